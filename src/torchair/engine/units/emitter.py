"""From a fused unit to a native call: the kernel, and the words it is called with.

Static graphs get kernels with their sizes in the code. In dynamic graphs sizes and strides are
Numbers, so that a kernel made for one plan serves the others. Units that look alike, as those of
the layers of a model, share one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.codegen.program import SIZES_AT, Argument, Native
from torchair.codegen.sizes import GuardedInt, GuardSet, Int, Size, largest
from torchair.codegen.target import KernelOrder, Target
from torchair.engine.fuse.units import Unit, is_number
from torchair.engine.strides import Meta
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Sym, is_static
from torchair.operators.core import operands_of

QUANTISED = "WeightQuantBatchMatmulV2"
PARAMETERS = ("weight", "antiquant_scale", "antiquant_offset")
"""What a product with a quantised weight reads beside the other factor: the weight first."""

INTEGERS = "QuantBatchMatmulV3"
"""A product of bytes; native code makes the sums alone, which is what a result of int32 is."""


def parameters(node: Node) -> list[Value]:
    """The weight of a quantised product, its scales, and its offsets if it has some. Nothing of
    other products."""
    ports = {QUANTISED: PARAMETERS, INTEGERS: ("x2",)}.get(node.type, ())
    return [v for port in ports if isinstance(v := node.inputs.get(port), Value)]


class NotNative(Exception):
    """A unit that the generators cannot serve with these sizes and strides."""


def is_one(n: Int) -> bool:
    """Whether a size is known to be 1."""
    return not isinstance(n, GuardedInt) and n == 1


class UnitSizes:
    """Dims, strides and contents of a unit's values, as integers or as GuardedInts."""

    def __init__(
        self,
        unit: Unit,
        fact: Callable[[Value], Fact],
        metas: Sequence[Meta],
        dynamic: bool,
    ) -> None:
        self._fact = fact
        self._values = [*unit.inputs, *unit.outputs]
        self._metas = dict(zip(self._values, metas, strict=True))
        self._guards = GuardSet() if dynamic else None
        self._sources: list[tuple[int, int]] = []  # (operand, dim), or (operand, -1 - dim): stride
        self._symbols: dict[Any, Int] = {}
        self._recipe: Any = None
        if dynamic:
            self._learn()
        self._strides = {v: self._strides_of(k, v) for k, v in enumerate(self._values)}

    def _learn(self) -> None:
        dims = [
            (d.expr, k, i)
            for k, v in enumerate(self._values)
            for i, d in enumerate(v.shape or ())
            if isinstance(d, Sym)
        ]
        for expr, k, i in sorted(dims, key=lambda x: not x[0].is_Symbol):
            number = self._number(k, i, self._metas[self._values[k]].shape[i])
            if self._symbols.setdefault(expr, number) != number:
                raise NotNative(f"{self._values[k]} does not have the dims that its graph declares")

    def _number(self, operand: int, dim: int, value: int) -> GuardedInt:
        assert self._guards is not None
        self._sources.append((operand, dim))
        return self._guards.variable(value)

    def dims(self, value: Value) -> tuple[Int, ...]:
        """Dims of any value of the unit."""
        if self._guards is None:
            return tuple(self._fact(value).shape or ())  # type: ignore[arg-type]
        return tuple(self._dim(d) for d in value.shape or ())

    def _dim(self, dim: Any) -> Int:
        """A dim. Whether it is 1 decides on broadcasting, so that a kernel is made for either."""
        n = self._of(dim)
        return 1 if isinstance(n, GuardedInt) and n == 1 else n

    def _of(self, dim: Any) -> Int:
        if not isinstance(dim, Sym):
            return int(dim)
        return _evaluated(dim.expr, self._symbols)

    def strides(self, value: Value) -> tuple[Int, ...]:
        """Strides of an operand."""
        return self._strides[value]

    def _strides_of(self, k: int, value: Value) -> tuple[Int, ...]:
        meta = self._metas[value]
        if self._guards is not None and not _fits(value.shape, meta):
            raise NotNative(f"{value} does not have the dims that its graph declares")
        if self._guards is None or (meta.is_contiguous() and is_static(value.shape)):
            return meta.stride()
        if meta.is_contiguous():
            return _contiguous(self.dims(value))
        return tuple(
            s if s in (0, 1) else self._number(k, -1 - i, s) for i, s in enumerate(meta.stride())
        )

    def fact(self, value: Value) -> Fact:
        """What rules see of a value."""
        if self._guards is None:
            return self._fact(value)
        content = value.content
        if isinstance(content, tuple):
            content = tuple(self._of(c) for c in content)
        elif content is not None:
            content = self._of(content)
        return Fact(value.dtype, self.dims(value), content)  # type: ignore[arg-type]

    def word(self, n: Int) -> Size:
        """What generators take for a size."""
        return n if self._guards is None else self._guards.word(n, SIZES_AT)  # type: ignore[return-value]

    def seal(self) -> None:
        """No more decisions: from now on the kernel is asked whether it fits."""
        if self._guards is not None:
            self._recipe = self._guards.recipe()
        self._metas = {}

    def words(self, metas: Sequence[Meta]) -> tuple[int, ...] | None:
        """Sizes to pass to the kernel; None if it is not made for such operands."""
        if self._recipe is None:
            return ()
        if not all(_fits(v.shape, m) for v, m in zip(self._values, metas, strict=True)):
            return None
        return self._recipe(
            [metas[k].shape[i] if i >= 0 else metas[k].stride()[-1 - i] for k, i in self._sources]
        )


def _fits(shape: Any, meta: Meta) -> bool:
    """Whether declared dims agree with real ones, so that what is derived from them is right."""
    return len(shape or ()) == meta.dim() and all(
        isinstance(d, Sym) or d == n for d, n in zip(shape or (), meta.shape, strict=True)
    )


def _contiguous(dims: Sequence[Int]) -> tuple[Int, ...]:
    strides: list[Int] = []
    step: Int = 1
    for d in reversed(dims):
        strides.append(step)
        step = step * d
    return tuple(reversed(strides))


def _evaluated(expr: Any, known: Mapping[Any, Int]) -> Int:
    """A symbolic size as an integer or GuardedInt, from the sizes of the operands."""
    if expr in known:
        return known[expr]
    if expr.is_Integer:
        return int(expr)
    if expr.is_Add or expr.is_Mul:
        parts = [_evaluated(a, known) for a in expr.args]
        total = parts[0]
        for part in parts[1:]:
            total = total + part if expr.is_Add else total * part
        return total
    if type(expr).__name__ == "FloorDiv":
        a, b = (_evaluated(x, known) for x in expr.args)
        return a // b
    raise NotNative(f"the size {expr} does not follow from the operands")


Layouts = Callable[[Value], Meta]
"""Dims and strides of a value that lives in memory."""


@dataclass(frozen=True)
class OrderedKernel:
    """A kernel that was ordered, and how its words follow from the sizes of a plan."""

    target: Target
    order: KernelOrder
    arguments: Sequence[Argument]
    sizes: UnitSizes
    flops: Callable[[Sequence[Meta]], float]

    def call(self, unit: Unit, metas: Sequence[Meta]) -> Native | None:
        """The call for a unit and these sizes; None if the kernel is not for them."""
        numbers = self.sizes.words(metas)
        if numbers is None:
            return None
        moved = sum(m.numel() * m.element_size() for m in metas)
        points: Any = 0
        for meta in metas[len(unit.inputs) :]:
            points = largest(points, meta.numel())
        work = self.target.work(moved, points * len(unit.nodes), self.flops(metas))
        return Native(self.order, self.arguments, numbers, work, unit)


def pattern_of(meta: Meta) -> Any:
    """What kernels for many sizes are chosen by: where memory is contiguous or repeated."""
    return meta.is_contiguous() or tuple(2 if s >= 2 else int(s) for s in meta.stride())


def signature(unit: Unit, constant: Callable[[Value], bool]) -> Any:
    """What two units have in common that need the same code."""
    names: dict[Value, int] = {}
    for value in [*unit.inputs, *unit.outputs]:
        names.setdefault(value, len(names))

    def name(value: Value | None) -> Any:
        if value is None:
            return None
        if is_number(value):
            # As text: 0.0 equals -0.0, and NaN not even itself.
            return ("number", repr(value.node.attr("value").item()), value.dtype)
        return names.setdefault(value, len(names)), value.dtype

    rows = []
    for node in unit.all_nodes:
        data = set(operands_of(node))
        attrs = tuple((k, repr(a.value)) for k, a in sorted(node.attrs.items()))
        ins = tuple((p, name(v)) for p, _, v in node.slots() if v is None or v in data)
        steers = tuple(v.content for v in node.values() if v not in data)
        rows.append((node.type, attrs, ins, steers, tuple(name(v) for v in node.outputs)))
    same = tuple(constant(v) for v in unit.inputs)
    outs = tuple(names[v] for v in unit.outputs)
    shapes = tuple(v.shape for v in names)
    return unit.kind, tuple(rows), tuple(sorted(unit.group.reduced)), outs, same, shapes


def contents_of(node: Node, fact: Callable[[Value], Fact]) -> Any:
    """What rules see of the values that steer a node."""
    data = set(operands_of(node))
    return tuple(fact(v).content for v in node.values() if v not in data)
