"""Graph to wire messages and bytes, and back. The byte form of one graph is always the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchair.errors import SerializationError
from torchair.ge.attrs import Attr
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Value
from torchair.ge.shapes import Sym, is_static, on_wire
from torchair.serde import schema
from torchair.serde.codec import MAX_BYTES, wire_dtype, write_attr, write_attrs, write_tensor
from torchair.serde.reader import SOURCES, default_content, read_graph_def
from torchair.serde.symbols import dims_text

Infer = Callable[[Node], Sequence[Fact]]


def to_model(graph: Graph) -> Any:
    """The ModelDef that holds this graph."""
    model = schema.message("ModelDef")()
    _write_graph(model.graph.add(), graph)
    return model


def to_message(graph: Graph, payloads: bool = True) -> Any:
    """The GraphDef of this graph; without `payloads`, values of constants are described only."""
    message = schema.message("GraphDef")()
    _write_graph(message, graph, payloads)
    return message


def to_bytes(graph: Graph) -> bytes:
    """The ModelDef bytes of this graph; SerializationError when they would exceed 2 GiB."""
    model = to_model(graph)
    try:
        data = bytes(model.SerializeToString(deterministic=True))
    except Exception as error:  # the messages are complete, so size is what protobuf objects to
        raise too_big(graph, model.ByteSize()) from error
    if len(data) > MAX_BYTES:
        raise too_big(graph, len(data))
    return data


def from_bytes(
    data: bytes, infer: Infer | None = None, *, file: str | os.PathLike[str] | None = None
) -> Graph:
    """The graph of ModelDef bytes.

    Types and dims are those of the file; `infer` adds what the file does not hold. Everything
    that is wrong with the bytes is a SerializationError, which names `file`.
    """
    model = schema.message("ModelDef")()
    try:
        model.ParseFromString(bytes(data))
    except Exception as error:  # DecodeError, or what else the protobuf in use raises
        raise SerializationError(
            f"these bytes are not a GE model: {error}",
            file=file,
            position=f"somewhere in {len(data)} bytes",
            hint="the file may be cut short or of another kind",
        ) from error
    if len(model.graph) != 1:
        raise SerializationError(
            f"a model with one graph is expected, this one has {len(model.graph)}", file=file
        )
    return read_graph_def(model.graph[0], infer, file)


def too_big(graph: Graph, size: int) -> SerializationError:
    """The error of a graph that the format has no room for."""
    return SerializationError(
        f"graph {graph.name!r} takes {size} bytes, the format ends at {MAX_BYTES}",
        hint="keep large weights out of the graph, as inputs or as FileConstant",
    )


@unset_fake_temporarily()
def _write_graph(target: Any, graph: Graph, payloads: bool = True) -> None:
    payload = sum(a.value.nbytes for n in graph.nodes for a in n.attrs.values() if _is_tensor(a))
    if payload > MAX_BYTES and payloads:
        raise too_big(graph, payload)
    with _position("graph"):
        target.name = graph.name
        write_attrs(target.attr, graph.attrs)
    descs: dict[Value, Any] = {}
    for node in graph.nodes:
        with _position(f"node {node.name!r}"):
            _write_node(target.op.add(), node, descs, payloads)


def _is_tensor(attr: Attr) -> bool:
    return isinstance(attr.value, torch.Tensor)


@contextmanager
def _position(where: str) -> Iterator[None]:
    try:
        yield
    except SerializationError as error:
        if error.position is not None:
            raise
        raise SerializationError(str(error), position=where) from error
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise SerializationError(f"cannot be written: {error}", position=where) from error


def _write_node(op: Any, node: Node, descs: dict[Value, Any], payloads: bool) -> None:
    op.name, op.type = node.name, node.type
    if node.type in INPUTS and not node.inputs and node.outputs:
        _add_desc(op.input_desc, "x", _desc(node.outputs[0], descs))
    _write_inputs(op, node, descs)
    for before in node.control:
        _check_member(node, before)
        op.input.append(f"{before.name}:-1")
    for name, attr in node.attrs.items():
        if node.type in SOURCES and name == "value" and attr.kind == "Tensor":
            _write_const(op.attr[name], node, attr, payloads)
        else:
            write_attr(op.attr[name], attr)
    for value in node.outputs:
        port = "" if node.type == "Const" else value.port
        _add_desc(op.output_desc, port, _desc(value, descs))


def _write_inputs(op: Any, node: Node, descs: dict[Value, Any]) -> None:
    for port, position, value in node.slots():
        name = port if position is None else f"{port}{position}"
        if value is None:
            op.input.append("")
            op.input_desc.add(name=name).attr["_is_unfed_optional"].i = 1
            continue
        _check_member(node, value.node)
        op.input.append(value.edge)
        _add_desc(op.input_desc, name, _desc(value, descs))


def _check_member(reader: Node, producer: Node) -> None:
    graph = reader.graph
    if producer.name not in graph or graph.node(producer.name) is not producer:
        raise SerializationError(f"it depends on {producer}, which is not in graph {graph.name!r}")


def _add_desc(target: Any, port: str, desc: Any) -> None:
    added = target.add()
    added.CopyFrom(desc)
    added.name = port


def _desc(value: Value, descs: dict[Value, Any]) -> Any:
    """The nameless description of a value; inputs and outputs hold copies of it."""
    if value not in descs:
        desc = descs[value] = schema.message("TensorDescriptor")()
        desc.dtype = wire_dtype(value.dtype)
        desc.layout = _layout(value)
        desc.device_type = value.device_type
        write_attrs(desc.attr, value.attrs)
        _write_dims(desc, value)
        _write_content(desc, value)
    return descs[value]


def _layout(value: Value) -> str:
    return value.layout or ("ND" if value.node.type == "Const" else "")


def _write_dims(desc: Any, value: Value) -> None:
    """Dims of a known rank. Without a shape a graph input says -2; an operator says nothing."""
    if value.shape is None and value.node.type not in INPUTS:
        return
    desc.shape.SetInParent()  # no dims at all is a scalar, and that must be told from "unknown"
    desc.shape.dim.extend(on_wire(value.shape))
    if value.shape is not None and not is_static(value.shape):
        stem = f"{value.node.name}_{value.index}"
        desc.attr["_sym_shape"].s = dims_text(value.shape, stem).encode()


def _write_content(desc: Any, value: Value) -> None:
    """The size that a graph input holds, so that dims of other inputs are known to be the same."""
    content = value.content
    if value.node.type not in INPUTS or content in (None, default_content(value)):
        return
    numbers = content if isinstance(content, tuple) else (content,)
    if all(isinstance(n, (int, Sym)) for n in numbers):
        desc.attr["_sym_value"].s = dims_text(numbers, f"{value.node.name}_value").encode()


def _write_const(target: Any, node: Node, attr: Attr, payload: bool) -> None:
    """The payload of a Const, or of an input that begins with a value, described by the data type
    of its output where that fits."""
    code = node.outputs[0].dtype if node.outputs else DataType.DT_UNDEFINED
    own = torch_to_ge(attr.value.dtype)
    write_tensor(target.t, attr.value, code if _holds(code, attr.value) else own,
                 _layout(node.outputs[0]) if node.outputs else "ND", payload)  # fmt: skip


def _holds(code: int, tensor: torch.Tensor) -> bool:
    try:
        return ge_to_torch(code) == tensor.dtype
    except RuntimeError:
        return False
