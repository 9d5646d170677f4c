"""The native side of planning: the fused units of a graph, their kernels, packed constants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchair.codegen.kernel import BrokenKernels, Declined, Pack
from torchair.codegen.target import Target
from torchair.engine.fuse.units import Fusion, Unit, fuse
from torchair.engine.lower import LOWERINGS
from torchair.engine.plan.records import Native
from torchair.engine.units import (
    Content,
    Emitter,
    Layouts,
    NativeCall,
    NotNative,
    Packed,
    heads,
    make_kernel,
    value_on,
)
from torchair.flags import Flags
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.log import logger

_Key = tuple[Value, Node | None, Content, Pack | None]


class NativeUnits:
    """Units of one graph and what was generated for them."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        frozen: Mapping[Value, torch.Tensor] | None = None,
        lane: Callable[[Node], str] = lambda node: "",
    ) -> None:
        self.frozen = dict(frozen or {})
        self.fusion: Fusion = fuse(graph, heads(target, self.is_constant), self.is_constant, lane)
        if Flags.read().debug >= 3:
            print(self.fusion.report())
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.target = target
        self._emitter = Emitter(target, graph.is_dynamic, self.is_constant, make_kernel)
        self._inside: dict[int, list[Node]] = {}
        self._packed: dict[_Key, tuple[Packed, torch.Tensor]] = {}
        self.copied: set[Value] = set()  # frozen values whose contents are in packed constants
        self._warned: set[str] = set()
        self._broken: dict[str, Exception] = {}

    def is_constant(self, value: Value) -> bool:
        """Whether a value is the same in every call: part of the graph, or frozen by the user."""
        return value.node.type == "Const" or value in self.frozen

    def _content(self, value: Value) -> torch.Tensor:
        tensor = self.frozen.get(value)
        if tensor is None:
            return value.node.attr("value")
        self.copied.add(value)
        return tensor

    def inside(self, unit: Unit) -> list[Node]:
        """Nodes and views of a unit, in the order of the graph."""
        known = self._inside.get(id(unit))
        if known is None:
            nodes = [*unit.nodes, *unit.views]
            known = self._inside[id(unit)] = sorted(nodes, key=self.position.__getitem__)
        return known

    def signature(self, unit: Unit) -> Any:
        """What units have in common that need the same code."""
        return self._emitter.signature_of(unit)

    def emit(
        self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts
    ) -> NativeCall | None:
        """The call for a unit; None if there is none, which is said once with its names."""
        try:
            call = self._emitter.emit(unit, fact, layout)
            broken = self._broken.get(call.kernel.entry)
            if broken is None:
                return call
            self._warn(unit, broken)
        except (NotNative, Declined) as e:
            logger.info("%s runs node by node: %s", _names(unit), e)
        except Exception as e:
            self._warn(unit, e)
        return None

    def _warn(self, unit: Unit, error: Exception) -> None:
        name = _names(unit)
        if name not in self._warned:
            self._warned.add(name)
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"no native code for {name}, it runs node by node ({reason})",
                UserWarning,
                stacklevel=2,
            )

    def forbid(self, broken: BrokenKernels) -> None:
        """Kernels that LLVM refused: their units run node by node from now on."""
        self._broken.update(broken.errors)

    def bind(self, call: NativeCall, slots: Mapping[Value, int]) -> Native:
        """The call with slots for values, and constants packed."""
        places: list[int | torch.Tensor | str] = []
        for x in call.operands:
            if isinstance(x, Packed):
                places.append(self._pack(x))
            else:
                places.append(slots[x] if isinstance(x, Value) else x)
        return Native(call.generated, places, call.numbers, call.work)

    def _pack(self, x: Packed) -> torch.Tensor:
        folded = None if x.content == "own" else x.unit.folded
        key = (x.value, folded, x.content, x.pack)
        if key not in self._packed:
            self._packed[key] = x, self._packed_anew(x)
        return self._packed[key][1]

    def repack(self) -> None:
        """Bring packed constants up to date after weights were written to; they stay in place."""
        for x, packed in self._packed.values():
            packed.copy_(self._packed_anew(x))

    def _packed_anew(self, x: Packed) -> torch.Tensor:
        content = {"own": self._own, "scaled": self._scaled, "shift": self._shift}[x.content](x)
        return content if x.pack is None else x.pack(content)

    def _own(self, x: Packed) -> torch.Tensor:
        return self._content(x.value)

    def _scaled(self, x: Packed) -> torch.Tensor:
        """Weights of a convolution with the scale of its normalisation folded in."""
        assert x.unit.folded is not None
        weight, scale = self._content(x.value), self._scale(x.unit.folded)
        return (weight * scale.reshape(-1, 1, 1, 1)).to(weight.dtype)

    def _scale(self, norm: Node) -> torch.Tensor:
        """What a batch normalisation multiplies each channel with."""
        scale, variance = (
            self._content(value_on(norm, p)).float() for p in ("scale", "variance")
        )
        return scale / torch.sqrt(variance + norm.attr("epsilon"))

    def _shift(self, x: Packed) -> torch.Tensor:
        """What is added to each channel of a convolution with its normalisation folded in."""
        unit, norm = x.unit, x.unit.folded
        assert norm is not None
        offset, mean = (self._content(value_on(norm, p)).float() for p in ("offset", "mean"))
        bias = unit.head.inputs.get("bias")
        if isinstance(bias, Value):
            mean = mean - self._content(bias).float()
        return (offset - mean * self._scale(norm)).contiguous()

    def is_pointwise(self, unit: Unit) -> bool:
        """Whether a result's element depends on the same elements of operands of its dims."""
        kinds = {LOWERINGS[n.type].kind for n in unit.group.nodes}
        return unit.kind == "loops" and kinds == {"map"} and not unit.group.reduced

    def updated(self, unit: Unit) -> Value | None:
        """The value that a unit updates in place, if it does."""
        node = unit.group.nodes[-1] if unit.group.nodes else None
        if node is None or unit.kind != "loops" or LOWERINGS[node.type].kind != "update":
            return None
        return node.values()[0]

    def rereads(self, unit: Unit) -> bool:
        """Whether a unit that updates a value reads it for something else too."""
        value = self.updated(unit)
        return sum(v is value for n in unit.group.nodes for v in n.values()) > 1


def _names(unit: Unit) -> str:
    nodes: list[Node] = unit.nodes
    return "+".join(n.type for n in nodes) + f" ({nodes[0].name})"
