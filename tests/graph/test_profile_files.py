"""Files of a profile about memory and communication, and databases, of a known trace."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from profile_tools import BASE, HOST, PRODUCT, WORKER, host, kernel
from torchair.ascend.emulate.profiles import database, memory
from torchair.ascend.emulate.profiles.communication import (
    ProfileOrigin,
    communication_json,
    communication_matrix_json,
)
from torchair.ascend.emulate.profiles.events import Profile, read
from torchair.ascend.emulate.profiles.output import analyse, save
from torchair.ascend.emulate.profiles.recording import KernelRecord
from torchair.store import csv_bytes

GROUP = "tag=;rank_list=0,1,3"
MEGABYTE = 1024 * 1024
TALK = KernelRecord(
    "HcomAllReduce",
    "COMMUNICATION",
    ["all_reduce"],
    [("FLOAT", [1000, 500])],
    graph="graph_7",
    group=GROUP,
)
SEND = KernelRecord("HcomSend", "COMMUNICATION", ["send"], [("BF16", [500_000])])


def moment(time: float, piece: int, size: int, total: int) -> dict[str, Any]:
    about = {
        "Device Type": memory.DEVICE_TYPE, "Device Id": 0, "Addr": piece, "Bytes": size,
        "Total Allocated": total, "Total Reserved": 4 * MEGABYTE, "Stream": 0,
    }  # fmt: skip
    return {"ph": "i", "name": memory.EVENT, "tid": HOST, "ts": time, "args": about}


TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        host("ProfilerStep#3", 0, 100, "user_annotation"),
        host("call", 10, 90, "user_annotation"),
        host("inner", 20, 25, **{"Input Dims": [[2, 3], []], "Input type": ["float", ""]}),
        kernel(PRODUCT, 30, 50),
        kernel(TALK, 40, 60, stream=1, thread=WORKER),
        kernel(TALK, 62, 72, stream=1, thread=WORKER),
        kernel(SEND, 75, 80, stream=1, thread=WORKER),
        moment(5, 1, -MEGABYTE, 0),  # of a piece that was there before
        moment(22, 1, MEGABYTE, MEGABYTE),
        moment(28, 2, 2 * MEGABYTE, 3 * MEGABYTE),
        moment(85, 1, -MEGABYTE, 2 * MEGABYTE),
        {"ph": "i", "name": memory.EVENT, "tid": HOST, "ts": 9, "args": {"Device Type": 0}},
    ],
}


def profile() -> Profile:
    return read(TRACE)


def table(rows: list[list[Any]]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_bytes(rows).decode(), newline="")))


def test_operator_memory() -> None:
    first, second = table(memory.operator_memory(profile()))
    assert tuple(first) == memory.OPERATOR_COLUMNS
    assert (first["Name"], first["Size(KB)"], first["Duration(us)"]) == ("inner", "1024", "63.000")
    assert first["Release Total Allocated(MB)"] == "2.000000" and first["Device Type"] == "NPU:0"
    assert (second["Name"], second["Release Time(us)"], second["Duration(us)"]) == ("call", "", "")
    assert second["Allocation Total Allocated(MB)"] == "3.000000"


def test_memory_record() -> None:
    rows = table(memory.memory_record(profile()))
    assert tuple(rows[0]) == memory.RECORD_COLUMNS
    assert [r["Component"] for r in rows] == ["PTA", "PTA+GE"] * 4
    assert [float(r["Total Allocated(MB)"]) for r in rows[::2]] == [0, 1, 3, 2]
    assert {r["Total Reserved(MB)"] for r in rows} == {"4.000000"}


def test_communication() -> None:
    (found,) = json.loads(communication_json(profile(), ProfileOrigin(1, 4))).values()
    assert list(found["p2p"]) == ["hcom_send__0@default_group", "Total Op Info"]
    first, second, total = found["collective"].values()
    assert list(found["collective"])[:2] == [f"hcom_allreduce__{n}@{GROUP}" for n in (0, 1)]
    times = first["Communication Time Info"]
    assert times["Elapse Time(ms)"] == times["Transit Time(ms)"] == pytest.approx(0.02)
    assert times["Start Timestamp(us)"] == BASE / 1e3 + 40
    link = second["Communication Bandwidth Info"]["RDMA"]
    assert link["Transit Size(MB)"] == 2.0 and link["Bandwidth(GB/s)"] == pytest.approx(200)
    assert total["Communication Bandwidth Info"]["RDMA"]["Size Distribution"] == {
        "2": [2, pytest.approx(0.03)]
    }


def test_communication_matrix() -> None:
    (found,) = json.loads(communication_matrix_json(profile(), ProfileOrigin(1, 4))).values()
    calls = found["collective"]
    fastest = calls[f"allreduce-top1@{GROUP}"]
    assert list(fastest) == ["1-0", "1-3"], "other members of the group"
    assert fastest["1-3"]["Transit Size(MB)"] == 1.0
    assert fastest["1-3"]["Op Name"] == "hcom_allreduce__1"
    assert calls[f"allreduce-bottom1@{GROUP}"]["1-0"]["Op Name"] == "hcom_allreduce__0"
    assert calls[f"allreduce-total@{GROUP}"]["1-0"]["Transit Time(ms)"] == pytest.approx(0.03)
    assert list(found["p2p"]["send-total@default_group"]) == ["1-0", "1-2", "1-3"]


KERNELS = """
    SELECT NAME.value, KIND.value, SHAPES.value, TASK.endNs - TASK.startNs, waitNs, API.value
    FROM COMPUTE_TASK_INFO JOIN TASK ON COMPUTE_TASK_INFO.globalTaskId = TASK.globalTaskId
    JOIN STRING_IDS AS NAME ON NAME.id = COMPUTE_TASK_INFO.name
    JOIN STRING_IDS AS KIND ON KIND.id = COMPUTE_TASK_INFO.opType
    JOIN STRING_IDS AS SHAPES ON SHAPES.id = COMPUTE_TASK_INFO.inputShapes
    JOIN CANN_API ON CANN_API.startNs = TASK.startNs AND CANN_API.connectionId = TASK.connectionId
    JOIN PYTORCH_API ON PYTORCH_API.connectionId = TASK.connectionId
    JOIN STRING_IDS AS API ON API.id = PYTORCH_API.name
"""
TALKS = """
    SELECT NAME.value, KIND.value, COMMUNICATION_OP.endNs - COMMUNICATION_OP.startNs, count
    FROM COMMUNICATION_OP JOIN STRING_IDS AS NAME ON NAME.id = COMMUNICATION_OP.opName
    JOIN STRING_IDS AS KIND ON KIND.id = COMMUNICATION_OP.opType
"""


def test_databases(tmp_path: Path) -> None:
    folder = save(tmp_path, "me", TRACE, {"rank_id": 1, "world_size": 4}, {"who": "me"})
    analyse(folder, export_type="db")
    made = folder / "ASCEND_PROFILER_OUTPUT"
    assert sorted(f.name for f in made.iterdir()) == ["analysis.db", "ascend_pytorch_profiler_1.db"]
    with sqlite3.connect(made / "ascend_pytorch_profiler_1.db") as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        assert names == set(database.TABLES)
        product = ("MatMulV2_1+Relu_1", "MatMulV2+Relu", "2,3;3", 20_000, 0, "call")
        assert db.execute(KERNELS).fetchall() == [product]
        assert db.execute(TALKS).fetchall() == [
            ("hcom_allreduce__0", "allreduce", 20_000, 500_000),
            ("hcom_allreduce__1", "allreduce", 10_000, 500_000),
            ("hcom_send__0", "send", 5_000, 500_000),
        ]
        assert db.execute("SELECT * FROM STEP_TIME").fetchall() == [(3, BASE, BASE + 100_000)]
        assert db.execute("SELECT max(totalAllocated) FROM MEMORY_RECORD").fetchone() == (3 << 20,)
        assert db.execute("SELECT duration FROM OP_MEMORY").fetchall() == [(63_000,), (None,)]
        assert db.execute("SELECT * FROM META_DATA").fetchall() == [("who", '"me"')]
        assert db.execute("SELECT * FROM RANK_DEVICE_MAP").fetchall() == [(1, 0)]
    with sqlite3.connect(made / "analysis.db") as db:
        assert db.execute("SELECT step, computing FROM StepTraceTime").fetchall() == [("3", 20)]
        count = "SELECT count(*), sum(transit_size) FROM"
        assert db.execute(f"{count} CommAnalyzerBandwidth").fetchone() == (3, 5.0)
        assert db.execute(f"{count} CommAnalyzerMatrix").fetchone() == (7, pytest.approx(5.0))


def test_both_kinds_and_no_other(tmp_path: Path) -> None:
    info = {"config": {"experimental_config": {"export_type": ["text", "db"]}}}
    folder = save(tmp_path, "me", TRACE, info, {})
    analyse(folder)
    found = {f.name for f in (folder / "ASCEND_PROFILER_OUTPUT").iterdir()}
    assert found >= {
        "memory_record.csv",
        "operator_memory.csv",
        "communication.json",
        "trace_view.json",
        "communication_matrix.json",
        "ascend_pytorch_profiler.db",
        "analysis.db",
    }
    with pytest.raises(ValueError, match="'text' and 'db'"):
        analyse(folder, export_type="xml")
