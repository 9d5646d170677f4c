"""`torchair trace`: runs a program of the user, which leaves in its own way, with timelines on."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from torchair.ascend.emulate import launcher
from torchair.errors import CommandError

_TIMELINE = "TORCHAIR_TIMELINE"


def trace(options: argparse.Namespace) -> int:
    """Run a program as Python would, with timelines on."""
    script, folder = launcher.existing(options.script), writable_folder(options.output)
    there = set(folder.glob("*.json"))
    kept = sys.argv, sys.path[0], os.environ.get(_TIMELINE)
    sys.argv, sys.path[0] = [str(script), *options.arguments], str(script.resolve().parent)
    os.environ[_TIMELINE] = str(folder.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0], before = kept
        if before is None:
            del os.environ[_TIMELINE]
        else:
            os.environ[_TIMELINE] = before
    made = sorted(set(folder.glob("*.json")) - there)
    for file in made:
        print(file)
    return 0 if made else 1


def writable_folder(name: str | Path) -> Path:
    """A folder to write to, which need not be there yet."""
    folder = Path(name)
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "it may not be written to" if nearest.is_dir() else "it is no folder"
        raise CommandError(f"nothing can be written to {folder}: {why}", file=nearest)
    return folder
