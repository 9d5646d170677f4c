"""torchair: graph mode for PyTorch inference, as a torch.compile backend.

    import torch, torchair
    model = torch.compile(model, backend=torchair.get_npu_backend())

Tested with Python 3.11 to 3.13, torch 2.11 to 2.15 and llvmlite 0.47 to 0.50 (`torchair.versions`).
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchair.extensions import Kind, offer
from torchair.import_hooks import when_imported
from torchair.torch_private.distributed import FUNCTIONAL_COLLECTIVES
from torchair.torch_private.dynamo import UTILS
from torchair.versions import __version__, check_torch

if TYPE_CHECKING:
    from torchair.backend import get_compiler, get_npu_backend
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.convert.registry import register_fx_node_ge_converter
    from torchair.deploy.compiled import compile
    from torchair.deploy.export import dynamo_export
    from torchair.deploy.formats import npu_format_cast_via_cpu, use_internal_format_weight
    from torchair.deploy.load import load
    from torchair.deploy.packaging import package
    from torchair.deploy.weights import weights_changed
    from torchair.explanation.api import explain
    from torchair.fx.module_guards import skip_model_guards_unsafe
    from torchair.fx.passes.user import register_replacement
    from torchair.log import logger
    from torchair.ops.hcom import patch_for_hcom
    from torchair.reporting.api import report
    from torchair.verification.api import verify

__all__ = [
    "__version__", "CompilerConfig", "compile", "dynamo_export", "explain", "get_compiler",
    "get_npu_backend", "load", "logger", "npu_format_cast_via_cpu", "package", "patch_for_hcom",
    "register_fx_node_ge_converter", "register_replacement", "report",
    "skip_model_guards_unsafe", "use_internal_format_weight", "verify", "weights_changed",
]  # fmt: skip

_MODULES = ("configs", "ge", "inference", "llm_datadist", "npugraph_ex", "ops", "scope", "versions")
"""Public modules."""
_LAZY = {
    "CompilerConfig": "torchair.configs.compiler_config",
    "get_compiler": "torchair.backend",
    "get_npu_backend": "torchair.backend",
    "logger": "torchair.log",
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
    "report": "torchair.reporting.api",
    "skip_model_guards_unsafe": "torchair.fx.module_guards",
    "ge": "torchair.ge",
    "inference": "torchair.inference",
    "llm_datadist": "torchair.llm_datadist",
    "verify": "torchair.verification.api",
    "weights_changed": "torchair.deploy.weights",
}
_ASCEND: dict[Kind, str] = {
    "operators": "torchair.ascend.operators",
    "converters": "torchair.ascend.convert",
    "rules": "torchair.ascend.rules",
    "attention": "torchair.ascend.ops.infer_schemas",
    "graph_check": "torchair.ascend.gegraph_check.graphs",
    "capture_check": "torchair.ascend.gegraph_check.captured",
    "drafts": "torchair.ascend.legacy.drafts",
}
"""What is loaded when a graph or a script asks for it."""


def _teach_dynamo(_module: Any) -> None:
    """Tell Dynamo about collectives when it comes, before it traces anything."""
    from torchair.ops.hcom import teach_dynamo

    teach_dynamo()


def _reporter(path: str) -> Any:
    """The writer of the report at a path."""
    from torchair.reporting.recorder import reporter_at

    return reporter_at(path)


def begin() -> None:
    """What `import torchair` does: operators, old names, the backend. The command line does it with
    the command that runs, so that its help does not wait for torch."""
    global _begun
    if _begun:
        return
    _begun = True
    check_torch(import_module("torch").__version__)
    import torchair.backend
    import torchair.fallbacks
    import torchair.old_names
    import torchair.ops
    import torchair.trace

    offer(_ASCEND)
    torchair.old_names.install()
    torchair.trace.reports.writer = _reporter
    when_imported(
        {
            FUNCTIONAL_COLLECTIVES: _teach_dynamo,
            UTILS: torchair.fallbacks.hand_over,
        }
    )


def _is_command_line() -> bool:
    """Whether this process runs the `torchair` command, or `python -m torchair`."""
    # Python has "-m" for the program until it has found the module, which is its next argument.
    as_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "torchair"
    return as_module or "_torchair_command" in sys.modules


_begun = False
if not _is_command_line():
    begin()


def __getattr__(name: str) -> Any:
    """Load what is not needed at import when it is first asked for."""
    if not _begun:
        raise AttributeError(f"the command line has not loaded torchair, which has {name!r}")
    target = _LAZY.get(name) or f"torchair.{name}"
    known = name in _LAZY or name in _MODULES
    if not known and (
        name.startswith("__") or not import_module("torchair.old_names").knows(target)
    ):
        raise AttributeError(f"module 'torchair' has no attribute {name!r}")
    module = import_module(target)
    return module if target == f"torchair.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    """The public names; others may change without notice."""
    return sorted([*__all__, *_MODULES, "__doc__", "__file__", "__name__", "__path__"])
