"""Number formats of four and eight bits: those torch has types for, and those it has not, which are
stored in bytes.

HiFloat8 has a sign, a prefix that says how many bits the exponent has, the exponent with a sign and
a leading one that is not stored, and one to three bits of mantissa. Two four-bit floats share a
byte, the first in its lower half. A shared scale (E8M0) is the byte of an exponent plus 127.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch

from torchair.ascend.ops.library import refuse, wrong

Tensor = torch.Tensor
ROUND_MODES = ("rint", "round", "floor")
"""Halves to even, halves away from zero, and down."""

HIFLOAT8_INF, HIFLOAT8_NAN = 0x6F, 0x80
SCALE_BIAS = 127
SCALE_NAN = 255


@dataclass(frozen=True)
class NumberFormat:
    """A narrow number format: its largest finite value, the exponent of that value, the type that
    stores it and how many values share one element of that type."""

    name: str
    largest: float
    exponent: int
    stored: torch.dtype
    packed: int = 1
    values: tuple[float, ...] = ()  # of four-bit formats, by code without the sign

    @property
    def is_native(self) -> bool:
        """Whether torch has a type for it."""
        return self.stored != torch.uint8


E4M3 = NumberFormat("float8_e4m3fn", 448.0, 8, torch.float8_e4m3fn)
E5M2 = NumberFormat("float8_e5m2", 57344.0, 15, torch.float8_e5m2)
HIFLOAT8 = NumberFormat("hifloat8", 32768.0, 15, torch.uint8)
E2M1 = NumberFormat("float4_e2m1fn_x2", 6.0, 2, torch.uint8, 2, (0, 0.5, 1, 1.5, 2, 3, 4, 6))
E1M2 = NumberFormat(
    "float4_e1m2fn_x2", 1.75, 0, torch.uint8, 2, (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75)
)
INT8 = NumberFormat("int8", 127.0, 6, torch.int8)

_BY_CODE = {
    1: INT8, 258: INT8, 23: E5M2, 291: E5M2, 24: E4M3, 292: E4M3, 45: E2M1, 296: E2M1,
    290: HIFLOAT8, 297: E1M2,
}  # fmt: skip
"""Formats by type number: torch's own numbers, and from 256 on those of GE."""

TYPE_NUMBERS = {
    "int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292,
    "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297,
}  # fmt: skip
"""The types of `torch_npu` itself, which are numbers."""

MX = (E4M3, E5M2, E2M1, E1M2)
"""Formats that blocks with a shared scale may have."""


def format_of(
    operator: str, argument: str, code: int | None, known: tuple[NumberFormat, ...]
) -> NumberFormat:
    """The format behind a type number, if it is one of those that are known."""
    found = None if code is None else _BY_CODE.get(int(code))
    if found is None or found not in known:
        names = ", ".join(f.name for f in known)
        raise refuse(operator, argument, f"type number {code} is none of {names}")
    return found


def check_round(operator: str, mode: str, kind: NumberFormat) -> None:
    """Raise for a mode of rounding that a format does not have."""
    if mode not in (*ROUND_MODES, "hybrid"):
        raise wrong(operator, "round_mode", f"{mode!r} is none of {', '.join(ROUND_MODES)}")
    only = ("round",) if kind is HIFLOAT8 else ("rint",)
    allowed = ROUND_MODES if kind.values else only
    if mode not in allowed and not (kind is HIFLOAT8 and mode == "rint"):
        raise refuse(operator, "round_mode", f"{mode!r} is not known for {kind.name}")


def stored_dims(kind: NumberFormat, dims: list[int] | tuple[int, ...]) -> list[int]:
    """Dims of the tensor that stores values of these dims."""
    return [*dims[:-1], dims[-1] // kind.packed] if kind.packed > 1 else list(dims)


def encode(x: Tensor, kind: NumberFormat, mode: str = "rint") -> Tensor:
    """Values as the nearest ones of a format; those beyond its ends become its ends, except that
    HiFloat8 has an infinity."""
    if kind is INT8:
        return x.round().clamp(-128, 127).to(torch.int8)
    if kind.is_native:
        return x.clamp(-kind.largest, kind.largest).to(kind.stored)
    if kind is HIFLOAT8:
        return _encode_hifloat8(x)
    codes = _nearest(x, kind.values, mode)
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def decode(stored: Tensor, kind: NumberFormat) -> Tensor:
    """What is stored, in float32."""
    if kind.is_native:
        return stored.to(torch.float32)
    if kind is HIFLOAT8:
        return torch.tensor(_hifloat8_values(), device=stored.device)[stored.to(torch.int64)]
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(torch.int64)
    positive = torch.tensor(kind.values, device=stored.device)
    return torch.cat([positive, -positive])[codes]


def _nearest(x: Tensor, values: tuple[float, ...], mode: str) -> Tensor:
    """Codes of four bits, the highest being the sign."""
    table = torch.tensor(values, dtype=x.dtype, device=x.device)
    size, negative = x.abs(), torch.signbit(x)
    size = torch.where(size.isnan(), torch.zeros_like(size), size)  # there is no code for it
    if mode == "floor":
        below = torch.searchsorted(table, size, right=True) - 1
        above = torch.searchsorted(table, size).clamp_(max=len(values) - 1)
        codes = torch.where(negative, above, below)
    else:
        middles = (table[1:] + table[:-1]) / 2
        upper = torch.searchsorted(middles, size, right=True)
        lower = torch.searchsorted(middles, size)
        codes = torch.where(lower % 2 == 0, lower, upper) if mode == "rint" else upper
    return (codes + 8 * negative).to(torch.uint8)


# ---- HiFloat8 ----


def hifloat8_value(byte: int) -> float:
    """The number that a byte stands for."""
    if byte == HIFLOAT8_NAN:
        return math.nan
    sign = -1.0 if byte & 0x80 else 1.0
    rest = byte & 0x7F
    if rest == HIFLOAT8_INF:
        return sign * math.inf
    if rest >> 3 == 0:  # no bit of a prefix: powers of two below the normal numbers
        return sign * math.ldexp(1.0, rest - 23) if rest else 0.0
    if rest >> 3 == 1:
        return sign * (1 + (rest & 7) / 8)
    size = {0: 1, 1: 2, 2: 3, 3: 4}[rest >> 5]  # bits of the exponent
    mantissa_bits = {1: 3, 2: 3, 3: 2, 4: 1}[size]
    mantissa, field = rest & (1 << mantissa_bits) - 1, rest >> mantissa_bits
    negative, low = field >> size - 1 & 1, field & (1 << size - 1) - 1
    exponent = (1 << size - 1) + low
    value = math.ldexp(1 + mantissa / (1 << mantissa_bits), -exponent if negative else exponent)
    return sign * value


@cache
def _hifloat8_values() -> tuple[float, ...]:
    return tuple(hifloat8_value(b) for b in range(256))


@cache
def _hifloat8_steps() -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Numbers from zero up where the nearest byte changes, and the bytes between them. What would
    be the number after the largest one counts as infinity."""
    finite = sorted((hifloat8_value(b), b) for b in range(128) if b != HIFLOAT8_INF)
    values = [v for v, _ in finite] + [1.5 * HIFLOAT8.largest]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    return tuple(middles), (*(b for _, b in finite), HIFLOAT8_INF)


def _encode_hifloat8(x: Tensor) -> Tensor:
    """The nearest numbers, halves away from zero."""
    middles, codes = _hifloat8_steps()
    steps = torch.tensor(middles, dtype=x.dtype, device=x.device)
    place = torch.searchsorted(steps, x.abs().nan_to_num(0.0, math.inf), right=True)
    bytes_ = torch.tensor(codes, device=x.device)[place]
    signed = torch.where(torch.signbit(x) & (bytes_ != 0), bytes_ + 0x80, bytes_)
    return torch.where(x.isnan(), HIFLOAT8_NAN, signed).to(torch.uint8)


# ---- shared scales ----


def scale_values(scales: Tensor) -> Tensor:
    """Shared scales as float32: bytes of exponents, or torch's type for them."""
    exponents = scales.view(torch.uint8).to(torch.int32)
    made = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - SCALE_BIAS)
    return torch.where(exponents == SCALE_NAN, math.nan, made)
