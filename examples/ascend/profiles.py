"""A profile of a compiled model on the emulated device: its files, kernels by stream, steps."""

import csv
from pathlib import Path

import torch
import torch_npu
from torch_npu.profiler.profiler import analyse

import torchair

profiler, mstx = torch_npu.profiler, torch_npu.npu.mstx


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torchair.scope.npu_stream_switch("aside"):
            gate = torch.sigmoid(x)
        return self.second(torch.relu(self.first(x))) * gate


def profiled(mode: str, x: torch.Tensor) -> Path:
    """Profile two steps of a compiled model; the folder with the files."""
    config = torchair.CompilerConfig()
    config.mode = mode
    model = torch.compile(
        Model().npu(), backend=torchair.get_npu_backend(compiler_config=config), dynamic=False
    )
    model(x)  # compiles
    with profiler.profile(
        schedule=profiler.schedule(wait=0, warmup=0, active=2, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(f"./{mode}", analyse_flag=False),
        experimental_config=profiler._ExperimentalConfig(mstx=True),
    ) as prof:
        for _ in range(2):
            number = mstx.range_start("forward", torch.npu.current_stream())
            model(x)
            mstx.range_end(number)
            prof.step()
    analyse(f"./{mode}")
    (folder,) = Path(mode).glob("*_ascend_pt")
    return folder / "ASCEND_PROFILER_OUTPUT"


def show(folder: Path) -> None:
    """The kernels of a profile, without their times."""
    with open(folder / "kernel_details.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in sorted(rows, key=lambda r: (r["Step Id"], r["Stream ID"])):
        print(
            f"  step {row['Step Id']} stream {row['Stream ID']} {row['Accelerator Core']:14}"
            f" {row['Type']:14} {row['Input Shapes']} -> {row['Output Shapes']}"
        )


def main() -> None:
    x = torch.randn(8, 32).npu()
    with torch.no_grad():
        for mode in ("max-autotune", "reduce-overhead"):
            folder = profiled(mode, x)
            print(mode)
            show(folder)
    print("files:", ", ".join(sorted(f.name for f in folder.iterdir())))


if __name__ == "__main__":
    main()
