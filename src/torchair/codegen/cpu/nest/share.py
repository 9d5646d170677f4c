"""Sharing the units of a nest among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torchair.codegen.text.unit import UnitWriter
from torchair.codegen.text.writer import KernelWriter

Body = Callable[[list[str]], None]
"""Writes a unit at a position of some axes."""


@dataclass(frozen=True)
class Walk:
    """What a unit does at each position of some axes."""

    unit: UnitWriter
    sizes: tuple[str, ...]
    body: Body


class Walks:
    """Walks on their way into a kernel: those in a row that run over the same positions become one,
    which does at each position what all of them do. So memory that they fill together is filled in
    order."""

    def __init__(self) -> None:
        self._waiting: list[Walk] = []

    def add(self, walk: Walk) -> None:
        """One more, after those before it."""
        if self._waiting and self._waiting[0].sizes != walk.sizes:
            self.write()
        self._waiting.append(walk)

    def write(self) -> None:
        """Write those that wait."""
        walks, self._waiting = self._waiting, []
        if walks:
            _share(walks)


def share_units(unit: UnitWriter, sizes: Sequence[str], body: Body) -> None:
    """Run the body for this thread's share of the positions of some axes."""
    _share([Walk(unit, tuple(sizes), body)])


def _share(walks: Sequence[Walk]) -> None:
    w, sizes = walks[0].unit.w, walks[0].sizes
    total = "1"
    for n in sizes:
        total = w.mul(total, n)
    if total == "0":
        return
    if total == "1":
        with w.when(w("icmp eq i64 %tid, 0")):
            _side_by_side(walks, lambda body: body(["0"] * len(sizes)))
        return
    low, high = w.share(total)
    with w.when(w(f"icmp slt i64 {low}, {high}")):
        _side_by_side(walks, lambda body: _walk(w, low, high, sizes, body))


def _side_by_side(walks: Sequence[Walk], run: Callable[[Body], None]) -> None:
    with ExitStack() as scopes:
        for walk in walks:
            scopes.enter_context(walk.unit.point.scope())
            walk.unit.thread()

        def body(positions: list[str]) -> None:
            for walk in walks:
                walk.body(list(positions))

        run(body)


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
