"""Whether the machine code in a model file is run: only if the caller says so.

Machine code can do anything. A checksum shows damage, not the author. So the caller trusts the
file, or hands in the key that it was signed with; else kernels are compiled here as usual.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from torchair.engine.packaged import CodeError, PackagedCode, PackagedTarget
from torchair.errors import InputError, SerializationError
from torchair.log import logger, warn_once
from torchair.serde.air import is_signed, read_code
from torchair.store import FilePath
from torchair.versions import __version__

_LEAST = 16  # bytes of a key


def key_in(path: FilePath) -> bytes:
    """The key that a file holds: any content of 16 bytes or more."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SerializationError(f"cannot read the key: {error.strerror}", file=path) from error
    if len(content) < _LEAST:
        raise InputError(f"a key has {_LEAST} bytes or more", name="key", got=str(len(content)))
    return hashlib.blake2b(content, digest_size=32).digest()


def code_in(path: FilePath) -> PackagedCode | None:
    """The code that a file holds, None where it holds none. SerializationError if it is damaged."""
    try:
        data = read_code(path)
        return None if data is None else PackagedCode.from_bytes(data)
    except CodeError as error:
        raise SerializationError(f"the code in the file is damaged: {error}", file=path) from error


def default_frozen(path: FilePath) -> bool:
    """Whether a package was made for weights that are packed."""
    code = code_in(path)
    return code is not None and bool(code.notes.get("frozen_parameter"))


def code_for(
    path: FilePath,
    device: str,
    *,
    trust: bool = False,
    key: FilePath | None = None,
    processor: str | None = None,
) -> PackagedTarget | None:
    """The code of a file for the processor of this machine, None where it has none, or where it
    is not trusted. A GPU is given the PTX for it."""
    if key is not None and not is_signed(path, key_in(key)):
        raise SerializationError(
            "the file was not signed with this key, or has been changed since", file=path
        )
    code = code_in(path)
    if code is None:
        if key is not None or processor is not None:
            raise SerializationError("the file holds no machine code", file=path)
        return None
    if not trust and key is None:
        warn_once(
            f"{Path(path).name} holds machine code, which is not run. Pass trust=True if you trust "
            "its author, or key= if the file is signed. Kernels are compiled here instead"
        )
        return None
    _compare_versions(path, code)
    place = torch.device(device)
    if place.type == "cuda":
        logger.info("%s: PTX of %d launches", path, code.provide_ptx(place.index or 0))
    return _target(path, code, processor) if place.type == "cpu" else None


def _compare_versions(path: FilePath, code: PackagedCode) -> None:
    """Kernels are found by their text, which another version may write otherwise."""
    theirs, ours = code.notes.get("torchair"), __version__
    if theirs != ours:
        warn_once(
            f"{Path(path).name} was made by torchair {theirs}, this is {ours}: it may lack kernels"
        )


def _target(path: FilePath, code: PackagedCode, processor: str | None) -> PackagedTarget | None:
    try:
        target = code.target(processor)
        if (reason := target.available()) is not None:
            raise CodeError(reason)
    except (CodeError, ValueError) as error:
        if processor is not None:
            raise InputError(str(error), name="processor", got=processor) from error
        warn_once(f"{Path(path).name}: {error}. Kernels are compiled here instead")
        return None
    logger.info("%s: code for %s", path, target.name_of_processor)
    return target
