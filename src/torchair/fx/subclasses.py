"""Guards of tensors that are made of others, as quantised parameters of torchao are.

Dynamo takes every such tensor apart at every call, twice, in Python, to see that it is made as it
was. Of torchao's classes it is known which attributes tell that: those are compared instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from operator import attrgetter
from typing import Any

from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._dynamo.source import SubclassAttrListSource
from torch._guards import Guard, TracingContext

_OF_ALL_TENSORS = {"dtype", "device", "shape"}
"""Attributes that the guard of the tensor itself compares; a subclass is slow to tell them."""


def quicken_guards() -> None:
    """Change guards of the graph that Dynamo is compiling. They refuse what they did before."""
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    changed = {g: make for g in guards if (make := _quicker(g)) is not None}
    if not changed:
        return
    for guard in changed:
        guards.inner.discard(guard)
        guards.source_to_guards[guard.originating_source].remove(guard)
    for old, make in changed.items():
        guards.add(Guard(old.originating_source, make, stack=old.stack, user_stack=old.user_stack))


def _quicker(guard: Guard) -> Callable[[Any, Guard], None] | None:
    if guard.create_fn is GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH:
        return _guard_attributes
    if type(guard.originating_source) is SubclassAttrListSource:
        return _guard_names
    return None


def _guard_attributes(builder: GuardBuilder, guard: Guard) -> None:
    """Instead of TENSOR_SUBCLASS_METADATA_MATCH."""
    value = builder.get(guard)
    if not _is_from_torchao(value):
        GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH(builder, guard)
        return
    told = get_verbose_code_parts(f"attributes of {guard.name}", guard)
    builder.get_guard_manager(guard).add_lambda_guard(_same_as(value), told, guard.user_stack)


def _guard_names(builder: GuardBuilder, guard: Guard) -> None:
    """Instead of EQUALS_MATCH for the names of inner tensors: those that are there have guards of
    their own, and that others are still missing is among what `_same_as` compares."""
    source = guard.originating_source
    assert isinstance(source, SubclassAttrListSource)
    if not _is_from_torchao(builder.get(source.base)):
        GuardBuilder.EQUALS_MATCH(builder, guard)


def _is_from_torchao(value: Any) -> bool:
    """Whether a tensor is taken apart into its attributes as torchao's tensors are."""
    base = getattr(sys.modules.get("torchao.utils"), "TorchAOBaseTensor", None)
    return base is not None and type(value).__tensor_flatten__ is base.__tensor_flatten__


def _same_as(value: Any) -> Callable[[Any], bool]:
    """Whether a tensor of the same class has the same attributes beside tensors."""
    present, attributes = value.__tensor_flatten__()
    optional = getattr(value, "optional_tensor_data_names", ())
    names = [n for n in attributes if n not in _OF_ALL_TENSORS]
    names += [n for n in optional if n not in present]
    if not names:
        return lambda x: True
    read = attrgetter(*names)
    known = deepcopy(read(value))
    return lambda x: read(x) == known
