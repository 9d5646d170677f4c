"""Strict numerics over whole models, all or those named (`make strict`):

    python tests/tools/strict_models.py [NAME ...]

Architectures of transformers in float32 and bfloat16, forward and one backward: are
results and gradients eager's to the last bit? What AOTAutograd alone (`aot_eager`) computes with
other bits is said, and is no failure.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchair
from architectures import CASES, GROUPED, MORE, TEXT, Case, decoder, encoder
from torchair.verification.judge import same_bits

_DECODERS = (
    "Granite",
    "Cohere",
    "Olmo",
    "Persimmon",
    "Nemotron",
    "Glm",
    "Helium",
    "Glm4",
    "SmolLM3",
    "Arcee",
    "Exaone4",
)
_ENCODERS = ("Camembert", "MPNet", "Ernie", "Data2VecText", "XLMRobertaXL", "Nystromformer")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**GROUPED, **_TOKENS, "head_dim": 8}
_ENCODER = {**TEXT, **_TOKENS}
MODELS = {
    **CASES,
    **MORE,
    **{n.lower(): Case(f"{n}ForCausalLM", f"{n}Config", _DECODER, decoder) for n in _DECODERS},
    **{n.lower(): Case(f"{n}ForMaskedLM", f"{n}Config", _ENCODER, encoder) for n in _ENCODERS},
}


def outcome(model: nn.Module, call: Any, inputs: dict[str, Any]) -> list[Any]:
    """Results and gradients of all parameters."""
    torch.manual_seed(0)
    results = [t for t in tree_leaves(call(**inputs)) if isinstance(t, Tensor)]
    loss = sum(t.float().square().mean() for t in results if t.requires_grad)
    loss.backward()
    return [*results, *(p.grad for p in model.parameters())]


def same(case: Case, dtype: torch.dtype, backend: Any) -> bool:
    """Whether a compiled model gives eager's bits."""
    torch._dynamo.reset()
    model = case.build(dtype)
    inputs, twin = case.arguments(2, 12, dtype), copy.deepcopy(model)
    expected = outcome(model, model, inputs)
    got = outcome(twin, torch.compile(twin, backend=backend), inputs)
    return len(got) == len(expected) and all(map(same_bits, got, expected))


def main() -> int:
    warnings.simplefilter("ignore")
    config = torchair.CompilerConfig()
    config.numerics = "strict"
    failed = 0
    chosen = sys.argv[1:] or list(MODELS)
    for name in chosen:
        case = MODELS[name]
        for dtype in (torch.float32, torch.bfloat16):
            verdict = "eager's bits"
            if not same(case, dtype, torchair.get_npu_backend(compiler_config=config)):
                alone = same(case, dtype, "aot_eager")
                verdict = "OTHER BITS" if alone else "other bits, as aot_eager's"
                failed += alone
            print(f"{name:24s} {dtype!s:16s} {verdict}", flush=True)
    print(f"{2 * len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
