"""The inner kernels of convolution: one tile of results, summed in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Writer


@dataclass(frozen=True)
class Tile:
    """Sums of `vectors` vectors of output channels at some pixels.

    `pixels` are their offsets in the input, in elements. `steps` is the sum as nested loops, each
    (count, elements of the input between); the weights lie in the order of the loops. The kind is
    "dense", "dot" (pairs of bf16) or "depthwise". If `turns` is given, the function also takes a
    first and a last kernel row, each of so many turns of the outer loops, and leaves out others.
    With `ahead`, weights are fetched so many bytes before they are needed.
    """

    kind: str
    pixels: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    vectors: int
    turns: int = 0
    ahead: int = 0

    @property
    def overlapping(self) -> bool:
        """Whether a step reads what another pixel reads in another step."""
        return self.steps[-1][1] == 1 and any(0 < p < self.steps[-1][0] for p in self.pixels)


def tile(outer: KernelWriter, shape: Tile, machine: Machine) -> str:
    """Adds a function that computes a tile, and returns its name.

    It takes the address of the first input element, of the weights of the panel, and of the
    memory for the sums, which are written pixel after pixel.
    """
    name = f"ENTRY.tile{len(shape.pixels)}"
    w = Writer(machine)
    body = _Sums(w, shape)
    for i, value in enumerate(body.sums()):
        at = w.offset("%sums", "float", str(i * w.lanes))
        w.do(f"store {body.vector} {value}, ptr {at}, align {4 * w.lanes}")
    args = "ptr noalias %x, ptr noalias %p, ptr noalias %sums"
    args += ", i64 %first, i64 %last" if shape.turns else ""
    outer.helper(name, w.text(f"internal void @{name}({args})"))
    outer.declared.update(w.declared)
    return name


class _Sums:
    """The text of one tile."""

    def __init__(self, w: Writer, shape: Tile) -> None:
        self.w, self.shape, self.pixels, self.vectors = w, shape, shape.pixels, shape.vectors
        self.vector = w.vector("float")
        self.element = "bfloat" if shape.kind == "dot" else "float"
        self.step = {"dense": self.dense, "dot": self.dot, "depthwise": self.depthwise}[shape.kind]
        self.width = w.lanes * (2 if shape.kind == "dot" else 1)  # weights of a vector

    def sums(self) -> list[str]:
        """The finished sums, of a pixel after the other."""
        count = len(self.pixels) * self.vectors
        outer, (length, stride) = self.shape.steps[:-1], self.shape.steps[-1]
        sums = ["zeroinitializer"] * count
        if not outer:
            return self.inner(length, stride, "%x", "%p", sums)[1:]
        start, stop, p = "0", str(math.prod(n for n, _ in outer)), "%p"
        if turns := self.shape.turns:
            start, stop = (self.w.mul(row, str(turns)) for row in ("%first", "%last"))
            each = length * self.vectors * self.width
            p = self.w.offset(p, self.element, self.w.mul(start, str(each)))
        carried = [("ptr", p), *((self.vector, value) for value in sums)]
        with self.w.loop(start, stop, carried=carried) as loop:
            p, *sums = loop.carried
            x = self.w.offset("%x", self.element, self.place(outer, loop.index))
            loop.next = self.inner(length, stride, x, p, sums)
        return loop.results[1:]

    def place(self, loops: Sequence[tuple[int, int]], index: str) -> str:
        """The offset at one turn of several loops written as one: more loops around the sums would
        make the compiler keep them in memory."""
        w, at = self.w, "0"
        for k, (count, stride) in reversed(list(enumerate(loops))):
            turn = w.rem(index, str(count)) if k else index
            index = w.div(index, str(count)) if k else index
            at = w.add(at, w.mul(turn, str(stride)))
        return at

    def inner(self, count: int, stride: int, x: str, p: str, sums: list[str]) -> list[str]:
        """The innermost loop: the next weights, and the sums."""
        unroll = self.unroll(count)
        if unroll == count:
            return self.steps(count, stride, x, p, sums)[1:]
        kinds = ["ptr", "ptr"] + [self.vector] * len(sums)
        carried = list(zip(kinds, [x, p, *sums], strict=True))
        with self.w.loop("0", str(count // unroll), carried=carried) as loop:
            x, p, *sums = loop.carried
            loop.next = self.steps(unroll, stride, x, p, sums)
        return loop.results[1:]

    def steps(self, count: int, stride: int, x: str, p: str, sums: list[str]) -> list[str]:
        """Some steps: the next input and weights, and the sums."""
        for u in range(count):
            sums = self.step(x, u * stride, p, u * self.vectors * self.width, sums)
        x = self.w.offset(x, self.element, str(count * stride))
        return [x, self.w.offset(p, self.element, str(count * self.vectors * self.width)), *sums]

    def unroll(self, count: int) -> int:
        """Steps of the innermost loop that are written out. One step if several share
        inputs: the compiler would merge their loads, and has no registers to keep the values."""
        if self.shape.overlapping:
            return 1
        if count <= 7:
            return count
        return next(u for u in (2, 3, 5, 7, 1) if count % u == 0)

    def weights(self, p: str, at: int) -> list[str]:
        """The weights of one step."""
        w, found = self.w, []
        for j in range(self.vectors):
            place = w.offset(p, self.element, str(at + j * self.width))
            if self.shape.ahead:
                later = w.offset(place, "i8", str(self.shape.ahead))
                how = (("i32", "0"), ("i32", "3"), ("i32", "1"))  # to read, often, as data
                w.call("void", "llvm.prefetch.p0", ("ptr", later), *how)
            kind = f"<{self.width} x {self.element}>"
            found.append(w(f"load {kind}, ptr {place}, align {4 * w.lanes}"))
        return found

    def dense(self, x: str, at: int, p: str, p_at: int, sums: list[str]) -> list[str]:
        """One float32 of each pixel times a vector of weights."""
        w, weights = self.w, self.weights(p, p_at)
        after: list[str] = []
        for pixel in self.pixels:
            place = w.offset(x, "float", str(at + pixel))
            value = w.splat("float", w(f"load float, ptr {place}, align 4"))
            after += [
                self.fused(value, v, s) for v, s in zip(weights, self.of(sums, after), strict=True)
            ]
        return after

    def dot(self, x: str, at: int, p: str, p_at: int, sums: list[str]) -> list[str]:
        """A pair of bfloat16 of each pixel times a vector of pairs."""
        w, weights = self.w, self.weights(p, p_at)
        after: list[str] = []
        pairs, words = f"<{2 * w.lanes} x bfloat>", w.vector("i32")
        function = f"llvm.x86.avx512bf16.dpbf16ps.{32 * w.lanes}"
        for pixel in self.pixels:
            place = w.offset(x, "bfloat", str(at + pixel))
            value = w.splat("i32", w(f"load i32, ptr {place}, align 2"))
            value = w(f"bitcast {words} {value} to {pairs}")
            for v, s in zip(weights, self.of(sums, after), strict=True):
                args = ((self.vector, s), (pairs, v), (pairs, value))
                after.append(w.call(self.vector, function, *args))
        return after

    def depthwise(self, x: str, at: int, p: str, p_at: int, sums: list[str]) -> list[str]:
        """A vector of channels of each pixel times the weights of these channels."""
        w, weights = self.w, self.weights(p, p_at)
        after: list[str] = []
        for pixel in self.pixels:
            for j, (v, s) in enumerate(zip(weights, self.of(sums, after), strict=True)):
                place = w.offset(x, "float", str(at + pixel + j * w.lanes))
                value = w(f"load {self.vector}, ptr {place}, align 4")
                after.append(self.fused(value, v, s))
        return after

    def of(self, sums: list[str], after: list[str]) -> list[str]:
        """The sums of the next pixel, given those that are done."""
        return sums[len(after) : len(after) + self.vectors]

    def fused(self, a: str, b: str, c: str) -> str:
        """a * b + c."""
        kind, function = self.vector, f"llvm.fmuladd.v{self.w.lanes}f32"
        return self.w.fast_call(REASSOCIATE, kind, function, (kind, a), (kind, b), (kind, c))
