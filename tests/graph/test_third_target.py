"""A target in a file of its own, registered in one line, runs operators as eager does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.cases import call_of
from conformance.check import check
from conformance.choose import Chosen, read_slice
from plain_target import PlainTarget
from torchair import ge
from torchair.engine.compile import TARGETS
from torchair.engine.run.native import StepError
from torchair.engine.session import TorchNpuGraph
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer

EVERY = 4  # sample of the slice; `python tests/tools/plain_target.py` runs all of them
pytestmark = pytest.mark.filterwarnings("ignore")  # the samples are made to provoke them


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainTarget]:
    target = PlainTarget()
    monkeypatch.setitem(TARGETS, "cpu", lambda index: target)
    yield target


@pytest.mark.parametrize(
    "chosen", read_slice()[::EVERY], ids=lambda c: str(c.case).replace(" ", "-")
)
def test_sample(chosen: Chosen, plain: PlainTarget) -> None:
    outcome = check(chosen.case, call_of(chosen.case))
    assert outcome.right, outcome.reason


def layer(rows: int | None) -> Graph:
    """A product with an epilogue, a reduction over its rows, and an update in place."""
    with Graph("layer", infer) as graph:
        shape = [-1 if rows is None else rows, 8]
        x = ge.Data(index=0, dtype=DataType.DT_FLOAT, shape=shape, placement="CPU")
        w = ge.Data(index=1, dtype=DataType.DT_FLOAT, shape=[8, 8], placement="CPU")
        h = ge.Relu(ge.MatMul(x, w, transpose_x2=True))
        ge.NetOutput([ge.Add(h, ge.ReduceSum(x, [1], keep_dims=True))])
    return graph


def test_steps_of_a_plan_run_in_the_target(plain: PlainTarget) -> None:
    session, w = TorchNpuGraph("layer"), torch.randn(8, 8)
    session.load(layer(3))
    x = torch.randn(3, 8)
    (got,) = session.run([x, w])
    torch.testing.assert_close(got, (x @ w.t()).relu() + x.sum(1, keepdim=True))
    plan = session.last_plan()
    assert plan is not None and plan.target is plain and plan.native_steps
    assert plain.ran == [s.code.kernel.entry for s in plan.native_steps]


def test_a_bad_index_names_its_node(plain: PlainTarget) -> None:
    with Graph("gather", infer) as graph:
        x = ge.Data(index=0, dtype=DataType.DT_FLOAT, shape=[4, 2], placement="CPU")
        at = ge.Data(index=1, dtype=DataType.DT_INT64, shape=[3], placement="CPU")
        ge.NetOutput([ge.GatherV2(x, at, [0])])
    session, x = TorchNpuGraph("gather"), torch.randn(4, 2)
    session.load(graph)
    right = torch.tensor([3, 0, 1])
    torch.testing.assert_close(session.run([x, right])[0], x[right])
    with pytest.raises(StepError, match="GatherV2 failed: an index is out of range"):
        session.run([x, torch.tensor([0, 9, 1])])
    torch.testing.assert_close(session.run([x, right])[0], x[right])
