"""`torchair.weights_changed`: writes to packed weights that torch does not count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchair.engine.run.contents import note_changes
from torchair.torch_private import pytree


def weights_changed(model: Any) -> int:
    """Tell that weights were written to in a way that torch does not count: through `.data` or
    NumPy, by another process, or to tensors of inference mode. Packed copies of them are made again
    at the next call; how many compiled graphs that concerns.

    `model` is a module, compiled or not, a function with modules or tensors in its closure, a
    tensor, or a nest of these.
    """
    return note_changes(_tensors(model))


def _tensors(model: Any) -> Iterable[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    waiting, seen = [model], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.update({id(t): t for t in _inner(item)})
        elif isinstance(item, torch.nn.Module):
            waiting += [*item.parameters(), *item.buffers(), *_attributes(item)]
        elif isinstance(item, list | tuple | set | Mapping):
            waiting += pytree.tree_leaves(list(item) if isinstance(item, set) else item)
        elif hasattr(item, "model"):  # what `torchair.compile` gives
            waiting.append(item.model)
        else:  # a function or a method: what it is bound to, and what it closes over
            waiting += [item.__self__] if hasattr(item, "__self__") else []
            waiting += [getattr(item, "_torchdynamo_orig_callable", None)]
            waiting += [c.cell_contents for c in getattr(item, "__closure__", None) or ()]
    return found.values()


def _attributes(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules have as plain attributes."""
    values = (v for m in module.modules() for v in vars(m).values())
    return [v for v in values if isinstance(v, torch.Tensor)]


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors behind a subclass, as those of torchao are; the tensor itself without such."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [t for name in flatten()[0] for t in _inner(getattr(tensor, name))]
