"""Graph to wire messages, bytes and protobuf text, and back. The bytes of one graph are always the
same; what a file says is checked, and every fault in it is a SerializationError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchair.errors import GraphError, SerializationError, TorchairError
from torchair.ge.attrs import Attr
from torchair.ge.build import add_output, connect, const_fact, infer_node
from torchair.ge.dtypes import DataType, holds, torch_to_ge
from torchair.ge.graph import INPUTS, Graph, Infer, Node, Value, topological
from torchair.ge.shapes import Shape, Sym, is_static, on_wire, symbol
from torchair.operators import infer
from torchair.serde import codec, ge_ir
from torchair.serde.literals import quoted
from torchair.store import FilePath
from torchair.torch_private.fake import unset_fake_temporarily


def to_model(graph: Graph, payloads: bool = True) -> Any:
    """The ModelDef that holds this graph; without `payloads`, values of constants are described
    only."""
    model = ge_ir.message("ModelDef")()
    _write_graph(model.graph.add(), graph, payloads)
    return model


def to_message(graph: Graph, payloads: bool = True) -> Any:
    """The GraphDef of this graph, `payloads` as above."""
    message = ge_ir.message("GraphDef")()
    _write_graph(message, graph, payloads)
    return message


def to_bytes(graph: Graph) -> bytes:
    """The ModelDef bytes of this graph; SerializationError when they would exceed 2 GiB."""
    model = to_model(graph)
    try:
        data = bytes(model.SerializeToString(deterministic=True))
    except Exception as error:  # the messages are complete, so size is what protobuf objects to
        raise too_big(graph, model.ByteSize()) from error
    if len(data) > codec.MAX_BYTES:
        raise too_big(graph, len(data))
    return data


def from_bytes(data: bytes, infer: Infer | None = None, *, file: FilePath | None = None) -> Graph:
    """The graph of ModelDef bytes.

    Types and dims are those of the file; `infer` adds what the file does not hold. Everything
    that is wrong with the bytes is a SerializationError, which names `file`.
    """
    return read_graph_def(parsed(data, len(data), file), infer, file)


def parsed(data: bytes, size: int, file: FilePath | None) -> Any:
    """The GraphDef of ModelDef bytes, which are those of a file of that size."""
    model = ge_ir.message("ModelDef")()
    try:
        model.ParseFromString(bytes(data))
    except Exception as error:  # DecodeError, or what else the protobuf in use raises
        raise not_a_model(file, size, error) from error
    if len(model.graph) != 1:
        raise SerializationError(
            f"a model with one graph is expected, this one has {len(model.graph)}", file=file
        )
    return model.graph[0]


def not_a_model(file: FilePath | None, size: int, error: Exception) -> SerializationError:
    """The error of bytes that hold something else."""
    return SerializationError(
        f"these bytes are not a GE model: {error}",
        file=file,
        position=f"somewhere in {size} bytes",
        hint="the file may be cut short or of another kind",
    )


def too_big(graph: Graph, size: int) -> SerializationError:
    """The error of a graph that the format has no room for."""
    return SerializationError(
        f"graph {graph.name!r} takes {size} bytes, the format ends at {codec.MAX_BYTES}",
        hint="keep large weights out of the graph, as inputs or as FileConstant",
    )


@unset_fake_temporarily()
def _write_graph(target: Any, graph: Graph, payloads: bool = True) -> None:
    attrs = [a.value for n in graph.nodes for a in n.attrs.values() if a.kind == "Tensor"]
    payload = sum(tensor.nbytes for tensor in attrs)
    if payload > codec.MAX_BYTES and payloads:
        raise too_big(graph, payload)
    with _position("graph"):
        target.name = graph.name
        codec.write_attrs(target.attr, graph.attrs)
    descs: dict[Value, Any] = {}
    for node in graph.nodes:
        with _position(f"node {node.name!r}"):
            _write_node(target.op.add(), node, descs, payloads)


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
            codec.write_attr(op.attr[name], attr)
    for value in node.outputs:
        _add_desc(op.output_desc, "" if node.type == "Const" else value.port, _desc(value, descs))


def _write_inputs(op: Any, node: Node, descs: dict[Value, Any]) -> None:
    for name, value in node.named_slots():
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
        desc = descs[value] = ge_ir.message("TensorDescriptor")()
        desc.dtype = codec.wire_dtype(value.dtype)
        desc.layout = _layout(value)
        desc.device_type = value.device_type
        codec.write_attrs(desc.attr, value.attrs)
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
        desc.attr["_sym_shape"].s = codec.dims_text(value.shape, stem).encode()


def _write_content(desc: Any, value: Value) -> None:
    """The size that a graph input holds, so that dims of other inputs are known to be the same."""
    content = value.content
    if value.node.type not in INPUTS or content in (None, default_content(value)):
        return
    numbers = content if isinstance(content, tuple) else (content,)
    if all(isinstance(n, (int, Sym)) for n in numbers):
        desc.attr["_sym_value"].s = codec.dims_text(numbers, f"{value.node.name}_value").encode()


def _write_const(target: Any, node: Node, attr: Attr, payload: bool) -> None:
    """The payload of a Const, or of an input that begins with a value, described by the data type
    of its output where that fits."""
    code = node.outputs[0].dtype if node.outputs else DataType.DT_UNDEFINED
    own = torch_to_ge(attr.value.dtype)
    codec.write_tensor(
        target.t,
        attr.value,
        code if holds(code, attr.value.dtype) else own,
        _layout(node.outputs[0]) if node.outputs else "ND",
        payload,
    )


# ---- reading ----


SOURCES = (*INPUTS, "Const")
PADDING = "_padding"  # an attribute that is there for the place of the next one in the file


@unset_fake_temporarily()
def read_graph_def(
    message: Any,
    infer: Infer | None = None,
    file: FilePath | None = None,
    payloads: Mapping[int, torch.Tensor] | None = None,
) -> Graph:
    """The graph of a GraphDef, nodes in file order. `payloads` are attributes `value` that the
    message lacks, by the position of their operator."""
    return _MessageReader(message, file, payloads or {}).read(infer)


@dataclass
class _MessageReader:
    """One GraphDef on its way to a graph: all nodes first, then all edges."""

    message: Any
    file: FilePath | None
    payloads: Mapping[int, torch.Tensor]

    def read(self, infer: Infer | None) -> Graph:
        with self.position("graph"):
            graph = Graph(self.message.name, infer=infer, attrs=codec.read_attrs(self.message.attr))
        self.graph = graph
        for index, op in enumerate(self.message.op):
            with self.position(f"op {index}, node {op.name!r}"):
                self.add(op, self.payloads.get(index))
        for index, op in enumerate(self.message.op):
            with self.position(f"op {index}, node {op.name!r}"):
                self.connect(op)
        with self.position("graph"):
            order = topological(graph.nodes, graph.name)
        if infer is not None:
            self.infer(order)
        return graph

    @contextmanager
    def position(self, where: str) -> Iterator[None]:
        try:
            yield
        except (SerializationError, GraphError) as error:
            raise SerializationError(str(error), file=self.file, position=where) from error

    def add(self, op: Any, payload: torch.Tensor | None) -> None:
        if not op.name.strip() or not op.type.strip():
            raise SerializationError(f"a node of type {op.type!r} needs a type and a name")
        if op.name in self.graph:
            raise SerializationError("two nodes have this name")
        if op.subgraph_name:
            raise SerializationError(f"the subgraph {op.subgraph_name[0]!r} is not read")
        node = self.graph.add(op.type, op.name)
        node.attrs.update(codec.read_attrs(op.attr))
        node.attrs.pop(PADDING, None)
        if payload is not None:
            node.attrs["value"] = Attr("Tensor", payload)
        for index, desc in enumerate(op.output_desc):
            _learn(add_output(node, desc.name), desc, f"output {index}")
        if node.type in SOURCES:
            _check_source(node)

    def connect(self, op: Any) -> None:
        node, names = self.graph.node(op.name), [desc.name for desc in op.input_desc]
        if node.type in SOURCES and all(edge.endswith(":-1") for edge in op.input):
            names = []  # the desc of a Data's port describes the same tensor as its output
        connect(node, op.input, names)

    def infer(self, order: list[Node]) -> None:
        """Let the shape rules add what the file left out, producers first."""
        for node in order:
            if node.type in (*SOURCES, "NetOutput"):
                continue
            try:
                infer_node(node)
            except TorchairError:
                raise
            except Exception as error:
                raise SerializationError(
                    f"the shape rule of {node.type} rejects what the file says: {error}",
                    file=self.file,
                    position=f"node {node.name!r}",
                ) from error


def _learn(value: Value, desc: Any, where: str) -> None:
    try:
        value.dtype = codec.ge_dtype(desc.dtype)
        value.layout, value.device_type = desc.layout, desc.device_type
        value.attrs = codec.read_attrs(desc.attr)
        named = value.attrs.pop("_sym_shape", None)
        content = value.attrs.pop("_sym_value", None)
        value.shape = _dims(value, desc, None if named is None else str(named.value))
        value.content = default_content(value) if content is None else _content(value, content)
    except SerializationError as error:
        raise SerializationError(f"{where}: {error}") from error


def _dims(value: Value, desc: Any, text: str | None) -> Shape | None:
    dims = list(desc.shape.dim)
    if text is not None:
        shape = codec.parse_dims(text)
        if on_wire(shape) != dims or any(isinstance(d, int) and d < 0 for d in shape):
            raise SerializationError(f"_sym_shape {text!r} does not fit the dims {dims}")
        return shape
    if dims == [-2] or (not desc.HasField("shape") and value.node.type not in SOURCES):
        return None
    if any(d < -1 for d in dims):
        raise SerializationError(f"{dims} are not dims")
    stem = value.node.name if value.node.type == "Data" else f"{value.node.name}_{value.index}"
    return tuple(symbol(f"{stem}_d{i}") if d == -1 else d for i, d in enumerate(dims))


def default_content(value: Value) -> Sym | None:
    """What a number on the host is at compile time: a size of its own. Other inputs: unknown."""
    number = value.dtype == DataType.DT_INT64 and value.shape == () and value.device_type == "CPU"
    return symbol(value.node.name) if number and value.node.type == "Data" else None


def _content(value: Value, text: Attr) -> Any:
    numbers = codec.parse_dims(str(text.value))
    if value.shape == () and len(numbers) == 1:
        return numbers[0]
    if value.shape is None or len(value.shape) != 1:
        raise SerializationError(f"_sym_value {text.value!r} does not fit the dims {value.shape}")
    return numbers


def _check_source(node: Node) -> None:
    """Inputs and constants have one output; that of a Const follows from its payload."""
    if len(node.outputs) != 1:
        raise SerializationError(f"a {node.type} has one output, this one {len(node.outputs)}")
    if node.type != "Const":
        return
    payload = node.attrs.get("value")
    if payload is None or payload.kind != "Tensor":
        raise SerializationError("a Const needs a tensor as its attribute 'value'")
    value = node.outputs[0]
    value.port, value.layout = "y", "" if value.layout == "ND" else value.layout
    code = value.dtype
    try:
        value.learn(const_fact(payload.value))
    except RuntimeError as error:
        raise SerializationError(f"its value is not a usable tensor: {error}") from error
    if code != DataType.DT_UNDEFINED:
        value.dtype = code


# ---- the `txt` form, complete and readable back ----


def to_txt(graph: Graph) -> str:
    """The text of this graph."""
    return str(ge_ir.text_format().MessageToString(to_message(graph), as_utf8=True))


def parse_txt(text: str, infer: Infer | None = None, *, file: FilePath | None = None) -> Graph:
    """The graph of such a text; SerializationError with line and column when it does not parse."""
    message = ge_ir.message("GraphDef")()
    try:
        ge_ir.text_format().Parse(text, message)
    except Exception as error:  # ParseError, or what else the protobuf in use raises
        line = getattr(error, "GetLine", lambda: None)()
        raise SerializationError(
            f"this is not the text of a GE graph: {error}",
            file=file,
            position=None if line is None else f"line {line}",
        ) from error
    return read_graph_def(message, infer, file)


# ---- the `pbtxt` form, which TensorBoard and Netron show; written, never read ----


def to_pbtxt(graph: Graph) -> str:
    """One block an operator; attributes and tensor descriptions are shown as their text."""
    return pbtxt_of(to_message(graph))


def pbtxt_of(message: Any) -> str:
    """The same of a GraphDef."""
    return "".join(_block(op) for op in message.op)


def described_once(message: Any) -> Any:
    """A GraphDef whose computed values are described where FX names them, by `_meta` alone: dims
    stand at inputs, at constants and at the results of the graph, and what is computed on the way
    from one FX node to the next has no description. So the original's files are."""
    given = {op.name for op in message.op if op.type in (*SOURCES, "FileConstant")}
    for op in message.op:
        if op.name not in given:
            for desc in op.output_desc:
                _describe_once(desc, False)
        for edge, desc in zip(op.input, op.input_desc, strict=False):
            if edge.rpartition(":")[0] not in given:
                _describe_once(desc, op.type == "NetOutput")
    return message


def _describe_once(desc: Any, dims: bool) -> None:
    if not dims:
        desc.ClearField("shape")
    if "_meta" not in desc.attr:
        desc.ClearField("dtype")


def _block(op: Any) -> str:
    lines = ["node {", f"  name: {_quoted(op.name)}", f"  op: {_quoted(op.type)}"]
    edges = [f"^{e.removesuffix(':-1')}" if e.endswith(":-1") else e for e in op.input if e]
    lines += [f"  input: {_quoted(edge)}" for edge in edges]
    shown = [(name, op.attr[name]) for name in sorted(op.attr)]
    shown += [(f"[i]{desc.name}", desc) for desc in op.input_desc]
    shown += [(f"[o]{desc.name}", desc) for desc in op.output_desc]
    for key, message in shown:
        text = ge_ir.text_format().MessageToString(message, as_utf8=True).strip()
        lines += ["  attr {", f"    key: {_quoted(key)}"]
        lines += ["    value {", f"      s: {_quoted(text)}", "    }", "  }"]
    return "\n".join([*lines, "}\n"])


def _quoted(text: str) -> str:
    """A string of the protobuf text format."""
    return quoted(text, _escaped)


def _escaped(character: str) -> str:
    """A character that is not printable, in the protobuf text format."""
    if character == "\n":
        return "\\n"
    return f"\\{ord(character):03o}" if character.isascii() else character


# ---- the name that the original has for all of this ----


class _AnyGraph(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, Graph)


class GeGraph(metaclass=_AnyGraph):
    """Makes a `Graph`; every `Graph` is an instance."""

    def __new__(  # type: ignore[misc]
        cls,
        model_def: Any = None,
        serialized_model_def: bytes | None = None,
        name: str | None = None,
    ) -> Graph:
        """The graph of a ModelDef message or of its bytes, or an empty one."""
        if model_def is not None and serialized_model_def is not None:
            raise AssertionError(
                "Unsupported init method: both model_def and serialized_model_def are specified. "
                "Give the message or its bytes, not both"
            )
        if model_def is not None:
            serialized_model_def = model_def.SerializeToString()
        if serialized_model_def is None:
            return Graph(name or "", infer)
        graph = from_bytes(serialized_model_def, infer)
        graph.name = graph.name if name is None else name
        return graph
