"""The command line: `torchair ops` prints the operator table, `torchair trace` runs a program and
keeps timelines of its graphs, `torchair verify` runs one and compares its graphs with eager,
`torchair report` runs one and writes a page about its graphs, `torchair compare` compares data
dumps, `torchair check` looks for stream problems in a graph file, `torchair run` runs an Ascend
script anywhere, `torchair run-air` runs a model file, `torchair cache` shows or clears the kernels
on disk, `torchair tune` shows or merges results of tuning, `torchair env` describes this
machine."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from torchair.codegen.kept import store
from torchair.codegen.tuned import NAME, DamagedFile, Found, merge, read
from torchair.convert.registry import lines
from torchair.deploy.load import add_run_air_options, run_air
from torchair.emulate import launcher
from torchair.engine.inspect.check import check_graph
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.inputs import mapping_assign_op_to_graph_output
from torchair.errors import did_you_mean
from torchair.operators import infer
from torchair.process import Steps
from torchair.serde import read_graph
from torchair.tools import compare_dumps

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
HEAD = ("torch operator", "GE operators", "checked types", "where")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `torchair` command."""
    parser = argparse.ArgumentParser(prog="torchair", description="graph mode for PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="which torch operators become which GE operators")
    ops.add_argument("pattern", nargs="?", default="", help="only operators with this in the name")
    ops.add_argument("--markdown", action="store_true", help="the page docs/operators.md")
    trace = commands.add_parser("trace", help="run a program, write timelines of its graphs")
    trace.add_argument("-o", "--output", default="timeline", help="folder, `timeline` if not given")
    trace.add_argument("script", help="Python program")
    trace.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    check = commands.add_parser("check", help="races and deadlocks of streams in a graph file")
    check.add_argument("file", help="a graph: .py, .txt or .air")
    verify = commands.add_parser("verify", help="run a program, compare its graphs with eager")
    verify.add_argument("-o", "--output", default="torchair_verify", help="folder for findings")
    verify.add_argument("--every-node", action="store_true", help="even where results are right")
    verify.add_argument("script", help="Python program")
    verify.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    about = commands.add_parser("report", help="run a program, write a page about its graphs")
    about.add_argument("-o", "--output", default="report.html", help="file, `report.html`")
    about.add_argument("script", help="Python program")
    about.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    compare = commands.add_parser("compare", help="two data dumps, matched by FX names")
    compare.add_argument("first", metavar="DUMP_A", help="folder of an eager npy or a GE dump")
    compare.add_argument("second", metavar="DUMP_B", help="folder of another")
    compare.add_argument("-o", "--output", default="compare.csv", help="table, `compare.csv`")
    compare.add_argument("--rtol", type=float, default=compare_dumps.RTOL, help="what diverges")
    launcher.add_options(commands.add_parser("run", help="run a script, with an emulated npu"))
    add_run_air_options(commands.add_parser("run-air", help="run a model file on arrays"))
    cache = commands.add_parser("cache", help="kernels that are kept on disk")
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    tune = commands.add_parser("tune", help="results of tuning: show files, or merge them")
    what = tune.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", action="store_true", help="what the files hold")
    what.add_argument("--merge", action="store_true", help="the best of all files, in one")
    tune.add_argument("files", nargs="+", metavar="FILE", help="results of tuning, or their folder")
    tune.add_argument("-o", "--output", default=NAME, help=f"the file to write, `{NAME}`")
    commands.add_parser("env", help="versions and hardware, for bug reports")
    options = parser.parse_args(arguments)
    if options.command == "run":
        return launcher.run(launcher.options_of(options))
    if options.command == "run-air":
        return run_air(options)
    if options.command == "env":
        print(launcher.environment())
        return 0
    if options.command == "cache":
        return _cache(options.action)
    if options.command == "tune":
        return _tune(options)
    if options.command == "trace":
        return _trace(Path(options.script), options.arguments, Path(options.output))
    if options.command == "check":
        return _check(options.file)
    if options.command == "verify":
        return _verify(options)
    if options.command == "report":
        return _report(options)
    if options.command == "compare":
        return _compare(options)
    return _ops(options.pattern, options.markdown)


def _trace(script: Path, arguments: list[str], folder: Path) -> int:
    """Run a program as Python would, with timelines on."""
    there = set(folder.glob("*.json"))
    kept = sys.argv, sys.path[0], os.environ.get("TORCHAIR_TIMELINE")
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    os.environ["TORCHAIR_TIMELINE"] = str(folder.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0], before = kept
        if before is None:
            del os.environ["TORCHAIR_TIMELINE"]
        else:
            os.environ["TORCHAIR_TIMELINE"] = before
    made = sorted(set(folder.glob("*.json")) - there)
    for file in made:
        print(file)
    return 0 if made else 1


def _verify(options: argparse.Namespace) -> int:
    """Run a program with a check around each graph that it compiles. Its own way to leave counts,
    unless something is wrong."""
    from torchair.runner import observed
    from torchair.verification.api import Asked, Verifier

    verifier = Verifier(Asked(Path(options.output), options.every_node))
    code: Any = 0
    try:
        with observed(verifier):
            code = launcher.run(launcher.RunOptions(options.script, options.arguments))
    except SystemExit as leaving:
        code = leaving.code
    finally:
        _print(verifier.report)
    if code:
        raise SystemExit(code)
    return 0 if verifier.report else 1


def _report(options: argparse.Namespace) -> int:
    """Run a program, and write the page even if it fails: what was compiled until then helps."""
    from torchair.reporting.recorder import Reporter
    from torchair.runner import observed

    reporter = Reporter(Path(options.output), Path(options.script).name)
    code: Any = 0
    try:
        with observed(reporter, changes=True):
            code = launcher.run(launcher.RunOptions(options.script, options.arguments))
    except SystemExit as leaving:
        code = leaving.code
    finally:
        print(reporter.write())
    if code:
        raise SystemExit(code)
    return 0


def _print(report: Any) -> None:
    """A table on a terminal, plain text elsewhere."""
    if not sys.stdout.isatty():
        print(report)
        return
    from rich.console import Console

    Console().print(report)


def _compare(options: argparse.Namespace) -> int:
    try:
        with Steps("torchair compare") as steps:
            found = compare_dumps.compare(
                Path(options.first), Path(options.second), options.rtol, steps.next
            )
    except (OSError, ValueError) as error:
        print(f"torchair compare: {error}", file=sys.stderr)
        return 2
    print(found)
    print(compare_dumps.write_csv(found, Path(options.output)))
    if not found.rows:
        print("torchair compare: no FX node is in both dumps", file=sys.stderr)
        return 2
    return 1 if found.diverging else 0


def _cache(action: Literal["show", "clear"]) -> int:
    kernels = store()
    entries = kernels.entries()
    size = sum(e.size for e in entries)
    if action == "clear":
        kernels.clear()
        print(f"{kernels.folder}: removed {len(entries)} kernels, {size:,} bytes")
        return 0
    print(f"folder   {kernels.folder}")
    print(f"kernels  {len(entries)}, {size:,} of at most {kernels.limit:,} bytes")
    if entries:
        last = datetime.fromtimestamp(entries[-1].used)
        print(f"used     {last:%Y-%m-%d %H:%M}, to the hour")
    return 0


def _tune(options: argparse.Namespace) -> int:
    files = [p / NAME if p.is_dir() else p for p in map(Path, options.files)]
    try:
        if options.merge:
            print(f"{options.output}: {merge(files, Path(options.output))} results")
            return 0
        _print_tuned([found for file in files for found in read(file)])
    except (OSError, DamagedFile) as error:
        print(f"torchair tune: {error}", file=sys.stderr)
        return 2
    return 0


def _print_tuned(rows: Sequence[Found]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "machine", "way", "us", "gain", title=f"{len(rows)} tuned kernels")
    for row in rows:
        gain = f"{row.usual / row.microseconds:.2f}x" if row.microseconds else "-"
        table.add_row(row.about, row.machine, row.way or "as ever", f"{row.microseconds:.1f}", gain)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _check(file: str) -> int:
    graph, state = read_graph(file, infer), GraphState()
    if graph.output is not None:
        mapping_assign_op_to_graph_output(graph, state)
    findings = check_graph(graph, state.assigned)
    for finding in findings:
        print(finding)
    if not findings:
        print("nothing found")
    return 1 if findings else 0


def _ops(pattern: str, markdown: bool) -> int:
    if markdown:
        print(operators_page())
        return 0
    rows = _rows(pattern)
    if not rows:
        space, name = _parts(pattern)
        print(_about(pattern, space, name))
        rows = _rows(name)  # what torch may make of it
        if not rows:
            return 1
        print("Converters with a name like it:")
    _print_table(rows)
    return 0


def _rows(pattern: str) -> list[tuple[str, str, str, str]]:
    """Rows of operators with a text in their name."""
    return [
        (x.target, " ".join(x.operators) or "(none)", " ".join(x.dtypes), f"{x.file}:{x.line}")
        for x in lines()
        if pattern.lower() in x.target.lower()
    ]


def _parts(pattern: str) -> tuple[str, str]:
    """Library and name of an operator, with or without its library and its overload."""
    words = pattern.removeprefix("torch.").removeprefix("ops.").split(".")
    spaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    return (words[0], words[1]) if words[0] in spaces and len(words) > 1 else ("aten", words[0])


def _about(pattern: str, space: str, name: str) -> str:
    """Why no converter has this in its name."""
    known = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    if f"{space}::{name}" not in known:
        near = did_you_mean(f"{space}.{name}", (n.replace("::", ".") for n in known))
        return f"torch has no operator {space}.{name}, as far as this process knows.{near}"
    packet = getattr(getattr(torch.ops, space), name)
    overloads = [getattr(packet, o) for o in packet.overloads() if "out" not in o]
    if all(o.has_kernel_for_dispatch_key(_COMPOSITE) for o in overloads):
        return f"{pattern} never reaches a graph: torch makes other operators of it while tracing."
    return f"{pattern} has no converter: it runs as the generic node, with torch's kernel."


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
