"""A graph as it was handed to the engine, the same for all weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchair.codegen.target import Target
from torchair.engine.inspect.dump import GraphDump
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import mapping_assign_op_to_graph_output
from torchair.engine.options import DumpOptions, EngineOptions
from torchair.engine.plan.ending import Promises
from torchair.engine.plan.inputs import check_outputs
from torchair.engine.plan.planner import OutputLayout
from torchair.engine.session.user_memory import UserMemory
from torchair.errors import GraphError
from torchair.ge.graph import Graph
from torchair.ge.rewrite import verify
from torchair.ge.signature import InputSource


@dataclass
class LoadedGraph:
    """A graph with its options and its device."""

    name: str
    graph: Graph
    state: GraphState
    options: EngineOptions
    layouts: Sequence[OutputLayout | None]
    device: str
    target: Target | None = None  # makes kernels, if not the one of the device
    finished: bool = False  # it has been compiled before
    dump: GraphDump | None = None  # runs it instead, to dump its data
    memory: UserMemory | None = None

    def dump_data(self, options: DumpOptions) -> None:
        """Run the graph node by node from now on, and write the data to files."""
        data = [n.outputs[0] for n in self.graph.data]
        results = self.graph.output.values()  # type: ignore[union-attr]
        promises = Promises(results, data, self.state.assigned, self.layouts)
        self.options = replace(self.options, native=False)
        self.dump = GraphDump(self.name, self.graph, self.device, promises, options)

    def check(self, outputs: Sequence[tuple[int, ...]]) -> None:
        """Raise an error where the graph cannot run on its device, or cannot have outputs of these
        dims."""
        results = self.graph.output.values()  # type: ignore[union-attr]
        check_outputs(results[: len(results) - len(self.state.assigned)], outputs)
        _check_device(self.device)


def checked_state(graph: Graph, state: GraphState | None) -> GraphState:
    """The state of a graph, a new one if there is none; GraphError if the graph is not well
    formed."""
    verify(graph)
    if graph.output is None:
        raise GraphError("the graph has no NetOutput", graph=graph.name)
    if state is None:
        state = GraphState([InputSource((i,)) for i in range(len(graph.data))])
        mapping_assign_op_to_graph_output(graph, state)
    return state


def _check_device(name: str) -> None:
    """Memory is the least that a device must offer; a device type without kernels has none."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as e:
        raise GraphError(
            f"graphs cannot run on {name}: torch has no kernels for that device in this process",
            hint="move the model and its inputs to a device that torch computes on, as cpu or cuda",
        ) from e
