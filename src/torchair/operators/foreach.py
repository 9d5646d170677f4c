"""Operators on lists of tensors: member i of the result comes from member i of every list.

Kernels are torch's own list functions. A rule asks the same function for the type, on stand-ins
of one element, and broadcasts the dims itself, so that symbolic sizes pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.errors import MissingHostValue
from torchair.ge.dtypes import FLOAT_TYPES, DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Value
from torchair.ge.shapes import Shape, broadcast
from torchair.operators.core import Op, TorchKernel, add_row, like_each, scalar

aten = torch.ops.aten

UNARY = (
    "abs", "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log10",
    "log1p", "log2", "neg", "reciprocal", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")  # with a list or with numbers
TERNARY = ("addcdiv", "addcmul")
FORMS = ("List", "Scalar", "ScalarList")
SCALED = ("ForeachAddList", "ForeachSubList")  # the last input is a factor of the second list
ROUNDING = {2: "floor", 3: "ceil", 4: "round", 5: "trunc", 7: "frac"}  # by `roundMode`


def _overloads() -> dict[str, Any]:
    """The torch function of every operator type; its arguments are the inputs in order."""
    table = {f"Foreach{n.capitalize()}": getattr(aten, f"_foreach_{n}").default for n in UNARY}
    for name in (*BINARY, *TERNARY):
        packet = getattr(aten, f"_foreach_{name}")
        for form in FORMS:
            numbers = "ScalarList" if name in TERNARY and form == "List" else form
            table[f"Foreach{name.capitalize()}{form}"] = getattr(packet, numbers)
    return table | {
        "ForeachLerpList": aten._foreach_lerp.List,
        "ForeachLerpScalar": aten._foreach_lerp.Scalar,
        "ForeachNorm": aten._foreach_norm.Scalar,
        "ForeachPowScalarAndTensor": aten._foreach_pow.ScalarAndTensor,
    }


def _call(op_type: str, overload: Any, args: list[Any]) -> Any:
    if op_type in SCALED:
        return overload(*args[:-1], alpha=args[-1])
    return overload(*args)


# ---- kernels ----


def _reader(op: Op, port: str) -> Callable[[Any], Any]:
    """From what lies on a port to the argument."""
    value = op.node.inputs[port]
    if not isinstance(value, Value):
        return lambda tensors: tensors
    if port != "scalars":
        return scalar(op, port)
    if value.node.type != "Const":
        return lambda t: t.tolist()
    known = value.node.attr("value").tolist()
    return lambda _t: known


def _kernel(op_type: str, overload: Any) -> Callable[[Op], TorchKernel]:
    def make(op: Op) -> TorchKernel:
        readers = [_reader(op, port) for port in op.node.inputs]
        return lambda *args: _call(
            op_type, overload, [read(a) for read, a in zip(readers, args, strict=True)]
        )

    return make


# ---- facts ----


def _dims(fact: Fact) -> Shape:
    if fact.shape is None:
        raise MissingHostValue("dims of a member of a list are not known")
    return fact.shape


def _placeholder(fact: Fact) -> torch.Tensor:
    return torch.empty((1,) * len(_dims(fact)), dtype=ge_to_torch(fact.dtype), device="meta")


def _argument(op: Op, port: str) -> Any:
    """An argument that gives results of the right type: one element, some number."""
    if isinstance(op.node.inputs[port], list):
        return [_placeholder(f) for f in op.list(port)]
    fact = op[port]
    number: Any = 1.0 if fact.dtype in FLOAT_TYPES else 1
    number = True if fact.dtype == DataType.DT_BOOL else number
    return [number] * len(_lists(op)) if port == "scalars" else number


def _lists(op: Op) -> list[tuple[Fact, ...]]:
    ports = [p for p, slot in op.node.inputs.items() if isinstance(slot, list)]
    return list(zip(*(op.list(p) for p in ports), strict=True))


def _rule(op_type: str, overload: Any) -> Callable[[Op], list[Fact]]:
    def rule(op: Op) -> list[Fact]:
        members = _lists(op)
        results = _call(op_type, overload, [_argument(op, p) for p in op.node.inputs])
        shapes = [broadcast(*(_dims(f) for f in facts)) for facts in members]
        if op_type == "ForeachNorm":  # one number for each member
            shapes = [() for _ in members]
        return [Fact(torch_to_ge(r.dtype), s) for r, s in zip(results, shapes, strict=True)]

    return rule


OVERLOADS = _overloads()
for _type, _overload in OVERLOADS.items():
    add_row(_type, _rule(_type, _overload), _kernel(_type, _overload))


# ---- rounding: the mode is an input ----


def _round(op: Op) -> TorchKernel:
    return getattr(aten, f"_foreach_{ROUNDING[op.int('roundMode')]}").default


add_row("ForeachRoundOffNumber", like_each("x"), _round, host=("roundMode",))
