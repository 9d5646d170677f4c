"""What happens to the results of a convolution: they are handed out vector by vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchair.codegen.text.writer import KernelWriter

Store = Callable[[KernelWriter, tuple[str, str, str, str], str, str | None], None]
"""What is done with results: `store(w, (n, c, h, w), vector, mask)` is called for each finished
vector, float32 along the channels from `c` on. It applies the epilogue and writes memory. The mask
says which lanes count; None if all do."""


@dataclass(frozen=True)
class Panels:
    """The output channels: `groups` groups of `channels`, each cut into panels of `size`."""

    groups: int
    channels: int
    size: int

    @property
    def of_group(self) -> int:
        """Panels of one group."""
        return -(-self.channels // self.size)

    @property
    def count(self) -> int:
        """All panels."""
        return self.groups * self.of_group

    def hand_out(
        self, w: KernelWriter, store: Store, panel: str, sums: str, n: str, row: str, column: str
    ) -> None:
        """Gives the results of a panel at one pixel, which lie at `sums`, to `store`. The last
        panel of a group may be short."""
        turn, group = w.rem(panel, str(self.of_group)), w.div(panel, str(self.of_group))
        base = w.add(w.mul(group, str(self.channels)), w.mul(turn, str(self.size)))

        def give(channels: int) -> None:
            for j in range(0, channels, w.lanes):
                place = w.offset(sums, "float", str(j))
                value = w(f"load {w.vector('float')}, ptr {place}, align {4 * w.lanes}")
                mask = None if channels - j >= w.lanes else _mask(w.lanes, channels - j)
                store(w, (n, w.add(base, str(j)), row, column), value, mask)

        short = self.channels % self.size
        if not short or self.of_group == 1:
            give(short or self.size)
            return
        last = w(f"icmp eq i64 {turn}, {self.of_group - 1}")
        with w.when(last):
            give(short)
        with w.when(w(f"xor i1 {last}, true")):
            give(self.size)


def _mask(lanes: int, valid: int) -> str:
    return "<" + ", ".join(f"i1 {'true' if i < valid else 'false'}" for i in range(lanes)) + ">"


def rounded(w: KernelWriter, vector: str, dtype: str, lanes: int | None = None) -> str:
    """A vector of float32 in another type, rounded to the nearest; NaN stays NaN."""
    n = w.lanes if lanes is None else lanes
    kind, words, short = (f"<{n} x {element}>" for element in ("float", "i32", "i16"))
    if dtype == "f32":
        return vector
    if dtype == "f16":
        return w(f"fptrunc {kind} {vector} to <{n} x half>")
    bits = w(f"bitcast {kind} {vector} to {words}")
    odd = w(f"and {words} {w(f'lshr {words} {bits}, splat (i32 16)')}, splat (i32 1)")
    up = w(f"add {words} {w(f'add {words} {bits}, splat (i32 32767)')}, {odd}")
    quiet = w(f"or {words} {bits}, splat (i32 4194304)")
    nan = w(f"fcmp uno {kind} {vector}, {vector}")
    chosen = w(f"select <{n} x i1> {nan}, {words} {quiet}, {words} {up}")
    high = w(f"trunc {words} {w(f'lshr {words} {chosen}, splat (i32 16)')} to {short}")
    return w(f"bitcast {short} {high} to <{n} x bfloat>")
