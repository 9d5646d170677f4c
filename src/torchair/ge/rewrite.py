"""Rewrite rules, and what passes are checked and shown by: `verify`, `line_of`.

A rule is a function over the node it ends at, entered into a set with the types of such nodes. It
walks up from there and gives a function that builds the new nodes, with the builders of graphs.

    @RULES("Neg")
    def DoubleNeg(node, inner):
        inside = node.values()[0]
        return (lambda: inside.node.values()[0]) if inside.node.type == "Neg" else None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.errors import GraphError
from torchair.ge.attrs import Attr
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType, dtype_name
from torchair.ge.graph import INPUTS, Graph, Node, Value, topological
from torchair.ge.shapes import on_wire
from torchair.labels import STREAM_LABEL

Build = Callable[[], Any]
"""Builds what stands for the results of a node; it may still raise Mismatch."""

Find = Callable[[Node, "Inner"], "Build | None"]
"""What builds the replacement of a node's results; None if this is nothing like the rule's,
Mismatch if it is and yet differs. `Inner` is told of the nodes between."""


class Mismatch(Exception):
    """Why nodes that look like those of a rule are none of it."""

    def __init__(self, reason: str, about: Any = None) -> None:
        super().__init__(reason if about is None else f"{reason} ({about})")


@dataclass
class Rule:
    """A rule by its name for logs and switches, and the types of the nodes that it ends at."""

    name: str
    find: Find
    last: tuple[str, ...]


class RuleSet(list[Rule]):
    """Rules, at a node tried in this order; called, it makes a rule of a function and adds it."""

    def __call__(self, *last: str, name: str = "") -> Callable[[Find], Rule]:
        """The rule is named after the function, unless it is given a name."""

        def add(find: Find) -> Rule:
            self.append(Rule(name or find.__name__, find, last))
            return self[-1]

        return add


class Inner:
    """The nodes between what a rule reads and the last one."""

    def __init__(self, last: Node, state: Any = None) -> None:
        self.last = last
        self.state = state  # what is known of the graph and of what will run it
        self.nodes: list[Node] = []  # that a replacement makes superfluous
        self.seen: list[Node] = []  # others, which may stay for other readers

    def add(self, *values: Value) -> None:
        """These are computed for the last node alone."""
        self.nodes += [v.node for v in values if v.node not in self.nodes]

    def see(self, *values: Value) -> None:
        """These are looked through, and may have other readers."""
        self.seen += [v.node for v in values]

    def check(self) -> None:
        """No other node reads what was added, none has an order, and all are on one stream."""
        members = {*self.nodes, self.last}
        for node in self.nodes:
            others = [u for v in node.outputs for u in v.users() if u not in members]
            if others:
                raise Mismatch(f"{node.name} is read elsewhere too", others[0])
        for node in (*self.nodes, *self.seen):
            if node.control or node.control_users:
                raise Mismatch("a node carries control edges", node)
        if len({n.attrs.get(STREAM_LABEL) for n in (*members, *self.seen)}) > 1:
            raise Mismatch("its nodes are on different streams", self.last)


def rewrite(
    graph: Graph,
    rules: Iterable[Rule],
    explain: Callable[[str], None] | None = None,
    stays: Callable[[Node], bool] = lambda node: True,
    state: Any = None,
) -> int:
    """Apply rules until none changes anything; returns how many replacements were made.

    What a replacement leaves unread goes with it, but for nodes of which `stays` holds. `state` is
    what rules find in `inner.state`: its `note` is told the name of each rule that matched, and
    whether it replaced something, and its `permits` may refuse a replacement, by names of rule and
    node.
    """
    by_type: dict[str, list[Rule]] = {}
    for rule in rules:
        for last in rule.last:
            by_type.setdefault(last, []).append(rule)
    total = 0
    while True:
        changed = 0
        for node in topological(graph.nodes):
            known = by_type.get(node.type)
            if known is None or graph._nodes.get(node.name) is not node:
                continue
            sources = [v.node for v in node.values()]
            if any(_applies(rule, node, explain, state) for rule in known):
                changed += 1
                _remove_unread(graph, sources, stays)
        if not changed:
            break
        total += changed
    if total:
        graph.sort()
    return total


def _applies(rule: Rule, node: Node, explain: Callable[[str], None] | None, state: Any) -> bool:
    """Apply a rule to a node, if it has anything to say."""
    graph, inner, result, declined = node.graph, Inner(node, state), None, None
    before = len(graph)
    try:
        build = rule.find(node, inner)
        if build is None:
            return False
        inner.check()
        with graph.inside(node.origin):
            result = build()
    except Mismatch as e:
        declined = e.with_traceback(None)  # which would keep all frames, and what they hold
    made = graph.newest(len(graph) - before)
    if declined is None and node.control and not made:
        declined = Mismatch("it waits for other nodes")
    if state is not None:
        if declined is None and state.permits and not state.permits(rule.name, node.name):
            declined = Mismatch("it may not, for now")
        state.note(rule.name, declined is None)
    if explain is not None:
        done = "replaced" if declined is None else "declined"
        explain(f"{rule.name} {done} {node.name}" + (f": {declined}" if declined else ""))
    if declined is None:
        _substitute(graph, node, result, made)
        return True
    for n in reversed(made):
        graph.remove(n)
    return False


def _remove_unread(graph: Graph, nodes: list[Node], stays: Callable[[Node], bool]) -> None:
    """Remove those of the nodes that are not needed any more, and what was computed for them."""
    while nodes:
        node = nodes.pop()
        gone = graph._nodes.get(node.name) is not node
        if gone or node.control_users or any(v.uses for v in node.outputs) or stays(node):
            continue
        nodes += [v.node for v in node.values()]
        graph.remove(node)


def _substitute(graph: Graph, node: Node, result: Any, made: list[Node]) -> None:
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(values) != len(node.outputs):
        raise GraphError(f"a rule gave {len(values)} values", node=node.name)
    for old, new in zip(node.outputs, values, strict=True):
        if not old.uses:
            continue  # a rule may give anything for what is not read: nothing is learnt from it
        if new.node in made:
            new.learn(old.fact)
            new.attrs = dict(old.attrs) | new.attrs
            new.device_type = new.device_type or old.device_type
        old.replace_with(new)
    work = [n for n in made if n.type != "Const"]
    for n in work:
        for key, value in node.attrs.items():
            if key.startswith("_") and key not in n.attrs:
                n.attrs[key] = value
    first, last = (work[0], work[-1]) if work else (values[0].node, values[0].node)
    for before in list(node.control):
        first.after(before)
    for user in list(node.control_users):
        user.after(last)
    name = node.name
    graph.remove(node)
    if work and last.type == node.type:
        graph.rename(last, name)


# ---- is this a graph at all: knows prototypes, not meanings ----


def verify(graph: Graph) -> None:
    """Raise GraphError at the first thing that is wrong."""
    nodes = set(graph.nodes)
    for name, node in graph._nodes.items():
        if node.name != name:
            raise GraphError(f"is stored under the name {name!r}", node=node.name, graph=graph.name)
        _edges(graph, node, nodes)
        _ports(graph, node)
    topological(graph.nodes, graph.name)
    indices = [n.attr("index", 0) for n in graph.data]
    if len(set(indices)) != len(indices):
        raise GraphError(f"two inputs have one index: {indices}", graph=graph.name)
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
                node=node.name,
                graph=graph.name,
            )
        if (node, port, position) not in value.uses:
            raise GraphError(f"{value.edge} does not know its reader", node=node.name)
    for value in node.outputs:
        for user, port, position in value.uses:
            slot = user.inputs.get(port)
            read = slot[position] if isinstance(slot, list) and position is not None else slot
            if user not in nodes or read is not value:
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


# ---- a node for people: `y: float32[2, 3] = Add(x1=a, x2=b, axis=1)` ----


_LONGEST = 60  # characters of an attribute that are shown


def line_of(node: Node) -> str:
    """Results, operator, operands and attributes. What is for machines only begins with `_`."""
    made = ", ".join(f"{dtype_name(v.dtype)}{on_wire(v.shape)}" for v in node.outputs)
    given = [f"{port}={_slot(slot)}" for port, slot in node.inputs.items() if slot is not None]
    given += [f"{k}={_short(a.value)}" for k, a in node.attrs.items() if not k.startswith("_")]
    after = ", ".join(n.name for n in node.control)
    text = f"{node.name}: {made or 'nothing'} = {node.type}({', '.join(given)})"
    return f"{text} after {after}" if after else text


def _slot(slot: Value | list[Value]) -> str:
    if isinstance(slot, list):
        return f"[{', '.join(map(_name, slot))}]"
    return _name(slot)


def _name(value: Value) -> str:
    return value.node.name if len(value.node.outputs) == 1 else value.edge


def _short(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


# ---- what rules ask about values ----


KERNEL_FLOATS = (DataType.DT_FLOAT, DataType.DT_BF16, DataType.DT_FLOAT16)
"""Types that fused operators have kernels for."""


def made_by(value: Value, *types: str) -> bool:
    """Whether a value is the first result of a node of these types."""
    return value.node.type in types and value.index == 0


def operands(value: Value) -> list[Value]:
    """What the node of a value reads."""
    return value.node.values()


def number(value: Value) -> float | None:
    """The number of a constant that holds one."""
    if value.node.type != "Const":
        return None
    tensor: torch.Tensor = value.node.attr("value")
    return float(tensor.item()) if tensor.numel() == 1 and not tensor.is_complex() else None


def both_orders(node: Node) -> Iterator[tuple[Value, Value]]:
    """The two operands of a commutative node, and the other way round."""
    a, b = node.values()
    yield a, b
    if a is not b:
        yield b, a


def with_number(value: Value, op_type: str) -> tuple[Value, float] | None:
    """The other operand and the number, where one operand is a constant number."""
    if made_by(value, f"{op_type}s"):  # Muls and Adds keep the number as an attribute
        return operands(value)[0], float(value.node.attr("value"))
    if not made_by(value, op_type):
        return None
    for other, constant in both_orders(value.node):
        found = number(constant)
        if found is not None:
            return other, found
    return None


def below_cast(value: Value) -> Value:
    """What a conversion of type reads, or the value itself."""
    return operands(value)[0] if made_by(value, "Cast") else value


def below(value: Value, *types: str) -> Value:
    """What is under nodes of these types, one on the other."""
    while made_by(value, *types):
        value = operands(value)[0]
    return value


def only(value: Value) -> Any:
    """The one small number that a value is known to hold, None if there is none."""
    content = value.content
    return content[0] if isinstance(content, tuple) and len(content) == 1 else content


def swaps_last_two(perm: Value) -> bool:
    """Whether a transpose exchanges just the last two dims."""
    rank = len(perm.content or ())
    return rank >= 2 and perm.content == (*range(rank - 2), rank - 1, rank - 2)


def flags_of(node: Node) -> dict[str, Any]:
    """Arguments with which a builder makes another node like this one."""
    return {name: a.value for name, a in node.attrs.items() if not name.startswith("_")}


def split(graph: Graph, nodes: Iterable[Node], parts: Callable[[Node], Sequence[Value]]) -> None:
    """Put parts in the place of nodes: for each output of a node one of their results, in its
    type."""
    for node in nodes:
        with graph.inside(node.origin):
            for old, new in zip(node.outputs, parts(node), strict=True):
                if old.uses:
                    old.replace_with(cast(new, old.dtype))
        graph.remove(node)
    graph.sort()


def cast(x: Value, dtype: int) -> Value:
    """A value in a type, which it may have already."""
    return x if x.dtype == dtype else builder("Cast")(x, dst_type=dtype)


def shape_of(value: Value) -> tuple[Any, ...]:
    """Dims of a value; Mismatch where they are not known."""
    if value.shape is None:
        raise Mismatch("dims are not known", value)
    return value.shape


def rank_of(value: Value) -> int:
    """How many dims a value has; Mismatch where that is not known."""
    return len(shape_of(value))
