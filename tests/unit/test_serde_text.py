"""The exact text of dumps, and the files they are written to."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proto_text import parse
from serde_graphs import (
    HEADER,
    NetOutput,
    check_all_forms,
    check_original,
    small_graph,
)
from torchair import ge, serde
from torchair.errors import SerializationError
from torchair.ge.build import Data
from torchair.ge.graph import Graph, Origin
from torchair.ge.shapes import symbol
from torchair.serde import ge_ir
from torchair.serde.codec import shortest_float
from torchair.store import atomic_write, private_dir


def test_original_text() -> None:
    with Graph("graph_1") as graph:
        x = Data(index=0, dtype=0, shape=[symbol("s7"), 6], placement="NPU", node_name="arg0_1")
        graph.journal += ["", '# File "model.py", line 3, in forward    return f(x)']
        graph.journal.append("## FX Code: topk = torch.ops.aten.topk.default(arg0_1, 2)")
        top = ge.TopKV2(x, 2, sorted=True, dim=-1, largest=True)
        cast = ge.Cast(top[1], dst_type=9)
        both = ge.Mul(ge.Const(2, dtype=0), top[0])
        half = ge.SoftmaxV2(both, axes=[-1], half_to_float=False)
        label = ge.Fill([1, -1], float("inf"), node_name="a.b")
        own = ge.custom_op("Own", inputs={"x": half}, outputs=["y"])
        NetOutput([cast, own], dependencies=[label])
        Data(index=1, dtype=9, shape=[2], placement="CPU", node_name=None)
    graph.node("Mul").attrs["_user_stream_label"] = ge.attr.Str("stream_1")
    graph.control("Cast", "Mul")
    assert check_original(graph) == HEADER + (
        'arg0_1_0 = ge.Data(index=0, dtype=0, shape=[-1, 6], placement="NPU", node_name="arg0_1")\n'
        '\n# File "model.py", line 3, in forward    return f(x)\n'
        "## FX Code: topk = torch.ops.aten.topk.default(arg0_1, 2)\n"
        "[TopKV2_0, TopKV2_1] = ge.TopKV2(arg0_1_0, 2, sorted=True, dim=-1, largest=True)\n"
        'Cast_0 = ge.Cast(TopKV2_1, dst_type=9, node_name="Cast")\n'
        'Mul_0 = ge.Mul(ge.Const(2, dtype=0), TopKV2_0, node_name="Mul")\n'
        'SoftmaxV2_0 = ge.SoftmaxV2(Mul_0, axes=[-1], half_to_float=False, node_name="SoftmaxV2")\n'
        'a_b_0 = ge.Fill([1, -1], 1e999, node_name="a.b")\n'
        'Own_0 = ge.custom_op("Own", inputs={"x": SoftmaxV2_0}, outputs=["y"], attrs={}, '
        'node_name="Own")\n'
        "\n_ = ge.NetOutput([Cast_0, Own_0], dependencies=[a_b_0])\n"
        'Data_0 = ge.Data(index=1, dtype=9, shape=[2], placement="CPU", node_name=None)\n'
        'get_default_ge_graph().control("Cast", "Mul")\n'
        'get_default_ge_graph().set_attr("Mul", _user_stream_label=ge.attr.Str("stream_1"))\n'
    )


def test_canonical_text() -> None:
    with Graph("graph_1") as graph:
        x = Data(index=0, dtype=0, shape=[4, 6], node_name="a/b")
        graph.origin = Origin('# File "m.py", line 1', "## FX Code: y = f(x)\nand more", "y")
        parts = ge.SplitV(x, [2, 2], 1, num_split=2)
        mm = ge.MatMulV2(parts[0], parts[1], None, None)
        graph.origin = Origin('# File "m.py", line 1', "## FX Code: z = g(y)", "z")
        out = ge.Exponential(mm, **{"lambda": 0.5})
        graph.origin = None
        NetOutput([out])
    graph.node("MatMulV2").attrs["_op_exec_never_timeout"] = ge.attr.Bool(True)
    graph.attrs["_note"] = ge.attr.Int(0)
    check_all_forms(graph)
    assert serde.canonical_text(graph) == HEADER + (
        'a_b_0 = ge.Data(index=0, dtype=0, shape=[4, 6], placement="NPU", node_name="a/b")\n'
        '\n# File "m.py", line 1\n## FX Code: y = f(x)\n# and more\n'
        "[SplitV_0, SplitV_1] = ge.SplitV(a_b_0, ge.Const([2, 2], dtype=9), ge.Const(1, dtype=3), "
        'num_split=2, size_of_y=2, node_name="SplitV")\n'
        'MatMulV2_0 = ge.MatMulV2(SplitV_0, SplitV_1, None, None, node_name="MatMulV2")\n'
        "## FX Code: z = g(y)\n"
        'Exponential_0 = ge.Exponential(MatMulV2_0, **{"lambda": 0.5}, node_name="Exponential")\n'
        "\n_ = ge.NetOutput([Exponential_0], dependencies=[])\n"
        'get_default_ge_graph().set_attr("MatMulV2", _op_exec_never_timeout=ge.attr.Bool(True))\n'
        "get_default_ge_graph().attrs.update(_note=ge.attr.Int(0))\n"
    )
    loaded = serde.load(serde.canonical_text(graph))
    assert loaded.node("MatMulV2").origin == Origin(
        '# File "m.py", line 1', "## FX Code: y = f(x)\n# and more", "y"
    )


def test_a_result_is_named_where_running_the_line_would_not() -> None:
    with Graph("g") as graph:
        x = Data(index=0, dtype=0, shape=[4], node_name="TopKV2")
        gone = ge.TopKV2(x, 1)
        ge.TopKV2(x, 2)
        graph.remove(gone[0].node)
        del graph.journal[1]
    assert 'ge.TopKV2(TopKV2_0, 2, node_name="TopKV2_2")' in serde.original_text(graph)
    assert serde.same_graph(graph, serde.load(serde.original_text(graph))) == []


def test_variables_of_clashing_names_differ() -> None:
    with Graph("g") as graph:
        for name in ("a/b", "a.b", "a_b", "1", "\u00e9"):
            Data(index=0, dtype=0, shape=[4], node_name=name)
        NetOutput([n.outputs[0] for n in graph.nodes])
    check_all_forms(graph)
    assert "NetOutput([a_b_0, a_b_0_, a_b_0__, _1_0, __0]" in check_original(graph)


def test_txt_is_the_text_of_the_graph_message() -> None:
    text = serde.to_txt(small_graph())
    assert text.startswith('name: "graph_1"\nop {\n  name: "arg0_1"\n  type: "Data"\n  attr {\n')
    assert "dtype: DT_FLOAT" in text and 'input: "arg0_1:0"' in text
    with pytest.raises(SerializationError, match="line 3"):
        serde.parse_txt('name: "g"\nop {\n  nme: "x"\n}')


def test_pbtxt_is_a_tensorflow_like_graph() -> None:
    graph = small_graph()
    graph.control("Abs", "Sub")
    text = serde.to_pbtxt(graph)
    assert text.startswith('node {\n  name: "arg0_1"\n  op: "Data"\n  attr {\n    key: "index"\n')
    assert '  input: "MatMul:0"\n  input: "^Abs"\n' in text
    parsed = _tensorflow_graph(text)
    keys = [[a.key for a in n.attr] for n in parsed.node if n.op == "MatMul"]
    assert keys == [["[i]x1", "[i]x2", "[i]bias", "[o]y"]]
    assert 'name: "x1"\ndtype: DT_FLOAT' in parsed.node[1].attr[0].value.s


def _tensorflow_graph(text: str) -> Any:
    from google.protobuf import descriptor_pool, message_factory

    source = """syntax = "proto3"; message G { repeated N node = 1; }
        message N {
            string name = 1; string op = 2; repeated string input = 3; repeated A attr = 5;
        }
        message A { string key = 1; V value = 2; } message V { string s = 2; }"""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(parse(source, "g.proto").SerializeToString())
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("G"))()
    ge_ir.text_format().Parse(text, message)
    return message


def test_floats_are_read_with_few_digits() -> None:
    for number in (1e-05, 0.1, 16777216.0, 3.4028234663852886e38, 1e-45, 1 / 3):
        single = struct.unpack("f", struct.pack("f", number))[0]
        assert struct.pack("f", shortest_float(single)) == struct.pack("f", number)
    assert shortest_float(struct.unpack("f", struct.pack("f", 1e-05))[0]) == 1e-05


@pytest.mark.parametrize("kind", serde.KINDS)
def test_files(kind: str, tmp_path: Path) -> None:
    path = serde.write_graph(small_graph(), tmp_path / "a" / "b" / f"g.{kind}", kind)
    assert path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
    assert list(path.parent.iterdir()) == [path]
    if kind == "pbtxt":
        with pytest.raises(SerializationError, match="not read"):
            serde.read_graph(path)
    else:
        assert serde.same_graph(small_graph(), serde.read_graph(path)) == []


def test_original_and_canonical_py_files(tmp_path: Path) -> None:
    path = serde.write_graph(small_graph(), tmp_path / "g.py", "py", original=True)
    assert path.read_text() == serde.original_text(small_graph())
    with pytest.raises(SerializationError, match="'dot'"):
        serde.write_graph(small_graph(), tmp_path / "g.dot", "dot")
    with pytest.raises(SerializationError, match=r"none\.air"):
        serde.read_graph(tmp_path / "none.air")
    path.write_text("import os\n")
    with pytest.raises(SerializationError, match=r"g\.py\n  position: line 1"):
        serde.read_graph(path)


def test_places_that_are_not_written(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "link", tmp_path, target / "below"):
        with pytest.raises(RuntimeError):
            atomic_write(path, b"new")
    assert target.read_bytes() == b"old"
    with pytest.raises(RuntimeError):
        private_dir(target)
    assert atomic_write(target, b"new").read_bytes() == b"new"
    if os.getuid() != 0:
        target.chmod(0o400)
        with pytest.raises(RuntimeError, match="may not be written"):
            atomic_write(target, b"newer")


def test_dump_names() -> None:
    name = serde.dump_name("dynamo_original_graph_1", "py")
    stem, _, rest = name.partition("_rank_0_pid_")
    assert stem == "dynamo_original_graph_1"
    pid, _, time = rest.partition("_ts_")
    assert pid == str(os.getpid()) and len(time) == 20 + len(".py") and time.endswith(".py")


def test_importing_serde_does_not_load_protobuf() -> None:
    code = "import sys, torchair.serde; sys.exit('google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
