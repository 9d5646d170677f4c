"""GE graphs as random programs, as a file may hold them: random ones, and ones for operators and
forms of operators that no function of torch becomes. Each is judged by its nodes run one by one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuzz_graph_table import GRAPHS
from native_check import differences, largest, oracle, truth_of
from random_graphs import Maker, Noise, Resize
from random_recipes import SIZES, TYPES
from torchair.engine.session import TorchNpuGraph
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.ge.graph import Graph, Value, needed_by
from torchair.operators import infer

INPUT = re.compile(r"\w+=(\w)\[([\w,]*)\](\??)")
Given = tuple[torch.dtype, tuple[int, ...], bool]
"""Type and dims of an input, and whether the graph knows the dims."""


class GraphTrial:
    """One graph and inputs for it."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed = seed
        self.made = number % 3 == 0
        self.dynamic = not self.made and number % 3 == 1
        self.options: dict[str, str] = {}
        self.excused: list[str] = []
        if self.made:
            inputs, build, *options = GRAPHS[number // 3 % len(GRAPHS)]
            self.given = _given(inputs, random.Random(seed))
            self.graph = _graph(seed, self.given, build)
            self.options = options[0] if options else {}
        else:
            self.maker = Maker(seed, nodes=random.Random(seed).randint(6, 20), dynamic=self.dynamic)
            self.graph = self.maker.graph

    def __str__(self) -> str:
        return f"seed {self.seed} graph {'by hand' if self.made else 'random'}"

    def _inputs(self, resize: Resize) -> list[torch.Tensor]:
        if not self.made:
            return self.maker.resized(resize)
        return [Noise(self.seed + k).content(t, dims) for k, (t, dims, _) in enumerate(self.given)]

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
        session.load(self.graph, self.options)
        for inputs, eager, truth in calls:
            scale = largest([*truth.values(), *inputs])
            for value, got in zip(results, session.run(inputs), strict=True):
                exact = truth.get(value, eager[value])
                wrong = differences(got, eager[value], exact, scale)
                if wrong and _is_of_float32(value):
                    short = got.float(), eager[value].float()
                    self.excused.append(f"{value}: computed from float32: {wrong}")
                    wrong = differences(*short, exact, scale)
                if wrong:
                    return f"{value}: {wrong}"
        return ""

    def _expected(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        eager = oracle(self.graph, inputs)
        nodes = [n for n in self.graph.nodes if n.type not in ("Data", "Const", "NetOutput")]
        return eager, truth_of(nodes, eager)


def _is_of_float32(value: Value) -> bool:
    """Whether a float64 was computed from float32: its error is of that type."""
    sources = [v for n in needed_by([value.node]) for v in n.outputs]
    return value.dtype == DataType.DT_DOUBLE and any(v.dtype == DataType.DT_FLOAT for v in sources)


def _given(inputs: str, pick: random.Random) -> list[Given]:
    """Inputs of random types and sizes."""
    types = {letter: pick.choice(found) for letter, found in TYPES.items()}
    sizes = dict(zip("ABCDE", pick.choices(SIZES, k=5), strict=True))
    return [
        (types[letter], tuple(int(sizes.get(d, d)) for d in dims.split(",") if d), not unknown)
        for letter, dims, unknown in INPUT.findall(inputs)
    ]


def _graph(seed: int, given: Sequence[Given], build: Callable[..., Any]) -> Graph:
    graph = Graph(f"by_hand_{seed}", infer)
    with graph:
        values = [
            Data(index=k, dtype=torch_to_ge(dtype), shape=list(dims) if known else None)
            for k, (dtype, dims, known) in enumerate(given)
        ]
        made = build(*values)
        NetOutput(list(made) if isinstance(made, (tuple, list)) else [made])
    return graph
