"""Converters of the operators of the `npu` library that declare the GE operator they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torchair.convert.registry import Decline, bound, builtin, plain, promote
from torchair.ge.attrs import Attr
from torchair.ge.build import builder
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Node, Value
from torchair.ge.prototypes import Prototype, prototype
from torchair.ops.npu import NpuOperator, operators
from torchair.ops.npu.forms import GE_TYPES, Call, Form
from torchair.ops.npu.library import dtype_of

_KINDS: dict[type, str] = {int: "Int", float: "Float", bool: "Bool", str: "Str", list: "ListInt"}


def _port(kind: str, value: Any) -> Any:
    """What feeds an input: a list for a variable one, a constant for numbers."""
    if kind == "dynamic":
        return list(value or ())
    if isinstance(value, (list, tuple)):
        return promote(torch_to_ge(dtype_of("", "", 4)), value)  # counts are int64
    return value


def _type_number(operator: str, argument: str, code: Any) -> int | None:
    """GE's number for a type; from `GE_TYPES` on torch_npu has the same ones, moved up."""
    if code is None or (isinstance(code, int) and code >= GE_TYPES):
        return None if code is None else int(code) - GE_TYPES
    return int(torch_to_ge(dtype_of(operator, argument, code)))


def _attributes(operator: str, form: Form, proto: Prototype, given: dict[str, Any]) -> Any:
    attrs = dict(form.fixed)
    for spec in proto.attrs:
        name = form.argument(spec.name)
        if name not in given or spec.name in attrs:
            continue
        value = given[name]
        plain(*(value if isinstance(value, (list, tuple)) else [value]))
        attrs[spec.name] = (
            _type_number(operator, name, value) if spec.name in form.types else value
        )
    return attrs


def _unplaced(
    form: Form, proto: Prototype, call: Call, given: Mapping[str, Any]
) -> dict[str, Attr]:
    """Private attributes for what the GE operator has no place for; Decline tensors."""
    names = [*(p.name for p in proto.inputs), *(a.name for a in proto.attrs)]
    placed = {*map(form.argument, names), *form.unused}
    found = {}
    for argument in call.arguments:
        value = given.get(argument.name)
        if argument.name in placed or value is None or value == argument.default_value:
            continue
        if isinstance(value, Value) or type(value) not in _KINDS:
            raise Decline(f"argument {argument.name}")
        found[form.private(argument.name)] = Attr(_KINDS[type(value)], value)
    return found


def _noted(node: Node, private: dict[str, Attr]) -> None:
    """Give a node private attributes, and its results what follows from them."""
    node.attrs.update(private)
    infer = node.graph.infer
    if private and infer is not None:
        for value, fact in zip(node.outputs, infer(node), strict=True):
            value.learn(fact)


def _converter(operator: NpuOperator, form: Form) -> Callable[..., Any]:
    op_type, call, name = form.type, Call(operator.schema), operator.name

    @cache
    def proto() -> Prototype:
        found = prototype(op_type)
        assert found is not None, f"no GE operator {op_type}"
        return found

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = bound(_Schema(call.arguments), args, kwargs)
        private = _unplaced(form, proto(), call, given)
        ports = [_port(p.kind, given.get(form.argument(p.name))) for p in proto().inputs]
        made = builder(op_type)(*ports, **_attributes(name, form, proto(), given))
        _noted(made.node if isinstance(made, Value) else made[0].node, private)
        if isinstance(made, Value):
            return made
        return made[: len(meta_outputs)] if isinstance(meta_outputs, list) else made[0]

    return convert


class _Schema:
    """What `bound` asks of a schema."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


for _operator in operators():
    if _operator.form is not None:
        _base, _, _overload = _operator.name.partition(".")
        _target = f"npu.{_base}.{_overload or 'default'}"
        builtin(_target)(_converter(_operator, _operator.form))
