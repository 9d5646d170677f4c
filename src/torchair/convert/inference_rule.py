"""Dims of a user's operator as formulas of the dims of its inputs, kept as the attribute
`_inference_rule` of its node: a graph file then tells them without the torch operator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from torchair.ge import attrs as attr
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Node
from torchair.ge.prototypes import is_declared, prototype
from torchair.log import logger


def is_users(op_type: str) -> bool:
    """Whether an operator type is none of the package."""
    return prototype(op_type) is None or is_declared(op_type)


def attach_rule(target: Any, args: Any, kwargs: Any, created: Iterable[Node]) -> None:
    """Give nodes of operators that only users know the rule of the torch operator they came from;
    without a formula there is a warning and no rule."""
    own = [n for n in created if is_users(n.type)]
    if not isinstance(target, torch._ops.OpOverload):
        return
    try:
        text = rule_text(target, args, kwargs)
    except Exception as e:
        logger.warning("no formula for the dims of %s: %s", target, e)
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
    "Pow": "Pow",
    "Mod": "Mod",
    "PythonMod": "Mod",
    "CleanDiv": "Div",
    "IntTrueDiv": "Div",
    "CeilToInt": "Ceil",
    "Max": "Max",
    "Min": "Min",
}
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
