"""Maximum and average over windows of an image."""

from __future__ import annotations

from torchair.codegen.requests import Pool
from torchair.codegen.sizes import BYTES, STORAGE, Size
from torchair.codegen.target import DEFAULT_CONFIG, Choices, Generated, KernelConfig
from torchair.codegen.text.memory import arrived, leaving, memory_element
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine

MOST_VECTORS = 4
"""Vectors of channels that are pooled together, so that the walk over a window is shared."""

MOST_STRIDE = 4
"""Widest stride at which columns are picked out of whole vectors."""


def pool_choices(spec: Pool, machine: Machine) -> Choices:
    """The width of vectors and, along the channels, how many are pooled together."""
    return {"vectors": ("1", "2", "4", "8"), "bits": machine.narrower}


def pool(
    spec: Pool, machine: Machine, label: str = "pool", config: KernelConfig = DEFAULT_CONFIG
) -> Generated:
    """The kernel of a pooling: vectors lie along the channels if these are dense in the input, else
    along the columns."""
    w = KernelWriter(machine)
    if _across(spec):
        _along_columns(w, spec)
    else:
        _along_channels(w, spec, config.integer("vectors", MOST_VECTORS))
    return Generated(w.kernel(label))


def _across(spec: Pool) -> bool:
    return spec.x[1] != 1 or (spec.channels == 1 and spec.x[3] == 1)


def _along_channels(w: KernelWriter, spec: Pool, vectors: int) -> None:
    """Units are (pixel of the result, block of channels)."""
    channels = w.size(spec.channels)
    while isinstance(spec.channels, int) and vectors > 1 and spec.channels < vectors * w.lanes:
        vectors //= 2
    size = vectors * w.lanes
    blocks = w.ceil(channels, size)
    high, wide = w.size(spec.out_height), w.size(spec.out_width)
    low, last = w.share(w.mul(w.mul(w.size(spec.batch), w.mul(high, wide)), blocks))
    with w.loop(low, last) as unit:
        pixel, first = w.div(unit.index, blocks), w.mul(w.rem(unit.index, blocks), size)
        line, column = w.div(pixel, wide), w.rem(pixel, wide)
        n, row = w.div(line, high), w.rem(line, high)
        window = _PoolWindow(w, spec, row, column)
        end = w.least(w.add(first, size), channels)
        whole = w(f"icmp eq i64 {w.sub(end, first)}, {size}")
        with w.when(whole):
            window.reduce(n, first, w.lanes, vectors)
        if not isinstance(spec.channels, int) or spec.channels % size:
            with w.when(w(f"xor i1 {whole}, true")):
                _rest_of_channels(w, window, n, first, end)


def _rest_of_channels(w: KernelWriter, window: _PoolWindow, n: str, first: str, end: str) -> None:
    lanes = str(w.lanes)
    middle = w.add(first, w.mul(w.div(w.sub(end, first), lanes), lanes))
    with w.loop(first, middle, lanes) as channel:
        window.reduce(n, channel.index, w.lanes, 1)
    with w.loop(middle, end) as channel:
        window.reduce(n, channel.index, 1, 1)


def _along_columns(w: KernelWriter, spec: Pool) -> None:
    """Units are rows of the result. Columns whose windows are inside the image form vectors."""
    high, wide, channels = (w.size(s) for s in (spec.out_height, spec.out_width, spec.channels))
    low, last = w.share(w.mul(w.mul(w.size(spec.batch), channels), high))
    start, stop = _whole_columns(w, spec, wide)
    with w.loop(low, last) as unit:
        line, row = w.div(unit.index, high), w.rem(unit.index, high)
        n, channel = w.div(line, channels), w.rem(line, channels)

        for first, end, lanes in (("0", start, 1), (start, stop, w.lanes), (stop, wide, 1)):
            if first == end:
                continue
            with w.loop(first, end, lanes) as column:
                _PoolWindow(w, spec, row, column.index).reduce(n, channel, lanes, 1)


def _whole_columns(w: KernelWriter, spec: Pool, wide: str) -> tuple[str, str]:
    """First and last+1 of the columns that can be computed as vectors."""
    step, left, lanes = spec.stride[1], spec.padding[2], w.lanes
    if spec.x[3] != 1 or step > MOST_STRIDE:
        return "0", "0"
    first = w.least(str(-(-left // step)), wide)
    reach = (spec.kernel[1] - 1) * spec.dilation[1] + step * lanes - left
    rest = w.sub(w.sub(w.size(spec.width), reach), w.mul(first, step))
    rest = w.most(w.add(rest, step * lanes), 0)
    count = w.least(w.div(rest, step * lanes), w.div(w.sub(wide, first), lanes))
    return first, w.add(first, w.mul(count, lanes))


class _PoolWindow:
    """The window of one result, or of several side by side if these are all inside the image."""

    def __init__(self, w: KernelWriter, spec: Pool, row: str, column: str) -> None:
        self.w, self.spec, self.row, self.column = w, spec, row, column
        self.across = _across(spec)
        top, bottom, left, right = spec.padding
        self.rows = self.span(0, row, spec.height, top, bottom)
        self.columns = self.span(1, column, spec.width, left, right)

    def span(self, axis: int, at: str, size: Size, before: int, after: int) -> dict[str, str]:
        """Along one axis: the input at the first tap, the taps inside, and how many count."""
        w, step, taps = self.w, self.spec.dilation[axis], self.spec.kernel[axis]
        start = w.sub(w.mul(at, self.spec.stride[axis]), before)
        extent = w.size(size)
        first, last = (
            w.least(w.ceil(w.most(n, 0), step), taps)
            for n in (w.sub("0", start), w.sub(extent, start))
        )
        padded = w.sub(w.add(extent, after), start)
        return {"start": start, "first": first, "last": last, "all": w.least(padded, taps)}

    def reduce(self, n: str, channel: str, lanes: int, vectors: int) -> None:
        """Pool `vectors` vectors from this channel on, and write them."""
        w, spec = self.w, self.spec
        kind = f"<{lanes} x float>"
        row_step, column_step = w.size(spec.x[2]), w.size(spec.x[3])
        base = w.add(w.mul(n, w.size(spec.x[0])), w.mul(channel, w.size(spec.x[1])))
        empty = "zeroinitializer" if spec.kind == "avg" else "splat (float 0xFFF0000000000000)"
        sums = [(kind, empty)] * vectors
        with w.loop(self.rows["first"], self.rows["last"], carried=sums) as row:
            high = w.add(self.rows["start"], w.mul(row.index, spec.dilation[0]))
            line = w.add(base, w.mul(high, row_step))
            inner = [(kind, value) for value in row.carried]
            with w.loop(self.columns["first"], self.columns["last"], carried=inner) as column:
                wide = w.add(self.columns["start"], w.mul(column.index, spec.dilation[1]))
                at = w.add(line, w.mul(wide, column_step))
                place = w.offset(w.pointer(0), STORAGE[spec.dtype], at)
                column.next = [
                    self.combine(kind, value, self.load(place, j * lanes, lanes))
                    for j, value in enumerate(column.carried)
                ]
            row.next = column.results
        for j, value in enumerate(row.results):
            self.write(n, w.add(channel, j * lanes), self.finish(value, lanes), lanes)

    def load(self, place: str, at: int, lanes: int) -> str:
        """A vector of float32; along the columns, of those that are a stride apart."""
        w, spec = self.w, self.spec
        element = memory_element(spec.dtype)
        step = spec.stride[1] if self.across and lanes > 1 else 1
        place = w.offset(place, element, at)
        wide = f"<{lanes * step} x {element}>"
        value = w(f"load {wide}, ptr {place}, align {BYTES[spec.dtype]}")
        if step > 1:
            picked = ", ".join(f"i32 {k * step}" for k in range(lanes))
            value = w(f"shufflevector {wide} {value}, {wide} poison, <{lanes} x i32> <{picked}>")
        return arrived(w, value, spec.dtype, lanes)

    def combine(self, kind: str, old: str, new: str) -> str:
        """One more value."""
        w = self.w
        if self.spec.kind == "avg":
            return w(f"fadd {REASSOCIATE} {kind} {old}, {new}")
        flags = kind.replace("float", "i1")
        more, strange = w(f"fcmp ogt {kind} {new}, {old}"), w(f"fcmp uno {kind} {new}, {new}")
        taken = w(f"or {flags} {more}, {strange}")
        return w(f"select {flags} {taken}, {kind} {new}, {kind} {old}")

    def finish(self, value: str, lanes: int) -> str:
        """The pooled values in the type of the result."""
        w, spec = self.w, self.spec
        if spec.kind == "avg":
            count = w(f"sitofp i64 {self.divisor()} to float")
            count = w.splat("float", count, lanes)
            value = w(f"fdiv <{lanes} x float> {value}, {count}")
        return leaving(w, value, spec.dtype, lanes)

    def divisor(self) -> str:
        """What a sum is divided by."""
        w, spec = self.w, self.spec
        if spec.divisor_override is not None:
            return str(spec.divisor_override)
        if spec.count_include_pad:
            return w.mul(self.rows["all"], self.columns["all"])
        counts = [w.sub(span["last"], span["first"]) for span in (self.rows, self.columns)]
        return w.most(w.mul(*counts), 1)

    def write(self, n: str, channel: str, value: str, lanes: int) -> None:
        """Write a vector, or its elements one by one if they do not lie together."""
        w, spec = self.w, self.spec
        element, size = memory_element(spec.dtype), BYTES[spec.dtype]
        at = "0"
        for index, stride in zip((n, channel, self.row, self.column), spec.out, strict=True):
            at = w.add(at, w.mul(index, w.size(stride)))
        place = w.offset(w.pointer(1), element, at)
        step = spec.out[3] if self.across else spec.out[1]
        if lanes == 1 or step == 1:
            w.do(f"store <{lanes} x {element}> {value}, ptr {place}, align {size}")
            return
        for lane in range(lanes):
            one = w(f"extractelement <{lanes} x {element}> {value}, i64 {lane}")
            to = w.offset(place, element, w.mul(str(lane), w.size(step)))
            w.do(f"store {element} {one}, ptr {to}, align {size}")
