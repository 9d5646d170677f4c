"""AOTAutograd, its caches, and the contexts that torch compiles in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torchair.torch_private.table import Names, feature, required

if TYPE_CHECKING:
    from torch._guards import CompileContext as CompileContext
    from torch._guards import CompileId as CompileId
    from torch._guards import TracingContext as TracingContext

NAMES = Names(
    __name__,
    {
        "aot_module_simplified": required(
            "torch._functorch.aot_autograd:aot_module_simplified", "graphs of forward and backward"
        ),
        "default_partition": required(
            "torch._functorch.partitioners:default_partition", "the split of training graphs"
        ),
        "min_cut_partition": required(
            "torch._functorch.partitioners:min_cut_rematerialization_partition",
            "the split of training graphs",
        ),
        "functorch_config": required("torch._functorch.config", "AOTAutograd's cache"),
        "BypassAOTAutogradCache": required(
            "torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache",
            "AOTAutograd's cache",
        ),
        "aot_autograd": feature("torch._functorch.aot_autograd", "vLLM"),
        "is_written": feature("torch:_functionalize_has_data_mutation", "vLLM"),
        "is_moved": feature("torch:_functionalize_has_metadata_mutation", "vLLM"),
        "StorageWeakRef": feature("torch.multiprocessing.reductions:StorageWeakRef", "vLLM"),
        "OutputType": feature("torch._functorch._aot_autograd.schemas:OutputType", "vLLM"),
        "TracingContext": required(
            "torch._guards:TracingContext", "which arguments are parameters"
        ),
        "tracing": feature("torch._guards:tracing", "torchair.compile"),
        "CompileContext": required("torch._guards:CompileContext", "artifacts in TORCH_TRACE"),
        "CompileId": required("torch._guards:CompileId", "artifacts in TORCH_TRACE"),
        "compile_context": required("torch._guards:compile_context", "artifacts in TORCH_TRACE"),
        "compiling_flag": feature(
            "torch.compiler:_is_compiling_flag", "torch.compiler.is_compiling() in torchair.compile"
        ),
    },
)


_compiling: list[tuple[int, bool]] = []
"""Threads inside of `compiling`, with the flag that each found."""


@contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true inside, for all threads. The caller holds a lock:
    one thread at a time is inside."""
    import torch

    _compiling.append((get_ident(), torch.compiler._is_compiling_flag))
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = _compiling.pop()[1]


def stop_compiling_of_others() -> None:
    """In a child of `fork`: threads that were inside of `compiling` do not exist there."""
    import torch

    while _compiling and _compiling[-1][0] != get_ident():
        torch.compiler._is_compiling_flag = _compiling.pop()[1]


class NotTracedAsExpected(RuntimeError):
    """A graph writes into its arguments, or its results share memory."""


@contextmanager
def traced_once(results: Sequence[Any]) -> Iterator[None]:
    """AOTAutograd runs a graph twice: to see what it does to its arguments, and to trace it.
    Inside, the first run is of a function that gives new tensors like `results`. A graph that
    writes into an argument, or whose results share memory with one or with each other, is then
    found by the second: NotTracedAsExpected. Other threads trace as before. The caller holds a
    lock: one thread at a time is inside."""
    import torch

    capturing, thread = NAMES.find("aot_autograd"), get_ident()
    collect = capturing.run_functionalized_fw_and_collect_metadata
    capture = capturing.aot_stage1_graph_capture

    def new_tensors(*_: Any) -> list[Any]:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in results
        ]

    def collected(run: Callable[..., Any], **options: Any) -> Any:
        return collect(new_tensors if get_ident() == thread else run, **options)

    def captured(state: Any, run: Callable[..., Any]) -> Any:
        if get_ident() != thread:
            return capture(state, run)

        @wraps(run)
        def checked(*args: Any) -> Any:
            made = run(*args)
            _check_trace(args, made)
            return made

        return capture(state, checked)

    capturing.run_functionalized_fw_and_collect_metadata = collected
    capturing.aot_stage1_graph_capture = captured
    try:
        yield
    finally:
        capturing.run_functionalized_fw_and_collect_metadata = collect
        capturing.aot_stage1_graph_capture = capture


def _check_trace(args: Sequence[Any], results: Sequence[Any]) -> None:
    """Both as functional tensors, after the run."""
    import torch

    storage, is_written, is_moved = map(NAMES.find, ("StorageWeakRef", "is_written", "is_moved"))
    given: list[Any] = [x for x in args if isinstance(x, torch.Tensor)]
    made = [x for x in results if isinstance(x, torch.Tensor)]
    if any(is_written(x.elem) or is_moved(x.elem) for x in given):
        raise NotTracedAsExpected("it writes into an argument")
    places = [storage(x.untyped_storage()) for x in made]
    if len(set(places)) < len(places) or {storage(x.untyped_storage()) for x in given} & {*places}:
        raise NotTracedAsExpected("its results share memory")


__getattr__ = NAMES.find
