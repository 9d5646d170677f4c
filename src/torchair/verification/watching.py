"""One run of a graph in some form, with what each FX node came to in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchair.catalog.reference import interpret, placed, run_node
from torchair.devices.call import GraphCall
from torchair.devices.hosted import host_memory
from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.calls import input_reader, result_builder
from torchair.engine.run.executor import Run
from torchair.ge.graph import Value, topological
from torchair.verification.judge import difference, leaves

Key = tuple[str, int]
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
    values: dict[Key, Tensor] = field(default_factory=dict)
    steps: list[StepValues] = field(default_factory=list)  # of a plan, in order


def key_of(value: Value) -> Key | None:
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

    def again(self) -> AbstractContextManager[Any]:
        """A block in which the generators go on from this state."""
        return _Replayed(self)

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


class _Replayed:
    def __init__(self, start: Randomness) -> None:
        self._start = start

    def __enter__(self) -> None:
        self._after = Randomness()
        self._start.restore()

    def __exit__(self, *error: object) -> None:
        self._after.restore()


def run_fx(gm: fx.GraphModule, args: Sequence[Any]) -> SeenRun:
    """An FX graph, node by node with torch."""
    seen: dict[Key, Tensor] = {}

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            if n.op == "call_function":
                for i, leaf in enumerate(leaves(made)):
                    if isinstance(leaf, Tensor):
                        seen[n.name, i] = leaf.detach().clone()
            return made

    results = Watched(gm).run(*args)
    return SeenRun(results, args, seen)


def run_ge(call: GraphCall, args: Sequence[Any], device: str) -> SeenRun:
    """A GE graph node by node with the catalogue's kernels, in the place of its program."""
    seen: dict[Key, Tensor] = {}

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
    looker = _Looker()
    outputs = call.session.run_watched(inputs, looker.of)
    keyed = ((key_of(v), t) for s in looker.steps for v, t in s.values)
    values = {key: t for key, t in keyed if key is not None}
    return SeenRun(call.build_results(outputs, args), args, values, looker.steps)


class _Looker:
    """Keeps what the steps of a program give."""

    alone = True

    def __init__(self) -> None:
        self.steps: list[StepValues] = []

    def of(self, plan: Plan) -> _Looker:
        self._plan = plan
        return self

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """All is there."""

    def wrap(self, run: Run, steps: Sequence[int], lane: str) -> Run:
        (number,) = steps
        step = self._plan.steps[number]

        def run_and_keep(registers: list[Any]) -> None:
            run(registers)
            made = [
                (value, registers[slot].detach().clone())
                for slot, value in zip(step.outs, step.made, strict=False)
                if isinstance(registers[slot], Tensor)
            ]
            self.steps.append(StepValues(step, tuple(made)))

        return run_and_keep


def worst_step(
    call: GraphCall, seen: SeenRun, args: Sequence[Any], device: str, among: frozenset[str]
) -> Step:
    """Of the steps that compute nodes of these FX nodes, the one that is farthest from what the
    catalogue's kernels make of the values before it."""
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
    nodes = step.also or [step.node]
    return frozenset(n.origin.fx_name for n in nodes if n.origin is not None)
