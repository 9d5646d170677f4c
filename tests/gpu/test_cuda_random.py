"""Random numbers drawn by our kernels: Philox's numbers in torch's order, the passes that put them
there, and on a GPU dropout equal to eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from capture_tools import compiled as captured
from compiling import compiled
from cuda_graphs import data
from cuda_tools import HOPPER, OLDER, entry_of
from lowering import OneNode
from ptx_machine import Memory, launch
from torchair import ge
from torchair.capture.rehearsal import Rehearsal
from torchair.codegen import philox
from torchair.codegen.cuda.jit import Gpu, foreign, ptx
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.loops import Access, Expr, Nest, Store, axis, const, load, op
from torchair.codegen.philox import PhiloxLayout
from torchair.codegen.text.philox import is_run
from torchair.engine.inspect.dry_run import dry_run
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.random import draw_in_kernels
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import Op, infer, row_of

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
LOW = np.uint64(2**32 - 1)
THREADS = 132 * 8 * 256  # of an H200


def numpy_philox(seed: int, counter: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Philox4x32-10 as its paper has it, apart from torch and from the code that is tested."""
    words = [counter & LOW, counter >> np.uint64(32), sequence & LOW, sequence >> np.uint64(32)]
    words = [np.asarray(w, np.uint64) for w in words]
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        a, b = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            (b >> np.uint64(32)) ^ words[1] ^ keys[0],
            b & LOW,
            (a >> np.uint64(32)) ^ words[3] ^ keys[1],
            a & LOW,
        ]
        keys = [(k + s) & LOW for k, s in zip(keys, STEPS, strict=True)]
    return np.stack(words, -1).astype(np.uint32)


def expected(seed: int, offset: int, layout: PhiloxLayout) -> np.ndarray:
    """All numbers, thread by thread as torch's kernels loop."""
    found = np.zeros(layout.elements, np.float32)
    thread = np.arange(layout.threads, dtype=np.uint64)
    call, first, vector = 0, 0, layout.vector
    while first < layout.elements:
        for _ in range(max(1, vector // 4)):
            four = numpy_philox(seed, np.uint64(offset // 4 + call) + 0 * thread, thread)
            four = four.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
            for k in range(4):
                if vector == 1:
                    place = first + k * layout.threads + thread.astype(np.int64)
                elif k < vector:
                    inside = 4 * (call % max(1, vector // 4)) + k
                    place = first + thread.astype(np.int64) * vector + inside
                else:
                    continue
                inside_all = place < layout.elements
                found[place[inside_all]] = four[inside_all, k]
            call += 1
        first += layout.threads * (vector if vector > 1 else 4)
    return found


LAYOUTS = [
    PhiloxLayout(elements, vector, threads)
    for elements, vector, threads in (
        (1, 1, 256), (5, 1, 256), (1030, 1, 256), (3072, 1, 256), (1026, 2, 256), (2048, 2, 256),
        (4096, 4, 256), (1024, 4, 512), (512, 8, 256), (4096, 8, 256), (8192, 8, 512),
    )
]  # fmt: skip
SEEDS = [(0, 0), (7, 4), (2**40 + 5, 2**34 - 4), (2**63 - 1, 8), (2**64 - 3, 12)]


def as_state(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, offset])


def test_known_answers() -> None:
    """The vectors that its authors publish."""
    zero = np.zeros(1, np.uint64)
    assert numpy_philox(0, zero, zero)[0].tolist() == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8
    ]  # fmt: skip


@pytest.mark.parametrize("seed, offset", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numbers_of_the_reference(layout: PhiloxLayout, seed: int, offset: int) -> None:
    got = philox.drawn(as_state(seed, offset), torch.arange(layout.elements), layout)
    assert np.array_equal(got.numpy(), expected(seed, offset, layout))


def test_layouts_of_torch() -> None:
    assert philox.layout_of(1000, 8, THREADS) == PhiloxLayout(1000, 8, 1024)
    assert philox.layout_of(10**9, 8, THREADS).threads == THREADS
    assert [philox.vector_of(n, 8) for n in (16, 12, 6, 5)] == [8, 4, 2, 1]
    assert [philox.increment(n, THREADS) for n in (1, 4 * THREADS, 4 * THREADS + 1)] == [4, 4, 8]


def drawing(layout: PhiloxLayout, rows: int, lanes_of: str = "f32") -> Nest:
    """A nest over rows that stores the number of each element."""
    columns = layout.elements // rows
    seed, offset = (load(Access(0, "i64", (0, 0), k)) for k in (0, 1))
    place = op("add", op("mul", axis(0), const(columns, "i64")), axis(1))
    value = Expr("philox", "f32", (seed, offset, place), layout)
    return Nest((rows, columns), (Store(Access(1, lanes_of, (columns, 1)), value),))


def run_on_machine(nest: Nest, layout: PhiloxLayout, seed: int, offset: int) -> np.ndarray:
    kernel, how = print_nest(nest, HOPPER)
    assert not foreign([kernel])
    memory = Memory()
    out = np.zeros(layout.elements, np.float32)
    words = [memory.place(as_state(seed, offset).numpy()), memory.place(out)]
    launch(kernel, how, HOPPER, memory, words)
    return memory.read(words[1], out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numbers_of_kernels(layout: PhiloxLayout) -> None:
    """Vectors of one kernel have lanes of one call, of several, or one each."""
    rows = next(r for r in (6, 2, 1) if layout.elements % r == 0)
    for seed, offset in SEEDS[1:4]:
        got = run_on_machine(drawing(layout, rows), layout, seed, offset)
        assert np.array_equal(got, expected(seed, offset, layout))


def test_four_neighbours_share_a_call() -> None:
    """The multiplications of one call are most of the cost."""

    def multiplications(vector: int) -> int:
        layout = PhiloxLayout(1 << 18, vector, 1 << 16)
        kernel, how = print_nest(drawing(layout, 1), HOPPER)
        text = ptx([entry_of(kernel, how)], HOPPER)
        return text.count("mul.wide.u32")

    wide, apart = multiplications(8), multiplications(1)
    # a call has 20: one for a vector of four, and one for each of four single elements beside it
    assert wide < 6 * 20 and apart > wide + 2 * 20


def test_what_a_run_is() -> None:
    four = const(4, "i64")
    assert is_run(axis(1), 1, 4)
    assert is_run(op("add", op("mul", axis(0), const(768, "i64")), axis(1)), 1, 4)
    assert not is_run(op("add", op("mul", axis(0), const(6, "i64")), axis(1)), 1, 4)
    assert not is_run(op("mul", axis(1), four), 1, 4)
    assert not is_run(op("add", axis(1), const(2, "i64")), 1, 4)
    assert not is_run(op("floordiv", axis(1), four), 1, 4)


@pytest.mark.parametrize("gpu", [HOPPER, OLDER], ids=lambda gpu: gpu.name)
def test_every_chip_takes_it(gpu: Gpu) -> None:
    kernel, how = print_nest(drawing(PhiloxLayout(1 << 20, 8, 1 << 16), 4), gpu)
    text = ptx([entry_of(kernel, how)], gpu)
    assert ".local" not in text and "call" not in text


# ---- the pass ----


def dropouts(second_after: bool = False) -> Graph:
    """Two dropouts of one run; between them something else may draw."""
    with Graph("g", infer) as graph:
        x, y = (data(i, 64, 256) for i in (0, 1))
        a, kept = ge.NativeDropout(ge.Relu(x), p=0.1)
        if second_after:
            other = ge.NativeDropout(y, p=0.5)[0]  # an input, which may lie anywhere
            a = ge.Add(a, other)
        b, also_kept = ge.NativeDropout(ge.Neg(a), p=0.25)
        ge.NetOutput([ge.Add(b, y), kept, also_kept])
    draws = [n for n in graph.nodes if n.type == "NativeDropout"]
    for before, after in pairwise(draws):
        after.after(before)
    graph.output.after(draws[-1])
    return graph


def drawn_in_kernels(graph: Graph) -> Graph:
    draw_in_kernels(graph, GraphState(native=True, target=CudaTarget(0, HOPPER)))
    return graph


def types(graph: Graph) -> list[str]:
    return [n.type for n in graph.nodes if n.type not in ("Const", "Data", "NetOutput")]


def test_dropouts_are_drawn_where_they_are_read() -> None:
    graph = drawn_in_kernels(dropouts())
    found = types(graph)
    assert found.count("PhiloxState") == 1 and found.count("PhiloxMask") == 2
    assert "NativeDropout" not in found
    (state,) = (n for n in graph.nodes if n.type == "PhiloxState")
    assert state.attr("increment") == 8 and state in graph.output.control
    masks = [n for n in graph.nodes if n.type == "PhiloxMask"]
    assert [n.attr("first") for n in masks] == [0, 4]
    run = dry_run(graph, HOPPER)
    natives = [s for s in run.plan.steps if s.kind == "native"]
    assert sum("PhiloxMask" in {n.type for n in s.native.unit.nodes} for s in natives) >= 1
    assert len(natives) <= 2  # with what is before and after them


def test_each_draws_as_far_behind_the_state_as_it_stands() -> None:
    """Kernels, and torch's operators in their place."""
    layout = {"keep": 0.75, "vector": 4, "threads": 256}
    seed, offset = SEEDS[2]
    wanted = expected(seed, offset + 12, PhiloxLayout(3072, 4, 256)) < 0.75
    one = OneNode("PhiloxMask", as_state(seed, offset), [48, 64], first=12, **layout)
    kernel = row_of("PhiloxMask").kernel(Op(one.node))  # type: ignore[union-attr]
    for got in (one.run()[0], kernel(as_state(seed, offset))):
        assert np.array_equal(got.numpy().ravel(), wanted)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_of_a_generator_is_no_copy_from_the_host(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A rehearsal before a recording refuses such a copy, as a recording would."""
    offsets = [8]
    generator = SimpleNamespace(
        initial_seed=lambda: 2**64 - 3,
        get_offset=lambda: offsets[-1],
        set_offset=offsets.append,
    )
    monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with Graph("g", infer):
        node = ge.PhiloxState(increment=12, device=device).node
    with Rehearsal([]):
        made = row_of("PhiloxState").kernel(Op(node))()  # type: ignore[union-attr]
    assert made.shape == (2,) and offsets == [8, 20]
    if device == "cpu":
        assert torch.equal(made, as_state(2**64 - 3, 8))


def test_a_draw_in_between_keeps_its_place() -> None:
    graph = drawn_in_kernels(dropouts(second_after=True))
    found = types(graph)
    assert found.count("PhiloxState") == 2 and found.count("NativeDropout") == 1
    (kept,) = (n for n in graph.nodes if n.type == "NativeDropout")
    (before,) = kept.control
    assert before.type == "PhiloxState"
    last = next(n for n in graph.nodes if n.type == "PhiloxState" and n is not before)
    assert kept in last.control


def test_without_a_target_torch_draws() -> None:
    graph = dropouts()
    draw_in_kernels(graph, GraphState(native=True))
    assert types(graph).count("NativeDropout") == 2


def test_other_types_stay_with_torch() -> None:
    with Graph("g", infer) as graph:
        x = data(0, 64, dtype=DataType.DT_DOUBLE)
        ge.NetOutput(list(ge.NativeDropout(ge.Relu(x), p=0.1)))
    assert "NativeDropout" in types(drawn_in_kernels(graph))


# ---- on a GPU ----


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def generator_state() -> tuple[int, int]:
    generator = torch.cuda.default_generators[0]
    return generator.initial_seed(), generator.get_offset()


def fallbacks() -> dict[str, int]:
    return {k: n for k, n in counters["torchair"].items() if k.startswith("fallback")}


SIZES = (1, 2, 3, 8, 255, 4096, 4098, 65537, 270336, 270340, 1081348, 1572864, 9000001, 9000008)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@torch.no_grad()
def test_dropout_draws_what_eager_draws(fresh: None, dtype: torch.dtype, p: float) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, kept = torch.ops.aten.native_dropout(x * 2, p, True)
        second, also_kept = torch.ops.aten.native_dropout(first + 1, p, True)
        return second + x, first, kept, also_kept

    for size in SIZES:
        torch._dynamo.reset()
        call = compiled(fn)
        x = torch.randn(size, device="cuda").to(dtype)
        for seed in (3, 2**62 + 1):
            torch.manual_seed(seed)
            wanted, state = [], None
            for _ in range(2):
                wanted = fn(x)
            state = generator_state()
            torch.manual_seed(seed)
            for _ in range(2):
                got = call(x)
            assert generator_state() == state
            for g, w in zip(got[1:], wanted[1:], strict=True):
                assert torch.equal(g, w), (size, seed)
            torch.testing.assert_close(
                got[0], wanted[0], rtol=2e-2, atol=2e-2
            )  # rounded less often


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(8, 128, 768), (3, 5, 7), (16, 12, 64, 64)])
@torch.no_grad()
def test_other_draws_keep_their_place(fresh: None, shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = nn.functional.dropout(x.relu(), 0.2)
        b = torch.rand_like(x) + torch.randn_like(x)
        c = nn.functional.dropout(torch.softmax(a + b, -1), 0.3)
        return (
            a,
            b,
            c,
            nn.functional.dropout(x.transpose(0, 1).sin(), 0.4),
            torch.bernoulli(c.abs().clamp(max=1)),
        )

    x = torch.randn(shape, device="cuda")
    call = compiled(fn)
    torch.manual_seed(11)
    wanted, state = fn(x), generator_state()
    torch.manual_seed(11)
    got = call(x)
    assert generator_state() == state
    for g, w in zip(got, wanted, strict=True):
        assert torch.equal(g == 0, w == 0)
        torch.testing.assert_close(g, w)


@pytest.mark.cuda
def test_gradients_of_a_dropout(fresh: None) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x @ w, 0.1).square().sum()

    call = compiled(loss)
    for dtype in (torch.float32, torch.bfloat16):
        grads = []
        for fn in (loss, call):
            torch.manual_seed(5)
            x, w = (
                torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(2)
            )
            fn(x, w).backward()
            grads.append((x.grad, w.grad, generator_state()))
        assert grads[0][2] == grads[1][2]
        for a, b in zip(grads[0][:2], grads[1][:2], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("way", [compiled, captured], ids=["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("first", [False, True], ids=["computed", "argument"])
@torch.no_grad()
def test_replays_draw_what_eager_draws(fresh: None, way: Callable[..., Any], first: bool) -> None:
    """By our kernels and, of an argument that may lie anywhere, by torch's; without a fallback."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(x if first else x + 1, 0.5)
        return nn.functional.dropout(y.relu() * 2, 0.2) + x

    before = fallbacks()
    call = way(fn)
    torch.manual_seed(4)
    wanted = [fn(x) for x in (torch.ones(4096, 64, device="cuda") * k for k in range(1, 5))]
    state = generator_state()
    torch.manual_seed(4)
    got = [call(x) for x in (torch.ones(4096, 64, device="cuda") * k for k in range(1, 5))]
    assert generator_state() == state and fallbacks() == before
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.cuda
@torch.no_grad()
def test_dropout_in_a_recorded_graph(fresh: None) -> None:
    """Each replay draws what the call would have drawn there."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.dropout(x + 1, 0.5) * 2, 0.2)

    x, call = torch.ones(4096, 64, device="cuda"), compiled(fn)
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(x)
    torch.manual_seed(9)
    wanted = [fn(x) for _ in range(3)]
    state = generator_state()
    torch.manual_seed(9)
    for w in wanted:
        graph.replay()
        assert torch.equal(found, w)
    assert generator_state() == state
