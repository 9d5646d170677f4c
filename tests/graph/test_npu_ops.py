"""Operators of the `npu` library: values, fake results, conversion, compiled graphs, gradients."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import torchair
from compiling import compiled_afresh as compiled
from npu_attention_cases import CASES as ATTENTION
from npu_attention_cases import CK, CV, K2, ONE, Q2, V2, K, Q, V, bsh, each_batch
from npu_cases import CASES, HALF, MODULES, Case, npu, randint, randn
from npu_results import assert_close, copies
from op_harness import check, convert
from processes import inherited, run_forked
from torchair.ascend import ops as library
from torchair.ascend.emulate.facade import operators
from torchair.convert import registered
from torchair.operators import row_of

Tensor = torch.Tensor
ALL = [*CASES, *ATTENTION]
by_name = pytest.mark.parametrize("case", ALL, ids=str)


def case(name: str) -> Case:
    return next(c for c in ALL if c.name == name)


# ---- what they give ----


@by_name
def test_values(case):
    inputs = copies(case.inputs)
    expected = Case("", case.expected, (), case.expected).call(*case.inputs)
    assert_close(case.call(*inputs), expected, case.rough)
    for used, given in zip(inputs, case.inputs, strict=True):
        assert torch.equal(used, given)  # none of these writes to an argument


@by_name
def test_fake_results_look_like_real_ones(case):
    real = case.call(*case.inputs)
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in case.inputs))
    assert len(real) == len(fake)
    for r, f in zip(real, fake, strict=True):
        if not isinstance(r, torch.Tensor):
            assert r == f
            continue
        assert (r.shape, r.dtype) == (f.shape, f.dtype)
        steps = zip(r.stride(), f.stride(), r.shape, strict=True)
        assert not r.numel() or all(a == b or n == 1 for a, b, n in steps)


OPCHECK = {
    "npu_rms_norm": (randn(3, 8), randn(8)),
    "npu_add_rms_norm": (randn(3, 8), randn(3, 8, seed=1), randn(8)),
    "npu_swiglu": (randn(3, 8),),
    "npu_rotary_mul": (randn(2, 3, 1, 8), randn(1, 3, 1, 8), randn(1, 3, 1, 8, seed=1)),
    "npu_fusion_attention": (Q, K, V, 4, "BNSD"),
    "scatter_update": (randn(2, 4, 3), torch.tensor([1, 2]), randn(2, 1, 3), 1),
    "scatter_update_": (randn(2, 4, 3), torch.tensor([1, 2]), randn(2, 1, 3), 1),
    "npu_scatter_nd_update_": (randn(4, 3), torch.tensor([[1], [2]]), randn(2, 3)),
    "npu_dynamic_quant": (randn(3, 8),),
    "npu_dynamic_quant_asymmetric": (randn(3, 8),),
    "npu_convert_weight_to_int4pack": (randint(-8, 8, 3, 8, dtype=torch.int32),),
    "npu_prompt_flash_attention": (bsh(Q), bsh(K), bsh(V)),
    "npu_format_cast": (randn(3, 4), 29),
}


@pytest.mark.parametrize("name", OPCHECK)
def test_torch_finds_nothing_wrong(name):
    opcheck(
        getattr(npu, name).default,
        OPCHECK[name],
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# ---- gradients ----

GRADIENTS = {
    "rms_norm": (lambda x, g: npu.npu_rms_norm(x, g)[0], (randn(3, 5), randn(5))),
    "swiglu": (lambda x: npu.npu_swiglu(x, 1), (randn(2, 4, 3),)),
    **{
        f"rotary-{mode}": (
            lambda x, a, b, mode=mode: npu.npu_rotary_mul(x, a, b, mode),
            (randn(2, 3, 2, 4), randn(1, 3, 1, 4), randn(1, 3, 1, 4, seed=1)),
        )
        for mode in ("half", "interleave", "quarter", "interleave-half")
    },
    "attention": (
        lambda q, k, v, p: npu.npu_fusion_attention(q, k, v, 4, "BNSD", p, scale=0.4)[0],
        (randn(1, 4, 3, 2), randn(1, 2, 4, 2), randn(1, 2, 4, 2, seed=1), randn(1, 4, 3, 4)),
    ),
    "attention-ragged": (
        lambda q, k, v: npu.npu_fusion_attention(
            q,
            k,
            v,
            2,
            "TND",
            scale=0.4,
            sparse_mode=3,
            actual_seq_qlen=[2, 4],
            actual_seq_kvlen=[1, 5],
        )[0],
        (randn(4, 2, 2), randn(5, 1, 2), randn(5, 1, 2, seed=1)),
    ),
    "format_cast": (lambda x: npu.npu_format_cast(x, 29), (randn(2, 3),)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_differences(name):
    fn, inputs = GRADIENTS[name]
    assert torch.autograd.gradcheck(fn, [t.double().requires_grad_() for t in inputs])


def test_dropout_of_attention_has_the_gradient_of_its_own_pattern():
    q, k, v = (x.double().requires_grad_() for x in (Q, K, V))

    def run(*operands: Tensor) -> Any:
        torch.manual_seed(4)
        return npu.npu_fusion_attention(*operands, 4, "BNSD", scale=0.4, keep_prob=0.6)

    out, *_, seed, _, count = run(q, k, v)
    assert seed and count == 2 * 4 * 5 * 7
    assert not torch.equal(out, npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.4)[0])
    assert torch.autograd.gradcheck(lambda *x: run(*x)[0], (q, k, v))
    ones = torch.ones_like(v)  # the mean of what stays is one
    weights = run(q.repeat(40, 1, 1, 1), k.repeat(40, 1, 1, 1), ones.repeat(40, 1, 1, 1))[0]
    assert abs(weights.mean() - 1) < 0.05


@pytest.mark.parametrize("name", [n for n in GRADIENTS if n != "attention-ragged"])
def test_compiled_gradients_equal_eager_ones(name):
    fn, inputs = GRADIENTS[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    twins = [t.clone().requires_grad_() for t in inputs]
    fn(*leaves).square().sum().backward()
    compiled(fn)(*twins).square().sum().backward()
    for ours, eager in zip(twins, leaves, strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)


def test_half_gradients():
    x, g = randn(5, 16, dtype=torch.bfloat16), randn(16, dtype=torch.bfloat16)
    grads = []
    for dtype, fn in (
        (torch.bfloat16, compiled(lambda x, g: npu.npu_rms_norm(x, g)[0])),
        (torch.float64, lambda x, g: npu.npu_rms_norm(x, g)[0]),
    ):
        leaves = [t.clone().to(dtype).requires_grad_() for t in (x, g)]
        fn(*leaves).sum().backward()
        grads.append([t.grad for t in leaves])
    assert [t.dtype for t in grads[0]] == [torch.bfloat16] * 2
    assert_close(grads[0], grads[1], HALF)


# ---- conversion and compiled graphs ----


@by_name
def test_conversion(case):
    conversion = check(case.call, *case.inputs, generic=case.generic)
    assert bool(conversion.generic) == case.generic


def test_every_converter_is_executed():
    calls = [case for module in MODULES for case in import_module(module).CASES]
    calls += [*(Case(n, fn, args, fn) for n, (fn, args) in INPLACE.items()), *AIR, *BACKWARD]
    seen: set[str] = set()
    for c in calls:
        traced = torch.fx.experimental.proxy_tensor.make_fx(c.call, tracing_mode="fake")(*c.inputs)
        seen |= {str(n.target) for n in traced.graph.nodes}
    ours = {t for t in registered() if isinstance(t, str)}
    assert ours and ours <= seen, ours - seen


@by_name
def test_compiled_static(case):
    fast = compiled(lambda *x: case.call(*x))
    with torch.no_grad():
        for _ in range(2):
            assert_close(fast(*copies(case.inputs)), case.call(*case.inputs), case.rough)


SIZES: dict[str, Any] = {
    "rms_norm": (lambda x, g: npu.npu_rms_norm(x, g), lambda n: (randn(n, 3, 16), randn(16))),
    "add_rms_norm": (
        npu.npu_add_rms_norm, lambda n: (randn(n, 16), randn(n, 16, seed=1), randn(16))
    ),
    "swiglu": (npu.npu_swiglu, lambda n: (randn(2, n, 16),)),
    "rotary": (
        npu.npu_rotary_mul, lambda n: (randn(2, n, 4, 8), randn(1, n, 1, 8), randn(1, n, 1, 8))
    ),
    "fusion": (
        lambda q: npu.npu_fusion_attention(q, q, q, 4, "BSH", scale=0.3, sparse_mode=2)[0],
        lambda n: (randn(2, n, 32),),
    ),
    "prompt": (
        lambda q, k: npu.npu_prompt_flash_attention(
            q, k, k, num_heads=4, num_key_value_heads=2, input_layout="BSND", scale_value=0.3
        ),
        lambda n: (randn(2, n, 4, 8), randn(2, n + 3, 2, 8)),
    ),
    "fused": (
        lambda q, k: npu.npu_fused_infer_attention_score(
            q, k, k, num_heads=4, num_key_value_heads=2, input_layout="BSND", scale=0.3,
            sparse_mode=3, softmax_lse_flag=True,
        ),
        lambda n: (randn(2, n, 4, 8), randn(2, n + 3, 2, 8)),
    ),
    "scatter": (
        lambda d, i, u: npu.scatter_update(d, i, u, 1),
        lambda n: (randn(n, 9, 4), torch.arange(n), randn(n, 2, 4)),
    ),
    "dynamic_quant": (npu.npu_dynamic_quant, lambda n: (randn(n, 32),)),
    "quant_matmul": (
        lambda a, b, s: npu.npu_quant_matmul(a, b, s, output_dtype=torch.float16),
        lambda n: (randint(-9, 9, n, 16), randint(-9, 9, 16, 8), randn(8)),
    ),
    "grouped": (
        lambda x, w, g: npu.npu_grouped_matmul([x], [w], group_list=g, group_type=0, split_item=3),
        lambda n: (randn(n, 8), randn(2, 8, 6), torch.tensor([n // 2, n])),
    ),
    "gating": (lambda x: npu.npu_moe_gating_top_k_softmax(x, None, 2), lambda n: (randn(n, 5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_compiled_dynamic(name):
    fn, make = SIZES[name]
    fast = compiled(fn, dynamic=True)
    with torch.no_grad():
        for n in (5, 7, 4):
            expected = Case("", fn, (), fn).call(*make(n))
            assert_close(Case("", fast, (), fast).call(*make(n)), expected, 2e-3)


def test_lengths_that_change_from_call_to_call():
    def step(q: Tensor, k: Tensor, v: Tensor, a: int, b: int) -> Tensor:
        return npu.npu_incre_flash_attention(
            q,
            k,
            v,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="BNSD",
            scale_value=0.4,
            actual_seq_lengths=[a, b, 3],
        )

    fast = compiled(step, dynamic=True)
    for a, b in ((4, 9), (5, 8), (6, 2)):
        got = fast(ONE, CK, CV, a, b)
        expected, _ = each_batch(ONE, CK, CV, 0.4, key_lengths=(a, b, 3))
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


NATIVE = (
    "rms_norm-float32", "add_rms_norm", "swiglu--1", "swiglu_backward", "rotary_mul-half",
    "rms_norm_backward", "scatter_update", "scatter_nd_update-points", "dynamic_quant-smooth",
    "dynamic_quant_asymmetric-pertoken", "int4pack",
    "quantize--1-True", "fusion-BSND", "fusion-mode-2", "prompt-BSH", "prompt-mask",
    "prompt-band", "step-BSND", "step-mask", "fused-bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_generated_code_runs_it(name, capfd, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "4")
    with torch.no_grad():
        compiled(lambda *x: case(name).call(*x))(*copies(case(name).inputs))
    text = capfd.readouterr().out
    assert re.search(r"^(loops|attention) ", text, re.MULTILINE), text
    assert not re.search(r"^torch  ", text, re.MULTILINE), text


# ---- updates in place ----


def _through_a_view(cache: Tensor, index: Tensor, update: Tensor) -> Tensor:
    npu.scatter_update_(cache.view(2, 6, 4), index, update, 1)
    return cache.sum()


INPLACE: dict[str, Any] = {
    "scatter_update_": (
        lambda cache, index, update: npu.scatter_update_(cache, index, update, -2),
        (randn(2, 3, 6, 4), torch.tensor([5, 0]), randn(2, 3, 1, 4)),
    ),
    "npu_scatter_nd_update_": (
        lambda cache, index, update: npu.npu_scatter_nd_update_(cache, index, update) * 2,
        (randn(6, 4), torch.tensor([[5], [0]]), randn(2, 4)),
    ),
    "through-a-view": (_through_a_view, (randn(12, 4), torch.tensor([3, 1]), randn(2, 2, 4))),
}


@pytest.mark.parametrize("name", INPLACE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_updates_in_place(name, dynamic):
    fn, inputs = INPLACE[name]
    ours, eager = copies(inputs), copies(inputs)
    fast = compiled(lambda *x: (fn(*x) * 1, x[1] + 1)[0], dynamic=dynamic)
    for _ in range(2):
        torch.testing.assert_close(fast(*ours), fn(*eager))
        torch.testing.assert_close(ours[0], eager[0])
    assert not torch.equal(ours[0], inputs[0])


def test_the_recovered_update_writes_to_the_input():
    seen: list[Any] = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = lambda gm, inputs, config: seen.extend(
        n.target for n in gm.graph.nodes
    )

    def step(cache: Tensor, index: Tensor, update: Tensor) -> Tensor:
        npu.scatter_update_(cache.view(2, 6, 4), index, update, 1)
        return index + 1

    torch._dynamo.reset()
    fast = torch.compile(step, backend=torchair.get_npu_backend(compiler_config=config))
    cache, index, update = copies(INPLACE["through-a-view"][1])
    expected = npu.scatter_update(cache.view(2, 6, 4), index, update, 1).view(12, 4)
    fast(cache, index, update)
    torch.testing.assert_close(cache, expected)
    assert npu.scatter_update_.default in seen and torch.ops.aten.copy_.default not in seen


def test_a_position_outside_of_the_cache_is_an_error():
    cache, index, update = randn(2, 6, 4), torch.tensor([5, 0]), randn(2, 2, 4)
    with pytest.raises(IndexError, match="indices"):
        npu.scatter_update(cache, index, update, 1)
    with torch.no_grad(), pytest.raises(Exception, match="Scatter"):
        compiled(lambda *x: npu.scatter_update(*x, 1) + 1)(cache, index, update)


# ---- lengths that are tensors ----

_LENGTHS = torch.tensor([3, 5]), torch.tensor([6, 5])
AIR = [
    Case(
        "air-fused",
        lambda q, k, v, a, b: torchair.ops.npu_fused_infer_attention_score(
            q,
            k,
            v,
            num_heads=4,
            num_key_value_heads=2,
            scale=0.4,
            input_layout="BNSD",
            actual_seq_lengths=a,
            actual_seq_lengths_kv=b,
        )[0],
        (Q2, K2, V2, *_LENGTHS),
        lambda q, k, v, a, b: each_batch(q, k, v, 0.4, lengths=(3, 5), key_lengths=(6, 5))[0],
    ),
    Case(
        "air-fused-v2",
        lambda q, k, v, a, b: torchair.ops.npu_fused_infer_attention_score_v2(
            q,
            k,
            v,
            num_query_heads=4,
            num_key_value_heads=2,
            softmax_scale=0.4,
            input_layout="BNSD",
            actual_seq_qlen=a,
            actual_seq_kvlen=b,
            return_softmax_lse=True,
        ),
        (Q2, K2, V2, *_LENGTHS),
        lambda q, k, v, a, b: each_batch(q, k, v, 0.4, lengths=(3, 5), key_lengths=(6, 5)),
    ),
]
BACKWARD = [
    Case(
        "fusion-grad",
        lambda q, k, v, dy, top, total: npu.npu_fusion_attention_grad(
            q, k, v, dy, 4, "BNSD", softmax_max=top, softmax_sum=total, scale_value=0.4
        ),
        (Q, K, V, Q, *npu.npu_fusion_attention(Q, K, V, 4, "BNSD", scale=0.4)[1:3]),
        lambda *x: None,
    )
]


@pytest.mark.parametrize("case", AIR, ids=str)
def test_tensor_lengths_belong_into_graphs(case):
    with pytest.raises(NotImplementedError, match="max-autotune"):
        case.call(*case.inputs)
    expected = Case("", case.expected, (), case.expected).call(*case.inputs)
    assert_close(compiled(lambda *x: case.call(*x))(*case.inputs), expected, 1e-5)


# ---- forms for captured graphs ----


def test_results_are_written_where_they_are_wanted():
    options = dict(num_heads=4, num_key_value_heads=2, input_layout="BNSD", softmax_lse_flag=True)
    out, sums = npu.npu_fused_infer_attention_score(Q2, K2, V2, **options)
    room = torch.empty_like(out), torch.empty_like(sums)
    workspace = npu._npu_fused_infer_attention_score_get_max_workspace(Q2, K2, V2, **options)
    made = npu.npu_fused_infer_attention_score.out(
        Q2, K2, V2, **options, workspace=workspace, attention_out=room[0], softmax_lse=room[1]
    )
    assert made[0] is room[0] and torch.equal(room[0], out) and torch.equal(room[1], sums)


# ---- what is refused ----

REFUSED: dict[str, Any] = {
    "rotate": lambda: npu.npu_rotary_mul(randn(1, 4), randn(4), randn(4), "half", randn(4, 4)),
    "rotary_mode": lambda: npu.npu_rotary_mul(randn(1, 1, 1, 4), randn(4), randn(4), "round"),
    "self": lambda: npu.npu_swiglu(randn(2, 3)),
    "padding_mask": lambda: npu.npu_fusion_attention(Q, K, V, 4, "BNSD", None, Q),
    "input_layout": lambda: npu.npu_fusion_attention(Q, K, V, 4, "NBSD"),
    "sparse_mode": lambda: npu.npu_fusion_attention(Q, K, V, 4, "BNSD", sparse_mode=7),
    "keep_prob": lambda: npu.npu_fusion_attention(Q, K, V, 4, "BNSD", keep_prob=0.0),
    "actual_seq_qlen": lambda: npu.npu_fusion_attention(Q[0], K[0], V[0], 4, "TND"),
    "actual_seq_lengths": lambda: npu.npu_fused_infer_attention_score(
        Q[0], K[0], V[0], num_heads=5, input_layout="TND"
    ),
    "deq_scale1": lambda: npu.npu_prompt_flash_attention(Q, K, V, deq_scale1=torch.ones(1)),
    "query": lambda: npu.npu_incre_flash_attention(randint(0, 9, 2, 1, 8), V, V),
    "block_size": lambda: npu.npu_incre_flash_attention(
        bsh(ONE), bsh(CK), bsh(CV), num_heads=4, block_table=torch.zeros(3, 1, dtype=torch.int32),
        block_size=16,
    ),
    "key_antiquant_mode": lambda: npu.npu_fused_infer_attention_score(
        Q, K, V, num_heads=4, key_antiquant_scale=torch.ones(1), key_antiquant_mode=5
    ),
    "query_dtype": lambda: npu.npu_fused_infer_attention_score_v2(Q, K, V, query_dtype=290),
    "axis": lambda: npu.scatter_update(randn(2, 3), torch.tensor([0, 1]), randn(2, 1), 0),
    "dtype": lambda: npu.npu_quantize(randn(2, 3), torch.ones(1), None, 290),
    "quant_mode": lambda: npu.npu_dynamic_quant(randn(2, 3), quant_mode="perhaps"),
    "group_sizes": lambda: npu.npu_quant_matmul(
        randint(0, 9, 2, 4), randint(0, 9, 4, 2), torch.ones(2), group_sizes=[1, 1, 2]
    ),
    "weight": lambda: npu.npu_convert_weight_to_int4pack(randint(0, 7, 2, 12, dtype=torch.int32)),
    "round_mode": lambda: npu.npu_trans_quant_param(torch.ones(1), round_mode=1),
    "act_type": lambda: npu.npu_grouped_matmul([randn(2, 3)], [randn(3, 2)], act_type=3),
    "split_item": lambda: npu.npu_grouped_matmul(
        [randn(2, 3)], [randn(1, 3, 2)], group_list=torch.tensor([2]), group_type=0
    ),
    "drop_pad_mode": lambda: npu.npu_moe_finalize_routing(
        randn(2, 3), None, None, None, None, torch.tensor([0, 1]), None, 9
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_supported_is_named(argument):
    with pytest.raises((NotImplementedError, ValueError), match=f"argument '{argument}'"):
        REFUSED[argument]()


def test_dropout_is_refused_in_graphs():
    with pytest.raises(Exception, match="argument 'keep_prob'"):
        compiled(lambda q: npu.npu_fusion_attention(q, q, q, 4, "BNSD", keep_prob=0.5)[0])(Q)


# ---- the library ----


def test_defining_again_changes_nothing():
    before = npu.npu_rms_norm.default
    library.define()
    assert npu.npu_rms_norm.default is before


def test_operators_of_others_stay():
    there = torch.library.Library("npu", "FRAGMENT")
    there.define("npu_of_others(Tensor x) -> Tensor")
    mine = library.NpuOperator("npu_of_others(Tensor x) -> Tensor", lambda x: x + 1, lambda x: x)
    torchair.ascend.ops.library.define_missing([mine])
    with pytest.raises(NotImplementedError):
        npu.npu_of_others(torch.ones(2))


def test_a_real_package_is_left_alone(monkeypatch):
    defined = []
    monkeypatch.setattr(library.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(library, "define_missing", defined.append)
    library.define()
    assert not defined


def test_functions_of_the_facade():
    found = operators()
    wanted = {
        "npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu",
        "npu_fusion_attention", "npu_prompt_flash_attention", "npu_incre_flash_attention",
        "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2",
        "npu_scatter_nd_update", "npu_scatter_nd_update_", "scatter_update", "scatter_update_",
        "npu_quantize", "npu_dynamic_quant", "npu_quant_matmul", "npu_weight_quant_batchmatmul",
        "npu_dynamic_quant_asymmetric", "npu_convert_weight_to_int4pack", "npu_trans_quant_param",
        "npu_grouped_matmul", "npu_moe_gating_top_k_softmax", "npu_moe_init_routing",
        "npu_moe_finalize_routing", "npu_format_cast",
    }  # fmt: skip
    assert wanted <= found.keys()
    assert found["npu_swiglu"] is npu.npu_swiglu


def test_the_graph_has_the_documented_operators():
    conversion = convert(case("grouped_matmul-rows").call, *case("grouped_matmul-rows").inputs)
    types = [n.type for n in conversion.graph.nodes]
    assert types.count("Fill") == 5 and types.count("GroupedMatmul") == 1
    rows = {c.name: convert(c.call, *c.inputs).graph for c in ALL if c.name.startswith("quantize")}
    last = {name: graph.nodes[-2].type for name, graph in rows.items()}
    assert last["quantize--1-True"] == "Quantize" and last["quantize--1-False"] == "AscendQuantV2"
    assert all(row_of(t) is not None for t in ("PromptFlashAttention", "MoeFinalizeRoutingV2"))


def test_replays_read_new_lengths():
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"

    def step(q: Tensor, k: Tensor, a: int, b: int) -> Tensor:
        return npu.npu_fused_infer_attention_score(
            q * 2,
            k,
            k,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="BNSD",
            scale=0.4,
            actual_seq_lengths_kv=[a, b, 9],
        )[0]

    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    fast = torch.compile(step, backend=backend, dynamic=True)
    with torch.no_grad():
        for a, b in ((4, 9), (5, 8), (6, 2)):
            torch.testing.assert_close(fast(ONE, CK, a, b), step(ONE, CK, a, b))


def test_the_examples_of_the_page_run():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "npu_library.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    done = run_forked("-c", "".join(found), env=inherited())
    assert len(found) > 1
    assert done.returncode == 0, done.stderr


# ---- on a GPU ----


@pytest.mark.cuda
@by_name
def test_cuda_equals_cpu(case):
    inputs = [t.cuda() for t in case.inputs]
    expected = case.call(*case.inputs)
    with torch.no_grad():
        fast = compiled(lambda *x: case.call(*x))(*inputs)
    for got in (case.call(*inputs), fast):
        here = [g.cpu() if isinstance(g, torch.Tensor) else g for g in got]
        assert_close(here, expected, case.rough, to_largest=True)
