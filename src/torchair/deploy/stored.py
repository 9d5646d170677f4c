"""Between a traced method and the data of its file: what is kept of it, and a way back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchair.catalog import infer
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.settings import Settings
from torchair.deploy.artifact import Artifact
from torchair.deploy.guards import Guards, TensorSpec
from torchair.deploy.homes import Home, Roots, Walk, homes_of
from torchair.deploy.runnable import Runnable
from torchair.deploy.traced import Traced
from torchair.deploy.trees import Shape
from torchair.deploy.version import Version
from torchair.devices.base import device_named
from torchair.devices.call import GraphCall, engine_graph
from torchair.errors import SerializationError
from torchair.runner import GmRunner
from torchair.serde import from_bytes, same_graph, to_bytes
from torchair.serde.convention import from_text, to_text
from torchair.trace import Trace

_PLAIN = (bool, int, float, str, type(None))


class NotStored(Exception):
    """Why a method is not kept, or what was kept of it not used."""


def stored(
    traced: Traced, homes: Sequence[Sequence[Home]], shape: Shape, roots: Roots
) -> dict[str, Any]:  # fmt: skip
    """What an Artifact says of the graph. The graph must not have run yet: running changes it."""
    graph, capture = _graph_of(traced)
    if graph.draws:
        raise AssertionError("random numbers are drawn: a cached graph has no generator")
    if any(not isinstance(v, _PLAIN) for v in traced.constants.values()):
        raise NotStored("a result is neither a tensor nor a number")
    hidden = Walk(roots).hidden
    if hidden:
        raise NotStored(f"{hidden[0]} is a tensor in a tuple or of a special kind; register it")
    try:
        return {
            "device": _device_of([*shape.leaves, *(places[0].read() for places in homes)]),
            "arguments": _arguments(shape),
            "guards": Guards(traced.specs, traced.conditions).to_data(),
            "tensors": list(traced.tensors),
            "weights": [_weight(places) for places in homes],
            "attributes": _numbers(roots),
            "convention": to_text(graph.convention),
            "result": pytree.treespec_dumps(traced.result),
            "constants": {str(k): v for k, v in traced.constants.items()},
            "updates": traced.updates,
            "capture": capture,
            "graph": to_bytes(graph.graph),
        }
    except (SerializationError, NotImplementedError) as e:
        raise NotStored(str(e).partition("\n")[0]) from e


def finish(made: Artifact, traced: Traced) -> None:
    """Keep the graph as it runs, after a call has optimised it, where a file can hold that."""
    graph = _graph_of(traced)[0].optimized
    if graph is None or graph.is_dynamic:
        return
    try:
        data = to_bytes(graph)
        if not same_graph(from_bytes(data, infer), graph, strict=True):
            made.graph, made.finished = data, True
    except SerializationError:  # the graph as it was converted is there
        return


def _device_of(values: Sequence[Any]) -> str:
    """The accelerator among devices of tensors, the CPU when there is none."""
    tensors = [str(v.device) for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in tensors if d != "cpu"), "cpu")


def _graph_of(traced: Traced) -> tuple[GraphCall, dict[str, Any] | None]:
    """The graph in the engine, and what a capture of it must know."""
    if traced.runner is None:
        raise NotStored("results share memory with arguments, or arguments are replaced")
    found: Any = traced.runner.runner
    graph = engine_graph(found)
    if graph is not None:
        return graph, None
    known: Any = found.storable() if hasattr(found, "storable") else None
    if known is None:
        raise NotStored("options ask for something else than to run the compiled graph")
    return known


def loaded(
    found: Artifact, roots: Roots, shape: Shape, engine: Settings, config: CompilerConfig,
) -> Version:  # fmt: skip
    """The version of a method that a file holds; NotStored with the reason if it is for another
    one. `roots` are the modules that it reads."""
    if found.arguments != _arguments(shape):
        raise NotStored("arguments are nested or named otherwise")
    homes = _homes(found.weights, roots)
    _compare(found.attributes, _numbers(roots))
    guards = Guards.from_data(found.guards)
    runnable = Runnable.from_bytes(
        found.graph, from_text(found.convention), options=dict(engine.local_options),
        process=dict(engine.global_options), device=found.device, finished=found.finished,
    )  # fmt: skip
    runner = GmRunner(_run_of(runnable, found.capture, found.device, config), Trace())
    traced = Traced(
        runner, runner, list(guards.specs), [c.text for c in guards.conditions],
        [int(k) for k in found.tensors], pytree.treespec_loads(found.result),
        {int(k): v for k, v in found.constants.items()}, found.updates,
    )  # fmt: skip
    return Version(roots, shape, traced, homes)


def _run_of(
    runnable: Runnable, capture: dict[str, Any] | None, device: str, config: CompilerConfig
) -> Any:
    if capture is None:
        return runnable.call if not runnable.call.replays else runnable
    from torchair.concrete import CapturedGraph

    return CapturedGraph(
        runnable.call, runnable.graph.name, device_named(device), capture, Settings.of(config)
    )


def _arguments(shape: Shape) -> dict[str, Any]:
    return {
        "names": list(shape.names), "labels": list(shape.labels), "count": shape.count,
        "keys": list(shape.keys),
    }  # fmt: skip


def _weight(places: Sequence[Home]) -> dict[str, Any]:
    spec = TensorSpec.of(places[0].name, places[0].read().detach())
    loose = all(h.loose for h in places)
    names = sorted(h.name for h in places)
    return {"names": names, "loose": loose, **json.loads(json.dumps(asdict(spec)))}


def _homes(weights: Sequence[Mapping[str, Any]], roots: Roots) -> list[list[Home]]:
    """Where the weights of a file are in a model."""
    every = homes_of(roots)
    there = {h.name: places for places in every for h in places}
    registered = [places for places in every if not all(h.loose for h in places)]
    expected = [w for w in weights if w["name"] and not w["loose"]]
    if len(registered) != len(expected):
        raise NotStored(f"the module has other weights: {len(expected)} were compiled")
    found = []
    for weight in weights:
        places = there.get(weight["name"]) if weight["name"] else [Home.nowhere()]
        if places is None:
            raise NotStored(f"the module has no weight {weight['name']}")
        now = _weight(places)
        for what, known in weight.items():
            if what != "name" and now[what] != known:
                raise NotStored(f"{what} of {weight['name']}: compiled {known}, now {now[what]}")
        found.append(places)
    return found


def _attributes(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Attributes of all modules that are neither weights nor submodules."""
    for prefix, module, _ in Walk(roots).modules:
        for key, value in vars(module).items():
            if key == "training" or not key.startswith("_"):
                yield f"{prefix}.{key}" if prefix else key, value


def _numbers(roots: Roots) -> dict[str, str]:
    """Plain values that tracing may have made part of the graph, as text; also those one level
    inside of dicts and of objects such as a configuration, where these are first met."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, value in _attributes(roots):
        if _is_plain(value):
            found[name] = repr(value)
        elif id(value) not in seen and not callable(value):
            seen.add(id(value))
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            found |= {f"{name}.{k}": repr(v) for k, v in inner.items() if _is_plain(v)}
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 64 and all(isinstance(v, _PLAIN) for v in value)
    return isinstance(value, (*_PLAIN, torch.dtype, torch.device, Enum))


def _compare(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            raise NotStored(f"{name} was {then.get(name)}, now it is {now.get(name)}")
