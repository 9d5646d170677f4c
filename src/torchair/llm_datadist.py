"""Tensors over memory of another library; see `torchair.ascend.llm_datadist`."""

from torchair.ascend.llm_datadist import create_npu_tensors

__all__ = ["create_npu_tensors"]
