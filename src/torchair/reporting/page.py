"""The page: a template, its style and its script from the package, and the data as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""So that no name of a model can end the element that the data are in."""


def page(title: str, graphs: Sequence[dict[str, Any]]) -> bytes:
    """The whole file. Nothing is loaded by it, and only our own script may run."""
    style, script = _part("page.css"), _part("page.js")
    parts = {
        "POLICY": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded({"title": title, "graphs": list(graphs)}),
    }
    pieces = _part("page.html").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces).encode()


def embedded(data: Any) -> str:
    """JSON that can stand inside of a script element, whatever texts are in it."""
    text = json.dumps(data, separators=(",", ":"))
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return text


def _part(name: str) -> str:
    return (resources.files("torchair.reporting") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    mark = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{mark}'"
