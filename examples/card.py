"""A card's binary dump, with an error in it, judged by the graph; and times of its kernels."""

import os
import tempfile
from pathlib import Path

import torch

from torchair import ge
from torchair.cli import main
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.operators.reference import interpret
from torchair.serde import cann_dump, write_graph
from torchair.serde.cann_dump import CardTensor, OperatorDump

HALF = ge.DataType.DT_FLOAT16

# The graph that the card ran; a real one is written by `debug.graph_dump`.
graph = Graph("layer", infer=infer)
with graph:
    x = ge.Data(index=0, dtype=HALF, shape=[4, 64], placement="NPU", node_name="x")
    weight = ge.Const(torch.linspace(-1, 1, 64 * 8).reshape(64, 8), HALF, node_name="weight")
    product = ge.MatMul(x, weight, None, node_name="product")
    ge.NetOutput([ge.SoftmaxV2(ge.Relu(product, node_name="relu"), axes=[-1], node_name="soft")])


def dump(node, results):
    """What the card does, with an error in `relu`."""
    for tensor in results:
        if node.name == "relu":
            tensor[2, 5] += 0.5
    if node.type != "Const":
        outputs = [CardTensor(tensor) for tensor in results]
        cann_dump.write("dump/0", node.type, OperatorDump(node.name, outputs=outputs))


PROFILE = """Name,Type,Duration(us),Input Shapes,Input Data Types,Output Shapes,Output Data Types
product,MatMul,4.1,"4,64;64,8",FLOAT16;FLOAT16,"4,8",FLOAT16
"""

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    write_graph(graph, "graph.txt", "txt")
    interpret(graph, [torch.rand(4, 64).half()], dump)
    Path("kernel_details.csv").write_text(PROFILE)
    status = main(["compare", "--npu", "dump", "graph.txt", "--profile", "."])
    os.chdir("/")
print("exit code", status)
