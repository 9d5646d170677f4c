"""CANN's binary data dumps: one file for each run of an operator, with its tensors.

A file is eight bytes of length (little-endian), a protobuf message `DumpData` of that length, then
the elements of all inputs and of all outputs, in order. The few fields that matter are read and
written here by hand: numbers of fields are those of `dump_data.proto` in CANN's runtime.
"""

from __future__ import annotations

import csv
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchair.errors import SerializationError
from torchair.ge.dtypes import DataType, Format, dtype_name, ge_to_torch, torch_to_ge
from torchair.serde.codec import tensor_bytes
from torchair.store import FilePath, atomic_write

# ---- the wire format of protobuf: varints and pieces with a length

_VARINT, _FIXED64, _PIECE, _FIXED32 = 0, 1, 2, 5
_LARGEST = 2**64 - 1
Field = tuple[int, "int | bytes"]
"""Number of a field, and its number or its bytes."""


def varint(number: int) -> bytes:
    """A number from 0 on, seven bits a byte, the lowest first."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def message(fields: Iterable[Field]) -> bytes:
    """A message of fields in this order."""
    made = bytearray()
    for number, content in fields:
        if isinstance(content, bytes):
            made += varint(number << 3 | _PIECE) + varint(len(content)) + content
        else:
            made += varint(number << 3 | _VARINT) + varint(content)
    return bytes(made)


def fields_of(data: bytes) -> Iterator[Field]:
    """The fields of a message, unknown ones included; ValueError where it is none."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            content, at = _read_varint(data, at)
            yield number, content
            continue
        if kind == _PIECE:
            size, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"field {number} has the wire type {kind}")
        if at + size > len(data):
            raise ValueError(f"field {number} ends after the message")
        yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("the message ends inside of a number")
        byte = data[at]
        number, at = number | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return number & _LARGEST, at
    raise ValueError("a number has more than 64 bits")


# ---- `DumpData`

# The data types of a dump have numbers of their own: the place in this list.
_TYPES = (
    "UNDEFINED", "FLOAT", "FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "INT32", "INT64", "UINT32",
    "UINT64", "BOOL", "DOUBLE", "STRING", "DUAL_SUB_INT8", "DUAL_SUB_UINT8", "COMPLEX64",
    "COMPLEX128", "QINT8", "QINT16", "QINT32", "QUINT8", "QUINT16", "RESOURCE", "STRING_REF",
    "DUAL", "VARIANT", "BF16", "INT4", "UINT1", "INT2", "UINT2", "COMPLEX32", "HIFLOAT8",
    "FLOAT8_E5M2", "FLOAT8_E4M3FN", "FLOAT8_E8M0", "FLOAT6_E3M2", "FLOAT6_E2M3", "FLOAT4_E2M1",
    "FLOAT4_E1M2",
)  # fmt: skip
_ELEMENTS = frozenset(
    DataType[f"DT_{name}"]
    for name in (
        "FLOAT",
        "FLOAT16",
        "BF16",
        "DOUBLE",
        "BOOL",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "COMPLEX32",
        "COMPLEX64",
        "COMPLEX128",
        "FLOAT8_E5M2",
        "FLOAT8_E4M3FN",
        "FLOAT8_E8M0",
    )
)
"""Types whose elements are whole bytes with a meaning in torch."""
_BLOCKED = frozenset(
    f.value
    for f in (
        Format.FORMAT_FRACTAL_Z,
        Format.FORMAT_NC1HWC0_C04,
        Format.FORMAT_NDC1HWC0,
        Format.FORMAT_FRACTAL_Z_3D,
        Format.FORMAT_FRACTAL_NZ_C0_16,
        Format.FORMAT_FRACTAL_NZ_C0_2,
        Format.FORMAT_FRACTAL_NZ_C0_4,
        Format.FORMAT_FRACTAL_NZ_C0_8,
    )
)
"""Formats with dims in blocks that are not put together here."""

# Fields of a tensor on each side: those of `OpInput` and of `OpOutput`.
_DTYPE, _FORMAT, _SHAPE = 1, 2, 3
_INPUT = {"data": 4, "size": 5, "original_shape": 6}
_OUTPUT = {"data": 5, "size": 6, "original_shape": 7}
_ORIGINAL_OP = 4  # of an output
_MOST_ELEMENTS = 2**48  # of a dim: more is no dump
_VERSION, _TIME, _OUTPUTS, _INPUTS, _NAME = 1, 2, 3, 4, 6


@dataclass(frozen=True)
class CardTensor:
    """A tensor of a dump; None, with the reason, where its elements cannot be read here."""

    tensor: torch.Tensor | None
    unread: str = ""
    origin: tuple[str, int] | None = None  # node before fusion, and which of its outputs


@dataclass(frozen=True)
class OperatorDump:
    """What one file says."""

    name: str  # of the node; empty in files of old versions
    inputs: Sequence[CardTensor] = ()
    outputs: Sequence[CardTensor] = ()
    time: int = 0


def to_bytes(dump: OperatorDump) -> bytes:
    """The content of a file. Tensors are written in the format ND."""
    sides = ((_OUTPUTS, _OUTPUT, dump.outputs), (_INPUTS, _INPUT, dump.inputs))
    described: list[Field] = [(_VERSION, b"1.0"), (_TIME, dump.time)]
    described += [(n, _described(one, names)) for n, names, side in sides for one in side]
    header = message([*described, (_NAME, dump.name.encode())])
    elements = [tensor_bytes(_present(one)) for one in (*dump.inputs, *dump.outputs)]
    return b"".join([struct.pack("<Q", len(header)), header, *elements])


def _present(one: CardTensor) -> torch.Tensor:
    if one.tensor is None:
        raise SerializationError(f"a tensor that was not read cannot be written: {one.unread}")
    return one.tensor


def _described(one: CardTensor, names: Mapping[str, int]) -> bytes:
    tensor = _present(one)
    code = _TYPES.index(dtype_name(torch_to_ge(tensor.dtype)).removeprefix("DT_"))
    dims = message([(1, b"".join(map(varint, tensor.shape)))])
    fields: list[Field] = [(_DTYPE, code), (_FORMAT, Format.FORMAT_ND.value), (_SHAPE, dims)]
    if one.origin is not None:
        name, index = one.origin
        fields.append((_ORIGINAL_OP, message([(1, name.encode()), (2, index)])))
    return message([*fields, (names["size"], tensor.nbytes), (names["original_shape"], dims)])


def from_bytes(data: bytes, file: FilePath | None = None) -> OperatorDump:
    """What a file says; SerializationError if it is no dump."""
    try:
        return _read(data)
    except (ValueError, struct.error) as error:
        raise SerializationError(f"this is no dump of an operator: {error}", file=file) from error


def _read(data: bytes) -> OperatorDump:
    (size,) = struct.unpack_from("<Q", data)
    at = 8 + size
    if at > len(data):
        raise ValueError(f"the header has {size} bytes, the file {len(data)}")
    header = list(fields_of(data[8:at]))
    read: dict[int, list[CardTensor]] = {_INPUTS: [], _OUTPUTS: []}
    for side, names in ((_INPUTS, _INPUT), (_OUTPUTS, _OUTPUT)):
        for one in (_bytes(content) for number, content in header if number == side):
            tensor = _TensorDescription.of(one, names)
            elements = tensor.inside or data[at : at + tensor.size]
            at += 0 if tensor.inside else tensor.size
            if at > len(data):
                raise ValueError(f"the file ends {at - len(data)} bytes before its tensors")
            read[side].append(tensor.read(elements, with_origin=side == _OUTPUTS))
    last = dict(header)
    time = last.get(_TIME, 0)
    name = _bytes(last.get(_NAME, b"")).decode()
    return OperatorDump(name, read[_INPUTS], read[_OUTPUTS], time if isinstance(time, int) else 0)


def _bytes(content: int | bytes) -> bytes:
    if isinstance(content, int):
        raise ValueError(f"{content} where a message should be")
    return content


@dataclass
class _TensorDescription:
    """What the header says of one tensor."""

    dtype: int = 0
    format: int = 0
    dims: list[int] = field(default_factory=list)
    original_dims: list[int] = field(default_factory=list)
    size: int = 0
    inside: bytes = b""  # elements that are in the message
    original: bytes = b""

    @classmethod
    def of(cls, data: bytes, names: Mapping[str, int]) -> _TensorDescription:
        """That of one `OpInput` or `OpOutput`."""
        found = cls()
        for number, content in fields_of(data):
            if number == _DTYPE and isinstance(content, int):
                found.dtype = content
            elif number == _FORMAT and isinstance(content, int):
                found.format = content
            elif number == _SHAPE:
                found.dims = _dims(_bytes(content))
            elif number == names["original_shape"]:
                found.original_dims = _dims(_bytes(content))
            elif number == names["size"] and isinstance(content, int):
                found.size = content
            elif number == names["data"]:
                found.inside = _bytes(content)
            elif number == _ORIGINAL_OP:
                found.original = _bytes(content)
        return found

    def read(self, elements: bytes, with_origin: bool) -> CardTensor:
        """The tensor in the order of its dims before the card's formats."""
        origin = _origin(self.original) if with_origin else None
        known = self.dtype < len(_TYPES)
        code = DataType[f"DT_{_TYPES[self.dtype]}"] if known else DataType.DT_UNDEFINED
        if code not in _ELEMENTS:
            name = _TYPES[self.dtype] if known else str(self.dtype)
            return CardTensor(None, f"elements of the type {name} are not read", origin)
        dtype, count = ge_to_torch(code), math.prod(self.dims)
        if len(elements) < count * dtype.itemsize:
            text = f"{len(elements)} bytes for the dims {self.dims} of {dtype}"
            return CardTensor(None, text, origin)
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(bytearray(elements), dtype=dtype, count=count)
        tensor = self._unblocked(flat.reshape(self.dims))
        if tensor is None:
            return CardTensor(None, f"the format {self.format} is not read", origin)
        return CardTensor(tensor.contiguous(), "", origin)

    def _unblocked(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor with the dims that the graph has; None in formats that are not known here."""
        dims = self.original_dims
        if self.format == Format.FORMAT_FRACTAL_NZ.value and len(dims) == tensor.dim() - 2 >= 2:
            whole = tensor.movedim(-4, -2).flatten(-4, -3).flatten(-2, -1)
            return whole[..., : dims[-2], : dims[-1]]
        if self.format == Format.FORMAT_NC1HWC0.value and tensor.dim() == 5 and len(dims) == 4:
            return tensor.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, : dims[1]]
        if self.format in (Format.FORMAT_FRACTAL_NZ.value, Format.FORMAT_NC1HWC0.value, *_BLOCKED):
            return None
        if self.format == Format.FORMAT_NHWC.value and tensor.dim() == 4:
            turned = tensor.permute(0, 3, 1, 2)
            return turned if list(turned.shape) == dims != self.dims else tensor
        return tensor


def _dims(data: bytes) -> list[int]:
    """The dims of a `Shape`, packed or one by one."""
    dims: list[int] = []
    for number, content in fields_of(data):
        if number != 1:
            continue
        if isinstance(content, int):
            dims.append(content)
            continue
        at = 0
        while at < len(content):
            dim, at = _read_varint(content, at)
            dims.append(dim)
    if any(dim > _MOST_ELEMENTS for dim in dims):
        raise ValueError(f"{dims} are not dims")
    return dims


def _origin(data: bytes) -> tuple[str, int] | None:
    fields = dict(fields_of(data))
    name, index = _bytes(fields.get(1, b"")).decode(), fields.get(2, 0)
    return (name, index) if name and isinstance(index, int) else None


# ---- folders of such files

_FILE = re.compile(r"^(?P<type>[\w-]+)\.(?P<name>[\w-]+)\.(?P<task>\d+)\.(?P<stream>\d+)\.\d+$")
_REPLACED = re.compile(r"[./\\ ]")
_LONG_NAMES = "mapping.csv"


def file_part(name: str) -> str:
    """A type or name as it is in the name of a file."""
    return _REPLACED.sub("_", name)


def write(
    folder: FilePath, op_type: str, dump: OperatorDump, task: int = 0, stream: int = 0
) -> Path:
    """Write a file under the name that CANN gives it."""
    name = f"{file_part(op_type)}.{file_part(dump.name)}.{task}.{stream}.{dump.time}"
    return atomic_write(Path(folder, name), to_bytes(dump))


def files_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files of a folder and of those in it that are dumps of operators, and the node in the name of
    each. Long names are looked up in a `mapping.csv` beside the file."""
    names: dict[Path, dict[str, str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.parent not in names:
            names[path.parent] = _long_names(path.parent / _LONG_NAMES)
        match = _FILE.match(names[path.parent].get(path.name, path.name))
        if match is not None:
            yield path, match["name"]


def _long_names(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}


def read(path: Path) -> OperatorDump:
    """What a file says; SerializationError if it is no dump."""
    return from_bytes(path.read_bytes(), path)
