"""Logs and structured traces of torch."""

from __future__ import annotations

from torchair.torch_private.table import Names, optional, required

NAMES = Names(
    __name__,
    {
        "trace_structured": optional("torch._logging:trace_structured", "artifacts in TORCH_TRACE"),
        "trace_log": optional("torch._logging._internal:trace_log", "artifacts in TORCH_TRACE"),
        "artifact_logger": required(
            "torch._logging:getArtifactLogger", "programs in TORCH_LOGS=output_code"
        ),
    },
)

__getattr__ = NAMES.find
