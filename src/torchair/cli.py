"""The command line: `torchair ops` prints the operator table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchair.convert.table import lines

HEAD = ("torch operator", "GE operators", "checked types", "where")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `torchair` command."""
    parser = argparse.ArgumentParser(prog="torchair", description="graph mode for PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="which torch operators become which GE operators")
    ops.add_argument("pattern", nargs="?", default="", help="only operators with this in the name")
    ops.add_argument("--markdown", action="store_true", help="the page docs/operators.md")
    options = parser.parse_args(arguments)
    return _ops(options.pattern, options.markdown)


def _ops(pattern: str, markdown: bool) -> int:
    rows = [
        (x.target, " ".join(x.operators) or "(none)", " ".join(x.dtypes), f"{x.file}:{x.line}")
        for x in lines()
        if pattern.lower() in x.target.lower()
    ]
    if markdown:
        print(operators_page())
    elif not rows:
        print(f"no converter for {pattern!r}: such an operator runs as the generic torch node")
        return 1
    else:
        _print_table(rows)
    return 0


def _print_table(rows: list[tuple[str, str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{len(rows)} converters; any other operator: the generic torch node"
    table = Table(*HEAD, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def operators_page() -> str:
    """The text of docs/operators.md."""
    table = lines()
    text = [
        "# Operators",
        "",
        "Made by `torchair ops --markdown`; a test keeps it current. Every torch operator runs:",
        "one that is not listed becomes the generic node `TorchCall`, which calls torch's own",
        "kernel. *Checked types* are those in which samples of PyTorch's operator database, run",
        "through the converter and the engine, gave eager's result (`make conformance`); empty",
        "where that database never traces the operator and other tests cover it.",
        "",
        f"{len(table)} torch operators have a converter.",
    ]
    for family in sorted({x.family for x in table}):
        text += ["", f"## {family}", "", "| torch operator | GE operators | checked types |"]
        text.append("|---|---|---|")
        text += [
            f"| `{x.target}` | {' '.join(x.operators) or '-'} | {' '.join(x.dtypes)} |"
            for x in table
            if x.family == family
        ]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
