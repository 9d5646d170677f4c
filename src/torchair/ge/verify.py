"""Is this a graph at all: edges, ports, attributes, order of inputs. Raises GraphError naming the
node; knows prototypes, not meanings."""

from __future__ import annotations

from torchair.errors import GraphError
from torchair.ge.attrs import Attr
from torchair.ge.graph import INPUTS, Graph, Node, Value, topological


def verify(graph: Graph) -> None:
    """Raise GraphError at the first thing that is wrong."""
    nodes = set(graph.nodes)
    for name, node in graph._nodes.items():
        if node.name != name:
            raise GraphError(f"is stored under the name {name!r}", node=node.name, graph=graph.name)
        _edges(graph, node, nodes)
        _ports(graph, node)
    topological(graph.nodes, graph.name)
    _inputs(graph)
    outputs = [n for n in graph.nodes if n.type == "NetOutput"]
    if len(outputs) > 1:
        raise GraphError("a second NetOutput", node=outputs[1].name, graph=graph.name)


def _edges(graph: Graph, node: Node, nodes: set[Node]) -> None:
    for port, position, value in node.slots():
        if value is None:
            continue
        if not isinstance(value, Value):
            raise GraphError(f"input {port} is a {type(value).__name__}", node=node.name)
        if value.node not in nodes:
            raise GraphError(
                f"input {port} reads {value.edge}, which is not in the graph",
                node=node.name, graph=graph.name,
            )  # fmt: skip
        if (node, port, position) not in value.uses:
            raise GraphError(f"{value.edge} does not know its reader", node=node.name)
    for value in node.outputs:
        for user, port, position in value.uses:
            slot = user.inputs.get(port)
            held = slot[position] if isinstance(slot, list) and position is not None else slot
            if user not in nodes or held is not value:
                raise GraphError(f"{value.edge} names a reader that is gone", node=node.name)
    for before in node.control:
        if before not in nodes or node not in before.control_users:
            raise GraphError(f"runs after {before.name}, which is not there", node=node.name)


def _ports(graph: Graph, node: Node) -> None:
    proto = node.prototype
    if proto is None:
        return
    for port in proto.inputs:
        if node.type in INPUTS:
            break
        if port.kind == "required" and node.inputs.get(port.name) is None:
            raise GraphError(f"input {port.name!r} is not fed", node=node.name, graph=graph.name)
    for spec in proto.attrs:
        if spec.required and spec.name not in node.attrs and not proto.has_dynamic_output:
            raise GraphError(f"attribute {spec.name!r} is missing", node=node.name)
    for key, value in node.attrs.items():
        if not isinstance(value, Attr):
            raise GraphError(f"attribute {key!r} is not a ge.attr", node=node.name)


def _inputs(graph: Graph) -> None:
    indices = [n.attr("index", 0) for n in graph.data]
    if len(set(indices)) != len(indices):
        raise GraphError(f"two inputs have one index: {indices}", graph=graph.name)
