"""Sharing the units of a nest among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchair.codegen.text.unit import UnitWriter
from torchair.codegen.text.writer import KernelWriter

Body = Callable[[list[str]], None]
"""Writes a unit at a position of some axes."""


def share_units(unit: UnitWriter, sizes: Sequence[str], body: Body) -> None:
    """Run the body for this thread's share of the positions of some axes."""
    w = unit.w
    total = "1"
    for n in sizes:
        total = w.mul(total, n)
    if total == "0":
        return
    if total == "1":
        with w.when(w("icmp eq i64 %tid, 0")), unit.point.scope():
            unit.thread()
            body(["0"] * len(sizes))
        return
    low, high = w.share(total)
    with w.when(w(f"icmp slt i64 {low}, {high}")), unit.point.scope():
        unit.thread()
        _walk(w, low, high, sizes, body)


def _walk(w: KernelWriter, low: str, high: str, sizes: Sequence[str], body: Body) -> None:
    """Positions from one flat number to another: divided once, then counted."""
    real = [k for k, n in enumerate(sizes) if n != "1"]
    starts: dict[int, str] = {}
    rest = low
    for k in reversed(real[1:]):
        starts[k], rest = w.rem(rest, sizes[k]), w.div(rest, sizes[k])
    starts[real[0]] = rest
    positions = ["0"] * len(sizes)
    if len(real) == 1:
        with w.loop(low, high) as loop:
            positions[real[0]] = loop.index
            body(positions)
        return
    with w.loop(low, high, 1, [("i64", starts[k]) for k in real]) as loop:
        for k, position in zip(real, loop.carried, strict=True):
            positions[k] = position
        body(positions)
        loop.next = _next(w, loop.carried, [sizes[k] for k in real])


def _next(w: KernelWriter, positions: Sequence[str], sizes: Sequence[str]) -> list[str]:
    """The position after this one."""
    following: list[str] = []
    carry = "1"
    for position, size in zip(reversed(positions), reversed(sizes), strict=True):
        more = w.add(position, carry)
        over = w(f"icmp eq i64 {more}, {size}")
        following.append(w(f"select i1 {over}, i64 0, i64 {more}"))
        carry = w(f"zext i1 {over} to i64")
    return following[::-1]
