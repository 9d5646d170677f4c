"""Converters of the operators of the `npu` library that declare the GE operator they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torchair import ge
from torchair.ascend.convert.library import assigned
from torchair.ascend.ops import NpuOperator, operators
from torchair.ascend.ops.forms import GE_TYPES, GeForm, OperatorCall
from torchair.ascend.ops.library import dtype_of, wrong
from torchair.convert.operands import plain, promote, wanted
from torchair.convert.registry import Decline, bound, builtin
from torchair.ge.attrs import Attr
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.ge.graph import Node, Value
from torchair.ge.prototypes import Prototype, prototype

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


def _attributes(operator: str, form: GeForm, proto: Prototype, given: dict[str, Any]) -> Any:
    attrs: dict[str, Any] = {
        name: value(given) if callable(value) else value for name, value in form.fixed.items()
    }
    for spec in proto.attrs:
        name = form.argument(spec.name)
        if name not in given or spec.name in attrs:
            continue
        value = form.defaults.get(spec.name) if given[name] is None else given[name]
        plain(*(value if isinstance(value, (list, tuple)) else [value]))
        if spec.name in form.words:
            value = _word(operator, name, form.words[spec.name], value)
        elif spec.name in form.types:
            value = _type_number(operator, name, value)
        attrs[spec.name] = value
    return {name: value for name, value in attrs.items() if value is not None}


def _word(operator: str, argument: str, words: Mapping[Any, Any], value: Any) -> Any:
    if value not in words:
        known = ", ".join(repr(word) for word in words)
        raise wrong(operator, argument, f"is {value!r}, known are {known}")
    return words[value]


def _unplaced(
    form: GeForm, proto: Prototype, call: OperatorCall, given: Mapping[str, Any]
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


def _converter(operator: NpuOperator, form: GeForm) -> Callable[..., Any]:
    op_type, call, name = form.type, OperatorCall(operator.schema), operator.name

    @cache
    def proto() -> Prototype:
        found = prototype(op_type)
        assert found is not None, f"no GE operator {op_type}"
        return found

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = bound(_Schema(call.arguments), args, kwargs)
        private = _unplaced(form, proto(), call, given)
        fed = given | {n: promote(DataType[f"DT_{t}"], given[n]) for n, t in form.casts.items()}
        fed |= {n: ge.TensorMove(given[n]) for n in form.copied}
        ports = [_port(p.kind, fed.get(form.argument(p.name))) for p in proto().inputs]
        made = builder(op_type)(*ports, **_attributes(name, form, proto(), given))
        outputs = [made] if isinstance(made, Value) else list(made)
        _noted(outputs[0].node, private)
        by_port = {value.port: value for value in outputs}
        for port in proto().inputs:
            argument = form.argument(port.name)
            if argument in form.assigned and given[argument] is not None:
                assigned(given[argument], by_port[port.name])
        inputs = {p.name for p in proto().inputs}
        found = [by_port[port] for port in form.returned(list(by_port), inputs, call.returns)]
        if isinstance(meta_outputs, list):
            return wanted(found[: len(meta_outputs)], meta_outputs)
        return found[0] if found else None

    copies = ("TensorMove",) if form.copied else ()
    convert.ge_types = (*copies, op_type)  # type: ignore[attr-defined]
    return convert


class _Schema:
    """What `bound` asks of a schema."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


for _operator in operators():
    if _operator.form is not None:
        builtin(_operator.target)(_converter(_operator, _operator.form))
