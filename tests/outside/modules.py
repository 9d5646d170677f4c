"""The module and operator databases inside torch's wheel, in our modes: `make modules`.

One row per entry and mode: `max-autotune` and `npugraph_ex`, each for inference and, as
`... training`, with gradients. docs/outside.md says how to read the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.pool import Done, run_all

from .databases import entries, spread
from .judging import MODES, Counts
from .table import BUILD, DOCS, Journal, Right, Row, finish
from .trial import Finding, line, tried

TRAINING = " training"
ALL_MODES = [mode + kind for mode in MODES for kind in ("", TRAINING)]
PATH = DOCS / "modules.csv"
STATE = BUILD / "modules.csv"
Task = tuple[str, str, int]  # an entry, a mode, the most samples


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outside.modules", description=__doc__)
    parser.add_argument("names", nargs="*", help="names or patterns of entries, as 'nn.*Pool*'")
    parser.add_argument("--samples", type=int, default=12, help="of an entry; 0: all")
    parser.add_argument("--modes", nargs="+", choices=ALL_MODES, default=ALL_MODES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="subprocesses")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a row")
    parser.add_argument("--update", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--state", type=Path, default=STATE, help="rows of an interrupted run")
    parser.add_argument("--fresh", action="store_true", help="do not go on with that run")
    parser.add_argument("--verbose", action="store_true", help="print samples that are not right")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    names = [
        name
        for name in entries()
        if not options.names or any(fnmatch.fnmatch(name, p) for p in options.names)
    ]
    journal = Journal(options.state, fresh=options.fresh)
    tasks: list[Task] = [
        (n, m, options.samples) for n in names for m in options.modes if (n, m) not in journal
    ]
    with tempfile.TemporaryDirectory(prefix="torchair-outside-") as folder:
        os.environ["TORCHAIR_CACHE_DIR"] = folder  # so that every compilation is a first one
        for done in run_all(tasks, findings, options.jobs, options.timeout):
            row = row_of(done)
            if row is not None:
                journal.add(row)
            if options.verbose:
                _show(done)
            if row is not None and len(journal.rows) % 50 == 0:
                print(f"{len(journal.rows)} rows", flush=True)
    partial = bool(options.names) or set(options.modes) != set(ALL_MODES)
    asked = {(n, m) for n in names for m in options.modes}
    rows = [row for row in journal.end() if row.key in asked]
    return finish(rows, PATH, update=options.update, partial=partial)


def findings(task: Task) -> Iterator[Finding]:
    """What the samples of an entry came to in a mode; the first right one is timed."""
    name, mode, most = task
    training = mode.endswith(TRAINING)
    timed = False
    try:
        programs = list(entries()[name](training))
    except Exception as e:  # a sample that cannot be made in a type
        yield Finding("samples", Right.UNKNOWN, f"eager: {line(e)}")
        return
    for program in spread(programs, most):
        found = tried(program, mode.removesuffix(TRAINING), training=training, timing=not timed)
        timed = timed or found.right is Right.YES
        yield found


def row_of(done: Done) -> Row | None:
    """The row of an entry in a mode; None where eager has nothing to differentiate or to run."""
    name, mode, _ = done.task
    found: list[Finding] = done.answers
    if done.lost:
        found = [*found, Finding("the next sample", Right.NO, done.lost)]
    if all(f.why.startswith("eager:") for f in found):
        return None
    count = Counter(f.right for f in found)
    right = next((r for r in (Right.NO, Right.YES) if count[r]), Right.UNKNOWN)
    counts = Counts()
    for f in found:
        counts.graph_breaks.update(f.counts.graph_breaks)
        counts.fallbacks.update(f.counts.fallbacks)
    timed = next((f for f in found if f.speed is not None), Finding("", right))
    return Row(
        name,
        mode,
        right,
        counts.graph_breaks.total(),
        counts.fallbacks.total(),
        timed.seconds,
        timed.aot_eager,
        timed.speed,
        _note(found, right, counts),
    )


def _note(found: Sequence[Finding], right: Right, counts: Counts) -> str:
    count = Counter(f.right for f in found)
    parts = [f"{count[Right.YES]} of {len(found)} samples"]
    other = next((f for r in (Right.NO, Right.UNKNOWN) for f in found if f.right is r), None)
    if other is not None:
        parts.append(f"{other.name}: {other.why[:160]}")
    if counts.fallbacks:
        parts.append(str(counts))
    return "; ".join(parts)


def _show(done: Done) -> None:
    name, mode, _ = done.task
    for f in done.answers:
        if f.right is not Right.YES and not f.why.startswith("eager:"):
            print(f"{name} [{mode}] {f.name}: {f.right}: {f.why}", flush=True)
    if done.lost:
        print(f"{name} [{mode}]: lost: {done.lost}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
