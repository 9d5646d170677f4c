"""What one of several processes does under `torchrun`: collectives alone, and a tensor-parallel
block. Expected values are computed without any communication."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torchair

warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
SIZE = int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])


def given(rank: int) -> torch.Tensor:
    """What a process begins with; every other knows it too."""
    return (torch.arange(32.0).reshape(4, 8) % 7 + 10 * rank) / 4


def everyone() -> list[torch.Tensor]:
    return [given(r) for r in range(SIZE)]


def compiled(fn: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    """The function in one graph that is written down."""
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(FOLDER / name / str(dist.get_rank()))
    for key, value in options.items():
        setattr(config.experimental_config, key, value)
    return torch.compile(
        fn, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True
    )


def nodes(name: str) -> list[str]:
    """Types of the collectives in the optimized graph of this process."""
    (file,) = (FOLDER / name / str(dist.get_rank())).glob("dynamo_optimized_*.py")
    calls = [line.partition(" = ge.")[2].partition("(") for line in file.read_text().splitlines()]
    return [c[0] for c in calls if c[0].startswith("Hcom")] + [
        "HcomSend" for line in file.read_text().splitlines() if line.startswith("ge.HcomSend(")
    ]


# ---- each collective: the call, what it must give, and its nodes


def all_reduce(x, rank):
    dist.all_reduce(x)
    return x * 2


def all_reduce_max(x, rank):
    y = x + 1
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y


def all_reduce_product(x, rank):
    y = x + 1
    dist.all_reduce(y, op=dist.ReduceOp.PRODUCT)
    return y


def all_gather(x, rank):
    made = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(made, x)
    return torch.stack(made).cumsum(0)


def all_gather_into_tensor(x, rank):
    made = x.new_empty(SIZE * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(made, x)
    return made + 1


def all_to_all(x, rank):
    made = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_to_all(made, [x + k for k in range(SIZE)])
    return torch.stack(made)


def all_to_all_uneven(x, rank):
    """Process r gets 1 row from the first, 2 from the second, and so on."""
    made = [x.new_empty(k + 1, 8) for k in range(SIZE)]
    dist.all_to_all(made, [x[: rank + 1] + k for k in range(SIZE)])
    return torch.cat(made)


def all_to_all_single(x, rank):
    made = torch.empty_like(x)
    dist.all_to_all_single(made, x)
    return made * 2


def all_to_all_single_uneven(x, rank):
    sent = [1, 3] if rank == 0 else [2, 2]
    received = [1, 2] if rank == 0 else [3, 2]
    made = x.new_empty(sum(received), 8)
    dist.all_to_all_single(made, x, received, sent)
    return made


def broadcast(x, rank):
    y = x * 3
    dist.broadcast(y, 1)
    return y + x


def broadcast_by_group_rank(x, rank):
    y = x * 3
    dist.broadcast(y, group=dist.group.WORLD, group_src=1)
    return y


def reduce_scatter_tensor(x, rank):
    made = x.new_empty(x.shape[0] // SIZE, 8)
    dist.reduce_scatter_tensor(made, x * 2)
    return made


def send_and_recv(x, rank):
    made = torch.empty_like(x)
    if rank == 0:
        dist.send(x * 2, 1, tag=7)
        dist.recv(made, 1)
    else:
        dist.recv(made, 0, tag=7)
        dist.send(made + 1, 0)
    return made


def a2a_rows() -> list[torch.Tensor]:
    a, b = everyone()
    return [torch.cat([a[:1], b[:2]]), torch.cat([a[1:], b[2:]])]


COLLECTIVES: dict[Callable[..., Any], tuple[Callable[[int], torch.Tensor], list[str]]] = {
    all_reduce: (lambda r: sum(everyone()) * 2, ["HcomAllReduce"]),
    all_reduce_max: (lambda r: everyone()[-1] + 1, ["HcomAllReduce"]),
    all_reduce_product: (lambda r: (given(0) + 1) * (given(1) + 1), ["HcomAllReduce"]),
    all_gather: (lambda r: torch.stack(everyone()).cumsum(0), ["HcomAllGather"]),
    all_gather_into_tensor: (lambda r: torch.cat(everyone()) + 1, ["HcomAllGather"]),
    all_to_all: (lambda r: torch.stack(everyone()) + r, ["HcomAllToAll"]),
    all_to_all_uneven: (
        lambda r: torch.cat([x[: k + 1] + r for k, x in enumerate(everyone())]),
        ["HcomAllToAllV"],
    ),
    all_to_all_single: (
        lambda r: torch.cat([x[2 * r : 2 * r + 2] for x in everyone()]) * 2,
        ["HcomAllToAll"],
    ),
    all_to_all_single_uneven: (lambda r: a2a_rows()[r], ["HcomAllToAllV"]),
    broadcast: (lambda r: given(1) * 3 + given(r), ["HcomBroadcast"]),
    broadcast_by_group_rank: (lambda r: given(1) * 3, ["HcomBroadcast"]),
    reduce_scatter_tensor: (
        lambda r: sum(everyone())[2 * r : 2 * r + 2] * 2,
        ["HcomReduceScatter"],
    ),
    send_and_recv: (
        lambda r: given(0) * 2 + (1 if r == 0 else 0),
        ["HcomReceive", "HcomSend"],
    ),
}  # fmt: skip


def check_collectives(rank: int) -> None:
    for fn, (expected, types) in COLLECTIVES.items():
        name = fn.__name__
        run = compiled(lambda x, fn=fn: fn(x, rank), name)
        for _ in range(2):
            torch.testing.assert_close(run(given(rank)), expected(rank), msg=name)
        assert sorted(nodes(name)) == types, (name, nodes(name))


# ---- a block of a transformer, cut among the processes


class Block(nn.Module):
    """Attention and a gated layer, as Llama has them."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.first(x)
        q, k, v = (
            f(y).view(batch, length, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def check_block(rank: int) -> None:
    torch.manual_seed(0)
    whole, x = Block(), torch.randn(2, 6, 32)
    torch.manual_seed(0)
    columns = {n: ColwiseParallel() for n in ("q", "k", "v", "gate", "up")}
    rows = {n: RowwiseParallel() for n in ("o", "down")}
    cut = parallelize_module(Block(), init_device_mesh("cpu", (SIZE,)), {**columns, **rows})
    assert cut.q.weight.to_local().shape == (16, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(cut, "block")(x), whole(x))
    assert nodes("block") == ["HcomAllReduce", "HcomAllReduce"], nodes("block")


def main() -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        check_collectives(rank)
        check_block(rank)
        (FOLDER / f"done{rank}").touch()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
