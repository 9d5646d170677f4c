"""How far a compiled model may be from the truth, measured instead of guessed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

TIMES_EAGER = 8  # fused kernels round in another order, so up to this many eager errors
FLOOR = 8  # and never less than this many units in the last place of the largest value


def assert_close_to_reference(model: nn.Module, inputs: Any, got: Any, eager: Any) -> None:
    """`got` is as good as `eager`, judged by the same model run in float64.

    Two results in bfloat16 may differ a lot and both be right, and a fixed tolerance either hides
    faults or fails on rounding. So the truth is computed: a copy of the model (same weights, as
    they were rounded) runs in double precision on the inputs in double precision. The error of
    eager, `e = max|eager - truth|` per output, tells how much rounding this model amplifies; the
    compiled result may be off by `max(TIMES_EAGER * e, FLOOR * eps(dtype) * max|truth|)`.
    Integers and booleans must equal eager exactly.

    A model that a call changes (a cache, running statistics) must be handed in as it was before
    the call; or keep a `double_copy` beside it and use `assert_close`.
    """
    with torch.no_grad():
        truth = call(double_copy(model), to_double(inputs))
    assert_close(got, eager, truth)


def assert_close(
    got: Any, eager: Any, truth: Any, *more: Any, terms: Mapping[int, float] | None = None
) -> None:
    """The rule of `assert_close_to_reference` for results that are there already. `more` are
    results of eager in other ways that are as good, `terms` the size of what results are the mean
    or the sum of, by number: a mean near zero is no more exact than its terms."""
    all_got, all_truth, *ways = (list(tensors(x)) for x in (got, truth, eager, *more))
    assert {len(all_got), len(all_truth), *map(len, ways)} == {len(all_got)} != {0}
    for i, (g, t, *found) in enumerate(zip(all_got, all_truth, *ways, strict=True)):
        least = (terms or {}).get(i, 0.0)
        _compare(f"result {i}", g.detach(), [e.detach() for e in found], t.detach(), least)


def _compare(name: str, got: Tensor, found: list[Tensor], truth: Tensor, least: float) -> None:
    eager = found[0]
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape), name
    if not got.dtype.is_floating_point:
        assert torch.equal(got, eager), f"{name} differs from eager"
        return
    if not got.numel():
        return
    mine, *theirs = ((x.double() - truth).abs().max().item() for x in (got, *found))
    scale = max(truth.abs().max().item(), least)
    allowed = max(TIMES_EAGER * max(theirs), FLOOR * torch.finfo(got.dtype).eps * scale)
    # Written so that a NaN anywhere fails.
    assert mine <= allowed, f"{name}: error {mine:.3g}, allowed {allowed:.3g}, scale {scale:.3g}"


def double_copy(model: nn.Module) -> nn.Module:
    """The same model in double precision, tensors included that modules keep beside their
    parameters and buffers."""
    twin = copy.deepcopy(model).double()
    for parameter in twin.parameters():
        if parameter.is_complex():
            parameter.data = parameter.data.to(torch.complex128)
    for module in twin.modules():
        vars(module).update({k: to_double(v) for k, v in vars(module).items() if _is_float(v)})
    return twin


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on positional or on keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def to_double(tree: Any) -> Any:
    """Floating-point tensors of lists, tuples and dicts in double precision; the rest as it is."""
    if isinstance(tree, Tensor):
        return tree.detach().double() if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {name: to_double(member) for name, member in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(to_double(member) for member in tree)
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for member in tree.values():
            yield from tensors(member)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for member in tree:
            yield from tensors(member)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors(getattr(tree, field.name))
