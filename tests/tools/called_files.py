"""Prints, as JSON, which files of torchair take part in compiling and calling a Linear.

Counted is a file when one of its functions runs between the first call of
`torch.compile(nn.Linear(16, 16), backend="torchair")` under `no_grad` and the end of the second.
Functions that run because a module is being imported do not count: bodies, decorators and
registrations are not on the way of the Linear. Neither do records without functions of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import torchair

HOME = f"{Path(torchair.__file__).parent}/"


def importing(frame: FrameType | None) -> bool:
    """Whether a frame was entered by the import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def called_files() -> list[str]:
    """Paths below the package."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        new = event == "call" and path.startswith(HOME) and path not in found
        if new and not importing(frame):
            found.add(path)

    compiled = torch.compile(torch.nn.Linear(16, 16), backend="torchair")
    x = torch.randn(4, 16)
    with torch.no_grad():
        sys.setprofile(note)
        try:
            compiled(x)
            compiled(x)
        finally:
            sys.setprofile(None)
    return sorted(path.removeprefix(HOME) for path in found)


if __name__ == "__main__":
    print(json.dumps(called_files()))
