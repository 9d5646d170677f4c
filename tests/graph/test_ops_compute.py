"""Converters and operator table rows of reductions, norms, products, convolutions and pooling."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from op_harness import check, convert, run
from torchair.convert import GraphConverter
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.operators import Op, infer, interpret, row_of
from torchair.operators.reference import tensor_args, tensor_fact

aten = torch.ops.aten
f32, bf16, f64, i32, i64 = torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64
T, N = True, False


def rand(*shape, dtype=f32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype is torch.uint8 else -9, 9, shape, generator=generator).to(
            dtype
        )
    return torch.randn(shape, generator=generator).to(dtype)


def verify(fn, *inputs, **options):
    """`check`, and for every node: rule and `out=` kernel against what the kernel returns."""
    conversion = check(fn, *inputs, **options)
    signature = conversion.signature
    feeds = [inputs[s.args[0]] for s in signature.inputs]
    feeds = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in feeds]
    env = {}

    def watch(node, results):
        row = row_of(node.type)
        if node.type not in ("Data", "Const"):
            known = infer(node, lambda v: tensor_fact(env[v], v))
            for fact, tensor in zip(known, results, strict=True):
                assert fact.shape == tuple(tensor.shape), (node, fact, tensor.shape)
                if fact.dtype != DataType.DT_UNDEFINED:
                    assert ge_to_torch(fact.dtype) == tensor.dtype, (node, fact, tensor.dtype)
            if row.out:
                _check_out(node, row, env, results)
        env.update(zip(node.outputs, results, strict=True))

    interpret(conversion.graph, feeds, watch)
    return conversion


def _check_out(node, row, env, results):
    op = Op(node, lambda v: tensor_fact(env[v], v))
    outs = [torch.empty(r.shape, dtype=r.dtype) for r in results]
    places = [o.data_ptr() for o in outs]
    row.kernel(op)(
        *tensor_args(node, row, env.__getitem__), out=outs[0] if len(outs) == 1 else tuple(outs)
    )
    assert places == [o.data_ptr() for o in outs]
    for out, result in zip(outs, results, strict=True):
        torch.testing.assert_close(out, result, equal_nan=True)


def types(conversion):
    return [n.type for n in conversion.graph.nodes if n.type not in ("Const", "Data", "NetOutput")]


# ---- reductions ----

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum dim": lambda x: x.sum(1),
    "sum dims keep": lambda x: x.sum((0, -1), keepdim=True),
    "sum no dims": lambda x: x.sum([]),
    "sum wide": lambda x: x.sum(-1, dtype=f64),
    "prod": lambda x: x.prod(),
    "prod dim": lambda x: x.prod(1, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax((0, 2)),
    "amax all": lambda x: x.amax(),
    "amin keep": lambda x: x.amin(-1, keepdim=True),
    "max dim": lambda x: x.max(1),
    "min dim keep": lambda x: x.min(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum first": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "any": lambda x: x.any(),
    "any dim": lambda x: x.any(-1),
    "any dims": lambda x: torch.any(x, dim=(0, 2), keepdim=True),
    "any no dims": lambda x: torch.any(x, dim=()),
    "all": lambda x: x.all(),
    "all dim": lambda x: x.all(1, keepdim=True),
    "all dims": lambda x: torch.all(x, dim=(0, 1)),
}
ORDERED = {
    "argmax": lambda x: x.argmax(),
    "argmax keep all": lambda x: aten.argmax(x, None, True),
    "argmax dim": lambda x: x.argmax(-1),
    "argmax keep": lambda x: x.argmax(1, keepdim=True),
    "argmin": lambda x: x.argmin(),
    "argmin dim": lambda x: x.argmin(0),
    "argmin keep": lambda x: x.argmin(-1, keepdim=True),
    "topk": lambda x: x.topk(2),
    "topk first": lambda x: x.topk(1, 0, largest=False, sorted=True),
    "sort": lambda x: x.sort(),
    "sort middle": lambda x: x.sort(1, descending=True),
    "sort stable": lambda x: torch.sort(x, dim=-1, stable=True),
}
FLOATING = {
    "mean": lambda x: x.mean(),
    "mean dim": lambda x: x.mean((0, -1)),
    "mean keep": lambda x: x.mean(1, keepdim=True),
    "mean wide": lambda x: x.mean(-1, dtype=f64),
    "mean all wide": lambda x: x.mean(dtype=f32),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp keep": lambda x: x.logsumexp((0, 2), keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm one": lambda x: torch.linalg.vector_norm(x, 1, (0, 1), keepdim=True),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), -1),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, float("-inf"), 1),
    "norm three": lambda x: torch.linalg.vector_norm(x, 3.5, 1),
    "norm zero": lambda x: torch.linalg.vector_norm(x, 0, -1),
    "norm wide": lambda x: torch.linalg.vector_norm(x, dtype=f64),
    "std": lambda x: x.std(),
    "std dim": lambda x: x.std((0, -1), correction=0, keepdim=True),
    "std 2": lambda x: x.std(1, correction=2),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "var": lambda x: x.var(1, correction=0),
    "var_mean": lambda x: torch.var_mean(x, (0, -1), correction=0, keepdim=True),
}


@pytest.mark.parametrize("dtype", [f32, bf16, i64, i32, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name, dtype):
    verify(REDUCTIONS[name], rand(3, 4, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [f32, bf16, i64], ids=str)
@pytest.mark.parametrize("name", ORDERED)
def test_order(name, dtype):
    x = torch.randperm(60, generator=torch.Generator().manual_seed(0)).reshape(3, 4, 5)
    verify(ORDERED[name], x.to(dtype))


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize("name", FLOATING)
def test_floating_reduction(name, dtype):
    verify(FLOATING[name], rand(3, 4, 5, dtype=dtype))


SCALARS = (
    "sum", "sum no dims", "prod", "max", "min", "amax all", "any", "all", "argmax", "argmin",
    "argmax keep all", "sort", "mean", "norm",
)  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_reduction_of_a_scalar(name):
    verify((REDUCTIONS | ORDERED | FLOATING)[name], torch.tensor(2.5))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.mean(-1),
        lambda x: x.max(0),
        lambda x: x.argmax(0),
        lambda x: x.logsumexp(0),
        lambda x: x.cumsum(0),
        lambda x: x.any(0),
        lambda x: x.topk(1),
    ],
)
def test_dim_of_a_scalar(fn):
    verify(fn, torch.tensor(-0.5))


def test_reductions_of_special_values():
    x = torch.tensor([[float("inf"), 1.0], [float("-inf"), float("-inf")], [float("nan"), 2.0]])
    verify(lambda x: (x.logsumexp(1), *x.max(1), x.amax(1), x.argmax(1), x.sum(1)), x)
    verify(lambda x: (x.sum(1), x.sum(), x.any(1), x.all()), torch.empty(3, 0))
    verify(lambda x: x.logsumexp(0), rand(4, 3, dtype=i64))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.var(1),
        lambda x: x.std(1, correction=0.5),
        lambda x: torch.var_mean(x, 0),
        lambda x: torch.linalg.vector_norm(x.to(torch.complex64)),
        lambda x: x.to(torch.complex64).std(),
        lambda x: x[:0].logsumexp(0),
    ],
)
def test_what_reductions_leave_to_torch(fn):
    conversion = check(fn, rand(4, 6), generic=True)
    assert conversion.generic


def test_reductions_of_dynamic_shapes():
    def fn(x):
        top = x.topk(x.shape[1] // 2)
        return x.sum(), x.mean(0), x.max(1), x.argmax(), x.cumsum(0), x.sort(0), *top, x.std()

    def flat(x):
        return [t for r in fn(x) for t in (r if isinstance(r, tuple) else (r,))]

    x = (rand(4, 6),)
    check(flat, *x, dynamic=True, generic=True, other_inputs=(rand(5, 8),))


def test_call_sequence_of_reductions():
    def fn(x):
        v, i = torch.topk(x, 2, -1)
        return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0)

    conversion = convert(fn, rand(4, 6))
    calls = [
        (c.builder, c.args[1:], {k: v for k, v in c.kwargs.items() if k != "node_name"})
        for c in conversion.graph.journal
        if not isinstance(c, str) and c.builder not in ("Data", "NetOutput")
    ]
    calls = [(b, [_plain(a) for a in args], kw) for b, args, kw in calls]
    assert calls == [
        ("TopKV2", [2], dict(sorted=True, dim=-1, largest=True)),
        ("Cast", [], dict(dst_type=9)),
        ("Cast", [], dict(dst_type=0)),
        ("ReduceSum", [[0, 1]], {}),
        ("ReduceMean", [[0]], dict(keep_dims=False)),
        ("ArgMaxWithValue", [], dict(dimension=1, keep_dims=False)),
        ("Cast", [], dict(dst_type=9)),
        ("ArgMaxV2", [("Const", -1, 9)], {}),
        ("Cumsum", [0], {}),
    ]


def _plain(x):
    return ("Const", x.content, x.dtype) if hasattr(x, "node") else x


# ---- norms ----


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
def test_layer_norm(affine, dtype):
    x = rand(3, 4, 6, dtype=dtype)
    w = rand(4, 6, dtype=dtype) if affine in ("both", "weight") else None
    b = rand(4, 6, dtype=dtype) + 1 if affine in ("both", "bias") else None
    params = [p for p in (w, b) if p is not None]

    def fn(x, *p):
        p = iter(p)
        return aten.native_layer_norm(
            x, [4, 6], w if w is None else next(p), b if b is None else next(p), 1e-5
        )

    verify(fn, x, *params)


def test_layer_norm_call():
    conversion = convert(
        lambda x, w, b: F.layer_norm(x, [32], w, b), rand(4, 32), rand(32), rand(32)
    )
    (call,) = [
        c for c in conversion.graph.journal if not isinstance(c, str) and c.builder == "LayerNormV4"
    ]
    assert call.args[1] == [32] and call.kwargs == dict(epsilon=1e-05)


def test_layer_norm_of_mixed_types():
    args = (rand(3, 8, dtype=bf16), rand(8), rand(8))
    verify(lambda x, w, b: F.layer_norm(x, [8], w, b), *args)


def test_layer_norm_of_dynamic_shapes():
    def fn(x, w):
        return F.layer_norm(x, [x.shape[-1]], w) + F.layer_norm(x, [x.shape[-1]])

    check(fn, rand(4, 6), rand(6), dynamic=True, other_inputs=(rand(3, 9), rand(9)), generic=True)


def wanted(grads, mask):
    """The gradients asked for; torch may give others as well."""
    return [g for g, m in zip(grads, mask, strict=True) if m]


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("weighted", [T, N])
def test_layer_norm_backward(weighted, dtype):
    x, w = rand(3, 4, 6, dtype=dtype), rand(6, dtype=dtype)
    _, mean, rstd = aten.native_layer_norm(x, [6], w, w, 1e-5)
    mask = [T, weighted, weighted]

    def fn(dy, x, mean, rstd, w):
        p = w if weighted else None
        found = aten.native_layer_norm_backward(dy, x, [6], mean, rstd, p, p, mask)
        return wanted(found, mask)

    verify(fn, rand(3, 4, 6, dtype=dtype), x, mean, rstd, w)


def converted_call(target, inputs, *args):
    """One call of an operator that tracing would take apart, converted; `inputs` stand for it."""
    graph = fx.Graph()
    nodes = iter([graph.placeholder(f"arg{i}_1") for i in range(len(inputs))])
    call = graph.call_function(target, tuple(next(nodes) if a is ... else a for a in args))
    count = len(target._schema.returns)
    members = range(count if count > 1 else 0)
    graph.output(
        tuple(graph.call_function(operator.getitem, (call, i)) for i in members) or (call,)
    )
    gm = fx.GraphModule(torch.nn.Module(), graph)
    fakes = map(FakeTensorMode().from_tensor, inputs)
    conversion = GraphConverter(gm, "graph_1", infer).run(*fakes)
    assert not conversion.generic
    return conversion


@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
def test_rms_norm(dtype, eps):
    x, w = rand(2, 3, 8, dtype=dtype), rand(8, dtype=dtype)
    conversion = converted_call(aten._fused_rms_norm.default, [x, w], ..., [8], ..., eps)
    assert types(conversion) == ["RmsNorm"]
    expected = aten._fused_rms_norm(x, [8], w, eps)
    for got, e in zip(run(conversion, [x, w]), expected, strict=True):
        torch.testing.assert_close(got, e, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("affine", [T, N])
def test_group_norm(affine, dtype):
    def fn(x, w, b):
        p = (w, b) if affine else (None, None)
        return aten.native_group_norm(x, *p, 2, 6, 20, 3, 1e-5)

    verify(fn, rand(2, 6, 4, 5, dtype=dtype), rand(6, dtype=dtype), rand(6, dtype=dtype) + 1)


def test_group_norm_of_equal_elements_is_zero():
    x = (torch.arange(8.0) * 1.37 + 3.3).view(8, 1)
    fn = lambda x: torch.sign(F.group_norm(x, 1, eps=0.1))  # noqa: E731
    assert torch.equal(torch.compile(fn, backend="torchair")(x), torch.zeros(8, 1))


@pytest.mark.parametrize("weighted", [T, N])
def test_group_norm_backward(weighted):
    x, w = rand(2, 6, 4, 5), rand(6)
    _, mean, rstd = aten.native_group_norm(x, w, w, 2, 6, 20, 3, 1e-5)

    def fn(dy, x, mean, rstd, w):
        p, mask = (w, [T, T, T]) if weighted else (None, [T, N, N])
        found = aten.native_group_norm_backward(dy, x, mean, rstd, p, 2, 6, 20, 3, mask)
        return wanted(found, mask)

    verify(fn, rand(2, 6, 4, 5) + 1, x, mean, rstd, w)


def test_group_norm_of_dynamic_shapes():
    check(
        lambda x, w: F.group_norm(x, 2, w),
        rand(3, 4, 5, 6),
        rand(4),
        dynamic=True,
        other_inputs=(rand(2, 4, 7, 3), rand(4)),
        generic=True,
    )


SHAPES = [(4, 6), (4, 6, 5), (2, 6, 4, 5), (2, 6, 2, 3, 4)]


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("affine", [T, N])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_batch_norm_inference(shape, affine, dtype):
    def fn(x, w, b, mean, var):
        p = (w, b) if affine else (None, None)
        y, *saved = aten._native_batch_norm_legit_no_training(x, *p, mean, var, 0.1, 1e-5)
        return (y, *saved) if dtype is f32 else y  # tracing says bfloat16 for the empty rest

    stats = (rand(6), rand(6) + 1, rand(6) + 2, rand(6).abs() + 0.5)
    conversion = verify(fn, rand(*shape, dtype=dtype), *stats)
    assert "BNInfer" in types(conversion)


@pytest.mark.parametrize("affine", [T, N])
@pytest.mark.parametrize("training", [T, N])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_batch_norm_training(shape, training, affine):
    def fn(x, w, b, mean, var):
        p = (w, b) if affine else (None, None)
        return aten._native_batch_norm_legit_functional(x, *p, mean, var, training, 0.1, 1e-5)

    verify(fn, rand(*shape), rand(6), rand(6) + 1, rand(6) + 2, rand(6).abs() + 0.5)


def test_batch_norm_of_half_with_float_parameters():
    stats = (rand(6), rand(6) + 1, rand(6) + 2, rand(6).abs() + 0.5)

    def fn(x, w, b, mean, var):
        return aten._native_batch_norm_legit_functional(x, w, b, mean, var, T, 0.1, 1e-5)[0]

    verify(fn, rand(2, 6, 4, 4, dtype=bf16), *stats)


def test_batch_norm_backward_of_half_with_narrowed_statistics():
    x, w, mean, var = rand(4, 6, 5, dtype=bf16), rand(6), rand(6) + 2, rand(6).abs() + 0.5
    _, saved, rstd = aten._native_batch_norm_legit.no_stats(x, w, w, T, 0.1, 1e-5)
    assert saved.dtype is f32

    dy = rand(4, 6, 5, dtype=bf16) + 1
    inputs = [dy, x, w, mean, var, saved.to(bf16), rstd.to(bf16)]
    conversion = converted_call(
        aten.native_batch_norm_backward.default, inputs, *[...] * 7, T, 1e-5, [T, T, T]
    )
    expected = aten.native_batch_norm_backward(dy, x, w, mean, var, saved, rstd, T, 1e-5, [T, T, T])
    for got, e in zip(run(conversion, inputs), expected, strict=True):
        torch.testing.assert_close(got, e)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_instance_norm(dtype):
    verify(
        lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, T, 0.1, 1e-5),
        rand(2, 6, 4, 5, dtype=dtype),
    )


@pytest.mark.parametrize("mask", [[T, T, T], [T, N, N], [N, T, T]], ids=str)
@pytest.mark.parametrize("train", [T, N])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_batch_norm_backward(shape, train, mask):
    x, w, mean, var = rand(*shape), rand(6), rand(6) + 2, rand(6).abs() + 0.5
    _, saved, rstd, *_ = aten._native_batch_norm_legit_functional(
        x, w, w, mean, var, train, 0.1, 1e-5
    )

    def fn(dy, x, w, mean, var, saved, rstd):
        w = w if mask[1] else None
        found = aten.native_batch_norm_backward(dy, x, w, mean, var, saved, rstd, train, 1e-5, mask)
        return wanted(found, mask)

    verify(fn, rand(*shape) + 1, x, w, mean, var, saved, rstd)


# ---- products ----


@pytest.mark.parametrize("dtype", [f32, bf16, i64], ids=str)
@pytest.mark.parametrize(
    "fn, shapes",
    [
        (torch.mm, [(3, 4), (4, 5)]),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
        (torch.mv, [(3, 4), (4,)]),
        (torch.dot, [(4,), (4,)]),
        (torch.addmm, [(5,), (3, 4), (4, 5)]),
        (torch.addmv, [(3,), (3, 4), (4,)]),
        (lambda s, a, b: torch.addmv(s, a, b, alpha=2, beta=3), [(3,), (3, 4), (4,)]),
        (lambda s, a, b: torch.addmm(s, a, b, alpha=2, beta=3), [(3, 5), (3, 4), (4, 5)]),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    ],
)
def test_product(fn, shapes, dtype):
    verify(fn, *(rand(*s, dtype=dtype) for s in shapes))


@pytest.mark.parametrize(
    "a, b",
    [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 5)),
        ((6, 1, 3, 4), (2, 4, 5)),
    ],
)
def test_matmul(a, b):
    x, y = rand(*a), rand(*b)
    conversion = converted_call(aten.matmul.default, [x, y], ..., ...)
    torch.testing.assert_close(run(conversion, [x, y])[0], torch.matmul(x, y))


# ---- convolutions ----

CONVOLUTIONS = {
    "1d": ((2, 4, 9), (6, 4, 3), dict(stride=[2], padding=[1], dilation=[2])),
    "1d depthwise": ((2, 4, 9), (4, 1, 3), dict(padding=[2], groups=4)),
    "2d": ((2, 4, 8, 9), (6, 4, 3, 2), dict(stride=[2, 1], padding=[1, 0], dilation=[1, 2])),
    "2d plain": ((2, 4, 8, 9), (6, 4, 3, 2), {}),
    "2d groups": ((2, 4, 8, 9), (6, 2, 3, 3), dict(padding=[1, 1], groups=2)),
    "3d": ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), dict(stride=[1, 2, 1], padding=[1, 0, 1])),
    "1d back": ((2, 4, 5), (4, 3, 3), dict(stride=[2], transposed=T, output_padding=[1])),
    "2d back": (
        (2, 4, 5, 6), (4, 3, 3, 2),
        dict(stride=[2, 3], padding=[1, 0], transposed=T, output_padding=[1, 2]),
    ),
    "2d back groups": ((2, 4, 5, 6), (4, 3, 3, 2), dict(dilation=[2, 1], transposed=T, groups=2)),
    "3d back": ((1, 2, 3, 4, 5), (2, 3, 2, 3, 2), dict(stride=[1, 2, 1], transposed=T)),
}  # fmt: skip


def arguments(shape, options):
    rank = len(shape) - 2
    defaults = dict(
        stride=[1] * rank,
        padding=[0] * rank,
        dilation=[1] * rank,
        transposed=N,
        output_padding=[0] * rank,
        groups=1,
    )
    return tuple((defaults | options).values())


def channels(kernel, options):
    return kernel[1] * options.get("groups", 1) if options.get("transposed") else kernel[0]


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("biased", [T, N])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, biased, dtype):
    shape, kernel, options = CONVOLUTIONS[name]

    def fn(x, w, b):
        return aten.convolution(x, w, b if biased else None, *arguments(shape, options))

    bias = rand(channels(kernel, options), dtype=dtype)
    verify(fn, rand(*shape, dtype=dtype), rand(*kernel, dtype=dtype), bias)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_of_dynamic_shapes(name):
    shape, kernel, options = CONVOLUTIONS[name]

    def fn(x, w):
        return aten.convolution(x, w, None, *arguments(shape, options))

    other = (shape[0] + 1, shape[1], *(n + 3 for n in shape[2:]))
    check(fn, rand(*shape), rand(*kernel), dynamic=True, other_inputs=(rand(*other), rand(*kernel)))


@pytest.mark.parametrize("mask", [[T, T, T], [N, T, N], [T, N, T]], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_backward(name, mask):
    shape, kernel, options = CONVOLUTIONS[name]
    x, w = rand(*shape), rand(*kernel)
    dy = aten.convolution(x, w, None, *arguments(shape, options)) * 0.1 + 1
    bias = [channels(kernel, options)]

    def fn(dy, x, w):
        found = aten.convolution_backward(dy, x, w, bias, *arguments(shape, options), mask)
        return wanted(found, mask)

    verify(fn, dy, x, w)


def test_convolution_with_uneven_pads():
    from torchair import ge
    from torchair.ge.graph import Graph

    x, w = rand(1, 2, 5, 6), rand(3, 2, 2, 2)
    with Graph("uneven", infer) as graph:
        a = ge.builder("Data")(index=0, dtype=0, shape=[1, 2, 5, 6])
        b = ge.builder("Data")(index=1, dtype=0, shape=[3, 2, 2, 2])
        y = ge.Conv2D(a, b, None, None, strides=[1, 1, 1, 1], pads=[0, 1, 2, 0], data_format="NCHW")
        ge.builder("NetOutput")([y])
    (result,) = interpret(graph, [x, w])
    assert y.shape == tuple(result.shape)
    torch.testing.assert_close(result, F.conv2d(F.pad(x, (2, 0, 0, 1)), w))


# ---- pooling and resizing ----

POOLS = {
    "max": lambda x: aten.max_pool2d_with_indices(x, [2, 2]),
    "max one number": lambda x: aten.max_pool2d_with_indices(x, [3], [2], [1]),
    "max ceil": lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 3], [1, 0], [1, 1], T),
    "max dilated": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [0, 0], [2, 3]),
    "average": lambda x: aten.avg_pool2d(x, [2, 2]),
    "average padded": lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]),
    "average inside": lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1], N, N),
    "average ceil": lambda x: aten.avg_pool2d(x, [3, 2], [2, 2], [0, 0], T),
    "average divisor": lambda x: aten.avg_pool2d(x, [2, 3], [2, 2], [0, 1], N, T, 5),
    "adaptive": lambda x: aten._adaptive_avg_pool2d(x, [3, 2]),
}
RESIZES = {
    "nearest": lambda x: aten.upsample_nearest2d(x, [11, 20]),
    "nearest scale": lambda x: F.interpolate(x, scale_factor=2),
    "nearest thrice": lambda x: F.interpolate(x, scale_factor=3),
    "nearest smaller": lambda x: F.interpolate(x, size=(4, 3)),
    "bilinear": lambda x: aten.upsample_bilinear2d(x, [11, 20], N),
    "bilinear corners": lambda x: aten.upsample_bilinear2d(x, [11, 20], T),
    "bilinear scale": lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"),
}


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (3, 8, 9)], ids=len)
def test_pool(shape, name, dtype):
    verify(POOLS[name], rand(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", RESIZES)
def test_resize(name, dtype):
    verify(RESIZES[name], rand(2, 3, 7, 9, dtype=dtype))


def test_resize_with_a_scale_that_the_sizes_do_not_tell():
    conversion = check(
        lambda x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=N),
        rand(2, 3, 7, 9),
        generic=True,
    )
    assert conversion.generic


@pytest.mark.parametrize("ceil", [T, N])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 6), (3, 5, 7, 6)], ids=len)
def test_max_pool3d(shape, ceil):
    verify(
        lambda x: aten.max_pool3d_with_indices(x, [2, 3, 2], [2, 2, 1], [1, 1, 0], [1, 1, 2], ceil),
        rand(*shape),
    )


@pytest.mark.parametrize("ceil", [T, N])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_max_pool_backward(dtype, ceil):
    x = rand(2, 3, 7, 9, dtype=dtype)
    window = ([3, 2], [2, 2], [1, 1], [1, 1], ceil)
    y, where = aten.max_pool2d_with_indices(x, *window)
    verify(lambda dy, x, i: aten.max_pool2d_with_indices_backward(dy, x, *window, i), y, x, where)


@pytest.mark.parametrize("options", [(N, T, None), (T, N, None), (N, T, 7)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (3, 7, 9)], ids=len)
def test_avg_pool_backward(shape, options):
    x = rand(*shape)
    window = ([3, 2], [2, 2], [1, 1], *options)
    dy = aten.avg_pool2d(x, *window)
    verify(lambda dy, x: aten.avg_pool2d_backward(dy, x, *window), dy, x)


def test_adaptive_avg_pool_backward():
    verify(aten._adaptive_avg_pool2d_backward, rand(2, 3, 3, 4), rand(2, 3, 7, 9))


@pytest.mark.parametrize("scales", [(), (2.0, 3.0)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_upsample_nearest_backward(dtype, scales):
    verify(
        lambda dy: aten.upsample_nearest2d_backward(dy, [8, 15], [2, 3, 4, 5], *scales),
        rand(2, 3, 8, 15, dtype=dtype),
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.max_pool2d_with_indices(x, [2, 2]),
        lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 3], [1, 0], [1, 1], T),
        lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]),
        lambda x: aten._adaptive_avg_pool2d(x, [3, 2]),
        lambda x: aten.upsample_nearest2d(x, [x.shape[2] * 2, 12]),
        lambda x: aten.upsample_bilinear2d(x, [x.shape[2] * 2, 12], N),
        lambda x: aten.avg_pool2d_backward(x, F.pad(x, (1, 1, 1, 1)), [3], [1], [0], N, T, None),
    ],
)
def test_pool_of_dynamic_shapes(fn):
    check(fn, rand(2, 3, 7, 9), dynamic=True, other_inputs=(rand(3, 3, 8, 11),), generic=True)
