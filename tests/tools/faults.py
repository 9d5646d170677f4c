"""What happens to a process at bad moments: little address space, signals at random instructions,
threads that exit, a fork in the middle of compiling. Each is done in a process of its own: calls
give the right result or raise an error that says something, and afterwards all is right again.

    python tests/tools/faults.py --count 40
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

import torchair
from hardship import child

_TIMEOUT = 120  # seconds after which a process hangs
_FORKED = 60  # the same of one that it has forked
_MIB = 1 << 20
_HUNG, _WRONG = 3, 1  # exit codes
_TORCH_ABORTS = "TorchDispatchModeTLS.cpp"
"""What torch says when it ends a process that is interrupted while its tracing exchanges dispatch
modes: a destructor finds the old one in place, and throws."""


class Net(nn.Module):
    """A packed weight, a reduction and an activation. With a number of its own, kernels are new."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(torch.tanh(self.up(x) * self.number)), -1)


def compiled(model: nn.Module, way: str, rows: int) -> Any:
    """A model that is not compiled yet, or was just traced."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.experimental_config.kernel_cache = False
    config.mode = "npugraph_ex" if way == "captured" else "max-autotune"
    if way == "direct":
        return torchair.compile(model, torch.randn(rows, 24), config=config, dynamic=True)
    torch._dynamo.reset()
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))


WAYS = ("direct", "dynamo", "captured")


def new_model(chance: random.Random) -> nn.Module:
    return Net(chance.uniform(0.5, 2.0)).eval()


def check(call: Any, model: nn.Module, rows: int) -> None:
    """A right result, or AssertionError."""
    x = torch.randn(rows, 24)
    torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


def whole(chance: random.Random, way: str) -> None:
    """Compile a new model, and call it with two sizes."""
    model = new_model(chance)
    call = compiled(model, way, 3)
    for rows in (3, 7, 3):
        check(call, model, rows)


# ---- the faults: each runs in a process of its own, and says what came of it ----


def little_memory(chance: random.Random) -> str:
    """The address space may grow by a few MiB only."""
    way = chance.choice(WAYS)
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + chance.randrange(48) * _MIB, limits[1]))
    outcome = "right"
    try:
        whole(chance, way)
    except AssertionError:
        raise
    except Exception as error:
        outcome = f"refused: {_kind(error)}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    for other in (way, "direct"):
        whole(chance, other)
    return outcome


def _kind(error: BaseException) -> str:
    """The class of the first cause; an error without a text says nothing."""
    assert str(error).strip(), f"{type(error).__name__} without a text"
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


class Interrupt(KeyboardInterrupt):
    """Ours, not the user's."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise an interrupt in the main thread after so many seconds, wherever it is then."""

    def strike(*_given: object) -> None:
        raise Interrupt("struck")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def signals(chance: random.Random) -> str:
    """Interrupts while a model is compiled and called; the same object goes on afterwards."""
    way, struck = chance.choice(WAYS), 0
    model = new_model(chance)
    call = None
    begun = time.perf_counter()
    whole(chance, way)
    usual = time.perf_counter() - begun
    for _ in range(6):
        try:
            with interrupted(chance.uniform(1e-5, usual)):
                call = call if call is not None else compiled(model, way, 3)
                for rows in (3, 7, 11):
                    check(call, model, rows)
        except BaseException as error:
            if not _is_strike(error):
                raise
            struck += 1
        if call is not None:
            check(call, model, 3)
            check(call, model, chance.randrange(2, 40))
    for _ in range(40):  # in calls that are quick
        assert call is not None or struck
        call = call if call is not None else compiled(model, way, 3)
        try:
            with interrupted(chance.uniform(1e-6, 3e-4)):
                for rows in (3, 7, 3, 7):
                    check(call, model, rows)
        except BaseException as error:
            if not _is_strike(error):
                raise
            struck += 1
        check(call, model, 3)
    return "interrupted" if struck else "right"


def _is_strike(error: BaseException | None) -> bool:
    """Whether it is our interrupt, or was made of it."""
    while error is not None:
        if isinstance(error, Interrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def exiting_threads(chance: random.Random) -> str:
    """Threads that compile, call and exit; then there are no more than before."""
    torch.set_num_threads(2)
    model = new_model(chance)
    call = compiled(model, "direct", 3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        try:
            with torch.no_grad():  # which is of a thread
                check(call, model, mine.randrange(2, 12))
                if mine.random() < 0.3:
                    whole(mine, "direct")
        except BaseException as error:
            failures.append(error)

    before = None
    for turn in range(6):
        threads = [threading.Thread(target=work, args=(chance.randrange(10**9),)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        if turn == 2:
            before = len(os.listdir("/proc/self/task"))
    assert before is not None
    for _ in range(200):  # those of OpenMP end some time after the thread that they worked for
        after = len(os.listdir("/proc/self/task"))
        if after <= before:
            break
        time.sleep(0.01)
    assert after <= before, f"{before} threads became {after}"
    check(call, model, 5)
    return "right"


def fork_in_the_middle(chance: random.Random) -> str:
    """A process is forked while other threads compile and call. The child calls what is compiled,
    and compiles more."""
    torch.set_num_threads(2)
    model, stop = new_model(chance), threading.Event()
    call = compiled(model, "direct", 3)
    check(call, model, 3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        try:
            with torch.no_grad():
                while not stop.is_set():
                    whole(mine, "direct")
                    check(call, model, mine.randrange(2, 12))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(chance.randrange(10**9),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            time.sleep(chance.uniform(0.0, 0.3))

            def forked() -> None:
                faulthandler.dump_traceback_later(_FORKED - 5, exit=False)
                call(torch.randn(3, 24))  # ours; eager's threads hang in a forked process
                torch.set_num_threads(1)
                check(call, model, 3)
                whole(chance, chance.choice(WAYS))

            code = _waited(child(forked), _FORKED)
            assert code == 0, f"the child of a fork ended with {code}"
            check(call, model, 3)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return "right"


FAULTS: dict[str, Callable[[random.Random], str]] = {
    "little memory": little_memory,
    "signals": signals,
    "exiting threads": exiting_threads,
    "fork in the middle": fork_in_the_middle,
}


# ---- processes ----


def _waited(pid: int, seconds: float) -> int:
    """The exit code of a process, negative for a signal; one that hangs is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _HUNG


def once(name: str, seed: int) -> str:
    """What came of a fault in a process of its own; AssertionError where it ended badly."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(reader, "rb") as outcome:
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            _inside(name, seed, writer)
        os.close(writer)
        code = _waited(pid, _TIMEOUT)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        if FAULTS[name] is signals and code == -signal.SIGABRT and _TORCH_ABORTS in said:
            return "ended by torch"
        assert code == 0, f"{name}, seed {seed}: the process ended with {code}\n{said}"
        return outcome.read().decode()


def _inside(name: str, seed: int, writer: int) -> NoReturn:
    """Do it in this process, write what came of it, and end."""
    code = _WRONG
    try:
        torch.manual_seed(seed)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            os.write(writer, FAULTS[name](random.Random(seed)).encode())
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def prepare() -> None:
    """Load what forked processes need, and start no threads."""
    torch.set_num_threads(1)  # a forked process has none of the others
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for way in WAYS:
            whole(random.Random(0), way)


def run(counts: dict[str, int], seed: int = 0) -> dict[str, Counter[str]]:
    """All faults, so often each; what came of them."""
    threads = torch.get_num_threads()
    prepare()
    found: dict[str, Counter[str]] = {}
    try:
        for name, count in counts.items():
            chance = random.Random(f"{seed} {name}")
            found[name] = Counter(once(name, chance.randrange(10**9)) for _ in range(count))
            print(f"{name:20s} {dict(found[name])}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="processes at bad moments")
    parser.add_argument("--count", type=int, default=40, help="of each fault")
    parser.add_argument("--only", choices=FAULTS, nargs="*", default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run(dict.fromkeys(given.only, given.count), given.seed)
    print("every result was right, or refused, and right again afterwards")


if __name__ == "__main__":
    main()
