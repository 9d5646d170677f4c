"""Commands that observe a program of the user: they load AOTAutograd before it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchair.ascend.emulate import launcher
from torchair.cli.show import print_report
from torchair.cli.trace import writable_folder
from torchair.errors import CommandError
from torchair.reporting.recorder import Reporter
from torchair.runner import observed
from torchair.verification.api import Verifier, VerifyOptions


def verify(options: argparse.Namespace) -> int:
    """Run a program with a check around each graph that it compiles. Its own way to leave counts,
    unless something is wrong."""
    launcher.existing(options.script)
    verifier = Verifier(VerifyOptions(writable_folder(options.output), options.every_node))
    _run_observed(options, observed(verifier), lambda: print_report(verifier.report))
    return 0 if verifier.report else 1


def report(options: argparse.Namespace) -> int:
    """Run a program, and write the page even if it fails: what was compiled until then helps."""
    script, page = launcher.existing(options.script), Path(options.output)
    writable_folder(page.parent)
    if page.is_dir():
        raise CommandError("the page cannot be written: this is a folder", file=page)
    reporter = Reporter(page, script.name)
    _run_observed(options, observed(reporter, changes=True), lambda: print(reporter.write()))
    return 0


def _run_observed(
    options: argparse.Namespace, looking: AbstractContextManager[None], finish: Callable[[], None]
) -> None:
    """Run a program under observation, and `finish` even if it fails; leave as it does."""
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
