"""Streams: two labels in a model, the timeline of a call, the checker, and streams of torch's own
API on the emulated device. See docs/streams.md."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from pathlib import Path

import torch

import torchair
import torchair.emulate
from torchair import ops, scope


class Model(torch.nn.Module):
    """Two operators on a stream of their own, and one that waits for them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with scope.npu_stream_switch("stream_1"):
            mm = torch.mm(x, x)
            abs = torch.abs(mm)
            done = ops.record()
        add = torch.add(abs, 1)
        ops.wait([done])
        sub = torch.sub(x, mm)
        return add, sub


def racy(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """One stream reads what another overwrites, and nothing says which comes first."""
    with scope.npu_stream_switch("reader"):
        old = torch.exp(cache)
    with scope.npu_stream_switch("writer"):
        cache.add_(new)
    return old


def manual(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams as scripts for an NPU have them."""
    side, ready, done = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
    total = x + y
    ready.record()
    with torch.npu.stream(side):
        ready.wait()
        mm = torch.mm(total, y)
        done.record()
        total.record_stream(side)
    abs = torch.abs(torch.mm(x, y))
    done.wait()
    return total, abs, mm - abs


def show_timeline(folder: str) -> None:
    """What ran on which stream, and who waited for whom, from the file of the timeline."""
    path = max(Path(folder).glob("timeline_*.json"))
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    for row, name in rows.items():
        ran = [e["name"] for e in slices if e["tid"] == row]
        print(f"{name:16s} {' '.join(ran)}")
    for event in [e for e in events if e["ph"] == "s"]:
        print(f"{event['args']['for']} waits for {event['args']['of']}")


def main(folder: str) -> None:
    """Run both parts; files are written to a folder."""
    config = torchair.CompilerConfig()
    config.debug.timeline.type = "json"
    config.debug.timeline.path = folder
    model, x = Model(), torch.randn(3, 3)
    compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
    torch.testing.assert_close(compiled(x), model(x))
    show_timeline(folder)

    config = torchair.CompilerConfig()
    config.debug.deadlock_check = True
    warnings.simplefilter("ignore")  # the findings are printed, too
    checked = torch.compile(racy, backend=torchair.get_npu_backend(compiler_config=config))
    cache = torch.zeros(4)
    assert torch.equal(checked(cache, torch.ones(4)), torch.ones(4))
    assert torch.equal(cache, torch.ones(4))

    torchair.emulate.install()  # nothing to do on a machine with an NPU
    config = torchair.CompilerConfig()
    config.debug.timeline.type = "json"
    config.debug.timeline.path = folder
    backend = torchair.get_npu_backend(compiler_config=config)
    compiled = torch.compile(manual, backend=backend, fullgraph=True)
    x, y = torch.randn(3, 3).npu(), torch.randn(3, 3).npu()
    torch.testing.assert_close(compiled(x, y), manual(x, y))
    show_timeline(folder)


if __name__ == "__main__":
    # The checker writes to the working directory.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.no_grad():
        main(folder)
