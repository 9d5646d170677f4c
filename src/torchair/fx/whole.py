"""Operators that torch takes apart while it traces, and that one GE operator stands for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_lock = threading.RLock()


def _nearest(x: torch.Tensor, output_size: Any, scale_factors: Any) -> torch.Tensor:
    """`upsample_nearest2d.vec` as the operator that takes sizes."""
    from torch._decomp.decompositions import upsample_compute_output_size

    size = upsample_compute_output_size(x.size(), output_size, scale_factors)
    resized: torch.Tensor = torch.ops.aten.upsample_nearest2d.default(
        x, size, *(scale_factors or (None, None))
    )
    return resized


# The Python kernel that tracing gets for each operator; None leaves it to torch's own dispatch.
_KERNELS: dict[Any, Any] = {
    torch.ops.aten.upsample_nearest2d.default: None,
    torch.ops.aten.upsample_nearest2d.vec: _nearest,
}


@contextmanager
def kept_whole() -> Iterator[None]:
    """Trace without taking these operators apart. Other backends trace as before."""
    with _lock:
        before = {op: dict(op.py_kernels) for op in _KERNELS}
        for op, kernel in _KERNELS.items():
            _set_kernels(op, dict.fromkeys(_KEYS, kernel) if kernel is not None else {})
        try:
            yield
        finally:
            for op, kernels in before.items():
                _set_kernels(op, {k: f for k, f in kernels.items() if k in _KEYS})


def _set_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    for key in _KEYS:
        op.py_kernels.pop(key, None)
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
