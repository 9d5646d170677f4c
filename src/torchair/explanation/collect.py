"""Looks on while graphs are compiled and called, and remembers what an explanation needs."""

from __future__ import annotations

import linecache
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchair.concrete import GeConcreteGraph, ReplayedGraph
from torchair.concrete.acl import AclConcreteGraph, mutated_arguments
from torchair.devices.call import GraphCall
from torchair.explanation.machine import rates
from torchair.explanation.report import Break, Explanation, GraphRow, Recompile, Times
from torchair.explanation.units import UnitRow, unit_rows
from torchair.log import logger
from torchair.runner import Compilation, GmRunner


class _Timed:
    """A graph whose calls are timed."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.calls, self.seconds, self.best = 0, 0.0, float("inf")
        self.args: list[Any] = []  # of the last call

    def __call__(self, *args: Any) -> Any:
        return self.entry(args)

    def entry(self, args: Sequence[Any]) -> Any:
        """Run the graph."""
        self.args = list(args)
        begun = time.perf_counter()
        results = self.compilation.runner.run(args)
        spent = time.perf_counter() - begun
        self.seconds, self.best = self.seconds + spent, min(self.best, spent)
        self.calls += 1
        return results

    @property
    def graph(self) -> GraphCall | None:
        """The graph in the engine, if it is there."""
        return engine_call(self.compilation)


def engine_call(compilation: Compilation) -> GraphCall | None:
    """The graph in the engine; None where it is recorded call by call, or not compiled."""
    made = compilation.made
    if isinstance(made, GeConcreteGraph):
        return made
    if isinstance(made, ReplayedGraph):
        return made.graph
    if isinstance(made, AclConcreteGraph):
        known = made.storable()
        return known[0] if known is not None and isinstance(known[0], GraphCall) else None
    return None


class Collector:
    """Everything about the graphs that are compiled while it looks on."""

    def __init__(self) -> None:
        from torch._dynamo import output_graph, utils

        self._dynamo, self._breaks = utils, output_graph.graph_break_reasons
        self._first_break = len(self._breaks)
        self._metrics_before = utils.get_compilation_metrics()  # Dynamo keeps the last 64
        self.graphs: list[_Timed] = []

    def __call__(self, compilation: Compilation) -> GmRunner:
        timed = _Timed(compilation)
        self.graphs.append(timed)
        return GmRunner(timed, compilation.runner.trace)

    def forget_times(self) -> None:
        """Calls so far were for compiling."""
        for graph in self.graphs:
            graph.calls, graph.seconds, graph.best = 0, 0.0, float("inf")

    @property
    def seconds(self) -> float:
        """Time inside of graphs so far."""
        return sum(g.seconds for g in self.graphs)

    def explanation(self, call: float | None = None, inside: float = 0.0) -> Explanation:
        """What is known by now; `call` are the seconds of one call of the model, of which it was
        `inside` of graphs."""
        rows = [self._row(k, graph) for k, graph in enumerate(self.graphs)]
        made = Explanation(rows, self._break_rows(), self._recompiles())
        timed = [u for r in rows for u in r.units if u.seconds]
        if timed:
            made.rates = rates(self._device(), lambda known: max(u.share(known) for u in timed))
        if call is not None:
            calls = max((r.calls for r in rows), default=1) or 1
            kernels = sum(r.kernels * r.calls for r in rows) / calls
            made.times = Times(call, inside, min(kernels, inside))
        return made

    def _device(self) -> str:
        every = (a for g in self.graphs for a in g.args if isinstance(a, Tensor))
        return next((str(a.device) for a in every if a.is_cuda), "cpu")

    def _row(self, number: int, timed: _Timed) -> GraphRow:
        compilation, graph = timed.compilation, timed.graph
        nodes = sum(n.op == "call_function" for n in compilation.gm.graph.nodes)
        dynamic = any(isinstance(x, torch.SymInt) for x in compilation.inputs)
        generic = dict(getattr(graph, "generic", {}))
        units, note = self._units(timed, graph)
        if graph is not None:
            dynamic = graph.graph.is_dynamic
        return GraphRow(
            f"graph {number + 1}", compilation.phase, nodes, dynamic, timed.calls,
            timed.best if timed.calls else 0.0, generic, units, note,
        )  # fmt: skip

    def _units(self, timed: _Timed, graph: GraphCall | None) -> tuple[list[UnitRow], str]:
        if not timed.args:
            return [], "never called"
        if graph is None:
            return [], "recorded call by call"
        mutated = set(mutated_arguments(timed.compilation.gm))
        nodes = timed.compilation.gm.graph.find_nodes(op="placeholder")
        args = [
            a.clone() if n in mutated and isinstance(a, Tensor) else a
            for n, a in zip(nodes, timed.args, strict=True)
        ]
        try:
            with torch.no_grad():
                return unit_rows(graph, args, self._device()), ""
        except Exception as e:  # an explanation must not end the program that it is about
            logger.warning("steps of a graph could not be timed: %s", e)
            return [], f"its steps could not be timed: {e}"

    def _break_rows(self) -> list[Break]:
        found = Counter(
            (_first_line(b.reason), _place(b.user_stack)) for b in self._breaks[self._first_break :]
        )
        return [Break(reason, line, count) for (reason, line), count in found.items()]

    def _recompiles(self) -> list[Recompile]:
        before = {id(m) for m in self._metrics_before}
        return [
            Recompile(f"{m.co_name} ({m.co_filename}:{m.co_firstlineno})", _first_line(text))
            for m in self._dynamo.get_compilation_metrics()
            if id(m) not in before and (text := m.recompile_reason)
        ]


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""


def _place(stack: Sequence[Any]) -> str:
    """File, line and text of the innermost frame of the user."""
    if not stack:
        return "unknown line"
    frame = stack[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} {text}".rstrip()
