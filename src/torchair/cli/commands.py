"""The commands and their arguments. What they do is named here and loaded when it runs: this module
imports nothing that takes time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from torchair.versions import stated

Parser = argparse.ArgumentParser


class Command(NamedTuple):
    """A command: what it does in words, the function that does it (`module:name`), the arguments it
    takes, and whether it runs a program of the user."""

    help: str
    run: str
    add_options: Callable[[Parser], None] = lambda _parser: None
    runs_program: bool = False


def parser() -> Parser:
    """The parser of the whole command line."""
    whole = Parser(prog="torchair", description="graph mode for PyTorch")
    whole.add_argument("--version", action=_VersionAction, help="versions of this installation")
    whole.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help, description=command.help))
    return whole


class _VersionAction(argparse.Action):
    """Prints versions. They are looked up only then."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Parser, *_arguments: object) -> None:
        print(stated())
        parser.exit()


# ---- numbers in a range, lists of names


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.strip().lstrip("-+").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return number


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def _rate(text: str) -> float:
    number = _tolerance(text)
    if not number:
        raise argparse.ArgumentTypeError("a rate must be greater than 0")
    return number


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


# ---- arguments of the commands


_TRUST = "read a file that others may have written to; reading it can run code"


def _add_program(parser: Parser, what: str = "Python program") -> None:
    parser.add_argument("script", help=what)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _trace(parser: Parser) -> None:
    parser.add_argument(
        "-o", "--output", default="timeline", help="output folder (default: timeline)"
    )
    _add_program(parser)


def _verify(parser: Parser) -> None:
    parser.add_argument("-o", "--output", default="torchair_verify", help="folder for findings")
    parser.add_argument(
        "--every-node", action="store_true", help="check every node, not only wrong graphs"
    )
    _add_program(parser)


def _report(parser: Parser) -> None:
    parser.add_argument(
        "-o", "--output", default="report.html", help="output file (default: report.html)"
    )
    _add_program(parser)


def _run(parser: Parser) -> None:
    number = _at_least(1)
    parser.add_argument("--devices", type=number, metavar="N", help="number of emulated devices")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of all random generators")
    parser.add_argument("--dump", metavar="FOLDER", help="dump every compiled graph to this folder")
    parser.add_argument("--timeline", metavar="FOLDER", help="write graph timelines to this folder")
    summary = "print graphs, graph breaks, fallbacks and compile time at exit"
    parser.add_argument("--explain", action="store_true", help=summary)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    _add_program(parser, "Python program, or module with -m")


def _run_air(parser: Parser) -> None:
    parser.add_argument("model", help="a .air file")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a .npy file for an input; files without a name are taken in order",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="save results to this folder as .npy files"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--frozen", action="store_true", help="pack weights for faster kernels")
    parser.add_argument("--check", action="store_true", help="compare checksums of weights")
    parser.add_argument("--trust", action="store_true", help="run the machine code of a package")
    parser.add_argument("--key", metavar="FILE", help="run machine code signed with this key")
    parser.add_argument(
        "--processor", help="processor level to use, e.g. x86-64-v3 (default: best)"
    )
    calls = "number of timed calls (0: no timing)"
    parser.add_argument("--repeat", type=_at_least(0), default=10, metavar="N", help=calls)


def _export(parser: Parser) -> None:
    files = "a .pt2 file of torch.export.save, or a graph file (.air, .om, .pb, .py, .txt)"
    parser.add_argument("program", help=files)
    kinds = "output file (default: <program>.air); .om files are for viewers such as Netron"
    parser.add_argument("-o", "--output", default="", help=kinds)
    parser.add_argument("--trust", action="store_true", help=_TRUST)


def _package(parser: Parser) -> None:
    names = "target processors, e.g. x86-64-v3,x86-64-v4+avx512bf16"
    parser.add_argument("model", help="a .pt2 file of torch.export.save, or a .air file")
    parser.add_argument("-o", "--output", required=True, help="output file")
    parser.add_argument("--cpu", type=_names, metavar="NAMES", help=names)
    parser.add_argument(
        "--gpu",
        type=_names,
        default=[],
        metavar="NAMES",
        help="GPU architectures to emit PTX for, e.g. sm_80,sm_90",
    )
    parser.add_argument("--frozen", action="store_true", help="pack weights for faster kernels")
    parser.add_argument("--key", metavar="FILE", help="sign the package with this secret")
    parser.add_argument("--trust", action="store_true", help=_TRUST)


def _compare(parser: Parser) -> None:
    parser.add_argument("first", metavar="DUMP_A", help="dump folder; with --npu a graph file")
    parser.add_argument("second", nargs="?", metavar="DUMP_B", help="second dump folder")
    parser.add_argument(
        "-o", "--output", default="compare.csv", help="output table (default: compare.csv)"
    )
    tolerance = "relative tolerance above which a tensor is reported"
    parser.add_argument("--rtol", type=_tolerance, help=tolerance)
    card = parser.add_argument_group("a graph (.txt, .py, .air) against a real card")
    card.add_argument("--npu", metavar="DUMP", help="folder of a binary CANN dump")
    card.add_argument("--profile", metavar="FOLDER", help="an *_ascend_pt folder, for times")
    card.add_argument(
        "--bandwidth", type=_rate, metavar="GB/s", help="memory bandwidth (default: 1600)"
    )
    card.add_argument(
        "--flops", type=_rate, metavar="TFLOP/s", help="matmul throughput (default: 313)"
    )


def _cache(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show")


def _tune(parser: Parser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", action="store_true", help="print the contents of the files")
    what.add_argument(
        "--merge", action="store_true", help="merge the best results of all files into one"
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="tuning file, or a folder of them")
    parser.add_argument("-o", "--output", help="output file")


def _check(parser: Parser) -> None:
    parser.add_argument("file", help="a graph: .py, .txt or .air")


def _table(parser: Parser) -> None:
    parser.add_argument(
        "pattern", nargs="?", default="", help="show only names that contain this text"
    )
    parser.add_argument("--markdown", action="store_true", help="print the Markdown page of docs/")


def _ops(parser: Parser) -> None:
    _table(parser)
    parser.add_argument("--npu", action="store_true", help="list the `npu` library instead")


_WATCHED, _FILES, _TABLES = (f"torchair.cli.{name}" for name in ("watched", "files", "tables"))
COMMANDS = {
    "ops": Command(
        "list torch operators and the GE operators they convert to", f"{_TABLES}:ops", _ops
    ),
    "options": Command("list the options of CompilerConfig", f"{_TABLES}:options", _table),
    "trace": Command(
        "run a program and write timelines of its graphs", "torchair.cli.trace:trace", _trace, True
    ),
    "check": Command("find stream races and deadlocks in a graph file", f"{_FILES}:check", _check),
    "verify": Command(
        "run a program and compare its graphs with eager", f"{_WATCHED}:verify", _verify, True
    ),
    "report": Command(
        "run a program and write an HTML report of its graphs", f"{_WATCHED}:report", _report, True
    ),
    "compare": Command(
        "compare two data dumps, or a graph with the dump of a card", f"{_FILES}:compare", _compare
    ),
    "run": Command(
        "run a script with an emulated npu device",
        "torchair.ascend.emulate.launcher:run",
        _run,
        True,
    ),
    "run-air": Command("run a model file on arrays", "torchair.cli.run_air:run_air", _run_air),
    "export": Command(
        "write a program of torch.export, or a graph file, as a model file",
        f"{_FILES}:export",
        _export,
    ),
    "package": Command(
        "write a model with machine code for many processors", f"{_FILES}:package", _package
    ),
    "cache": Command("show or clear the kernel cache on disk", f"{_FILES}:cache", _cache),
    "tune": Command("show or merge tuning results", f"{_FILES}:tune", _tune),
    "env": Command("print versions and hardware for bug reports", f"{_TABLES}:env"),
}
