"""Run the native kernels of a graph one by one and compare each with the operator table's kernels.

Every unit gets the operands that the oracle computed, in the layouts that the planner chose, and
its results are judged by the same nodes run in float64. So a fault is found in the unit it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from like_eager import twin
from random_graphs import Maker, Resize
from torchair.codegen.cpu.jit import run_kernel
from torchair.codegen.cpu.target import cpu
from torchair.codegen.program import SIZES_AT, AuxMemory, Native
from torchair.engine.fuse.units import Fusion, Unit
from torchair.engine.plan.planner import Planner
from torchair.engine.plan.records import Plan
from torchair.engine.session import TorchNpuGraph
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.dtypes import FLOAT_TYPES, DataType, torch_to_ge
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Value
from torchair.operators import Op, row_of
from torchair.operators.reference import run_node, tensor_args, tensor_fact

Tensors = dict[Value, torch.Tensor]

TIMES_EAGER = 4  # another order of rounding may cost up to this many errors of eager
FLOOR = 8  # and never less than this many units in the last place of the element
GUARD = 16  # elements around memory that must stay as they are


# ---- what is right ----


def oracle(graph: Graph, inputs: Sequence[torch.Tensor]) -> Tensors:
    """All values of a graph, node by node with torch kernels."""
    env: Tensors = {n.outputs[0]: t for n, t in zip(graph.data, inputs, strict=True)}
    for node in graph.nodes:
        if node.type not in (*INPUTS, "NetOutput"):
            env.update(zip(node.outputs, run_node(node, env), strict=True))
    return env


def truth_of(nodes: Sequence[Node], env: Tensors) -> Tensors:
    """The results of some nodes computed in float64 from what they read, whose types stay."""
    wide: Tensors = {}

    def get(value: Value) -> torch.Tensor:
        return wide[value] if value in wide else _double(env[value])

    def fact(value: Value) -> Fact:
        known = tensor_fact(env[value], value)
        real = known.dtype in FLOAT_TYPES
        return Fact(DataType.DT_DOUBLE if real else known.dtype, known.shape, known.content)

    for node in nodes:
        row = row_of(node.type)
        assert row is not None
        if node.type == "Cast" and node.attr("dst_type") in FLOAT_TYPES:
            results: Any = get(node.values()[0]).double()
        else:
            results = row.kernel(Op(node, fact))(*tensor_args(node, row, get))
        results = results if isinstance(results, (list, tuple)) else [results]
        wide.update((v, _double(t)) for v, t in zip(node.outputs, results, strict=True))
    return wide


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t


def differences(
    got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, scale: float = 0.0
) -> str:
    """Where a result is worse than eager's, "" if nowhere. Integers equal eager's; a float is as
    near to the truth as eager's are, or the very number that eager has. `scale` is how large the
    numbers are that it was computed from: what remains of a difference of them is rounding."""
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return f"{got.dtype} {list(got.shape)} instead of {eager.dtype} {list(eager.shape)}"
    same = (got == eager) | (got.isnan() & eager.isnan())
    if got.dtype.is_floating_point:
        same |= _near(got.double(), eager.double(), truth.double(), scale, torch.finfo(got.dtype))
    if bool(same.all()):
        return ""
    at = tuple(int(x) for x in (~same).nonzero()[0])
    count = int((~same).sum())
    return f"{count} of {same.numel()} wrong, at {at}: {got[at]}, eager {eager[at]}, {truth[at]}"


def _near(
    g: torch.Tensor, e: torch.Tensor, t: torch.Tensor, scale: float, info: torch.finfo
) -> torch.Tensor:
    errors = (e - t).abs()
    usual = errors[errors.isfinite()]
    worst = usual.max() if usual.numel() else torch.zeros(())
    allowed = FLOOR * info.eps * t.abs() + TIMES_EAGER * worst + info.eps * scale + info.tiny
    if info.dtype == "float64":  # the truth is no better than this
        allowed = allowed + 64 * info.eps * max(scale, largest([t]))
    near = (g - t).abs() <= allowed
    too_large = (t.abs() >= info.max * (1 - FLOOR * info.eps)) & g.isinf() & (g.sign() == t.sign())
    return near | too_large | (g == t) | (g.isnan() & t.isnan())


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest of all finite numbers."""
    sizes = [t[t.isfinite()].abs() for t in tensors if t.is_floating_point()]
    return max((float(s.max()) for s in sizes if s.numel()), default=0.0)


# ---- units alone ----


@dataclass
class Emitted:
    """A unit with its call and the layouts of what it reads and writes."""

    unit: Unit
    call: Native
    layouts: Tensors


class Recorder(NativeUnits):
    """Units that keep every call they make."""

    def __init__(self, graph: Graph, frozen: Mapping[Value, torch.Tensor] | None = None) -> None:
        super().__init__(graph, cpu(), frozen)
        self.calls: list[Emitted] = []
        self.declined: list[Unit] = []

    def emit(self, unit: Unit, fact: Any, layout: Any) -> Native | None:
        call = super().emit(unit, fact, layout)
        if call is None:
            self.declined.append(unit)
        else:
            layouts = {v: layout(v) for v in [*unit.inputs, *unit.outputs]}
            self.calls.append(Emitted(unit, call, layouts))
        return call


def facts_of(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[Fact]:
    """What a session knows of its inputs when it plans."""
    facts = []
    for node, t in zip(graph.data, inputs, strict=True):
        content: Any = None
        if node.outputs[0].content is not None:
            content = tuple(t.tolist()) if t.dim() else t.item()
        facts.append(Fact(torch_to_ge(t.dtype), tuple(t.shape), content))
    return facts


def check_units(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    frozen: Mapping[Value, torch.Tensor] | None = None,
    natives: Recorder | None = None,
    threads: Sequence[int] = (1, 2),
) -> Recorder:
    """Every unit of a graph gives what its nodes give one by one. With `natives` of an earlier
    check, kernels made for other sizes are used where they hold."""
    natives = natives or Recorder(graph, frozen)
    natives.calls.clear()
    natives.declined.clear()
    env = oracle(graph, inputs)
    planner = Planner(graph, natives=natives)
    planner.plan(facts_of(graph, inputs), [t.stride() for t in inputs])
    for one in natives.calls:
        nodes = [n for n in graph.nodes if n in {*one.unit.nodes, *one.unit.views}]
        truth = truth_of(nodes, env)
        scale = largest([*truth.values(), *(env[v] for v in one.unit.inputs)])
        for count in threads:
            for value, got in run_unit(one, env, natives, count).items():
                wrong = differences(got, env[value], truth[value], scale)
                assert not wrong, f"{_described(one)} with {count} threads, {value}: {wrong}"
    return natives


def _described(one: Emitted) -> str:
    names = "+".join(n.type for n in one.unit.nodes)
    layouts = ", ".join(f"{list(t.shape)}:{list(t.stride())}" for t in one.layouts.values())
    return f"{one.unit.kind} {names} over {layouts}"


def run_unit(one: Emitted, env: Tensors, natives: Recorder, threads: int) -> Tensors:
    """Results of one kernel for operands that the oracle computed."""
    memory = {v: Guarded(one.layouts[v], env[v]) for v in one.unit.inputs}
    updated = natives.updated(one.unit)
    for v in one.unit.outputs:
        memory[v] = Guarded(one.layouts[v], None if updated is None else env[updated])
    code = one.call.order.generated
    scratch = torch.empty(code.scratch * threads + 64, dtype=torch.uint8)
    fault = torch.zeros(1, dtype=torch.int64)
    room = scratch.data_ptr() + -scratch.data_ptr() % 64
    special = {AuxMemory.SCRATCH: room, AuxMemory.FAULT: fault.data_ptr()}
    values, words = [*one.unit.inputs, *one.unit.outputs], []
    for word, x in enumerate(one.call.arguments):
        if x.content is not None and (word in code.pack or x.content != "own"):
            constant = one.call.constants[word]
            words.append(natives.packed(constant, code.pack.get(word)).data_ptr())
        else:
            words.append(
                special[x.of] if isinstance(x.of, AuxMemory) else memory[values[x.of]].address
            )
    if one.call.numbers:
        words += [0] * (SIZES_AT - len(words)) + list(one.call.numbers)
    run_kernel(cpu().library, code.kernel, words, threads)
    assert not int(fault), "an index out of range"
    for m in memory.values():
        m.check()
    for v in one.unit.inputs:
        assert memory[v].same_as(env[v]), "an operand was written"
    return {v: memory[v].view for v in one.unit.outputs}


class Guarded:
    """A tensor of a given layout in the middle of memory that must stay as it is."""

    def __init__(self, layout: torch.Tensor, content: torch.Tensor | None) -> None:
        spans = [(n - 1) * s for n, s in zip(layout.shape, layout.stride(), strict=True)]
        extent = 1 + sum(spans) if layout.numel() else 0
        self._whole = torch.full((extent + 2 * GUARD,), 77, dtype=layout.dtype)
        self._places = torch.tensor(GUARD)
        for n, s in zip(layout.shape, layout.stride(), strict=True):
            self._places = self._places.unsqueeze(-1) + torch.arange(n) * s
        if content is not None:
            self._whole[self._places.reshape(-1)] = content.reshape(-1)
        self._others = torch.ones_like(self._whole, dtype=torch.bool)
        self._others[self._places.reshape(-1)] = False
        self.view = self._whole.as_strided(layout.shape, layout.stride(), GUARD)

    @property
    def address(self) -> int:
        """Where the first element is."""
        return self._whole.data_ptr() + GUARD * self._whole.element_size()

    def check(self) -> None:
        """Nothing around the tensor, or between its elements, was written."""
        assert bool((self._whole[self._others] == torch.tensor(77).to(self._whole.dtype)).all())

    def same_as(self, t: torch.Tensor) -> bool:
        """Whether the elements still are these."""
        return bool(((self.view == t) | (self.view.isnan() & t.isnan())).all())


# ---- graphs of compiled functions ----


@dataclass
class Captured:
    """A graph that was compiled, with the inputs of its first call."""

    session: TorchNpuGraph
    inputs: list[torch.Tensor]

    @property
    def graph(self) -> Graph:
        """The graph after all passes."""
        return self.session.graph

    @property
    def natives(self) -> NativeUnits:
        """Its fused units."""
        found = self.session.current.units
        assert found is not None
        return found

    @property
    def fusion(self) -> Fusion:
        """How its nodes were grouped."""
        return self.natives.fusion

    @property
    def plan(self) -> Plan:
        """The plan that ran last."""
        found = self.session.last_plan()
        assert found is not None
        return found

    @property
    def share(self) -> float:
        """Part of the nodes that run natively or cost nothing."""
        return self.session.summary().native_share

    def check_units(self, **options: Any) -> Recorder:
        """Check every unit on the inputs of the first call."""
        return check_units(self.graph, self.inputs, self.natives.frozen, **options)


@contextmanager
def capture() -> Iterator[list[Captured]]:
    """Collects the graphs that are compiled for the first time inside."""
    found: list[Captured] = []
    real: Callable[..., None] = TorchNpuGraph.compile

    def compile(self: TorchNpuGraph, inputs: Any = None) -> None:
        if not self.is_compiled and inputs is not None:
            found.append(Captured(self, [twin(t.detach()) for t in inputs]))
        real(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchNpuGraph, "compile", compile)
        yield found


def native_types(plan: Plan) -> set[str]:
    """Operator types that generated code computes in a plan."""
    return {n.type for s in plan.steps if s.kind == "native" for n in s.also}


# ---- random graphs as a whole


def _expected(graph: Graph, inputs: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    eager = oracle(graph, inputs)
    nodes = [n for n in graph.nodes if n.type not in ("Data", "Const", "NetOutput")]
    return eager, truth_of(nodes, eager)


def check_sessions(made: Maker, resizes: list[Resize]) -> None:
    """One session, for inputs of these sizes one after the other."""
    results = list(made.graph.output.values())
    sets, expected = [], []
    for resize in resizes:
        inputs = made.resized(resize)
        try:
            expected.append(_expected(made.graph, inputs))
        except RuntimeError as e:  # sizes that only happen to be equal do not grow together
            assert sets and "must match" in str(e)
            continue
        sets.append(inputs)
    session = TorchNpuGraph(made.graph.name)
    session.load(made.graph)
    for inputs, (eager, truth) in zip(sets, expected, strict=True):
        scale = largest([*truth.values(), *inputs])
        for value, got in zip(results, session.run(inputs), strict=True):
            wrong = differences(got, eager[value], truth.get(value, eager[value]), scale)
            assert not wrong, f"{value} of {made.graph.name}: {wrong}"
