"""Tiny random models of the transformers library, captured as one graph, equal to eager.

Sizes are as small as the architectures allow and nothing is downloaded. Cost is Dynamo's tracing,
which with symbolic sizes takes seconds a model, so layers are few.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import transformers
from torch import Tensor, nn

import torchair
from architectures import CASES, FLOATS, MIXTRAL, MORE, NATIVE, VOCAB, Case, Inputs, ids
from generic_nodes import collect_generic_nodes, report
from lane_tools import nothing_found
from tolerance import assert_close, assert_close_to_reference, double_copy, to_double

SLOW = pytest.mark.slow


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _check(
    case: Case, model: nn.Module, dtype: torch.dtype, dynamic: bool, **options: Any
) -> Counter[str]:
    """Compile and compare at two sizes if dynamic, else twice at one; gives the generic nodes."""
    backend = torchair.get_npu_backend()
    fast = torch.compile(model, backend=backend, dynamic=dynamic, **options)
    with torch.no_grad(), nothing_found(), collect_generic_nodes() as generic:
        for batch, length in ((2, 6), (3, 10) if dynamic else (2, 6)):
            inputs = case.arguments(batch, length, dtype)
            got, eager = fast(**inputs), model(**inputs)
            assert type(got) is type(eager)
            assert_close_to_reference(model, inputs, got, eager)
    return generic


# Symbolic sizes in bfloat16 are marked slow: tracing them takes as long again as in float32, and
# types and sizes are each seen with the other.
FORMS = [
    pytest.param(
        dynamic,
        dtype,
        id=f"{'dynamic' if dynamic else 'static'}-{str(dtype)[6:]}",
        marks=SLOW if dynamic and dtype is torch.bfloat16 else (),
    )
    for dynamic in (False, True)
    for dtype in FLOATS
]


@pytest.mark.parametrize(("dynamic", "dtype"), FORMS)
@pytest.mark.parametrize("name", CASES)
def test_full_graph(name: str, dynamic: bool, dtype: torch.dtype, record_property: Any) -> None:
    case = CASES[name]
    generic = _check(case, case.build(dtype), dtype, dynamic, fullgraph=True)
    report(name, generic, record_property)
    assert name not in NATIVE or not generic


WAYS = [
    pytest.param(dynamic, dtype, marks=() if (dynamic, dtype) == (False, FLOATS[0]) else SLOW)
    for dynamic in (False, True)
    for dtype in FLOATS
]


@pytest.mark.parametrize(("dynamic", "dtype"), WAYS)
@pytest.mark.parametrize("name", MORE)
def test_more_full_graphs(
    name: str, dynamic: bool, dtype: torch.dtype, record_property: Any
) -> None:
    case = MORE[name]
    generic = _check(case, case.build(dtype), dtype, dynamic, fullgraph=True)
    report(name, generic, record_property)


@pytest.mark.parametrize("name", ("llama", "bert"))
def test_explicit_attention(name: str, record_property: Any) -> None:
    """The implementation "eager": matmul, mask, softmax, matmul instead of the fused operator."""
    case = CASES[name]
    model = case.build(torch.float32)
    model.set_attn_implementation("eager")
    generic = _check(case, model, torch.float32, dynamic=False, fullgraph=True)
    report(f"{name} explicit", generic, record_property)


@pytest.mark.parametrize("name", ("llama", "bert", "t5", "vit"))
def test_gradients(name: str, record_property: Any) -> None:
    """Loss and gradients of all parameters; without dropout, whose numbers are the engine's own."""
    case = CASES[name]
    eager = case.build(torch.float32)
    mine, truth = copy.deepcopy(eager), double_copy(eager)
    fast = torch.compile(mine, backend=torchair.get_npu_backend(), fullgraph=True)
    inputs = case.arguments(2, 6, torch.float32)
    with collect_generic_nodes() as generic:
        got, expected = _gradients(fast, mine, inputs), _gradients(eager, eager, inputs)
    assert_close(got, expected, _gradients(truth, truth, to_double(inputs)))
    report(f"{name} training", generic, record_property)


def _gradients(call: Any, model: nn.Module, inputs: Inputs) -> list[Tensor]:
    loss = call(**inputs).logits.square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


# ---- decoding with the caches of the library


def test_static_cache(record_property: Any) -> None:
    """Decode steps update the tensors of a StaticCache in place."""
    case = CASES["llama"]
    eager = case.build(torch.float32)
    truth = double_copy(eager)
    backend = torchair.get_npu_backend()
    fast = torch.compile(copy.deepcopy(eager), backend=backend, fullgraph=True, dynamic=False)
    caches = [transformers.StaticCache(config=eager.config, max_cache_len=16) for _ in range(3)]
    with torch.no_grad(), collect_generic_nodes() as generic:
        prompt = {"input_ids": ids(1, 5), "cache_position": torch.arange(5)}
        for model, cache in zip((eager, eager, truth), caches, strict=True):
            model(**prompt, past_key_values=cache)
        for position in range(5, 9):
            step = {"input_ids": ids(1, 1), "cache_position": torch.tensor([position])}
            got, expected, exact = (
                [model(**step, past_key_values=cache).logits, *_contents(cache)]
                for model, cache in zip((fast, eager, truth), caches, strict=True)
            )
            assert_close(got, expected, exact)
    report("llama static cache", generic, record_property)


def _contents(cache: Any) -> list[Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


# ---- Mixtral, whose routing depends on data


@pytest.mark.parametrize("backend", ("torchair", "npugraph_ex"))
def test_compile_config_with_its_defaults(backend: str) -> None:
    """Its mode is reduce-overhead, and what generate returns holds results of all steps."""
    model = CASES["llama"].build(torch.float32)
    model.generation_config.pad_token_id = 0
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    ids = torch.randint(3, VOCAB, (2, 5))
    options = dict(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        cache_implementation="static",
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
    )
    truth = double_copy(model).generate(ids, disable_compile=True, **options)
    expected = model.generate(ids, disable_compile=True, **options)
    chosen = transformers.CompileConfig(backend=backend)
    assert chosen.mode == "reduce-overhead"
    chosen._compile_all_devices = True
    got = model.generate(ids, compile_config=chosen, **options)
    assert torch.equal(got.sequences, expected.sequences)
    kept = [[r.logits, *r.hidden_states] for r in (got, expected, truth)]
    assert_close(*kept)


@pytest.mark.parametrize("dtype", FLOATS, ids=("float32", "bfloat16"))
def test_mixtral_in_pieces(dtype: torch.dtype, record_property: Any) -> None:
    """Not as one graph: the library loops over the experts that were hit, a number only the data
    tell, and Dynamo refuses that with any backend ("aot_eager" too). The pieces are compiled."""
    generic = _check(MIXTRAL, MIXTRAL.build(dtype), dtype, dynamic=False)
    report("mixtral", generic, record_property)


@pytest.mark.parametrize(("dynamic", "dtype"), FORMS)
def test_mixtral_full_graph(
    dynamic: bool, dtype: torch.dtype, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph, with a loop over all experts; how many tokens each one gets stays in the data."""
    model = MIXTRAL.build(dtype)
    block = type(model.model.layers[0].block_sparse_moe)
    monkeypatch.setattr(block, "forward", _all_experts)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        generic = _check(MIXTRAL, model, dtype, dynamic, fullgraph=True)
    report("mixtral full graph", generic, record_property)


def _all_experts(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of the library's sparse block, with a loop whose length is known."""
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    logits = block.gate(flat)
    weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(flat.dtype)
    result = torch.zeros_like(flat)
    hits = F.one_hot(chosen, num_classes=block.num_experts).permute(2, 1, 0)
    for expert, hit in zip(block.experts, hits, strict=True):
        rank, token = torch.where(hit)
        result.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
    return result.view_as(hidden_states), logits
