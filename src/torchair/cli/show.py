"""Tables and reports on a terminal, and as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 160  # of a table that no terminal shows


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header."""
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def print_report(report: Any) -> None:
    """Print a report in colours on a terminal."""
    if sys.stdout.isatty():
        Console().print(report)
    else:
        print(report)
