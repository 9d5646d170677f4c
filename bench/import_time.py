"""Milliseconds that ``import torchair`` costs on top of ``import torch``, in fresh processes."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

TARGET = 150.0
CODE = """
import time
import torch
start = time.perf_counter()
import torchair
print((time.perf_counter() - start) * 1e3)
"""


def measure() -> float:
    """One import in one fresh interpreter."""
    source = Path(__file__).resolve().parent.parent / "src"
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes")
    runs = parser.parse_args().runs
    measure()  # writes the byte code, which later imports read
    times = []
    for run in range(runs):
        times.append(measure())
        print(f"run {run + 1} of {runs}: {times[-1]:.1f} ms", flush=True)
    median = statistics.median(times)
    verdict = "met" if median <= TARGET else "missed"
    print(f"import torchair after torch: median {median:.1f} ms (target {TARGET:.0f}: {verdict})")


if __name__ == "__main__":
    main()
