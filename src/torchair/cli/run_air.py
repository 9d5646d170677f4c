"""`torchair run-air`: shows a model file, runs it on arrays, times it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchair.deploy.code import code_for
from torchair.deploy.load import Loaded, ModelPort, device_name, is_archive, load_air
from torchair.errors import InputError, SerializationError
from torchair.fx.dump import as_array
from torchair.store import atomic_write, npy_bytes


def run_air(options: argparse.Namespace) -> int:
    """What the command does; its exit status."""
    if is_archive(options.model):
        raise SerializationError(
            "this is a program of torch.export",
            file=options.model,
            hint=f"torchair export {options.model} -o model.air makes a model file of it",
        )
    place = device_name(options.device)
    code = code_for(
        options.model, place, trust=options.trust, key=options.key, processor=options.processor
    )
    model = load_air(options.model, place, options.frozen or None, options.check, None, code)
    for word, ports in (("input", model.inputs), ("result", model.outputs)):
        for k, port in enumerate(ports):
            print(f"{word} {k}: {port}")
    if options.input or not model.inputs:
        tensors = _tensors(model, options.input, options.device)
        model.check(tensors)
        _run(model, tensors, options.output, options.repeat)
    return 0


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
            raise InputError(f"more than one file for the input {name}", name=name, got=text)
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
        raise SerializationError("this is not a .npy file", file=file)
    try:
        found = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise SerializationError(
            f"torch has no dtype for {array.dtype} of numpy", file=file
        ) from error
    if found.is_complex() and port.dtype is not None and not port.dtype.is_complex:
        raise InputError("complex data for a real input", name=port.name, got=file)
    if port.dtype is not None and found.dtype != port.dtype:
        print(f"{port.name}: {found.dtype} is taken as {port.dtype}")
        found = found.to(port.dtype)
    return found


def _run(model: Loaded, tensors: list[torch.Tensor], folder: str | None, repeat: int) -> None:
    results, seconds = _timed(model, tensors)
    print(f"first call: {seconds * 1e3:.1f} ms, with planning and kernels")
    for k, result in enumerate(results):
        _print_result(k, result, folder)
    if repeat > 0:
        times = [_timed(model, tensors)[1] * 1e3 for _ in range(repeat)]
        median, best = statistics.median(times), min(times)
        print(f"{repeat} calls: median {median:.3f} ms, best {best:.3f} ms")


def _timed(model: Loaded, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], float]:
    start = time.perf_counter()
    results = model.flat(tensors)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return results, time.perf_counter() - start


def _print_result(k: int, result: Any, folder: str | None) -> None:
    if not isinstance(result, torch.Tensor):
        print(f"result {k}: {result}")
        return
    if folder is None:
        print(f"result {k}: {result.cpu()}")
        return
    path = Path(folder) / f"result_{k}.npy"
    atomic_write(path, npy_bytes(as_array(result)))
    print(f"result {k}: {tuple(result.shape)} in {path}")
