"""Batch-invariant numerics on a GPU: a row has the same bits alone and in a batch. Kernels on the
machine of numpy, and models on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from cuda_tools import HOPPER, on_machine
from nest_plain import as_words, into_memory
from torchair.codegen.cuda.jit import Gpu, describe
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.loops import Access, Expr, Nest, Store, const, load, op, reduce, simplify

FEW = describe((9, 0), 3)
"""A GPU with three multiprocessors."""
MOST = 9


# ---- reductions, norms, softmax


@dataclass(frozen=True)
class RowsCase:
    """What is computed of the elements of each row of a batch."""

    kind: str  # sums, softmax or norm
    inner: tuple[int, ...]  # the dims of a row
    reduced: tuple[int, ...] = (-1,)  # those of them that are reduced
    dtype: str = "f32"
    pad: int = 0  # elements behind each row
    shift: int = 0  # bytes that the rows are moved by

    def __str__(self) -> str:
        more = f"+{self.pad}" * bool(self.pad) + f"@{self.shift}" * bool(self.shift)
        sizes = "x".join(map(str, self.inner))
        return f"{self.kind}-{sizes}-over{self.reduced}-{self.dtype}{more}"

    def nest(self, batch: int) -> Nest:
        """Word 0 are the rows, 1 sums, 2 what has as many elements as the rows."""
        rank, size = len(self.inner), math.prod(self.inner)
        along = tuple(math.prod(self.inner[k + 1 :]) for k in range(rank))
        reduced = frozenset(1 + k % rank for k in self.reduced)
        kept = [n for k, n in enumerate(self.inner, 1) if k not in reduced]
        far, sums = math.prod(kept), []
        for k in range(1, rank + 1):
            sums.append(0 if k in reduced else math.prod(kept[len([s for s in sums if s]) + 1 :]))
        x = load(Access(0, self.dtype, (size + self.pad, *along)))
        total, whole = FORMULAS[self.kind](x, math.prod(self.inner[k] for k in self.reduced))
        stores = [Store(Access(1, "f32", (far, *sums)), total)]
        if whole is not None:
            stores.append(Store(Access(2, self.dtype, (size, *along)), whole))
        return simplify(Nest((batch, *self.inner), tuple(stores), reduced))

    def run(
        self, rows: slice, gpu: Gpu = FEW, invariant: bool = True, counted: bool = False
    ) -> list[np.ndarray]:
        """Both results of some rows, as bits. The size of the batch may be a word."""
        size = math.prod(self.inner)
        pick = np.random.default_rng(7)
        all_ = pick.standard_normal((MOST, size + self.pad)).astype(np.float32)
        x = np.ascontiguousarray(into_memory(all_, self.dtype)[rows])
        batch = len(x)
        kept = size // math.prod(self.inner[k] for k in self.reduced)
        memory = [x, np.zeros(batch * kept, np.float32), np.zeros(batch * size, x.dtype)]
        nest, words = as_words(self.nest(batch), len(memory), lambda n: counted and n == batch)
        kernel, launch = print_nest(
            nest, gpu, scratch=len(memory) + len(words), batch_invariant=invariant
        )
        shifts = {0: self.shift}
        found = on_machine((kernel, launch, words), gpu, memory, shifts=shifts)
        return [np.ascontiguousarray(m.reshape(batch, -1)).view(np.uint8) for m in found[1:]]


def _softmax(x: Expr, count: int) -> tuple[Expr, Expr]:
    power = Expr("exp", "f32", (op("sub", x, reduce("max", x)),))
    total = reduce("sum", power)
    return total, op("div", power, total)


def _norm(x: Expr, count: int) -> tuple[Expr, Expr]:
    mean = op("mul", reduce("sum", x), const(1 / count, "f32"))
    far = op("sub", x, mean)
    variance = op("mul", reduce("sum", op("mul", far, far)), const(1 / count, "f32"))
    scale = Expr("rsqrt", "f32", (op("add", variance, const(1e-5, "f32")),))
    return variance, op("mul", far, scale)


FORMULAS: dict[str, Callable[[Expr, int], tuple[Expr, Expr | None]]] = {
    "sums": lambda x, count: (reduce("sum", op("mul", x, x)), None),
    "softmax": _softmax,
    "norm": _norm,
}
ROWS = [
    RowsCase("sums", (7,)),
    RowsCase("sums", (10_000,)),
    RowsCase("sums", (768,), dtype="bf16", shift=2),
    RowsCase("sums", (768,), pad=1),
    RowsCase("softmax", (100,)),
    RowsCase("softmax", (300,), pad=3),
    RowsCase("softmax", (2051,), dtype="bf16"),
    RowsCase("norm", (768,), dtype="bf16"),
    RowsCase("norm", (4096,), dtype="f16", pad=2),
    RowsCase("sums", (12, 40), (0,)),  # few terms, each thread alone
    RowsCase("sums", (100, 40), (0,), pad=1),
    RowsCase("norm", (70, 24), (0,), "bf16", shift=2),
    RowsCase("sums", (40, 3, 12), (0, 2)),
    RowsCase("sums", (200, 3, 48), (0, 2), pad=1),
    RowsCase("softmax", (16, 2, 600), (0, 2), "bf16", pad=1),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_sums_of_a_row_do_not_depend_on_the_batch(case: RowsCase) -> None:
    among = case.run(slice(MOST))
    assert among[0].any()
    for rows, gpu, counted in (
        (slice(1), FEW, False),
        (slice(8, 9), HOPPER, False),
        (slice(3, 5), FEW, True),
    ):
        for found, expected in zip(case.run(rows, gpu, True, counted), among, strict=True):
            np.testing.assert_array_equal(found, expected[rows], f"rows {rows}")


@pytest.mark.parametrize("case", [ROWS[1], ROWS[3]], ids=str)
def test_usual_sums_of_a_row_depend_on_the_batch(case: RowsCase) -> None:
    among = case.run(slice(MOST), invariant=False)[0]
    alone = [case.run(slice(k, k + 1), invariant=False)[0] for k in range(MOST)]
    assert not np.array_equal(among, np.concatenate(alone))
