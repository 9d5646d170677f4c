"""`torchair run-air`: a model file on the command line. Shows it, runs it on arrays, times it."""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchair.deploy.load import Loaded, ModelPort, load
from torchair.errors import InputError, SerializationError, TorchairError
from torchair.store import atomic_write


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", help="a .air file")
    parser.add_argument(
        "--input", action="append", default=[], metavar="[NAME=]FILE",
        help="a .npy file for an input; without a name they are taken in order",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FOLDER", help="save results there as .npy files")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--frozen", action="store_true", help="pack weights for faster kernels")
    parser.add_argument("--check", action="store_true", help="compare checksums of weights")
    parser.add_argument("--repeat", type=int, default=10, help="calls to time; 0 times nothing")


def run(options: argparse.Namespace) -> int:
    """What the command does; its exit status."""
    try:
        model = load(
            options.model, device=options.device, frozen_parameter=options.frozen,
            check=options.check,
        )  # fmt: skip
        _show("input", model.inputs)
        _show("result", model.outputs)
        if not options.input and model.inputs:
            return 0
        tensors = _tensors(model, options.input, options.device)
        _run(model, tensors, options.output, options.repeat)
    except (TorchairError, OSError, RuntimeError, ValueError) as error:
        print(f"torchair run-air: {_plainly(error)}")
        return 1
    return 0


def _plainly(error: BaseException) -> BaseException:
    """An error of the engine as it was raised, without the places that it went through."""
    cause = error.__cause__
    longer = cause is not None and str(error).startswith(f"{cause}\nTraceback")
    return _plainly(cause) if cause is not None and longer else error


def _show(word: str, ports: Sequence[ModelPort]) -> None:
    for k, port in enumerate(ports):
        print(f"{word} {k}: {port}")


def _tensors(model: Loaded, given: Sequence[str], device: str) -> list[torch.Tensor]:
    """Arrays by the names of inputs, or in their order."""
    names = [p.name for p in model.inputs]
    files: dict[str, str] = {}
    free = iter(names)
    for text in given:
        name, named, file = text.partition("=")
        if not named or (name not in names and Path(text).exists()):
            name, file = next((n for n in free if n not in files), ""), text
        elif name not in names:
            raise InputError(f"the model has no input {name}", expected=", ".join(names), got=text)
        elif name in files:
            raise InputError(f"two files for the input {name}", name=name, got=text)
        if not name:
            raise InputError("too many inputs", expected=", ".join(names), got=str(len(given)))
        files[name] = file
    missing = [n for n in names if n not in files]
    if missing:
        raise InputError(f"no --input for {', '.join(missing)}")
    return [_tensor(files[p.name], p).to(device) for p in model.inputs]


def _tensor(file: str, port: ModelPort) -> torch.Tensor:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SerializationError(f"cannot read an array: {error}", file=file) from error
    if not isinstance(array, np.ndarray):
        raise SerializationError("this is no .npy file", file=file)
    try:
        found = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise SerializationError(f"no tensor holds {array.dtype} of numpy", file=file) from error
    if found.is_complex() and port.dtype is not None and not port.dtype.is_complex:
        raise InputError("complex numbers for an input of real ones", name=port.name, got=file)
    if port.dtype is not None and found.dtype != port.dtype:
        print(f"{port.name}: {found.dtype} is taken as {port.dtype}")
        found = found.to(port.dtype)
    return found


def _run(model: Loaded, tensors: list[torch.Tensor], folder: str | None, repeat: int) -> None:
    start = time.perf_counter()
    results = model.flat(tensors)
    _wait()
    print(f"first call: {(time.perf_counter() - start) * 1e3:.1f} ms, with planning and kernels")
    for k, result in enumerate(results):
        _print_result(k, result, folder)
    if repeat > 0:
        times = [_timed(model, tensors) for _ in range(repeat)]
        print(
            f"{repeat} calls: median {statistics.median(times) * 1e3:.3f} ms, "
            f"best {min(times) * 1e3:.3f} ms"
        )


def _timed(model: Loaded, tensors: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    model.flat(tensors)
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _print_result(k: int, result: Any, folder: str | None) -> None:
    if not isinstance(result, torch.Tensor):
        print(f"result {k}: {result}")
        return
    if folder is None:
        print(f"result {k}: {result.cpu()}")
        return
    array = result.detach().cpu()
    if array.dtype not in _NUMPY:
        array = array.float()
    path = Path(folder) / f"result_{k}.npy"
    atomic_write(path, npy_bytes(array.numpy()))
    print(f"result {k}: {tuple(result.shape)} in {path}")


_NUMPY = {
    torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64, torch.complex128,
}  # fmt: skip


def npy_bytes(array: Any) -> bytes:
    """The content of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
