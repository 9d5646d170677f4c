"""A graph in the engine that is captured without the FX graph it comes from: one out of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchair.capture.base import CaptureOptions
from torchair.capture.fixed import EngineGraph
from torchair.capture.graph import AclGraph, AclGraphCacheInfo
from torchair.capture.select import substrate_for
from torchair.capture.updates import Updates
from torchair.configs.settings import Settings
from torchair.devices import Device


class CapturedGraph:
    """A graph in the engine, captured as an AclConcreteGraph is, without the FX graph."""

    def __init__(
        self, engine: EngineGraph, name: str, device: Device, known: Mapping[str, Any],
        settings: Settings,
    ) -> None:  # fmt: skip
        """`known` comes from `storable`."""
        options = capture_options(settings, fresh_results=False)
        arguments = {k: v for k, v in known.items() if k != "results"}
        arguments["unupdated_sym_input_index"] = [
            (i, number) for i, number in known["unupdated_sym_input_index"]
        ]
        info = AclGraphCacheInfo(
            fx_graph_name=name, pool=options.pool,
            capture_error_mode=options.error_mode, num_warmup_iters=options.warmups, **arguments,
        )  # fmt: skip
        self.graph = AclGraph(fx_forward=lambda *args: engine.call(args), config=options)
        find = partial(substrate_for, engine=engine, pool=options.pool, updates=Updates())
        uncaptured = engine.call if device.name == "cpu" else None
        self.graph.load(info, lambda args: find(device.host_arguments(args)), uncaptured)
        kinds = info.kinds()
        self.entry: Callable[[Sequence[Any]], Any]
        if not options.share_results:
            self.entry = device.noted(self.graph.call, kinds.mutated)
        else:
            fixed = (*kinds.parameters, *kinds.mutated)
            self.entry = device.hosted(self.graph.call, known["results"], kinds.mutated, fixed)


def capture_options(settings: Settings, fresh_results: bool) -> CaptureOptions:
    """The options of capture among all settings; a pool of the user's is never shared by keys."""
    return CaptureOptions(
        clone_input=settings.clone_input,
        share_results=settings.share_results and not settings.clone_output and not fresh_results,
        frozen_parameter=settings.frozen_parameter,
        reuse=settings.reuse_graph_pool and settings.capture_pool is None,
        limit=settings.capture_limit,
        evict=settings.evict_captures,
        pool=settings.capture_pool,
        error_mode=settings.capture_error_mode,
        fallback=settings.capture_fallback,
        warmups=settings.capture_warmups,
        force_recapture=settings.force_recapture,
    )
