"""Operators that a special generator serves, why a node of them cannot be served, and what a unit
asks a target for: one method for each kind of unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torchair.codegen import requests
from torchair.codegen.loops import Nest, join_rows, simplify, with_words
from torchair.codegen.pieces import pieces
from torchair.codegen.program import SIZES_AT, Argument, AuxMemory, ConstantContent
from torchair.codegen.sizes import Element, Int
from torchair.codegen.target import Anchor, AnchorKind, KernelOrder, Target
from torchair.engine.fuse.units import NodeCheck, Unit, UnitKind
from torchair.engine.lower import Operand, build_nest
from torchair.engine.strides import Meta
from torchair.engine.units import emitter
from torchair.engine.units.spacing import batch_strides, one_stride, steps_along
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ge.shapes import Dim, broadcast
from torchair.log import debug_print
from torchair.operators import Op
from torchair.operators.attention import is_plain
from torchair.operators.contraction import Window
from torchair.operators.core import TYPES, loaded_rows, operands_of

LEFT_UP_CAUSAL = 2  # value of sparse_mode: query i sees keys up to i
_ACTIVATIONS = ("f32", "bf16", "f16")


def factors(node: Node) -> tuple[Value, Value]:
    """The two matrices of a product."""
    ports = ("x", "weight") if node.type == emitter.QUANTISED else ("x1", "x2")
    first, second = (node.value_on(p) for p in ports)
    return first, second


def transposed(node: Node, which: int) -> bool:
    """Whether operand 1 or 2 of a matrix product is to be read transposed."""
    if node.type == emitter.QUANTISED:
        return bool(node.attr("transpose_x" if which == 1 else "transpose_weight"))
    adjoint = node.type.startswith("Batch")
    return bool(node.attr(f"adj_x{which}" if adjoint else f"transpose_x{which}"))


def anchors(
    target: Target, described: Mapping[AnchorKind, Callable[[Node], Anchor]]
) -> dict[str, tuple[UnitKind, NodeCheck]]:
    """By operator type: the kind of unit, and a function that says why a node cannot be one:
    because no request says what it is, or because the target declines it."""
    unfit: dict[AnchorKind, NodeCheck] = {
        "matmul": _product_unfit,
        "conv": _conv_unfit,
        "attention": _attention_unfit,
        "pool": _pool_unfit,
    }

    def check(kind: AnchorKind) -> NodeCheck:
        return lambda node: unfit[kind](node) or target.declines(described[kind](node))

    found = loaded_rows().items()
    return {t: (row.anchor, check(row.anchor)) for t, row in found if row.anchor is not None}


def descriptions(
    constant: Callable[[Value], bool], batch_invariant: bool = False
) -> dict[AnchorKind, Callable[[Node], Anchor]]:
    """What a target gets to know of nodes, by kind."""

    def conv(node: Node) -> Anchor:
        return Anchor("conv", _type_of(node, "x"), constant=constant(node.value_on("filter")))

    def product(node: Node) -> Anchor:
        first, second = factors(node)
        quantised = node.type in (emitter.QUANTISED, emitter.INTEGERS)
        same = all(map(constant, emitter.parameters(node))) if quantised else constant(second)
        return Anchor(
            "matmul",
            TYPES.get(first.dtype),
            same,
            rows=_rows(node),
            along=transposed(node, 2),
            quantised=quantised,
            turned=transposed(node, 1),
            sizes=_sizes(node),
            batch_invariant=batch_invariant,
        )

    return {"matmul": product, "conv": conv, "attention": _attention, "pool": _pool}


def _rows(node: Node) -> int | None:
    """Rows of a product with one matrix, if they are known."""
    first, second = (value.shape or () for value in factors(node))
    dims = [first[-1], *first[:-2]] if transposed(node, 1) else list(first[:-1])
    return _product(dims) if len(second) == 2 else None


def _sizes(node: Node) -> tuple[int | None, ...]:
    """Batch, rows, columns and sum of a product, None where they are not known. With one matrix all
    rows are those of one product."""
    first, second = (list(value.shape or ()) for value in factors(node))
    if transposed(node, 1):
        first[-2:] = first[:-3:-1]
    if transposed(node, 2):
        second[-2:] = second[:-3:-1]
    outer, rows = list(broadcast(first[:-2], second[:-2])), [first[-2]]
    if len(second) == 2:
        outer, rows = [], first[:-1]
    return tuple(map(_product, (outer, rows, second[-1:], first[-1:])))


def _product(dims: Sequence[Dim]) -> int | None:
    """The product of dims, None if one is not known."""
    known = [d for d in dims if isinstance(d, int)]
    return math.prod(known) if len(known) == len(dims) else None


def _type_of(node: Node, port: str) -> Element | None:
    return TYPES.get(node.value_on(port).dtype)


def _pool(node: Node) -> Anchor:
    return Anchor("pool", _type_of(node, "x"))


def _attention(node: Node) -> Anchor:
    shapes = [node.value_on("query").shape, node.values_on("value")[0].shape]
    widths = [s[-1] if s else None for s in shapes]
    known = [w for w in widths if isinstance(w, int)]
    width = max(known) if len(known) == len(widths) else None
    length = (node.value_on("query").shape or (None,) * 4)[2]
    rows = length if isinstance(length, int) else None
    return Anchor("attention", _type_of(node, "query"), width=width, rows=rows)


def _product_unfit(node: Node) -> str | None:
    if min(len(value.shape or ()) for value in factors(node)) < 2:
        return "it is not a product of matrices"
    if node.type == emitter.QUANTISED:
        return _quantised_unfit(node)
    if node.type == emitter.INTEGERS:
        return _integers_unfit(node)
    return None if node.inputs.get("offset_w") is None else "it is quantised"


def _quantised_unfit(node: Node) -> str | None:
    values = emitter.parameters(node)
    shapes = [v.shape or () for v in values]
    types = [TYPES.get(v.dtype) for v in values]
    if any(not isinstance(d, int) for shape in shapes for d in shape) or len(shapes[0]) != 2:
        return "its weights have no fixed dims"
    if node.inputs.get("quant_scale") is not None or node.attr("transpose_x"):
        return "its results are quantised, or its first factor is transposed"
    known = types[0] == "i8" and types[1] in _ACTIVATIONS
    if not known or not {*types[2:]} <= {*_ACTIVATIONS, "i8"}:
        return "its integers, scales or offsets are of a type that this generator does not know"
    return None if group_of(node) else "its groups do not divide the features"


def _integers_unfit(node: Node) -> str | None:
    shape = node.value_on("x2").shape or ()
    if any(not isinstance(d, int) for d in shape) or len(shape) != 2:
        return "its weights have no fixed dims"
    if any(TYPES.get(value.dtype) != "i8" for value in factors(node)):
        return "its factors are no bytes"
    others = [node.inputs.get(port) for port in ("offset", "bias", "pertoken_scale")]
    plain = node.attr("dtype") == DataType.DT_INT32 and others == [None] * 3
    return None if plain else "its results are more than sums"


def group_of(node: Node) -> int | None:
    """Numbers of a column of a quantised weight that share a scale; None if no number fits."""
    shapes = (value.shape or () for value in emitter.parameters(node))
    weight, *others = ([d for d in shape if isinstance(d, int)] for shape in shapes)
    n, k = weight if transposed(node, 2) else reversed(weight)
    counts = {_groups(dims, n, transposed(node, 2)) for dims in others}
    if len(counts) != 1 or (groups := counts.pop()) is None or not k or k % groups:
        return None
    given = node.attr("antiquant_group_size")
    return k // groups if groups == 1 or given in (0, k // groups) else None


def _groups(dims: Sequence[int], n: int, turned: bool) -> int | None:
    """How many groups scales of these dims are for."""
    if math.prod(dims) in (1, n) and max(dims, default=1) in (1, n):
        return 1
    if len(dims) != 2 or dims[0 if turned else 1] != n:
        return None
    return dims[1 if turned else 0]


def _conv_unfit(node: Node) -> str | None:
    shape = node.value_on("filter").shape or ()
    if any(not isinstance(d, int) for d in shape) or node.inputs.get("offset_w") is not None:
        return "its weights have no fixed dims"
    known = str(Op(node).attr("data_format")).startswith("NC") and len(shape) == 4
    return None if known else "its layout is not known"


def _attention_unfit(node: Node) -> str | None:
    if not is_plain(Op(node)):
        return "it has operands, a layout or a mask that the generated kernel does not know"
    if node.outputs[1].uses and not Op(node).attr("softmax_lse_flag"):
        return "sums that were not asked for are read"
    return None


def _pool_unfit(node: Node) -> str | None:
    if any(v.uses for v in node.outputs[1:]):
        return "the positions of the maxima are wanted"
    op, plain = Op(node), len(node.value_on("x").shape or ()) == 4
    if node.type == "AvgPoolV2":
        plain &= op.attr("data_format") == "NCHW" and op.attr("padding_mode") == "CALCULATED"
    return None if plain else "its layout is not known"


def pool_options(node: Node) -> dict[str, Any]:
    """What a pooling operator says in its attributes, in the words of the generator."""
    op = Op(node)
    if node.type == "MaxPoolWithArgmaxV1":
        kernel, stride, pads, dilation = (
            tuple(op.attr(a)[1:3]) for a in ("ksize", "strides", "pads", "dilation")
        )
        padding = (pads[0], pads[0], pads[1], pads[1])
        return dict(kind="max", kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    top, bottom, left, right = op.attr("pads")
    return dict(
        kind="avg",
        kernel=tuple(op.attr("ksize")[2:]),
        stride=tuple(op.attr("strides")[2:]),
        padding=(top, bottom, left, right),
        dilation=(1, 1),
        count_include_pad=not op.attr("exclusive"),
        divisor_override=op.attr("divisor_override") or None,
    )


class UnitWriting:
    """Making the kernel of a unit. Words are handed out in the order in which generators expect
    them."""

    def __init__(
        self,
        unit: Unit,
        sizes: emitter.UnitSizes,
        target: Target,
        constant: Callable[[Value], bool],
        bits: Callable[[Value], int],
        batch_invariant: bool = False,
    ) -> None:
        """`bits` tells how many the numbers of a constant need: 0, 4 or 8."""
        self.batch_invariant = batch_invariant
        self.unit, self.sizes, self.target = unit, sizes, target
        self.constant, self.bits = constant, bits
        self.arguments: list[Argument] = []
        self.word = sizes.word

    def run(self) -> emitter.OrderedKernel:
        """The kernel, ordered."""
        ask: dict[UnitKind, Callable[[], requests.Request]] = {
            "loops": self._loops,
            "matmul": self._matmul,
            "conv": self._conv,
            "attention": self._attention,
            "pool": self._pool,
        }
        request = ask[self.unit.kind]()
        debug_print(4, lambda: f"torchair kernel {self._label()}\n{request}")
        self.sizes.seal()
        order = KernelOrder(self.target, request, self._label())
        return emitter.OrderedKernel(
            self.target, order, self.arguments, self.sizes, _flops(self.unit)
        )

    # ---- words ----

    def address(self, value: Value, content: ConstantContent = "own") -> int:
        """The next word, for the address of a value."""
        number = [*self.unit.inputs, *self.unit.outputs].index(value)
        return self._next(Argument(number, content if self.constant(value) else None))

    def _next(self, argument: Argument) -> int:
        self.arguments.append(argument)
        if len(self.arguments) > SIZES_AT:
            raise emitter.NotNative(f"more than {SIZES_AT} operands")
        return len(self.arguments) - 1

    def _fault(self) -> int:
        """The word where a failed test is noted down."""
        fault = Argument(AuxMemory.FAULT)
        return self.arguments.index(fault) if fault in self.arguments else self._next(fault)

    def _operand(self, value: Value) -> Operand:
        dims, strides = self.sizes.dims(value), self.sizes.strides(value)
        return Operand(self.address(value), TYPES[value.dtype], dims, strides)

    def _all(self, sizes: Sequence[Int]) -> Any:
        return tuple(self.word(n) for n in sizes)

    def _label(self) -> str:
        return "_".join(dict.fromkeys(n.type.lower() for n in self.unit.nodes))[:60]

    # ---- loops ----

    def _loops(self) -> requests.Loops:
        operands = {v: self._operand(v) for v in (*self.unit.inputs, *self.unit.outputs)}
        nest = build_nest(
            self.unit.group,
            operands,
            self.unit.outputs,
            self.sizes.fact,
            self._fault,
            self.batch_invariant,
        )
        parts = pieces(nest) if self.target.piecewise else [nest]
        first, *more = (with_words(simplify(part), self.word) for part in parts)
        scratch = None
        if first.reduced and self.target.shares_sums:
            scratch = self._next(Argument(AuxMemory.SCRATCH))
        return requests.Loops(first, tuple(more), self.batch_invariant, scratch)

    # ---- products ----

    def _matmul(self) -> requests.Product:
        node = self.unit.anchor
        a, b = factors(node)
        batch, m, n, k, sa, sb, outer = self._product(node)
        one = self.constant(b) and len(b.shape or ()) == 2
        if emitter.parameters(node):
            n, k = (int(d) for d in (n, k))  # those of constants
        order: Literal["kn", "nk"] = "nk" if transposed(node, 2) else "kn"
        spec = requests.MatMul(
            TYPES[a.dtype],
            self.word(batch),
            self.word(m),
            self.word(n),
            self.word(k),
            self._all(sa),
            self._all(sb),
            order if one else "",
            self._weight(node) if node.type == emitter.QUANTISED else None,
            self.batch_invariant,
            None if outer is None else requests.Outer(*self._all(outer)),
        )
        self.address(a)
        self.address(b)
        self._next(Argument(AuxMemory.SCRATCH))
        if node.type == emitter.INTEGERS:
            self.address(b)
        elif node.type == emitter.QUANTISED:
            scales, *offsets = emitter.parameters(node)[1:]
            self.address(scales)
            self.address(offsets[0] if offsets else scales)
        return requests.Product(spec, self._epilogue())

    def _weight(self, node: Node) -> requests.Weight:
        """What the integers of a quantised weight mean."""
        weight, scales, *offsets = emitter.parameters(node)
        group = group_of(node)
        assert group is not None
        narrow = self.bits(weight) <= 4 and group % requests.FOUR_BITS_STEP == 0
        kept = TYPES[offsets[0].dtype] if offsets and self.bits(offsets[0]) else ""
        return requests.Weight(4 if narrow else 8, group, TYPES[scales.dtype], kept)

    def _product(
        self, node: Node
    ) -> tuple[Int, Int, Int, Int, list[Int], list[Int], list[Int] | None]:
        """Batch, m, n, k, the strides of both operands of a matrix product, and what is known of
        outer batches."""
        a, b = factors(node)
        dims_a, st_a = list(self.sizes.dims(a)), list(self.sizes.strides(a))
        dims_b, st_b = list(self.sizes.dims(b)), list(self.sizes.strides(b))
        if transposed(node, 1):
            dims_a[-2:], st_a[-2:] = dims_a[:-3:-1], st_a[:-3:-1]
        if transposed(node, 2):
            dims_b[-2:], st_b[-2:] = dims_b[:-3:-1], st_b[:-3:-1]
        m, k, n = dims_a[-2], dims_a[-1], dims_b[-1]
        if len(dims_b) == 2 and len(dims_a) > 2:  # rows of all batches are rows
            rows = one_stride(dims_a[:-1], st_a[:-1])
            return 1, _total(dims_a[:-1]), n, k, [0, rows, st_a[-1]], [0, *st_b], None
        dims = _broadcast(dims_a[:-2], dims_b[:-2])
        steps_a = steps_along(dims, dims_a[:-2], st_a[:-2])
        steps_b = steps_along(dims, dims_b[:-2], st_b[:-2])
        found = batch_strides(dims, steps_a, steps_b, self.target.outer_batches)
        near_a, near_b = found.near
        strides = [near_a, *st_a[-2:]], [near_b, *st_b[-2:]]
        outer = None if found.far is None else [found.inner, *found.far]
        return _total(dims), m, n, k, *strides, outer

    def _conv(self) -> requests.Convolution:
        node = self.unit.anchor
        x, weight, window = node.value_on("x"), node.value_on("filter"), Window(Op(node))
        batch, channels, height, width = self.sizes.dims(x)
        out_channels, _, kh, kw = (int(d) for d in self.sizes.dims(weight))
        spec = requests.Conv(
            dtype=TYPES[x.dtype],
            batch=self.word(batch),
            channels=int(channels),
            height=self.word(height),
            width=self.word(width),
            out_channels=out_channels,
            kernel=(kh, kw),
            stride=tuple(window.strides),
            dilation=tuple(window.dilations),
            padding=(window.before[0], window.after[0], window.before[1], window.after[1]),
            groups=window.groups,
            x=self._all(self.sizes.strides(x)),
            winograd=0 if self.batch_invariant else requests.WINOGRAD,
        )
        self.address(x)
        self.address(weight, "own" if self.unit.folded is None else "scaled")
        self._next(Argument(AuxMemory.SCRATCH))
        return requests.Convolution(spec, self._epilogue(rows=False))

    def _epilogue(self, rows: bool = True) -> Nest:
        """What is done with each vector of results: bias, the group's nodes, stores."""
        group = self.unit.group
        read = [v for n in group.nodes for v in operands_of(n) if v in self.unit.inputs]
        operands = {v: self._operand(v) for v in dict.fromkeys([*read, *self.unit.outputs])}
        if group.bias is not None:
            operands[group.bias[0]] = self._bias(group.bias[0])
        rounds = self.batch_invariant
        nest = build_nest(group, operands, self.unit.outputs, self.sizes.fact, rounds=rounds)
        return with_words(join_rows(nest) if rows else nest, self.word)

    def _bias(self, value: Value) -> Operand:
        if self.unit.folded is None:
            return self._operand(value)
        return Operand(self.address(value, "shift"), "f32", self.sizes.dims(value), (1,))

    # ---- the others ----

    def _attention(self) -> requests.Attention:
        node, op = self.unit.anchor, Op(self.unit.anchor)
        q, k, v = node.value_on("query"), node.values_on("key")[0], node.values_on("value")[0]
        out, lse = node.outputs
        shift = node.inputs.get("pse_shift")
        mask = shift if isinstance(shift, Value) else None
        batch, heads, length, width = self.sizes.dims(q)
        kv_heads, span = self.sizes.dims(k)[1:3]
        wide = lse in self.unit.outputs
        so = self._all(self.sizes.strides(out))
        spec = requests.Attention(
            dtype=TYPES[q.dtype],
            batch=self.word(batch),
            heads=self.word(heads),
            kv_heads=self.word(kv_heads),
            length=self.word(length),
            span=self.word(span),
            width=int(width),
            value_width=int(self.sizes.dims(v)[3]),
            q=self._all(self.sizes.strides(q)),
            k=self._all(self.sizes.strides(k)),
            v=self._all(self.sizes.strides(v)),
            out=(so[0], so[2], so[1], so[3]) if op.attr("input_layout") == "BNSD_BSND" else so,
            scale=op.attr("scale"),
            causal=op.attr("sparse_mode") == LEFT_UP_CAUSAL,
            mask=TYPES[mask.dtype] if mask is not None else None,
            mask_strides=self._all(self._mask_strides(mask)),
            lse=self._all(self.sizes.strides(lse))[:3] if wide else None,
            batch_invariant=self.batch_invariant,
        )
        for x in (q, k, v, mask if mask is not None else q, out, lse if wide else out):
            self.address(x)
        self._next(Argument(AuxMemory.SCRATCH))
        return spec

    def _mask_strides(self, mask: Value | None) -> tuple[Int, ...]:
        """Over (batch, head, query, key), 0 where the mask is broadcast."""
        if mask is None:
            return (0, 0, 0, 0)
        dims, strides = self.sizes.dims(mask), self.sizes.strides(mask)
        own = [0 if emitter.is_one(n) else s for n, s in zip(dims, strides, strict=True)]
        return (*[0] * (4 - len(own)), *own)

    def _pool(self) -> requests.Pool:
        node = self.unit.anchor
        x, out = node.value_on("x"), node.outputs[0]
        n, c, h, w = self._all(self.sizes.dims(x))
        out_h, out_w = self._all(self.sizes.dims(out))[2:]
        spec = requests.Pool(
            dtype=TYPES[x.dtype],
            batch=n,
            channels=c,
            height=h,
            width=w,
            out_height=out_h,
            out_width=out_w,
            x=self._all(self.sizes.strides(x)),
            out=self._all(self.sizes.strides(out)),
            **pool_options(node),
        )
        self.address(x)
        self.address(out)
        return spec


def _flops(unit: Unit) -> Callable[[Sequence[Meta]], float]:
    """Multiplications of a unit's product, if it is one."""
    values = [*unit.inputs, *unit.outputs]
    if unit.kind == "matmul":
        a = values.index(factors(unit.anchor)[0])
        return lambda metas: metas[-1].numel() * metas[a].shape[-1]
    if unit.kind == "conv":
        f = values.index(unit.anchor.value_on("filter"))
        return lambda metas: metas[-1].numel() * (metas[f].numel() // metas[f].shape[0])
    if unit.kind == "attention":
        k = values.index(unit.anchor.values_on("key")[0])
        return lambda metas: 2.0 * metas[len(unit.inputs)].numel() * metas[k].shape[-2]
    return lambda metas: 0.0


def _total(dims: Sequence[Int]) -> Int:
    total: Int = 1
    for d in dims:
        total = total * d
    return total


def _broadcast(a: Sequence[Int], b: Sequence[Int]) -> list[Int]:
    rank = max(len(a), len(b))
    a, b = [*[1] * (rank - len(a)), *a], [*[1] * (rank - len(b)), *b]
    return [y if emitter.is_one(x) else x for x, y in zip(a, b, strict=True)]
