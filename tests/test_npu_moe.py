"""Operators of the `npu` library for experts, products and number formats: values, fake results,
conversion, compiled graphs in all modes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import npu_expert_cases
import npu_mx_cases
from npu_cases import Case
from op_harness import check
from test_npu_ops import assert_close, copies

Tensor = torch.Tensor
ALL = [*npu_mx_cases.CASES, *npu_expert_cases.CASES]
by_name = pytest.mark.parametrize("case", ALL, ids=str)


@by_name
def test_values(case):
    inputs = copies(case.inputs)
    expected = Case("", case.expected, (), case.expected).call(*case.inputs)
    assert_close(case.call(*inputs), expected, case.rough)
    for used, given in zip(inputs, case.inputs, strict=True):
        assert torch.equal(used.view(torch.uint8), given.view(torch.uint8))


@by_name
def test_fake_results_look_like_real_ones(case):
    real = case.call(*case.inputs)
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in case.inputs))
    assert [(r.shape, r.dtype) for r in real] == [(f.shape, f.dtype) for f in fake]


@by_name
def test_conversion(case):
    conversion = check(case.call, *case.inputs, generic=case.generic, strict=not case.generic)
    assert bool(conversion.generic) == case.generic
