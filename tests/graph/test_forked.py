"""Programs in processes forked from one that has torch are what they are in new processes."""

from __future__ import annotations

import subprocess

import pytest

import forked
from processes import alone, run, run_forked

PLACE = """
import __main__, os, pickle, sys, torch
class Local: pass
assert type(pickle.loads(pickle.dumps(Local()))) is __main__.Local
print(__name__, sys.argv, sys.orig_argv, sys.path[:2], os.getcwd(), sys.stdin.read())
print(sorted(os.environ))
print(globals().get("__file__"), "torchair" in sys.modules)
import torchair
print(torchair.__file__)
"""
ENDS = {
    "a code": "import sys; sys.exit(7)",
    "a message": "import sys; sys.exit('a message')",
    "at once": "import os; print('lost'); os._exit(9)",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "an error": "def f():\n    raise ValueError('mine')\nf()",
    "a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(3) from e",
    "no Python": "x = (",
    "handlers": "import atexit; atexit.register(print, 'last'); 1 / 0",
    "an interrupt": "from signal import *\nsignal(2, default_int_handler)\nraise_signal(2)",
}


@pytest.mark.parametrize("way", ["-c", "script", "-m"])
def test_a_program_finds_its_place(way, tmp_path):
    (tmp_path / "program.py").write_text(PLACE)
    words = {"-c": ["-c", PLACE], "script": ["program.py"], "-m": ["-m", "program"]}[way]
    new = run(*words, "x", cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert new.returncode == 0, new.stderr
    made = run_forked(*words, "x", cwd=tmp_path)
    assert (made.returncode, made.stdout) == (0, new.stdout), made.stderr


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_in_its_way(end, tmp_path):
    (tmp_path / "program.py").write_text(ENDS[end])
    new, made = (go("program.py", cwd=tmp_path) for go in (run, run_forked))
    assert (made.returncode, made.stdout) == (new.returncode, new.stdout)
    assert made.stderr == new.stderr


def test_what_torch_reads_as_it_is_imported_is_refused():
    with pytest.raises(AssertionError, match="TORCH_LOGS"):
        forked.run("-c", "", env={**alone(), "TORCH_LOGS": "dynamo"})
    with pytest.raises(AssertionError, match="-W"):
        forked.run("-W", "error", env=alone())


def test_programs_run_beside_each_other_and_have_limits(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run("-c", "import time; time.sleep(600)", env=alone(), timeout=0.1)
    waits = "import pathlib, time\nwhile not pathlib.Path('mark').exists(): time.sleep(0.01)"
    first = forked.start("-c", waits, env=alone(), cwd=tmp_path)
    second = forked.start("-c", "open('mark', 'w')", env=alone(), cwd=tmp_path)
    assert [p.communicate(60).returncode for p in (first, second)] == [0, 0]
