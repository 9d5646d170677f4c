"""Nodes of recorded graphs through a driver of this file: which of their words are addresses, how
they are exchanged, and how often a graph is recorded until that is known."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from host_memory import ACCELERATOR
from torchair.capture import exchange
from torchair.capture.exchange import ALIGNED, Placeholders
from torchair.codegen.cuda import graphs
from torchair.codegen.cuda.driver import DriverError
from torchair.codegen.cuda.graphs import (
    ExecutableGraph,
    MovedMemory,
    Patch,
    RecordedNode,
    moved,
    nodes_of,
)
from torchair.garbage import no_garbage_collection

A, B = MovedMemory(0x1000, 0x51000, 64), MovedMemory(0x2000, 0x62000, 32)


def kernel(*words: int, launch: int = 7) -> RecordedNode:
    return RecordedNode(1, 0, (launch,), list(words))


def test_addresses_are_words_that_move_as_a_piece_does() -> None:
    first = [kernel(0x1010, 5, 0x9999), kernel(0x2000, 0x1000)]
    second = [kernel(0x51010, 5, 0x9999), kernel(0x62000, 0x51000)]
    assert moved(second, [first], [A, B]) == [
        Patch(0, 0, 0, 0x10), Patch(1, 0, 1, 0), Patch(1, 1, 0, 0),
    ]  # fmt: skip


def test_the_end_of_a_piece_is_its_own_unless_another_begins_there() -> None:
    low, high = MovedMemory(0x1000, 0x5000, 64), MovedMemory(0x1040, 0x5040, 64)
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
        (
            [RecordedNode(1, 1, (), [0x1000])],
            [RecordedNode(1, 0, (), [0x51000])],
        ),  # a copy, and a kernel
    ],
)
def test_recordings_that_differ_otherwise_are_not_understood(
    first: list[RecordedNode], second: list[RecordedNode]
) -> None:
    with pytest.raises(DriverError):
        moved(second, [first], [A, B])


def test_halves_of_addresses_are_addresses() -> None:
    """What the stack held in a gap beside a number of 32 bits."""
    a, b = (
        MovedMemory(0x7F0000001000, 0x7F0000051000, 64),
        MovedMemory(0x7F0000002000, 0x7F0000062000, 64),
    )
    first = [kernel(0x3F80000000001008, 0x2000_00000005)]
    second = [kernel(0x3F80000000051008, 0x62000_00000005)]
    assert moved(second, [first], [a, b]) == [Patch(0, 0, 0, 8, "low"), Patch(0, 1, 1, 0, "high")]


def test_an_address_in_halves_of_two_words_is_not_understood() -> None:
    """One that begins at a multiple of four bytes: its upper half would stay what it was."""
    a = MovedMemory(0x7F0000001000, 0x7F0000051000, 64)
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


def test_torch_launches_a_graph_that_draws(driver: Any) -> None:
    """What torch has made of it gets the new addresses."""
    made = driver([word(0x1000)])
    done: list[str] = []
    torchs = SimpleNamespace(
        instantiate=lambda: done.append("instantiate"),
        raw_cuda_graph_exec=lambda: 77,
        replay=lambda: done.append("replay"),
    )
    run = ExecutableGraph(1, nodes_of(1), [Patch(0, 0, 0, 0)], 1, torchs)
    run.exchange([(0, 0x5000)])
    run.launch(3)
    assert made.set == [(0, [word(0x5000)])] and run._exec.value == 77
    assert done == ["instantiate", "replay"]
    del run
    assert not made.done  # it is torch's


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


# ---- recordings


def test_stand_ins_are_apart_in_both_places() -> None:
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [100, 0, 512, 7])
    here, there = placeholders.pieces(0), placeholders.pieces(1)
    for a, b in zip(here, there, strict=True):
        assert (a.first, a.second) == (b.second, b.first) and a.first != a.second
    spans = sorted((p.first, p.first + p.size) for p in here)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(p.first % ALIGNED == 0 and p.second % ALIGNED == 0 for p in here)
    assert placeholders.storage(2, 1).data_ptr() == there[2].second
    assert placeholders.number_at(there[3].second, 1) == 3
    assert placeholders.number_at(there[3].second, 0) is None


def test_distances_between_pieces_are_no_constants() -> None:
    """A kernel that is given one would go on from a moved piece by the old distance."""
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [4096] * 3)
    for one, other in itertools.permutations(range(3), 2):
        before, after = (
            [kernel(at[one].second, at[other].second, (at[other].second - at[one].second) % 2**64)]
            for at in map(placeholders.pieces, (0, 1))
        )
        with pytest.raises(DriverError, match="in word 2"):
            moved(after, [before], placeholders.pieces(1))


class Nodes:
    """Graphs of one kernel: what it is given in a recording, beside an address in a piece."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        placeholders: Placeholders,
        given: Callable[[int, int], int],
    ) -> None:
        self.recordings = 0
        self._stand_ins, self._given = placeholders, given
        monkeypatch.setattr(exchange, "nodes_of", self._nodes)
        monkeypatch.setattr(exchange, "ExecutableGraph", self._executable)

    def _executable(
        self, graph: int, nodes: Any, patches: list[Patch], pieces: int, torchs: Any
    ) -> Any:
        read = [p.piece for p in patches]
        return SimpleNamespace(graph=graph, patches=patches, readers=read.count)

    def _nodes(self, address: int) -> list[RecordedNode]:
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
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [8, 0])
    nodes = Nodes(monkeypatch, placeholders, given)
    made: Any = exchange.recorded(nodes.record, placeholders, 1)
    assert nodes.recordings == recordings
    assert made.run.graph == placeholders.pieces(int(recordings < 4))[0].second
    assert made.run.patches == [Patch(0, 0, 0, 0)]
    assert made.groups == {2: 1}  # the first group is in the pool, the second is the argument


def test_pieces_are_given_back_when_a_graph_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, as they are as large as all arguments and results: not when garbage is collected."""
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [8, 0])
    nodes = Nodes(monkeypatch, placeholders, lambda turn, address: 0x700000 + 512 * turn)
    block = weakref.ref(placeholders._block)
    with no_garbage_collection():
        made = exchange.recorded(nodes.record, placeholders, 1)
        assert nodes.recordings > 2 and made.run.patches
        monkeypatch.undo()  # who has exchanged functions holds on to what they are bound to
        del placeholders, nodes
        assert block() is None


def test_a_piece_that_no_argument_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may find its address in memory."""
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [8, 8])
    nodes = Nodes(monkeypatch, placeholders, lambda turn, address: 5)
    with pytest.raises(DriverError, match="piece 1"):
        exchange.recorded(nodes.record, placeholders, 1)


def test_a_graph_that_is_not_understood_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a number that follows from an address."""
    placeholders = Placeholders(ACCELERATOR, torch.device("cpu"), [8, 8])
    nodes = Nodes(monkeypatch, placeholders, lambda turn, address: address >> 4)
    with pytest.raises(DriverError, match="no known reason"):
        exchange.recorded(nodes.record, placeholders, 1)
    assert nodes.recordings > 2
