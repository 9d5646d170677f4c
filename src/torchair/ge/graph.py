"""The GE graph: nodes, values with use lists, control edges. Plain objects, no protobuf.

Shape and type inference is injected (`Graph(infer=...)`) so that this package does not know
operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torchair.errors import GraphError, without_marks
from torchair.extensions import load
from torchair.ge.attrs import Attr, Attributes, Blank, Description, Edges, NodeAttributes
from torchair.ge.dtypes import DataType, dtype_name, type_of_meta
from torchair.ge.prototypes import Prototype, prototype
from torchair.ge.shapes import Dim, Shape, from_torch, is_static, on_wire

INPUTS = ("Data", "RefData")
"""Types of the nodes through which a caller's tensors come in."""
NO_WORK = (*INPUTS, "Const", "NetOutput")
"""Types of the nodes that compute nothing."""


@dataclass
class Fact:
    """What is known of a value before it is computed: type, dims, and for small host integers
    (axes, sizes) the content itself, as a scalar or a tuple."""

    dtype: int = DataType.DT_UNDEFINED
    shape: Shape | None = None
    content: Any = None


class Tensor:
    """Base of what converters receive and return: a value of the graph under construction."""

    index: int
    dtype: int

    @property
    def rank(self) -> int:
        raise AssertionError("abstract")


@dataclass(frozen=True)
class TensorSpec:
    """Expected result of a converter, from the fake tensor that tracing produced."""

    dtype: int
    shape: Shape | None
    torch_dtype: Any = None
    device: str = "cpu"
    in_order: bool = True  # whether its elements lie in memory in the order of their indices

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape or ())

    @property
    def size(self) -> list[int]:
        """Dims as integers; AssertionError when one is symbolic."""
        shape = self.shape
        assert is_static(shape), f"size of a dynamic tensor {shape} is not known at compile time"
        return list(shape)  # type: ignore[arg-type]

    @property
    def symsize(self) -> list[Dim]:
        """Dims, symbolic ones included."""
        return list(self.shape or ())


class Value(Tensor):
    """One output of a node."""

    __slots__ = (
        "attrs",
        "content",
        "device_type",
        "dtype",
        "index",
        "layout",
        "meta",
        "node",
        "port",
        "shape",
        "uses",
    )

    def __init__(self, node: Node, index: int, port: str) -> None:
        self.node = node
        self.index = index
        self.port = port
        self.dtype = DataType.DT_UNDEFINED
        self.shape: Shape | None = None
        self.content: Any = None
        self.layout = ""
        self.device_type = ""
        self.attrs: dict[str, Attr] = {}
        self.meta: Any = None  # the fake result of tracing, where a converter has set it
        self.uses: dict[tuple[Node, str, int | None], None] = {}

    @property
    def edge(self) -> str:
        """Edge text of files and dumps: `<node>:<output index>`."""
        return f"{self.node.name}:{self.index}"

    @property
    def tensor(self) -> str:
        """The edge text, under the name that converters know."""
        return self.edge

    @property
    def controller(self) -> str:
        """Edge text for who waits for this value: `other.node.input.append(x.controller)`."""
        return f"{self.node.name}:-1"

    @property
    def desc(self) -> Description:
        """The description of the value, as a message."""
        return Description(self, self.port)

    @property
    def symsize(self) -> list[Dim]:
        """Dims, symbolic ones included."""
        return list(self.shape or ())

    def set_meta(self, meta: Any) -> None:
        """Take type and dims from a fake tensor, a list of sizes or a symbolic number."""
        self.meta = meta
        if isinstance(meta, (list, tuple)):
            self.learn(Fact(DataType.DT_INT64, (len(meta),)))
        else:
            dims = getattr(meta, "shape", ())
            self.learn(Fact(type_of_meta(meta), tuple(from_torch(d) for d in dims)))

    @property
    def rank(self) -> int:
        """Number of dims; GraphError when unknown."""
        if self.shape is None:
            raise GraphError(f"rank of {self.edge} is not known")
        return len(self.shape)

    @property
    def fact(self) -> Fact:
        """Type, dims and content as one record."""
        return Fact(self.dtype, self.shape, self.content)

    def learn(self, fact: Fact) -> None:
        """Take over what is known; unknown parts keep what was there."""
        if fact.dtype != DataType.DT_UNDEFINED:
            self.dtype = fact.dtype
        if fact.shape is not None:
            self.shape = fact.shape
        if fact.content is not None:
            self.content = fact.content

    def replace_with(self, other: Value, keep: Callable[[Node], bool] | None = None) -> None:
        """Make every reader of this value read `other`; readers for which `keep` holds stay."""
        for node, port, position in list(self.uses):
            if keep is None or not keep(node):
                node.set_input(port, other, position)

    def users(self) -> list[Node]:
        """Nodes reading this value, each once, in order of first use."""
        return list(dict.fromkeys(node for node, _, _ in self.uses))

    def __repr__(self) -> str:
        return f"Tensor({self.edge}, dtype={dtype_name(self.dtype)}, size={on_wire(self.shape)})"


Slot = Value | None | list[Value]


def _positions(slot: Slot) -> Iterable[tuple[int | None, Value]]:
    """Values of a slot, and where they are in a list of them."""
    if isinstance(slot, list):
        return enumerate(slot)
    return () if slot is None else ((None, slot),)


class Node:
    """One operator of the graph."""

    __slots__ = (
        "attr",
        "attrs",
        "control",
        "control_users",
        "graph",
        "inputs",
        "name",
        "origin",
        "outputs",
        "type",
    )

    def __init__(self, graph: Graph, op_type: str, name: str) -> None:
        self.graph = graph
        self.type = op_type
        self.name = name
        self.inputs: dict[str, Slot] = {}
        self.outputs: list[Value] = []
        self.attrs: dict[str, Attr] = {}
        self.attr = NodeAttributes(self)  # `attr("axis")` is a value, `attr["axis"]` a message
        self.control: dict[Node, None] = {}
        self.control_users: dict[Node, None] = {}
        self.origin: Origin | None = None

    @property
    def prototype(self) -> Prototype | None:
        return prototype(self.type)

    @property
    def input(self) -> Edges:
        """Edge texts of what the node reads and waits for."""
        return Edges(self)

    @property
    def input_desc(self) -> list[Description]:
        """Descriptions of what the node reads."""
        unfed = Blank(attrs={"_is_unfed_optional": Attr("Int", 1)})
        return [Description(unfed if v is None else v, name) for name, v in self.named_slots()]

    @property
    def output_desc(self) -> list[Description]:
        """Descriptions of what the node computes."""
        return [Description(value, value.port) for value in self.outputs]

    def slots(self) -> Iterator[tuple[str, int | None, Value | None]]:
        """All input positions: port, index in a variable port or None, value or None if unfed."""
        for port, slot in self.inputs.items():
            if isinstance(slot, list):
                for i, value in enumerate(slot):
                    yield port, i, value
            else:
                yield port, None, slot

    def named_slots(self) -> Iterator[tuple[str, Value | None]]:
        """The same by names as files have them: those of a variable port are numbered."""
        for port, position, value in self.slots():
            yield port if position is None else f"{port}{position}", value

    def value_on(self, port: str) -> Value:
        """The value on a port that is fed."""
        value = self.inputs[port]
        assert isinstance(value, Value), f"{self}: input {port!r} is not one tensor"
        return value

    def values_on(self, port: str) -> list[Value]:
        """The values of a variable port."""
        values = self.inputs.get(port) or []
        assert isinstance(values, list)
        return values

    def values(self) -> list[Value]:
        """Input values in slot order, unfed ones left out."""
        found: list[Value] = []
        for slot in self.inputs.values():
            if isinstance(slot, list):
                found += slot
            elif slot is not None:
                found.append(slot)
        return found

    def producers(self) -> list[Node]:
        """The nodes that this one waits for."""
        return [*(v.node for v in self.values()), *self.control]

    def set_input(self, port: str, value: Slot, position: int | None = None) -> None:
        """Connect a port, or one position of a variable port, keeping use lists true."""
        if position is not None:
            slot = self.inputs[port]
            assert isinstance(slot, list) and isinstance(value, Value)
            slot[position].uses.pop((self, port, position), None)
            slot[position] = value
            value.uses[(self, port, position)] = None
            return
        for i, old in _positions(self.inputs.get(port)):
            old.uses.pop((self, port, i), None)
        self.inputs[port] = list(value) if isinstance(value, (list, tuple)) else value
        for i, new in _positions(self.inputs[port]):
            new.uses[(self, port, i)] = None

    def after(self, other: Node) -> None:
        """Add a control edge: this node runs after `other`."""
        if other is not self:
            self.control[other] = None
            other.control_users[self] = None

    def not_after(self, other: Node) -> None:
        """Remove a control edge."""
        self.control.pop(other, None)
        other.control_users.pop(self, None)

    def __repr__(self) -> str:
        return f"<{self.type} {self.name}>"


@dataclass(frozen=True)
class Origin:
    """Where a node came from: the user's source line and the FX node it was converted from."""

    file: str = ""
    fx: str = ""
    fx_name: str = ""
    target: str = ""  # the torch operator of the FX node, as `aten.clone.default`

    @property
    def line(self) -> str:
        """Source position for messages, without the marks under the expression."""
        return without_marks(self.file.removeprefix("# File ")) or "unknown source line"


@dataclass
class Mark:
    """A `record` or a `wait` as the model has it; control edges are what it comes to.

    Of a record `node` is the last one before it on its stream, of a wait the next one after it.
    `awaited` are names of nodes, or the records, that a wait is for.
    """

    kind: str
    stream: str
    origin: Origin | None = None
    node: str | None = None
    awaited: list[str | Mark] = field(default_factory=list)


@dataclass
class BuilderCall:
    """One outermost builder call, remembered for the text dump."""

    builder: str
    args: list[Any]
    kwargs: dict[str, Any]
    result: Any


class Operators(list[Node]):
    """The nodes of a graph as a field of a message."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.nodes)
        self._graph = graph

    def add(self) -> Any:
        """A new operator, to be written field by field."""
        return load("drafts").Draft(self._graph)


Infer = Callable[[Node], Sequence[Fact]]
"""Shape rules: what is known of the results of a node."""


@dataclass
class Graph:
    """A GE graph, under construction or finished."""

    name: str = ""
    infer: Infer | None = None
    attrs: dict[str, Attr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._next_name: dict[str, int] = {}
        self.journal: list[BuilderCall | str] = []  # builder calls and comment lines, in order
        self.depth = 0  # nesting of builder calls; only depth 0 is journalled
        self.origin: Origin | None = None  # stamped on nodes while an FX node is converted
        self.keep_alive: list[Node] = []  # side effects that become NetOutput dependencies
        self.objects: dict[str, Any] = {}  # live Python targets of generic nodes, by key
        self.marks: list[Mark] = []  # for checks; files do not have them

    @property
    def nodes(self) -> list[Node]:
        """All nodes, in insertion or sorted order."""
        return list(self._nodes.values())

    @property
    def op(self) -> Operators:
        """The nodes, under the name that converters know: `get_default_ge_graph().op[-1]`."""
        return Operators(self)

    @property
    def attr(self) -> Attributes:
        """Attributes of the graph, as messages."""
        return Attributes(self)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def node(self, name: str) -> Node:
        """The node of that name; GraphError if there is none."""
        try:
            return self._nodes[name]
        except KeyError:
            raise GraphError(f"graph {self.name!r} has no node {name!r}") from None

    def value(self, edge: str) -> Value:
        """What an edge text stands for: `<node>:<output index>`; GraphError if it is nothing."""
        name, _, output = edge.rpartition(":")
        found = self.node(name).outputs
        if not output.isdecimal() or int(output) >= len(found):
            raise GraphError(f"{edge!r}: {name!r} has {len(found)} outputs, none is {output!r}")
        return found[int(output)]

    @property
    def data(self) -> list[Node]:
        """Input nodes by their `index` attribute."""
        found = [n for n in self._nodes.values() if n.type in INPUTS]
        return sorted(found, key=lambda n: n.attr("index", 0))

    @property
    def output(self) -> Node | None:
        """The NetOutput node, if it is there already."""
        return next((n for n in reversed(self._nodes.values()) if n.type == "NetOutput"), None)

    @property
    def is_dynamic(self) -> bool:
        """Whether any input has a dim that is not a known integer."""
        return not all(is_static(n.outputs[0].shape) for n in self.data)

    def newest(self, count: int) -> list[Node]:
        """The nodes added last, in order."""
        return list(islice(reversed(self._nodes.values()), count))[::-1]

    def unique_name(self, stem: str) -> str:
        """The stem itself, then stem_1, stem_2, ..."""
        count = self._next_name.get(stem, 0)
        while True:
            name = f"{stem}_{count}" if count else stem
            count += 1
            if name not in self._nodes:
                self._next_name[stem] = count
                return name

    def add(self, op_type: str, name: str | None = None) -> Node:
        """A new unconnected node."""
        if name is None:
            name = self.unique_name(op_type)
        assert name.strip(), "a node name must not be blank"
        assert name not in self._nodes, f"node name {name!r} is used already in {self.name!r}"
        node = Node(self, op_type, name)
        node.origin = self.origin
        self._nodes[name] = node
        return node

    def remove(self, node: Node) -> None:
        """Take a node out; GraphError while something still reads it."""
        readers = [u for out in node.outputs for u in out.users()]
        if readers:
            raise GraphError(f"cannot remove {node}: {readers[0]} reads it")
        for port, position, value in node.slots():
            if value is not None:
                value.uses.pop((node, port, position), None)
        for other in list(node.control):
            node.not_after(other)
        for other in list(node.control_users):
            other.not_after(node)
        del self._nodes[node.name]

    def rename(self, node: Node, name: str) -> None:
        """Give a node another unique name; it moves to the end of the order."""
        assert name not in self._nodes, f"node name {name!r} is used already"
        del self._nodes[node.name]
        self._nodes[name] = node
        node.name = name

    def sort(self) -> None:
        """Order nodes so that producers come first, otherwise keeping the present order."""
        self._nodes = {n.name: n for n in topological(self._nodes.values(), self.name)}

    def set_order(self, order: Iterable[Node]) -> None:
        """Take over a complete order of the nodes."""
        nodes = {n.name: n for n in order}
        assert nodes.keys() == self._nodes.keys(), "an order must hold every node once"
        self._nodes = nodes

    def set_attr(self, node: str, **values: Attr) -> None:
        """Put attributes on a node by name; used by dumps for what builder calls do not show."""
        self.node(node).attrs.update(values)

    def control(self, before: str, after: str) -> None:
        """Add a control edge by node names; used by dumps."""
        self.node(after).after(self.node(before))

    def __enter__(self) -> Graph:
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()

    @contextmanager
    def inside(self, origin: Origin | None) -> Iterator[None]:
        """Builders add to this graph what stands for a node of that origin: no call of a dump."""
        self.depth, self.origin = self.depth + 1, origin
        try:
            with self:
                yield
        finally:
            self.depth, self.origin = self.depth - 1, None


def topological(nodes: Iterable[Node], graph_name: str = "") -> list[Node]:
    """Nodes with producers before consumers, stable in the given order; GraphError on a cycle."""
    nodes = list(nodes)
    done: dict[Node, None] = {}  # which keeps the order
    members: set[Node] = set()
    for root in nodes:
        if root in done:
            continue
        if _is_ready(root, done):  # all of them, where the order is right already
            done[root] = None
            continue
        members = members or set(nodes)
        _produce(root, members, done, graph_name)
    return list(done)


def _is_ready(node: Node, done: dict[Node, None]) -> bool:
    """Whether nothing that a node needs is missing."""
    for slot in node.inputs.values():
        if isinstance(slot, list):
            for value in slot:
                if value.node not in done:
                    return False
        elif slot is not None and slot.node not in done:
            return False
    return all(before in done for before in node.control)


def _produce(root: Node, members: set[Node], done: dict[Node, None], graph_name: str) -> None:
    """Add what a node needs of the members, then itself."""
    begun = {root}
    stack = [(root, iter(root.producers()))]
    while stack:
        node, producers = stack[-1]
        step = next((p for p in producers if p in members and p not in done), None)
        if step is None:
            done[node] = None
            stack.pop()
        elif step in begun:
            raise GraphError(f"graph {graph_name!r} has a cycle through {step}")
        else:
            begun.add(step)
            stack.append((step, iter(step.producers())))


def needed_by(nodes: Iterable[Node]) -> set[Node]:
    """Nodes that must have run before some, and those themselves."""
    found = set(nodes)
    stack = list(found)
    while stack:
        new = set(stack.pop().producers()) - found
        found |= new
        stack += new
    return found


_local = threading.local()


def _stack() -> list[Graph]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def get_default_ge_graph() -> Graph:
    """The graph that builder calls of this thread add to; one is made when none was entered."""
    stack = _stack()
    if not stack:
        stack.append(Graph("default"))
    return stack[-1]
