"""Requests to the GPU generators with data and what should come out, in float64. The same cases run
on a GPU and, where they are small, on the machine of `ptx_machine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from nest_plain import from_memory, into_memory
from torchair.codegen.cuda.attention import AttentionForm, attention
from torchair.codegen.cuda.gemv import GemvForm, gemv
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.tiles import TileForm, packs_of
from torchair.codegen.loops import (
    Access,
    Expr,
    Nest,
    Store,
    cast,
    const,
    load,
    op,
    reduce,
    renumbered,
)
from torchair.codegen.requests import Attention, Joint, MatMul, Partner, Product, Weight
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Kernel, Launch

EXACT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-20}
"""What a result may differ from the true one, over the largest one."""
A, B, SCRATCH, OUT, MORE, SOURCE, GAIN, SECOND, COUNT = range(9)  # words of a product
Q_OUT, Q_MORE, Q_SOURCE, Q_GAIN, Q_SECOND = range(5, 10)  # ... with integers


@dataclass
class Work:
    """A kernel with its data: addresses come first among the words, then numbers."""

    kernel: Kernel
    launch: Launch
    memory: list[np.ndarray]
    numbers: list[int] = field(default_factory=list)
    shifts: dict[int, int] = field(default_factory=dict)  # bytes that an operand is moved by
    expected: dict[int, np.ndarray] = field(default_factory=dict)  # by operand, float64
    dtypes: dict[int, str] = field(default_factory=dict)
    slack: float = 0.0  # what a result may differ beside that, over the largest one

    def check(self, memory: list[np.ndarray]) -> None:
        """Compare what came out."""
        for k, true in self.expected.items():
            got = from_memory(memory[k], self.dtypes[k]).astype(np.float64)
            finite = np.isfinite(true)
            np.testing.assert_array_equal(got[~finite], true[~finite], f"operand {k}")
            largest = np.max(np.abs(true), where=finite, initial=1e-30)
            bound = (EXACT[self.dtypes[k]] + self.slack) * largest
            np.testing.assert_allclose(got[finite], true[finite], 0, bound, err_msg=f"operand {k}")


def given(k: int) -> Expr:
    return Expr("given", "f32", data=k)


def random(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal numbers as they are in memory."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return into_memory(x, dtype)


def wide(x: np.ndarray, dtype: str) -> np.ndarray:
    return from_memory(x, dtype).astype(np.float64)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return wide(into_memory(x.astype(np.float32), dtype), dtype)


# ---- products ----


@dataclass(frozen=True)
class ProductCase:
    """A product of m rows and a matrix of n rows of k elements each."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    epilogue: str = "plain"  # or bias, residual, gate (with a second matrix)
    norm: str = ""  # A is computed in the kernel: an "rms" norm, or "scaled" without one
    keep: bool = False  # ... and stored
    form: GemvForm | None = None
    shift: int = 0  # bytes that the matrix is moved by
    counted: bool = False  # n is a word
    padded: int = 0  # elements behind each row of the matrix
    early: bool = False

    def __str__(self) -> str:
        extra = [self.epilogue, *([self.norm] if self.norm else [])]
        extra += [x for x in ("keep", "counted", "early") if getattr(self, x)]
        form = ""
        if self.form:
            form = f"-{self.form.rows}x{self.form.split}x{self.form.warps}"
            form += f"{'-after' * (not self.form.ahead)}{'-shared' * (not self.form.in_registers)}"
        moved = f"+{self.shift}" if self.shift else ""
        return f"{self.m}x{self.n}x{self.k}-{self.dtype}-{'-'.join(extra)}{form}{moved}"

    def work(self, gpu: Gpu) -> Work:
        """The kernel and its data."""
        m, n, k, dtype = self.m, self.n, self.k, self.dtype
        second = n if self.epilogue == "gate" else 1
        memory = [
            random(shape, dtype, seed)
            for seed, shape in enumerate(
                [(m, k), (n, k + self.padded), (1,), (m, n), (m, n), (m, k), (k,), (second, k)]
            )
        ]
        kernel, launch = self.generate(gpu)
        made = Work(kernel, launch, memory, [n], {B: self.shift})
        a = wide(memory[A], dtype)
        if self.norm:
            a = wide(memory[SOURCE], dtype) * wide(memory[GAIN], dtype)
            if self.norm == "rms":
                squares = (wide(memory[SOURCE], dtype) ** 2).mean(1, keepdims=True)
                a = a / np.sqrt(squares + 1e-5)
            a = rounded(a, dtype)
        results = [a @ wide(memory[x], dtype)[:, :k].T for x in (B, SECOND)]
        out = EPILOGUES[self.epilogue][1](*results, wide(memory[MORE], dtype))
        made.expected[OUT] = out
        if self.norm:
            made.expected[A] = a if self.keep else wide(memory[A], dtype)
        made.dtypes = {A: dtype, OUT: dtype}
        return made

    @property
    def matmul(self) -> MatMul:
        """What is asked for."""
        m, n, k = self.m, SizeArgument(COUNT) if self.counted else self.n, self.k
        return MatMul(self.dtype, 1, m, n, k, (m * k, k, 1), (0, 1, k + self.padded), "nk")

    def generate(self, gpu: Gpu) -> tuple[Kernel, Launch]:
        """The kernel and its launch."""
        m, n, k, dtype = self.m, self.matmul.n, self.k, self.dtype
        value = EPILOGUES[self.epilogue][0](load(Access(MORE, dtype, (self.n, 1))))
        nest = Nest((m, n), (Store(Access(OUT, dtype, (self.n, 1)), value),))
        partner = Partner(SECOND, (0, 1, k)) if self.epilogue == "gate" else None
        prologue = PROLOGUES[self.norm](m, k, dtype)
        work = Joint(Product(self.matmul, nest), partner, prologue, self.keep)
        return gemv(work, gpu, form=self.form, early=self.early)


@dataclass(frozen=True)
class QuantisedCase:
    """A product of m rows and a matrix of n rows of k integers."""

    m: int
    n: int
    k: int
    bits: Literal[4, 8] = 8
    group: int = 0  # 0: one scale for a row
    offsets: str = ""
    dtype: str = "bf16"
    scales: str = "bf16"
    epilogue: str = "plain"
    norm: str = ""
    form: TileForm | None = None
    shift: int = 0  # bytes that A is moved by
    turned: bool = True  # the matrix is stored along the sum
    early: bool = False
    specials: tuple[float, ...] = ()  # in A, each in a row and a column of its own

    def __str__(self) -> str:
        names = [f"{self.m}x{self.n}x{self.k}-{self.bits}bits", self.dtype, self.scales]
        names += [str(x) for x in self.specials]
        names += [f"groups{self.group}"] if self.group else []
        names += [f"offsets{self.offsets}"] if self.offsets else []
        names += [self.epilogue, *([self.norm] if self.norm else [])]
        names += [f"+{self.shift}"] if self.shift else []
        names += [x for x in ("early",) if getattr(self, x)] + ["kn"] * (not self.turned)
        if self.form:
            names.append(f"{self.form.depth}x{self.form.split}x{self.form.warps}")
        return "-".join(names)

    @property
    def matmul(self) -> MatMul:
        """What is asked for."""
        m, n, k = self.m, self.n, self.k
        weight = Weight(self.bits, self.group or k, self.scales, self.offsets)
        b = (0, 1, k) if self.turned else (0, n, 1)
        layout: Literal["nk", "kn"] = "nk" if self.turned else "kn"
        return MatMul(self.dtype, 1, m, n, k, (m * k, k, 1), b, layout, weight)

    def generate(self, gpu: Gpu) -> tuple[Kernel, Launch]:
        """The kernel and its launch."""
        m, n, k, dtype = self.m, self.n, self.k, self.dtype
        more = load(Access(Q_MORE, dtype, (n, 1)))
        value = EPILOGUES[self.epilogue][0](more)
        nest = Nest((m, n), (Store(Access(Q_OUT, dtype, (n, 1)), value),))
        prologue = PROLOGUES[self.norm](m, k, dtype)
        if prologue is not None:
            words = {SOURCE: Q_SOURCE, GAIN: Q_GAIN}
            prologue = renumbered(prologue, lambda word: words.get(word, word))
        partner = Partner(Q_SECOND, (0, 1, k)) if self.epilogue == "gate" else None
        work = Joint(Product(self.matmul, nest), partner, prologue)
        return gemv(work, gpu, form=self.form, early=self.early)

    def _tables(self, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Integers, scales and offsets as kernels read them, and the matrix that they stand for."""
        pick, groups = np.random.default_rng(seed), self.k // (self.group or self.k)
        low, high = (-8, 8) if self.bits == 4 else (-128, 128)
        integers = pick.integers(low, high, (self.n, self.k)).astype(np.int8)
        integers[0, :2] = low, high - 1
        size = (0.2 if self.bits == 4 else 0.01) / np.sqrt(self.k)  # results are of about 1
        scales = into_memory(
            (size * pick.uniform(0.5, 1.5, (self.n, groups))).astype(np.float32), self.scales
        )
        shifts = pick.uniform(-8, 8, (self.n, groups)).astype(np.float32)
        if self.offsets == "i8":
            offsets = shifts.astype(np.int8)
        else:
            offsets = into_memory(shifts, self.offsets or "f32")
        whole = integers.astype(np.float64)
        size = self.group or self.k
        if self.offsets:
            kind = "f32" if self.offsets == "i8" else self.offsets
            added = from_memory(offsets.astype(np.float32) if kind == "f32" else offsets, kind)
            whole = whole + np.repeat(added.astype(np.float64), size, 1)
        whole = whole * np.repeat(wide(scales, self.scales), size, 1)
        packs = packs_of(self.matmul)
        given = [x if self.turned else x.T for x in (integers, scales, offsets)]
        types = ("i8", self.scales, self.offsets or "f32")
        tensors = [_tensor(x, t) for x, t in zip(given, types, strict=True)]
        made = [packs[w](t) if w in packs else t for w, t in zip((1, 3, 4), tensors, strict=True)]
        return [_bytes(t) for t in made], whole

    def work(self, gpu: Gpu) -> Work:
        """The kernel and its data."""
        m, n, k, dtype = self.m, self.n, self.k, self.dtype
        (b, scales, offsets), matrix = self._tables(1)
        gated = self.epilogue == "gate"
        (b2, scales2, offsets2), matrix2 = self._tables(2 if gated else 1)
        unused = np.zeros(1, np.float32)
        memory = [
            random((m, k), dtype, 3), b, unused, scales, offsets, random((m, n), dtype, 4),
            random((m, n), dtype, 5), random((m, k), dtype, 6), random((k,), dtype, 7),
            b2, unused, scales2, offsets2,
        ]  # fmt: skip
        for row, special in enumerate(self.specials):
            memory[A][row, 5 * row] = into_memory(np.float32([special]), dtype)[0]
        kernel, launch = self.generate(gpu)
        made = Work(kernel, launch, memory, [], {A: self.shift})
        a = wide(memory[A], dtype)
        if self.norm:
            a = wide(memory[Q_SOURCE], dtype) * wide(memory[Q_GAIN], dtype)
            squares = (wide(memory[Q_SOURCE], dtype) ** 2).mean(1, keepdims=True)
            a = rounded(a / np.sqrt(squares + 1e-5), dtype)
        with np.errstate(invalid="ignore"):
            made.expected[Q_OUT] = EPILOGUES[self.epilogue][1](
                a @ matrix.T, a @ matrix2.T, wide(memory[Q_MORE], dtype)
            )
        made.dtypes = {Q_OUT: dtype}
        return made


def _tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    """An array as it is in memory as a tensor of that type."""
    found = torch.from_numpy(
        np.ascontiguousarray(x).copy()
        if dtype != "bf16"
        else np.ascontiguousarray(x).view(np.int16).copy()
    )
    return found.view(torch.bfloat16) if dtype == "bf16" else found


def _bytes(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(-1).view(torch.uint8).numpy()


def rms_norm(m: int, k: int, dtype: str) -> Nest:
    """A as the norm of the rows of SOURCE times GAIN; one row is a nest of one axis."""
    row = 1 if m == 1 else 2
    x = load(Access(SOURCE, dtype, (k, 1)[-row:]))
    gain = load(Access(GAIN, dtype, (0, 1)[-row:]))
    squares = op("mul", reduce("sum", op("mul", x, x)), const(1 / k, "f32"))
    scale = Expr("rsqrt", "f32", (op("add", squares, const(1e-5, "f32")),))
    value = op("mul", op("mul", x, scale), gain)
    stored = Store(Access(A, dtype, (k, 1)[-row:]), value)
    return Nest((m, k)[-row:], (stored,), frozenset({row - 1}))


def scaled(m: int, k: int, dtype: str) -> Nest:
    """A as SOURCE times GAIN, element by element."""
    x, gain = load(Access(SOURCE, dtype, (k, 1))), load(Access(GAIN, dtype, (0, 1)))
    return Nest((m, k), (Store(Access(A, dtype, (k, 1)), op("mul", x, gain)),))


PROLOGUES: dict[str, Callable[[int, int, str], Nest | None]] = {
    "": lambda m, k, dtype: None,
    "rms": rms_norm,
    "scaled": scaled,
}


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


EPILOGUES: dict[str, tuple[Callable[[Expr], Expr], Callable[..., np.ndarray]]] = {
    "plain": (lambda more: given(0), lambda y, y2, more: y),
    "residual": (lambda more: op("add", given(0), more), lambda y, y2, more: y + more),
    "gate": (
        lambda more: op("mul", Expr("silu", "f32", (given(0),)), given(1)),
        lambda y, y2, more: _silu(y) * y2,
    ),
    "integers": (
        lambda more: cast(cast(op("add", given(0), more), "i32"), "f32"),
        lambda y, y2, more: np.trunc(y + more),
    ),
}
"""What is done with results: as an expression, and in numpy."""

SMALL_PRODUCTS = [
    ProductCase(1, 9, 256),
    ProductCase(1, 5, 64, "f32"),
    ProductCase(1, 11, 520, "f16", "residual"),
    ProductCase(1, 17, 2048, "bf16", "residual", norm="rms"),
    ProductCase(1, 9, 512, "bf16", "gate", norm="rms", keep=True),
    ProductCase(2, 13, 264, counted=True),
    ProductCase(3, 7, 516, "f32", "residual", norm="rms"),
    ProductCase(4, 9, 1024, "bf16", "gate"),
    ProductCase(1, 6, 2304, form=GemvForm(2, 3, 6)),
    ProductCase(3, 13, 2304, norm="rms", form=GemvForm(2, 7, 7)),
    ProductCase(1, 37, 64, "f16", form=GemvForm(8, 1, 4), counted=True),
    ProductCase(1, 9, 192, padded=8),
    ProductCase(3, 9, 200, norm="scaled", keep=True, early=True),
    ProductCase(1, 9, 200, norm="scaled", form=GemvForm(2, 1, 3, ahead=False)),
    ProductCase(1, 9, 256, "bf16", "gate", norm="rms", shift=2),
    ProductCase(4, 5, 128, "f32", "residual", shift=4),
]
"""Cases that a machine of numpy does in a moment."""

SMALL_QUANTISED = [
    QuantisedCase(1, 20, 64),
    QuantisedCase(1, 33, 128, 4),
    QuantisedCase(2, 16, 96, 8, dtype="f16", scales="f32"),
    QuantisedCase(1, 35, 256, 4, 32, scales="f16", dtype="f16"),
    QuantisedCase(3, 18, 256, 4, 64, "bf16", epilogue="residual"),
    QuantisedCase(4, 20, 512, 8, 128, "i8", scales="f32"),
    QuantisedCase(1, 17, 1088, 4, offsets="f32", norm="rms"),
    QuantisedCase(1, 24, 512, 4, 128, "f16", epilogue="gate", norm="rms"),
    QuantisedCase(2, 24, 512, 8, epilogue="gate"),
    QuantisedCase(4, 24, 256, 4, 32, "i8", dtype="f32", scales="f32"),
    QuantisedCase(1, 17, 192, 8, dtype="f32", scales="bf16", norm="rms"),
    QuantisedCase(1, 40, 288, 4, 96, form=TileForm(2, 2, 4), shift=2),
    QuantisedCase(3, 40, 640, 4, 64, "bf16", form=TileForm(1, 2, 2)),
    QuantisedCase(4, 50, 320, 8, form=TileForm(3, 1, 2), early=True),
    QuantisedCase(2, 50, 256, 4, 32, "f32", "f32", "f32", form=TileForm(8, 4, 4), shift=4),
    QuantisedCase(1, 50, 256, 4, 64, "f32", turned=False),
    QuantisedCase(2, 50, 256, 8, turned=False),
    *(
        QuantisedCase(4, 33, 256, bits, dtype=dtype, specials=(np.inf, -np.inf, np.nan, 3e4))
        for bits, dtype in ((8, "bf16"), (4, "f16"), (8, "f32"))
    ),
]
"""Quantised ones."""

LARGE_QUANTISED = [
    QuantisedCase(*sizes, bits, group, offsets, dtype, dtype, how, norm)
    for sizes, how, norm in [
        ((1, 1000, 4096), "residual", ""),
        ((1, 1800, 4096), "gate", "rms"),
        ((1, 777, 14336), "residual", ""),
        ((4, 300, 2048), "gate", "rms"),
        ((3, 4300, 1024), "plain", ""),
    ]
    for bits, group, offsets, dtype in [
        (8, 0, "", "bf16"),
        (4, 128, "bf16", "bf16"),
        (4, 32, "", "bf16"),
        (4, 64, "f16", "f16"),
        (8, 32, "", "f16"),
        (4, 128, "", "f32"),
        (8, 0, "i8", "bf16"),
        (4, 0, "", "bf16"),
    ]
]

LARGE_PRODUCTS = [
    ProductCase(m, n, k, dtype, epilogue, norm)
    for m, n, k, dtype, epilogue, norm in [
        (1, 2048, 2048, "bf16", "plain", "rms"),
        (1, 512, 2048, "bf16", "plain", "rms"),
        (1, 8192, 2048, "bf16", "gate", "rms"),
        (1, 2048, 8192, "bf16", "residual", ""),
        (1, 9001, 2048, "bf16", "plain", "rms"),
        (1, 4096, 14336, "bf16", "residual", ""),
        (1, 4096, 4096, "f16", "residual", ""),
        (2, 2048, 2048, "bf16", "plain", "rms"),
        (4, 2048, 2048, "bf16", "gate", "rms"),
        (4, 1000, 8192, "f16", "plain", ""),
        (1, 2048, 2048, "f32", "residual", "rms"),
        (3, 777, 5120, "f32", "plain", ""),
        (1, 50, 16, "bf16", "plain", ""),
        (1, 3, 40000, "bf16", "plain", ""),
    ]
]


# ---- attention ----


@dataclass(frozen=True)
class AttentionCase:
    """Attention of some queries."""

    heads: int
    kv_heads: int
    length: int
    span: int
    width: int
    dtype: str = "bf16"
    mask: str | None = None  # bool, or the type of numbers
    per_row: bool = False  # whether each head and query has a mask of its own
    hole: str = ""  # what is special in the mask: "none" seen by a row, "nan"
    causal: bool = False
    batch: int = 1
    value_width: int = 0  # if another one
    lse: bool = False
    shift: int = 0  # bytes that keys are moved by
    counted: bool = False  # the span is a word
    form: AttentionForm | None = None
    early: bool = False

    def __str__(self) -> str:
        names = [f"{self.heads}of{self.kv_heads}x{self.length}x{self.span}x{self.width}"]
        names += [self.dtype, self.mask or "open", self.hole]
        names += [x for x in ("causal", "per_row", "lse", "counted", "early") if getattr(self, x)]
        names += [f"+{self.shift}"] if self.shift else []
        names += [f"{self.form.warps}w{self.form.blocks}b"] if self.form else []
        return "-".join(x for x in names if x)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of q, k, v, mask and out."""
        values = self.value_width or self.width
        mask = (self.batch, self.heads if self.per_row else 1, self.length, self.span)
        mask = mask if self.per_row else (self.batch, 1, 1, self.span)
        return [
            (self.batch, self.heads, self.length, self.width),
            (self.batch, self.kv_heads, self.span, self.width),
            (self.batch, self.kv_heads, self.span, values),
            mask,
            (self.batch, self.length, self.heads, values),
        ]

    @property
    def request(self) -> Attention:
        """What is asked for. Outputs of all heads lie side by side."""
        q, k, v, mask, out = (_strides(s) for s in self.shapes)
        mask = mask if self.per_row else (mask[0], 0, 0, mask[3])
        return Attention(
            self.dtype,
            self.batch,
            self.heads,
            self.kv_heads,
            self.length,
            SizeArgument(6) if self.counted else self.span,
            self.width,
            self.value_width or self.width,
            q,
            k,
            v,
            (out[0], out[2], out[1], 1),
            0.3,
            self.causal,
            self.mask,
            mask if self.mask else (0, 0, 0, 0),
            (self.heads * self.length, self.length, 1) if self.lse else None,
        )

    def generate(self, gpu: Gpu) -> tuple[Kernel, Launch]:
        """The kernel and its launch."""
        return attention(self.request, gpu, form=self.form, early=self.early)

    def work(self, gpu: Gpu) -> Work:
        """The kernel and its data."""
        kernel, launch = self.generate(gpu)
        memory = [random(s, self.dtype, seed) for seed, s in enumerate(self.shapes)]
        mask = self._mask()
        memory[3] = (
            mask.astype(np.bool_)
            if self.mask == "bool"
            else into_memory(mask.astype(np.float32), self.mask or "f32")
        )
        memory.append(np.zeros((self.batch, self.heads, self.length), np.float32))
        made = Work(kernel, launch, memory, [self.span], {1: self.shift})
        q, k, v = (wide(m, self.dtype) for m in memory[:3])
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = 0.3 * q @ k.swapaxes(2, 3)
        if self.mask == "bool":
            scores = np.where(mask != 0, scores, -np.inf)
        elif self.mask:
            scores = scores + wide(memory[3], self.mask)
        if self.causal:
            scores = np.where(np.tri(self.length, self.span) > 0, scores, -np.inf)
        with np.errstate(all="ignore"):
            top = scores.max(-1, keepdims=True, initial=-np.inf)
            weights = np.exp(scores - np.where(top == -np.inf, 0, top))
            total = weights.sum(-1, keepdims=True)
            found = np.where(total == 0, 0, weights @ v / total)
            sums = np.where(total == 0, 0, np.log(total) + top)[..., 0]
        made.expected = {4: found.swapaxes(1, 2), **({5: sums} if self.lse else {})}
        made.dtypes = {4: self.dtype, 5: "f32"}
        return made

    def _mask(self) -> np.ndarray:
        shape = self.shapes[3]
        pick = np.random.default_rng(9)
        if self.mask == "bool":
            found = (pick.random(shape) < 0.6).astype(np.float64)
        else:
            found = pick.standard_normal(shape)
            found[pick.random(shape) < 0.3] = -np.inf
        if self.hole == "none":
            found[0, 0, 0] = 0 if self.mask == "bool" else -np.inf
        elif self.hole:
            found[0, 0, 0, 1] = {"nan": np.nan, "inf": np.inf}[self.hole]
        return found


def _strides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    _, b, c, d = shape
    return (b * c * d, c * d, d, 1)


SMALL_ATTENTION = [
    AttentionCase(4, 2, 1, 37, 64, mask="bool", form=AttentionForm(2, 4, 2, 2)),
    AttentionCase(2, 2, 1, 5, 64, "f32", early=True),
    AttentionCase(3, 1, 1, 40, 80, "f16", mask="f16"),
    AttentionCase(2, 1, 2, 33, 128, mask="bool", per_row=True, hole="none", lse=True),
    AttentionCase(2, 1, 3, 20, 64, causal=True, batch=2),
    AttentionCase(5, 1, 1, 50, 64, mask="f32", per_row=True, hole="none", lse=True, counted=True),
    AttentionCase(2, 2, 1, 21, 64, mask="f32", per_row=True, hole="nan"),
    AttentionCase(2, 2, 1, 21, 64, mask="bf16", per_row=True, hole="inf"),
    AttentionCase(2, 2, 1, 21, 256, "f32", value_width=64),
    AttentionCase(2, 2, 1, 21, 64, value_width=128, mask="bool"),
    AttentionCase(2, 1, 1, 30, 64, shift=2, mask="bool"),
    AttentionCase(2, 1, 4, 0, 64, lse=True),
    AttentionCase(12, 1, 1, 150, 64, lse=True, form=AttentionForm(4, 4, 4, 2)),
    AttentionCase(5, 1, 4, 70, 32, "f16", mask="bool", form=AttentionForm(3, 2, 3, 1)),
]

LARGE_ATTENTION = [
    AttentionCase(32, 8, 1, 1024, 64, mask="bool"),
    AttentionCase(32, 8, 1, 1024, 128, mask="bool", lse=True),
    AttentionCase(32, 8, 1, 1000, 64, "f32", counted=True),
    AttentionCase(64, 8, 1, 8000, 128, mask="bf16"),
    AttentionCase(12, 12, 4, 512, 64, "f16", mask="f32", per_row=True, batch=3),
    AttentionCase(16, 4, 1, 4096, 256, mask="bool"),
    AttentionCase(32, 32, 1, 777, 80, "f16", mask="f16", batch=6),
    AttentionCase(8, 8, 2, 20000, 64),
]
