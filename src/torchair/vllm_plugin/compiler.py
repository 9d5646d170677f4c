"""torchair as a compiler of vLLM: graphs, or pieces of them, to callables and files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm.compilation.compiler_interface import CompilerInterface

from torchair.backend import compile_with_aot
from torchair.cacheable import StoredGraph
from torchair.configs.compiler_config import CompilerConfig
from torchair.deploy.stored import library_versions, read_private
from torchair.errors import SerializationError
from torchair.fx.tracing import without_decomposition
from torchair.log import logger
from torchair.runner import GmRunner
from torchair.store import atomic_write, private_dir
from torchair.torch_private.aot import (
    NotTracedAsExpected,
    OutputType,
    TracingContext,
    functorch_config,
    traced_once,
)
from torchair.torch_private.dynamo import SerializableCallable
from torchair.vllm_plugin.attention import call_compiled_functions


class TorchairCompiler(CompilerInterface):
    """Compiles a graph for all sizes at once. The handle of a compiled graph is a file of ours."""

    name = "torchair"

    def __init__(self) -> None:
        self._folder: Path | None = None
        call_compiled_functions()

    def initialize_cache(
        self, cache_dir: str, disable_cache: bool = False, prefix: str = ""
    ) -> None:
        """Keep files there."""
        self._folder = None if disable_cache else Path(cache_dir) / "torchair"

    def compute_hash(self, vllm_config: Any) -> str:
        """Changes with the versions of what compiles."""
        return _versions().hex()[:10]

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        compile_range: Any,
        key: str | None = None,
    ) -> tuple[Callable[..., Any] | None, Any | None]:
        """The compiled graph, and the handle that `load` takes; None where no file can hold it."""
        call, stored = compile_graph(graph, example_inputs)
        if stored is None or self._folder is None or key is None:
            return call, None
        path = self._folder / f"{key}.graph"
        private_dir(self._folder, 0o700)
        atomic_write(path, stored.to_bytes(), 0o600)
        return call, (key, str(path))

    def load(
        self,
        handle: Any,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        graph_index: int,
        compile_range: Any,
    ) -> Callable[..., Any]:
        """The graph of a file, ready to be called; kernels come from the cache of kernels."""
        _, path = handle
        return _unboxed(StoredGraph.from_bytes(read_private(Path(path))).load(), graph)


class NoPasses:
    """Stands for vLLM's passes over graphs of inductor, which are for GPUs."""

    def configure(self, config: Any) -> None:
        """There is nothing to configure."""

    def add(self, graph_pass: Any) -> None:
        """Passes of users are passes of inductor."""
        logger.warning("torchair does not run the inductor pass %s", graph_pass)


class WholeGraph(SerializableCallable):
    """What `torch.compile` calls in mode 2, in a form that vLLM keeps for the next start."""

    def __init__(self, call: Callable[..., Any], stored: StoredGraph | None) -> None:
        self._call, self._stored = call, stored
        call_compiled_functions()

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: WholeGraph) -> bytes:
        """The content of a file of ours; SerializationError where no file can hold the graph."""
        if fn._stored is None:
            raise SerializationError("the compiled graph is not kept for the next start")
        return _versions() + fn._stored.to_bytes()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> WholeGraph:
        """The graph of such a content; SerializationError where other versions have made it."""
        known = _versions()
        if not data.startswith(known):
            raise SerializationError("the graph was compiled with other versions")
        stored = StoredGraph.from_bytes(data[len(known) :])
        runner = stored.load()
        return cls(lambda *args: runner.run(args), stored)

    def finalize_loading(self, vllm_config: Any) -> None:
        """Everything is loaded."""


def whole_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> WholeGraph:
    """A backend for `torch.compile` with the weights of a model frozen."""
    return WholeGraph(*compile_graph(gm, example_inputs))


def _versions() -> bytes:
    """Changes with what compiles."""
    return hashlib.sha256(repr(sorted(library_versions().items())).encode()).digest()


def compile_graph(
    graph: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[Callable[..., Any], StoredGraph | None]:
    """A graph as Dynamo traced it, or a piece of one, and what a file holds of it."""
    stored: list[StoredGraph] = []

    def keep(_: fx.GraphModule, runner: GmRunner) -> GmRunner:
        if _is_called_as_traced():
            try:
                stored.append(StoredGraph.of(runner))
            except (SerializationError, NotImplementedError) as e:
                logger.warning("the compiled graph is not kept for the next start: %s", e)
        return runner

    static = frozenset(i for i, x in enumerate(example_inputs) if _is_weight(x))

    def traced() -> Callable[..., Any]:
        return compile_with_aot(graph, example_inputs, _config(), {}, finish=keep, static=static)

    with functorch_config.patch(force_autograd_cache=False):  # vLLM keeps our file instead
        made = _traced_once(graph, traced)
        if made is None:
            stored.clear()
            made = traced()
    return _returning(made, graph), stored[0] if len(stored) == 1 else None


def _traced_once(
    graph: fx.GraphModule, traced: Callable[[], Callable[..., Any]]
) -> Callable[..., Any] | None:
    """What a graph is compiled to if it only computes new tensors, as those of models do; None for
    another, which AOTAutograd must look at before it is traced."""
    results = graph.graph.output_node().args[0]
    nodes = results if isinstance(results, (tuple, list)) else [results]
    values = [n.meta.get("example_value") if isinstance(n, fx.Node) else n for n in nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if len(tensors) < len(values) or any(t.requires_grad for t in tensors):
        return None
    try:
        with without_decomposition(), traced_once(tensors):
            return traced()
    except NotTracedAsExpected as e:
        logger.info("AOTAutograd looks at the graph first: %s", e)
        return None


def _config() -> CompilerConfig:
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    return config


def _is_weight(x: Any) -> bool:
    return isinstance(x, torch.nn.Parameter)


def _is_called_as_traced() -> bool:
    """Whether the compiled graph takes the arguments and gives the results of the traced one, so
    that AOTAutograd has nothing to do around it."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return False
    plain = all(o.output_type == OutputType.non_alias for o in metadata.output_info)
    return plain and not metadata.mutated_inp_runtime_indices and not metadata.tokens


def _unboxed(runner: GmRunner, graph: fx.GraphModule) -> Callable[..., Any]:
    return _returning(lambda *args: runner.run(args), graph)


def _returning(call: Callable[..., Any], graph: fx.GraphModule) -> Callable[..., Any]:
    """A call with results as the traced graph has them: a tuple, or a single one."""
    if isinstance(graph.graph.output_node().args[0], (tuple, list)):
        return call
    return lambda *args: call(*args)[0]
