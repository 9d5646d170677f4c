"""AclGraph, the run time of a captured FX graph: which graph serves a call, when one is captured,
and what happens when there are too many."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchair.capture import base
from torchair.capture.cpu import EngineSubstrate
from torchair.capture.cuda import DeviceSubstrate
from torchair.capture.entered import Enterable, Guard, ReplayEntry, guard_of
from torchair.capture.keys import KeyMaker, Raw
from torchair.capture.tape import TapeSubstrate
from torchair.capture.updates import Updates
from torchair.configs.compiler_config import Settings
from torchair.devices import Device
from torchair.engine.run.frozen import FrozenTensors
from torchair.errors import CaptureError
from torchair.fallbacks import Fallback, note
from torchair.locks import RLock
from torchair.log import logger, npugraph_ex_logger, speaking
from torchair.torch_private.dynamo import loaded_utils
from torchair.torch_private.profiler import is_profiling
from torchair.trace import label

if TYPE_CHECKING:
    from torchair.devices.base import GraphCall

RunGraph = Callable[[Sequence[Any]], Any]

TensorLayout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where a tensor is: address, dims, strides."""

_LIMITS = {False: "static_capture_size_limit", True: "capture_limit"}  # True: of npugraph_ex
COUNTERS = "npugraph_ex"
"""Name of our counters in `torch._dynamo.utils.counters`."""


@dataclass
class AclGraphCacheInfo:
    """What the run time needs to know of an FX graph; plain values, so that a program can hold
    them."""

    fx_graph_name: str = "graph_1"
    pool: tuple[int, int] | None = None
    stream: Any = None
    capture_error_mode: str = "global"
    num_warmup_iters: int = 0
    user_inputs_mapping: dict[str, int] = field(default_factory=dict)
    parameter_user_inputs: list[int] = field(default_factory=list)
    unupdated_sym_input_index: list[tuple[int, bool]] = field(default_factory=list)
    updated_ops_param: dict[str, Any] = field(default_factory=dict)
    ops_update_rulers: dict[str, Any] = field(default_factory=dict)
    mutated_user_inputs: list[str] = field(default_factory=list)
    tagged_event_names: list[str] = field(default_factory=list)
    user_stream_label: set[str] = field(default_factory=set)
    user_stream_info: dict[str, dict[str, int]] = field(default_factory=dict)
    userinput_ref_with_output: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pool(self.pool)

    def kinds(self) -> base.ArgumentKinds:
        """Positions of arguments by kind."""
        mutated = {self.user_inputs_mapping[n] for n in self.mutated_user_inputs}
        users = [i for i in self.user_inputs_mapping.values() if i not in mutated]
        return base.ArgumentKinds(
            tuple(self.parameter_user_inputs), tuple(users), tuple(sorted(mutated))
        )


def check_pool(pool: Any) -> None:
    """A pool handle is None or two integers, one of them zero."""
    if pool is None:
        return
    pair = isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(v, int) for v in pool)
    if not pair or pool[0] * pool[1] != 0:
        raise TypeError(f"a graph pool is a pair of integers, one of them 0, not {pool!r}")


@dataclass
class GraphMeta:
    """One captured graph of an FX graph."""

    key: str
    raw: Raw
    recording: base.Recording
    mutated: list[tuple[int, TensorLayout]]  # arguments that it updates, and where they are
    frozen: list[Any]  # parameters that were promised to stay
    frozen_tensors: FrozenTensors | None  # what `serves` compares with
    limits: Any = None
    serves: Callable[[Sequence[Any]], bool] | None = None  # a quick test whether it is for a call


class AclGraph:
    """Captured graphs of one FX graph, one for each graph key.

    Calls from several threads take turns, and each has results of its own. With `share_results`
    they are overwritten by the next replay that shares their memory.
    """

    def __init__(
        self,
        *,
        fx_graph: fx.GraphModule | None = None,
        fx_forward: base.Forward | None = None,
        config: base.CaptureOptions | Mapping[str, Any] | None = None,
    ) -> None:
        assert (fx_graph is None) != (fx_forward is None), "give a graph or a function, one of them"
        self.forward: base.Forward = fx_graph if fx_graph is not None else fx_forward  # type: ignore[assignment]
        if not isinstance(config, base.CaptureOptions):
            config = base.CaptureOptions.read(config or {})
        self.options = config
        self.captured: OrderedDict[str, GraphMeta] = OrderedDict()
        self.fallen_back = False
        self._by_raw: dict[Raw, GraphMeta] = {}
        self._latest: dict[Raw, GraphMeta] = {}  # by what tells calls apart, but for parameters
        self._lock = RLock()
        self._started = False
        self._watched = False  # whether the log shows single steps
        self._uncaptured: RunGraph | None = None
        self._given: Sequence[Any] = ()  # arguments that `process_input` had
        self.shown: Callable[[], AbstractContextManager[Any]] = nullcontext  # in a profile

    def load(
        self,
        info: AclGraphCacheInfo,
        substrate: Callable[[Sequence[Any]], base.Substrate] | None = None,
        uncaptured: RunGraph | None = None,
    ) -> None:
        """Take over what is known of the FX graph. `substrate` is asked once, with the arguments of
        the first call, how to capture on their device; without it calls are recorded one by one.
        `uncaptured` is how to run it without capture, the FX graph itself by default."""
        self.name = info.fx_graph_name
        self.kinds = info.kinds()
        entries = tuple((i, bool(number)) for i, number in info.unupdated_sym_input_index)
        self._keys = KeyMaker(self.kinds, entries, self.options.frozen_parameter)
        self._raw, self._rest = self._keys.raw, self._keys.rest
        self._updates = Updates.from_literals(info.updated_ops_param, info.ops_update_rulers)
        self._find_substrate = substrate or partial(
            substrate_for, engine=None, pool=info.pool, updates=self._updates
        )
        self._warmups = info.num_warmup_iters
        self._uncaptured = uncaptured

    @property
    def graph(self) -> Mapping[str, GraphMeta]:
        """Captured graphs by key, under the name that the original has for them."""
        return self.captured

    # ---- one call ----

    def __call__(self, *args: Any) -> Any:
        return self.call(list(args))

    def call(self, args: Sequence[Any]) -> Any:
        """Capture if need be, then bring inputs, replay, bring updates back, hand results out."""
        with self._lock:
            meta = self._ready(args)
            if meta is None:
                return self._eagerly(args)
            hold = len(self.captured) == 1 or not self.options.reuse
            if self._watched:
                return self._step_by_step(meta, args, hold)
            if is_profiling():
                return self._profiled(meta, args, hold)
            return meta.recording.call(args, hold)

    def _profiled(self, meta: GraphMeta, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        kernels = self.shown() if meta.recording.by_operators else nullcontext()
        with torch.profiler.record_function("acl_graph_replay"), kernels:
            return meta.recording.profiled(args, hold)

    def _step_by_step(self, meta: GraphMeta, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """A call whose steps are timed for the log."""
        recording = meta.recording
        with _timed("generate graph_key", self._keys.text):
            self._keys.text(args)
        with _timed("process input", recording.feed):
            recording.feed(args)
        with label("acl_graph_replay"):
            recording.replay()
        with _timed("get updated params", self._updates.values):
            self._updates.values(args)
        recording.write_back(args)
        return recording.results(args, hold)

    def compile(self, *args: Any) -> str | None:
        """The key of the graph that serves this call, captured now if it is new; None when calls
        run eagerly."""
        with self._lock:
            meta = self._ready(list(args))
            return None if meta is None else meta.key

    def entry(
        self,
        args: Sequence[Any],
        guard: Callable[[Enterable], Guard | None] | None = None,
    ) -> ReplayEntry | None:
        """Calls like this one, which was served before, as one native call; None where there is
        none. `guard` makes one of other arguments than these."""
        with self._lock:
            if self.fallen_back or self.options.force_recapture:
                return None
            meta = self._latest.get(self._rest(args))
            numbers = self._keys.numbers(args)
            if meta is None or meta.limits is not None or numbers is None:
                return None
            if meta.serves is None or not meta.serves(args):
                return None
            found = meta.recording.enterable()
            if found is None or (guard is not None and found.outputs.reads_arguments):
                return None
            made = guard_of(found, args, numbers) if guard is None else guard(found)
            if made is None:
                return None
            entry = ReplayEntry(found, made, self._lock)
            meta.recording.enter_by(entry)
            return entry

    # The parts of a call under the original's names, for a key that `compile` gave.

    def process_input(self, graph_key: str, *args: Any) -> None:
        """Bring the arguments of a call to where the captured graph reads them."""
        self._given = list(args)
        self.captured[graph_key].recording.feed(self._given)

    def run(self, graph_key: str) -> None:
        """Replay it."""
        self.captured[graph_key].recording.replay()

    def process_inplace_inputs(self, graph_key: str, *args: Any) -> None:
        """Bring updates back to arguments that are not where the graph was captured."""
        self.captured[graph_key].recording.write_back(list(args))

    def reconstruct_outputs(self, graph_key: str) -> list[Any]:
        """The results of the last replay."""
        hold = len(self.captured) == 1 or not self.options.reuse
        return list(self.captured[graph_key].recording.results(self._given, hold))

    def _eagerly(self, args: Sequence[Any]) -> Any:
        with label("fx_run_eagerly"):
            if self._uncaptured is None or self.substrate.busy():  # nothing can be planned then
                with self.shown():
                    return self.forward(*args)
            return self._uncaptured(args)

    # ---- which graph ----

    def _ready(self, args: Sequence[Any]) -> GraphMeta | None:
        """The captured graph for a call, None when it runs eagerly: also where its caller is being
        captured, and replays of that are not ordered with ours."""
        meta = self._captured_for(args)
        if meta is None or not self.substrate.busy():
            return meta
        return None

    def _captured_for(self, args: Sequence[Any]) -> GraphMeta | None:
        if self.fallen_back:
            return None
        latest = self._latest.get(self._rest(args))
        if latest is not None and latest.serves is not None and latest.serves(args):
            return self._found(latest)
        meta = self._by_raw.get(self._raw(args))
        if meta is None:
            meta = self._moved(args)
        elif self._reason(meta, args) is None and meta.recording.renew(args):
            self._latest[self._rest(args)] = meta
            if meta.recording.frozen_tensors is not meta.frozen_tensors:
                self._keep_test(meta, args)
            return self._found(meta)
        if not self._started:
            self._start(args)
        if self.options.fallback and self.substrate.busy():
            return None  # its operators become part of that capture
        return self._capture_new(args, meta)

    def _moved(self, args: Sequence[Any]) -> GraphMeta | None:
        """The captured graph whose frozen parameters have other memory than they had."""
        if not self.options.frozen_parameter:
            return None
        moved = self._keys.have_moved
        return next((m for m in self.captured.values() if moved(args, m.frozen, m.raw)), None)

    def _keep_test(self, meta: GraphMeta, args: Sequence[Any]) -> None:
        """A quick test whether the next call is like this one, where no limits come into it."""
        meta.frozen_tensors = meta.recording.frozen_tensors
        if meta.limits is None and not self.options.force_recapture:
            meta.serves = self._keys.test(args, self.kinds.mutated, meta.frozen_tensors)

    def _found(self, meta: GraphMeta) -> GraphMeta:
        if self.options.evict:
            self.captured.move_to_end(meta.key)
        self._watched = logger.isEnabledFor(logging.DEBUG)
        if self._watched:
            where = f"of fx_graph {self.name}, graph key {meta.key}"
            logger.debug("Find captured AclGraph %s", where)
            logger.debug("The current AclGraph no needs to be recaptured %s", where)
        return meta

    def _start(self, args: Sequence[Any]) -> None:
        if self._warmups:
            self._warm_up(args)
        self.substrate = self._find_substrate(args)
        self._started = True

    def _warm_up(self, args: Sequence[Any]) -> None:
        """Runs without effects: on copies of the arguments, with random numbers put back."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device = next((t.device for t in tensors if t.device.type != "cpu"), None)
        kind, numbers = ("cuda", []) if device is None else (device.type, [device.index or 0])
        with torch.no_grad(), torch.random.fork_rng(numbers, device_type=kind):
            for _ in range(self._warmups):
                with label("acl_graph_warm_up"):
                    self.forward(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])

    def _reason(self, meta: GraphMeta, args: Sequence[Any]) -> Counted | None:
        """Why a graph is captured again, if that is counted."""
        if any(_layout(args[i]) != layout for i, layout in meta.mutated):
            return Counted.MOVED
        if self.options.force_recapture:
            return Counted.FORCED
        other = meta.limits is not None and meta.limits != self.substrate.limits()
        return Counted.LIMITS if other else None

    def _capture_new(self, args: Sequence[Any], old: GraphMeta | None) -> GraphMeta | None:
        key = self._keys.text(args) if old is None else old.key
        if old is None and key in self.captured:
            key = self._keys.text(args, full=True)
        if old is None:
            logger.debug(
                "No find captured AclGraph of fx_graph %s for graph key %s", self.name, key
            )
        else:
            self._note_recapture(old, args)
        if old is None and len(self.captured) == 1 and self.options.reuse:
            next(iter(self.captured.values())).recording.release()
        self._log_memory(key)
        if len(self.captured) >= self.options.limit and not self._evict_or_stop(old):
            return None
        try:
            meta = self._capture(key, args)
        except CaptureError as e:
            self._without(e)
            return None
        if old is not None:
            self._drop(old)
        self._watched = logger.isEnabledFor(logging.DEBUG)
        self.captured[key] = self._by_raw[meta.raw] = self._latest[self._rest(args)] = meta
        if old is None:
            self._count(Counted.CAPTURED)
        logger.debug("Success to capture fx_graph %s for graph key %s", self.name, key)
        self._log_counts()
        return meta

    def _capture(self, key: str, args: Sequence[Any]) -> GraphMeta:
        request = base.ToCapture(self.name, self.forward, args, self.kinds, self.options)
        with label("acl_graph_capture"), torch.no_grad():
            recording = self.substrate.capture(request)
        mutated = [(i, _layout(args[i])) for i in self.kinds.mutated]
        limits, frozen = self.substrate.limits(), self._keys.parameters(args)
        meta = GraphMeta(key, self._raw(args), recording, mutated, frozen, None, limits)
        self._keep_test(meta, args)
        return meta

    def _note_recapture(self, old: GraphMeta, args: Sequence[Any]) -> None:
        logger.debug(
            "The current AclGraph needs to be recaptured for fx_graph %s, graph key %s",
            self.name,
            old.key,
        )
        reason = self._reason(old, args)
        if reason is not None:
            self._count(reason)
        elif self.options.frozen_parameter:
            logger.debug(
                "A frozen weight of fx_graph %s has other memory than it had. The original says: "
                "The current AclGraph no needs to be recaptured, and uses the old weight",
                self.name,
            )

    def _evict_or_stop(self, old: GraphMeta | None) -> bool:
        """At the limit: forget what was used least recently, or run eagerly from now on."""
        if self.options.evict:
            if old is None:
                self.substrate.finish()  # a replay of what is forgotten may be under way
                for meta in list(self.captured.values()):
                    if meta.recording.used():  # by calls that did not come through here
                        self.captured.move_to_end(meta.key)
                self._drop(next(iter(self.captured.values())))
            return True
        limit = _LIMITS[speaking() is npugraph_ex_logger]
        text = (
            f"{self.name}: {limit} reached, {self.options.limit} graphs are captured; calls run "
            f"without capture from now on. Raise {limit}, let sizes vary less (pad them, or keep a "
            "cache of fixed size), or set debug.aclgraph.evict_captures."
        )
        warnings.warn(text, UserWarning, stacklevel=4)
        note(Fallback.CAPTURE_LIMIT, text)
        self._fall_back()
        return False

    def _without(self, error: CaptureError) -> None:
        """A graph that cannot be captured runs without capture, or is an error where the user
        prefers that."""
        if not self.options.fallback:
            raise error
        warnings.warn(f"{self.name} runs without capture: {error}", UserWarning, stacklevel=5)
        note(Fallback.CAPTURE, f"{self.name} runs without capture", error)
        self._fall_back()

    def _fall_back(self) -> None:
        self.fallen_back = True
        self.substrate.finish()
        for meta in list(self.captured.values()):
            self._drop(meta)
        for name in Counted:
            _counters().pop(f"{name}_{self.name}", None)
        self.substrate.trim()

    def _drop(self, meta: GraphMeta) -> None:
        self._latest.clear()
        self.captured.pop(meta.key, None)
        self._by_raw.pop(meta.raw, None)
        meta.recording.reset()

    def _count(self, what: Counted) -> None:
        _counters()[f"{what}_{self.name}"] += 1

    def _log_memory(self, key: str) -> None:
        if not self.options.reuse:
            text = "memory pool reuse is disable: no mempool reuse in fx_graph %s, graph key %s"
        elif self.captured:
            text = "After setting to original memory state for fx_graph %s, for graph key %s"
        else:
            text = "When mempool reuse is enabled in fx_graph %s, keys after %s share memory"
        logger.debug(text, self.name, key)

    def _log_counts(self) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            counted = (Counted.CAPTURED, Counted.MOVED)
            counts = [_counters()[f"{what}_{self.name}"] for what in counted]
            logger.debug(
                "For graph %s : the count of captures is %s, and count of recaptures caused by "
                "mutated inputs changed is %s",
                self.name,
                *counts,
            )


_own_counters: dict[str, Counter[str]] = {COUNTERS: Counter()}


class Counted(StrEnum):
    """What is counted, for each FX graph."""

    CAPTURED = "captured"
    MOVED = "recapture_due_to_mutated_input_change"
    LIMITS = "recapture_due_to_global_limit_core_change"
    FORCED = "recapture_due_to_force_recapture"


def _counters() -> Any:
    dynamo = loaded_utils()  # a stored graph runs without it
    return (dynamo.counters if dynamo is not None else _own_counters)[COUNTERS]


def _layout(tensor: torch.Tensor) -> TensorLayout:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@contextmanager
def _timed(phase: str, function: Callable[..., Any]) -> Iterator[None]:
    """Log what a step of a call has cost."""
    start = time.perf_counter()
    yield
    logger.debug(
        "The operation of [npugraph_ex overhead] %s phase (function name: %s) cost %.9fs.",
        phase,
        function.__name__,
        time.perf_counter() - start,
    )


def substrate_for(
    args: Sequence[Any], engine: GraphCall | None, pool: tuple[int, int] | None, updates: Updates
) -> base.Substrate:
    """The device's own graphs on an accelerator, of the engine's program or of the FX graph; on the
    CPU the engine, or the tape. The engine is not for graphs that it does not take and for host
    lists that differ between calls."""
    device = next(
        (a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"),
        torch.device("cpu"),
    )
    if device.type != "cpu":
        return DeviceSubstrate(device, pool, updates, graph=None if updates.rules else engine)
    if engine is None or updates.rules:
        return TapeSubstrate(updates)
    return EngineSubstrate(engine, pool)


def wired(
    graph: AclGraph,
    info: AclGraphCacheInfo,
    device: Device,
    engine: GraphCall | None,
    updates: Updates,
    results: Sequence[str],
) -> RunGraph:
    """What a call of a graph enters, through what its device must do. `results` are the devices of
    its results."""
    find = partial(substrate_for, engine=engine, pool=info.pool, updates=updates)
    engine = None if updates.rules else engine
    uncaptured = None if engine is None or device.name != "cpu" else engine.call
    graph.load(info, lambda args: find(device.host_arguments(args)), uncaptured)
    kinds = info.kinds()
    if engine is not None and not graph.options.share_results:
        return device.noted(graph.call, kinds.mutated)
    fixed = () if engine is None else (*kinds.parameters, *kinds.mutated)
    return device.hosted(graph.call, results, kinds.mutated, fixed)


class CapturedGraph:
    """A graph in the engine, captured as an AclConcreteGraph is, without the FX graph."""

    def __init__(
        self,
        engine: GraphCall,
        name: str,
        device: Device,
        known: Mapping[str, Any],
        settings: Settings,
    ) -> None:
        """`known` comes from `storable`."""
        options = settings.capture.resolved()
        arguments = {k: v for k, v in known.items() if k != "results"}
        info = AclGraphCacheInfo(
            fx_graph_name=name,
            pool=options.pool,
            capture_error_mode=options.error_mode,
            num_warmup_iters=options.warmups,
            **arguments,
        )
        self.graph = AclGraph(fx_forward=lambda *args: engine.call(args), config=options)
        self.entry = wired(self.graph, info, device, engine, Updates(), known["results"])
