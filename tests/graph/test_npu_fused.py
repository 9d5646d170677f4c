"""Fused operators of the `npu` library: values, results without data, graphs in all modes.

Dynamo takes most of the time, so many operators are compiled as one graph.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchair
from npu_cases import Case, npu, randint, randn
from torchair.convert import find
from torchair.fx.passes import inplace

Tensor = torch.Tensor
MODULES = ("npu_fused_cases", "npu_cache_cases", "npu_state_cases", "npu_latent_cases")
CASES: list[Case] = [case for module in MODULES for case in import_module(module).CASES]
by_name = pytest.mark.parametrize("case", CASES, ids=str)
MODES = ("max-autotune", "reduce-overhead", "npugraph_ex")


def copies(tensors: Any) -> list[Tensor]:
    return [t.clone() for t in tensors]


def assert_close(case: Case, got: Any, expected: Any) -> None:
    assert len(got) == len(expected), case
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape, (case, g.shape, e.shape)
        rough = case.rough
        torch.testing.assert_close(
            g.double(), e.double(), rtol=rough, atol=rough, msg=lambda m: f"{case}: {m}"
        )


# ---- what they give ----


@by_name
def test_values(case):
    expected = Case("", case.expected, (), case.expected).call(*copies(case.inputs))
    assert_close(case, case.call(*copies(case.inputs)), expected)


@by_name
def test_results_without_data_look_like_real_ones(case):
    real = case.call(*copies(case.inputs))
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in case.inputs))
    assert [(r.shape, r.dtype) for r in real] == [(f.shape, f.dtype) for f in fake]


# ---- graphs ----


def compiled(cases: list[Case], inputs: Any, mode: str) -> list[Any]:
    """Results of all cases from one graph."""
    config = torchair.CompilerConfig()
    config.mode = mode if mode != "npugraph_ex" else "max-autotune"
    backend: Any = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    fast = torch.compile(
        lambda given: [case.call(*x) for case, x in zip(cases, given, strict=True)],
        backend="npugraph_ex" if mode == "npugraph_ex" else backend,
        fullgraph=True,
        dynamic=False,
    )
    with torch.no_grad():
        return list(fast(inputs))


def chosen(mode: str) -> list[Case]:
    """Captured graphs call the kernels of eager code, so one call of each operator is enough there;
    and both modes that capture do it alike, so those that update arguments are enough for one."""
    if mode == "max-autotune":
        return CASES
    first = list({frozenset(_targets(case)): case for case in reversed(CASES)}.values())
    if mode == "reduce-overhead":
        return first
    return [case for case in first if any(op._schema.is_mutable for op in _targets(case))]


@pytest.mark.parametrize("mode", MODES)
def test_graphs_in_all_modes(mode):
    cases = chosen(mode)
    inputs = [copies(case.inputs) for case in cases]
    for case, given, got in zip(cases, inputs, compiled(cases, inputs, mode), strict=True):
        own = copies(case.inputs)
        assert_close(case, got, case.call(*own))
        if "apply_rotary" not in case.name:  # which graphs copy
            assert_close(case, given, own)  # updated as eager does, whatever the schema says


def test_operators_have_converters_where_the_original_has_them():
    for case in CASES:
        missing = {op for op in _targets(case) if find(op) is None}
        assert bool(missing) == case.generic, (case, missing)


def _targets(case: Case) -> set[Any]:
    seen: set[Any] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("npu", "atb"):
                seen.add(func)
            return func(*args, **kwargs or {})

    with Watch():
        case.call(*copies(case.inputs))
    return seen


def _sized(n: int) -> list[Any]:
    """Tensors for a graph whose number of tokens varies."""
    whole = torch.tensor([n], dtype=torch.int32)
    return [
        randn(n, 16),
        randn(16),
        randn(1, n, 1, 16),
        torch.arange(n),
        randn(4, 4, 2, 8),
        randn(n, 2, 8),
        randint(-9, 9, n, 16, dtype=torch.int32),
        whole,
        randn(1, 4, 3, 8),
    ]


def _many(
    x: Tensor,
    g: Tensor,
    angles: Tensor,
    slots: Tensor,
    pages: Tensor,
    tokens: Tensor,
    whole: Tensor,
    lengths: Tensor,
    state: Tensor,
) -> list[Any]:
    scale = torch.full((1, 16), 0.1)
    npu.npu_scatter_pa_kv_cache(tokens, tokens, pages, pages * 1, slots, cache_mode="Norm")
    heads = angles.transpose(1, 2)
    value = x.view(-1, 4, 4)[..., :3]
    return [
        *npu.npu_add_rms_norm_dynamic_quant(x, x, g)[:1],
        npu.npu_clipped_swiglu(x),
        npu.npu_interleave_rope(heads, heads, heads),
        *npu.npu_apply_rotary_pos_emb(angles * 1, angles * 2, angles, angles),
        *npu.npu_dequant_swiglu_quant(whole, weight_scale=scale, quant_mode=1),
        npu.npu_lightning_indexer(
            tokens[None], tokens[None, :, :1], x[None, :, :2], sparse_count=3
        )[0],
        *npu.npu_chunk_gated_delta_rule(
            tokens, tokens, value, initial_state=state, actual_seq_lengths=lengths
        ),
        pages * 1,
    ]


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_numbers_of_tokens_that_vary(mode):
    case = Case("sizes", _many, (), _many, rough=1e-4)
    config = torchair.CompilerConfig()
    config.mode = mode
    torch._dynamo.reset()
    fast = torch.compile(
        _many, backend=torchair.get_npu_backend(compiler_config=config), dynamic=True
    )
    with torch.no_grad():
        for n in (5, 7, 3):
            ours, eager = _sized(n), _sized(n)
            assert_close(case, fast(*ours), case.call(*eager))
            assert_close(case, ours, eager)


def test_captured_graphs_update_caches_where_the_functional_form_is_called():
    case = next(c for c in CASES if c.name == "scatter_pa-functional")

    def step(key: Tensor, value: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> None:
        news = npu.npu_scatter_pa_kv_cache_functional(key, value, kc, vc, slots)
        kc.copy_(news[0])
        vc.copy_(news[1])

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in case.inputs]
    gm = torch.fx.experimental.proxy_tensor.make_fx(step)(*fakes)
    inplace.reinplace_input_mutated_ops(gm)
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == [npu.npu_scatter_pa_kv_cache.default]
    ours, eager = copies(case.inputs), copies(case.inputs)
    gm(*ours)
    step(*eager)
    assert_close(case, ours, eager)


NATIVE = (
    "npu_fast_gelu",
    "fast_gelu_backward",
    "geglu",
    "interleave_rope",
    "add_rms_norm_cast",
    "apply_rotary-BSND-half",
    "scatter_pa-norm",
    "scatter_pa-nz",
    "scatter_pa-functional",
    "kv_rmsnorm-PA",
    "kv_rmsnorm_v2",
)


def test_generated_code_runs_them(capfd, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "4")
    cases = [case for case in CASES if case.name in NATIVE]
    inputs = [copies(case.inputs) for case in cases]
    for case, got in zip(cases, compiled(cases, inputs, "max-autotune"), strict=True):
        assert_close(case, got, case.call(*copies(case.inputs)))
    text = capfd.readouterr().out
    assert text.count("PagedUpdate   (it updates memory in place)") == 10
    assert not re.search(r"^torch  ", text, re.MULTILINE), text


def test_a_slot_outside_of_the_pages_stops_a_graph():
    case = next(c for c in CASES if c.name == "scatter_pa-norm")
    *tensors, slots = copies(case.inputs)
    with pytest.raises(Exception, match="PagedUpdate"):
        compiled([case], [[*tensors, slots + 9]], "max-autotune")


# ---- what is refused ----

X = torch.ones(2, 3, 4)
REFUSED: dict[str, Any] = {
    "approximate": lambda: npu.npu_gelu(X, approximate="some"),
    "axis": lambda: npu.npu_add_rms_norm_quant(X, X, X[0, 0], X[0, 0], None, axis=0),
    "compress_lens": lambda: npu.npu_scatter_pa_kv_cache(X, X, X, X, X, compress_lens=X),
    "max_size": lambda: npu.npu_prefetch(X, X, 0),
    "quant_axis": lambda: npu.npu_quant_scatter(X.char(), X[:, 0, 0], X, X, quant_axis=1),
    "reduce": lambda: npu.npu_scatter_list([X], X[0, 0], X[None], reduce="add"),
    "v": lambda: npu.npu_kv_rmsnorm_rope_cache(X, X[0, 0], X, X, X, X, X, v=X),
    "cache_mode": lambda: npu.npu_mrope(X[0, 0].long(), X[0], X[0], X[0], 4, cache_mode="none"),
    "dst_type": lambda: npu.npu_gelu_quant(X, dst_type=290),
    "group": lambda: npu.npu_group_norm_silu(X, None, None, 2),
    "input_scale": lambda: npu.npu_gelu_quant(X, quant_mode="static"),
    "layout": lambda: npu.npu_apply_rotary_pos_emb(X, X, X, X, "SBH"),
    "output_mask": lambda: npu.npu_add_rms_norm_dynamic_quant(
        X, X, X[0, 0], output_mask=[False, False]
    ),
    "actual_seq_lengths": lambda: npu.npu_chunk_gated_delta_rule(X, X, X, initial_state=X),
    "conv_mode": lambda: npu.npu_fused_causal_conv1d(X, X[0], X, conv_mode="other"),
    "query_start_loc": lambda: npu.npu_fused_causal_conv1d(X[0], X[0], X),
    "ssm_state_indices": lambda: npu.npu_recurrent_gated_delta_rule(X, X, X, X),
    "block_table": lambda: npu.npu_lightning_indexer(
        X[None], X[None], X, layout_key="PA_BSND", actual_seq_lengths_key=X[0, 0]
    ),
    "key": lambda: npu.npu_kv_quant_sparse_flash_attention(X, X, X, X, 1.0, 2, 2),
    "query_quant_mode": lambda: npu.npu_mla_prolog_v3(*[X] * 11, query_quant_mode=1),
    "sparse_mode": lambda: npu.npu_sparse_flash_attention(X, X, X, X, 1.0, sparse_mode=4),
    "swiglu_mode": lambda: npu.npu_dequant_swiglu_quant(X, swiglu_mode=3),
    "x": lambda: npu.npu_clipped_swiglu(X, dim=1),
}


def test_a_slot_outside_of_the_pages_is_an_error():
    pages = torch.zeros(2, 4, 3, 4)
    with pytest.raises(IndexError, match="argument 'slot_mapping'"):
        npu.npu_scatter_pa_kv_cache(
            X, X, pages, pages.clone(), torch.tensor([3, 8]), cache_mode="Norm"
        )


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_supported_is_named(argument):
    with pytest.raises((NotImplementedError, ValueError), match=f"argument '{argument}'"):
        REFUSED[argument]()
