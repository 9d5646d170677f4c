"""The modes that capture, on the CPU; and what prepares a capture on any device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from capture_cases import CASES
from capture_tools import fresh
from torchair.capture.base import view_of
from torchair.capture.rehearsal import GraphWalk, host_nodes


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    fresh()
    yield
    fresh()


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    CASES[name](torch.device("cpu"))


# ---- what prepares a capture on an accelerator


def traced(fn: Any, *shapes: tuple[int, ...]) -> fx.GraphModule:
    """The graph of a function of CUDA tensors; no device is needed to trace it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = [torch.empty(shape, device="cuda") for shape in shapes]
        return make_fx(fn)(*args)


def moved(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._to_copy.default(tensor, device=like.device)


def test_values_of_the_host_are_found():
    def fn(x):
        table = torch.arange(3) * 2
        return x + moved(table, x), x.exp(), moved(torch.rand(3), x) + x

    graph = traced(fn, (3,)).graph
    found = {node.name for node in host_nodes(graph)}
    assert found == {"arange", "mul", "_to_copy"}, found


def test_values_that_the_graph_updates_are_not_settled():
    def fn(x):
        mask = torch.zeros(3)
        mask.fill_(1)
        return x + moved(mask, x)

    assert not list(host_nodes(traced(fn, (3,)).graph))


def test_a_walk_takes_settled_values_and_holds_nothing():
    def fn(x, n):
        return x + torch.full((2,), 3.0), x * n

    gm = make_fx(fn)(torch.ones(2), torch.ones(2))
    walk = GraphWalk(gm)
    x, n = torch.ones(2), torch.full((2,), 5.0)
    walk.prepare([x, n])
    (constant,) = walk.constants()
    constant.fill_(10)
    total, product = walk([x, n])
    assert total.tolist() == [11, 11] and product.tolist() == [5, 5]
    assert not walk._steps.env and not list(walk._steps.args_iter)


def test_a_failure_names_node_and_line():
    def fn(x):
        return torch.ops.aten.relu(x), torch.ops.aten.view(x, [2, 2])

    gm = make_fx(fn)(torch.ones(4))
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    y = x.view(2, 2)\n'
    walk = GraphWalk(gm)
    with pytest.raises(RuntimeError) as failed:
        walk([torch.ones(5)])
    error = walk.error("graph_1", failed.value)
    assert str(error).startswith("graph_1 cannot be captured: shape '[2, 2]' is invalid")
    assert error.node is not None and "torch.ops.aten.view.default" in error.node
    assert error.source is not None and '"model.py", line 7' in error.source


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[1:, ::2],
        lambda x: x.t(),
        lambda x: x.view(torch.int16)[1],
        lambda x: x[2].view(torch.int64),
    ],
)
def test_views_are_made_from_the_argument_of_a_call(view):
    first = torch.randn(4, 6)
    make = view_of(1, first, view(first))
    later = torch.randn(9, 6)[3:7]
    got = make([None, later])
    assert torch.equal(got, view(later)) and got.stride() == view(later).stride()
    assert got.untyped_storage().data_ptr() == later.untyped_storage().data_ptr()


def test_a_rehearsal_needs_no_dynamo():
    program = (
        "import sys, torch; from torchair.capture.rehearsal import Rehearsal\n"
        "with Rehearsal([]): torch.ones(2) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
