"""Tuning: kernels of a model are measured when it is first compiled, and never again."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import torch

import torchair
from torchair.cli import main as command

files = tempfile.TemporaryDirectory()  # where results are written here; it goes at the end
os.chdir(files.name)
warnings.filterwarnings("ignore", message="frozen_parameter is on")

model = torch.nn.Sequential(torch.nn.Linear(256, 688), torch.nn.SiLU(), torch.nn.Linear(688, 256))
x = torch.randn(1, 256)


def compiled_with(config: torchair.CompilerConfig) -> torch.Tensor:
    """The result of the model, compiled now."""
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, dynamic=False)(x)


def seen() -> float:
    """When results were last written."""
    return Path("torchair_tuned.sqlite").stat().st_mtime


with torch.no_grad():
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.aoe_config.aoe_mode = "2"
    config.aoe_config.work_path = "."
    result = compiled_with(config)
    print("equal to eager:", torch.allclose(result, model(x), atol=1e-5))

    written = seen()
    compiled_with(config)
    print("measured again:", seen() != written)

    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tuned_kernels = "torchair_tuned.sqlite"
    print("equal without aoe_mode:", torch.equal(compiled_with(config), result))

command(["tune", "--merge", "torchair_tuned.sqlite", "-o", "all.sqlite"])
