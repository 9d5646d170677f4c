"""GE graphs as random programs, as a file may hold them: random ones, and ones for operators and
forms of operators that no function of torch becomes. Each is judged by its nodes run one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from native_check import differences, largest, oracle, truth_of
from random_graphs import Maker, Noise, Resize
from torchair.engine.session import TorchNpuGraph
from torchair.ge.build import Const, Data, NetOutput, builder
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Graph, Value
from torchair.operators import infer

F32, F16, F64, BF16 = torch.float32, torch.float16, torch.float64, torch.bfloat16
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool
Given = tuple[torch.dtype, tuple[int, ...]]


def _op(name: str, **attrs: Any) -> Callable[..., Any]:
    """A node of some type with these attributes."""
    return lambda *values: builder(name)(*values, **attrs)


def _turned(name: str, side: int, **attrs: Any) -> Callable[..., Any]:
    """A product of which one factor is transposed by a node of its own."""

    def build(*values: Value) -> Any:
        fed = list(values)
        fed[side] = builder("Transpose")(fed[side], [1, 0])
        return builder(name)(*fed, **attrs)

    return build


def _long(x: Value) -> Any:
    """More nodes than one unit takes."""
    y = x
    for _ in range(90):
        y = builder("Add")(builder("Sin")(y), x)
    return y


GRAPHS: tuple[tuple[list[Given], Callable[..., Any]], ...] = (
    ([(BOOL, (4, 8)), (F32, (4, 8)), (F16, (4, 8))], _op("SelectV2")),
    ([(F32, (4, 8)), (F32, (8, 16))], _turned("MatMulV2", 1, transpose_x2=True)),
    ([(F32, (8, 4)), (F32, (8, 16))], _turned("MatMulV2", 0)),
    ([(F32, (4, 8)), (F32, (8, 16)), (F32, (16,))], lambda x, w, b: builder("Add")(
        builder("MatMulV2")(x, w, None), b)),
    ([(F32, (4, 8)), (F32, (8, 16)), (F32, (16,))], lambda x, w, b: builder("Add")(
        b, builder("MatMul")(x, w, None))),
    ([(I64, (4, 8)), (I64, (4, 8)), (I64, (4, 8))], lambda a, b, c: builder("Addcmul")(
        a, b, c, Const(torch.tensor(2.0)))),
    ([(F32, (4, 8)), (F32, (2, 8, 8))], lambda x, w: builder("BatchMatMulV2")(x, w)),
    ([(F32, (4, 8)), (I8, (8, 16)), (F32, (16,))], lambda x, w, s: builder(
        "WeightQuantBatchMatmulV2")(x, w, s)),
    ([(F16, (4, 8)), (I8, (16, 8)), (F16, (16, 1))], lambda x, w, s: builder(
        "WeightQuantBatchMatmulV2")(x, w, s, transpose_weight=True)),
    ([(F32, (4, 8)), (F32, (8, 16))], lambda x, w: builder("Add")(
        builder("Identity")(builder("Cast")(x, dst_type=torch_to_ge(F32))),
        builder("Reshape")(builder("Reshape")(x, [8, 4]), [4, 8]))),
    ([(F32, (4, 8))], lambda x: builder("Transpose")(builder("Transpose")(x, [1, 0]), [1, 0])),
    ([(F32, (4, 8)), (F32, (8,))], lambda x, y: builder("ConcatV2")([builder("Reshape")(
        x, [32]), y], 0, N=2)),
    ([(F64, (4, 8)), (I8, (8, 16)), (F64, (16,))], _op("WeightQuantBatchMatmulV2")),
    ([(U8, (4, 32)), (I8, (32, 16)), (F32, (1,))], _op(
        "QuantBatchMatmulV3", dtype=torch_to_ge(I32))),
    ([(I8, (4, 32)), (I8, (16, 32)), (F32, (16,))], _op(
        "QuantBatchMatmulV3", dtype=torch_to_ge(F16), transpose_x2=True)),
    ([(F32, (4, 8)), (F32, (8, 16)), (I8, (16,))], lambda x, w, o: builder("MatMulV2")(
        x, w, None, o)),
    ([(F32, (4, 2, 8)), (F32, (2, 8, 8))], _op(
        "TransposeBatchMatMul", perm_x1=[1, 0, 2], batch_split_factor=2)),
    ([(F32, (4, 8)), (F32, (0,))], lambda x, y: builder("ConcatV2")([builder("Tanh")(x), y], 0,
        N=2)),
    ([(F32, (4, 8)), (F32, (1, 8))], lambda x, y: builder("ViewCopy")(
        x, [4, 8], [8, 1], 0, y, [1, 8], [8, 1], 0)),
    ([(F32, (4, 8)), (F32, (8,))], lambda x, y: builder("ScatterNdUpdate")(
        x, Const(torch.tensor([[0], [1]])), y)),
    ([(F32, (4, 8)), (F32, (4, 8))], lambda x, y: builder("ScatterNdUpdate")(
        x, Const(torch.zeros((1, 0), dtype=I64)), y)),
    ([(F32, (4, 8)), (F32, (4,)), (I32, (4,))], _op("Quantize", dtype="torch.qint8", axis=0)),
    ([(F32, (4, 8)), (F32, (1,)), (I32, (1,))], _op("Quantize", dtype="torch.qint32", axis=1)),
    ([(F32, (2, 3, 8, 8))], lambda x: builder("ResizeNearestNeighborV2")(
        x, [5, 11], half_pixel_centers=True)),
    ([(F32, (4, 8))], _long),
)  # fmt: skip


class GraphTrial:
    """One graph and inputs for it."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed = seed
        self.made = number % 3 == 0
        self.dynamic = not self.made and number % 3 == 1
        if self.made:
            self.given, build = GRAPHS[number // 3 % len(GRAPHS)]
            self.graph = _graph(seed, self.given, build)
        else:
            self.maker = Maker(seed, nodes=random.Random(seed).randint(6, 20), dynamic=self.dynamic)
            self.graph = self.maker.graph

    def __str__(self) -> str:
        return f"seed {self.seed} graph {'by hand' if self.made else 'random'}"

    def _inputs(self, resize: Resize) -> list[torch.Tensor]:
        if not self.made:
            return self.maker.resized(resize)
        return [Noise(self.seed + k).content(t, dims) for k, (t, dims) in enumerate(self.given)]

    def run(self) -> str:
        """What is wrong, "" if nothing."""
        results = list(self.graph.output.values())
        calls = []
        for size in (lambda n: n, lambda n: n + 1) if self.dynamic else (lambda n: n,):
            inputs = self._inputs(size)
            try:
                calls.append((inputs, *self._expected(inputs)))
            except RuntimeError:
                if not calls:
                    raise
        session = TorchNpuGraph(self.graph.name)
        session.load(self.graph)
        for inputs, eager, truth in calls:
            scale = largest([*truth.values(), *inputs])
            for value, got in zip(results, session.run(inputs), strict=True):
                wrong = differences(got, eager[value], truth.get(value, eager[value]), scale)
                if wrong:
                    return f"{value}: {wrong}"
        return ""

    def _expected(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        eager = oracle(self.graph, inputs)
        nodes = [n for n in self.graph.nodes if n.type not in ("Data", "Const", "NetOutput")]
        return eager, truth_of(nodes, eager)


def _graph(seed: int, given: Sequence[Given], build: Callable[..., Any]) -> Graph:
    graph = Graph(f"by_hand_{seed}", infer)
    with graph:
        values = [
            Data(index=k, dtype=torch_to_ge(dtype), shape=list(dims))
            for k, (dtype, dims) in enumerate(given)
        ]
        made = build(*values)
        NetOutput(list(made) if isinstance(made, (tuple, list)) else [made])
    return graph
