"""A compiled method as one file of data: a header in JSON and the bytes of a GE graph.

Nothing in it is executed. Both parts are under one checksum, which is compared before they are
read; all that they say is checked again by who uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torchair.configs.options import NPUGRAPH_EX
from torchair.store import atomic_write, private_dir

FILE = "compiled_module"
VERSIONS = {NPUGRAPH_EX: "1.0.6"}
"""Versions that files have, by mode."""
VERSION = "1.0.5"
"""The one of all other modes."""
_MAGIC = b"torchair compiled module 4\n"  # counts layouts of the file
_DIGEST = 32


@cache
def library_versions() -> dict[str, str]:
    """Versions of all that a compiled graph follows from."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchair", "llvmlite"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


@dataclass
class Artifact:
    """What a method was compiled to."""

    name: str  # of the method, with its signature
    date: str
    mode: str
    device: str
    source: str  # hash of the code that was traced
    arguments: dict[str, Any]  # how calls are nested
    guards: dict[str, Any]
    tensors: list[int]  # arguments that the graph gets
    weights: list[dict[str, Any]]  # names and specs of the graph's first arguments
    attributes: dict[str, str]  # of modules, as text: numbers that are part of the graph
    convention: str  # how the graph is called
    result: str  # how results are nested
    constants: dict[str, Any]  # leaves of the result that are no tensors
    written: list[int]  # arguments of the graph that calls update
    capture: dict[str, Any] | None  # what capture must know of arguments
    options: dict[str, str]  # for people
    versions: dict[str, str]  # of libraries
    finished: bool = False  # whether the engine has optimised the graph
    plan: dict[str, Any] | None = None  # recipe of the native plan, where the call is one
    version: str = ""
    graph: bytes = b""

    def __post_init__(self) -> None:
        self.version = self.version or VERSIONS.get(self.mode, VERSION)

    def to_bytes(self) -> bytes:
        """The content of a file."""
        known = asdict(self)
        del known["graph"]
        head = json.dumps(known, separators=(",", ":")).encode()
        body = len(head).to_bytes(8, "little") + head + self.graph
        return _MAGIC + _checksum(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """From the content of a file; ValueError where it is damaged or of another version."""
        body = data[len(_MAGIC) + _DIGEST :]
        if not data.startswith(_MAGIC):
            raise ValueError("it is no compiled module, or one of another version")
        if data[len(_MAGIC) : len(_MAGIC) + _DIGEST] != _checksum(body):
            raise ValueError("it is damaged")
        size = int.from_bytes(body[:8], "little")
        known = json.loads(body[8 : 8 + size])
        if not isinstance(known, dict) or set(known) != {f.name for f in fields(cls)} - {"graph"}:
            raise ValueError("its header is not that of a compiled module")
        expected = VERSIONS.get(known["mode"], VERSION)
        if known["version"] != expected:
            raise ValueError(f"its version is {known['version']}, this one reads {expected}")
        return cls(**known, graph=body[8 + size :])

    def write(self, path: Path) -> None:
        """To a private file, whole or not at all."""
        private_dir(path.parent, 0o700)
        atomic_write(path, self.to_bytes(), 0o600)

    @classmethod
    def read(cls, path: Path) -> Artifact:
        """From a file that belongs to this user alone."""
        return cls.from_bytes(read_private(path))


def read_private(path: Path) -> bytes:
    """The content of a file; ValueError if there is none, PermissionError if others could have
    written it."""
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        owners = {os.lstat(path).st_uid, os.fstat(number).st_uid}
        known = os.fstat(number)
        if not stat.S_ISREG(known.st_mode):
            raise ValueError(f"{path} is not a file")
        if hasattr(os, "getuid") and owners != {os.getuid()}:
            raise PermissionError(f"{path} belongs to another user")
        if stat.S_IMODE(known.st_mode) != 0o600:
            mode = oct(stat.S_IMODE(known.st_mode))
            raise PermissionError(f"{path} has the mode {mode}, expected 0o600")
        return file.read()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()
