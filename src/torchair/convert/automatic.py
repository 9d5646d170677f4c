"""Operators of users: converters made from a torch schema and the prototype of the GE operator of
the same name, and rules for the dims of their results.

`custom_define::my_op_test` becomes `MyOpTest`, if a user declared that type. Tensors go to inputs
and the rest to attributes, in order of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torchair import ge
from torchair.convert.registry import Registration, bound, entry_of
from torchair.errors import ConversionError
from torchair.fallbacks import Fallback, note
from torchair.ge import attrs as attr
from torchair.ge.dtypes import ConverterErrorMsg, ge_to_torch, torch_to_ge
from torchair.ge.graph import Node
from torchair.ge.prototypes import Prototype, is_declared, is_users, prototype, user_kernel
from torchair.log import logger
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.fake import FakeTensorMode
from torchair.torch_private.pytree import tree_leaves, tree_map, tree_map_only

_BUILTIN = ("aten", "prim", "prims")
_NAMES_OF_KINDS = {maker.kind: name for name, maker in attr._ATTR_TYPE_MAP.items()}


def ge_type(target: Any) -> str:
    """The GE operator that a torch operator is converted to: its name in camel case."""
    name = target._schema.name.partition("::")[2].removesuffix("_functional")
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def automatic_entry(target: Any) -> Registration | None:
    """The generated converter of an operator whose GE type a user declared, None for any other;
    ConversionError where the two do not fit."""
    if not isinstance(target, OpOverload) or target.namespace in _BUILTIN:
        return None
    return generate(target) if is_declared(ge_type(target)) else None


def generate(target: Any) -> Registration:
    """A converter of a torch operator; ConversionError says why there can be none."""
    validate_support(target)
    op_type = ge_type(target)
    proto = prototype(op_type)
    if proto is None or not is_declared(op_type):
        raise _refused(target, ConverterErrorMsg.GE_IR_NOT_REGISTERED.format(name=op_type))
    fit = _Fit(target, proto)
    fit.check()
    if user_kernel(op_type) is None:
        ge.register_kernel(op_type, None, fit.kernel, updates=fit.updates)
    logger.info("generated a converter: %s -> %s", target._schema, fit.text())
    return entry_of(fit.convert, by_user=False)


def validate_support(target: Any) -> None:
    """Raise for a target that no converter can be generated for, whatever GE has."""
    if not isinstance(target, OpOverload):
        raise _refused(target, ConverterErrorMsg.NOT_OP_OVERLOAD.format(target=target))
    if target.namespace in _BUILTIN:
        raise _refused(target, ConverterErrorMsg.BUILTIN_OP.format(target=target))
    for argument in target._schema.arguments:
        if _holds(argument.type, torch.NumberType):
            reason = ConverterErrorMsg.SCALAR_INPUT.format(target=target, name=argument.name)
            raise _refused(target, reason)


def _refused(target: Any, reason: str) -> ConversionError:
    return ConversionError(reason, op=target, schema=getattr(target, "_schema", None))


def _holds(kind: Any, wanted: type) -> bool:
    """Whether a schema type is, or has as its element, a type of that kind."""
    if isinstance(kind, wanted):
        return True
    inner = getattr(kind, "getElementType", None)
    return inner is not None and _holds(inner(), wanted)


@dataclass(frozen=True)
class _Fit:
    """A torch operator and the GE operator that stands for it."""

    target: Any
    proto: Prototype

    @property
    def tensors(self) -> list[Any]:
        """Arguments of the schema that are inputs."""
        return [a for a in self.target._schema.arguments if _holds(a.type, torch.TensorType)]

    @property
    def others(self) -> list[Any]:
        """Arguments of the schema that are attributes."""
        return [a for a in self.target._schema.arguments if not _holds(a.type, torch.TensorType)]

    @property
    def written(self) -> list[str]:
        """Arguments that the torch operator changes."""
        arguments = self.target._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @property
    def in_place(self) -> list[str]:
        """Outputs of the GE operator that are inputs updated."""
        inputs = {p.name for p in self.proto.inputs}
        return [p.name for p in self.proto.outputs if p.name in inputs]

    @property
    def updates(self) -> tuple[str, ...]:
        """Inputs that the torch operator changes, by their GE names."""
        return tuple(self.in_place) if self.written else ()

    def check(self) -> None:
        """Raise for the first count that differs."""
        tensors, others = [a.name for a in self.tensors], [a.name for a in self.others]
        inputs = [(p.name, p.kind) for p in self.proto.inputs]
        attrs = [(a.name, _NAMES_OF_KINDS.get(a.kind, a.kind)) for a in self.proto.attrs]
        results = len(self.written) + len(self.target._schema.returns)
        outputs, updated = len(self.proto.outputs), len(self.in_place)
        if len(tensors) != len(inputs):
            reason = ConverterErrorMsg.TENSOR_INPUTS_COUNT_MISMATCH
            raise self._differ(reason, tensor_inputs=tensors, ge_inputs=inputs)
        if len(others) > len(attrs):
            reason = ConverterErrorMsg.NON_TENSOR_INPUTS_COUNT_MISMATCH
            raise self._differ(reason, non_tensor_inputs=others, ge_attrs=attrs)
        if results != outputs:
            reason = ConverterErrorMsg.OUTPUTS_COUNT_MISMATCH
            raise self._differ(reason, outputs_count=results, ge_outputs_count=outputs)
        if self.written and len(self.written) != updated:
            reason, count = ConverterErrorMsg.INPLACE_COUNT_MISMATCH, len(self.written)
            raise self._differ(reason, inplace_count=count, ge_inplace_count=updated)

    def _differ(self, reason: str, **counts: Any) -> ConversionError:
        target, ge_name = self.target, self.proto.type
        return _refused(target, reason.format(target=target, ge_name=ge_name, **counts))

    def text(self) -> str:
        """The call that the converter makes, for the log."""
        given = [a.name for a in (*self.tensors, *self.others)]
        return f"ge.custom_op({', '.join([repr(self.proto.type), *given])})"

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        """One node of the GE operator from the arguments of the torch operator."""
        given = bound(self.target._schema, args, kwargs)
        inputs = [given[a.name] for a in self.tensors]
        if not self.written:
            ports = zip(self.proto.inputs, inputs, strict=True)
            inputs = [tree_map(ge.Clone, v) if p.name in self.in_place else v for p, v in ports]
        attrs = [given[a.name] for a in self.others]
        attrs += [None] * (len(self.proto.attrs) - len(attrs))
        results = ge.custom_op(self.proto.type, *inputs, *attrs)
        results = results if isinstance(results, tuple) else (results,)
        named = zip(self.proto.outputs, results, strict=True)
        kept = [v for p, v in named if p.name not in self.updates]
        if len(kept) == 1:
            return kept[0]
        return kept or None

    def kernel(self, *tensors: Any, **attrs: Any) -> Any:
        """The torch operator itself, as kernel of the GE operator."""
        given = {a.name: t for a, t in zip(self.tensors, tensors, strict=True)}
        for argument, spec in zip(self.others, self.proto.attrs, strict=False):
            given[argument.name] = _from_attr(argument, attrs.get(spec.name))
        return self.target(**given)


def _from_attr(argument: Any, value: Any) -> Any:
    """An attribute as the torch operator wants it: types of tensors were numbers of GE."""
    if "ScalarType" in str(argument.real_type) and isinstance(value, int):
        return ge_to_torch(value)
    if value is None and argument.has_default_value():
        return argument.default_value
    return value


# ---- rules for dims: formulas of the dims of inputs, kept as the attribute `_inference_rule` ----
# ---- of a node; a graph file then tells dims without the torch operator ----


def attach_rule(target: Any, args: Any, kwargs: Any, created: Iterable[Node]) -> None:
    """Give nodes of operators that only users know the rule of the torch operator they came from;
    without a formula there is a warning and no rule."""
    own = [n for n in created if is_users(n.type)]
    if not isinstance(target, OpOverload):
        return
    try:
        text = rule_text(target, args, kwargs)
    except Exception as e:
        note(Fallback.SHAPE_FORMULA, f"no formula for the dims of {target}", e)
        return
    for node in own:
        node.attrs["_inference_rule"] = attr.Str(text)


def rule_text(target: Any, args: Any, kwargs: Any) -> str:
    """The rule as JSON: dims of inputs as symbols, dims of outputs as formulas, types as codes."""
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    names: dict[str, str] = {}
    inputs: list[list[str]] = []

    def fresh(t: torch.Tensor) -> torch.Tensor:
        sizes = [_hint(d) for d in t.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
        example = torch.empty(sizes, dtype=t.dtype, device="meta")
        made = mode.from_tensor(example, symbolic_context=context)
        for d in made.shape:
            names.setdefault(str(_expr(d)), f"s{len(names)}")
        inputs.append([_text(_expr(d), names) for d in made.shape])
        return made

    args, kwargs = tree_map_only(torch.Tensor, fresh, (args, kwargs))
    with mode:
        results = [r for r in tree_leaves(target(*args, **kwargs)) if isinstance(r, torch.Tensor)]
    outputs = [[_text(_expr(d), names) for d in r.shape] for r in results]
    types = [torch_to_ge(r.dtype) for r in results]
    return json.dumps({"shape": {"inputs": inputs, "outputs": outputs}, "dtype": types})


def _hint(size: Any) -> int:
    """A size to trace with; symbols come from it, so it decides nothing but what is in range."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    return 2 if known is None else int(known)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


_CALLS = {
    "Pow": "Pow", "Mod": "Mod", "PythonMod": "Mod", "CleanDiv": "Div", "IntTrueDiv": "Div",
    "CeilToInt": "Ceil", "Max": "Max", "Min": "Min",
}  # fmt: skip
_SIGNS = {"Add": " + ", "Mul": "*"}


def _text(expr: Any, names: dict[str, str]) -> str:
    """An expression over sizes, in the words that rules are written in."""
    if isinstance(expr, int) or expr.is_Integer:
        return str(int(expr))
    if expr.is_Symbol:
        return names[str(expr)]
    kind, parts = type(expr).__name__, [_text(a, names) for a in expr.args]
    if kind in _SIGNS:
        return "(" + _SIGNS[kind].join(parts) + ")"
    if kind == "FloorDiv":
        return f"Floor(Div({', '.join(parts)}))"
    if kind in _CALLS:
        return f"{_CALLS[kind]}({', '.join(parts)})"
    raise ValueError(f"{expr} has no form in a rule")
