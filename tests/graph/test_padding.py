"""Products of training graphs whose rows a GPU cannot read by 16 bytes are padded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import torchair
from torchair.fx import padding, tracing

aten = torch.ops.aten
CLASSES, WIDTH, TOKENS = 101, 66, 70


@pytest.fixture(autouse=True)
def padded_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, and small ones."""
    monkeypatch.setattr(padding, "_DEVICES", ("cpu",))
    monkeypatch.setattr(padding, "_WORK", 1)
    torch._dynamo.reset()


class Split:
    """Forward and backward of a function through AOTAutograd with our partition."""

    def __init__(self, fn: Callable[..., Any], lays_out: bool = True) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        split = partial(tracing.partition, lays_out=lays_out)
        backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=split)
        self.call = torch.compile(fn, backend=backend, dynamic=False)

    def _keep(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    @property
    def products(self) -> list[list[Any]]:
        """The operands and the result of each product."""
        nodes = [n for gm in self.graphs for n in gm.graph.nodes if n.target in padding._PRODUCTS]
        return [
            [*(a.meta["val"] for a in n.args if isinstance(a, torch.fx.Node)), n.meta["val"]]
            for n in nodes
        ]


def is_read_by_16_bytes(x: Tensor) -> bool:
    return x.dim() == 1 or max(x.stride()) * x.element_size() % 16 == 0


class Classifier(nn.Module):
    """As the head of a language model is, whose weights are not in the type of the products."""

    def __init__(self, bias: bool, classes: int = CLASSES) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        self.classes = classes

    def forward(self, x: Tensor, target: Tensor, logits: bool = False) -> Any:
        h = F.gelu(F.linear(x, self.hidden.weight.bfloat16(), self.hidden.bias.bfloat16()))
        bias = None if self.head.bias is None else self.head.bias.bfloat16()
        found = F.linear(h, self.head.weight.bfloat16(), bias).view(2, -1, self.classes)
        loss = F.cross_entropy(found.float().view(-1, self.classes), target)
        return (loss, found) if logits else loss


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(TOKENS, 64, dtype=torch.bfloat16), torch.randint(0, CLASSES, (TOKENS,))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture(params=["loss of torch", "loss rewritten"])
def rewrites(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on a GPU, where the loss reads the padded predictions."""
    found: bool = request.param == "loss rewritten"
    if found:
        monkeypatch.setattr(tracing, "_is_on", lambda joint, device: device == "cuda")
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_values_and_gradients(bias: bool, logits: bool, rewrites: bool) -> None:
    model = Classifier(bias)
    other, split = copy.deepcopy(model), Split(model)
    exact = copy.deepcopy(model).double()
    x, target = batch()
    target[3] = target[5] = -100
    got, expected = split.call(x, target, logits), other(x, target, logits)
    assert all(is_read_by_16_bytes(t) for product in split.products for t in product)
    assert any(CLASSES + 3 in t.shape for product in split.products for t in product)
    if logits:
        assert got[1].shape == expected[1].shape and got[1].stride() == expected[1].stride()
        torch.testing.assert_close(got[1], expected[1], atol=1e-2, rtol=1e-2)
        got, expected = got[0], expected[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    h = F.gelu(exact.hidden(x.double()))
    right = gradients(exact, F.cross_entropy(exact.head(h), target))
    found = gradients(model, got)
    assert len(found) == len(right)
    for g, r in zip(found, right, strict=True):
        assert (g.double() - r).norm() < 0.02 * r.norm()
    assert all(is_read_by_16_bytes(t) for product in split.products for t in product)


def test_padded_weights_are_shared_and_gradients_written_once() -> None:
    split = Split(Classifier(True))
    split.call(*batch()).backward()
    forward, backward = split.graphs
    pads = [
        tuple(n.meta["val"].shape)
        for graph in (forward, backward)
        for n in graph.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    ]
    assert pads.count((CLASSES + 3, WIDTH + 6)) == 1
    readers = [n for n in backward.graph.nodes if n.target is aten.sum.dim_IntList]
    assert readers
    wide = [n for n in backward.graph.nodes if n.target is aten.slice.Tensor]
    assert any(r.args[0] in wide for r in readers)


def test_loss_and_gradient_are_as_wide_as_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the odd number of classes is computed, but what a caller asks for."""
    monkeypatch.setattr(tracing, "_is_on", lambda joint, device: device == "cuda")
    split = Split(Classifier(False))
    split.call(*batch()).backward()
    nodes = [n for g in split.graphs for n in g.graph.nodes if n.target is not aten.slice.Tensor]
    values = [n.meta.get("val") for n in nodes]
    tensors = [v for v in values if isinstance(v, Tensor)]
    assert not any(v.numel() == TOKENS * CLASSES for v in tensors)
    wide = [v for v in tensors if v.shape == (TOKENS, CLASSES + 3)]
    assert {v.dtype for v in wide} == {torch.bfloat16, torch.float32, torch.bool}


def test_engine_runs_padded_graphs(rewrites: bool) -> None:
    model = Classifier(True)
    other = copy.deepcopy(model)
    fast = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
    x, target = batch()
    for _ in range(2):
        torch.testing.assert_close(fast(x, target), other(x, target), atol=2e-3, rtol=2e-3)
    for got, expected in zip(
        gradients(model, fast(x, target)), gradients(other, other(x, target)), strict=True
    ):
        assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    "reason, change",
    [
        ("aligned", {"classes": 104}),
        ("strict", {"lays_out": False}),
        ("small", {"work": 1 << 40}),
        ("device", {"devices": ("cuda",)}),
    ],
)
def test_products_stay(
    reason: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "_WORK", change.get("work", 1))
    monkeypatch.setattr(padding, "_DEVICES", change.get("devices", ("cpu",)))
    model = nn.Linear(64, change.get("classes", CLASSES), bias=False, dtype=torch.bfloat16)
    split = Split(model, change.get("lays_out", True))
    split.call(torch.randn(TOKENS + 2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    names = {str(n.target) for g in split.graphs for n in g.graph.nodes}
    assert "aten.constant_pad_nd.default" not in names


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flat": lambda x, w: (x @ w).view(-1).view(CLASSES, TOKENS),
    "flat and turned": lambda x, w: (
        (x @ w).view(7, 10, CLASSES).permute(1, 2, 0).reshape(10 * CLASSES, 7).t().relu()
    ),
    "turned result": lambda x, w: (x @ w).t(),
    "turned parts": lambda x, w: [part.t() for part in (x @ w).split(35)],
    "parts of rows": lambda x, w: [part.relu() for part in (x @ w).unbind(0)][3],
    "repeated": lambda x, w: (x @ w)[None].expand(2, -1, -1),
    "strided": lambda x, w: torch.as_strided((x @ w).t(), (3, 4), (7, 1), 5),
    "strided columns": lambda x, w: torch.as_strided((x @ w)[:, 3:], (60, 90), (CLASSES, 1)),
    "bias of one": lambda x, w: torch.addmm(w[0, :1], x, w),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_padded_products(name: str) -> None:
    """They have the values, and results the strides, that they have without padding."""
    x = torch.randn(TOKENS, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64, CLASSES, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for call in (Split(VIEWS[name]).call, VIEWS[name]):
        results = call(x, w)
        results = results if isinstance(results, list) else [results]
        sum((r.float() * torch.arange(r.numel()).view(r.shape)).mean() for r in results).backward()
        found.append([*(r.detach() for r in results), x.grad, w.grad])
        x.grad = w.grad = None
    assert [t.stride() for t in found[0]] == [t.stride() for t in found[1]]
    for got, expected in zip(*found, strict=True):
        assert (got.float() - expected.float()).norm() <= 0.02 * expected.float().norm()


def test_checkpoints_compute_padded_products_again() -> None:
    def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(x @ w) @ v

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, w, v, use_reentrant=False).sum()

    sizes = ((TOKENS, 64), (64, CLASSES), (CLASSES, 72))
    given = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in sizes]
    split = Split(fn)
    split.call(*given).backward()
    kept = split.graphs[1].graph.find_nodes(op="placeholder")
    assert {tuple(n.meta["val"].shape) for n in kept if n.meta["val"].dim() == 2} == {*sizes}


@pytest.mark.parametrize("target", [CLASSES, CLASSES + 2])
def test_targets_behind_the_classes_are_errors(target: int, rewrites: bool) -> None:
    x, targets = batch()
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match=f"{target}"):
        Split(Classifier(False)).call(x, targets)
