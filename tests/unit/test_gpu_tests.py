"""The runner of the tests that need a GPU misses none of them, and says what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu_tests

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_of_a_file_are_all_of_its_tests(parts, monkeypatch):
    found, dropped = [], []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    for part in range(parts):
        monkeypatch.setenv("TORCHAIR_TEST_PART", f"{part}/{parts}")
        items = list(range(7))
        gpu_tests.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
        found += items
    assert sorted(found) == list(range(7))
    assert len(dropped) == 7 * (parts - 1)


def test_files_that_are_named_are_there():
    for name in (*gpu_tests.CASES, *gpu_tests.PARTS):
        assert (TESTS / name).exists()
    todo = gpu_tests.tasks("")
    assert {task.file for task in todo} >= {*gpu_tests.CASES, *gpu_tests.PARTS}
    assert {task.file for task in gpu_tests.tasks("cuda_nest")} == {"gpu/test_cuda_nest.py"}


def test_slices_are_all_of_it_and_disjoint():
    files = [
        {task.file for task in gpu_tests.tasks(",".join(words))}
        for words in gpu_tests.SLICES.values()
    ]
    assert set().union(*files) == {task.file for task in gpu_tests.tasks("")}
    assert sum(map(len, files)) == len(set().union(*files))


@pytest.mark.parametrize("ending", ["os._exit(134)", "time.sleep(600)"])
def test_what_comes_after_a_test_that_ended_a_process_runs_too(tmp_path, monkeypatch, ending):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        f"import os, time\ndef test_a(): pass\ndef test_b(): {ending}\ndef test_c(): assert 0\n"
    )
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "PATHS", (str(TESTS / "tools"),))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_")
    todo = [gpu_tests.Task("test_some.py", 0, 1, cases=True)]
    first, second = gpu_tests.run(todo, 1, tmp_path, (), hang=6 if "sleep" in ending else 60)
    assert "test_b" in first.failures[0][1] and dict(first.counts) == {"passed": 1}
    assert dict(second.counts) == {"failed": 1} and "test_c" in second.failures[0][0]
    assert todo == [first, second]


def test_a_failure_is_told_and_counted(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "def test_right(): pass\ndef test_wrong(): assert 1 == 2, 'as planned'\n"
    )
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_")
    task = gpu_tests.Task("test_some.py", 0, 1, cases=True)
    monkeypatch.setattr(gpu_tests, "PATHS", (str(TESTS / "tools"),))
    done = list(gpu_tests.run([task], 1, tmp_path, ()))
    assert done == [task]
    assert dict(task.counts) == {"passed": 1, "failed": 1}
    assert "as planned" in task.failures[0][1]


def test_a_process_that_ends_early_is_a_failure(tmp_path):
    task = gpu_tests.Task("test_some.py", 0, 1, cases=False)
    task.results = tmp_path / "results.json"
    task.process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(139)"])
    task.process.wait()
    (tmp_path / "results.txt").write_text("illegal address")
    task.finish()
    assert "illegal address" in task.failures[0][1]


def test_a_process_that_waits_for_ever_is_stopped(tmp_path, monkeypatch):
    task = gpu_tests.Task("test_some.py", 0, 1, cases=False)
    rows = '["test_first", "setup", "passed", 0, ""]\n["test_first", "call", "passed", 0, ""]\n'
    rows += '["test_second", "setup", "passed", 0, ""]\n'

    def start(folder, words):
        task.results = tmp_path / "results.json"
        task.results.write_text(rows)
        (tmp_path / "results.txt").write_text("")
        task.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        task.round = gpu_tests.ROUNDS

    monkeypatch.setattr(task, "start", start)
    assert list(gpu_tests.run([task], 1, tmp_path, (), limit=0)) == [task]
    assert task.process.returncode == -9
    assert task.failures == [("test_some.py", "stopped after 0 s\nin test_second")]
    assert dict(task.counts) == {"passed": 1}
