"""From a traced method to the data of its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.deploy.artifact import Artifact
from torchair.deploy.guards import Guards
from torchair.deploy.homes import Home, HomeWalk, Roots
from torchair.deploy.stored import PLAIN, NotStored, arguments_of, numbers_of, weight_of
from torchair.deploy.traced import Traced
from torchair.deploy.trees import CallShape, spec_text
from torchair.devices.call import GraphCall, engine_graph
from torchair.engine.run.recipe import recipe_of
from torchair.errors import SerializationError
from torchair.operators import infer
from torchair.serde import from_bytes, same_graph, to_bytes
from torchair.serde.convention import to_text


def stored(
    traced: Traced, homes: Sequence[Sequence[Home]], shape: CallShape, roots: Roots
) -> dict[str, Any]:  # fmt: skip
    """What an Artifact says of the graph. The graph must not have run yet: running changes it."""
    graph, capture = _graph_of(traced)
    if graph.draws:
        raise AssertionError("random numbers are drawn: a cached graph has no generator")
    if any(not isinstance(v, PLAIN) for v in traced.constants.values()):
        raise NotStored("a result is neither a tensor nor a number")
    if graph.graph.objects:
        raise NotStored(f"a file cannot hold the Python objects that it calls, {_objects(graph)}")
    hidden = HomeWalk(roots).hidden
    if hidden:
        raise NotStored(f"{hidden[0]} is a tensor in a tuple or of a special kind; register it")
    try:
        return {
            "device": _device_of([*shape.leaves, *(places[0].read() for places in homes)]),
            "arguments": arguments_of(shape),
            "guards": Guards(traced.specs, traced.conditions).to_data(),
            "tensors": list(traced.tensors),
            "weights": [weight_of(places) for places in homes],
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


def _objects(graph: GraphCall) -> str:
    return ", ".join(sorted({name.rpartition(":")[2] for name in graph.graph.objects}))


def finish(made: Artifact, traced: Traced) -> None:
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
    found = call.session.native_plan() if call.plain else None
    data = None if found is None else recipe_of(*found)
    return None if data is None else {"taken": call.taken, "order": call.order, "plan": data}


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
    known: Any = (graph, None)
    if graph is None:
        known = found.storable() if hasattr(found, "storable") else None
    if known is None:
        raise NotStored("options ask for something else than to run the compiled graph")
    if known[0].options()[0].get("aoe_mode"):
        raise NotStored("aoe_mode is set; tune first, then give the results as tuned_kernels")
    return known
