"""A program of torch.export: compiled, and packaged with machine code for many processors.

    python examples/package.py

The package is loaded in a second process in which llvmlite cannot be imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import torchair
from torchair.errors import InputError

ELSEWHERE = """
import sys
sys.modules["llvmlite"] = None  # importing it is an ImportError from now on
import torch, torchair

folder = sys.argv[1]
model = torchair.load(f"{folder}/model.air", key=f"{folder}/key")
results = [model(torch.ones(rows, 16)) for rows in (1, 5, 64)]
torch.save(results, f"{folder}/results.pt")
print("without llvmlite:", model)
"""


class Scorer(nn.Module):
    """Two layers, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        return {"scores": self.layers(x).softmax(-1), "calls": self.calls + 0}


def show_compiled(model: nn.Module, folder: str) -> None:
    """Export the model and compile the program, in this process and from its file."""
    program = torch.export.export(
        model, (torch.ones(4, 16),), dynamic_shapes={"x": {0: Dim("rows", min=1, max=64)}}
    )
    torch.export.save(program, f"{folder}/model.pt2")
    fast = torchair.compile(program)
    for call in (fast, torchair.load(f"{folder}/model.pt2")):
        print(call, "gives", {k: tuple(v.shape) for k, v in call(torch.ones(9, 16)).items()})
    try:
        fast(torch.ones(65, 16))
    except InputError as error:
        print(error)


def main() -> None:
    """Compile, package, load elsewhere, compare."""
    torch.manual_seed(0)
    model = Scorer()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        show_compiled(model, folder)
        Path(folder, "key").write_bytes(os.urandom(32))
        processors = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"]
        torchair.package(
            f"{folder}/model.pt2", f"{folder}/model.air", cpu=processors, key=f"{folder}/key"
        )
        command = [sys.executable, "-c", ELSEWHERE, folder]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
        found = torch.load(f"{folder}/results.pt")
        fresh = torch.export.load(f"{folder}/model.pt2").module()
        for rows, result in zip((1, 5, 64), found, strict=True):
            torch.testing.assert_close(dict(result), fresh(torch.ones(rows, 16)))
        print("the package gives what eager gives")


if __name__ == "__main__":
    main()
