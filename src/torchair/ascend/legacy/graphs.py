"""Graphs of both modes made with the original's arguments, and exported programs as GE graphs:
views of what compiles and runs here."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from torchair import concrete
from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.devices import device_of
from torchair.ge.graph import Graph, Node
from torchair.operators import infer
from torchair.pipeline import NpuFxCompiler, convert, next_graph_id, optimize_fx, own_copy
from torchair.serde import to_message
from torchair.torch_private.export import composite_decomposition as _get_decomp_for_cia
from torchair.torch_private.export import composite_operators as _collect_all_valid_cia_ops
from torchair.trace import Trace

_MISSING = object()
_replaced: dict[tuple[type, str], Any] = {}  # what was there before


class _LegacyMeta(abc.ABCMeta):
    """A class that is made with other arguments than ours. Methods that scripts put in place of
    its own are put in place of ours, and our objects are instances."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(("_abc_", "__abstract")):
            super().__setattr__(name, value)
            return
        owner = cls.__mro__[1]
        _replaced.setdefault((owner, name), vars(owner).get(name, _MISSING))
        setattr(owner, name, value)

    def __delattr__(cls, name: str) -> None:
        owner = cls.__mro__[1]
        before = _replaced.pop((owner, name))
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, cls.__mro__[1])


class GeConcreteGraph(concrete.GeConcreteGraph, metaclass=_LegacyMeta):
    """A graph for the engine that has a name and options first, and an FX graph later."""

    def __init__(
        self, config: CompilerConfig, name: str | None = None, record_ascend_ir: bool = False
    ) -> None:
        """`record_ascend_ir` keeps what each FX node became, for `get_ascend_ir_map`."""
        self.config, self.name = config, name or f"graph_{next_graph_id()}"
        self.graph = Graph(self.name, infer)
        self.fx_graph = None
        self._settings = Settings.of(config)
        self._gears = ()
        self._record_asc_ir = record_ascend_ir
        self._ascend_ir_map: dict[str, NodeIR] | None = {} if record_ascend_ir else None

    def save_fx_graph(self, graph_module: fx.GraphModule) -> None:
        """The FX graph that is to be converted."""
        self.fx_graph = graph_module

    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        source = self.fx_graph
        assert source is not None, "save_fx_graph comes first"
        conversion = convert(own_copy(source), given, self._settings, frozenset(), self.name)
        if self._ascend_ir_map is not None:
            self._ascend_ir_map |= ir_map(source, conversion.graph)
        super().__init__(conversion, self._settings, device_of(given))
        self.fx_graph = source
        super().optimize(given, trace, aot_gm)

    def get_ascend_ir_map(self) -> dict[str, NodeIR]:
        """What each FX node became, where that was asked for."""
        return self._ascend_ir_map or {}


class AclConcreteGraph(concrete.AclConcreteGraph, metaclass=_LegacyMeta):
    """A graph for capture that has a name and options first, and an FX graph later."""

    def __init__(self, config: CompilerConfig, name: str = "graph", **_: Any) -> None:
        self.config, self.name = config, name
        self._source: fx.GraphModule | None = None

    def save_fx_graph(self, graph_module: fx.GraphModule) -> None:
        """The FX graph that is to be captured."""
        self._source = graph_module

    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        assert self._source is not None, "save_fx_graph comes first"
        gm, settings = own_copy(self._source), Settings.of(self.config)
        engine = NpuFxCompiler(self.config)._engine_of(gm, given, frozenset(), self.name)
        super().__init__(gm, self.name, settings, frozenset(), engine, False, self.config)
        super().optimize(given, trace, aot_gm)


# ---- `torchair.ge.ge_graph_ascend`


@dataclass
class NodeIR:
    """The GE nodes of one FX node, as plain values; `source` is "converter", or nothing where torch
    computes it. `mapping` names the nodes' results."""

    source: str
    ops: list[dict[str, Any]]
    mapping: dict[str, Any] = field(default_factory=dict)


@dataclass
class GeGraphAscend:
    """An exported program as a GE graph: its message, what each FX node became, and the program
    before and after the passes."""

    proto: Any
    ascend_ir_map: Mapping[str, NodeIR]
    original: ExportedProgram | None
    optimized: ExportedProgram | None

    def to_json_dict(self) -> dict[str, Any]:
        """The message as plain values, bytes as hexadecimal numbers."""
        found: dict[str, Any] = _plain(self.proto)
        return found


def optimize_and_convert(
    ep: ExportedProgram,
    config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Any] | None = None,
) -> GeGraphAscend:
    """Decompose an exported program, run the FX passes over it, and convert it."""
    config = CompilerConfig() if config is None else config
    composite = {op: _get_decomp_for_cia(op) for op in _collect_all_valid_cia_ops()}
    program = ep.run_decompositions({**composite, **(custom_decompositions or {})})
    args, kwargs = program.example_inputs or ((), {})
    given = list(program._graph_module_flat_inputs(args, kwargs))

    def passes(gm: fx.GraphModule) -> Any:
        from torch.fx.passes.infra.pass_base import PassResult

        return PassResult(optimize_fx(own_copy(gm), given, config), True)

    optimized = program._transform_do_not_use(passes)
    name = "ascend_ir_graph"
    gm = own_copy(optimized.graph_module)
    conversion = convert(gm, given, Settings.of(config), frozenset(), name)
    made = ir_map(gm, conversion.graph)
    return GeGraphAscend(to_message(conversion.graph), made, program, optimized)


def ir_map(gm: fx.GraphModule, graph: Graph) -> dict[str, NodeIR]:
    """What each call of an FX graph became."""
    made: dict[str, list[Node]] = {n.name: [] for n in gm.graph.nodes if n.op == "call_function"}
    for node in graph.nodes:
        if node.origin is not None and node.origin.fx_name in made:
            made[node.origin.fx_name].append(node)
    messages = {op.name: op for op in to_message(graph, payloads=False).op}
    return {name: _node_ir(nodes, messages) for name, nodes in made.items()}


def _node_ir(nodes: Sequence[Node], messages: Mapping[str, Any]) -> NodeIR:
    generic = any(n.type == "TorchCall" for n in nodes)
    ops = [_plain(messages[n.name]) for n in nodes]
    results = {"outputs": [v.edge for v in nodes[-1].outputs]} if nodes else {}
    return NodeIR("" if generic else "converter", ops, results)


def _plain(message: Any) -> Any:
    """A message as plain values."""
    from google.protobuf.json_format import MessageToDict

    return _without_bytes(MessageToDict(message))


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {k: _without_bytes(v) for k, v in value.items()}
    return [_without_bytes(v) for v in value] if isinstance(value, list | tuple) else value


# ---- counters of names


class GraphCounter:
    """Numbers for names of streams and events of a graph."""

    COUNT = -1

    @classmethod
    def graph_id(cls) -> str:
        """The next one, as a prefix."""
        cls.COUNT += 1
        return f"graph_{cls.COUNT}_"

    @classmethod
    def set_graph_id(cls, value: int) -> None:
        """Count from here on."""
        cls.COUNT = value
