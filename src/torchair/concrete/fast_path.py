"""Calls of an inference graph through `torch.compile` as one native call, or as those of a captured
graph alone.

Dynamo has compared the arguments when a compiled graph is called, and AOTAutograd's wrapper does
nothing around most inference graphs. From the fourth call on such a graph is a native guard that
looks at arguments and packed weights, takes addresses and runs the program; whatever it refuses
takes the usual path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, NamedTuple

import torch

from torchair.capture.entered import ReplayEntry
from torchair.codegen.streams import HOST
from torchair.concrete.acl import AclConcreteGraph, ReplayedGraph
from torchair.concrete.ge import GeConcreteGraph
from torchair.engine.plan.records import picker
from torchair.engine.run.frozen import ANY, FrozenTensors, TensorLike, reads_natively
from torchair.engine.run.native import GuardedEntry, same_as
from torchair.engine.session.loaded import LoadedGraph
from torchair.errors import InputError
from torchair.log import EVENT_LEVEL, logger
from torchair.torch_private.aot import TracingContext
from torchair.torch_private.dispatch import (
    is_any_autocast_enabled,
    is_torch_function_mode_enabled,
    is_traceable_wrapper_subclass,
)
from torchair.torch_private.forward_ad import computes_tangents
from torchair.torch_private.profiler import is_profiling

FIRST, LONGEST = 3, 1024
"""Usual calls before there is a native guard; twice as many after each that served few."""
_SERVED = 64  # calls of a native guard that was worth making


@dataclass
class Inference:
    """What is known of a graph that AOTAutograd has made for inference."""

    flat: bool = True
    """Whether it is called with its arguments one by one, and these and its results are plain
    tensors: metadata do not tell of tensors that the wrapper takes apart or makes of others."""
    metadata: Any = None
    """AOTAutograd's own."""
    arguments: int = -1
    """How many the graph has."""
    runner: Any = None
    """What it was compiled to."""

    def noting(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """A compiler that notes it down."""

        def compile_inference(gm: Any, inputs: Sequence[Any]) -> Any:
            self.metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
            self.arguments, self.runner = len(inputs), compiler(gm, inputs)
            return self.runner

        return compile_inference

    def is_bare(self, count: int) -> bool:
        """Whether the wrapper around it does nothing but call it with its `count` arguments."""
        known = self.metadata
        if known is None or self.arguments != count:
            return False
        plain = not known.num_outputs_aliased and not known.mutated_inp_runtime_indices
        return plain and not known.tokens and known.num_intermediate_bases == 0

    @property
    def leaves_nothing(self) -> bool:
        """Whether the wrapper sets nothing either, but for versions of updated arguments: marks of
        sizes that vary, the gradient mode."""
        known, missing = self.metadata, object()
        marks = getattr(known, "dynamic_outputs", missing)
        return not marks and getattr(known, "grad_enabled_mutation", missing) is None

    @property
    def counted(self) -> list[int]:
        """Arguments that the graph updates and autograd knows: it counts their versions."""
        return list(self.metadata.mutated_graph_handled_indices_seen_by_autograd)


def is_flat(gm: Any, inputs: Sequence[Any]) -> bool:
    """Whether what Dynamo gives is a graph, and none of its inputs and results is a tensor made of
    others."""
    if not isinstance(gm, torch.fx.GraphModule) or any(map(is_traceable_wrapper_subclass, inputs)):
        return False
    results = (n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes)
    return not any(map(is_traceable_wrapper_subclass, results))


def quickened(
    usual: Callable[..., Any],
    made: Inference,
    count: int,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """`usual`, a graph of `count` arguments in AOTAutograd's wrapper, with a fast path for calls
    that are alike, where the wrapper is not needed. `around` is what else is around a graph."""
    graph = made.runner
    if not made.flat or not made.is_bare(count) or not made.leaves_nothing:
        return usual
    if isinstance(graph, AclConcreteGraph | ReplayedGraph):
        return update_wrapper(_Entering(usual, graph, around, made.counted).caller(), usual)
    if not isinstance(graph, GeConcreteGraph) or graph.device.name != HOST:
        return usual
    if not graph.plain or graph.graph.is_dynamic:
        return usual
    return update_wrapper(_FastPath(usual, graph, made.counted).caller(), usual)


class _Entering:
    """Calls of a captured graph, which compares its arguments itself: without the wrapper, where
    that has no mode to set, and as one native call, where calls are alike."""

    def __init__(
        self,
        usual: Callable[..., Any],
        graph: AclConcreteGraph | ReplayedGraph,
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        counted: Sequence[int],
    ) -> None:
        """`counted` are arguments whose versions a call increments."""
        self._usual, self._captured, self._counted = usual, graph.captured, counted
        self._run, self._speaks = around(graph.run), around(logger.isEnabledFor)
        self._graph = graph
        self._calls, self._patience = 0, FIRST
        self._seen = 0  # calls that the entry had served when it refused one
        self._entry: ReplayEntry | None = None

    def caller(self) -> Callable[..., Any]:
        """The function that Dynamo calls."""
        own, usual, run, speaks = self, self._usual, self._run, self._speaks
        count, gradients = torch.autograd.graph.increment_version, torch.is_grad_enabled
        counted = self._counted

        def call(*args: Any) -> Any:
            if gradients() or is_any_autocast_enabled() or computes_tangents():
                return usual(*args)
            entry = own._entry
            quiet = entry is None or speaks(EVENT_LEVEL) or is_profiling()
            results = None
            if entry is not None and not quiet and not is_torch_function_mode_enabled():
                results = entry(args)
            if results is None:
                results = run(list(args))
                own.note(args)
            if counted:
                count([args[k] for k in counted])
            return results

        return call

    def note(self, args: Sequence[Any]) -> None:
        """After a usual call. The entry is made anew after some in a row that it refused."""
        entry = self._entry
        calls = 0 if entry is None else entry.calls
        self._calls = self._calls + 1 if calls == self._seen else 1
        self._seen = calls
        if self._calls < self._patience:
            return
        self._entry, self._seen, served = None, 0, calls >= _SERVED
        self._calls, self._patience = 0, FIRST if served else min(2 * self._patience, LONGEST)
        if not self._graph.replaced:
            self._entry = self._captured.entry(list(args))


class _BoundEntry(NamedTuple):
    """The fast path."""

    enter: Callable[..., bool | None]
    makers: Sequence[Callable[[], torch.Tensor]]
    order: Sequence[int] | None  # of results, where it is another
    guarded: GuardedEntry
    loaded: LoadedGraph  # which may get memory of the user


class _FastPath:
    """The native guard of a graph, made for arguments like those of a call before."""

    def __init__(
        self, usual: Callable[..., Any], graph: GeConcreteGraph, counted: Sequence[int]
    ) -> None:
        """`counted` are arguments whose versions a call increments."""
        self._usual, self._graph, self._counted = usual, graph, counted
        self._calls, self._patience = 0, FIRST
        self._served = 0
        self._entry: _BoundEntry | None = None
        self._weights = _Weights(graph)

    def caller(self) -> Callable[..., Any]:
        """The function that Dynamo calls."""
        own, usual, speaks = self, self._usual, logger.isEnabledFor
        counted, count = self._counted, torch.autograd.graph.increment_version

        def call(*args: Any) -> Any:
            if computes_tangents():
                return usual(*args)
            entry = own._entry
            if entry is None:
                return own.otherwise(args)
            if is_profiling() or is_torch_function_mode_enabled() or speaks(EVENT_LEVEL):
                return usual(*args)
            enter, makers, order, guarded, loaded = entry
            if loaded.memory is not None:
                return own.otherwise(args)
            made = [makers[0]()] if len(makers) == 1 else [make() for make in makers]
            done = enter(*args, *made)
            if not done:
                if done is None:
                    raise guarded.failure()
                return own.otherwise(args)
            if counted:
                count([args[k] for k in counted])
            return made if order is None else [made[k] for k in order]

        return call

    def otherwise(self, args: Sequence[Any]) -> Any:
        """A usual call. After some in a row that were refused the guard is made anew."""
        entry = self._entry
        if entry is not None and (count := entry.guarded.take_hits()):
            self._served += count
            self._calls = 0
        if entry is not None or self._patience == FIRST:
            self._weights.check(args)
        result = self._usual(*args)
        session = self._graph.session
        if not session.is_compiled or session.loaded.memory is not None:
            self._entry = None
        elif entry is not None and entry.guarded.frozen_tensors is not self._frozen():
            self._entry = None  # its weights are not those of the model any more
        self._calls += 1
        if self._calls >= self._patience:
            served = self._served >= _SERVED
            self._calls, self._served = 0, 0
            self._patience = FIRST if served else min(2 * self._patience, LONGEST)
            self._entry = None
            self._entry = self._made(args)
        return result

    def _frozen(self) -> FrozenTensors | None:
        return self._graph.session.current.frozen_tensors

    def _made(self, args: Sequence[Any]) -> _BoundEntry | None:
        graph, frozen = self._graph, self._frozen()
        inputs = graph.collect(args)
        if not reads_natively() or any(type(t) not in _PLAIN for t in inputs):
            return None
        used = 0 if frozen is None else frozen.hits
        made = self._bound(args, inputs)
        if frozen is not None:
            frozen.add_hits(used - frozen.hits)  # those were no calls
        return made

    def _bound(self, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> _BoundEntry | None:
        graph, found = self._graph, self._graph.direct(inputs)
        if found is None:
            return None
        program, frozen = found
        frozen_inputs = {} if frozen is None else frozen.tensors
        records = [
            TensorLike(taken, t, tuple(t.shape), _strides(t))
            for k, (taken, t) in enumerate(zip(graph.taken, inputs, strict=True))
            if k not in frozen_inputs
        ]
        guarded = program.guarded_entry(inputs, graph.taken, records, (), frozen, len(args))
        if guarded is None or any(program.results[i] >= 0 for i in graph.order):
            return None
        fresh = [i for i, k in enumerate(program.results) if k < 0]
        order = [fresh.index(i) for i in graph.order]
        plainly = order == list(range(len(program.makers)))
        order_given = None if plainly else order
        loaded = graph.session.loaded
        return _BoundEntry(guarded.enter, program.makers, order_given, guarded, loaded)


class _Weights:
    """Parameters of a graph, which are what they were at the first call: guards of Dynamo make sure
    of that, unless the user has left them out."""

    def __init__(self, graph: GeConcreteGraph) -> None:
        static = [(n, s.args[0]) for n, s in enumerate(graph.state.inputs) if s.static]
        self._graph, self._numbers = graph, [n for n, _ in static]
        self._pick = picker([a for _, a in static])
        self._kinds: list[tuple[Any, ...]] | None = None
        self._alike: Any = None  # a quick test

    def check(self, args: Sequence[Any]) -> None:
        """InputError for a parameter of another shape, type or layout: no plan is for that."""
        given = self._pick(args)
        if self._alike is not None and self._alike.check(*given):
            return
        kinds = [_kind(t) for t in given]
        if self._kinds is None:
            self._kinds = kinds
        for n, kind, expected in zip(self._numbers, kinds, self._kinds, strict=True):
            if kind != expected:
                raise InputError(
                    "a parameter has changed since the model was compiled",
                    index=n,
                    name=self._graph.graph.data[n].name,
                    expected=_shown(expected),
                    got=_shown(kind),
                    hint="keep Dynamo's guards on modules if parameters change",
                )
        self._alike = same_as(given) if all(type(t) in _PLAIN for t in given) else None


def _kind(t: Any) -> tuple[Any, ...]:
    if not isinstance(t, torch.Tensor):
        return (type(t).__name__,)
    return t.dtype, tuple(t.shape), _strides(t), str(t.device)


def _shown(kind: Sequence[Any]) -> str:
    return ", ".join(map(str, kind))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides that are compared: those of dims of size 1 say nothing."""
    return tuple(ANY if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))
