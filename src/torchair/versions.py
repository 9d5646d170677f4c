"""The version of this package, the only place where it stands, and versions of what it was tested
with. Imports nothing of torchair, and no torch.
"""

from __future__ import annotations

import platform
import re
import warnings
from importlib import metadata
from typing import NamedTuple

__version__ = "0.1.0"


class Tested(NamedTuple):
    """The oldest and the newest version that `make matrix` has run with."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


PYTHON = Tested("3.11", "3.13")
TORCH = Tested("2.11", "2.15")
LLVMLITE = Tested("0.47", "0.50")


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(major), int(minor)


def check_torch(version: str) -> None:
    """ImportError where torch is too old, one warning where it is newer than what was tested."""
    if release(version) < release(TORCH.oldest):
        raise ImportError(
            f"torchair {__version__} needs torch {TORCH.oldest} or newer, and {version} is here "
            f"(pip install 'torch>={TORCH.oldest}')"
        )
    if release(version) > release(TORCH.newest):
        warnings.warn(
            f"torchair {__version__} was tested with torch {TORCH}, and this is {version}: "
            "compare results with eager (torchair.verify) before you rely on them",
            stacklevel=2,
        )


def stated() -> str:
    """This version and those of what is installed, with what was tested."""
    rows = [("Python", platform.python_version(), PYTHON)]
    for package, tested in (("torch", TORCH), ("llvmlite", LLVMLITE)):
        try:
            rows.append((package, metadata.version(package), tested))
        except metadata.PackageNotFoundError:
            rows.append((package, "not installed", tested))
    lines = [f"{name:8}  {version} (tested: {tested})" for name, version, tested in rows]
    return "\n".join([f"torchair  {__version__}", *lines])
