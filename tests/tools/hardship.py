"""What happens to files at bad moments: writers that are killed, two at once, flipped bytes, a full
disk, a folder that cannot be written. Results must be right, or for a model file there may be an
error that says so.

    python tests/tools/hardship.py --kills 200 --flips 1000
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import torchair
from torchair.codegen import kernel_cache
from torchair.codegen.cpu.target import cpu
from torchair.errors import TorchairError
from torchair.inference import cache_compile
from torchair.serde.air import read_air, write_air

X = torch.linspace(-1, 1, 48).reshape(3, 16)


class Net(nn.Module):
    """Small, with a weight that is large enough to stay in a mapped file, and a state."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Linear(16, 80)
        with torch.no_grad():
            for p in self.up.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
        self.register_buffer("calls", torch.zeros(1100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.softmax(torch.tanh(self.up(x)) * self.calls[:80], -1)


def check(call: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The first result of a model that was just made is the right one."""
    with torch.no_grad():
        torch.testing.assert_close(call(X), Net()(X))
    return "right"


class Kernels:
    """Machine code by its hash, below `TORCHAIR_CACHE_DIR`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def produce(self) -> None:
        """Write all files anew."""
        kernel_cache.store().clear()
        self.use()

    def use(self) -> str:
        """Run what the files hold, as a process does that begins now."""
        kernel_cache._store.cache_clear()
        cpu.cache_clear()
        return check(torchair.compile(Net(), X))


class Methods:
    """Files of `cache_compile`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "methods"

    def produce(self) -> None:
        """As above."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.use()

    def use(self) -> str:
        """As above."""
        return check(cache_compile(Net().forward, cache_dir=str(self.folder), dynamic=False))


class Models:
    """A `.air` file. Damage may be an error; what loads is right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "models"
        torchair.dynamo_export(X, model=Net(), export_path=str(self.folder))
        self._graph = read_air(self.folder / "export.air")

    def produce(self) -> None:
        """As above."""
        write_air(self._graph, self.folder / "export.air")

    def use(self) -> str:
        """As above."""
        try:
            return check(torchair.load(self.folder / "export.air", check=True))
        except TorchairError:
            return "refused"


Subject = Kernels | Methods | Models
SUBJECTS: tuple[type[Subject], ...] = (Kernels, Methods, Models)


def child(work: Callable[[], object]) -> int:
    """A process that does something and nothing else; its exit status tells whether it could."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(subject: Subject, count: int, chance: random.Random) -> Counter[str]:
    """Writers that end at a random moment."""
    found: Counter[str] = Counter()

    def forever() -> None:
        while True:
            subject.produce()

    for _ in range(count):
        pid = child(forever)
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        status(pid)
        found[subject.use()] += 1
    return found


def flipped(subject: Subject, count: int, chance: random.Random) -> Counter[str]:
    """One bit of one file is another one."""
    subject.produce()
    found: Counter[str] = Counter()
    for _ in range(count):
        files = [p for p in subject.folder.rglob("[!.]*") if p.is_file() and p.suffix != ".pbtxt"]
        path = chance.choice(sorted(files))  # not what killed writers have left
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        found[subject.use()] += 1
        path.write_bytes(whole)
    return found


def at_once(subject: Subject, count: int, chance: random.Random) -> Counter[str]:
    """Two processes write the same, and this one reads."""
    found: Counter[str] = Counter()
    for _ in range(count):
        pids = [child(subject.produce) for _ in range(2)]
        found[subject.use()] += 1
        if any([status(pid) for pid in pids]):
            raise AssertionError("a writer failed")
        found[subject.use()] += 1
    return found


def full(subject: Subject, count: int, chance: random.Random) -> Counter[str]:
    """No file may grow beyond some bytes: writes end in the middle with an error of the system."""
    found: Counter[str] = Counter()
    for _ in range(count):
        most = chance.choice((0, 1, 100, 1000, 3000))

        def work(most: int = most) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            try:
                subject.produce()
            except RuntimeError as e:  # of an export, whose file is what it is for
                if not isinstance(subject, Models) or "cannot write" not in str(e):
                    raise

        if status(child(work)):
            raise AssertionError(f"a writer failed with {most} bytes of room")
        found[subject.use()] += 1
    return found


def read_only(subject: Subject, count: int, chance: random.Random) -> Counter[str]:
    """Nothing may be written, and what is there be read. A user who may do all is not stopped by
    modes of folders; the calls that write are refused instead."""
    subject.produce()

    def work() -> None:
        def refuse(*given: object) -> None:
            raise OSError(30, "Read-only file system")

        for name in ("replace", "unlink", "mkdir", "rename", "utime"):
            setattr(os, name, refuse)
        import torchair.store

        torchair.store._write_new = refuse  # type: ignore[assignment]
        subject.use()

    found: Counter[str] = Counter()
    for _ in range(count):
        if status(child(work)):
            raise AssertionError("it failed where nothing can be written")
        found["right"] += 1
    return found


HARDSHIPS = {
    "killed writers": killed,
    "flipped bits": flipped,
    "two at once": at_once,
    "full disk": full,
    "read-only": read_only,
}


def run(counts: dict[str, int], seed: int = 0) -> dict[tuple[str, str], Counter[str]]:
    """All hardships for all kinds of files, so many of each; what came of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processes that are forked have none of the others
    found = {}
    before = os.environ.get("TORCHAIR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        os.environ["TORCHAIR_CACHE_DIR"] = str(Path(folder) / "kernels")
        try:
            for kind in SUBJECTS:
                place = Path(folder) / "kernels" if kind is Kernels else Path(folder)
                subject = kind(place)
                for name, count in counts.items():
                    chance = random.Random(f"{seed} {kind.__name__} {name}")
                    found[kind.__name__, name] = HARDSHIPS[name](subject, count, chance)
                    print(f"{kind.__name__:8s} {name:15s} {dict(found[kind.__name__, name])}")
                    sys.stdout.flush()
        finally:
            torch.set_num_threads(threads)
            os.environ.pop("TORCHAIR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHAIR_CACHE_DIR"] = before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="files at bad moments")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--others", type=int, default=20, help="of each other hardship")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    others = dict.fromkeys(HARDSHIPS, given.others)
    run({**others, "killed writers": given.kills, "flipped bits": given.flips}, given.seed)
    print("every result was right, or refused")


if __name__ == "__main__":
    main()
