"""What a kernel is to compute, in sizes, strides and loop nests: no word of how, and no LLVM.

Each request says which words of the argument block hold its addresses. An `epilogue` is a nest
without reduced axes: what is done with each result, which stands in it as `given` 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchair.codegen.loops import Access, Expr, Nest, Store
from torchair.codegen.sizes import Element, Size, SizeArgument

Strides3 = tuple[Size, Size, Size]
Strides4 = tuple[Size, Size, Size, Size]


@dataclass(frozen=True)
class Loops:
    """A loop nest whose sizes are ints or words. The last axis is the one to put vectors along. No
    store changes what another point of the nest loads."""

    nest: Nest
    more: tuple[Nest, ...] = ()  # other pieces of the same work, each like the first
    batch_invariant: bool = False  # whether sums must not depend on how many of them there are
    scratch: int | None = None  # the word with the address of scratch memory, if there is any

    def __str__(self) -> str:
        return "\n".join(map(str, (self.nest, *self.more)))


FOUR_BITS_STEP = 8
"""Groups of four-bit integers are multiples of this."""


@dataclass(frozen=True)
class Weight:
    """Integers that stand for the numbers of B, which are (integer + offset) * scale.

    Each column has a scale, or each piece of `group` numbers of a column, in a matrix as B is:
    [groups, n] where B is "kn", [n, groups] where it is "nk".
    """

    bits: Literal[8, 4]  # that hold every one of the integers; in memory they are bytes
    group: int  # k where a column has one scale
    scales: Element  # their type in memory: f32, bf16 or f16
    offsets: Element | Literal[""]  # that of offsets, which may also be i8; "" where there are none


@dataclass(frozen=True)
class Outer:
    """Batches of batches: matrices that one stride does not reach, such as those of the heads of
    several sequences. A batch of a product then counts through all of them."""

    inner: Size  # matrices from one outer batch to the next
    a: Size  # stride of A over outer batches
    b: Size  # and of B


@dataclass(frozen=True)
class MatMul:
    """The product C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n].

    Strides count elements. Word 0 of the argument block is the address of A, word 1 that of B,
    and word 2 that of scratch memory, if the kernel wants some. With `weight` B is constant, and
    words 3 and 4 are the addresses of its scales and offsets. Of bytes, B is constant too, sums
    are int32, and word 3 is the address of B once more.
    """

    dtype: Element  # of A and B in memory: f32, bf16, f16, f64 or i8
    batch: Size
    m: Size
    n: Size
    k: Size
    a: Strides3  # of A over (batch, m, k)
    b: Strides3  # of B over (batch, k, n); unused when packed
    constant: Literal["", "kn", "nk"] = ""
    """The dims of B if it is one matrix, the same in every call: it may be laid out anew."""
    weight: Weight | None = None  # what the integers of B mean, where it holds integers
    batch_invariant: bool = False
    """Whether a row of results must have the same bits whatever m and the threads are."""
    outer: Outer | None = None  # where strides over the batch are those of an inner batch

    @property
    def integers(self) -> Weight:
        """The meaning of the integers of a B that holds some."""
        assert self.weight is not None
        return self.weight


@dataclass(frozen=True)
class Product:
    """A matrix product and what is done with its results. The last axis of the epilogue is n; the
    axes before it count the `batch * m` rows."""

    matmul: MatMul
    epilogue: Nest

    def __str__(self) -> str:
        return f"{self.matmul}\n{self.epilogue}"


@dataclass(frozen=True)
class Partner:
    """A second matrix as large as B of a product: a kernel takes the same rows of both,
    and the epilogue gets its results as `given` 1. Scales and offsets are as far behind it as
    those of B."""

    word: int  # its address
    b: Strides3


FAR = 1 << 16
"""Words of the second step that a kernel computes begin here, those of the third at twice that."""


@dataclass(frozen=True)
class Joint:
    """A product with what the same kernel computes: a `partner`, and a `prologue`, a nest whose one
    store is A itself, which with `keep` is also stored where it belongs."""

    product: Product
    partner: Partner | None = None
    prologue: Nest | None = None
    keep: bool = False

    def __str__(self) -> str:
        return f"{self.product}\n{self.partner}\n{self.prologue}\n{self.keep}"


WINOGRAD = 2
"""The default for patches of Winograd's method."""


@dataclass(frozen=True)
class Conv:
    """A convolution over (batch, channels, height, width); in one dimension the height is 1.

    `padding` is (top, bottom, left, right). `x` are the strides of the input over (n, c, h, w), in
    elements; any layout is right, channels-last is the fast one. Word 0 is the address of the
    input, word 1 that of the weights [out, in of group, height, width], word 2 scratch memory.

    `winograd` is the largest patch of results, per side, that Winograd's method may use where it
    pays: 0 for direct sums only, 2 for patches about as exact as a direct sum, 4 for faster ones
    with some five times its rounding error. With patches an infinite or NaN input also spoils the
    other results of its patch.
    """

    dtype: Element  # "f32", "bf16" or "f16", of the input and of the weights
    batch: Size
    channels: int
    height: Size
    width: Size
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    x: Strides4
    winograd: int = WINOGRAD

    @property
    def group_in(self) -> int:
        """Input channels of a group."""
        return self.channels // self.groups

    @property
    def group_out(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @property
    def depthwise(self) -> bool:
        """Whether each channel is a group of its own, so that channels can share a vector."""
        return self.groups == self.channels == self.out_channels and self.channels > 1

    @property
    def results(self) -> tuple[int, int] | None:
        """Rows and columns of the result, if the size of the image is known."""
        if isinstance(self.height, SizeArgument) or isinstance(self.width, SizeArgument):
            return None
        top, bottom, left, right = self.padding
        rows = (self.height + top + bottom - self.extent(0)) // self.stride[0] + 1
        return rows, (self.width + left + right - self.extent(1)) // self.stride[1] + 1

    def extent(self, axis: int) -> int:
        """How many input rows (axis 0) or columns (axis 1) one result depends on."""
        return (self.kernel[axis] - 1) * self.dilation[axis] + 1


@dataclass(frozen=True)
class Convolution:
    """A convolution with constant weights, which may be laid out anew, and what is done with its
    results: an epilogue over (n, c, h, w)."""

    conv: Conv
    epilogue: Nest

    def __str__(self) -> str:
        return f"{self.conv}\n{self.epilogue}"


@dataclass(frozen=True)
class Attention:
    """out = softmax(scale * q kᵀ + mask) v, with sums in float32.

    Strides count elements over (batch, head, position, feature). Query head h reads key head
    `h // (heads // kv_heads)`. With `causal`, query i sees keys 0..i. A `mask` is "bool" (true
    where a key is seen) or the type of numbers to be added; its strides go over (batch, head,
    query, key) and are 0 where it is repeated. `lse` are the strides over (batch, head, query) of
    a second, float32 output: the logarithm of the sum of exponentials. A query that sees no key
    gets zeros in both outputs, as in torch.

    Words: the addresses of q, k, v, mask, out, lse (mask and lse may be anything where there is
    none), and scratch memory.
    """

    dtype: Element  # "f32", "bf16" or "f16": of q, k, v and out
    batch: Size
    heads: Size
    kv_heads: Size
    length: Size  # queries
    span: Size  # keys
    width: int  # features of q and k
    value_width: int  # features of v and out
    q: Strides4
    k: Strides4
    v: Strides4
    out: Strides4
    scale: float
    causal: bool = False
    mask: Element | None = None
    mask_strides: Strides4 = (0, 0, 0, 0)
    lse: Strides3 | None = None
    batch_invariant: bool = False  # whether no bit of a query's outputs may depend on `batch`

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


@dataclass(frozen=True)
class Pool:
    """A pooling over (batch, channels, height, width). Words: input, result.

    `padding` is (top, bottom, left, right). The sizes of the result are given, so that the caller
    decides how they are rounded. `x` and `out` are strides over (n, c, h, w), in elements. As in
    torch a maximum over a NaN is NaN, and padding never is the maximum.
    """

    kind: Literal["max", "avg"]
    dtype: Element  # "f32", "bf16" or "f16"
    batch: Size
    channels: Size
    height: Size
    width: Size
    out_height: Size
    out_width: Size
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    x: Strides4
    out: Strides4
    count_include_pad: bool = True
    divisor_override: int | None = None


Request = Loops | Product | Joint | Convolution | Attention | Pool


def stored(
    axes: tuple[Size, ...],
    strides: tuple[Size, ...],
    dtype: Element,
    word: int,
    given: Element = "f32",
) -> Nest:
    """The epilogue that only writes results, which come as `given`, to memory at a word."""
    return Nest(axes, (Store(Access(word, dtype, strides), Expr("given", given, data=0)),))
