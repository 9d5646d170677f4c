"""A model compiled for one kind of call: its guards, and the fast path through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from torchair.deploy.guards import Guards, TracedGraph
from torchair.deploy.tensor_refs import ModelState, Roots, SharedMemory, TensorRef
from torchair.deploy.trees import CallShape, only, result_of
from torchair.engine.run.native import GuardedEntry
from torchair.errors import GraphError, InputError
from torchair.torch_private.dispatch import is_any_autocast_enabled, set_grad_enabled
from torchair.torch_private.forward_ad import computes_tangents
from torchair.torch_private.profiler import is_profiling

if TYPE_CHECKING:
    from torchair.capture import AclGraph
    from torchair.capture.entered import Enterable, Guard, ReplayEntry
    from torchair.engine.session import TorchNpuGraph

# calls of a kind before they get a native guard, twice as many after each try in vain
_PATIENCE = 2
_LONGEST = 1024


def autocast_types() -> str:
    """What autocast computes in, by device; nothing where it is off."""
    if not is_any_autocast_enabled():
        return ""
    on = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return ", ".join(f"{torch.get_autocast_dtype(d)} on {d}" for d in on) or "another device"


class _AroundCall(NamedTuple):
    """What a fast path does beside running native code."""

    usual: Callable[..., Any]  # the path through Python, for calls that native code refuses
    autocast_changed: Callable[[], bool]
    updated: Callable[[Sequence[Any]], list[torch.Tensor]] | None  # whose versions count a call
    finish: Callable[[Sequence[Any]], Any]


class Version:
    """The model compiled for one kind of call."""

    def __init__(
        self,
        roots: Roots,
        shape: CallShape,
        traced: TracedGraph,
        refs: Sequence[Sequence[TensorRef]],
    ) -> None:
        """`roots` are the modules that calls read, `refs` where the first arguments of the graph
        are."""
        self._shape, self._traced = shape, traced
        self.state = ModelState(roots, refs, traced.written)
        self._guards = Guards(traced.specs, traced.conditions)
        self._finish = result_of(traced.result, traced.constants)
        self._autocast = autocast_types()
        self._calls, self._patience = 0, _PATIENCE
        self._fast_path: Callable[..., Any] | None = None
        shape.forget()

    def fitting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The flat arguments of a call that this was compiled for, else None."""
        flat = self._shape.flat(args, kwargs)
        if flat is None or self._autocast_changed() or not self._guards.check(flat):
            return None
        return flat if self.state.problem() is None else None

    def mismatch(self, args: Sequence[Any], kwargs: dict[str, Any]) -> InputError:
        """Why a call does not fit."""
        flat = self._shape.flat(args, kwargs)
        if flat is None:
            return InputError(
                "nesting or names of the arguments differ from those of the compiled call",
                expected=", ".join(self._shape.labels) or "no arguments",
                got=f"{len(args)} by position, by name: {', '.join(kwargs) or 'none'}",
            )
        if self._autocast_changed():
            return InputError(
                "autocast is not what it was when the call was compiled",
                expected=self._autocast or "no autocast",
                got=autocast_types() or "no autocast",
            )
        error = self._guards.mismatch(flat) or self.state.problem()
        assert error is not None
        return error

    @property
    def _autocast_changed(self) -> Callable[[], bool]:
        """Whether autocast computes in other types than when this was compiled."""
        known = self._autocast
        return (lambda: autocast_types() != known) if known else is_any_autocast_enabled

    def shared(self, flat: Sequence[Any]) -> SharedMemory | None:
        """What arguments that fit share with what the call updates: the graph was traced as if it
        were nothing."""
        if not self._traced.written or not self._traced.tensors:
            return None
        given = {self._traced.specs[k].name: flat[k] for k in self._traced.tensors}
        return self.state.sharing().problem(given)

    def run(self, flat: Sequence[Any]) -> Any:
        """The result for flat arguments that fit."""
        args, runner = self._arguments(flat), self._traced.runner
        grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            if runner is None:
                return self._finish(self._traced.wrapped(*args))
            results = runner.run(args)
        finally:
            set_grad_enabled(grad)
        if self._traced.written:
            increment_version([args[k] for k in self._traced.written])
        return self._finish(results)

    def _updated(self) -> Callable[[Sequence[Any]], list[torch.Tensor]] | None:
        """What a call updates, of its flat arguments; None if nothing."""
        if not self._traced.written:
            return None
        count, tensors = len(self.state.tensors), self._traced.tensors
        own = [self.state.tensors[k] for k in self._traced.written if k < count]
        given = [tensors[k - count] for k in self._traced.written if k >= count]
        return lambda flat: [*own, *[flat[k] for k in given]]

    def _arguments(self, flat: Sequence[Any]) -> list[Any]:
        return [*self.state.tensors, *[flat[k] for k in self._traced.tensors]]

    @property
    def _graph(self) -> Any:
        return None if self._traced.runner is None else self._traced.runner.runner

    def session(self, exchanged: bool = False) -> TorchNpuGraph:
        """The engine's handle of the graph, compiled. GraphError where the graph is not one of the
        engine with fixed sizes, and where its memory is to be `exchanged` but a GPU replays it."""
        from torchair.devices.base import engine_graph

        graph = engine_graph(self._graph)
        if graph is None or not graph.plain or graph.graph.is_dynamic:
            raise GraphError("the model is not one graph of the engine that has fixed sizes")
        if exchanged and not getattr(self._graph, "plain", False):
            raise GraphError("a GPU replays the model in memory that it was recorded with")
        unknown = [None] * len(self._traced.tensors)  # of these nothing is frozen
        graph.compile(graph.collect([*self.state.tensors, *unknown]))
        return graph.session

    def forget(self) -> None:
        """Invalidate the fast path: it captured its own memory."""
        self._fast_path = None

    def fast_path(
        self, flat: Sequence[Any], usual: Callable[..., Any], tried: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """Calls like this one as one native call; None if that is not possible, or too early.
        `tried` is the native call that has refused these arguments, if any."""
        if self._fast_path is not None and tried is not self._fast_path:
            return self._fast_path  # of another version
        self._calls += 1
        if self._calls < self._patience or not self._shape.simple or not self.state.native:
            return None
        self._calls, self._patience = 0, min(2 * self._patience, _LONGEST)
        around = _AroundCall(usual, self._autocast_changed, self._updated(), self._finish)
        captured = getattr(self._graph, "captured", None)
        if captured is not None:
            made = self._of_replay(captured, flat, around)
        elif getattr(self._graph, "plain", False):  # inputs are arguments as they are, results new
            made = self._of_program(flat, around)
        else:
            made = None
        if made is None:
            return None
        self._patience = _PATIENCE
        tensors = self._traced.tensors
        if self._traced.written and tensors:
            made = self.state.sharing().guarding(made, usual, {k: flat[k] for k in tensors})
        self._fast_path = made
        return made

    def _of_program(self, flat: Sequence[Any], around: _AroundCall) -> Callable[..., Any] | None:
        """The fast path of a graph whose program is run."""
        graph, count, tensors = self._graph, len(self.state.tensors), self._traced.tensors
        inputs = graph.collect(self._arguments(flat))
        found = graph.direct(inputs)
        if found is None:
            return None
        program, frozen_tensors = found
        positions = [tensors[a - count] if a >= count else -1 for a in graph.taken]
        entry = program.guarded_entry(
            inputs, positions, self._guards.records(flat), self.state.entries(), frozen_tensors
        )
        if entry is None or any(program.results[i] >= 0 for i in graph.order):
            return None
        fresh = [i for i, k in enumerate(program.results) if k < 0]
        order = [fresh.index(i) for i in graph.order]
        if len(program.makers) == 1 and self._finish is only:
            return _one_result(entry, around)
        return _several_results(entry, order, around)

    def _of_replay(
        self, captured: AclGraph, flat: Sequence[Any], around: _AroundCall
    ) -> Callable[..., Any] | None:
        """The fast path of a graph that is replayed."""
        positions = [*[-1] * len(self.state.tensors), *self._traced.tensors]
        args, records = self._arguments(flat), self._guards.records(flat)

        def guard(graph: Enterable) -> Guard | None:
            return graph.guard_of_call(args, positions, records, self.state.entries())

        entry = captured.entry(args, guard)
        return None if entry is None else _replayed(entry, around)


def _replayed(entry: ReplayEntry, around: _AroundCall) -> Callable[..., Any]:
    usual, autocast_changed, updated, finish = around

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or autocast_changed() or is_profiling() or computes_tangents():
            return usual(*args, **kwargs)
        results = entry(args)
        if results is None:
            return usual(*args, **kwargs)
        if updated is not None:
            increment_version(updated(args))
        return finish(results)

    return call


def _one_result(entry: GuardedEntry, around: _AroundCall) -> Callable[..., Any]:
    """The whole call: the result is allocated, the native guard does the rest."""
    usual, autocast_changed, updated, _ = around
    (make,), enter = entry.program.makers, entry.enter

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or autocast_changed() or is_profiling() or computes_tangents():
            return usual(*args, **kwargs)
        made = make()
        done = enter(*args, made)
        if not done:
            return _refused(entry, done, usual, args)
        if updated is not None:
            increment_version(updated(args))
        return made

    return call


def _several_results(
    entry: GuardedEntry, order: Sequence[int], around: _AroundCall
) -> Callable[..., Any]:
    """The same, where the model returns more than one tensor. `order` tells which of the new
    tensors each result is."""
    usual, autocast_changed, updated, finish = around
    makers, enter = entry.program.makers, entry.enter
    in_order = list(order) == list(range(len(makers)))

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or autocast_changed() or is_profiling() or computes_tangents():
            return usual(*args, **kwargs)
        made = [make() for make in makers]
        done = enter(*args, *made)
        if not done:
            return _refused(entry, done, usual, args)
        if updated is not None:
            increment_version(updated(args))
        return finish(made if in_order else [made[k] for k in order])

    return call


def _refused(
    entry: GuardedEntry, done: bool | None, usual: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """A call that native code did not serve: None is an error, False another kind of call."""
    if done is None:
        raise entry.failure()
    entry.take_hits()
    return usual(*args)
