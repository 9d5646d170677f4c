"""The wire format read by other means, and files that are not graphs."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from proto_text import FOLDER, descriptor_set
from serde_graphs import (
    HEADER,
    check_all_forms,
    like_first,
    rich_graph,
    small_graph,
)
from torchair import ge, serde
from torchair.errors import SerializationError
from torchair.ge.build import Data
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, get_default_ge_graph
from torchair.serde import ge_ir


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) pairs of one message: integers, or bytes for everything with a length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - 2**64 if value >= 2**63 else value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 5:
            yield tag >> 3, struct.unpack("<f", data[at : at + 4])[0]
            at += 4
        else:
            assert tag & 7 == 2
            size = varint()
            yield tag >> 3, data[at : at + size]
            at += size


def table(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


def attrs_of(entries: list[bytes]) -> dict[str, dict[int, list[Any]]]:
    return {table(e)[1][0].decode(): table(table(e)[2][0]) for e in entries}


def test_field_numbers() -> None:
    graph = rich_graph()
    (model,) = table(serde.to_bytes(graph))[7]
    message = table(model)
    assert message[1] == [b"rich"]
    placements = table(attrs_of(message[11])["_input_placements"][1][0])
    assert placements == {3: [b"\x01\x00\x01"], 20: [2]}
    ops = {table(op)[1][0].decode(): table(op) for op in message[6]}
    data = ops["n"]
    assert data[2] == [b"Data"] and 5 not in data and attrs_of(data[10]) == {"index": {3: [1]}}
    assert table(data[34][0]) == {1: [b"y"], 2: [8], 3: [b""], 4: [b"ND"], 14: [b"CPU"]}
    assert table(data[33][0]) == table(data[34][0]) | {1: [b"x"]}
    assert table(table(ops["any"][34][0])[3][0]) == {1: [b"\xfe" + b"\xff" * 8 + b"\x01"]}
    concat = ops["ConcatV2"]
    assert concat[5][:3] == [b"TopKV2:0", b"LayerNormV4:0", b"LayerNormV4:0"]
    assert [table(d)[1][0] for d in concat[33]] == [b"x0", b"x1", b"x2", b"concat_dim"]
    norm = ops["LayerNormV4"]
    assert norm[5][2:] == [b"", b""]
    unfed = table(norm[33][2])
    assert unfed.keys() == {1, 5} and attrs_of(unfed[5]) == {"_is_unfed_optional": {3: [1]}}
    assert ops["Assign"][5] == [b"L['x']/a.1:0", b"TopKV2:0", b"TopKV2:-1"]
    assert attrs_of(table(ops["Reshape"][33][0])[5])["_sym_shape"] == {2: [b"s0,4"]}
    own = attrs_of(ops["MyOp"][10])
    assert own["a_bool"] == {5: [0]} and own["a_type"] == {15: [27]}
    assert own["a_bytes"].keys() == {7} and own["a_tensor"].keys() == {12}
    assert table(own["l_text"][1][0]) == {2: [b"", b"b,c"]} and own["e_text"] == {1: [b""]}
    assert [table(own[f"e_{t}"][1][0])[20] for t in ("int", "float", "bool", "type")] == [
        [2],
        [3],
        [4],
        [10],
    ]
    assert own["ll_int"].keys() == {14} and own["ll_float"].keys() == {16}


def test_constant_on_the_wire() -> None:
    with Graph("g") as graph:
        ge.Const([1.5, -2.0], dtype=DataType.DT_BF16)
    op = table(table(table(serde.to_bytes(graph))[7][0])[6][0])
    attrs = attrs_of(op[10])
    assert attrs["_readable_value"] == {2: [b"[1.5, -2.0]"]}
    payload = table(attrs["value"][12][0])
    assert payload[2] == [torch.tensor([1.5, -2.0]).bfloat16().view(torch.uint8).numpy().tobytes()]
    assert payload[1] == op[34]  # the output has the same description, and no name
    assert table(payload[1][0]) == {2: [27], 3: [b"\x0a\x01\x02"], 4: [b"ND"]}


def test_the_descriptor_is_that_of_the_proto_file() -> None:
    assert (FOLDER / "ge_ir.desc").read_bytes() == descriptor_set(FOLDER / "ge_ir.proto")


def test_every_data_type_has_its_own_number() -> None:
    wire = ge_ir.dtype_numbers()
    some = ("DT_UNDEFINED", "DT_FLOAT", "DT_INT64", "DT_BF16", "DT_INT4", "DT_FLOAT4_E1M2")
    assert [wire[name] for name in some] == [0, 1, 8, 27, 28, 40]
    with Graph("g") as graph:
        for code in DataType:
            if code != DataType.DT_MAX:
                Data(index=0, dtype=0, node_name=code.name).dtype = code
    check_all_forms(graph)
    graph.nodes[0].outputs[0].dtype = 5
    with pytest.raises(SerializationError, match="node 'DT_FLOAT'"):
        serde.to_bytes(graph)


# Each of these, after a correct first line of a graph, must be refused.
REFUSED = """
import os
from os import system
from torch import tensor as t
import torchair
x_0.__class__
x_0.node.graph
a = x_0.node
a = x_0.__class__
a = ge
a = [].append
eval('1')
a = eval('1')
a = __import__('os')
print(1)
a = open('f')
a = [v for v in [1]]
a = {1: 2}
a = {**{}}
a = 1 + 1
a = (lambda: 1)()
a = f'{x_0}'
a = x_0 if x_0 else x_0
def f(): pass
class A: pass
for i in []: pass
while 1: pass
with x_0: pass
del x_0
assert 1
raise x_0
a: int = 1
a = b = 1
a += 1
...
a = ge.build.builder('Add')
a = ge.attr.Attr.__init__
a = ge.attr.KINDS()
a = ge.graph.Graph()
a = ge._build(1)
a = ge.Nothing(x_0)
a = ge.Abs(y_0)
a = ge.Abs(x_0, x_0)
a = ge.Abs(*[x_0])
a = ge.Abs(**x_0)
a = ge.Abs(x_0)(1)
a = ge.Abs(x_0).node
[a, b] = ge.Abs(x_0)
get_default_ge_graph().remove(x_0)
get_default_ge_graph().control('x', 'z')
get_default_ge_graph().set_attr('x', k=1)
get_default_ge_graph().attrs.clear()
a = 'x' - 1
get_default_ge_graph()
a = get_default_ge_graph()
ge.Abs.cache_clear()
x_0.node = 1
x_0.dtype = 'a'
a = tensor([1], device='cuda')
a = tensor('x')
a = -'x'
a.b.c = 1
1 +
a = ge.custom_op('A', inputs=1)
a = tensor([1]).reshape([7])
a = tensor([1]).tolist()
a = ge.attr.Int('x')
a = ge.Data(index=0, dtype=0, node_name='x')
exit()
a = yield
"""


def test_cut_and_flipped_bytes_never_raise_anything_else() -> None:
    data = serde.to_bytes(rich_graph())
    chance = random.Random(0)
    cuts = [data[:n] for n in {*range(0, len(data), 7), len(data) - 1}]
    flips = []
    for _ in range(600):
        broken = bytearray(data)
        for _ in range(chance.choice((1, 1, 3))):
            broken[chance.randrange(len(data))] = chance.randrange(256)
        flips.append(bytes(broken))
    for broken in cuts + flips:
        try:
            serde.to_bytes(serde.from_bytes(broken, like_first))
        except SerializationError as error:
            assert str(error)
    with pytest.raises(SerializationError, match=r"model\.air"):
        serde.from_bytes(data[:-1], file="model.air")


def desc_attr(op: Any, name: str) -> Any:
    return op.output_desc[0].attr[name]


def broken_model(change: Any) -> Any:
    model = serde.to_model(small_graph())
    change({op.name: op for op in model.graph[0].op}, model.graph[0])
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda ops, g: ops["Abs"].input.__setitem__(0, "Nobody:0"), "Nobody"),
        (lambda ops, g: ops["Abs"].input.__setitem__(0, "MatMul:1"), "MatMul"),
        (lambda ops, g: ops["Abs"].input.__setitem__(0, "MatMul:x"), "MatMul"),
        (lambda ops, g: ops["Abs"].input.append("Nobody:-1"), "Nobody"),
        (lambda ops, g: ops["Abs"].input.append("MatMul:0"), "2 inputs"),
        (lambda ops, g: ops["MatMul"].input.__setitem__(0, "Abs:0"), "cycle"),
        (lambda ops, g: ops["MatMul"].input.append("Abs:-1"), "cycle"),
        (lambda ops, g: setattr(ops["Abs"].output_desc[0], "dtype", 77), "77"),
        (lambda ops, g: setattr(ops["Abs"].output_desc[0], "dtype", 41), "41"),
        (lambda ops, g: ops["Abs"].output_desc[0].shape.dim.append(-3), "not dims"),
        (lambda ops, g: ops["Abs"].attr["k"].func.SetInParent(), "attribute 'k'"),
        (lambda ops, g: ops["Abs"].attr["k"].SetInParent(), "attribute 'k'"),
        (lambda ops, g: setattr(ops["Abs"].attr["k"], "s", b"\xff"), "UTF-8"),
        (lambda ops, g: setattr(ops["Abs"].attr["k"].list, "val_type", 7), "list of type 7"),
        (lambda ops, g: setattr(desc_attr(ops["Abs"], "_sym_shape"), "s", b"s0"), "fit"),
        (lambda ops, g: setattr(desc_attr(ops["Abs"], "_sym_shape"), "s", b"exit()"), "exit"),
        (lambda ops, g: setattr(ops["Abs"], "name", "Add"), "two nodes"),
        (lambda ops, g: setattr(ops["Abs"], "name", " "), "a name"),
        (lambda ops, g: ops["Abs"].subgraph_name.append("body"), "subgraph"),
        (lambda ops, g: setattr(ops["MatMul"].input_desc[1], "name", "x1"), "x1"),
        (lambda ops, g: ops["Const"].attr.pop("value"), "tensor"),
        (lambda ops, g: setattr(ops["Const"].attr["value"].t, "data", b"12345"), "5 bytes"),
        (lambda ops, g: setattr(ops["Const"].attr["value"].t.desc, "dtype", 13), "DT_STRING"),
        (lambda ops, g: setattr(ops["Const"].attr["value"].t.desc, "dtype", 20), "qint32"),
        (lambda ops, g: ops["arg0_1"].output_desc.pop(), "one output"),
        (lambda ops, g: g.attr["k"].g.SetInParent(), "attribute 'k'"),
    ],
)
def test_wrong_graphs_say_what_is_wrong(change: Any, what: str) -> None:
    data = broken_model(change)
    with pytest.raises(SerializationError, match=what) as caught:
        serde.from_bytes(data)
    assert caught.value.position is not None


def test_layout_bookkeeping_of_other_writers_is_left_out() -> None:
    def change(ops: Any, graph: Any) -> None:
        ops["Abs"].attr["output_layout_info"].list.i.append(0)
        ops["Abs"].attr["output_layout_info"].list.s.append(b"NCHW")

    assert serde.from_bytes(broken_model(change)).node("Abs").attrs == {}


def test_models_without_or_with_several_graphs() -> None:
    with pytest.raises(SerializationError, match="has 0"):
        serde.from_bytes(b"")
    two = serde.to_model(small_graph())
    two.graph.add()
    with pytest.raises(SerializationError, match="has 2"):
        serde.from_bytes(two.SerializeToString())


def test_what_cannot_be_written() -> None:
    with Graph("g") as graph:
        ge.Identity(ge.Const(torch.empty(2**31 + 8, dtype=torch.uint8), readable=False))
    with pytest.raises(SerializationError, match="2147483656 bytes"):
        serde.to_bytes(graph)
    with Graph("g") as graph:
        x = Data(index=2**70, dtype=0, node_name="x")
    with pytest.raises(SerializationError, match="node 'x'"):
        serde.to_bytes(graph)
    with Graph("h"):
        ge.Abs(x)
        other = get_default_ge_graph()
    with pytest.raises(SerializationError, match="not in graph 'h'"):
        serde.to_bytes(other)


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_dump_is_not_a_program_to_the_loader(line: str) -> None:
    text = HEADER + 'x_0 = ge.Data(index=0, dtype=0, shape=[2], node_name="x")\n' + line + "\n"
    with pytest.raises(SerializationError, match="line 7"):
        serde.load(text)


def test_text_that_is_not_python() -> None:
    for text in ("\0", "(" * 1000, "a = " + "-" * 100_000 + "1", "a = \\"):
        with pytest.raises(SerializationError):
            serde.load(text)
