"""Native programs called from several Python threads: results, memory, number of threads."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiling
from torchair import ge
from torchair.codegen.cpu import run as segment
from torchair.codegen.cpu import target as cpu_target
from torchair.codegen.cpu.target import cpu
from torchair.engine.session import TorchNpuGraph
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer

LENGTHS = (1, 2, 3, 7, 16, 33, 64)
THREADS = 4
GROWTH = 48 << 10  # kilobytes that the process may grow by after its first calls


def compiled_in_parts(fn: Any, **kwargs: Any) -> Any:
    """Without fullgraph: its count of compiled frames is one for all threads of the process."""
    return compiling.compiled(fn, fullgraph=False, **kwargs)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Small(nn.Module):
    """Norm, products, softmax, activation, an update of a buffer: what decoders are made of."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, 3 * dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.2, -1)
        x = x + weights @ v
        return x + self.down(F.gelu(self.up(x))), weights.sum(-2)


def _inputs() -> dict[int, torch.Tensor]:
    torch.manual_seed(1)
    return {n: torch.randn(2, n, 32) for n in LENGTHS}


def _together(count: int, work: Callable[[int], None]) -> None:
    """Run `work(k)` in threads of their own; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _check_calls(calls: int) -> None:
    """Threads call one compiled model with different sizes; every result is the one that a single
    thread got, and memory stays as it is."""
    model = Small()
    fast = compiled_in_parts(model, dynamic=True)
    inputs = _inputs()
    with torch.no_grad():
        expected = {n: fast(x) for n, x in inputs.items()}
        for n, x in inputs.items():
            torch.testing.assert_close(expected[n], model(x))

    def work(k: int, times: int) -> None:
        with torch.no_grad():
            for i in range(times):
                n = LENGTHS[(i + k) % len(LENGTHS)]
                for got, wanted in zip(fast(inputs[n]), expected[n], strict=True):
                    assert torch.equal(got, wanted), f"call {i} of thread {k} at length {n}"

    _together(THREADS, lambda k: work(k, 200))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _together(THREADS, lambda k: work(k, calls // THREADS))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < GROWTH, f"{grown} kB more after {calls} calls"


def test_many_calls() -> None:
    _check_calls(20_000)


@pytest.mark.slow
def test_very_many_calls() -> None:
    _check_calls(100_000)


def test_updates_of_own_state() -> None:
    """Threads that each update tensors of their own in place do not see each other."""

    def step(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, at, new)
        return cache.sum(1) + new.mean(1)

    fast = compiled_in_parts(step, dynamic=False)
    fast(torch.zeros(2, 8, 5), torch.tensor([0]), torch.zeros(2, 1, 5))

    def work(k: int) -> None:
        cache, plain = torch.zeros(2, 8, 5), torch.zeros(2, 8, 5)
        for i in range(300):
            at, new = torch.tensor([i % 8]), torch.full((2, 1, 5), float(10 * k + i))
            torch.testing.assert_close(fast(cache, at, new), step(plain, at, new))
            assert torch.equal(cache, plain)

    with torch.no_grad():
        _together(THREADS, work)


def test_calls_while_others_compile() -> None:
    """One model runs in some threads while others compile new ones and meet new sizes."""
    model = Small()
    fast = compiled_in_parts(model, dynamic=True)
    inputs = _inputs()
    with torch.no_grad():
        expected = {n: fast(x)[0] for n, x in inputs.items() if n in (2, 3)}
    done = threading.Event()

    def call(k: int) -> None:
        n = 2 + k
        with torch.no_grad():
            while not done.is_set():
                assert torch.equal(fast(inputs[n])[0], expected[n])

    def make(k: int) -> None:
        try:
            with torch.no_grad():
                for i in range(3):
                    x = torch.randn(5 + i, 9 + k)
                    other = compiled_in_parts(lambda x, i=i: torch.softmax(x * (i + k), -1) + i)
                    torch.testing.assert_close(other(x), torch.softmax(x * (i + k), -1) + i)
                    y = torch.randn(2, 40 + 3 * k + i, 32)
                    torch.testing.assert_close(fast(y)[0], model(y)[0])
        finally:
            if k == 2:
                done.set()

    _together(4, lambda k: call(k) if k < 2 else make(k))


def test_first_calls_at_once() -> None:
    """Several threads meet new sizes at the same moment: plans and kernels are made once or
    twice, never wrong."""
    model = Small()
    fast = compiled_in_parts(model, dynamic=True)
    barrier = threading.Barrier(THREADS)
    with torch.no_grad():
        fast(torch.randn(2, 5, 32))

    def work(k: int) -> None:
        with torch.no_grad():
            for n in range(6, 18):
                x = torch.randn(2, n, 32)
                barrier.wait(60)
                torch.testing.assert_close(fast(x), model(x))

    _together(THREADS, work)


# ---- how many threads compute ----


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each call of the driver asks for."""
    found: list[int] = []
    real = cpu().driver()

    def driver(base: int) -> None:
        found.append(ctypes.c_int64.from_address(base + 8 * segment.THREADS).value)
        real(base)

    monkeypatch.setattr(cpu(), "driver", lambda: driver)
    return found


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_number_of_threads_is_torchs(used: list[int], threads: Any) -> None:
    """A program asks for as many threads as torch would use now, at most for those it has memory
    for; the result does not depend on it."""
    with Graph("g", infer) as graph:
        shapes = ((128, 256), (256, 512))
        x, y = (
            Data(index=i, dtype=DataType.DT_FLOAT, shape=s, placement="CPU")
            for i, s in enumerate(shapes)
        )
        NetOutput([ge.ReduceSum(ge.SoftmaxV2(ge.MatMulV2(x, y, None, None)), [0])])
    session = TorchNpuGraph("g")
    session.load(graph)
    a, b = (torch.randn(s) for s in shapes)
    wanted = torch.softmax(a.double() @ b.double(), -1).sum(0).float()
    for count in (2, 1, 2, 4):
        threads(count)
        torch.testing.assert_close(session.run([a, b])[0], wanted, rtol=1e-4, atol=1e-5)
    assert used == [2, 1, 2, 2]


def test_little_work_runs_on_one_thread(used: list[int], threads: Any) -> None:
    threads(2)
    fast = compiled_in_parts(lambda x: x * 2 + 1, dynamic=False)
    with torch.no_grad():
        assert torch.equal(fast(torch.ones(4)), torch.full((4,), 3.0))
    assert used == [1]


# ---- fork ----

FORKING = """
import os, signal, sys
import torch

torch.set_num_threads(2)
layer = torch.nn.Linear(256, 256)
run = [torch.compile(lambda x: layer(x).relu().sum(-1), backend=b) for b in sys.argv[1:]]
new = torch.compile(lambda x: x.softmax(-1).sum(-1), backend=sys.argv[1])
x = torch.randn(256, 256)
with torch.no_grad():
    expected = [r(x) for r in run]  # the pool has two threads now
    child = os.fork()
    if not child:
        signal.alarm(120)
        same = all(torch.equal(r(x), e) for r, e in zip(run, expected))
        os._exit(not (same and all(abs(one - 1) < 1e-5 for one in new(x).tolist())))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_fork_runs_and_compiles() -> None:
    """torch's own kernels would wait there for threads that the child does not have."""
    command = [sys.executable, "-c", FORKING, "torchair", "npugraph_ex"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["OMP_NUM_THREADS"] = "2"
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_sizes_with_more_work_than_the_first_get_all_threads(monkeypatch):
    made = []

    class Seen(segment.SizedSegment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(cpu_target, "SizedSegment", Seen)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = compiled_in_parts(lambda x: torch.exp(x) + 1, dynamic=True)
        for rows, threads in ((2, 1), (4096, 2), (3, 1)):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(run(x), torch.exp(x) + 1)
            assert [s.most for s in made] == [threads]
    finally:
        torch.set_num_threads(before)
