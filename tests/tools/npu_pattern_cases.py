"""Functions of `npu` operators that patterns join: with arguments, the operator that is left, and
the modes in which they are joined."""

from __future__ import annotations

from typing import Any

import torch

from npu_cases import BF16, npu, randn
from torchair.ascend import ops as library

library.define()
X1, X2, GAMMA = (t.to(BF16) for t in (randn(2, 3, 16), randn(2, 3, 16, seed=1), randn(16)))
SCALES, ZEROS = randn(16).abs() / 20 + 0.01, torch.zeros(16, dtype=torch.int32)
LEFT, WEIGHT = randn(3, 4, 16).to(BF16), randn(4, 16, 32).to(BF16)


def _cast(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g, 1e-5)
    return y, x, y.to(torch.float32), y.view(-1, 16).float()


def dynamic(a: Any, b: Any, g: Any) -> Any:
    """A norm of a sum, quantised by rows."""
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


def _returned(a: Any, w: Any) -> Any:
    return torch.bmm(a.transpose(0, 1), w).transpose(0, 1)


def _passed_on(a: Any, w: Any) -> Any:
    return _returned(a, w) * 2 + 1


def _product(a: Any, w: Any) -> Any:
    rows = _returned(a, w).flatten(1)
    return rows @ rows.mT / 64


def _unaligned(a: Any, w: Any) -> Any:
    return _product(a, w[..., :30])


NORM, PLAIN, GRAPHS, CAPTURED = (
    "npu_add_rms_norm",
    (X1, X2, GAMMA),
    "max-autotune",
    "reduce-overhead",
)
BOTH = (GRAPHS, CAPTURED)
PATTERNS: dict[str, Any] = {
    "cast": (_cast, PLAIN, f"{NORM}_cast", BOTH),
    "dynamic": (dynamic, PLAIN, f"{NORM}_dynamic_quant", BOTH),
    "dynamic-rows": (_dynamic_rows, PLAIN, f"{NORM}_dynamic_quant", BOTH),
    "read-otherwise": (_read_otherwise, PLAIN, NORM, (GRAPHS,)),
    "quant": (_quant, (*PLAIN, SCALES, ZEROS), f"{NORM}_quant", (CAPTURED,)),
    "product": (_product, (LEFT, WEIGHT), "npu_transpose_batchmatmul", (CAPTURED,)),
    "returned": (_returned, (LEFT, WEIGHT), "bmm", (CAPTURED,)),
    "passed-on": (_passed_on, (LEFT, WEIGHT), "bmm", (CAPTURED,)),
    "unaligned": (_unaligned, (LEFT, WEIGHT), "bmm", (CAPTURED,)),
}
