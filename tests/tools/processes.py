"""Python programs in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import forked

TOOLS = Path(__file__).resolve().parent
SOURCE = TOOLS.parents[1] / "src"


def alone(path: str = "") -> dict[str, str]:
    """An environment with our sources on Python's path, and nothing of the user's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(SOURCE)]))
    return environment


def inherited() -> dict[str, str]:
    """The environment of the tests, in which fallbacks are errors, with our sources on the path."""
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


def run(*arguments: str, path: str = "", **kwargs) -> subprocess.CompletedProcess[str]:
    """Python in a new process."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=alone(path),
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


def run_forked(
    *arguments: str, env: Mapping[str, str] | None = None, **kwargs
) -> subprocess.CompletedProcess[str]:
    """Python in a process that has imported torch: for programs that do not look at how they
    start."""
    return forked.run(*arguments, env=alone() if env is None else env, **kwargs)


def run_ranks(
    count: int, *arguments: str, env: Mapping[str, str] | None = None, **kwargs
) -> list[str]:
    """What the processes of a group print, each told its place as `torchrun` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        forked.start(
            *arguments,
            env={
                **(alone() if env is None else env), **common, "MASTER_PORT": str(port),
                "RANK": str(rank), "LOCAL_RANK": str(rank),
            },
            **kwargs,
        )
        for rank in range(count)
    ]  # fmt: skip
    done = [p.communicate(600) for p in ranks]
    assert not any(d.returncode for d in done), [d.stdout + d.stderr for d in done]
    return [d.stdout for d in done]
