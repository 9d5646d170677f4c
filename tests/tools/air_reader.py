"""A reader of model files that shares nothing with the product: messages built by hand from the
field numbers that the format documents."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# message: {field: (number, type)}; "*" before a type means repeated, "map" from text to AttrDef.
FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "ModelDef": {"name": (1, "string"), "version": (2, "uint32"), "graph": (7, "*GraphDef"),
                 "attr": (11, "map")},
    "GraphDef": {"name": (1, "string"), "input": (4, "*string"), "output": (5, "*string"),
                 "op": (6, "*OpDef"), "attr": (11, "map")},
    "OpDef": {"name": (1, "string"), "type": (2, "string"), "input": (5, "*string"),
              "attr": (10, "map"), "id": (21, "int64"), "input_desc": (33, "*TensorDescriptor"),
              "output_desc": (34, "*TensorDescriptor"), "subgraph_name": (35, "*string")},
    "TensorDescriptor": {"name": (1, "string"), "dtype": (2, "int32"), "shape": (3, "ShapeDef"),
                         "layout": (4, "string"), "attr": (5, "map"),
                         "device_type": (14, "string")},
    "TensorDef": {"desc": (1, "TensorDescriptor"), "data": (2, "bytes")},
    "ShapeDef": {"dim": (1, "*int64")},
    "ListValue": {"s": (2, "*bytes"), "i": (3, "*int64"), "f": (4, "*float"), "b": (5, "*bool"),
                  "bt": (7, "*bytes"), "dt": (12, "*int64"), "val_type": (20, "int32")},
    "AttrDef": {"list": (1, "ListValue"), "s": (2, "bytes"), "i": (3, "int64"), "f": (4, "float"),
                "b": (5, "bool"), "bt": (7, "bytes"), "t": (12, "TensorDef"), "dt": (15, "int64")},
}  # fmt: skip


@cache
def _model() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="by_hand.proto", package="x", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind == "map":
                entry = message.nested_type.add(name=f"{field.title()}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=1, type=9)
                entry.field.add(name="value", number=2, label=1, type=11, type_name=".x.AttrDef")
                kind = f"*{name}.{entry.name}"
            made = message.field.add(name=field, number=number, label=3 if kind[0] == "*" else 1)
            kind = kind.removeprefix("*")
            if kind[0].isupper():
                made.type, made.type_name = 11, f".x.{kind}"
            else:
                made.type = made.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("x.ModelDef"))


def read(path: Path) -> Any:
    """The only graph of a model file."""
    model = _model()()
    model.ParseFromString(path.read_bytes())
    (graph,) = model.graph
    return graph


def ops(graph: Any, op_type: str) -> list[Any]:
    """The operators of one type."""
    return [op for op in graph.op if op.type == op_type]
