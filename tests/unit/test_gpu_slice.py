"""The slice of a GPU session ends in time, whatever hangs, and its table says what happened."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import gpu_slice
import gpu_tests
from gpu_slice import Stage

ROOT = Path(__file__).resolve().parents[2]


def words(text: str) -> tuple[str, ...]:
    return ("-c", text)


def test_stages_name_what_is_there():
    for stage in gpu_slice.STAGES:
        assert (ROOT / stage.words[0]).is_file()
        if stage.words[0] == gpu_slice.TESTS and "--only" in stage.words:
            only = stage.words[stage.words.index("--only") + 1]
            assert all(gpu_tests.tasks(word) for word in only.split(","))
        if "--slice" in stage.words:
            assert stage.words[stage.words.index("--slice") + 1] in gpu_tests.SLICES
    assert gpu_slice.TOTAL < 540


def test_what_hangs_is_stopped_and_the_next_stage_runs(tmp_path, monkeypatch, capsys):
    sleep = "[sys.executable, '-c', 'import time; time.sleep(99)']"
    child = f"import subprocess, sys, time; p = subprocess.Popen({sleep})\n"
    child += "print('│ child', p.pid, flush=True); time.sleep(99)"
    stages = [
        Stage("hangs", words(child), 2, "│"),
        Stage("works", words("print('no'); print('│ 1.0 us │')"), 20, "│"),
        Stage("fails", words("raise SystemExit('wrong')"), 20, "│"),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_slice", "--out", str(tmp_path)])
    start = time.perf_counter()
    with pytest.raises(SystemExit) as found:
        gpu_slice.main(stages)
    assert found.value.code and time.perf_counter() - start < 30
    text = (tmp_path / "table.txt").read_text()
    assert text in capsys.readouterr().out + "\n"
    assert "stopped          hangs" in text and "right            works" in text
    assert "exit status 1    fails" in text and "wrong" in text and "│ 1.0 us │" in text
    pid = int(text.split("child")[1].split()[0])
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_no_time_is_left_for_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_slice", "--out", str(tmp_path), "--total", "1"])
    with pytest.raises(SystemExit) as found:
        gpu_slice.main([Stage("late", words("print(1)"), 5)])
    assert found.value.code
    assert "not begun: late" in (tmp_path / "table.txt").read_text()
