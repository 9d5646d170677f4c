"""Passes over graph inputs: packing of symbol lists, removal of dead inputs, updates."""

from __future__ import annotations

from torchair.engine.optimize import GraphState
from torchair.ge import attrs as attr
from torchair.ge.build import Data
from torchair.ge.dtypes import DataType, ExecutorType, Placement
from torchair.ge.graph import INPUTS, Graph, Node, Value
from torchair.ge.shapes import free_symbols
from torchair.ge.signature import InputSource
from torchair.operators import Trait, row_of


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


# ---- updates: redundant copies, and Assign to an input ----


def optimize_reference_op_redundant_copy(
    graph: Graph, state: GraphState | None = None
) -> list[int]:
    """Data -> TensorMove -> update -> Assign(Data): the update works on the input itself. Gives
    the inputs that are updated."""
    for node in graph.nodes:
        row = row_of(node.type)
        if row is None or not row.has(Trait.WRITES_FIRST):
            continue
        moved = next(iter(node.values()), None)
        if moved is None or moved.node.type != "TensorMove" or len(moved.uses) != 1:
            continue
        source = moved.node.values()[0]
        if source.node.type != "Data" or not _assigned_back(node, source):
            continue
        moved.replace_with(source)
        graph.remove(moved.node)
    targets = [n.inputs["ref"] for n in graph.nodes if n.type == "Assign"]
    inputs = [v.node for v in targets if isinstance(v, Value) and v.node.type == "Data"]
    return [node.attr("index") for node in inputs]


def _assigned_back(node: Node, source: Value) -> bool:
    """Whether the only other reader of the input is the Assign of this node's result."""
    others = [u for u in source.users() if u.type not in ("TensorMove", "Cmo")]
    return len(others) == 1 and (
        others[0].type == "Assign"
        and others[0].inputs["ref"] is source
        and others[0].inputs["value"] is node.outputs[0]
    )


def mapping_assign_op_to_graph_output(
    graph: Graph, state: GraphState | None = None
) -> dict[int, int]:
    """Assign to an input -> one more graph output whose memory is that input. Gives the input of
    each such output."""
    output, state = graph.output, state if state is not None else GraphState()
    assert output is not None
    for node in graph.nodes:
        if node.type != "Assign":
            continue
        ref, value = node.inputs["ref"], node.inputs["value"]
        assert isinstance(ref, Value) and isinstance(value, Value)
        same = (ref.dtype, ref.shape) == (value.dtype, value.shape)
        if ref.node.type not in INPUTS or not same:
            output.after(node)
            continue
        node.outputs[0].replace_with(value)
        results = list(output.values())
        state.assigned[len(results)] = ref.node.attr("index")
        for before in list(node.control):
            output.after(before)
        for user in list(node.control_users):
            user.after(value.node)
        graph.remove(node)
        output.set_input("input", [*results, value])
    return state.assigned
