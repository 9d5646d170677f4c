"""Ascend beside the core: what loads it, and what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"

PROGRAM = """
import json, sys
import torch, torchair

found = {}

def note(what):
    found[what] = sorted(name for name in sys.modules if name.startswith("torchair.ascend"))

note("import")
backend = torchair.get_npu_backend()
linear, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
compiled = torch.compile(linear, backend=backend)
assert torch.allclose(compiled(x), linear(x), atol=1e-5)
note("linear")

layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).train()
layer.compile(backend=backend)
layer(torch.randn(2, 3, 8)).sum().backward()

def products(x, weight, scales):
    whole = torch._int_mm(x.to(torch.int8), weight.t())
    return whole, torch._weight_int8pack_mm(x.bfloat16(), weight, scales)

weight = torch.ones(32, 32, dtype=torch.int8)
torch.compile(products, backend=backend)(torch.ones(32, 32), weight, torch.ones(32).bfloat16())
note("training and quantised products")

from torchair.operators import row_of
assert row_of("NetOutput") is None and row_of("NoSuchOperator") is None
note("unknown operators")
assert row_of("FastGelu").is_native
note("an operator of the npu library")
from torchair.convert import find
assert find("npu.npu_rms_norm.default") is not None
note("a converter of the npu library")
import torchair.core.utils
note("an old name")
import torchair.emulate
note("emulation")
print(json.dumps(found))
"""


def found() -> dict[str, list[str]]:
    """Modules of Ascend that are loaded after each step of a program."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = str(SOURCE)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: Any = json.loads(done.stdout.splitlines()[-1])
    return made


def test_ascend_is_loaded_when_something_asks_for_it():
    loaded = found()
    for step in ("import", "linear", "training and quantised products", "unknown operators"):
        assert loaded[step] == [], step
    steps = {
        "an operator of the npu library": ("operators", "convert"),
        "a converter of the npu library": ("convert", "legacy"),
        "an old name": ("legacy", "emulate"),
        "emulation": ("emulate", "rules"),
    }
    for step, (wanted, other) in steps.items():
        assert f"torchair.ascend.{wanted}" in loaded[step], step
        assert f"torchair.ascend.{other}" not in loaded[step], step
