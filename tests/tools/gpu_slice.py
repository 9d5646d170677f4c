"""`make gpu-slice`: what a GPU has to show, most telling first, in less than nine minutes.

Stages run one after the other, each in processes of its own with a limit, since a kernel may hang
and an illegal address ends a process. Whatever was stopped or failed, the next stage runs; what no
time is left for is named. Every stage writes all of its output to a file in the folder `--out`; at
the end there is one table with a line for each.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS, BENCH = "tests/tools/gpu_tests.py", "bench"
TOTAL = 530.0
"""Seconds of all stages."""
_LEAST = 10.0  # seconds that are worth beginning a stage


@dataclass(frozen=True)
class Stage:
    """A command, and the seconds that it may take."""

    name: str
    words: tuple[str, ...]
    limit: float
    shows: str = r"^== \{|^not run|^stopped|^FAILED|^\w*Error"
    """The lines of its output that the table has."""


def tests(name: str, seconds: float, *more: str) -> Stage:
    """A slice of the tests, which stops itself."""
    limits = ("--total", str(int(seconds)), "--hang", "60", "--slowest", "0")
    return Stage(f"tests: {name}", (TESTS, *limits, *more), seconds + 20)


_FIGURES = r"│|┃|^  .*(met|missed|at most|at least)"

STAGES = (
    tests("replay", 90, "--only", "cuda_exchange,cuda_capture"),
    Stage("host time of a call", (f"{BENCH}/gpu_host.py", "--quick"), 60, _FIGURES),
    tests("kernels", 120, "--slice", "kernels"),
    Stage(
        "training, linear chains",
        (f"{BENCH}/gpu.py", "--quick", "--peers", "", "--only", "chain,train BERT 6 layers b16"),
        100,
        _FIGURES,
    ),
    tests("training", 90, "--only", "cuda_training,cuda_random,cuda_lists"),
    Stage("products", (f"{BENCH}/gpu_matmul.py", "--quick"), 60, _FIGURES),
    Stage("reductions", (f"{BENCH}/reductions.py", "--quick"), 60, _FIGURES),
    Stage(
        "attention",
        (f"{BENCH}/gpu_attention.py", "--tokens", "1024", "4096", "--width", "128"),
        60,
        _FIGURES,
    ),
    tests("the rest", 400, "--only", "cuda_engine,cuda_batches,cuda_deploy,test_cuda.py"),
)


@dataclass
class Outcome:
    """How a stage ended."""

    stage: Stage
    status: str
    seconds: float
    lines: list[str]


def run(stage: Stage, limit: float, out: Path) -> Outcome:
    """One stage, stopped at its limit with all processes that it has begun."""
    log = out / (re.sub(r"\W+", "-", stage.name) + ".txt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *stage.words],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if re.search(stage.shows, line)]
    status = "stopped" if code is None else "right" if code == 0 else f"exit status {code}"
    if code and not lines:
        lines = text.splitlines()[-4:]
    return Outcome(stage, status, time.perf_counter() - began, lines)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and whatever it has begun: they are a group of their own. It may say first what
    it has so far."""
    for number, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 2.0)):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)


def report(done: Sequence[Outcome], left: Sequence[Stage]) -> str:
    """The table."""
    rows = []
    for outcome in done:
        rows.append(f"{outcome.seconds:6.1f} s  {outcome.status:16} {outcome.stage.name}")
        rows += [f"            {line[:150]}" for line in outcome.lines]
    rows += [f"                not begun: {stage.name}" for stage in left]
    return "\n".join(rows)


def main(stages: Sequence[Stage] = STAGES) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds of all stages")
    parser.add_argument("--only", default="", help="stages whose name has one of these, by commas")
    parser.add_argument("--from", type=int, default=1, dest="first", help="number of the first")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-slice"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    words = options.only.split(",")
    todo = [s for s in stages[options.first - 1 :] if any(w in s.name for w in words)]
    done: list[Outcome] = []
    end_of_all = time.perf_counter() + options.total
    while todo and (left := end_of_all - time.perf_counter()) > _LEAST:
        stage = todo.pop(0)
        done.append(run(stage, min(stage.limit, left - _LEAST / 2), options.out))
        print(report(done[-1:], ()), flush=True)
    text = report(done, todo)
    (options.out / "table.txt").write_text(text + "\n")
    print(f"\n== all\n{text}")
    sys.exit(any(o.status != "right" for o in done) or bool(todo))


if __name__ == "__main__":
    main()
