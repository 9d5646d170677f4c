"""Private attributes of torch's objects. They are used where the objects are; this table is the
list of those that may be, each with an object to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchair.torch_private.table import Names, Row, Without


@dataclass(frozen=True)
class Attribute(Row):
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
    return _tensor().storage()


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


_R, _F, _O = Without.REQUIRED, Without.FEATURE, Without.OPTIONAL
_ROWS = (
    Attribute("OpOverload._schema", _R, "arguments and results of operators", probe=_operator),
    Attribute("OpOverload._op", _F, "capture on a CPU, the emulated device", probe=_operator),
    Attribute("OpOverload._op_dk", _F, "capture on a CPU, the emulated device", probe=_operator),
    Attribute("OpOverload._opname", _R, "forms of operators", probe=_operator),
    Attribute("OpOverload._overloadname", _R, "names of operators", probe=_operator),
    Attribute("OpOverload._dispatch_cache", _R, "operators kept whole", probe=_operator),
    Attribute("OpOverload.py_kernels", _R, "operators that are kept whole", probe=_operator),
    Attribute("Tensor._cdata", _O, "tests of arguments in native code", probe=_tensor),
    Attribute("Tensor._version", _R, "weights that change", probe=_tensor),
    Attribute("Tensor._is_zerotensor", _R, "zeros that have no memory", probe=_tensor),
    Attribute("UntypedStorage._cdata", _R, "tensors that share memory", probe=_storage),
    Attribute("TypedStorage._untyped_storage", _F, "the emulated device", probe=_typed_storage),
    Attribute("TypedStorage._new_wrapped_storage", _F, "the emulated device", probe=_typed_storage),
    Attribute("Module._parameters", _F, "torchair.compile", probe=_module),
    Attribute("Module._buffers", _F, "torchair.compile", probe=_module),
    Attribute("Module._modules", _F, "torchair.compile", probe=_module),
    Attribute("Node._pretty_print_target", _R, "names of operators in dumps", probe=_node),
    Attribute("ProcessGroup._device_types", _F, "collectives", probe=_group),
    Attribute("ProcessGroup._get_backend", _F, "the emulated device", probe=_group),
    Attribute(
        "ExportedProgram._graph_module_flat_inputs", _F, "exported programs as GE graphs",
        probe=_exported,
    ),
    Attribute(
        "ExportedProgram._transform_do_not_use", _F, "exported programs as GE graphs",
        probe=_exported,
    ),
    Attribute(
        "profile._trace_metadata", _O, "metadata in profiles of the emulated device", "2.13",
        probe=_profile,
    ),
    Attribute("OptimizedModule._orig_mod", _F, "models that are compiled", probe=_optimized),
    Attribute("TorchInGraphFunctionVariable._get_handlers", _F, "emulated", probe=_in_graph),
    Attribute("UserDefinedClassVariable._in_graph_classes", _F, "emulated", probe=_user_class),
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
