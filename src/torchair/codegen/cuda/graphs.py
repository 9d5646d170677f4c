"""Nodes of a CUDA graph through the driver: which arguments of its kernels are addresses of given
memory, and how to exchange them in the graph that runs. Knows no tensors and no plans.

Nothing says which bytes of an argument are an address: kernels of libraries take structures, tensor
maps among them. So the same work is recorded twice, with some pieces of memory elsewhere in the
second recording. A word that differs by exactly as much as one of the pieces has moved, and lay in
it before, is an address in that piece.

Arguments have gaps that nobody has written: what the stack held is left there. In them the low half
of an address may stand alone; it is treated as an address, which does no harm. What differs between
recordings whose pieces are at the same places, or is the same where pieces are elsewhere, does not
follow from these places, and is as good as it was recorded. If a word differs for none of these
reasons the graph is not understood, and its memory cannot be exchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchair.codegen.cuda.driver import DriverError, check, driver, enter_context

_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2  # numbers of kinds of nodes
_QUIET = frozenset({5, 6, 7})  # nothing is read or written: empty nodes, events
_INVALID_VALUE = 1
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # keys of a list of extra arguments
_WORD = 8
_LOW = 0xFFFFFFFF
_ALIGNED = 64  # bytes: where an argument begins in our copy of it
_MEMORY_TYPES, _DEVICE_MEMORY = (4, 15), 2  # words of a copy, and the number of a type
_COPY_BYTES, _SET_BYTES = 200, 40  # sizes of structures that describe copies and fills


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class MovedMemory(NamedTuple):
    """Memory that is somewhere else in the second recording."""

    first: int  # its address in the first one
    second: int
    size: int  # bytes


@dataclass
class RecordedNode:
    """A node of a recorded graph, with a copy of its arguments as words."""

    handle: int
    kind: int
    launch: tuple[int, ...] = ()  # function, grid, block, shared memory: must be equal
    words: list[int] = field(default_factory=list)
    buffer: Any = None  # the same, where `params` refers to
    params: Any = None  # what the driver takes
    held: Any = None  # what that refers to


Half = Literal["", "low", "high"]


class Patch(NamedTuple):
    """A word of a node that is an address in a piece, or half a word that is its low half."""

    node: int
    word: int
    piece: int
    offset: int
    half: Half = ""


class GraphTable(NamedTuple):
    """A graph that runs, as addresses for native code that exchanges and launches."""

    exec: int
    launch: int  # functions of the driver
    memcpy: int
    patches: list[list[tuple[int, int, int, int]]]
    """By piece: where to write, bytes to add, whether the low half alone, node."""
    nodes: dict[int, tuple[int, int, int, int]]
    """Setter, handle, arguments, and a context where the setter takes one."""


def nodes_of(graph: int) -> list[RecordedNode]:
    """The nodes of a recorded graph in the order of recording; DriverError for a kind of node whose
    contents cannot be read."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    check(driver().cuGraphGetNodes(handle, None, ctypes.byref(count)), "nodes of a graph")
    handles = (ctypes.c_void_p * count.value)()
    check(driver().cuGraphGetNodes(handle, handles, ctypes.byref(count)), "nodes of a graph")
    return [_node(h or 0) for h in handles[: count.value]]


def _node(handle: int) -> RecordedNode:
    kind = ctypes.c_int()
    check(driver().cuGraphNodeGetType(ctypes.c_void_p(handle), ctypes.byref(kind)), "a node")
    node = RecordedNode(handle, kind.value)
    if node.kind == _KERNEL:
        _read_kernel(node)
    elif node.kind in (_MEMCPY, _MEMSET):
        _read_raw(node)
    elif node.kind not in _QUIET:
        raise DriverError(f"a graph has a node of kind {node.kind}")
    return node


def _read_raw(node: RecordedNode) -> None:
    """A copy or a fill: its description as words."""
    size = _COPY_BYTES if node.kind == _MEMCPY else _SET_BYTES
    node.buffer = node.params = (ctypes.c_uint64 * (size // _WORD))()
    name = "cuGraphMemcpyNodeGetParams" if node.kind == _MEMCPY else "cuGraphMemsetNodeGetParams"
    check(getattr(driver(), name)(ctypes.c_void_p(node.handle), node.params), name)
    node.words = list(node.buffer)
    for word in _MEMORY_TYPES if node.kind == _MEMCPY else ():
        node.words[word] &= _LOW  # the rest of the word is padding
        if node.words[word] != _DEVICE_MEMORY:
            raise DriverError("a graph copies from the host, perhaps addresses")


def _read_kernel(node: RecordedNode) -> None:
    params = _KernelParams()
    read = driver().cuGraphKernelNodeGetParams_v2
    check(read(ctypes.c_void_p(node.handle), ctypes.byref(params)), "arguments of a kernel")
    p = params
    shape = (p.grid_x, p.grid_y, p.grid_z, p.block_x, p.block_y, p.block_z, p.shared)
    node.launch = (p.function or 0, p.kernel or 0, *shape)
    block = not p.arguments and bool(p.extra)
    sources = [_block(p.extra)] if block else [(p.arguments[k] or 0, n) for k, n in _sizes(p)]
    starts, end = [], 0
    for _, size in sources:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    node.buffer = (ctypes.c_uint64 * (end // _WORD))()
    base = ctypes.addressof(node.buffer)
    for (address, size), start in zip(sources, starts, strict=True):
        ctypes.memmove(base + start, address, size)
    node.words = list(node.buffer)
    if block:
        size_of = ctypes.c_size_t(sources[0][1])
        list_of = (_BUFFER_POINTER, base, _BUFFER_SIZE, ctypes.addressof(size_of), None)
        node.held = (size_of, (ctypes.c_void_p * len(list_of))(*list_of))
        params.extra = ctypes.cast(node.held[1], ctypes.POINTER(ctypes.c_void_p))
    else:
        node.held = (ctypes.c_void_p * max(1, len(starts)))(*(base + start for start in starts))
        params.arguments = ctypes.cast(node.held, ctypes.POINTER(ctypes.c_void_p))
    node.params = params


def _block(extra: Any) -> tuple[int, int]:
    """Arguments that were given as one block of memory: its address and its size."""
    address, size, k = 0, 0, 0
    while extra[k]:
        if extra[k] == _BUFFER_POINTER:
            address = extra[k + 1]
        elif extra[k] == _BUFFER_SIZE:
            size = ctypes.c_size_t.from_address(extra[k + 1]).value
        k += 2
    return address, size


def _sizes(params: _KernelParams) -> list[tuple[int, int]]:
    """Each argument of a kernel with its bytes."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    if params.kernel:
        ask, of = driver().cuKernelGetParamInfo, params.kernel
    else:
        ask, of = driver().cuFuncGetParamInfo, params.function
    sizes: list[tuple[int, int]] = []
    while True:
        given = (ctypes.c_void_p(of), ctypes.c_size_t(len(sizes)))
        code = ask(*given, ctypes.byref(offset), ctypes.byref(size))
        if code == _INVALID_VALUE:
            return sizes
        check(code, "the size of an argument")
        sizes.append((len(sizes), size.value))


def moved(
    made: Sequence[RecordedNode],
    elsewhere: Sequence[Sequence[RecordedNode]],
    pieces: Sequence[MovedMemory],
    alike: Sequence[Sequence[RecordedNode]] = (),
) -> list[Patch]:
    """All words of a recording that are addresses in pieces; DriverError where it is not
    understood. `elsewhere` are recordings with the pieces at their first addresses, while in this
    one and those `alike` they are at the second ones."""
    elsewhere = [other for other in elsewhere if _same_launches(made, other)]
    alike = [other for other in alike if _same_launches(made, other)]
    if not elsewhere:
        raise DriverError("no two recordings launch the same")
    found: list[Patch] = []
    for number, node in enumerate(made):
        for word, y in enumerate(node.words):
            before = [other[number].words[word] for other in elsewhere]
            if all(x == y for x in before):
                continue
            again = [other[number].words[word] for other in alike]
            patches = _explained(number, word, y, before, again, pieces)
            if patches is None or any(_is_split(p, node.words, pieces) for p in patches):
                values = f"{before[-1]:#x} and {y:#x} in word {word}"
                raise DriverError(f"node {number} has {values}, for no known reason")
            found += patches
    return found


def _same_launches(one: Sequence[RecordedNode], other: Sequence[RecordedNode]) -> bool:
    return len(one) == len(other) and all(
        (a.kind, a.launch, len(a.words)) == (b.kind, b.launch, len(b.words))
        for a, b in zip(one, other, strict=True)
    )


_HALVES: tuple[tuple[Half, int], ...] = (("low", 0), ("high", 32))


def _explained(
    node: int, word: int, y: int, before: list[int], again: list[int], pieces: Sequence[MovedMemory]
) -> list[Patch] | None:
    """The addresses in a word that differs; None where it does for no known reason."""
    numbers = {_piece(x, y, pieces) for x in before}
    if len(numbers) == 1 and (k := numbers.pop()) is not None:
        return [Patch(node, word, k, y - pieces[k].second)]
    lower = [MovedMemory(p.first & _LOW, p.second & _LOW, p.size) for p in pieces]
    found: list[Patch] = []
    for half, shift in _HALVES:
        low = y >> shift & _LOW
        others = [x >> shift & _LOW for x in before]
        if all(x == low for x in others):
            continue
        numbers = {_piece(x, low, lower) for x in others}
        if len(numbers) == 1 and (k := numbers.pop()) is not None:
            found.append(Patch(node, word, k, low - lower[k].second, half))
        elif low not in others and all(x >> shift & _LOW == low for x in again):
            return None
    return found


def _is_split(patch: Patch, words: Sequence[int], pieces: Sequence[MovedMemory]) -> bool:
    """Whether half a word and the half behind it, in the next word, are one address. Exchanging its
    low half alone would leave the other one as it is."""
    if patch.half != "high" or patch.word + 1 == len(words):
        return False
    high = (pieces[patch.piece].second + patch.offset) >> 32
    return high != 0 and words[patch.word + 1] & _LOW == high


def _piece(x: int, y: int, pieces: Sequence[MovedMemory]) -> int | None:
    """The piece that both words are the same place of. The end of one counts where no other begins
    there."""
    end = None
    for k, p in enumerate(pieces):
        if x - p.first == y - p.second:
            if 0 <= x - p.first < p.size:
                return k
            end = k if x - p.first == p.size else end
    return end


class ExecutableGraph:
    """A graph that can be launched, and in which the memory of pieces can be exchanged."""

    def __init__(
        self,
        graph: int,
        nodes: Sequence[RecordedNode],
        patches: Sequence[Patch],
        pieces: int,
        torchs: Any = None,
    ) -> None:
        """`graph` and `nodes` must outlive it; `pieces` is their number. With `torchs`, the graph
        as an object of torch, that is what is launched: torch alone advances its generator."""
        known = driver()
        self._exec, context = ctypes.c_void_p(), ctypes.c_void_p()
        check(known.cuCtxGetCurrent(ctypes.byref(context)), "a context")
        self._replay = None if torchs is None else torchs.replay
        if torchs is not None:
            torchs.instantiate()
            self._exec.value = torchs.raw_cuda_graph_exec()
        else:
            made = (ctypes.byref(self._exec), ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
            check(known.cuGraphInstantiateWithFlags(*made), "a graph")
            self._destroy = known.cuGraphExecDestroy
        self._launch, self._driver = known.cuGraphLaunch, known
        self._enter = enter_context
        setters = {
            _KERNEL: (known.cuGraphExecKernelNodeSetParams_v2, ()),
            _MEMCPY: (known.cuGraphExecMemcpyNodeSetParams, (context,)),
            _MEMSET: (known.cuGraphExecMemsetNodeSetParams, (context,)),
        }
        self._set: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._params: dict[int, Any] = {}
        self._held = [nodes[n] for n in {p.node for p in patches}]
        self._words: list[list[tuple[Any, int, int, int, int]]] = [[] for _ in range(pieces)]
        for p in patches:
            node = nodes[p.node]
            setter, more = setters[node.kind]
            given = (self._exec, ctypes.c_void_p(node.handle), ctypes.byref(node.params), *more)
            self._set[p.node] = setter, given
            self._params[p.node] = node.params
            self._words[p.piece].append((*_word(node.buffer, p), p.offset, p.node))

    def readers(self, piece: int) -> int:
        """How many nodes have addresses in a piece."""
        return len({n for *_, n in self._words[piece]})

    def exchange(self, addresses: Sequence[tuple[int, int]]) -> None:
        """Let future launches find pieces elsewhere: (piece, address) of each that has moved."""
        touched: dict[int, None] = {}
        for piece, address in addresses:
            for buffer, index, mask, offset, node in self._words[piece]:
                buffer[index] = (address + offset) & mask
                touched[node] = None
        for node in touched:
            setter, given = self._set[node]
            code = setter(*given)
            if code:
                check(code, f"new arguments for node {node}")

    def table(self) -> GraphTable | None:
        """The same for native code, which must keep this object; None where torch launches."""
        if self._replay is not None:
            return None
        nodes = {}
        for number, (setter, (_, handle, _, *context)) in self._set.items():
            params = ctypes.addressof(self._params[number])
            of_node = context[0].value or 0 if context else 0
            nodes[number] = (_address_of(setter), handle.value or 0, params, of_node)
        patches = [
            [
                (ctypes.addressof(buffer) + index * _SIZES[mask], offset, int(mask == _LOW), node)
                for buffer, index, mask, offset, node in words
            ]
            for words in self._words
        ]
        functions = _address_of(self._launch), _address_of(self._driver.cuMemcpyDtoDAsync_v2)
        return GraphTable(self._exec.value or 0, *functions, patches, nodes)

    def launch(self, stream: int) -> None:
        """Run it on a stream, which is the current one."""
        if self._replay is not None:
            return self._replay()
        code = self._launch(self._exec, ctypes.c_void_p(stream))
        if code:
            check(code, "the launch of a graph")

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            with suppress(RuntimeError):  # where the driver has ended before the process
                self._enter()  # this may be any thread: that of an autograd engine, say
                self._destroy(self._exec)


_SIZES = {2**64 - 1: 8, _LOW: 4}  # bytes that a mask writes


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _word(buffer: Any, patch: Patch) -> tuple[Any, int, int]:
    """Where a patch writes: an array, the index there, and the bits of an address that fit."""
    if not patch.half:
        return buffer, patch.word, 2**64 - 1
    halves = (ctypes.c_uint32 * (2 * len(buffer))).from_buffer(buffer)
    return halves, 2 * patch.word + (patch.half == "high"), _LOW
