"""The sizes and the work memory that the two forms of attention agree on."""

from __future__ import annotations

from torchair.codegen.requests import Attention
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter

FEW_ROWS = 8
"""Up to so many query rows of a key head, the decode form is the faster one."""


def dots_bf16(spec: Attention, machine: Machine) -> bool:
    """Whether pairs of bf16 features are multiplied by the processor's own instruction."""
    plain = spec.k[3] == 1 and spec.width % 2 == 0
    return spec.dtype == "bf16" and machine.dot_bf16 and machine.bits == 512 and plain


class Areas:
    """The work memory of one thread: names of areas and where they begin, in bytes."""

    def __init__(self) -> None:
        self._places: dict[str, range] = {}
        self.bytes = 0

    def add(self, name: str, bytes_: int) -> None:
        """Reserve an area, aligned to a cache line."""
        first, self.bytes = self.bytes, self.bytes + round_up(bytes_, 64)
        self._places[name] = range(first, self.bytes)

    def start(self, name: str) -> int:
        """The first byte of an area."""
        return self._places[name].start

    def end(self, name: str) -> int:
        """The byte behind an area."""
        return self._places[name].stop

    def at(self, w: KernelWriter, name: str, per_thread: int) -> str:
        """The address of an area of this thread."""
        base = w.entry(f"mul i64 %tid, {per_thread}")
        base = w.entry(f"getelementptr i8, ptr {w.pointer(6)}, i64 {base}")
        return w.offset(base, "i8", str(self.start(name)))


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below n."""
    return -(-n // unit) * unit


class Sizes:
    """The sizes of a spec as values of a kernel."""

    def __init__(self, w: KernelWriter, spec: Attention) -> None:
        self.batch = w.size(spec.batch)
        self.kv_heads = w.size(spec.kv_heads)
        self.length = w.size(spec.length)
        self.span = w.size(spec.span)
        self.group = str(spec.group) if spec.group else self._group(w, w.size(spec.heads))
        self.rows = w.mul(self.group, self.length)
        self.q, self.k, self.v, self.out, self.mask = (
            tuple(w.size(s) for s in strides)
            for strides in (spec.q, spec.k, spec.v, spec.out, spec.mask_strides)
        )
        self.lse = tuple(w.size(s) for s in spec.lse or ())

    def _group(self, w: KernelWriter, heads: str) -> str:
        """heads / kv_heads, and 1 where there are none."""
        none = w(f"icmp eq i64 {self.kv_heads}, 0")
        count = w(f"select i1 {none}, i64 1, i64 {self.kv_heads}")
        group = w.div(heads, count)
        none = w(f"icmp eq i64 {group}, 0")
        return w(f"select i1 {none}, i64 1, i64 {group}")
