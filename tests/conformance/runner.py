"""The command line: run the operator database, show the tables, compare with known.toml."""

from __future__ import annotations

import argparse
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import torchair.convert
from torchair.configs.options import Numerics

from . import errors, types
from .cases import DTYPES, MODES, Group, groups
from .check import FAILED, Outcome
from .report import KNOWN, as_json, judge, proven_text, read_known, show, show_verdict
from .workers import Limits, run_all

PROVEN = Path(torchair.convert.__file__).with_name("proven.txt")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Compare compiled operators with eager on PyTorch's operator database.",
    )
    parser.add_argument("ops", nargs="*", help="names or patterns of operators, as 'linalg.*'")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--samples", type=int, default=4, help="samples of an operator and type")
    parser.add_argument("--grad", action="store_true", help="gradients instead of values")
    parser.add_argument("--dynamic", action="store_true", help="values, with symbolic sizes")
    parser.add_argument("--strict", action="store_true", help="strict numerics: eager's bits")
    parser.add_argument("--errors", action="store_true", help="what eager refuses, nothing else")
    parser.add_argument("--all", action="store_true", help="values in both ways, and gradients")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="subprocesses")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for an operator")
    parser.add_argument("--slice", default="0/1", help="k/n: every n-th group from the k-th on")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    help_record = "with --all: write the checked types of `torchair ops`"
    parser.add_argument("--record", action="store_true", help=help_record)
    return parser.parse_args(argv)


def choose(options: argparse.Namespace) -> list[Group]:
    """The groups that the options ask for."""
    if options.errors:
        return _part([*errors.groups(), *types.groups()], options)
    asked = [mode for mode in ("dynamic", "grad") if getattr(options, mode)]
    modes = MODES if options.all else asked or ["forward"]
    found = [g for mode in modes for g in groups(mode, options.dtypes)]
    return _part(found, options)


def _part(found: list[Group], options: argparse.Namespace) -> list[Group]:
    if options.ops:
        found = [g for g in found if any(fnmatch.fnmatch(g.op, p) for p in options.ops)]
    k, n = (int(part) for part in options.slice.split("/"))
    return found[k::n]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when every failure is listed and everything listed fails."""
    options = parse(argv)
    if options.record and (options.ops or not options.all):
        raise SystemExit("--record needs the whole run: --all, and no operator names")
    console = Console()
    listed = errors.EXCUSED if options.errors else KNOWN
    known = read_known(listed)
    outcomes = _run(choose(options), options, console)
    if options.json:
        options.json.write_text(as_json(outcomes), encoding="utf-8")
    if options.record:
        PROVEN.write_text(proven_text(outcomes), encoding="utf-8")
    if options.strict:
        show(outcomes, console)
        return _show_other_bits(outcomes, console)
    verdict = judge(outcomes, known)
    show_verdict(verdict, console, listed.name)
    (errors.show if options.errors else show)(outcomes, console)
    return 0 if verdict.good else 1


def _show_other_bits(outcomes: list[Outcome], console: Console) -> int:
    """List the cases whose bits are not eager's."""
    failed = [o for o in outcomes if o.status == FAILED]
    for outcome in failed:
        console.print(f"{outcome.case}: {outcome.reason}", markup=False)
    return 1 if failed else 0


def _run(todo: list[Group], options: argparse.Namespace, console: Console) -> list[Outcome]:
    outcomes: list[Outcome] = []
    numerics: Numerics = "strict" if options.strict else "default"
    limits = Limits(options.samples, options.timeout, numerics)
    columns = (
        TextColumn("{task.description:44.44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("operators", total=len(todo), failed=0)
        for group, found in run_all(todo, options.jobs, limits):
            outcomes += found
            failed = sum(o.status == FAILED for o in outcomes)
            progress.update(task, advance=1, description=str(group), failed=failed)
            finished = progress.tasks[0].completed
            if not console.is_terminal and finished % 100 == 0:  # a log file gets lines instead
                console.print(f"{finished:.0f} of {len(todo)} done, {failed} failed")
    return sorted(outcomes, key=lambda o: o.case)
