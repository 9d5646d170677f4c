"""torchair: graph mode for PyTorch inference, as a torch.compile backend.

    import torch, torchair
    model = torch.compile(model, backend=torchair.get_npu_backend())
"""

from typing import TYPE_CHECKING, Any

from torchair import fallbacks, legacy, ops
from torchair.backend import get_compiler, get_npu_backend
from torchair.configs.compiler_config import CompilerConfig
from torchair.log import logger
from torchair.process import when_imported

if TYPE_CHECKING:
    from torchair.convert.registry import register_fx_node_ge_converter
    from torchair.deploy.compiled import compile
    from torchair.deploy.export import dynamo_export
    from torchair.deploy.formats import npu_format_cast_via_cpu, use_internal_format_weight
    from torchair.deploy.load import load
    from torchair.deploy.packaging import package
    from torchair.deploy.weights import weights_changed
    from torchair.explanation.api import explain
    from torchair.fx.passes.user import register_replacement
    from torchair.ops.hcom import patch_for_hcom
    from torchair.verification.api import verify

__all__ = [
    "CompilerConfig", "compile", "dynamo_export", "explain", "get_compiler", "get_npu_backend",
    "load", "logger", "npu_format_cast_via_cpu", "package", "patch_for_hcom",
    "register_fx_node_ge_converter", "register_replacement", "use_internal_format_weight", "verify",
    "weights_changed",
]  # fmt: skip

_LAZY = {
    "compile": "torchair.deploy.compiled",
    "dynamo_export": "torchair.deploy.export",
    "explain": "torchair.explanation.api",
    "load": "torchair.deploy.load",
    "npu_format_cast_via_cpu": "torchair.deploy.formats",
    "package": "torchair.deploy.packaging",
    "patch_for_hcom": "torchair.ops.hcom",
    "use_internal_format_weight": "torchair.deploy.formats",
    "register_fx_node_ge_converter": "torchair.convert.registry",
    "register_replacement": "torchair.fx.passes.user",
    "ge": "torchair.ge",
    "inference": "torchair.inference",
    "llm_datadist": "torchair.llm_datadist",
    "verify": "torchair.verification.api",
    "weights_changed": "torchair.deploy.weights",
}


def _teach_dynamo(_module: Any) -> None:
    """Tell Dynamo about collectives when it comes, before it traces anything."""
    from torchair.ops.hcom import teach_dynamo

    teach_dynamo()


def _offer_reports(runner: Any) -> None:
    """Tell the compiler who writes reports, when it comes."""

    def reporter(path: str) -> Any:
        from torchair.reporting.recorder import reporter_at

        return reporter_at(path)

    runner.onlookers.reporter = reporter


legacy.install()
when_imported({
    "torch.distributed._functional_collectives": _teach_dynamo,
    "torch._dynamo.utils": fallbacks.hand_over,
    "torchair.runner": _offer_reports,
})  # fmt: skip
_ = ops


def __getattr__(name: str) -> Any:
    """Load what is not needed at import when it is first asked for."""
    import importlib

    home = _LAZY.get(name) or (f"torchair.{name}" if legacy.knows(f"torchair.{name}") else None)
    if home is None:
        raise AttributeError(f"module 'torchair' has no attribute {name!r}")
    module = importlib.import_module(home)
    return module if home == f"torchair.{name}" else getattr(module, name)
