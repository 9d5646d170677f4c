"""A filter of Dynamo's guards for a model that stays what it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_NAMED = re.compile(r"G\['(?!__)\w+'\]")
"""A global of the source of a model; Dynamo's own begin with underscores."""


def skip_model_guards_unsafe(entries: Sequence[Any]) -> list[bool]:
    """Keep guards on arguments, on `training` of modules, on globals of the user and on the state
    of torch (gradient mode, autocast, ...); leave out others on modules and on torch's functions.

    For `torch.compile(..., options={"guard_filter_fn": torchair.skip_model_guards_unsafe})`. The
    user promises that submodules, attributes, hooks and the kinds of parameters do not change.
    """
    kept = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)
    return [
        (keep or entry.name.endswith(".training")) and not _is_of_torch(entry)
        for keep, entry in zip(kept, entries, strict=True)
    ]


def _is_of_torch(entry: Any) -> bool:
    """Whether a guard compares a module of torch or Python with itself, or looks into one. What the
    user has a name of his own for may be something else in the next call."""
    if not entry.is_global:
        return False
    value = entry.value
    if isinstance(value, ModuleType):
        return _is_known(value.__name__)
    if _NAMED.fullmatch(entry.name):
        return False
    if isinstance(value, _FUNCTIONS):
        return _is_known(getattr(value, "__module__", None) or "")
    return bool(entry.name.startswith(("G['__import_torch", "G['torch']")))


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in ("builtins", "torch", "_operator", "math")
