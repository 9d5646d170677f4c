"""Fixed and varying sizes: what Dynamo traces, and what graph comes of it.

    torchair run dynamic_static.py static        dynamic=False
    torchair run dynamic_static.py dynamic       dynamic=True
    torchair run dynamic_static.py mark_static   dynamic=True, the tensor's sizes declared fixed

The model has everything that can go into a graph: parameters, a buffer, a tensor that the caller
gives, and a number. The log shows the FX graph; the dumped Python file in the working folder is the
graph that the engine gets, one `ge.` call for each operator.
"""

import logging
import os
import sys

os.environ.setdefault("TNG_LOG_LEVEL", "3")  # the engine's own log; 0 tells everything

import torch
from torch import nn

import torchair
from torchair.configs.compiler_config import CompilerConfig
from torchair.core.utils import logger

logger.setLevel(logging.INFO)


class DemoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(64))
        self.linear1 = nn.Linear(128, 64)

    def forward(self, x, scale_factor):
        x = self.linear1(x)
        x = x - self.running_mean
        x = x * scale_factor
        return x


def main(variant: str) -> None:
    config = CompilerConfig()
    config.debug.graph_dump.type = "py"
    backend = torchair.get_npu_backend(compiler_config=config)

    model = DemoModel().npu()
    compiled = torch.compile(model, dynamic=variant != "static", fullgraph=True, backend=backend)

    x = torch.randn(100, 128).npu()
    if variant == "mark_static":
        torch._dynamo.mark_static(x)
    for _ in range(4):
        result = compiled(x, 100)
    torch.testing.assert_close(result, model(x, 100))
    print(variant, "equals eager on", result.device)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "static")
