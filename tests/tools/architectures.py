"""Tiny random models of the transformers library: class, config and inputs of each architecture.

Sizes are as small as the architectures allow and nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

FLOATS = (torch.float32, torch.bfloat16)
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


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def _mask(batch: int, length: int) -> Tensor:
    """Every odd row ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1::2, length - length // 3 :] = 0
    return mask


def decoder(batch: int, length: int) -> Inputs:
    return {"input_ids": ids(batch, length), "use_cache": False}


def _masked_decoder(batch: int, length: int) -> Inputs:
    return {**decoder(batch, length), "attention_mask": _mask(batch, length)}


def encoder(batch: int, length: int) -> Inputs:
    return {"input_ids": ids(batch, length), "attention_mask": _mask(batch, length)}


def _translation(batch: int, length: int) -> Inputs:
    target = {"decoder_input_ids": ids(batch, length // 2), "use_cache": False}
    return {**encoder(batch, length), **target}


def _images(batch: int, length: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def _speech(batch: int, length: int) -> Inputs:
    target = {"decoder_input_ids": ids(batch, length), "use_cache": False}
    return {"input_features": torch.randn(batch, 8, 32), **target}


# ---- models

_BODY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**_BODY, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
_SPEECH = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}

CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", GROUPED, decoder),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", GROUPED, _masked_decoder),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, decoder),
    "mistral": Case(
        "MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}, _masked_decoder
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        _masked_decoder,
    ),
    "bert": Case("BertForMaskedLM", "BertConfig", TEXT, encoder),
    "roberta": Case("RobertaForMaskedLM", "RobertaConfig", TEXT, encoder),
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
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}, decoder),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}, decoder),
    "phi": Case("PhiForCausalLM", "PhiConfig", GROUPED, _masked_decoder),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}, decoder),
    "stablelm": Case("StableLmForCausalLM", "StableLmConfig", GROUPED, decoder),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", GROUPED, decoder),
    "starcoder2": Case("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED, decoder),
    "gpt_neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, _masked_decoder),
    "opt": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
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
        encoder,
    ),
    "albert": Case("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, encoder),
    "electra": Case("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 16}, encoder),
    "xlm_roberta": Case("XLMRobertaForMaskedLM", "XLMRobertaConfig", TEXT, encoder),
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
    {**GROUPED, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    decoder,
)
