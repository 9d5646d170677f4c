"""Matrix products: our kernels on packed and unpacked weights against F.linear, interleaved."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from common import console, interleaved, ratio, table
from torchair.codegen.cpu import driver
from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.matmul.kernel import B, product
from torchair.codegen.requests import MatMul, Product, stored
from torchair.codegen.target import Kernel

ROWS = (1, 4, 16, 128, 512)
SHAPES = ((768, 768), (768, 3072), (3072, 768), (768, 32000))
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Program:
    """One kernel as a program of the driver: a call runs it on all threads."""

    def __init__(self, library: Library, kernel: Kernel, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors  # they must outlive the program
        self.words = (ctypes.c_int64 * len(tensors))(*(t.data_ptr() for t in tensors))
        self.barrier = (ctypes.c_int64 * 16)()
        step = (library.address(kernel), ctypes.addressof(self.words), 0)
        self.steps = (ctypes.c_int64 * driver.STEP)(*step)
        header = [ctypes.addressof(self.steps), 1, torch.get_num_threads(), 0, 0, 0]
        header += [ctypes.addressof(self.barrier), 0]
        self.header = (ctypes.c_int64 * driver.HEADER)(*header)
        self.address = ctypes.addressof(self.header)
        self.entry = driver.entry_point(library)

    def __call__(self) -> None:
        self.entry(self.address)


def linear(library: Library, a: torch.Tensor, weight: torch.Tensor, packed: bool) -> Program:
    """Our kernel for F.linear(a, weight)."""
    (m, k), n = a.shape, weight.shape[0]
    dtype = next(name for name, kind in TYPES.items() if kind == a.dtype)
    spec = MatMul(dtype, 1, m, n, k, (0, k, 1), (0, 1, k), "nk" if packed else "")
    request = Product(spec, stored((1, m, n), (0, n, 1), dtype, 3))
    code = product(request, library.machine, "matmul")
    room = torch.empty(code.scratch * torch.get_num_threads(), dtype=torch.uint8)
    b = code.pack[B](weight) if B in code.pack else weight
    made = Program(library, code.kernel, [a, b, room, torch.empty(m, n, dtype=a.dtype)])
    made()
    error = (made.tensors[3].double() - F.linear(a.double(), weight.double())).abs().max()
    assert error < 0.02 * k**0.5, f"wrong by {error}"
    return made


def measure(library: Library, dtype: str, m: int, shape: tuple[int, int]) -> dict[str, float]:
    """Seconds of each contestant."""
    k, n = shape
    a, weight = torch.randn(m, k).to(TYPES[dtype]), torch.randn(n, k).to(TYPES[dtype])
    calls: dict[str, Callable[[], object]] = {
        "packed": linear(library, a, weight, True),
        "unpacked": linear(library, a, weight, False),
        "torch": lambda: F.linear(a, weight),
    }
    return interleaved(calls, windows=12, seconds=0.03)


def line(name: str, times: dict[str, float], operations: int, read: int) -> list[str]:
    """A row of the table."""
    best = min(times["packed"], times["unpacked"])
    return [
        name,
        *(f"{times[x] * 1e6:.0f}" for x in ("packed", "unpacked", "torch")),
        ratio(times, "packed", "torch"),
        ratio(times, "unpacked", "torch"),
        f"{operations / best / 1e9:.0f}",
        f"{read / best / 1e9:.0f}",
    ]


def main() -> None:
    """Print one table for each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    quick = parser.parse_args().quick
    library = Library()
    columns = ["M x K x N", "packed us", "unpacked us", "torch us", "packed", "unpacked"]
    for dtype in TYPES:
        made = table(f"{dtype}, {torch.get_num_threads()} threads", [*columns, "GFLOP/s", "GB/s"])
        for k, n in SHAPES[:2] if quick else SHAPES:
            for m in (1, 16, 128) if quick else ROWS:
                times = measure(library, dtype, m, (k, n))
                read = k * n * TYPES[dtype].itemsize
                made.add_row(*line(f"{m} x {k} x {n}", times, 2 * m * n * k, read))
        console.print(made)


if __name__ == "__main__":
    main()
