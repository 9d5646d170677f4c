"""From a model to a graph that runs, in either mode.

torchair run end_to_end.py max-autotune      the engine plans and runs the whole graph
torchair run end_to_end.py reduce-overhead   the graph is captured once and replayed
"""

import sys
import warnings

import torch
import torch_npu

import torchair


class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch.add(x, y)


def main(mode: str) -> None:
    model = Model().npu()

    config = torchair.CompilerConfig()
    config.mode = mode
    with warnings.catch_warnings(action="ignore"):  # a newer name of the second mode is suggested
        npu_backend = torchair.get_npu_backend(compiler_config=config)
    opt_model = torch.compile(model, backend=npu_backend, fullgraph=True, dynamic=False)

    x, y, z = (torch.randn(2, 2).npu() for _ in range(3))
    first = opt_model(x, y).clone()  # compiled here; a replay overwrites the results of the last
    start, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    second = opt_model(x, z)
    end.record()
    torch.npu.synchronize()
    torch.testing.assert_close(first, model(x, y))
    torch.testing.assert_close(second, model(x, z))
    print(f"{mode} equals eager on {torch.npu.get_device_name()}")
    print(f"a call takes {start.elapsed_time(end) * 1e3:.0f} us", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "max-autotune")
