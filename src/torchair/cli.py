"""The command line. `torchair --help` lists the commands, and `_COMMANDS` is the list."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchair.codegen.kept import store
from torchair.codegen.numbers import Element
from torchair.codegen.tuned import NAME, DamagedFile, TunedWay, merge, read
from torchair.configs.compiler_config import OPTION_ALIASES, OPTIONS, CompilerConfig, public_path
from torchair.convert.registry import TableLine, lines
from torchair.deploy import commands as deployment
from torchair.deploy.load import add_run_air_options, run_air
from torchair.emulate import launcher
from torchair.engine.inspect.check import check_graph
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import mapping_assign_op_to_graph_output
from torchair.errors import did_you_mean
from torchair.npu_page import npu_page
from torchair.operators import Trait, infer, row_of
from torchair.operators.core import ANY, FLOATS, INTEGERS, NUMBERS
from torchair.process import Steps
from torchair.serde import read_graph
from torchair.tools import compare_dumps

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
HEAD = ("torch operator", "GE operators", "kernels", "native types", "checked types", "where")
OPTION_HEAD = ("path", "allowed", "default", "mode", "effect today")
_BESIDE = ("Cast", "Shape")  # change types and tell sizes on the way to what an operator computes
TYPES = {ANY: "all", NUMBERS: "numbers", INTEGERS: "integers", FLOATS: "floats"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `torchair` command."""
    parser = argparse.ArgumentParser(prog="torchair", description="graph mode for PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help))
    options = parser.parse_args(arguments)
    return _COMMANDS[options.command].run(options)


class Command(NamedTuple):
    """A command: what it does, in words and as a function, and the arguments it takes."""

    help: str
    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


# ---- running programs


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="timeline", help="folder, `timeline`")
    _add_program(parser)


def _trace(options: argparse.Namespace) -> int:
    """Run a program as Python would, with timelines on."""
    script, folder = Path(options.script), Path(options.output)
    there = set(folder.glob("*.json"))
    kept = sys.argv, sys.path[0], os.environ.get("TORCHAIR_TIMELINE")
    sys.argv, sys.path[0] = [str(script), *options.arguments], str(script.resolve().parent)
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


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="torchair_verify", help="folder for findings")
    parser.add_argument("--every-node", action="store_true", help="even where results are right")
    _add_program(parser)


def _verify(options: argparse.Namespace) -> int:
    """Run a program with a check around each graph that it compiles. Its own way to leave counts,
    unless something is wrong."""
    from torchair.runner import observed
    from torchair.verification.api import Verifier, VerifyOptions

    verifier = Verifier(VerifyOptions(Path(options.output), options.every_node))
    _run_observed(options, observed(verifier), lambda: _print(verifier.report))
    return 0 if verifier.report else 1


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="report.html", help="file, `report.html`")
    _add_program(parser)


def _report(options: argparse.Namespace) -> int:
    """Run a program, and write the page even if it fails: what was compiled until then helps."""
    from torchair.reporting.recorder import Reporter
    from torchair.runner import observed

    reporter = Reporter(Path(options.output), Path(options.script).name)
    _run_observed(options, observed(reporter, changes=True), lambda: print(reporter.write()))
    return 0


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


def _print(report: Any) -> None:
    """A table on a terminal, plain text elsewhere."""
    if not sys.stdout.isatty():
        print(report)
        return
    from rich.console import Console

    Console().print(report)


# ---- files


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="DUMP_A", help="folder of an eager npy or a GE dump")
    parser.add_argument("second", metavar="DUMP_B", help="folder of another")
    parser.add_argument("-o", "--output", default="compare.csv", help="table, `compare.csv`")
    parser.add_argument("--rtol", type=float, default=compare_dumps.RTOL, help="what diverges")


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
    print(found.write(Path(options.output)))
    if not found.rows:
        print("torchair compare: no FX node is in both dumps", file=sys.stderr)
        return 2
    return 1 if found.diverging else 0


def _cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show")


def _cache(options: argparse.Namespace) -> int:
    kernels = store()
    entries = kernels.entries()
    size = sum(e.size for e in entries)
    if options.action == "clear":
        kernels.clear()
        print(f"{kernels.folder}: removed {len(entries)} kernels, {size:,} bytes")
        return 0
    print(f"folder   {kernels.folder}")
    print(f"kernels  {len(entries)}, {size:,} of at most {kernels.limit:,} bytes")
    if entries:
        print(f"used     {datetime.fromtimestamp(entries[-1].used):%Y-%m-%d %H:%M}, to the hour")
    return 0


def _tune_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", action="store_true", help="what the files hold")
    what.add_argument("--merge", action="store_true", help="the best of all files, in one")
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, or their folder")
    parser.add_argument("-o", "--output", default=NAME, help=f"the file to write, `{NAME}`")


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


def _print_tuned(rows: Sequence[TunedWay]) -> None:
    cells = [
        (r.about, r.machine, r.way or "as ever", f"{r.microseconds:.1f}",
         f"{r.usual / r.microseconds:.2f}x" if r.microseconds else "-")
        for r in rows
    ]  # fmt: skip
    _print_table(f"{len(rows)} tuned kernels", ("kernel", "machine", "way", "us", "gain"), cells)


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a graph: .py, .txt or .air")


def _check(options: argparse.Namespace) -> int:
    graph, state = read_graph(options.file, infer), GraphState()
    if graph.output is not None:
        mapping_assign_op_to_graph_output(graph, state)
    findings = check_graph(graph, state.assigned)
    for finding in findings:
        print(finding)
    if not findings:
        print("nothing found")
    return 1 if findings else 0


# ---- tables of operators and of options


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="", help="only those with this in the name")
    parser.add_argument("--markdown", action="store_true", help="the page of docs/")


def _ops_options(parser: argparse.ArgumentParser) -> None:
    _table_options(parser)
    parser.add_argument("--npu", action="store_true", help="those of the `npu` library")


def _ops(options: argparse.Namespace) -> int:
    if options.markdown:
        print(npu_operators_page() if options.npu else operators_page())
        return 0
    if options.npu:
        options.pattern = f"npu.{options.pattern}"
    pattern = options.pattern
    rows = _rows(pattern)
    if not rows:
        space, name = _parts(pattern)
        print(_about(pattern, space, name))
        rows = _rows(name)  # what torch may make of it
        if not rows:
            return 1
        print("Converters with a name like it:")
    _print_table(f"{len(rows)} converters; any other operator: the generic torch node", HEAD, rows)
    return 0


def _rows(pattern: str) -> list[tuple[str, ...]]:
    found = [x for x in lines() if pattern.lower() in x.target.lower()]
    return [(x.target, *_cells(x), f"{x.file}:{x.line}") for x in found]


def _cells(x: TableLine) -> tuple[str, ...]:
    """What the tables say of an operator: what it becomes, how that runs, what was checked."""
    return " ".join(x.operators) or "-", *_kernels(x.operators), " ".join(x.dtypes)


def _kernels(operators: Sequence[str]) -> tuple[str, str]:
    """Whose kernels GE operators have, and the types that all native ones take, by their rows."""
    known = [row for row in map(row_of, operators) if row is not None]
    rows = [row for row in known if not row.has(Trait.CONSTANT | Trait.VIEW)]
    rows = [row for row in rows if row.type not in _BESIDE] or rows
    native = [row for row in rows if row.is_native]
    types = ANY.intersection(*(row.types for row in native)) if native else frozenset[Element]()
    said = TYPES.get(types, " ".join(sorted(types)))
    by_torch = [row.type for row in rows if not row.is_native]
    if native and by_torch:
        return f"native, torch: {' '.join(by_torch)}", said
    return ("native" if native else "torch" if by_torch else "view" if known else "-"), said


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


def _print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _options(options: argparse.Namespace) -> int:
    if options.markdown:
        print(options_page())
        return 0
    rows = [row for row in _option_rows() if options.pattern.lower() in row[0].lower()]
    _print_table(f"{len(rows)} options", OPTION_HEAD, rows)
    return 0 if rows else 1


def _option_rows() -> list[tuple[str, str, str, str, str]]:
    """Path, legal values, default, modes and effect of every option."""
    return [
        (public_path(path), option.accepts, repr(option.default), option.about.where,
         option.about.effect)
        for path, option in OPTIONS.items()
    ]  # fmt: skip


def npu_operators_page() -> str:
    """The text of docs/npu_operators.md."""
    return npu_page(_kernels)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


_ABOUT_OPTIONS = """\
# Options

Made by `torchair options --markdown` from the declarations in `configs/`; a test keeps it current.
`torchair options NAME` shows those with a text in their name.

"GE" is the mode `max-autotune`; "capture" stands for `reduce-overhead` and `npugraph_ex`. Booleans
may be given as `True`/`False` or `1`/`0`; reading an option gives an object whose `.value` is text
(`"1"`, `"0"`, `"64"`) or None.

No option is silent: one that does nothing, on this device or in the mode of the configuration, says
so in a warning of the backend when it is not at its default.

## The tree
"""
_ABOUT_FLAT = """
## The `options` names

They are applied by `apply_options(config, options)`, and readable and writable on
`config.npugraphex_config`. An inverted name holds the opposite of the option behind it. The backend
"npugraph_ex" takes these and five more, see [npugraph_ex.md](npugraph_ex.md).
"""


def options_page() -> str:
    """The text of docs/options.md."""
    tree = [(f"`{p}`", legal, f"`{d}`", where, what) for p, legal, d, where, what in _option_rows()]
    values = CompilerConfig().npugraphex_config.as_dict()
    flat = [
        (f"`{name}`", f"`{a.path}`", f"`{values[name]!r}`", "inverted" if a.inverted else "-")
        for name, a in OPTION_ALIASES.items()
    ]
    parts = [_ABOUT_OPTIONS, *_markdown(OPTION_HEAD, tree), _ABOUT_FLAT]
    return "\n".join([*parts, *_markdown(("name", "path", "default", "transform"), flat)])


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
        "*Kernels* are those of the GE operators' rows: *native* code is generated for a CPU and a",
        "GPU where the operands are of the *native types* (*all*: bool, integers of up to 64 bits,",
        "floats); torch's kernels compute the others. A *view* computes nothing.",
        "",
        f"{len(table)} torch operators have a converter.",
    ]
    for family in sorted({x.family for x in table}):
        text += ["", f"## {family}", "", f"| {' | '.join(HEAD[:-1])} |", "|---" * 5 + "|"]
        text += [f"| `{x.target}` | {' | '.join(_cells(x))} |" for x in table if x.family == family]
    return "\n".join(text)


def _env(_options: argparse.Namespace) -> int:
    print(launcher.environment())
    return 0


_COMMANDS = {
    "ops": Command("which torch operators become which GE operators", _ops, _ops_options),
    "options": Command("the options of CompilerConfig", _options, _table_options),
    "trace": Command("run a program, write timelines of its graphs", _trace, _trace_options),
    "check": Command("races and deadlocks of streams in a graph file", _check, _check_options),
    "verify": Command("run a program, compare its graphs with eager", _verify, _verify_options),
    "report": Command("run a program, write a page about its graphs", _report, _report_options),
    "compare": Command("two data dumps, matched by FX names", _compare, _compare_options),
    "run": Command("run a script, with an emulated npu", launcher.run, launcher.add_options),
    "run-air": Command("run a model file on arrays", run_air, add_run_air_options),
    "export": Command(
        "write a program of torch.export as a model file",
        deployment.export, deployment.add_export_options,
    ),
    "package": Command(
        "write a model with machine code for many processors",
        deployment.make_package, deployment.add_package_options,
    ),
    "cache": Command("kernels that are kept on disk", _cache, _cache_options),
    "tune": Command("results of tuning: show files, or merge them", _tune, _tune_options),
    "env": Command("versions and hardware, for bug reports", _env),
}
