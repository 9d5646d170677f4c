"""vLLM on CPUs, compiled by torchair: the two functions that vLLM's plug-in loader calls.

vLLM is imported by no other part of torchair, and here only inside of these functions: the loader
calls them while vLLM itself is being imported.
"""

from __future__ import annotations

from types import ModuleType

from torchair.import_hooks import when_imported
from torchair.vllm_plugin.distribution import name_distribution

PLATFORM = "torchair.vllm_plugin.platform.TorchairCpuPlatform"


def choose_platform() -> str | None:
    """The name of our platform where vLLM would choose its own for CPUs; None elsewhere."""
    from vllm.platforms import cpu_platform_plugin

    name_distribution()
    found = cpu_platform_plugin()
    return PLATFORM if found == "vllm.platforms.cpu.CpuPlatform" else None


def register() -> None:
    """Let linear layers of models that torchair compiles be torch operators; once per process."""
    from torchair.vllm_plugin.linear import keep_weights

    keep_weights()
    when_imported(
        {
            "vllm.model_executor.kernels.linear": _offer_kernels,
            "vllm.model_executor.layers.vocab_parallel_embedding": _compile_logits,
            "vllm.model_executor.models.registry": _inspect_here,
        }
    )


def _offer_kernels(kernels: ModuleType) -> None:
    """Offer kernels for quantised layers once vLLM has its own: an unquantised model needs none."""
    from torchair.vllm_plugin.quantised import offer_kernels

    offer_kernels()


def _compile_logits(layers: ModuleType) -> None:
    """Compile the product with the vocabulary."""
    from torchair.vllm_plugin.head import compile_logits

    compile_logits(layers)


def _inspect_here(registry: ModuleType) -> None:
    """Import a model's class once, in this process."""
    from torchair.vllm_plugin.inspection import inspect_here

    inspect_here(registry)
