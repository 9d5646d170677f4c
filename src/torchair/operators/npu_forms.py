"""GE operators whose meaning is the kernel of an operator of the `npu` library: a row for each that
declares a form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchair.errors import MissingHostValue
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact
from torchair.operators.core import Kernel, Op, Trait, add_row
from torchair.ops.npu import NpuOperator, operators
from torchair.ops.npu.forms import GE_TYPES, Call, Form, Outline

_COLLECTIVE = Trait.COMMUNICATION | Trait.SIDE_EFFECT


def _outline(fact: Fact) -> Outline:
    if fact.shape is None:
        raise MissingHostValue("dims of an input are not known")
    return Outline(fact.shape, ge_to_torch(fact.dtype))


def _numbers(form: Form, call: Call, op: Op) -> dict[str, Any]:
    """Arguments that are attributes."""
    proto = op.node.prototype
    assert proto is not None
    names = [a.name for a in call.arguments if form.private(a.name) in op.node.attrs]
    found = {name: op.attr(form.private(name)) for name in names}
    for spec in proto.attrs:
        if spec.name not in form.fixed and spec.name in op.node.attrs:
            value = op.attr(spec.name)
            if spec.name in form.types:
                value = None if value == DataType.DT_UNDEFINED else GE_TYPES + int(value)
            found[form.argument(spec.name)] = value
    return found


def _facts(results: Any) -> Iterator[Fact]:
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if isinstance(result, (tuple, list)):
            yield from _facts(result)
        else:
            yield Fact(torch_to_ge(result.dtype), tuple(result.shape))


def _rule(operator: NpuOperator, form: Form, call: Call) -> Callable[[Op], list[Fact]]:
    def rule(op: Op) -> list[Fact]:
        given = _numbers(form, call, op)
        for port, value in op.node.inputs.items():
            if isinstance(value, list):
                given[form.argument(port)] = [_outline(fact) for fact in op.list(port)]
            elif value is not None:
                given[form.argument(port)] = _outline(op[port])
        try:
            return list(_facts(call.run(operator.fake, given)))
        except TypeError as e:  # a comparison of sizes that are not known yet
            raise MissingHostValue(f"{op.node}: {e}") from e

    return rule


def _kernel(operator: NpuOperator, form: Form, call: Call) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        numbers, ports = _numbers(form, call, op), list(op.node.inputs)

        def run(*tensors: Any) -> Any:
            fed = zip(ports, tensors, strict=True)
            given = {form.argument(port): t for port, t in fed if t is not None}
            return call.run(operator.kernel, numbers | given)

        return run

    return make


def _enter(operator: NpuOperator, form: Form) -> None:
    call, traits = Call(operator.schema), _COLLECTIVE if form.collective else Trait.NONE
    add_row(form.type, _rule(operator, form, call), _kernel(operator, form, call), traits)


for _operator in operators():
    if _operator.form is not None:
        _enter(_operator, _operator.form)
