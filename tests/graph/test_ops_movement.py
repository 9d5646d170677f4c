"""Operators that move elements: views, slices, joins, indices, attention, symbolic sizes.

Arguments are cloned first so that a view is computed by the graph and not taken from the input.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchair
from op_harness import TOLERANCE, check, convert
from torchair.convert import GraphConverter
from torchair.engine.optimize.passes import GraphState, apply_rules, remove_dead_code
from torchair.errors import ConversionError
from torchair.operators import Op, Trait, infer, interpret, row_of
from torchair.operators.reference import tensor_args, tensor_fact

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of distinct-looking elements."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(wanted.dtype, dict(rtol=1e-7, atol=1e-7))
    torch.testing.assert_close(got, wanted, equal_nan=True, **tolerance)


def check_all(fn: Any, *inputs: Any, **options: Any) -> list[str]:
    """Check against eager, then every kernel's `out=` on the way; gives the operator types."""
    conversion = check(fn, *inputs, **options)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if len(tensors) == len(conversion.graph.data) == len(inputs):
        check_out(conversion.graph, [x.clone() for x in inputs])
    return [n.type for n in conversion.graph.nodes]


def check_out(graph: Any, inputs: list[torch.Tensor]) -> None:
    env: dict[Any, torch.Tensor] = {}

    def watch(node: Any, results: Any) -> None:
        row = row_of(node.type)
        if row.out and len(results) == 1:
            kernel = row.kernel(Op(node, lambda v: tensor_fact(env[v], v)))
            args = tensor_args(node, row, env.__getitem__)
            first = args[0].clone() if isinstance(args[0], torch.Tensor) else None
            for out in (
                torch.empty_like(results[0], memory_format=torch.contiguous_format),
                torch.empty((*results[0].shape, 2), dtype=results[0].dtype)[..., 0],
            ):
                pointer = out.data_ptr()
                assert kernel(*args, out=out) is out and out.data_ptr() == pointer, node
                same(out, results[0])
            if first is not None:
                same(args[0], first)
            if row.has(Trait.WRITES_FIRST):
                assert kernel(first, *args[1:], out=first) is first
                same(first, results[0])
        env.update(zip(node.outputs, results, strict=True))

    interpret(graph, inputs, watch)


def partial_of(fn: Any, *rest: Any, **options: Any) -> Any:
    return lambda a, b: fn(a, b, *rest, **options)


# ---- shape ----

VIEWS: dict[str, Any] = {
    "view": lambda x: x.view(3, 2, 4),
    "view_minus_one": lambda x: x.view(-1, 2),
    "reshape_scalar": lambda x: x[0, 0, :1].reshape(()),
    "reshape_alias": lambda x: aten._reshape_alias(x, [6, 4], [4, 1]),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute_negative": lambda x: x.permute(-1, 0, -2),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x.view(6, 4).t(),
    "t_vector": lambda x: aten.t(x[0, 0]),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "unsqueeze_scalar": lambda x: x[0, 0, 0].unsqueeze(0),
    "squeeze": lambda x: x[:1, :, :1].squeeze(),
    "squeeze_dim": lambda x: x[:1].squeeze(0),
    "squeeze_dim_negative": lambda x: x[..., :1].squeeze(-1),
    "squeeze_dim_kept": lambda x: x.squeeze(1),
    "squeeze_dims": lambda x: x[:1, :, :1].squeeze((0, -1)),
    "squeeze_scalar": lambda x: x[0, 0, 0].squeeze(0),
    "expand": lambda x: x[:, :1].expand(2, 5, -1),
    "expand_new_dim": lambda x: x.expand(3, 2, 3, 4),
    "expand_same": lambda x: x.expand(2, 3, 4),
    "detach": lambda x: x.detach(),
    "alias": lambda x: aten.alias(x),
    "lift": lambda x: aten.lift_fresh_copy(x),
    "contiguous": lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format),
    "copy": lambda x: aten.copy(x, x + x),
    "copy_cast": lambda x: aten.copy(x, x.to(torch.float64)),
    "copy_broadcast": lambda x: aten.copy(x, x[0, 0]),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_new_dim": lambda x: x.repeat(2, 1, 1, 2),
    "flip": lambda x: x.flip(0, -1),
    "flip_scalar": lambda x: x[0, 0, 0].flip(()),
    "rot90": lambda x: x.rot90(),
    "rot90_back": lambda x: x.rot90(-1, (2, 0)),
    "rot90_half": lambda x: x.rot90(2, (1, -1)),
    "rot90_whole": lambda x: x.rot90(4),
    "roll": lambda x: x.roll((1, -1), (0, 2)),
    "roll_flat": lambda x: x.roll(5),
    "as_strided": lambda x: aten.as_strided(x, [2, 2], [3, 5], 1),
    "as_strided_overlap": lambda x: aten.as_strided(x, [5, 4], [2, 1]),
    "as_strided_permuted": lambda x: aten.as_strided(x.transpose(0, 1), [4, 3], [3, 1], 2),
    "as_strided_scatter": lambda x: aten.as_strided_scatter(x, x[0], [3, 4], [1, 4], 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, dtype):
    fn = VIEWS[name]
    check_all(lambda x: fn(x.clone()), made(dtype, 2, 3, 4))


def test_as_strided_counts_in_memory_and_not_in_dims():
    """An elementwise result keeps the layout of its transposed operand."""
    types = check_all(lambda x: aten.as_strided(x.t() * 2, [2, 3], [1, 2], 4), torch.randn(4, 6))
    assert "AsStrided" in types


def test_as_strided_of_the_real_part_of_what_is_computed():
    """It counts in pairs of numbers, as the memory of a complex tensor has them."""

    def fn(x):
        return (x * 1j + x).real.flatten()[:4].as_strided((2, 2), (2, 1)).clone()

    x = torch.randn(4, 6)
    call = torch.compile(fn, backend=torchair.get_npu_backend(), fullgraph=True)
    assert torch.equal(call(x), fn(x))


def test_updates_through_as_strided_of_a_part_are_refused():
    """It counts in memory that only eager has: an error is better than a wrong answer."""
    fn = lambda x: aten.as_strided_scatter(x.clone()[:, 1:], x[0, :2], [2], [1], 3)  # noqa: E731
    with pytest.raises(ConversionError, match="memory layout"):
        convert(fn, torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_pairs(dtype):
    types = check_all(lambda z: torch.view_as_real(z.clone()), made(dtype, 3, 4))
    assert types.count("Real") == types.count("Imag") == types.count("Pack") == 1
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    types = check_all(lambda x: torch.view_as_complex(x.clone()), made(real, 3, 4, 2))
    assert types.count("GatherV2") == 2 and types.count("Complex") == 1


def test_bitcast():
    check_all(lambda x: x.clone().view(torch.int32), torch.randn(3, 4))
    check_all(lambda x: x.clone().view(torch.bfloat16), made(torch.int16, 3, 4))
    check(lambda x: x.clone().view(torch.uint8), torch.randn(3, 4), generic=True)


DYNAMIC_VIEWS: dict[str, Any] = {
    "reshape_two_symbols": lambda x: x.reshape(x.shape[1], -1),
    "reshape_product": lambda x: x.reshape(x.shape[0] * x.shape[1], 4),
    "reshape_split": lambda x: x.reshape(x.shape[0], x.shape[1], 2, 2).transpose(1, 2),
    "expand": lambda x: x[:, :1].expand(-1, x.shape[1], -1),
    "expand_symbol": lambda x: x[0, 0].expand(x.shape[1], x.shape[0], 4),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze": lambda x: x[:, :, :1].squeeze(),
    "repeat": lambda x: x.repeat(1, x.shape[0], 2),
    "flip": lambda x: x.flip(0, 1),
    "copy": lambda x: aten.copy(x, x[0, 0]),
    "as_strided": lambda x: aten.as_strided(x, [x.shape[0], 2], [x.shape[1] * 4, 1], 1),
    "as_strided_cut": lambda x: x[:, 1:].flatten().as_strided((2, 2), (2, 1), 1),
    "as_strided_turned": lambda x: aten.as_strided(x.transpose(0, 1) * 2, [2, 2], [5, 1], 2),
    "numel": lambda x: x.sum() * x.numel(),
    "stride": lambda x: x.sum() * x.stride(0),
}


@pytest.mark.parametrize("name", DYNAMIC_VIEWS)
def test_views_of_other_sizes(name):
    fn = DYNAMIC_VIEWS[name]
    check_all(
        lambda x: fn(x.clone()),
        torch.randn(2, 3, 4),
        dynamic=True,
        other_inputs=(torch.randn(5, 7, 4),),
    )


# ---- slices, joins, splits ----

SLICES: dict[str, Any] = {
    "start": lambda x: x[1:],
    "middle": lambda x: x[:, 1:3],
    "negative": lambda x: x[:, -3:-1],
    "step": lambda x: x[:, ::2],
    "clamped": lambda x: x[:, 2:100],
    "clamped_start": lambda x: x[:, -100:2],
    "empty": lambda x: torch.cat([x[:, 3:2], x], 1),
    "whole": lambda x: x[:, 0:],
    "select": lambda x: x[1],
    "select_negative": lambda x: x[:, -1],
    "select_last": lambda x: x.select(-1, 2),
    "select_scalar": lambda x: x[0, 0, 0],
    "split": lambda x: x.split(2, 1),
    "split_uneven": lambda x: x.split(3, -1),
    "split_sizes": lambda x: x.split([1, 4], 1),
    "split_sizes_op": lambda x: aten.split.sizes(x, [2, 2], -1),
    "split_many": lambda x: x.repeat(1, 20, 1).split(1, 1)[7:9],
    "unsafe_split": lambda x: aten.unsafe_split(x, 2, 1),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(1),
    "unbind_vector": lambda x: x[0, 0].unbind(),
    "cat": lambda x: torch.cat([x, x[:, :2], x], 1),
    "cat_negative": lambda x: torch.cat([x, x], -1),
    "cat_one": lambda x: torch.cat([x]),
    "cat_legacy_empty": lambda x: torch.cat([x.new_empty(0), x, x[1:]], 0),
    "cat_vectors": lambda x: torch.cat([x[0, 0], x[0, 1, :0]]),
    "cat_promotes": lambda x: torch.cat([x, torch.ones(2, 1, 4, dtype=torch.int8)], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "stack_last": lambda x: torch.stack([x[0], x[1]], -1),
    "stack_scalars": lambda x: torch.stack([x[0, 0, 0], x[1, 1, 1]]),
    "slice_scatter": lambda x: aten.slice_scatter(x, x[:, :2], 1, 2, 4),
    "slice_scatter_step": lambda x: aten.slice_scatter(x, x[:, :3], 1, 0, 9, 2),
    "slice_scatter_negative": lambda x: aten.slice_scatter(x, x[..., :1], -1, -1),
    "slice_scatter_whole": lambda x: aten.slice_scatter(x, x + x),
    "slice_scatter_casts": lambda x: aten.slice_scatter(x, x[:1].to(torch.float64), 0, 1),
    "select_scatter": lambda x: aten.select_scatter(x, x[:, 0], 1, 2),
    "select_scatter_last": lambda x: aten.select_scatter(x, x[..., 0], -1, -1),
    "slice_backward": lambda x: aten.slice_backward(x, [2, 9, 4], 1, 1, 6, 1),
    "slice_backward_step": lambda x: aten.slice_backward(x, [2, 9, 4], 1, 0, 2**63 - 1, 2),
    "slice_backward_whole": lambda x: aten.slice_backward(x, [2, 5, 4], 1, 0, 2**63 - 1, 1),
    "select_backward": lambda x: aten.select_backward(x, [2, 3, 5, 4], 1, -1),
    "pad": lambda x: aten.constant_pad_nd(x, [1, 2]),
    "pad_two": lambda x: aten.constant_pad_nd(x, [1, 2, 0, 3], 1),
    "pad_negative": lambda x: aten.constant_pad_nd(x, [-1, 2, 1, -2, 0, 1]),
    "pad_none": lambda x: aten.constant_pad_nd(x, [0, 0]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, dtype):
    fn = SLICES[name]
    check_all(lambda x: fn(x.clone()), made(dtype, 2, 5, 4))


def test_what_is_emitted():
    x = torch.randn(2, 5, 4)
    conversion = convert(lambda x: x[:, 1:3] + 1, x)
    node = next(n for n in conversion.graph.nodes if n.type == "StridedSliceV2")
    contents = {port: v.content for port, _, v in node.slots()}
    assert contents == {"x": None, "begin": 1, "end": 3, "axes": 1, "strides": 1}
    types = [n.type for n in convert(lambda x: x[:, 1] + 1, x).graph.nodes]
    assert types == ["Data", "Const", "Const", "GatherV2", "Const", "Add", "NetOutput"]


DYNAMIC_SLICES: dict[str, Any] = {
    "start": lambda x, n: x[n:],
    "end": lambda x, n: x[:, :n],
    "from_end": lambda x, n: x[:, -n:],
    "clamped": lambda x, n: x[:, : n + 100],
    "one": lambda x, n: x[1:, :-1],
    "select": lambda x, n: x.select(1, n),
    "select_back": lambda x, n: x.select(1, n - 4),
    "narrow": lambda x, n: x.narrow(1, n - 1, 2),
    "cat": lambda x, n: torch.cat([x, x[:, :n]], 1),
    "stack": lambda x, n: torch.stack([x, x + n]),
    "split": lambda x, n: x.split(x.shape[1] // 2, 1)[:2],
    "split_sizes": lambda x, n: x.split([n, x.shape[1] - n], 1),
    "pad": lambda x, n: aten.constant_pad_nd(x, [0, n, 1, 0], 2),
    "repeat": lambda x, n: x.repeat(n, 1, 1),
    "slice_scatter": lambda x, n: aten.slice_scatter(x, x[:, :1], 1, n, n + 1),
    "select_scatter": lambda x, n: aten.select_scatter(x, x[:, 0], 1, n),
    "select_scatter_back": lambda x, n: aten.select_scatter(x, x[:, 0], 1, n - 4),
    "slice_backward": lambda x, n: aten.slice_backward(
        x[:, :-1], [x.shape[0], x.shape[1], 4], 1, 1, 2**63 - 1, 1
    ),
    "slice_backward_step": lambda x, n: aten.slice_backward(
        x[:, ::2], [x.shape[0], x.shape[1], 4], 1, 0, 2**63 - 1, 2
    ),
    "select_backward": lambda x, n: aten.select_backward(x[0], [x.shape[0], x.shape[1], 4], 0, -1),
}


@pytest.mark.parametrize("name", DYNAMIC_SLICES)
def test_slices_of_other_sizes(name):
    fn = DYNAMIC_SLICES[name]
    check_all(
        lambda x, n: fn(x.clone(), n),
        torch.randn(3, 5, 4),
        2,
        dynamic=True,
        other_inputs=(torch.randn(4, 8, 4), 3),
    )


MIRRORS = [
    (F.pad, (3, 6), (2, 1), "reflect"),
    (F.pad, (2, 3, 6), (2, 1), "reflect"),
    (F.pad, (2, 3, 6), (1, 2), "replicate"),
    (F.pad, (2, 5, 6), (2, 1, 0, 3), "reflect"),
    (F.pad, (1, 2, 5, 6), (2, 1, 1, 3), "reflect"),
    (F.pad, (1, 2, 5, 6), (2, 1, 0, 0), "replicate"),
    (F.pad, (1, 2, 4, 5, 6), (1, 2, 2, 1, 3, 0), "reflect"),
    (F.pad, (2, 4, 5, 6), (1, 2, 2, 1, 3, 0), "replicate"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pad,shape,padding,mode", MIRRORS)
def test_mirrored_paddings(pad, shape, padding, mode, dtype):
    x = made(dtype, *shape)
    types = check_all(lambda x: aten_pad(x, padding, mode), x)
    assert "PadV3" in types
    grad = made(dtype, *pad(x, padding, mode).shape)
    kind = "reflection" if mode == "reflect" else "replication"
    backward = getattr(aten, f"{kind}_pad{len(padding) // 2}d_backward")
    types = check_all(lambda g, x: backward(g, x, list(padding)), grad, x)
    assert "PadV3Grad" in types


def aten_pad(x: torch.Tensor, padding: tuple[int, ...], mode: str) -> torch.Tensor:
    kind = "reflection" if mode == "reflect" else "replication"
    return getattr(aten, f"{kind}_pad{len(padding) // 2}d")(x, list(padding))


# ---- indices ----

READS: dict[str, Any] = {
    "one": lambda x, i, j: x[i],
    "second": lambda x, i, j: x[:, i],
    "negative": lambda x, i, j: x[:, i - 2],
    "pair": lambda x, i, j: x[i, j],
    "apart": lambda x, i, j: x[i, :, j],
    "broadcast": lambda x, i, j: x[i[:, None], j[None]],
    "scalar_index": lambda x, i, j: aten.index(x, [None, i[0], j]),
    "unsafe": lambda x, i, j: aten._unsafe_index(x, [None, i, j]),
    "int32": lambda x, i, j: x[i.int()],
    "index_select": lambda x, i, j: x.index_select(1, i),
    "index_select_negative_dim": lambda x, i, j: x.index_select(-1, i.int()),
    "index_select_one": lambda x, i, j: x.index_select(0, i[1]),
    "gather": lambda x, i, j: x.gather(1, i.view(1, 4, 1).expand(2, 4, 3)),
    "gather_last": lambda x, i, j: x.gather(-1, i.view(1, 1, 4)),
    "gather_scalar": lambda x, i, j: x[0, 0, 0].gather(0, i[0] * 0),
}
WRITES: dict[str, Any] = {
    "put": lambda x, i, j: aten.index_put(x, [i[:2]], x[0]),
    "put_second": lambda x, i, j: aten.index_put(x, [None, i[:2]], x[:, :2]),
    "put_third": lambda x, i, j: aten.index_put(x, [None, None, i[:2]], x[..., :2]),
    "put_apart": lambda x, i, j: aten.index_put(x, [i[1:2], None, j[1:2]], x[0, 0, 0]),
    "put_negative": lambda x, i, j: aten.index_put(x, [i[:2] - 2], x[:2]),
    "put_scalar_index": lambda x, i, j: aten.index_put(x, [None, i[1]], x[:, 0]),
    "unsafe_put": lambda x, i, j: aten._unsafe_index_put(x, [i[:2]], x[:2]),
    "index_copy": lambda x, i, j: x.index_copy(1, i[:2], x[:, :2]),
    "index_copy_last": lambda x, i, j: x.index_copy(-1, i[:2], x[..., :2]),
    "index_copy_one": lambda x, i, j: x.index_copy(1, i[1], x[:, :1]),
    "index_fill": lambda x, i, j: x.index_fill(1, i[:2], 1),
    "index_fill_tensor": lambda x, i, j: x.index_fill(-1, i[:2], x[0, 0, 0]),
    "scatter": lambda x, i, j: x.scatter(1, i[:2].view(1, 2, 1).expand(2, 2, 3), x),
    "scatter_value": lambda x, i, j: x.scatter(-1, i[:2].view(1, 1, 2), 1),
    "scatter_scalar": lambda x, i, j: x[0, 0, 0].scatter(0, i[0] * 0, x[1, 1, 1]),
    "put_mask": lambda x, i, j: aten.index_put(x, [i.bool()[:2]], x[0, 0, 0]),
    "put_mask_second": lambda x, i, j: aten.index_put(x, [None, i.bool()], x[0, 0, 0]),
    "put_mask_pair": lambda x, i, j: aten.index_put(x, [x[..., 0] > 0], x[0, 0, 0]),
    "put_mask_all": lambda x, i, j: aten.index_put(x, [x > 0], x[0, 0, 0]),
    "masked_scatter": lambda x, i, j: x.masked_scatter(x > 0, x.flip(0)),
}
SUMS: dict[str, Any] = {
    "put_accumulate": lambda x, i, j: aten.index_put(x, [None, i], x[:, :1], True),
    "index_add": lambda x, i, j: x.index_add(1, i[:3], x[:, :3]),
    "index_add_alpha": lambda x, i, j: x.index_add(-1, i[:2].int(), x[..., :2], alpha=3),
    "index_add_one": lambda x, i, j: x.index_add(0, i[0], x[:1]),
    "scatter_add": lambda x, i, j: x.scatter_add(1, i.view(1, 4, 1).expand(2, 4, 3), x),
    "scatter_add_last": lambda x, i, j: x.scatter_add(-1, j.view(1, 1, 4)[..., :3], x),
}


def reduced(how: str) -> Any:
    return lambda x, i, j: x.scatter_reduce(1, i.view(1, 4, 1).expand(2, 4, 3), x, how)


def scattered(how: str) -> Any:
    return lambda x, i, j: x.scatter(1, i.view(1, 4, 1).expand(2, 4, 3), x, reduce=how)


SUMS |= {f"scatter_reduce_{how}": reduced(how) for how in ("sum", "prod", "amax", "amin")}
SUMS |= {f"scatter_with_{how}": scattered(how) for how in ("add", "multiply")}
PLACES = (torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0, 1, 1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_indices(name, dtype):
    fn = {**READS, **WRITES}[name]
    check_all(fn, made(dtype, 2, 4, 3), *PLACES)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_indices_that_sum(name, dtype):
    check_all(SUMS[name], made(dtype, 2, 4, 3), *PLACES)


DECLINED: dict[str, Any] = {
    "bool_mask": lambda x, m: x[m],
    "bool_mask_put": lambda x, m: aten.index_put(x, [m[:, 0]], x[:1], True),
    "bool_mask_row": lambda x, m: aten.index_put(x, [m[:, 0]], x[0]),
    "byte_mask": lambda x, m: aten.index_put(x, [m[:, 0].byte()], x[0]),
    "mean": lambda x, m: x.scatter_reduce(0, m.long(), x, "mean"),
    "without_self": lambda x, m: x.scatter_reduce(0, m.long(), x, "sum", include_self=False),
    "nonzero": lambda x, m: m.nonzero(),
    "masked_select": lambda x, m: x.masked_select(m),
    "diagonal": lambda x, m: (x * 2).diagonal(),
    "unfold": lambda x, m: (x * 2).unfold(1, 2, 1),
}


@pytest.mark.parametrize("name", DECLINED)
def test_left_to_the_generic_node(name):
    x = torch.randn(3, 4)
    conversion = check(DECLINED[name], x, x > 0, generic=True)
    assert conversion.generic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("indices", [[1, 3, 1], [[1, 0], [3, 3]], 2], ids=str)
@pytest.mark.parametrize("index_type", [torch.int64, torch.int32], ids=str)
def test_embedding(index_type, indices, dtype):
    indices = torch.tensor(indices, dtype=index_type)
    table = made(dtype, 5, 6)
    types = check_all(lambda t, i: F.embedding(i, t, padding_idx=3), table, indices)
    assert "GatherV2" in types
    grad = made(dtype, *indices.shape, 6)
    for padding, scaled in ((-1, False), (3, False), (-1, True)):
        backward = partial_of(aten.embedding_dense_backward, 5, padding, scaled)
        assert "EmbeddingDenseGrad" in check_all(backward, grad, indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_searchsorted(dtype):
    rows, values = made(dtype, 3, 8).sort(-1).values, made(dtype, 3, 5)
    for options in ({}, {"right": True}, {"side": "right"}, {"side": "left"}, {"out_int32": True}):
        check_all(partial_of(torch.searchsorted, **options), rows, values)
    loose = made(dtype, 3, 8)
    check_all(lambda r, v, s: torch.searchsorted(r, v, sorter=s), loose, values, loose.argsort(-1))
    check_all(lambda v, b: torch.bucketize(v, b, right=True), values, rows[0])


@pytest.mark.parametrize("name", ["one", "pair", "apart", "broadcast", "index_select"])
def test_reads_of_other_sizes(name):
    other = (torch.randn(3, 6, 5), torch.tensor([2, 1, 0]), torch.tensor([2, 2, 0]))
    check_all(READS[name], torch.randn(2, 4, 3), *PLACES, dynamic=True, other_inputs=other)


def test_scatter_value_of_other_sizes():
    fn = lambda x, i: x.scatter(0, i, 2.5)  # noqa: E731
    other = (torch.randn(6, 3), torch.randint(0, 6, (2, 3)))
    check_all(fn, torch.randn(4, 5), torch.randint(0, 4, (3, 5)), dynamic=True, other_inputs=other)


# ---- caches ----

CACHES: dict[str, Any] = {
    "index_copy": lambda cache, new, at: cache.index_copy_(2, at, new),
    "index_put": lambda cache, new, at: aten.index_put_(cache, [None, None, at], new),
    "slice": lambda cache, new, at: cache[:, :, 2:4].copy_(new),
    "select": lambda cache, new, at: cache[:, :, 3].copy_(new[:, :, 0]),
    "scatter_add": lambda cache, new, at: cache.index_add_(2, at, new),
}


@pytest.mark.parametrize("name", CACHES)
def test_cache_update_is_one_node_that_may_work_in_place(name):
    def fn(cache, new, at):
        CACHES[name](cache, new, at)
        return cache.sum(-1), cache

    cache, new, at = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 2, 4), torch.tensor([4, 6])
    conversion = check(fn, cache, new, at)
    apply_rules(conversion.graph, GraphState())  # a slice that is put back becomes one node here
    remove_dead_code(conversion.graph, GraphState())
    rows = [row_of(n.type) for n in conversion.graph.nodes if n.type != "NetOutput"]
    assert len([row for row in rows if row.has(Trait.WRITES_FIRST)]) == 1
    assert [row.type for row in rows].count("Assign") == 1
    check_out(conversion.graph, [cache, new, at])


def test_a_clone_keeps_what_was_there_before_an_update():
    traced = make_fx(lambda x: (x.clone(), aten.copy_(x, x + 1))[0], tracing_mode="fake")(
        torch.zeros(3)
    )
    examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    conversion = GraphConverter(traced, "graph_1", infer).run(*examples)
    x = torch.zeros(3)
    (old,) = interpret(conversion.graph, [x])
    assert old.tolist() == [0, 0, 0]


# ---- attention ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "scale", "grouped", "cross"])
def test_attention(kind, dtype):
    q, k = made(dtype, 2, 4, 8, 16), made(dtype, 2, 4, 8, 16)
    options: dict[str, Any] = {}
    if kind == "grouped":
        k, options = made(dtype, 2, 2, 8, 16), {}
    if kind == "cross":
        k = made(dtype, 2, 4, 5, 16)
    if kind == "causal":
        options = {"is_causal": True}
    if kind == "scale":
        options = {"scale": 0.3}
    op = aten._scaled_dot_product_flash_attention_for_cpu

    if kind == "mask":
        types = check_all(lambda q, k, m: op(q, k, k, attn_mask=m), q, k, made(dtype, 2, 1, 8, 8))
    else:
        types = check_all(lambda q, k: op(q, k, k, **options), q, k)
    assert "FusedInferAttentionScore" in types


def test_attention_hands_heads_over_without_a_copy():
    def fn(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(2, 8, 64) * 2

    q = torch.randn(2, 4, 8, 16)
    types = check_all(fn, q, q + 1, q - 1)
    assert types.count("Transpose") == 0 and types.count("Reshape") == 1


def test_attention_of_other_sizes():
    def heads(x):
        return x.view(x.shape[0], x.shape[1], 4, 16).transpose(1, 2)

    def fn(q, k):
        return F.scaled_dot_product_attention(heads(q), heads(k), heads(k))

    check_all(
        fn,
        torch.randn(2, 8, 64),
        torch.randn(2, 6, 64),
        dynamic=True,
        other_inputs=(torch.randn(3, 5, 64), torch.randn(3, 9, 64)),
    )


# ---- symbols ----

NUMBERS: dict[str, Any] = {
    "add": lambda n, m: n + m + 1,
    "sub": lambda n, m: n - 2 * m,
    "floordiv": lambda n, m: n // 2 + (m + 3) // 4,
    "mod": lambda n, m: (n - 9) % 4,
    "pow": lambda n, m: n**2,
    "neg": lambda n, m: -n,
    "truediv": lambda n, m: n / 3,
    "float": lambda n, m: torch.sym_float(n) * 0.1,
    "floor": lambda n, m: math.floor(n * 0.7),
    "ceil": lambda n, m: math.ceil(n / 3),
    "trunc": lambda n, m: math.trunc(n * 1.9),
    "int": lambda n, m: torch.sym_int(n / 2),
    "max": lambda n, m: torch.sym_max(n, 4),
    "min": lambda n, m: torch.sym_min(n, m),
    "sum": lambda n, m: torch.sym_sum([n, m, 3]),
    "sqrt": lambda n, m: torch._sym_sqrt(n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    fn = NUMBERS[name]
    check_all(
        lambda x, n, m: (x * fn(n, m), fn(n, m)),
        torch.randn(3),
        7,
        2,
        dynamic=True,
        other_inputs=(torch.randn(3), 6, 3),
    )


def test_a_size_computed_with_floats_is_exact():
    def fn(x):
        return x.new_ones(math.floor(x.shape[0] * 0.7), math.ceil(x.shape[1] / 3))

    check_all(fn, torch.randn(10, 9), dynamic=True, other_inputs=(torch.randn(30, 8),))


TRUTHS: dict[str, Any] = {
    "eq": lambda n, m: n == m,
    "ne": lambda n, m: n != m,
    "lt": lambda n, m: n < m,
    "le": lambda n, m: n <= m,
    "gt": lambda n, m: n > m,
    "ge": lambda n, m: n >= m,
    "not": lambda n, m: torch.sym_not(n > m),
    "and": lambda n, m: (n > 1) & (m > 5),
    "or": lambda n, m: (n > 9) | (m > 5),
    "float": lambda n, m: n / 2 > m,
}


@pytest.mark.parametrize("name", TRUTHS)
def test_truths(name):
    """Tracing decides most comparisons, so these graphs are written by hand."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    n, m = (fake.shape_env.create_unbacked_symint() for _ in range(2))
    traced = torch.fx.GraphModule({}, torch.fx.Tracer().trace(TRUTHS[name]))
    for node, meta in zip(traced.graph.find_nodes(op="placeholder"), (n, m), strict=True):
        node.meta["val"] = meta
    conversion = GraphConverter(traced, "graph_1", infer).run(n, m)
    assert not conversion.generic
    for numbers in ((2, 7), (7, 2), (3, 3), (10, 10)):
        seen: list[Any] = []
        inputs = [torch.tensor(x) for x in numbers]
        interpret(conversion.graph, inputs, lambda _, results, seen=seen: seen.extend(results))
        expected = not numbers[0] > numbers[1] if name == "not" else TRUTHS[name](*numbers)
        assert seen[-1].dtype == torch.bool and seen[-1].item() == expected


def test_checks_run():
    def fn(x):
        aten._assert_async.msg(x.sum() < 10, "too large")
        aten._assert_tensor_metadata(x, dtype=torch.int64)
        return x * 2

    conversion = check(fn, torch.tensor([1, 2, 3]))
    assert "Assert" in [n.type for n in conversion.graph.nodes]
    with pytest.raises(RuntimeError, match="too large"):
        interpret(conversion.graph, [torch.tensor([10, 20, 30])])
