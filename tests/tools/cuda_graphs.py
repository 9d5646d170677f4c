"""Graphs for a GPU."""

from __future__ import annotations

from torchair import ge
from torchair.ge.dtypes import DataType


def data(index: int, *dims: int, dtype: DataType = DataType.DT_BF16) -> ge.Tensor:
    return ge.Data(index=index, dtype=dtype, shape=list(dims), placement="NPU")
