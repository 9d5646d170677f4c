"""`torchair export`: what the command line does with programs of `torch.export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchair.deploy.exported import read_program, write_program
from torchair.errors import TorchairError

_TRUST = "read a file that others may have written to; reading it can run code"


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `torchair export`."""
    parser.add_argument("program", help="a .pt2 file of torch.export.save")
    parser.add_argument("-o", "--output", default="", help="the file to write, `<program>.air`")
    parser.add_argument("--trust", action="store_true", help=_TRUST)


def export(options: argparse.Namespace) -> int:
    """Write a program as a model file; the exit status."""
    target = Path(options.output or Path(options.program).with_suffix(".air"))
    try:
        print(write_program(read_program(options.program, options.trust), target))
    except (TorchairError, OSError) as error:
        print(f"torchair export: {error}", file=sys.stderr)
        return 2
    return 0
