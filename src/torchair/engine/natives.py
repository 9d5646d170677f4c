"""The native side of planning: the fused units of a graph, their kernels, packed constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from torchair.codegen.llvm.matmul import pack as pack_matrix
from torchair.codegen.llvm.target import Target
from torchair.engine.fuse import Fusion, Unit, fuse
from torchair.engine.lower import LOWERINGS
from torchair.engine.plan import Native
from torchair.engine.units import HEADS, Emitter, Layouts, NativeCall, NotNative, Packed
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.log import logger


class Natives:
    """Units of one graph and what was generated for them."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.fusion: Fusion = fuse(graph, HEADS)
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self._target = target
        self._emitter = Emitter(target, graph.is_dynamic)
        self._packed: dict[tuple[Value, str], torch.Tensor] = {}
        self._warned: set[str] = set()

    def emit(
        self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts
    ) -> NativeCall | None:
        """The call for a unit; None if there is none, which is said once with its names."""
        try:
            return self._emitter.emit(unit, fact, layout)
        except NotNative as e:
            logger.info("%s runs node by node: %s", _names(unit), e)
        except Exception as e:
            name = _names(unit)
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "no native code for %s, it runs node by node (%s: %s)",
                    name, type(e).__name__, e,
                )  # fmt: skip
        return None

    def bind(self, call: NativeCall, slots: Mapping[Value, int]) -> Native:
        """The call with slots for values, and constants packed."""
        places: list[int | torch.Tensor | None] = []
        for x in call.operands:
            if isinstance(x, Packed):
                places.append(self._pack(x))
            else:
                places.append(None if x is None else slots[x])
        return Native(call.kernel, places, call.numbers, call.scratch, call.work)

    def _pack(self, x: Packed) -> torch.Tensor:
        key = (x.value, x.how)
        if key not in self._packed:
            tensor = x.value.node.attr("value")
            self._packed[key] = pack_matrix(tensor, self._target, x.how == "linear")
        return self._packed[key]

    def updated(self, unit: Unit) -> Value | None:
        """The value that a unit updates in place, if it does."""
        node = unit.group.nodes[-1] if unit.group.nodes else None
        if node is None or unit.kind != "loops" or LOWERINGS[node.type].kind != "update":
            return None
        return node.values()[0]


def _names(unit: Unit) -> str:
    nodes: list[Node] = unit.nodes
    return "+".join(n.type for n in nodes) + f" ({nodes[0].name})"
