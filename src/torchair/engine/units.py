"""From a fused unit to a native call: the kernel, and the words it is called with.

Static graphs get kernels with their sizes in the code. In dynamic graphs sizes and strides are
Numbers, so that a kernel made for one plan serves the others; `Emitter` keeps what it made, and a
plan for new sizes finds its kernels there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.catalog import Op
from torchair.codegen.abi import Kernel, Size
from torchair.codegen.llvm.attention import Attention, attention
from torchair.codegen.llvm.attention import scratch_bytes as attention_scratch
from torchair.codegen.llvm.matmul import MatMul, matmul
from torchair.codegen.llvm.matmul import scratch_bytes as matmul_scratch
from torchair.codegen.llvm.nest import emit_point, print_nest
from torchair.codegen.llvm.target import Target
from torchair.codegen.llvm.writer import KernelWriter
from torchair.codegen.loops import Nest, join_rows, simplify, with_words
from torchair.codegen.numbers import Book, Int, Number
from torchair.engine.fuse import Unit, is_number, operands_of
from torchair.engine.lower.build import Operand, build_nest
from torchair.engine.lower.core import TYPES
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Sym, is_static

LEFT_UP_CAUSAL = 2
_IN_CACHE = 1 << 18  # bytes that come from a cache
_WORDS = 64  # operands of a kernel at most; words from here on are sizes


class NotNative(Exception):
    """A unit that the generators cannot serve with these sizes and strides."""


@dataclass(frozen=True)
class Packed:
    """A constant operand laid out anew for a kernel."""

    value: Value
    how: str  # "linear": [N, K] rows; "matrix": [K, N]


Place = Value | Packed | None
"""What an address word holds: a value, a packed constant, or (None) scratch memory."""


@dataclass(frozen=True)
class NativeCall:
    """A kernel with its operands, in the order of its words, and the numbers after them."""

    kernel: Kernel
    operands: tuple[Place, ...]
    numbers: tuple[int, ...]
    scratch: int  # bytes for each thread
    work: float  # microseconds that one thread needs, roughly


Layouts = Callable[[Value], torch.Tensor]
"""Meta tensor of a value that lives in memory."""


class Emitter:
    """Makes native calls for the units of one graph, each kind of kernel once."""

    def __init__(self, target: Target, dynamic: bool) -> None:
        self.target = target
        self.dynamic = dynamic
        self._made: dict[Any, list[_Made]] = {}
        self._signatures: dict[int, Any] = {}

    def emit(self, unit: Unit, fact: Callable[[Value], Fact], layout: Layouts) -> NativeCall:
        """The call that computes a unit; NotNative if there is none."""
        metas = [layout(v) for v in [*unit.inputs, *unit.outputs]]
        variants = self._made.setdefault(self._key(unit, fact, metas), [])
        for made in variants:
            if made.fits(metas):
                return made.call(unit, metas)
        sizes = _Sizes(unit, fact, metas, self.dynamic)
        variants.append(_Emission(self.target, unit, sizes).run())
        return variants[-1].call(unit, metas)

    def _key(
        self, unit: Unit, fact: Callable[[Value], Fact], metas: Sequence[torch.Tensor]
    ) -> Any:
        known = self._signatures.get(id(unit))
        if known is None:
            known = self._signatures[id(unit)] = signature(unit)
        if self.dynamic:
            return known, tuple(_pattern(m) for m in metas)
        contents = tuple(_contents(n, fact) for n in unit.group.nodes)
        return known, tuple((m.shape, m.stride()) for m in metas), contents


def _pattern(meta: torch.Tensor) -> Any:
    """What kernels for many sizes are chosen by: where memory is contiguous or repeated."""
    return meta.is_contiguous() or tuple(min(s, 2) for s in meta.stride())


@dataclass(frozen=True)
class _Made:
    """A kernel and how its words follow from the sizes of a plan."""

    kernel: Kernel
    order: tuple[int, ...]
    scratch: int
    sizes: _Sizes
    work: Callable[[Sequence[torch.Tensor]], float]

    def fits(self, metas: Sequence[torch.Tensor]) -> bool:
        """Whether the kernel is right for these sizes."""
        return self.sizes.holds(metas)

    def call(self, unit: Unit, metas: Sequence[torch.Tensor]) -> NativeCall:
        """The call for these sizes."""
        places = _places(unit)
        operands = tuple(places[k] for k in self.order)
        numbers = self.sizes.words(metas)
        return NativeCall(self.kernel, operands, numbers, self.scratch, self.work(metas))


class _Sizes:
    """Dims, strides and contents of a unit's values, as integers or as Numbers."""

    def __init__(
        self,
        unit: Unit,
        fact: Callable[[Value], Fact],
        metas: Sequence[torch.Tensor],
        dynamic: bool,
    ) -> None:
        self._fact = fact
        self._values = [*unit.inputs, *unit.outputs]
        self._metas = dict(zip(self._values, metas, strict=True))
        self._book = Book() if dynamic else None
        self._sources: list[tuple[int, int]] = []  # (operand, dim), or (operand, -1 - dim): stride
        self._symbols: dict[Any, Int] = {}
        self._recipe: Any = None
        if dynamic:
            self._learn()
        self._strides = {v: self._strides_of(k, v) for k, v in enumerate(self._values)}

    def _learn(self) -> None:
        dims = [
            (d.expr, k, i)
            for k, v in enumerate(self._values)
            for i, d in enumerate(v.shape or ())
            if isinstance(d, Sym)
        ]
        for expr, k, i in sorted(dims, key=lambda x: not x[0].is_Symbol):
            if expr not in self._symbols:
                number = self._number(k, i, self._metas[self._values[k]].shape[i])
                self._symbols[expr] = number

    def _number(self, operand: int, dim: int, value: int) -> Number:
        assert self._book is not None
        self._sources.append((operand, dim))
        return self._book.number(value)

    def dims(self, value: Value) -> tuple[Int, ...]:
        """Dims of any value of the unit."""
        if self._book is None:
            return tuple(self._fact(value).shape or ())  # type: ignore[arg-type]
        return tuple(self._of(d) for d in value.shape or ())

    def _of(self, dim: Any) -> Int:
        if not isinstance(dim, Sym):
            return int(dim)
        return _evaluated(dim.expr, self._symbols)

    def strides(self, value: Value) -> tuple[Int, ...]:
        """Strides of an operand."""
        return self._strides[value]

    def _strides_of(self, k: int, value: Value) -> tuple[Int, ...]:
        meta = self._metas[value]
        if self._book is None or (meta.is_contiguous() and is_static(value.shape)):
            return meta.stride()
        if meta.is_contiguous():
            return _contiguous(self.dims(value))
        return tuple(
            s if s in (0, 1) else self._number(k, -1 - i, s) for i, s in enumerate(meta.stride())
        )

    def fact(self, value: Value) -> Fact:
        """What rules see of a value."""
        if self._book is None:
            return self._fact(value)
        content = value.content
        if isinstance(content, tuple):
            content = tuple(self._of(c) for c in content)
        elif content is not None:
            content = self._of(content)
        return Fact(value.dtype, self.dims(value), content)  # type: ignore[arg-type]

    def word(self, first: int) -> Callable[[Int], Size]:
        """A function from sizes to what generators take; words begin at `first`."""
        if self._book is None:
            return lambda n: n  # type: ignore[return-value]
        book = self._book
        return lambda n: book.word(n, first)

    def seal(self) -> None:
        """No more decisions: from now on the kernel is asked whether it fits."""
        if self._book is not None:
            self._recipe = self._book.recipe()
        self._metas = {}

    def _given(self, metas: Sequence[torch.Tensor]) -> list[int]:
        return [metas[k].shape[i] if i >= 0 else metas[k].stride()[-1 - i] for k, i in self._sources]

    def holds(self, metas: Sequence[torch.Tensor]) -> bool:
        return self._recipe is None or self._recipe[0](self._given(metas))

    def words(self, metas: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return () if self._recipe is None else self._recipe[1](self._given(metas))


def _contiguous(dims: Sequence[Int]) -> tuple[Int, ...]:
    strides: list[Int] = []
    step: Int = 1
    for d in reversed(dims):
        strides.append(step)
        step = step * d
    return tuple(reversed(strides))


def _evaluated(expr: Any, known: Mapping[Any, Int]) -> Int:
    """A symbolic size as an integer or Number, from the sizes of the operands."""
    if expr in known:
        return known[expr]
    if expr.is_Integer:
        return int(expr)
    if expr.is_Add or expr.is_Mul:
        parts = [_evaluated(a, known) for a in expr.args]
        total = parts[0]
        for part in parts[1:]:
            total = total + part if expr.is_Add else total * part
        return total
    if type(expr).__name__ == "FloorDiv":
        a, b = (_evaluated(x, known) for x in expr.args)
        return a // b
    raise NotNative(f"the size {expr} does not follow from the operands")


def _places(unit: Unit) -> list[Place]:
    """What the words of a unit's kernel may hold, by number."""
    values: list[Place] = [*unit.inputs, *unit.outputs]
    return [*values, *(Packed(v, h) for v in unit.inputs for h in ("linear", "matrix")), None]


def signature(unit: Unit) -> Any:
    """What two units have in common that need the same code."""
    names: dict[Value, int] = {}
    for value in [*unit.inputs, *unit.outputs]:
        names.setdefault(value, len(names))

    def name(value: Value | None) -> Any:
        if value is None:
            return None
        if is_number(value):
            return ("number", value.node.attr("value").item(), value.dtype)
        return names.setdefault(value, len(names)), value.dtype

    rows = []
    for node in [*([unit.head] if unit.kind != "loops" else []), *unit.group.nodes]:
        data = set(operands_of(node))
        attrs = tuple((k, repr(a.value)) for k, a in sorted(node.attrs.items()))
        ins = tuple((p, name(v)) for p, _, v in node.slots() if v is None or v in data)
        rows.append((node.type, attrs, ins, tuple(name(v) for v in node.outputs)))
    constant = tuple(v.node.type == "Const" for v in unit.inputs)
    reduced = tuple(sorted(unit.group.reduced))
    shapes = tuple(v.shape for v in names)
    return unit.kind, tuple(rows), reduced, tuple(names[v] for v in unit.outputs), constant, shapes


def _contents(node: Node, fact: Callable[[Value], Fact]) -> Any:
    data = set(operands_of(node))
    return tuple(fact(v).content for v in node.values() if v not in data)


class _Emission:
    """Making one kernel."""

    def __init__(self, target: Target, unit: Unit, sizes: _Sizes) -> None:
        self.unit, self.target, self.sizes = unit, target, sizes
        self.order: list[int] = []  # numbers of places, see `_places`
        self.scratch = 0
        self.word: Callable[[Int], Size] = sizes.word(_WORDS)

    def run(self) -> _Made:
        make = {"loops": self._loops, "matmul": self._matmul, "attention": self._attention}
        kernel = make[self.unit.kind]()
        self.sizes.seal()
        return _Made(kernel, tuple(self.order), self.scratch, self.sizes, _work(self.unit))

    # ---- operands ----

    def operand(self, value: Value) -> Operand:
        """A value as an operand of a nest; it gets the next word."""
        dims, strides = self.sizes.dims(value), self.sizes.strides(value)
        return Operand(self.address(value), TYPES[value.dtype], dims, strides)

    def address(self, value: Value | None, how: str = "") -> int:
        """The next word, for the address of a value (None: scratch), packed if `how` says so."""
        inputs = self.unit.inputs
        values = [*inputs, *self.unit.outputs]
        if value is None:
            place = len(values) + 2 * len(inputs)
        elif how:
            place = len(values) + 2 * inputs.index(value) + ("linear", "matrix").index(how)
        else:
            place = values.index(value)
        self.order.append(place)
        if len(self.order) > _WORDS:
            raise NotNative(f"more than {_WORDS} operands")
        return len(self.order) - 1

    def _label(self) -> str:
        types = [n.type.lower() for n in self.unit.nodes]
        return "_".join(dict.fromkeys(types))[:60]

    # ---- kinds ----

    def _loops(self) -> Kernel:
        values = [*self.unit.inputs, *self.unit.outputs]
        operands = {v: self.operand(v) for v in values}
        nest = build_nest(self.unit.group, operands, self.unit.outputs, self.sizes.fact)
        return print_nest(with_words(simplify(nest), self.word), self.target, self._label())

    def _matmul(self) -> Kernel:
        node = self.unit.head
        a, b = value_on(node, "x1"), value_on(node, "x2")
        batch, m, n, k, sa, sb = self._product(node)
        how = ""
        if b.node.type == "Const" and len(b.shape or ()) == 2 and not _is_one(m):
            how = "linear" if _flag(node, 2) else "matrix"
        word = self.word
        spec = MatMul(
            TYPES[a.dtype], word(batch), word(m), word(n), word(k),
            (word(sa[0]), word(sa[1]), word(sa[2])), (word(sb[0]), word(sb[1]), word(sb[2])),
            packed=bool(how),
        )  # fmt: skip
        self.address(a)
        self.address(b, how)
        self.address(None)
        self.scratch = matmul_scratch(spec, self.target)
        return matmul(spec, self.target, self._epilogue(m), self._label())

    def _product(self, node: Node) -> tuple[Int, Int, Int, Int, list[Int], list[Int]]:
        """Batch, m, n, k and the strides of both operands of a matrix product."""
        a, b = value_on(node, "x1"), value_on(node, "x2")
        dims_a, st_a = list(self.sizes.dims(a)), list(self.sizes.strides(a))
        dims_b, st_b = list(self.sizes.dims(b)), list(self.sizes.strides(b))
        if _flag(node, 1):
            dims_a[-2:], st_a[-2:] = dims_a[:-3:-1], st_a[:-3:-1]
        if _flag(node, 2):
            dims_b[-2:], st_b[-2:] = dims_b[:-3:-1], st_b[:-3:-1]
        m, k, n = dims_a[-2], dims_a[-1], dims_b[-1]
        if len(dims_b) == 2 and len(dims_a) > 2:  # rows of all batches are rows
            rows = _one_stride(dims_a[:-1], st_a[:-1])
            return 1, _total(dims_a[:-1]), n, k, [0, rows, st_a[-1]], [0, *st_b]
        dims = _broadcast(dims_a[:-2], dims_b[:-2])
        batch_a = _batch_stride(dims, dims_a[:-2], st_a[:-2])
        batch_b = _batch_stride(dims, dims_b[:-2], st_b[:-2])
        return _total(dims), m, n, k, [batch_a, *st_a[-2:]], [batch_b, *st_b[-2:]]

    def _epilogue(self, m: Int) -> Callable[..., None]:
        """What is done with each vector of results: bias, the group's nodes, stores."""
        group = self.unit.group
        read = [v for n in group.nodes for v in operands_of(n) if v in self.unit.inputs]
        bias = [group.bias[0]] if group.bias else []
        operands = {v: self.operand(v) for v in dict.fromkeys([*bias, *read, *self.unit.outputs])}
        nest = join_rows(build_nest(group, operands, self.unit.outputs, self.sizes.fact))
        printed, rows = with_words(nest, self.word), self.word(m)

        def store(w: KernelWriter, at: Sequence[str], vector: str, mask: str | None) -> None:
            batch, row, column = at
            flat = w.add(w.mul(batch, w.size(rows)), row)
            index = [*_positions(w, flat, printed), column]
            emit_point(w, printed.stores, index, len(printed.axes) - 1, [vector], mask)

        return store

    def _attention(self) -> Kernel:
        node, op = self.unit.head, Op(self.unit.head)
        q, k, v = value_on(node, "query"), values_on(node, "key")[0], values_on(node, "value")[0]
        out, lse = node.outputs
        shift = node.inputs.get("pse_shift")
        mask = shift if isinstance(shift, Value) else None
        batch, heads, length, width = self.sizes.dims(q)
        kv_heads, span = self.sizes.dims(k)[1:3]
        wide = lse in self.unit.outputs
        so = self._words(self.sizes.strides(out))
        spec = Attention(
            dtype=TYPES[q.dtype], batch=self.word(batch), heads=self.word(heads),
            kv_heads=self.word(kv_heads), length=self.word(length), span=self.word(span),
            width=int(width), value_width=int(self.sizes.dims(v)[3]),
            q=self._words(self.sizes.strides(q)), k=self._words(self.sizes.strides(k)),
            v=self._words(self.sizes.strides(v)),
            out=(so[0], so[2], so[1], so[3]) if op.attr("input_layout") == "BNSD_BSND" else so,
            scale=op.attr("scale"), causal=op.attr("sparse_mode") == LEFT_UP_CAUSAL,
            mask=TYPES[mask.dtype] if mask is not None else None,
            mask_strides=self._words(self._mask_strides(mask)),
            lse=self._words(self.sizes.strides(lse))[:3] if wide else None,
        )  # fmt: skip
        for x in (q, k, v, mask if mask is not None else q, out, lse if wide else out):
            self.address(x)
        self.address(None)
        self.scratch = attention_scratch(spec, self.target)
        return attention(spec, self.target, self._label())

    def _words(self, sizes: Sequence[Int]) -> Any:
        return tuple(self.word(n) for n in sizes)

    def _mask_strides(self, mask: Value | None) -> tuple[Int, ...]:
        """Over (batch, head, query, key), 0 where the mask is broadcast."""
        if mask is None:
            return (0, 0, 0, 0)
        dims, strides = self.sizes.dims(mask), self.sizes.strides(mask)
        own = [0 if _is_one(n) else s for n, s in zip(dims, strides, strict=True)]
        return (*[0] * (4 - len(own)), *own)


def _work(unit: Unit) -> Callable[[Sequence[torch.Tensor]], float]:
    """Microseconds that one thread needs, from memory and operations at rates any core has."""
    nodes, values = len(unit.nodes), [*unit.inputs, *unit.outputs]
    first = 0
    if unit.kind == "matmul":
        first = values.index(value_on(unit.head, "x1"))
    if unit.kind == "attention":
        first = values.index(values_on(unit.head, "key")[0])

    def work(metas: Sequence[torch.Tensor]) -> float:
        moved = sum(m.numel() * m.element_size() for m in metas)
        points = max((m.numel() for m in metas[len(unit.inputs) :]), default=0)
        rate = 1e5 if moved < _IN_CACHE else 2e4
        total = moved / rate + points * nodes / 8e3 + 0.05
        if unit.kind == "matmul":
            total += points * metas[first].shape[-1] / 5e4
        if unit.kind == "attention":
            total += points * metas[first].shape[-2] / 2e4
        return total

    return work


def _positions(w: KernelWriter, flat: str, nest: Nest) -> list[str]:
    """Positions along the leading axes of a nest from the number of a row."""
    leading = nest.axes[:-1]
    positions: list[str] = []
    for size in reversed(leading[1:]):
        n = w.size(size)
        positions.append(w.rem(flat, n))
        flat = w.div(flat, n)
    return [*([flat] if leading else []), *reversed(positions)]


def value_on(node: Node, port: str) -> Value:
    """The value on a port that has one."""
    value = node.inputs[port]
    assert isinstance(value, Value)
    return value


def values_on(node: Node, port: str) -> list[Value]:
    """The values of a variable port."""
    values = node.inputs[port]
    assert isinstance(values, list)
    return values


def _flag(node: Node, which: int) -> bool:
    adjoint = node.type.startswith("Batch")
    return bool(node.attr(f"adj_x{which}" if adjoint else f"transpose_x{which}"))


def _is_one(n: Int) -> bool:
    return not isinstance(n, Number) and n == 1


def _total(dims: Sequence[Int]) -> Int:
    total: Int = 1
    for d in dims:
        total = total * d
    return total


def _broadcast(a: Sequence[Int], b: Sequence[Int]) -> list[Int]:
    rank = max(len(a), len(b))
    a, b = [*[1] * (rank - len(a)), *a], [*[1] * (rank - len(b)), *b]
    return [y if _is_one(x) else x for x, y in zip(a, b, strict=True)]


def _one_stride(dims: Sequence[Int], strides: Sequence[Int]) -> Int:
    """The stride of dims taken together; NotNative if there is none."""
    step: Int | None = None
    reach: Int = 0
    for n, s in zip(reversed(dims), reversed(strides), strict=True):
        if _is_one(n):
            continue
        if step is not None and s != reach:
            raise NotNative("rows are not evenly spaced in memory")
        step, reach = (s if step is None else step), n * s
    return 0 if step is None else step


def _batch_stride(dims: Sequence[Int], own: Sequence[Int], strides: Sequence[Int]) -> Int:
    own = [*[1] * (len(dims) - len(own)), *own]
    strides = [*[0] * (len(dims) - len(strides)), *strides]
    return _one_stride(dims, [0 if _is_one(n) else s for n, s in zip(own, strides, strict=True)])


HALVES = ("f32", "bf16", "f16")


def _product_declines(node: Node) -> str | None:
    if TYPES[value_on(node, "x1").dtype] not in HALVES:
        return "generated products are for float32, bfloat16 and float16"
    ranks = [len(value_on(node, p).shape or ()) for p in ("x1", "x2")]
    if min(ranks) < 2:
        return "it is not a product of matrices"
    fed = [p for p in ("offset_w",) if node.inputs.get(p) is not None]
    return "it is quantised" if fed else None


def _attention_declines(node: Node) -> str | None:
    fed = {p for p, _, v in node.slots() if v is not None}
    if not fed <= {"query", "key", "value", "pse_shift"} or len(values_on(node, "key")) != 1:
        return "it has operands that the generated kernel does not know"
    if TYPES[value_on(node, "query").dtype] not in HALVES:
        return "generated attention is for float32, bfloat16 and float16"
    if Op(node).attr("input_layout") not in ("BNSD", "BNSD_BSND"):
        return "its layout is not known"
    width = (value_on(node, "query").shape or ())[-1]
    return None if isinstance(width, int) and width <= 256 else "its heads are too wide"


HEADS: dict[str, tuple[str, Callable[[Node], str | None]]] = {
    **{
        t: ("matmul", _product_declines)
        for t in ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2")
    },
    "FusedInferAttentionScore": ("attention", _attention_declines),
}
"""Operators with a generator of their own: the kind of unit, and why a node cannot be served."""
