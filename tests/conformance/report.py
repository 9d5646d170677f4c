"""What a run came to: tables, the JSON report, the verdict against the known failures."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .cases import Case, Group
from .check import FAILED, GENERIC, PASSED, UNTRACEABLE, Outcome

KNOWN = Path(__file__).with_name("known.toml")
STATES = (PASSED, GENERIC, FAILED, UNTRACEABLE)


@dataclass(frozen=True)
class Known:
    """One entry of known.toml: samples that fail, and why."""

    op: str
    dtypes: list[str]
    modes: list[str]
    samples: str  # indices and ranges, as "0-3, 7"
    reason: str

    def cases(self) -> Iterator[Case]:
        for dtype, mode, index in product(self.dtypes, self.modes, _indices(self.samples)):
            yield Case(Group(self.op, dtype, mode), index)


def _indices(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def read_known(path: Path = KNOWN) -> list[Known]:
    """The list of known failures; every entry must give a reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("known", [])
    known = [Known(**entry) for entry in entries]
    bare = [k for k in known if not k.reason]
    if bare:
        raise ValueError(f"{path.name}: without reason: {bare}")
    return known


def proven_text(outcomes: Iterable[Outcome]) -> str:
    """For every converter the types in which it was right: the table of `torchair ops`."""
    types: dict[str, set[str]] = {}
    for outcome in outcomes:
        if outcome.status in (PASSED, GENERIC):
            for target in outcome.used:
                types.setdefault(target, set()).add(outcome.case.group.dtype)
    return "".join(f"{target}\t{' '.join(sorted(types[target]))}\n" for target in sorted(types))


@dataclass(frozen=True)
class Verdict:
    """How a run compares with the list of known failures."""

    new: list[Outcome]  # failures that are not listed
    stale: list[Case]  # listed cases that pass

    @property
    def good(self) -> bool:
        return not self.new and not self.stale


def judge(outcomes: Iterable[Outcome], known: Iterable[Known]) -> Verdict:
    """New failures, and entries that must go; cases that did not run count as neither."""
    by_case = {o.case: o for o in outcomes}
    listed = {case for entry in known for case in entry.cases()}
    new = [o for o in by_case.values() if o.status == FAILED and o.case not in listed]
    stale = [c for c in sorted(listed) if c in by_case and by_case[c].status != FAILED]
    return Verdict(new, stale)


# ---- tables ----


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table by family and the totals by mode."""
    table = Table(title="samples by family of converters")
    table.add_column("family")
    for state in ("samples", *STATES, "right"):
        table.add_column(state, justify="right")
    for family in sorted({f for o in outcomes for f in o.families or ["(none)"]}):
        _row(table, family, [o for o in outcomes if family in (o.families or ["(none)"])])
    table.add_section()
    for mode in sorted({o.case.group.mode for o in outcomes}):
        _row(table, f"all, {mode}", [o for o in outcomes if o.case.group.mode == mode])
    console.print(table)
    console.print(
        "A sample counts in every family it uses; 'generic' samples ran right with at least one "
        "operator on the generic node; 'untraceable' ones AOTAutograd alone cannot run either."
    )


def _row(table: Table, name: str, outcomes: Sequence[Outcome]) -> None:
    count = Counter(o.status for o in outcomes)
    able = len(outcomes) - count[UNTRACEABLE]
    right = count[PASSED] + count[GENERIC]
    share = f"{right / able:.2%}" if able else "-"
    table.add_row(name, str(len(outcomes)), *(str(count[s]) for s in STATES), share)


def show_verdict(
    verdict: Verdict, console: Console, listed: str = KNOWN.name, most: int = 60
) -> None:
    """Everything that is not as listed."""
    for outcome in verdict.new[:most]:
        console.print(f"[red]new failure[/] {outcome.case}: {outcome.reason}", highlight=False)
    if len(verdict.new) > most:
        console.print(f"[red]and {len(verdict.new) - most} more[/]")
    for case in verdict.stale[:most]:
        console.print(f"[yellow]passes now, remove from {listed}[/] {case}", highlight=False)
    if verdict.good:
        console.print(f"[green]as expected[/]: every failure is listed in {listed}")


def as_json(outcomes: Iterable[Outcome]) -> str:
    """All outcomes, one flat record each."""
    return json.dumps([_record(o) for o in outcomes], indent=0)


def _record(outcome: Outcome) -> dict[str, Any]:
    record = asdict(outcome)
    case = record.pop("case")
    return {**case["group"], "sample": case["index"], **record}
