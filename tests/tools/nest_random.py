"""Random loop nests with memory for them: shapes, strides, types, masks, gathers, reductions."""

from __future__ import annotations

import random

import numpy as np

from nest_plain import INTEGERS, noise
from torchair.codegen.loops import (
    Access,
    Expr,
    Nest,
    Store,
    axis,
    cast,
    const,
    expressions,
    load,
    op,
    reduce,
)

FLOATING = (
    "add", "sub", "mul", "div", "min", "max", "where", "neg", "abs", "sqrt", "tanh", "sigmoid",
    "sign", "cast",
)  # fmt: skip
INTEGER = (
    "add", "sub", "mul", "and", "or", "xor", "not", "shl", "shr", "where", "div", "floordiv",
    "remainder", "fmod", "min", "max", "cast",
)  # fmt: skip
LOGICAL = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "cast")


class Maker:
    """Makes random nests with their memory."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.memory: list[np.ndarray] = []
        sizes = [1, 2, 3, 5, 7, 16, 17, 31, 64, 100, 130, 300]
        self.axes = [self.pick.choice(sizes) for _ in range(self.pick.randint(1, 4))]
        while int(np.prod(self.axes)) > 12000:
            self.axes.remove(max(self.axes))
        some = self.pick.random() < 0.65
        self.reduced = {a for a in range(len(self.axes)) if some and self.pick.random() < 0.5}
        self.leaves: dict[str, list[Expr]] = {}

    def nest(self) -> Nest:
        """A nest with one to three stores."""
        kinds = self.pick.choices(
            ["f32", "f64", "i64", "i32", "u8", "bool"], [6, 2, 1, 1, 1, 1], k=2
        )
        stores = tuple(
            self.store(self.value(self.pick.choice(kinds), self.pick.randint(1, 4)))
            for _ in range(self.pick.randint(1, 3))
        )
        return Nest(tuple(self.axes), stores, frozenset(self.reduced))

    def layout(self, used: set[int], gaps: bool = True) -> tuple[tuple[int, ...], int, int]:
        """Strides in some order, an offset, and how many elements that takes."""
        order = sorted(used, key=lambda a: self.pick.random())
        if self.pick.random() < 0.6:
            order = sorted(used)
        strides, step, offset = [0] * len(self.axes), 1, 0
        if gaps and self.pick.random() < 0.2:
            step = self.pick.choice([2, 3])
        for a in reversed(order):
            strides[a] = step
            step *= max(1, self.axes[a]) + (gaps and self.pick.random() < 0.15)
            if gaps and self.pick.random() < 0.12:
                offset += strides[a] * (self.axes[a] - 1)
                strides[a] = -strides[a]
        return tuple(strides), offset, max(1, step)

    def operand(self, count: int, dtype: str) -> int:
        self.memory.append(noise(count, dtype, len(self.memory)))
        return len(self.memory) - 1

    def load(self, dtype: str, low: bool = False) -> Expr:
        """A load of some form; `low` ones are not masked and not scattered."""
        used = {a for a in range(len(self.axes)) if self.pick.random() < 0.75}
        strides, offset, count = self.layout(used)
        extra = mask = None
        if not low and self.pick.random() < 0.2:
            rows = self.pick.randint(1, 9)
            row = op("remainder", self.load("i64", low=True), const(rows, "i64"))
            extra, count = op("mul", row, const(count, "i64")), count * rows
        if not low and self.pick.random() < 0.15:
            mask = self.value("bool", 1)
        return load(Access(self.operand(count, dtype), dtype, strides, offset, extra, mask))

    def leaf(self, dtype: str) -> Expr:
        known = self.leaves.setdefault(dtype, [])
        if known and self.pick.random() < 0.4:
            return self.pick.choice(known)
        chance = self.pick.random()
        if chance < 0.1:
            return const(self.pick.choice([0, 1, 2, 3]), dtype)
        if dtype == "i64" and chance < 0.3:
            return axis(self.pick.randrange(len(self.axes)))
        memory = self.pick.choice(["f32", "f32", "bf16", "f16"]) if dtype == "f32" else dtype
        if dtype == "f32" and chance < 0.2:
            return cast(self.load(self.pick.choice([*INTEGERS, "bool"])), "f32")
        known.append(self.load(memory))
        return known[-1]

    def value(self, dtype: str, depth: int) -> Expr:
        """An expression of a type."""
        if depth <= 0:
            return self.leaf(dtype)
        made = self.reduction(dtype, depth) if self.reduced and self.pick.random() < 0.3 else None
        if made is None and dtype in ("f32", "f64"):
            made = self.floating(dtype, depth - 1)
        if made is None:
            made = self.logical(depth - 1) if dtype == "bool" else self.integer(dtype, depth - 1)
        self.leaves.setdefault(dtype, []).append(made)
        return made

    def reduction(self, dtype: str, depth: int) -> Expr:
        if dtype == "bool":
            return reduce(self.pick.choice(["any", "all"]), self.value("bool", depth - 1))
        if dtype == "u8":
            return reduce(self.pick.choice(["max", "min"]), self.value(dtype, depth - 1))
        kind = self.pick.choice(["sum", "sum", "max", "min"])
        count = int(np.prod([self.axes[a] for a in self.reduced]))
        result = reduce(kind, self.value(dtype, depth - 1))
        if kind == "sum" and dtype in ("f32", "f64"):
            return op("div", result, const(float(max(1, count)), dtype))
        return result

    def floating(self, dtype: str, depth: int) -> Expr:
        kind = self.pick.choice(FLOATING)
        x = self.value(dtype, depth)
        if kind == "where":
            return op("where", self.value("bool", depth), x, self.value(dtype, depth))
        if kind == "cast":
            other = self.pick.choice(["i32", "u8", "bool", "f64" if dtype == "f32" else "f32"])
            return cast(self.value(other, depth), dtype)
        if kind == "sqrt":
            return op("sqrt", op("abs", x))
        if kind in ("neg", "abs", "tanh", "sigmoid"):
            return op(kind, x)
        if kind == "sign":
            return op("sign", self.leaf(dtype))
        if kind == "div":
            return op("div", x, op("add", op("abs", self.value(dtype, depth)), const(0.5, dtype)))
        return op(kind, x, self.value(dtype, depth))

    def integer(self, dtype: str, depth: int) -> Expr:
        kind = self.pick.choice(INTEGER)
        x, y = self.value(dtype, depth), self.value(dtype, depth)
        if kind == "not":
            return op("not", x)
        if kind == "where":
            return op("where", self.value("bool", depth), x, y)
        if kind == "cast":
            return cast(self.leaf(self.pick.choice(["f32", "bool", *INTEGERS])), dtype)
        if kind in ("div", "floordiv", "remainder", "fmod"):
            y = op("max", y, const(1, dtype))
        return op(kind, x, y)

    def logical(self, depth: int) -> Expr:
        kind = self.pick.choice(LOGICAL)
        if kind in ("and", "or", "xor"):
            return op(kind, self.value("bool", depth), self.value("bool", depth))
        if kind == "not":
            return op(kind, self.value("bool", depth))
        dtype = self.pick.choice(["f32", "f64", "u8", "i64", "i8"])
        if kind == "cast":
            return cast(self.leaf(dtype), "bool")
        if kind == "isnan":
            return op(kind, self.leaf("f32"))
        return op(kind, self.leaf(dtype), self.leaf(dtype))

    def store(self, x: Expr) -> Store:
        """A store of every point that the value differs in."""
        row = self.pick.random() < 0.2 or self.varies_in_row(x)
        used = {a for a in range(len(self.axes)) if row or a not in self.reduced}
        dtype = self.pick.choice(["f32", "f32", "bf16", "f16"]) if x.dtype == "f32" else x.dtype
        strides, offset, count = self.layout(used)
        mask = None
        if row and self.pick.random() < 0.1:
            mask = op("lt", self.load("f32"), const(0.3, "f32"))
        return Store(Access(self.operand(count, dtype), dtype, strides, offset, None, mask), x)

    def varies_in_row(self, x: Expr) -> bool:
        found: dict[int, bool] = {}
        place = Access(0, "f32", (0,) * len(self.axes))
        for e in expressions(Nest((), (Store(place, x),))):
            inner = [found[id(a)] for a in e.args]
            if e.kind == "load":
                inner += [found[id(a)] for a in (e.data.extra, e.data.mask) if a is not None]
                inner += [e.data.strides[a] != 0 for a in self.reduced]
            inner += [e.data in self.reduced] if e.kind == "axis" else []
            found[id(e)] = any(inner) and e.kind != "reduce"
        return found[id(x)]
