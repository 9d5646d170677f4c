"""Which function turns which FX target into GE nodes: registration, and what converters share.

User registrations win over built-in ones, whichever was made first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from pkgutil import resolve_name
from typing import Any

import torch

from torchair import ge
from torchair.extensions import load
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, HALF_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Node, TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import is_static


class Decline(Exception):
    """Raised by a converter for arguments it does not cover; the generic node takes over."""


ASKED = frozenset({"meta_outputs", "meta_inputs", "meta_keywords", "views", "reads"})
"""What a converter gets if it has such a parameter: what tracing saw of the results, the fake
arguments with their strides, those given by name, the folder that makes pending views (which it
then takes as well), and the numbers of the results that somebody reads."""


@dataclass(frozen=True)
class Registration:
    """A registered converter."""

    fn: Callable[..., Any]
    wants: frozenset[str]  # parameters it has among `ASKED`
    by_user: bool
    file: str  # where it is registered, if it is our own, else where it is written
    line: int


_Overload = torch._ops.OpOverload
_user: dict[Any, Registration] = {}
_lite: set[Any] = set()  # operators whose converter of the user stays
_builtin: dict[Any, Registration] = {}


def entry_of(
    fn: Callable[..., Any], by_user: bool, place: tuple[str, int] | None = None
) -> Registration:
    """A converter with what its parameters ask for."""
    wants = ASKED & inspect.signature(fn).parameters.keys()
    code = getattr(fn, "__code__", None)
    file, line = place or ((code.co_filename, code.co_firstlineno) if code else ("", 0))
    return Registration(fn, wants, by_user, file, line)


class Converter:
    """Decorator that registers a converter for one operator when the function is defined."""

    compile_backend: Any = None  # with these two a script checks samples by itself
    result_checker: Any = None

    def __init__(self, aten_op: Any, is_lite: bool = False) -> None:
        """One that `is_lite` is not replaced by a later one that is not."""
        self._aten_op = aten_op
        self._is_lite_converter = is_lite
        self.samples: list[Any] = []  # calls that it is declared to support

    @property
    def _signature(self) -> inspect.Signature:
        """Parameters of the operator, under the name that the original has for them."""
        return inspect.signature(self._aten_op)

    @property
    def supported_cases(self) -> list[Any] | None:
        """The samples, None where none are declared."""
        return self.samples or None

    @supported_cases.setter
    def supported_cases(self, samples: list[Any]) -> None:
        self.samples = samples

    def __call__(self, converter: Callable[..., Any]) -> Converter:
        if self._aten_op in _lite and not self._is_lite_converter:
            return self
        if self._is_lite_converter:
            _lite.add(self._aten_op)
        _user[self._aten_op] = entry_of(converter, by_user=True)
        _show_on(self._aten_op)
        return self

    def check(self) -> list[str]:
        """Try the samples that were declared; what went wrong, none if all give torch's result."""
        found = (sample.check(self._aten_op) for sample in self.samples)
        return [problem for problem in found if problem is not None]


class RegisteredConverter:
    """Stands on an operator, as `_ge_converter`, for the converter that is registered for it.
    Another one put in its place is used instead."""

    is_registered = True

    def __init__(self, op: Any) -> None:
        self._op = op

    @property
    def _entry(self) -> Registration:
        entry = registered_for(self._op)
        assert entry is not None, f"{self._op} has no converter"
        return entry

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._entry.fn

    @property
    def require_meta(self) -> bool:
        """Whether it asks for what tracing saw of the results."""
        return "meta_outputs" in self._entry.wants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry.fn(*args, **kwargs)


def _show_on(target: Any) -> None:
    """Let a torch operator show its converter, unless somebody has put one there."""
    if isinstance(target, _Overload) and not hasattr(target, "_ge_converter"):
        setattr(target, "_ge_converter", RegisteredConverter(target))  # noqa: B010


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a converter from a torch operator to GE nodes; a later registration overrides.

    The function gets the operator's arguments with tensors replaced by `ge.Tensor`, and the
    expected results as `meta_outputs` if it has such a parameter. `None` drops the function.
    """
    if aten_op is None:
        return lambda converter: None
    return Converter(aten_op)


def unregister(aten_op: Any) -> None:
    """Forget a user registration; the built-in converter, if any, is back."""
    _user.pop(aten_op, None)
    _lite.discard(aten_op)
    shown = getattr(aten_op, "__dict__", {}).get("_ge_converter")
    if isinstance(shown, RegisteredConverter) and registered_for(aten_op) is None:
        del aten_op._ge_converter


def builtin(
    *targets: Any, depth: int = 1, filled: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a converter of our own for one or more FX targets; None targets are ignored. It gets
    those arguments of a torch operator that it has parameters for, by name, with torch's defaults;
    for `**` the others too, if they are given or all are `filled`. An operator of a library that
    may be loaded later is given by its name. `depth` says how many calls up its file is."""
    caller = sys._getframe(depth)
    place = (caller.f_code.co_filename, caller.f_lineno)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in dict.fromkeys(targets):
            if target is not None:
                assert target not in _builtin, f"two converters for {target}"
                _builtin[target] = entry_of(_by_parameters(fn, target, filled), False, place)
                _show_on(target)
        return fn

    return register


def _by_parameters(fn: Callable[..., Any], target: Any, filled: bool) -> Callable[..., Any]:
    """A function of all arguments of a torch operator from one that names those it needs."""
    parameters = inspect.signature(fn).parameters
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or not isinstance(target, (str, _Overload)):
        return fn
    others = inspect.Parameter.VAR_KEYWORD in kinds
    needed = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}

    @wraps(fn)
    def convert(*args: Any, **kwargs: Any) -> Any:
        known = bound(_schema(target), args, kwargs, None if filled else needed)
        return fn(**{n: v for n, v in known.items() if others or n in parameters})

    return convert


def find(target: Any) -> Registration | None:
    """The converter of an FX target. One that somebody has put on the operator itself, as
    `_ge_converter`, wins over all that are registered."""
    put = getattr(target, "__dict__", {}).get("_ge_converter")
    if put is not None and not getattr(put, "is_registered", False):
        return entry_of(put, by_user=True)
    return registered_for(target)


def registered_for(target: Any) -> Registration | None:
    """The converter that is registered for an FX target."""
    return _user.get(target) or _builtin_for(target)


_EXTENDED = ("air", "atb", "npu")
"""Libraries of torch that an extension has converters for."""


def _builtin_for(target: Any) -> Registration | None:
    found = _builtin.get(target) or _builtin.get(str(target))
    if found is None and str(target).partition(".")[0] in _EXTENDED:
        load("converters")
        found = _builtin.get(str(target))
    return found


def registered() -> dict[Any, Registration]:
    """All converters, user ones on top, with those of extensions."""
    load("converters")
    return _builtin | _user


# ---- what converters share: operands in other types ----

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
    the result, `None` an unfed port, `1` and `[0]` are what they are. `attrs` are those that become
    attributes: `ge=torch` where names differ, `ge=[torch]` where GE has a list of one, `ge=@` the
    type of the result. `words` has the words for what torch numbers, `fixed` the attributes that
    are always the same.
    """

    type: str
    inputs: str = ""
    attrs: str = ""
    promoted: bool = False  # inputs are cast to the type of the result
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    recast: bool = False  # a Cast of the result, whatever its type is
    fixed: Mapping[str, Any] = field(default_factory=dict)
    alike: bool = False  # inputs of different types are declined


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


@cache
def _schema(target: Any) -> Any:
    return (resolve_name(f"torch:ops.{target}") if isinstance(target, str) else target)._schema


_LITERALS = {"None": None, "1": 1, "[0]": [0]}


def _converter(target: Any, row: Direct) -> Callable[..., Any]:
    op_type, words, scale = row.type, row.words, factor if "~" in row.inputs else promote
    parted = [text.partition("=") for text in row.attrs.split()]
    renamed = [(ge_name, name or ge_name) for ge_name, _, name in parted]

    @cache
    def ports() -> list[tuple[str, str, str]]:
        given, every = _schema(target).arguments, row.inputs == "*"
        names = [a.name for a in given if every or "Tensor" in str(a.type)]
        return [n.partition(":") for n in (not every and row.inputs.split()) or names]

    def attributes(given: dict[str, Any], dtype: Any) -> dict[str, Any]:
        attrs = dict(row.fixed)
        for ge_name, name in renamed:
            value = dtype if name == "@" else given[name.strip("[]")]
            plain(value)
            value = words[ge_name][value] if ge_name in words else value
            attrs[ge_name] = [value] if name.startswith("[") else value
        return attrs

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = bound(_schema(target), args, kwargs) | _LITERALS
        attrs = attributes(given, getattr(meta_outputs, "dtype", None))
        inputs = [given[name] for name, _, _ in ports()]
        if row.alike:
            alike(*inputs)
        made = builder(op_type)(*inputs, **attrs)
        return wanted(made, meta_outputs) if isinstance(meta_outputs, list) else made

    def promoting(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Any:
        given, result = bound(_schema(target), args, kwargs) | _LITERALS, meta_outputs.dtype
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
        return cast_result(made, result) if row.recast else promote(result, made)

    casts = row.promoted or row.recast or any(mark in row.inputs for mark in ":~")
    return promoting if casts else convert


def bound(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], needed: set[str] | None = None
) -> dict[str, Any]:
    """The arguments of a call by name; those left out have their default, None without one, if they
    are among the `needed`."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False))
    wished = [a for a in schema.arguments if needed is None or a.name in needed]
    return {a.name: a.default_value for a in wished} | given | dict(kwargs)
