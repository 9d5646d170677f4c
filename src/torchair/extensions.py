"""Modules beside the core that are loaded when something asks for what only they have.

The core has tables: operators, converters, rewrite rules. A module beside it adds its own entries
when it is imported. `offer` says which module that is for each table; code that does not find a
name calls `load` and looks again. Imports nothing of torchair.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

Kind = Literal[
    "operators", "converters", "rules", "attention", "graph_check", "capture_check", "drafts"
]

_offered: dict[Kind, str] = {}


def offer(modules: Mapping[Kind, str]) -> None:
    """Say which module is to be loaded for what."""
    _offered.update(modules)


def load(kind: Kind) -> Any:
    """The module for a kind of names, imported now if it was not; None where none was offered."""
    name = _offered.get(kind)
    return None if name is None else import_module(name)


def is_loaded(kind: Kind) -> bool:
    """Whether a kind of names has been asked for before."""
    return _offered.get(kind) in sys.modules
