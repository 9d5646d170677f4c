"""Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
SOURCE = TOOLS.parents[1] / "src"


def run(*arguments: str, path: str = "", **kwargs) -> subprocess.CompletedProcess[str]:
    """Python with our sources on its path, and nothing of the user's environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(SOURCE)]))
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )
