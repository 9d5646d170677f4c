"""What a release says of itself: versions, metadata, public names."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest

import torchair
import version_matrix
from torchair import versions
from torchair.versions import LLVMLITE, PYTHON, TORCH, check_torch, release, stated

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "environments.md").read_text()


def test_the_version_stands_in_one_place() -> None:
    assert torchair.__version__ == versions.__version__
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert f"\n## {versions.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_stated_versions_are_those_of_the_matrix() -> None:
    for tested, tried in ((TORCH, version_matrix.TORCHES), (LLVMLITE, version_matrix.LLVMLITES)):
        assert release(tried[0]) == release(tested.oldest)
        assert release(tried[-1]) == release(tested.newest)
    assert {PYTHON.oldest, PYTHON.newest} <= set(version_matrix.PYTHONS)
    wanted = {re.split("[>=]", d)[0]: d for d in PROJECT["dependencies"]}
    assert wanted["torch"].endswith(f">={TORCH.oldest}")
    assert wanted["llvmlite"].endswith(f">={LLVMLITE.oldest}")
    assert PROJECT["requires-python"] == f">={PYTHON.oldest}"
    for tested in (TORCH, LLVMLITE, PYTHON):
        assert str(tested) in str(torchair.__doc__) and str(tested) in PAGE
    assert str(TORCH) in stated()


def test_an_old_torch_is_refused_and_a_newer_one_told_of() -> None:
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, and 2\.9\.1 is here"):
        check_torch("2.9.1")
    with pytest.warns(UserWarning, match=r"with torch 2\.11 to 2\.15, and this is 2\.16") as told:
        check_torch("2.16.0a0+git1234")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch("2.13.0+cpu")


def test_dir_lists_public_names() -> None:
    listed = set(dir(torchair))
    assert set(torchair.__all__) <= listed and "begin" not in listed and "sys" not in listed
    for name in listed:
        assert hasattr(torchair, name), name
    modules = {name for name in listed - set(torchair.__all__) if not name.startswith("_")}
    assert not [m for m in modules if f"torchair.{m}" not in PAGE]


def test_combinations_cover_every_version() -> None:
    chosen = list(version_matrix.combinations(whole=False))
    assert len(chosen) == len(set(chosen)) < len(list(version_matrix.combinations(whole=True)))
    assert {c.python for c in chosen} == set(version_matrix.PYTHONS)
    assert {c.torch for c in chosen} == set(version_matrix.TORCHES)
    assert {c.llvmlite for c in chosen} == set(version_matrix.LLVMLITES)
