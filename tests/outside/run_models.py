"""Models of other libraries, random weights, in our modes: `make outside`, docs/outside.md.

    python -m tests.outside.run_models --jobs 2 --only 'timm/'     a choice of models
    python -m tests.outside.run_models --update                    all, and write the CSV

Workers are processes: one that crashes or hangs costs one row. Finished rows are written to a
file, and a run that was interrupted goes on with the rest; --fresh begins again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .model_rows import MODES
from .models import names
from .table import DOCS, Right, Row, finish, read, write

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "outside" / "models.csv"
CHUNK = 8  # models of a library that one worker does, so that imports are paid once for them
Key = tuple[str, str]


@dataclass(frozen=True)
class Limits:
    """How workers run."""

    timeout: float
    launcher: tuple[str, ...] = ()


def work(todo: Sequence[Key], limits: Limits) -> Iterator[Row]:
    """Rows as a worker makes them; one that ends it is a row too, and another worker goes on."""
    rest = list(todo)
    while rest:
        for made in _worker(tuple(rest), limits):
            rest.remove(made.key)
            yield made


def _worker(todo: Sequence[Key], limits: Limits) -> Iterator[Row]:
    asked = [f"{name}:{mode}" for name, mode in todo]
    program = [*limits.launcher, sys.executable, "-m", "tests.outside.model_rows"]
    command = [*program, "--timeout", str(limits.timeout), *asked]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHAIR_KERNEL_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    made = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"model"'):
                fields = json.loads(line)
                made += 1
                yield Row(**{**fields, "right": Right(fields["right"])})
        code = process.wait()
        if made < len(todo):
            errors.seek(0)
            yield _lost(todo[made], code, errors.read(), limits.timeout)


def _lost(key: Key, code: int, errors: str, timeout: float) -> Row:
    if "Timeout (" in errors:
        note = f"longer than {timeout:.0f} s: {_where(errors)}"
    else:
        note = f"the process ended with {code}: {(errors.strip().splitlines() or [''])[-1]}"
    return Row(*key, Right.NO, note=note[:300])


def _where(errors: str) -> str:
    """The innermost frame of the stack that faulthandler printed."""
    after = errors.split("Timeout (")[-1].splitlines()
    return next((line.strip() for line in after if "File " in line), "")


def chunks(todo: Sequence[Key]) -> list[list[Key]]:
    """Rows for one worker each: some models of one library. Libraries take turns, so that a run
    that is interrupted has seen all of them."""
    size = CHUNK * len(MODES)
    libraries = []
    for _, group in groupby(todo, key=lambda key: key[0].split("/")[0]):
        rows = list(group)
        libraries.append([rows[i : i + size] for i in range(0, len(rows), size)])
    return [piece for turn in zip_longest(*libraries) for piece in turn if piece]


def run(
    todo: Sequence[Key], done: list[Row], options: argparse.Namespace, console: Console
) -> None:
    """Do the rows, add them to `done` and to the file."""
    columns = (
        TextColumn("{task.description:44.44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[wrong]} not right"),
        TimeElapsedColumn(),
    )
    lock, limits = threading.Lock(), Limits(options.timeout, tuple(shlex.split(options.launcher)))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=len(todo), wrong=0)

        def one(piece: list[Key]) -> None:
            for made in work(piece, limits):
                with lock:
                    done.append(made)
                    write(options.state, done)
                    wrong = sum(r.right is not Right.YES for r in done)
                    progress.update(task, advance=1, description=made.model, wrong=wrong)
                    if made.right is not Right.YES or not console.is_terminal:
                        console.print(_line(made), markup=False, highlight=False, soft_wrap=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            for future in as_completed([pool.submit(one, piece) for piece in chunks(todo)]):
                future.result()


def _line(row: Row) -> str:
    times = [
        f"{value:.2f}" if value else "-" for value in (row.compile_s, row.aot_eager_s, row.speed)
    ]
    return f"{row.right!s:8s}{row.model} {row.mode} {' '.join(times)} {row.note}"


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a row is wrong that was right in docs/outside/models.csv, or is new and wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.outside.run_models", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--only", default="", help="a regular expression over library/model")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a row")
    parser.add_argument("--launcher", default="", help="what starts a worker, as 'nice -n 10'")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--update", action="store_true", help="write docs/outside/models.csv")
    parser.add_argument("--state", type=Path, default=STATE, help="the file of finished rows")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    asked = [(name, mode) for name in names(options.only) for mode in options.modes]
    done = [] if options.fresh else read(options.state)
    finished = {row.key for row in done}
    options.state.parent.mkdir(parents=True, exist_ok=True)
    run([key for key in asked if key not in finished], done, options, console)
    wanted = set(asked)
    rows = [row for row in done if row.key in wanted]
    partial = bool(options.only) or set(options.modes) != set(MODES)
    return finish(rows, DOCS / "models.csv", update=options.update, partial=partial)


if __name__ == "__main__":
    sys.exit(main())
