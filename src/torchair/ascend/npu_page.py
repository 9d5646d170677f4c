"""The page about operators of the `npu` library: what is wanted, written and shown to be right.

Names that the original converts are in `ascend/ops/wanted.txt`, those that tests compare with a
reference in `ascend/ops/proven.txt`, and what operators do not support in `ascend/ops/limits.txt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module, resources

from torchair.ascend import ops as npu
from torchair.ascend.ops import FAMILIES, NpuOperator
from torchair.convert.table import TableLine, lines

HEAD = ("operator", "GE operators", "kernels", "gradient", "checked", "not supported")
_HEADING = """\
# Operators of the `npu` library

Made by `torchair ops --npu --markdown`; a test keeps it current. [npu_library.md](npu_library.md)
says how to use them, what their arguments mean here, and how one is added.

*GE operators* are those of the converter; without one the generic node calls the kernel. *Kernels*
are the kernels of these GE operators on a CPU: *native* code is generated where operands allow it.
*Checked* operators are compared with a reference in float64 by the tests. Names with `(a!)` update
arguments in place.
"""


def data_lines(name: str) -> dict[str, str]:
    """Lines of a data file of `ascend/ops`: a name, and what is behind the tab."""
    text = resources.files(npu.__name__).joinpath(name).read_text("utf-8")
    rows = (line.partition("\t") for line in text.splitlines() if not line.startswith("#"))
    return {name: rest for name, _, rest in rows if name}


def npu_page(kernels: Callable[[Sequence[str]], tuple[str, str]]) -> str:
    """The text of docs/npu_operators.md; `kernels` tells whose kernels GE operators have."""
    table = {x.target: x for x in lines()}
    text = [_HEADING, *_counts(), ""]
    for family in FAMILIES:
        module = import_module(f"{npu.__name__}.{family}")
        title = (module.__doc__ or family).partition("\n\n")[0].replace("\n", " ").rstrip(".")
        text += [f"## {family}", "", f"{title}.", ""]
        text += _markdown(HEAD, (_cells(name, table, kernels) for name in _names(module.OPERATORS)))
        text.append("")
    return "\n".join([*text, *_missing()])


def _names(operators: Iterable[NpuOperator]) -> list[str]:
    """Operators by name, overloads and forms for captured graphs once."""
    return list(dict.fromkeys(o.base for o in operators))


@cache
def _written() -> dict[str, NpuOperator]:
    found: dict[str, NpuOperator] = {}
    for operator in npu.operators():
        found.setdefault(operator.base, operator)
    return found


def _cells(
    name: str, table: dict[str, TableLine], kernels: Callable[[Sequence[str]], tuple[str, str]]
) -> tuple[str, ...]:
    operator = _written()[name]
    line = table.get(operator.target)
    types = () if line is None else line.operators
    return (
        f"`{name}`" + (" `(a!)`" if "!)" in operator.schema else ""),
        " ".join(types) or "-",
        kernels(types)[0] if types else "generic node",
        "yes" if operator.gradient is not None else "-",
        "yes" if name in data_lines("proven.txt") else "-",
        data_lines("limits.txt").get(name, ""),
    )


def _counts() -> list[str]:
    wanted, written, right = (set(names) for names in _sets())
    rows = [
        ("names that the original converts", wanted, wanted & written, wanted & right),
        ("other names of torch_npu", written - wanted, written - wanted, right - wanted),
    ]
    counts = ((what, *(str(len(names)) for names in sets)) for what, *sets in rows)
    return _markdown(("", "wanted", "written", "right"), counts)


def _sets() -> tuple[Iterable[str], Iterable[str], Iterable[str]]:
    return data_lines("wanted.txt"), _written(), data_lines("proven.txt")


def _missing() -> list[str]:
    rows = [(f"`{n}`", why) for n, why in data_lines("wanted.txt").items() if n not in _written()]
    if not rows:
        return []
    return ["## Not written", "", *_markdown(("operator", "why"), rows), ""]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]
