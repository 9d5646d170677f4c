"""Compiled graphs that caches of others keep: AOTAutograd's, and files of serving engines.

`StoredGraph` is a graph as plain data: its bytes, how it is called, its options. `CompiledGraph` is
what AOTAutograd's cache wants of a compiler, an `OutputCode`: pickled, it is a `StoredGraph`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torchair.devices.base import GraphCall, device_named, engine_graph
from torchair.engine.optimize.passes import GraphState
from torchair.errors import SerializationError
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.runner import GmRunner
from torchair.serde import from_bytes, to_bytes
from torchair.serde.convention import Convention, check, from_text, to_text
from torchair.torch_private.aot import BypassAOTAutogradCache, functorch_config
from torchair.torch_private.inductor import OutputCode
from torchair.trace import Trace

_MAGIC = b"torchair stored graph 1\n"  # counts layouts of the file
_DIGEST = 32


@dataclass(frozen=True)
class StoredGraph:
    """A compiled graph as data."""

    graph: bytes
    convention: str
    options: dict[str, str]
    process: dict[str, str]
    device: str

    @classmethod
    def of(cls, runner: GmRunner) -> StoredGraph:
        """The graph behind a runner, which must not have run yet; SerializationError with the
        reason where data cannot hold it."""
        call = engine_graph(runner.runner)
        if call is None:
            raise SerializationError("it is captured, or not compiled at all")
        if call.draws:
            raise SerializationError("random numbers are drawn: a stored graph has no generator")
        if call.graph.objects:
            names = sorted({name.rpartition(":")[2] for name in call.graph.objects})
            raise SerializationError(f"it calls Python objects: {', '.join(names)}")
        options, process = call.options()
        made = to_text(call.convention)
        return cls(to_bytes(call.graph), made, dict(options), dict(process), call.device.name)

    def load(self) -> GmRunner:
        """The graph, ready to be called; SerializationError where the data are damaged."""
        graph, convention = from_bytes(self.graph, infer), from_text(self.convention)
        if graph.output is None:
            raise SerializationError(f"graph {graph.name!r} has no NetOutput")
        check(convention, len(graph.data), len(graph.output.values()))
        return GmRunner(_LoadedCall(graph, convention, self), Trace())

    def to_bytes(self) -> bytes:
        """The content of a file."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "graph"}
        header = json.dumps(known, separators=(",", ":")).encode()
        body = len(header).to_bytes(8, "little") + header + self.graph
        return _MAGIC + _checksum(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredGraph:
        """From the content of a file; SerializationError where it is damaged."""
        start = len(_MAGIC) + _DIGEST
        body = data[start:]
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != _checksum(body):
            raise SerializationError("no stored graph, or it is damaged or of another version")
        size = int.from_bytes(body[:8], "little")
        return cls(graph=body[8 + size :], **json.loads(body[8 : 8 + size]))


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


class _LoadedCall(GraphCall):
    """A graph from data, with the options that it was compiled with."""

    def __init__(self, graph: Graph, convention: Convention, stored: StoredGraph) -> None:
        signature = convention.signature
        state = GraphState(list(signature.inputs), dict(convention.assigned))
        super().__init__(graph, signature, device_named(stored.device), state)
        self._options = (stored.options, stored.process)
        self.ready()

    def options(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        return self._options

    entry = GraphCall.enter


def is_wanted() -> bool:
    """Whether AOTAutograd will put what a compiler returns into its cache."""
    return bool(getattr(functorch_config, "force_autograd_cache", False))


class CompiledGraph(OutputCode):
    """A compiled graph for AOTAutograd's cache."""

    def __init__(self, runner: GmRunner, around: Callable[..., Any] | None = None) -> None:
        """`around` makes what is called of the function that runs the graph."""
        super().__init__()
        self._boxed_call = True
        self._runner: GmRunner | None = runner
        self._run = runner.run if around is None else around(runner.run)
        self._stored: StoredGraph | str = ""  # a text says why there is none

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Become data, on a copy of the graph that runs."""
        assert self._runner is not None, "it is data already"
        try:
            self._stored = StoredGraph.of(self._runner)
        except (SerializationError, NotImplementedError) as e:
            if not functorch_config.strict_autograd_cache:
                raise BypassAOTAutogradCache(f"torchair cannot store the graph: {e}") from e
            self._stored = str(e)  # ahead-of-time compilation goes on, loading will fail
        self._runner = None
        self._run = _not_loaded

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Become a graph that runs, out of data."""
        if self._runner is None:
            if isinstance(self._stored, str):
                raise SerializationError(f"the graph was not stored: {self._stored}")
            self._runner = self._stored.load()
            self._run = self._runner.run

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


def _not_loaded(inputs: Sequence[Any]) -> Any:
    raise SerializationError("the graph is data: call post_compile first")
