"""`torchair.verify`: a model in eager mode and compiled, side by side."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torchair.backend import get_npu_backend, mode_of
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.section import given
from torchair.runner import observed
from torchair.verification.blame import copied
from torchair.verification.checked import Asked, Verifier
from torchair.verification.report import Report

FOLDER = "torchair_verify"
_VERSIONS = 256  # of one function that Dynamo may keep: each verification makes its own


def verify(
    model: Callable[..., Any],
    *inputs: Any,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    more: Sequence[Sequence[Any]] = (),
    training: bool = False,
    every_node: bool = False,
    folder: str | os.PathLike[str] = FOLDER,
    **keywords: Any,
) -> Report:
    """Compile a model, call it as `model(*inputs, **keywords)`, and compare with eager.

    The same inputs come again in another order of elements, then as they were, then those of
    `more`, so that what is captured is replayed too. The report is true if all is right; else it
    names the node, the line and who made the error. `training` runs the backward of all results as
    well. With `every_node` all nodes are compared even where results are right.
    """
    known = copy.deepcopy(given(config, CompilerConfig))
    if (meant := mode_of(mode)) is not None:
        known.mode = meant
    begun = time.perf_counter()
    wish = Asked(Path(folder), every_node)
    verifier = Verifier(wish)
    plain = getattr(model, "_orig_mod", model)
    compiled = torch.compile(
        plain, backend=get_npu_backend(compiler_config=known), dynamic=dynamic
    )
    first = (inputs, keywords)
    calls = [first, tree_map(reordered, first), first, *((args, keywords) for args in more)]
    calls = [tree_map(_own, call) for call in calls]  # all at once: each has memory of its own
    limits = torch._dynamo.config.patch(recompile_limit=_VERSIONS, cache_size_limit=_VERSIONS)
    with _restored(plain), limits, observed(verifier), wish.steps as steps:
        for number, (args, named) in enumerate(calls):
            steps.next(f"call {number}")
            _call(compiled, args, named, training)
    verifier.report.seconds = time.perf_counter() - begun
    return verifier.report


def _call(model: Callable[..., Any], args: Any, keywords: Any, training: bool) -> None:
    if not training:
        with torch.no_grad():
            model(*args, **keywords)
        return
    results = [t for t in tree_leaves(model(*args, **keywords)) if isinstance(t, Tensor)]
    loss = [t.float().sum() for t in results if t.requires_grad and not t.is_complex()]
    if loss:
        torch.stack(loss).sum().backward()


def _own(value: Any) -> Any:
    """A copy that the model may change."""
    made = copied(value)
    return made.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else made


def reordered(value: Any) -> Any:
    """A tensor with the same elements in another order: still valid indices, masks and numbers."""
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return value
    with torch.no_grad():
        return value.detach().flip(list(range(value.dim()))).requires_grad_(value.requires_grad)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Leave parameters, gradients and buffers of a model as they were."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, copied(b)) for b in model.buffers()]
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        with torch.no_grad():
            for p, grad in grads:
                p.grad = grad
            for buffer, before in buffers:
                buffer.copy_(before)
