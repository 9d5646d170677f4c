"""A real card's results judged here: a GE graph runs node by node, each node over the inputs that
the card had, and its results are compared with what the card dumped.

So a node that is named makes the error itself. Imports neither FX forms nor capture.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from torchair.errors import CommandError
from torchair.ge.dtypes import FLOAT_TYPES, ge_to_torch
from torchair.ge.graph import NO_WORK, Graph, Node, Value, topological
from torchair.operators import Trait, row_of
from torchair.operators.reference import run_node
from torchair.serde import cann_dump
from torchair.serde.cann_dump import OperatorDump
from torchair.store import atomic_write, csv_bytes
from torchair.verification.judge import Difference, difference, no_number, widened

_NOT_REPEATED = Trait.RANDOM | Trait.DRAWS | Trait.COMMUNICATION
_UPDATES = Trait.SIDE_EFFECT | Trait.WRITES_FIRST


class Skipped(enum.Enum):
    """Why a node is not judged."""

    NO_DUMP = "without a dump"
    NO_INPUTS = "without all inputs"
    UNREAD = "in a type or format that is not read"
    NOT_REPEATED = "random or of several cards"
    NOT_HERE = "not computed here"


@dataclass(frozen=True)
class Verdict:
    """One result of a node on the card: right, or why not."""

    node: Node
    index: int
    got: Tensor
    wrong: Difference | None

    def __str__(self) -> str:
        where = self.node.name + (f":{self.index}" if self.index else "")
        kind = f"{str(self.got.dtype).removeprefix('torch.')}{list(self.got.shape)}"
        return f"{where} ({self.node.type}, {kind}): {self.wrong or 'right'}"

    def cells(self) -> tuple[Any, ...]:
        """Cells of the table, in the order of its columns."""
        dtype, wrong = str(self.got.dtype).removeprefix("torch."), self.wrong
        numbers = ("", "") if wrong is None else (f"{wrong.error:.6g}", f"{wrong.allowed:.6g}")
        shown = (self.node.name, self.node.type, self.index, dtype, list(self.got.shape))
        return (*shown, wrong is not None, *numbers, "" if wrong is None else wrong.what)


_COLUMNS = (
    "folder",
    "node",
    "type",
    "index",
    "dtype",
    "shape",
    "wrong",
    "error",
    "allowed",
    "note",
)


@dataclass
class CardReport:
    """What is known of one run of a graph on a card, in the order of the graph."""

    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: dict[Node, tuple[Skipped, str]] = field(default_factory=dict)
    not_in_graph: list[str] = field(default_factory=list)  # files of other nodes

    @property
    def wrong(self) -> list[Verdict]:
        """Results that rounding does not explain, the first one on top."""
        return [v for v in self.verdicts if v.wrong is not None]

    def __str__(self) -> str:
        judged = len({v.node for v in self.verdicts})
        bad = len({v.node for v in self.wrong})
        lines = [f"{self.folder}: {judged} nodes judged in float64, {bad} wrong"]
        counts = Counter(reason for reason, _ in self.skipped.values())
        lines += [
            f"skipped, {reason.value}: {counts[reason]}" for reason in Skipped if counts[reason]
        ]
        if self.not_in_graph:
            lines.append(f"dumped, not in the graph: {len(self.not_in_graph)}")
        if self.wrong:
            lines += [
                f"first wrong node: {self.wrong[0]}",
                *(f"! {v}" for v in self.wrong[1:_SHOWN]),
            ]
        return "\n".join(lines)


_SHOWN = 20  # wrong results that are printed


def write_table(reports: Sequence[CardReport], path: Path) -> Path:
    """All verdicts as a CSV file."""
    rows = [(r.folder, *v.cells()) for r in reports for v in r.verdicts]
    return atomic_write(path, csv_bytes([_COLUMNS, *rows]))


def judge_dump(
    graph: Graph, folder: Path, rtol: float = 0.0, each: Callable[[str], None] = lambda name: None
) -> list[CardReport]:
    """Judge all runs of a graph in a folder; one folder of files is one run. A result may also be
    off by `rtol` of its largest element. `each` is told of every node."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder with a data dump")
    runs: dict[Path, list[tuple[Path, str]]] = {}
    for path, name in cann_dump.files_in(folder):
        runs.setdefault(path.parent, []).append((path, name))
    found = [_Run(graph, place, files) for place, files in runs.items()]
    known = [run for run in found if run.seen or run.inputs]
    if not known:
        raise CommandError(
            f"{folder} has no dump of a node of the graph {graph.name!r}",
            hint="files are named <type>.<node>.<task>.<stream>.<time>, as CANN writes them",
        )
    return [run.judged(rtol, each) for run in known]


class _Run:
    """The files of one run, by nodes and values of the graph."""

    def __init__(self, graph: Graph, folder: Path, files: Sequence[tuple[Path, str]]) -> None:
        self._nodes = [n for n in topological(graph.nodes, graph.name) if n.type != "NetOutput"]
        self._by_name = {cann_dump.file_part(n.name): n for n in self._nodes}
        self._by_name |= {n.name: n for n in self._nodes}
        self.report = CardReport(folder)
        self.inputs: dict[Node, dict[Value, Tensor]] = {}
        self.seen: dict[Value, Tensor] = {}  # results, by the dump of their own node
        self._unread: dict[Node, str] = {}
        dumps = [(cann_dump.read(path), path, name) for path, name in files]
        for dump, path, name in sorted(dumps, key=lambda found: found[0].time):
            self._take(dump, path, self._by_name.get(dump.name or name, self._by_name.get(name)))
        self._passed = {v: t for given in self.inputs.values() for v, t in given.items()}

    def _take(self, dump: OperatorDump, path: Path, node: Node | None) -> None:
        known = node is not None
        if node is not None:
            self._take_inputs(node, dump)
        for index, one in enumerate(dump.outputs):
            maker, number = node, index
            if node is None and one.origin is not None:  # the card has fused the node
                maker, number = self._by_name.get(one.origin[0]), one.origin[1]
            if maker is None or number >= len(maker.outputs):
                continue
            known = True
            if one.tensor is None:
                self._unread[maker] = one.unread
            else:
                self.seen[maker.outputs[number]] = one.tensor
        if not known:
            self.report.not_in_graph.append(path.name)

    def _take_inputs(self, node: Node, dump: OperatorDump) -> None:
        """Inputs that are as many as the node reads, or as it has ports; others are not matched."""
        slots: list[Value | None] = [value for _, value in node.named_slots()]
        if len(dump.inputs) == len(node.values()):
            slots = list(node.values())
        if len(dump.inputs) != len(slots):
            return
        given = self.inputs.setdefault(node, {})
        for value, one in zip(slots, dump.inputs, strict=True):
            if value is not None and one.tensor is not None:
                given.setdefault(value, one.tensor)

    def judged(self, rtol: float, each: Callable[[str], None]) -> CardReport:
        """Run the graph, and compare what the card has made."""
        own: dict[Value, Tensor] = {}
        wide: dict[Value, Tensor] = {}
        for node in self._nodes:
            each(node.name)
            mine, truths = self._computed(node, own, wide)
            judged = False
            for i, value in enumerate(node.outputs):
                card = self.seen.get(value)
                if card is None and (passed := self._passed.get(value)) is not None:
                    card = passed if passed.dtype == ge_to_torch(value.dtype) else None
                if card is not None and mine:
                    wrong = _compared(card, mine[i], truths[i], rtol)
                    if node.type not in NO_WORK:
                        self.report.verdicts.append(Verdict(node, i, card, wrong))
                        judged = True
                if card is not None or mine:
                    own[value] = card if card is not None else mine[i]
                    wide[value] = truths[i] if card is None else widened(card)
            if not judged and node.type not in NO_WORK:
                self._skip(node, bool(mine))
        return self.report

    def _skip(self, node: Node, computed: bool) -> None:
        if node in self._unread:
            self.report.skipped[node] = (Skipped.UNREAD, self._unread[node])
        elif computed or not any(v in self.seen for v in node.outputs):
            self.report.skipped.setdefault(node, (Skipped.NO_DUMP, ""))

    def _computed(
        self, node: Node, own: Mapping[Value, Tensor], wide: Mapping[Value, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Results of a node in its own types and in float64; none, with the reason noted, where it
        cannot be computed here."""
        if node.type in NO_WORK and node.type != "Const":
            return [], []
        card = self.inputs.get(node, {})
        mine = {v: card.get(v, own.get(v)) for v in node.values()}
        if any(t is None for t in mine.values()):
            self.report.skipped[node] = (Skipped.NO_INPUTS, "")
            return [], []
        row = row_of(node.type)
        if row is not None and row.has(_NOT_REPEATED):
            self.report.skipped[node] = (Skipped.NOT_REPEATED, "")
            return [], []
        truths = {v: widened(card[v]) if v in card else wide[v] for v in mine}
        copied = row is not None and row.has(_UPDATES)
        try:
            made = run_node(node, {v: _typed(t, v, copied) for v, t in mine.items()})
        except Exception as error:  # whatever kernels say of inputs that a file gave
            self.report.skipped[node] = (Skipped.NOT_HERE, str(error).partition("\n")[0])
            return [], []
        try:
            exact = run_node(node, {v: t.clone() if copied else t for v, t in truths.items()})
        except (RuntimeError, TypeError, ValueError):  # an operator of one type only
            exact = made
        return made, exact


def _typed(tensor: Any, value: Value, copied: bool) -> Tensor:
    """A tensor in the type that the graph has, where the card has another floating one."""
    floating = tensor.dtype.is_floating_point and value.dtype in FLOAT_TYPES
    made: Tensor = tensor.to(ge_to_torch(value.dtype)) if floating else tensor
    return made.clone() if copied else made


def _compared(card: Tensor, mine: Tensor, truth: Tensor, rtol: float) -> Difference | None:
    """What is wrong with a result. It is judged by the rounding of the type that the card has."""
    if not isinstance(mine, Tensor):
        return None
    if card.shape != mine.shape and card.numel() == mine.numel() == 1:
        card = card.reshape(mine.shape)  # a card knows no tensors without dims
    if card.dtype.is_floating_point and mine.dtype.is_floating_point:
        mine = mine.to(card.dtype)
    if card.shape != mine.shape:
        return no_number(f"dims {list(card.shape)} instead of {list(mine.shape)}")
    wrong = difference(card, mine, truth)
    if wrong is not None and not wrong.what and wrong.error <= rtol * wrong.scale:
        return None
    return wrong
