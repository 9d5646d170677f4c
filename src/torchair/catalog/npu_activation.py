"""Gradients of gated and rotary activations, and rotary embeddings in all their modes."""

from __future__ import annotations

from typing import Any

from torchair.catalog.core import Kernel, Op, add_row, same_as
from torchair.ge.graph import Fact
from torchair.ops.npu import activation, norm


def _swiglu_grad(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda grad, x: activation.swiglu_backward(grad, x, dim)


add_row("SwiGluGrad", same_as("x"), _swiglu_grad)


# ---- rotary embedding ----


def _mode(op: Op) -> str:
    return activation.ROTARY_MODES[op.attr("mode")]


def _rotary(op: Op) -> Kernel:
    mode = _mode(op)
    activation.check_rotary(op.shape("x"), mode, op.get("rotate"))
    return lambda x, cos, sin, rotate: activation.rotary(x, cos, sin, mode)


def _rotary_grad(op: Op) -> Kernel:
    mode = _mode(op)

    def run(dy: Any, cos: Any, sin: Any, x: Any) -> Any:
        return activation.rotary_backward(dy, x, cos, sin, mode)

    return run


def _like(*ports: str) -> Any:
    return lambda op: [Fact(op.dtype(p), op.shape(p)) for p in ports]


def _half_grad(x: Any, r1: Any, r2: Any, dy: Any) -> Any:
    return activation.rotary_backward(dy, x, r1, r2)


add_row("RotaryPositionEmbedding", same_as("x"), _rotary)
add_row("RotaryPositionEmbeddingGrad", _like("dy", "cos", "sin"), _rotary_grad)
add_row("RotaryMulGrad", _like("x", "r1", "r2"), lambda op: _half_grad)


# ---- root mean square norm ----


def _rms_norm_grad_rule(op: Op) -> list[Fact]:
    return [Fact(op.dtype("x"), op.shape("x")), Fact(op.dtype("rstd"), op.shape("gamma"))]


def _rms_norm_grad(dy: Any, x: Any, rstd: Any, gamma: Any) -> Any:
    return norm.rms_norm_backward(dy, x, gamma, rstd)


add_row("RmsNormGrad", _rms_norm_grad_rule, lambda op: _rms_norm_grad)
