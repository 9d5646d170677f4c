"""Operators of the `npu` library that are joined: what graphs have, and that results agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchair
from npu_pattern_cases import CAPTURED, NORM, PATTERNS, PLAIN, dynamic


def graph_of(
    fn: Any, inputs: Any, mode: str, joined: bool = True, dynamic: bool | None = None
) -> tuple[Any, list[str]]:
    """Results, and the names of the operators that the graph has."""
    seen: list[str] = []
    config = torchair.CompilerConfig()
    config.mode = mode
    config.experimental_config.pattern_fusion_pass = joined
    config.post_grad_custom_post_pass = lambda gm, given, config: seen.extend(
        n.target._opname for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
    )
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    with torch.no_grad():
        call = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
        return call(*inputs), seen


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, row in PATTERNS.items() for mode in row[3]]
)
def test_operators_are_joined(name, mode):
    fn, inputs, wanted, _ = PATTERNS[name]
    found, operators = graph_of(fn, inputs, mode)
    assert wanted in operators, operators
    if wanted not in (NORM, "bmm"):
        assert NORM not in operators and "bmm" not in operators
    _check(found, fn(*inputs))


@pytest.mark.parametrize("name", PATTERNS)
def test_operators_of_symbolic_sizes(name):
    """Sizes of views are nodes of their own, which stand behind the norm."""
    fn, inputs, wanted, modes = PATTERNS[name]
    found, operators = graph_of(fn, inputs, modes[0], dynamic=True)
    if wanted.startswith(NORM):
        assert wanted in operators, operators
    _check(found, fn(*inputs))


def _check(found: Any, expected: Any) -> None:
    for ours, eager in zip(_list(found), _list(expected), strict=True):
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        assert ours.stride() == eager.stride()
        step = 1 if ours.dtype == torch.int8 else 2e-2  # the norm is not rounded in between
        torch.testing.assert_close(ours.double(), eager.double(), rtol=2e-2, atol=step)


def _list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def test_the_switch_of_patterns():
    _, operators = graph_of(dynamic, PLAIN, CAPTURED, joined=False)
    assert NORM in operators and f"{NORM}_dynamic_quant" not in operators
