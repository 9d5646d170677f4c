"""Converters that no sample of the operator database reaches, each executed by a hand-made graph.

A table of expressions: tensors are inputs, `ROWS` and `COLUMNS` are the symbolic sizes of the first
one. They are built as FX graphs directly, since tracing would turn many of these operators into
others (Python works out sizes, composite operators decompose).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import torchair
from torchair import pipeline
from torchair.fx.passes import FX_PASSES

from .watch import name_of

aten = torch.ops.aten
prims = torch.ops.prims
by_name = torch.ops._c10d_functional
by_ranks = torch.ops.c10d_functional
Target = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Expr:
    """A call of an FX target."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fake: Target | None = None  # gives the types of the results where the target has no fake form


@dataclass(frozen=True)
class Size:
    """A symbolic size of the first input."""

    dim: int


@dataclass(frozen=True, eq=False)
class Extra:
    """A graph: its result, and calls made for their effect before."""

    result: Expr
    effects: tuple[Expr, ...] = ()
    target: Target | None = None  # what it is there for, if not the call of the result
    bare: bool = False  # without FX passes, as they would replace the target

    @property
    def covers(self) -> str:
        """The converter that it executes."""
        return name_of(self.target or self.result.target)

    def inputs(self) -> list[torch.Tensor]:
        """All tensors of the expressions, the matrix that gives the sizes first."""
        found = [MATRIX] if any(isinstance(x, Size) for x in self._leaves()) else []
        for x in self._leaves():
            if isinstance(x, torch.Tensor) and not any(x is y for y in found):
                found.append(x)
        return found

    def _leaves(self) -> Iterator[Any]:
        for expr in (*self.effects, self.result):
            yield from _leaves(expr)


MATRIX = torch.arange(15.0).reshape(3, 5) - 4.5
ROWS, COLUMNS = Size(0), Size(1)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, Expr):
        yield from _leaves((x.args, x.kwargs))
    elif isinstance(x, dict):
        yield from _leaves(tuple(x.values()))
    elif isinstance(x, (list, tuple)):
        for member in x:
            yield from _leaves(member)
    else:
        yield x


# ---- running one ----


def run(extra: Extra) -> Any:
    """Compile the graph of an expression and run it."""
    inputs = extra.inputs()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [_fake(mode, t, symbolic=t is MATRIX) for t in inputs]
    graph = _Builder(mode, inputs, fakes).build(extra)
    passes = () if extra.bare else FX_PASSES
    with mock.patch.object(pipeline, "FX_PASSES", passes):
        runner = torchair.get_compiler()(graph, fakes)
    return runner(*(t.clone() for t in inputs))


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, for the collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_eagerly(extra: Extra) -> Any:
    """The same without compiling."""
    for effect in extra.effects:
        _value(effect)
    return _value(extra.result)


def _value(x: Any) -> Any:
    if isinstance(x, Expr):
        return x.target(*_value(x.args), **_value(x.kwargs))
    if isinstance(x, Size):
        return MATRIX.shape[x.dim]
    if isinstance(x, dict):
        return {k: _value(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_value(v) for v in x)
    return x


def _fake(mode: FakeTensorMode, t: torch.Tensor, symbolic: bool) -> torch.Tensor:
    kind = DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC
    context = StatelessSymbolicContext(dynamic_sizes=[kind] * t.dim())
    return mode.from_tensor(t, symbolic_context=context)


class _Builder:
    """Makes FX nodes with the fake result of each in `meta`, as AOTAutograd leaves them."""

    def __init__(
        self, mode: FakeTensorMode, inputs: list[torch.Tensor], fakes: list[torch.Tensor]
    ) -> None:
        self._mode = mode
        self._inputs = inputs
        self._graph = fx.Graph()
        self._nodes = [self._graph.placeholder(f"x{i}") for i in range(len(fakes))]
        for node, fake in zip(self._nodes, fakes, strict=True):
            node.meta["val"] = fake

    def build(self, extra: Extra) -> fx.GraphModule:
        for effect in extra.effects:
            self._make(effect)
        made = self._make(extra.result)
        several = isinstance(meta := made.meta["val"], (list, tuple))
        self._graph.output(self._parts(made, len(meta)) if several else (made,))
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def _parts(self, node: fx.Node, count: int) -> tuple[fx.Node, ...]:
        return tuple(self._call(operator.getitem, (node, i), {}) for i in range(count))

    def _make(self, x: Any) -> Any:
        if isinstance(x, Expr):
            return self._call(x.target, self._make(x.args), self._make(x.kwargs), x.fake)
        if isinstance(x, Size):
            return self._call(aten.sym_size.int, (self._nodes[0], x.dim), {})
        if isinstance(x, torch.Tensor):
            return next(n for n, t in zip(self._nodes, self._inputs, strict=True) if t is x)
        if isinstance(x, dict):
            return {k: self._make(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(self._make(v) for v in x)
        return x

    def _call(self, target: Target, args: Any, kwargs: Any, fake: Target | None = None) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        metas = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = (fake or target)(*metas[0], **metas[1])
        return node


# ---- the table ----


def _number(target: Target, *args: Any) -> Extra:
    """A target that gives a symbolic number, which fills a tensor."""
    return Extra(Expr(aten.full.default, ([2], Expr(target, args))), target=target)


def _truth(target: Target, *args: Any) -> Extra:
    """A target that gives a symbolic truth value, which chooses a number."""
    return _number_of(target, Expr(torch.sym_ite, (Expr(target, args), ROWS, COLUMNS)))


def _number_of(target: Target, number: Expr) -> Extra:
    return Extra(Expr(aten.full.default, ([2], number)), target=target)


def _effect(target: Target, *args: Any, **kwargs: Any) -> Extra:
    result = Expr(aten.add.Tensor, (MATRIX, ROWS))
    return Extra(result, (Expr(target, args, kwargs),), target)


def _view(target: Target, *args: Any, part: int | None = None, bare: bool = False) -> Extra:
    """A target that gives a view, which is computed with, as a view itself is never made."""
    made = Expr(target, args)
    if part is not None:
        made = Expr(operator.getitem, (made, part))
    return Extra(Expr(aten.add.Tensor, (made, 1)), target=target, bare=bare)


def _call(target: Target, *args: Any, **kwargs: Any) -> Extra:
    return Extra(Expr(target, args, kwargs))


def _collective(target: Target, *args: Any) -> Extra:
    return Extra(Expr(by_name.wait_tensor.default, (Expr(target, args),)), target=target)


def _attention_gradient() -> Extra:
    """The gradient of attention on a CPU."""
    make = torch.Generator().manual_seed(0)
    grad, q, k, v = (torch.randn(2, 3, 5, 4, generator=make) for _ in range(4))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    return _several_results(_CPU_GRADIENT, grad, q, k, v, out, lse, 0.0, True)


def _several_results(target: Target, *args: Any) -> Extra:
    """A call of which all results are wanted: three, of one shape."""
    made = Expr(target, args)
    parts = [Expr(operator.getitem, (made, k)) for k in range(3)]
    return Extra(Expr(aten.cat.default, (parts,)), target=target)


def _several(target: Target, *args: Any) -> Extra:
    """A collective on a list of tensors, of which the last result is waited for."""
    last = Expr(operator.getitem, (Expr(target, ([POSITIVE, POSITIVE], *args)), 1))
    return Extra(Expr(by_name.wait_tensor.default, (last,)), target=target)


def _pairs(target: Target) -> Extra:
    """A call on lists of two tensors, with a tensor of two scales."""
    args = [POSITIVE, POSITIVE], [POSITIVE, POSITIVE], [POSITIVE, POSITIVE], torch.tensor([0.5, 2])
    return Extra(Expr(target, args, fake=lambda first, *_: [torch.empty_like(t) for t in first]))


BELOW = Expr(aten.slice.Tensor, (MATRIX, 0, 1))  # begins after a row
RATIO = Expr(operator.truediv, (COLUMNS, ROWS))
LARGER = Expr(operator.gt, (COLUMNS, ROWS))
WHOLE = torch.tensor([[1, 2, 3], [4, 5, 6]])
BITS = torch.tensor([1, 0, 3])
IMAGE = torch.rand(1, 2, 4, 3)
GROUP = "0"  # the name that torch gives to the first process group
POSITIVE = torch.rand(2, 3) + 0.5
BYTES = torch.randint(-128, 128, (32, 32), dtype=torch.int8)
SHORT = torch.rand(2, 32, dtype=torch.bfloat16)
SCALES_AND_ZEROS = torch.rand(1, 32, 2, dtype=torch.bfloat16)
SCALES_AND_ZEROS[0, 3, 0] = 0  # a column whose weights are all equal

_CPU_GRADIENT = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

EXTRA: tuple[Extra, ...] = (
    _attention_gradient(),
    # sizes and numbers made of them
    _number(aten.sym_size.int, MATRIX, 0),
    _number(aten.sym_size, MATRIX, 0),
    _number(aten.sym_numel.default, MATRIX),
    _number(aten.sym_numel, MATRIX),
    _number(aten.sym_stride.int, MATRIX, 0),
    _number(aten.sym_stride, MATRIX, 0),
    _number(aten.sym_storage_offset.default, BELOW),
    _number(aten.sym_storage_offset, BELOW),
    _number(operator.add, ROWS, COLUMNS),
    _number(operator.sub, ROWS, COLUMNS),
    _number(operator.mul, ROWS, COLUMNS),
    _number(operator.floordiv, COLUMNS, ROWS),
    _number(operator.truediv, COLUMNS, ROWS),
    _number(operator.pow, ROWS, 2),
    _number(operator.mod, COLUMNS, ROWS),
    _number(operator.lshift, ROWS, 2),
    _number(operator.rshift, COLUMNS, 1),
    _number(operator.neg, ROWS),
    _number(torch.sym_max, ROWS, COLUMNS),
    _number(torch.sym_min, ROWS, COLUMNS),
    _number(torch.sym_sum, [ROWS, COLUMNS, ROWS]),
    _number(torch.sym_float, ROWS),
    _number(torch._sym_sqrt, ROWS),
    _number(torch._sym_log2, ROWS),
    _number(torch.sym_int, RATIO),
    _number(math.floor, RATIO),
    _number(math.ceil, RATIO),
    _number(math.trunc, RATIO),
    _number(round, RATIO),
    _number(torch.sym_ite, LARGER, ROWS, COLUMNS),
    _truth(operator.eq, ROWS, COLUMNS),
    _truth(operator.ne, ROWS, COLUMNS),
    _truth(operator.gt, ROWS, COLUMNS),
    _truth(operator.ge, ROWS, COLUMNS),
    _truth(operator.lt, ROWS, COLUMNS),
    _truth(operator.le, ROWS, COLUMNS),
    _truth(operator.and_, LARGER, LARGER),
    _truth(operator.or_, LARGER, LARGER),
    _truth(torch.sym_not, LARGER),
    # checks
    _effect(aten._assert_scalar.default, LARGER, "sizes"),
    _effect(aten._assert_async.default, torch.tensor(True)),
    _effect(aten._assert_async.msg, torch.tensor(True), "sizes"),
    _effect(aten._assert_tensor_metadata.default, MATRIX, dtype=torch.float32),
    _effect(aten.sym_constrain_range.default, ROWS, min=2, max=9),
    _effect(aten.sym_constrain_range_for_size.default, ROWS, min=2, max=9),
    # bits
    _call(aten.__lshift__.Scalar, WHOLE, 2),
    _call(aten.__lshift__.Tensor, WHOLE, BITS),
    _call(aten.__rshift__.Scalar, WHOLE, 1),
    _call(aten.__rshift__.Tensor, WHOLE, BITS),
    _call(aten.bitwise_left_shift.Tensor_Scalar, WHOLE, 2),
    _call(aten.bitwise_right_shift.Tensor_Scalar, WHOLE, 1),
    _call(aten.bitwise_and.Scalar, WHOLE, 3),
    _call(aten.bitwise_and.Scalar_Tensor, 3, WHOLE),
    _call(aten.bitwise_or.Scalar, WHOLE, 3),
    _call(aten.bitwise_or.Scalar_Tensor, 3, WHOLE),
    _call(aten.bitwise_xor.Scalar, WHOLE, 3),
    _call(aten.bitwise_xor.Scalar_Tensor, 3, WHOLE),
    # elementwise, in forms that tracing prefers others to
    _call(aten.clamp_max.default, POSITIVE, 1),
    _call(aten.div.Scalar_mode, POSITIVE, 0.3, rounding_mode="floor"),
    _call(aten.floor_divide.Scalar, POSITIVE, 0.3),
    _call(aten.fmod.Scalar, POSITIVE, 0.3),
    _call(aten.remainder.Scalar_Tensor, 2.0, POSITIVE),
    _call(aten.xlogy.Scalar_Other, POSITIVE, 2.0),
    _call(aten.xlogy.Scalar_Self, 2.0, POSITIVE),
    _call(aten.less.Tensor, POSITIVE, torch.ones(3)),
    _call(aten.masked_fill.Tensor, POSITIVE, torch.tensor([True, False, True]), torch.tensor(7.0)),
    _call(aten.fill.Tensor, POSITIVE, torch.tensor(7.0)),
    _call(aten.eye.m, 2, 3),
    _call(aten.matmul.default, MATRIX, torch.ones(5, 2)),
    _call(aten.prelu.default, MATRIX, torch.tensor([0.25])),
    _call(prims.add.default, POSITIVE, POSITIVE),
    _call(prims.mul.default, POSITIVE, POSITIVE),
    _call(prims.maximum.default, POSITIVE, torch.ones(2, 3)),
    _call(prims.minimum.default, POSITIVE, torch.ones(2, 3)),
    _call(prims.lt.default, POSITIVE, torch.ones(2, 3)),
    _call(prims.le.default, POSITIVE, torch.ones(2, 3)),
    _call(prims.convert_element_type.default, POSITIVE, torch.int32),
    # views and splits
    _view(aten.alias.default, POSITIVE, bare=True),
    _view(aten.lift.default, POSITIVE),
    _view(aten.lift_fresh.default, POSITIVE),
    _view(aten.view.default, POSITIVE, [3, 2], bare=True),
    _view(aten.view.dtype, POSITIVE, torch.int32),
    _call(aten.contiguous.default, IMAGE, memory_format=torch.channels_last),
    _view(aten._reshape_alias.default, POSITIVE, [6], [1]),
    _call(aten.rot90.default, MATRIX, -1, [0, 1]),
    _view(aten.split.sizes, WHOLE, [1, 2], 1, part=1),
    _view(aten.unsafe_split_with_sizes.default, WHOLE, [1, 2], 1, part=1),
    # operators that AOTAutograd decomposes, there for graphs from elsewhere
    _call(aten.true_divide.Tensor, POSITIVE, POSITIVE),
    _call(aten.hardshrink.default, POSITIVE, 0.7),
    _call(aten.hardshrink_backward.default, POSITIVE, POSITIVE, 0.7),
    _call(aten.softshrink.default, POSITIVE, 0.7),
    _call(aten.softshrink_backward.default, POSITIVE, POSITIVE, 0.7),
    _call(aten._fused_rms_norm.default, POSITIVE, [3], torch.ones(3), 1e-5),
    _call(aten.upsample_nearest2d.default, IMAGE, [8, 9]),
    _call(aten.upsample_nearest2d.vec, IMAGE, None, [2.0, 3.0]),
    _call(aten.upsample_nearest2d_backward.default, torch.rand(1, 2, 8, 9), [8, 9], [1, 2, 4, 3]),
    _call(aten.upsample_bilinear2d.default, IMAGE, [8, 9], False),
    _call(aten.upsample_bilinear2d.vec, IMAGE, None, True, [2.0, 3.0]),
    # weights of few bits, as torch packs them
    _call(aten._int_mm.default, BYTES, BYTES),
    _call(aten._weight_int8pack_mm.default, SHORT, BYTES, SHORT[0]),
    _call(
        aten._weight_int4pack_mm_for_cpu.default, SHORT,
        aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (32, 32)).int(), 1), 32,
        SCALES_AND_ZEROS,
    ),
    # lists of tensors
    _pairs(aten._foreach_addcdiv.Tensor),
    _pairs(aten._foreach_addcmul.Tensor),
    _call(aten._foreach_pow.ScalarAndTensor, 2.0, [POSITIVE, MATRIX]),
    # random numbers
    _call(aten.rand_like.default, POSITIVE),
    _call(aten.randperm.default, 9),
    _call(aten.rand.generator, [2, 3], generator=None),
    _call(aten.rand_like.generator, POSITIVE, generator=None),
    _call(aten.randn.generator, [2, 3], generator=None),
    _call(aten.randn_like.generator, POSITIVE, generator=None),
    _call(aten.randint.generator, 9, [2, 3], generator=None),
    _call(aten.randint.low_generator, 3, 9, [2, 3], generator=None),
    _call(aten.randperm.generator, 9, generator=None),
    _call(aten.bernoulli.Tensor, POSITIVE, torch.full((2, 3), 0.5)),
    # collectives, of one process
    _collective(by_name.all_reduce.default, POSITIVE, "sum", GROUP),
    _collective(by_name.all_gather_into_tensor.default, POSITIVE, 1, GROUP),
    _collective(by_name.reduce_scatter_tensor.default, POSITIVE, "sum", 1, GROUP),
    _collective(by_name.broadcast.default, POSITIVE, 0, GROUP),
    _collective(by_name.all_to_all_single.default, POSITIVE, [2], [2], GROUP),
    _several(by_name.all_reduce_coalesced.default, "sum", GROUP),
    _several(by_name.all_gather_into_tensor_coalesced.default, 1, GROUP),
    _several(by_name.reduce_scatter_tensor_coalesced.default, "sum", 1, GROUP),
    _call(by_name.wait_tensor.default, POSITIVE),
    _collective(by_ranks.all_reduce.default, POSITIVE, "sum", "", [0], 1),
    _collective(by_ranks.all_gather_into_tensor.default, POSITIVE, "", [0], 1),
    _collective(by_ranks.reduce_scatter_tensor.default, POSITIVE, "sum", "", [0], 1),
    _collective(by_ranks.broadcast.default, POSITIVE, 0, "", [0], 1),
    _collective(by_ranks.all_to_all_single.default, POSITIVE, [2], [2], "", [0], 1),
    _call(by_ranks.wait_tensor.default, POSITIVE),
)  # fmt: skip
