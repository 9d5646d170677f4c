"""Commands that run a program of the user. What it raises, and how it leaves, is its own affair."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchair.cli.show import print_report
from torchair.emulate import launcher
from torchair.errors import CommandError
from torchair.reporting.recorder import Reporter
from torchair.runner import observed
from torchair.verification.api import Verifier, VerifyOptions

_TIMELINE = "TORCHAIR_TIMELINE"

run = launcher.run


def trace(options: argparse.Namespace) -> int:
    """Run a program as Python would, with timelines on."""
    script, folder = launcher.existing(options.script), _folder(options.output)
    there = set(folder.glob("*.json"))
    kept = sys.argv, sys.path[0], os.environ.get(_TIMELINE)
    sys.argv, sys.path[0] = [str(script), *options.arguments], str(script.resolve().parent)
    os.environ[_TIMELINE] = str(folder.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0], before = kept
        if before is None:
            del os.environ[_TIMELINE]
        else:
            os.environ[_TIMELINE] = before
    made = sorted(set(folder.glob("*.json")) - there)
    for file in made:
        print(file)
    return 0 if made else 1


def verify(options: argparse.Namespace) -> int:
    """Run a program with a check around each graph that it compiles. Its own way to leave counts,
    unless something is wrong."""
    launcher.existing(options.script)
    verifier = Verifier(VerifyOptions(_folder(options.output), options.every_node))
    _run_observed(options, observed(verifier), lambda: print_report(verifier.report))
    return 0 if verifier.report else 1


def report(options: argparse.Namespace) -> int:
    """Run a program, and write the page even if it fails: what was compiled until then helps."""
    script, page = launcher.existing(options.script), Path(options.output)
    _folder(page.parent)
    if page.is_dir():
        raise CommandError("the page cannot be written: this is a folder", file=page)
    reporter = Reporter(page, script.name)
    _run_observed(options, observed(reporter, changes=True), lambda: print(reporter.write()))
    return 0


def _folder(name: str | Path) -> Path:
    """A folder to write to, which need not be there yet."""
    folder = Path(name)
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "it may not be written to" if nearest.is_dir() else "it is no folder"
        raise CommandError(f"nothing can be written to {folder}: {why}", file=nearest)
    return folder


def _run_observed(
    options: argparse.Namespace, looking: AbstractContextManager[None], finish: Callable[[], None]
) -> None:
    """Run a program while somebody looks on, and `finish` even if it fails; leave as it does."""
    code: Any = 0
    try:
        with looking:
            code = launcher.run_script(options.script, options.arguments)
    except SystemExit as leaving:
        code = leaving.code
    finally:
        finish()
    if code:
        raise SystemExit(code)
