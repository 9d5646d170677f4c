"""Entry points of npugraph_ex: its flat configuration becomes a tree, then all is torchair's; and
`torch.ops.npugraph_ex.*`, operators of `air` under the name of this surface.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchair import ops as air
from torchair.backend import compile_with_aot, mode_of
from torchair.configs import compiler_config as configs
from torchair.configs.compiler_config import CompilerConfig, FlatConfig
from torchair.configs.options import given
from torchair.log import npugraph_ex_logger, spoken_by
from torchair.torch_private.dispatch import OpOverload
from torchair.trace import Trace, model_directory, start_debug_log

if TYPE_CHECKING:
    from torchair.deploy.cached import CachedMethod

_FLAT_NAMES = {alias.path: name for name, alias in configs.FLAT_ALIASES.items()}


def get_npu_backend(
    *,
    compiler_config: FlatConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A backend for `torch.compile(model, backend=...)`."""
    start_debug_log(npugraph_ex_logger)
    config, own = given(compiler_config, FlatConfig), dict(custom_decompositions or {})
    _warn(config)
    return partial(npugraph_ex_backend, compiler_config=config, decompositions=own)


def npugraph_ex_backend(
    gm: Any,
    example_inputs: Sequence[Any],
    compiler_config: FlatConfig | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend behind the name "npugraph_ex"; `options` are flat options by name. It has one
    mode, whichever of torch.compile's is asked for."""
    start_debug_log(npugraph_ex_logger)
    mode_of(mode)
    config = tree_of(_with_options(compiler_config, options or {}))
    return compile_with_aot(gm, example_inputs, config, decompositions or {}, npugraph_ex_logger)


def get_compiler(compiler_config: FlatConfig | None = None) -> Callable[..., Any]:
    """A compiler `(gm, example_inputs) -> callable` for hand-written AOT backends."""
    config = given(compiler_config, FlatConfig)
    _warn(config)
    return partial(_compile, config)


def compile_fx(
    gm: Any, example_inputs: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph as AOTAutograd makes them: functional, of aten operators, with fake values.

    Without `example_inputs` the values that tracing left on the placeholders are taken. Streams
    and limits of cores are not supported this way, and arguments that the graph updates in its
    last `copy_` nodes are updated in place only if those nodes are there
    (`keep_inference_input_mutations=True` of AOTAutograd).
    """
    start_debug_log(npugraph_ex_logger)
    inputs = _traced_inputs(gm) if example_inputs is None else list(example_inputs)
    config = FlatConfig()
    config.update(options or {})
    trace = Trace("compile_fx", model_directory(npugraph_ex_logger, "compile"))
    return get_compiler(config)(gm, inputs, trace)


def tree_of(config: FlatConfig) -> CompilerConfig:
    """The tree that the pipeline reads. User passes in it still get the flat configuration."""
    tree = config.tree()
    for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"):
        if (user_pass := getattr(config, name).value) is not None:
            setattr(tree, name, _flat_pass(user_pass, config))
    return tree


def _flat_pass(user_pass: Callable[..., Any], config: FlatConfig) -> Callable[..., Any]:
    def run(gm: Any, example_inputs: Any, _tree: CompilerConfig) -> None:
        user_pass(gm, example_inputs, config)
        as_air_ops(gm.graph)

    return run


def _compile(
    config: FlatConfig, gm: Any, example_inputs: Sequence[Any], trace: Trace | None = None
) -> Callable[..., Any]:
    from torchair.pipeline import NpuFxCompiler

    compiler = spoken_by(npugraph_ex_logger, NpuFxCompiler(tree_of(config), trace))
    return spoken_by(npugraph_ex_logger, compiler(gm, example_inputs))


def _with_options(config: FlatConfig | None, options: Mapping[str, Any]) -> FlatConfig:
    """A configuration of its own for one compilation; the user's stays as it is."""
    own = copy.deepcopy(config) if config is not None else FlatConfig()
    own.update(options)
    if options:
        _warn(own)
    return own


def _warn(config: FlatConfig) -> None:
    tree = config.tree()
    configs.warn_unsupported(tree, _FLAT_NAMES)
    configs.warn_frozen_parameter(tree)


def _traced_inputs(gm: Any) -> list[Any]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    unknown = [node.name for node in placeholders if "val" not in node.meta]
    if unknown:
        raise ValueError(
            f"the placeholders {', '.join(unknown)} carry no value from tracing; "
            "pass example_inputs to compile_fx"
        )
    return [node.meta["val"] for node in placeholders]


# ---- compiled methods that outlive their process


def cache_compile(
    func: Callable[..., Any],
    *,
    config: FlatConfig | None = None,
    backend: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> CachedMethod:
    """A bound method of a module, compiled and captured at its first call, or taken from its
    folder. All else that `torchair.inference.cache_compile` takes may be `given`."""
    from torchair.deploy.cached import cache_compile, config_of

    start_debug_log(npugraph_ex_logger)
    known = _with_options(config_of(config, backend), options or {})
    return cache_compile(func, config=tree_of(known), **given)


# ---- operators: tracing turns them into those of `air`; what a user's FX pass inserts is renamed
# after the pass

_ = air  # registers what is named here
_NAMES = (
    "scope_enter",
    "scope_exit",
    "record",
    "wait",
    "tagged_event_record",
    "tagged_event_wait",
    "tagged_event_record_on_stream",
    "tagged_event_wait_on_stream",
    "tagged_stream_wait_stream",
    "record_tagged_stream",
)
_lib = torch.library.Library("npugraph_ex", "FRAGMENT")


def _define(name: str) -> Any:
    operator = getattr(torch.ops.air, name).default
    _lib.define(str(operator._schema).removeprefix("air::"))
    _lib.impl(name, lambda *args, **kwargs: operator(*args, **kwargs), "CompositeImplicitAutograd")
    return operator


_AIR_OPS = {name: _define(name) for name in _NAMES}


def as_air_ops(graph: fx.Graph) -> None:
    """Let calls of these operators call those of `air`, which the passes know."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            space, _, name = node.target._schema.name.partition("::")
            if space == "npugraph_ex" and name in _AIR_OPS:
                node.target = _AIR_OPS[name]
