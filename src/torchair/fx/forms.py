"""What operators write to, and their forms that write into memory they are given: in place, and
`out=`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchair.torch_private.dispatch import OpOverload, has_computed_kernel

aten = torch.ops.aten
TorchOperator = OpOverload

VIEW_OF_SCATTER: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""`scatter(base, src, ...)` is a copy of `base` in which `view(base, ...)` is `src`."""


def is_written(argument: Any) -> bool:
    """Whether an operator updates an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def written(op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments of a call that an operator updates."""
    for i, argument in enumerate(op._schema.arguments):
        if is_written(argument):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value, in lists of lists too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from tensors_in(member)


_NOT_AT_ONCE = ("_c10d_functional",)  # starts its work and returns: others must not be in between


@cache
def in_place_form(op: TorchOperator) -> TorchOperator | None:
    """`foo_` for `foo`, if it takes the same arguments and gives the first one back."""
    schema = op._schema
    if op.namespace in _NOT_AT_ONCE or schema.is_mutable or len(schema.returns) != 1:
        return None
    if not schema.arguments or schema.arguments[0].alias_info is not None:
        return None  # nothing to write to, or a view
    packet = getattr(getattr(torch.ops, op.namespace), f"{op._opname}_", None)
    if packet is None:
        return None
    forms = [getattr(packet, name) for name in packet.overloads()]
    fitting = [form for form in forms if _is_in_place_form(schema, form._schema)]
    return fitting[0] if len(fitting) == 1 else None


def _is_in_place_form(plain: Any, form: Any) -> bool:
    if _signature(plain.arguments) != _signature(form.arguments) or len(form.returns) != 1:
        return False
    first, *rest = (a.alias_info for a in form.arguments)
    back = form.returns[0].alias_info
    writes = first is not None and first.is_write and all(a is None for a in rest)
    return writes and back is not None and back.is_write


def _signature(arguments: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in arguments]


_FACTORY = ("dtype", "layout", "device", "pin_memory")  # options that an `out` tensor replaces


@dataclass(frozen=True)
class OutForm:
    """The overload of an operator that writes its results into given tensors."""

    op: TorchOperator
    names: tuple[str, ...]  # of the arguments for results
    listed: bool  # one argument takes all results
    dropped: tuple[str, ...]  # options that it does not have

    def runs_on(self, device: str) -> bool:
        """Whether it has a kernel for a kind of device."""
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device, "PrivateUse1")
        return has_computed_kernel(self.op.name(), key)


@cache
def out_form(op: TorchOperator) -> OutForm | None:
    """The form of a functional operator that writes into given tensors: it has the same arguments,
    or the same but for the options of new tensors."""
    if op._schema.is_mutable:
        return None
    wanted = _signature(op._schema.arguments)
    plain = [s for s in wanted if s[0] not in _FACTORY]
    makes_tensors = len(wanted) - len(plain) == len(_FACTORY)
    packet = op.overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        arguments = other._schema.arguments
        outs = [a for a in arguments if a.is_out]
        found = _signature(a for a in arguments if not a.is_out)
        if not outs or not (found == wanted or (makes_tensors and found == plain)):
            continue
        listed = str(outs[0].type) == "List[Tensor]"
        if len(outs) == (1 if listed else len(op._schema.returns)):
            dropped = () if found == wanted else _FACTORY
            return OutForm(other, tuple(a.name for a in outs), listed, dropped)
    return None


@dataclass(frozen=True)
class ManyInPlace:
    """An operator that updates several arguments; its functional twin gives the new values as its
    last results, in the order of the arguments."""

    op: TorchOperator
    written: tuple[int, ...]
    first_new: int  # the first result of the twin that is a new value


MANY_IN_PLACE = {
    ("npu", "npu_kv_rmsnorm_rope_cache_v2"): (5, 6),
    ("npu", "npu_mla_prolog_v3"): (9, 10),
    ("npu", "npu_add_rms_norm_v2"): (0, 1),
    ("npu", "npu_scatter_pa_kv_cache"): (2, 3),
    ("npu", "npu_gather_pa_kv_cache"): (4, 5),
    ("npu", "npu_qkv_rms_norm_rope_cache"): (6, 7, 8),
    ("npu", "npu_recurrent_gated_delta_rule"): (3,),
}
"""Library and name of such operators, and the arguments that they update."""


def many_in_place_forms() -> dict[Any, ManyInPlace]:
    """Functional twin: the operator that updates in place, for those that are installed."""
    found = {}
    for (library, name), written in MANY_IN_PLACE.items():
        plain = getattr(getattr(torch.ops, library), f"{name}_functional", None)
        form = getattr(getattr(torch.ops, library), name, None)
        if plain is None or form is None:
            continue
        results, own = len(plain.default._schema.returns), len(form.default._schema.returns)
        if results == own + len(written):
            found[plain.default] = ManyInPlace(form.default, written, own)
    return found
