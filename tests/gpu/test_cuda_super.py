"""Persistent kernels on a GPU that is not here: whole plans as one launch, with the same bits as
many, in whatever order blocks and warps go on. A wait that is missing shows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ptx_machine
import torchair
from compiling import compiled
from models import Llama, LlamaConfig, Mlp, MlpConfig, build, llama_inputs, mlp_inputs
from ptx_target import PtxTarget
from quantised import quantise
from random_graphs import Maker
from torchair import scope
from torchair.codegen.cuda import super_kernel
from torchair.codegen.cuda.jit import describe, module_text, ptx
from torchair.codegen.work_lists import Work, WorkLists, work_lists
from torchair.engine.compile import TARGETS
from torchair.engine.session import TorchNpuGraph
from torchair.errors import ScopeError
from torchair.verification.judge import same_bits

LLAMA = LlamaConfig(2, 64, 2, 1, 32, 128, 96, 300, attention="grouped")
MLP = MlpConfig(2, 64)
Calls = Sequence[tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxTarget]:
    """One with three multiprocessors instead of the CPU."""
    target = a_gpu(monkeypatch, 3)
    torch._dynamo.reset()
    with torch.no_grad():
        yield target
    torch._dynamo.reset()


def a_gpu(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> PtxTarget:
    target = PtxTarget(describe((9, 0), multiprocessors))
    monkeypatch.setitem(TARGETS, "cpu", lambda index: target)
    return target


def results(make: Callable[[], nn.Module], calls: Calls, together: bool) -> list[Tensor]:
    """The results of calls one after the other, with memory of their own."""
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.experimental_config.super_kernels = together
    fast = compiled(make(), config, dynamic=False)
    return [fast(*copy.deepcopy(call)).clone() for call in calls]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def mlp() -> nn.Module:
    return build(Mlp, MLP).to(torch.bfloat16)


def mlp_calls() -> Calls:
    """Other numbers in each: what the first call has left in memory is wrong in the second."""
    (x,) = mlp_inputs(MLP, 1, torch.bfloat16)
    return [(x,), (x.flip(-1) * 2,)]


def llama(bits: int = 0) -> nn.Module:
    model = build(Llama, LLAMA).to(torch.bfloat16)
    if bits:
        quantise(model, bits, 32)
    return model


def llama_calls() -> Calls:
    return [llama_inputs(LLAMA, 1, start) for start in (290, 291)]


# ---- the same bits


def test_an_mlp_is_one_launch(gpu: PtxTarget) -> None:
    expected = results(mlp, mlp_calls(), False)
    gpu.ran.clear()
    assert same(results(mlp, mlp_calls(), True), expected)
    assert len(gpu.ran) == 2 and len(set(gpu.ran)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_blocks_may_go_on_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_gpu(monkeypatch, 1)
    expected = results(mlp, mlp_calls(), False)
    target.order, target.seed = "random", seed
    assert same(results(mlp, mlp_calls(), True), expected)


def of_many_sizes(x: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """Rows that 1024 threads add up, too long for a prologue, between products of fewer threads,
    whose blocks stand side by side then."""
    h = torch.nn.functional.linear(x, wide).softmax(-1)
    return torch.nn.functional.linear(h, narrow).relu()


def test_parts_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = a_gpu(monkeypatch, 1)
    given = (torch.randn(4, 64), torch.randn(4096, 64), torch.randn(8, 4096))
    found = []
    for together in (False, True):
        torch._dynamo.reset()
        gpu.ran.clear()
        config = torchair.CompilerConfig()
        config.experimental_config.super_kernels = together
        found.append(compiled(of_many_sizes, config)(*given))
    assert same_bits(*found)
    assert len(gpu.ran) == 1, gpu.ran
    (name,) = gpu.ran
    assert int(name.rpartition("_")[2].split("x")[0]) > 256


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_llama_is_one_launch(bits: int, gpu: PtxTarget) -> None:
    """Two layers: products with their norms, rope, an updated cache, attention, the head."""
    expected = results(lambda: llama(bits), llama_calls(), False)
    assert len(gpu.ran) > 40
    gpu.ran.clear()
    assert same(results(lambda: llama(bits), llama_calls(), True), expected)
    assert len(gpu.ran) == 2 and len(set(gpu.ran)) == 1


def test_a_step_of_llama_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_gpu(monkeypatch, 1)
    expected = results(llama, llama_calls()[:1], False)
    target.order = "random"
    assert same(results(llama, llama_calls()[:1], True), expected)


def test_blocks_of_a_head_meet_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they would be a cluster in a launch of their own."""
    target = a_gpu(monkeypatch, 4)
    config = replace(LLAMA, layers=1, context=900)
    calls = [llama_inputs(config, 1, 850)]
    expected = results(lambda: build(Llama, config).to(torch.bfloat16), calls, False)
    clusters: list[int] = []
    part = target._part

    def noted(order: Any) -> Any:
        clusters.append(order.generated.launch.cluster)
        return part(order)

    monkeypatch.setattr(target, "_part", noted)
    found = results(lambda: build(Llama, config).to(torch.bfloat16), calls, True)
    assert same(found, expected)
    assert max(clusters) > 1


@pytest.mark.parametrize("seed", range(2000, 2010))
@pytest.mark.filterwarnings("ignore")
def test_random_graphs_have_the_same_bits(
    seed: int, monkeypatch: pytest.MonkeyPatch, gpu: PtxTarget
) -> None:
    """Over memory that holds no numbers before."""
    monkeypatch.setenv("TORCHAIR_POISON", "1")
    found = []
    for together in (False, True):
        made = Maker(seed, nodes=25)
        session = TorchNpuGraph(made.graph.name)
        session.load(made.graph, {"torchair.superKernels": "1"} if together else {})
        gpu.ran.clear()
        found.append(session.run(made.resized(lambda n: n)))
    assert same(found[1], found[0])


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two products at once, whose rows fill the registers of a launch of their own."""
    linear = torch.nn.functional.linear
    return linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)


def test_no_part_takes_the_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with more registers than 512 threads may have gets another form, with the same
    bits. Parts are functions; no register of theirs has a value from before them."""
    gpu = a_gpu(monkeypatch, 1)
    given = [torch.randn(*n).to(torch.bfloat16) for n in ((1, 2048), *[(16, 2048)] * 2, (8, 16))]
    texts: list[str] = []
    launch = ptx_machine.launch_persistent

    def noted(entry: Any, machine: Any, *rest: Any) -> None:
        texts.append(module_text([entry]))
        assert ptx([entry], machine).count("call.uni") == len(entry.kernels) == 2
        launch(entry, machine, *rest)

    monkeypatch.setattr(ptx_machine, "launch_persistent", noted)
    found = []
    for together in (False, True):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.experimental_config.super_kernels = together
        found.append(compiled(gated, config)(*given))
    assert same_bits(*found)
    block, resident = map(int, gpu.ran[-1].rpartition("_")[2].split("x"))
    assert block * resident == 512
    assert texts and not re.search(r" = phi .*\[ poison", texts[0])


@pytest.mark.parametrize("fits", [1, 0])
def test_as_many_blocks_as_fit(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver has room for fewer than were asked for; without any it is no persistent
    kernel."""
    target = a_gpu(monkeypatch, 2)
    expected = results(mlp, mlp_calls(), False)
    assert same(results(mlp, mlp_calls(), True), expected)
    asked = target.ran[-1]
    assert int(asked.rpartition("x")[2]) > 1
    target.ran.clear()
    target.fits = fits
    assert same(results(mlp, mlp_calls(), True), expected)
    if fits:
        assert {*target.ran} == {asked.rpartition("x")[0] + "x1"}
    else:
        assert len(target.ran) > 2 and not any("super" in name for name in target.ran)


# ---- what is missing shows


def without_waits(work: int) -> Callable[[Sequence[Work], int], WorkLists]:
    """Lists in which the items of a work wait for nothing."""

    def made(works: Sequence[Work], blocks: int) -> WorkLists:
        lists = work_lists(works, blocks)
        free = (
            tuple(replace(i, waits=()) if i.work == work else i for i in own) for own in lists.lists
        )
        return replace(lists, lists=tuple(free))

    return made


@pytest.mark.parametrize("work", [1, 2])
def test_a_wait_that_is_missing_shows(
    work: int, monkeypatch: pytest.MonkeyPatch, gpu: PtxTarget
) -> None:
    """The check of the lists cannot find that, since they end: numbers are wrong instead."""
    expected = results(mlp, mlp_calls(), False)
    monkeypatch.setattr(super_kernel, "work_lists", without_waits(work))
    gpu.order = "random"
    assert not same(results(mlp, mlp_calls(), True), expected)


def test_lists_that_never_end_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, gpu: PtxTarget
) -> None:
    """A raise is left out: the check says so, and the launches are what they were."""

    def stuck(works: Sequence[Work], blocks: int) -> WorkLists:
        lists = work_lists(works, blocks)
        quiet = (tuple(replace(i, raises=None) for i in own) for own in lists.lists)
        return replace(lists, lists=tuple(quiet))

    monkeypatch.setattr(super_kernel, "work_lists", stuck)
    expected = results(mlp, mlp_calls(), False)
    gpu.ran.clear()
    assert same(results(mlp, mlp_calls(), True), expected)
    assert not any("super" in name for name in gpu.ran)
    with pytest.raises(ScopeError, match=r"waits for counter 0 to reach .* raise 0 times"):
        compiled(in_a_scope, torchair.CompilerConfig())(torch.randn(4, 64), torch.randn(64, 64))


# ---- scopes


STRICT = "strict-scope-check=abort"


def in_a_scope(x: Tensor, w: Tensor) -> Tensor:
    with scope.super_kernel("layer", STRICT):
        h = torch.nn.functional.linear(x[:1], w).softmax(-1)
        return torch.nn.functional.linear(h, w).relu()


def waits_in_a_scope(x: Tensor, w: Tensor) -> Tensor:
    """A softmax over few long columns: its blocks wait for each other."""
    with scope.super_kernel("layer", STRICT):
        return (x.softmax(0) * 2).sum(0).sigmoid()


def test_a_scope_is_one_launch(gpu: PtxTarget) -> None:
    x, w = torch.randn(4, 64), torch.randn(64, 64)

    def outside(x: Tensor, w: Tensor) -> Tensor:
        h = torch.nn.functional.linear(x[:1], w).softmax(-1)
        return torch.nn.functional.linear(h, w).relu()

    expected = compiled(outside, torchair.CompilerConfig())(x, w)
    launches = len(gpu.ran)
    torch._dynamo.reset()
    gpu.ran.clear()
    assert same_bits(compiled(in_a_scope, torchair.CompilerConfig())(x, w), expected)
    assert launches > 1 and len(gpu.ran) == 1 and gpu.ran[0].startswith("super_")


def test_a_kernel_whose_blocks_wait_breaks_a_strict_scope(gpu: PtxTarget) -> None:
    with pytest.raises(ScopeError, match="not one kernel") as raised:
        compiled(waits_in_a_scope, torchair.CompilerConfig())(torch.randn(4096, 8), torch.randn(1))
    text = str(raised.value)
    assert "is launched by itself: its blocks wait for each other" in text
    assert "test_cuda_super.py" in text


def test_explain_tells_of_it(gpu: PtxTarget) -> None:
    """Also the text of the lists is kept."""
    found = torchair.explain(in_a_scope)(torch.randn(4, 64), torch.randn(64, 64))
    (text,) = found.graphs[0].super_kernels
    assert re.fullmatch(
        r"(\d+) launches of \d+ steps as one: \d+ items on \d+ blocks, \d+ counters", text
    )
    assert text in str(found)


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("name", ["mlp", "llama", "llama of 8 bits", "llama of 4 bits"])
@pytest.mark.filterwarnings("ignore")
def test_one_launch_has_the_bits_of_many(name: str, mode: str) -> None:
    """Fifty calls in turn: counters are zero each time, and replays take new addresses."""
    bits = int(name.split()[2]) if "bits" in name else 0
    made = mlp() if name == "mlp" else llama(bits)
    calls = mlp_calls() if name == "mlp" else llama_calls()
    model = made.cuda()
    found = []
    for together in (False, True):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.mode = mode
        config.experimental_config.super_kernels = together
        fast = compiled(copy.deepcopy(model), config, dynamic=False)
        found.append([fast(*(x.cuda() for x in call)).clone() for call in calls * 25])
    assert same(found[1], found[0])


@pytest.mark.cuda
def test_scopes_are_one_launch_on_a_gpu() -> None:
    x, w = torch.randn(4, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    told = torchair.explain(in_a_scope)(x, w)
    assert len(told.graphs[0].super_kernels) == 1
