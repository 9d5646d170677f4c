"""What converters share: operands in other types, sizes as values, and tables of torch operators
that are one GE operator each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Node, TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import is_static

INT64, HALF = DataType.DT_INT64, (DataType.DT_FLOAT16, DataType.DT_BF16)

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


def real(spec: TensorSpec) -> int:
    """The type of a result, Decline unless it is a real floating point one."""
    if spec.dtype not in FLOAT_TYPES:
        raise Decline("not a real floating point result")
    return spec.dtype


# ---- sizes ----


def size_of(x: Value, dim: int) -> Value:
    """A dim of a tensor that only the call tells."""
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


# ---- results ----


def wanted(results: Sequence[Value], traced: Sequence[Any]) -> list[Value | None]:
    """Results that tracing has too; it does not always follow an operator's output mask."""
    return [None if t is None else r for r, t in zip(results, traced, strict=True)]


def keep_alive() -> Node:
    """Let the newest node of the graph run even if nobody reads it."""
    graph = get_default_ge_graph()
    graph.keep_alive.append(graph.nodes[-1])
    return graph.nodes[-1]


def kept(value: Value) -> Value:
    """A value whose node runs even if nobody reads it."""
    get_default_ge_graph().keep_alive.append(value.node)
    return value


# ---- one operator for another ----


@dataclass(frozen=True)
class Direct:
    """A torch operator that is one GE operator.

    `inputs` are arguments of the schema in the order of GE's ports, all tensors if none are named,
    all arguments for `*`. `x:INT64` is cast to that type and `x:` to none, `~x` is a scale beside
    the result, `None` an unfed port. `attrs` are those that become attributes: `ge=torch` where
    names differ, `ge=[torch]` where GE has a list of one, `ge=@` the type of the result. `words`
    has the words for what torch numbers, `fixed` the attributes that are always the same.
    """

    type: str
    inputs: str = ""
    attrs: str = ""
    promoted: bool = False  # inputs are cast to the type of the result
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    recast: bool = False  # a Cast of the result, whatever its type is
    fixed: Mapping[str, Any] = field(default_factory=dict)


def direct(table: Mapping[Any, Direct | str], **same: Any) -> None:
    """Register rows, or just types with what is the `same` for all of them, for torch operators."""
    for target, row in table.items():
        row = Direct(row, **same) if isinstance(row, str) else row
        builtin(target, depth=2)(_converter(target, row))


def of_aten(names: Mapping[str, str]) -> dict[Any, str]:
    """A table for `direct` from GE types and torch's names for them: `pow.Scalar`, or `sqrt` for
    `sqrt.default`."""
    named = [(name.partition("."), op_type) for op_type, n in names.items() for name in n.split()]
    aten = torch.ops.aten
    return {getattr(getattr(aten, p), o or "default"): op_type for (p, _, o), op_type in named}


_UNFED = {"None": None}


def _converter(target: Any, row: Direct) -> Callable[..., Any]:
    op_type, words, scale = row.type, row.words, factor if "~" in row.inputs else promote
    renamed = [(ge_name, name or ge_name) for ge_name, _, name in _parted(row.attrs)]

    @cache
    def schema() -> Any:
        found = resolve_name(f"torch:ops.{target}") if isinstance(target, str) else target
        return found._schema

    @cache
    def ports() -> list[tuple[str, str, str]]:
        named = [a for a in schema().arguments if row.inputs == "*" or "Tensor" in str(a.type)]
        every = "" if row.inputs == "*" else row.inputs
        return [n.partition(":") for n in every.split() or (a.name for a in named)]

    def attributes(given: dict[str, Any], dtype: Any) -> dict[str, Any]:
        attrs = dict(row.fixed)
        for ge_name, name in renamed:
            value = dtype if name == "@" else given[name.strip("[]")]
            plain(value)
            value = words[ge_name][value] if ge_name in words else value
            attrs[ge_name] = [value] if name.startswith("[") else value
        return attrs

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = bound(schema(), args, kwargs) | _UNFED
        attrs = attributes(given, getattr(meta_outputs, "dtype", None))
        made = builder(op_type)(*(given[name] for name, _, _ in ports()), **attrs)
        return wanted(made, meta_outputs) if isinstance(meta_outputs, list) else made

    def promoting(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Any:
        given, result = bound(schema(), args, kwargs) | _UNFED, meta_outputs.dtype
        values = []
        for name, marked, dtype in ports():
            if name.startswith("~"):
                values.append(scale(result, given[name[1:]]))
            elif dtype or (row.promoted and not marked):
                wished = DataType[f"DT_{dtype}"] if dtype else result
                values.append(promote(wished, given[name]))
            else:
                values.append(given[name])
        made = builder(op_type)(*values, **attributes(given, result))
        return cast_result(made, result) if row.recast else made

    casts = row.promoted or row.recast or any(mark in row.inputs for mark in ":~")
    return promoting if casts else convert


def _parted(attrs: str) -> list[tuple[str, str, str]]:
    return [text.partition("=") for text in attrs.split()]


def bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those left out have their default, None without one."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    for a in schema.arguments:
        given.setdefault(a.name, a.default_value if a.has_default_value() else None)
    return given
