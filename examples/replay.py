"""Capture once, replay many times: the backend npugraph_ex and what it asks of its user.

Run it: `python examples/replay.py`. docs/npugraph_ex.md explains what it prints.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import npugraph_ex


class Decoder(nn.Module):
    """One token at a time; what was seen before is in a cache that the graph updates."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(16))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        self.cache.add_(self.words(token).sum(0))
        return torch.tanh(self.mix(self.cache))


def show(title: str) -> None:
    print(f"\n== {title}\n")


def captures() -> dict[str, int]:
    """Our counters, without the number of the graph in their names."""
    return {name.rpartition("_graph_")[0]: n for name, n in counters["npugraph_ex"].items()}


def forget() -> None:
    torch._dynamo.reset()
    counters.clear()


def one_capture_for_all_steps() -> None:
    show("1 five steps, one capture")
    model, reference = Decoder(), Decoder()
    reference.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend=npugraph_ex.get_npu_backend())
    with torch.no_grad():
        for step in range(5):
            token = torch.tensor([step])
            torch.testing.assert_close(fast(token), reference(token))
    print("captures:", captures())


def results_can_be_shared() -> None:
    show("2 a result that is kept")
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
    for share in (False, True):
        forget()
        backend = npugraph_ex.get_npu_backend()
        double = torch.compile(lambda x: x * 2, backend=backend, options={"share_results": share})
        first = double(x)
        double(y)
        print(f"share_results={share}:", first.tolist())


def sizes_are_keys() -> None:
    show("3 sizes, and a limit")
    forget()
    config = npugraph_ex.CompilerConfig()
    config.capture_limit = 2
    backend = npugraph_ex.get_npu_backend(compiler_config=config)
    square = torch.compile(lambda x: x * x, backend=backend, dynamic=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in (3, 4, 3, 4, 5):
            x = torch.arange(float(n))
            torch.testing.assert_close(square(x), x * x)
            print(f"size {n}:", captures())
    print(*(str(w.message).partition(": ")[2] for w in said if "limit" in str(w.message)))


def graph_of_your_own() -> None:
    show("4 a graph of your own")
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4, 4)
    gm = make_fx(lambda x: (torch.relu(x) + 1,), tracing_mode="fake")(x)
    call = npugraph_ex.compile_fx(gm, options={"clone_output": True})
    torch.testing.assert_close(call(x)[0], torch.relu(x) + 1)
    print("compile_fx:", [n.name for n in gm.graph.nodes if n.op == "call_function"])


def saved_tensors() -> None:
    show("5 tensors as files")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dump_tensor_data": True, "data_dump_dir": folder}
        backend = npugraph_ex.get_npu_backend()
        call = torch.compile(lambda x: (x + 1).sin(), backend=backend, options=options)
        call(torch.zeros(2))
        for file in sorted(Path(folder).rglob("*.pt")):
            print(file.relative_to(folder).as_posix(), torch.load(file))


def wrong_options() -> None:
    show("6 a wrong option")
    for name, value in (("capture_error_mode", "strict"), ("clone_outputs", True)):
        try:
            setattr(npugraph_ex.CompilerConfig(), name, value)
        except ValueError as error:
            print(str(error).splitlines()[0][:90])


def main() -> None:
    torch.manual_seed(0)
    one_capture_for_all_steps()
    results_can_be_shared()
    sizes_are_keys()
    graph_of_your_own()
    saved_tensors()
    wrong_options()
    print("\nall results were equal to eager")


if __name__ == "__main__":
    main()
