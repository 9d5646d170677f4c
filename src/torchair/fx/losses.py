"""Cross entropy of training graphs in the form that keeps little between forward and backward.

Torch keeps the logarithms of all probabilities, in float32. They follow from the predictions, which
are kept anyway, and two numbers of each row: what reads them computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchair.fx.padding import narrowed, widened

aten = torch.ops.aten
_IGNORED = -100
_MEAN, _NONE = 1, 0  # numbers of reductions


def keep_less_of_cross_entropy(joint: fx.GraphModule, pads: bool = False) -> None:
    """nll_loss(log_softmax(x)) and its gradient -> the same from x, the largest element of each row
    and the logarithm of its sum. Only the elements at the targets are read for the loss. If it
    `pads`, rows have as many elements as products want."""
    found = joint.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    losses = [loss for node in found if (loss := _loss_of(node)) is not None]
    for loss in losses:
        _rewrite(*loss, pads)
    if losses:
        joint.graph.eliminate_dead_code()
        joint.recompile()


def _loss_of(node: fx.Node) -> tuple[fx.Node, fx.Node, list[tuple[fx.Node, fx.Node]]] | None:
    """A logarithm of softmax, its loss, and gradients of the loss with those of the softmax; None
    where something else reads it."""
    value, (_, dim, half) = node.meta["val"], node.args
    if value.dim() != 2 or dim not in (1, -1) or half:
        return None
    if not isinstance(value.shape[1], int) or value.shape[1] == 0:
        return None
    same, losses, gradients, pairs = {node}, [], [], []
    for reader in (todo := list(node.users)):
        if reader.target is aten.detach.default:
            same.add(reader)
            todo += reader.users
        elif _widens(reader):
            todo += reader.users
        elif reader.target is aten.nll_loss_forward.default and _is_plain(reader, 2):
            losses.append(reader)
        elif reader.target is aten.nll_loss_backward.default and _is_plain(reader, 3):
            gradients.append(reader)
        elif reader.target is aten._log_softmax_backward_data.default:
            if reader.args[1] not in same or reader.args[0] in same:
                return None
            pairs.append((_before_cast(reader.args[0]), reader))
        else:
            return None
    made = [made for made, _ in pairs]
    alone = all(g in made and len(g.users) == 1 for g in gradients)
    if len(losses) != 1 or not alone or len(gradients) != len(pairs) or len(pairs) > 1:
        return None
    return node, losses[0], pairs


def _widens(node: fx.Node) -> bool:
    """Whether it gives a value of 16 bits as float32, as autocast does before a loss."""
    dtypes = {"dtype": torch.float32}
    return node.target is aten._to_copy.default and node.kwargs == dtypes and _narrow(node.args[0])


def _before_cast(gradient: Any) -> Any:
    """A gradient as the loss gives it, before autocast brings it back to 16 bits."""
    cast = isinstance(gradient, fx.Node) and gradient.target is aten._to_copy.default
    alone = cast and len(gradient.users) == 1 and _narrow(gradient)
    return gradient.args[0] if alone else gradient


def _is_plain(node: fx.Node, weight: int) -> bool:
    """Whether all classes count alike, for one target a row."""
    target = node.args[weight - 1]
    assert isinstance(target, fx.Node)
    return node.args[weight] is None and target.meta["val"].dim() == 1


class _Builder:
    """Adds nodes before another one, as parts of forward or backward as that is."""

    def __init__(self, before: fx.Node) -> None:
        self.before = before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        graph = self.before.graph
        with graph.inserting_before(self.before):
            made = graph.call_function(target, args, kwargs)
        known: dict[str, Any] = {k: v for k, v in self.before.meta.items() if k != "tensor_meta"}
        fake: Any = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            known["val"] = target(*fake[0], **fake[1])
        made.meta = known
        return made

    def numbers(self, count: int, device: torch.device) -> fx.Node:
        """The numbers from 0 on, as a row."""
        made = self(aten.arange.default, count, dtype=torch.int64, device=device)
        return self(aten.unsqueeze.default, made, 0)

    @property
    def _mode(self) -> Any:
        value: Any = self.before.meta["val"]
        return (value[0] if isinstance(value, tuple) else value).fake_mode


def _rewrite(
    node: fx.Node, loss: fx.Node, pairs: list[tuple[fx.Node, fx.Node]], pads: bool
) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if pads and (wide := widened(x, node)) is not None:
        x = wide
    if _narrow(x):  # the softmax rounds what it gives, and nothing in between
        x = _Builder(node)(aten._to_copy.default, x, dtype=torch.float32)
    largest, total = _row_numbers(_Builder(node), x)
    _at_targets(_Builder(loss), loss, x, largest, total, node.meta["val"].shape[1])
    for gradient, result in pairs:
        _gradient(_Builder(result), gradient, result, (x, largest, total))


def _row_numbers(make: _Builder, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The largest element of each row, and the logarithm of the sum of exponentials beside it."""
    largest = make(aten.amax.default, x, [1], True)
    powers = make(aten.exp.default, make(aten.sub.Tensor, x, largest))
    return largest, make(aten.log.default, make(aten.sum.dim_IntList, powers, [1], True))


def _at_targets(
    make: _Builder, loss: fx.Node, x: fx.Node, largest: fx.Node, total: fx.Node, classes: int
) -> None:
    """The loss from one prediction a row, as if there were one class. Targets behind the `classes`
    are errors, whatever is there."""
    _, target, _, reduction, ignored = loss.args
    counts = make(aten.ne.Scalar, target, ignored)
    one = make(aten._to_copy.default, counts, dtype=torch.int64)
    place = make(aten.mul.Tensor, target, one)
    source = x
    if x.target is aten._to_copy.default and _narrow(x.args[0]):
        source = x.args[0]  # type: ignore[assignment]
    if source.meta["val"].shape[1] != classes:
        source = make(aten.slice.Tensor, source, 1, 0, classes)
    found = make(aten.gather.default, source, 1, make(aten.unsqueeze.default, place, 1))
    if source is not x:
        found = make(aten._to_copy.default, found, dtype=x.meta["val"].dtype)
    known = make(aten.sub.Tensor, make(aten.sub.Tensor, found, largest), total)
    if known.meta["val"].dtype is not loss.meta["val"][0].dtype:
        known = make(aten._to_copy.default, known, dtype=loss.meta["val"][0].dtype)
    first = make(aten.mul.Tensor, make(aten.sub.Tensor, one, 1), -_IGNORED)
    made = make(aten.nll_loss_forward.default, known, first, None, reduction, _IGNORED)
    loss.replace_all_uses_with(made)


def _narrow(x: Any) -> bool:
    value = x.meta["val"] if isinstance(x, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _gradient(
    make: _Builder, gradient: fx.Node, result: fx.Node, known: tuple[fx.Node, fx.Node, fx.Node]
) -> None:
    """Probabilities, less one at the targets, times what reaches the row."""
    x, largest, total = known
    reaching, _, target, _, reduction, ignored, weight = gradient.args
    if reduction == _MEAN:
        reaching = make(aten.div.Tensor, reaching, weight)
    counts = make(aten.ne.Scalar, target, ignored)
    if reduction != _NONE:
        reaching = make(aten.unsqueeze.default, reaching, 0)
    zero = make(aten.zeros_like.default, reaching)
    row = make(aten.unsqueeze.default, make(aten.where.self, counts, reaching, zero), 1)
    beside = make(aten.sub.Tensor, make(aten.sub.Tensor, x, largest), total)
    chance = make(aten.exp.default, beside)
    value = x.meta["val"]
    classes = make.numbers(value.shape[1], value.device)
    here = make(aten.eq.Tensor, classes, make(aten.unsqueeze.default, target, 1))
    less = make(aten.where.self, here, make(aten.sub.Tensor, chance, 1.0), chance)
    made = make(aten.mul.Tensor, less, row)
    if made.meta["val"].dtype is not result.meta["val"].dtype:
        made = make(aten._to_copy.default, made, dtype=result.meta["val"].dtype)
    count = result.meta["val"].shape[1]
    if value.shape[1] != count:
        made = narrowed(made, result, count)
    result.replace_all_uses_with(made)
