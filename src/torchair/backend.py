"""Entry points: the torch.compile backend and the compiler behind it, wired to AOTAutograd."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.nn import functional as F

from torchair.configs.compiler_config import CompilerConfig, Settings, apply_options, warn_about
from torchair.configs.options import MAX_AUTOTUNE, TORCH_MODES, given
from torchair.configs.sections import ExperimentalConfig
from torchair.errors import UnsupportedModeError
from torchair.fallbacks import Fallback, note
from torchair.fx.gears import combinations, gears_of, keep_to_gears, traced_inputs
from torchair.garbage import no_garbage_collection
from torchair.log import TorchairLogger, logger, spoken_by
from torchair.store import atomic_write
from torchair.torch_private import aot, dynamo
from torchair.torch_private.forward_ad import any_tangent, computes_tangents
from torchair.torch_private.table import check
from torchair.trace import Trace, model_directory, start_debug_log


def get_compiler(compiler_config: CompilerConfig | None = None) -> Callable[..., Any]:
    """A compiler `(gm, example_inputs) -> callable` for hand-written AOT backends."""
    from torchair.pipeline import NpuFxCompiler

    return NpuFxCompiler(given(compiler_config, CompilerConfig))


def get_npu_backend(
    *,
    compiler_config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A backend for `torch.compile(model, backend=...)`."""
    if "torch_npu" in sys.modules:
        from torchair.ops.hcom import teach_dynamo

        teach_dynamo()  # again: it may have come since Dynamo did
    start_debug_log()
    config = given(compiler_config, CompilerConfig)
    warn_about(config)
    return partial(
        npu_backend, compiler_config=config, decompositions=dict(custom_decompositions or {})
    )


def torchair_backend(gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend behind the names "torchair" and "npu"."""
    return get_npu_backend()(gm, example_inputs, **kwargs)


def npu_backend(
    gm: Any,
    example_inputs: Sequence[Any],
    compiler_config: CompilerConfig | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph. `options` and `mode` are torch.compile's arguments of that name."""
    config = config_in(mode, compiler_config)
    if options:
        config = copy.deepcopy(config)
        apply_options(config, options)
    return compile_with_aot(gm, example_inputs, config, decompositions or {})


def settings_of(backend: Any) -> tuple[CompilerConfig | None, dict[Any, Any]]:
    """Configuration and decompositions of a backend that is ours, by its name or as
    `get_npu_backend` gives it."""
    if backend is None or (isinstance(backend, str) and backend in ("torchair", "npu")):
        return None, {}
    if isinstance(backend, partial) and backend.func is npu_backend:
        known = backend.keywords
        return known.get("compiler_config"), dict(known.get("decompositions") or {})
    raise ValueError(f"torchair.compile is its own backend; torch.compile takes {backend!r}")


def mode_of(name: str | None) -> str | None:
    """The mode that `torch.compile(mode=name)` means, None for that of the config."""
    if name is not None and name not in TORCH_MODES:
        raise UnsupportedModeError(
            f"unknown mode {name!r} for torch.compile", mode=name, supported=TORCH_MODES
        )
    return None if name is None else TORCH_MODES[name]


def config_in(mode: str | None, config: CompilerConfig | None) -> CompilerConfig:
    """The user's configuration; a copy of it where `mode` is given, as `torch.compile` takes it."""
    known, meant = given(config, CompilerConfig), mode_of(mode)
    if meant is not None:
        known = copy.deepcopy(known)
        known.mode = meant
    return known


def compile_with_aot(
    gm: Any,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    decompositions: dict[Any, Any],
    speaker: TorchairLogger = logger,
    finish: Callable[..., Any] | None = None,
    static: frozenset[int] | None = None,
) -> Callable[..., Any]:
    """Forward, backward and inference graphs of a Dynamo graph, each through the pipeline.

    `speaker` is the logger of the surface that the user called. `finish` gets each FX graph and
    what was compiled of it, and gives what runs instead. `static` are the arguments that are
    parameters, where Dynamo does not tell.
    """
    check()
    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):  # compiled autograd's
        again = partial(compile_with_aot, config=config, decompositions=decompositions)
        return dynamo.flatten_graph_inputs(gm, example_inputs, partial(again, speaker=speaker))

    with no_garbage_collection():  # these are many, and Dynamo's objects would be looked at
        from torchair.cacheable import CompiledGraph, is_wanted
        from torchair.concrete.fast_path import Inference, is_flat, quickened
        from torchair.fx.passes import fx_text
        from torchair.fx.torch_streams import translate_streams, uses_torch_streams
        from torchair.fx.tracing import (
            partition,
            quicken_guards,
            traced_wrongly,
            without_decomposition,
        )
        from torchair.pipeline import NpuFxCompiler

    if (reason := traced_wrongly(gm, example_inputs)) is not None:
        note(Fallback.TRACING, reason)
        return gm.forward
    gears = _gears(gm, example_inputs, config)
    quicken_guards()
    if (directory := model_directory(speaker)) is not None:
        atomic_write(directory / "dynamo_out_graph.txt", fx_text(gm).encode())
    outside = translate_streams(gm) if uses_torch_streams(gm) else None
    _lay_out_masks(gm, config)
    inference = Inference(is_flat(gm, example_inputs))

    def stage(phase: str, training: bool = True) -> Callable[..., Any]:
        trace = Trace(phase, directory)
        compiler = spoken_by(speaker, NpuFxCompiler(config, trace, training, static, gears))
        if finish is not None:
            return lambda graph, inputs: boxed(finish(graph, compiler(graph, inputs)))
        if is_wanted():
            around = partial(spoken_by, speaker)
            return lambda graph, inputs: CompiledGraph(compiler(graph, inputs), around)
        noted = compiler if training or outside is not None else inference.noting(compiler)
        return lambda graph, inputs: spoken_by(speaker, boxed(noted(graph, inputs)))

    keep = config.experimental_config.keep_inference_input_mutations
    with without_decomposition():
        made = aot.aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=stage("forward"),
            bw_compiler=opaque(stage("backward")),
            inference_compiler=stage("forward", training=False),
            partition_fn=partial(partition, lays_out=_lays_out(config)),
            decompositions=decompositions,
            keep_inference_input_mutations=bool(keep),
        )
    usual, count = with_tangents(made, gm), len(example_inputs)
    call = quickened(usual, inference, count, partial(spoken_by, speaker))
    if outside is not None and finish is None:
        call = outside.around(call)
    return with_backward(call, config.experimental_config)


def _lays_out(config: CompilerConfig) -> bool:
    """Whether values may have other layouts than torch would trace, and other kernels."""
    return Settings.of(config).numerics != "strict"


def _lay_out_masks(gm: Any, config: CompilerConfig) -> None:
    attention = F.scaled_dot_product_attention
    for part in (m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)):
        if part.graph.find_nodes(op="call_function", target=attention) and _lays_out(config):
            from torchair.fx.masks import lay_out_masks

            lay_out_masks(part)


def with_tangents(call: Callable[..., Any], gm: Any) -> Callable[..., Any]:
    """A call whose arguments may carry tangents of forward-mode differentiation, which kernels know
    nothing of: then the graph of Dynamo runs."""

    def run(*args: Any) -> Any:
        if computes_tangents() and any_tangent(args):
            note(Fallback.TRACING, "an argument carries a tangent of forward-mode differentiation")
            return gm.forward(*args)
        return call(*args)

    return update_wrapper(run, call)


def with_backward(call: Callable[..., Any], options: ExperimentalConfig) -> Callable[..., Any]:
    """A call that runs the backward of one of its results as well, if that is asked for. Gradients
    are in `.grad` when it returns, and its results have no history."""
    if not options.aot_config_enable_joint_graph:
        return call
    loss = int(options.aot_config_output_loss_index.value)

    def run(*args: Any) -> list[Any]:
        results = list(call(*args))
        if not 0 <= loss < len(results):
            raise IndexError(
                f"aot_config_output_loss_index is {loss}, but the graph has {len(results)} results"
            )
        if getattr(results[loss], "requires_grad", False):
            results[loss].backward()
        return [r.detach() if isinstance(r, torch.Tensor) else r for r in results]

    return run


def _gears(gm: Any, inputs: Sequence[Any], config: CompilerConfig) -> Sequence[Mapping[str, int]]:
    """Sizes that the user has set gears for; guards keep calls to them. The modes that capture
    have a graph for each size anyway."""
    if config.mode.value != MAX_AUTOTUNE or not any(hasattr(x, "dim_gears") for x in inputs):
        return ()
    found = gears_of(inputs)
    traced = traced_inputs(gm)
    merged = combinations(traced, found, config.inference_config.dynamic_gears_merge_policy.value)
    keep_to_gears(traced, found)
    return merged


def opaque(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler of a backward graph, untraced. A backward is compiled and run where the user
    calls `backward()`, perhaps in a function that Dynamo is tracing; of forward graphs Dynamo
    itself keeps away."""

    def compile_backward(graph: Any, inputs: Any) -> Callable[..., Any]:
        return dynamo.disable(compiler(graph, inputs), reason="it is compiled already")

    return dynamo.disable(compile_backward, reason="a compiler is not traced")


def boxed(runner: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A callable over one list of arguments, the convention AOTAutograd is fastest with. It may
    take them out of the list."""
    run = getattr(runner, "run", None)
    if getattr(runner, "consumes", False):
        run = runner.run_consuming  # type: ignore[attr-defined]

    def call(args: list[Any]) -> Any:
        return run(args) if run is not None else runner(*args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
