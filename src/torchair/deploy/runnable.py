"""Runnable: a GE graph, in memory or from bytes, as a function of tensors.

Neither Dynamo nor AOTAutograd is loaded for it; sympy is where dims are symbols, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchair.codegen.target import Target
from torchair.devices import Device
from torchair.devices.base import GraphCall, device_named
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import mapping_assign_op_to_graph_output
from torchair.errors import InputError, SerializationError
from torchair.flags import debug_level
from torchair.ge.graph import Graph
from torchair.ge.shapes import Sym, contiguous_strides, is_static
from torchair.ge.signature import Computed, GraphResult, InputSource, InputView, Signature
from torchair.operators import infer
from torchair.serde import from_bytes
from torchair.serde.convention import Convention, check

Options = Mapping[str, str]


class Runnable:
    """A finished graph that is called with tensors.

    `bound` are arguments that are the same in every call, by position, as the weights of a model:
    they are left out of calls, and may be frozen.
    """

    def __init__(
        self,
        graph: Graph,
        convention: Convention | None = None,
        *,
        bound: Mapping[int, torch.Tensor] | None = None,
        options: Options | None = None,
        process: Options | None = None,
        device: str = "cpu",
        finished: bool = False,
        target: Target | None = None,
    ) -> None:
        """`options` are those of the engine for this graph, `process` those for the process, as
        `Settings` has them. The graph belongs to the runnable; it is `finished` if the engine has
        optimised it before. `target` makes kernels, if that is not the one of the device."""
        if convention is None:
            convention = convention_of(graph, device)
        output = graph.output
        if output is None:
            raise SerializationError(f"graph {graph.name!r} has no NetOutput")
        check(convention, len(graph.data), len(output.values()))
        bound = dict(bound or {})
        signature = _weights_last(convention.signature, bound)
        self.graph, self.signature = graph, signature
        self.arguments = signature.arguments - len(bound)  # how many a call has
        self._bound = tuple(bound[k] for k in sorted(bound))
        state = GraphState(list(signature.inputs), dict(convention.assigned))
        self.device = torch.device(device)
        made = _Call(graph, signature, device_named(device), state, options or {}, process or {})
        made.finished, made.target = finished, target
        made.ready()
        self.call = made
        self._run = made.enter if not made.replays else _replayed(made)

    @classmethod
    def from_bytes(
        cls, data: bytes, convention: Convention | None = None, **kwargs: Any
    ) -> Runnable:
        """The same from the bytes of a graph file; SerializationError when they are none."""
        return cls(from_bytes(data, infer), convention, **kwargs)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return self.run(args)

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Results for the arguments of a call, all but the bound ones."""
        if len(args) != self.arguments:
            raise InputError(
                "wrong number of arguments", expected=str(self.arguments), got=str(len(args))
            )
        return self._run((*args, *self._bound))

    def compile(self, args: Sequence[Any]) -> None:
        """Plan and compile kernels for arguments like these without running anything."""
        inputs = self.call.collect((*args, *self._bound))
        self.call.compile(inputs)
        self.call.session.recording(inputs).planned()

    def generate(self, args: Sequence[Any]) -> None:
        """Have the target make the kernels for arguments like these."""
        inputs = self.call.collect((*args, *self._bound))
        self.call.compile(inputs)
        self.call.session.variant_for(inputs).generate(inputs)


class _Call(GraphCall):
    """A graph with options of its own."""

    def __init__(
        self,
        graph: Graph,
        signature: Signature,
        device: Device,
        state: GraphState,
        options: Options,
        process: Options,
    ) -> None:
        super().__init__(graph, signature, device, state)
        self._options = (options, process)

    @property
    def replays(self) -> bool:
        """Whether its device records the plan: random numbers are drawn anew, prints print."""
        return self.device.replays and not self.draws and debug_level() < 5

    def options(self) -> tuple[Options, Options]:
        return self._options

    entry = GraphCall.enter


def convention_of(graph: Graph, device: str = "cpu", updates: bool = True) -> Convention:
    """How a graph is called of which nothing but itself is known: inputs by their index, results as
    NetOutput has them. With `updates`, Assigns to inputs become outputs that update them."""
    sources = [InputSource((i,), dtype=n.outputs[0].dtype) for i, n in enumerate(graph.data)]
    output = graph.output
    if output is None:
        raise SerializationError(f"graph {graph.name!r} has no NetOutput")
    results: list[GraphResult] = [
        Computed(k, v.shape or (), contiguous_strides(v.shape or ()), k, device=device)
        for k, v in enumerate(output.values())
    ]
    state = GraphState(sources)
    if updates:
        mapping_assign_op_to_graph_output(graph, state)
    symbols: dict[str, tuple[int, int | None]] = {}
    for i, node in enumerate(graph.data):
        for k, d in enumerate(node.outputs[0].shape or ()):
            if isinstance(d, Sym) and d.expr.is_Symbol:
                symbols.setdefault(d.expr.name, (i, k))
    return Convention(Signature(sources, results, symbols, len(sources)), state.assigned)


def _weights_last(signature: Signature, bound: Mapping[int, torch.Tensor]) -> Signature:
    """The signature with bound arguments after all others, and these marked as static."""
    order = [a for a in range(signature.arguments) if a not in bound] + sorted(bound)
    made = signature.renumbered({a: k for k, a in enumerate(order)})
    first = signature.arguments - len(bound)
    made.inputs = [
        replace(s, static=True) if s.args and s.args[0] >= first else s for s in made.inputs
    ]
    return made


def _replayed(call: _Call) -> Any:
    """The call as a GPU replays it."""
    from torchair.capture import AclGraphCacheInfo
    from torchair.concrete.acl import ReplayedGraph

    names = {i: n.name for i, n in enumerate(call.graph.data)}
    tensors = {s.args[0]: i for i, s in enumerate(call.state.inputs) if s.kind == "tensor"}
    users = {names[i]: a for a, i in tensors.items() if not call.state.inputs[i].static}
    entries = {(a, True) for s in call.state.inputs if s.kind != "tensor" for a in s.args}
    entries |= {(arg, dim is None) for arg, dim in call.signature.symbols.values()}
    entries |= {(r.arg, False) for r in call.signature.results if isinstance(r, InputView)}
    for arg, i in tensors.items():
        value = call.graph.data[i].outputs[0]
        if value.device_type == "CPU" and value.shape == ():
            entries.add((arg, True))
        elif not is_static(value.shape):
            entries.add((arg, False))
    info = AclGraphCacheInfo(
        fx_graph_name=call.graph.name,
        capture_error_mode=ReplayedGraph.OPTIONS.error_mode,
        user_inputs_mapping=users,
        parameter_user_inputs=[a for a, i in tensors.items() if call.state.inputs[i].static],
        mutated_user_inputs=[n for n, a in users.items() if a in call.updated],
        unupdated_sym_input_index=sorted(entries),
    )
    return ReplayedGraph(call, info).enter
