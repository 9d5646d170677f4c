"""Who takes part: torch itself, inductor in its modes, other runtimes where installed, and we."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import torchair
from common import has_inductor

Inputs = tuple[torch.Tensor, ...]
Prepare = Callable[[torch.nn.Module, Inputs], Callable[[], Any]]
"""Makes the model ready to be called with these inputs, the first call included."""


@dataclass(frozen=True)
class Contestant:
    """A way to run a model. `missing` says why it cannot be used here."""

    name: str
    prepare: Prepare
    missing: str = ""
    ours: bool = False
    compiler: bool = False


def eager(model: torch.nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """The model as it is."""
    return lambda: model(*inputs)


# Contestants over one class share its code: in their own regions of Dynamo none of them is tried
# with the guards of the others (torch before 2.13 has no such regions).
_REGIONS = "isolate_recompiles" in signature(torch.compile).parameters
APART: dict[str, Any] = {"isolate_recompiles": True} if _REGIONS else {}
torch._dynamo.config.recompile_limit = 64


def through_compile(
    backend: Callable[[], Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    options: dict[str, Any] | None = None,
) -> Prepare:
    """torch.compile with a backend; its first call happens inside `around`."""

    def prepare(model: torch.nn.Module, inputs: Inputs) -> Callable[[], Any]:
        with around():
            compiled = torch.compile(
                model, backend=backend(), options=options, dynamic=False, fullgraph=True, **APART
            )
            compiled(*inputs)
        return lambda: compiled(*inputs)

    return prepare


def torchair_backend(frozen: bool = False) -> Any:
    """Our backend, with or without the promise that parameters never change."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    with warnings.catch_warnings(action="ignore"):  # it reminds of that promise
        return torchair.get_npu_backend(compiler_config=config)


_folder = tempfile.TemporaryDirectory(prefix="inductor_", ignore_cleanup_errors=True)
"""Files of inductor. They stay until the end, since the code in them is in use."""


@contextmanager
def _inductor_with(settings: dict[str, Any]) -> Iterator[None]:
    """Settings of inductor, caches as empty as in a new installation, and no reports of tuning."""
    import torch._inductor.config as config
    from torch._inductor.utils import fresh_cache

    with (
        config.patch(**settings),
        fresh_cache(dir=_folder.name, delete=False),
        redirect_stderr(StringIO()),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def inductor(**settings: Any) -> Prepare:
    """Inductor with settings of its config. They are given twice: Dynamo looks at the config and
    treats frozen parameters as constants, and by the options it tells one mode from another."""
    return through_compile(lambda: "inductor", lambda: _inductor_with(settings), settings or None)


def onnx_runtime(model: torch.nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """ONNX Runtime on the model exported to ONNX."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, inputs, path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    session.run(None, feeds)
    return lambda: session.run(None, feeds)


def openvino(model: torch.nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """OpenVINO on the model it traced."""
    import openvino as ov

    hints = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    hints["INFERENCE_PRECISION_HINT"] = "f32" if _width(model) == 4 else "bf16"
    converted = ov.convert_model(model, example_input=inputs)
    compiled = ov.Core().compile_model(converted, "CPU", hints)
    request = compiled.create_infer_request()
    feeds = [x.numpy() for x in inputs]
    request.infer(feeds)
    return lambda: request.infer(feeds)


def _width(model: torch.nn.Module) -> int:
    return next(model.parameters()).element_size()


def _absent(module: str) -> str:
    return "" if importlib.util.find_spec(module) else "not installed"


_NO_COMPILER = "" if has_inductor() else "no C++ compiler"

EAGER = Contestant("eager", eager)

FLOOR = Contestant("aot_eager", through_compile(lambda: "aot_eager"))

PEERS = {
    "default": Contestant("inductor", inductor(), _NO_COMPILER, compiler=True),
    "freezing": Contestant(
        "inductor freezing", inductor(freezing=True), _NO_COMPILER, compiler=True
    ),
    "autotune": Contestant(
        "inductor max-autotune",
        inductor(freezing=True, max_autotune=True), _NO_COMPILER, compiler=True,
    ),
    "onnxruntime": Contestant("ONNX Runtime", onnx_runtime, _absent("onnxruntime")),
    "openvino": Contestant("OpenVINO", openvino, _absent("openvino")),
}  # fmt: skip

OURS = (
    Contestant("torchair", through_compile(torchair_backend), ours=True, compiler=True),
    Contestant(
        "torchair frozen",
        through_compile(lambda: torchair_backend(True)),
        ours=True,
        compiler=True,
    ),
)
