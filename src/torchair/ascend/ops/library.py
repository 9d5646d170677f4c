"""How operators of the `npu` library are declared as data and handed to torch, refusals that name
the argument, and the types that results are computed and stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx.node import has_side_effect

from torchair.ascend.ops.forms import Arguments, GeForm, OperatorCall
from torchair.ops.quantised import INT4_IN_INT32 as INT4_IN_INT32
from torchair.ops.quantised import rounded as rounded
from torchair.ops.quantised import unpack_int4 as unpack_int4
from torchair.ops.quantised import wide as wide
from torchair.ops.streams import call_plainly
from torchair.torch_private.dispatch import schemas_of
from torchair.torch_private.tensors import (
    functionalize_commit_update,
    functionalize_replace,
    functionalize_sync,
)

_Implementation = TypeVar("_Implementation", bound=Callable[..., Any])
ATB = "atb"
"""The library of torch that some operators of torch_npu are in."""
DEVICES = ("CPU", "CUDA")
"""Dispatch keys the kernels are for. An emulated device calls the CPU kernel on aliases."""


@dataclass(frozen=True)
class Gradient:
    """The backward formula of an operator: what to keep of a call, and what to make of it."""

    keep: Callable[..., None]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class NpuOperator:
    """One operator: schema, kernel over torch functions, results on tensors without data.

    `gradient` is there where the real operator has one. `pure` is the operator that an in-place
    one becomes when a graph is made functional: the same arguments, a new tensor as result.
    `form` says which GE operator it is where that is a matter of names; others have a converter.
    `space` is the library of torch that it is in.
    """

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    gradient: Gradient | None = None
    pure: str | None = None
    form: GeForm | None = None
    space: str = "npu"

    @property
    def name(self) -> str:
        """Name with the overload behind a dot, if it has one."""
        return self.schema.partition("(")[0]

    @property
    def base(self) -> str:
        """Name without the overload."""
        return self.name.partition(".")[0]

    @property
    def target(self) -> str:
        """How graphs call it."""
        return f"{self.space}.{self.base}.{self.name.partition('.')[2] or 'default'}"


class NpuOperators(list[NpuOperator]):
    """Operators of one module."""

    def add(
        self,
        schema: str,
        fake: Callable[..., Any] | None = None,
        gradient: Gradient | None = None,
        pure: str | None = None,
        form: GeForm | None = None,
        space: str = "npu",
    ) -> Callable[[_Implementation], _Implementation]:
        """One more, whose kernel is the function below. Without `fake` that is run to know the
        results on tensors without data, too; tracing an operator takes several times as long then.
        With a `form` the fake kernel is also the shape rule of the GE operator.
        """

        def enter(kernel: _Implementation) -> _Implementation:
            self.append(NpuOperator(schema, kernel, fake or kernel, gradient, pure, form, space))
            return kernel

        return enter

    def add_by_record(
        self, schema: str, fake: Callable[[Arguments], Any], form: GeForm
    ) -> Callable[[Callable[[Arguments], Any]], Callable[[Arguments], Any]]:
        """One more, whose kernel and fake kernel get all arguments as one record: for operators
        with many arguments, most of which go on to others."""
        call = OperatorCall(schema)

        def taking(function: Callable[[Arguments], Any]) -> Callable[..., Any]:
            return lambda *args, **named: function(call.record(args, named))

        def enter(kernel: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
            self.append(NpuOperator(schema, taking(kernel), taking(fake), form=form))
            return kernel

        return enter


def like(*places: int) -> Callable[..., Any]:
    """Results without data that are like these arguments, contiguous."""

    def fake(*args: Any, **options: Any) -> Any:
        made = tuple(args[p].new_empty(args[p].shape) for p in places)
        return made if len(made) > 1 else made[0]

    return fake


@cache
def _library(space: str) -> torch.library.Library:
    return torch.library.Library(space, "FRAGMENT")


def exists(name: str, space: str = "npu") -> bool:
    """Whether torch knows an operator of the library, also one of another package."""
    base, _, overload = name.partition(".")
    known = schemas_of(f"{space}::{base}")
    return any(schema.overload_name == overload for schema in known)


def define_missing(operators: Iterable[NpuOperator]) -> None:
    """Define the operators that torch does not know yet."""
    for operator in operators:
        if not exists(operator.name, operator.space):
            _define(operator)


def _define(operator: NpuOperator) -> None:
    library, full = _library(operator.space), f"{operator.space}::{operator.name}"
    library.define(operator.schema)
    for device in DEVICES:
        library.impl(operator.name, operator.kernel, device)
    torch.library.register_fake(full, operator.fake, lib=library)
    packet = getattr(getattr(torch.ops, operator.space), operator.base)
    overload = getattr(packet, operator.name.partition(".")[2] or "default")
    if not overload._schema.returns and not overload._schema.is_mutable:
        has_side_effect(overload)  # it is called for that
    if operator.gradient is not None:
        keep, backward = operator.gradient.keep, operator.gradient.backward
        torch.library.register_autograd(full, backward, setup_context=keep, lib=library)
    if operator.pure is not None:
        library.impl(operator.name, _made_functional(operator.pure), "Functionalize")


def _made_functional(pure: str) -> Callable[..., torch.Tensor]:
    """The in-place operator for tensors that record updates: the pure one, then a replacement."""

    def run(first: Any, *rest: Any, **options: Any) -> torch.Tensor:
        new = call_plainly(getattr(torch.ops.npu, pure), first, *rest, **options)
        functionalize_replace(first, new)
        functionalize_commit_update(first)
        functionalize_sync(first)
        return first

    return run


# ---- refusals and types ----

_BY_CODE: dict[int, torch.dtype] = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64,
    5: torch.float16, 6: torch.float32, 7: torch.float64, 11: torch.bool, 12: torch.qint8,
    13: torch.quint8, 14: torch.qint32, 15: torch.bfloat16, 16: torch.quint4x2,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 44: torch.float8_e8m0fnu,
    256: torch.float32, 257: torch.float16, 258: torch.int8, 259: torch.int32, 260: torch.uint8,
    265: torch.int64, 283: torch.bfloat16, 285: torch.quint4x2, 291: torch.float8_e5m2,
    292: torch.float8_e4m3fn, 293: torch.float8_e8m0fnu,
}  # fmt: skip
"""Types by number: torch's own numbers, and from 256 on those of GE."""

_STORED: dict[torch.dtype, torch.dtype] = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}


def refuse(operator: str, argument: str, reason: str) -> NotImplementedError:
    """The error for an argument value that there is no kernel for."""
    return NotImplementedError(f"{operator}: argument {argument!r}: {reason}")


def wrong(operator: str, argument: str, reason: str) -> ValueError:
    """The error for an argument value that no device would take."""
    return ValueError(f"{operator}: argument {argument!r}: {reason}")


def refuse_given(operator: str, **arguments: Any) -> None:
    """Raise for the first argument that was given a value."""
    for name, value in arguments.items():
        if value is not None:
            raise refuse(operator, name, "is not supported, leave it out")


def dtype_of(operator: str, argument: str, code: int | torch.dtype) -> torch.dtype:
    """The type behind a number of the torch_npu interface. Quantised types count as the plain
    integers that hold them; `torch.quint4x2` stands for four-bit integers."""
    known = code if isinstance(code, torch.dtype) else _BY_CODE.get(code)
    if known is None:
        raise refuse(operator, argument, f"there is no torch type for the number {code}")
    return _STORED.get(known, known)


def known_type(
    operator: str, argument: str, code: int | torch.dtype, known: Sequence[torch.dtype]
) -> torch.dtype:
    """The same, if it is one of those that are known."""
    kind = dtype_of(operator, argument, code)
    if kind not in known:
        raise refuse(operator, argument, f"{kind} is none of {', '.join(map(str, known))}")
    return kind


# ---- four-bit integers, eight to an int32, the first in the lowest bits ----


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7 along the last dim, eight to each int32."""
    groups = values.to(torch.int32).unflatten(-1, (-1, INT4_IN_INT32)) & 15
    packed = torch.zeros_like(groups[..., 0])
    for k in range(INT4_IN_INT32):
        packed |= groups[..., k] << (4 * k)
    return packed
