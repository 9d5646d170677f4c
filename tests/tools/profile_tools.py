"""Events of a host and of kernels, as profiles are made of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchair.ascend.emulate.profiles.recording import KernelRecord

BASE = 1_700_000_000_123_456_000  # nanoseconds


HOST, WORKER = 70, 71


def host(name: str, begin: float, end: float, kind: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": HOST,
        "tid": HOST,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def kernel(
    work: KernelRecord, begin: float, end: float, stream: int = 0, thread: int = HOST
) -> dict[str, Any]:
    where = {"device": 0, "stream": stream, "caller": HOST, "thread": thread, "threads": 2}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": work.type,
        "pid": 0,
        "tid": stream,
        "ts": begin,
        "dur": end - begin,
        "args": {**where, **asdict(work)},
    }


PRODUCT = KernelRecord(
    "MatMulV2+Relu",
    "AI_CORE",
    ["MatMulV2_1", "Relu_1"],
    [("FLOAT", [2, 3]), ("BF16", [3])],
    [("FLOAT", [2, -1])],
    "graph_7",
    "static",
)
