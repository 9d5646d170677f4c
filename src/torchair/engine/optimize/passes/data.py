"""Passes over graph inputs: packing of symbol lists, removal of dead inputs."""

from __future__ import annotations

from torchair.engine.optimize.passes.state import GraphState
from torchair.ge import attrs as attr
from torchair.ge.build import Data
from torchair.ge.dtypes import DataType, ExecutorType, Placement
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.shapes import free_symbols
from torchair.ge.signature import InputSource


def optimize_sym_pack(graph: Graph, state: GraphState) -> None:
    """Pack of host scalar inputs -> one host input vector; equal packs share it."""
    made: dict[tuple[int, ...], Value] = {}
    for node in graph.nodes:
        if node.type != "Pack" or not _all_host_scalars(node, state):
            continue
        members = node.values()
        key = tuple(v.node.attr("index") for v in members)
        if key not in made:
            args = tuple(state.inputs[i].args[0] for i in key)
            index = max(n.attr("index") for n in graph.data) + 1
            with graph:
                made[key] = Data(
                    index=index,
                    dtype=DataType.DT_INT64,
                    shape=[len(key)],
                    placement="CPU",
                    node_name=None,
                )
            made[key].content = tuple(v.content for v in members)
            state.inputs.append(InputSource(args, "packed", DataType.DT_INT64))
        node.outputs[0].replace_with(made[key])
        graph.remove(node)
    graph.sort()


def _all_host_scalars(node: Node, state: GraphState) -> bool:
    return bool(node.values()) and all(
        v.node.type == "Data"
        and state.inputs[v.node.attr("index")].kind == "scalar"
        and v.dtype == DataType.DT_INT64
        for v in node.values()
    )


def remove_dead_data_and_reorder_data_index(graph: Graph, state: GraphState) -> None:
    """Drop inputs that nothing reads and number the rest from 0."""
    kept: list[InputSource] = []
    read = [n.outputs[0] for n in graph.data if n.outputs[0].uses]
    known = free_symbols(d for v in read for d in (v.shape or ()))
    for node in graph.data:
        needed = free_symbols([node.outputs[0].content]) & state.promised - known
        if node.outputs[0].uses or needed:
            source = state.inputs[node.attr("index")]
            if node.attr("index") != len(kept):
                node.attrs["index"] = attr.Int(len(kept))
            kept.append(source)
        else:
            graph.remove(node)
    state.inputs[:] = kept


def note_interface(graph: Graph, executor: ExecutorType) -> None:
    """Where inputs are, which types outputs have and who runs the graph, as attributes of it."""
    sides = [n.outputs[0].device_type for n in graph.data]
    places = [Placement.HOST if side == "CPU" else Placement.DEVICE for side in sides]
    outputs = graph.output.values() if graph.output is not None else []
    graph.attrs |= {
        "_input_placements": attr.ListInt([int(place) for place in places]),
        "_output_dtypes": attr.ListInt([int(v.dtype) for v in outputs]),
        "_executor_type": attr.Int(int(executor)),
    }
