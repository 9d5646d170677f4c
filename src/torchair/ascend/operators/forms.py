"""GE operators whose meaning is the kernel of an operator of the `npu` library: a row for each that
declares a form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchair.ascend.ops import NpuOperator, operators
from torchair.ascend.ops.forms import GE_TYPES, GeForm, OperatorCall, TensorMeta
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact
from torchair.operators.core import Op, TorchKernel, Trait, add_row, rows

_COLLECTIVE = Trait.COMMUNICATION | Trait.SIDE_EFFECT


def _meta_of(fact: Fact) -> TensorMeta:
    if fact.shape is None:
        raise MissingHostValue("dims of an input are not known")
    return TensorMeta(fact.shape, ge_to_torch(fact.dtype))


def _numbers(form: GeForm, call: OperatorCall, op: Op) -> dict[str, Any]:
    """Arguments that are attributes."""
    proto = op.node.prototype
    assert proto is not None
    names = [a.name for a in call.arguments if form.private(a.name) in op.node.attrs]
    found = {name: op.attr(form.private(name)) for name in names}
    for spec in proto.attrs:
        if spec.name not in form.fixed and spec.name in op.node.attrs:
            value = op.attr(spec.name)
            if spec.name in form.words:
                words = form.words[spec.name]
                value = next(known for known, word in words.items() if word == value)
            elif spec.name in form.types:
                value = None if value == DataType.DT_UNDEFINED else GE_TYPES + int(value)
            found[form.argument(spec.name)] = value
    return found


def _leaves(results: Any) -> Iterator[Any]:
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if isinstance(result, (tuple, list)):
            yield from _leaves(result)
        elif result is not None:
            yield result


def _placed(
    form: GeForm, call: OperatorCall, op: Op, results: list[Any], updated: Callable[[str], Any]
) -> list[Any]:
    """Outputs of the node: updated inputs, and results of the operator where they belong."""
    outputs, inputs = [v.port for v in op.node.outputs], op.node.inputs
    if not set(outputs) & inputs.keys() and not form.results:
        return results
    found = dict(zip(form.returned(outputs, inputs, call.returns), results, strict=True))
    return [found[p] if inputs.get(p) is None else updated(p) for p in outputs]


def _facts(results: Any) -> Iterator[Fact]:
    for result in _leaves(results):
        yield Fact(torch_to_ge(result.dtype), tuple(result.shape))


def _rule(operator: NpuOperator, form: GeForm, call: OperatorCall) -> Callable[[Op], list[Fact]]:
    def rule(op: Op) -> list[Fact]:
        given = _numbers(form, call, op)
        for port, value in op.node.inputs.items():
            if isinstance(value, list):
                given[form.argument(port)] = [_meta_of(fact) for fact in op.list(port)]
            elif value is not None:
                given[form.argument(port)] = _meta_of(op[port])
        try:
            found = list(_facts(call.run(operator.fake, given)))
            return _placed(form, call, op, found, lambda port: op[port])
        except TypeError as e:  # a comparison of sizes that are not known yet
            raise MissingHostValue(f"{op.node}: {e}") from e

    return rule


def _kernel(operator: NpuOperator, form: GeForm, call: OperatorCall) -> Callable[[Op], TorchKernel]:
    def make(op: Op) -> TorchKernel:
        numbers, ports = _numbers(form, call, op), list(op.node.inputs)
        updated = {v.port for v in op.node.outputs} & set(ports)

        def run(*tensors: Any) -> Any:
            fed = {p: t for p, t in zip(ports, tensors, strict=True) if t is not None}
            fed |= {p: fed[p].clone() for p in updated if p in fed}
            given = {form.argument(port): t for port, t in fed.items()}
            found = call.run(operator.kernel, numbers | given)
            return _placed(form, call, op, list(_leaves(found)), fed.get)

        return run

    return make


def _enter(operator: NpuOperator, form: GeForm) -> None:
    if form.type in rows():
        return
    call, traits = OperatorCall(operator.schema), Trait.NONE
    traits |= _COLLECTIVE if form.collective else traits
    traits |= Trait.CONTRACTION if form.product else traits
    add_row(form.type, _rule(operator, form, call), _kernel(operator, form, call), traits)


for _operator in operators():
    if _operator.form is not None:
        _enter(_operator, _operator.form)
