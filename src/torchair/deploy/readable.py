"""`readable_cache`: the file of a compiled method as text for people. Nothing of it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchair.deploy.artifact import Artifact
from torchair.operators import infer
from torchair.serde import canonical_text, from_bytes
from torchair.store import atomic_write

_WIDTH = 100


def readable_cache(
    cache_bin: str | os.PathLike[str],
    print_output: bool = True,
    file: str | os.PathLike[str] | None = None,
) -> str:
    """What a file of `cache_compile` holds: meta data, arguments, options, guards and graph.

    With `file`, the same as comments, and the graph as Python below them, go there.
    """
    path = Path(cache_bin)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: name the file itself")
    if file is not None:
        _check_target(Path(file))
    found = Artifact.read(path)
    program = canonical_text(from_bytes(found.graph, infer, file=path))
    text = "\n".join(_lines(found))
    if print_output:
        print(text)
    if file is not None:
        comments = "\n".join(f"# {line}".rstrip() for line in text.split("\n"))
        atomic_write(file, f"{comments}\n\n{program}".encode(), 0o600)
    return text


def _check_target(target: Path) -> None:
    if target.is_symlink():
        raise ValueError(f"{target} is a symbolic link: nothing is written through it")
    if not target.exists():
        return
    known = target.stat()
    if hasattr(os, "getuid") and known.st_uid != os.getuid():
        raise PermissionError(f"{target} belongs to another user")
    if known.st_mode & 0o777 != 0o600:
        raise PermissionError(f"{target} has the mode {oct(known.st_mode & 0o777)}, not 0o600")


def _lines(found: Artifact) -> list[str]:
    graph = from_bytes(found.graph, infer)
    specs = found.guards["specs"]
    return [
        "=" * _WIDTH,
        f"name: {found.name}",
        f"date: {found.date}",
        f"version: {found.version}",
        *(f"{package}: {version}" for package, version in found.versions.items()),
        f"mode: {found.mode}",
        f"device: {found.device}",
        f"source: {found.source}",
        _title("graph module"),
        *(f"{n.name}: {n.type}({', '.join(v.edge for v in n.values())})" for n in graph.nodes),
        _title("inputs"),
        *(f"{_spec(w)}  weight" for w in found.weights),
        *map(_spec, specs),
        _title("guards"),
        *found.guards["conditions"],
        *(f"{name} == {value}" for name, value in found.attributes.items()),
        _title("compile options"),
        *(f"{name}: {value}" for name, value in found.options.items()),
        "=" * _WIDTH,
    ]


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")


def _spec(spec: Mapping[str, Any]) -> str:
    if "dtype" not in spec:
        return f"{spec['name']}: {spec.get('value')!r}"
    strides: Sequence[Any] = ["any" if s is None else s for s in spec["strides"]]
    order = spec.get("order")
    where = f"dense, order {list(order)}" if order is not None else f"strides {list(strides)}"
    return f"{spec['name']}: {spec['dtype']}{list(spec['dims'])} {where} on {spec['device']}"
