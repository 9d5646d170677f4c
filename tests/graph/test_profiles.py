"""Profiles of the emulated device: records, tables and views of a known trace, then real ones."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from processes import run_forked
from profile_tools import BASE, PRODUCT, WORKER, host, kernel
from torchair.ascend.emulate.profiles import output
from torchair.ascend.emulate.profiles.events import NO_GRAPH, Profile, read, stacks
from torchair.ascend.emulate.profiles.output import analyse, save, trace_view, write_output
from torchair.ascend.emulate.profiles.recording import KernelRecord, Marks, of_call
from torchair.store import csv_bytes

TALK = KernelRecord("HcomAllReduce", "COMMUNICATION", ["all_reduce"], graph="graph_7")
EAGER = of_call("aten::add", [torch.ones(2, 2), 1], {}, torch.ones(2, 2, dtype=torch.float64))


def example() -> Profile:
    """Two steps. In the first one a compiled call computes on two streams; in the second an eager
    operator runs, on the CPU's kernel of the same name."""
    return read(
        {
            "baseTimeNanoseconds": BASE,
            "traceEvents": [
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "aside"}},
                host("ProfilerStep#3", 0, 100, "user_annotation"),
                host("ProfilerStep#4", 100, 200, "user_annotation"),
                host("main.py(1): <module>", 0, 200, "python_function"),
                host("main.py(5): step", 5, 95, "python_function"),
                host("<built-in method run>", 6, 94, "python_function"),
                host("profiler.py(9): __enter__", 9, 11, "python_function"),
                host("call", 10, 90, "user_annotation"),
                host("run", 20, 80, "user_annotation"),
                kernel(PRODUCT, 30, 50),
                kernel(TALK, 40, 60, stream=1, thread=WORKER),
                kernel(PRODUCT, 65, 70),
                host("prologue", 102, 120),
                host("overlaps it", 118, 140),
                host("aten::add", 150, 190, **{"Input Dims": [[2, 2], [], []]}),
                kernel(EAGER, 160, 180),
                host("aten::add", 161, 179),
            ],
        }
    )


def table(rows: list[output.CsvRow]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_bytes(rows).decode(), newline="")))


def test_operators_and_what_they_launched() -> None:
    profile = example()
    by_name = {o.name: o for o in profile.operators}
    assert list(by_name) == ["call", "run", "prologue", "overlaps it", "aten::add"]
    assert len(profile.operators) == 5, "the CPU's kernel is how the device computes"
    call, inner = by_name["call"], by_name["run"]
    assert inner.parent is call and (call.own, call.total) == (20, 80)
    assert [k.work for k in inner.kernels] == [PRODUCT, TALK, PRODUCT]
    assert (call.device_own, call.device_total, call.products_total) == (0, 45, 25)
    assert call.stack == ["main.py(5): step", "main.py(1): <module>"], "what has ended is no caller"
    assert by_name["overlaps it"].parent is None and by_name["prologue"].own == 18
    assert by_name["aten::add"].device_own == 20


def test_kernel_details() -> None:
    rows = table(output.kernel_details(example()))
    assert list(rows[0]) == ["Step Id", *output.KERNEL_COLUMNS]
    first, talk, second, eager = rows
    assert first == {
        "Step Id": "3",
        "Device_id": "0",
        "Model ID": "7",
        "Task ID": "0",
        "Stream ID": "0",
        "Name": "MatMulV2_1+Relu_1",
        "Type": "MatMulV2+Relu",
        "OP State": "static",
        "Accelerator Core": "AI_CORE",
        "Start Time(us)": "1700000000123486.000",
        "Duration(us)": "20.000",
        "Wait Time(us)": "0.000",
        "Block Dim": "2",
        "Mix Block Dim": "N/A",
        "HF32 Eligible": "NO",
        "Input Shapes": "2,3;3",
        "Input Data Types": "FLOAT;BF16",
        "Input Formats": "ND;ND",
        "Output Shapes": "2,-1",
        "Output Data Types": "FLOAT",
        "Output Formats": "ND",
    }
    assert talk["Stream ID"] == "1" and talk["OP State"] == "N/A"
    assert (second["Task ID"], second["Wait Time(us)"]) == ("1", "15.000")
    assert eager["Step Id"] == "4" and eager["Model ID"] == str(NO_GRAPH)
    assert (eager["Name"], eager["Type"]) == ("add", "add")  # the label of a real one has a library
    assert (eager["Input Shapes"], eager["Output Data Types"]) == ("2,2", "DOUBLE")


def test_operator_details_and_statistics() -> None:
    rows = {r["Name"]: r for r in table(output.operator_details(example()))}
    assert tuple(rows["call"]) == output.OPERATOR_COLUMNS
    assert rows["run"]["Device Self Duration With AICore(us)"] == "25.000"
    assert rows["aten::add"]["Input Shapes"] == "2,2;;"
    assert rows["call"]["Call Stack"] == "main.py(5): step;\r\nmain.py(1): <module>"
    counted = {r["OP Type"]: r for r in table(output.op_statistic(example()))}
    assert tuple(counted["add"]) == output.STATISTIC_COLUMNS
    assert counted["MatMulV2+Relu"]["Count"] == "2"
    assert counted["MatMulV2+Relu"]["Max Time(us)"] == "20.000"
    assert counted["add"]["Ratio(%)"] == f"{100 * 20 / 65:.3f}"


def test_step_trace_time() -> None:
    first, second = table(output.step_trace_time(example()))
    assert tuple(first) == output.STEP_COLUMNS
    assert [float(v) for v in first.values()] == [0, 3, 25, 10, 10, 20, 65, 100, 0, 10, 30]
    assert [float(v) for v in second.values()] == [0, 4, 20, 0, 0, 0, 80, 100, 0, 0, 60]


def test_trace_view() -> None:
    events = trace_view(example())
    layers = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(layers.values()) == [
        "Python",
        "Ascend Hardware",
        "Communication",
        "Overlap Analysis",
    ]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(isinstance(e["ts"], str) for e in slices)
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= set(rows)
    (talk,) = [
        e
        for e in slices
        if e["name"] == "all_reduce"
        and e["args"]["Stream Id"] == 1
        and layers[e["pid"]] == "Ascend Hardware"
    ]
    assert rows[talk["pid"], talk["tid"]] == "Stream 1 aside"
    parts = {
        name: [(e["ts"][-7:], e["dur"]) for e in slices if e["name"] == name]
        for name in ("Computing", "Communication(Not Overlapped)", "Free")
    }
    assert parts["Communication(Not Overlapped)"] == [("506.000", 10)]
    assert parts["Free"] == [("516.000", 5), ("526.000", 90)]
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 8 and {e["cat"] for e in arrows} == {"async_npu"}
    assert {e["name"] for e in slices if layers[e["pid"]] == "Python"} >= {"ProfilerStep#3", "run"}


def test_stacks() -> None:
    lines = stacks(example(), "self_npu_time_total").splitlines()
    assert lines == [
        "main.py(1): <module>;main.py(5): step;run 45",
        "main.py(1): <module>;aten::add 20",
    ]
    assert "main.py(1): <module>;main.py(5): step;call 20" in stacks(
        example(), "self_cpu_time_total"
    )


def test_domains_of_marks() -> None:
    for marks, kept in (
        (Marks(), ["a", "b"]),
        (Marks(include=("a",)), ["a"]),
        (Marks(exclude=("a",)), ["b"]),
    ):
        numbers = [marks.begin(f"in {name}", None, name) for name in "ab"]
        for number in reversed(numbers):
            marks.end(number)
        marks.end(99)
        assert sorted(e["args"]["domain"] for e in marks.events(0.0)) == kept
        assert [bool(n) for n in numbers] == ["a" in kept, "b" in kept]


def test_what_was_recorded_is_analysed_later(tmp_path: Path) -> None:
    trace = {"traceEvents": [host("aten::add", 0, 5)]}
    folder = save(tmp_path, "worker", trace, {"rank_id": 2}, {"key": "value"})
    assert folder.name.startswith("worker_2") and folder.name.endswith("_ascend_pt")
    assert sorted(f.name for f in folder.iterdir()) == [
        "FRAMEWORK",
        "profiler_info_2.json",
        "profiler_metadata.json",
    ]
    analyse(tmp_path, max_process_number=1, export_type=["text"])
    output = folder / "ASCEND_PROFILER_OUTPUT"
    assert sorted(f.name for f in output.iterdir()) == ["operator_details.csv", "trace_view.json"]
    assert write_output(folder) == output, "once more"
    with pytest.raises(FileNotFoundError, match="holds no profile"):
        analyse(tmp_path / "elsewhere")


REAL = """if True:
    import csv, json, os, sys, warnings
    from pathlib import Path
    import torchair.ascend.emulate
    torchair.ascend.emulate.install()
    import torch, torch_npu, torchair
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    profiler, mstx = torch_npu.profiler, torch_npu.npu.mstx

    def kernels(prof):
        prof.export_chrome_trace("trace.json")
        events = json.loads(Path("trace.json").read_text())["traceEvents"]
        return [(e["name"], e["tid"]) for e in events if e.get("cat") == "kernel"]

    def model(x):
        with torchair.scope.npu_stream_switch("aside"):
            y = torch.mm(x, x)
        return torch.sigmoid(x) + y

    x = torch.randn(4, 4).npu()
    expected = {("MatMul", 1), ("Sigmoid", 0), ("Add", 0)}
    for mode, shared in (("max-autotune", False), ("reduce-overhead", False),
                         ("reduce-overhead", True), ("npugraph_ex", False)):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.mode = mode
        config.debug.aclgraph.share_results = shared
        backend = torchair.get_npu_backend(compiler_config=config)
        call = torch.compile(model, backend=backend, dynamic=False)
        with torch.no_grad():
            call(x)
            with profiler.profile() as prof:
                result = call(x)
            torch.testing.assert_close(result, model(x))
            torch.testing.assert_close(call(x), model(x))
        assert set(kernels(prof)) == expected, (mode, shared, kernels(prof))

    def lengths(q, n):
        return torch.ops.npu.npu_fused_infer_attention_score(
            q, q, q, num_heads=2, input_layout="BNSD", actual_seq_lengths=n, scale=1.0)[0] * 2

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    backend = torchair.get_npu_backend(compiler_config=config)
    call, q = torch.compile(lengths, backend=backend, dynamic=True), torch.randn(1, 2, 4, 8).npu()
    with torch.no_grad():
        call(q, [4]), call(q, [3])
        with profiler.profile() as prof:
            call(q, [2])
    names = [name for name, _ in kernels(prof)]
    assert "npu::npu_fused_infer_attention_score" in names and "aten::mul" in names, names
    assert "aten::empty" not in names

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.relu(x @ x)
    os.environ["ASCEND_WORK_PATH"] = "work"
    with profiler.profile(with_modules=True) as prof:
        prof.add_metadata("who", "me")
        graph.replay()
        mstx.mark("nobody looks")
    assert kernels(prof) == [("aten::mm", 0), ("aten::relu", 0)]
    prof.export_stacks("stacks.log", "self_npu_time_total")
    assert "NPUGraph::replay " in Path("stacks.log").read_text()
    (raw,) = Path("work/profiling_data").iterdir()
    assert json.loads((raw / "profiler_metadata.json").read_text())["who"] == "me"
    profiler.profiler.analyse(raw)
    assert (raw / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").is_file()
    assert "mstx" not in (raw / "FRAMEWORK" / "trace.json").read_text()

    from threading import Thread
    from torchair.ascend.emulate.profiles.events import read
    def work():
        prof.enable_profiler_in_child_thread()
        torch.sigmoid(x)
    with profiler._KinetoProfile() as prof:
        thread = Thread(target=work)
        thread.start()
        thread.join()
    (found,) = [o for o in read(prof._recorded()).operators if o.name == "aten::sigmoid"]
    assert [k.label for k in found.kernels] == ["aten::sigmoid"]
    assert found.thread == thread.native_id and len(list(Path("work").rglob("*_pt"))) == 1

    both = [profiler.ExportType.Text, profiler.ExportType.Db]
    settings = profiler._ExperimentalConfig(
        mstx=True, mstx_domain_exclude=["quiet"], export_type=both)
    handler = profiler.tensorboard_trace_handler("out", worker_name="me")
    with profiler.profile(
        on_trace_ready=handler, experimental_config=settings, profile_memory=True
    ) as prof:
        big = torch.empty(1024, 1024, device="npu")
        del big
        number = mstx.range_start("range", torch.npu.current_stream())
        mstx.mark("quiet mark", domain="quiet")
        mstx.mstx_range("decorated")(torch.relu)(x)
        mstx.range_end(number)
    (folder,) = Path("out").glob("me_*_ascend_pt")
    assert len(list(Path("out").glob("me.*.pt.trace.json"))) == 1
    view = json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    marks = [e["name"] for e in view if e.get("cat") == "mstx"]
    assert sorted(marks) == ["decorated", "range", "range"], marks
    made = folder / "ASCEND_PROFILER_OUTPUT"
    with (made / "operator_memory.csv").open() as file:
        (piece,) = [r for r in csv.DictReader(file) if float(r["Size(KB)"]) == 4096]
    assert piece["Name"] == "aten::empty" and float(piece["Duration(us)"]) > 0, piece
    import sqlite3
    with sqlite3.connect(made / "ascend_pytorch_profiler.db") as db:
        query = "SELECT value, size FROM OP_MEMORY JOIN STRING_IDS ON id = name WHERE size > 1e6"
        assert db.execute(query).fetchall() == [("aten::empty", 4 << 20)]
"""


def test_real_profiles(tmp_path: Path) -> None:
    done = run_forked("-c", REAL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_other_metrics_and_missing_stacks_are_refused(tmp_path: Path) -> None:
    from torchair.ascend.emulate.profiler import profile

    with profile() as prof:
        torch.ones(2) + 1
    refused = {"self_cuda_time_total": "metric is one", "self_cpu_time_total": "with_stack=True"}
    for metric, word in refused.items():
        with pytest.raises((ValueError, RuntimeError), match=word):
            prof.export_stacks(str(tmp_path / "stacks.log"), metric)
    info = json.loads((prof._save(str(tmp_path), "me") / "profiler_info.json").read_text())
    assert info["config"]["experimental_config"]["profiler_level"] == "Level0"
