"""Gears: sizes that are planned ahead, guards that keep to them, and what the user may not ask."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import torchair
from compiling import compiled
from torchair import progress
from torchair.concrete.ge import GeConcreteGraph
from torchair.engine.session.variant import WeightVariant
from torchair.errors import InputError
from torchair.fx.gears import combinations
from torchair.inference import set_dim_gears


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x, y):
        return torch.softmax(self.linear(x), -1), y.transpose(0, 1) * x.shape[0]


@pytest.fixture
def plans(monkeypatch):
    """Sizes of the varying inputs of every plan that is made."""
    made, make = [], WeightVariant._pool

    def watched(variant, key, inputs):
        made.append([tuple(t.shape) for t in inputs if t.dim()])
        return make(variant, key, inputs)

    monkeypatch.setattr(WeightVariant, "_pool", watched)
    torch._dynamo.reset()
    counters.clear()
    return made


def config(policy):
    made = torchair.CompilerConfig()
    made.inference_config.dynamic_gears_merge_policy = policy
    return made


def inputs(n, m):
    return torch.randn(n, 6), torch.randn(3, m)


@torch.no_grad()
@pytest.mark.parametrize(
    ("policy", "pairs"), [("zip", {(2, 5), (4, 7)}), ("product", {(2, 5), (2, 7), (4, 5), (4, 7)})]
)
def test_gears_are_planned_at_the_first_call_and_never_again(plans, policy, pairs):
    model = Net()
    call = compiled(model, config(policy), dynamic=True)
    first = inputs(4, 7)
    set_dim_gears(first[0], {0: [2, 4]})
    set_dim_gears(first[1], {1: (5, 7)})
    torch.testing.assert_close(call(*first), model(*first))
    sizes = {(dims[-2][0], dims[-1][1]) for dims in plans}
    assert sizes == pairs and len(plans) == len(pairs)
    for n, m in sorted(pairs):
        given = inputs(n, m)
        torch.testing.assert_close(call(*given), model(*given))
    assert len(plans) == len(pairs) and counters["stats"]["unique_graphs"] == 1
    between = inputs(3, 5)  # fits no guard: another graph
    torch.testing.assert_close(call(*between), model(*between))
    assert counters["stats"]["unique_graphs"] == 2


@torch.no_grad()
def test_other_dims_are_fixed_and_the_engine_is_told(plans, monkeypatch):
    told = []
    options = GeConcreteGraph.options
    monkeypatch.setattr(
        GeConcreteGraph, "options", lambda self: told.append(options(self)[0]) or options(self)
    )
    call = compiled(nn.Linear(6, 8), config("zip"), dynamic=True)
    x = torch.randn(4, 6)
    set_dim_gears(x, {0: [2, 4, 8]})
    set_dim_gears(x, {0: [2, 4, 8]})  # again, the same
    call(x)
    assert told[0]["ge.dynamicDims"] == "2;4;8" and told[0]["ge.dynamicNodeType"] == "1"
    shapes = told[0]["ge.inputShape"].split(";")
    assert shapes == sorted(shapes) and sum(":-1,6" in s for s in shapes) == 1


def test_a_first_size_beyond_the_gears_is_refused():
    torch._dynamo.reset()
    x = torch.randn(3, 6)
    set_dim_gears(x, {0: [2, 4]})
    with pytest.raises(Exception, match=r"dim 0 of input \d+ is 3, which is none of its gears"):
        compiled(nn.Linear(6, 8), config("zip"), dynamic=True)(x)


@pytest.mark.parametrize(
    ("gears", "words"),
    [
        ({"0": [2, 3]}, "Dim index in dim_gears must be an integer, but got <class 'str'>"),
        ({2: [2, 3]}, r"must be in range \[0, 1\], but got"),
        ({-1: [2, 3]}, r"must be in range \[0, 1\], but got"),
        ({0: {2, 3}}, "Gears for dim index 0 in dim_gears must be a list or tuple"),
        ({0: [2, 3.0]}, "Element at index 1 of value for dim index 0 in dim_gears must be an int"),
        ({0: [0, 2]}, "must not be 0"),
        ({0: [2]}, r"in range \[2, 100\], but got 1"),
        ({0: list(range(1, 102))}, r"must be in range \[2, 100\], but got 101"),
    ],
)
def test_what_cannot_be_gears(gears, words):
    with pytest.raises(AssertionError, match=words):
        set_dim_gears(torch.zeros(4, 6), gears)


def test_gears_are_set_once():
    x = torch.zeros(4, 6)
    set_dim_gears(x, {0: [2, 4]})
    assert x.dim_gears == {0: [2, 4]}
    with pytest.raises(AssertionError, match="already has set dim gears, and it is not"):
        set_dim_gears(x, {0: [2, 8]})


def test_merging_has_limits():
    tensors = [torch.zeros(4, 6), torch.zeros(5)]
    with pytest.raises(AssertionError, match="is zip, input gears len must same"):
        combinations(tensors, {0: {0: [2, 4]}, 1: {0: [5, 6, 7]}}, "zip")
    many = list(range(2, 14))
    with pytest.raises(AssertionError, match="exceed 100, and the current number of gears is: 144"):
        combinations(tensors, {0: {0: many}, 1: {0: many}}, "product")
    with pytest.raises(AssertionError, match="only support zip and product"):
        combinations(tensors, {0: {0: [2, 4]}}, "sum")


@torch.no_grad()
def test_gears_without_dynamo(plans):
    model, x = nn.Linear(6, 8), torch.randn(4, 6)
    set_dim_gears(x, {0: [2, 4, 8]})
    call = torchair.compile(model, x)
    for n in (4, 2, 8, 4):
        given = torch.randn(n, 6)
        torch.testing.assert_close(call(given), model(given))
    assert sorted(dims[-1][0] for dims in plans) == [2, 4, 8]
    for rows in (3, 16):
        with pytest.raises(InputError, match="dim 0 of"):
            call(torch.randn(rows, 6))
    with pytest.raises(InputError, match="dims"):
        call(torch.randn(4, 7))


@torch.no_grad()
def test_progress_is_shown_on_terminals_only(plans, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        torch._dynamo.reset()
        monkeypatch.setattr(sys, "stderr", stream)
        x = torch.randn(4, 6)
        set_dim_gears(x, {0: [2, 4]})
        compiled(nn.Linear(6, 8), config("zip"), dynamic=True)(x)
        assert ("planning gears" in stream.getvalue()) is shown
