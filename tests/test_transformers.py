"""Tiny random models of the transformers library, captured as one graph, equal to eager.

Sizes are as small as the architectures allow and nothing is downloaded. Cost is Dynamo's tracing,
which with symbolic sizes takes seconds a model, so layers are few.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import torchair
from generic_nodes import collect_generic_nodes, report
from lane_tools import nothing_found
from tolerance import assert_close, assert_close_to_reference, double_copy, to_double

FLOATS = (torch.float32, torch.bfloat16)
SLOW = pytest.mark.slow
VOCAB = 99
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model class with its config, and its keyword arguments for a batch and a length."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[int, int], Inputs]

    def build(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        return getattr(transformers, self.model)(config).eval().to(dtype)

    def arguments(self, batch: int, length: int, dtype: torch.dtype) -> Inputs:
        torch.manual_seed(length)
        made = self.inputs(batch, length)
        return {k: x.to(dtype) if _is_float(x) else x for k, x in made.items()}


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


# ---- inputs


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def _mask(batch: int, length: int) -> Tensor:
    """Every odd row ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1::2, length - length // 3 :] = 0
    return mask


def _decoder(batch: int, length: int) -> Inputs:
    return {"input_ids": _ids(batch, length), "use_cache": False}


def _masked_decoder(batch: int, length: int) -> Inputs:
    return {**_decoder(batch, length), "attention_mask": _mask(batch, length)}


def _encoder(batch: int, length: int) -> Inputs:
    return {"input_ids": _ids(batch, length), "attention_mask": _mask(batch, length)}


def _translation(batch: int, length: int) -> Inputs:
    target = {"decoder_input_ids": _ids(batch, length // 2), "use_cache": False}
    return {**_encoder(batch, length), **target}


def _images(batch: int, length: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def _speech(batch: int, length: int) -> Inputs:
    target = {"decoder_input_ids": _ids(batch, length), "use_cache": False}
    return {"input_features": torch.randn(batch, 8, 32), **target}


# ---- models

_BODY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_TEXT = {**_BODY, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
_SPEECH = {
    "vocab_size": VOCAB, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}  # fmt: skip

CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", _GROUPED, _decoder),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _masked_decoder),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, _decoder),
    "mistral": Case(
        "MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}, _masked_decoder
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        _masked_decoder,
    ),
    "bert": Case("BertForMaskedLM", "BertConfig", _TEXT, _encoder),
    "roberta": Case("RobertaForMaskedLM", "RobertaConfig", _TEXT, _encoder),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "vocab_size": VOCAB, "num_layers": 1},
        _translation,
    ),
    "vit": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {**_BODY, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "num_labels": 5},
        _images,
    ),
    "whisper": Case("WhisperForConditionalGeneration", "WhisperConfig", _SPEECH, _speech),
}
NATIVE = {"llama", "qwen2", "qwen3", "mistral", "bert", "gpt2", "vit", "t5"}  # no generic node

_SHORT = {"d_model": 32, "vocab_size": VOCAB, "max_position_embeddings": 64}
_BART = {
    **_SHORT, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
_PICTURES = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 2, "num_labels": 5}

# Static float32 in every run; the other three ways are marked slow (`make conformance`), because
# Dynamo takes half a minute for such a model with symbolic sizes.
MORE = {
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}, _decoder),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8}, _decoder),
    "phi": Case("PhiForCausalLM", "PhiConfig", _GROUPED, _masked_decoder),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}, _decoder),
    "stablelm": Case("StableLmForCausalLM", "StableLmConfig", _GROUPED, _decoder),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", _GROUPED, _decoder),
    "starcoder2": Case("Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED, _decoder),
    "gpt_neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, _masked_decoder),
    "opt": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
        _masked_decoder,
    ),
    "bloom": Case(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        _masked_decoder,
    ),
    "distilbert": Case(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        _encoder,
    ),
    "albert": Case("AlbertForMaskedLM", "AlbertConfig", {**_TEXT, "embedding_size": 16}, _encoder),
    "electra": Case(
        "ElectraForMaskedLM", "ElectraConfig", {**_TEXT, "embedding_size": 16}, _encoder
    ),
    "xlm_roberta": Case("XLMRobertaForMaskedLM", "XLMRobertaConfig", _TEXT, _encoder),
    "bart": Case("BartForConditionalGeneration", "BartConfig", _BART, _translation),
    "deit": Case("DeiTForImageClassification", "DeiTConfig", {**_BODY, **_PICTURES}, _images),
    "convnext": Case(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        _images,
    ),
}
MIXTRAL = Case(
    "MixtralForCausalLM",
    "MixtralConfig",
    {**_GROUPED, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    _decoder,
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
        dynamic, dtype, id=f"{'dynamic' if dynamic else 'static'}-{str(dtype)[6:]}",
        marks=SLOW if dynamic and dtype is torch.bfloat16 else (),
    )
    for dynamic in (False, True)
    for dtype in FLOATS
]  # fmt: skip


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
        prompt = {"input_ids": _ids(1, 5), "cache_position": torch.arange(5)}
        for model, cache in zip((eager, eager, truth), caches, strict=True):
            model(**prompt, past_key_values=cache)
        for position in range(5, 9):
            step = {"input_ids": _ids(1, 1), "cache_position": torch.tensor([position])}
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
        attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
        cache_implementation="static", return_dict_in_generate=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
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
