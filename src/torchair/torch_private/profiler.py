"""torch's profiler."""

from __future__ import annotations

from torch.autograd import profiler as _profiler

from torchair.torch_private.table import Names, feature, required

_FLAG = "torch.autograd.profiler:_is_profiler_enabled"
NAMES = Names(
    __name__,
    {
        "enabled_flag": required(_FLAG, "labels of calls in profiles"),
        "ExperimentalConfig": feature(
            "torch._C._profiler:_ExperimentalConfig", "the profiler of the emulated device"
        ),
    },
)


def is_profiling() -> bool:
    """Whether a profiler runs in this process."""
    return _profiler._is_profiler_enabled


__getattr__ = NAMES.find
