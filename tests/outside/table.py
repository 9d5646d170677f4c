"""Result tables: a typed row, a CSV file, and what changed since the CSV that docs/outside has.

    rows = [Row("gelu", "max-autotune", Right.YES, compile_s=0.4, aot_eager_s=0.2, speed=1.3)]
    return finish(rows, DOCS / "modules.csv", update=False)

`finish` prints the totals and the comparison, and gives the exit status.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchair.store import atomic_write, csv_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "outside"
BUILD = DOCS.parents[1] / "build" / "outside"
SHOWN = 40  # changes that a comparison prints; the files have all


class Right(Enum):
    """Whether the results of a row are right."""

    YES = "yes"
    NO = "no"  # other numbers, types or dims than eager's, or an error where eager has none
    UNKNOWN = "unknown"  # eager or aot_eager fails, or results cannot be compared

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Row:
    """One program in one mode. None: not measured."""

    model: str
    mode: str
    right: Right
    graph_breaks: int = 0
    fallbacks: int = 0
    compile_s: float | None = None  # the first call: Dynamo, AOTAutograd and our compiler
    aot_eager_s: float | None = None  # the same with the backend aot_eager
    speed: float | None = None  # seconds of eager divided by ours, for later calls
    note: str = ""  # what is wrong, kinds of fallbacks, numbers of samples

    @property
    def key(self) -> tuple[str, str]:
        """What names a row."""
        return self.model, self.mode


COLUMNS = tuple(f.name for f in fields(Row))


# ---- files ----


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, sorted, as a CSV file that appears whole."""
    ordered = sorted(rows, key=lambda r: r.key)
    names = Counter(r.key for r in ordered)
    twice = [key for key, count in names.items() if count > 1]
    if twice:
        raise ValueError(f"rows with the same model and mode: {twice}")
    cells = [[_cell(value) for value in astuple(row)] for row in ordered]
    # In the repository: for every reader of it.
    atomic_write(path, csv_bytes([COLUMNS, *cells]).replace(b"\r\n", b"\n"), mode=0o644)


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: columns {reader.fieldnames}, not {list(COLUMNS)}")
    return [_row(record) for record in reader]


class Journal:
    """Rows as they are made, in a file, so that a run that was interrupted goes on with the rest.
    The file is there only while a run is not finished."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.rows = [] if fresh else read(path)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return any(row.key == key for row in self.rows)

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        write(self.path, self.rows)

    def end(self) -> list[Row]:
        """All rows; the next run begins again."""
        self.path.unlink(missing_ok=True)
        return self.rows


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return " ".join(str(value).split())  # one line: a CSV in git is read as text


def _row(record: Mapping[str, str]) -> Row:
    def number(name: str) -> float | None:
        return float(record[name]) if record[name] else None

    return Row(
        record["model"],
        record["mode"],
        Right(record["right"]),
        int(record["graph_breaks"]),
        int(record["fallbacks"]),
        number("compile_s"),
        number("aot_eager_s"),
        number("speed"),
        record["note"],
    )


# ---- comparison ----


@dataclass(frozen=True)
class Change:
    """A row that is not as it was."""

    old: Row | None
    new: Row | None

    @property
    def lost(self) -> bool:
        return self.new is None

    @property
    def regression(self) -> bool:
        """A result that was right, or was not there, and is not right now."""
        if self.new is None:
            return False
        before = self.old.right if self.old is not None else Right.UNKNOWN
        return (
            self.new.right is Right.NO
            if before is Right.UNKNOWN
            else (before is Right.YES and self.new.right is not Right.YES)
        )

    @property
    def improvement(self) -> bool:
        return (
            self.new is not None
            and self.old is not None
            and self.new.right is Right.YES
            and self.old.right is not Right.YES
        )

    @property
    def kind(self) -> str:
        if self.lost:
            return "lost"
        if self.regression:
            return "worse"
        return "better" if self.improvement else "counts"

    def __str__(self) -> str:
        row = self.new or self.old
        assert row is not None
        if self.new is None or self.old is None:
            return row.note or f"right: {row.right}"
        parts = [
            f"{name}: {before} -> {now}"
            for name in ("right", "graph_breaks", "fallbacks")
            if (before := getattr(self.old, name)) != (now := getattr(self.new, name))
        ]
        return ", ".join([*parts, self.new.note] if self.new.note else parts)


def compare(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """What is not as it was in `right`, graph breaks or fallbacks; lost rows; and new rows that are
    wrong. Times are not compared: they are another machine's, or another hour's."""
    before, now = ({r.key: r for r in rows} for rows in (old, new))
    changes = []
    for key in sorted(before | now):
        change = Change(before.get(key), now.get(key))
        if change.lost or change.regression or change.improvement or _other_counts(change):
            changes.append(change)
    return changes


def _key(change: Change) -> tuple[str, str]:
    row = change.new or change.old
    assert row is not None
    return row.key


def _other_counts(change: Change) -> bool:
    if change.old is None or change.new is None:
        return False
    counts = [(r.graph_breaks, r.fallbacks) for r in (change.old, change.new)]
    return counts[0] != counts[1]


def show(changes: Sequence[Change], console: Console) -> None:
    """The changes as a table: regressions first."""
    order = ("worse", "lost", "better", "counts")
    shown = sorted(changes, key=lambda c: order.index(c.kind))
    table = Table(title="against the last run", title_justify="left")
    for column in ("change", "model", "mode", "what"):
        table.add_column(column, overflow="fold")
    for change in shown[:SHOWN]:
        row = change.new or change.old
        assert row is not None
        table.add_row(change.kind, row.model, row.mode, str(change)[:200])
    if shown:
        console.print(table, markup=False)
    if len(shown) > SHOWN:
        console.print(f"and {len(shown) - SHOWN} more")


def totals(rows: Sequence[Row]) -> str:
    """One line: how many rows, and what they came to."""
    count = Counter(r.right for r in rows)
    judged = count[Right.YES] + count[Right.NO]
    speeds = sorted(r.speed for r in rows if r.speed)
    middle = f", median speed against eager {speeds[len(speeds) // 2]:.2f}" if speeds else ""
    return (
        f"{len(rows)} rows: {count[Right.YES]} of {judged} right, {count[Right.UNKNOWN]} unknown, "
        f"{sum(r.graph_breaks for r in rows)} graph breaks, "
        f"{sum(r.fallbacks for r in rows)} fallbacks{middle}"
    )


def finish(
    rows: Sequence[Row],
    path: Path,
    *,
    update: bool = False,
    partial: bool = False,
    console: Console | None = None,
) -> int:
    """Print how `rows` compare with the file; 1 on a regression of `right` or a lost row.

    `update` writes the file, where a regression is only shown. A `partial` run is a choice of
    programs: rows that it did not run are neither lost nor removed from the file.
    """
    console = console or Console(width=140)
    old, keys = read(path), {r.key for r in rows}
    compared = [r for r in old if r.key in keys] if partial else old
    changes = compare(compared, rows)
    show(changes, console)
    known = [r for r in rows if r.right is Right.NO and r.key not in {_key(c) for c in changes}]
    for row in known:
        console.print(f"still wrong: {row.model}, {row.mode}: {row.note[:200]}", markup=False)
    console.print(totals(rows), highlight=False)
    if update:
        others = [r for r in old if r.key not in keys] if partial else []
        write(path, [*rows, *others])
        console.print(f"written: {path}", highlight=False)
        return 0
    return int(any(c.regression or c.lost for c in changes))
