"""Tuning for GPUs: which kernels of a plan are measured and in which forms. Candidates run on the
machine of `ptx_machine`; what needs a GPU is marked."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchair
from cuda_graphs import data
from cuda_tools import HOPPER
from models import LLAMA, Llama, build, llama_inputs
from ptx_machine import Memory, launch
from quantised import quantise
from tolerance import assert_close, double_copy
from torchair import ge
from torchair.codegen.cuda import target as cuda_target
from torchair.codegen.cuda.jobs import Job, launches_of
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.cuda.trial import Replay
from torchair.codegen.requests import Joint, Loops, Product
from torchair.codegen.target import DEFAULT_CONFIG, Generated, KernelConfig
from torchair.codegen.tuned import NAME, read
from torchair.engine.inspect.dry_run import dry_run
from torchair.engine.plan.records import Plan
from torchair.engine.run import trial
from torchair.engine.tune import TuneRequest, tuner
from torchair.engine.tune.tuner import Candidate, Tuning
from torchair.ge.graph import Graph
from torchair.operators import infer

WIDTH, INNER = 64, 32


def planned() -> Plan:
    """One token through the second half of a decoder layer."""
    with Graph("layer", infer) as graph:
        x, scale = data(0, 1, WIDTH), data(1, WIDTH)
        gate, up = data(2, INNER, WIDTH), data(3, INNER, WIDTH)
        down = data(4, WIDTH, INNER)
        h, _ = ge.RmsNorm(x, scale, epsilon=1e-5)
        left = ge.Swish(ge.MatMul(h, gate, transpose_x2=True), scale=1.0)
        middle = ge.Mul(left, ge.MatMul(h, up, transpose_x2=True))
        ge.NetOutput([ge.Add(ge.MatMul(middle, down, transpose_x2=True), x)])
    plan = dry_run(graph, HOPPER).plan
    plan.device = "cpu"  # memory of the host stands for that of the GPU
    return plan


def test_constants_of_a_trial_are_where_its_kernel_runs() -> None:
    stage = trial.Stage.__new__(trial.Stage)
    stage._device, stage._packed, stage._constants = torch.device("meta"), {}, {1: "positions"}
    stage._content = lambda constant, pack: torch.arange(4)  # constants of a graph are on the host
    stage._target = CudaTarget(0, HOPPER)
    assert {stage._constant(1, None, turn).device.type for turn in (0, 1)} == {"meta"}


class NumpyTrial:
    """A kernel on the machine of the tests, over copies of the memory of its stage."""

    threads = steps = 1
    launched: list[str] = []

    def __init__(
        self, made: Generated, words: Sequence[dict[int, int]], target: Any, keep: Any
    ) -> None:
        self._made, self._words, self._stage = made, words[0], keep[0]

    def __call__(self) -> None:
        memory, given = Memory(), {}
        tensors = [t for (_, turn), t in self._stage._allocations.items() if turn == 0]
        for t in tensors:
            raw = t.view(torch.uint8).numpy()
            given[t.data_ptr()] = memory.place(raw), raw
        launch_of, words = self._made.launch, [0] * (1 + max(self._made.kernel.words))
        assert launch_of is not None
        for word in self._made.kernel.words:
            words[word] = self._moved(self._words[word], given)
        launch(self._made.kernel, launch_of, HOPPER, memory, words)
        for at, raw in given.values():
            raw[:] = memory.read(at, np.empty(raw.shape, np.uint8))
        self.launched.append(self._made.kernel.entry)

    @staticmethod
    def _moved(address: int, given: dict[int, tuple[int, np.ndarray]]) -> int:
        for start, (at, raw) in given.items():
            if start <= address < start + raw.nbytes:
                return at + address - start
        raise AssertionError("an address outside of the stage")


@pytest.fixture
def numpy_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaTarget]:
    """A target whose candidates run on the machine of the tests; each is faster than all before."""

    def times(candidates: Sequence[Candidate], windows: int = 0) -> list[float]:
        return [100.0 / (1 + k) for k in range(len(candidates))]

    monkeypatch.setattr(cuda_target, "GpuTrial", NumpyTrial)
    monkeypatch.setattr(CudaTarget, "compile_alone", lambda self, made: None)
    monkeypatch.setattr(tuner, "times", times)
    NumpyTrial.launched.clear()
    yield CudaTarget(0, HOPPER)


def tuned(plan: Plan, target: CudaTarget, folder: Path) -> Tuning:
    """Results for the products of a plan."""
    found = Tuning(target, str(folder), None)
    found.tune(plan, lambda x, pack: x, TuneRequest(kinds=("matmul",)))
    return found


def jobs(plan: Plan, target: CudaTarget) -> list[Job]:
    parts = launches_of(plan, target.joined)
    return [job for _, part in parts for bundle in part for job in bundle]


def ways(plan: Plan, target: CudaTarget) -> dict[type, KernelConfig]:
    return {type(job.order.request): job.order.config for job in jobs(plan, target)}


def test_kernels_of_several_steps_are_measured_as_they_run(
    numpy_gpu: CudaTarget, tmp_path: Path
) -> None:
    plan = planned()
    kernels = {type(s.order.request): s for s in numpy_gpu.subjects(plan)}
    assert set(kernels) == {Joint, Product} and len(kernels[Joint].steps) == 3
    tuning = tuned(plan, numpy_gpu, tmp_path)
    rows = read(tmp_path / NAME)
    assert len(rows) == 2 and all("form=" in row.config and row.usual for row in rows)
    assert {row.machine for row in rows} == {rows[0].machine} and "sm_90" in rows[0].machine
    assert len(NumpyTrial.launched) > 12
    NumpyTrial.launched.clear()
    tuned(plan, numpy_gpu, tmp_path)
    assert NumpyTrial.launched == []

    assert set(ways(planned(), numpy_gpu).values()) == {DEFAULT_CONFIG}
    again = planned()
    tuning.choose(again)
    found = ways(again, numpy_gpu)
    assert {str(config) for config in found.values()} == {row.config for row in rows}
    usual, mine = ({j.kernel.entry for j in jobs(p, numpy_gpu)} for p in (planned(), again))
    assert len(mine) == len(usual) == 2 and not mine & usual


def test_a_wrong_kernel_of_a_gpu_does_not_win(
    numpy_gpu: CudaTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = CudaTarget.generate
    product = next(s for s in numpy_gpu.subjects(planned()) if len(s.steps) == 1)
    _, wrong, *others = numpy_gpu.choices(product.order.request)["form"]

    def planted(
        self: CudaTarget, request: Any, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        """One form sums up the first half only."""
        if config.choice("form") == wrong:
            matmul = request.matmul
            request = replace(request, matmul=replace(matmul, k=matmul.k // 2))
        return generate(self, request, label, config)

    monkeypatch.setattr(CudaTarget, "generate", planted)
    stage = trial.Stage(product.steps, planned(), lambda x, pack: x, numpy_gpu)
    benchmark = tuner.KernelBenchmark(product.order, numpy_gpu, stage, 1)
    entered = benchmark.enter(KernelConfig((("form", x),)) for x in (wrong, others[0]))
    assert [e.config.choice("form") for e in entered] == others[:1]


def test_kernels_that_stand_beside_others_keep_the_size_of_their_blocks(
    numpy_gpu: CudaTarget,
) -> None:
    product = next(s for s in numpy_gpu.subjects(planned()) if len(s.steps) == 1)
    forms = numpy_gpu.choices(product.order.request)["form"]
    chosen = [KernelConfig((("form", x),)) for x in (forms[1], forms[-1])]
    for beside in (False, True):
        stage = trial.Stage(product.steps, planned(), lambda x, pack: x, numpy_gpu)
        benchmark = tuner.KernelBenchmark(product.order, numpy_gpu, stage, 1, beside)
        blocks = [e.made.launch.block for e in benchmark.enter(chosen)]  # type: ignore[union-attr]
        assert blocks == [128] if beside else blocks == [128, 512]


def test_pieces_of_nests_are_choices_where_there_is_much_to_do() -> None:
    target = CudaTarget(0, HOPPER)
    with Graph("norm", infer) as graph:
        rows, few = data(0, 512, 1024), data(1, 2, 1024)
        scale = data(2, 1024)
        many, _ = ge.RmsNorm(rows, scale, epsilon=1e-5)
        small, _ = ge.RmsNorm(few, scale, epsilon=1e-5)
        ge.NetOutput([many, small, ge.Relu(rows)])
    requests = [s.order.request for s in target.subjects(dry_run(graph, HOPPER).plan)]
    assert all(isinstance(r, Loops) for r in requests)
    choices = [target.choices(r) for r in requests]
    assert sorted(bool(c) for c in choices) == [False, True, True]
    for request, choice in zip(requests, choices, strict=True):
        usual = target.generate(request, "nest").kernel.entry
        made = {
            target.generate(request, "nest", DEFAULT_CONFIG.having(name, value)).kernel.entry
            for name, values in choice.items()
            for value in values
        }
        assert not choice or (usual in made and len(made) > 3)


# ---- on a GPU


def config_for(folder: Path, mode: str, tuned: bool = False) -> torchair.CompilerConfig:
    config = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):
        config.mode = mode
    if tuned:
        config.experimental_config.tuned_kernels = str(folder / NAME)
        return config
    config.aoe_config.aoe_mode = "2"
    config.aoe_config.work_path = str(folder)
    return config


def called(model: Any, inputs: Any, config: torchair.CompilerConfig) -> torch.Tensor:
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    fast = torch.compile(model, backend=backend, dynamic=False)
    return [fast(*inputs) for _ in range(3)][-1]


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.no_grad()
def test_a_decode_step_is_tuned(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(LLAMA["4 layers"], layers=2, ffn=768)
    model = build(Llama, config).to("cuda", torch.bfloat16)
    if bits < 16:
        quantise(model, bits, 0 if bits == 8 else 32)
    inputs = tuple(x.cuda() for x in llama_inputs(config, 1, start=8))
    wide = double_copy(model)
    expected, exact = model(*inputs), wide(*inputs)
    for mode in ("max-autotune", "reduce-overhead"):
        got = called(model, inputs, config_for(tmp_path, mode))
        assert_close([got], [expected], [exact])
    rows = read(tmp_path / NAME)
    kinds = {row.about.partition(" ")[0] for row in rows}
    assert kinds >= {"matmul", "attention"} and any(row.usual > 0 for row in rows)
    assert torch.cuda.get_device_name() in rows[0].machine and "driver" in rows[0].machine

    def measured(*given: Any) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(trial.Stage, "__init__", measured)
    got = called(model, inputs, config_for(tmp_path, "max-autotune", tuned=True))
    assert_close([got], [expected], [exact])


@pytest.mark.cuda
def test_ways_of_a_gpu_that_do_not_show_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(candidates: Sequence[Candidate], windows: int = 0) -> list[float]:
        return [100.0 / (1 + k) for k in range(len(candidates))]

    seen: list[list[float]] = []

    def shows(tuned: Replay, usual: Replay) -> bool:
        seen.append([call.seconds(0.0) for call in (tuned, usual)])
        return False

    monkeypatch.setattr(tuner, "times", times)
    monkeypatch.setattr(tuner, "shows", shows)
    layers = torch.nn.Linear(256, 512), torch.nn.SiLU(), torch.nn.Linear(512, 64)
    model, x = torch.nn.Sequential(*layers).cuda(), torch.randn(1, 256, device="cuda")
    with torch.no_grad():
        got = called(model, (x,), config_for(tmp_path, "max-autotune"))
        torch.testing.assert_close(got, model(x), atol=1e-4, rtol=1e-4)
    rows = read(tmp_path / NAME)
    assert len(seen) == 2 and all(0 < t < 1 for pair in seen for t in pair)
    assert rows and not any(row.config for row in rows)
