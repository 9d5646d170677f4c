"""What the original's names stand for where nothing of ours has the same form."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair.capture.updates import UPDATABLE, register_updatable
from torchair.configs.compiler_config import CompilerConfig, FlatConfig, apply_options
from torchair.configs.sections import gear_keys
from torchair.fx.gears import DimGears, merge
from torchair.fx.passes.allocation import WORKSPACE_OPS, WorkspaceOp
from torchair.torch_private.tensors import storage_at

# ---- gears of inputs that are only described


class ValueType(enum.Enum):
    """What an input of a graph is."""

    TENSOR = 0
    PARAMETER = 1
    BUFFER = 2
    STATIC_TENSOR = 3


@dataclass
class GeInputInfo:
    """The description of an input; `func` makes it from the arguments of a call."""

    value_type: ValueType
    func: Callable[..., Any] | None
    shape: Sequence[int]
    dim_gears: DimGears = field(default_factory=dict)
    device_type: str = "CPU"
    real_shape: Sequence[int] | None = None


def generate_dynamic_dims_option(
    named_inputs_info: Mapping[str, GeInputInfo], policy: str
) -> dict[str, str]:
    """The options that tell the engine about gears; none where no input has any."""
    infos = dict(sorted(named_inputs_info.items()))
    lists: list[Sequence[int]] = []
    for info in infos.values():
        for dim, gears in sorted(info.dim_gears.items()):
            assert info.shape[dim] == -1, "Set dim gear index shape must generalize -1."
            lists.append(gears)
    if not lists:
        return {}
    return gear_keys({name: info.shape for name, info in infos.items()}, merge(lists, policy))


def get_dim_gears(t: torch.Tensor) -> DimGears | None:
    """The gears that were set on a tensor."""
    return getattr(t, "dim_gears", None)


# ---- options among all keywords of a backend


def process_kwargs_options(config: CompilerConfig | FlatConfig, kwargs: Mapping[str, Any]) -> None:
    """Set the options that `torch.compile(options=...)` gave to a backend."""
    options = kwargs.get("options") or {}
    if isinstance(config, FlatConfig):
        config.update(options)
    else:
        apply_options(config, options)


# ---- operators that capture calls with memory and lists from outside


@dataclass(frozen=True)
class StaticWorkspaceReplaceFunc:
    """The form of an operator that is captured: where its results and its workspace go, and which
    lists of integers replays update."""

    get_workspace: Callable[..., Any] | None
    out_operator: Any
    workspace_keys: Sequence[str]
    output_keys: Sequence[str]
    updated_param_keys: Sequence[str]


class _ReplaceFuncs(MutableMapping[Any, StaticWorkspaceReplaceFunc]):
    """What the pass `replace_dynamic_workspace_ops` and updates between replays know, as one
    table by operator."""

    def __setitem__(self, op: Any, entry: StaticWorkspaceReplaceFunc) -> None:
        workspace = next(iter(entry.workspace_keys), "workspace")
        outputs = tuple(entry.output_keys)
        WORKSPACE_OPS[op] = WorkspaceOp(entry.out_operator, outputs, entry.get_workspace, workspace)
        if entry.updated_param_keys:
            for form in (op, entry.out_operator):
                register_updatable(form, entry.updated_param_keys)

    def __getitem__(self, op: Any) -> StaticWorkspaceReplaceFunc:
        known = WORKSPACE_OPS[self._key(op)]
        updates = UPDATABLE.get(str(op))
        workspaces = [known.workspace] if known.asks is not None else []
        lists = list(updates.parameters) if updates is not None else []
        return StaticWorkspaceReplaceFunc(
            known.asks, known.out, workspaces, list(known.outputs), lists
        )

    def __delitem__(self, op: Any) -> None:
        for form in (op, WORKSPACE_OPS.pop(self._key(op)).out):
            UPDATABLE.pop(str(form), None)

    def __iter__(self) -> Iterator[Any]:
        return iter(WORKSPACE_OPS)

    def __len__(self) -> int:
        return len(WORKSPACE_OPS)

    @staticmethod
    def _key(op: Any) -> Any:
        """Operators of libraries that may come later are known by their names."""
        return op if op in WORKSPACE_OPS else str(op)


REPLACE_FUNC_MAP = _ReplaceFuncs()


# ---- values, held loosely or as bare memory


class WeakRef:
    """A tensor that is not kept alive, or any other value, which is. Called, it gives the value, or
    None where the tensor is gone."""

    def __init__(self, value: Any) -> None:
        self.swap_weakref(value)

    def swap_weakref(self, value: Any) -> None:
        """Refer to another value from now on."""
        loosely = isinstance(value, torch.Tensor)
        self._get: Callable[[], Any] = weakref.ref(value) if loosely else lambda: value

    def __call__(self) -> Any:
        return self._get()


class LazyMessage:
    """A text for the log that is made when a line is written, and only then."""

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._make, self._args, self._kwargs = make, args, kwargs

    def __str__(self) -> str:
        return str(self._make(*self._args, **self._kwargs))


def reconstruct_args_kwargs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments whose tensors, also those in lists, are others over the same memory, which they do
    not keep alive."""
    return [_bare(a) for a in args], {name: _bare(a) for name, a in kwargs.items()}


def _bare(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_over_memory(v) if isinstance(v, torch.Tensor) else v for v in value]
    return _over_memory(value) if isinstance(value, torch.Tensor) else value


def _over_memory(t: torch.Tensor) -> torch.Tensor:
    memory = t.untyped_storage()
    storage = storage_at(memory.data_ptr(), t.device, memory.nbytes())
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    return made.set_(storage, t.storage_offset(), t.shape, t.stride())
