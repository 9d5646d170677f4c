"""`make matrix`: a slice of the tests with other versions of Python, torch and llvmlite.

Each pair of Python and torch has a virtual environment in `.venv-matrix/` (torch takes gigabytes),
in which llvmlite is exchanged. What cannot be had is in the table too, with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
LLVMLITES = ("0.47.0", "0.48.0", "0.49.0", "0.50.0")
NUMBA = {"0.47.0": "numba==0.65.1"}
"""Beside which llvmlite there is a numba that wants it, to be used in the same process."""
TESTS = (
    "graph/test_torch_private.py",
    "graph/test_llvm.py",
    "kernel/test_native_matmul.py",
    "graph/test_backend.py",
)
SPACE = 12 << 30  # bytes that must be free to install torch
SECONDS = 1800  # that one combination may take


@dataclass(frozen=True)
class Combination:
    """Versions that are tried together."""

    python: str
    torch: str
    llvmlite: str

    @property
    def folder(self) -> Path:
        """The virtual environment of this Python and torch."""
        return FOLDER / f"py{self.python}-torch{self.torch}"


USUAL = Combination("3.11", "2.13.0", "0.50.0")


class NotAvailable(Exception):
    """Why a combination cannot be tried here."""


def combinations(whole: bool) -> Iterator[Combination]:
    """The oldest of all; each torch and llvmlite beside the usual ones, each Python beside the
    newest of both. Or everything."""
    if whole:
        yield from (Combination(p, t, v) for p in PYTHONS for t in TORCHES for v in LLVMLITES)
        return
    yield Combination(PYTHONS[0], TORCHES[0], LLVMLITES[0])
    for torch in TORCHES:
        for llvmlite in LLVMLITES if torch == USUAL.torch else [USUAL.llvmlite]:
            yield Combination(USUAL.python, torch, llvmlite)
    for python in PYTHONS[1:]:
        yield Combination(python, TORCHES[-1], LLVMLITES[-1])


def interpreter(version: str) -> str:
    """A Python of this version: of the path, or one that pyenv has."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *home.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, map(str, filter(None, [*found, sys.executable]))):
        said = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if said.stdout.startswith(f"Python {version}."):
            return candidate
    raise NotAvailable(f"no python{version} on this machine")


def install(wanted: Combination) -> Path:
    """The Python of a virtual environment with these versions."""
    python = wanted.folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter(wanted.python), "-m", "venv", wanted.folder], check=True)
    have = _installed(python)
    if have.get("torch", "").partition("+")[0] != wanted.torch:
        free = shutil.disk_usage(FOLDER).free
        if free < SPACE:
            raise NotAvailable(f"{free >> 30} GiB of disk are free, torch needs {SPACE >> 30}")
        _pip(python, f"torch=={wanted.torch}")
    _pip(python, "--quiet", "-e", str(ROOT), "pytest", "expecttest", f"llvmlite=={wanted.llvmlite}")
    if wanted.llvmlite in NUMBA:
        _pip(python, "--quiet", NUMBA[wanted.llvmlite])
    elif "numba" in have:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", "numba"], check=True)
    return python


def _installed(python: Path) -> dict[str, str]:
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True
    )
    return dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        raise NotAvailable((errors or done.stderr.splitlines() or ["pip failed"])[-1])


def tried(wanted: Combination, tests: list[str]) -> str:
    """What came of a combination, in a few words."""
    try:
        python = install(wanted)
    except NotAvailable as error:
        return f"not available: {error}"
    log = wanted.folder.with_name(f"{wanted.folder.name}-llvmlite{wanted.llvmlite}.log")
    cache = wanted.folder / "cache"
    environment = {**os.environ, "TORCHAIR_CACHE_DIR": str(cache)}
    files = [str(ROOT / "tests" / t) for t in tests]
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not cuda and not slow", "-rf"]
    started = time.perf_counter()
    with log.open("w") as out:
        try:
            smoke = [python, ROOT / "examples" / "demo.py"]
            told = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment, "cwd": FOLDER}
            if subprocess.run(smoke, timeout=SECONDS, **told).returncode:
                return f"the demo FAILED, see {log.relative_to(ROOT)}"
            command = [python, "-m", "pytest", *options, "--override-ini=addopts=", *files]
            subprocess.run(command, timeout=SECONDS, **{**told, "cwd": ROOT})
        except subprocess.TimeoutExpired:
            return f"FAILED: more than {SECONDS} s, see {log.relative_to(ROOT)}"
    lines = log.read_text().splitlines()
    summary = next((x for x in reversed(lines) if re.search(r"\d+ (passed|failed|error)", x)), "")
    counts = " ".join(re.findall(r"\d+ (?:passed|failed|errors?)", summary))
    if "passed" not in counts or "failed" in counts or "error" in counts:
        return f"FAILED ({counts or 'the process ended'}), see {log.relative_to(ROOT)}"
    return f"{counts}, {time.perf_counter() - started:.0f} s"


def main() -> int:
    """Try combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every combination")
    for axis in ("python", "torch", "llvmlite"):
        parser.add_argument(f"--{axis}", help=f"only these versions of {axis}, by commas")
    parser.add_argument("--tests", default=",".join(TESTS), help="files of tests, by commas")
    parser.add_argument("--remove", action="store_true", help="remove each environment after use")
    options = parser.parse_args()
    chosen = [
        c
        for c in combinations(options.all)
        if all(
            getattr(options, axis) is None or getattr(c, axis) in getattr(options, axis).split(",")
            for axis in ("python", "torch", "llvmlite")
        )
    ]
    FOLDER.mkdir(exist_ok=True)
    rows: list[tuple[Combination, str]] = []
    for k, wanted in enumerate(chosen):
        rows.append((wanted, tried(wanted, options.tests.split(","))))
        print(_row(*rows[-1]), flush=True)
        later = {c.folder for c in chosen[k + 1 :]}
        if options.remove and wanted.folder not in later:
            shutil.rmtree(wanted.folder, ignore_errors=True)
    print("\n| Python | torch | llvmlite | result |\n|---|---|---|---|")
    for row in rows:
        print(_row(*row))
    return 1 if any("FAILED" in result for _, result in rows) else 0


def _row(c: Combination, result: str) -> str:
    return f"| {c.python} | {c.torch} | {c.llvmlite} | {result} |"


if __name__ == "__main__":
    sys.exit(main())
