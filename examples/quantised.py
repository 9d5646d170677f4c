"""Weights of eight and of four bits: what becomes of them, and how close the results are.

python examples/quantised.py
"""

from __future__ import annotations

import copy
import os
from contextlib import redirect_stdout
from io import StringIO

import torch
from torch import Tensor, nn

GROUP = 32


class Linear(nn.Module):
    """A layer with integers for weights, as a quantiser leaves it: one scale for each piece of
    `group` integers of a row, 0 for the whole row."""

    def __init__(self, layer: nn.Linear, bits: int, group: int = GROUP) -> None:
        super().__init__()
        self.group = group or layer.in_features
        pieces = layer.weight.detach().unflatten(1, (-1, self.group))
        top = 2 ** (bits - 1) - 1
        scales = pieces.abs().amax(-1) / top
        integers = (pieces / scales[..., None]).round().flatten(1).to(torch.int8)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def weight(self) -> Tensor:
        """The numbers that the integers stand for."""
        pieces = self.integers.unflatten(1, (-1, self.group)).to(self.scales.dtype)
        return (pieces * self.scales[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias)


def quantise(model: nn.Module, bits: int, group: int = GROUP) -> None:
    """Give all layers of a model integers for weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Linear(child, bits, group))


def units(model: nn.Module, x: Tensor) -> tuple[Tensor, list[str]]:
    """A result of the compiled model, and the units that compute it."""
    torch._dynamo.reset()
    os.environ["TORCHAIR_DEBUG"] = "3"
    with redirect_stdout(StringIO()) as told:
        y = torch.compile(model, backend="torchair")(x)
    os.environ["TORCHAIR_DEBUG"] = "0"
    kinds = ("loops", "matmul", "torch  ")
    return y, [line for line in told.getvalue().splitlines() if line.startswith(kinds)]


@torch.no_grad()
def main() -> None:
    """Compile a block with both kinds of weights."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    x = torch.randn(1, 256)
    for bits in (8, 4):
        model = nn.Sequential(Linear(block[0], bits), nn.GELU(), Linear(block[2], bits))
        y, lines = units(model, x)
        print(f"{bits} bits:")
        print("\n".join(lines))
        right = copy.deepcopy(model).double()(x.double())
        print("as the dequantised weights say:", torch.allclose(y.double(), right, atol=1e-5))


if __name__ == "__main__":
    main()
