"""`torchair.dynamo_export`: a model as a `.air` file, for Ascend's offline compiler or for
`torchair.load`.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchair.backend import compile_with_aot, get_npu_backend
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.options import MAX_AUTOTUNE, given, read_path
from torchair.deploy.package import FileArgument, NotNested, Package, nesting_of
from torchair.devices.base import GraphCall, engine_graph
from torchair.errors import GraphError, SerializationError, TorchairError, UnsupportedModeError
from torchair.fallbacks import Fallback, note
from torchair.ge.graph import Graph
from torchair.log import logger, warn_once
from torchair.process import world
from torchair.serde import to_message
from torchair.serde.air import write_air
from torchair.serde.codec import tensor_memory
from torchair.serde.proto import described_once, pbtxt_of
from torchair.store import atomic_write, private_dir
from torchair.torch_private import dynamo, pytree

MOST_INSIDE = (2048 - 200) << 20
"""Bytes of a graph and its weights up to which the weights are in the file itself."""

_KEY = re.compile(r"\[(?:(\d+)|'([^']*)')\]|\.(\w+)")  # of the text of a source

Keys = tuple[str | int, ...]


class ExportSuccess(Exception):
    """Ends the call that an export was waiting for; the message says what was written."""


class _Collected(Exception):
    """Ends the call of the graph: all that it was called with is known."""


def dynamo_export(
    *args: Any,
    model: torch.nn.Module,
    export_path: str = "export_file",
    export_name: str = "export",
    dynamic: bool = False,
    config: CompilerConfig | None = None,
    **kwargs: Any,
) -> None:
    """Write `model` as `<export_path>/<export_name>.air`, traced with these arguments.

    With several processes each writes `<export_name><rank>.air`. The model is not run.
    """
    config = given(config, CompilerConfig)
    name, together = os.path.basename(export_name), world()
    rank = None if together is None else together[1]
    file = Path(export_path) / f"{name}{'' if rank is None else rank}.air"
    for place in (Path(export_path), file):
        if place.is_symlink():
            logger.error("dynamo_export: %s is a symbolic link, nothing is exported", place)
            return
    _check(config, args, kwargs)
    _configure(config, model, export_path, name)
    dynamo.reset()
    get_npu_backend(compiler_config=config)  # for what it warns of
    twin, args, kwargs, copied = _copied(model, args, kwargs)
    export = _Export(config, model, file, name, rank, call_leaves(model, args, kwargs), copied)
    compiled = torch.compile(twin, backend=export, fullgraph=True, dynamic=dynamic)
    try:
        with torch.no_grad():
            export.write(compiled(*args, **kwargs))
    except ExportSuccess as done:
        logger.info("export success: %s", done)
        return
    except dynamo.BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, TorchairError):
            raise failed.inner_exception from failed  # what Dynamo adds does not help here
        raise
    finally:
        dynamo.reset()
    logger.error("dynamo_export: the model ran without a graph, %s is not written", file)


def _copied(model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any, bool]:
    """Model and arguments as objects of our own, with the tensors of the user: what the model does
    to objects beside its graph, is not seen. The originals, where they cannot be copied."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    memo: dict[int, Any] = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}
    try:
        return *copy.deepcopy((model, args, kwargs), memo), True
    except Exception as e:  # of any class that the user has
        note(Fallback.EXPORT_STRUCTURE, "the model has no copy: results have no structure", e)
        return model, args, kwargs, False


def _check(config: CompilerConfig, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    mode = read_path(config, "mode")
    if mode != MAX_AUTOTUNE:
        raise UnsupportedModeError(
            "dynamo_export needs a GE graph", mode=mode, supported=[MAX_AUTOTUNE]
        )
    if read_path(config, "experimental_config.frozen_parameter"):
        raise ValueError(
            "dynamo_export does not go with experimental_config.frozen_parameter: weights are "
            "constants of the file anyway; set it to False"
        )
    geared = [t for t in pytree.tree_leaves((args, kwargs)) if hasattr(t, "dim_gears")]
    if geared:
        raise ValueError(
            f"dynamo_export does not go with set_dim_gears, which {len(geared)} arguments have; "
            "pass new tensors and dynamic=True"
        )
    if read_path(config, "export.experimental.enable_lite_export"):
        warn_once("enable_lite_export has no effect: there are no lite converters; leave it out")


def _configure(config: CompilerConfig, model: torch.nn.Module, folder: str, name: str) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    config.export.export_mode = True
    config.export.export_path_dir = folder
    config.export.export_name = name
    config.export.weight_name = {id(t): n for n, t in named}
    config.experimental_config.enable_ref_data = True
    config.experimental_config.keep_inference_input_mutations = True


def call_leaves(model: torch.nn.Module, args: Any, kwargs: Any) -> dict[Keys, tuple[int, Any]]:
    """Paths to all that a call hands in, numbered in the order of `forward`'s parameters."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    bound |= bound.pop("kwargs", {})
    stack: list[tuple[Keys, Any]] = [((n,), v) for n, v in reversed(bound.items())]
    found: dict[Keys, tuple[int, Any]] = {}
    while stack:
        path, value = stack.pop()
        if isinstance(value, (list, tuple)):
            stack += [((*path, k), v) for k, v in reversed(list(enumerate(value)))]
        elif isinstance(value, dict):
            stack += [((*path, k), v) for k, v in reversed(value.items())]
        else:
            found[path] = len(found), value
    return found


class _Export:
    """The backend of one export, and what its graph does when it is called: write files."""

    def __init__(
        self,
        config: CompilerConfig,
        model: torch.nn.Module,
        file: Path,
        name: str,
        rank: int | None,
        leaves: Mapping[Keys, tuple[int, Any]],
        goes_on: bool,
    ) -> None:
        """With `goes_on` the call ends as a call does, and hands `write` its result."""
        self._config, self._file, self._name, self._rank = config, file, name, rank
        self._leaves, self._goes_on = leaves, goes_on
        self._marks: list[torch.Tensor] = []  # stand for the results of the graph
        self._ready: Callable[[Any], None] | None = None
        self._read: set[str | int] = set()  # parameters that the graph has something of
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._tensors = [*model.named_parameters(), *model.named_buffers()]

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        sources = [_source(n) for n in gm.graph.find_nodes(op="placeholder")]
        self._read = {_path(s, self._parameters)[0] for s in sources}

        def finish(graph: fx.GraphModule, runner: Any) -> Callable[..., Any]:
            metas = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
            if len(metas) < len(sources):
                raise GraphError(
                    "arguments share memory that the model updates, which a file cannot express",
                    hint="export it with tensors that do not overlap",
                )
            names = [""] * (len(metas) - len(sources)) + sources
            call = file_call(runner.runner)

            def collect(*args: Any) -> None:
                self._ready = partial(self._write, call, args, metas, names)
                raise _Collected

            return collect

        compiled = compile_with_aot(gm, example_inputs, self._config, {}, finish=finish)
        (output,) = gm.graph.find_nodes(op="output")

        def called(*args: Any) -> tuple[torch.Tensor, ...]:
            try:
                compiled(*args)
            except _Collected:
                if not self._goes_on:
                    self._ready(None)  # type: ignore[misc]
            self._marks = [torch.empty(0) for _ in output.args[0]]
            return tuple(self._marks)

        return called

    def write(self, result: Any) -> None:
        """Write the files, for a call that gave this result; nothing where it had no graph."""
        if self._ready is not None:
            self._ready(self._nesting(result))

    def _nesting(self, result: Any) -> Any:
        """How the result of the model is nested, None where that is not known."""
        marks = {id(t): k for k, t in enumerate(self._marks)}
        paths = {id(v): path for path, (_, v) in self._leaves.items() if path[0] in self._read}
        weights = {id(t): n for n, t in self._tensors}

        def leaf(value: Any) -> dict[str, Any] | None:
            if not isinstance(value, torch.Tensor):
                return None
            for kind, known in (("result", marks), ("argument", paths), ("weight", weights)):
                if id(value) in known:
                    return {kind: known[id(value)]}
            raise NotNested("a result is a tensor from elsewhere")

        try:
            return nesting_of(result, leaf)
        except NotNested as e:
            note(Fallback.EXPORT_STRUCTURE, "the file returns its results as a tuple", e)
            return None

    def _write(
        self,
        call: GraphCall,
        args: Sequence[Any],
        metas: Sequence[Any],
        names: Sequence[str],
        nesting: Any,
    ) -> None:
        weights = self._weights(args)
        sizes = {a: d for a, d in _sizes(metas).items() if d[0] not in weights}
        package = Package(call, args, weights)
        folder = self._file.parent
        if self._rank is not None:
            folder = folder / f"rank_{self._rank}"
        private_dir(folder)
        put_weights(package, folder)
        places = [i for i in range(len(args)) if i not in weights and i not in sizes]
        if len(call.signature.results) != len(self._marks):
            nesting = None  # results of the graph are not those that Dynamo sees
        package.finish(self._arguments(places, names), sizes, nesting)
        graph = call.graph
        write_air(graph, self._file)
        readable = pbtxt_of(described_once(to_message(graph, payloads=False)))
        atomic_write(folder / "dynamo.pbtxt", readable.encode("utf-8", "backslashreplace"))
        if read_path(self._config, "export.experimental.auto_atc_config_generated"):
            self._write_atc(groups_of(graph))
        raise ExportSuccess(f"{self._file}, {len(graph.data)} inputs, {len(weights)} weights")

    def _weights(self, args: Sequence[Any]) -> dict[int, str]:
        """Arguments that are parameters or buffers: the objects, or tensors over their memory."""
        by_id = read_path(self._config, "export.weight_name") or {}
        by_memory = {_memory(t): n for n, t in self._tensors if t.numel()}
        found = {}
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                name = by_id.get(id(arg)) or by_memory.get(_memory(arg))
                if name is not None:
                    found[i] = name
        return found

    def _arguments(self, places: Sequence[int], names: Sequence[str]) -> list[FileArgument]:
        given_names = read_path(self._config, "export.inputs_name")
        found = []
        for place in places:
            path = _path(names[place] or f"arg{place}", self._parameters)
            found.append(FileArgument(place, ".".join(map(str, path)), path))
        found.sort(key=lambda a: self._leaves.get(a.path, (len(self._leaves), None))[0])
        if given_names is None:
            return found
        if len(given_names) != len(found):
            raise ValueError(
                f"export.inputs_name has {len(given_names)} names for {len(found)} inputs: "
                f"{[a.name for a in found]}"
            )
        named = zip(found, given_names, strict=True)
        return [FileArgument(a.place, str(n), a.path, chosen=True) for a, n in named]

    def _write_atc(self, groups: dict[str, list[int]]) -> None:
        """Configuration of Ascend's offline compiler, where ranks talk to each other."""
        if self._rank != 0 or not groups:
            return
        world = torch.distributed.get_world_size()
        relation = model_relation(self._name, groups, world)
        atomic_write(self._file.parent / "model_relation_config.json", _json(relation))
        atomic_write(self._file.parent / "numa_config.json", _json(numa(range(world))))


def file_call(runner: Any) -> GraphCall:
    """The graph in the engine that a file can hold, behind what runs it."""
    call = engine_graph(runner)
    if call is not None and call.graph.objects:
        found = ", ".join(call.graph.objects)
        raise SerializationError(
            f"the model calls Python objects, which a file cannot hold: {found}",
            hint="leave torch.cond, loops and operators of Python out of what is exported",
        )
    if call is None:
        raise GraphError(
            "the model runs without a GE graph, which an export needs",
            hint="switch run_eagerly, data_dump and fx_summary.skip_compile off",
        )
    return call


def _sizes(metas: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Numbers among the arguments that are dims of tensors among them: (argument, dim)."""
    dims: dict[Any, tuple[int, int]] = {}
    for i, meta in enumerate(metas):
        for k, d in enumerate(meta.shape if isinstance(meta, torch.Tensor) else ()):
            if isinstance(d, torch.SymInt):
                dims.setdefault(d.node.expr, (i, k))
    numbers = {i: m.node.expr for i, m in enumerate(metas) if isinstance(m, torch.SymInt)}
    return {i: dims[e] for i, e in numbers.items() if e in dims}


def _source(node: fx.Node) -> str:
    """Where Dynamo has an input from, as `L['x']`."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)


def _path(source: str, parameters: Sequence[str]) -> Keys:
    """`L['x'][0]['k']` as a path. What is not reached by keys alone is one name. A `forward` that
    is wrapped has its arguments in `args` and `kwargs`; they count by the names of `parameters`."""
    keys = [int(m[1]) if m[1] else m[2] or m[3] for m in _KEY.finditer(source.removeprefix("L"))]
    if keys[:1] == ["kwargs"] and len(keys) > 1:
        del keys[0]
    elif keys[:1] == ["args"] and "args" not in parameters and keys[1:2]:
        keys[:2] = parameters[int(keys[1]) : int(keys[1]) + 1] or keys[:2]
    if "." in source or not isinstance(next(iter(keys), None), str):
        return (".".join(map(str, keys)) or source,)
    return tuple(keys)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def put_weights(package: Package, folder: Path) -> None:
    """Put the weights into the graph, or into files of a folder where they are too large."""
    total = to_message(package.graph, payloads=False).ByteSize()
    total += sum(package.payload(n).nbytes for n in package.weight_nodes)
    if total <= MOST_INSIDE:
        package.put_inside()
    else:
        _write_files(package.put_beside(folder))


def _write_files(files: Mapping[Path, torch.Tensor]) -> None:
    for k, (path, tensor) in enumerate(files.items(), 1):
        print(f"\rsaving weights: {k}/{len(files)} {path.name}", end="", flush=True)
        atomic_write(path, [tensor_memory(tensor)])
    print()


# ---- how the models of several ranks belong together ----


_NAMED = re.compile(r"tag=(?P<tag>[^;]*);rank_list=(?P<ranks>[\d,]+)")


def groups_of(graph: Graph) -> dict[str, list[int]]:
    """Communication groups that a graph names, with their ranks where the name says them."""
    found: dict[str, list[int]] = {}
    for node in graph.nodes:
        name = node.attr("group", "")
        if name and name not in found:
            named = _NAMED.search(name)
            found[name] = [int(r) for r in named["ranks"].split(",")] if named else []
    return found


def model_relation(name: str, groups: dict[str, list[int]], world: int) -> dict[str, Any]:
    """`model_relation_config.json`: which model runs where, and which ranks communicate."""
    models = [f"{name}{rank}" for rank in range(world)]
    everybody = list(range(world))
    return {
        "deploy_config": [
            {"submodel_name": f"{model}.air", "deploy_device_id_list": f"0:0:{rank}"}
            for rank, model in enumerate(models)
        ],
        "model_name_to_instance_id": [
            {"submodel_name": f"{model}.air", "model_instance_id": rank}
            for rank, model in enumerate(models)
        ],
        "comm_group": [
            {"group_name": group, "group_rank_list": str(ranks or everybody)}
            for group, ranks in groups.items()
        ],
        "rank_table": [{"rank_id": r, "model_instance_id": r} for r in everybody],
    }


def numa(ranks: Sequence[int]) -> dict[str, Any]:
    """`numa_config.json`: one node with a device for each rank."""
    node = {
        "node_id": 0,
        "node_type": "ATLAS800",
        "ipaddr": "127.0.0.1",
        "port": 29500,
        "is_local": True,
        "item_list": [{"item_id": rank} for rank in ranks],
    }
    return {
        "cluster": [{"cluster_nodes": [node]}],
        "item_def": [{"item_type": "Ascend910"}],
        "node_def": [{"node_type": "ATLAS800", "item_type": "Ascend910"}],
    }


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()
