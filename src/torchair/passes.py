"""The pass runner, for FX and GE graphs alike: it alone times, verifies, dumps and traces."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchair.errors import GraphError
from torchair.flags import Flags
from torchair.log import logger
from torchair.trace import PassRecord, Trace


@dataclass(frozen=True)
class Pass:
    """One rewriting step. `enabled` reads the settings; a disabled pass is not run at all."""

    name: str
    fn: Callable[..., Any]
    enabled: Callable[[Any], bool] = lambda _settings: True

    @property
    def doc(self) -> str:
        """First line of what the pass says of itself."""
        return (self.fn.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class Kind:
    """How the runner handles one kind of graph."""

    name: str  # "fx" or "ge"
    count: Callable[[Any], Counter[str]]
    fingerprint: Callable[[Any], int]
    verify: Callable[[Any], None]
    text: Callable[[Any], str]
    file_type: str


class PassRunner:
    """Runs passes over one graph and remembers what each did."""

    def __init__(self, kind: Kind, settings: Any, trace: Trace) -> None:
        self.kind = kind
        self.settings = settings
        self.trace = trace

    def run(self, passes: Iterable[Pass], graph: Any, *context: Any) -> None:
        """Every enabled pass in order, each as `fn(graph, *context)`."""
        for step in passes:
            if step.enabled(self.settings):
                self._run_one(step, graph, context)

    def _run_one(self, step: Pass, graph: Any, context: tuple[Any, ...]) -> None:
        before, print_before = self.kind.count(graph), self.kind.fingerprint(graph)
        start = time.perf_counter()
        step.fn(graph, *context)
        seconds = time.perf_counter() - start
        self._verify(step, graph)
        after = self.kind.count(graph)
        record = PassRecord(
            step.name,
            seconds,
            before.total(),
            after.total(),
            changed=print_before != self.kind.fingerprint(graph),
        )
        self.trace.records.append(record)
        if self.trace.writes:
            what = f"graph_after_{step.name}"
            self.trace.write(what, self.kind.file_type, self.kind.text(graph))
        self._log(record, before, after)

    def _verify(self, step: Pass, graph: Any) -> None:
        try:
            self.kind.verify(graph)
        except Exception as e:
            raise GraphError(f"pass {step.name} left an invalid graph: {e}") from e

    def _log(self, record: PassRecord, before: Counter[str], after: Counter[str]) -> None:
        if Flags.read().debug >= 2:
            print(f"torchair pass {record.name:40s} {record.seconds * 1e3:8.2f} ms "
                  f"{record.nodes_before} -> {record.nodes_after} nodes")  # fmt: skip
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", difference_text(self.kind.name, record, before, after))


def difference_text(
    kind: str, record: PassRecord, before: Counter[str], after: Counter[str]
) -> str:
    """What a pass changed, as a table by target."""
    rows = [("name", "cnt(before)", "cnt(after)", "diff")]
    totals = (before.total(), after.total())
    rows.append(("total", str(totals[0]), str(totals[1]), f"{totals[1] - totals[0]:+d}"))
    for name in sorted(before.keys() | after.keys()):
        b, a = before[name], after[name]
        if a != b:
            rows.append((name, str(b), str(a), f"{a - b:+d}"))
    width = max(len(r[0]) for r in rows)
    table = "\n".join(f"  {r[0]:{width}s} {r[1]:>12s} {r[2]:>12s} {r[3]:>6s}" for r in rows)
    return (
        f"After {kind} graph pass({record.name}) optimization: cost {record.seconds:.6f}s, "
        f"nodes {totals[0]} -> {totals[1]}\n{table}"
    )
