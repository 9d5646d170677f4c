"""What `ptx_machine` knows of compute capability 9.0: barriers in shared memory that count
arrivals and bytes, the copy engine, and products of warpgroups from shared memory.

A copy is done as soon as it is asked for. Tiles lie in shared memory with swizzled rows of 128
bytes, which is all that our kernels ask for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchair.codegen.sizes import BYTES
from torchair.codegen.target import TensorTile

WARPGROUP = 128
_ROW = 128  # bytes of a swizzled row
Values = np.ndarray


def swizzled(place: Values) -> Values:
    """Where a byte is that belongs at some place."""
    return place ^ ((place >> 3) & 0x70)


# ---- barriers ----


@dataclass
class Barrier:
    """One barrier: who is still to arrive, and how many bytes are still to come."""

    arrivals: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def advance(self) -> None:
        """End the phase if all is there."""
        assert self.pending >= 0, "more arrivals than a barrier waits for"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.arrivals


@dataclass
class Barriers:
    """Those of some blocks, by where they are."""

    made: dict[int, Barrier] = field(default_factory=dict)
    numbered: dict[tuple[int, int], int] = field(default_factory=dict)  # threads that only arrived

    def at(self, place: int) -> Barrier:
        assert place in self.made, f"there is no barrier at {place}"
        return self.made[place]


def _places(b: Any, i: Any, active: Values) -> Values:
    """Where the barriers of some threads are."""
    address = next(a for a in i.args if isinstance(a, tuple))
    space = "shared_cluster" if "shared_cluster" in i.parts else "shared"
    _, found = b.bytes_at(space, address, 8, active)
    return found[:, 0]


def passed(b: Any, i: Any, here: Values) -> Values:
    """Threads that need not wait any longer."""
    found = np.zeros(b.count, np.bool_)
    if here.any():
        parity = b.value(i.args[2], "u32")[here]
        phases = np.array([b.barriers.at(int(p)).phase for p in _places(b, i, here)])
        found[here] = phases != parity
    return found


def _barrier(b: Any, i: Any, active: Values) -> None:
    """mbarrier.init|arrive|arrive.expect_tx|try_wait.parity"""
    what = i.parts[1]
    if what == "try_wait":
        b.keep(i.args[0], np.ones(b.count, np.bool_), active)
        return
    counted = what == "init" or "expect_tx" in i.parts
    count = b.value(i.args[-1] if counted else 0, "u32")[active]
    for place, n in zip(_places(b, i, active), count, strict=True):
        if what == "init":
            b.barriers.made[int(place)] = Barrier(int(n), int(n))
            continue
        barrier = b.barriers.at(int(place))
        if "expect_tx" in i.parts:
            barrier.bytes += int(n)
        barrier.pending -= 1
        barrier.advance()


def _meetings(b: Any, i: Any, active: Values) -> dict[tuple[int, int], Values]:
    """The threads at each barrier with a number, by block and number."""
    numbers = b.value(i.args[0], "u32")
    keys = {(int(b.block[t]), int(numbers[t])) for t in np.flatnonzero(active)}
    return {key: active & (b.block == key[0]) & (numbers == key[1]) for key in keys}


def complete(b: Any, i: Any, here: Values) -> Values:
    """Threads at a barrier with a number that as many as are wanted have reached."""
    found = np.zeros(b.count, np.bool_)
    for key, threads in _meetings(b, i, here).items():
        if threads.sum() + b.barriers.numbered.get(key, 0) >= _wanted(b, i, threads):
            found |= threads
    return found


def meet(b: Any, i: Any, active: Values) -> None:
    """bar.sync|arrive number, threads"""
    for key, threads in _meetings(b, i, active).items():
        count, wanted = int(threads.sum()), _wanted(b, i, threads)
        more = count if "arrive" in i.parts else count - wanted
        b.barriers.numbered[key] = b.barriers.numbered.get(key, 0) + more
        assert 0 <= b.barriers.numbered[key] <= wanted, "more threads than a barrier is for"


def _wanted(b: Any, i: Any, threads: Values) -> int:
    """How many threads a barrier is for, about which all of them agree."""
    found = np.unique(b.value(i.args[1], "u32")[threads])
    assert found.size == 1, "threads wait at one barrier for different numbers of them"
    return int(found[0])


# ---- the copy engine ----


@dataclass(frozen=True)
class Tensor:
    """A tensor as the copy engine is told of it."""

    tile: TensorTile
    address: int
    dims: list[int]
    strides: list[int]


def _copy(b: Any, i: Any, active: Values) -> None:
    """cp.async.bulk.tensor.Nd.shared::cluster.global... [place], [tensor, {position}], [barrier]"""
    assert i.parts[:4] == ["cp", "async", "bulk", "tensor"], i.parts
    name, *position = re.findall(r"[\w%$.]+", i.args[1][0])
    for thread in np.flatnonzero(active):
        tensor = b.run.maps[int(b.value(name, "u64")[thread])]
        first = [int(b.value(p, "s32")[thread]) for p in position]
        target, barrier = (int(b.value(i.args[k][0], "u64")[thread]) + i.args[k][1] for k in (0, 2))
        own = int(b.block[thread]) * b.shared.size // (b.block.max() + 1)
        _brought(b, tensor, first, target + own)
        waiting = b.barriers.at(barrier + own)
        waiting.bytes -= int(np.prod(tensor.tile.box)) * BYTES[tensor.tile.dtype]
        waiting.advance()


def _brought(b: Any, tensor: Tensor, first: list[int], target: int) -> None:
    tile, size = tensor.tile, BYTES[tensor.tile.dtype]
    assert tile.box[0] * size == _ROW and target % 1024 == 0 and tensor.address % 16 == 0
    assert all(n * size % 16 == 0 for n in tensor.strides), tensor
    memory = b.run.memory
    start = tensor.address - (1 << 32)
    for row, outer in enumerate(itertools.product(*(range(n) for n in reversed(tile.box[1:])))):
        at = [p + q for p, q in zip(first[1:], reversed(outer), strict=True)]
        line = np.zeros(_ROW, np.uint8)
        inside = all(0 <= p < n for p, n in zip(at, tensor.dims[1:], strict=True))
        count = max(0, min(tile.box[0], tensor.dims[0] - first[0])) * size if inside else 0
        if count:
            far = first[0] + sum(p * s for p, s in zip(at, tensor.strides, strict=True))
            where = slice(start + far * size, start + far * size + count)
            assert memory.owned[where].all(), f"a copy of memory that is nobody's: {at}"
            line[:count] = memory.bytes[where]
        places = swizzled(target + row * _ROW + np.arange(_ROW))
        assert b.shared_owned[places].all(), "a copy to shared memory that is nobody's"
        b.shared[places] = line


# ---- products ----


def _multiply(b: Any, i: Any, active: Values) -> None:
    """wgmma.mma_async.sync.aligned.m64nNk16.f32.t.t sums, a, b, add, 1, 1, turned a, turned b;
    A in registers is not turned."""
    if i.parts[1] != "mma_async":
        return
    columns, dtype = int(re.findall(r"n(\d+)k16", i.parts[4])[0]), i.parts[-1]
    sums, a, other, adds, first_sign, second_sign, *turned_a, turned_b = i.args
    assert (first_sign, second_sign) == (1, 1), i.parts
    assert active.reshape(-1, WARPGROUP).all(1).any() and len(sums) == columns // 2, i.parts
    add = np.full(b.count, adds) if isinstance(adds, int) else b.value(adds, "pred")
    t = np.arange(WARPGROUP)
    row, column = t // 32 * 16 + t % 32 // 4, 2 * (t % 4)
    places = [(row + 8 * (k // 2 % 2), column + 8 * (k // 4) + k % 2) for k in range(len(sums))]
    old = [b.value(name, "f32") for name in sums]
    new = [x.copy() for x in old]
    for first in np.flatnonzero(active):
        if first % WARPGROUP:
            continue
        mine = slice(first, first + WARPGROUP)
        if isinstance(a, list):
            x = _own_rows([b.value(name, "b32")[mine] for name in a], dtype)
        else:
            x = _matrix(b, first, b.value(a, "u64")[first], 64, turned_a[0], dtype)
        y = _matrix(b, first, b.value(other, "u64")[first], columns, turned_b, dtype)
        product = (x @ y.T).astype(np.float32)
        for k, place in enumerate(places):
            before = np.where(add[mine].astype(bool), old[k][mine], 0)
            new[k][mine] = before + product[place]
    for name, values in zip(sums, new, strict=True):
        b.keep(name, values, active)


def _matrix(
    b: Any, thread: int, descriptor: Values, rows: int, turned: int, dtype: str
) -> np.ndarray:
    """Rows of 16 elements along the sum."""
    bits = int(descriptor)
    assert bits >> 62 == 1, "rows of 128 bytes are expected"
    start, apart, far = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if turned:
        place = start + r // 64 * apart + k // 8 * far + k % 8 * _ROW + r % 64 * 2
    else:
        place = start + r // 8 * far + r % 8 * _ROW + k * 2
    place = swizzled(place) + int(b.block[thread]) * b.shared.size // (b.block.max() + 1)
    assert b.shared_owned[place].all(), "a factor in memory that is nobody's"
    return _wide(
        b.shared[place].astype(np.uint16) | (b.shared[place + 1].astype(np.uint16) << 8), dtype
    )


def _own_rows(words: list[Values], dtype: str) -> np.ndarray:
    """The same of A from four registers of each thread."""
    t = np.arange(WARPGROUP)
    row, column = t // 32 * 16 + t % 32 // 4, 2 * (t % 4)
    found = np.zeros((64, 16))
    for k, word in enumerate(words):
        for side in (0, 1):
            short = (word >> np.uint32(16 * side)).astype(np.uint16)
            found[row + 8 * (k % 2), column + 8 * (k // 2) + side] = _wide(short, dtype)
    return found


def _wide(short: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f16":
        return short.view(np.float16).astype(np.float64)
    return (short.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


INSTRUCTIONS: dict[str, Callable[[Any, Any, Values], None]] = {
    "mbarrier": _barrier,
    "cp": _copy,
    "wgmma": _multiply,
}
