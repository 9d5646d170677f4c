"""`torchair.package`: one file with graph, weights and machine code for many machines.

The code is made here, by LLVM for any processor that it knows. A process that loads the file needs
neither LLVM nor a compiler. The graph is planned for each processor as a loaded one would be, and
the kernels of these plans are compiled. Where sizes vary, that is done for sizes all over their
range: most kernels serve any size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchair.deploy.code import code_in, key_in
from torchair.deploy.compiled import is_exported
from torchair.deploy.guards import Condition, Expected, Guards
from torchair.deploy.load import Loaded, is_archive, load_air
from torchair.engine.options import EngineOptions
from torchair.engine.packaged import PackagedCode, RecordingTarget, processor_named, ptx_of
from torchair.errors import GraphError, SerializationError
from torchair.log import logger
from torchair.serde.air import add_code
from torchair.store import FilePath, private_dir
from torchair.versions import __version__

if TYPE_CHECKING:
    from torch.export import ExportedProgram

DEFAULT_PROCESSORS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64")
_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64, 100, 128, 256, 512, 1024)
"""Sizes that plans are made for, as far as they are in range: kernels may be others for few rows,
odd ones, and multiples of vectors."""


def package(
    model: ExportedProgram | FilePath,
    path: FilePath,
    *,
    cpu: Sequence[str] = DEFAULT_PROCESSORS,
    gpu: Sequence[str] = (),
    frozen_parameter: bool = False,
    key: FilePath | None = None,
    trust: bool = False,
) -> Path:
    """Write a model with machine code for processors of `cpu` and PTX for architectures of `gpu`.

    `model` is a program of `torch.export`, a `.pt2` file of one, or a `.air` file. With
    `frozen_parameter` weights are packed for faster kernels when the file is loaded. `key` is a
    file with a secret of 16 bytes or more, that signs the package. `trust` reads a `.pt2` file that
    others may have written to.
    """
    path = Path(path)
    secret = None if key is None else key_in(key)
    processors = [processor_named(name) for name in dict.fromkeys(cpu)]
    if not processors and not gpu:
        raise GraphError("a package has code for at least one processor (cpu) or GPU (gpu)")
    private_dir(path.parent)
    with tempfile.TemporaryDirectory(prefix=".torchair-", dir=path.parent) as folder:
        source = _model_file(model, Path(folder) / "model.air", trust)
        made = PackagedCode(notes=_notes(frozen_parameter))
        for processor in processors:
            target = RecordingTarget(processor)
            loaded = load_air(source, "cpu", frozen_parameter, target=target)
            for tensors in example_inputs(loaded):
                loaded.generate(tensors)
            made.images[processor.name] = target.image()
            logger.info("%s: %d kernels for %s", path, target.count, processor.name)
        for architecture in dict.fromkeys(gpu):
            made.ptx[architecture] = _gpu_code(source, architecture, frozen_parameter)
        return add_code(source, path, made.to_bytes(), secret)


def _notes(frozen_parameter: bool) -> dict[str, Any]:
    return {"frozen_parameter": frozen_parameter, "torchair": __version__}


def _model_file(model: Any, target: Path, trust: bool) -> Path:
    """A `.air` file with all of a model."""
    if isinstance(model, (str, Path)) and not is_archive(model):
        if code_in(model) is not None:
            raise SerializationError("the file is a package already", file=model)
        return Path(model)
    from torchair.deploy.exported import read_program, write_program

    program = model if is_exported(model) else read_program(model, trust)
    made = write_program(program, target)
    if len(list(target.parent.iterdir())) > 1:
        raise SerializationError("the weights of a package must fit into the file, up to 1.8 GiB")
    return made


def _gpu_code(source: Path, architecture: str, frozen: bool) -> dict[str, str]:
    call = load_air(source, "meta", frozen).call  # no GPU need be here
    if call.graph.is_dynamic:
        raise GraphError(
            "code for a GPU is made for fixed sizes, and sizes of this model vary",
            hint="export it without dynamic shapes, or leave gpu out",
        )
    return ptx_of(call.graph, call.state, EngineOptions.of({}, {}), architecture)


# ---- arguments that plans are made for ----


def example_inputs(loaded: Loaded) -> Iterator[list[torch.Tensor]]:
    """Tensors for calls of a model: of its fixed sizes, or of several in its ranges."""
    guards, example = loaded.guards, loaded.example
    ports = loaded.inputs
    if guards is None or example is None:
        if any(d < 0 for p in ports for d in p.shape):
            raise GraphError(
                "sizes of the model vary, and the file does not say in which ranges",
                hint="package the program of torch.export",
            )
        yield [torch.zeros(p.shape, dtype=p.dtype or torch.float32) for p in ports]
        return
    tensors = [s for s in guards.specs if isinstance(s, Expected)]
    for sizes in _assignments(guards, tensors, example):
        yield [_tensor(s, sizes) for s in tensors]


def _tensor(spec: Expected, sizes: Mapping[str, int]) -> torch.Tensor:
    dims = [sizes[d] if isinstance(d, str) else d for d in spec.dims]
    return torch.zeros(dims, dtype=getattr(torch, spec.dtype))


def _assignments(
    guards: Guards, tensors: Sequence[Expected], example: Sequence[Sequence[int]]
) -> Iterator[dict[str, int]]:
    """Sizes by name: those of the example, then each of `_SIZES` for all names and for one."""
    first: dict[str, int] = {}
    for spec, dims in zip(tensors, example, strict=True):
        first |= {d: n for d, n in zip(spec.dims, dims, strict=True) if isinstance(d, str)}
    yield first
    follow = _equalities(guards.conditions)
    free = [name for name in first if name not in follow]
    for n in _SIZES if free else ():
        for given in (dict.fromkeys(free, n), *({**first, name: n} for name in free)):
            sizes = {**first, **given}
            sizes |= {name: int(value.value(sizes)) for name, value in follow.items()}
            if all(c.value(sizes) for c in guards.conditions):
                yield sizes


def _equalities(conditions: Sequence[Condition]) -> dict[str, Condition]:
    """Sizes that conditions compute from others: `a == 2*b`."""
    found: dict[str, Condition] = {}
    for condition in conditions:
        name, equal, value = condition.text.partition(" == ")
        if equal and name.isidentifier() and name not in found:
            right = Condition(value)
            if not right.names & {name, *found}:
                found[name] = right
    return found
