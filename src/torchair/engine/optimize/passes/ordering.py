"""What passes know of a graph besides; passes over its inputs and updates, those that make program
order explicit and drop what data imply, and the one that chooses the order of execution."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from torchair.codegen.target import Target
from torchair.engine.options import EngineOptions
from torchair.ge import attrs as attr
from torchair.ge.build import Data
from torchair.ge.dtypes import DataType, ExecutorType, Placement
from torchair.ge.graph import INPUTS, Graph, Node, Value, needed_by, topological
from torchair.ge.prototypes import TORCH_CALLS
from torchair.ge.shapes import Sym, free_symbols, symbol
from torchair.ge.signature import InputSource
from torchair.labels import STREAM_LABEL
from torchair.operators import Trait, has_trait
from torchair.operators.core import SIDE_EFFECTS, steering_nodes
from torchair.operators.generic import is_collective
from torchair.operators.purity import draws, is_foreign


@dataclass
class GraphState:
    """Inputs by Data index, and which graph output updates which input."""

    inputs: list[InputSource] = field(default_factory=list)
    assigned: dict[int, int] = field(default_factory=dict)
    promised: frozenset[str] = frozenset()  # symbols that the layout of a result is told with
    topology: str = "DFS"
    switches: dict[str, bool] = field(default_factory=dict)
    dead_code: bool = True  # whether what nothing reads is removed
    native: bool = False  # whether generated code will run the graph
    quantised: int = 0  # rows of products with quantised weights that there are kernels for
    channels_last: bool = False  # whether a library convolves short floats best with channels last
    splits_lists: bool = False  # whether operators on lists of tensors are taken apart
    target: Target | None = None  # that kernels are generated for
    splits_batch_norms: bool = False  # whether sums over a batch are best kernels of their own
    splits_group_norms: bool = False  # whether there are kernels for the parts of a group norm
    overlap: bool = False  # whether communication and computing shall overlap
    permits: Callable[[str, str], bool] | None = None  # asked before a rule replaces a node
    matched: Counter[str] = field(default_factory=Counter)  # how often rules and patterns fitted
    replaced: Counter[str] = field(default_factory=Counter)  # and had an effect

    def follow(self, options: EngineOptions, target: Target | None) -> None:
        """Take over what the user asks for and what the target can do."""
        self.topology, self.switches = options.topology, options.switches
        self.dead_code = options.dead_code
        self.overlap = options.overlap and not options.single_stream
        self.native = target is not None
        self.quantised = 0 if target is None else target.quantised
        self.channels_last = target is not None and target.library_channels_last
        self.splits_lists = target is not None and target.splits_lists
        self.target = target
        self.splits_batch_norms = target is not None and target.splits_batch_norms
        self.splits_group_norms = target is not None and target.splits_group_norms

    def note(self, name: str, done: bool) -> None:
        """Count a rule that fitted."""
        self.matched[name] += 1
        self.replaced[name] += done

    def fuses(self, name: str) -> bool:
        """Whether a pattern is switched on; without a word about it, ALL decides."""
        return self.switches.get(name, self.switches.get("ALL", True))


def explicit_order_for_side_effect_nodes(graph: Graph, state: GraphState | None = None) -> None:
    """Chain prints and the like in program order and tie the last to NetOutput; so draws of random
    numbers, and collectives, which all processes must meet in one order. A foreign operator may do
    any of that. What updates an input waits for the prints of its old value."""
    effects = [n for n in graph.nodes if n.type in SIDE_EFFECTS]
    foreign = _foreign_by_stream(graph)
    in_program = set(foreign.pop("", ()))
    _chain(graph, [n for n in graph.nodes if n.type in SIDE_EFFECTS or n in in_program])
    if effects and state is not None and state.assigned:
        _before_updates(graph, effects, state)
    _chain(graph, [n for n in graph.nodes if draws(n) or n in in_program])
    _chain(graph, [n for n in graph.nodes if communicates(n) or n in in_program])
    for nodes in foreign.values():
        _chain(graph, nodes)


def _foreign_by_stream(graph: Graph) -> dict[str, list[Node]]:
    """Operators of other libraries by the stream that the user put them on, "" for the default:
    those of one stream keep their order, streams are ordered by events only."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if is_foreign(node):
            found.setdefault(str(node.attr(STREAM_LABEL, "")), []).append(node)
    return found


def _before_updates(graph: Graph, effects: list[Node], state: GraphState) -> None:
    assert graph.output is not None
    results = graph.output.values()
    writers = {index: results[k].node for k, index in state.assigned.items()}
    for node in effects:
        texts = [v.node for v in node.values() if v.node.type == "StringFormat"]
        read = [v.node for reader in (node, *texts) for v in reader.values()]
        before = needed_by([node])
        for source in dict.fromkeys(n for n in read if n.type == "Data"):
            writer = writers.get(source.attr("index"))
            if writer is not None and writer.type != "Data" and writer not in before:
                writer.after(node)


def communicates(node: Node) -> bool:
    """Whether a node talks to other processes."""
    if node.type in TORCH_CALLS:
        return is_collective(node.attr("target"))
    return has_trait(node, Trait.COMMUNICATION)


# ---- lanes: what the user put on streams of its own ----

COMMUNICATION = "communication"
"""The lane of collectives without a label, when those shall overlap with computing."""


class Lanes(dict[Node, str]):
    """Which lane each node of a graph runs in that is not in the default one."""

    def __init__(self, graph: Graph, single: bool = False, overlap: bool = False) -> None:
        """`single` puts all nodes into one lane; `overlap` gives communication one of its own."""
        super().__init__()
        if single:
            return
        for node in graph.nodes:
            label = str(node.attr(STREAM_LABEL, ""))  # the stream that the user put it on
            if not label and overlap and communicates(node):
                label = COMMUNICATION
            if label:
                self[node] = label

    def of(self, node: Node) -> str:
        """The lane of a node: a label, empty for the default one."""
        return self.get(node, "")


def explicit_order_for_cmo(graph: Graph, state: GraphState | None = None) -> None:
    """Chain prefetch operators in program order."""
    _chain(graph, [n for n in graph.nodes if n.type == "Cmo"])


def _chain(graph: Graph, nodes: list[Node]) -> None:
    for before, after in pairwise(nodes):
        after.after(before)
    if nodes and graph.output is not None:
        graph.output.after(nodes[-1])


def choose_order(graph: Graph, state: GraphState) -> None:
    """Order nodes for execution by the topology strategy."""
    order = topological(graph.nodes, graph.name)
    if state.topology == "BFS":  # level by level: everything that is ready, in program order
        order = _as_ready(graph, deque.extend)
    elif state.topology == "DFS":  # what has just become ready, so that intermediates die young
        rank = {n: -i for i, n in enumerate(order)}
        by_rank = partial(sorted, key=rank.__getitem__)
        order = _as_ready(graph, lambda queue, fresh: queue.extendleft(by_rank(fresh)))
    elif state.topology == "RDFS" and graph.output is not None:
        # what the outputs need, each operand just before its reader
        order = topological([graph.output, *graph.nodes], graph.name)
    order = _joins_last(order, Lanes(graph))
    if state.overlap:
        order = _communication_first(order)
    graph.set_order([*graph.data, *(n for n in order if n.type not in INPUTS)])


def _joins_last(order: list[Node], lanes: Lanes) -> list[Node]:
    """Let a lane do all that it can before it waits for the lane of a label."""
    if not lanes:
        return order
    joins: dict[Node, int] = {}  # how many such waits there are on the way here
    for node in order:
        lane = lanes.of(node)
        other = {b: lanes.of(b) not in ("", lane) for b in node.producers()}
        joins[node] = max((joins[b] + waits for b, waits in other.items()), default=0)
    return sorted(order, key=joins.__getitem__)


def _communication_first(order: list[Node]) -> list[Node]:
    """Begin communication as soon as it can be, and do all that needs no result of it before what
    does: that is time to overlap with."""
    stage: dict[Node, int] = {}  # how many times data went to other processes on the way here
    for node in order:
        before = node.producers()
        stage[node] = max((stage[b] + communicates(b) for b in before), default=0)
    leads: dict[Node, bool] = {}  # whether communication of the same stage waits for a node
    for node in reversed(order):
        after = [*(u for v in node.outputs for u in v.users()), *node.control_users]
        near = [u for u in after if stage[u] == stage[node]]
        leads[node] = communicates(node) or any(leads[u] for u in near)
    return sorted(order, key=lambda n: (stage[n], not leads[n]))


def _as_ready(graph: Graph, take: Callable[[deque[Node], list[Node]], None]) -> list[Node]:
    """Nodes from a queue into which `take` puts those that have become ready."""
    missing: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {n: [] for n in graph.nodes}
    for node in graph.nodes:
        producers = set(node.producers())
        missing[node] = len(producers)
        for p in producers:
            users[p].append(node)
    queue: deque[Node] = deque()
    take(queue, [n for n in graph.nodes if not missing[n]])
    order = []
    while queue:
        order.append(queue.popleft())
        for user in users[order[-1]]:
            missing[user] -= 1
        take(queue, [u for u in users[order[-1]] if not missing[u]])
    return order


# ---- passes over graph inputs: packing of symbol lists, removal of dead inputs, updates ----


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
                    index=index, dtype=DataType.DT_INT64, shape=[len(key)], placement="CPU"
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
    """Note as attributes where inputs are, types of outputs, and which engine runs the graph."""
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
        if not has_trait(node, Trait.WRITES_FIRST):
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
    if len(others) != 1 or others[0].type != "Assign":
        return False
    ref, value = others[0].values()
    return ref is source and value is node.outputs[0]


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
        ref, value = node.value_on("ref"), node.value_on("value")
        if ref.node.type not in INPUTS or (ref.dtype, ref.shape) != (value.dtype, value.shape):
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


# ---- order that data imply


def drop_implied_order(graph: Graph, state: GraphState | None = None) -> None:
    """A control edge between nodes that data order anyway -> none. A stream waits for another one
    because it reads what that computes, and what others wait for has no generated code."""
    if not any(node.control for node in graph.nodes):
        return
    position = {node: k for k, node in enumerate(topological(graph.nodes))}
    for node in graph.nodes:
        for before in list(node.control):
            if _reads_from(node, before, position):
                node.not_after(before)


def _reads_from(node: Node, before: Node, position: dict[Node, int]) -> bool:
    """Whether a node reads numbers that another one makes, or what follows from them. Dims of a
    value may be known, and then nothing waits for it."""
    stack, seen = [node], {node}
    while stack:
        reader = stack.pop()
        if reader.type == "Shape":
            continue
        for source in {value.node for value in reader.values()} - seen:
            if source is before:
                return True
            if position[source] > position[before]:
                seen.add(source)
                stack.append(source)
    return False


def forget_numbers(graph: Graph, state: GraphState) -> None:
    """Integers without dims that are arguments may be sizes. Those that no size follows from are
    data, such as the batches that a batch norm has seen: kernels compute with them, where all
    arguments are on the CPU."""
    given = [node.outputs[0] for node in graph.data]
    if any(v.device_type != "CPU" for v in given):
        return
    steering = steering_nodes(graph)
    symbolic = (v for v in given if isinstance(v.content, Sym))  # `symbol` loads sympy
    data = {
        v.content.expr
        for v in symbolic
        if v.node not in steering and v.uses and v.content == symbol(v.node.name)
    }
    values = [v for n in graph.nodes for v in n.outputs]
    dims = (d for v in values for d in v.shape or () if isinstance(d, Sym))
    data -= {s for d in dims for s in d.expr.free_symbols}
    for value in values:
        if isinstance(value.content, Sym) and value.content.expr.free_symbols & data:
            value.content = None
