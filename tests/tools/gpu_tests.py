"""`make test-cuda`: tests that need a CUDA device, in processes side by side, and a table of them.

A file is run by one process or, where it takes long, by several that each take a part of its tests:
an illegal address ends a process, and with it what would have come after. A process that is loaded
by pytest as a plug-in (`-p gpu_tests`) chooses its part and writes down each result as it comes, so
that a run that is stopped has a table too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = tuple(str(ROOT / p) for p in ("src", "tests", "tests/tools", "examples", "bench"))
"""Where the processes find modules."""
CASES = (
    "unit/test_lower_elementwise.py",
    "unit/test_lower_index.py",
    "unit/test_lower_norm.py",
    "outside/test_conformance.py",
)
"""Tests of the CPU's kernels, which run on a GPU where `TORCHAIR_TEST_DEVICE` says so."""
PARTS = {
    "gpu/test_cuda.py": 4,
    "gpu/test_cuda_batches.py": 12,
    "gpu/test_cuda_capture.py": 8,
    "gpu/test_cuda_deploy.py": 3,
    "gpu/test_cuda_engine.py": 12,
    "gpu/test_cuda_exchange.py": 2,
    "gpu/test_cuda_matmul.py": 2,
    "gpu/test_cuda_random.py": 2,
    "gpu/test_cuda_sums.py": 2,
    "gpu/test_cuda_training.py": 4,
    "graph/test_npu_ops.py": 3,
    "unit/test_lower_elementwise.py": 4,
    "unit/test_lower_index.py": 2,
    "unit/test_lower_norm.py": 2,
    "outside/test_conformance.py": 4,
}
"""Files that take longer than others, and into how many parts they are split: of a minute or so on
an H200. Those with most parts begin first."""
SLICES = {
    "replay": ("cuda_exchange", "cuda_capture", "cuda_lists", "cuda_random", "test_load",
               "test_scope", "test_capture_updates"),
    "kernels": ("cuda_nest", "cuda_kernels", "cuda_sums", "cuda_matmul", "cuda_flash",
                "cuda_super", "cuda_tune"),
    "training": ("cuda_training", "cuda_engine"),
    "models": ("test_cuda.py", "cuda_batches", "cuda_deploy", "cuda_verify"),
    "operators": ("test_npu_ops", *CASES),
}  # fmt: skip
"""Files by what they show, each slice for less than eight minutes on an H200 with 16 cores. The
first two reach every kernel."""
ROUNDS = 3  # processes that a part may have: each goes on behind the test that ended the last one
_PART, _RESULTS = "TORCHAIR_TEST_PART", "TORCHAIR_TEST_RESULTS"
_SKIPPED = "TORCHAIR_TEST_SKIPPED"  # a file with names of tests, one a line


# ---- inside of pytest


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this process's part: every n-th test, so that neighbours are in different processes,
    without those that an earlier process has begun."""
    part, parts = map(int, os.environ.get(_PART, "0/1").split("/"))
    path = os.environ.get(_SKIPPED)
    begun = set(Path(path).read_text().splitlines()) if path else set()
    mine = [i for i in items[part::parts] if not begun or i.nodeid not in begun]
    kept = set(map(id, mine))
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in kept])
    items[:] = mine


def pytest_runtest_logreport(report: Any) -> None:
    """Append a phase of a test to the file of results."""
    if path := os.environ.get(_RESULTS):
        text = str(report.longrepr) if report.failed else ""
        row = [report.nodeid, report.when, report.outcome, report.duration, text]
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


# ---- outside


@dataclass
class Task:
    """A part of the tests of a file, and the process that runs it."""

    file: str
    part: int
    parts: int
    cases: bool
    results: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    round: int = 0
    begun: list[str] = field(default_factory=list)  # tests of earlier rounds
    ended: bool = True  # by itself, with all of its tests

    @property
    def name(self) -> str:
        """For the table."""
        where = f" {self.part + 1}/{self.parts}" if self.parts > 1 else ""
        again = f" from {len(self.begun)} on" if self.begun else ""
        return f"{self.file}{where}{' on the GPU' if self.cases else ''}{again}"

    def rest(self) -> Task | None:
        """What is left of it after a process that did not end by itself; None if nothing can be."""
        begun = dict.fromkeys([*self.begun, *(row[0] for row in self._rows())])
        if self.ended or self.round + 1 >= ROUNDS or len(begun) == len(self.begun):
            return None
        known = (self.file, self.part, self.parts, self.cases)
        return Task(*known, round=self.round + 1, begun=list(begun))

    def _rows(self) -> list[list[Any]]:
        """Phases of tests, as the process has written them down."""
        text = self.results.read_text() if self.results.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def idle(self) -> float:
        """Seconds since it has written down anything."""
        last = self.results.stat().st_mtime if self.results.is_file() else 0.0
        return min(time.perf_counter() - self.began, time.time() - last)

    def start(self, folder: Path, words: Sequence[str]) -> None:
        """Run pytest on this part."""
        stem = f"{Path(self.file).stem}.{self.part}.{self.round}"
        self.results, log = folder / f"{stem}.json", folder / f"{stem}.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(PATHS),
            "OMP_NUM_THREADS": "2",
            _PART: f"{self.part}/{self.parts}",
            _RESULTS: str(self.results),
        }
        if self.begun:
            environment[_SKIPPED] = str(folder / f"{stem}.begun")
            (folder / f"{stem}.begun").write_text("\n".join(self.begun))
        chosen = ["-k", "not threads and not narrow"] if self.cases else ["-m", "cuda"]
        if self.cases:
            environment["TORCHAIR_TEST_DEVICE"] = "cuda"
        command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "-p", "no:cacheprovider"]
        command += [f"tests/{self.file}", *chosen, "--tb=short", *words]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        self.began = time.perf_counter()

    def stop(self, note: str) -> None:
        """End the process."""
        if self.process:
            self.process.kill()
            self.process.wait()
        self.finish(note)

    def finish(self, note: str = "") -> None:
        """Collect what the process has written down."""
        self.seconds = time.perf_counter() - self.began
        last = ""  # the test that was not ended
        for name, when, outcome, _, text in self._rows():
            last = name if when == "setup" and outcome == "passed" else ""
            if when == "call" or outcome != "passed":
                self.counts[outcome] += 1
            if text:
                self.failures.append((name, text))
        code = self.process.returncode if self.process else 0
        log = self.results.with_suffix(".txt").read_text(errors="replace")
        self.ended = not note and code in (0, 1, 5)
        if not self.ended:
            text = note or f"exit status {code}\n{log[-4000:]}"
            self.failures.append((self.name, f"{text}\nin {last}" if last else text))


def tasks(only: str) -> list[Task]:
    """Everything to be run, long ones first."""
    marked = sorted(
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.cuda" in path.read_text()
    )
    files = [(f, False) for f in marked if f not in CASES] + [(f, True) for f in CASES]
    found = [
        Task(file, part, PARTS.get(file, 1), cases)
        for file, cases in files
        if any(word in file for word in only.split(","))
        for part in range(PARTS.get(file, 1))
    ]
    return sorted(found, key=lambda task: -task.parts)


def run(
    todo: list[Task],
    jobs: int,
    folder: Path,
    words: Sequence[str],
    limit: float = float("inf"),
    hang: float = float("inf"),
) -> Iterator[Task]:
    """Run them side by side; those that have ended, as they end, or were stopped after `limit`
    seconds, or `hang` seconds without a result: blocks that wait for each other on a GPU may wait
    for ever. What was not reached of those runs in another process, and is added to `todo`."""
    waiting, running = list(todo), list[Task]()

    def ended(task: Task) -> Iterator[Task]:
        yield task
        rest = task.rest()
        if rest is not None:
            todo.append(rest)
            waiting.append(rest)

    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            task.start(folder, words)
            running.append(task)
        time.sleep(0.1)
        for task in [t for t in running if t.process and t.process.poll() is not None]:
            running.remove(task)
            task.finish()
            yield from ended(task)
        for task in running[:]:
            if note := over(task, limit, hang):
                running.remove(task)
                task.stop(note)
                yield from ended(task)


def over(task: Task, limit: float, hang: float) -> str:
    """Why a process is to be stopped, if it is."""
    if time.perf_counter() - task.began > limit:
        return f"stopped after {limit:.0f} s"
    return f"stopped: nothing for {hang:.0f} s" if task.idle > hang else ""


def line(task: Task) -> str:
    """What a task came to."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(task.counts.items()))
    return f"{task.seconds:6.1f} s  {task.name:50} {kinds or 'nothing'}"


def slowest(done: Sequence[Task], count: int) -> list[str]:
    """The tests that took longest."""
    times = Counter[str]()
    for task in done:
        if task.results.exists():
            for row in task.results.read_text().splitlines():
                name, _, _, seconds, _ = json.loads(row)
                times[name] += seconds
    return [f"{seconds:6.1f} s  {name}" for name, seconds in times.most_common(count)]


def main() -> None:
    """Run, and print a table, the failures and the slowest tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--only", default="", help="files whose path has one of these, by commas")
    parser.add_argument("--slice", choices=SLICES, help="files that belong together")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a process")
    parser.add_argument("--hang", type=float, default=180, help="seconds without a result")
    parser.add_argument("--total", type=float, default=0, help="seconds of all, then stop")
    parser.add_argument("--slowest", type=int, default=15, help="how many of the slowest to print")
    parser.add_argument("--lines", type=int, default=25, help="of each failure")
    parser.add_argument("words", nargs="*", help="options of pytest, after --")
    options = parser.parse_args()

    def stopped(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stopped)
    if options.total and hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stopped)
        signal.alarm(max(1, int(options.total)))
    done: list[Task] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = ",".join(SLICES[options.slice]) if options.slice else options.only
        todo, begun = tasks(chosen), time.perf_counter()
        limits = (options.limit, options.hang)
        try:
            for task in run(todo, options.jobs, Path(folder), options.words, *limits):
                done.append(task)
                print(f"{len(done):3} of {len(todo)} {line(task)}", flush=True)
        except KeyboardInterrupt:
            for task in todo:
                if task.process and task not in done:
                    task.stop("stopped before its end")
                    done.append(task)
                    print(f"stopped    {line(task)}")
            done += [t for t in todo if not t.process]
        failures = [pair for task in done for pair in task.failures]
        for name, text in failures:
            print(f"\n== {name}\n" + "\n".join(text.splitlines()[-options.lines :]))
        print("\n== slowest", *slowest(done, options.slowest), sep="\n")
        total = sum((task.counts for task in done), Counter[str]())
        seconds = time.perf_counter() - begun
        print(f"\n== {dict(total)} in {seconds:.0f} s; {len(failures)} failures", flush=True)
    missing = [task.name for task in done if not task.process]
    if missing:
        print("not run:", *missing)
    sys.exit(bool(failures or missing))


if __name__ == "__main__":
    main()
