"""From the data of a file back to a compiled method, as far as the module is still the same.

Where plan and kernels are on disk, nothing of the compiler is loaded for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.settings import Settings
from torchair.deploy.artifact import Artifact
from torchair.deploy.guards import Expected, Guards
from torchair.deploy.homes import Home, HomeWalk, Roots, homes_of
from torchair.deploy.ready import ReadyCall
from torchair.deploy.traced import Traced
from torchair.deploy.trees import CallShape, spec_of
from torchair.deploy.version import Version
from torchair.runner import GmRunner
from torchair.trace import Trace

if TYPE_CHECKING:
    from torchair.deploy.runnable import Runnable

PLAIN = (bool, int, float, str, type(None))


class NotStored(Exception):
    """Why a method is not kept, or what was kept of it not used."""


def loaded(
    found: Artifact, roots: Roots, shape: CallShape, engine: Settings, config: CompilerConfig,
) -> Version:  # fmt: skip
    """The version of a method that a file holds; NotStored with the reason if it is for another
    one. `roots` are the modules that it reads."""
    if found.arguments != arguments_of(shape):
        raise NotStored("arguments are nested or named otherwise")
    homes = _homes(found.weights, roots)
    _compare(found.attributes, numbers_of(roots))
    guards = Guards.from_data(found.guards)
    ready = ReadyCall.of(found.plan, lambda: _runnable(found, engine).call)
    run: Any = ready or _run_of(_runnable(found, engine), found, config)
    runner = GmRunner(run, Trace())
    traced = Traced(
        runner, runner, list(guards.specs), [c.text for c in guards.conditions],
        [int(k) for k in found.tensors], spec_of(found.result),
        {int(k): v for k, v in found.constants.items()}, frozenset(found.written),
    )  # fmt: skip
    return Version(roots, shape, traced, homes)


def _runnable(found: Artifact, engine: Settings) -> Runnable:
    """The graph of a file in the engine."""
    from torchair.deploy.runnable import Runnable
    from torchair.serde.convention import from_text

    return Runnable.from_bytes(
        found.graph, from_text(found.convention), options=dict(engine.local_options),
        process=dict(engine.global_options), device=found.device, finished=found.finished,
    )  # fmt: skip


def _run_of(runnable: Runnable, found: Artifact, config: CompilerConfig) -> Any:
    if found.capture is None:
        return runnable.call if not runnable.call.replays else runnable
    from torchair.capture.stored import CapturedGraph
    from torchair.devices.base import device_named

    return CapturedGraph(
        runnable.call, runnable.graph.name, device_named(found.device), found.capture,
        Settings.of(config),
    )  # fmt: skip


def arguments_of(shape: CallShape) -> dict[str, Any]:
    """How arguments of a call are nested."""
    return {
        "names": list(shape.names), "labels": list(shape.labels), "count": shape.count,
        "keys": list(shape.keys),
    }  # fmt: skip


def weight_of(places: Sequence[Home]) -> dict[str, Any]:
    """Names and spec of a weight."""
    spec = Expected.of(places[0].name, places[0].read().detach())
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
        now = weight_of(places)
        for what, known in weight.items():
            if what != "name" and now[what] != known:
                raise NotStored(f"{what} of {weight['name']}: compiled {known}, now {now[what]}")
        found.append(places)
    return found


def _attributes(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Attributes of all modules that are neither weights nor submodules."""
    for prefix, module, _ in HomeWalk(roots).modules:
        for key, value in vars(module).items():
            if key == "training" or not key.startswith("_"):
                yield f"{prefix}.{key}" if prefix else key, value


def numbers_of(roots: Roots) -> dict[str, str]:
    """Plain values that tracing may have made part of the graph, as text; also those one level
    inside of dicts and of objects such as a configuration, where these are first met. Not a hash:
    it follows from other values, and is another one in each process."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, value in _attributes(roots):
        if _is_plain(value):
            found[name] = repr(value)
        elif id(value) not in seen and not callable(value):
            seen.add(id(value))
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            plain = ((k, v) for k, v in inner.items() if _is_plain(v))
            found |= {f"{name}.{k}": repr(v) for k, v in plain if not str(k).endswith("_hash")}
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 64 and all(isinstance(v, PLAIN) for v in value)
    return isinstance(value, (*PLAIN, torch.dtype, torch.device, Enum))


def _compare(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            raise NotStored(f"{name} was {then.get(name)}, now it is {now.get(name)}")
