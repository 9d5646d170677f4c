"""What an attention kernel computes, and the sizes and work memory its two forms agree on."""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import Size

Strides = tuple[Size, Size, Size, Size]

FEW_ROWS = 8
"""Up to so many query rows of a key head, the decode form is the faster one."""


@dataclass(frozen=True)
class Attention:
    """out = softmax(scale * q kᵀ + mask) v, with sums in float32.

    Strides count elements over (batch, head, position, feature). Query head h reads key head
    `h // (heads // kv_heads)`. With `causal`, query i sees keys 0..i. A `mask` is "bool" (true
    where a key is seen) or the type of numbers to be added; its strides go over (batch, head,
    query, key) and are 0 where it is repeated. `lse` are the strides over (batch, head, query) of
    a second, float32 output: the logarithm of the sum of exponentials. A query that sees no key
    gets zeros in both outputs, as in torch.
    """

    dtype: str  # "f32", "bf16" or "f16": of q, k, v and out
    batch: Size
    heads: Size
    kv_heads: Size
    length: Size  # queries
    span: Size  # keys
    width: int  # features of q and k
    value_width: int  # features of v and out
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    scale: float
    causal: bool = False
    mask: str | None = None
    mask_strides: Strides = (0, 0, 0, 0)
    lse: tuple[Size, Size, Size] | None = None

    @property
    def adds(self) -> bool:
        """Whether the mask holds numbers, so that scores must stay in natural units."""
        return self.mask not in (None, "bool")

    @property
    def group(self) -> int | None:
        """Query heads of one key head, if known."""
        if isinstance(self.heads, int) and isinstance(self.kv_heads, int):
            return self.heads // max(self.kv_heads, 1)
        return None

    @property
    def rows(self) -> int | None:
        """Query rows of one key head, if known: they share its keys and values."""
        if self.group is None or not isinstance(self.length, int):
            return None
        return self.group * self.length

    @property
    def one_mask_row(self) -> bool:
        """Whether all query rows of a key head are known to share one row of the mask."""
        return self.mask_strides[2] == 0 and (self.mask_strides[1] == 0 or self.group == 1)


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
