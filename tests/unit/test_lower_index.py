"""Lowering of reads and writes by index, of joins, slices and views, against the torch kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowering import OneNode, check, check_dynamic, check_node, layouts
from torchair import ge
from torchair.codegen.cpu.jit import Library, host, run_kernel
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import expressions, simplify, with_words
from torchair.engine.lower import Group, Operand, build_nest, whole
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Graph
from torchair.operators import infer, interpret
from torchair.operators.core import TYPES, has_loops

TYPED = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
END = 2**31 - 1


def reals(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * 9).to(dtype)


def positions(n, *shape, dtype=torch.int64, negative=False, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-n if negative else 0, n, shape, generator=source).to(dtype)


def some_of(n, count, dtype=torch.int64, seed=0):
    """Positions without repetition."""
    source = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=source)[:count].to(dtype)


def named(dtype):
    return str(dtype).removeprefix("torch.")


by_type = pytest.mark.parametrize("dtype", TYPED, ids=named)


# ---- reads ----


@pytest.mark.parametrize("dtype", (*TYPED[:3], torch.uint8), ids=named)
@pytest.mark.parametrize("size", [(14, 18), (21, 18), (7, 9), (50, 4), (3, 100)], ids=str)
def test_nearest_neighbours(size, dtype):
    check("ResizeNearestNeighborV2", reals(2, 3, 7, 9, dtype=dtype), list(size))


@by_type
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=named)
def test_rows_of_a_table(index, dtype):
    check("GatherV2", reals(11, 37, dtype=dtype), positions(11, 3, 4, dtype=index), [0])


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
def test_rows_along_any_axis(layout, axis):
    x = layouts(reals(5, 6, 19))[layout]
    check("GatherV2", x, positions(x.shape[axis], 4), [axis])


@pytest.mark.parametrize("at", [0, 3, -1, -4])
def test_selection_of_one_row(at):
    check("GatherV2", reals(5, 6, 19), at, [1], negative_index_support=True)


@pytest.mark.parametrize("op_type", ["GatherV2", "IndexByTensor", "GatherElements"])
def test_an_index_out_of_range_reads_inside(op_type):
    x, wild = reals(5, 3), torch.tensor([0, 4, 5, 10**12, -(10**12)])
    if op_type == "GatherElements":
        one = OneNode(op_type, x, wild[:, None].expand(5, 3).contiguous())
    else:
        one = OneNode(op_type, x, *((wild, [0]) if op_type == "GatherV2" else ([wild],)))
    (got,) = one.run()
    torch.testing.assert_close(got, x[[0, 4, 0, 0, 0]])


@by_type
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_elements_along_a_dim(dim, dtype):
    check("GatherElements", reals(5, 6, 19, dtype=dtype), positions(5, 4, 5, 18), dim=dim)


def test_elements_of_scalars():
    check("GatherElements", reals(), torch.tensor(0))
    check("GatherElements", reals(7), torch.tensor(3))


INDICES = {
    "leading": ([1], [(4, 2)]),
    "second": ([0, 1], [(4, 2)]),
    "two": ([1, 1], [(4, 2), (2,)]),
    "last two": ([0, 1, 1], [(4, 1), (3,)]),
    "apart": ([1, 0, 1], [(4, 1), (3,)]),
    "all": ([1, 1, 1], [(4,), (1,), (4,)]),
}


@pytest.mark.parametrize("name", INDICES)
def test_points(name):
    mask, shapes = INDICES[name]
    covered = [d for d, m in enumerate(mask) if m]
    indices = [
        positions((5, 6, 19)[d], *s, negative=True) for d, s in zip(covered, shapes, strict=True)
    ]
    check("IndexByTensor", reals(5, 6, 19), indices, indices_mask=mask)


# ---- writes ----


@by_type
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
def test_rows_written(layout, dtype):
    value = layouts(reals(5, 4, 19, dtype=dtype, seed=1))[layout]
    where = some_of(6, 4) - 3  # some of them count from the end
    check("IndexPutV2", reals(5, 6, 19, dtype=dtype), value, [0, 1], [0, 1], [where])


def test_points_written():
    rows, columns = torch.tensor([[0], [1], [4]]), torch.tensor([[1, 3]])
    check("IndexPutV2", reals(5, 6, 7), reals(3, 2, 6), [1, 0, 1], [1, 0, 1], [rows, columns])


def test_a_write_out_of_range_does_not_happen():
    one = OneNode("IndexPutV2", reals(5, 3), reals(4, 3), [1], [1], [torch.tensor([5, -1, -6, 9])])
    (got,) = one.run()
    expected = reals(5, 3)
    expected[4] = reals(4, 3)[1]
    torch.testing.assert_close(got, expected)


def test_writes_that_are_declined():
    x, where = reals(5, 3), torch.tensor([1, 2])
    put = ([1], [1], [where])
    assert OneNode("IndexPutV2", x, reals(2, 3), *put, accumulate=True).declined is not None
    assert OneNode("IndexPutV2", x, reals(1, 3), *put).declined is not None
    assert OneNode("IndexPutV2", x, reals(2, 3), *put).declined is None
    along = where[:, None].expand(2, 3).contiguous()
    assert OneNode("ScatterElements", x, along, reals(2, 3), reduction="add").declined is not None


@by_type
@pytest.mark.parametrize("axis", [0, -1])
def test_elements_written(axis, dtype):
    columns = [some_of(4, 3, seed=k) for k in range(4)]
    where = torch.stack(columns, dim=1 if axis == 0 else 0)
    check("ScatterElements", reals(4, 4, dtype=dtype), where, reals(5, 6, dtype=dtype), axis=axis)


@by_type
def test_a_slice_written(dtype):
    x, value = reals(5, 37, dtype=dtype), reals(2, 17, dtype=dtype, seed=1)
    check("StridedSliceAssign", x, [1, -34], [3, END], [1, 2], value)


def test_a_broadcast_slice_is_declined():
    one = OneNode("StridedSliceAssign", reals(5, 7), [1, 0], [3, END], [1, 1], reals(1, 7))
    assert one.declined is not None


VIEWS = [  # dims of the whole, then size, stride and offset of the part
    ((6, 8), (3, 4), (16, 1), 2),
    ((6, 8), (4, 3), (1, 16), 2),
    ((48,), (3, 4), (10, 2), 5),
    ((6, 8), (5,), (9,), 1),
    ((6, 8), (), (), 13),
]


@pytest.mark.parametrize(("dims", "size", "stride", "offset"), VIEWS)
def test_a_view_written(dims, size, stride, offset):
    place = [list(size), list(stride), [offset]]
    check("ViewCopy", reals(*dims), *place, reals(*size, seed=1), list(size), [1], [0])


# ---- joins ----


@by_type
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenation(axis, dtype):
    shapes = [[3, 5, 21] for _ in range(3)]
    for k, n in enumerate((2, 17, 1)):
        shapes[k][axis] = n
    check("ConcatV2", [reals(*s, dtype=dtype, seed=k) for k, s in enumerate(shapes)], axis, N=3)


def test_concatenation_with_nothing_and_with_scalars():
    check("ConcatV2", [reals(3, 2), reals(3, 0), reals(3, 33)], -1, N=3)
    check("ConcatV2", [reals(3, 0), reals(3, 4)], -1, N=2)
    check("ConcatV2", [reals(), reals(3)], 0, N=2)
    check("ConcatV2", [reals(4, 3)], 0, N=1)


@pytest.mark.parametrize("layout", ["transposed", "spread"])
def test_concatenation_of_other_layouts(layout):
    parts = [layouts(reals(3, n, seed=n))[layout] for n in (4, 19)]
    check("ConcatV2", parts, 1, N=2)


@by_type
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_packing(axis, dtype):
    check("Pack", [reals(5, 18, dtype=dtype, seed=k) for k in range(3)], axis=axis, N=3)


def test_packing_of_scalars():
    check("Pack", [reals(), reals(seed=1)], axis=0, N=2)


@by_type
@pytest.mark.parametrize("pads", [[1, 2, 0, 0, 0, 3], [0, 0, 2, 0, 5, 1], [1, -2, 0, 1, -1, 3]])
def test_constant_padding(pads, dtype):
    filling = [] if dtype == torch.bool else [torch.tensor(3, dtype=dtype)]
    check("PadV3", reals(3, 4, 21, dtype=dtype), pads, *filling)


def test_padding_by_halves_and_with_a_vector():
    check("PadV3", reals(3, 21), [1, -2, 0, 3], paddings_contiguous=False)
    check("PadV3", reals(3, 21), [1, 2, 0, 3], torch.tensor([2.5]))
    assert OneNode("PadV3", reals(3, 21), [0, 0, 1, 1], mode="reflect").declined is not None


# ---- splits and slices ----


@pytest.mark.parametrize("sizes", [[7, 7, 7], [2, -1, 10], [0, 20, 1]])
def test_splits(sizes):
    """Parts of different sizes are different nests: the first one is made here."""
    only = None if sizes == [7, 7, 7] else [0]
    check("SplitV", reals(3, 21), sizes, 1, num_split=3, only=only)


def test_unpacking():
    check("Unpack", reals(3, 4, 19), num=4, axis=1)


@by_type
@pytest.mark.parametrize(
    ("begin", "end", "steps"),
    [
        ([1, 2], [3, 30], [1, 1]),
        ([0, -34], [END, END], [1, 2]),
        ([-9, 0], [-1, 99], [1, 3]),
        ([4, 0], [2, 5], [1, 1]),
    ],
)
def test_slices(begin, end, steps, dtype):
    x = reals(5, 37, dtype=dtype)
    check("StridedSliceV2", x, begin, end, [0, 1], steps)
    check("StridedSlice", x, begin, end, steps)


def test_masks_of_a_slice_are_declined():
    one = OneNode("StridedSliceV2", reals(5, 7), [1], [3], [0], [1], begin_mask=0)
    assert one.declined is None
    one.node.attrs["end_mask"] = ge.attr.Int(1)
    assert one.declined == "end_mask"


@by_type
@pytest.mark.parametrize("times", [[2, 1, 3], [1, 4, 1], [3, 2]])
def test_tiles(times, dtype):
    check("Tile", reals(3, 11, dtype=dtype), times)
    check("Tile", reals(1, 11, dtype=dtype), times)


@by_type
@pytest.mark.parametrize("axes", [[0], [-1], [0, 2]])
def test_reversal(axes, dtype):
    check("ReverseV2", reals(3, 4, 37, dtype=dtype), axes)


@pytest.mark.parametrize(
    ("shifts", "dims"), [([1], [0]), ([-2], [1]), ([40], [-1]), ([0], [0]), ([1, -1], [0, 2])]
)
def test_rolls(shifts, dims):
    check("Roll", reals(3, 4, 37), shifts=shifts, dims=dims)


def test_rolls_across_dims():
    check("Roll", reals(37), shifts=[5])
    assert OneNode("Roll", reals(3, 4), shifts=[5]).declined is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
@pytest.mark.parametrize("dim", [0, -1])
def test_gated_halves(dim, dtype):
    x = reals(4, 38, dtype=dtype)
    grad = reals(2, 38, dtype=dtype) if dim == 0 else reals(4, 19, dtype=dtype)
    check("GLU", x, dim=dim)
    check("GLUGrad", grad, x, dim=dim)


# ---- views ----

RESHAPES = [
    ((4, 6), (24,)), ((24,), (4, 6)), ((4, 6, 5), (4, 30)), ((4, 30), (4, 6, 5)),
    ((2, 3, 4, 5), (6, 20)), ((6, 4), (4, 6)), ((3, 1, 4), (1, 3, 4, 1)), ((2, 6, 5), (4, 3, 5)),
    ((1,), ()), ((), (1, 1)), ((4, 6), (2, 2, 6)), ((0, 3), (3, 0)), ((7, 5), (7, 5)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_reshapes(old, new, layout):
    x = reals(*old)
    check("Reshape", layouts(x)[layout] if x.dim() else x, list(new))


@by_type
def test_other_views(dtype):
    x = reals(3, 1, 19, dtype=dtype)
    check("Transpose", x, [2, 0, 1])
    check("Unsqueeze", x, axes=[0, -1])
    check("Squeeze", x, axis=[1])
    check("Squeeze", x)
    check("BroadcastTo", x, [2, 3, 4, 19])
    check("Expand", x, [3, 5, 19])
    check("Identity", x)


def test_expansion_that_keeps_dims():
    check("Expand", reals(3, 1, 19), [2, -1, 5, -1])


# ---- one kernel for many sizes, other processors ----


def test_one_kernel_serves_all_sizes_of_reads_and_writes():
    shapes = ((11, 37, 3), (2, 5, 9), (4, 70, 2))
    check_dynamic("GatherV2", *[(reals(n, m), positions(n, k), [0]) for n, m, k in shapes])
    check_dynamic("IndexByTensor", *[(reals(n, m), [positions(n, k)]) for n, m, k in shapes])
    puts = [(reals(n, m), reals(2, m), [1], [1], [some_of(n, 2)]) for n, m, _ in shapes]
    check_dynamic("IndexPutV2", *puts)


def test_one_kernel_serves_all_sizes_of_joins():
    pairs = [([reals(3, n), reals(3, m)], 1) for n, m in ((5, 37), (8, 2), (40, 70))]
    check_dynamic("ConcatV2", *pairs, N=2)
    shapes = [(5, 37), (8, 3), (2, 70)]
    check_dynamic("Pack", *[([reals(*s), reals(*s, seed=1)],) for s in shapes], axis=1, N=2)
    check_dynamic("PadV3", *[(reals(*s), [1, 0, 2, 1]) for s in shapes])


def test_one_kernel_serves_all_sizes_of_slices():
    shapes = [(5, 37), (8, 4), (3, 70)]
    check_dynamic("StridedSliceV2", *[(reals(*s), [1, -3], [3, END], [0, 1]) for s in shapes])
    check_dynamic("ReverseV2", *[(reals(*s), [0, 1]) for s in shapes])
    check_dynamic("Roll", *[(reals(*s),) for s in shapes], shifts=[1], dims=[1])
    check_dynamic("Tile", *[(reals(*s), [2, 3]) for s in shapes])
    check_dynamic("GLU", *[(reals(n, 2 * m),) for n, m in shapes])


@pytest.mark.parametrize("target", [[-1], [2, -1], [-1, 3]])
def test_one_kernel_serves_all_sizes_of_reshapes(target):
    shapes = [(6, 37), (12, 5), (18, 70)]
    check_dynamic("Reshape", *[(reals(*s), target) for s in shapes])
    check_dynamic("Reshape", *[(reals(*s, 2).transpose(0, 1), target) for s in shapes[:1]])


@pytest.mark.parametrize("bits", [256, 128])
def test_narrower_processors(bits):
    narrow = replace(host(), bits=bits, registers=16, dot_bf16=False)
    for one in (
        OneNode("GatherV2", reals(11, 37), positions(11, 3), [0]),
        OneNode("ConcatV2", [reals(3, 5), reals(3, 37)], 1, N=2),
        OneNode("IndexPutV2", reals(5, 19), reals(2, 19), [1], [1], [some_of(5, 2)]),
        OneNode("Reshape", reals(6, 19).t(), [3, 38]),
    ):
        check_node(one, machine=narrow)


# ---- several nodes in one nest ----


def fused(build, *tensors, reduced=(), threads=2):
    """Lower all nodes of a graph into one nest over the dims of the last result, and compare with
    the operator table. The kinds of expressions in the nest are returned."""
    with Graph("g", infer) as graph:
        inputs = [
            Data(index=k, dtype=torch_to_ge(t.dtype), shape=list(t.shape), placement="NPU")
            for k, t in enumerate(tensors)
        ]
        last = build(*inputs)
        NetOutput([last])
    nodes = [n for n in graph.nodes if has_loops(n.type)]
    (expected,) = interpret(graph, [t.clone() for t in tensors])
    result = torch.empty_like(expected, memory_format=torch.contiguous_format)
    operands = {
        v: Operand(k, TYPES[v.dtype], tuple(t.shape), tuple(t.stride()))
        for k, (v, t) in enumerate(zip([*inputs, last], [*tensors, result], strict=True))
    }
    group = Group(nodes, last, frozenset(reduced), spaces={last: whole(last)})
    nest = simplify(build_nest(group, operands, [last], lambda v: v.fact))
    kernel = print_nest(with_words(nest, lambda n: n), host())
    pointers = [t.data_ptr() for t in (*tensors, result)]
    run_kernel(Library(), kernel, pointers, threads)
    torch.testing.assert_close(result, expected)
    return [e.kind for e in expressions(nest)]


def test_a_reshape_and_its_inverse_cost_nothing():
    def build(x):
        return ge.Reshape(ge.Relu(ge.Reshape(x, [15, 37])), [3, 5, 37])

    assert "floordiv" not in fused(build, reals(3, 5, 37))
    assert "floordiv" not in fused(build, reals(5, 3, 37).transpose(0, 1))


def test_a_reshape_of_computed_values_is_one_walk_through_memory():
    def build(x, y):
        return ge.Relu(ge.Reshape(ge.Add(x, y), [15, 4]))

    assert "floordiv" not in fused(build, reals(3, 5, 4), reals(3, 5, 4, seed=1))
    assert "floordiv" in fused(build, reals(3, 5, 4), reals(3, 1, 4, seed=1))


def test_heads_are_taken_apart_and_put_together():
    def build(x):
        heads = ge.Transpose(ge.Reshape(x, [3, 5, 4, 8]), [0, 2, 1, 3])
        back = ge.Transpose(ge.Relu(heads), [0, 2, 1, 3])
        return ge.Reshape(back, [3, 5, 32])

    assert "floordiv" not in fused(build, reals(3, 5, 32))


def test_rotary_embedding():
    def build(x, cos, sin):
        first = ge.StridedSliceV2(x, [0], [8], [-1], [1])
        second = ge.StridedSliceV2(x, [8], [END], [-1], [1])
        turned = ge.ConcatV2([ge.Neg(second), first], -1, N=2)
        return ge.Add(ge.Mul(x, cos), ge.Mul(turned, sin))

    fused(build, reals(2, 3, 5, 16), reals(5, 16, seed=1), reals(5, 16, seed=2))


def test_a_divisor_is_not_zero_where_nothing_is_read():
    def build(x, y, z):
        return ge.ConcatV2([ge.FloorDiv(x, y), z], 0, N=2)

    x = torch.arange(5)
    fused(build, x, x + 1, x)


def test_a_row_taken_from_a_join_reads_one_operand():
    def build(x, y):
        joined = ge.ConcatV2([x, y], 0, N=2)
        return ge.Relu(ge.GatherV2(joined, 4, [0], negative_index_support=True))

    assert "where" not in fused(build, reals(3, 19), reals(4, 19, seed=1))


def test_norm_of_embeddings():
    def build(table, where, more, gamma):
        rows = ge.Add(ge.GatherV2(table, where, [0]), more)
        return ge.LayerNormV4(rows, [37], gamma)[0]

    inputs = reals(11, 37), positions(11, 2, 5), reals(5, 37, seed=1), reals(37, seed=2)
    fused(build, *inputs, reduced=[2])


def test_softmax_of_a_join():
    def build(x, y):
        return ge.SoftmaxV2(ge.ConcatV2([ge.Relu(x), y], -1, N=2))

    fused(build, reals(3, 7), reals(3, 19, seed=1), reduced=[1])


def test_softmax_of_a_reshape_of_another_layout():
    def build(x):
        return ge.SoftmaxV2(ge.Reshape(ge.Transpose(x, [1, 0, 2]), [5, 21]))

    fused(build, reals(3, 5, 7), reduced=[1])
