"""Cross entropy of training graphs: what the rewritten one gives, what it keeps, when it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from tolerance import assert_close
from torchair.fx.losses import keep_less_of_cross_entropy
from torchair.fx.tracing import partition

ROWS, CLASSES = 12, 11


class Traced:
    """A function through AOTAutograd with the rewriting, and what its backward is given."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        torch._dynamo.reset()
        self.kept: list[Tensor] = []
        self.targets: set[str] = set()
        backend = aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=self._split
        )
        self.call = torch.compile(fn, backend=backend)

    def _split(self, joint: Any, inputs: Any, **options: Any) -> Any:
        keep_less_of_cross_entropy(joint)
        return partition(joint, inputs, **options)

    def _forward(self, gm: Any, inputs: Any) -> Any:
        self.targets |= {str(n.target) for n in gm.graph.nodes}
        return make_boxed_func(gm.forward)

    def _backward(self, gm: Any, inputs: Any) -> Any:
        self.targets |= {str(n.target) for n in gm.graph.nodes}
        found = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        self.kept = [v for v in found if isinstance(v, Tensor)]
        return make_boxed_func(gm.forward)

    @property
    def rewritten(self) -> bool:
        return "aten._log_softmax.default" not in self.targets


def operands(dtype: torch.dtype, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 8, dtype=dtype, requires_grad=True)
    w = torch.randn(8, CLASSES, dtype=dtype, requires_grad=True)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[3] = target[7] = ignored
    return x, w, target


def gradients(fn: Callable[..., Any], *given: Tensor) -> list[Tensor]:
    for t in given[:2]:
        t.grad = None
    loss = fn(*given)
    (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum().backward()
    return [loss.detach(), given[0].grad, given[1].grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0, 5])
def test_losses_and_gradients(dtype: torch.dtype, reduction: str, ignored: int) -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float(), target, reduction=reduction, ignore_index=ignored)

    given = operands(dtype, ignored)
    traced = Traced(loss)
    wanted, got = gradients(loss, *given), gradients(traced.call, *given)
    assert traced.rewritten
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            a, b, **({} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03})
        )


def test_gradients_in_float64() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, target)

    x, w, target = operands(torch.float64, -100)
    call = Traced(loss).call
    assert torch.autograd.gradcheck(lambda a, b: call(a, b, target), (x, w))


def test_predictions_are_kept_in_their_type() -> None:
    """Beside them two numbers of each row: nothing of float32 has the classes."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float(), target)

    traced = Traced(loss)
    gradients(traced.call, *operands(torch.bfloat16, -100))
    wide = [t for t in traced.kept if tuple(t.shape) == (ROWS, CLASSES)]
    assert [t.dtype for t in wide] == [torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_predictions(dtype: torch.dtype) -> None:
    """They are what is kept; what follows from them is computed in float32 and rounded once."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(4 * x + w, target, reduction="none")

    torch.manual_seed(0)
    x, w = torch.randn(64, 300, dtype=dtype), torch.randn(300, dtype=dtype)
    given = x.requires_grad_(), w.requires_grad_(), torch.randint(0, 300, (64,))
    traced = Traced(loss)
    wanted, got = gradients(loss, *given), gradients(traced.call, *given)
    truth = gradients(loss, *(t.detach().double().requires_grad_() for t in given[:2]), given[2])
    assert traced.rewritten
    assert [t.dtype for t in traced.kept if tuple(t.shape) == (64, 300)] == [dtype]
    assert_close(got[:2], wanted[:2], truth[:2])
    assert (got[0] != wanted[0]).float().mean() < 0.1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logarithms_that_autocast_widens(reduction: str) -> None:
    """On a GPU it has the softmax of bfloat16 give bfloat16, and the loss take float32."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x @ w, 1).float(), target, reduction=reduction)

    given = operands(torch.bfloat16, 5)
    traced = Traced(loss)
    wanted, got = gradients(loss, *given), gradients(traced.call, *given)
    assert traced.rewritten
    wide = [t for t in traced.kept if tuple(t.shape) == (ROWS, CLASSES)]
    assert [t.dtype for t in wide] == [torch.bfloat16]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_no_classes() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x + w, target, reduction="sum")

    given = torch.zeros(3, 0, requires_grad=True), torch.zeros(0, requires_grad=True)
    assert gradients(Traced(loss).call, *given, torch.full((3,), -100))[0].item() == 0.0


@pytest.mark.parametrize(
    "ends", [[float("inf")], [float("-inf")], [float("nan")], [1e4, -1e4], [3e38, -3e38]]
)
def test_extreme_predictions(ends: list[float]) -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x + w, target, reduction="none")

    x = torch.zeros(3, 4)
    x[1, : len(ends)] = torch.tensor(ends)
    given = x.requires_grad_(), torch.zeros(4, requires_grad=True), torch.tensor([1, 1, 0])
    wanted, got = gradients(loss, *given), gradients(Traced(loss).call, *given)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_all_targets_ignored() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, target)

    x, w, target = operands(torch.float32, -100)
    wanted, got = gradients(loss, x, w, target.fill_(-100)), None
    got = gradients(Traced(loss).call, x, w, target)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weights": lambda x, w, t: F.cross_entropy(x @ w, t, weight=torch.arange(1.0, CLASSES + 1)),
    "label smoothing": lambda x, w, t: F.cross_entropy(x @ w, t, label_smoothing=0.1),
    "read by others": lambda x, w, t: (
        F.nll_loss((p := F.log_softmax(x @ w, 1)), t) + p.exp().square().sum()
    ),
    "another dim": lambda x, w, t: F.log_softmax(x @ w, 0).square().sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_as_it_is(name: str) -> None:
    given = operands(torch.float32, -100)
    traced = Traced(KEPT[name])
    wanted, got = gradients(KEPT[name], *given), gradients(traced.call, *given)
    assert not traced.rewritten
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
