"""3 x 3 convolution by Winograd's method: fewer products, between transforms of small patches.

A patch of (m + 2) x (m + 2) inputs gives m x m results. Both are seen as polynomials and evaluated
at the points 0, +p, -p, ..., infinity in either direction; at each pair of points the channels are
one matrix product. For m = 2 that is 16 products in place of 36, as exact as the direct sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchair.codegen.cpu.conv.plan import Conv, ConvTile, Panels, StoreConv, plan, tile
from torchair.codegen.sizes import BYTES, STORAGE, Size
from torchair.codegen.target import DEFAULT_CONFIG, KernelConfig
from torchair.codegen.text.memory import load_vector, memory_element
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, Writer, f32

POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.75, 1.5)}
"""The positive points, by m. Those for 4 are not whole numbers because they keep errors small."""

PATCH_BYTES = 320 * 1024
"""Most bytes of transformed input of a block, so that they stay in the second cache."""

WEIGHT_BYTES = 3 * 1024 * 1024
"""Most bytes of transformed weights for m = 4; more would come from memory too slowly."""

CACHED = 1024 * 1024
"""Bytes of weights that may still be in the second cache from the last time."""

AHEAD = 4096
"""How many bytes ahead other weights are fetched: a page, since the processor by itself does not
look beyond one."""


@dataclass(frozen=True)
class Patches:
    """How the work is cut: patches in groups, which a tile takes at once, groups in blocks."""

    spec: Conv
    m: int
    vectors: int
    lanes: int
    group: int  # patches in a group
    groups: int  # groups in a block
    ahead: int = AHEAD

    @property
    def side(self) -> int:
        """Rows and columns of a patch."""
        return self.m + 2

    @property
    def places(self) -> int:
        """Pairs of points, each a matrix product."""
        return self.side**2

    @property
    def block(self) -> int:
        """Patches in a block."""
        return self.group * self.groups

    @property
    def pitch(self) -> int:
        """Elements from a transformed patch to the next: not a multiple of a cache page."""
        return self.spec.channels + 16

    @property
    def panels(self) -> Panels:
        """The output channels."""
        return Panels(1, self.spec.out_channels, self.vectors * self.lanes)

    @property
    def inputs(self) -> int:
        """Elements of transformed input in the scratch of a thread."""
        return self.places * self.block * self.pitch

    @property
    def scratch(self) -> int:
        """Bytes of scratch that each thread needs: the input, then the products."""
        return -(-4 * (self.inputs + self.places * self.block * self.panels.size) // 64) * 64


METHODS = {"direct": 0, "patches2": 2, "patches4": 4}
"""Ways to convolve, and the patches that they need."""


def patches(spec: Conv, machine: Machine, config: KernelConfig = DEFAULT_CONFIG) -> Patches | None:
    """The cut of a convolution, or None if it should be a direct sum."""
    chosen = METHODS.get(config.choice("method"))
    m = _side(spec, machine) if chosen is None else chosen
    if not m:
        return None
    vectors = 2
    most = min(14, (machine.registers - vectors - 1) // vectors)
    total = _count(spec, m)
    if total is None:
        return Patches(spec, m, vectors, machine.lanes, most, 2)
    if total <= machine.registers - 4:  # one pass over the weights, of which there are many
        vectors, most = 1, machine.registers - 4
    if tile := config.choice("tile"):
        vectors, most = map(int, tile.split("x"))
    group = _ceil(total, _ceil(total, most))
    each = 4 * (m + 2) ** 2 * group * (spec.channels + 16)
    blocks = _ceil(total, group * max(1, config.integer("window", PATCH_BYTES) // each))
    groups, ahead = _ceil(total, group * blocks), config.integer("ahead", AHEAD)
    return Patches(spec, m, vectors, machine.lanes, group, groups, ahead)


def _side(spec: Conv, machine: Machine) -> int:
    """Rows and columns of the results of a patch, 0 where a direct sum is as good."""
    if not fits(spec, machine):
        return 0
    m = 4 if spec.winograd >= 4 and _pays(spec, 4) else 2
    return m if _pays(spec, m) else 0


def fits(spec: Conv, machine: Machine) -> bool:
    """Whether the method applies: 3 x 3, dense in channels, and enough of them."""
    plain = spec.stride == spec.dilation == (1, 1) and spec.groups == 1 and spec.x[1] == 1
    many = min(spec.channels, spec.out_channels) >= 32 and spec.channels % machine.lanes == 0
    dense = plan(spec, machine).kind == "dense"
    return spec.winograd >= 2 and spec.kernel == (3, 3) and plain and many and dense


def _pays(spec: Conv, m: int) -> bool:
    """Whether patches save enough: they have more weights, and some results are outside."""
    weights = 4 * (m + 2) ** 2 * spec.channels * spec.out_channels
    if m == 4 and weights > WEIGHT_BYTES:
        return False
    total = _count(spec, m)
    if total is None:
        return True
    n, (high, wide) = _batch(spec), spec.results or (0, 0)
    direct, ours = 9 * n * high * wide, (m + 2) ** 2 * total
    return total >= 8 and direct > 1.4 * ours


def _count(spec: Conv, m: int) -> int | None:
    """Patches of the whole batch, if the size of the image is known."""
    if spec.results is None:
        return None
    high, wide = spec.results
    return _batch(spec) * _ceil(high, m) * _ceil(wide, m)


def _batch(spec: Conv) -> int:
    """The size of the batch, as far as it matters for the cut."""
    return spec.batch if isinstance(spec.batch, int) else 1


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)


def pack_patches(weight: torch.Tensor, cut: Patches) -> torch.Tensor:
    """The transformed weights: for each panel and pair of points, [channel][output channel]."""
    points = [0.0, *(sign * p for p in POINTS[cut.m] for sign in (1, -1))]
    rows = []
    for i, p in enumerate(points):
        scale = 1.0
        for k, q in enumerate(points):
            scale *= p - q if k != i else 1.0
        rows.append([1 / scale, p / scale, p * p / scale])
    g = torch.tensor([*rows, [0.0, 0.0, 1.0]], dtype=torch.float64)
    there = torch.einsum("ai,ocij,bj->abco", g, weight.double(), g).flatten(0, 1)
    panels = cut.panels
    full = torch.zeros(*there.shape[:2], panels.count * panels.size)
    full[..., : panels.channels] = there
    return full.unflatten(2, (panels.count, panels.size)).permute(2, 0, 1, 3)


class PatchBlocks:
    """Writes the entry function: this thread's share of (block of patches, panel)."""

    def __init__(self, w: KernelWriter, cut: Patches, store: StoreConv) -> None:
        self.w, self.cut, self.spec, self.store = w, cut, cut.spec, store
        pixels = tuple(k * cut.pitch for k in range(cut.group))
        steps = ((cut.spec.channels, 1),)
        weights = 4 * cut.places * cut.panels.count * cut.panels.size * cut.spec.channels
        ahead = cut.ahead if weights > CACHED else 0
        self.tile = tile(w, ConvTile("dense", pixels, steps, cut.vectors, ahead=ahead))
        _spread(w, cut)
        _collect(w, cut)
        self.results = w.scratch(4 * cut.m**2 * cut.panels.size)
        self.zeros = w.scratch(BYTES[cut.spec.dtype] * cut.spec.channels)
        self.inputs = w.entry(f"getelementptr [{cut.scratch} x i8], ptr {w.pointer(2)}, i64 %tid")
        self.sums = w.entry(f"getelementptr float, ptr {self.inputs}, i64 {cut.inputs}")

    def write(self) -> None:
        """The whole function."""
        w, cut = self.w, self.cut
        w.clear(self.zeros, str(BYTES[self.spec.dtype] * self.spec.channels))
        total = w.mul(w.size(self.spec.batch), w.mul(*_across(w, cut)))
        panels = cut.panels.count
        low, high = w.share(w.mul(w.ceil(total, cut.block), panels))
        with w.loop(low, high, carried=[("i64", "-1")]) as unit:
            block, panel = w.div(unit.index, panels), w.rem(unit.index, panels)
            first = w.mul(block, cut.block)
            last = w.least(w.add(first, cut.block), total)
            with w.when(w(f"icmp ne i64 {block}, {unit.carried[0]}")):
                w.run("spread", "%words", self.inputs, self.zeros, first, last)
            unit.next = [block]
            self.products(panel, w.sub(last, first))
            self.finish(panel, first, last)

    def products(self, panel: str, count: str) -> None:
        """The matrix product at each pair of points, for so many patches."""
        w, cut = self.w, self.cut
        per_place = self.spec.channels * cut.panels.size
        weights = w.offset(w.pointer(1), "float", w.mul(panel, cut.places * per_place))
        with w.loop("0", cut.places) as place:
            p = w.offset(weights, "float", w.mul(place.index, per_place))
            with w.loop("0", count, cut.group) as group:
                patch = w.add(w.mul(place.index, cut.block), group.index)
                x = w.offset(self.inputs, "float", w.mul(patch, cut.pitch))
                w.run(self.tile, x, p, w.offset(self.sums, "float", w.mul(patch, cut.panels.size)))

    def finish(self, panel: str, first: str, last: str) -> None:
        """Transform the products back and hand out the results that are inside the image."""
        w, cut, m = self.w, self.cut, str(self.cut.m)
        high, wide = _results(w, self.spec)
        with w.loop(first, last) as patch:
            n, row, column = _where(w, cut, patch.index)
            at = w.mul(w.sub(patch.index, first), cut.panels.size)
            w.run("collect", w.offset(self.sums, "float", at), self.results)
            row, column = w.mul(row, m), w.mul(column, m)
            rows, columns = w.least(m, w.sub(high, row)), w.least(m, w.sub(wide, column))
            with w.loop("0", rows) as i, w.loop("0", columns) as j:
                pixel = w.add(w.mul(i.index, m), j.index)
                place = w.offset(self.results, "float", w.mul(pixel, cut.panels.size))
                where = (n, w.add(row, i.index), w.add(column, j.index))
                cut.panels.hand_out(w, self.store, panel, place, *where)


def _results(w: KernelWriter, spec: Conv) -> tuple[str, str]:
    """Rows and columns of the result."""
    top, bottom, left, right = spec.padding
    return (
        w.add(w.size(spec.height), top + bottom - 2),
        w.add(w.size(spec.width), left + right - 2),
    )


def _across(w: KernelWriter, cut: Patches) -> tuple[str, str]:
    """Patches from top to bottom and from left to right."""
    high, wide = (w.ceil(size, cut.m) for size in _results(w, cut.spec))
    return high, wide


def _where(w: KernelWriter, cut: Patches, patch: str) -> tuple[str, str, str]:
    """Image, row and column of a patch."""
    high, wide = _across(w, cut)
    line = w.div(patch, wide)
    return w.div(line, high), w.rem(line, high), w.rem(patch, wide)


def _spread(outer: KernelWriter, cut: Patches) -> None:
    """Adds the function that transforms the inputs of patches `%first` to `%last`."""
    dtype, args = cut.spec.dtype, "ptr %words, ptr noalias %to, ptr %zeros, i64 %first, i64 %last"
    with outer.function("spread", args) as w, w.loop("%first", "%last") as patch:
        sources, element = _sources(w, cut, patch.index), memory_element(dtype)
        to = w.offset("%to", "float", w.mul(w.sub(patch.index, "%first"), cut.pitch))
        with w.loop("0", cut.spec.channels, w.lanes) as channel:
            places = (w.offset(source, element, channel.index) for source in sources)
            values = [load_vector(w, dtype, place, w.lanes, None) for place in places]
            at = w.offset(to, "float", channel.index)
            for k, value in enumerate(_both(w, cut, values, _evaluate)):
                place = w.offset(at, "float", k * cut.block * cut.pitch)
                w.do(f"store {w.vector('float')} {value}, ptr {place}, align {4 * w.lanes}")


def _sources(w: KernelWriter, cut: Patches, patch: str) -> list[str]:
    """Where the pixels of a patch are; those outside the image are read from zeros."""
    spec, m = cut.spec, str(cut.m)
    n, row, column = _where(w, cut, patch)
    top = w.sub(w.mul(row, m), spec.padding[0])
    left = w.sub(w.mul(column, m), spec.padding[2])
    image = w.mul(n, w.size(spec.x[0]))
    rows = [_inside(w, w.add(top, i), spec.height, spec.x[2]) for i in range(cut.side)]
    columns = [_inside(w, w.add(left, j), spec.width, spec.x[3]) for j in range(cut.side)]
    found = []
    for row_ok, row_at in rows:
        base = w.add(image, row_at)
        for column_ok, column_at in columns:
            place = w.offset(w.pointer(0), STORAGE[spec.dtype], w.add(base, column_at))
            ok = w(f"and i1 {row_ok}, {column_ok}")
            found.append(w(f"select i1 {ok}, ptr {place}, ptr %zeros"))
    return found


def _inside(w: KernelWriter, index: str, size: Size, stride: Size) -> tuple[str, str]:
    """Whether an index is inside the image, and its offset."""
    return w(f"icmp ult i64 {index}, {w.size(size)}"), w.mul(index, w.size(stride))


def _collect(outer: KernelWriter, cut: Patches) -> None:
    """Adds the function that turns the products of one patch into results."""
    step, size = cut.block * cut.panels.size, cut.panels.size
    with outer.function("collect", "ptr noalias %sums, ptr noalias %to") as w:
        vector, align = w.vector("float"), 4 * w.lanes
        for j in range(0, cut.vectors * w.lanes, w.lanes):
            places = (w.offset("%sums", "float", k * step + j) for k in range(cut.places))
            values = [w(f"load {vector}, ptr {place}, align {align}") for place in places]
            for k, value in enumerate(_both(w, cut, values, _interpolate)):
                place = w.offset("%to", "float", k * size + j)
                w.do(f"store {vector} {value}, ptr {place}, align {align}")


Transform = Callable[[Writer, Sequence[str], Sequence[float]], list[str]]


def _both(w: Writer, cut: Patches, values: Sequence[str], transform: Transform) -> list[str]:
    """A transform of a square of values along its rows and then along its columns."""
    side, points = cut.side, POINTS[cut.m]
    rows = [transform(w, values[k : k + side], points) for k in range(0, side * side, side)]
    columns = [transform(w, column, points) for column in zip(*rows, strict=True)]
    return [value for row in zip(*columns, strict=True) for value in row]


def _evaluate(w: Writer, d: Sequence[str], points: Sequence[float]) -> list[str]:
    """The inputs times the polynomials that vanish at all points but one."""
    squares = [p * p for p in points]
    found = [_sum(w, _product(squares), d[0::2])]
    for p in points:
        rest = _product([q for q in squares if q != p * p])
        even, odd = _sum(w, rest, d[2::2]), _sum(w, rest, d[1::2])
        found += [_sum(w, [1.0, p], [even, odd]), _sum(w, [1.0, -p], [even, odd])]
    return [*found, _sum(w, _product(squares), d[1::2])]


def _interpolate(w: Writer, d: Sequence[str], points: Sequence[float]) -> list[str]:
    """The coefficients of a polynomial that is known as a sum over the points."""
    pairs = list(zip(d[1:-1:2], d[2:-1:2], strict=True))
    sums = [_sum(w, [1.0, 1.0], pair) for pair in pairs]
    gaps = [_sum(w, [1.0, -1.0], pair) for pair in pairs]
    found = []
    for k in range(2 * len(points)):
        powers = [p**k for p in points]
        parts = list(gaps if k % 2 else sums)
        if k == 0:
            found.append(_sum(w, [1.0, *powers], [d[0], *parts]))
        elif k == 2 * len(points) - 1:
            found.append(_sum(w, [1.0, *powers], [d[-1], *parts]))
        else:
            found.append(_sum(w, powers, parts))
    return found


def _product(squares: Sequence[float]) -> list[float]:
    """Coefficients of the product of (t - square), from the constant one on."""
    found = [1.0]
    for square in squares:
        found = [a - square * b for a, b in zip([0.0, *found], [*found, 0.0], strict=True)]
    return found


def _sum(w: Writer, factors: Sequence[float], values: Sequence[str]) -> str:
    """The sum of values times constants."""
    kind, total = w.vector("float"), ""
    ordered = sorted(zip(factors, values, strict=False), key=lambda pair: pair[0] != 1.0)
    for factor, value in ordered:
        if not total:
            total = value if factor == 1.0 else w(f"fmul {kind} {value}, {_literal(factor)}")
        elif factor in (1.0, -1.0):
            name = "fadd" if factor == 1.0 else "fsub"
            total = w(f"{name} {REASSOCIATE} {kind} {total}, {value}")
        else:
            total = w.fused(value, _literal(factor), total)
    return total


def _literal(value: float) -> str:
    return f"splat (float {f32(value)})"
