"""AOTAutograd, its caches, and the contexts that torch compiles in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchair.torch_private.table import Names, feature, required

if TYPE_CHECKING:
    from torch._guards import CompileContext as CompileContext
    from torch._guards import CompileId as CompileId
    from torch._guards import TracingContext as TracingContext

NAMES = Names(
    __name__,
    {
        "aot_module_simplified": required(
            "torch._functorch.aot_autograd:aot_module_simplified", "graphs of forward and backward"
        ),
        "default_partition": required(
            "torch._functorch.partitioners:default_partition", "the split of training graphs"
        ),
        "min_cut_partition": required(
            "torch._functorch.partitioners:min_cut_rematerialization_partition",
            "the split of training graphs",
        ),
        "functorch_config": required("torch._functorch.config", "AOTAutograd's cache"),
        "BypassAOTAutogradCache": required(
            "torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache",
            "AOTAutograd's cache",
        ),
        "OutputType": feature("torch._functorch._aot_autograd.schemas:OutputType", "vLLM"),
        "TracingContext": required(
            "torch._guards:TracingContext", "which arguments are parameters"
        ),
        "tracing": feature("torch._guards:tracing", "torchair.compile"),
        "CompileContext": required("torch._guards:CompileContext", "artifacts in TORCH_TRACE"),
        "CompileId": required("torch._guards:CompileId", "artifacts in TORCH_TRACE"),
        "compile_context": required("torch._guards:compile_context", "artifacts in TORCH_TRACE"),
        "compiling_flag": feature(
            "torch.compiler:_is_compiling_flag", "torch.compiler.is_compiling() in torchair.compile"
        ),
    },
)


@contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true inside."""
    import torch

    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


__getattr__ = NAMES.find
