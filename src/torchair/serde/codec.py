"""Attributes, data types, dims and tensor payloads between the IR and wire messages.

Symbolic dims are text there, which is read by a parser that knows integer arithmetic only.
"""

from __future__ import annotations

import ast
import ctypes
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from torchair.errors import SerializationError
from torchair.ge.attrs import Attr
from torchair.ge.dtypes import DataType, dtype_name, ge_to_torch, torch_to_ge
from torchair.ge.shapes import Dim, Shape, Sym, symbol
from torchair.serde import ge_ir
from torchair.torch_private import symbols

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2)  # bytes alone say too little
MAX_BYTES = 2**31 - 1  # protobuf's own limit

_SINGLES = {"i": "Int", "f": "Float", "b": "Bool", "dt": "DataType", "s": "Str", "bt": "Bytes"}
_LISTS = {field: f"List{kind}" for field, kind in _SINGLES.items() if field != "bt"}
_FIELDS = {kind: field for field, kind in _SINGLES.items()}
_LIST_FIELDS = {kind: field for field, kind in _LISTS.items()}
# val_type by member; a list of strings leaves it 0, and readers accept 1 too.
_VAL_TYPES = {"i": 2, "f": 3, "b": 4, "dt": 10}
_MEMBER_OF_VAL_TYPE = {number: member for member, number in _VAL_TYPES.items()} | {1: "s"}


@cache
def _wire_by_ge() -> dict[int, int]:
    wire = ge_ir.dtype_numbers()
    return {code: wire[code.name] for code in DataType if code.name in wire}


@cache
def _ge_by_wire() -> dict[int, int]:
    return {number: code for code, number in _wire_by_ge().items()}


def wire_dtype(code: int) -> int:
    """Wire number of a GE data type."""
    try:
        return _wire_by_ge()[code]
    except KeyError:
        raise SerializationError(f"{dtype_name(code)} has no number in files") from None


def ge_dtype(number: int) -> int:
    """GE number of a data type read from a file."""
    try:
        return _ge_by_wire()[number]
    except KeyError:
        raise SerializationError(f"{number} is not a known data type number") from None


def write_attrs(target: Any, attrs: Mapping[str, Attr]) -> None:
    """Fill a `map<string, AttrDef>`."""
    for name, attr in attrs.items():
        write_attr(target[name], attr)


def write_attr(target: Any, attr: Attr) -> None:
    """Fill one AttrDef."""
    if attr.kind == "Tensor":
        write_tensor(target.t, attr.value, torch_to_ge(attr.value.dtype))
    elif attr.kind.startswith("ListList"):
        _write_rows(target, attr)
    elif attr.kind in _LIST_FIELDS:
        member = _LIST_FIELDS[attr.kind]
        target.list.val_type = _VAL_TYPES.get(member, 0)
        getattr(target.list, member).extend(_plain(v) for v in attr.value)
        target.list.SetInParent()
    else:
        setattr(target, _FIELDS[attr.kind], _plain(attr.value))


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _write_rows(target: Any, attr: Attr) -> None:
    short = attr.kind[8:9].lower()
    rows = getattr(target, f"list_list_{attr.kind[8:].lower()}")
    rows.SetInParent()
    for row in attr.value:
        getattr(getattr(rows, f"list_list_{short}").add(), f"list_{short}").extend(row)


def read_attrs(source: Any) -> dict[str, Attr]:
    """Attributes of a `map<string, AttrDef>`, by name in alphabetical order."""
    found = {}
    for name in sorted(source):
        try:
            attr = read_attr(source[name])
        except SerializationError as error:
            raise SerializationError(f"attribute {name!r}: {error}") from error
        if attr is not None:
            found[name] = attr
    return found


def read_attr(source: Any) -> Attr | None:
    """One attribute; None for bookkeeping that means nothing once the file is read."""
    member = source.WhichOneof("value")
    if member == "list":
        return _read_list(source.list)
    if member == "t":
        return Attr("Tensor", read_tensor(source.t))
    if member in ("list_list_int", "list_list_float"):
        return _read_rows(source, member)
    if member not in _SINGLES:
        raise SerializationError(f"holds {member or 'nothing'}, which is not read")
    return Attr(_SINGLES[member], _python(member, getattr(source, member)))


def _read_list(source: Any) -> Attr | None:
    filled = [field.name for field, _ in source.ListFields() if field.name != "val_type"]
    if source.val_type == 0 and set(filled) == {"i", "s"}:
        return None  # layouts by desc index: the descs themselves hold them already
    if source.val_type == 0 and len(filled) <= 1:
        member = filled[0] if filled else "s"
    else:
        member = _MEMBER_OF_VAL_TYPE.get(source.val_type, "")
    if member not in _LISTS:
        raise SerializationError(f"holds a list of type {source.val_type}, which is not read")
    return Attr(_LISTS[member], [_python(member, v) for v in getattr(source, member)])


def _read_rows(source: Any, member: str) -> Attr:
    kind = member.removeprefix("list_list_")
    rows = getattr(getattr(source, member), f"list_list_{kind[0]}")
    values = [[_python(kind[0], v) for v in getattr(row, f"list_{kind[0]}")] for row in rows]
    return Attr(f"ListList{kind.title()}", values)


def _python(member: str, value: Any) -> Any:
    if member == "f":
        return shortest_float(value)
    if member != "s":
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise SerializationError(f"holds {value[:40]!r}, which is not UTF-8 text") from error


def shortest_float(value: float) -> float:
    """The shortest number that is this single precision number: 1e-05, not 9.99999975e-06."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if ctypes.c_float(short).value == value:
            return short
    return value


def write_tensor(
    target: Any, tensor: torch.Tensor, code: int, layout: str = "ND", payload: bool = True
) -> None:
    """Fill a TensorDef: description and, with `payload`, raw elements."""
    target.desc.dtype = wire_dtype(code)
    target.desc.layout = layout
    target.desc.shape.SetInParent()
    target.desc.shape.dim.extend(tensor.shape)
    if payload:
        target.data = tensor_bytes(tensor)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order as they lie in memory."""
    return bytes(tensor_memory(tensor))


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The same without a copy, where the tensor is contiguous and on the host."""
    if tensor.device.type == "meta" or tensor.is_quantized or tensor.layout != torch.strided:
        raise SerializationError(f"a {tensor.dtype} tensor on {tensor.device} has no plain bytes")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not flat.nbytes:
        return memoryview(b"")
    row = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride
    return memoryview(row.view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensor(source: Any, data: memoryview | None = None) -> torch.Tensor:
    """The tensor of a TensorDef; over `data` in place of its own bytes, as long as kernels can read
    them there."""
    given = source.data if data is None else data
    return read_elements(list(source.desc.shape.dim), ge_dtype(source.desc.dtype), given)


def read_elements(dims: list[int], code: int, data: bytes | memoryview) -> torch.Tensor:
    """A tensor of these bytes: a copy of `bytes`, while other memory stays where it is."""
    try:
        dtype = ge_to_torch(code)
    except RuntimeError as error:
        raise SerializationError(f"holds a tensor of {dtype_name(code)}: {error}") from error
    if dtype in _QUANTISED:
        raise SerializationError(f"holds a quantised tensor ({dtype}), which is not read")
    if any(d < 0 for d in dims) or math.prod(dims) * dtype.itemsize != len(data):
        raise SerializationError(
            f"holds {len(data)} bytes for a {dtype_name(code)} tensor of dims {dims}"
        )
    try:
        if not len(data):
            return torch.empty(dims, dtype=dtype)
        own = bytearray(data) if isinstance(data, bytes) else data
        memory = torch.frombuffer(own, dtype=torch.uint8)
        if memory.data_ptr() % max(dtype.itemsize, 16):  # it begins at an odd place
            memory = memory.clone()
        return memory.view(dtype).reshape(dims)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise SerializationError(f"holds a {dtype} tensor of dims {dims}: {error}") from error


# ---- symbolic dims as text ----


_LONGEST = 4096
_HIGHEST_POWER = 64
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAND_IN = re.compile(r"\b_q(\d+)_\b")
_UNBACKED = re.compile(r"u\d+")  # torch's names of sizes that may be zero


def dims_text(shape: Sequence[Dim], stem: str) -> str:
    """Dims joined by commas, e.g. `s0,64,s0*2`.

    An expression beyond the parser below becomes a plain symbol named after `stem` and its place.
    """
    return ",".join(_dim_text(d, f"{stem}_d{i}") for i, d in enumerate(shape))


def _dim_text(dim: Dim, fallback: str) -> str:
    if isinstance(dim, int):
        return str(dim)
    text = _expr_text(dim.expr)
    return text if _survives(text) else _name_text(fallback)


def _expr_text(expr: Any) -> str:
    strange = sorted(s.name for s in expr.free_symbols if _name_text(s.name) != s.name)
    if not strange:
        return str(expr)
    import sympy

    renamed = {
        s: sympy.Symbol(f"_q{strange.index(s.name)}_", **s.assumptions0)
        for s in expr.free_symbols
        if s.name in strange
    }
    return _STAND_IN.sub(lambda m: repr(strange[int(m[1])]), str(expr.xreplace(renamed)))


def _name_text(name: str) -> str:
    plain = _PLAIN_NAME.fullmatch(name) and not keyword.iskeyword(name)
    return name if plain and not _STAND_IN.fullmatch(name) else repr(name)


@lru_cache(1024)
def _survives(text: str) -> bool:
    try:
        (dim,) = parse_dims(text)
    except SerializationError:
        return False
    return isinstance(dim, Sym) and _expr_text(dim.expr) == text


@lru_cache(1024)
def parse_dims(text: str) -> Shape:
    """The dims of a text written by `dims_text`; SerializationError for anything else."""
    if len(text) > _LONGEST:
        raise SerializationError(f"a shape text of {len(text)} characters is too long")
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
        assert isinstance(tree, ast.List), "more than a list of dims"
        return tuple(_dim(_evaluate(item)) for item in tree.elts)
    except SerializationError:
        raise
    except Exception as error:  # whatever ast or sympy object to, the text is no shape
        raise SerializationError(f"{text!r} is not a shape: {error}") from error


def _dim(value: Any) -> Dim:
    if isinstance(value, int):
        return value
    return int(value) if value.is_Integer else Sym(value)


def _evaluate(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Constant) and type(tree.value) is int and abs(tree.value) < 2**63:
        return tree.value
    if isinstance(tree, ast.Name):
        return _symbol(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return _symbol(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_evaluate(tree.operand)
    if isinstance(tree, ast.BinOp):
        if type(tree.op) not in _BINARY:
            raise SerializationError(f"a shape holds the operator {type(tree.op).__name__}")
        return _BINARY[type(tree.op)](_evaluate(tree.left), _evaluate(tree.right))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        return _call(tree.func.id, [_evaluate(a) for a in tree.args])
    raise SerializationError(f"a shape holds {type(tree).__name__}, not integer arithmetic")


def _symbol(name: str) -> Any:
    if not _UNBACKED.fullmatch(name):
        return symbol(name).expr
    import sympy

    return sympy.Symbol(name, integer=True)


def _power(a: Any, b: Any) -> Any:
    if not isinstance(b, int) or not 0 <= b <= _HIGHEST_POWER or isinstance(a, int):
        raise SerializationError(f"a shape holds the power {a}**{b}")
    return a**b


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: _power,
    ast.FloorDiv: lambda a, b: _call("FloorDiv", [a, b]),
    ast.Mod: lambda a, b: _call("PythonMod", [a, b]),
}  # fmt: skip


def _call(name: str, args: list[Any]) -> Any:
    import sympy

    if name not in ("FloorDiv", "Mod", "PythonMod", "Max", "Min"):
        raise SerializationError(f"a shape calls {name}: only FloorDiv, Mod, Max and Min are read")
    return getattr(symbols.functions, name)(*(sympy.sympify(a, strict=True) for a in args))
