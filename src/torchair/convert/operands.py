"""What converters make of operands: types are promoted, numbers become Const, lists of sizes one
value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchair import ge
from torchair.convert.registry import Decline
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value

# ---- types ----


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


def plain(*numbers: Any) -> None:
    """Decline unless all arguments are Python numbers."""
    if any(isinstance(n, Value) for n in numbers):
        raise Decline("a scalar argument is symbolic")


# ---- sizes ----


def size_of(x: Value, dim: int) -> Value:
    """A dim of a tensor that only the call tells."""
    size = ge.Gather(ge.Shape(x, dtype=DataType.DT_INT64), dim)
    size.node.attrs["_force_unknown_shape"] = attr.Bool(True)
    return size


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
