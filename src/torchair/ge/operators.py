"""Operators that users add: what they take and give, and the torch function that computes them.

The catalogue makes rows of the kernels kept here; this room does not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.ge.attrs import KINDS
from torchair.ge.prototypes import (
    AttrSpec,
    Port,
    Prototype,
    declare,
    is_declared,
    prototype,
)

_MARKS = {"?": "optional", "*": "dynamic"}


@dataclass(frozen=True)
class UserKernel:
    """The meaning of an operator type, given by a user."""

    type: str
    shape_rule: Callable[..., Any] | None
    function: Callable[..., Any]
    updates: tuple[str, ...] = ()


_kernels: dict[str, UserKernel] = {}


def register_operator(
    op_type: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attrs: Mapping[str, str | tuple[str, Any]] | None = None,
) -> None:
    """Declare an operator type, so that `ge.custom_op` and `ge.<Type>` take positional arguments
    and a converter can be generated.

    A port is a name; `name?` may be unfed, `name*` takes a list. An attribute is a kind of
    `ge.attr` ("Float", "ListInt", ...), or a pair of the kind and a default. An output that has
    the name of an input is that input updated.
    """
    specs = tuple(_attr(name, spec) for name, spec in (attrs or {}).items())
    by_name = {s.name: s for s in specs}
    ports = [tuple(_port(text) for text in names) for names in (inputs, outputs)]
    declare(Prototype(op_type, ports[0], ports[1], specs, by_name))


def _port(text: str) -> Port:
    name = text.rstrip("?*")
    if not name.isidentifier():
        raise ValueError(f"{text!r} is not a port: a name is wanted, with ? or * behind it")
    return Port(name, _MARKS.get(text[len(name) :], "required"))


def _attr(name: str, spec: str | tuple[str, Any]) -> AttrSpec:
    kind, default, required = (spec, None, True) if isinstance(spec, str) else (*spec, False)
    if kind not in KINDS:
        raise ValueError(f"attribute {name!r}: unknown kind {kind!r}, expected one of {KINDS}")
    return AttrSpec(name, kind, default, required)


def register_kernel(
    op_type: str,
    shape_rule: Callable[..., Any] | None,
    function: Callable[..., Any],
    *,
    updates: Sequence[str] = (),
) -> None:
    """Let the engine compute an operator type with a torch function; a later call overrides.

    The function gets the tensors in port order (None for an unfed port, a list for a variable
    one) and the attributes by keyword, and returns a tensor or a tuple of them. `shape_rule` is
    called in the same way with tensors on the `meta` device and tells the results by others on it;
    with None the function itself is asked. `updates` names the inputs that the function changes in
    place: each has an output of the same name, which the function does not return.
    """
    if prototype(op_type) is not None and not is_declared(op_type):
        raise ValueError(
            f"{op_type} is an operator of the package: choose another name for yours, or give it "
            "a row with torchair.operators.core.add_row"
        )
    _kernels[op_type] = UserKernel(op_type, shape_rule, function, tuple(updates))


def unregister_kernel(op_type: str) -> None:
    """Forget the kernel of an operator type."""
    _kernels.pop(op_type, None)


def user_kernel(op_type: str) -> UserKernel | None:
    """What a user registered for an operator type."""
    return _kernels.get(op_type)
