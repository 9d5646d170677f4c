"""Tuning: what is measured, what may win, what is kept and used again."""

from __future__ import annotations

import json
import math
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchair
from torchair import ge, progress
from torchair.cli import main
from torchair.codegen import tuned
from torchair.codegen.cpu.target import CpuTarget, cpu
from torchair.codegen.loops import Access, Nest, Store, load, op, reduce
from torchair.codegen.program import Allocation, Argument, AuxMemory, Native
from torchair.codegen.requests import (
    Attention,
    Conv,
    Convolution,
    Loops,
    MatMul,
    Pool,
    Product,
    Weight,
    stored,
)
from torchair.codegen.target import BY_TORCH, DEFAULT_CONFIG, Generated, KernelConfig, KernelOrder
from torchair.codegen.tuned import NAME, DamagedFile, TunedKernel, read, tuned_file, write
from torchair.engine.compile import GraphCompiler
from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.trial import Stage
from torchair.engine.session import TorchNpuGraph
from torchair.engine.tune import TuneRequest, tuner
from torchair.engine.tune.tuner import Candidate, agree
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.inference import cache_compile
from torchair.operators import infer


class Small(torch.nn.Module):
    """Two products of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 64)
        self.second = torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Windows of one run each, and no memory of earlier warnings."""
    monkeypatch.setattr(tuner, "WINDOW", 0.0)
    monkeypatch.setattr(tuner, "GRAPH_WINDOW", 0.0)
    monkeypatch.setattr(tuned, "_warned", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ways that are measured, in order; each is said to be faster than all before it, but torch
    is not."""
    seen: list[str] = []

    def times(candidates: Sequence[Candidate], windows: int = 0) -> list[float]:
        seen.extend(str(e.config) for e in candidates)
        return [
            200.0 if e.config == BY_TORCH else 100.0 / (1 + k) for k, e in enumerate(candidates)
        ]

    monkeypatch.setattr(tuner, "times", times)
    monkeypatch.setattr(tuner, "shows", lambda tuned, usual: True)
    return seen


def config_for(folder: Path | None, **more: Any) -> torchair.CompilerConfig:
    """A configuration that tunes, unless there is no folder for that."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    if folder is not None:
        config.aoe_config.aoe_mode = "2"
        config.aoe_config.work_path = str(folder)
    for name, value in more.items():
        section = config.aoe_config if name == "aoe_config_file" else config.experimental_config
        setattr(section, name, value)
    return config


def called(model: torch.nn.Module, x: torch.Tensor, config: Any, dynamic: bool = False) -> Any:
    """The result of a model that is compiled now."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "frozen_parameter is on")
        backend = torchair.get_npu_backend(compiler_config=config)
        return torch.compile(model, backend=backend, dynamic=dynamic)(x)


def names(folder: Path) -> list[str]:
    """Kernels of which a folder has results."""
    return sorted(f.about for f in read(folder / NAME))


@torch.no_grad()
def test_a_second_compilation_measures_nothing(tmp_path: Path, raced: list[str]) -> None:
    model, x = Small(), torch.randn(5, 48)
    expected = model(x)
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)
    found = read(tmp_path / NAME)
    assert len(found) == 2 and all(f.config for f in found) and raced
    raced.clear()
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)
    assert raced == []


@torch.no_grad()
def test_graphs_that_are_captured_are_tuned(tmp_path: Path, raced: list[str]) -> None:
    model, x, config = Small(), torch.randn(5, 48), config_for(tmp_path)
    config.mode = "npugraph_ex"
    torch.testing.assert_close(called(model, x, config), model(x))
    assert len(read(tmp_path / NAME)) == 2


@torch.no_grad()
def test_results_are_used_by_compilations_that_do_not_tune(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Small(), torch.randn(5, 48)
    called(model, x, config_for(tmp_path))
    configs = {f.config for f in read(tmp_path / NAME)}
    used: list[str] = []
    generate = CpuTarget.generate

    def watched(
        self: CpuTarget, request: Any, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        used.append(str(config))
        return generate(self, request, label, config)

    monkeypatch.setattr(CpuTarget, "generate", watched)
    raced.clear()
    config = config_for(None, tuned_kernels=str(tmp_path / NAME))
    torch.testing.assert_close(called(model, x, config), model(x))
    assert configs <= set(used)
    used.clear()
    config.mode = "npugraph_ex"
    torch.testing.assert_close(called(model, x, config), model(x))
    assert configs <= set(used)
    used.clear()
    called(model, x, config_for(None))
    assert set(used) == {""} and raced == []


@torch.no_grad()
def test_a_wrong_kernel_does_not_win(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = CpuTarget.generate

    def planted(
        self: CpuTarget, request: Any, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        """Kernels of panels leave the last row out."""
        if config.choice("form") == "panel" and isinstance(request, Product):
            spec = request.matmul
            assert isinstance(spec.m, int)
            short = MatMul(**{**vars(spec), "m": spec.m - 1})
            request = Product(short, request.epilogue)
        return generate(self, request, label, config)

    monkeypatch.setattr(CpuTarget, "generate", planted)
    model, x = Small(), torch.randn(5, 48)
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), model(x))
    assert raced and not any("panel" in config.split("=") for config in raced)
    assert all(KernelConfig.read(f.config).choice("form") != "panel" for f in read(tmp_path / NAME))


@torch.no_grad()
def test_the_usual_kernel_stays_unless_another_is_faster_by_a_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(candidates: Sequence[Candidate], windows: int = 0) -> list[float]:
        return [98.0 if e.config else 100.0 for e in candidates]

    monkeypatch.setattr(tuner, "times", times)
    called(Small(), torch.randn(5, 48), config_for(tmp_path))
    assert [f.config for f in read(tmp_path / NAME)] == ["", ""]


@torch.no_grad()
@pytest.mark.parametrize("verdicts", [[True], [False, True], [False, False]])
def test_configs_stay_if_the_whole_graph_is_faster(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch, verdicts: list[bool]
) -> None:
    model, x, asked = Small(), torch.randn(5, 48), list(verdicts)
    expected = model(x)

    def shows(tuned: Any, usual: Any) -> bool:
        for call in (tuned, usual):
            torch.testing.assert_close(call(), [expected])
        return asked.pop(0)

    monkeypatch.setattr(tuner, "shows", shows)
    monkeypatch.setattr(tuner, "LITTLE", 0.0)  # all gain more
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)
    kept = [bool(f.config) for f in read(tmp_path / NAME)]
    assert asked == [] and kept == [verdicts[-1]] * 2
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)


@torch.no_grad()
@pytest.mark.parametrize("faster", [True, False])
def test_threads_of_a_graph_are_counted(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    model, x, most = torch.nn.Linear(256, 512), torch.randn(32, 256), torch.get_num_threads()
    asked: list[Sequence[int]] = []

    def with_threads(call: Any, counts: Sequence[int]) -> tuple[float, dict[int, float]]:
        asked.append(counts)
        torch.testing.assert_close(call(), [model(x)])
        return 1.0, dict.fromkeys(counts[1:], 0.5 if faster else 0.99)

    used: list[int] = []
    bind = GraphCompiler.bind
    monkeypatch.setattr(tuner, "with_threads", with_threads)
    monkeypatch.setattr(
        GraphCompiler,
        "bind",
        lambda self, plan, *a, **k: (used.append(plan.threads), bind(self, plan, *a, **k))[1],
    )
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            torch.testing.assert_close(called(model, x, config_for(tmp_path)), model(x))
            assert used[-1] == (1 if faster else 0)
        (row,) = [f for f in read(tmp_path / NAME) if f.about.startswith("program")]
        assert row.config == ("threads=1" if faster else "") and asked == [[2, 1]]
        tune_request = tmp_path / "wish.json"
        tune_request.write_text('{"kinds": ["matmul"]}')
        (tmp_path / NAME).unlink()
        called(model, x, config_for(tmp_path, aoe_config_file=str(tune_request)))
        assert len(asked) == 1 and used[-1] == 0
    finally:
        torch.set_num_threads(most)


def test_threads_take_turns() -> None:
    most, seen = torch.get_num_threads(), []
    usual, others = tuner.with_threads(lambda: seen.append(torch.get_num_threads()), [2, 1])
    assert set(seen) == {1, 2} and usual > 0 and others.keys() == {1}
    assert torch.get_num_threads() == most


def test_what_shows() -> None:
    assert tuner.shows(lambda: None, lambda: sum(range(20000)))
    assert not tuner.shows(lambda: sum(range(20000)), lambda: None)


@torch.no_grad()
def test_an_interruption_keeps_what_was_found(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = tuner._walk

    def interrupted(*args: Any) -> Any:
        if (tmp_path / NAME).exists():
            raise KeyboardInterrupt
        return walk(*args)

    model, x = Small(), torch.randn(5, 48)
    monkeypatch.setattr(tuner, "_walk", interrupted)
    with pytest.warns(UserWarning, match="interrupted: 1 of 2 kernels"):
        result = called(model, x, config_for(tmp_path))
    torch.testing.assert_close(result, model(x))
    assert len(read(tmp_path / NAME)) == 1
    monkeypatch.setattr(tuner, "_walk", walk)
    called(model, x, config_for(tmp_path))
    assert len(read(tmp_path / NAME)) == 2


@torch.no_grad()
@pytest.mark.usefixtures("fallbacks_allowed")
def test_what_cannot_be_measured_runs_as_ever(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Stage, *args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Stage, "__init__", failing)
    model, x = Small(), torch.randn(5, 48)
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), model(x))
    assert raced == [] and not (tmp_path / NAME).exists()


def test_the_bar_is_for_work_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress.Progress("tuning", 2, show=True) as bar:
        bar.next("first")
        assert bar._shown is None
        monkeypatch.setattr(progress, "_PATIENCE", 0.0)
        bar.next("second")
        assert bar._shown.tasks[0].completed == 1 and bar._shown.tasks[0].total == 2
    assert bar._shown is None and bar.count == 2


@torch.no_grad()
def test_a_file_restricts_what_is_tuned(tmp_path: Path, raced: list[str]) -> None:
    model, x, tune_request = Small(), torch.randn(5, 48), tmp_path / "wish.json"
    for text, count in (
        ({"kinds": ["conv"]}, 0),
        ({"kernels": ["*relu*"]}, 1),
        ({"budget_seconds": 0}, 0),
        ({"kinds": ["matmul"], "margin": 0.5, "budget_seconds": 60}, 2),
    ):
        (tmp_path / NAME).unlink(missing_ok=True)
        tune_request.write_text(json.dumps(text))
        called(model, x, config_for(tmp_path, aoe_config_file=str(tune_request)))
        assert len(names(tmp_path)) == count if count else not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold an object"),
        ('{"kind": []}', "Did you mean.*kinds"),
        ('{"kinds": ["gemm"]}', "kinds are matmul, conv"),
        ('{"budget_seconds": "1"}', "must be a number"),
        ('{"kernels": "a"}', "must be a list of strings"),
    ],
)
def test_a_wrong_wish_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wish.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        TuneRequest.read(str(path))


@torch.no_grad()
def test_a_damaged_file_costs_its_contents_and_one_warning(
    tmp_path: Path, raced: list[str]
) -> None:
    model, x = Small(), torch.randn(5, 48)
    (tmp_path / NAME).write_bytes(b"no database at all, but long enough to be one" * 20)
    with pytest.warns(UserWarning, match="damaged") as caught:
        result = called(model, x, config_for(tmp_path))
    torch.testing.assert_close(result, model(x))
    assert len([w for w in caught if "a new file replaces it" in str(w.message)]) == 1
    assert len(read(tmp_path / NAME)) == 2


@torch.no_grad()
def test_a_config_that_no_generator_declares_is_not_taken(tmp_path: Path, raced: list[str]) -> None:
    model, x = Small(), torch.randn(5, 48)
    called(model, x, config_for(tmp_path))
    with sqlite3.connect(tmp_path / NAME) as file:
        file.execute("update tuned set config = 'tile=4000x4000'")
    file.close()
    config = config_for(None, tuned_kernels=str(tmp_path / NAME))
    torch.testing.assert_close(called(model, x, config), model(x))


@torch.no_grad()
def test_graphs_whose_sizes_vary_are_not_tuned(tmp_path: Path, raced: list[str]) -> None:
    model, x = Small(), torch.randn(5, 48)
    with pytest.warns(UserWarning, match="its shapes are dynamic"):
        called(model, x, config_for(tmp_path), dynamic=True)
    assert raced == [] and not (tmp_path / NAME).exists()


def test_a_graph_in_the_engine_is_tuned(tmp_path: Path, raced: list[str]) -> None:
    kind = DataType.DT_FLOAT
    with Graph("product", infer) as graph:
        x = Data(index=0, dtype=kind, shape=[5, 48], placement="CPU")
        y = Data(index=1, dtype=kind, shape=[48, 64], placement="CPU")
        NetOutput([ge.MatMul(x, y, None)])
    session, inputs = TorchNpuGraph("product"), [torch.randn(5, 48), torch.randn(48, 64)]
    session.load(graph, {"aoe_mode": "2", "work_path": str(tmp_path)})
    session.auto_tune(inputs)
    assert raced and len(read(tmp_path / NAME)) == 1
    session.compile(inputs)
    raced.clear()
    torch.testing.assert_close(session.run(inputs), [inputs[0] @ inputs[1]])
    assert raced == []


@pytest.mark.filterwarnings("ignore:frozen_parameter is on", "ignore:.* is compiled again")
@torch.no_grad()
def test_cached_methods_know_the_contents_of_results(tmp_path: Path, raced: list[str]) -> None:
    model, x = Small(), torch.randn(1, 48)
    called(model, x, config_for(tmp_path))
    first = _method(model, tmp_path).path
    with sqlite3.connect(tmp_path / NAME) as file:
        file.execute("update tuned set config = 'form=panel tile=1x2'")
    file.close()
    made = _method(model, tmp_path)
    assert made.path != first
    torch.testing.assert_close(made(x), model(x))
    assert made.path.exists() and not first.exists()
    again = _method(model, tmp_path)
    torch.testing.assert_close(again(x), model(x))
    tuning = cache_compile(
        model.forward, config=config_for(tmp_path), dynamic=False, cache_dir=str(tmp_path)
    )
    with pytest.warns(UserWarning, match="is not cached: aoe_mode is set"):
        tuning(x)
    assert not tuning.path.exists()


def _method(model: torch.nn.Module, folder: Path) -> Any:
    config = config_for(None, tuned_kernels=str(folder / NAME))
    return cache_compile(model.forward, config=config, dynamic=False, cache_dir=str(folder))


def test_files_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, made = (tmp_path / name for name in ("a.sqlite", "b.sqlite", "c.sqlite"))
    row = TunedKernel("r", "m", "1", "matmul first", "tile=6x4", 50.0, 100.0)
    better = TunedKernel("r", "m", "1", "matmul first", "tile=8x3", 40.0, 100.0)
    other = TunedKernel("r", "m2", "1", "matmul first", "", 100.0, 100.0)
    write(one, [row, other])
    write(two, [better])
    assert main(["tune", "--merge", str(one), str(two), "-o", str(made)]) == 0
    assert read(made) == [better, other]
    assert main(["tune", "--show", str(made)]) == 0
    shown = capsys.readouterr().out
    assert "tile=8x3" in shown and "2.50x" in shown and "default" in shown
    two.write_text("nothing of the kind" * 50)
    assert main(["tune", "--merge", str(one), str(two), "-o", str(made)]) == 2
    assert "damaged" in capsys.readouterr().err and read(made) == [better, other]


def test_rows_that_are_no_results_are_damage(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, [TunedKernel("r", "m", tuned.version(), "", "tile=6x4", 1.0, 2.0)])
    with sqlite3.connect(path) as file:
        file.execute("update tuned set config = 'import os'")
    file.close()
    with pytest.raises(DamagedFile, match="name=value"):
        read(path)
    with pytest.warns(UserWarning, match="default kernel settings are used"):
        assert tuned_file(path).find("", "") is None


def test_what_agrees() -> None:
    a = torch.randn(100)
    assert agree(a, a + 1e-7) and agree(a.bfloat16(), (a * (1 + 2**-9)).bfloat16())
    wrong = a.clone()
    wrong[7] += 1e-3
    assert not agree(wrong, a)
    wrong[7] = float("nan")
    assert not agree(wrong, a) and agree(wrong, wrong)
    assert not agree(torch.tensor([1]), torch.tensor([2]))


def stage_of(
    request: Any,
    operands: Sequence[tuple[int, ...] | str],
    constants: dict[int, torch.Tensor],
    outs: Sequence[int],
    dtype: torch.dtype,
) -> tuple[KernelOrder, Stage]:
    """A step with contiguous operands, given by word as dims or as other memory."""
    order, plan = KernelOrder(cpu(), request, "kernel"), Plan(slots=len(operands))
    for slot, dims in enumerate(operands):
        if not isinstance(dims, str):
            kind = "const" if slot in constants else "arena"
            allocation = Allocation(
                slot, kind, torch.empty(dims, dtype=dtype, device="meta"), "cpu"
            )
            plan.allocations.append(allocation)
            plan.places[slot] = allocation, 0
    arguments = [
        Argument(AuxMemory(x) if isinstance(x, str) else slot, "own" if slot in constants else None)
        for slot, x in enumerate(operands)
    ]
    unit: Any = SimpleNamespace(inputs=[constants.get(k) for k in range(len(operands))], outputs=[])
    native = Native(order, arguments, (), 1.0, unit, list(range(len(operands))))
    step = Step(None, "native", None, [0], list(outs), native=native)  # type: ignore[arg-type]
    content = lambda x, pack: x.value if pack is None else pack(x.value)  # noqa: E731
    return order, Stage([step], plan, content, cpu())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 200), (37, 50, 33), (130, 96, 64)])
def test_all_configs_of_a_product_are_right(dtype: str, m: int, n: int, k: int) -> None:
    spec = MatMul(dtype, 1, m, n, k, (0, k, 1), (0, 1, k), "nk")
    request = Product(spec, stored((1, m, n), (0, n, 1), dtype, 3))
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    weight = torch.randn(n, k).to(kind)
    operands = [(m, k), (n, k), "scratch", (m, n)]
    order, stage = stage_of(request, operands, {1: weight}, [3], kind)
    candidates = tuner.KernelBenchmark(order, cpu(), stage, 2)
    choices = dict(cpu().choices(request))
    forms = [KernelConfig((("form", form),)) for form in choices.pop("form")]
    configs = [f.having(name, v) for f in forms for name, values in choices.items() for v in values]
    assert len(forms) == 3 and len(candidates.enter(configs)) >= 6
    assert all(agree(r, e) for r, e in zip(stage.results(), candidates._expected, strict=True))
    a = stage._allocations[0, 0][: m * k].view(m, k).double()
    exact, got = a @ weight.double().t(), stage.results()[0][: m * n].view(m, n).double()
    limit = 1e-5 if dtype == "f32" else 1e-2
    assert (got - exact).abs().max() <= limit * exact.abs().max()


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "m"),
    [("bf16", 8, 256, 3), ("bf16", 4, 256, 8), ("f32", 8, 64, 8), ("i8", 8, 256, 7)],
)
def test_all_configs_of_a_product_of_integers_are_right(
    dtype: str, bits: int, group: int, m: int
) -> None:
    n, k, end = 70, 256, 8 if bits == 4 else 128
    weight = Weight(bits, group, "f32", "") if dtype != "i8" else None  # type: ignore[arg-type]
    spec = MatMul(dtype, 1, m, n, k, (0, k, 1), (0, 1, k), "nk", weight)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8}[dtype]
    out, given = ("i32", "i32") if dtype == "i8" else (dtype, "f32")
    request = Product(spec, stored((1, m, n), (0, n, 1), out, 4, given))
    integers = torch.randint(-end, end, (n, k), dtype=torch.int8)
    scales = torch.rand(n, k // group) if weight else integers
    constants = {1: integers, 3: scales}
    operands = [(m, k), (n, k), "scratch", tuple(scales.shape), (4, m, n)]  # bytes at least
    order, stage = stage_of(request, operands, constants, [4], kind)
    if dtype == "i8":
        stage._allocations[0, 0].copy_(torch.randint(-128, 128, stage._allocations[0, 0].shape))
    choices = cpu().choices(request)
    configs = [KernelConfig(((name, v),)) for name, values in choices.items() for v in values]
    found = tuner.KernelBenchmark(order, cpu(), stage, 2).enter(configs)
    assert {name for e in found for name, _ in e.config.settings} == choices.keys()
    a = stage._allocations[0, 0][: m * k].view(m, k).double()
    numbers = integers.double()
    if weight:
        numbers = numbers * scales.double().repeat_interleave(group, 1)
    got = stage.results()[0].view(torch.int32 if dtype == "i8" else kind)[: m * n]
    exact, limit = a @ numbers.t(), 1e-2 if dtype == "bf16" else 1e-5
    assert (got.view(m, n).double() - exact).abs().max() <= limit * exact.abs().max()


def test_seven_products_keep_what_is_not_finite_in_its_row() -> None:
    m, n, k = 40, 256, 256
    spec = MatMul("f32", 1, m, n, k, (0, k, 1), (0, 1, k), "nk")
    request = Product(spec, stored((1, m, n), (0, n, 1), "f32", 3))
    weight = torch.randn(n, k)
    operands = [(m, k), (n, k), "scratch", (m, n)]
    order, stage = stage_of(request, operands, {1: weight}, [3], torch.float32)
    configs = [
        KernelConfig.read(f"form=strassen {more}")
        for more in ("", "tile=6x4", "tile=8x2", "panel=16384")
    ]
    found = tuner.KernelBenchmark(order, cpu(), stage, 2).enter(configs)
    assert "strassen" in cpu().choices(request)["form"] and len(found) == len(configs)
    a = stage._allocations[0, 0][: m * k].view(m, k)
    for row, strange in ((None, 0.0), (3, float("nan")), (30, float("inf")), (7, 3e38)):
        if row is not None:
            a[row, 5] = strange
        expected = (a.double() @ weight.double().t()).float()
        for candidate in found:
            stage.clear()
            candidate.run()
            got = stage.results()[0][: m * n].view(m, n)
            assert agree(got, expected) or row == 7
            assert torch.equal(got.isfinite(), expected.isfinite())
            assert agree(got[8:20], expected[8:20])


@pytest.mark.parametrize(
    ("dtype", "channels", "side", "kernel", "stride"),
    [("f32", 32, 9, 3, 1), ("f32", 20, 11, 3, 2), ("bf16", 32, 9, 3, 1), ("f32", 3, 12, 5, 2)],
)
def test_all_configs_of_a_convolution_are_right(
    dtype: str, channels: int, side: int, kernel: int, stride: int
) -> None:
    kind, out, pad = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype], 40, kernel // 2
    strides = (channels * side * side, 1, channels * side, channels)
    spec = Conv(
        dtype,
        1,
        channels,
        side,
        side,
        out,
        (kernel, kernel),
        (stride, stride),
        (pad,) * 4,
        (1, 1),
        1,
        strides,
    )
    assert spec.results is not None
    high, wide = spec.results
    nest = stored((1, out, high, wide), (out * high * wide, 1, out * wide, out), dtype, 3)
    request = Convolution(spec, nest)
    weight = torch.randn(out, channels, kernel, kernel).to(kind)
    operands = [(1, side, side, channels), weight.shape, "scratch", (1, high, wide, out)]
    order, stage = stage_of(request, operands, {1: weight}, [3], kind)
    candidates = tuner.KernelBenchmark(order, cpu(), stage, 2)
    choices = dict(cpu().choices(request))
    methods = [KernelConfig((("method", x),)) for x in choices.pop("method", ())] or [
        DEFAULT_CONFIG
    ]
    configs = [
        m.having(name, v) for m in methods for name, values in choices.items() for v in values
    ]
    found = candidates.enter(configs)
    assert len(found) >= 3
    x = stage._allocations[0, 0][: side * side * channels].view(1, side, side, channels)
    exact = torch.nn.functional.conv2d(
        x.double().permute(0, 3, 1, 2), weight.double(), stride=stride, padding=pad
    )
    got = stage.results()[0][: exact.numel()].view(1, high, wide, out).permute(0, 3, 1, 2)
    limit = 1e-5 if dtype == "f32" else 1e-2
    assert (got.double() - exact).abs().max() <= limit * exact.abs().max()
    if methods != [DEFAULT_CONFIG]:
        assert {e.config.choice("method") for e in found} >= {"direct", "patches4"}


@pytest.mark.parametrize(
    ("dtype", "length", "span"), [("f32", 1, 70), ("f32", 70, 70), ("bf16", 70, 70)]
)
def test_all_configs_of_attention_are_right(dtype: str, length: int, span: int) -> None:
    kind, heads, width = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype], 2, 32
    q, k = ((1, heads, n, width) for n in (length, span))
    of = {n: (heads * n * width, n * width, width, 1) for n in (length, span)}
    request = Attention(
        dtype,
        1,
        heads,
        heads,
        length,
        span,
        width,
        width,
        of[length],
        of[span],
        of[span],
        of[length],
        width**-0.5,
    )
    order, stage = stage_of(request, [q, k, k, (1,), q, (1,), "scratch"], {}, [4], kind)
    candidates = tuner.KernelBenchmark(order, cpu(), stage, 2)
    choices = dict(cpu().choices(request))
    forms = [KernelConfig((("form", x),)) for x in choices.pop("form", ())] or [DEFAULT_CONFIG]
    configs = [f.having(name, v) for f in forms for name, values in choices.items() for v in values]
    found = candidates.enter(configs)
    assert len(found) >= 3 and (
        length > 8 or {e.config.choice("form") for e in found} == {"prefill"}
    )
    given = [stage._allocations[s, 0] for s in range(3)]
    args = [
        t[: heads * n * width].view(1, heads, n, width)
        for t, n in zip(given, (length, span, span), strict=True)
    ]
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in args))
    got = stage.results()[0][: exact.numel()].view(exact.shape).double()
    assert (got - exact).abs().max() <= (1e-5 if dtype == "f32" else 1e-2) * exact.abs().max()


def softmax_of(rows: int, columns: int) -> Loops:
    """Rows of numbers at word 0 to their softmax at word 1."""
    x = load(Access(0, "f32", (columns, 1)))
    e = op("exp", op("sub", x, reduce("max", x)))
    y = op("div", e, reduce("sum", e))
    return Loops(Nest((rows, columns), (Store(Access(1, "f32", (columns, 1)), y),), frozenset([1])))


def test_all_configs_of_loops_and_pools_are_right() -> None:
    image, few = (1, 9, 9, 70), (1, 4, 4, 70)
    strides = (81 * 70, 1, 9 * 70, 70), (16 * 70, 1, 4 * 70, 70)
    window = ((3, 3), (2, 2), (0, 0, 0, 0), (1, 1))
    pool = Pool("max", "f32", 1, 70, 9, 9, 4, 4, *window, *strides)
    for request, operands in ((softmax_of(5, 1000), [(5, 1000)] * 2), (pool, [image, few])):
        order, stage = stage_of(request, operands, {}, [1], torch.float32)
        benchmark, choices = tuner.KernelBenchmark(order, cpu(), stage, 2), cpu().choices(request)
        configs = [KernelConfig(((name, v),)) for name, values in choices.items() for v in values]
        found = benchmark.enter(configs)
        assert {name for e in found for name, _ in e.config.settings} == choices.keys()
        stage.clear()
        found[-1].run()
        x = stage._allocations[0, 0][: math.prod(operands[0])].view(operands[0])
        exact = (
            torch.softmax(x, -1)
            if request is not pool
            else torch.nn.functional.max_pool2d(x.permute(0, 3, 1, 2), 3, 2).permute(0, 2, 3, 1)
        )
        got = stage.results()[0][: exact.numel()].view(exact.shape)
        torch.testing.assert_close(got, exact)


def test_kernels_of_little_work_are_not_measured(tmp_path: Path, raced: list[str]) -> None:
    class Both(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(super().forward(x), -1)

    model, x, tune_request = Both(), torch.randn(5, 48), tmp_path / "wish.json"
    for share, kinds in ((0.3, {"matmul"}), (0.0, {"matmul", "loops"})):
        (tmp_path / NAME).unlink(missing_ok=True)
        tune_request.write_text(json.dumps({"share": share}))
        with torch.no_grad():
            called(model, x, config_for(tmp_path, aoe_config_file=str(tune_request)))
        assert {name.split()[0] for name in names(tmp_path)} == kinds


@torch.no_grad()
@pytest.mark.parametrize("shown", [True, False])
def test_torch_runs_what_it_is_faster_at(
    tmp_path: Path, raced: list[str], monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    model, x, graphs = Small(), torch.randn(5, 48), []
    expected = model(x)

    def times(candidates: Sequence[Candidate], windows: int = 0) -> list[float]:
        raced.extend(str(e.config) for e in candidates)
        return [{"by=torch": 1.0}.get(str(e.config), 100.0) for e in candidates]

    def shows(tuned: Any, usual: Any) -> bool:
        graphs.append(None)
        for call in (tuned, usual):
            torch.testing.assert_close(call(), [expected])
        return shown

    monkeypatch.setattr(tuner, "times", times)
    monkeypatch.setattr(tuner, "shows", shows)
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)
    configs = {f.config for f in read(tmp_path / NAME)}
    assert len(graphs) == 1 and "by=torch" in raced
    assert configs == ({"by=torch"} if shown else {""})
    raced.clear()
    units: list[int] = []
    bind = GraphCompiler.bind
    monkeypatch.setattr(
        GraphCompiler,
        "bind",
        lambda self, plan, *a, **k: (
            units.append(len(plan.native_steps)),
            bind(self, plan, *a, **k),
        )[1],
    )
    torch.testing.assert_close(called(model, x, config_for(tmp_path)), expected)
    assert raced == [] and units == [0 if shown else 2]


def test_calls_of_torch_are_right_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 20, 3, 3)
    conv = Conv(
        "f32", 1, 20, 11, 9, 40, (3, 3), (2, 2), (1, 0, 1, 1), (1, 1), 1, (1980, 1, 180, 20)
    )
    high, wide = conv.results or (0, 0)
    nest = stored((1, 40, high, wide), (40 * high * wide, 1, 40 * wide, 40), "f32", 3)
    matmul = MatMul("f32", 2, 7, 5, 6, (42, 6, 1), (30, 5, 1))
    product = Product(matmul, stored((2, 7, 5), (35, 5, 1), "f32", 3))
    for request, operands, constants in (
        (Convolution(conv, nest), [(1, 11, 9, 20), (40, 20, 3, 3)], {1: weight}),
        (product, [(2, 7, 6), (2, 6, 5)], {}),
    ):
        listed = [*operands, "scratch", (1, high, wide, 40)]
        order, stage = stage_of(request, listed, constants, [3], torch.float32)
        usual = tuner.KernelBenchmark(order, cpu(), stage, 1).usual
        found = stage.library(request, 1)
        assert found is not None and "by" in cpu().choices(request)
        kernel = stage.results()[0]
        got = found().movedim(1, -1) if constants else found()
        torch.testing.assert_close(kernel[: got.numel()].view(got.shape), got, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(tuner, "times", lambda candidates: [100.0, 1.0])
        assert tuner._beaten(usual, found, 0.03) == 1.0
        monkeypatch.setattr(found, "exact", lambda: (torch.zeros(3), torch.ones(3)))
        assert tuner._beaten(usual, found, 0.03) == 0.0
