"""Nodes of a CUDA graph through the driver: which arguments of its kernels are addresses of given
memory, and how to exchange them in the graph that runs. Knows no tensors and no plans.

Nothing says which bytes of an argument are an address: kernels of libraries take structures, tensor
maps among them. So the same work is recorded twice, with the same memory but for some pieces, each
of which has another address in the second recording. A word that differs by exactly as much as one
of the pieces has moved, and lay in it before, is an address in that piece. If anything else differs
the graph is not understood, and its memory cannot be exchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchair.codegen.cuda.driver import DriverError, check, driver

_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2  # numbers of kinds of nodes
_QUIET = frozenset({5, 6, 7})  # nothing is read or written: empty nodes, events
_INVALID_VALUE = 1
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # keys of a list of extra arguments
_WORD = 8
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


class Piece(NamedTuple):
    """Memory that is somewhere else in the second recording."""

    first: int  # its address in the first one
    second: int
    size: int  # bytes


@dataclass
class Node:
    """A node of a recorded graph, with a copy of its arguments as words."""

    handle: int
    kind: int
    launch: tuple[int, ...] = ()  # function, grid, block, shared memory: must be equal
    words: list[int] = field(default_factory=list)
    params: Any = None  # of a kernel: what the driver takes, over `buffer`
    buffer: Any = None


class Patch(NamedTuple):
    """A word of a node that is an address in a piece."""

    node: int
    word: int
    piece: int
    offset: int


def nodes_of(graph: int) -> list[Node]:
    """The nodes of a recorded graph in the order of recording; DriverError for a kind of node whose
    contents cannot be read."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    check(driver().cuGraphGetNodes(handle, None, ctypes.byref(count)), "nodes of a graph")
    handles = (ctypes.c_void_p * count.value)()
    check(driver().cuGraphGetNodes(handle, handles, ctypes.byref(count)), "nodes of a graph")
    return [_node(h or 0) for h in handles[: count.value]]


def _node(handle: int) -> Node:
    kind = ctypes.c_int()
    check(driver().cuGraphNodeGetType(ctypes.c_void_p(handle), ctypes.byref(kind)), "a node")
    node = Node(handle, kind.value)
    if node.kind == _KERNEL:
        _read_kernel(node)
    elif node.kind in (_MEMCPY, _MEMSET):
        _read_raw(node)
    elif node.kind not in _QUIET:
        raise DriverError(f"a graph has a node of kind {node.kind}")
    return node


def _read_raw(node: Node) -> None:
    """A copy or a fill: its description as words."""
    size = _COPY_BYTES if node.kind == _MEMCPY else _SET_BYTES
    raw = (ctypes.c_uint64 * (size // _WORD))()
    name = "cuGraphMemcpyNodeGetParams" if node.kind == _MEMCPY else "cuGraphMemsetNodeGetParams"
    read = getattr(driver(), name)
    check(read(ctypes.c_void_p(node.handle), raw), name)
    node.words = list(raw)
    if node.kind == _MEMCPY:
        for word in _MEMORY_TYPES:  # the rest of the word is padding
            node.words[word] &= 0xFFFFFFFF
            if node.words[word] != _DEVICE_MEMORY:
                raise DriverError("a graph copies from the host, perhaps addresses")


def _read_kernel(node: Node) -> None:
    params = _KernelParams()
    read = driver().cuGraphKernelNodeGetParams_v2
    check(read(ctypes.c_void_p(node.handle), ctypes.byref(params)), "arguments of a kernel")
    p = params
    shape = (p.grid_x, p.grid_y, p.grid_z, p.block_x, p.block_y, p.block_z, p.shared)
    node.launch = (p.function or 0, p.kernel or 0, *shape)
    places: list[tuple[int, int]] = []  # in our copy: where an argument begins, and its size
    if p.extra and not p.arguments:
        sources = [_extra(p.extra)]
    else:
        sources = [(p.arguments[k], size) for k, size in enumerate(_sizes(p))]
    end = 0
    for _, size in sources:
        places.append((end, size))
        end += -(-size // _ALIGNED) * _ALIGNED
    node.buffer = (ctypes.c_uint64 * (end // _WORD))()
    base = ctypes.addressof(node.buffer)
    for (address, size), (at, _) in zip(sources, places, strict=True):
        ctypes.memmove(base + at, address, size)
    node.words = list(node.buffer)
    if p.extra and not p.arguments:
        raise DriverError("a kernel has its arguments in one block")
    pointers = (ctypes.c_void_p * max(1, len(places)))(*(base + at for at, _ in places))
    params.arguments = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
    params.extra = None
    node.params = (params, pointers)  # the structure refers to them


def _extra(extra: Any) -> tuple[int, int]:
    """Arguments that were given as one block of memory."""
    address, size, k = 0, 0, 0
    while extra[k]:
        if extra[k] == _BUFFER_POINTER:
            address = extra[k + 1]
        elif extra[k] == _BUFFER_SIZE:
            size = ctypes.c_size_t.from_address(extra[k + 1]).value
        k += 2
    return address, size


def _sizes(params: _KernelParams) -> list[int]:
    """Bytes of each argument of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    if params.kernel:
        ask, of = driver().cuKernelGetParamInfo, params.kernel
    else:
        ask, of = driver().cuFuncGetParamInfo, params.function
    sizes: list[int] = []
    while True:
        given = (ctypes.c_void_p(of), ctypes.c_size_t(len(sizes)))
        code = ask(*given, ctypes.byref(offset), ctypes.byref(size))
        if code == _INVALID_VALUE:
            return sizes
        check(code, "the size of an argument")
        sizes.append(size.value)


def moved(first: Sequence[Node], second: Sequence[Node], pieces: Sequence[Piece]) -> list[Patch]:
    """All words that are addresses in pieces; DriverError where the recordings differ otherwise."""
    if len(first) != len(second):
        raise DriverError(f"{len(first)} nodes became {len(second)}")
    found: list[Patch] = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        same = (a.kind, a.launch, len(a.words)) == (b.kind, b.launch, len(b.words))
        if not same:
            raise DriverError(f"node {number} is launched in another way")
        for word, (x, y) in enumerate(zip(a.words, b.words, strict=True)):
            if x == y:
                continue
            k = _piece(x, y, pieces)
            if k is None or a.kind != _KERNEL:
                raise DriverError(f"word {word} of node {number} differs for no known reason")
            found.append(Patch(number, word, k, x - pieces[k].first))
    return found


def _piece(x: int, y: int, pieces: Sequence[Piece]) -> int | None:
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
        self, graph: int, nodes: Sequence[Node], patches: Sequence[Patch], pieces: int
    ) -> None:
        """`graph` and `nodes` must outlive it; `pieces` is their number."""
        self._exec = ctypes.c_void_p()
        made = (ctypes.byref(self._exec), ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
        check(driver().cuGraphInstantiateWithFlags(*made), "a graph")
        known = driver()
        self._launch, self._destroy = known.cuGraphLaunch, known.cuGraphExecDestroy
        self._set = known.cuGraphExecKernelNodeSetParams_v2
        touched = sorted({p.node for p in patches})
        given = {n: (ctypes.c_void_p(nodes[n].handle), nodes[n].params) for n in touched}
        self._given = {
            n: (self._exec, handle, ctypes.byref(params[0]))
            for n, (handle, params) in given.items()
        }
        self._held = [(nodes[n].params, nodes[n].buffer) for n in touched]
        self._words: list[list[tuple[Any, int, int, int]]] = [[] for _ in range(pieces)]
        for p in patches:
            self._words[p.piece].append((nodes[p.node].buffer, p.word, p.offset, p.node))

    def readers(self, piece: int) -> int:
        """How many kernels take addresses in a piece."""
        return len({n for *_, n in self._words[piece]})

    def exchange(self, addresses: Sequence[tuple[int, int]]) -> None:
        """Let future launches find pieces elsewhere: (piece, address) of each that has moved."""
        touched: dict[int, None] = {}
        for piece, address in addresses:
            for buffer, word, offset, node in self._words[piece]:
                buffer[word] = address + offset
                touched[node] = None
        for node in touched:
            code = self._set(*self._given[node])
            if code:
                check(code, f"new arguments for node {node}")

    def launch(self, stream: int) -> None:
        """Run it on a stream."""
        code = self._launch(self._exec, ctypes.c_void_p(stream))
        if code:
            check(code, "the launch of a graph")

    def __del__(self) -> None:
        if self._exec and hasattr(self, "_destroy"):
            self._destroy(self._exec)
