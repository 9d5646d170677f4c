"""Convolutions and batch norms in training on a GPU: what is planned for them on any machine,
values, strides and losses where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchair
from cuda_graphs import data
from cuda_tools import HOPPER
from torchair import ge
from torchair.engine.inspect.dry_run import DryRun, dry_run
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.batch_norms import split_batch_norms
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer
from training_blocks import Block, check_steps

FLOAT = DataType.DT_FLOAT


def planned(split: bool) -> DryRun:
    """A batch norm before a residual sum and an activation, and their gradients."""
    with Graph("g", infer) as graph:
        x, other, grad = (data(k, 4, 8, 6, 6, dtype=FLOAT) for k in range(3))
        vectors = [data(k, 8, dtype=FLOAT) for k in range(3, 7)]
        y, *running, mean, rstd = ge.BatchNormV3(
            x, *vectors, epsilon=1e-5, momentum=0.1, is_training=True
        )
        z = ge.Relu(ge.Add(y, other))
        dy = ge.ReluGrad(grad, z)
        gradients = ge.BatchNormGradV3(
            dy, x, vectors[0], *vectors[2:], mean, rstd, is_training=True, epsilon=1e-5
        )
        ge.NetOutput([*running, z, dy, *gradients])
    split_batch_norms(graph, GraphState(splits_batch_norms=split))
    return dry_run(graph, HOPPER, {0: 5, 1: 6})


def test_batch_norms_are_sums_and_maps() -> None:
    """Maps take in what is around them, sums what they sum up; the running statistics are updated
    where they are, beside another kernel."""
    run = planned(split=True)
    kinds = [[n.type for n in s.also] for s in run.plan.steps]
    first = ["BatchNormScale", "Add", "Relu", "ReluGrad", "BatchNormSums"]
    assert [k for k in kinds if k != ["Mul", "Mul", "Add"]] == [
        ["BatchNormStatistics"],
        first,
        ["BatchNormInputGrad"],
    ]
    assert not run.plan.write_backs
    assert sum(a.kind == "tied" for a in run.plan.allocations) == 2
    assert len(run.launches) == 3
    assert all(run.ptx(launch).count(".entry") == 1 for launch in run.launches)


def test_batch_norms_stay_where_they_are_not_split() -> None:
    types = {n.type for s in planned(split=False).plan.steps for n in s.also}
    assert {"BatchNormV3", "BatchNormGradV3"} <= types


@pytest.mark.parametrize("dtype", [DataType.DT_DOUBLE, DataType.DT_BF16])
def test_types_that_are_not_split(dtype: DataType) -> None:
    """float64, and statistics that were narrowed."""
    with Graph("g", infer) as graph:
        x, dy = (data(k, 4, 8, 6, 6, dtype=dtype) for k in range(2))
        vectors = [data(k, 8, dtype=dtype) for k in range(2, 7)]
        grads = ge.BatchNormGradV3(dy, x, *vectors, is_training=True, epsilon=1e-5)
        ge.NetOutput(list(grads))
    split_batch_norms(graph, GraphState(splits_batch_norms=True))
    assert any(n.type == "BatchNormGradV3" for n in graph.nodes)


# ---- on a GPU ----


class Headed(Block):
    """With a pool and a head."""

    def __init__(self, groups: int = 1, channels: int = 32) -> None:
        super().__init__(channels, groups)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(super().forward(x), 3, 2, 1).mean((2, 3)))


@pytest.mark.cuda
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_on_a_gpu(dtype: torch.dtype, groups: int, last: bool) -> None:
    """With few channels float32 is as exact as eager's, although TF32 is allowed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    check_steps(Headed(groups).cuda().to(dtype), torch.randn(6, 3, 17, 15).cuda().to(dtype), last)


@pytest.mark.cuda
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 128])
@pytest.mark.parametrize("allowed", [False, True])
def test_gradients_with_tf32(allowed: bool, groups: int, last: bool) -> None:
    """Where it is allowed, convolutions in another layout than eager's may use it and eager's not.
    They are no less exact than eager's in that layout."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(6, 3, 17, 15).cuda()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        check_steps(Headed(groups, 128).cuda(), x, last, either=allowed)


@pytest.mark.cuda
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_those_of_eager(autocast: bool) -> None:
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Headed().cuda()
        x, labels = torch.randn(16, 3, 32, 32).cuda(), torch.randint(10, (16,)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run: Any = model
        if compiled:
            run = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
        seen = []
        for _ in range(20):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(run(x), labels)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        losses.append(torch.stack(seen))
    assert losses[1][-1] < 0.9 * losses[1][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=3e-2 if autocast else 3e-3, atol=1e-2)


class Reader(nn.Module):
    """A language model of one layer: attention under a mask of which each row is one value, and a
    number of classes of which no 16 bytes are whole."""

    def __init__(self, classes: int, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(classes, width)
        self.parts, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        rows, length, width = x.shape
        q, k, v = self.parts(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        shown = torch.arange(length, device=x.device)[None, None, :, None] >= 0
        mask = shown.expand(rows, -1, length, length)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm(x + y.transpose(1, 2).reshape(x.shape))
        found = self.head(x).float().view(-1, self.words.num_embeddings)
        return F.cross_entropy(found, targets.view(-1))


def losses_of(classes: int, wrap: Any) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Reader(classes).cuda()
    tokens, targets = torch.randint(classes, (2, 16, 128)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run, seen = wrap(model), []
    for _ in range(20):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return torch.stack(seen)


@pytest.mark.cuda
@pytest.mark.parametrize("classes", [3001, 3002, 3008])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_losses_of_odd_numbers_of_classes(mode: str, classes: int) -> None:
    """Products are padded, and masks copied."""
    config = torchair.CompilerConfig()
    config.mode = mode
    backend = torchair.get_npu_backend(compiler_config=config)
    expected = losses_of(classes, lambda model: model)
    got = losses_of(classes, lambda m: torch.compile(m, backend=backend, dynamic=False))
    assert got[-1] < 0.95 * got[0]
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=1e-2)
