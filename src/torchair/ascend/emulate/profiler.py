"""`torch_npu.profiler` on top of torch's: the same calls, with the streams of the device as rows.

Files are traces that TensorBoard, Perfetto and chrome://tracing open, and the original's tables.
"""

from __future__ import annotations

import enum
import gzip
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import torch
from torch.profiler import ProfilerAction

from torchair.ascend.emulate.profiles.events import StackMetric, read, stacks
from torchair.ascend.emulate.profiles.memory import MemoryMoments
from torchair.ascend.emulate.profiles.output import analyse, save, write_output
from torchair.ascend.emulate.profiles.recording import Marks, TraceRows
from torchair.ascend.emulate.state import STATE
from torchair.process import world
from torchair.store import atomic_write
from torchair.torch_private.profiler import ExperimentalConfig as KinetoConfig

__all__ = [
    "AiCMetrics", "ExportType", "ProfilerAction", "ProfilerActivity", "ProfilerLevel",
    "_ExperimentalConfig", "_KinetoProfile", "analyse", "profile", "schedule",
    "supported_activities", "supported_ai_core_metrics", "supported_export_type",
    "supported_profiler_level", "tensorboard_trace_handler",
]  # fmt: skip

__path__: list[str] = []  # `torch_npu.profiler.profiler`, where the original has its functions


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
    MemoryAccess = "ACL_AICORE_MEMORY_ACCESS"


class ExportType(enum.Enum):
    """Forms of results: tables and traces, or databases."""

    Text = "text"
    Db = "db"


class _ExperimentalConfig:
    """Settings of the real device's profiler. Those of marks and files count; the others have no
    effect."""

    def __init__(
        self,
        profiler_level: Any = ProfilerLevel.Level0,
        *,
        mstx: bool = False,
        msprof_tx: bool = False,
        mstx_domain_include: Iterable[str] | None = None,
        mstx_domain_exclude: Iterable[str] | None = None,
        export_type: Any = None,
        **settings: Any,
    ) -> None:
        """`msprof_tx` is what `mstx` was called before; `export_type` one or several of
        `ExportType`."""
        self.profiler_level = profiler_level
        self.mstx = bool(mstx or msprof_tx)
        self.mstx_domain_include = list(mstx_domain_include or ())
        self.mstx_domain_exclude = list(mstx_domain_exclude or ())
        if self.mstx_domain_include and self.mstx_domain_exclude:
            raise ValueError("give mstx_domain_include or mstx_domain_exclude, not both")
        chosen = export_type if isinstance(export_type, list | tuple) else [export_type]
        self.export_type = [ExportType(e).value for e in chosen if e is not None] or ["text"]
        self.__dict__.update(settings)

    def new_marks(self) -> Marks | None:
        """Where marks are kept, None if they are not recorded."""
        wanted, unwanted = self.mstx_domain_include, self.mstx_domain_exclude
        return Marks(tuple(wanted), tuple(unwanted)) if self.mstx else None


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
    """Both."""
    return set(ExportType)


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
    dir_name: str | None = None,
    worker_name: str | None = None,
    analyse_flag: bool = True,
    async_mode: bool = False,
) -> Callable[[Any], None]:
    """A function that writes a trace into a folder that TensorBoard can be pointed to, and beside
    it the folder `{worker}_{time}_ascend_pt`. Without `analyse_flag` that holds what was recorded,
    for `analyse`; with `async_mode` its files are made while the program goes on."""

    def handler(prof: profile) -> None:
        parent = dir_name or _work_folder() or "."
        torch.profiler.tensorboard_trace_handler(parent, worker_name)(prof)
        folder = prof._save(parent, worker_name)
        if analyse_flag and async_mode:
            Thread(target=write_output, args=(folder,)).start()
        elif analyse_flag:
            write_output(folder)

    return handler


def _work_folder() -> str | None:
    """Where profiles go without a folder given."""
    base = os.environ.get("ASCEND_WORK_PATH")
    return os.path.join(base, "profiling_data") if base else None


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
        self._rows = TraceRows() if ProfilerActivity.NPU in wanted else None
        self._settings = experimental_config or _ExperimentalConfig()
        self._marks = self._settings.new_marks()
        self._memory: MemoryMoments | None = None
        self._over = False
        self._trace: dict[str, Any] | None = None
        self._chosen = {
            "activities": sorted(a.name for a in wanted),
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "with_modules": with_modules,
        }
        super().__init__(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=schedule,
            on_trace_ready=on_trace_ready or self._keep,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack or with_modules,
            with_flops=with_flops,
            with_modules=with_modules,
            experimental_config=KinetoConfig(profile_all_threads=True),
        )

    @staticmethod
    def enable_profiler_in_child_thread(**settings: Any) -> None:
        """Nothing: all threads are recorded, with the settings of the profile."""

    @staticmethod
    def disable_profiler_in_child_thread() -> None:
        """Nothing, as above."""

    def start_trace(self) -> None:
        """Begin to record."""
        self._trace = None
        if self._rows is not None:
            self._rows = STATE.rows = TraceRows()
        self._marks = STATE.marks = self._settings.new_marks()
        wanted = self._rows is not None and self._chosen["profile_memory"]
        self._memory = STATE.memory = MemoryMoments() if wanted else None
        super().start_trace()

    def stop_trace(self) -> None:
        """Stop recording."""
        STATE.rows = STATE.marks = STATE.memory = None
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

    def _recorded(self) -> dict[str, Any]:
        """Everything as a Chrome trace, streams of the device and marks included."""
        if self._trace is None:
            with tempfile.TemporaryDirectory() as folder:
                plain = os.path.join(folder, "trace.json")
                super().export_chrome_trace(plain)
                trace = json.loads(Path(plain).read_text(encoding="utf-8"))
            clocks = time.time_ns() - time.perf_counter_ns() - trace.get("baseTimeNanoseconds", 0)
            for looked in (self._rows, self._marks, self._memory):
                trace["traceEvents"] += looked.events(clocks / 1e3) if looked is not None else []
            self._trace = trace
        return self._trace

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Write what was recorded, streams of the device included."""
        data = json.dumps(self._recorded()).encode()
        atomic_write(path, gzip.compress(data) if str(path).endswith(".gz") else data)

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total") -> None:
        """Write stacks of Python functions with the time spent in each, for FlameGraph."""
        if metric not in get_args(StackMetric):
            known = ", ".join(get_args(StackMetric))
            raise ValueError(f"metric is one of {known}, not {metric!r}")
        if not (self._chosen["with_stack"] or self._chosen["with_modules"]):
            raise RuntimeError("there are no stacks: profile with with_stack=True")
        atomic_write(path, stacks(read(self._recorded()), metric).encode())

    def _keep(self, _: Any) -> None:
        """Without a function of the user, keep what was recorded where the environment says."""
        folder = _work_folder()
        if folder is not None:
            self._save(folder, None)

    def _save(self, parent: str, worker: str | None) -> Path:
        size, rank = world() or (1, -1)
        chosen = {"common_config": self._chosen, "experimental_config": vars(self._settings)}
        version = sys.modules["torch_npu"].__version__ if "torch_npu" in sys.modules else ""
        info = {"config": chosen, "rank_id": rank, "world_size": size}
        info["torch_npu_version"] = version
        recorded = getattr(self, "_trace_metadata", {})  # torch before 2.13 does not keep it
        metadata = {key: json.loads(text) for key, text in recorded.items()}
        return save(parent, worker, self._recorded(), info, metadata)


class _KinetoProfile(profile):
    """A profile without steps, which writes nothing by itself."""

    def __init__(self, **settings: Any) -> None:
        refused = {"schedule", "on_trace_ready"} & settings.keys()
        if refused:
            raise TypeError(f"_KinetoProfile takes no {' and no '.join(sorted(refused))}")
        super().__init__(**settings, on_trace_ready=lambda _: None)
