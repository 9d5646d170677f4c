"""Graphs that are captured once and replayed: `AclConcreteGraph`, the reduce-overhead mode, an FX
graph; `ReplayedGraph`, the max-autotune mode on a GPU, the engine's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchair.capture import (
    AclGraph,
    AclGraphCacheInfo,
    CaptureOptions,
    find_updates,
    key_entries,
    render,
    substrate_for,
)
from torchair.capture.graph import wired
from torchair.capture.updates import Updates
from torchair.codegen.streams import streams_of
from torchair.concrete.ge import ConcreteGraph
from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.devices import Device, device_of
from torchair.devices.base import GraphCall
from torchair.extensions import load
from torchair.flags import debug_level
from torchair.fx.forms import written
from torchair.fx.passes import CAPTURE_PASSES, FX_KIND, fx_text
from torchair.log import debug_print, logger
from torchair.passes import FxContext, PassGroup, PassRunner
from torchair.serde import dump_name, write_graph
from torchair.store import atomic_write
from torchair.structured import artifact
from torchair.torch_private.dispatch import OpOverload
from torchair.trace import Trace


class AclConcreteGraph(ConcreteGraph):
    """An FX graph with its captured graphs.

    `forward` is the graph after the passes of this mode; it is what devices capture by running it,
    and what runs when nothing is captured. On the CPU the engine captures `engine`, the same graph
    before those passes: its own planner decides what is computed in place.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        name: str,
        settings: Settings,
        static: frozenset[int],
        engine: GraphCall | None,
        fresh_results: bool,
        config: CompilerConfig | None = None,
    ) -> None:
        """`config` is for passes of the user; `static` are arguments that stay where they are;
        `fresh_results` is for graphs whose results outlive the next replay, as what a forward graph
        saves for its backward."""
        self.forward = gm
        self.name = name
        self._settings, self._config = settings, config
        self._engine = engine
        self._options = settings.capture.resolved(fresh_results)
        self._info = describe(gm, name, static, self._options)

    @property
    def captured(self) -> AclGraph:
        """What is replayed."""
        return self.graph

    @property
    def fx_graph(self) -> fx.GraphModule:
        """The FX graph as it is now, under the name that the original has for it."""
        return self.forward

    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        self._dump_if_wanted("original")
        runner = PassRunner(FX_KIND, self._settings, trace)
        passes = PassGroup("all npugraph_ex pass", CAPTURE_PASSES, since=aot_gm)
        runner.run(passes, self.forward, FxContext(given, self._config, self.name))
        self.forward.recompile()
        logger.debug("fx code of %s, ready for capture: %s", self.name, self.forward.code)
        self._dump_if_wanted("optimized")
        debug_print(4, lambda: fx_text(self.forward))
        if self._settings.deadlock_check:
            load("capture_check").check_captured(self.forward, self.name, trace)
        self._load(device_of(given).with_results_on(devices_of_results(self.forward)))
        trace.show_program(self.name, self.codegen)
        artifact(f"{self.name}_capture", self.codegen)

    def _load(self, device: Device) -> None:
        on_device = device.name != "cpu"
        updates = find_updates(self.forward, on_device)
        info = self._info
        info.updated_ops_param, info.ops_update_rulers = updates.parameters(), updates.rulers()
        info.unupdated_sym_input_index = list(key_entries(self.forward, updates.ignored, on_device))
        self.graph = AclGraph(fx_graph=device.on_host(self.forward), config=self._options)
        self.graph.shown = device.shown
        results = devices_of_results(self.forward)
        self.enter = wired(self.graph, info, device, self._engine, updates, results)

    def storable(self) -> tuple[GraphCall, dict[str, Any]] | None:
        """The graph in the engine and what `CapturedGraph` needs to know, in plain values; None
        where devices capture the FX graph."""
        info = self._info
        if self._engine is None or info.updated_ops_param or self._settings.run_eagerly:
            return None
        names = ("user_inputs_mapping", "parameter_user_inputs", "mutated_user_inputs")
        known = {name: getattr(info, name) for name in names}
        entries = [list(e) for e in info.unupdated_sym_input_index]
        results = devices_of_results(self.forward)
        return self._engine, {**known, "unupdated_sym_input_index": entries, "results": results}

    def codegen(self) -> str:
        """The graph as a program that captures and replays it."""
        names, emitted = CaptureOptions.names(), self._settings.local_options.items()
        local = {name: text for name, text in emitted if name in names}
        configs = {
            **local,
            "share_results": self._options.share_results,
            "capture_error_mode": self._options.error_mode,
            "capture_fallback": self._options.fallback,
        }
        return render(self.forward, configs, self._info)

    def compile(self, inputs: Any = None, *more: Any) -> str | None:  # type: ignore[override]
        """The key of the captured graph that serves a call with these arguments, a list or one by
        one; None where calls run without capture."""
        if inputs is None:
            return None
        listed = isinstance(inputs, list | tuple) and not more
        return self.graph.compile(*(inputs if listed else (inputs, *more)))

    @property
    def replaced(self) -> bool:
        """Whether that is `compile`, too."""
        return super().replaced or type(self).compile is not _COMPILE

    def entry(self, args: Sequence[Any]) -> Any:
        """Run it; `compile` first where a user has replaced it."""
        if type(self).compile is not _COMPILE:
            self.compile(*args)
        return super().entry(args)

    def _dump_if_wanted(self, state: str) -> None:
        kind, folder = self._settings.graph_dump_type, self._settings.graph_dump_path
        if kind not in (None, "py"):
            raise NotImplementedError(
                f"Graph dump for aclGraph only support 'py' type, but got: {kind}. "
                "Set config.debug.graph_dump.type to 'py': a captured graph is an FX graph"
            )
        if kind is not None:
            self.dump(f"{folder}/{dump_name(f'dynamo_{state}_{self.name}', kind)}")

    def dump(self, path: str) -> None:
        atomic_write(path, fx_text(self.forward).encode())


_COMPILE = AclConcreteGraph.compile


def describe(
    gm: fx.GraphModule, name: str, static: frozenset[int], options: CaptureOptions
) -> AclGraphCacheInfo:
    """What the run time must know of the arguments of a graph."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    tensors = {
        n: i for i, n in enumerate(placeholders) if isinstance(n.meta.get("val"), torch.Tensor)
    }
    parameters = [i for n, i in tensors.items() if i in static or _stays(n)]
    users = {n.name: i for n, i in tensors.items() if i not in parameters}
    mutated = [n.name for n in mutated_arguments(gm) if n.name in users]
    return AclGraphCacheInfo(
        fx_graph_name=name,
        pool=options.pool,
        capture_error_mode=options.error_mode,
        num_warmup_iters=options.warmups,
        user_inputs_mapping=users,
        parameter_user_inputs=parameters,
        mutated_user_inputs=mutated,
    )


def devices_of_results(gm: fx.GraphModule) -> list[str]:
    """The device that tracing saw each result on; the host's for what is no tensor."""
    (output,) = gm.graph.find_nodes(op="output")
    items: Any = output.args[0]
    values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in items]
    return [str(v.device) if isinstance(v, torch.Tensor) else "cpu" for v in values]


def mutated_arguments(gm: fx.GraphModule) -> list[fx.Node]:
    """Placeholders that a node writes to."""
    found: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            members = written(node.target, node.args, node.kwargs)
            nodes = (m for m in members if isinstance(m, fx.Node))
            found |= {m: None for m in nodes if m.op == "placeholder"}
    return list(found)


def copied(value: Any) -> Any:
    """A tensor in memory of its own, laid out as it was; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    return plain.new_empty_strided(plain.shape, plain.stride()).copy_(plain)


def own_arguments(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """Arguments for one more call of a graph: those that it updates as copies."""
    mutated, nodes = set(mutated_arguments(gm)), gm.graph.find_nodes(op="placeholder")
    return [copied(a) if n in mutated else a for n, a in zip(nodes, args, strict=True)]


def _stays(node: fx.Node) -> bool:
    value = node.meta["val"]
    if hasattr(value, "_dynamo_static_input_type") or isinstance(value, torch.nn.Parameter):
        return True
    return getattr(value, "_torchair_is_parameter", False)


# ---- the engine's plan, recorded and replayed ----


class ReplayedGraph(ConcreteGraph):
    """A GE graph whose plan a device replays."""

    OPTIONS = CaptureOptions(evict=True, error_mode="relaxed")

    def __init__(self, graph: GraphCall, info: AclGraphCacheInfo) -> None:
        """`info` says what is known of the arguments."""
        self.graph = graph
        self._replay = AclGraph(fx_forward=lambda *args: graph.enter(args), config=self.OPTIONS)
        self._replay.load(info, lambda args: substrate_for(args, graph, None, Updates()))
        self._streams = streams_of(graph.device.name)

    @property
    def captured(self) -> AclGraph:
        """What is replayed."""
        return self._replay

    @staticmethod
    def suits(graph: GraphCall) -> bool:
        """Whether replays do what runs do: random numbers are drawn anew, and prints print."""
        return not graph.draws and debug_level() < 5

    def optimize(self, given: Sequence[Any], trace: Trace, aot_gm: fx.GraphModule | None) -> None:
        """Done before."""

    def compile(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        if inputs is not None:
            self._replay.compile(*inputs)

    def dump(self, path: str) -> None:
        write_graph(self.graph.graph, path, path.rpartition(".")[2])

    def enter(self, args: Sequence[Any]) -> Any:
        """Replay it, or record what was there before."""
        if self._streams is not None and self._streams.recording:
            return self.graph.enter(args)  # its kernels become part of that graph
        return self._replay.call(list(args))
