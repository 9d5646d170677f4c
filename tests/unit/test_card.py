"""CANN's binary dumps, read and written; a graph judged by the dump of a card; its times."""

from __future__ import annotations

import csv
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from random_graphs import Maker
from torchair.ascend.emulate.profiles.output import KERNEL_COLUMNS
from torchair.cli import main
from torchair.errors import SerializationError
from torchair.ge.build import Const, Data, NetOutput, builder
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Graph, Node, topological
from torchair.operators import infer
from torchair.operators.reference import run_node
from torchair.serde import cann_dump, write_graph
from torchair.serde.cann_dump import CardTensor, OperatorDump
from torchair.verification import roofline
from torchair.verification.card import CardReport, Skipped, judge_dump
from torchair.verification.judge import widened

# ---- the format

# DumpData{version "1.0", dump_time 5, output{dtype 2 (float16), format 2, shape{1, 2},
# original_op{"relu", 1}, size 4, original_shape{1, 2}}, input{dtype 7 (int32), format 2,
# shape{2}, size 8, original_shape{2}}, op_name "n"}, written byte by byte.
OUTPUT = bytes.fromhex("0802 1002 1a04 0a02 0102 2208 0a04 72656c75 1001 3004 3a04 0a02 0102")
INPUT = bytes.fromhex("0807 1002 1a03 0a01 02 2808 3203 0a01 02")
HEAD = (
    bytes.fromhex("0a03 312e30 1005 1a")
    + bytes([len(OUTPUT)])
    + OUTPUT
    + b"\x22"
    + bytes([len(INPUT)])
    + INPUT
    + bytes.fromhex("3201 6e")
)
FILE = (
    struct.pack("<Q", len(HEAD))
    + HEAD
    + struct.pack("<ii", -1, 7)
    + bytes.fromhex("003c 00c0")  # 1 and -2 in half precision
)


def test_a_file_written_by_hand_is_read_and_written():
    dump = cann_dump.from_bytes(FILE)
    assert (dump.name, dump.time) == ("n", 5)
    (given,), (made,) = dump.inputs, dump.outputs
    assert torch.equal(given.tensor, torch.tensor([-1, 7], dtype=torch.int32))
    assert torch.equal(made.tensor, torch.tensor([[1.0, -2.0]], dtype=torch.float16))
    assert made.origin == ("relu", 1) and given.origin is None
    assert cann_dump.to_bytes(dump) == FILE


@pytest.mark.parametrize("cut", [0, 4, 9, len(HEAD), len(FILE) - 1])
def test_a_file_that_ends_early_is_no_dump(cut):
    with pytest.raises(SerializationError, match="no dump of an operator"):
        cann_dump.from_bytes(FILE[:cut])


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(), (0, 3), (2, 300)])
def test_tensors_come_back(dtype, dims):
    tensor = (torch.rand(dims) * 5).to(dtype)
    dump = OperatorDump("a/b", [CardTensor(tensor)] * 2, [CardTensor(tensor)], 2**60)
    found = cann_dump.from_bytes(cann_dump.to_bytes(dump))
    assert (found.name, found.time) == (dump.name, dump.time)
    for one in (*found.inputs, *found.outputs):
        assert one.tensor.dtype == dtype and one.tensor.shape == tensor.shape
        assert one.tensor.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def described(dtype: int, layout: int, dims: list[int], original: list[int], size: int) -> bytes:
    """A file with one output; dims are not packed, and a field is there that nobody knows."""

    def shape(of: list[int]) -> bytes:
        return cann_dump.message([(1, d) for d in of])

    output = cann_dump.message(
        [(1, dtype), (2, layout), (3, shape(dims)), (6, size), (7, shape(original)), (9, 1 << 63)]
    )
    head = cann_dump.message([(3, output)]) + b"\x7d\0\0\0\0"  # field 15, four bytes
    return struct.pack("<Q", len(head)) + head


def test_blocked_formats_are_put_together():
    x = torch.arange(2 * 3 * 5, dtype=torch.float32).reshape(2, 3, 5)
    blocks = torch.zeros(2, 2, 2, 2, 4)  # of 2 rows and 4 columns: columns, then rows of blocks
    for i in range(3):
        for j in range(5):
            blocks[:, j // 4, i // 2, i % 2, j % 4] = x[:, i, j]
    data = described(1, 29, [2, 2, 2, 2, 4], [2, 3, 5], blocks.nbytes)
    (one,) = cann_dump.from_bytes(data + blocks.numpy().tobytes()).outputs
    assert torch.equal(one.tensor, x)
    image = torch.rand(1, 3, 2, 2)
    channels = torch.zeros(1, 2, 2, 2, 2)
    for c in range(3):
        channels[:, c // 2, :, :, c % 2] = image[:, c]
    data = described(1, 3, [1, 2, 2, 2, 2], [1, 3, 2, 2], channels.nbytes)
    (one,) = cann_dump.from_bytes(data + channels.numpy().tobytes()).outputs
    assert torch.equal(one.tensor, image)


@pytest.mark.parametrize(
    "dtype, layout, size, why",
    [(28, 2, 2, "type INT4"), (99, 2, 2, "type 99"), (1, 4, 8, "format 4"), (1, 2, 4, "4 bytes")],
)
def test_what_is_not_read_says_why(dtype, layout, size, why):
    (one,) = cann_dump.from_bytes(described(dtype, layout, [2], [2], size) + bytes(size)).outputs
    assert one.tensor is None and why in one.unread


def test_a_single_element_of_any_stride_is_written():
    one = torch.arange(4.0)[1::3]
    assert one.is_contiguous() and one.stride() == (3,)
    (found,) = cann_dump.from_bytes(
        cann_dump.to_bytes(OperatorDump("n", outputs=[CardTensor(one)]))
    ).outputs
    assert torch.equal(found.tensor, one)


def test_no_bytes_do_more_than_raise_one_error():
    noise = random.Random(0)
    read = 0
    for _ in range(3000):
        data = bytearray(FILE)
        for _ in range(noise.randint(1, 4)):
            data[noise.randrange(len(data))] = noise.randrange(256)
        try:
            cann_dump.from_bytes(bytes(data))
            read += 1
        except SerializationError:
            pass
    assert 0 < read < 3000
    with pytest.raises(SerializationError, match="are not dims"):
        cann_dump.from_bytes(described(1, 2, [0, 2**63], [0], 0))


# ---- judging a card

Planted = Callable[[Node, torch.Tensor], torch.Tensor]
MatMul, Add, Relu, Softmax = map(builder, ("MatMul", "Add", "Relu", "SoftmaxV2"))


def small_graph(dtype: torch.dtype) -> Graph:
    code = torch_to_ge(dtype)
    graph = Graph("small", infer=infer)
    with graph:
        x = Data(index=0, dtype=code, shape=[4, 8], placement="NPU", node_name="x")
        w = Const(torch.linspace(-1, 1, 40).reshape(8, 5), code, node_name="w")
        y = MatMul(x, w, None, node_name="layer/product")
        y = Relu(Add(y, y, node_name="sum"), node_name="relu")
        NetOutput([Softmax(y, axes=[-1], node_name="soft")])
    return graph


def dumped(
    graph: Graph, folder: Path, x: torch.Tensor, planted: Planted, mode: str = "all"
) -> Path:
    """Run a graph as a card with an error would: what is planted goes on to the nodes after it."""
    env: dict[str, torch.Tensor] = {}
    for task, node in enumerate(graph.nodes):
        if node.type == "NetOutput":
            continue
        given = {v: env[v.edge] for v in node.values()}
        made = [x] if node.type == "Data" else run_node(node, given)
        env |= {v.edge: planted(node, t) for v, t in zip(node.outputs, made, strict=True)}
        inputs = [CardTensor(env[v.edge]) for v in node.values()] if mode != "output" else []
        outputs = [CardTensor(env[v.edge]) for v in node.outputs] if mode != "input" else []
        if node.type not in ("Const", "Data") or (mode == "output" and node.type == "Data"):
            dump = OperatorDump(node.name, inputs, outputs, 1700000000000000 + task)
            cann_dump.write(folder, node.type, dump, task)
    return folder


def right(_node: Node, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def off_at(name: str, by: float = 0.05) -> Planted:
    def planted(node: Node, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        if node.name == name:
            made[1, 2] += by
        return made

    return planted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["all", "output", "input"])
def test_a_right_card_is_right(dtype, mode, tmp_path):
    graph = small_graph(dtype)
    (report,) = judge_dump(graph, dumped(graph, tmp_path, torch.rand(4, 8).to(dtype), right, mode))
    judged = ["layer/product", "sum", "relu", "soft"]
    assert [v.node.name for v in report.verdicts] == judged[: 3 if mode == "input" else 4]
    assert not report.wrong and not report.not_in_graph


@pytest.mark.parametrize("name", ["layer/product", "sum", "relu", "soft"])
@pytest.mark.parametrize("mode", ["all", "output"])
def test_a_planted_error_is_named_and_nothing_else(name, mode, tmp_path):
    graph, x = small_graph(torch.float16), torch.rand(4, 8).half()
    (report,) = judge_dump(graph, dumped(graph, tmp_path, x, off_at(name, 0.5), mode))
    (wrong,) = report.wrong
    assert wrong.node.name == name and not report.skipped
    assert wrong.wrong.error == pytest.approx(0.5, rel=0.05)
    assert 0 < wrong.wrong.allowed < 0.2
    assert f"first wrong node: {name} ({wrong.node.type}, float16[4, 5]): error 0." in str(report)


def rounded_card(made: Maker, folder: Path, pick: random.Random, plant: bool) -> Node | None:
    """Dump a run that rounds the truth of each node, which nobody else does, and leaves out some
    nodes; with an error in the node that is returned."""
    env = dict(zip((n.outputs[0] for n in made.graph.data), made.inputs, strict=True))
    target = None
    nodes = [n for n in topological(made.graph.nodes) if n.type != "NetOutput"]
    for task, node in enumerate(nodes):
        given = {v: env[v] for v in node.values()}
        if node not in made.graph.data:
            own = run_node(node, given)
            wide = run_node(node, {v: widened(t) for v, t in given.items()})
            results = [w.to(o.dtype).clone() for o, w in zip(own, wide, strict=True)]
            if plant and target is None and task > len(nodes) // 2 and can_be_wrong(node, results):
                largest, target = float(results[0].abs().max()), node
                results[0] = results[0].contiguous()
                results[0].view(-1)[pick.randrange(results[0].numel())] += largest / 5
            env |= dict(zip(node.outputs, results, strict=True))
        if node.type == "Const" or (node is not target and node.inputs and pick.random() < 0.3):
            continue
        outputs = [CardTensor(env[v]) for v in node.outputs]
        cann_dump.write(
            folder, node.type, OperatorDump(node.name, (), outputs, 10**15 + task), task
        )
    return target


def can_be_wrong(node: Node, results: list[torch.Tensor]) -> bool:
    first = results[0]
    computed = node.type != "Const" and first.is_floating_point() and first.numel()
    return bool(computed and first.isfinite().all() and first.abs().max() > 1e-3)


@pytest.mark.parametrize("seed", range(3000, 3012))
def test_random_graphs_have_no_error_but_the_planted_one(seed, tmp_path):
    made, pick = Maker(seed, nodes=20), random.Random(seed)
    rounded_card(made, tmp_path / "right", pick, plant=False)
    (report,) = judge_dump(made.graph, tmp_path / "right")
    assert report.verdicts and not report.wrong
    target = rounded_card(made, tmp_path / "wrong", pick, plant=True)
    (report,) = judge_dump(made.graph, tmp_path / "wrong")
    assert [v.node for v in report.wrong] == ([] if target is None else [target])


def judged_small(tmp_path: Path, change: Callable[[Path], None]) -> CardReport:
    graph = small_graph(torch.float32)
    folder = dumped(graph, tmp_path, torch.rand(4, 8), off_at("relu"))
    change(folder)
    (report,) = judge_dump(graph, folder)
    return report


def only(folder: Path, kind: str) -> Path:
    (path,) = folder.glob(f"{kind}.*")
    return path


def test_nodes_without_a_dump_are_counted_and_computed_on_the_way(tmp_path):
    report = judged_small(tmp_path, lambda folder: only(folder, "Add").unlink())
    reasons = {n.name: reason for n, (reason, _) in report.skipped.items()}
    judged = [v.node.name for v in report.verdicts]
    assert judged == ["layer/product", "sum", "relu", "soft"] and not reasons  # seen by `relu`
    assert [v.node.name for v in report.wrong] == ["relu"]
    graph = small_graph(torch.float32)
    folder = dumped(graph, tmp_path / "b", torch.rand(4, 8), off_at("relu"), "output")
    only(folder, "Add").unlink()
    (report,) = judge_dump(graph, folder)
    assert {n.name: r for n, (r, _) in report.skipped.items()} == {"sum": Skipped.NO_DUMP}
    assert [v.node.name for v in report.wrong] == ["relu"]
    only(folder, "Data").unlink()
    (report,) = judge_dump(graph, folder)
    assert report.skipped[graph.node("layer/product")][0] is Skipped.NO_INPUTS
    assert "skipped, without all inputs: 1" in str(report)


def test_results_of_fused_operators_are_those_of_their_origins(tmp_path):
    def fuse(folder: Path) -> None:
        dump = cann_dump.read(only(folder, "Relu"))
        made = [CardTensor(dump.outputs[0].tensor, origin=("relu", 0))]
        only(folder, "Relu").unlink()
        fused = OperatorDump("sum_relu_fused", dump.inputs[:1], made, dump.time)
        cann_dump.write(folder, "AddRelu", fused)
        cann_dump.write(folder, "Cast", OperatorDump("inserted", made, [], dump.time))

    report = judged_small(tmp_path, fuse)
    assert [v.node.name for v in report.wrong] == ["relu"] and len(report.verdicts) == 4
    assert [name.partition(".")[0] for name in report.not_in_graph] == ["Cast"]


def test_long_names_are_looked_up(tmp_path):
    def rename(folder: Path) -> None:
        path = only(folder, "Relu")
        (folder / "mapping.csv").write_text(f"0123456789,{path.name}\n")
        path.rename(folder / "0123456789")

    assert [v.node.name for v in judged_small(tmp_path, rename).wrong] == ["relu"]


def test_the_command_names_the_node_and_prints_times(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    graph, x = small_graph(torch.float32), torch.rand(4, 8)
    dumped(graph, tmp_path / "good" / "0", x, right)
    dumped(graph, tmp_path / "bad" / "0", x, off_at("sum"))
    for kind in ("txt", "py"):
        write_graph(graph, f"graph.{kind}", kind)
    assert main(["compare", "--npu", "good", "graph.txt"]) == 0
    assert main(["compare", "--npu", "bad", "graph.py", "-o", "table.csv"]) == 1
    assert "first wrong node: sum (Add, float32[4, 5]): error 0.05, " in capsys.readouterr().out
    rows = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert [(r["node"], r["wrong"]) for r in rows if r["wrong"] == "True"] == [("sum", "True")]
    assert main(["compare", "--npu", "bad", "graph.py", "--rtol", "0.5"]) == 0
    columns = ",".join((*roofline._KEY, "Duration(us)"))
    cells = 'layer/product,MatMul,"""4,8;8,5""",FLOAT;FLOAT,"""4,5""",FLOAT,'
    Path("kernel_details.csv").write_text(f"{columns}\n{cells}3.0\n{cells}5.0\n")
    command = ["compare", "--npu", "good", "graph.txt", "--profile", "."]
    assert main([*command, "--bandwidth", "0.1", "--flops", "1e-4"]) == 0
    shown = capsys.readouterr().out
    assert "1 kernels at 0.1 GB/s and 0.0001 TFLOP/s" in shown
    # 32 + 40 + 20 numbers of 4 bytes at 0.1 GB/s; 2 * 4 * 8 * 5 operations at 1e-4 TFLOP/s
    assert [c.strip() for c in shown.splitlines()[-2].strip("│").split("│")] == [
        "layer/product",
        "MatMul",
        "2",
        "4.00",
        "3.68",
        "memory",
        "92 %",
    ]
    for words in (["graph.txt"], ["--npu", "good", "graph.txt", "b"], ["--npu", ".", "graph.pt"]):
        assert main(["compare", *words]) == 2


def test_products_and_convolutions_count_operations(tmp_path):
    rows = [
        'a,BatchMatMulV2,"2,3,4;2,4,5",FLOAT16;FLOAT16,"2,3,5",FLOAT16,1',
        'b,Conv2D,"1,3,8,8;6,3,3,3",FLOAT16;FLOAT16,"1,6,8,8",FLOAT16,1',
        'c,Relu,"-1,3",FLOAT,"-1,3",FLOAT,1',
        "d,Relu+Cast,7,FLOAT,7,BF16,1",
    ]
    table = tmp_path / "kernel_details.csv"
    table.write_text("\n".join([",".join((*roofline._KEY, "Duration(us)")), *rows]))
    found = {k.name: k for k in roofline.kernel_times(tmp_path)}
    assert found["a"].operations == 2 * 2 * 3 * 4 * 5
    assert found["b"].operations == 2 * 6 * 64 * 27
    assert found["c"].moved is None and found["c"].cells(roofline.CardRates())[4] == "-"
    assert (found["d"].moved, found["d"].operations) == (7 * 6, 0.0)
    assert {*roofline._KEY, "Duration(us)"} <= {*KERNEL_COLUMNS}  # of the emulated profiler
