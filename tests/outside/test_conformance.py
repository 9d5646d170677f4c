"""A slice of the conformance run: every built-in converter executed at least once, and right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from conformance import extra
from conformance.cases import DEVICE, Call, Case, Group, call_of, operators, spread
from conformance.check import FAILED, GENERIC, PASSED, UNTRACEABLE, Outcome, check
from conformance.choose import Chosen, read_slice
from conformance.extra import EXTRA, Extra
from conformance.report import Known, judge, read_known
from conformance.watch import builtin_targets, name_of, watch
from conformance.workers import Limits, run_all
from torchair.convert import Decline, registry

SLICE = read_slice()
ON_GPU = {
    "aten._weight_int4pack_mm.default",
    *(
        f"aten._scaled_dot_product_{kind}_attention.default"
        for kind in ("flash", "efficient", "cudnn")
    ),
}
"""Operators of tensors on a GPU; test_cuda_text.py converts them."""
pytestmark = pytest.mark.filterwarnings("ignore")  # the samples are made to provoke them


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads only get in the way of the other test process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chosen", SLICE, ids=lambda c: str(c.case).replace(" ", "-"))
def test_sample(chosen: Chosen) -> None:
    case = chosen.case
    if DEVICE != "cpu" and case.group.op not in operators():
        return  # an older torch than the slice was made with
    outcome = check(case, call_of(case))
    if DEVICE != "cpu":  # other operators are called there, and some samples are for hosts only
        assert outcome.status != FAILED, outcome.reason
        return
    assert outcome.right, outcome.reason
    missed = set(chosen.covers) - set(outcome.used)
    assert not missed, f"not executed any more, run conformance.choose again: {missed}"


@pytest.mark.parametrize("item", EXTRA, ids=lambda e: e.covers)
def test_extra(item: Extra) -> None:
    with extra.one_process() if "c10d" in item.covers else nullcontext():
        with watch() as seen:
            got = tree_leaves(extra.run(item))
        expected = tree_leaves(extra.run_eagerly(item))
    assert not seen.errors and not seen.generic
    assert item.covers in {name_of(t) for t in seen.used}
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        if not seen.random:
            torch.testing.assert_close(g, e, equal_nan=True)


def test_every_converter_is_executed() -> None:
    by_samples = {name for chosen in SLICE for name in chosen.covers}
    by_hand = {item.covers for item in EXTRA}
    missing = builtin_targets() - by_samples - by_hand - ON_GPU
    assert not missing, (
        f"run conformance.choose on a new report, or add to conformance/extra.py: {sorted(missing)}"
    )


def test_known_failures_are_of_the_database() -> None:
    for entry in read_known():
        assert entry.op in operators() and list(entry.cases())


# ---- the check itself ----

SINE = Case(Group("sin", "float32", "forward"), 0)


def _sine() -> Call:
    return call_of(SINE)


def _check_sine(convert: Any) -> Outcome:
    target = torch.ops.aten.sin.default
    with mock.patch.dict(registry._builtin, {target: registry.entry_of(convert, by_user=False)}):
        return check(SINE, _sine())


def test_a_right_converter_passes() -> None:
    outcome = check(SINE, _sine())
    assert (outcome.status, outcome.families) == (PASSED, ["elementwise"])


def test_a_wrong_converter_fails() -> None:
    from torchair import ge

    outcome = _check_sine(lambda self: ge.Cos(self))
    assert outcome.status == FAILED and "not close" in outcome.reason


def test_a_converter_that_raises_fails() -> None:
    def convert(self: Any) -> Any:
        raise ValueError("oops")

    outcome = _check_sine(convert)
    assert outcome.status == FAILED and "oops" in outcome.reason


def test_a_converter_that_declines_is_generic() -> None:
    def convert(self: Any) -> Any:
        raise Decline("not today")

    outcome = _check_sine(convert)
    assert outcome.status == GENERIC and outcome.generic == {"aten.sin.default": 1}


def test_what_aot_cannot_trace_is_no_failure() -> None:
    outcome = check(SINE, Call(lambda x: x[x > 0], [torch.randn(4)]))
    assert outcome.status == UNTRACEABLE


def test_a_random_operator_must_repeat_itself() -> None:
    outcome = check(SINE, Call(lambda x: torch.rand_like(x) + x, [torch.randn(4)]))
    assert outcome.right


def test_a_changed_input_is_compared() -> None:
    outcome = check(SINE, Call(lambda x: x.add_(1), [torch.randn(4)]))
    assert outcome.right


@pytest.mark.parametrize(("seconds", "right"), [(0, False), (120, True)])
def test_workers(seconds: float, right: bool) -> None:
    ((group, outcomes),) = run_all([SINE.group], 1, Limits(samples=1, seconds=seconds))
    assert group == SINE.group
    assert [outcome.right for outcome in outcomes] == [right]


def test_verdict() -> None:
    good, bad = Outcome(SINE, PASSED), Outcome(SINE, FAILED, "wrong")
    known = [Known("sin", ["float32"], ["forward"], "0-2, 7", "a reason")]
    assert judge([good], []).good
    assert judge([bad], known).good
    assert judge([bad], []).new == [bad]
    assert judge([good], known).stale == [SINE]


def test_samples_are_spread() -> None:
    assert spread(3, 4) == [0, 1, 2]
    assert spread(32, 4) == [0, 10, 21, 31]
    assert spread(9, 1) == [0]
