"""The native side of planning: the fused units of a graph, their kernels, packed constants, and
weights that are computed from frozen parameters alone before the first call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.program import Constant, ConstantContent, Native
from torchair.codegen.streams import HOST
from torchair.codegen.target import BrokenKernels, Declined, Pack, Target
from torchair.engine.fuse.units import Fusion, Joins, Unit, always, fuse
from torchair.engine.strides import plain
from torchair.engine.units import emitter
from torchair.engine.units.batches import warn_of_library
from torchair.engine.units.emitter import Layouts, NotNative, parameters
from torchair.engine.units.kernels import UnitWriting, anchors, descriptions
from torchair.fallbacks import Fallback, note
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Value
from torchair.log import debug_print, logger
from torchair.operators import Trait, row_of
from torchair.operators.core import loops_of
from torchair.operators.reference import run_node

_FIXED = ("Const", *INPUTS)


class FoldedConstants:
    """Frozen values of a graph and those that were computed from them: `tensors` has both, `nodes`
    are those that need not run any more."""

    def __init__(self, graph: Graph, frozen: Mapping[Value, torch.Tensor]) -> None:
        self.tensors: dict[Value, torch.Tensor] = dict(frozen)
        self._device = next((t.device for t in frozen.values()), torch.device(HOST))
        self._sources: dict[Value, frozenset[Value]] = {v: frozenset([v]) for v in frozen}
        self._order = _needed(graph, {v for n in graph.nodes for v in parameters(n)}, self.tensors)
        self.nodes = frozenset(self._order)
        for node in self._order:
            made = [t.detach().clone() for t in self._run(node)]
            self.tensors.update(zip(node.outputs, made, strict=True))
            read = [self._sources.get(v, frozenset()) for v in node.values()]
            self._sources.update((v, frozenset().union(*read)) for v in node.outputs)

    def _run(self, node: Node) -> list[torch.Tensor]:
        env = dict(self.tensors)
        constants = [v for v in node.values() if v.node.type == "Const"]
        env.update((v, v.node.attr("value").to(self._device)) for v in constants)
        with torch.no_grad():
            return run_node(node, env)

    def sources(self, value: Value) -> frozenset[Value]:
        """The frozen values that a value follows from."""
        return self._sources[value]

    def update(self) -> None:
        """Compute everything again, in place, after a write to frozen values."""
        for node in self._order:
            for value, tensor in zip(node.outputs, self._run(node), strict=True):
                self.tensors[value].copy_(tensor)


def quantised_inputs(graph: Graph, static: Collection[Value]) -> set[Value]:
    """Inputs that weights, scales or offsets of quantised products follow from, if all that those
    follow from is `static`."""
    found: set[Value] = set()
    for product in graph.nodes:
        read: dict[Value, None] = dict.fromkeys(parameters(product))
        stack = list(read)
        while stack:
            more = [v for v in stack.pop().node.values() if v not in read]
            read |= dict.fromkeys(more)
            stack += more
        leaves = {v for v in read if not v.node.values() and v.node.type != "Const"}
        if leaves <= set(static):
            found |= leaves
    return found


def _needed(graph: Graph, wanted: set[Value], frozen: Mapping[Value, torch.Tensor]) -> list[Node]:
    """Nodes that these values follow from, in order, if frozen ones are all that they read."""
    fixed: set[Node] = set()
    for node in graph.nodes:
        row = row_of(node.type)
        if node.type in _FIXED or row is None or row.has(Trait.SIDE_EFFECT | Trait.RANDOM):
            continue
        read = node.values()
        known = all(v in frozen or v.node.type == "Const" or v.node in fixed for v in read)
        if read and known and not node.control and not node.control_users:
            fixed.add(node)
    needed: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in fixed and any(v in wanted for v in node.outputs):
            needed.add(node)
            wanted = wanted | set(node.values())
    return [n for n in graph.nodes if n in needed]


_Key = tuple[Value, Node | None, ConstantContent, Pack | None]
"""A constant, the normalisation that is folded into it, and how both are laid out."""


class NativeUnits:
    """Units of one graph and what was generated for them."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        frozen: Mapping[Value, torch.Tensor] | None = None,
        lane: Callable[[Node], str] = lambda node: "",
        joins: Joins = always,
        batch_invariant: bool = False,
    ) -> None:
        self._batch_invariant = batch_invariant
        self.prepared = FoldedConstants(graph, frozen or {})
        self.frozen = self.prepared.tensors
        self._descriptions = descriptions(self.is_constant, batch_invariant)
        served = anchors(target, self._descriptions)
        self.fusion: Fusion = fuse(
            graph,
            served,
            self.is_constant,
            lane,
            target.overlaps,
            self.prepared.nodes,
            joins,
            batch_invariant,
        )
        debug_print(3, self.fusion.report)
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.target = target
        numbers = any(n.outputs[0].content is not None for n in graph.data)  # others in each call
        self._varies = graph.is_dynamic or numbers
        self._made: dict[
            Any, list[emitter.OrderedKernel]
        ] = {}  # kernels by what units have in common
        self._signatures: dict[int, Any] = {}
        self._bits: dict[Value, int] = {}
        self._inside: dict[int, list[Node]] = {}
        self._packed: dict[_Key, tuple[Constant, torch.Tensor]] = {}
        self.copied: set[Value] = set()  # frozen values whose contents are in packed constants
        self._warned: set[str] = set()

    def is_constant(self, value: Value) -> bool:
        """Whether a value is the same in every call: part of the graph, or frozen by the user."""
        return value.node.type == "Const" or value in self.frozen

    def _content(self, value: Value) -> torch.Tensor:
        tensor = self.frozen.get(value)
        if tensor is None:
            return value.node.attr("value")
        self.copied.update(self.prepared.sources(value))
        return tensor

    def bits_of(self, value: Value) -> int:
        """How many bits the numbers of a constant need: none where all are zero, 4 or 8."""
        if value not in self._bits:
            self._bits[value] = _bits_of(self._content(value)) if self.is_constant(value) else 8
        return self._bits[value]

    def inside(self, unit: Unit) -> list[Node]:
        """Nodes and views of a unit, in the order of the graph."""
        known = self._inside.get(id(unit))
        if known is None:
            nodes = [*unit.nodes, *unit.views]
            known = self._inside[id(unit)] = sorted(nodes, key=self.position.__getitem__)
        return known

    def signature(self, unit: Unit) -> Any:
        """What units have in common that need the same code."""
        known = self._signatures.get(id(unit))
        if known is None:
            bits = tuple(map(self.bits_of, parameters(unit.anchor)))
            known = self._signatures[id(unit)] = emitter.signature(unit, self.is_constant), bits
        return known

    def emit(self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts) -> Native | None:
        """The call for a unit; None if there is none, which is said once with its names."""
        try:
            call = self._call(unit, fact, layout)
        except Exception as e:  # a fallback, or meant to be so
            self._report(unit, e)
            return None
        if call.order.failed is None:
            return call
        self._report(unit, call.order.failed)
        return None

    def _call(self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts) -> Native:
        """The same; NotNative if there is none. A kernel that was made before may serve it."""
        metas = [layout(v) for v in [*unit.inputs, *unit.outputs]]
        if self._varies:
            sizes: Any = tuple(map(emitter.pattern_of, metas))
        else:
            contents = tuple(emitter.contents_of(n, fact) for n in unit.group.nodes)
            sizes = tuple((m.shape, m.stride()) for m in metas), contents
        variants = self._made.setdefault((self.signature(unit), sizes), [])
        for made in variants:
            call = made.call(unit, metas)
            if call is not None:
                return call
        known = emitter.UnitSizes(unit, fact, [plain(m) for m in metas], self._varies)
        writing = UnitWriting(
            unit, known, self.target, self.is_constant, self.bits_of, self._batch_invariant
        )
        variants.append(writing.run())
        call = variants[-1].call(unit, metas)
        assert call is not None, "a kernel is right for the sizes it was made with"
        return call

    def following_rows(self) -> list[Node]:
        """Operators with a kernel whose sums follow from the number of rows, whatever is asked."""
        described = {
            u.anchor: self._descriptions[u.kind](u.anchor)
            for u in self.fusion.units
            if u.kind != "loops"
        }
        return [node for node, anchor in described.items() if not self.target.keeps_rows(anchor)]

    def _report(self, unit: Unit, error: Exception) -> None:
        """Why a unit runs node by node: a fallback, unless that is meant to be so."""
        if self._batch_invariant:
            warn_of_library(unit.nodes)
        name = "+".join(n.type for n in unit.nodes) + f" ({unit.nodes[0].name})"
        if isinstance(error, NotNative | Declined):
            logger.info("%s runs node by node: %s", name, error)
            return
        if name not in self._warned:
            self._warned.add(name)
            note(Fallback.KERNEL, f"no native code for {name}, it runs node by node", error)

    def generate(self, natives: Iterable[Native]) -> None:
        """The text of kernels, as far as it is new, and constants as they want them. Raises
        BrokenKernels if there is none for some."""
        errors: dict[str, Exception] = {}
        for native in natives:
            try:
                pack = native.generated.pack
            except Exception as e:  # a fallback when it is planned again
                native.order.failed = errors[native.order.label] = e
                continue
            for word, x in native.constants.items():
                if word in pack or x.content != "own":
                    native.packed[word] = self.packed(x, pack.get(word))
        if errors:
            raise BrokenKernels(errors)

    def forbid(self, natives: Sequence[Native], broken: BrokenKernels) -> bool:
        """Let units whose kernels cannot be run node by node from now on; False if none of these
        is to blame."""
        for native in natives:
            if native.order.failed is None and native.kernel.entry in broken.errors:
                native.order.failed = broken.errors[native.kernel.entry]
        return any(native.order.failed is not None for native in natives)

    def packed(self, x: Constant, pack: Pack | None) -> torch.Tensor:
        """A constant as its kernel reads it."""
        key = (x.value, None if x.content == "own" else x.unit.folded, x.content, pack)
        if key not in self._packed:
            self._packed[key] = x, self._packed_anew(x, pack)
        return self._packed[key][1]

    def content(self, x: Constant, pack: Pack | None) -> torch.Tensor:
        """A constant as some kernel would read it, without a note of it."""
        noted = set(self.copied)
        try:
            return self._packed_anew(x, pack)
        finally:
            self.copied = noted

    def repack(self) -> bool:
        """Bring packed constants up to date after weights were written to; they stay in place.
        False if integers do not fit their bits any more: then all is to be made anew."""
        self.prepared.update()
        if any(_bits_of(self._content(v)) > bits for v, bits in self._bits.items() if bits < 8):
            return False
        for (*_, pack), (x, packed) in self._packed.items():
            packed.copy_(self._packed_anew(x, pack))
        return True

    def _packed_anew(self, x: Constant, pack: Pack | None) -> torch.Tensor:
        folded = {"scaled": self._scaled, "shift": self._shift}.get(x.content)
        content = self._content(x.value) if folded is None else folded(x)
        return content if pack is None else pack(content)

    def _scaled(self, x: Constant) -> torch.Tensor:
        """Weights of a convolution with the scale of its normalisation folded in."""
        assert x.unit.folded is not None
        weight, scale = self._content(x.value), self._scale(x.unit.folded)
        return (weight * scale.reshape(-1, 1, 1, 1)).to(weight.dtype)

    def _scale(self, norm: Node) -> torch.Tensor:
        """What a batch normalisation multiplies each channel with."""
        scale, variance = (self._content(norm.value_on(p)).float() for p in ("scale", "variance"))
        return scale / torch.sqrt(variance + norm.attr("epsilon"))

    def _shift(self, x: Constant) -> torch.Tensor:
        """What is added to each channel of a convolution with its normalisation folded in."""
        unit, norm = x.unit, x.unit.folded
        assert norm is not None
        offset, mean = (self._content(norm.value_on(p)).float() for p in ("offset", "mean"))
        bias = unit.anchor.inputs.get("bias")
        if isinstance(bias, Value):
            mean = mean - self._content(bias).float()
        return (offset - mean * self._scale(norm)).contiguous()

    def is_pointwise(self, unit: Unit) -> bool:
        """Whether a result's element depends on the same elements of operands of its dims."""
        kinds = {loops_of(n.type).kind for n in unit.group.nodes}
        return unit.kind == "loops" and kinds == {"map"} and not unit.group.reduced

    def updated(self, unit: Unit) -> Value | None:
        """The value that a unit updates in place, if it does."""
        node = unit.group.nodes[-1] if unit.group.nodes else None
        if node is None or unit.kind != "loops" or loops_of(node.type).kind != "update":
            return None
        return node.values()[0]

    def rereads(self, unit: Unit) -> bool:
        """Whether a unit that updates a value reads it for something else too."""
        value = self.updated(unit)
        return sum(v is value for n in unit.group.nodes for v in n.values()) > 1


def _bits_of(tensor: torch.Tensor) -> int:
    if tensor.is_floating_point() or not tensor.numel():
        return 8 if tensor.any() else 0
    least, most = (int(x) for x in torch.aminmax(tensor))
    if least == most == 0:
        return 0
    return 4 if least >= -8 and most <= 7 else 8
