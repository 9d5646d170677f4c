"""Graphs in Ascend's `.om` container: a header of 256 bytes, a table of partitions, the ModelDef
and the weights. Viewers such as Netron show such a file; it holds no code for a card."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from torchair.errors import SerializationError
from torchair.ge.graph import Graph, Infer
from torchair.serde.codec import tensor_memory
from torchair.serde.proto import not_a_model, parsed, read_graph_def, to_model
from torchair.store import FilePath
from torchair.versions import __version__

MAGIC = b"IMOD"
HEADER = struct.Struct("<4s2I64sI4B32sI32sI I20sB3xQ2B62x")
"""Magic, size of the header, version, checksum, size of the rest; encrypted, unchecked, kind of
model, kind of compiler; name, operators, note of the user, version of the IR; models, version and
type of the platform, size of the model; checked for one OS, dynamic."""

_VERSION = 0x20000000  # the first with a number of models
_UNCHECKED, _IR_MODEL, _OFFLINE = 1, 0, 0
_ALIGNED = 64
_WIDTHS = {4: "I", 8: "Q"}  # of the numbers of the table


class Partition(IntEnum):
    """What a part of the file holds; those that only a compiler for cards writes are not named."""

    MODEL = 0
    WEIGHTS = 1


def om_parts(graph: Graph) -> list[bytes | memoryview]:
    """The bytes of the file in pieces, weights as they lie in memory."""
    model = to_model(graph, payloads=False)
    weights = _place_weights(model.graph[0], graph)
    content = model.SerializeToString(deterministic=True)
    sizes = {Partition.MODEL: len(content), Partition.WEIGHTS: sum(map(len, weights))}
    table = _table(sizes)
    size = len(table) + sum(sizes.values())
    return [_header(graph, size), table, content, *weights]


def _header(graph: Graph, size: int) -> bytes:
    dynamic = int(graph.is_dynamic)
    return HEADER.pack(
        MAGIC,
        HEADER.size,
        _VERSION,
        b"",
        size & 0xFFFFFFFF,
        0,
        _UNCHECKED,
        _IR_MODEL,
        _OFFLINE,
        graph.name.encode()[:31],
        len(graph),
        f"torchair {__version__}".encode()[:31],
        0,
        1,
        b"",
        0,
        size,
        0,
        dynamic,
    )


def _table(sizes: Mapping[Partition, int]) -> bytes:
    """Kind, place and size of each partition. Places count from the end of the table; numbers have
    eight bytes where four are too few."""
    width = 4 if sum(sizes.values()) < 1 << 32 else 8
    numbers, at = [len(sizes)], 0
    for kind, size in sizes.items():
        numbers += [kind, at, size]
        at += size
    return struct.pack(f"<{len(numbers)}{_WIDTHS[width]}", *numbers)


def _place_weights(message: Any, graph: Graph) -> list[bytes | memoryview]:
    """Tell each constant where its elements are, and give these."""
    pieces: list[bytes | memoryview] = []
    at = 0
    for op in message.op:
        _without_type_lists(op)
        if "value" not in op.attr or not op.attr["value"].HasField("t"):
            continue
        memory = tensor_memory(graph.node(op.name).attrs["value"].value)
        desc = op.attr["value"].t.desc
        desc.data_offset, desc.weight_size = at, len(memory)
        gap = -len(memory) % _ALIGNED
        pieces += [memory, bytes(gap)]
        at += len(memory) + gap
    return pieces


def _without_type_lists(op: Any) -> None:
    """Lists of data types as numbers: Netron cannot show the others."""
    for attr in op.attr.values():
        if attr.WhichOneof("value") == "list" and attr.list.type:
            attr.list.i.extend(attr.list.type)
            attr.list.ClearField("type")


# ---- reading ----


def from_om(data: bytes, infer: Infer | None = None, *, file: FilePath | None = None) -> Graph:
    """The graph of such bytes; SerializationError for others, and for a model that is encrypted."""
    view = memoryview(data)
    try:
        partitions = _partitions(view)
    except (struct.error, ValueError) as error:
        raise not_a_model(file, len(data), error) from error
    if Partition.MODEL not in partitions:
        raise SerializationError("the file holds no graph", file=file)
    message = parsed(bytes(partitions[Partition.MODEL]), len(data), file)
    weights = partitions.get(Partition.WEIGHTS, memoryview(b""))
    for op in message.op:
        if "value" in op.attr and op.attr["value"].HasField("t"):
            _fetch_weight(op.attr["value"].t, weights, op.name, file)
    return read_graph_def(message, infer, file)


def _partitions(view: memoryview) -> dict[int, memoryview]:
    magic, header_size, _, _, _, encrypted, *_ = HEADER.unpack_from(view)
    if magic != MAGIC or encrypted:
        raise ValueError("it begins as no plain .om file does")
    for width, code in _WIDTHS.items():  # the file does not say which
        count, *_ = struct.unpack_from(f"<{code}", view, header_size)
        end = header_size + width * (1 + 3 * count)
        if end > len(view):
            continue
        numbers = struct.unpack_from(f"<{3 * count}{code}", view, header_size + width)
        rows = [numbers[k : k + 3] for k in range(0, len(numbers), 3)]
        inside = all(kind < 32 and end + at + size <= len(view) for kind, at, size in rows)
        if inside and len({kind for kind, *_ in rows}) == count:
            return {kind: view[end + at : end + at + size] for kind, at, size in rows}
    raise ValueError("its table of partitions does not fit the file")


def _fetch_weight(tensor: Any, weights: memoryview, name: str, file: FilePath | None) -> None:
    """Put the elements of a constant where a ModelDef has them."""
    begin, size = tensor.desc.data_offset, tensor.desc.weight_size
    if tensor.data or not size:
        return
    if begin < 0 or size < 0 or begin + size > len(weights):
        raise SerializationError(
            f"bytes {begin} to {begin + size} are not in {len(weights)} bytes of weights",
            file=file,
            position=f"node {name!r}",
        )
    tensor.data = bytes(weights[begin : begin + size])
