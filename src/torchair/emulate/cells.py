"""The fused cells of LSTM and GRU, which torch calls on this kind of device instead of its own.

They are written with tensors of the device, so that capture and random state need no thought here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Optional = Tensor | None


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New hidden state, new cell state, and the four gates for the backward."""
    gates = _sum(_sum(input_gates + hidden_gates, input_bias), hidden_bias)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


def lstm_cell_backward(
    grad_hy: Optional, grad_cy: Optional, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Optional, Optional, Optional]:
    """Gradients of the gates, of the old cell state, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, c, o = workspace.chunk(4, 1)
    bent = cy.tanh()
    hidden = grad_hy if grad_hy is not None else torch.zeros_like(bent)
    cell = _sum(hidden * o * (1 - bent * bent), grad_cy)
    parts = [
        cell * c * i * (1 - i),
        cell * cx * f * (1 - f),
        cell * i * (1 - c * c),
        hidden * bent * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """New hidden state, and what the backward needs."""
    a = _sum(input_gates, input_bias).chunk(3, 1)
    b = _sum(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
    new = (a[2] + reset * b[2]).tanh()
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, b[2]], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Optional, Optional]:
    """Gradients of both gates, of the old hidden state, and of both biases."""
    reset, update, new, hx, hidden = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden * reset * (1 - reset)
    of_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * update, *biases


def _sum(x: Tensor, y: Optional) -> Tensor:
    return x if y is None else x + y


CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
