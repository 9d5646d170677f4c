"""What converters share: operands in other types, sizes, results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.registry import Decline
from torchair.ge import attrs as attr
from torchair.ge.dtypes import FLOAT_TYPES, HALF_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Node, TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import is_static

INT64, HALF = DataType.DT_INT64, HALF_TYPES


def promote(dtype: int, *operands: Any) -> Any:
    """Operands in the given GE type: a Cast where a tensor differs, a Const for a number."""
    done = [_promote(dtype, x) for x in operands]
    return done[0] if len(done) == 1 else done


def _promote(dtype: int, x: Any) -> Any:
    if x is None:
        return None
    if not isinstance(x, Value):
        return ge.Const(x, dtype=dtype)
    return x if x.dtype == dtype else ge.Cast(x, dst_type=dtype)


def dtype_promote(*operands: Any, target_dtype: int) -> Any:
    """The same under the name and with the arguments that converters of users know."""
    return promote(target_dtype, *operands)


def cast_result(x: Value, dtype: int) -> Value:
    """A Cast that is emitted even when the type agrees, as the documented graphs show it."""
    return ge.Cast(x, dst_type=dtype)


def factor(dtype: int, x: Any) -> Value:
    """A scale. Beside 16 bit tensors torch keeps a number in float32, so it is not rounded here."""
    if dtype not in HALF or isinstance(x, complex):
        return promote(dtype, x)
    if isinstance(x, Value):
        keep = x.shape == () and x.dtype not in HALF
        return promote(DataType.DT_FLOAT if keep else dtype, x)
    exact = torch.tensor(x, dtype=ge_to_torch(dtype)).item() == x
    return ge.Const(x, dtype=dtype if exact else DataType.DT_FLOAT)


def plain(*arguments: Any) -> None:
    """Decline unless all arguments are what Python has, numbers or lists of them."""
    if any(isinstance(a, Value) for a in arguments):
        raise Decline("an argument that decides the graph is symbolic")


def alike(*operands: Value) -> None:
    """Decline unless all operands are of one type."""
    if len({x.dtype for x in operands}) > 1:
        raise Decline("operands of different types")


def real(spec: TensorSpec) -> int:
    """The type of a result, Decline unless it is a real floating point one."""
    if spec.dtype not in FLOAT_TYPES:
        raise Decline("not a real floating point result")
    return spec.dtype


def size_of(x: Value, dim: int) -> Value:
    """A dim of a tensor that is not known before the call."""
    size = ge.Gather(ge.Shape(x, dtype=INT64), dim)
    size.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return size


def dims_of(x: Value) -> Any:
    """Dims of a tensor as GE takes them: a list where they are known, else a value."""
    return list(x.shape or ()) if is_static(x.shape) else ge.Shape(x, dtype=INT64)


def sizes(elements: Sequence[Any]) -> Any:
    """A list argument again: a plain list, or one Pack when an element is a value."""
    if not any(isinstance(e, Value) for e in elements):
        return list(elements)
    packed = ge.Pack(list(elements), N=len(elements), axis=0)
    packed.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return packed


def members(x: Any) -> list[Any]:
    """Elements of a list argument: Python integers, and values where the list was packed."""
    if not isinstance(x, Value):
        return list(x)
    packed = x.node.inputs["x"]
    assert x.node.type == "Pack" and isinstance(packed, list)
    return [v.content if v.node.type == "Const" else v for v in packed]


def wanted(results: Sequence[Value], traced: Sequence[Any]) -> list[Value | None]:
    """Results that tracing has too; it does not always follow an operator's output mask."""
    return [None if t is None else r for r, t in zip(results, traced, strict=True)]


def keep_alive() -> Node:
    """Let the newest node of the graph run even if nothing reads it."""
    graph = get_default_ge_graph()
    graph.keep_alive.append(graph.nodes[-1])
    return graph.nodes[-1]


def keep_node_alive(value: Value) -> Value:
    """A value whose node runs even if nothing reads it."""
    get_default_ge_graph().keep_alive.append(value.node)
    return value
