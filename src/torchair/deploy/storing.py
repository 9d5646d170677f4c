"""What a file of `cache_compile` holds: made from a traced method, and shown to people as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchair.deploy.guards import Guards, TracedGraph
from torchair.deploy.stored import PLAIN, Artifact, NotStored, arguments_of, numbers_of, weight_of
from torchair.deploy.tensor_refs import ModuleWalk, Roots, TensorRef
from torchair.deploy.trees import CallShape, spec_text
from torchair.devices.base import GraphCall, engine_graph
from torchair.engine.run.recipe import recipe_of
from torchair.engine.session.recording import native_plan
from torchair.errors import SerializationError
from torchair.operators import infer
from torchair.serde import canonical_text, from_bytes, same_graph, to_bytes
from torchair.serde.convention import to_text
from torchair.store import FilePath, atomic_write


def stored(
    traced: TracedGraph, refs: Sequence[Sequence[TensorRef]], shape: CallShape, roots: Roots
) -> dict[str, Any]:
    """What an Artifact says of the graph. The graph must not have run yet: running changes it."""
    graph, capture = _graph_of(traced)
    if graph.draws:
        raise AssertionError("random numbers are drawn: a cached graph has no generator")
    if any(not isinstance(v, PLAIN) for v in traced.constants.values()):
        raise NotStored("a result is neither a tensor nor a number")
    objects = sorted({name.rpartition(":")[2] for name in graph.graph.objects})
    if objects:
        called = ", ".join(objects)
        raise NotStored(f"a file cannot hold the Python objects that it calls, {called}")
    hidden = ModuleWalk(roots).hidden
    if hidden:
        raise NotStored(f"{hidden[0]} is a tensor in a tuple or of a special kind; register it")
    try:
        return {
            "device": _device_of([*shape.leaves, *(places[0].read() for places in refs)]),
            "arguments": arguments_of(shape),
            "guards": Guards(traced.specs, traced.conditions).to_data(),
            "tensors": list(traced.tensors),
            "weights": [weight_of(places) for places in refs],
            "attributes": numbers_of(roots),
            "convention": to_text(graph.convention),
            "result": spec_text(traced.result),
            "constants": {str(k): v for k, v in traced.constants.items()},
            "written": sorted(traced.written),
            "capture": capture,
            "graph": to_bytes(graph.graph),
        }
    except (SerializationError, NotImplementedError) as e:
        raise NotStored(str(e).partition("\n")[0]) from e


def finish(made: Artifact, traced: TracedGraph) -> None:
    """Keep the graph as it runs, after a call has optimised it, and its plan, where a file can hold
    that."""
    call, capture = _graph_of(traced)
    graph = call.optimized
    if graph is None:
        return
    if capture is None and made.device == "cpu":
        made.plan = _recipe_of(call)
    if graph.is_dynamic:
        return
    try:
        data = to_bytes(graph)
        if not same_graph(from_bytes(data, infer), graph, strict=True):
            made.graph, made.finished = data, True
    except SerializationError:  # the graph as it was converted is there
        return


def _recipe_of(call: GraphCall) -> dict[str, Any] | None:
    found = native_plan(call.session.current) if call.plain else None
    data = None if found is None else recipe_of(*found)
    return None if data is None else {"taken": call.taken, "order": call.order, "plan": data}


def _device_of(values: Sequence[Any]) -> str:
    """The accelerator among devices of tensors, the CPU when there is none."""
    tensors = [str(v.device) for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in tensors if d != "cpu"), "cpu")


def _graph_of(traced: TracedGraph) -> tuple[GraphCall, dict[str, Any] | None]:
    """The graph in the engine, and what a capture of it must know."""
    if traced.runner is None:
        raise NotStored("results share memory with arguments, or arguments are replaced")
    found: Any = traced.runner.runner
    graph = engine_graph(found)
    known: Any = (graph, None)
    if graph is None:
        known = found.storable() if hasattr(found, "storable") else None
    if known is None:
        raise NotStored("options ask for something else than to run the compiled graph")
    if known[0].options()[0].get("aoe_mode"):
        raise NotStored("aoe_mode is set; tune first, then give the results as tuned_kernels")
    return known


# ---- `readable_cache`: nothing of a file runs ----


_WIDTH = 100


def readable_cache(
    cache_bin: FilePath, print_output: bool = True, file: FilePath | None = None
) -> str:
    """What a file of `cache_compile` holds: meta data, arguments, options, guards and graph.

    With `file`, the same as comments, and the graph as Python below them, go there.
    """
    path = Path(cache_bin)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: name the file itself")
    if file is not None:
        _check_target(Path(file))
    found = Artifact.read(path)
    program = canonical_text(from_bytes(found.graph, infer, file=path))
    text = "\n".join(_lines(found))
    if print_output:
        print(text)
    if file is not None:
        comments = "\n".join(f"# {line}".rstrip() for line in text.split("\n"))
        atomic_write(file, f"{comments}\n\n{program}".encode(), 0o600)
    return text


def _check_target(target: Path) -> None:
    if target.is_symlink():
        raise ValueError(f"{target} is a symbolic link: nothing is written through it")
    if not target.exists():
        return
    known = target.stat()
    if hasattr(os, "getuid") and known.st_uid != os.getuid():
        raise PermissionError(f"{target} belongs to another user")
    if known.st_mode & 0o777 != 0o600:
        raise PermissionError(f"{target} has the mode {oct(known.st_mode & 0o777)}, not 0o600")


def _lines(found: Artifact) -> list[str]:
    graph = from_bytes(found.graph, infer)
    specs = found.guards["specs"]
    return [
        "=" * _WIDTH,
        f"name: {found.name}",
        f"date: {found.date}",
        f"version: {found.version}",
        *(f"{package}: {version}" for package, version in found.versions.items()),
        f"mode: {found.mode}",
        f"device: {found.device}",
        f"source: {found.source}",
        _title("graph module"),
        *(f"{n.name}: {n.type}({', '.join(v.edge for v in n.values())})" for n in graph.nodes),
        _title("inputs"),
        *(f"{_spec(w)}  weight" for w in found.weights),
        *map(_spec, specs),
        _title("guards"),
        *found.guards["conditions"],
        *(f"{name} == {value}" for name, value in found.attributes.items()),
        _title("compile options"),
        *(f"{name}: {value}" for name, value in found.options.items()),
        "=" * _WIDTH,
    ]


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")


def _spec(spec: Mapping[str, Any]) -> str:
    if "dtype" not in spec:
        return f"{spec['name']}: {spec.get('value')!r}"
    strides: Sequence[Any] = ["any" if s is None else s for s in spec["strides"]]
    order = spec.get("order")
    where = f"dense, order {list(order)}" if order is not None else f"strides {list(strides)}"
    return f"{spec['name']}: {spec['dtype']}{list(spec['dims'])} {where} on {spec['device']}"
