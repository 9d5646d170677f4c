"""Passes over in-place updates: redundant copies, and Assign to a graph input."""

from __future__ import annotations

from torchair.catalog import Trait, row_of
from torchair.engine.optimize.passes.state import GraphState
from torchair.ge.graph import INPUTS, Graph, Node, Value


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
