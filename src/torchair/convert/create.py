"""Converters of operators that make tensors: from sizes and numbers, by a cast, or at random.

Random operators take the graph's seed, a constant of the graph, and an offset of their own.
Offsets are one more input of the graph, which an Unpack hands out. A call says there that there
are none: operators then draw from torch's generators, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import Direct, direct
from torchair.convert.operands import cast_result, factor, plain, promote, real
from torchair.convert.registry import Decline, builtin
from torchair.ge import attrs as attr
from torchair.ge.build import add_output, builder, const_tensor
from torchair.ge.dtypes import FLOAT_TYPES, INT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import BuilderCall, Fact, TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import free_symbols, is_static
from torchair.operators.create import unwritten

aten = torch.ops.aten
prims = torch.ops.prims
_INT32 = torch.iinfo(torch.int32)


def typed(value: Any, dtype: int) -> Value:
    """A number as the documented Cast of a plain Const, or as Const where that would round it."""
    if not isinstance(value, Value):
        exact = const_tensor(value, dtype)
        if not torch.equal(const_tensor(value).to(exact.dtype), exact):
            return ge.Const(value, dtype=dtype)
    return ge.Cast(value, dst_type=dtype)


# ---- one number everywhere; `options` are dtype, layout, device, pin_memory, memory_format ----


@builtin(aten.full.default)
def full(size: Any, fill_value: Any, meta_outputs: TensorSpec) -> Value:
    value = promote(meta_outputs.dtype, fill_value)
    return value if size == [] else ge.Fill(size, value)


@builtin(
    aten.zeros.default,
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
)
def zeros(size: Any, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(size, typed(0, meta_outputs.dtype))


@builtin(
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
)
def empty(size: Any, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(size, _unwritten(meta_outputs))


@builtin(aten.empty_like.default)
def empty_like(self: Value, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(ge.Shape(self), _unwritten(meta_outputs))


def _unwritten(spec: TensorSpec) -> Value:
    """Zeros, where torch does not fill memory with what shows in results."""
    return typed(unwritten(ge_to_torch(spec.dtype)) or 0, spec.dtype)


@builtin(aten.new_ones.default)
def new_ones(size: Any, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(size, typed(1, meta_outputs.dtype))


@builtin(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: Value, value: Any, meta_outputs: TensorSpec) -> Value:
    return ge.Fill(ge.Shape(self), typed(value, meta_outputs.dtype))


@builtin(aten.full_like.default)
def full_like(self: Value, fill_value: Any, meta_outputs: TensorSpec) -> Value:
    return fill(self, fill_value, meta_outputs=meta_outputs)


direct(
    {
        aten.linspace.default: Direct("LinSpace", "start end steps:", promoted=True),
        aten.new_empty.default: Direct("Empty", "size:INT32", "dtype=@"),
        aten.new_empty_strided.default: Direct("Empty", "size:INT32", "dtype=@"),
        aten.new_full.default: Direct("Fill", "size: fill_value", promoted=True),
        aten.ones.default: Direct("Fill", "size: 1", promoted=True),
        aten.ones_like.default: Direct("OnesLike", promoted=True),
        aten.tril.default: Direct("Tril", "self", "diagonal"),
        aten.triu.default: Direct("Triu", "self", "diagonal"),
        aten.zero.default: Direct("ZerosLike", promoted=True),
        aten.zeros_like.default: Direct("ZerosLike", promoted=True),
        prims.convert_element_type.default: Direct("Cast", "a", "dst_type=@"),
    }
)


@builtin(aten.scalar_tensor.default)
def scalar_tensor(s: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    return ge.Cast(s, dst_type=dtype) if isinstance(s, Value) else ge.Const(s, dtype=dtype)


@builtin(aten.eye.default, aten.eye.m)
def eye(n: Any, m: Any = None, *, meta_outputs: TensorSpec) -> Value:
    m = n if m is None else m
    plain(n, m)
    return ge.Eye(num_rows=n, num_columns=m, dtype=meta_outputs.dtype)


# ---- ranges ----


@builtin(aten.arange.default, aten.arange.start)
def arange(end: Any, start: Any = 0, *, meta_outputs: TensorSpec) -> Value:
    if not _integral(start, end):
        return arange_start_step(start, end, 1, meta_outputs)
    bounds = [x if isinstance(x, Value) else _integer(x) for x in (start, end, 1)]
    return cast_result(ge.Range(*bounds), meta_outputs.dtype)


@builtin(aten.arange.start_step)
def arange_start_step(start: Any, end: Any, step: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    bounds = (start, end, step)
    if any(isinstance(x, Value) for x in bounds) and _integral(*bounds):
        return cast_result(ge.Range(*promote(DataType.DT_INT64, *bounds)), dtype)
    if not all(_representable(x, dtype) for x in bounds):
        raise Decline(f"bounds {bounds} are rounded in the type of the result")
    return cast_result(ge.Range(*promote(dtype, *bounds)), dtype)


def _integral(*numbers: Any) -> bool:
    return all(
        x.dtype in INT_TYPES if isinstance(x, Value) else isinstance(x, int) for x in numbers
    )


def _integer(x: int) -> Value:
    small = _INT32.min <= x <= _INT32.max
    return ge.Const(x, dtype=DataType.DT_INT32 if small else DataType.DT_INT64)


def _representable(x: Any, dtype: int) -> bool:
    return not isinstance(x, Value) and torch.tensor(x, dtype=ge_to_torch(dtype)).item() == x


# ---- casts ----


@builtin(aten._to_copy.default)
def to_copy(self: Value, device: torch.device | None, meta_outputs: TensorSpec) -> Value:
    if device is not None and _changes_device(device):
        raise Decline("copy between devices")
    if self.dtype == meta_outputs.dtype:
        return ge.TensorMove(self)
    return ge.Cast(self, dst_type=meta_outputs.dtype)


def _changes_device(device: torch.device) -> bool:
    """Whether a tensor may come from elsewhere: graph inputs live at another place too."""
    target = "CPU" if device.type == "cpu" else "NPU"
    tensors = [n.outputs[0] for n in get_default_ge_graph().data if n.outputs[0].shape != ()]
    return any(v.device_type != target for v in tensors)


INT64, UINT64, DOUBLE = DataType.DT_INT64, DataType.DT_UINT64, DataType.DT_DOUBLE
_SEED, _OFFSETS, _UNPACK = "initial_seed", "offset_list", "unpack_generator_offsets"


# ---- random numbers: seed and offset ----


def _seed() -> Value:
    """The seed that torch's generator had when the graph was converted, as a signed number."""
    graph = get_default_ge_graph()
    if _SEED in graph:
        return graph.node(_SEED).outputs[0]
    seed = torch.initial_seed()
    return ge.Const(seed - 2**64 if seed >= 2**63 else seed, dtype=INT64, node_name=_SEED)


def _offset() -> Value:
    """The next offset. Input and Unpack are made with the first one and grow with each other."""
    graph = get_default_ge_graph()
    if _UNPACK not in graph:
        return _first_offset()
    unpack = graph.node(_UNPACK)
    data = unpack.values()[0]
    made = add_output(unpack, f"y{len(unpack.outputs)}")
    made.learn(Fact(INT64, ()))
    count = len(unpack.outputs)
    unpack.attrs["num"] = attr.Int(count)
    data.shape = (count,)
    call = next(c for c in graph.journal if isinstance(c, BuilderCall) and c.result is data)
    call.kwargs["shape"] = [count]
    return made


def _first_offset() -> Value:
    graph = get_default_ge_graph()
    data = ge.Data(
        index=len(graph.data), dtype=INT64, shape=[1], placement="CPU", node_name=_OFFSETS
    )
    graph.depth += 1  # dumps do not show the Unpack
    try:
        return ge.Unpack(data, num=1, node_name=_UNPACK)[0]
    finally:
        graph.depth -= 1


def _counter() -> Value:
    zero = ge.Const(0, dtype=INT64)
    zero.device_type = "CPU"  # as the offset it is joined with
    return ge.ConcatV2([zero, _offset()], 0, N=2)


def _default(generator: Any, spec: TensorSpec | None = None) -> None:
    if generator is not None:
        raise Decline("a generator of its own")
    if spec is not None and not spec.in_order:
        raise Decline("numbers that torch draws in the order of another layout")


def _placed(made: Value, spec: TensorSpec) -> Value:
    """A result where tracing saw it: its inputs, numbers of the host, do not tell."""
    if spec.device == "cpu":
        return made
    if any(name.startswith("u") for name in free_symbols(spec.shape or ())):
        raise Decline("a data-dependent size on a device")
    made.device_type = "NPU"
    return made


# ---- random tensors of given sizes ----


def _draw(op_type: str, size: Any, spec: TensorSpec, *bounds: Value) -> Value:
    key = ge.Unsqueeze(ge.Cast(_seed(), dst_type=UINT64), axes=[0])
    counter = ge.Cast(_counter(), dst_type=UINT64)
    algorithm = typed(1, DataType.DT_INT32)
    chosen = {} if bounds else {"dtype": spec.dtype}
    return _placed(builder(op_type)(size, key, counter, algorithm, *bounds, **chosen), spec)


def _real(op_type: str, size: Any, generator: Any, spec: TensorSpec) -> Value:
    _default(generator, spec)
    real(spec)
    return _draw(op_type, size, spec)


def _drawn(op_type: str) -> Callable[..., Value]:
    def convert(
        size: Any = None, self: Any = None, generator: Any = None, *, meta_outputs: TensorSpec
    ) -> Value:
        dims = size if self is None else ge.Shape(self)
        return _real(op_type, dims, generator, meta_outputs)

    return convert


UNIFORM, NORMAL = "StatelessRandomUniformV2", "StatelessRandomNormalV2"
_DRAWN = {UNIFORM: (aten.rand, aten.rand_like), NORMAL: (aten.randn, aten.randn_like)}
for _drawing, _packets in _DRAWN.items():
    for _packet in _packets:
        builtin(_packet.default, getattr(_packet, "generator", None))(_drawn(_drawing))


@builtin(aten.uniform.default)
def uniform(self: Value, to: Any, generator: Any, meta_outputs: TensorSpec, **named: Any) -> Value:
    low = named.get("from", 0.0)
    plain(low, to)
    made = _real(UNIFORM, ge.Shape(self), generator, meta_outputs)
    return _moved(made, to - low, low, meta_outputs.dtype)


@builtin(aten.normal_functional.default)
def normal(self: Value, mean: Any, std: Any, generator: Any, meta_outputs: TensorSpec) -> Value:
    plain(mean, std)
    made = _real(NORMAL, ge.Shape(self), generator, meta_outputs)
    return _moved(made, std, mean, meta_outputs.dtype)


def _moved(x: Value, scale: float, start: float, dtype: int) -> Value:
    """x * scale + start as torch computes it: it stays within the bounds of a narrow range."""
    if (scale, start) == (1, 0):
        return x
    return ge.Add(ge.Mul(x, factor(dtype, scale)), factor(dtype, start))


# ---- integers: drawn as such, a scaled float would miss some beyond 2**24 and favour others ----


@builtin(
    aten.randint.default,
    aten.randint.generator,
    aten.randint.low,
    aten.randint.low_generator,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
def randint(
    high: Any,
    size: Any = None,
    self: Any = None,
    low: Any = 0,
    generator: Any = None,
    *,
    meta_outputs: TensorSpec,
) -> Value:
    dims, dtype = size if self is None else ge.Shape(self), meta_outputs.dtype
    _default(generator, meta_outputs)
    bounds = promote(INT64, low, high)
    return cast_result(_draw("StatelessRandomUniformIntV2", dims, meta_outputs, *bounds), dtype)


@builtin(aten.randperm.default, aten.randperm.generator)
def randperm(n: Any, generator: Any = None, *, meta_outputs: TensorSpec) -> Value:
    _default(generator)
    made = ge.StatelessRandperm(
        promote(INT64, n), _seed(), _offset(), layout=1, dtype=meta_outputs.dtype
    )
    return _placed(made, meta_outputs)


# ---- draws by probability ----


@builtin(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli(self: Value, generator: Any, p: Any = None, *, meta_outputs: TensorSpec) -> Value:
    _default(generator, meta_outputs)
    p = self if p is None else p
    if not isinstance(p, Value):
        prob = ge.Const(p, dtype=DOUBLE)
    else:  # a tensor without dims is no number: torch draws by it in another way
        prob = ge.Reshape(p, [1]) if p.shape == () else p
    made = ge.StatelessBernoulli(ge.Shape(self), prob, _seed(), _offset(), dtype=meta_outputs.dtype)
    return _placed(made, meta_outputs)


@builtin(aten.multinomial.default)
def multinomial(self: Value, num_samples: Any, replacement: bool, generator: Any) -> Value:
    _default(generator)
    plain(num_samples)
    return ge.MultinomialWithReplacement(
        self, _seed(), _offset(), numsamples=num_samples, replacement=replacement
    )


# ---- dropout: numbers in double, so that the scale is torch's to the last bit ----


@builtin(aten.native_dropout.default)
def native_dropout(
    input: Value, p: Any, train: bool | None, meta_outputs: Any
) -> tuple[Value, Value]:
    plain(p)
    if train is not None and not train:
        return input, ge.Fill(ge.Shape(input), ge.Const(True, dtype=DataType.DT_BOOL))
    _default(None, meta_outputs[1])
    if meta_outputs[0].device.startswith("cuda"):  # where it draws in an order of its own
        if p == 1 or not is_static(meta_outputs[0].shape):
            raise Decline("a dropout that only torch draws")
        return ge.NativeDropout(input, p=p)
    keep = ge.Const(1.0 - p, dtype=DOUBLE)
    drawn = ge.StatelessDropOutGenMask(
        ge.Shape(input), keep, _seed(), ge.Const(0, dtype=INT64), _counter()
    )
    mask = _placed(drawn, meta_outputs[1])
    return ge.DropOutDoMask(input, mask, keep), mask


@builtin(aten.native_dropout_backward.default)
def native_dropout_backward(
    grad_output: Value, mask: Value, scale: Any, meta_outputs: TensorSpec
) -> Value:
    plain(scale)
    if grad_output.dtype not in FLOAT_TYPES:
        raise Decline("a gradient that is not floating point")
    if meta_outputs.device.startswith("cuda"):  # where torch does not divide by what is kept
        kept = ge.Mul(grad_output, ge.Cast(mask, dst_type=grad_output.dtype))
        return ge.Mul(kept, factor(grad_output.dtype, scale))
    keep = 1.0 / scale if scale else 0.0
    return ge.DropOutDoMask(grad_output, mask, ge.Const(keep, dtype=DOUBLE))
