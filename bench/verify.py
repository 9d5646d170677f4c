"""What `torchair.verify` costs: processor time of a verified call against one in eager mode.

python bench/verify.py            an MLP, an encoder and a decoder of the transformers library
python bench/verify.py --calls 5  fewer calls
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchair
from torchair.runner import observed
from torchair.verification.api import Verifier, VerifyOptions


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    layers = [nn.Linear(64, 64) for _ in range(16)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    return model, {"input": torch.randn(8, 64)}


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=1000,
    )
    return BertModel(config), {"input_ids": torch.randint(0, 1000, (1, 128))}


def decoder() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config), {
        "input_ids": torch.randint(0, 1000, (1, 128)),
        "use_cache": False,
    }


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": mlp,
    "encoder": encoder,
    "decoder": decoder,
}


def processor_time(call: Callable[[], Any]) -> float:
    """Seconds of all threads."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20, help="of each, in turn; the best counts")
    parser.add_argument("--only", choices=tuple(MODELS), help="one of the models")
    options = parser.parse_args()
    for name, make in MODELS.items():
        if options.only not in (None, name):
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = make()
        model.eval()
        verifier = Verifier(VerifyOptions(Path("torchair_verify")))
        fast = torch.compile(model, backend=torchair.get_npu_backend())
        with torch.no_grad(), observed(verifier):
            for _ in range(2):
                fast(**inputs)
            times = [
                (processor_time(lambda: model(**inputs)), processor_time(lambda: fast(**inputs)))  # noqa: B023
                for _ in range(options.calls)
            ]
        eager, verified = (min(column) for column in zip(*times, strict=True))
        print(
            f"{name:8s} eager {eager * 1e3:8.3f} ms  verified {verified * 1e3:8.3f} ms"
            f"  {verified / eager:.1f}x  {'right' if verifier.report else 'wrong'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
