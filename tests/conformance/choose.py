"""Make slice.json: few cases that together execute every converter the database reaches.

    python -m tests.conformance --all --json report.json
    python -m tests.conformance.choose report.json

Run it when test_conformance.py says that a converter is not executed by any case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Case, Group
from .extra import EXTRA
from .watch import builtin_targets

SLICE = Path(__file__).with_name("slice.json")


@dataclass(frozen=True)
class Chosen:
    """A case of the slice and the converters it is there for."""

    case: Case
    covers: tuple[str, ...]


def read_slice(path: Path = SLICE) -> list[Chosen]:
    """The cases that the test-suite runs."""
    return [
        Chosen(Case(Group(op, dtype, mode), index), tuple(covers))
        for op, dtype, mode, index, covers in json.loads(path.read_text(encoding="utf-8"))
    ]


def choose(records: Iterable[dict[str, Any]]) -> list[Chosen]:
    """Greedy cover: again and again the case that executes most of what is left."""
    left = builtin_targets()
    cases = {
        Case(Group(r["op"], r["dtype"], r["mode"]), r["sample"]): set(r["used"]) & left
        for r in records
        if r["status"] in ("passed", "generic")
    }
    chosen = []
    while cases:
        case = max(sorted(cases), key=lambda c: len(cases[c] & left))
        covers = cases.pop(case) & left
        if not covers:
            break
        left -= covers
        chosen.append(Chosen(case, tuple(sorted(covers))))
    return sorted(chosen, key=lambda c: c.case)


def main(reports: Sequence[str]) -> int:
    """Write slice.json from reports of full runs and say what is left to extra.py."""
    records = [r for report in reports for r in json.loads(Path(report).read_text())]
    chosen = choose(records)
    rows = [
        json.dumps([c.case.group.op, c.case.group.dtype, c.case.group.mode, c.case.index, c.covers])
        for c in chosen
    ]
    SLICE.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    by_hand = {extra.covers for extra in EXTRA}
    left = builtin_targets() - {name for c in chosen for name in c.covers}
    print(f"{len(chosen)} cases; {len(left)} converters left to extra.py")
    for name in sorted(left - by_hand):
        print(f"  missing there: {name}")
    return 1 if left - by_hand else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
