"""`torchair.compile`: a model traced once; its calls are our guards and the plan, no Dynamo.

A compiled model is called as the model is. It finds the version for the call, which is the model
compiled for one kind of call (`call_version.py`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, overload

import torch
from torch.compiler import is_dynamo_compiling

from torchair.backend import config_in, settings_of
from torchair.configs.compiler_config import CompilerConfig, apply_options, warn_about
from torchair.deploy.call_version import Version
from torchair.deploy.guards import Expected, TracedGraph, TraceError
from torchair.deploy.tensor_refs import (
    ModuleWalk,
    SharedMemory,
    TensorRef,
    roots_of,
    tensor_refs_of,
)
from torchair.deploy.trees import CallShape
from torchair.errors import GraphError
from torchair.locks import RLock
from torchair.log import warn_once
from torchair.trace import start_debug_log

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from torchair.engine.session import GraphSummary, TorchNpuGraph

Dynamic = bool | Mapping[str, Sequence[int]]


def shape_of(model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> CallShape:
    """How a call of a model is nested."""
    return CallShape(args, kwargs, _names(model, len(args)))


def _names(model: Callable[..., Any], count: int) -> list[str]:
    """Names of the arguments of a model, at least so many."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    names: list[str] = []
    rest = "args"
    try:
        for name, p in inspect.signature(called).parameters.items():
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                names.append(name)
            elif p.kind is p.VAR_POSITIONAL:
                rest = name
    except (TypeError, ValueError):
        pass
    return names + [f"{rest}[{k}]" for k in range(count - len(names))]


def check_names(dynamic: Dynamic, labels: Sequence[str]) -> None:
    """ValueError where `dynamic` names no argument."""
    unknown = [] if isinstance(dynamic, bool) else [n for n in dynamic if n not in labels]
    if unknown:
        raise ValueError(
            f"dynamic names {', '.join(unknown)}, but the arguments are {', '.join(labels)}"
        )


def dynamic_dims(dynamic: Dynamic, label: str, t: torch.Tensor) -> list[int]:
    """Dims of an argument that may vary: those asked for, and those marked as Dynamo's are."""
    marked = set(getattr(t, "_dynamo_dynamic_indices", ()))
    if isinstance(dynamic, Mapping):
        marked |= {d % max(t.dim(), 1) for d in dynamic.get(label, ())}
    if marked and Expected.of(label, t, dict.fromkeys(marked, "n")).order is None:
        raise TraceError(
            f"dims of {label} are to vary, but it has gaps or overlaps in memory",
            hint="make it contiguous",
        )
    if dynamic is True:
        dense = Expected.of(label, t, {0: "n"}).order is not None if t.dim() else False
        static = set(getattr(t, "_dynamo_static_indices", ()))
        marked |= {i for i, n in enumerate(t.shape) if dense and n > 1 and i not in static}
    return sorted(marked)


OnMismatch = Literal["error", "recompile"]

_VERSIONS = 64  # that one compiled model may have
_models = RLock()
"""Held by a thread that looks at a model: while one is traced, tensors without memory are in the
place of its parameters, which others may have too."""
_tracer: int | None = None  # the thread that traces one


@contextmanager
def _tracing() -> Iterator[None]:
    """This thread traces a model inside."""
    global _tracer
    before, _tracer = _tracer, get_ident()
    try:
        yield
    finally:
        _tracer = before


@overload
def compile(model: None = None, **keywords: Any) -> Callable[..., CompiledModel]: ...


@overload
def compile(
    model: Callable[..., Any] | ExportedProgram, example_inputs: Any = None, **keywords: Any
) -> CompiledModel: ...


def compile(
    model: Callable[..., Any] | ExportedProgram | None = None,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: Dynamic | None = None,
    on_mismatch: OnMismatch | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    **as_torch: Any,
) -> Any:
    """Compile a model or function for inference, traced once on example inputs, or without them at
    the first call.

    `example_inputs` are the positional arguments of a call. With `dynamic=True` all dims of tensors
    may vary, `dynamic={"x": [0]}` names them. A call that does not fit what was compiled is
    compiled anew (`on_mismatch="recompile"`), or with example inputs an error.

    Other keywords are those of `torch.compile` (`fullgraph`, `backend`, `options`, `disable`,
    `recompile_limit`, ...), and so is the use as a decorator. A program of
    `torch.export` has its inputs and sizes that vary with it: it is all that is given.
    """
    given = example_inputs is not None or example_kwargs is not None
    if on_mismatch is None:
        on_mismatch = "error" if given else "recompile"
    if on_mismatch not in ("error", "recompile"):
        raise ValueError(f"on_mismatch is 'error' or 'recompile', not {on_mismatch!r}")
    if model is None:
        return partial(
            compile,
            example_inputs=example_inputs,
            example_kwargs=example_kwargs,
            config=config,
            mode=mode,
            dynamic=dynamic,
            on_mismatch=on_mismatch,
            custom_decompositions=custom_decompositions,
            **as_torch,
        )
    if as_torch.get("disable"):
        return model
    start_debug_log()
    known, decompositions = _settings(config, mode, as_torch)
    decompositions |= custom_decompositions or {}
    warn_about(known)
    if is_exported(model):
        from torchair.deploy.exported import compile_program

        if dynamic:
            raise ValueError("the dims that vary are those of the export; leave `dynamic` out")
        return compile_program(model, known, decompositions)
    made = CompiledModel(model, known, dynamic or False, on_mismatch, decompositions)
    made.most = as_torch.get("recompile_limit") or made.most
    if given:
        args = () if example_inputs is None else example_inputs
        args = args if isinstance(args, tuple | list) else (args,)
        made.add(args, dict(example_kwargs or {}))
    return made


_AS_TORCH = {
    "fullgraph", "backend", "options", "name", "disable", "recompile_limit", "isolate_recompiles",
}  # fmt: skip
"""Keywords of `torch.compile` that are taken beside those of our own."""


def _settings(
    config: CompilerConfig | None, mode: str | None, given: Mapping[str, Any]
) -> tuple[CompilerConfig, dict[Any, Any]]:
    """The configuration that keywords of `torch.compile` ask for, and decompositions."""
    unknown = set(given) - _AS_TORCH
    if unknown:
        raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
    if given.get("fullgraph") is False:
        raise ValueError("a model is compiled as one graph; torch.compile has fullgraph=False")
    found, decompositions = settings_of(given.get("backend"))
    if config is not None and found is not None:
        raise ValueError("give the configuration as `config` or with the backend, not both")
    known = config_in(mode, config if found is None else found)
    options = dict(given.get("options") or {})
    options.pop("guard_filter_fn", None)  # there are no guards of Dynamo
    if options:
        if mode is not None:
            raise RuntimeError("Either mode or options can be specified, but not both")
        known = copy.deepcopy(known)
        apply_options(known, options)
    return known, decompositions


def is_exported(model: Any) -> TypeGuard[ExportedProgram]:
    """Whether a model is a program of `torch.export`, which is not imported for the question."""
    known = sys.modules.get("torch.export.exported_program")
    return known is not None and isinstance(model, known.ExportedProgram)


class CompiledModel:
    """A compiled model: called as the model is. What else it is asked for, the model answers."""

    from_two = True
    """Whether graphs with sizes that vary are for sizes from 2 on; else for any, where they can."""

    def __init__(
        self,
        model: Callable[..., Any],
        config: CompilerConfig,
        dynamic: Dynamic,
        on_mismatch: OnMismatch,
        decompositions: dict[Any, Any],
    ) -> None:
        self.model = model
        self._attribute: str | None = None  # of a class
        self.versions: list[Version] = []
        self._config, self._dynamic, self._decompositions = config, dynamic, decompositions
        self._on_mismatch = on_mismatch
        self._lock = _models
        self.most = _VERSIONS
        self._fast_path: Callable[..., Any] = self._usual_path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # a part of what torch.compile traces
            return self.model(*args, **kwargs)
        return self._fast_path(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.model, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is loaded, compiles anew: native code knows the first one's tensors."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_fast_path")} | {
            "versions": []
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=_models, _fast_path=self._usual_path)

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> CompiledModel:
        """As a method, which each object has compiled for itself."""
        if instance is None or self._attribute is None or not inspect.isfunction(self.model):
            return self
        place = f"_compiled_{self._attribute}"
        found = vars(instance).get(place)
        method = getattr(found, "model", None)
        if not isinstance(method, MethodType) or method.__self__ is not instance:  # or a copy's
            found = vars(instance)[place] = copy.copy(self)
            found.model = MethodType(self.model, instance)
        return found

    def __repr__(self) -> str:
        name = getattr(self.model, "__name__", type(self.model).__name__)
        return f"CompiledModel({name}, {len(self.versions)} compiled)"

    def add(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Version:
        """Compile for calls like this one."""
        shape = shape_of(self.model, args, kwargs)
        with self._lock, _tracing():
            traced, refs = self.trace(shape)
            made = Version(roots_of(self.model), shape, traced, refs)
            self.versions.insert(0, made)
        return made

    def trace(self, shape: CallShape) -> tuple[TracedGraph, list[list[TensorRef]]]:
        """The graph of calls of a shape, and where its first arguments are."""
        from torchair.deploy.tracing import trace

        check_names(self._dynamic, shape.labels)
        roots = roots_of(self.model)
        refs = tensor_refs_of(roots)
        modules = [(name, module) for name, module, _ in ModuleWalk(roots).modules]

        def call(leaves: Sequence[Any]) -> Any:
            positional, named = shape.restored(leaves)
            return self.model(*positional, **named)

        traced = trace(
            call,
            refs,
            shape.leaves,
            shape.labels,
            partial(dynamic_dims, self._dynamic),
            self._config,
            self._decompositions,
            self.from_two,
            modules,
        )
        for k in traced.unread:
            if all(h.loose for h in refs[k]):  # no need to check it any more
                refs[k] = [TensorRef.nowhere()]
        return traced, refs

    def _usual_path(self, *args: Any, **kwargs: Any) -> Any:
        """A call through Python: finds the version, and makes the fast path to it."""
        if _tracer == get_ident():  # another one, which this is a part of
            return self.model(*args, **kwargs)
        version, flat = self._find(args, kwargs)
        shared = version.shared(flat)
        if shared is not None:
            return self._eagerly(shared, args, kwargs)
        result = version.run(flat)
        if not kwargs:
            with self._lock:
                found = version.fast_path(flat, self._usual_path, tried=self._fast_path)
                self._fast_path = found or self._fast_path
        return result

    def _eagerly(self, reason: SharedMemory, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call that no graph computes rightly, since an argument lies in the model."""
        if not reason.of_model:
            raise reason
        warn_once(
            f"{str(reason).partition(chr(10))[0]}: such calls run eagerly because an argument "
            "aliases an updated buffer; pass a clone to compile them"
        )
        with torch.no_grad():
            return self.model(*args, **kwargs)

    @property
    def _latest(self) -> Version:
        if not self.versions:
            raise GraphError("nothing is compiled yet", hint="give example_inputs, or call it once")
        return self.versions[0]

    def summary(self) -> GraphSummary:
        """What the graph compiled last needs, before or after its first run."""
        return self._latest.session().summary()

    def set_graph_const_memory_base(self, block: torch.Tensor) -> None:
        """Keep the constants of the graph compiled last in memory of yours."""
        self._session_of_others().set_graph_const_memory_base(block)

    def update_graph_feature_memory_base(self, block: torch.Tensor) -> None:
        """Let the graph compiled last compute in memory of yours; it may be exchanged."""
        self._session_of_others().update_graph_feature_memory_base(block)

    def _session_of_others(self) -> TorchNpuGraph:
        """The engine's handle of the graph, for memory of the user: the fast path has its own."""
        found = self._latest.session(exchanged=True)
        self._latest.forget()
        self._fast_path = self._usual_path
        return found

    def _find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Version, list[Any]]:
        with self._lock:
            for k, version in enumerate(self.versions):
                flat = version.fitting(args, kwargs)
                if flat is not None:
                    if k:
                        self.versions.insert(0, self.versions.pop(k))
                    return version, flat
            error = self.versions[0].mismatch(args, kwargs) if self.versions else None
            if error is not None and (
                self._on_mismatch == "error" or len(self.versions) >= self.most
            ):
                raise error
            made = self.add(args, kwargs)
            fitting = made.fitting(args, kwargs)
            if fitting is None:  # nothing that is compiled serves such arguments
                self.versions.remove(made)
                raise made.mismatch(args, kwargs)
            return made, fitting
