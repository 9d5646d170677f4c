"""The pass runner, for FX and GE graphs alike: it alone times, verifies, dumps and traces."""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.errors import GraphError
from torchair.log import debug_print, logger
from torchair.trace import Change, PassRecord, Trace


@dataclass(frozen=True)
class FxContext:
    """What a pass over an FX graph may ask for besides the graph."""

    example_inputs: Sequence[Any] = ()
    config: Any = None  # the user's
    name: str = "graph"  # of the graph: part of the tags of events
    phase: str = "forward"  # or "backward", for the log


NO_CONTEXT = FxContext()
"""For a pass that is called by itself."""


def call_pass(fn: Callable[..., Any], graph: Any, context: Any) -> None:
    """Run a pass: `fn(graph)`, or `fn(graph, context)` if it takes a second argument."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS:
        fn(graph)
    else:
        fn(graph, context)


@dataclass(frozen=True)
class Pass:
    """One rewriting step. `enabled` reads the settings; a disabled pass is not run at all. One that
    looks for nodes of a few kinds names them in `only`: a graph without them is not walked."""

    name: str
    fn: Callable[..., Any]
    enabled: Callable[[Any], bool] = lambda _settings: True
    only: Collection[str] = ()

    @property
    def doc(self) -> str:
        """First line of what the pass says of itself."""
        return (self.fn.__doc__ or "").strip().split("\n")[0]

    @property
    def current(self) -> Callable[..., Any]:
        """What runs: `fn`, or what a user has put in its place in the module that defines it."""
        name = getattr(self.fn, "__qualname__", "")
        return getattr(sys.modules.get(self.fn.__module__), name, self.fn)


@dataclass(frozen=True)
class Handler:
    """How the runner handles one kind of graph."""

    name: str  # "fx" or "ge"
    count: Callable[[Any], Counter[str]]
    fingerprint: Callable[[Any], int]
    verify: Callable[[Any], None]
    text: Callable[[Any], str]
    file_type: str
    names: Callable[[Any], list[str]] = lambda _graph: []  # of nodes, in order
    kinds: Callable[[Any], Counter[str]] | None = None  # a coarser count, for the log
    shown: Callable[[Any], object] | None = None  # what the log shows of a graph that was changed
    lines: Callable[[Any], list[str]] = lambda _graph: []  # one for each node, for differences


@dataclass
class GraphSnapshot:
    """What is compared before and after a pass: a fingerprint, counts by target and by kind, names
    of nodes, and their lines if changes are kept."""

    mark: int
    counts: Counter[str]
    kinds: Counter[str] | None
    names: list[str]
    lines: list[str]


@dataclass(frozen=True)
class PassGroup:
    """Passes that the log also tells of together, under a name; `since` is the graph to compare
    with, if that is not the one they are given."""

    name: str
    passes: Iterable[Pass]
    since: Any = None

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)


class PassRunner:
    """Runs passes over one graph and remembers what each did."""

    def __init__(self, kind: Handler, settings: Any, trace: Trace) -> None:
        self.kind = kind
        self.settings = settings
        self.trace = trace

    def run(self, passes: Iterable[Pass] | PassGroup, graph: Any, context: Any = None) -> None:
        """Every enabled pass in order, see `call_pass`."""
        enabled = [p for p in passes if p.enabled(self.settings)]
        if not enabled:
            return
        first = snapshot = self._snapshot(graph)
        start = time.perf_counter()
        for step in enabled:
            if self.trace.full:
                return
            snapshot = self._run_one(step, graph, context, snapshot)
        if isinstance(passes, PassGroup) and logger.isEnabledFor(logging.DEBUG):
            self._log_all(passes, first, snapshot, time.perf_counter() - start)

    def _log_all(
        self, passes: PassGroup, first: GraphSnapshot, last: GraphSnapshot, seconds: float
    ) -> None:
        if passes.since is not None:
            first = self._snapshot(passes.since)
        counts = first.counts.total(), last.counts.total()
        record = PassRecord(passes.name, seconds, *counts, changed=first.mark != last.mark)
        logger.debug("%s", difference_text(self.kind.name, record, first, last))

    def _run_one(
        self, step: Pass, graph: Any, context: Any, before: GraphSnapshot
    ) -> GraphSnapshot:
        start = time.perf_counter()
        mark = before.mark
        if not step.only or not before.counts.keys().isdisjoint(step.only):
            call_pass(step.current, graph, context)
            mark = self.kind.fingerprint(graph)
        seconds = time.perf_counter() - start
        changed = mark != before.mark
        if changed:
            self._verify(step, graph)
        after = self._snapshot(graph, mark) if changed else before
        record = PassRecord(
            step.name, seconds, before.counts.total(), after.counts.total(), changed=changed
        )
        self.trace.records.append(record)
        if changed and self.trace.changes is not None:
            self.trace.changes.append(self._change(step, record, before, after))
        if self.trace.writes:
            self.trace.write(f"graph_after_{step.name}", self.kind.file_type, self.kind.text(graph))
        self._log(record, before, after, graph)
        return after

    def _snapshot(self, graph: Any, mark: int | None = None) -> GraphSnapshot:
        kinds, wanted = self.kind.kinds, logger.isEnabledFor(logging.DEBUG)
        return GraphSnapshot(
            self.kind.fingerprint(graph) if mark is None else mark,
            self.kind.count(graph),
            kinds(graph) if kinds is not None and wanted else None,
            self.kind.names(graph) if wanted else [],
            self.kind.lines(graph) if self.trace.changes is not None else [],
        )

    def _change(
        self, step: Pass, record: PassRecord, before: GraphSnapshot, after: GraphSnapshot
    ) -> Change:
        lines = difflib.unified_diff(before.lines, after.lines, n=1, lineterm="")
        return Change(**vars(record), kind=self.kind.name, about=step.doc, lines=tuple(lines)[2:])

    def _verify(self, step: Pass, graph: Any) -> None:
        try:
            self.kind.verify(graph)
        except Exception as e:
            raise GraphError(f"pass {step.name} left an invalid graph: {e}") from e

    def _log(
        self, record: PassRecord, before: GraphSnapshot, after: GraphSnapshot, graph: Any
    ) -> None:
        took, counts = record.seconds * 1e3, f"{record.nodes_before} -> {record.nodes_after}"
        debug_print(2, f"torchair pass {record.name:40s} {took:8.2f} ms {counts} nodes")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", difference_text(self.kind.name, record, before, after))
            if record.changed and self.kind.shown is not None:
                shown = self.kind.shown(graph)
                logger.debug("after %s optimization, graph is %s", record.name, shown)


def difference_text(
    kind: str, record: PassRecord, before: GraphSnapshot, after: GraphSnapshot
) -> str:
    """What a pass changed: time, names of nodes, and tables of kinds and of targets."""
    title = f"After {kind} graph pass({record.name}) optimization:"
    if not record.changed:
        return f"{title} nothing changed, cost: {record.seconds:.6f}s"
    gone, new = set(before.names), set(after.names)
    lines = [
        title,
        f"cost: {record.seconds:.6f}s",
        f"before {record.nodes_before} nodes, after {record.nodes_after} nodes",
        f"removed nodes: {_listed(n for n in before.names if n not in new)}",
        f"added nodes: {_listed(n for n in after.names if n not in gone)}",
    ]
    if before.kinds is not None and after.kinds is not None:
        lines += ["operation kinds:", *_table(before.kinds, after.kinds, whole=True)]
    lines += ["targets:", *_table(before.counts, after.counts, whole=False)]
    return "\n".join(lines)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _table(before: Counter[str], after: Counter[str], whole: bool) -> list[str]:
    """Counts before and after, the totals first; without `whole` only rows that differ follow."""
    names = sorted(n for n in before.keys() | after.keys() if whole or before[n] != after[n])
    counts = [("total", before.total(), after.total()), *((n, before[n], after[n]) for n in names)]
    width = max(len(name) for name, _, _ in counts)
    columns = f"  {'name':{width}s} {'cnt(before)':>12s} {'cnt(after)':>12s} {'diff':>6s}"
    return [columns, *(f"  {n:{width}s} {b:12d} {a:12d} {a - b:+6d}" for n, b, a in counts)]
