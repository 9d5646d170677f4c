"""`torchair export` and `torchair package`: model files from programs of `torch.export`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from torchair.deploy.exported import read_program, write_program
from torchair.deploy.packaging import DEFAULT_PROCESSORS, package
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
    return _reported(
        "export", lambda: write_program(read_program(options.program, options.trust), target)
    )


def add_package_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `torchair package`."""
    parser.add_argument("model", help="a .pt2 file of torch.export.save, or a .air file")
    parser.add_argument("-o", "--output", required=True, help="the file to write")
    parser.add_argument(
        "--cpu", default=",".join(DEFAULT_PROCESSORS), metavar="NAMES",
        help="processors to make code for, `%(default)s`; x86-64-v4 may have +avx512vnni and "
        "+avx512bf16",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", default="", metavar="NAMES", help="GPUs to make PTX for, as `sm_80,sm_90`"
    )
    parser.add_argument("--frozen", action="store_true", help="pack weights for faster kernels")
    parser.add_argument("--key", metavar="FILE", help="sign the package with this secret")
    parser.add_argument("--trust", action="store_true", help=_TRUST)


def make_package(options: argparse.Namespace) -> int:
    """Write a model with machine code for many processors; the exit status."""
    cpu, gpu = ([n for n in text.split(",") if n] for text in (options.cpu, options.gpu))
    return _reported(
        "package",
        lambda: package(
            options.model, options.output, cpu=cpu, gpu=gpu, frozen_parameter=options.frozen,
            key=options.key, trust=options.trust,
        ),
    )  # fmt: skip


def _reported(command: str, write: Callable[[], Path]) -> int:
    try:
        print(write())
    except (TorchairError, OSError, ValueError) as error:
        print(f"torchair {command}: {error}", file=sys.stderr)
        return 2
    return 0
