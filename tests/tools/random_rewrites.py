"""Other ways to write a random function: what is computed stays the same, the graph does not."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import torch

from random_functions import KNOWN, MADE, NAMES, Program

IDENTITIES = (
    "{x}.flip(0).flip(0)", "torch.cat({x}.chunk(2, {d}), {d})", "torch.cat({x}.split(2, {d}), {d})",
    "torch.stack({x}.unbind({d}), {d})", "{x}.transpose({d}, {e}).transpose({d}, {e})",
    "{x}.reshape(-1).reshape({x}.shape)", "{x}[None][0]", "{x}.unsqueeze({d}).squeeze({d})",
    "torch.stack([{x}, {x}])[1]", "{x}.expand(2, *{x}.shape)[1]", "{x}.clone()", "{x}.contiguous()",
    "{x}.movedim(0, -1).movedim(-1, 0)", "{x}.roll(1, {d}).roll(-1, {d})", "-(-{x})", "{x} * 1",
    "F.pad({x}, (1, 2))[..., 1:-2]", "{x}.repeat(2, *[1] * ({x}.dim() - 1))[: {x}.shape[0]]",
    "{x}.to(f64).to({x}.dtype)", "torch.where(torch.ones_like({x}, dtype=torch.bool), {x}, {x})",
    "{x}.index_select({d}, torch.arange({x}.shape[{d}]))", "torch.empty_like({x}).copy_({x})",
    "{x}.permute(*reversed(range({x}.dim()))).permute(*reversed(range({x}.dim())))",
    "{x} * 2 / 2", "torch.maximum({x}, {x})", "{x}.unflatten(-1, (1, -1)).flatten(-2)",
    "torch.cat([{x}[:1], {x}[1:]])", "{x}.gather(0, torch.zeros_like({x}, dtype=torch.int64)"
    " + torch.arange({x}.shape[0]).reshape(-1, *[1] * ({x}.dim() - 1)))", "{x}.masked_fill("
    "torch.zeros_like({x}, dtype=torch.bool), 0)", "{x}.view_as({x})",
)  # fmt: skip
"""A value of at least one dim as itself."""
NAME = re.compile(r"\b[xv]\d+\b")
SWAP = re.compile(r"([xv]\d+) ([+*]) ([xv]\d+)")
MAPPED = re.compile(r"(torch\.(?:tanh|sigmoid|sin|sign)|F\.(?:gelu|silu|mish|softplus))\((\w+)\)")
PRODUCT = re.compile(r"([xv]\d+)\.matmul\(([xv]\d+)\)")
WHOLE = (
    (SWAP, r"\3 \2 \1"),
    (MAPPED, r"torch.cat([\1(t) for t in \2.split(2)])"),
    (PRODUCT, r"torch.cat([t.matmul(\2) for t in \1.split(2, -2)], -2)"),
    (PRODUCT, r"(\2.mT @ \1.mT).mT"),
)
"""Whole expressions written in another way: operands exchanged, a batch cut and joined again."""


def rewritten(program: Program, pick: random.Random) -> Program:
    """The same function in other lines. The program must not change values in place."""
    other = copy.copy(program)
    other.name = program.name.replace("random", "rewritten")
    other.body = [_line(line, program, pick) for line in program.body]
    return other


def _line(line: str, program: Program, pick: random.Random) -> str:
    for expression, by in pick.sample(WHOLE, len(WHOLE)):
        new = expression.sub(by, line)
        if pick.random() < 0.6 and new != line and _same(line, new, program):
            line = new
            break
    made = MADE.search(line)
    names = [m for m in NAME.finditer(line) if made is None or m.start() > made.start() + 1]
    for found in reversed(names):
        dim = max(program.values[found[0]].dim(), 1)
        text = pick.choice(IDENTITIES).format(
            x=found[0], d=pick.randrange(dim), e=pick.randrange(dim)
        )
        new = f"{line[: found.start()]}({text}){line[found.end() :]}"
        if pick.random() < 0.5 and _same(line, new, program):
            line = new
    return line


def _same(line: str, new: str, program: Program) -> bool:
    """Whether two lines give the same, but for rounding."""
    a, b = (_value(text, program) for text in (line, new))
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.allclose(a, b, 1e-2, 1e-2, equal_nan=True)


def _value(line: str, program: Program) -> torch.Tensor | None:
    names: dict[str, Any] = {**KNOWN, **NAMES, **program.numbers, **program.values}
    made = MADE.search(line)
    try:
        exec(line, names)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None
    return names[made[1]] if made is not None else None
