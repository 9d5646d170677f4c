"""`.om` files: bytes, reading back, and what Netron's own parser makes of them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from torchair import ge
from torchair.cli import main
from torchair.errors import SerializationError
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.serde import from_om, om, read_graph, render, same_graph, write_graph

READ = """
import * as om from './om.js';
import * as base from './base.js';
import * as fs from 'fs';
const context = {
    stream: new base.BinaryStream(fs.readFileSync(process.argv[2])),
    set: (name, value) => { context.value = value; return value; },
    require: async (file) => import(`${file}.js`),
    metadata: async () => ({ type: () => null }),
};
const factory = new om.ModelFactory();
await factory.match(context);
const model = await factory.open(context);
const text = (type) => type ? type.toString() : null;
const seen = (value) => [value.name, text(value.type), value.initializer ? 1 : 0];
console.log(JSON.stringify({ format: model.format, graphs: model.modules.map((graph) => ({
    name: graph.name,
    nodes: graph.nodes.map((node) => ({
        name: node.name, type: node.type.name,
        inputs: node.inputs.map((input) => input.value.map(seen)).flat(),
        outputs: node.outputs.map((output) => output.value.map(seen)).flat(),
        weights: node.inputs.map((input) => input.value.filter((v) => v.initializer)
            .map((v) => Buffer.from(v.initializer.values).toString('hex'))).flat(),
    })) })) }));
"""


def netron(folder: Path) -> Path:
    """The parser of Netron as modules of node; the test is skipped where there is none."""
    spec = importlib.util.find_spec("netron")
    found = [Path(os.environ["NETRON_SOURCE"])] if "NETRON_SOURCE" in os.environ else []
    found += [Path(p) for p in (spec.submodule_search_locations or () if spec else ())]
    found += [Path("node_modules/netron/source")]
    source = next((p for p in found if (p / "om.js").is_file()), None)
    if source is None or shutil.which("node") is None:
        pytest.skip("needs node and Netron: pip install netron, or NETRON_SOURCE")
    for part in source.glob("*.js"):
        shutil.copy(part, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "read.js").write_text(READ)
    return folder / "read.js"


def graph() -> Graph:
    made = Graph("layer", infer)
    with made:
        x = ge.Data(index=0, dtype=0, shape=[-1, 4], placement="NPU", node_name="x")
        weight = ge.Const(torch.arange(8.0).reshape(2, 4), node_name="weight")
        product = ge.MatMulV2(x, weight, None, None, transpose_x2=True, node_name="product")
        ge.NetOutput([ge.Relu(product, node_name="act")])
    return made


def exported(folder: Path, name: str) -> Path:
    """A program with a symbolic batch, written by the command line."""
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.GELU())
    program = torch.export.export(model, (torch.randn(5, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "model.pt2")
    assert main(["export", str(folder / "model.pt2"), "-o", str(folder / name), "--trust"]) == 0
    return folder / name


def test_the_bytes_are_a_header_a_table_and_partitions():
    data = render(graph(), "om")
    magic, head, version, _, rest, *_ = om.HEADER.unpack_from(data)
    assert (magic, head, version) == (b"IMOD", 256, 0x20000000) and rest == len(data) - 256
    count, model, at, size, weights, begin, length = struct.unpack_from("<7I", data, 256)
    assert (count, model, at, weights, begin) == (2, 0, 0, 1, size) and length == 64
    assert struct.unpack_from("<8f", data, 256 + 28 + begin) == tuple(range(8))


def test_a_file_is_read_back(tmp_path):
    made = graph()
    path = write_graph(made, tmp_path / "layer.om", "om")
    assert not same_graph(read_graph(path, infer), made)
    assert main(["export", str(path), "-o", str(tmp_path / "layer.txt")]) == 0
    assert not same_graph(read_graph(tmp_path / "layer.txt", infer), made)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"JUNK"), (80, b"\1"), (260, b"\x20"), (264, b"\xff" * 4)]
)
def test_damage_is_an_error(at, value):
    data = bytearray(render(graph(), "om"))
    data[at : at + len(value)] = value
    with pytest.raises(SerializationError):
        from_om(bytes(data))
    with pytest.raises(SerializationError):
        from_om(render(graph(), "om")[:200])


def test_wide_tables_are_read():
    """Files beyond four GiB have numbers of eight bytes."""
    data = render(graph(), "om")
    numbers = struct.unpack_from("<7I", data, 256)
    wide = data[:256] + struct.pack("<7Q", *numbers) + data[256 + 28 :]
    assert not same_graph(from_om(wide, infer), graph())


def test_netron_opens_it(tmp_path):
    script = netron(tmp_path)
    files = [write_graph(graph(), tmp_path / "layer.om", "om"), exported(tmp_path, "model.om")]
    shown = []
    for file in files:
        ran = subprocess.run(["node", script, file], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        shown.append(json.loads(ran.stdout))
    by_hand, program = shown
    assert by_hand["format"] == "DaVinci OM" and by_hand["graphs"][0]["name"] == "layer"
    nodes = {n["name"]: n for n in by_hand["graphs"][0]["nodes"]}
    assert nodes["product"]["type"] == "MatMulV2"
    assert nodes["product"]["inputs"][:2] == [
        ["x:0", "float32[-1,4]", 0],
        ["weight:0", "float32[2,4]", 1],
    ]
    assert bytes.fromhex(nodes["product"]["weights"][0]) == struct.pack("<8f", *range(8))
    assert nodes["act"]["outputs"] == [["act:0", "float32[-1,2]", 0]]
    assert {"LayerNormV4", "Gelu"} <= {n["type"] for n in program["graphs"][0]["nodes"]}
