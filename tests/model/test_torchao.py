"""Models quantised with torchao: their products read the integers, no node is generic, and results
are those of the dequantised weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("torchao")
pytest.importorskip("transformers")

import transformers
from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import LocalSource
from torch._guards import Guard, GuardsSet, TracingContext
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.quant_primitives import MappingType
from torchao.utils import TorchAOBaseTensor

import torchair
from generic_nodes import collect_generic_nodes
from models import Llama, LlamaConfig, llama_inputs
from torchair.engine.fuse.units import Fusion
from torchair.errors import InputError
from torchair.fx.tracing import quicken_guards

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int8 in groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int4 as bytes": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "int4 with zero points": lambda: IntxWeightOnlyConfig(
        torch.int4, PerGroup(32), MappingType.ASYMMETRIC
    ),
    "int4": lambda: PrototypeInt4WeightOnlyConfig(group_size=32),
}
SMALL = LlamaConfig(layers=1, dim=64, heads=4, head_dim=16, ffn=96, vocab=112, context=16)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fusions(monkeypatch) -> list[Fusion]:
    """What became of every graph that is compiled."""
    from torchair.engine.units import native_units

    found: list[Fusion] = []

    def fuse(*args: Any) -> Fusion:
        found.append(original(*args))
        return found[-1]

    original = native_units.fuse
    monkeypatch.setattr(native_units, "fuse", fuse)
    return found


def weight_of(layer: nn.Linear) -> torch.Tensor:
    """The weight of a quantised layer in float64, as the product of a unit matrix tells it where
    torchao cannot say."""
    if hasattr(layer.weight, "dequantize") and not hasattr(layer.weight, "scale_and_zero"):
        return (
            layer.weight.dequantize(torch.float32).double()
            if _takes_type(layer)
            else (layer.weight.dequantize().double())
        )
    units = torch.eye(layer.in_features, dtype=layer.weight.dtype)
    return nn.functional.linear(units, layer.weight).double().t()


def _takes_type(layer: nn.Linear) -> bool:
    return type(layer.weight).__name__ == "Int8Tensor"


@torch.no_grad()
def dequantised(model: nn.Module) -> nn.Module:
    """The same model in float64 with plain weights."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if isinstance(layer, nn.Linear) and type(layer.weight) is not nn.Parameter:
            layer.weight = nn.Parameter(weight_of(layer), requires_grad=False)
    for _, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    return plain


def quantised_llama(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(SMALL).eval().to(dtype)
    quantize_(model, CONFIGS[name]())
    return model


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torchair") for name in CONFIGS), *((n, "npugraph_ex") for n in ("int8", "int4"))],
)
@torch.no_grad()
def test_a_decoder_with_quantised_weights(name, backend, fusions):
    model = quantised_llama(name, torch.float32)
    right = dequantised(model)
    fast = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True, dynamic=False)
    with collect_generic_nodes() as generic:
        for length, start in ((9, 0), (1, 9), (1, 10)):
            inputs = llama_inputs(SMALL, length, start)
            torch.testing.assert_close(fast(*inputs).double(), right(*inputs), rtol=1e-4, atol=1e-5)
    assert not generic
    for fusion in fusions:
        heads = [unit.anchor.type for unit in fusion.units if unit.kind == "matmul"]
        assert heads.count("WeightQuantBatchMatmulV2") == 8
        assert not [n for n in fusion.alone if n.type == "WeightQuantBatchMatmulV2"]


@pytest.mark.parametrize("name", ["int8", "int4"])
@torch.no_grad()
def test_results_in_bfloat16_are_as_close_as_those_of_torchao(name):
    model = quantised_llama(name, torch.bfloat16)
    right = dequantised(model)
    fast = torch.compile(copy.deepcopy(model), backend="torchair", fullgraph=True)
    for length, start in ((9, 0), (1, 9)):
        inputs = llama_inputs(SMALL, length, start)
        truth = right(*inputs)
        wrong = (model(*inputs).double() - truth).abs().max()
        assert (fast(*inputs).double() - truth).abs().max() <= 1.5 * wrong


@torch.no_grad()
def test_rows_that_are_quantised_as_they_come(fusions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 70), nn.ReLU(), nn.Linear(70, 33, bias=False)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    fast = torch.compile(model, backend="torchair", fullgraph=True, dynamic=False)
    with collect_generic_nodes() as generic:
        for rows in (1, 20):
            x = torch.randn(2, rows, 96)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert not generic
    for fusion in fusions:
        heads = [unit.anchor.type for unit in fusion.units if unit.kind == "matmul"]
        assert heads == ["QuantBatchMatmulV3"] * 2 and not any(fusion.alone.values())


# ---- checkpoints that transformers quantises while it loads them

LOADED = {
    **{name: CONFIGS[name] for name in ("int8", "int4 as bytes", "int4")},
    "rows too": Int8DynamicActivationInt8WeightConfig,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small model in a folder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=112,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, config: Any) -> Any:
    chosen = transformers.TorchAoConfig(config, modules_to_not_convert=["lm_head"])
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=chosen, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torchair") for name in ("int8", "int4", "rows too")),
        ("int4 as bytes", "npugraph_ex"),
    ],
)
@torch.no_grad()
def test_checkpoints_loaded_with_a_configuration(name, backend, checkpoint, fusions):
    """`generate` without a break in any graph: tokens of the quantised model, and logits of the
    dequantised one. Rows that are quantised too have ties that the last bit decides: there logits
    are as close as those of torchao."""
    model, prompt = loaded(checkpoint, LOADED[name]()), torch.tensor([[74, 17, 42]])
    options = dict(
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    eager = model.generate(prompt, **options)
    plain = dequantised(model)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    with collect_generic_nodes() as generic:
        got = model.generate(prompt, **options)
    assert not generic and torch.equal(got.sequences, eager.sequences)
    logits, theirs = (torch.stack(found.logits, 1).double() for found in (got, eager))
    right = plain(got.sequences[:, :-1]).logits[:, prompt.shape[1] - 1 :]
    wrong = (theirs - right).abs().max() if name == "rows too" else 1e-4
    assert (logits - right).abs().max() <= 2 * wrong
    kind = "QuantBatchMatmulV3" if name == "rows too" else "WeightQuantBatchMatmulV2"
    for fusion in fusions:
        heads = [unit.anchor.type for unit in fusion.units if unit.kind == "matmul"]
        assert heads.count(kind) == 7
    assert len(fusions) == 2  # prefill and decode


@torch.no_grad()
def test_calls_without_dynamo_read_what_quantised_parameters_are_made_of(fusions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 70), nn.ReLU()).eval()
    quantize_(model, CONFIGS["int8"]())
    x = torch.randn(3, 96)
    fast = torchair.compile(model, (x,))
    torch.testing.assert_close(fast(x), model(x))
    assert [unit.anchor.type for unit in fusions[0].units] == ["WeightQuantBatchMatmulV2"]
    model[0].weight.scale.mul_(2)
    torch.testing.assert_close(fast(x), model(x))
    other = nn.Linear(96, 70)
    quantize_(other, CONFIGS["int8"]())
    model[0].weight = other.weight
    with pytest.raises(
        InputError, match=r"0\.weight of the model has changed since it was compiled"
    ):
        fast(x)


@torch.no_grad()
def test_guards_of_modules_may_be_left_out():
    model = nn.Linear(96, 70).eval()
    quantize_(model, CONFIGS["int8"]())
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    fast, x = torch.compile(model, backend="torchair", options=options), torch.randn(3, 96)
    torch.testing.assert_close(fast(x), model(x))
    model.weight.scale.mul_(2)
    torch.testing.assert_close(fast(x), model(x))


@torch.no_grad()
def test_guards_see_what_quantised_parameters_are_made_of_without_taking_them_apart(monkeypatch):
    model = nn.Linear(96, 70).eval()
    quantize_(model, CONFIGS["int8"]())
    fast, x = torch.compile(model, backend="torchair", fullgraph=True), torch.randn(3, 96)
    torch.testing.assert_close(fast(x), model(x))
    apart, taken = TorchAOBaseTensor.__tensor_flatten__, []

    def counted(tensor: Any) -> Any:
        taken.append(tensor)
        return apart(tensor)

    monkeypatch.setattr(TorchAOBaseTensor, "__tensor_flatten__", counted)
    torch.testing.assert_close(fast(x), model(x))
    assert not taken
    for name, value in (("act_pre_scale", torch.full((96,), 2.0)), ("reduce_range", True)):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        setattr(model.weight, name, value)
        torch.testing.assert_close(fast(x), model(x))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_guards_of_a_torch_that_does_not_keep_them_by_source(monkeypatch):
    """torch 2.11 has no such table."""
    guard = Guard(LocalSource("w"), GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH)
    guards = GuardsSet({guard})
    monkeypatch.delattr(guards, "source_to_guards", raising=False)
    monkeypatch.setattr(GuardsSet, "add", lambda self, guard: self.inner.add(guard))
    context = SimpleNamespace(guards_context=SimpleNamespace(dynamo_guards=guards))
    monkeypatch.setattr(TracingContext, "try_get", lambda: context)
    quicken_guards()
    assert len(guards.inner) == 1 and guard not in guards.inner
