"""The folder of a profile: what was recorded, and the files that analysis makes of it.

    {worker}_{time}_ascend_pt/
        profiler_info.json, profiler_metadata.json
        FRAMEWORK/trace.json       what was recorded
        ASCEND_PROFILER_OUTPUT/    tables and trace_view.json, made by `analyse`
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torchair.emulate.profiles import tables
from torchair.emulate.profiles.events import read
from torchair.emulate.profiles.view import trace_view
from torchair.store import atomic_write

SUFFIX = "_ascend_pt"
_RECORDED = Path("FRAMEWORK", "trace.json")
_OUTPUT = "ASCEND_PROFILER_OUTPUT"
_TABLES = {
    "kernel_details.csv": tables.kernel_details,
    "operator_details.csv": tables.operator_details,
    "step_trace_time.csv": tables.step_trace_time,
    "op_statistic.csv": tables.op_statistic,
}
_OF_DEVICE = ("kernel_details.csv", "op_statistic.csv", "step_trace_time.csv")


def save(
    parent: str | os.PathLike[str],
    worker: str | None,
    trace: Mapping[str, Any],
    info: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Path:
    """Write what was recorded into a new folder, which is returned."""
    name = worker or f"{socket.gethostname()}_{os.getpid()}"
    folder = Path(parent, f"{name}_{datetime.now().strftime('%Y%m%d%H%M%S%f')[:-3]}{SUFFIX}")
    rank = info.get("rank_id", -1)
    described = "profiler_info.json" if rank < 0 else f"profiler_info_{rank}.json"
    for path, content in (
        (described, info), ("profiler_metadata.json", metadata), (_RECORDED, trace),
    ):  # fmt: skip
        atomic_write(folder / path, json.dumps(content).encode())
    return folder


def write_output(folder: Path) -> Path:
    """Make the files of a folder from what was recorded."""
    profile = read(json.loads((folder / _RECORDED).read_text(encoding="utf-8")))
    output = folder / _OUTPUT
    for name, table in _TABLES.items():
        if profile.kernels or name not in _OF_DEVICE:
            atomic_write(output / name, tables.as_csv(table(profile)))
    atomic_write(output / "trace_view.json", json.dumps(trace_view(profile)).encode())
    return output


def analyse(
    profiler_path: str | os.PathLike[str],
    max_process_number: int | None = None,
    export_type: str | Sequence[str] | None = None,
) -> None:
    """Make the files of a profile, or of all profiles in a folder, from what was recorded. The
    files are text, and made one after the other."""
    path = Path(profiler_path)
    candidates = [path] if path.name.endswith(SUFFIX) else sorted(path.glob(f"*{SUFFIX}"))
    found = [folder for folder in candidates if (folder / _RECORDED).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{path} holds no profile: a folder '<worker>_<time>{SUFFIX}' with {_RECORDED}, as "
            "torch_npu.profiler.tensorboard_trace_handler writes it"
        )
    for folder in found:
        write_output(folder)
