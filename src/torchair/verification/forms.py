"""One run of a graph in some form, and the check of it: is each value what its FX node makes of the
values before it?

So an error is found where it is made, and what follows from it is no error. Nodes that the form has
no value for, as those inside of a kernel, are computed on the way, in their own types and in
float64.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchair.devices.base import GraphCall, StepWatcher, host_memory
from torchair.engine.plan.inputs import input_reader, result_builder
from torchair.engine.plan.records import Step
from torchair.engine.run.executor import RunStep
from torchair.ge.graph import Value, topological
from torchair.operators.reference import interpret, placed, run_node
from torchair.verification import judge
from torchair.verification.judge import Difference, WideGraph, difference, leaves

ResultKey = tuple[str, int]
"""An FX node, and which of its results."""

_NAME = "_fx_tensor_name"  # attribute of a value: `<node>-<target>.OUTPUT.<number>`


@dataclass(frozen=True)
class StepValues:
    """What one step of a plan gave."""

    step: Step
    values: tuple[tuple[Value, Tensor], ...]


@dataclass
class SeenRun:
    """What a run of one form of a graph gave."""

    results: Sequence[Any]
    args: Sequence[Any]  # as they are afterwards
    values: dict[ResultKey, Tensor] = field(default_factory=dict)
    steps: list[StepValues] = field(default_factory=list)  # of a plan, in order


def key_of(value: Value) -> ResultKey | None:
    """The result of an FX node that a value of a GE graph is."""
    attr = value.attrs.get(_NAME)
    if attr is None:
        return None
    name, _, rest = str(attr.value).partition("-")
    number = rest.rpartition(".OUTPUT.")[2]
    return (name, int(number)) if number.isdigit() else None


class Randomness:
    """The state of torch's generators, to run the same thing again."""

    def __init__(self) -> None:
        self._host = torch.random.get_rng_state()
        self._devices = {m: m.get_rng_state_all() for m in _device_modules()}

    def on_host(self, args: Sequence[Any]) -> Randomness:
        """The same where the host stands for the emulated device of some arguments: it goes on with
        the numbers of that device."""
        places = (a.device for a in args if isinstance(a, Tensor))
        place = next((d for d in places if host_memory(d) is not None), None)
        if place is None:
            return self
        made = copy.copy(self)
        made._host = self._devices[torch.get_device_module(place)][place.index or 0]
        return made

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which the generators go on from this state."""
        after = Randomness()
        self.restore()
        try:
            yield
        finally:
            after.restore()

    def restore(self) -> None:
        """Put the generators into this state."""
        torch.random.set_rng_state(self._host)
        for module, states in self._devices.items():
            module.set_rng_state_all(states)


def _device_modules() -> list[Any]:
    """Of devices with generators of their own that are in use."""
    found = [torch.cuda] if torch.cuda.is_initialized() else []
    npu = getattr(torch, "npu", None)
    return [*found, npu] if hasattr(npu, "get_rng_state_all") else found


def run_fx(gm: fx.GraphModule, args: Sequence[Any]) -> SeenRun:
    """An FX graph, node by node with torch."""
    seen: dict[ResultKey, Tensor] = {}

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            if n.op == "call_function":
                for i, leaf in enumerate(leaves(made)):
                    if isinstance(leaf, Tensor):
                        seen[n.name, i] = leaf.detach().clone()
            return made

    return SeenRun(Watched(gm).run(*args), args, seen)


def run_ge(call: GraphCall, args: Sequence[Any], device: str) -> SeenRun:
    """A GE graph node by node with the operator table's kernels, in the place of its program."""
    seen: dict[ResultKey, Tensor] = {}

    def watch(node: Any, made: Sequence[Any]) -> None:
        for value, tensor in zip(node.outputs, made, strict=True):
            if (key := key_of(value)) is not None and isinstance(tensor, Tensor):
                seen[key] = tensor.detach().clone()

    inputs = input_reader(call.state.inputs)(args)
    outputs = interpret(call.graph, inputs, watch, device)
    for k, d in call.state.assigned.items():
        outputs[k] = inputs[d].copy_(outputs[k])
    build = result_builder(call.signature.results, call.signature.symbols)
    return SeenRun(build(outputs, args), args, seen)


def run_program(call: GraphCall, args: Sequence[Any]) -> SeenRun:
    """A compiled graph, as its programs run it."""
    inputs = call.collect(args)
    call.compile(inputs)
    return SeenRun(call.build_results(call.session.run(inputs), args), args)


def run_steps(call: GraphCall, args: Sequence[Any]) -> SeenRun:
    """A compiled graph step by step: each kernel by itself."""
    inputs = call.collect(args)
    call.compile(inputs)
    looker = _StepRecorder()
    outputs = call.session.run_watched(inputs, looker.of)
    keyed = ((key_of(v), t) for s in looker.steps for v, t in s.values)
    values = {key: t for key, t in keyed if key is not None}
    return SeenRun(call.build_results(outputs, args), args, values, looker.steps)


class _StepRecorder(StepWatcher):
    """Keeps what the steps of a program give."""

    def __init__(self) -> None:
        self.steps: list[StepValues] = []

    def around(self, number: int, run: RunStep, registers: list[Any]) -> None:
        """Run a step, and keep what it made."""
        run(registers)
        step = self.plan.steps[number]
        made = [
            (value, registers[slot].detach().clone())
            for slot, value in zip(step.outs, step.made, strict=False)
            if isinstance(registers[slot], Tensor)
        ]
        self.steps.append(StepValues(step, tuple(made)))


def worst_step(
    call: GraphCall, seen: SeenRun, args: Sequence[Any], device: str, among: frozenset[str]
) -> Step:
    """Of the steps that compute nodes of these FX nodes, the one that is farthest from what the
    operator table's kernels make of the values before it."""
    given = {v: t for s in seen.steps for v, t in s.values}
    off: dict[Value, float] = {}
    env: dict[Value, Tensor] = {}
    feeds = dict(zip(call.graph.data, input_reader(call.state.inputs)(args), strict=True))
    for node in topological(call.graph.nodes):
        if node.type == "NetOutput":
            continue
        made = [feeds[node]] if node in feeds else placed(node, run_node(node, env), env, device)
        for value, tensor in zip(node.outputs, made, strict=True):
            env[value] = given.get(value, tensor)
            if value in given and (wrong := difference(given[value], tensor)) is not None:
                off[value] = wrong.error / wrong.allowed if wrong.allowed else wrong.error
    candidates = [s for s in seen.steps if among & _origins(s.step)]
    scores = [max((off.get(v, 0.0) for v, _ in s.values), default=0.0) for s in candidates]
    return candidates[scores.index(max(scores))].step


def _origins(step: Step) -> frozenset[str]:
    return frozenset(n.origin.fx_name for n in step.also or [step.node] if n.origin is not None)


@dataclass(frozen=True)
class Wrong:
    """The first value that is wrong."""

    node: fx.Node  # that computes it
    difference: Difference
    what: str  # "", "result 2" or "argument 1"
    region: tuple[fx.Node, ...]  # nodes between it and the values before it
    inputs: tuple[tuple[str, Any], ...]  # those values, by name


class _FoundWrong(Exception):
    def __init__(self, wrong: Wrong) -> None:
        super().__init__(wrong.node.name)
        self.wrong = wrong  # torch's interpreter puts a text into `args`


class LocalCheck(WideGraph):
    """Runs an FX graph over the values of one of its forms."""

    def __init__(self, gm: fx.GraphModule, seen: SeenRun, bits: bool = False) -> None:
        """With `bits` a value is right only if it is eager's to the last bit."""
        super().__init__(gm)
        self._seen, self._bits = seen, bits
        self._known: dict[fx.Node, Any] = {}  # nodes whose value is the form's, or an argument

    def first_wrong(self, args: Sequence[Any], start: Randomness) -> Wrong | None:
        """The first value that is wrong, None if all are right."""
        try:
            with torch.no_grad(), start.again():
                results = self.run(*args)
                self._check_results(results)
                self._check_arguments(args)
        except _FoundWrong as found:
            return found.wrong
        return None

    def run_node(self, n: fx.Node) -> Any:
        """A node over the values before it; its own value is put in the place of the result."""
        made = super().run_node(n)
        if n.op != "call_function":
            if n.op == "placeholder":
                updated = isinstance(made, Tensor) and any(map(_writes, n.users))
                self._known[n] = made.clone() if updated else made  # as it was before
            return made
        truths = leaves(self.wide.get(n, made))
        members: list[Any] = []
        wanted = _wanted(n, made)
        for i, (eager, truth) in enumerate(zip(leaves(made), truths, strict=True)):
            value = self._seen.values.get((n.name, i))
            if value is None or not isinstance(eager, Tensor) or i not in wanted:
                members.append((eager, truth))
                continue
            self._judge(n, i, value, eager, truth)
            own = _laid_out_like(eager, value)
            members.append((own, judge.widened(own)))
            self._known[n] = made
        if n.target is operator.getitem and n.args[0] in self._known:
            self._known[n] = made
        if n not in self._known:
            return made
        whole = _refilled(made, [own for own, _ in members])
        if n in self.wide:
            self.wide[n] = _refilled(self.wide[n], [truth for _, truth in members])
        self._known[n] = whole
        return whole

    def _check_results(self, results: Any) -> None:
        (output,) = self.module.graph.find_nodes(op="output")  # type: ignore[union-attr, operator]
        made = results if isinstance(results, list | tuple) else (results,)
        sources = output.args[0] if isinstance(output.args[0], list | tuple) else output.args
        if len(made) != len(self._seen.results):
            text = f"{len(self._seen.results)} results instead of {len(made)}"
            raise _FoundWrong(self._wrong(output, judge.no_number(text)))
        rows = zip(self._seen.results, made, self.results, sources, strict=True)
        for i, (got, eager, truth, source) in enumerate(rows):
            node = source if isinstance(source, fx.Node) else output
            self._judge(node, 0, got, eager, truth, f"result {i}")

    def _check_arguments(self, args: Sequence[Any]) -> None:
        nodes = self.module.graph.find_nodes(op="placeholder")  # type: ignore[union-attr, operator]
        rows = zip(self._seen.args, args, nodes, strict=True)
        for i, (got, eager, node) in enumerate(rows):
            if not isinstance(eager, Tensor) or got is eager:
                continue
            writer = next((u for u in reversed(list(node.users)) if _writes(u)), node)
            self._judge(writer, 0, got, eager, self.wide.get(writer), f"argument {i}")

    def _judge(
        self, node: fx.Node, index: int, got: Any, eager: Any, truth: Any, what: str = ""
    ) -> None:
        """Raise for a value that is wrong. Where it is, the nodes that lead to it are shaken: what
        moves as much by rounding, as the small difference of large numbers does, is right."""
        if self._bits:
            if not judge.same_bits(got, eager):
                raise _FoundWrong(
                    self._wrong(node, judge.no_number("other bits than eager's"), what)
                )
            return
        wrong = difference(got, eager, truth)
        if wrong is None:
            return
        found = self._wrong(node, wrong, what)
        shaken = leaves(judge.run_shaken(found.region, dict(found.inputs)))
        moved = shaken[index] if index < len(shaken) else None
        if not judge.is_explained(wrong, got, eager, truth, moved):
            raise _FoundWrong(found)

    def _wrong(self, node: fx.Node, wrong: Difference, what: str = "") -> Wrong:
        """The finding, with the nodes that lie between it and known values."""
        region: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if at in region or at in inputs:
                continue
            if at.op != "call_function" or (at in self._known and at is not node):
                inputs[at] = None
            else:
                region[at] = None
                waiting += at.all_input_nodes
        order = tuple(n for n in self.module.graph.nodes if n in region)  # type: ignore[union-attr]
        given = tuple((n.name, self._value(n)) for n in inputs if n.op != "output")
        return Wrong(node, wrong, what, order, given)

    def _value(self, node: fx.Node) -> Any:
        if node in self._known:
            return self._known[node]
        return self.fetch_attr(str(node.target)) if node.op == "get_attr" else self.env.get(node)


def _wanted(node: fx.Node, made: Any) -> set[int]:
    """Which results of a node are read, by number: others, as states of generators that drop
    nothing, may be anything."""
    every = range(len(leaves(made)))
    parts = [u.args[1] if u.target is operator.getitem else None for u in node.users]
    if not isinstance(made, list | tuple) or not all(isinstance(k, int) for k in parts):
        return set(every)
    read = set(parts)
    there = [k for k, member in enumerate(made) if member is not None]
    return {i for i, k in zip(every, there, strict=False) if k in read}


def _laid_out_like(eager: Tensor, value: Tensor) -> Tensor:
    """A value with the strides of eager's, which views after it may count on."""
    if value.device == eager.device and value.stride() == eager.stride():
        return value
    return torch.empty_like(eager).copy_(value)


def _refilled(tree: Any, members: Sequence[Any]) -> Any:
    """A result of a node with other members; those that are None stay."""
    if not isinstance(tree, list | tuple):
        return members[0]
    rest = iter(members)
    return type(tree)([None if m is None else next(rest) for m in tree])


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
