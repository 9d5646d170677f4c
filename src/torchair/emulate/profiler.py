"""`torch_npu.profiler` on top of torch's: the same calls, with the streams of the device as rows.

Files are traces that TensorBoard, Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import enum
import gzip
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from torchair.emulate.rows import Rows
from torchair.emulate.state import STATE
from torchair.store import atomic_write

__all__ = [
    "AiCMetrics",
    "ExportType",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "profile",
    "schedule",
    "supported_activities",
    "supported_ai_core_metrics",
    "supported_export_type",
    "supported_profiler_level",
    "tensorboard_trace_handler",
]


class ProfilerActivity(enum.Enum):
    """What to look at."""

    CPU = 0
    NPU = 1


class ProfilerLevel(enum.Enum):
    """How much the device tells. The emulated one tells all it knows at every level."""

    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(enum.Enum):
    """Counters of a core, which the emulated device has none of."""

    AiCoreNone = "ACL_AICORE_NONE"
    PipeUtilization = "ACL_AICORE_PIPE_UTILIZATION"
    ArithmeticUtilization = "ACL_AICORE_ARITHMETIC_UTILIZATION"
    Memory = "ACL_AICORE_MEMORY_BANDWIDTH"
    MemoryL0 = "ACL_AICORE_L0B_AND_WIDTH"
    MemoryUB = "ACL_AICORE_MEMORY_UB"
    ResourceConflictRatio = "ACL_AICORE_RESOURCE_CONFLICT_RATIO"
    L2Cache = "ACL_AICORE_L2_CACHE"


class ExportType(enum.Enum):
    """Forms of results. The emulation writes text."""

    Text = "text"
    Db = "db"


class _ExperimentalConfig:
    """Settings of the real device's profiler. They are taken and have no effect."""

    def __init__(self, profiler_level: Any = ProfilerLevel.Level0, **settings: Any) -> None:
        self.profiler_level = profiler_level
        self.__dict__.update(settings)


def supported_activities() -> set[ProfilerActivity]:
    """Everything that can be looked at."""
    return set(ProfilerActivity)


def supported_profiler_level() -> set[ProfilerLevel]:
    """All levels."""
    return set(ProfilerLevel)


def supported_ai_core_metrics() -> set[AiCMetrics]:
    """No counters."""
    return {AiCMetrics.AiCoreNone}


def supported_export_type() -> set[ExportType]:
    """Text."""
    return {ExportType.Text}


def schedule(
    *, wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0, **rest: Any
) -> Callable[[int], ProfilerAction]:
    """Which steps are recorded, see `torch.profiler.schedule`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*won't be using warmup")
        return torch.profiler.schedule(
            wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first
        )


def tensorboard_trace_handler(
    dir_name: str, worker_name: str | None = None, analyse_flag: bool = True,
    async_mode: bool = False,
) -> Callable[[Any], None]:  # fmt: skip
    """A function that writes a trace into a folder that TensorBoard can be pointed to."""
    return torch.profiler.tensorboard_trace_handler(dir_name, worker_name)


class profile(torch.profiler.profile):
    """Record what runs inside a block, on the host and on the streams of the device."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
        **_: Any,
    ) -> None:
        wanted = set(activities) if activities is not None else supported_activities()
        unknown = wanted - supported_activities()
        if unknown:
            raise ValueError(f"unknown activities {unknown}; use torch_npu.profiler's own")
        self._rows = Rows() if ProfilerActivity.NPU in wanted else None
        self._over = False
        super().__init__(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule,
            on_trace_ready=on_trace_ready, record_shapes=record_shapes,
            profile_memory=profile_memory, with_stack=with_stack, with_flops=with_flops,
            with_modules=with_modules,
        )  # fmt: skip

    def start_trace(self) -> None:
        """Begin to record."""
        if self._rows is not None:
            self._rows = STATE.rows = Rows()
        super().start_trace()

    def stop_trace(self) -> None:
        """Stop recording."""
        STATE.rows = None
        super().stop_trace()

    def start(self) -> None:
        """Begin, as on entering the block."""
        self._over = False
        super().start()

    def stop(self) -> None:
        """End, as on leaving the block; once is enough."""
        if not self._over:
            self._over = True
            super().stop()

    def step(self) -> None:
        """The next step begins; after the end there is none."""
        if not self._over:
            super().step()

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Write what was recorded, streams of the device included."""
        with tempfile.TemporaryDirectory() as folder:
            plain = os.path.join(folder, "trace.json")
            super().export_chrome_trace(plain)
            trace = json.loads(Path(plain).read_text(encoding="utf-8"))
        if self._rows is not None:
            clocks = time.time_ns() - time.perf_counter_ns() - trace.get("baseTimeNanoseconds", 0)
            trace["traceEvents"] += self._rows.events(clocks / 1e3)
        data = json.dumps(trace).encode()
        atomic_write(path, gzip.compress(data) if str(path).endswith(".gz") else data)
