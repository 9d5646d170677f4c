"""A model as a file: exported, loaded without its source, run on the command line.

python examples/export.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import torchair
from torchair import cli


class Counter(nn.Module):
    """Two layers, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layers(x) + bias * self.calls


@torch.no_grad()
def main() -> None:
    """Export, load, compare, and show the command."""
    torch.manual_seed(0)
    model = Counter()
    with tempfile.TemporaryDirectory() as folder:
        x, bias = torch.randn(3, 16), torch.randn(4)
        torchair.dynamo_export(x, bias, model=model, export_path=folder, dynamic=True)
        print("files:", sorted(p.name for p in Path(folder).iterdir()))

        loaded = torchair.load(f"{folder}/export.air")
        print(loaded)
        for rows in (3, 5):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(loaded(x, bias=bias), model(x, bias))
        print("the loaded model gives what the model gives, and counts its calls too")

        np.save(f"{folder}/x.npy", x.numpy())
        np.save(f"{folder}/bias.npy", bias.numpy())
        inputs = ["--input", f"{folder}/x.npy", "--input", f"{folder}/bias.npy"]
        cli.main(["run-air", f"{folder}/export.air", *inputs, "--output", folder])


if __name__ == "__main__":
    main()
