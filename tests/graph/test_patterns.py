"""Built-in patterns: what they fuse, that values stay right, and why they decline."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchair
from tolerance import assert_close, to_double
from torchair.core._backend import finalize_graph_engine
from torchair.engine.optimize.passes import SWITCHED
from torchair.engine.optimize.rules import PATTERNS
from torchair.engine.options import by_our_names, read_switches
from torchair.fx.passes import user as user_passes

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def own_options():
    """Global options belong to the process: each test has its own."""
    finalize_graph_engine()
    yield
    finalize_graph_engine()


class Compiled:
    """A function compiled once; `types` are those of the graph that runs, `said` what was told."""

    def __init__(self, fn, native=True, dynamic=False, configure=lambda config: None):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.experimental_config.native_code = native
        configure(config)
        self.graphs = []

        def backend(gm, inputs):
            from torch._functorch.aot_autograd import aot_module_simplified

            from torchair.backend import boxed

            def compile_one(graph, examples):
                runner = torchair.get_compiler(config)(graph, examples)
                self.graphs.append(runner.runner)
                return boxed(runner)

            return aot_module_simplified(gm, inputs, fw_compiler=compile_one)

        self.run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)

    @property
    def types(self):
        graph = self.graphs[0]
        silent = ("Data", "Const", "NetOutput")
        return sorted(n.type for n in graph.graph.nodes if n.type not in silent)

    @property
    def native_share(self):
        (graph,) = self.graphs
        return graph.session.summary().native_share


def check(fn, *args, **options):
    """Compile, run and compare with the truth in double precision."""
    compiled = Compiled(fn, **options)
    with torch.no_grad():
        got = compiled.run(*[a.clone() for a in args])
        assert_close(got, fn(*args), fn(*to_double(args)))
    return compiled


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


# ---- the forms


def rms(x, w):
    h = x.float() if x.dtype.itemsize == 2 else x
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def rms_squares(x, w):
    return x * torch.rsqrt(1e-5 + (x * x).mean(-1, keepdim=True)) * w


def rms_wide(x, w):
    h = x.float() if x.dtype.itemsize == 2 else x
    h = h / torch.sqrt(torch.square(h).mean((-1,), keepdim=True) + 1e-6)
    return (h * (1.0 + w.to(h.dtype))).to(x.dtype)


def add_rms(x, y, w):
    x = x + y
    return rms(x, w), x


def layer(x, w, b):
    m, v = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - m) / torch.sqrt(v + 1e-5) * w + b


def layer_squares(x, w, b):
    m = x.mean(-1, keepdim=True)
    v = (x - m).pow(2).mean(-1, keepdim=True)
    return b + w * ((x - m) * torch.rsqrt(v + 1e-5))


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary(x, cos, sin):
    return x * cos + turned(x) * sin


def rotary_chunks(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), dim=-1) * sin + cos * x


def swiglu(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def swiglu_slices(x):
    half = x.shape[-1] // 2
    gate = x[..., :half]
    return x[..., half:] * (gate * torch.sigmoid(gate))


def gelu_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_half(x):
    return x / 2 * (torch.erf(x * 0.7071067811865475) + 1)


def gelu_new(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def attention_masked(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def attention_bare(q, k, v):
    return (q * 0.3 @ k.mT).softmax(-1) @ v


def attention_batches(q, k, v, mask):
    weights = F.softmax(torch.baddbmm(mask, q, k.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, v)


def attention_model(x, w, mask):
    b, s, d = x.shape
    q, k, v = (F.linear(x, w[i]).view(b, s, 4, d // 4).transpose(1, 2) for i in range(3))
    return attention_masked(q, k, v, mask).transpose(1, 2).reshape(b, s, d)


def attention_grouped(q, k, v):
    b, n, t, d = k.shape
    few = (x[:, :, None].expand(b, n, 3, t, d).reshape(b, 3 * n, t, d) for x in (k, v))
    return attention(q, *few)


def product(x, w):
    return torch.bmm(x, w).transpose(0, 1)


def product_turned(x, w):
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


HEADS = [(2, 4, 40, 16), (2, 4, 50, 16), (2, 4, 50, 16)]
FORMS = {
    rms: ("RmsNorm", [(2, 5, 64), (64,)]),
    rms_squares: ("RmsNorm", [(5, 64), (64,)]),
    rms_wide: ("RmsNorm", [(2, 5, 64), (64,)]),
    add_rms: ("AddRmsNorm", [(2, 5, 64), (2, 5, 64), (64,)]),
    layer: ("LayerNormV4", [(2, 5, 64), (64,), (64,)]),
    layer_squares: ("LayerNormV4", [(5, 64), (64,), (64,)]),
    rotary: ("RotaryMul", [(2, 4, 5, 16), (5, 16), (5, 16)]),
    rotary_chunks: ("RotaryMul", [(2, 4, 5, 16), (2, 1, 5, 16), (2, 1, 5, 16)]),
    swiglu: ("SwiGlu", [(2, 5, 64)]),
    swiglu_slices: ("SwiGlu", [(2, 5, 64)]),
    gelu_new: ("GeluV2", [(5, 33)]),
    gelu_fast: ("GeluV2", [(5, 33)]),
    quick_gelu: ("Swish", [(5, 33)]),
    attention: ("FusedInferAttentionScore", HEADS),
    attention_masked: ("FusedInferAttentionScore", [*HEADS, (2, 1, 40, 50)]),
    attention_bare: ("FusedInferAttentionScore", [(6, 40, 16), (6, 50, 16), (6, 50, 8)]),
    attention_batches: (
        "FusedInferAttentionScore", [(6, 40, 16), (6, 50, 16), (6, 50, 16), (6, 40, 50)]),
    attention_model: ("FusedInferAttentionScore", [(2, 40, 64), (3, 64, 64), (40, 40)]),
    attention_grouped: (
        "FusedInferAttentionScore", [(2, 6, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)]),
}  # fmt: skip
NOT_NATIVE = {
    gelu_erf: ("GeluV2", [(5, 33)]),
    gelu_half: ("GeluV2", [(5, 33)]),
    product: ("TransposeBatchMatMul", [(4, 5, 64), (4, 64, 8)]),
    product_turned: ("TransposeBatchMatMul", [(5, 4, 64), (4, 64, 8)]),
}
SCALES = ("Add", "Mul", "Pow", "Rsqrt", "Sub", "ReduceMean", "SoftmaxV2", "Erf", "Tanh", "Sigmoid")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fn", FORMS, ids=lambda f: f.__name__)
def test_forms_are_fused_into_native_code(fn, dtype):
    fused, shapes = FORMS[fn]
    made = check(fn, *(randn(*s, dtype=dtype) for s in shapes))
    assert made.types.count(fused) == 1, made.types
    allowed = {"Mul"} if fn in (attention_bare,) else {"Add"} if fn is rms_wide else set()
    assert not set(made.types) & (set(SCALES) - allowed), made.types
    assert made.native_share == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", FORMS | NOT_NATIVE, ids=lambda f: f.__name__)
def test_forms_are_fused_into_torch_kernels(fn, dtype):
    fused, shapes = (FORMS | NOT_NATIVE)[fn]
    made = check(fn, *(randn(*s, dtype=dtype) for s in shapes), native=False)
    assert made.types.count(fused) == 1, made.types


def test_two_values_turned_alike():
    made = check(
        lambda q, k, cos, sin: (rotary(q, cos, sin), rotary(k, cos, sin)),
        *(randn(*s) for s in [(2, 4, 5, 16), (2, 2, 5, 16), (5, 16), (5, 16)]),
    )
    assert made.types == ["RotaryMul", "RotaryMul"]


def test_transposes_around_attention_cancel():
    made = check(attention_model, randn(2, 40, 64), randn(3, 64, 64), randn(40, 40))
    assert not {"BatchMatMul", "TensorMove"} & set(made.types)
    assert made.types.count("Transpose") == 3  # of the operands
    (node,) = [n for n in made.graphs[0].graph.nodes if n.type == "FusedInferAttentionScore"]
    assert node.attr("input_layout") == "BNSD_BSND" and node.attr("scale") == 0.25


@pytest.mark.parametrize("native", [True, False])
def test_rows_that_see_nothing_are_zero(native):
    q, k, v = (randn(1, 2, 40, 16) for _ in range(3))
    mask = torch.zeros(40, 40)
    mask[3] = float("-inf")
    mask[5, 2:] = float("-inf")
    mask[7] = torch.finfo(torch.float32).min
    with torch.no_grad():
        got = Compiled(attention_masked, native).run(q, k, v, mask)
        eager = attention_masked(q, k, v, mask)
    assert eager[:, :, 3].isnan().all() and not got[:, :, 3].any()
    torch.testing.assert_close(got, eager.nan_to_num())


def test_repeated_heads_are_not_copied():
    made = check(attention_grouped, *(randn(*s) for s in FORMS[attention_grouped][1]))
    (node,) = [n for n in made.graphs[0].graph.nodes if n.type == "FusedInferAttentionScore"]
    assert (node.attr("num_heads"), node.attr("num_key_value_heads")) == (6, 2)
    assert made.types == ["FusedInferAttentionScore"], made.types


class Norms(nn.Module):
    """Static widths, so that a dynamic graph has symbols in batch and length only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64) / 8)
        self.scale = nn.Parameter(torch.randn(64))
        self.shift = nn.Parameter(torch.randn(64))

    def forward(self, x):
        b, s, d = x.shape
        x = rms(x, self.scale)
        q, k, v = (F.linear(x, w).view(b, s, 4, d // 4).transpose(1, 2) for w in self.weight)
        y = attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        return swiglu(gelu_fast(layer(y + x, self.scale, self.shift)))


def test_symbolic_sizes():
    model = Norms()
    compiled = Compiled(model, dynamic=True)
    with torch.no_grad():
        for size in ((2, 40), (3, 50), (1, 1), (2, 8)):
            x = torch.randn(*size, 64)
            truth = Norms().double()
            truth.load_state_dict(model.double().state_dict())
            expected = truth(x.double())
            model.float()
            assert_close(compiled.run(x), model(x), expected)
    types = compiled.types
    for fused in ("RmsNorm", "FusedInferAttentionScore", "LayerNormV4", "GeluV2", "SwiGlu"):
        assert fused in types, types


def test_a_sum_that_a_product_computes_stays_there():
    def fn(x, w, y, g):
        return add_rms(x @ w, y, g)

    args = randn(8, 64), randn(64, 64), randn(8, 64), randn(64)
    native = check(fn, *args)
    assert "RmsNorm" in native.types and "AddRmsNorm" not in native.types
    assert "AddRmsNorm" in check(fn, *args, native=False).types


def test_training_keeps_what_backward_needs():
    def fn(x, w):
        return rms(x, w).sum() + gelu_new(x).sum()

    torch._dynamo.reset()
    mine, theirs = (torch.randn(4, 64, generator=torch.manual_seed(0)) for _ in range(2))
    w = torch.ones(64)
    for x, call in (
        (mine, torch.compile(fn, backend=torchair.get_npu_backend())),
        (theirs, fn),
    ):
        x.requires_grad_()
        call(x, w).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_transformer_with_attention_spelled_out():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        attn_implementation="eager",
    )
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(0, 100, (2, 40))
    compiled = Compiled(lambda i: model(i, use_cache=False).last_hidden_state)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled.run(ids), model(ids, use_cache=False).last_hidden_state, rtol=1e-4, atol=1e-4
        )
    types = compiled.types
    assert types.count("FusedInferAttentionScore") == 2 and types.count("RotaryMul") == 4
    assert types.count("RmsNorm") == 5 and "SoftmaxV2" not in types
    assert compiled.native_share > 0.95


# ---- why not


def half_swapped(x):
    a, b = x.chunk(2, -1)
    return F.silu(b) * a


DECLINED = {
    "RmsNormFusion": {
        "the mean is not that of the square": lambda x, w: w * (
            x * torch.rsqrt(x.abs().pow(2).mean(-1, keepdim=True) + 1e-6)),
        "is read elsewhere too": lambda x, w: (
            w * (x * (r := torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))), r),
        "does not have the size of the last dim": lambda x, w: w[:, None] * (
            x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
        "is part of a layer norm": lambda x, w: layer_squares(x, w, w),
    },
    "LayerNormFusion": {
        "not the mean over the last dim": lambda x, w: (
            x - x.mean(0, keepdim=True)) / torch.sqrt(
                x.var(-1, unbiased=False, keepdim=True) + 1e-5) * w + w,
        "not divided by the deviation": lambda x, w: (
            x - x.mean(-1, keepdim=True)) / torch.sqrt(
                x.mean(-1, keepdim=True).abs() + 1e-5) * w + w,
    },
    "RotaryMulFusion": {
        "the two terms are of different values": lambda x, w: w * x + turned(x + 1) * w,
    },
    "GeluFusion": {
        "generated code of the parts is faster": lambda x, w: gelu_erf(x),
        "the operands of Tanh differ": lambda x, w: 0.5 * x * (1 + torch.tanh(x)),
        "the factor is not one half": lambda x, w: 0.4 * x * (1 + torch.tanh(x)),
        "the two factors are not computed from one value": lambda x, w: x * w * (1 + torch.tanh(x)),
    },
    "SwishFusion": {
        "the factor of the sigmoid is not its operand": lambda x, w: w * torch.sigmoid(x),
    },
    "SwiGluFusion": {"the gate is not the first half": lambda x, w: half_swapped(x)},
    "AttentionFusion": {
        "faster for so few queries": lambda x, w: attention(x[None], x[None], x[None]),
        "not a product plus a mask": lambda x, w: torch.bmm(
            F.softmax(repeated(x) + repeated(w), -1), repeated(x).mT),
        "not a product of query and key": lambda x, w: torch.bmm(
            F.softmax(repeated(x), -1), repeated(x).mT),
        "not over the axis that is summed": lambda x, w: torch.bmm(
            F.softmax(torch.bmm(repeated(x), repeated(x).mT), 1), repeated(x)),
        "the mask is larger than the scores": lambda x, w: torch.bmm(
            F.softmax(torch.bmm(repeated(x)[:1], repeated(x)[:1].mT) + w[:2, None, None], -1),
            repeated(x)),
    },
    "BatchMatMulTransposeFusion": {
        "costs nothing": lambda x, w: product(repeated(x), repeated(x).mT),
    },
}  # fmt: skip


def repeated(x):
    return (
        x.expand(2, 40, x.shape[-1])[:, :, :].contiguous()
        if x.dim() == 1
        else (x[None, :1].expand(2, 40, x.shape[-1]).contiguous())
    )


@pytest.mark.parametrize(
    ("name", "reason"), [(n, r) for n, reasons in DECLINED.items() for r in reasons]
)
def test_a_pattern_says_why_it_declines(name, reason, monkeypatch, capsys):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    check(DECLINED[name][reason], randn(8, 8), randn(8))
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("torchair pattern")]
    assert any(f"{name} declined" in x and reason in x for x in lines), "\n".join(lines)


def test_patterns_are_switched_by_their_names():
    names = [p.name for p in PATTERNS]
    assert set(DECLINED) <= set(names) and len(set(names)) == len(names)
    assert all(p.find.__doc__ for p in PATTERNS)


def test_what_is_fused_is_told(monkeypatch, capsys):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    check(quick_gelu, randn(3))
    assert "torchair pattern SwishFusion replaced Mul_1\n" in capsys.readouterr().out


def test_nodes_on_different_streams_stay(monkeypatch, capsys):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")

    def fn(x):
        with torchair.scope.npu_stream_switch("1"):
            gate = torch.sigmoid(1.702 * x)
        return x * gate

    assert "Swish" not in check(fn, randn(3)).types
    assert "SwishFusion declined Mul_1: its nodes are on different streams" in (
        capsys.readouterr().out
    )


# ---- switches


def both(x, w):
    return rms(x, w) + quick_gelu(x)


def with_switches(text):
    def configure(config):
        config.ge_config.optimization_switch = text

    return configure


def with_file(path, content):
    def configure(config):
        path.write_text(json.dumps(content))
        config.fusion_config.fusion_switch_file = str(path)

    return configure


def fused_types(configure):
    types = check(both, randn(4, 64), randn(64), configure=configure).types
    return {"RmsNorm", "Swish"} & set(types)


def test_pattern_fusion_pass():
    def off(config):
        config.experimental_config.pattern_fusion_pass = False

    assert fused_types(lambda config: None) == {"RmsNorm", "Swish"}
    assert fused_types(off) == set()


def test_optimization_switch_by_name():
    assert fused_types(with_switches("SwishFusion:off")) == {"RmsNorm"}
    finalize_graph_engine()
    assert fused_types(with_switches("fuse_patterns:off")) == set()


def test_fusion_switch_file(tmp_path):
    path = tmp_path / "switches.json"

    def graph(**switches):
        finalize_graph_engine()
        return with_file(path, {"Switch": {"GraphFusion": switches}})

    assert fused_types(graph(RmsNormFusion="off")) == {"Swish"}
    assert fused_types(graph(ALL="off", RmsNormFusion="on")) == {"RmsNorm"}
    assert fused_types(graph(ALL="off")) == set()


def test_optimization_switch_wins_over_the_file(tmp_path):
    file = with_file(tmp_path / "s.json", {"Switch": {"GraphFusion": {"ALL": "off"}}})

    def configure(config):
        file(config)
        config.ge_config.optimization_switch = "SwishFusion:on"

    assert fused_types(configure) == {"Swish"}


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"Switch": {"GraphFusion": {"A": "maybe"}}}', '{"GraphFusion": {}}', '"Switch"'],
)
def test_files_that_are_none(tmp_path, content):
    file = tmp_path / "s.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="is not a file of fusion switches"):
        read_switches(str(file))


def test_one_name_joins_all_kernels(tmp_path):
    file = tmp_path / "s.json"
    file.write_text('{"Switch": {"GraphFusion": {"A": "off"}, "UBFusion": {"ALL": "off"}}}')
    assert read_switches(str(file)) == {"A": False, "AutomaticUbFusion": False}
    named = '{"Switch": {"UBFusion": {"ALL": "off", "AutomaticUbFusion": "on"}}}'
    file.write_text(named)
    assert read_switches(str(file)) == {"AutomaticUbFusion": True} and read_switches(None) == {}


def kernels(configure):
    """How many nodes each kernel of a function computes."""

    def fn(x, w):
        return torch.tanh(F.gelu(x @ w) * 2 + 1)

    fast = check(fn, randn(4, 8), randn(8, 8), configure=configure)
    return [len(u.nodes) for u in fast.graphs[0].session.current.units.fusion.units]


def test_kernels_are_not_joined_where_the_user_says_so(tmp_path):
    assert kernels(lambda config: None) == [5]
    finalize_graph_engine()
    assert kernels(with_switches("AutomaticUbFusion:off")) == [1] * 5
    finalize_graph_engine()
    switches = {"Switch": {"UBFusion": {"ALL": "off"}}}
    assert kernels(with_file(tmp_path / "s.json", switches)) == [1] * 5


def test_names_of_the_original_and_names_that_nobody_knows():
    ours = by_our_names({"CommonSubexpressionEliminationPass": False, "ALL": True})
    assert ours == {"merge_common": False, "ALL": True}
    assert set(ours) - {"ALL"} <= SWITCHED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_types(with_switches("ZSplitVFusionPass:off;SwishFusion:off")) == {"RmsNorm"}
    finalize_graph_engine()
    unknown = with_switches("SwishFusionPas:off")
    with pytest.warns(UserWarning, match="'SwishFusionPas'.* did you mean SwishFusion") as seen:
        fused_types(unknown)
        fused_types(unknown)
    assert len([w for w in seen if "SwishFusionPas" in str(w.message)]) == 1


# ---- patterns of users


@pytest.fixture
def own_patterns(monkeypatch):
    """Registered patterns of one test."""
    for kept in ("WAITING", "REGISTERED", "_matcher"):
        monkeypatch.setattr(user_passes, kept, [])
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")


def sine_cosine(x, y):
    return torch.sin(x) * torch.cos(y)


def as_sines(x, y):
    return (torch.sin(x + y) + torch.sin(x - y)) / 2


def said_of_sines(capsys, fn=sine_cosine, **options):
    check(fn, randn(4), randn(4), **options)
    lines = capsys.readouterr().out.splitlines()
    return [x for x in lines if x.startswith("torchair pattern sine_cosine")]


def test_user_patterns_say_what_they_did(own_patterns, capsys):
    torchair.register_replacement(sine_cosine, as_sines, [torch.randn(2), torch.randn(2)])
    assert said_of_sines(capsys) == ["torchair pattern sine_cosine replaced mul"]
    assert said_of_sines(capsys, lambda x, y: x.sin() + y.cos()) == [
        "torchair pattern sine_cosine found nothing like itself"
    ]


def test_user_patterns_with_a_check(own_patterns, capsys):
    seen = []

    def small(match):
        seen.append(match.kwargs["x"].meta["val"].shape)
        return False

    inputs = [torch.randn(2), torch.randn(2)]
    torchair.register_replacement(sine_cosine, as_sines, inputs, extra_check=small)
    assert said_of_sines(capsys) == [
        "torchair pattern sine_cosine declined mul: its extra_check said no"
    ]
    assert seen == [(4,)]


def test_user_patterns_stay_on_one_stream(own_patterns, capsys):
    def two_streams(x, y):
        with torchair.scope.npu_stream_switch("1"):
            a = torch.sin(x)
        return a * torch.cos(y)

    torchair.register_replacement(sine_cosine, as_sines, [torch.randn(2), torch.randn(2)])
    assert said_of_sines(capsys, two_streams) == [
        "torchair pattern sine_cosine declined mul: its nodes are on different streams"
    ]


def test_user_patterns_are_switched_off_too(own_patterns, capsys):
    def off(config):
        config.experimental_config.pattern_fusion_pass = False

    torchair.register_replacement(sine_cosine, as_sines, [torch.randn(2), torch.randn(2)])
    assert said_of_sines(capsys, configure=off) == []
