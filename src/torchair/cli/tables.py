"""Tables: of operators, of options, of what this machine has; the pages of docs/ made from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from torchair.ascend.emulate import launcher
from torchair.ascend.npu_page import npu_page
from torchair.cli.show import print_table
from torchair.codegen.sizes import Element
from torchair.configs.compiler_config import OPTION_ALIASES, OPTIONS, CompilerConfig, public_path
from torchair.convert.table import TableLine, lines
from torchair.engine.optimize.rules import DECOMPOSED, use_extensions
from torchair.errors import did_you_mean
from torchair.operators import Trait, row_of
from torchair.operators.core import ANY, FLOATS, INTEGERS, NUMBERS
from torchair.torch_private.dispatch import DispatchKey, all_operator_names
from torchair.torch_private.table import report

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
HEAD = ("torch operator", "GE operators", "kernels", "native types", "checked types", "where")
OPTION_HEAD = ("path", "allowed", "default", "mode", "effect today")
_BESIDE = ("Cast", "Shape")  # change types and tell sizes on the way to what an operator computes
TYPES = {ANY: "all", NUMBERS: "numbers", INTEGERS: "integers", FLOATS: "floats"}


def ops(options: argparse.Namespace) -> int:
    """`torchair ops`."""
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
    print_table(f"{len(rows)} converters; any other operator: the generic torch node", HEAD, rows)
    return 0


def _rows(pattern: str) -> list[tuple[str, ...]]:
    found = [x for x in lines() if pattern.lower() in x.target.lower()]
    return [(x.target, *_cells(x), f"{x.file}:{x.line}") for x in found]


def _cells(x: TableLine) -> tuple[str, ...]:
    """What the tables say of an operator: what it becomes, how that runs, what was checked."""
    return " ".join(x.operators) or "-", *_kernels(x.operators), " ".join(x.dtypes)


def _kernels(operators: Sequence[str]) -> tuple[str, str]:
    """Whose kernels GE operators have, and the types that all native ones take, by their rows.
    What a rule takes apart becomes operators with native ones."""
    known = [row for row in map(row_of, operators) if row is not None]
    rows = [row for row in known if not row.has(Trait.CONSTANT | Trait.VIEW)]
    rows = [row for row in rows if row.type not in _BESIDE] or rows
    native = [row for row in rows if row.is_native]
    types = ANY.intersection(*(row.types for row in native)) if native else frozenset[Element]()
    said = TYPES.get(types, " ".join(sorted(types)))
    others = [row.type for row in rows if not row.is_native]
    use_extensions()
    by_torch = [name for name in others if name not in DECOMPOSED]
    some = bool(native) or len(by_torch) < len(others)
    if some and by_torch:
        return f"native, torch: {' '.join(by_torch)}", said
    if some:
        return "native", said
    if by_torch:
        return "torch", said
    return ("view" if known else "-"), said


def _parts(pattern: str) -> tuple[str, str]:
    """Library and name of an operator, with or without its library and its overload."""
    words = pattern.removeprefix("torch.").removeprefix("ops.").split(".")
    spaces = {name.partition("::")[0] for name in all_operator_names()}
    return (words[0], words[1]) if words[0] in spaces and len(words) > 1 else ("aten", words[0])


def _about(pattern: str, space: str, name: str) -> str:
    """Why no converter has this in its name."""
    known = {n.partition(".")[0] for n in all_operator_names()}
    if f"{space}::{name}" not in known:
        near = did_you_mean(f"{space}.{name}", (n.replace("::", ".") for n in known))
        return f"torch has no operator {space}.{name}, as far as this process knows.{near}"
    packet = getattr(getattr(torch.ops, space), name)
    overloads = [getattr(packet, o) for o in packet.overloads() if "out" not in o]
    if all(o.has_kernel_for_dispatch_key(_COMPOSITE) for o in overloads):
        return f"{pattern} never reaches a graph: torch makes other operators of it while tracing."
    return f"{pattern} has no converter: it runs as the generic node, with torch's kernel."


def options(given: argparse.Namespace) -> int:
    """`torchair options`."""
    if given.markdown:
        print(options_page())
        return 0
    rows = [row for row in _option_rows() if given.pattern.lower() in row[0].lower()]
    print_table(f"{len(rows)} options", OPTION_HEAD, rows)
    return 0 if rows else 1


def _option_rows() -> list[tuple[str, str, str, str, str]]:
    """Path, legal values, default, modes and effect of every option."""
    return [
        (
            public_path(path),
            option.accepts,
            repr(option.default),
            option.about.where,
            option.about.effect,
        )
        for path, option in OPTIONS.items()
    ]


def npu_operators_page() -> str:
    """The text of docs/npu_operators.md."""
    return npu_page(_kernels)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]


_ABOUT_OPTIONS = """\
# Options

Made by `torchair options --markdown` from the declarations in `configs/`; a test keeps it current.
`torchair options NAME` shows those with a text in their name.

"GE" is the mode `max-autotune`; "capture" stands for `reduce-overhead` and `npugraph_ex`. Booleans
may be given as `True`/`False` or `1`/`0`; reading an option gives an object whose `.value` is text
(`"1"`, `"0"`, `"64"`) or None.

Options without effect raise a warning of the backend when they are not at their default; so do
options that the device or the configured mode ignores.

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


def env(_options: argparse.Namespace) -> int:
    """`torchair env`."""
    print(launcher.environment())
    print(report())
    return 0
