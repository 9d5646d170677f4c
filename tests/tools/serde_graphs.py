"""Graphs and checks that the tests of `torchair.serde` share."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchair import ge, serde
from torchair.ge.attrs import Attr
from torchair.ge.build import Data, builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact, Graph, Node, get_default_ge_graph
from torchair.ge.shapes import symbol

NetOutput = builder("NetOutput")
HEADER = """\
# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph

"""
EVERY_ATTR = {
    "a_int": ge.attr.Int(-(2**63)),
    "a_float": ge.attr.Float(1e-05),
    "a_inf": ge.attr.Float(float("-inf")),
    "a_nan": ge.attr.Float(float("nan")),
    "a_bool": ge.attr.Bool(False),
    "a_text": ge.attr.Str('say "é" \\ \n\t\x01 😀'),
    "a_type": ge.attr.DataType(DataType.DT_BF16),
    "a_bytes": Attr("Bytes", b"\x00\xff'\""),
    "a_tensor": Attr("Tensor", torch.tensor([[0.1, 2.0]], dtype=torch.float64)),
    "l_int": ge.attr.ListInt([1, -1]),
    "l_float": ge.attr.ListFloat([0.1, 1e30, float("inf")]),
    "l_bool": ge.attr.ListBool([True, False]),
    "l_text": ge.attr.ListStr(["", "b,c"]),
    "l_type": ge.attr.ListDataType([0, 27]),
    "e_int": ge.attr.ListInt([]),
    "e_float": ge.attr.ListFloat([]),
    "e_bool": ge.attr.ListBool([]),
    "e_text": ge.attr.ListStr([]),
    "e_type": ge.attr.ListDataType([]),
    "ll_int": ge.attr.ListListInt([[1, 2], [], [3]]),
    "ll_float": ge.attr.ListListFloat([[0.5], []]),
    "ll_none": ge.attr.ListListInt([]),
    "from": ge.attr.Int(1),
    "node": ge.attr.Int(2),
    "a.b c": ge.attr.Int(3),
}


def like_first(node: Node) -> list[Fact]:
    """A shape rule for tests: every output is like the first input."""
    first = next(iter(node.values()), None)
    return [first.fact if first else Fact() for _ in node.outputs]


def run_program(text: str, infer: Any = None) -> Graph:
    """The dump as a real Python program."""
    apis = types.ModuleType("torchair._ge_concrete_graph")
    apis.ge_apis = ge  # type: ignore[attr-defined]
    graphs = types.ModuleType("torchair.ge._ge_graph")
    graphs.get_default_ge_graph = get_default_ge_graph  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, Graph(infer=infer) as graph:
        patch.setitem(sys.modules, apis.__name__, apis)
        patch.setitem(sys.modules, graphs.__name__, graphs)
        with unset_fake_temporarily():
            exec(text, {})
    return graph


def check_all_forms(graph: Graph, infer: Any = None) -> None:
    data = serde.to_bytes(graph)
    again = serde.from_bytes(data)
    assert serde.same_graph(graph, again, strict=True) == []
    assert serde.to_bytes(again) == data
    text = serde.to_txt(graph)
    assert serde.same_graph(graph, serde.parse_txt(text), strict=True) == []
    assert serde.to_txt(serde.parse_txt(text)) == text
    assert serde.to_pbtxt(graph).count("node {") == len(graph)
    program = serde.canonical_text(graph)
    loaded = serde.load(program, infer)
    assert serde.same_graph(graph, loaded) == []
    assert serde.canonical_text(loaded) == program
    assert serde.same_graph(graph, run_program(program, infer)) == []


def check_original(graph: Graph, infer: Any = None) -> str:
    text = serde.original_text(graph)
    loaded = serde.load(text, infer)
    assert serde.same_graph(graph, loaded) == []
    assert serde.original_text(loaded) == text
    assert serde.same_graph(graph, run_program(text, infer)) == []
    return text


def small_graph() -> Graph:
    with Graph("graph_1") as graph:
        x = Data(index=0, dtype=0, shape=[3, 3], node_name="arg0_1")
        mm = ge.MatMul(x, x, None)
        out = ge.Add(ge.Abs(mm), ge.Const(1, dtype=0))
        NetOutput([out, ge.Sub(x, mm)])
    return graph


def rich_graph() -> Graph:
    """Ports, edges and descriptions of every sort."""
    with Graph("rich", infer=like_first) as graph:
        x = Data(index=0, dtype=1, shape=[symbol("s0"), 4], node_name="L['x']/a.1")
        n = Data(index=1, dtype=9, shape=[], placement="CPU", node_name="n")
        Data(index=2, dtype=0, shape=None, node_name="any")
        shape = ge.Pack([n, -1], N=2, axis=0)
        r = ge.Reshape(x, shape)
        parts = ge.SplitV(r, [2, 2], 1, num_split=2)
        values, indices = ge.TopKV2(parts[0], 2, sorted=True, dim=-1)
        norm = ge.LayerNormV4(parts[1], [32], None, None, epsilon=1e-05)
        both = ge.ConcatV2([values, norm[0], norm[0]], 0, N=3)
        own = ge.custom_op(
            "MyOp",
            inputs={"a": both, "b": None, "c": ge.Const(2.5, dtype=1), "many": [x, values]},
            outputs=["p", ("q", 2)],
            attrs=EVERY_ATTR,
        )
        side = ge.Assign(x, values, dependencies=[indices])
        NetOutput([own[0], indices, ge.Const([1, 2], dtype=9)], dependencies=[side])
    graph.node("Reshape").attrs["_user_stream_label"] = ge.attr.Str("stream_1")
    graph.node("Reshape").after(graph.node("n"))
    graph.attrs["_input_placements"] = ge.attr.ListInt([1, 0, 1])
    value = graph.node("MyOp").outputs[1]
    value.layout, value.attrs = "NCHW", {"_meta": ge.attr.Str("Tensor(...)")}
    return graph
