"""Which torch operators do nothing but compute their results.

Only such a call may be left out when nothing reads it, computed once for all, merged with an
equal one, and moved across calls that are not pure. `operators/purity.py` does the same for GE
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload

OWN_NAMESPACES = frozenset(("aten", "prim", "prims"))
"""Libraries whose schemas describe everything that an operator does. An operator of any other
library may have effects that its schema does not mention: write a cache, count, log, talk to a
server."""


def is_foreign(target: Any) -> bool:
    """Whether a call may do anything: operators of other libraries, and those that call functions
    (`cond`, `auto_functionalized_v2`), which may hold such operators."""
    if isinstance(target, OpOverload):
        return target.namespace not in OWN_NAMESPACES
    return isinstance(target, HigherOrderOperator)


def is_pure(target: Any) -> bool:
    """Whether a call is known to compute results from its arguments and to do nothing else. Draws
    of random numbers are not pure: they advance a generator."""
    if is_foreign(target):
        return False
    if not isinstance(target, OpOverload):
        return True  # Python's own, such as `operator.getitem`, on sizes and lists of results
    schema = target._schema
    random = torch.Tag.nondeterministic_seeded in target.tags
    return bool(schema.returns) and not schema.is_mutable and not random


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may take numbers from torch's generator. The gradient of attention takes none:
    it is given the state that the attention has drawn with."""
    if not is_seeded(target):
        return False
    given = getattr(getattr(target, "_schema", None), "arguments", ())
    state = any(a.name == "philox_seed" for a in given)
    return not state and not has_no_dropout(target, args, kwargs)


def is_seeded(target: Any) -> bool:
    """Whether torch says that an operator draws random numbers, whatever its arguments are."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def has_no_dropout(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is attention, or its gradient, without dropout."""
    names = [a.name for a in getattr(getattr(target, "_schema", None), "arguments", ())]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0
