"""The file of fusion switches: which rules and patterns of the engine are on."""

from __future__ import annotations

import json
from typing import Any

_STATES = {"on": True, "off": False}
_LAYOUT = '{"Switch": {"GraphFusion": {"<name>": "on"}, "UBFusion": {"<name>": "off"}}}'


def read_switches(path: str | None) -> dict[str, bool]:
    """Switches of a file by name, `ALL` for what is not named; ValueError if it is not one.

    Only those of GraphFusion count: the fusion of loops, which UBFusion would switch, has no names.
    """
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            groups = json.load(file)["Switch"]
        found = {name: _checked(groups.get(name, {})) for name in ("GraphFusion", "UBFusion")}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is not a file of fusion switches ({e}): {_LAYOUT}") from e
    return found["GraphFusion"]


def _checked(group: dict[str, Any]) -> dict[str, bool]:
    wrong = [f"{name}: {state!r}" for name, state in group.items() if state not in _STATES]
    if wrong:
        raise ValueError(f"{wrong[0]} is neither on nor off")
    return {name: _STATES[state] for name, state in group.items()}
