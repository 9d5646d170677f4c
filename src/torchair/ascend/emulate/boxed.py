"""The kernel of almost every operator: run the CPU kernel on aliases of the arguments.

Arguments on the device become tensors of the host over the same memory, the operator runs there,
and results go back: an argument that was returned is that argument, a view of one is a view of it,
and new memory is wrapped.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

from torchair.ascend.emulate.state import (
    DEVICE_TYPE,
    GENERATORS,
    STATE,
    as_cpu,
    as_npu,
    kept_on_cpu,
)
from torchair.torch_private.dispatch import DispatchKey, DispatchKeySet, takes_numbers_as_tensors
from torchair.torch_private.tensors import is_alias_of

HOST_KEYS = DispatchKeySet(DispatchKey.CPU)
_CPU = torch.device("cpu")
_Tensor = torch.Tensor
_is_alias = is_alias_of
_as_strided = torch.ops.aten.as_strided.default
_set = torch.ops.aten.set_.source_Storage_storage_offset

# Operators that torch lets read tensors of the host beside those of a device.
_TAKES_HOST_TENSORS = {
    "aten::_amp_foreach_non_finite_check_and_unscale_",
    "aten::_foreach_copy_",
    "aten::_index_put_impl_",
    "aten::_pack_padded_sequence",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
}


class DeviceOperands:
    """The arguments of one call that are on the device, beside their aliases."""

    __slots__ = ("_alias", "_name", "_strict", "aliases", "host", "index", "originals")

    def __init__(self, name: str, strict: bool) -> None:
        self._name, self._strict = name, strict
        self._alias = as_cpu if STATE.here.tape is None else kept_on_cpu
        self.originals: list[torch.Tensor] = []
        self.aliases: list[torch.Tensor] = []
        self.index = -1
        self.host: torch.Tensor | None = None  # one that must not meet tensors of the device

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument as a tensor of the host."""
        index = tensor.get_device()
        if index < 0:
            if self.host is None and tensor.dim():
                self.host = tensor
            return tensor
        if self.index < 0:
            self.index = index
        elif index != self.index and self._strict:
            self._complain(self.originals[0], tensor)
        for original, known in zip(self.originals, self.aliases, strict=True):
            if original is tensor:
                return known
        made = self._alias(tensor)
        self.originals.append(tensor)
        self.aliases.append(made)
        return made

    def convert(self, value: Any) -> Any:
        """Any argument, with everything on the device replaced."""
        if isinstance(value, _Tensor):
            return self.alias(value)
        if isinstance(value, (list, tuple)):
            return [self.convert(v) for v in value]
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            if self.index < 0:
                self.index = STATE.index_of(value)
            return _CPU
        return value

    def check(self) -> None:
        """Refuse a tensor of the host among those of a device."""
        if self.host is not None and self.originals and self._strict:
            self._complain(self.originals[0], self.host)

    def _complain(self, one: torch.Tensor, other: torch.Tensor) -> None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{one.device} and {other.device}! (when running {self._name})"
        )

    def wrap(self, result: Any) -> Any:
        """A result as one of the device."""
        if isinstance(result, _Tensor):
            return self._wrap_tensor(result)
        if isinstance(result, (list, tuple)):
            return [self.wrap(r) for r in result]
        return result

    def _wrap_tensor(self, result: torch.Tensor) -> torch.Tensor:
        for original, alias in zip(self.originals, self.aliases, strict=True):
            if alias is result:
                return original
            if _is_alias(alias, result):
                start = original.storage_offset() + result.storage_offset()
                dims = result.shape, result.stride()
                return _as_strided.redispatch(HOST_KEYS, original, *dims, start)
        return as_npu(result, STATE.here.device if self.index < 0 else self.index)

    def replace(self, alias: torch.Tensor, other: torch.Tensor) -> None:
        """Let the argument of an alias have other memory, from now on."""
        self.aliases[next(i for i, a in enumerate(self.aliases) if a is alias)] = other

    def follow(self) -> None:
        """Give arguments the memory and the dims that their aliases have now."""
        for original, alias in zip(self.originals, self.aliases, strict=True):
            if alias.data_ptr() != original.data_ptr():
                start: Any = 0
                storage = as_npu(alias, original.get_device()).untyped_storage()
            elif alias.shape != original.shape or alias.stride() != original.stride():
                storage, start = original.untyped_storage(), original.storage_offset()
            else:
                continue
            _set.redispatch(HOST_KEYS, original, storage, start, alias.shape, alias.stride())


class Boxed:
    """An operator of the device, by means of its CPU kernel."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        self.operator, self._call = operator, operator._op
        self._name = schema.name
        self._strict = schema.name.startswith("aten::") and schema.name not in _TAKES_HOST_TENSORS
        self._kinds = [_kind(str(a.type)) for a in schema.arguments]
        self._names = [a.name for a in schema.arguments]
        self._draws = self._kinds.index("generator") if "generator" in self._kinds else None
        base = schema.name.partition("::")[2]
        self._takes_numbers = takes_numbers_as_tensors(base)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        operands, number = DeviceOperands(self._name, self._strict), False
        given: list[Any] = []
        for value, kind in zip(args, self._kinds, strict=False):
            if kind == "tensor" and isinstance(value, _Tensor):
                value = operands.alias(value)
            elif kind != "plain":
                value = operands.convert(value)
                number = number or (kind == "tensor" and value is not None)
            given.append(value)
        if kwargs:
            kwargs = {k: operands.convert(v) for k, v in kwargs.items()}
        operands.check()
        if self._draws is not None:
            self._choose_generator(operands.index, given, kwargs)
        if number and not self._takes_numbers:
            return operands.wrap(self._with_number(given, kwargs))
        return operands.wrap(self.run(operands, given, kwargs))

    def run(self, operands: DeviceOperands, given: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operator on tensors of the host; a graph that is being captured takes note."""
        tape, rows = STATE.here.tape, STATE.rows
        if tape is not None:
            return tape.run(self.operator, given, kwargs)
        if rows is not None:
            return rows.timed(self._name, self._call, given, kwargs)
        return self._call(*given, **kwargs)

    def _choose_generator(self, index: int, given: list[Any], kwargs: dict[str, Any]) -> None:
        """The device's generator where the caller named none."""
        position = self._draws
        assert position is not None
        own = GENERATORS[STATE.here.device if index < 0 else index]
        if position >= len(given):
            kwargs.setdefault(self._names[position], own)
        elif given[position] is None:
            given[position] = own

    def _with_number(self, given: list[Any], kwargs: dict[str, Any]) -> Any:
        """Torch hands a number that stands for a tensor over as a number. The overload that takes
        one gives the result its right type; without such an overload it becomes a tensor."""
        places = [
            k
            for k, v in enumerate(given)
            if self._kinds[k] == "tensor" and v is not None and not isinstance(v, _Tensor)
        ]
        operator = scalar_overload(self.operator, places[0]) if len(places) == 1 else None
        if operator is None:
            given = [torch.tensor(v) if k in places else v for k, v in enumerate(given)]
            operator = self.operator
        tape = STATE.here.tape
        return operator(*given, **kwargs) if tape is None else tape.run(operator, given, kwargs)


class BoxedOut(Boxed):
    """An operator with `out=`. A result may have to grow, which an alias cannot: then it gets
    memory of its own, and the caller's tensor takes that over."""

    def __init__(self, operator: Any) -> None:
        super().__init__(operator)
        self._outs = [a.name for a in operator._schema.arguments if a.is_out]

    def run(self, operands: DeviceOperands, given: list[Any], kwargs: dict[str, Any]) -> Any:
        self._renew(operands, kwargs, empty_only=True)
        try:
            result = super().run(operands, given, kwargs)
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            self._renew(operands, kwargs, empty_only=False)
            result = super().run(operands, given, kwargs)
        operands.follow()
        return result

    def _renew(self, operands: DeviceOperands, kwargs: dict[str, Any], empty_only: bool) -> None:
        for name in self._outs:
            out = kwargs.get(name)
            if isinstance(out, _Tensor) and not (empty_only and out.numel()):
                kwargs[name] = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
                operands.replace(out, kwargs[name])


@cache
def boxed(operator: Any) -> Boxed:
    """The kernel of an operator for the device."""
    grows = any(a.is_out for a in operator._schema.arguments)
    return BoxedOut(operator) if grows else Boxed(operator)


ArgumentKind = Literal["tensor", "generator", "other", "plain"]


def _kind(text: str) -> ArgumentKind:
    """What an argument of a type has to be looked at for."""
    if text in ("Tensor", "Optional[Tensor]"):
        return "tensor"
    if "Generator" in text:
        return "generator"
    return "other" if "Tensor" in text or "Device" in text or "Any" in text else "plain"


@cache
def scalar_overload(operator: Any, position: int) -> Any:
    """The overload of an operator that takes a number at a position where this one takes a tensor,
    None if there is none."""
    wanted = [(a.name, str(a.type)) for a in operator._schema.arguments]
    wanted[position] = (wanted[position][0], "number")
    packet = operator.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None
