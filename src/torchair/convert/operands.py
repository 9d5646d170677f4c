"""What converters share: operands in other types, sizes as values, and tables of torch operators
that are one GE operator each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, DataType
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

    `inputs` are arguments of the schema in the order of GE's ports, all tensors if none are named.
    `attrs` are those that become attributes: `ge=torch` where names differ, `ge=[torch]` where GE
    has a list of one. `words` has the words for what torch numbers.
    """

    type: str
    inputs: str = ""
    attrs: str = ""
    promoted: bool = False  # inputs are cast to the type of the result
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)


def direct(table: Mapping[Any, Direct | str]) -> None:
    """Register rows, or just types, for torch operators."""
    for target, row in table.items():
        row = Direct(row) if isinstance(row, str) else row
        builtin(target, depth=2)(_converter(target, row))


def _converter(target: Any, row: Direct) -> Callable[..., Any]:
    op_type, words = row.type, row.words
    renamed = [(ge_name, name or ge_name) for ge_name, _, name in _parted(row.attrs)]

    @cache
    def schema() -> Any:
        found = resolve_name(f"torch:ops.{target}") if isinstance(target, str) else target
        return found._schema

    def arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        given, attrs = bound(schema(), args, kwargs), {}
        for ge_name, name in renamed:
            value = given[name.strip("[]")]
            plain(value)
            value = words[ge_name][value] if ge_name in words else value
            attrs[ge_name] = [value] if name.startswith("[") else value
        tensors = (a.name for a in schema().arguments if "Tensor" in str(a.type))
        return [given[name] for name in row.inputs.split() or tensors], attrs

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        values, attrs = arguments(args, kwargs)
        made = builder(op_type)(*values, **attrs)
        return wanted(made, meta_outputs) if isinstance(meta_outputs, list) else made

    def promoting(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Any:
        values, attrs = arguments(args, kwargs)
        return builder(op_type)(*(promote(meta_outputs.dtype, v) for v in values), **attrs)

    return promoting if row.promoted else convert


def _parted(attrs: str) -> list[tuple[str, str, str]]:
    return [text.partition("=") for text in attrs.split()]


def bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those left out have their default, None without one."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    for a in schema.arguments:
        given.setdefault(a.name, a.default_value if a.has_default_value() else None)
    return given
