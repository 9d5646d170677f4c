"""Model files with their weights in place: written without a copy, read by mapping the file.

The bytes are a `ModelDef` as protobuf knows it. Payloads of constants begin at multiples of 64, for
which a padding attribute goes before them; so a mapped file holds tensors that kernels can read.
The last field, which other readers do not know, is a checksum of all but large payloads. A package
for many machines has two fields before it: machine code, and a checksum by a key.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchair.errors import SerializationError
from torchair.ge.graph import Graph, Infer
from torchair.serde import ge_ir
from torchair.serde.codec import MAX_BYTES, read_tensor, tensor_memory
from torchair.serde.proto import PADDING, not_a_model, parsed, read_graph_def, to_message, too_big
from torchair.store import FilePath, atomic_write

ALIGNED = 64
_SMALL = 4096  # payloads from here on are left where they are
_LENGTH = 2  # wire type of texts, bytes and messages
_WIDTHS = {1: 8, 5: 4}  # of fixed-width fields, by wire type
# Field numbers on the way to the payload of a constant.
_GRAPH, _OP, _ATTR, _KEY, _VALUE, _TENSOR, _DESC, _DATA = 7, 6, 10, 1, 2, 12, 1, 2
_DIGEST = 32  # bytes of the checksum
_MARK = b"\xc2\x3e" + bytes([_DIGEST])  # field 1000, and its length
_CODE = 1001  # field with machine code for many processors, which other readers do not know
_SIGNED = 1002  # field with a keyed checksum of everything before it


# ---- writing ----


def write_air(graph: Graph, path: FilePath) -> Path:
    """Write a model file whole or not at all; SerializationError beyond 2 GiB."""
    parts = _model(graph)
    size = sum(len(p) for p in parts)
    if size > MAX_BYTES:
        raise too_big(graph, size)
    return atomic_write(path, parts)


def _model(graph: Graph) -> list[bytes | memoryview]:
    """The bytes of the model in pieces, payloads as they lie in memory."""
    message = to_message(graph, payloads=False)
    header = _header(message, graph).SerializeToString(deterministic=True)
    at = 1 + 5 + len(header)
    parts: list[bytes | memoryview] = [header]
    for op in message.op:
        pieces = _op(op, graph, at)
        parts += pieces
        at += sum(len(p) for p in pieces)
    whole = [_tag(_GRAPH), _wide(at - 6), *parts]
    made = _checksum(p for p in whole if isinstance(p, bytes) or len(p) < _SMALL)
    return [*whole, _MARK, made]


def add_code(source: FilePath, path: FilePath, code: bytes, key: bytes | None = None) -> Path:
    """Write a model file that `write_air` has written again, with machine code that `read_code`
    gives, and signed by a key."""
    memory = mapped(source)
    end = _end(memory)
    _, payloads = _without_payloads(memory)
    checked = _without(memory, payloads.values(), len(memory) if end is None else end)
    whole: list[bytes | memoryview] = [memory if end is None else memory[:end]]
    added = [_field(_CODE, code)]
    if key is not None:
        added.append(_field(_SIGNED, _checksum([*whole, *added], key)))
    if len(memory) + sum(map(len, added)) > MAX_BYTES:
        raise SerializationError("model and code together exceed 2 GiB", file=path)
    return atomic_write(path, [*whole, *added, _MARK, _checksum([*checked, *added])])


def _checksum(pieces: Iterable[bytes | memoryview], key: bytes = b"") -> bytes:
    made = hashlib.blake2b(key=key, digest_size=_DIGEST)
    for piece in pieces:
        made.update(piece)
    return made.digest()


def _header(message: Any, graph: Graph) -> Any:
    """What a graph says beside its operators; lists of inputs and results as GE fills them in."""
    header = ge_ir.message("GraphDef")()
    header.name = message.name
    header.input.extend(f"{n.name}:0" for n in graph.data)
    header.output.extend(v.edge for v in (graph.output.values() if graph.output else ()))
    for name in message.attr:
        header.attr[name].CopyFrom(message.attr[name])
    return header


def _op(op: Any, graph: Graph, at: int) -> list[bytes | memoryview]:
    """One operator of the graph that begins `at` that byte of the file."""
    value = graph.node(op.name).attrs.get("value")
    if value is None or not isinstance(value.value, torch.Tensor):
        body = op.SerializeToString(deterministic=True)
        return [_tag(_OP), _wide(len(body)), body]
    memory = tensor_memory(value.value)
    inner = _field(_DESC, op.attr["value"].t.desc.SerializeToString(deterministic=True))
    inner += _tag(_DATA) + _wide(len(memory))
    attr = _tag(_TENSOR) + _wide(len(inner) + len(memory)) + inner
    entry = _field(_KEY, b"value") + _tag(_VALUE) + _wide(len(attr) + len(memory)) + attr
    del op.attr["value"]
    for padding in range(ALIGNED + 1):
        op.attr[PADDING].bt = bytes(padding)
        body = op.SerializeToString(deterministic=True)
        body += _tag(_ATTR) + _wide(len(entry) + len(memory)) + entry
        if (at + 6 + len(body)) % ALIGNED == 0:
            break
    return [_tag(_OP), _wide(len(body) + len(memory)), body, memory]


def _tag(number: int) -> bytes:
    tag = number << 3 | _LENGTH
    return bytes([tag]) if tag < 0x80 else bytes([tag & 0x7F | 0x80, tag >> 7])


def _wide(length: int) -> bytes:
    """A length in five bytes, whatever it is, so that places are known before lengths."""
    low = (length >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21))
    return bytes([*low, length >> 28])


def _field(number: int, content: bytes) -> bytes:
    return _tag(number) + _wide(len(content)) + content


# ---- reading ----


_Payload = tuple[slice, slice]
"""Where a constant that stays in the file is: its description, its elements."""


def read_air(path: FilePath, infer: Infer | None = None) -> Graph:
    """The graph of a model file. Large constants are tensors over the mapped file; writing to one
    does not change the file. SerializationError for everything that is wrong with the file."""
    memory = mapped(path)
    try:
        slim, payloads = _without_payloads(memory)
    except SerializationError as error:
        raise not_a_model(path, len(memory), error) from error
    message = parsed(slim, len(memory), path)
    _check(memory, payloads.values(), path)
    kept = {k: _tensor(memory, p, path) for k, p in payloads.items()}
    return read_graph_def(message, infer, path, kept)


def read_code(path: FilePath) -> memoryview | None:
    """The machine code in a model file, None where there is none; the file was read before."""
    memory = mapped(path)
    if _end(memory) is None:  # nothing tells whether it is damaged
        return None
    fields = _fields(memory, slice(0, len(memory)))
    return next((memory[inner] for n, _, inner in fields if n == _CODE and inner), None)


def is_signed(path: FilePath, key: bytes) -> bool:
    """Whether all of a file was written with this key, and has not changed."""
    memory = mapped(path)
    for number, whole, inner in _fields(memory, slice(0, len(memory))):
        if number == _SIGNED and inner is not None and whole.stop == _end(memory):
            return hmac.compare_digest(_checksum([memory[: whole.start]], key), memory[inner])
    return False


def mapped(path: FilePath) -> memoryview:
    """The bytes of a file, as they are needed; writing to them does not change the file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as error:
        raise SerializationError(f"cannot read the file: {error.strerror}", file=path) from error
    return memoryview(found)


def _check(memory: memoryview, payloads: Iterable[_Payload], path: Any) -> None:
    """Compare the checksum, if the file has one: all but large payloads is what it was."""
    end = _end(memory)
    if end is None:
        return
    if _checksum(_without(memory, payloads, end)) != memory[end + len(_MARK) :]:
        raise SerializationError(
            "the file is damaged: its checksum is another one",
            file=path,
            hint="export the model again, or copy the file again",
        )


def _end(memory: memoryview) -> int | None:
    """Where the checksum begins, None where there is none."""
    end = len(memory) - _DIGEST - len(_MARK)
    return end if end >= 0 and memory[end : end + len(_MARK)] == _MARK else None


def _without(memory: memoryview, payloads: Iterable[_Payload], end: int) -> list[memoryview]:
    """The pieces between large payloads."""
    pieces, at = [], 0
    for span in sorted((data for _, data in payloads), key=lambda s: s.start):
        pieces.append(memory[at : span.start])
        at = span.stop
    return [*pieces, memory[at:end]]


def _tensor(memory: memoryview, payload: _Payload, path: Any) -> torch.Tensor:
    source = ge_ir.message("TensorDef")()
    desc, data = payload
    try:
        source.desc.ParseFromString(bytes(memory[desc]))
    except Exception as error:  # as above
        raise not_a_model(path, len(memory), error) from error
    try:
        return read_tensor(source, memory[data])
    except SerializationError as error:
        raise SerializationError(str(error), file=path) from error


def _without_payloads(memory: memoryview) -> tuple[bytes, dict[int, _Payload]]:
    """The model without its large payloads, and these by the position of their operator."""
    payloads: dict[int, _Payload] = {}
    out: list[bytes] = []
    for number, whole, inner in _fields(memory, slice(0, len(memory))):
        if number in (_CODE, _SIGNED):
            continue
        if number != _GRAPH or inner is None:
            out.append(bytes(memory[whole]))
            continue
        graph: list[bytes] = []
        position = 0
        for part, span, op in _fields(memory, inner):
            taken = None
            if part == _OP and op is not None:
                taken = _payload(memory, op) if len(memory[op]) >= _SMALL else None
                if taken is not None:
                    payloads[position] = taken[1]
                position += 1
            graph.append(taken[0] if taken else bytes(memory[span]))
        out.append(_field(_GRAPH, b"".join(graph)))
    return b"".join(out), payloads


def _payload(memory: memoryview, op: slice) -> tuple[bytes, _Payload] | None:
    """The operator without its large payload, and that; None where it has none."""
    found: _Payload | None = None
    rest: list[bytes] = []
    for number, whole, inner in _fields(memory, op):
        taken = None
        if number == _ATTR and inner is not None and len(memory[inner]) >= _SMALL:
            taken = _tensor_of(memory, inner)
        if taken is None or found is not None:
            rest.append(bytes(memory[whole]))
        else:
            found = taken
    return None if found is None else (_field(_OP, b"".join(rest)), found)


def _tensor_of(memory: memoryview, entry: slice) -> _Payload | None:
    """The payload of an entry `value: TensorDef` of a map of attributes."""
    parts = _contents(memory, entry)
    if _VALUE not in parts or bytes(memory[parts.get(_KEY, slice(0))]) != b"value":
        return None
    tensor = _contents(memory, parts[_VALUE]).get(_TENSOR, slice(0, 0))
    inside = _contents(memory, tensor)
    if _DESC not in inside or _DATA not in inside or len(memory[inside[_DATA]]) < _SMALL:
        return None
    return inside[_DESC], inside[_DATA]


def _contents(memory: memoryview, span: slice) -> dict[int, slice]:
    return {number: inner for number, _, inner in _fields(memory, span) if inner is not None}


def _fields(memory: memoryview, span: slice) -> Iterator[tuple[int, slice, slice | None]]:
    """Fields of a message: number, all of its bytes, and its content where that has a length."""
    at = span.start
    while at < span.stop:
        begin = at
        tag, at = _varint(memory, at, span.stop)
        number, kind = tag >> 3, tag & 7
        content = None
        if kind == _LENGTH:
            length, at = _varint(memory, at, span.stop)
            content = slice(at, at + length)
            at += length
        elif kind == 0:
            _, at = _varint(memory, at, span.stop)
        elif kind in _WIDTHS:
            at += _WIDTHS[kind]
        else:
            raise SerializationError(f"a field of unknown kind {kind} at byte {begin}")
        if at > span.stop or number == 0:
            raise SerializationError(f"a field at byte {begin} goes beyond its message")
        yield number, slice(begin, at), content


def _varint(memory: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = memory[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise SerializationError(f"a number at byte {at} does not end")
