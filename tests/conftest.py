"""What holds for all tests: kernels are kept in a folder of this run, not in the user's cache;
drawn numbers are the same in every run (new ones are the business of test_fuzz.py); fallbacks that
are failures are errors, unless a test asks for `fallbacks_allowed`.

Programs that tests start without our variables find the cache home of this run."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.manual_seed(0)  # for what modules draw as they are loaded
_MINE = "TORCHAIR_TESTS_CACHE"  # workers of one run share the folder of the process that began it
_first = _MINE not in os.environ
if _first:
    os.environ[_MINE] = tempfile.mkdtemp(prefix="torchair-tests-")
os.environ.setdefault("TORCHAIR_STRICT", "1")  # a fallback that is a failure is an error
os.environ["TORCHAIR_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = os.environ[_MINE]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each program compiles our hundreds of files

if _processor := os.environ.get("TORCHAIR_TEST_QEMU"):
    import qemu_aarch64

    qemu_aarch64.install(_processor)  # before a test module asks which machine this is


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage need not look at them each time,
    nor come as often as while a process has few objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _folder_goes_with_the_run() -> Iterator[None]:
    yield
    if _first:
        shutil.rmtree(os.environ[_MINE], ignore_errors=True)


@pytest.fixture(autouse=True)
def _drawn_numbers_are_known() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _warnings_are_new() -> None:
    """What a process is told once, each test is told."""
    if "torchair.log" in sys.modules:
        sys.modules["torchair.log"]._warned.clear()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled is left from the test before, nor for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fallbacks_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that provoke fallbacks."""
    monkeypatch.setenv("TORCHAIR_STRICT", "0")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was traced for a call without Dynamo: nothing, where a file was used."""
    from torchair.deploy.compiled import CompiledModel  # tests of other things need not load it

    found: list[Any] = []
    trace = CompiledModel.trace

    def noted(self: CompiledModel, shape: Any) -> Any:
        found.append(shape)
        return trace(self, shape)

    monkeypatch.setattr(CompiledModel, "trace", noted)
    return found
