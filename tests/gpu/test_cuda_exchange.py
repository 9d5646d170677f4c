"""Replays that read arguments and write results where the caller has them: calls over memory of the
host, what is recorded that way, and the same on a GPU."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import torchair
from capture_tools import compiled, equal, fresh, graphs
from cuda_graphs import data
from host_memory import ACCELERATOR, over_address
from tolerance import assert_close, double_copy, tensors, to_double
from torchair import ge
from torchair.capture import base, exchange
from torchair.capture.accelerator import Accelerator
from torchair.capture.cuda import DeviceSubstrate
from torchair.capture.entered import ReplayEntry
from torchair.capture.exchange import ExchangedRecording, Placeholders, Recorded
from torchair.capture.native_replay import ALIGNED
from torchair.capture.rehearsal import EngineWalk
from torchair.capture.updates import Updates
from torchair.codegen.cuda.driver import DriverError
from torchair.codegen.cuda.graphs import ExecutableGraph
from torchair.errors import InputError
from torchair.ge.graph import Graph
from torchair.operators import infer

# ---- calls, over memory of the host


class Run:
    """In the place of a graph: y = 2 x + u, z = x + 1, at the addresses that it was given."""

    def __init__(self, count: int, readers: int = 1) -> None:
        self.at = [0] * 3
        self.count, self._readers = count, readers
        self.exchanged: list[list[int]] = []
        self.refuses = False
        self.update = torch.zeros(count)

    def readers(self, piece: int) -> int:
        return self._readers

    def exchange(self, addresses: Sequence[tuple[int, int]]) -> None:
        self.exchanged.append([piece for piece, _ in addresses])
        for piece, address in addresses:
            self.at[piece] = address
            if self.refuses:
                raise DriverError("refused")

    def _tensor(self, piece: int) -> torch.Tensor:
        memory = (ctypes.c_float * self.count).from_address(self.at[piece])
        return torch.frombuffer(memory, dtype=torch.float32)

    def launch(self, stream: int) -> None:
        x = self._tensor(0).clone()
        self.update.add_(1)
        self._tensor(1).copy_(2 * x + self.update)
        self._tensor(2).copy_(x + 1)


class Pool:
    """In the place of a `PoolOwner`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}

    def input_like(self, position: int, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.inputs[position] = made
        return made

    def result_at(self, address: int, size: int) -> torch.UntypedStorage:
        return over_address(address, self.device, size)


ORDER: Any = SimpleNamespace(enter=lambda: 0, on_device=lambda launch, stream: launch(stream))
ROWS, COLUMNS = 64, 4
COUNT = ROWS * COLUMNS


def aligned(shift: int = 0) -> torch.Tensor:
    """A tensor of the size of the argument that begins at a multiple of `ALIGNED`, or beside."""
    memory = torch.randn(COUNT + 2 * ALIGNED)
    begin = (-memory.data_ptr() % ALIGNED) // 4 + shift
    return memory[begin : begin + COUNT].view(ROWS, COLUMNS)


class Calls:
    """A recording with one argument, an update, and two results of which the first has a view."""

    def __init__(self, updated: torch.Tensor | None = None, **options: Any) -> None:
        self.run = Run(COUNT, **options)
        size = 4 * COUNT
        placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [size] * 3)
        places = [(placeholders.pieces(0)[k].second, size) for k in (1, 2)]
        shape = (ROWS, COLUMNS)
        sources = [
            base.Pooled(0, torch.float32, shape, (COLUMNS, 1)),
            base.Pooled(0, torch.float32, (COLUMNS,), (1,), offset=COLUMNS),
            base.Pooled(1, torch.float32, shape, (COLUMNS, 1)),
        ]
        self.placeholders = placeholders
        found: Any = SimpleNamespace(sources=sources, places=places, constants=[], storages=[])
        made: Any = Recorded(None, self.run, found, placeholders.sizes, {0: 1, 1: 2})  # type: ignore[arg-type]
        mutated = () if updated is None else (1,)
        args = [aligned(), *([] if updated is None else [updated])]
        kinds = base.ArgumentKinds((), (0,), mutated)
        request = base.ToCapture("graph_1", lambda *a: (), args, kinds, base.CaptureOptions())
        self.recording = ExchangedRecording(
            made,
            Pool(),
            ORDER,
            request,
            [0],
            [],
            self._again,  # type: ignore[arg-type]
        )
        self.again = 0
        self.updates = 0

    def _again(self, args: Sequence[Any]) -> Any:
        self.again += 1
        raise InputError("captured with copies")

    def __call__(self, x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
        self.updates += 1
        wanted = 2 * x + self.updates
        y, row, z = self.recording.call([x, *more], True)
        equal((y, row, z), (wanted, wanted[1], x + 1))
        assert row.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        return y, row, z


def test_results_belong_to_the_caller() -> None:
    calls, kept = Calls(), []
    for _ in range(4):
        x = aligned()
        results = calls(x)
        kept.append((results, [r.clone() for r in results]))
    for results, before in kept:
        equal(list(results), before)
    assert calls.recording.private == 0


def test_arguments_that_stay_are_not_exchanged() -> None:
    calls, x, y = Calls(), aligned(), aligned()
    for given in (x, x, y, y, x):
        calls(given)
    assert [0 in pieces for pieces in calls.run.exchanged].count(True) == 3


@pytest.mark.parametrize(
    "odd",
    [
        lambda: aligned(shift=1),
        lambda: aligned().t().contiguous().t(),
        lambda: aligned()[:, :1].expand(ROWS, COLUMNS),
    ],
)
def test_odd_arguments_are_copied_and_others_again_not(odd: Callable[[], torch.Tensor]) -> None:
    calls = Calls()
    calls(aligned())
    for _ in range(2):
        x = odd()
        calls(x)
        x.clone().add_(1)
    assert calls.recording.private == 1
    x = aligned()
    calls(x)
    assert calls.run.at[0] == x.data_ptr()


def test_what_a_graph_updates_is_read_as_it_was() -> None:
    """An argument that overlaps what is updated is copied before."""
    memory = aligned()
    calls = Calls(updated=memory)
    calls(aligned(), memory)
    assert not calls.recording.private
    calls(memory.view(ROWS, COLUMNS), memory)
    assert calls.recording.private == 1


def test_what_many_kernels_read_is_copied_if_it_is_small() -> None:
    few, many = Calls(readers=2), Calls(readers=50)
    few(aligned())
    many(aligned())
    assert (few.recording.private, many.recording.private) == (0, 1)


def test_other_types_and_sizes_are_errors() -> None:
    calls = Calls()
    for wrong in (aligned().double(), aligned()[1:]):
        with pytest.raises(InputError, match="does not fit"):
            calls.recording.call([wrong], True)


def test_a_graph_is_captured_with_copies_if_the_driver_refuses() -> None:
    calls, first = Calls(), aligned()
    calls(first)
    calls.run.refuses = True
    with pytest.raises(InputError, match="captured with copies"):
        calls.recording.call([aligned()], True)
    assert calls.again == 1 and not calls.recording.outputs.made


def test_an_exchange_that_ended_half_way_is_done_again() -> None:
    """A call like the one before the failure must not find what the failure left."""
    calls, x = Calls(), aligned()
    calls(x)
    calls.run.refuses = True
    with pytest.raises(InputError, match="captured with copies"):
        calls.recording.call([aligned()], True)
    calls.run.refuses = False
    calls(x)


def test_a_call_that_failed_is_not_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have copied, or not, is not what the next call copies."""
    calls, x = Calls(), aligned(shift=1)
    calls(x)
    assert calls.recording.private == 1

    def fail(wanted: Sequence[tuple[int, int]]) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(calls.recording, "_exchange", fail)
        calls.recording.call([aligned()], True)
    x.add_(1)
    calls(x)


def test_a_second_replay_has_results_of_its_own() -> None:
    calls, x = Calls(), aligned()
    first = calls(x)[0]
    before = first.clone()
    calls.recording.replay()
    equal(first, before)
    equal(calls.recording.results([x], True)[0], 2 * x + 2)


def substrate(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> DeviceSubstrate:
    """Captures on a device without one: its generator is this one."""
    here = nullcontext()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    module = SimpleNamespace(
        current_stream=lambda *device: stream,
        stream=lambda other: here,
        Stream=lambda: stream,
        device=lambda device: here,
        get_rng_state=lambda device: generator.get_state(),
    )
    known: Any = SimpleNamespace(
        kind="host", module=module, function=lambda name: None, new_open_graph=object
    )
    monkeypatch.setattr(Accelerator, "of", lambda kind: known)
    monkeypatch.setattr("torchair.capture.cuda.capture_stream", lambda module, device: stream)
    return DeviceSubstrate(torch.device("cpu", 0), None, Updates())


class Walk(EngineWalk):
    """A graph of the engine with these results; a run of it is a function."""

    def __init__(self, make: Callable[[], Sequence[Any]], run: Callable[[], Any]) -> None:
        with Graph("g", infer) as graph:
            ge.NetOutput(list(make()))
        super().__init__(SimpleNamespace(graph=graph, updated=[]))  # type: ignore[arg-type]
        self._run = run

    def __call__(self, args: Sequence[Any], place: Any = None) -> Any:
        return self._run()


def test_torch_replays_graphs_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone advances the generator of a graph with each replay. Where it does not show what it
    launches, nothing is exchanged in such a graph."""
    generator = torch.Generator().manual_seed(3)
    options, x = base.CaptureOptions(), lambda: data(0, 8)
    plain = Walk(lambda: [ge.Relu(x())], lambda: None)
    dropout = Walk(lambda: ge.NativeDropout(ge.Relu(x()), p=0.5), lambda: None)
    # of an operator of another library only its run tells
    foreign = Walk(lambda: [ge.Relu(x())], lambda: torch.rand(1, generator=generator))
    for walk, draws in ((plain, False), (dropout, True), (foreign, True)):
        captures = substrate(monkeypatch, generator)
        request = base.ToCapture("g", lambda *a: (), [], base.ArgumentKinds(), options)
        captures._rehearse(walk, request)
        assert captures._draws(walk) == draws
        for shown in (False, True):
            captures._accelerator.shows_executable = shown  # type: ignore[misc]
            assert captures._can_exchange(walk, options) == (shown or not draws)


def test_arguments_of_the_first_call_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another capture, where the driver refuses an exchange, has arguments of its own."""
    captures = substrate(monkeypatch, torch.Generator())
    monkeypatch.setattr(exchange, "recorded", lambda *given: None)
    monkeypatch.setattr(exchange, "ExchangedRecording", lambda *given: given[-2])
    monkeypatch.setattr(captures, "_memory_for", lambda options: None)
    monkeypatch.setattr(captures, "_record_once", lambda walk, request: request)
    x = torch.ones(4)
    kinds = base.ArgumentKinds(users=(0,))
    request = base.ToCapture("g", lambda *a: (), [x], kinds, base.CaptureOptions())
    walk, kept = Walk(lambda: [data(0, 8)], lambda: None), weakref.ref(x)
    again: Any = captures._record_twice(walk, request, [0])
    del x, request
    assert kept() is None
    assert again([5]).args == [5] and again([5]).kinds == kinds


def test_arguments_that_no_kernel_shows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are read where they are."""
    captures, asked = substrate(monkeypatch, torch.Generator()), list[int]()

    def recorded(record: Any, placeholders: Placeholders, arguments: int, draws: bool) -> None:
        asked.append(arguments)
        if arguments == 3:
            raise exchange.UnseenPieces([1])

    monkeypatch.setattr(exchange, "recorded", recorded)
    monkeypatch.setattr(exchange, "ExchangedRecording", lambda *given: given)
    memory = Pool()
    monkeypatch.setattr(captures, "_memory_for", lambda options: memory)
    args = [torch.ones(4), torch.ones(3), torch.ones(2)]
    kinds = base.ArgumentKinds(users=(0, 1, 2))
    request = base.ToCapture("g", lambda *a: (), args, kinds, base.CaptureOptions())
    monkeypatch.setattr(captures, "_device", args[0].device)
    walk = Walk(lambda: [data(0, 8)], lambda: None)
    made: Any = captures._record_exchanging(walk, request)
    assert asked == [3, 2]
    *_, moving, (feed,), _, faults = made
    assert faults is None, "an entry would not copy them"
    assert moving == [0, 2]
    targets = [memory.inputs[1]]
    feed([torch.zeros(4), torch.full((3,), 7.0), torch.zeros(2)])
    equal(targets, [torch.full((3,), 7.0)])


def test_results_that_no_kernel_shows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = substrate(monkeypatch, torch.Generator())

    def recorded(record: Any, placeholders: Placeholders, arguments: int, draws: bool) -> None:
        raise exchange.UnseenPieces([0, 1])

    monkeypatch.setattr(exchange, "recorded", recorded)
    monkeypatch.setattr(captures, "_memory_for", lambda options: Pool())
    x = torch.ones(4)
    monkeypatch.setattr(captures, "_device", x.device)
    kinds = base.ArgumentKinds(users=(0,))
    request = base.ToCapture("g", lambda *a: (), [x], kinds, base.CaptureOptions())
    with pytest.raises(DriverError, match="piece 0"):
        captures._record_exchanging(Walk(lambda: [data(0, 8)], lambda: None), request)


# ---- on a GPU


BF16 = torch.bfloat16


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def autotuned(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend=torchair.get_npu_backend(), dynamic=False)


MODES = {"max-autotune": autotuned, "reduce-overhead": compiled}


class Layers(nn.Module):
    """A product of a library and kernels of our own."""

    def __init__(self, size: int = 256, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, device="cuda", dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)) * 2


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    return y, y.view(-1), y[3:5], x, x[1:], (x + 1)[2:]


def moved_about(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[i] * 2, torch.cat([x, x * 2]), x.cumsum(0), x.clone(), torch.zeros_like(x)


def sorted_out(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sort(-1)[0], torch.linalg.norm(x), x.softmax(0), x.std(1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def judge(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], got: Any) -> None:
    """Results are as near to float64 as those of eager, and laid out like them."""
    eager = fn(*args)
    exact = double_copy(fn) if isinstance(fn, nn.Module) else fn
    assert_close(got, eager, exact(*to_double(args)))
    for mine, theirs in zip(tensors(got), tensors(eager), strict=True):
        assert mine.stride() == theirs.stride()


Case = tuple[Callable[[], Callable[..., Any]], Callable[[int], tuple[torch.Tensor, ...]]]
CASES: dict[str, Case] = {
    "a product": (Layers, lambda k: (on_gpu(64, 256),)),
    "a large product": (lambda: Layers(1024, BF16), lambda k: (on_gpu(2048, 1024, dtype=BF16),)),
    "begins anywhere": (Layers, lambda k: (on_gpu(66 * 256)[k : k + 64 * 256].view(64, 256),)),
    "other strides": (
        Layers,
        lambda k: (on_gpu(64, 256) if k % 3 else on_gpu(256, 64).t(),),
    ),
    "views": (lambda: views, lambda k: (on_gpu(64, 256),)),
    "indices and copies": (
        lambda: moved_about,
        lambda k: (on_gpu(512, 64), torch.randint(0, 512, (300,), device="cuda")),
    ),
    "kernels of torch": (lambda: sorted_out, lambda k: (on_gpu(64, 256),)),
    "attention": (
        lambda: attention,
        lambda k: tuple(on_gpu(2, 4, 256, 64, dtype=BF16) for _ in range(3)),
    ),
    "a convolution": (
        lambda: (
            nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            .cuda()
            .eval()
        ),
        lambda k: (on_gpu(4, 3, 33, 33),),
    ),
    "one tensor twice": (
        lambda: lambda x, y: x @ y.t() + y.sum(),
        lambda k: (x := on_gpu(64, 256), x if k % 2 else on_gpu(64, 256)),
    ),
    "no elements": (lambda: lambda x, y: (x * 2, y + 1), lambda k: (on_gpu(0, 4), on_gpu(3, 4))),
    "blocks that wait": (lambda: lambda x: x.softmax(0) + x.sum(0), lambda k: (on_gpu(8192, 640),)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_results_stay_whatever_is_called_later(name: str, mode: str) -> None:
    fresh()
    make, inputs = CASES[name]
    fn = make()
    fast, kept = MODES[mode](fn), []
    for k in range(5):
        args = inputs(k)
        got = fast(*args)
        kept.append((args, got))
        if k % 2:
            torch.cuda.empty_cache()
    for args, got in kept:
        judge(fn, args, got)


def copies(call: Callable[[], Any]) -> list[str]:
    """Copies that the device makes in calls after the first ones."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages() if e.self_device_time_total]
    assert names, "the profiler saw nothing"
    return [n for n in names if "Memcpy" in n or "copy" in n.lower()]


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_nothing_is_copied_around_a_product(mode: str) -> None:
    fresh()
    model = Layers(1024, BF16)
    xs = [on_gpu(2048, 1024, dtype=BF16) for _ in range(3)]
    fast = MODES[mode](model)
    turn = itertools.count()
    assert not copies(lambda: fast(xs[next(turn) % 3]))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_result_can_be_the_next_argument(mode: str) -> None:
    fresh()
    model = Layers()
    fast = MODES[mode](model)
    x = y = on_gpu(64, 256)
    for _ in range(6):
        x, y = fast(x), model(y)
        judge(model, (y,), fast(y))
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_an_argument_may_overlap_what_is_updated(mode: str) -> None:
    fresh()

    def fn(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        state.add_(1.0)
        return y + state.sum()

    state = on_gpu(64, 64)
    other, fast = state.clone(), MODES[mode](fn)
    for _ in range(4):
        x = on_gpu(64, 64)
        torch.testing.assert_close(fast(state, x), fn(other, x))
        torch.testing.assert_close(state, other)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_threads_on_streams_of_their_own_get_their_results(mode: str) -> None:
    fresh()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    fast = MODES[mode](model)
    fast(on_gpu(32, 256))
    torch.cuda.synchronize()
    wrong: list[float] = []

    def work() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                x = on_gpu(32, 256)
                error = (fast(x) - model(x)).abs().max().item()
                if error > 1e-3:
                    wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
@torch.no_grad()
def test_a_driver_that_refuses_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    model = Layers()
    fast = autotuned(model)
    x = on_gpu(64, 256)
    fast(x)

    def refuse(*args: Any) -> None:
        raise DriverError("refused")

    monkeypatch.setattr(ExecutableGraph, "exchange", refuse)
    before = counters["torchair"]["fallback_replay_copies"]
    kept = [(y, fast(y)) for y in (on_gpu(64, 256) for _ in range(3))]
    for y, got in kept:
        judge(model, (y,), got)
    assert counters["torchair"]["fallback_replay_copies"] == before + 1


@pytest.mark.cuda
def test_training_is_replayed_and_saves_what_the_backward_reads() -> None:
    """Forward results of several steps live at once; gradients are those of eager."""
    fresh()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)
    ).cuda()
    other = copy.deepcopy(model)
    fast = compiled(model)
    for _ in range(3):
        xs = [on_gpu(32, 64).requires_grad_() for _ in range(2)]
        losses = [fast(x).square().mean() for x in xs]  # two forwards, then two backwards
        for loss in losses:
            loss.backward()
        ys = [x.detach().clone().requires_grad_() for x in xs]
        for y in ys:
            other(y).square().mean().backward()
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-3)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-3)


class Attends(nn.Module):
    """Attention with a bias, which torch computes in training, between two products."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(64, 192), nn.Linear(64, 64), rate

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.first(x).view(rows, length, 3, 2, 32).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, attn_mask=bias, dropout_p=self.rate)
        return self.last(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.cuda
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_in_training_is_replayed_where_its_arguments_are(rate: float) -> None:
    """Without dropout it draws nothing, and its gradient reads nothing of the random state; with
    dropout torch launches the graph."""
    fresh()
    torch.manual_seed(0)
    model = Attends(rate).cuda()
    eager, fast = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        x, bias = on_gpu(4, 24, 64), on_gpu(4, 2, 24, 24)
        fast(x, bias).square().mean().backward()
        eager(x, bias).square().mean().backward()
    found = [meta.recording for graph in graphs() for meta in graph.captured.values()]
    assert len(found) == 2
    assert all(isinstance(r, ExchangedRecording) and r._instead is None for r in found)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.norm() > 0
        if not rate:
            torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-3)


def served() -> int:
    """Calls that entries have served."""
    return sum(o.calls for o in gc.get_objects() if type(o) is ReplayEntry)


def without_dynamo(model: nn.Module) -> Callable[..., Any]:
    return torchair.compile(model, on_gpu(64, 256))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [*MODES, "torchair.compile"])
@torch.no_grad()
def test_calls_that_are_alike_are_one_native_call(mode: str) -> None:
    """At other addresses, on another stream, from other threads, and beside odd ones."""
    fresh()
    model = Layers()
    fast = MODES[mode](model) if mode in MODES else without_dynamo(model)
    for _ in range(8):
        fast(on_gpu(64, 256))
    before, kept = served(), list[Any]()
    for _ in range(10):
        x = on_gpu(64, 256)
        kept.append((x, fast(x)))
    assert served() == before + 10
    odd = on_gpu(65 * 256)[1 : 1 + 64 * 256].view(64, 256)
    kept.append((odd, fast(odd)))
    with torch.cuda.stream(torch.cuda.Stream()):
        x = on_gpu(64, 256)
        kept += [(x, fast(x)) for _ in range(3)]
        torch.cuda.current_stream().synchronize()
    kept += [(x, fast(x)) for x, _ in kept[:3]]
    for x, got in kept:
        judge(model, (x,), got)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_caller_that_records_gets_operators_where_a_graph_is_there_already(mode: str) -> None:
    fresh()
    fast = MODES[mode](lambda x: x * 2 + 1)
    x, side = on_gpu(64, 256), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the stream of the recording has been replayed on
        for _ in range(8):
            fast(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = fast(x)
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        equal(y, torch.full_like(x, 2 * value + 1))
        equal(fast(x), y)
