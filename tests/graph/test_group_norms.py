"""Group norms on a CPU in native parts, with what is around them, in any layout."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiling import compiled
from native_check import capture, native_types
from tolerance import assert_close
from torchair.engine.plan.planner import _keeps_channels
from training_blocks import LAST, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def norm(groups: int, channels: int = 32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.GroupNorm(groups, channels)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return nn.Sequential(made, nn.SiLU())


def images(last: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (torch.randn(2, 32, 7, 5) * 3 + 2).to(dtype)
    return x.to(memory_format=LAST) if last else x


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_training(groups: int, last: bool) -> None:
    """All of it is generated, and gradients have eager's layout."""
    model, x = norm(groups), images(last)
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with capture() as found:
        got = gradients(mine, compiled(mine), x)
    eager = gradients(model, model, x)
    assert_close(got, eager, gradients(wide, wide, x.double()))
    assert [t.stride() for t in got] == [t.stride() for t in eager]
    for one in found:
        one.check_units()
        assert not {"out", "call", "late"} & {s.kind for s in one.plan.steps}
    forward, backward = found
    assert {"Moments", "GroupMoments", "Swish"} <= native_types(forward.plan)
    assert {"GroupSums", "SwishGrad"} <= native_types(backward.plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [False, True])
def test_inference(last: bool, dtype: torch.dtype) -> None:
    model, x = norm(8).to(dtype), images(last, dtype)
    with torch.no_grad(), capture() as found:
        y, eager = compiled(model)(x), model(x)
        assert_close(y, eager, copy.deepcopy(model).double()(x.double()))
    assert y.stride() == eager.stride()
    assert "GroupMoments" in native_types(found[0].plan)


def test_far_from_zero() -> None:
    """Squares of what all elements have in common are not summed up."""
    x = torch.randn(2, 8, 64) + 1e4
    truth = F.group_norm(x.double(), 4)
    assert (compiled(lambda x: F.group_norm(x, 4))(x) - truth).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("reduced", "keeps"),
    [({2, 3}, True), ({0, 2, 3}, True), ({3}, False), ({1, 2, 3}, False)],
    ids=["group norm", "batch norm", "last dim", "all"],
)
def test_sums_over_points_keep_channels_last(reduced: set[int], keeps: bool) -> None:
    """What is stored beside them would else be laid out anew, in steps of a whole image."""
    unit: Any = SimpleNamespace(group=SimpleNamespace(reduced=reduced))
    assert _keeps_channels(unit, images(True)) is keeps
    assert not _keeps_channels(unit, images(False))
