"""Commands that read and write files of ours: graphs, dumps, kernels, results of tuning."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from torchair.cli.show import print_table
from torchair.codegen.kernel_cache import store
from torchair.codegen.tuned import NAME, TunedKernel, merge, read
from torchair.deploy import packaging
from torchair.deploy.exported import read_program, write_program
from torchair.engine.inspect.check import check_graph
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import mapping_assign_op_to_graph_output
from torchair.errors import CommandError
from torchair.operators import infer
from torchair.progress import Progress
from torchair.serde import read_graph, write_graph
from torchair.tools import compare_dumps
from torchair.verification import card, roofline

_MODEL_FILES = (".air", ".om")


def compare(options: argparse.Namespace) -> int:
    """`torchair compare`: 1 if something diverges."""
    if options.npu is not None:
        return _compare_card(options)
    if options.second is None:
        raise CommandError("two dumps are compared; `--npu DUMP` compares one with a graph file")
    tolerance = compare_dumps.RTOL if options.rtol is None else options.rtol
    with Progress("torchair compare") as steps:
        found = compare_dumps.compare(
            Path(options.first), Path(options.second), tolerance, steps.next
        )
    if not found.rows:
        raise CommandError("no FX node is in both dumps")
    print(found)
    print(found.write(Path(options.output)))
    return 1 if found.diverging else 0


def _compare_card(options: argparse.Namespace) -> int:
    """`torchair compare --npu`: 1 if a node of the card is wrong."""
    if options.second is not None:
        raise CommandError("--npu takes one graph file beside the dump")
    graph = read_graph(options.first, infer)
    with Progress("torchair compare") as steps:
        reports = card.judge_dump(graph, Path(options.npu), options.rtol or 0.0, steps.next)
    for report in reports:
        print(report)
    print(card.write_table(reports, Path(options.output)))
    if options.profile is not None:
        _print_times(options)
    return 1 if any(report.wrong for report in reports) else 0


def _print_times(options: argparse.Namespace) -> None:
    rates = roofline.CardRates(
        options.bandwidth or roofline.BANDWIDTH, options.flops or roofline.FLOPS
    )
    kernels = roofline.by_time_lost(roofline.kernel_times(Path(options.profile)), rates)
    title = f"{len(kernels)} kernels at {rates.bandwidth:g} GB/s and {rates.flops:g} TFLOP/s"
    print_table(title, roofline.HEAD, [k.cells(rates) for k in kernels])


def cache(options: argparse.Namespace) -> int:
    """`torchair cache`."""
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
        used = datetime.fromtimestamp(entries[-1].used)
        print(f"last use {used:%Y-%m-%d %H:%M} (rounded to the hour)")
    return 0


def tune(options: argparse.Namespace) -> int:
    """`torchair tune`."""
    files = [p / NAME if p.is_dir() else p for p in map(Path, options.files)]
    if options.merge:
        target = Path(options.output or NAME)
        print(f"{target}: {merge(files, target)} results")
    else:
        _print_tuned([found for file in files for found in read(file)])
    return 0


def _print_tuned(rows: Sequence[TunedKernel]) -> None:
    cells = [
        (
            r.about,
            r.machine,
            r.config or "default",
            f"{r.microseconds:.1f}",
            f"{r.usual / r.microseconds:.2f}x" if r.microseconds else "-",
        )
        for r in rows
    ]
    print_table(f"{len(rows)} tuned kernels", ("kernel", "machine", "config", "us", "gain"), cells)


def check(options: argparse.Namespace) -> int:
    """`torchair check`: 1 if something is found."""
    graph, state = read_graph(options.file, infer), GraphState()
    if graph.output is not None:
        mapping_assign_op_to_graph_output(graph, state)
    findings = check_graph(graph, state.assigned)
    for finding in findings:
        print(finding)
    if not findings:
        print("nothing found")
    return 1 if findings else 0


def export(options: argparse.Namespace) -> int:
    """`torchair export`: write a program of `torch.export`, or a graph file, as a model file."""
    source = Path(options.program)
    target = Path(options.output or source.with_suffix(".air"))
    if source.suffix != ".pt2":
        print(write_graph(read_graph(source, infer), target, target.suffix.removeprefix(".")))
        return 0
    if target.suffix not in _MODEL_FILES:
        raise CommandError(f"{target}: a program is written as one of {', '.join(_MODEL_FILES)}")
    print(write_program(read_program(options.program, options.trust), target))
    return 0


def package(options: argparse.Namespace) -> int:
    """`torchair package`: write a model with machine code for many processors."""
    made = packaging.package(
        options.model,
        options.output,
        gpu=options.gpu,
        frozen_parameter=options.frozen,
        cpu=packaging.DEFAULT_PROCESSORS if options.cpu is None else options.cpu,
        key=options.key,
        trust=options.trust,
    )
    print(made)
    return 0
