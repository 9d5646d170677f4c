"""Opaque objects: arguments of torch operators that are neither tensors nor numbers.

A graph takes such an object as a handle, a 0-d tensor that names it, so that each call hands over
its own. The generic node looks the object up when it calls its operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchair.torch_private.fake import FakeScriptObject, is_opaque_value

_known: dict[int, tuple[Callable[[], Any], torch.Tensor]] = {}  # by id


def is_opaque(x: Any) -> bool:
    """Whether a value is an opaque object, a `ScriptObject`, or what tracing has for one."""
    return isinstance(x, (FakeScriptObject, torch.ScriptObject)) or is_opaque_value(x)


def real_object(x: Any) -> Any:
    """The object itself, of what tracing has for it."""
    return x.real_obj if isinstance(x, FakeScriptObject) else x


def handle_of(x: Any) -> torch.Tensor:
    """The tensor that names an object. It names nothing once the object is gone."""
    found = _known.get(id(x))
    if found is None:
        found = _known[id(x)] = (_reference(x), torch.tensor(id(x), dtype=torch.int64))
    return found[1]


def _reference(x: Any) -> Callable[[], Any]:
    key = id(x)
    try:
        return weakref.ref(x, lambda _: _known.pop(key, None))
    except TypeError:  # it takes no weak references: it stays
        return lambda: x


def object_of(handle: torch.Tensor) -> Any:
    """The object that a tensor names."""
    return _known[int(handle)][0]()
