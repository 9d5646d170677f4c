"""Random models of NNSmith in our modes: `make nnsmith`, which installs NNSmith for it.

The release of NNSmith that can be installed (0.1.0) has no `pt2` backend yet, so this is one: its
generator makes a graph of operators, its table of torch functions runs the graph, and
`torch.compile` with our backends compiles that. Values are judged as those of any other program
(docs/outside.md). A seed decides everything.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conformance.pool import Done, run_all

from .judging import MODES
from .table import BUILD, DOCS, Journal, Right, Row, finish
from .trial import Finding, Program, line, tried

PATH = DOCS / "nnsmith.csv"
STATE = BUILD / "nnsmith.csv"
NODES = 10
ELEMENTS = 4096  # of a tensor
Task = tuple[int, str]  # a seed and a mode


class Net(nn.Module):
    """The steps of a generated graph, without the checks of NNSmith's own module, each of which
    asks for values and would break the graph."""

    def __init__(self, symbolic: Any) -> None:
        super().__init__()
        self.steps = list(symbolic.instructions)
        self.owned = symbolic.mlist
        self.inputs = list(symbolic.ir.input_var())
        self.results = list(symbolic.output_map)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.inputs, args, strict=True))
        for step, names, made, _ in self.steps:
            found = step(*(values[name] for name in names))
            values.update(zip(made, found if isinstance(found, list) else [found], strict=True))
        return tuple(values[name] for name in self.results)

    def double(self) -> Net:
        """Also casts to floats are casts to float64."""
        super().double()
        self.steps = [(_widened(fn, op), names, made, op) for fn, names, made, op in self.steps]
        return self


def _widened(fn: Callable[..., Any], op: Any) -> Callable[..., Any]:
    to = op.extra_attrs.get("to")
    return torch.Tensor.double if to is not None and to.torch().is_floating_point else fn


@cache
def _model_type() -> tuple[Any, list[Any]]:
    """NNSmith's kind of model, and the operators that run on this torch."""
    from nnsmith.materialize import Model
    from nnsmith.narrow_spec import auto_opset
    from nnsmith.util import set_seed

    logging.disable(logging.WARNING)
    kind = Model.init("torch", backend_target="cpu")
    kind.add_seed_setter()
    set_seed(0)  # it tries operators with random inputs
    operators = auto_opset(kind, None, vulops=True)
    for op in operators:  # made from sets: their order is another one in every process
        op.in_dtypes, op.out_dtypes = (sorted(t, key=str) for t in (op.in_dtypes, op.out_dtypes))
    return kind, operators


def generated(seed: int) -> tuple[Program, str]:
    """The model of a seed, and the operators in it."""
    from nnsmith.graph_gen import model_gen
    from nnsmith.util import set_seed

    kind, operators = _model_type()
    set_seed(seed)
    torch.manual_seed(seed)
    ir = model_gen(
        opset=operators,
        method="symbolic-cinit",
        seed=seed,
        max_nodes=NODES,
        max_elem_per_tensor=ELEMENTS,
        timeout_ms=20000,
    ).make_concrete()
    symbolic = kind.from_gir(ir).native_model
    torch.manual_seed(seed)
    given = symbolic.get_random_inps()
    net = Net(symbolic)
    names = [type(op).__name__ for *_, op in net.steps]
    return Program(f"seed {seed}", net, [given[name] for name in net.inputs]), " ".join(names)


def findings(task: Task) -> Iterator[tuple[Finding, str]]:
    """What a seed came to in a mode, with its operators."""
    seed, mode = task
    try:
        program, operators = generated(seed)
    except Exception as e:
        yield Finding(f"seed {seed}", Right.UNKNOWN, f"NNSmith: {line(e)}"), ""
        return
    yield tried(program, mode, training=False, timing=True), operators


def row_of(done: Done) -> Row:
    """The row of a seed in a mode."""
    seed, mode = done.task
    if done.lost:
        found, operators = Finding("", Right.NO, done.lost), ""
    else:
        found, operators = done.answers[0]
    parts = [found.why, str(found.counts), operators]
    return Row(
        _name(seed),
        mode,
        found.right,
        found.counts.graph_breaks.total(),
        found.counts.fallbacks.total(),
        found.seconds,
        found.aot_eager,
        found.speed,
        "; ".join(p for p in parts if p),
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outside.smith", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="of models")
    parser.add_argument("--seconds", type=float, default=0, help="begin no model after; 0: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="subprocesses")
    parser.add_argument("--update", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--state", type=Path, default=STATE, help="rows of an interrupted run")
    parser.add_argument("--fresh", action="store_true", help="do not go on with that run")
    parser.add_argument("--verbose", action="store_true", help="print rows that are not right")
    return parser.parse_args(argv)


def _tasks(options: argparse.Namespace) -> list[Task]:
    seeds = range(options.first, options.first + options.count)
    return [(seed, mode) for seed in seeds for mode in MODES]


def _name(seed: int) -> str:
    return f"seed {seed:04}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    warnings.simplefilter("ignore")
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    journal = Journal(options.state, fresh=options.fresh)
    tasks = _tasks(options)
    todo = [(seed, mode) for seed, mode in tasks if (_name(seed), mode) not in journal]
    with tempfile.TemporaryDirectory(prefix="torchair-outside-") as folder:
        os.environ["TORCHAIR_CACHE_DIR"] = folder
        os.environ["XDG_CACHE_HOME"] = folder  # NNSmith's, too
        os.environ["PYTHONHASHSEED"] = "0"  # its generator iterates over sets
        _model_type()  # once: workers read what it wrote
        for done in run_all(todo, findings, options.jobs, 300):
            row = row_of(done)
            journal.add(row)
            if options.verbose and row.right is not Right.YES:
                print(f"{row.model} [{row.mode}]: {row.right}: {row.note}", flush=True)
            if len(journal.rows) % 50 == 0:
                print(f"{len(journal.rows)} rows", flush=True)
            if time.monotonic() > end:
                break
    asked = {(_name(seed), mode) for seed, mode in tasks}
    rows = [row for row in journal.end() if row.key in asked]
    partial = len(rows) < len(tasks) or options.first > 0
    return finish(rows, PATH, update=options.update, partial=partial)


if __name__ == "__main__":
    raise SystemExit(main())
