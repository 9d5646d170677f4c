"""`torchair.compile`: a model traced once; its calls are our guards and the plan, no Dynamo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchair.backend import mode_of
from torchair.configs.compat import warn_frozen_parameter, warn_ineffective, warn_unsupported
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.options import given
from torchair.deploy.homes import Home, homes_of, roots_of
from torchair.deploy.sharing import SharedMemory
from torchair.deploy.traced import Traced
from torchair.deploy.trees import CallShape
from torchair.deploy.version import Dynamic, Version, check_names, dynamic_dims, shape_of
from torchair.log import warn_once
from torchair.trace import start_debug_log

if TYPE_CHECKING:
    from torchair.engine.session import GraphSummary, TorchNpuGraph

OnMismatch = Literal["error", "recompile"]

_VERSIONS = 64  # that one compiled model may have


def compile(
    model: Callable[..., Any],
    example_inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: Dynamic = False,
    on_mismatch: OnMismatch = "error",
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledModel:
    """Compile a model or function for inference, traced once on example inputs.

    `example_inputs` are the positional arguments of a call. With `dynamic=True` all dims of tensors
    may vary, `dynamic={"x": [0]}` names them. A call that does not fit what was compiled is an
    error, or compiled anew with `on_mismatch="recompile"`.
    """
    if on_mismatch not in ("error", "recompile"):
        raise ValueError(f"on_mismatch is 'error' or 'recompile', not {on_mismatch!r}")
    start_debug_log()
    known = given(config, CompilerConfig)
    meant = mode_of(mode)
    if meant is not None:
        known = copy.deepcopy(known)
        known.mode = meant
    for warn in (warn_ineffective, warn_unsupported, warn_frozen_parameter):
        warn(known)
    args = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    made = CompiledModel(model, known, dynamic, on_mismatch, dict(custom_decompositions or {}))
    made.add(args, dict(example_kwargs or {}))
    return made


class CompiledModel:
    """A compiled model: called as the model is. What else it is asked for, the model answers."""

    def __init__(
        self, model: Callable[..., Any], config: CompilerConfig, dynamic: Dynamic,
        on_mismatch: OnMismatch, decompositions: dict[Any, Any],
    ) -> None:  # fmt: skip
        self.model = model
        self.versions: list[Version] = []
        self._config, self._dynamic, self._decompositions = config, dynamic, decompositions
        self._on_mismatch = on_mismatch
        self._lock = RLock()
        self._quick: Callable[..., Any] = self._slowly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._quick(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.model, name)

    def __repr__(self) -> str:
        return f"CompiledModel({self.model!r}, {len(self.versions)} compiled)"

    def add(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Version:
        """Compile for calls like this one."""
        shape = shape_of(self.model, args, kwargs)
        traced, homes = self.trace(shape)
        made = Version(roots_of(self.model), shape, traced, homes)
        self.versions.insert(0, made)
        return made

    def trace(self, shape: CallShape) -> tuple[Traced, list[list[Home]]]:
        """The graph of calls of a shape, and where its first arguments are."""
        from torchair.deploy.tracing import trace

        check_names(self._dynamic, shape.labels)
        homes = homes_of(roots_of(self.model))

        def call(leaves: Sequence[Any]) -> Any:
            positional, named = shape.restored(leaves)
            return self.model(*positional, **named)

        traced = trace(
            call, homes, shape.leaves, shape.labels, partial(dynamic_dims, self._dynamic),
            self._config, self._decompositions,
        )  # fmt: skip
        for k in traced.unread:
            if all(h.loose for h in homes[k]):  # nobody need look at it any more
                homes[k] = [Home.nowhere()]
        return traced, homes

    def _slowly(self, *args: Any, **kwargs: Any) -> Any:
        """A call through Python: finds the version, and makes the quick way to it."""
        version, flat = self._find(args, kwargs)
        shared = version.shared(flat)
        if shared is not None:
            return self._eagerly(shared, args, kwargs)
        result = version.run(flat)
        if not kwargs:
            self._quick = version.quick(flat, self._slowly, self._quick) or self._quick
        return result

    def _eagerly(self, reason: SharedMemory, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call that no graph computes rightly, since an argument lies in the model."""
        if not reason.of_model:
            raise reason
        warn_once(
            f"{str(reason).partition(chr(10))[0]}: such calls run eagerly; pass a copy of it if "
            "the value from before the call is meant"
        )
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def summary(self) -> GraphSummary:
        """What the graph compiled last needs, before or after its first run."""
        return self.versions[0].session().summary()

    def set_graph_const_memory_base(self, block: torch.Tensor) -> None:
        """Keep the constants of the graph compiled last in memory of yours."""
        self._session_of_others().set_graph_const_memory_base(block)

    def update_graph_feature_memory_base(self, block: torch.Tensor) -> None:
        """Let the graph compiled last compute in memory of yours; it may be exchanged."""
        self._session_of_others().update_graph_feature_memory_base(block)

    def _session_of_others(self) -> TorchNpuGraph:
        """The engine's handle of the graph, for memory of the user: the quick way has its own."""
        found = self.versions[0].session(exchanged=True)
        self.versions[0].forget()
        self._quick = self._slowly
        return found

    def _find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Version, list[Any]]:
        with self._lock:
            for k, version in enumerate(self.versions):
                flat = version.fitting(args, kwargs)
                if flat is not None:
                    if k:
                        self.versions.insert(0, self.versions.pop(k))
                    return version, flat
            latest = self.versions[0]
            error = latest.mismatch(args, kwargs)
            if self._on_mismatch == "error" or len(self.versions) >= _VERSIONS:
                raise error
            made = self.add(args, kwargs)
            fitting = made.fitting(args, kwargs)
            if fitting is None:  # nothing that is compiled serves such arguments
                self.versions.remove(made)
                raise made.mismatch(args, kwargs)
            return made, fitting
