"""Products of many rows for the tensor cores of a GPU, with data and what should come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuda_cases import Work, given, random, wide
from torchair.codegen.cuda.hopper import STEP
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.matmul import matmul
from torchair.codegen.cuda.matmul.forms import MatmulForm
from torchair.codegen.loops import Access, Expr, Nest, Store, axis, cast, const, load, op
from torchair.codegen.requests import MatMul, Product
from torchair.codegen.sizes import Element, SizeArgument
from torchair.codegen.target import Kernel, Launch

A, B, SCRATCH, OUT, BIAS, MORE, SCALE, SECOND, FIRST_SIZE = range(9)  # words

TRUNCATED = 2.0**-23
"""What tensor cores may lose of a sum in each step, over the sum: they drop digits and do not
round, so that the losses of all steps add up."""


@dataclass(frozen=True)
class Data:
    """What epilogues read, in float64; rows of all products one after the other."""

    bias: np.ndarray
    more: np.ndarray
    scale: np.ndarray


Values = Callable[[np.ndarray, Data], Sequence[np.ndarray]]


def _torch(function: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> np.ndarray:
    return function(torch.from_numpy(x)).numpy()


def _ramp(x: np.ndarray) -> np.ndarray:
    rows, columns = x.shape
    return np.arange(rows)[:, None] - np.arange(columns)


@dataclass(frozen=True)
class EpilogueCase:
    """Stored values of a nest, from the loads of its operands, and what they should be."""

    stored: Callable[[Expr, Expr, Expr, Expr], Sequence[Expr]]  # result, bias, more, scale
    values: Values


EPILOGUES: dict[str, EpilogueCase] = {
    "plain": EpilogueCase(lambda x, bias, more, scale: [x], lambda x, d: [x]),
    "gelu": EpilogueCase(
        lambda x, bias, more, scale: [Expr("gelu", "f32", (op("add", x, bias),))],
        lambda x, d: [_torch(torch.nn.functional.gelu, x + d.bias)],
    ),
    "residual": EpilogueCase(
        lambda x, bias, more, scale: [op("add", op("add", x, bias), more)],
        lambda x, d: [x + d.bias + d.more],
    ),
    "scaled": EpilogueCase(
        lambda x, bias, more, scale: [op("mul", x, scale), op("add", x, bias)],
        lambda x, d: [x * d.scale[:, None], x + d.bias],
    ),
    "triangle": EpilogueCase(  # the positions of a result decide
        lambda x, bias, more, scale: [
            op(
                "where",
                op("ge", axis(0), axis(1)),
                x,
                op("mul", cast(op("sub", axis(0), axis(1)), "f32"), const(1.0, "f32")),
            )
        ],
        lambda x, d: [np.where(_ramp(x) >= 0, x, _ramp(x))],
    ),
}


@dataclass(frozen=True)
class MatmulCase:
    """A product of A[batch, m, k] and B[batch, k, n], each stored along the sum or across it."""

    m: int
    n: int
    k: int
    form: MatmulForm
    epilogue: str = "plain"
    dtype: Element = "bf16"
    out: Element | None = None
    batch: int = 1
    turned: str = ""  # which of "ab" are stored across the sum
    shared: bool = False  # one B for all products
    shifts: tuple[tuple[int, int], ...] = ()  # bytes that operands are moved by
    counted: bool = False  # m and n are words
    padded: int = 0  # elements behind each row of A and B
    ahead: bool = False  # B is constant, and loaded before the launch before this one ends

    def __str__(self) -> str:
        names = [f"{self.batch}x{self.m}x{self.n}x{self.k}", str(self.form), self.epilogue]
        names += [self.dtype, *([self.out] if self.out else [])]
        names += [f"turned_{self.turned}"] if self.turned else []
        names += [x for x in ("shared", "counted", "ahead") if getattr(self, x)]
        names += [f"padded{self.padded}"] if self.padded else []
        names += [f"{k}+{far}" for k, far in self.shifts]
        return "-".join(names)

    @property
    def matmul(self) -> MatMul:
        """What is asked for."""
        m = SizeArgument(FIRST_SIZE) if self.counted else self.m
        n = SizeArgument(FIRST_SIZE + 1) if self.counted else self.n
        (rows_a, far_a), (rows_b, far_b) = self._stored()
        a = (rows_a * far_a, 1, far_a) if "a" in self.turned else (rows_a * far_a, far_a, 1)
        b = (rows_b * far_b, far_b, 1) if "b" in self.turned else (rows_b * far_b, 1, far_b)
        if self.batch == 1:
            a, b = (0, *a[1:]), (0, *b[1:])
        if self.shared:
            b = (0, *b[1:])
        constant = "nk" if self.ahead else ""
        return MatMul(self.dtype, self.batch, m, n, self.k, a, b, constant=constant)

    def _stored(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows in memory and the distance between them, of A and of B."""
        a = (self.k, self.m) if "a" in self.turned else (self.m, self.k)
        b = (self.k, self.n) if "b" in self.turned else (self.n, self.k)
        return (a[0], a[1] + self.padded), (b[0], b[1] + self.padded)

    def product(self) -> Product:
        """The request."""
        dtype, out, far = self.dtype, self.out or self.dtype, self.matmul.n
        epilogue = EPILOGUES[self.epilogue]
        bias = load(Access(BIAS, dtype, (0, 1)))
        more = load(Access(MORE, dtype, (far, 1)))
        scale = load(Access(SCALE, "f32", (1, 0)))
        values = epilogue.stored(given(0), bias, more, scale)
        words: list[tuple[int, Element]] = [(OUT, out), (SECOND, "f32")]
        stores = [
            Store(Access(word, kind, (far, 1)), value)
            for (word, kind), value in zip(words, values, strict=False)
        ]
        rows = self.matmul.m if self.batch == 1 else self.batch * self.m
        return Product(self.matmul, Nest((rows, self.matmul.n), tuple(stores)))

    def generate(self, gpu: Gpu) -> tuple[Kernel, Launch]:
        """The kernel and its launch."""
        return matmul(self.product(), gpu, form=self.form, early=self.ahead)

    def work(self, gpu: Gpu) -> Work:
        """The kernel and its data."""
        m, n, k, dtype, out = self.m, self.n, self.k, self.dtype, self.out or self.dtype
        rows = self.batch * m
        stored = self._stored()
        batches = (self.batch, 1 if self.shared else self.batch)
        shapes = [(b, *s) for b, s in zip(batches, stored, strict=True)]
        memory = [
            random(shapes[0], dtype, 0), random(shapes[1], dtype, 1), random((1,), dtype, 2),
            random((rows, n), out, 3), random((n,), dtype, 4), random((rows, n), dtype, 5),
            random((rows,), "f32", 6), random((rows, n), "f32", 7),
        ]  # fmt: skip
        numbers = [m, n] if self.counted else []
        made = Work(*self.generate(gpu), memory, numbers, dict(self.shifts))
        a = wide(memory[A], dtype).reshape(shapes[0])
        b = wide(memory[B], dtype).reshape(shapes[1])
        a = a[..., :m].transpose(0, 2, 1) if "a" in self.turned else a[..., :k]
        b = b[..., :n] if "b" in self.turned else b[..., :k].transpose(0, 2, 1)
        data = Data(
            *(wide(memory[x], d) for x, d in ((BIAS, dtype), (MORE, dtype), (SCALE, "f32")))
        )
        data = Data(data.bias.reshape(-1), data.more.reshape(rows, n), data.scale.reshape(-1))
        found = EPILOGUES[self.epilogue].values((a @ b).reshape(rows, n), data)
        made.expected = dict(zip((OUT, SECOND), found, strict=False))
        made.dtypes = {OUT: out, SECOND: "f32"}
        made.slack = TRUNCATED * self.k / STEP
        return made


ONE = MatmulForm(64, 1, 1, 3)
"""A tile of 64 rows and 64 columns: the smallest."""
TWO = MatmulForm(128, 2, 1, 2)
TALL = MatmulForm(64, 1, 2, 2)
TURNS = MatmulForm(64, 2, 1, 3, alternate=True)
SPLIT = MatmulForm(64, 1, 1, 3, split=2)
FEW = MatmulForm(64, 1, 1, 3, few=16)
SMALL_MATMULS = [
    MatmulCase(64, 64, 256, SPLIT),
    MatmulCase(70, 72, 200, SPLIT, "gelu"),
    MatmulCase(20, 64, 64, SPLIT, "residual"),  # a block without a step
    MatmulCase(100, 136, 520, MatmulForm(64, 2, 1, 2, split=4, lines=2), "residual", batch=2),
    MatmulCase(64, 128, 600, MatmulForm(128, 1, 1, 4, split=8)),
    MatmulCase(64, 192, 200, SPLIT, "gelu"),  # more tiles than clusters: stages are used again
    MatmulCase(130, 72, 264, MatmulForm(64, 2, 1, 3, split=2), "residual", turned="b"),
    MatmulCase(136, 128, 264, MatmulForm(64, 2, 1, 3, split=2), "gelu", "f16", turned="a"),
    MatmulCase(16, 128, 256, FEW),
    MatmulCase(13, 72, 200, FEW, "gelu"),
    MatmulCase(9, 136, 264, MatmulForm(64, 1, 1, 2, lines=2, few=16), "residual", "f16"),
    MatmulCase(3, 72, 200, MatmulForm(64, 1, 1, 3, few=8), "residual", turned="b"),
    MatmulCase(13, 72, 400, MatmulForm(64, 1, 1, 2, lines=2, few=16, split=2), "gelu", batch=3),
    MatmulCase(16, 256, 712, MatmulForm(64, 1, 1, 3, few=16, split=4), "residual", turned="b"),
    MatmulCase(100, 72, 136, MatmulForm(64, 2, 1, 2, few=104), "gelu"),
    MatmulCase(12, 136, 264, MatmulForm(64, 2, 1, 3, alternate=True, few=16), "residual"),
    MatmulCase(20, 48, 200, MatmulForm(48, 1, 1, 3, lines=2), "residual"),
    MatmulCase(72, 80, 136, MatmulForm(80, 1, 1, 2, lines=2), "gelu", turned="a"),
    MatmulCase(9, 24, 136, MatmulForm(8, 1, 1, 4), "gelu"),
    MatmulCase(200, 72, 200, TURNS, "gelu"),  # warpgroups that take turns
    MatmulCase(64, 64, 72, TURNS),
    MatmulCase(70, 136, 136, MatmulForm(64, 2, 2, 2, alternate=True), "residual", batch=3),
    MatmulCase(64, 64, 64, ONE, ahead=True),  # fewer steps than stages
    MatmulCase(70, 200, 520, ONE, "gelu", ahead=True),  # more, and tiles than blocks
    MatmulCase(13, 200, 520, MatmulForm(64, 1, 1, 2, lines=2, few=16, split=2), ahead=True),
    MatmulCase(100, 136, 264, TURNS, "residual", batch=2, ahead=True),
    MatmulCase(64, 64, 64, ONE),
    MatmulCase(64, 64, 320, ONE),  # the ring turns
    MatmulCase(70, 136, 72, ONE, "gelu"),  # every size ends within a tile
    MatmulCase(1, 8, 8, ONE),
    MatmulCase(70, 134, 72, ONE, "residual", "f16"),  # rows of pairs, but of no 16 bytes
    MatmulCase(70, 67, 72, ONE, "residual"),  # rows end with half a pair
    MatmulCase(66, 64, 72, ONE, "gelu", shifts=((OUT, 2), (BIAS, 2))),
    MatmulCase(66, 64, 72, ONE, "residual", shifts=((OUT, 4), (MORE, 8))),
    MatmulCase(130, 136, 72, TWO, "scaled", out="f32"),
    MatmulCase(130, 68, 72, TALL, "scaled"),
    MatmulCase(72, 72, 72, ONE, "triangle"),
    MatmulCase(72, 67, 72, ONE, "triangle"),
    MatmulCase(72, 136, 72, ONE, "gelu", turned="a"),
    MatmulCase(72, 136, 72, TWO, "gelu", turned="b"),
    MatmulCase(136, 264, 72, MatmulForm(256, 2, 1, 2), "gelu", turned="ab"),
    MatmulCase(40, 72, 72, ONE, "residual", batch=3, turned="b"),
    MatmulCase(40, 72, 72, ONE, "residual", batch=2, turned="a", shared=True),
    MatmulCase(70, 136, 72, ONE, "residual", counted=True),
    MatmulCase(70, 67, 72, ONE, "gelu", counted=True),
    MatmulCase(70, 136, 72, ONE, padded=8),
    MatmulCase(8, 64, 136, ONE, padded=8, turned="ab"),
]
_LARGE = MatmulForm(256)
LARGE_MATMULS = [
    MatmulCase(1024, 1024, 1024, _LARGE),
    MatmulCase(1000, 1032, 1000, _LARGE, "gelu"),
    MatmulCase(3000, 4104, 2056, _LARGE, "residual", "f16"),
    MatmulCase(3001, 4099, 2056, _LARGE, "residual"),
    MatmulCase(1024, 2048, 1024, MatmulForm(128, blocks=2), "scaled", counted=True),
    MatmulCase(300, 520, 264, MatmulForm(192), "triangle"),
    MatmulCase(300, 520, 264, _LARGE, "gelu", shifts=((A, 2), (B, 6), (OUT, 2))),
    MatmulCase(304, 520, 264, MatmulForm(128, stages=6), "gelu", turned="ab", shifts=((A, 8),)),
    *(MatmulCase(264, 520, 1032, _LARGE, "gelu", turned=t, batch=3) for t in ("", "a", "b", "ab")),
]
