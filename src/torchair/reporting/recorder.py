"""Looks on while graphs are compiled, and writes what is known of them into one page."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from torchair.configs.settings import Settings
from torchair.explanation.api import engine_call, own_arguments
from torchair.log import logger
from torchair.reporting.collect import SeenGraph, graph_data
from torchair.runner import Compilation, GmRunner
from torchair.store import atomic_write
from torchair.verification.forms import Randomness


class Reporter:
    """The report of one process. With `at_once` the file is written anew after the first call of
    each graph, else when it is asked for."""

    def __init__(self, path: Path, title: str, at_once: bool = False) -> None:
        self.path, self._title, self._at_once = path, title, at_once
        self._graphs: list[_Graph] = []
        self._lock = Lock()

    def __call__(self, compilation: Compilation) -> GmRunner:
        with self._lock:
            graph = _Graph(compilation, f"graph {len(self._graphs) + 1}", self)
            self._graphs.append(graph)
        return GmRunner(graph, compilation.runner.trace)

    def called(self) -> None:
        """A graph had its first call."""
        if self._at_once:
            self.write()

    def write(self) -> Path:
        """Write the page about all graphs so far."""
        with self._lock:
            return atomic_write(self.path, page(self._title, [g.data() for g in self._graphs]))


_reporters: dict[str, Reporter] = {}
_finding = Lock()


def reporter_at(path: str) -> Reporter:
    """The one that writes at a path: graphs of a process share a page."""
    with _finding:
        key = os.path.realpath(path)
        return _reporters.setdefault(key, Reporter(Path(key), Path(key).stem, at_once=True))


class _Graph:
    """One graph: the first call is looked at, later ones just run."""

    def __init__(self, compilation: Compilation, name: str, reporter: Reporter) -> None:
        self._compilation, self._name, self._reporter = compilation, name, reporter
        self._call = engine_call(compilation)
        self._run = self._first
        self._data: dict[str, Any] | None = None
        if self._call is not None:
            self._call.session.trace.changes = []

    def __call__(self, *args: Any) -> Any:
        return self.entry(args)

    def entry(self, args: Sequence[Any]) -> Any:
        """Run the graph."""
        return self._run(args)

    def data(self) -> dict[str, Any]:
        """What the page shows."""
        return self._data if self._data is not None else graph_data(self._seen("never called"))

    def _first(self, args: Sequence[Any]) -> Any:
        given = list(args)  # the list may be emptied by who runs
        results = self._compilation.runner.run(args)
        self._run = self._compilation.runner.run
        try:
            self._data = graph_data(self._looked_at(given))
        except Exception as e:  # a report must not end the program that it is about
            logger.warning("%s could not be reported on: %s", self._name, e)
            self._data = graph_data(self._seen(f"it could not be looked at: {e}"))
        self._reporter.called()
        return results

    def _seen(self, note: str) -> SeenGraph:
        mode = Settings.of(self._compilation.config).mode
        return SeenGraph(self._name, self._compilation, mode, note)

    def _looked_at(self, args: list[Any]) -> SeenGraph:
        """The graph after one more call, whose steps are timed. What it updates are copies."""
        if self._call is None:
            return self._seen("it is recorded call by call: there is no plan")
        seen = self._seen("")
        with torch.no_grad(), Randomness().again():
            seen.look(self._call, own_arguments(self._compilation.gm, args))
        return seen


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
