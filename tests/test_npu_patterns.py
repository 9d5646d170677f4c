"""Operators of the `npu` library that are joined: what graphs have, and that results agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchair
from npu_cases import BF16, npu, randn
from torchair.ops import npu as library

library.define()
X1, X2, GAMMA = (t.to(BF16) for t in (randn(2, 3, 16), randn(2, 3, 16, seed=1), randn(16)))
SCALES, ZEROS = randn(16).abs() / 20 + 0.01, torch.zeros(16, dtype=torch.int32)
LEFT, WEIGHT = randn(3, 4, 16).to(BF16), randn(4, 16, 32).to(BF16)


def _cast(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g, 1e-5)
    return y, x, y.to(torch.float32), y.view(-1, 16).float()


def _dynamic(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return *npu.npu_dynamic_quant(y), x


def _dynamic_rows(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return *npu.npu_dynamic_quant(y.flatten(0, 1), smooth_scales=g), x


def _read_otherwise(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return *npu.npu_dynamic_quant(y), x, y


def _quant(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return npu.npu_quantize(y, s, z, torch.qint8, -1), x


def _product(a: Any, w: Any) -> Any:
    return torch.bmm(a.transpose(0, 1), w).transpose(0, 1)


def _unaligned(a: Any, w: Any) -> Any:
    return torch.bmm(a.transpose(0, 1), w[..., :30]).transpose(0, 1)


NORM, PLAIN, GRAPHS, CAPTURED = (
    "npu_add_rms_norm",
    (X1, X2, GAMMA),
    "max-autotune",
    "reduce-overhead",
)
BOTH = (GRAPHS, CAPTURED)
PATTERNS: dict[str, Any] = {
    "cast": (_cast, PLAIN, f"{NORM}_cast", BOTH),
    "dynamic": (_dynamic, PLAIN, f"{NORM}_dynamic_quant", BOTH),
    "dynamic-rows": (_dynamic_rows, PLAIN, f"{NORM}_dynamic_quant", BOTH),
    "read-otherwise": (_read_otherwise, PLAIN, NORM, (GRAPHS,)),
    "quant": (_quant, (*PLAIN, SCALES, ZEROS), f"{NORM}_quant", (CAPTURED,)),
    "product": (_product, (LEFT, WEIGHT), "npu_transpose_batchmatmul", (CAPTURED,)),
    "unaligned": (_unaligned, (LEFT, WEIGHT), "bmm", (CAPTURED,)),
}


def graph_of(fn: Any, inputs: Any, mode: str, joined: bool = True) -> tuple[Any, list[str]]:
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
        return torch.compile(fn, backend=backend, fullgraph=True)(*inputs), seen


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, row in PATTERNS.items() for mode in row[3]]
)
def test_operators_are_joined(name, mode):
    fn, inputs, wanted, _ = PATTERNS[name]
    found, operators = graph_of(fn, inputs, mode)
    assert wanted in operators, operators
    if wanted not in (NORM, "bmm"):
        assert NORM not in operators and "bmm" not in operators
    expected = fn(*inputs)
    for ours, eager in zip(_list(found), _list(expected), strict=True):
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        step = 1 if ours.dtype == torch.int8 else 2e-2  # the norm is not rounded in between
        torch.testing.assert_close(ours.double(), eager.double(), rtol=2e-2, atol=step)


def _list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def test_the_switch_of_patterns():
    _, operators = graph_of(_dynamic, PLAIN, CAPTURED, joined=False)
    assert NORM in operators and f"{NORM}_dynamic_quant" not in operators
