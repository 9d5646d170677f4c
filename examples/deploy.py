"""Calls without Dynamo: torchair.compile, what it guards, what it sees; gears; methods on disk.

Run it: `python examples/deploy.py`. docs/deploy.md explains what it prints.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import torchair
from torchair.errors import InputError
from torchair.inference import cache_compile, set_dim_gears


class Decoder(nn.Module):
    """One token at a time; what was seen before is in a cache that the model updates."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(16))

    def forward(self, token: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.cache.mul_(0.5).add_(self.words(token).sum(0) * scale)
        return {"state": torch.tanh(self.mix(self.cache))}


def twins() -> tuple[Decoder, Decoder]:
    model, reference = Decoder(), Decoder()
    reference.load_state_dict(model.state_dict())
    return model, reference


@torch.no_grad()
def called_as_the_model() -> None:
    model, reference = twins()
    fast = torchair.compile(model, torch.tensor([0]))
    for step in range(5):
        token = torch.tensor([step])
        torch.testing.assert_close(fast(token), reference(token))
    model.mix.weight.mul_(2)  # in place, and seen
    reference.mix.weight.mul_(2)
    torch.testing.assert_close(fast(token), reference(token))
    print("five steps and new weights: equal to eager")


@torch.no_grad()
def with_fewer_guards() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    x = torch.randn(1, 16)
    expected = model(x)
    unguarded = {"guard_filter_fn": torchair.skip_model_guards_unsafe}
    model.compile(backend="torchair", options=unguarded, isolate_recompiles=True)
    for _ in range(5):
        torch.testing.assert_close(model(x), expected)
    model[0].weight.zero_()  # values are seen, a layer that is replaced is not
    torch.testing.assert_close(model(x), model[0].bias.relu()[None])
    print("fewer guards: equal to eager")


def what_does_not_fit() -> None:
    fast = torchair.compile(Decoder(), torch.tensor([0]))
    try:
        fast(torch.tensor([1, 2]))
    except InputError as error:
        print(error)
    lenient = torchair.compile(Decoder(), torch.tensor([0]), on_mismatch="recompile")
    lenient(torch.tensor([1, 2]))
    print(f"compiled for {len(lenient.versions)} kinds of calls")


@torch.no_grad()
def sizes_that_vary() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    fast = torchair.compile(model, torch.randn(4, 16), dynamic={"input": [0]})
    for rows in (2, 8, 100):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(fast(x), model(x))
    print(f"three sizes, {len(fast.versions)} graph: equal to eager")


@torch.no_grad()
def gears() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    fast = torch.compile(model, backend="torchair", dynamic=True)
    first = torch.randn(4, 16)
    set_dim_gears(first, {0: [2, 4, 8]})
    fast(first)  # plans for 2, 4 and 8 rows
    for rows in (2, 4, 8):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(fast(x), model(x))
    print("three gears: equal to eager")


def kept_on_disk(folder: str) -> None:
    for process in ("first", "second"):
        call = cache_compile(Decoder().forward, dynamic=False, cache_dir=folder)
        print(f"{process}: {'read' if call.path.exists() else 'compiled'}")
        call(torch.tensor([3]))


if __name__ == "__main__":
    torch.manual_seed(0)
    called_as_the_model()
    with_fewer_guards()
    what_does_not_fit()
    sizes_that_vary()
    gears()
    with tempfile.TemporaryDirectory() as folder:
        kept_on_disk(folder)
