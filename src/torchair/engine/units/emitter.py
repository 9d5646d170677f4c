"""From a fused unit to a native call: the kernel, and the words it is called with.

Static graphs get kernels with their sizes in the code. In dynamic graphs sizes and strides are
Numbers, so that a kernel made for one plan serves the others; an `Emitter` keeps what it made, and
a plan for new sizes finds its kernels there. Units that look alike, as those of the layers of a
model, share one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchair.codegen.numbers import largest
from torchair.codegen.target import Order, Target
from torchair.engine.fuse.units import Unit, is_number, operands_of
from torchair.engine.plan.strided import Strided
from torchair.engine.plan.strides import Meta
from torchair.engine.units.heads import parameters
from torchair.engine.units.sizes import Sizes
from torchair.ge.graph import Fact, Node, Value

SCRATCH, FAULT = "scratch", "fault"

Content = Literal["own", "scaled", "shift"]
"""What a constant holds for a kernel: its own content, the weights of a convolution times the
scale of the normalisation after it, or what is added then."""


@dataclass(frozen=True)
class Word:
    """What an address word holds: an operand of the unit (by number), or memory of the program
    (SCRATCH or FAULT)."""

    operand: int = -1
    memory: str = ""
    content: Content = "own"


@dataclass(frozen=True)
class Constant:
    """A constant operand of a unit, which its kernel may want in another layout."""

    unit: Unit
    value: Value
    content: Content


Place = Value | Constant | str
"""What an address word holds: a value, SCRATCH, or FAULT, the word where a kernel notes down that
an index was out of range."""


@dataclass(frozen=True)
class NativeCall:
    """A kernel with its operands, in the order of its words, and the numbers after them."""

    order: Order
    operands: tuple[Place, ...]
    numbers: tuple[int, ...]
    work: float  # microseconds that one thread needs, roughly


Layouts = Callable[[Value], Meta]
"""Dims and strides of a value that lives in memory."""


@dataclass(frozen=True)
class Made:
    """A kernel that was ordered, and how its words follow from the sizes of a plan."""

    target: Target
    order: Order
    words: tuple[Word, ...]
    constants: frozenset[int]  # words of operands that are the same in every call
    sizes: Sizes
    flops: Callable[[Sequence[Meta]], float]

    def call(self, unit: Unit, metas: Sequence[Meta]) -> NativeCall | None:
        """The call for a unit and these sizes; None if the kernel is not for them."""
        numbers = self.sizes.words(metas)
        if numbers is None:
            return None
        values = [*unit.inputs, *unit.outputs]
        operands = tuple(self._place(unit, values, k) for k in range(len(self.words)))
        moved = sum(m.numel() * m.element_size() for m in metas)
        points: Any = 0
        for meta in metas[len(unit.inputs) :]:
            points = largest(points, meta.numel())
        work = self.target.work(moved, points * len(unit.nodes), self.flops(metas))
        return NativeCall(self.order, operands, numbers, work)

    def _place(self, unit: Unit, values: Sequence[Value], number: int) -> Place:
        word = self.words[number]
        if word.operand < 0:
            return word.memory
        value = values[word.operand]
        return Constant(unit, value, word.content) if number in self.constants else value


Maker = Callable[["Emitter", Unit, Sizes], Made]


class Emitter:
    """Makes native calls for the units of one graph, each kind of kernel once."""

    def __init__(
        self, target: Target, dynamic: bool, constant: Callable[[Value], bool], make: Maker,
        bits: Callable[[Value], int] = lambda value: 8,
    ) -> None:  # fmt: skip
        self.target = target
        self.constant = constant  # whether a value is the same in every call
        self.bits = bits  # how many bits the numbers of a constant need: 0, 4 or 8
        self._dynamic = dynamic
        self._make = make
        self._made: dict[Any, list[Made]] = {}
        self._signatures: dict[int, Any] = {}

    def emit(self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts) -> NativeCall:
        """The call that computes a unit; NotNative if there is none."""
        metas = [layout(v) for v in [*unit.inputs, *unit.outputs]]
        variants = self._made.setdefault(self._key(unit, fact, metas), [])
        for made in variants:
            call = made.call(unit, metas)
            if call is not None:
                return call
        plain = [m.plain() if isinstance(m, Strided) else m for m in metas]
        variants.append(self._make(self, unit, Sizes(unit, fact, plain, self._dynamic)))
        call = variants[-1].call(unit, metas)
        assert call is not None, "a kernel is right for the sizes it was made with"
        return call

    def signature_of(self, unit: Unit) -> Any:
        """The signature of a unit, worked out once."""
        known = self._signatures.get(id(unit))
        if known is None:
            bits = tuple(map(self.bits, parameters(unit.head)))
            known = self._signatures[id(unit)] = signature(unit, self.constant), bits
        return known

    def _key(
        self, unit: Unit, fact: Callable[[Value], Fact], metas: Sequence[Meta]
    ) -> Any:
        known = self.signature_of(unit)
        if self._dynamic:
            return known, tuple(_pattern(m) for m in metas)
        contents = tuple(_contents(n, fact) for n in unit.group.nodes)
        return known, tuple((m.shape, m.stride()) for m in metas), contents


def _pattern(meta: Meta) -> Any:
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
            return ("number", value.node.attr("value").item(), value.dtype)
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


def _contents(node: Node, fact: Callable[[Value], Fact]) -> Any:
    data = set(operands_of(node))
    return tuple(fact(v).content for v in node.values() if v not in data)
