"""A whole small torchair in one file, to read before the real one. Run it; it checks itself.

A model comes in through torch.compile, becomes an FX graph, then a GE graph that prints as a
program, is made smaller by rules, gets a memory plan, and runs from that plan. Every section is a
package of `src/torchair` and the names are those used there. Left out: constants, several outputs
of a node, symbolic sizes, in-place inputs, control edges, files, and errors that teach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten = torch.ops.aten

# ---- ge/graph.py: the IR. Nodes, values that know their readers, nothing about meaning.


@dataclass(frozen=True)
class Fact:
    """What is known of a value before it is computed."""

    dtype: torch.dtype
    shape: torch.Size


class Value:
    """What a node computes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.fact: Any = None
        self.users: list[Node] = []

    def replace_with(self, other: Value) -> None:
        for user in self.users:
            user.inputs = [other if v is self else v for v in user.inputs]
            other.users.append(user)


class Node:
    """One operator."""

    def __init__(self, op_type: str, name: str, inputs: list[Value], attrs: dict[str, Any]) -> None:
        self.type, self.name, self.inputs, self.attrs = op_type, name, inputs, attrs
        self.output = Value(self)
        for value in inputs:
            value.users.append(self)


class Graph:
    """A GE graph; builders add to the one entered last. Shape inference is injected."""

    stack: list[Graph] = []

    def __init__(self, infer: Callable[[Node], Any] = lambda node: None) -> None:
        self.infer, self.nodes = infer, list[Node]()

    def __enter__(self) -> Graph:
        Graph.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        Graph.stack.pop()

    def sort(self) -> None:
        """Producers first, and only what the NetOutput needs: dead code ends here."""
        order: dict[Node, None] = {}

        def visit(node: Node) -> None:
            for value in node.inputs:
                visit(value.node)
            order[node] = None

        for node in [n for n in self.nodes if n.type in ("Data", "NetOutput")]:
            visit(node)
        self.nodes = list(order)
        for node in self.nodes:
            node.output.users = [u for u in node.output.users if u in order]

    def text(self) -> str:
        """The graph as a program of builder calls: the form to debug with."""
        shown = {"index", "target", "transpose_x2"}
        return "\n".join(
            f"  {n.name} = ge.{n.type}("
            + ", ".join(
                [v.node.name for v in n.inputs]
                + [f"{k}={v}" for k, v in n.attrs.items() if k in shown]
            )
            + ")"
            for n in self.nodes
        )


# ---- ge/build.py: `ge.Add(x, y)` adds one node. Any name is a builder; the real package looks it
# up among the operator prototypes and checks inputs and attributes against them.


def builder(op_type: str) -> Callable[..., Value]:
    def build(*inputs: Value, **attrs: Any) -> Value:
        graph = Graph.stack[-1]
        count = sum(n.type == op_type for n in graph.nodes)
        node = Node(op_type, f"{op_type}_{count}", list(inputs), attrs)
        graph.nodes.append(node)
        node.output.fact = graph.infer(node)
        return node.output

    return build


class Builders:
    def __getattr__(self, name: str) -> Callable[..., Value]:
        return builder(name)


ge = Builders()

# ---- operators/: what an operator means. One row each: shape rule, torch kernel, traits.


@dataclass(frozen=True)
class Row:
    rule: Callable[[Node], Any]
    kernel: Callable[[Node], Callable[..., torch.Tensor]] | None
    view: bool = False  # the result looks at the memory of the first input
    out: bool = False  # the kernel takes `out=`, so it can write planned memory


def broadcast(node: Node) -> Fact:
    shapes = [v.fact.shape for v in node.inputs]
    return Fact(node.inputs[0].fact.dtype, torch.broadcast_shapes(*shapes))


def matmul_rule(node: Node) -> Fact:
    a, b = (v.fact for v in node.inputs[:2])
    return Fact(a.dtype, torch.Size([a.shape[0], b.shape[0 if flipped(node) else 1]]))


def flipped(node: Node) -> bool:
    return bool(node.attrs.get("transpose_x2"))


def matmul_kernel(node: Node) -> Any:
    def run(x1: Any, x2: Any, bias: Any = None, *, out: Any) -> Any:
        x2 = x2.mT if flipped(node) else x2
        return torch.mm(x1, x2, out=out) if bias is None else torch.addmm(bias, x1, x2, out=out)

    return run


def torch_call(node: Node) -> Any:
    target, arguments = node.attrs["target"], node.attrs["arguments"]
    return lambda *x: target(*[x[a] if is_input else a for is_input, a in arguments])


rows: dict[str, Row] = {
    "Data": Row(lambda node: node.attrs["fact"], None),
    "NetOutput": Row(lambda node: None, None),
    "Add": Row(broadcast, lambda node: torch.add, out=True),
    "Relu": Row(broadcast, lambda node: lambda x, out: torch.clamp_min(x, 0, out=out), out=True),
    "MatMul": Row(matmul_rule, matmul_kernel, out=True),
    "Transpose": Row(
        lambda node: Fact(node.inputs[0].fact.dtype, node.inputs[0].fact.shape[::-1]),
        lambda node: torch.t,
        view=True,
    ),
    "TorchCall": Row(lambda node: node.attrs["fact"], torch_call),
}

# ---- convert/: one converter for each aten operator, and a driver that walks the FX graph.

converters: dict[Any, Callable[..., Value]] = {}


class Decline(Exception):
    """A converter's way to say that these arguments are not for it."""


def builtin(target: Any) -> Callable[[Any], Any]:
    return lambda fn: converters.setdefault(target, fn)


builtin(aten.t.default)(lambda self: ge.Transpose(self))
builtin(aten.relu.default)(lambda self: ge.Relu(self))


@builtin(aten.addmm.default)
def addmm(self: Value, mat1: Value, mat2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """Said plainly; making it clever is the engine's business."""
    if (alpha, beta) != (1, 1):
        raise Decline("a scale")
    return ge.Add(ge.MatMul(mat1, mat2), self)


class GraphConverter:
    """FX to GE. Never "unsupported": without a converter, torch itself is called at run time."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.graph, self.generic = gm, Graph(lambda n: rows[n.type].rule(n)), list[str]()

    def run(self) -> Graph:
        env: dict[fx.Node, Value] = {}
        with self.graph:
            for node in self.gm.graph.nodes:
                if node.op == "placeholder":
                    env[node] = ge.Data(index=len(env), fact=fact_of(node))
                elif node.op == "output":
                    ge.NetOutput(*[env[n] for n in node.args[0]])
                else:
                    env[node] = self.call(node, fx.map_arg(node.args, lambda n: env[n]))
        return self.graph

    def call(self, node: fx.Node, args: Any) -> Value:
        try:
            return converters[node.target](*args, **node.kwargs)
        except (KeyError, Decline):
            self.generic.append(str(node.target))
            x = [a for a in args if isinstance(a, Value)]
            arguments = [(True, x.index(a)) if a in x else (False, a) for a in args]
            return ge.TorchCall(*x, target=node.target, arguments=arguments, fact=fact_of(node))


def fact_of(node: fx.Node) -> Fact:
    return Fact(node.meta["val"].dtype, node.meta["val"].shape)


# ---- ge/rewrite.py: a rule looks up from the last node, and builds as those who build graphs do.


class Rule:
    """`last` is the type it ends at; `find` gives what stands for such a node, or None."""

    last: str


class TransposeIntoMatMul(Rule):
    last = "MatMul"

    def find(self, node: Node) -> Value | None:
        x1, x2, *bias = node.inputs
        if x2.node.type != "Transpose" or flipped(node):
            return None
        return ge.MatMul(x1, x2.node.inputs[0], *bias, transpose_x2=True)


class BiasIntoMatMul(Rule):
    last = "Add"

    def find(self, node: Node) -> Value | None:
        product, bias = node.inputs
        if product.node.type != "MatMul" or len(product.node.inputs) != 2:
            return None
        is_row = len(bias.fact.shape) == 1
        made = product.node
        return ge.MatMul(*made.inputs, bias, **made.attrs) if is_row else None


def rewrite(graph: Graph, rules: tuple[Any, ...]) -> None:
    """Apply rules until none has anything to say."""
    changed = True
    while changed:
        changed = False
        for node, rule in [(n, r) for n in graph.nodes for r in rules if r.last == n.type]:
            with graph:
                new = rule.find(node)
            if new is not None and node.output.users:
                node.output.replace_with(new)
                node.output.users, changed = [], True
        graph.sort()


# ---- engine/plan/planner.py, engine/plan/arena.py: which calls in which order, on which bytes.


@dataclass
class Allocation:
    """One piece of memory: input, arena (planned), fresh (a result), torch (the kernel's own)."""

    slot: int
    kind: str
    fact: Fact
    first: int
    last: int
    offset: int = -1

    @property
    def size(self) -> int:
        return (self.fact.shape.numel() * self.fact.dtype.itemsize + 63) // 64 * 64


@dataclass
class Plan:
    allocations: list[Allocation] = field(default_factory=list)
    steps: list[tuple[Node, str, Any, list[int], int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    arena_size: int = 0


def make_plan(graph: Graph) -> Plan:
    plan, slot, allocation = Plan(), dict[Value, int](), dict[int, Allocation]()
    for node in graph.nodes:
        now, args, made = len(plan.steps), [slot[v] for v in node.inputs], len(slot)
        for a in args:
            allocation[a].last = now
        if node.type == "NetOutput":
            plan.outputs = args
            continue
        row, slot[node.output] = rows[node.type], made
        if row.view:
            step, memory = "view", ""
        elif row.out:
            step, memory = "out", "arena"
        else:
            step, memory = "call", "input" if row.kernel is None else "torch"
        if row.view:
            allocation[made] = allocation[args[0]]
        else:
            allocation[made] = Allocation(made, memory, node.output.fact, now, now)
            plan.allocations.append(allocation[made])
        if row.kernel is not None:
            plan.steps.append((node, step, row.kernel(node), args, made))
    for o in plan.outputs:  # results belong to the caller: never arena memory
        if allocation[o].kind == "arena":
            allocation[o].kind = "fresh"
    plan.arena_size = place([r for r in plan.allocations if r.kind == "arena"])
    return plan


def place(allocations: list[Allocation]) -> int:
    """Large ones first, each at the lowest offset that is free while it is alive."""
    done: list[Allocation] = []
    for new in sorted(allocations, key=lambda r: -r.size):
        alive = [r for r in done if r.first <= new.last and new.first <= r.last]
        new.offset = min(
            start
            for start in [0, *(r.offset + r.size for r in alive)]
            if all(start + new.size <= r.offset or r.offset + r.size <= start for r in alive)
        )
        done.append(new)
    return max((r.offset + r.size for r in done), default=0)


# ---- engine/run/executor.py: a plan bound to memory. A call walks over prepared steps.


class Program:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arena = torch.empty(plan.arena_size, dtype=torch.uint8)
        self.registers: list[Any] = [None] * (1 + max(made for *_, made in plan.steps))
        for r in plan.allocations:
            if r.kind == "arena":
                memory = self.arena[r.offset : r.offset + r.size].view(r.fact.dtype)
                self.registers[r.slot] = memory[: r.fact.shape.numel()].view(r.fact.shape)
        self.inputs = [r.slot for r in plan.allocations if r.kind == "input"]
        self.fresh = [r for r in plan.allocations if r.kind == "fresh"]

    def run(self, *args: torch.Tensor) -> list[torch.Tensor]:
        registers = self.registers
        for slot, tensor in zip(self.inputs, args, strict=True):
            registers[slot] = tensor
        for r in self.fresh:
            registers[r.slot] = torch.empty(r.fact.shape, dtype=r.fact.dtype)
        with torch.no_grad():
            for _, kind, kernel, slots, made in self.plan.steps:
                out = {"out": registers[made]} if kind == "out" else {}
                registers[made] = kernel(*[registers[s] for s in slots], **out)
        return [registers[o] for o in self.plan.outputs]


# ---- pipeline.py and backend.py: the whole compiler on one page, and its entry point.


def compile_graph(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    converter = GraphConverter(gm)
    graph = converter.run()
    print(f"original graph, generic: {converter.generic}\n{graph.text()}\n")
    rewrite(graph, (TransposeIntoMatMul(), BiasIntoMatMul()))
    print(f"optimized graph\n{graph.text()}\n")
    plan = make_plan(graph)
    print(f"plan, arena of {plan.arena_size} bytes")
    where = {
        r.slot: f"arena + {r.offset}" if r.kind == "arena" else r.kind for r in plan.allocations
    }
    for node, kind, _, args, made in plan.steps:
        print(f"  {kind:5s}{node.name:12s} reads {args}, writes {made}: {where.get(made, kind)}")
    with unset_fake_temporarily():  # tracing is still on, and the arena must be real memory
        return make_boxed_func(Program(plan).run)


def tiny_backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """For `torch.compile(model, backend=tiny_backend)`."""
    return aot_module_simplified(gm, example_inputs, fw_compiler=compile_graph)


def main() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()).eval()
    call = torch.compile(mlp, backend=tiny_backend, dynamic=False)
    with torch.no_grad():
        for x in torch.randn(2, 3, 8):
            torch.testing.assert_close(call(x), mlp(x))
    print("\nequal to eager")


if __name__ == "__main__":
    main()
