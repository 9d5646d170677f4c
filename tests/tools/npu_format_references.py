"""Narrow number formats and quantisation by blocks, value by value, from what the formats are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

Tensor = torch.Tensor
_BITS = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1), "e1m2": (1, 2)}


@cache
def float_values(name: str) -> list[float]:
    """Finite values from zero up of a format with a fixed exponent, by code."""
    exponent_bits, mantissa_bits = _BITS[name]
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    bias = bias or 1  # one bit of exponent
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        value = (
            fraction * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + fraction) * 2.0 ** (exponent - bias)
        )
        found.append(value)
    lost = {"e4m3": 1, "e5m2": 4}.get(name, 0)  # codes of infinity and of no number
    return found[: len(found) - lost]


def largest_exponent(name: str) -> int:
    return math.floor(math.log2(float_values(name)[-1]))


def nearest_code(value: float, name: str) -> int:
    """Sign and code of the nearest value, halves to the even code, the largest one beyond it."""
    values = float_values(name)
    size = min(abs(value), values[-1])
    code = min(range(len(values)), key=lambda c: (abs(values[c] - size), c % 2))
    exponent_bits, mantissa_bits = _BITS[name]
    return code + (2 ** (exponent_bits + mantissa_bits) if math.copysign(1, value) < 0 else 0)


@cache
def hifloat8_values() -> dict[int, float]:
    """Finite values by byte, read off the bits as text."""
    found = {}
    for byte in range(256):
        sign, bits = (-1 if byte >> 7 else 1), f"{byte & 127:07b}"
        if bits.startswith("0000"):
            power = int(bits[4:], 2)
            value = 2.0 ** (power - 23) if power else 0.0
            if not power and sign < 0:
                continue
        elif bits.startswith("0001"):
            value = 1 + int(bits[4:], 2) / 8
        else:
            prefix, size = next(
                (p, n)
                for p, n in (("001", 1), ("01", 2), ("10", 3), ("11", 4))
                if bits.startswith(p)
            )
            rest = bits[len(prefix) :]
            field, mantissa = rest[:size], rest[size:]
            exponent = int("1" + field[1:], 2) * (-1 if field[0] == "1" else 1)
            value = (1 + int(mantissa, 2) / 2 ** len(mantissa)) * 2.0**exponent
            if value == 1.5 * 2**15:
                continue  # infinity
        found[byte] = sign * value
    return found


def nearest_hifloat8(value: float) -> int:
    """The byte of the nearest value, halves away from zero."""
    table = hifloat8_values()
    return min(table, key=lambda b: (abs(table[b] - value), -abs(table[b])))


def shared_exponent(block: Sequence[float], name: str, up: bool = False, most: float = 0.0) -> int:
    top = max(abs(v) for v in block)
    if top == 0:
        return -127
    if up:
        return max(-127, math.ceil(math.log2(top / (most or float_values(name)[-1]))))
    return max(-127, math.floor(math.log2(top)) - largest_exponent(name))


def mx_rows(
    rows: Sequence[Sequence[float]], name: str, up: bool = False, most: float = 0.0
) -> tuple[list[list[int]], list[list[int]]]:
    """Codes of the values of each row, and bytes of the scales of blocks of 32, an even number."""
    codes, scales = [], []
    for row in rows:
        line: list[int] = []
        bytes_ = []
        for k in range(0, len(row), 32):
            block = row[k : k + 32]
            exponent = shared_exponent(block, name, up, most)
            line += [nearest_code(v / 2.0**exponent, name) for v in block]
            bytes_.append(exponent + 127)
        codes.append(line)
        scales.append([*bytes_, *[0] * (len(bytes_) % 2)])
    return codes, scales


def pairs(codes: Tensor) -> Tensor:
    """Two codes of four bits in a byte, the first in the lower half."""
    return codes[..., ::2] + 16 * codes[..., 1::2]


def mx(
    x: Tensor, name: str, axis: int = -1, up: bool = False, most: float = 0.0
) -> tuple[Tensor, Tensor]:
    moved = x.double().movedim(axis, -1)
    codes, scales = mx_rows(moved.reshape(-1, moved.shape[-1]).tolist(), name, up, most)
    y = torch.tensor(codes).reshape(moved.shape).movedim(-1, axis)
    found = torch.tensor(scales).reshape(*moved.shape[:-1], -1, 2).movedim(-2, axis % x.dim())
    return (pairs(y) if name in ("e2m1", "e1m2") else y), found


def mx_product(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """What codes along the last dim stand for."""
    values = torch.tensor(float_values(name), dtype=torch.float64)
    half = len(values) if name in ("e2m1", "e1m2") else 128
    sizes = values[(codes.long() % half).clamp(max=len(values) - 1)]
    signed = torch.where(codes.long() >= half, -sizes, sizes)
    factors = torch.exp2(scales.double().flatten(-2) - 127).repeat_interleave(32, -1)
    return signed * factors[..., : codes.shape[-1]]
