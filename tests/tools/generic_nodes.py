"""Which operators of a model have no converter yet and run as generic torch nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torchair import pipeline


@contextmanager
def collect_generic_nodes() -> Iterator[Counter[str]]:
    """Count the generic nodes of all graphs compiled inside: operator name -> how often."""
    found: Counter[str] = Counter()
    convert = pipeline.convert

    def recording(*args: Any) -> Any:
        conversion = convert(*args)
        found.update(conversion.generic)
        return conversion

    with mock.patch.object(pipeline, "convert", recording):
        yield found


def report(name: str, found: Counter[str], record_property: Any) -> None:
    """Show the counts (pytest -s) and put them into the test report."""
    listed = ", ".join(f"{op} x{times}" for op, times in found.most_common())
    print(f"\n{name}: {found.total()} generic nodes{': ' + listed if listed else ''}")
    record_property("generic_nodes", dict(found))
