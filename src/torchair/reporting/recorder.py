"""Looks on while graphs are compiled, and writes what is known of them into one page."""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchair.codegen.target import KernelOrder
from torchair.concrete.acl import own_arguments
from torchair.configs.compiler_config import Settings
from torchair.devices.base import GraphCall
from torchair.engine.inspect.timeline import Slice, recorder, row_name
from torchair.engine.plan.records import Plan, Step, flat_slots
from torchair.explanation.api import engine_call
from torchair.explanation.units import LOADED, MachineRates, UnitRow, rates, unit_rows
from torchair.fallbacks import Fallback, note
from torchair.fx.source import last_frame, model_name, module_path
from torchair.ge.graph import Node, topological
from torchair.ge.rewrite import line_of
from torchair.locks import Lock
from torchair.process import LoadMeter
from torchair.runner import Compilation, GmRunner
from torchair.store import atomic_write
from torchair.trace import Change
from torchair.verification.forms import Randomness

# ---- what the page shows of one graph, as plain data ----


@dataclass
class SeenGraph:
    """One graph with what a call of it showed."""

    name: str
    compilation: Compilation
    mode: str
    note: str  # why there is no more
    call: GraphCall | None = None
    plan: Plan | None = None
    slices: list[Slice] = field(default_factory=list)
    units: list[UnitRow] = field(default_factory=list)
    rates: MachineRates | None = None  # what the machine can do
    others: float = 0.0  # cores that other processes kept busy while steps were timed

    def look(self, call: GraphCall, args: Sequence[Any]) -> None:
        """Run the graph once more, on its lanes, and time each step."""
        inputs = call.collect(args)
        call.compile(inputs)
        with LoadMeter() as meter:
            call.session.run_watched(inputs, lambda plan: recorder(self, plan), on_lanes=True)
            assert self.plan is not None
            self.units = unit_rows(call, args, self.plan.device)
        self.others = round(meter.others, 2)
        self.rates = rates(self.plan.device, self.units)
        for u in self.units:  # where others were busy with the machine when it was measured
            if u.seconds:
                self.rates = self.rates.with_seen(u.moved, u.operations, u.seconds)
        self.call = call

    def add(self, plan: Plan, slices: Sequence[Slice]) -> None:
        """Take the times of the call."""
        self.plan, self.slices = plan, list(slices)

    @property
    def changes(self) -> list[Change]:
        """What all passes changed, in order."""
        session = [] if self.call is None else self.call.session.trace.changes or []
        return [*(self.compilation.runner.trace.changes or []), *session]


def graph_data(seen: SeenGraph) -> dict[str, Any]:
    """All of one graph."""
    nodes = list(seen.compilation.gm.graph.nodes)
    sources = Sources(nodes)
    made: dict[str, Any] = {
        "name": seen.name,
        "model": model_name(nodes),
        "phase": seen.compilation.phase,
        "mode": seen.mode,
        "note": seen.note,
        "source": sources.rows,
        "fx": [[_fx_line(n), sources.row_of(n)] for n in nodes],
        "arguments": {"fx": [k for k, n in enumerate(nodes) if n.op == "placeholder"], "ge": []},
        "ge": [],
        "steps": [],
        "kernels": [],
        "memory": None,
        "timeline": None,
        "passes": [_pass_row(c) for c in seen.changes],
    }
    if seen.call is not None and seen.plan is not None:
        links = _Links(nodes, seen)
        kernels, kernel_of = kernel_rows(seen.plan)
        made |= {
            "fx": [[*row, links.ge_of(n)] for row, n in zip(made["fx"], nodes, strict=True)],
            "ge": [[line_of(n), links.fx_of(n), n.type] for n in links.graph],
            "steps": links.steps(kernel_of),
            "kernels": kernels,
            "memory": memory_picture(seen.plan),
            "timeline": timeline_picture(seen.plan, seen.slices),
            "rates": None if seen.rates is None else asdict(seen.rates),
            "others": seen.others if seen.others > LOADED else 0,
            "device": seen.plan.device,
        }
        made["arguments"]["ge"] = [k for k, n in enumerate(links.graph) if n.type == "Data"]
    return made


class _Links:
    """How FX nodes, GE nodes and steps belong together, by number."""

    def __init__(self, nodes: Sequence[fx.Node], seen: SeenGraph) -> None:
        assert seen.call is not None and seen.plan is not None
        call = seen.call
        self.graph = topological(call.graph.nodes)
        self._plan, self._nodes = seen.plan, nodes
        self._units = {u.step: u for u in seen.units}
        self._fx = {n.name: k for k, n in enumerate(nodes)}
        self._ge = {n: k for k, n in enumerate(self.graph)}
        arguments = [k for k, n in enumerate(nodes) if n.op == "placeholder"]
        self._argument = {
            data: [arguments[a] for a in source.args if a < len(arguments)]
            for data, source in zip(call.graph.data, call.state.inputs, strict=True)
        }
        self._of_fx = self._all_of_fx()

    def fx_of(self, node: Node) -> list[int]:
        """The FX nodes that a GE node came from."""
        if node in self._argument:
            return self._argument[node]
        found = self._fx.get(node.origin.fx_name) if node.origin is not None else None
        return [] if found is None else [found]

    def ge_of(self, node: fx.Node) -> list[int]:
        """The GE nodes of an FX node; of one that was merged into a later one, those of that."""
        return self._of_fx[self._fx[node.name]]

    def _all_of_fx(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._nodes]
        for k, node in enumerate(self.graph):
            for f in self.fx_of(node):
                found[f].append(k)
        for f in reversed(range(len(self._nodes))):
            users = (found[self._fx[u.name]] for u in self._nodes[f].users)
            found[f] = found[f] or next((u for u in users if u), [])
        return found

    def steps(self, kernel_of: dict[int, int]) -> list[dict[str, Any]]:
        """All that runs, in order. `reads` are steps whose results are read, as far as memory
        tells nothing else: through views and what is no step of its own."""
        owner = self._owners()
        reach: dict[Node, frozenset[int]] = {}
        reads: list[set[int]] = [set() for _ in self._plan.steps]
        for node in self.graph:
            sources = frozenset().union(*(reach[v.node] for v in node.values() if v.node in reach))
            own = owner.get(node)
            if own is not None:
                reads[own] |= sources - {own}
            reach[node] = sources if own is None else frozenset([own])
        return [
            self._step_row(k, step, sorted(reads[k]), kernel_of.get(k, -1))
            for k, step in enumerate(self._plan.steps)
        ]

    def _owners(self) -> dict[Node, int]:
        """The step that computes a node, if one does."""
        found: dict[Node, int] = {}
        for k, step in enumerate(self._plan.steps):
            if step.kind != "copy":
                found |= {n: k for n in step.also or [step.node]}
        return found

    def _step_row(self, k: int, step: Step, reads: list[int], kernel: int) -> dict[str, Any]:
        nodes = step.also or [step.node]
        name = row_name(step).removeprefix("torchair::")
        row = {
            "name": name if step.kind != "copy" else f"copy for {name}",
            "kind": "torch" if step.kind in ("out", "call", "late") else step.kind,
            "ge": sorted(self._ge[n] for n in nodes if n in self._ge),
            "reads": reads,
            "module": self._module(nodes),
            "kernel": kernel,
        }
        unit = self._units.get(k)
        if unit is not None:
            row |= {
                "why": unit.why,
                "us": round(unit.seconds * 1e6, 3),
                "bytes": unit.moved,
                "operations": unit.operations,
            }
        return row

    def _module(self, nodes: Sequence[Node]) -> str:
        """Where in the model most of these nodes are."""
        paths = [module_path(self._nodes[f]) for n in nodes for f in self.fx_of(n)]
        return max(paths, key=paths.count) if paths else ""


def _fx_line(node: fx.Node) -> str:
    """`name: float32[2, 3] = aten.add.Tensor(a, b)`."""
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, Tensor):
        dims = ", ".join(map(str, value.shape))
        kind = f": {str(value.dtype).removeprefix('torch.')}[{dims}]"
    if node.op == "placeholder":
        return f"{node.name}{kind}  argument"
    given = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    if node.op == "output":
        return f"return {', '.join(given)}"
    target = node._pretty_print_target(node.target).removeprefix("torch.ops.")
    return f"{node.name}{kind} = {target}({', '.join(given)})"


def _pass_row(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "name": change.name,
        "about": change.about,
        "seconds": change.seconds,
        "before": change.nodes_before,
        "after": change.nodes_after,
        "lines": change.lines,
    }


_LONGEST = 120_000  # characters of one text of a kernel


def memory_picture(plan: Plan) -> dict[str, Any]:
    """Boxes `[name, steps that write it, first, last, offset, bytes]` of the arena, one for each
    buffer, and what else has memory."""
    buffers: dict[int, list[Any]] = {}
    for k, step in enumerate(plan.steps):
        named = dict(zip(step.outs, step.made, strict=False))
        for slot in [*flat_slots(step.args), *step.outs]:
            allocation = plan.place(slot)[0]
            if allocation.offset < 0:
                continue
            box = buffers.setdefault(
                allocation.buffer, [[], [], k, k, allocation.offset, allocation.bytes]
            )
            box[3] = k
            if slot in step.outs:
                box[0] += [named[slot].node.name] if slot in named else []
                box[1].append(k)
    boxes = [[", ".join(names[:4]) or "copy", *rest] for names, *rest in buffers.values()]
    others: Counter[str] = Counter()
    for allocation in plan.allocations:
        if allocation.offset < 0:
            others[allocation.kind] += allocation.size
    return {
        "size": plan.arena_size,
        "floor": plan.arena_floor,
        "steps": len(plan.steps),
        "boxes": boxes,
        "others": dict(others),
    }


def timeline_picture(plan: Plan, slices: Sequence[Slice]) -> dict[str, Any]:
    """Slices `[lane, step, begin, end]` in microseconds since the first, and the events between
    lanes."""
    lanes = plan.schedule.lanes if plan.schedule is not None else [""]
    begin = min((t0 for _, _, t0, _ in slices), default=0.0)
    return {
        "lanes": [lane or "default stream" for lane in lanes],
        "slices": [
            [lanes.index(lane), k, round(t0 - begin, 3), round(t1 - begin, 3)]
            for lane, k, t0, t1 in slices
        ],
        "events": plan.schedule.events if plan.schedule is not None else [],
    }


def kernel_rows(plan: Plan) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Kernels, each once, with what was asked for and the text that was generated; and the kernel
    of each native step."""
    rows: list[dict[str, Any]] = []
    number: dict[str, int] = {}
    kernel_of: dict[int, int] = {}
    for k, step in enumerate(plan.steps):
        if step.native is None:
            continue
        kernel = step.native.kernel
        if kernel.entry not in number:
            number[kernel.entry] = len(rows)
            order = step.native.order
            texts = {"nest": str(order.request), "text": kernel.text, "machine": _code(order)}
            rows.append({"name": kernel.entry, **{k: cut(text) for k, text in texts.items()}})
        kernel_of[k] = number[kernel.entry]
    return rows, kernel_of


def _code(order: KernelOrder) -> str:
    try:
        return order.machine_text()
    except RuntimeError as e:  # LLVM's
        return f"no machine code: {e}"


def cut(text: str) -> str:
    """A text that a page can hold."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}\n… and {len(text) - _LONGEST:,} characters more"


_PLACE = re.compile(r'"([^"]+)", line (\d+)')
_AROUND = 3  # lines shown before and after one that is needed
_STEP = 4  # columns that the body of a function is indented by
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_NOT_THE_MODEL = tuple(f'"{folder}{os.sep}' for folder in _LIBRARIES)

SourceLine = tuple[str, int]


class Sources:
    """Rows of text: `[file]`, or `[number, text]`; between lines that are not neighbours `[]`.
    Lines that follow each other are moved to the left: a function begins there, not its class."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._place = {n: place_of(n) for n in nodes}
        used: dict[str, set[int]] = {}
        for place in self._place.values():
            if place is not None:
                used.setdefault(place[0], set()).add(place[1])
        self.rows: list[list[str | int]] = []
        self._row: dict[SourceLine, int] = {}
        for file, numbers in used.items():
            self._add(file, numbers)

    def _add(self, file: str, numbers: set[int]) -> None:
        self.rows.append([file])
        near = {n + d for n in numbers for d in range(-_AROUND, _AROUND + 1) if n + d > 0}
        texts = {n: linecache.getline(file, n).rstrip() for n in sorted(near)}
        texts = {n: text for n, text in texts.items() if text or n in numbers or n + 1 in texts}
        for run in _runs(list(texts)):
            if self.rows[-1] != [file]:
                self.rows.append([])
            least = min((_indent(texts[n]) for n in run if n in numbers), default=0)
            for number in run:
                text, cut = texts[number], max(least - _STEP, 0)
                self._row[file, number] = len(self.rows)
                self.rows.append([number, text[min(cut, _indent(text)) :]])

    def row_of(self, node: fx.Node) -> int:
        """Where the line of a node is, -1 if tracing left none."""
        place = self._place[node]
        return -1 if place is None else self._row[place]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other."""
    found: list[list[int]] = []
    for number in numbers:
        if not found or number != found[-1][-1] + 1:
            found.append([])
        found[-1].append(number)
    return found


def place_of(node: fx.Node) -> SourceLine | None:
    """File and line of the innermost frame of the model, which is not torch and not we."""
    found = _PLACE.match(last_frame(node, _NOT_THE_MODEL) or "")
    return (found[1], int(found[2])) if found is not None else None


class Reporter:
    """The report of one process. With `at_once` the file is written anew after the first call of
    each graph, else when it is asked for."""

    def __init__(self, path: Path, title: str, at_once: bool = False) -> None:
        self.path, self._title, self._at_once = path, title, at_once
        self._graphs: list[_ReportedGraph] = []
        self._lock = Lock()

    @property
    def graphs(self) -> int:
        """How many it is about."""
        return len(self._graphs)

    def __call__(self, compilation: Compilation) -> GmRunner:
        with self._lock:
            graph = _ReportedGraph(compilation, f"graph {len(self._graphs) + 1}", self)
            self._graphs.append(graph)
        return GmRunner(graph, compilation.runner.trace)

    def called(self) -> None:
        """A graph had its first call."""
        if self._at_once:
            self.write()

    def write(self) -> Path:
        """Write the page about all graphs so far."""
        with self._lock:
            return atomic_write(self.path, page(self._title, [g.data() for g in self._graphs]))


_reporters: dict[str, Reporter] = {}
_finding = Lock()


def reporter_at(path: str) -> Reporter:
    """The one that writes at a path: graphs of a process share a page."""
    with _finding:
        key = os.path.realpath(path)
        return _reporters.setdefault(key, Reporter(Path(key), Path(key).stem, at_once=True))


class _ReportedGraph:
    """One graph: the first call is looked at, later ones just run."""

    def __init__(self, compilation: Compilation, name: str, reporter: Reporter) -> None:
        self._compilation, self._name, self._reporter = compilation, name, reporter
        self._call = engine_call(compilation)
        self._run = self._first
        self._data: dict[str, Any] | None = None
        if self._call is not None:
            self._call.session.trace.changes = []

    def entry(self, args: Sequence[Any]) -> Any:
        """Run the graph."""
        return self._run(args)

    def data(self) -> dict[str, Any]:
        """What the page shows."""
        return self._data if self._data is not None else graph_data(self._seen("never called"))

    def _first(self, args: Sequence[Any]) -> Any:
        given = list(args)  # the callee may empty the list
        results = self._compilation.runner.run(args)
        self._run = self._compilation.runner.run
        try:
            self._data = graph_data(self._looked_at(given))
        except Exception as e:  # a report must not end the program that it is about
            note(Fallback.INSPECTION, f"{self._name} could not be reported on", e)
            self._data = graph_data(self._seen(f"it could not be looked at: {e}"))
        self._reporter.called()
        return results

    def _seen(self, note: str) -> SeenGraph:
        mode = Settings.of(self._compilation.config).mode
        return SeenGraph(self._name, self._compilation, mode, note)

    def _looked_at(self, args: list[Any]) -> SeenGraph:
        """The graph after one more call, whose steps are timed. What it updates are copies."""
        if self._call is None:
            return self._seen("it is recorded call by call: there is no plan")
        seen = self._seen("")
        with torch.no_grad(), Randomness().again():
            seen.look(self._call, own_arguments(self._compilation.gm, args))
        return seen


_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""So that no name of a model can end the element that the data are in."""


def page(title: str, graphs: Sequence[dict[str, Any]]) -> bytes:
    """The whole file. Nothing is loaded by it, and only our own script may run."""
    style, script = _part("page.css"), _part("page.js")
    parts = {
        "POLICY": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded({"title": title, "graphs": list(graphs)}),
    }
    return "".join(parts.get(piece, piece) for piece in _part("page.html").split("@@")).encode()


def embedded(data: Any) -> str:
    """JSON that can stand inside of a script element, whatever texts are in it."""
    text = json.dumps(data, separators=(",", ":"))
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return text


def _part(name: str) -> str:
    return (resources.files("torchair.reporting") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    mark = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{mark}'"
