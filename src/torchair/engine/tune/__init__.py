"""What is to be tuned: the file that `aoe_config.aoe_config_file` names, as JSON, and which graphs
cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchair.codegen.requests import Attention, Convolution, Joint, Loops, Pool, Product, Request
from torchair.codegen.target import Target
from torchair.errors import did_you_mean
from torchair.ge.graph import Graph
from torchair.log import warn_once

KINDS: Mapping[type, str] = {
    Product: "matmul", Joint: "matmul", Convolution: "conv", Attention: "attention",
    Loops: "loops", Pool: "pool",
}  # fmt: skip
"""Names of kinds of requests."""
PROGRAM = "program"
"""The kind of what is chosen for a whole graph."""
NAMES = (*dict.fromkeys(KINDS.values()), PROGRAM)


@dataclass(frozen=True)
class TuneRequest:
    """Which requests of a graph are measured, and how long that may take."""

    kinds: tuple[str, ...] = NAMES
    kernels: tuple[str, ...] = ("*",)  # patterns of their names
    budget_seconds: float = 120.0  # for one graph
    margin: float = 0.03  # by which a config must be faster than the default
    share: float = 0.005  # of the work of a graph, that a kernel is not measured below

    @classmethod
    def read(cls, path: str | None) -> TuneRequest:
        """From a file, everything without one."""
        if path is None:
            return cls()
        try:
            found = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ValueError(
                f"aoe_config_file {path} cannot be read as JSON ({e}); write an object like "
                '{"kinds": ["matmul"], "budget_seconds": 60}'
            ) from e
        return cls(**_checked(path, found))

    def includes(self, request: Request, label: str) -> bool:
        """Whether a request, whose kernel has this name, is to be measured."""
        named = any(fnmatchcase(label, pattern) for pattern in self.kernels)
        return named and KINDS[type(request)] in self.kinds


def _checked(path: str, found: Any) -> dict[str, Any]:
    """The settings of a file, each of which must be known and of its type."""
    if not isinstance(found, dict):
        raise ValueError(f"aoe_config_file {path} must hold an object, not {found!r}")
    readers = {
        "kinds": _kinds,
        "kernels": _texts,
        "budget_seconds": _number,
        "margin": _number,
        "share": _number,
    }
    made = {}
    for name, value in found.items():
        if name not in readers:
            raise ValueError(
                f"aoe_config_file {path} has no setting {name!r}.{did_you_mean(name, readers)} "
                f"Known are {', '.join(readers)}"
            )
        try:
            made[name] = readers[name](value)
        except ValueError as e:
            raise ValueError(f"aoe_config_file {path}: {name} is {value!r}, {e}") from e
    return made


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError("but must be a list of strings")
    return tuple(value)


def _kinds(value: Any) -> tuple[str, ...]:
    unknown = sorted(set(_texts(value)) - set(NAMES))
    if unknown:
        raise ValueError(f"but kinds are {', '.join(NAMES)}, not {', '.join(unknown)}")
    return tuple(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError("but must be a number that is not negative")
    return float(value)


def untunable(graph: Graph, target: Target | None) -> bool:
    """Whether a graph cannot be tuned, which is said once."""
    if target is None:
        return True
    if graph.is_dynamic:
        warn_once(
            f"tuning: graph {graph.name} is not tuned because its shapes are dynamic. Compile with "
            "dynamic=False to tune it for fixed shapes",
            stacklevel=3,
        )
    return graph.is_dynamic
