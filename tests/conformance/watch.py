"""Which converters a compilation used, what fell to the generic node, what went wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchair import pipeline
from torchair.convert import interpreter, registered


@dataclass
class Seen:
    """What happened in the compilations under watch."""

    used: Counter[Any] = field(default_factory=Counter)  # FX targets whose converter succeeded
    generic: Counter[str] = field(default_factory=Counter)  # operators that ran as generic nodes
    errors: list[str] = field(default_factory=list)  # converters that raised
    targets: set[Any] = field(default_factory=set)  # all FX targets

    @property
    def random(self) -> bool:
        """Whether a result depends on a random generator."""
        seeded = torch.Tag.nondeterministic_seeded
        return any(seeded in getattr(t, "tags", ()) for t in self.targets)

    @property
    def families(self) -> set[str]:
        """The families (files of `convert/`) whose converters were used."""
        return {family_of(t) for t in self.used} | ({"generic"} if self.generic else set())


@contextmanager
def watch() -> Iterator[Seen]:
    """Record what conversions inside do."""
    seen = Seen()
    convert, find = pipeline.convert, interpreter.find

    def recording_convert(gm: Any, *args: Any) -> Any:
        seen.targets.update(n.target for n in gm.graph.nodes if n.op == "call_function")
        conversion = convert(gm, *args)
        seen.generic.update(conversion.generic)
        return conversion

    def recording_find(target: Any) -> Any:
        entry = find(target)
        if entry is None:
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            result = entry.fn(*args, **kwargs)
            seen.used[target] += 1
            return result

        return dataclasses.replace(entry, fn=run)

    def recording_warning(text: str, *args: Any) -> None:
        if text.startswith("converter of"):
            seen.errors.append(text % args)

    with (
        mock.patch.object(pipeline, "convert", recording_convert),
        mock.patch.object(interpreter, "find", recording_find),
        mock.patch.object(interpreter.logger, "warning", recording_warning),
    ):
        yield seen


def name_of(target: Any) -> str:
    """A target as reports and slice.json name it."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    return f"{target.__module__.lstrip('_')}.{target.__name__}"


# Their tests: test_print, test_scope, test_comm_dist, test_custom_ops.
OURS = ("air.", "npu_define.", "torch.ops.higher_order.auto_functionalized_v2")


def builtin_targets() -> set[str]:
    """The names of torch's targets that have a converter of our own;
    `tests/graph/test_npu_ops.py` sees to operators that are registered by their name, other tests
    to libraries of ours."""
    entries = registered().items()
    names = {name_of(t) for t, e in entries if not e.by_user and not isinstance(t, str)}
    return {n for n in names if not n.startswith(OURS)}


def family_of(target: Any) -> str:
    """The file of `convert/` that holds a target's converter."""
    entry = registered().get(target)
    return Path(entry.file).stem if entry is not None else "generic"
