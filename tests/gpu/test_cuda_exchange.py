"""Replays that read arguments and write results where the caller has them: nodes of recorded graphs
through a driver of this file, calls over memory of the host, and the same on a GPU."""

from __future__ import annotations

import copy
import ctypes
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
from capture_tools import compiled, equal, fresh
from cuda_graphs import data
from tolerance import assert_close, double_copy, tensors, to_double
from torchair import ge
from torchair.capture import base, exchange
from torchair.capture.cuda import Accelerator, DeviceSubstrate
from torchair.capture.exchange import ALIGNED, ExchangedRecording, Recorded, StandIns
from torchair.capture.rehearsal import EngineWalk
from torchair.capture.updates import Updates
from torchair.codegen.cuda import graphs
from torchair.codegen.cuda.driver import DriverError
from torchair.codegen.cuda.graphs import ExecutableGraph, Node, Patch, Piece, moved, nodes_of
from torchair.errors import InputError
from torchair.ge.graph import Graph
from torchair.operators import infer

A, B = Piece(0x1000, 0x51000, 64), Piece(0x2000, 0x62000, 32)


def kernel(*words: int, launch: int = 7) -> Node:
    return Node(1, 0, (launch,), list(words))


def test_addresses_are_words_that_move_as_a_piece_does() -> None:
    first = [kernel(0x1010, 5, 0x9999), kernel(0x2000, 0x1000)]
    second = [kernel(0x51010, 5, 0x9999), kernel(0x62000, 0x51000)]
    assert moved(second, [first], [A, B]) == [
        Patch(0, 0, 0, 0x10), Patch(1, 0, 1, 0), Patch(1, 1, 0, 0),
    ]  # fmt: skip


def test_the_end_of_a_piece_is_its_own_unless_another_begins_there() -> None:
    low, high = Piece(0x1000, 0x5000, 64), Piece(0x1040, 0x5040, 64)
    assert moved([kernel(0x5040)], [[kernel(0x1040)]], [low]) == [Patch(0, 0, 0, 64)]
    assert moved([kernel(0x5040)], [[kernel(0x1040)]], [low, high]) == [Patch(0, 0, 1, 0)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([kernel(0x1000)], [kernel(0x51008)]),  # another place of the piece
        ([kernel(0x3000)], [kernel(0x53000)]),  # memory of something else
        ([kernel(0x1000 >> 4)], [kernel(0x51000 >> 4)]),  # not the address itself
        ([kernel(1)], [kernel(1, launch=8)]),  # another kernel
        ([kernel(1)], [kernel(1), kernel(1)]),
        ([Node(1, 1, (), [0x1000])], [Node(1, 0, (), [0x51000])]),  # a copy, and a kernel
    ],
)
def test_recordings_that_differ_otherwise_are_not_understood(
    first: list[Node], second: list[Node]
) -> None:
    with pytest.raises(DriverError):
        moved(second, [first], [A, B])


def test_halves_of_addresses_are_addresses() -> None:
    """What the stack held in a gap beside a number of 32 bits."""
    a, b = Piece(0x7F0000001000, 0x7F0000051000, 64), Piece(0x7F0000002000, 0x7F0000062000, 64)
    first = [kernel(0x3F80000000001008, 0x2000_00000005)]
    second = [kernel(0x3F80000000051008, 0x62000_00000005)]
    assert moved(second, [first], [a, b]) == [Patch(0, 0, 0, 8, "low"), Patch(0, 1, 1, 0, "high")]


def test_an_address_in_halves_of_two_words_is_not_understood() -> None:
    """One that begins at a multiple of four bytes: its upper half would stay what it was."""
    a = Piece(0x7F0000001000, 0x7F0000051000, 64)
    first, second = ([kernel((at & 0xFFFFFFFF) << 32 | 5, at >> 32)] for at in (a.first, a.second))
    with pytest.raises(DriverError, match="no known reason"):
        moved(second, [first], [a])


def test_what_varies_by_itself_is_left_as_it_was_recorded() -> None:
    """Between recordings with the same pieces at the same places."""
    first, second = [kernel(0x1000, 0xAAAA)], [kernel(0x51000, 0xBBBB)]
    varying, steady = [kernel(0x51000, 0xCCCC)], [kernel(0x51000, 0xBBBB)]
    assert moved(second, [first], [A], [varying]) == [Patch(0, 0, 0, 0)]
    assert moved(second, [first], [A], [steady, varying]) == [Patch(0, 0, 0, 0)]
    for alike in ([], [steady]):
        with pytest.raises(DriverError, match="no known reason"):
            moved(second, [first], [A], alike)


def test_what_stays_although_pieces_move_is_no_address() -> None:
    """Memory of a pool that comes in turns."""
    first, second, third = (
        [kernel(a, 0x9000 + b)] for a, b in ((0x1000, 0), (0x51000, 1), (0x1000, 1))
    )
    assert moved(second, [first, third], [A]) == [Patch(0, 0, 0, 0)]


def test_recordings_that_launch_otherwise_do_not_count() -> None:
    first, other = [kernel(0x1000)], [kernel(0x1000), kernel(7)]
    assert moved([kernel(0x51000)], [other, first], [A], [other]) == [Patch(0, 0, 0, 0)]
    with pytest.raises(DriverError, match="no two recordings"):
        moved([kernel(0x51000)], [other], [A])


class FakeDriver:
    """A driver with one graph: kernels as lists of arguments, which are bytes."""

    def __init__(self, kernels: Sequence[Sequence[bytes]]) -> None:
        self.kernels = [list(k) for k in kernels]
        self.kinds = [0] * len(kernels)
        self.set: list[tuple[int, list[bytes]]] = []
        self.copy = [0] * 25
        self.fill = [0] * 5
        self.block = False  # whether arguments are given as one block
        self.refuses = False
        self.done: list[str] = []
        self._kept: list[Any] = []

    def cuGraphGetNodes(self, graph: Any, handles: Any, count: Any) -> int:
        count._obj.value = len(self.kinds)
        if handles is not None:
            handles[:] = [k + 1 for k in range(len(self.kinds))]
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value - 1]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        arguments = [ctypes.create_string_buffer(a, len(a)) for a in self.kernels[node.value - 1]]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._kept += [arguments, pointers]
        params._obj.function = node.value
        if self.block:
            (only,) = arguments
            size = ctypes.c_size_t(len(only))
            given = (2, ctypes.addressof(size), 1, ctypes.addressof(only), None)
            extra = (ctypes.c_void_p * 5)(*given)
            self._kept += [size, extra]
            params._obj.extra = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        else:
            params._obj.arguments = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        sizes = [len(a) for a in self.kernels[function.value - 1]]
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, raw: Any) -> int:
        raw[:] = self.copy
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, raw: Any) -> int:
        raw[:] = self.fill
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, run: Any, node: Any, raw: Any, context: Any) -> int:
        self.set.append((node.value - 1, list(raw._obj)))
        return 0

    cuGraphExecMemsetNodeSetParams = cuGraphExecMemcpyNodeSetParams

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        made._obj.value = 99
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, run: Any, node: Any, params: Any) -> int:
        p, sizes = params._obj, [len(a) for a in self.kernels[node.value - 1]]
        if self.block:
            assert not p.arguments and list(p.extra[0:5:2]) == [1, 2, None]
            assert ctypes.c_size_t.from_address(p.extra[3]).value == sizes[0]
            read = [ctypes.string_at(p.extra[1], sizes[0])]
        else:
            read = [ctypes.string_at(p.arguments[k], size) for k, size in enumerate(sizes)]
        self.set.append((node.value - 1, read))
        return 400 if self.refuses else 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"invalid resource handle"
        return 0

    def cuGraphLaunch(self, run: Any, stream: Any) -> int:
        return 0

    def cuGraphExecDestroy(self, run: Any) -> int:
        self.done.append("destroy")
        return 0

    def enter(self) -> None:
        self.done.append("enter")


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    def use(*kernels: Sequence[bytes]) -> FakeDriver:
        made = FakeDriver(kernels)
        monkeypatch.setattr(graphs, "driver", lambda: made)
        monkeypatch.setattr(graphs, "enter_context", made.enter)
        monkeypatch.setattr("torchair.codegen.cuda.driver._driver", lambda: made)
        return made

    return use


def test_only_kernels_that_read_what_has_moved_get_new_arguments(driver: Any) -> None:
    """A structure with two addresses, an odd argument, a kernel that reads nothing of it."""
    structure = word(0x1000) + word(3) + word(0x2008)
    made = driver([structure, b"\x05\x00\x00"], [word(1)], [word(0x2000)])
    nodes = nodes_of(1)
    run = ExecutableGraph(
        1, nodes, [Patch(0, 0, 0, 0), Patch(0, 2, 1, 8), Patch(2, 0, 1, 0)], pieces=2
    )
    assert [run.readers(k) for k in range(2)] == [1, 2]
    run.exchange([(0, 0x7000)])
    run.exchange([(0, 0x8000), (1, 0x9000)])
    assert made.set == [
        (0, [word(0x7000) + word(3) + word(0x2008), b"\x05\x00\x00"]),
        (0, [word(0x8000) + word(3) + word(0x9008), b"\x05\x00\x00"]),
        (2, [word(0x9000)]),
    ]


def test_arguments_in_one_block_are_given_as_one(driver: Any) -> None:
    made = driver([word(5) + word(0x1000) + b"\x01\x02"])
    made.block = True
    nodes = nodes_of(1)
    assert nodes[0].words[:3] == [5, 0x1000, 0x201]
    run = ExecutableGraph(1, nodes, [Patch(0, 1, 0, 0), Patch(0, 0, 0, 4, "high")], pieces=1)
    run.exchange([(0, 0x12_0000_7000)])
    assert made.set == [(0, [word(5 | 0x7004 << 32) + word(0x12_0000_7000) + b"\x01\x02"])]


def test_copies_and_fills_get_new_addresses(driver: Any) -> None:
    made = driver([], [])
    made.kinds = [1, 2]
    made.copy[4], made.copy[15], made.copy[6] = 2, 2, 0x1000
    made.fill[0] = 0x1000
    run = ExecutableGraph(1, nodes_of(1), [Patch(0, 6, 0, 0), Patch(1, 0, 0, 0)], pieces=1)
    run.exchange([(0, 0x7000)])
    (_, copy), (_, fill) = made.set
    assert (copy[6], copy[4], fill) == (0x7000, 2, [0x7000, 0, 0, 0, 0])


def test_a_driver_that_refuses_is_an_error(driver: Any) -> None:
    made = driver([word(0x1000)])
    run = ExecutableGraph(1, nodes_of(1), [Patch(0, 0, 0, 0)], pieces=1)
    made.refuses = True
    with pytest.raises(DriverError, match="invalid resource handle"):
        run.exchange([(0, 0x7000)])


def test_any_thread_may_destroy_a_graph(driver: Any) -> None:
    """It needs a context of the driver then, which most of the driver's functions expect."""
    made = driver([word(1)])
    run = ExecutableGraph(1, nodes_of(1), [], pieces=0)
    assert not made.done
    del run
    assert made.done == ["enter", "destroy"]


@pytest.mark.parametrize(("kind", "understood"), [(5, True), (3, False), (10, False)])
def test_nodes_that_may_hold_addresses_elsewhere_are_refused(
    driver: Any, kind: int, understood: bool
) -> None:
    """An empty node, a call on the host, an allocation."""
    made = driver([word(1)])
    made.kinds = [kind]
    if understood:
        assert len(nodes_of(1)) == 1
        return
    with pytest.raises(DriverError, match="kind"):
        nodes_of(1)


def test_copies_from_the_host_are_refused(driver: Any) -> None:
    """They may bring addresses that no argument shows."""
    made = driver([word(1)])
    made.kinds, made.copy[4], made.copy[15] = [1], 2, 2 | 0xABC << 32
    assert len(nodes_of(1)) == 1
    made.copy[4] = 1
    with pytest.raises(DriverError, match="host"):
        nodes_of(1)


# ---- calls, over memory of the host


def over_address(address: int, device: torch.device, size: int) -> torch.UntypedStorage:
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


ACCELERATOR: Any = SimpleNamespace(storage_at=over_address)


def test_stand_ins_are_apart_in_both_places() -> None:
    stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [100, 0, 512, 7])
    here, there = stand_ins.pieces(0), stand_ins.pieces(1)
    for a, b in zip(here, there, strict=True):
        assert (a.first, a.second) == (b.second, b.first) and a.first != a.second
    spans = sorted((p.first, p.first + p.size) for p in here)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(p.first % ALIGNED == 0 and p.second % ALIGNED == 0 for p in here)
    assert stand_ins.storage(2, 1).data_ptr() == there[2].second
    assert stand_ins.number_at(there[3].second, 1) == 3
    assert stand_ins.number_at(there[3].second, 0) is None


def test_distances_between_pieces_are_no_constants() -> None:
    """A kernel that is given one would go on from a moved piece by the old distance."""
    stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [4096] * 3)
    for one, other in itertools.permutations(range(3), 2):
        before, after = (
            [kernel(at[one].second, at[other].second, (at[other].second - at[one].second) % 2**64)]
            for at in map(stand_ins.pieces, (0, 1))
        )
        with pytest.raises(DriverError, match="in word 2"):
            moved(after, [before], stand_ins.pieces(1))


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

    def input_like(self, position: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)

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
        stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [size] * 3)
        places = [(stand_ins.pieces(0)[k].second, size) for k in (1, 2)]
        shape = (ROWS, COLUMNS)
        sources = [
            base.Pooled(0, torch.float32, shape, (COLUMNS, 1)),
            base.Pooled(0, torch.float32, (COLUMNS,), (1,), offset=COLUMNS),
            base.Pooled(1, torch.float32, shape, (COLUMNS, 1)),
        ]
        self.stand_ins = stand_ins
        found: Any = SimpleNamespace(sources=sources, places=places, constants=[], storages=[])
        made: Any = Recorded(None, self.run, found, stand_ins.sizes, {0: 1, 1: 2})  # type: ignore[arg-type]
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
    calls = Calls()
    calls(aligned())
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
    """It alone advances the generator of a graph with each replay."""
    generator = torch.Generator().manual_seed(3)
    options, x = base.CaptureOptions(), lambda: data(0, 8)
    plain = Walk(lambda: [ge.Relu(x())], lambda: None)
    dropout = Walk(lambda: ge.NativeDropout(ge.Relu(x()), p=0.5), lambda: None)
    # of an operator of another library only its run tells
    foreign = Walk(lambda: [ge.Relu(x())], lambda: torch.rand(1, generator=generator))
    for walk, exchanges in ((plain, True), (dropout, False), (foreign, False)):
        captures = substrate(monkeypatch, generator)
        request = base.ToCapture("g", lambda *a: (), [], base.ArgumentKinds(), options)
        captures._rehearse(walk, request)
        assert captures._can_exchange(walk, options) == exchanges


def test_arguments_of_the_first_call_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another capture, where the driver refuses an exchange, has arguments of its own."""
    captures = substrate(monkeypatch, torch.Generator())
    monkeypatch.setattr(exchange, "recorded", lambda *given: None)
    monkeypatch.setattr(exchange, "ExchangedRecording", lambda *given: given[-1])
    monkeypatch.setattr(captures, "_memory_for", lambda options: None)
    monkeypatch.setattr(captures, "_record_once", lambda walk, request: request)
    x = torch.ones(4)
    kinds = base.ArgumentKinds(users=(0,))
    request = base.ToCapture("g", lambda *a: (), [x], kinds, base.CaptureOptions())
    walk, kept = Walk(lambda: [data(0, 8)], lambda: None), weakref.ref(x)
    again: Any = captures._record_twice(walk, request)
    del x, request
    assert kept() is None
    assert again([5]).args == [5] and again([5]).kinds == kinds


class Nodes:
    """Graphs of one kernel: what it is given in a recording, beside an address in a piece."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stand_ins: StandIns,
        given: Callable[[int, int], int],
    ) -> None:
        self.recordings = 0
        self._stand_ins, self._given = stand_ins, given
        monkeypatch.setattr(exchange, "nodes_of", self._nodes)
        monkeypatch.setattr(exchange, "ExecutableGraph", self._executable)

    def _executable(self, graph: int, nodes: Any, patches: list[Patch], pieces: int) -> Any:
        read = [p.piece for p in patches]
        return SimpleNamespace(graph=graph, patches=patches, readers=read.count)

    def _nodes(self, address: int) -> list[Node]:
        return [kernel(address, self._given(self.recordings, address))]

    def record(self, place: int) -> tuple[Any, Any]:
        self.recordings += 1
        pieces = self._stand_ins.pieces(place)
        graph = SimpleNamespace(raw_cuda_graph=lambda: pieces[0].second)
        return graph, SimpleNamespace(places=[(5, 8), *((p.second, 8) for p in pieces)])


@pytest.mark.parametrize(
    ("given", "recordings"),
    [
        (lambda turn, address: 5, 2),
        (lambda turn, address: 0x700000 + 512 * min(turn, 2), 4),  # the pool settles
        (lambda turn, address: 0x700000 + 512 * turn, 3),  # it never does
        (lambda turn, address: 0x700000 + 512 * (turn % 2), 3),  # it takes turns
    ],
)
def test_recording_is_repeated_until_it_is_understood(
    monkeypatch: pytest.MonkeyPatch, given: Callable[[int, int], int], recordings: int
) -> None:
    stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [8, 0])
    nodes = Nodes(monkeypatch, stand_ins, given)
    made: Any = exchange.recorded(nodes.record, stand_ins, 1)
    assert nodes.recordings == recordings
    assert made.run.graph == stand_ins.pieces(int(recordings < 4))[0].second
    assert made.run.patches == [Patch(0, 0, 0, 0)]
    assert made.groups == {2: 1}  # the first group is in the pool, the second is the argument


def test_a_piece_that_no_argument_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may find its address in memory."""
    stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [8, 8])
    nodes = Nodes(monkeypatch, stand_ins, lambda turn, address: 5)
    with pytest.raises(DriverError, match="piece 1"):
        exchange.recorded(nodes.record, stand_ins, 1)


def test_a_graph_that_is_not_understood_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a number that follows from an address."""
    stand_ins = StandIns(ACCELERATOR, torch.device("cpu"), [8, 8])
    nodes = Nodes(monkeypatch, stand_ins, lambda turn, address: address >> 4)
    with pytest.raises(DriverError, match="no known reason"):
        exchange.recorded(nodes.record, stand_ins, 1)
    assert nodes.recordings > 2


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
