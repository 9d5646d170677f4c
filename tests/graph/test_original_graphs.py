"""The original graph says what the model says, as the documented graphs do; what the engine wants
otherwise is in the optimised graph alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import golden_models
import torchair


class PutBack(nn.Module):
    """A part of an input replaced, as a cache is filled."""

    def forward(self, x, y):
        x[:, 1:3] = y
        return x * 2


class PutBackAtBothEnds(nn.Module):
    def forward(self, x, y):
        x[:, :2] = y
        x[:, -2:] = y
        return x + 1


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 5, bias=False))


def normed() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    with torch.no_grad():
        model(torch.randn(4, 3, 9, 9))  # statistics that are not the first ones
    return model.eval()


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    sizes: tuple[tuple[int, ...], ...]
    operators: str  # calls of the original dump, in order
    optimized: str  # operators that the engine runs, in any order


SLICES = "StridedSliceV2 StridedSliceV2 StridedSliceV2 ConcatV2"
NORM = "Shape Cast Fill BNInfer"
CASES = {
    "clone": Case(
        lambda: Calls(lambda x: (x.clone(), x.t().clone(memory_format=torch.contiguous_format))),
        ((3, 4),),
        "Identity Transpose Identity",
        "TensorMove TensorMove Transpose",
    ),
    "part put back": Case(
        PutBack,
        ((3, 5), (3, 2)),
        f"{SLICES} Mul Cast Assign",
        "Mul StridedSliceAssign",
    ),
    "parts at both ends": Case(
        PutBackAtBothEnds,
        ((3, 5), (3, 2)),
        f"{SLICES} {SLICES} Add Assign",
        "Add ConcatV2 ConcatV2 StridedSliceV2 StridedSliceV2 StridedSliceV2 StridedSliceV2",
    ),
    "linear layers": Case(
        linears,
        ((2, 3, 8),),
        "Reshape Transpose MatMul Reshape Reshape Transpose MatMul Reshape",
        "MatMul MatMul Reshape Reshape",
    ),
    "norms": Case(
        normed,
        ((2, 3, 8, 8),),
        f"Conv2D {NORM} Shape Gather Cast Fill Gather Cast Fill Cast Fill BNInfer",
        "BNInfer BNInfer Conv2D",
    ),
    "nearest": Case(
        lambda: Calls(lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
        ((1, 2, 3, 4),),
        "ResizeNearestNeighborV2",
        "ResizeNearestNeighborV2",
    ),
    "nearest of a size": Case(
        lambda: Calls(lambda x: F.interpolate(x, size=(7, 11))),
        ((1, 2, 3, 4),),
        "ResizeNearestNeighborV2",
        "ResizeNearestNeighborV2",
    ),
}


QUICK = ("cat of transposed, viewed", "linear of rank three", "two views alike", "split")
"""Models of which each run compares the graphs; `make golden` compares those of all."""


def dumps(case: Case, folder: Path, dynamic: bool) -> tuple[str, str]:
    """The texts of both stages; results and updated inputs are eager's."""
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(folder)
    model, inputs = case.model(), [torch.randn(s) for s in case.sizes]
    own, theirs = ([x.clone() for x in inputs] for _ in range(2))
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    with torch.no_grad():
        got = torch.compile(model, backend=backend, dynamic=dynamic)(*own)
        torch.testing.assert_close((got, own), (model(*theirs), theirs))
    texts = [next(folder.glob(f"dynamo_{s}_*")).read_text() for s in ("original", "optimized")]
    return texts[0], texts[1]


def operators(text: str) -> list[str]:
    """Types of the calls, without inputs, outputs and work on sizes."""
    found = re.findall(r"^.* = ge\.(\w+)\(", text, re.MULTILINE)
    return [name for name in found if name not in ("Data", "NetOutput")]


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_those_of_the_original(name, tmp_path):
    case = CASES[name]
    original, optimized = dumps(case, tmp_path, dynamic=False)
    assert operators(original) == case.operators.split()
    assert sorted(operators(optimized)) == case.optimized.split()
    assert "get_default_ge_graph()." not in original


@pytest.mark.parametrize("name", ["part put back", "linear layers", "nearest"])
def test_a_dynamic_dump_ends_with_the_net_output(name, tmp_path):
    original, optimized = dumps(CASES[name], tmp_path, dynamic=True)
    assert "-1" in original
    for text in (original, optimized):
        assert text.splitlines()[-1].startswith("_ = ge.NetOutput(")
    steps = [o for o in operators(optimized) if o not in ("Shape", "Gather", "Pack", "Mul", "Cast")]
    assert sorted(steps) == [o for o in CASES[name].optimized.split() if o != "Mul"]


@pytest.mark.parametrize(
    ("dims", "perm", "operators_of"),
    [
        ((6, 6, 4, 1), (0, 1, 3, 2), "Gather Gather Pack Reshape Shape Shape"),
        ((2, 3, 1), (2, 0, 1), "Gather Gather Pack Reshape Shape Shape"),
        ((5, 1, 1), (1, 0, 2), "Gather Pack Reshape Shape"),
        (
            (2, 3, 1),
            (1, 0, 2),
            "Gather Gather Pack Pack Reshape Reshape Shape Shape Transpose",
        ),
    ],
)
def test_dims_of_one_are_not_transposed(dims, perm, operators_of, tmp_path):
    case = Case(lambda: Calls(lambda x: x.permute(perm) + 1), (dims,), "", "")
    original, _ = dumps(case, tmp_path, dynamic=True)
    assert sorted(o for o in operators(original) if o != "Add") == operators_of.split()


GOLDEN = json.loads(golden_models.EXPECTED.read_text())


def test_all_models_have_graphs_of_the_original():
    assert list(GOLDEN) == list(golden_models.MODELS) and len(GOLDEN) == 45


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in golden_models.MODELS
    ],
)
def test_calls_are_those_of_the_original(name):
    for kind, dynamic in (("static", False), ("dynamic", True)):
        assert golden_models.dumped(torchair, name, dynamic) == GOLDEN[name][kind]


def test_other_backends_trace_as_before():
    seen = []

    def backend(gm, example_inputs):
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

        def keep(graph, _inputs):
            seen.append({str(n.target) for n in graph.graph.nodes})
            return make_boxed_func(graph)

        return aot_module_simplified(gm, example_inputs, fw_compiler=keep, decompositions={})

    def twice(x):
        return F.interpolate(x, scale_factor=2)

    x = torch.randn(1, 2, 3, 4)
    for one in (backend, torchair.get_npu_backend(), backend):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(twice, backend=one)(x), twice(x))
    assert seen[0] == seen[1] and not any("upsample" in name for name in seen[0])


def test_nearest_trains_as_eager():
    grads = []
    for fn in (lambda x: F.interpolate(x, scale_factor=2).square().sum(),):
        for call in (fn, torch.compile(fn, backend=torchair.get_npu_backend())):
            x = torch.arange(24.0).reshape(1, 2, 3, 4).requires_grad_()
            call(x).backward()
            grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
