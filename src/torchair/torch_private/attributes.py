"""Private attributes of torch's objects. They are used where the objects are; this table is the
list of those that may be, each with an object to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchair.torch_private.table import Names, PrivateName, Without


@dataclass(frozen=True)
class PrivateAttribute(PrivateName):
    """An attribute of an object."""

    probe: Callable[[], Any] | None = None  # such an object

    def found(self) -> Any:
        """The object; ImportError, AttributeError or OSError without it."""
        owner = self.probe() if self.probe is not None else None
        return getattr(owner, self.path.rpartition(".")[2])


def _operator() -> Any:
    import torch

    return torch.ops.aten.add.Tensor


def _tensor() -> Any:
    import torch

    return torch.ones(1)


def _module() -> Any:
    import torch

    return torch.nn.Module()


def _storage() -> Any:
    return _tensor().untyped_storage()


def _typed_storage() -> Any:
    import torch

    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=_storage(), dtype=torch.float32, _internal=True)  # does not warn


def _node() -> Any:
    import torch

    return torch.fx.Node


def _group() -> Any:
    import torch

    return torch.distributed.ProcessGroup


def _exported() -> Any:
    from torch.export import ExportedProgram

    return ExportedProgram


def _optimized() -> Any:
    from torch._dynamo.eval_frame import OptimizedModule

    as_it_is: Any = lambda f: f  # noqa: E731
    return OptimizedModule(_module(), as_it_is)


def _in_graph() -> Any:
    from torch._dynamo.trace_rules import TorchInGraphFunctionVariable

    return TorchInGraphFunctionVariable


def _user_class() -> Any:
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    return UserDefinedClassVariable


def _profile() -> Any:
    import torch

    return torch.profiler.profile()


_row = PrivateAttribute
_R, _F, _O = Without.REQUIRED, Without.FEATURE, Without.OPTIONAL
_ROWS = (
    _row("OpOverload._schema", _R, "arguments and results of operators", probe=_operator),
    _row("OpOverload._op", _F, "capture on a CPU, the emulated device", probe=_operator),
    _row("OpOverload._op_dk", _F, "capture on a CPU, the emulated device", probe=_operator),
    _row("OpOverload._opname", _R, "forms of operators", probe=_operator),
    _row("OpOverload._overloadname", _R, "names of operators", probe=_operator),
    _row("OpOverload._dispatch_cache", _R, "operators kept whole", probe=_operator),
    _row("OpOverload.py_kernels", _R, "operators that are kept whole", probe=_operator),
    _row("Tensor._cdata", _O, "tests of arguments in native code", probe=_tensor),
    _row("Tensor._version", _R, "weights that change", probe=_tensor),
    _row("Tensor._is_zerotensor", _R, "zeros that have no memory", probe=_tensor),
    _row("UntypedStorage._cdata", _R, "tensors that share memory", probe=_storage),
    _row("TypedStorage._untyped_storage", _F, "the emulated device", probe=_typed_storage),
    _row("TypedStorage._new_wrapped_storage", _F, "the emulated device", probe=_typed_storage),
    _row("Module._parameters", _F, "torchair.compile", probe=_module),
    _row("Module._buffers", _F, "torchair.compile", probe=_module),
    _row("Module._modules", _F, "torchair.compile", probe=_module),
    _row("Node._pretty_print_target", _R, "names of operators in dumps", probe=_node),
    _row("ProcessGroup._device_types", _F, "collectives", probe=_group),
    _row("ProcessGroup._get_backend", _F, "the emulated device", probe=_group),
    _row(
        "ExportedProgram._graph_module_flat_inputs", _F, "exported programs as GE graphs",
        probe=_exported,
    ),
    _row(
        "ExportedProgram._transform_do_not_use", _F, "exported programs as GE graphs",
        probe=_exported,
    ),
    _row(
        "profile._trace_metadata", _O, "metadata in profiles of the emulated device", "2.13",
        probe=_profile,
    ),
    _row("OptimizedModule._orig_mod", _F, "models that are compiled", probe=_optimized),
    _row("TorchInGraphFunctionVariable._get_handlers", _F, "emulated", probe=_in_graph),
    _row("UserDefinedClassVariable._in_graph_classes", _F, "emulated", probe=_user_class),
)  # fmt: skip
NAMES = Names(__name__, {row.path: row for row in _ROWS})

MARKS = (
    "_boxed_call",
    "_dynamo_dynamic_indices",
    "_dynamo_static_indices",
    "_dynamo_source",
    "_torchdynamo_orig_callable",
)
"""Attributes that torch sets on objects of others, or reads there; without them it does less."""
