"""The command line as a whole: quick help, one sentence for whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchair.cli import main, sentence
from torchair.cli.commands import COMMANDS
from torchair.errors import SerializationError, pretty_error_msg
from torchair.versions import __version__

WITHOUT_TORCH = """
import sys
sys.argv = ["torchair", *sys.argv[1:]]
import _torchair_command
try:
    _torchair_command.main()
except SystemExit as leaving:
    assert not leaving.code, leaving.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["report", "--help"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True
    )
    assert not found.stderr and not found.returncode
    assert (__version__ if arguments == ["--version"] else "usage: torchair") in found.stdout


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-W", "ignore", "-X", "importtime", "-m", "torchair", "--version"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.startswith(f"torchair  {__version__}\nPython")
    assert not any(line.endswith("| torch") for line in found.stderr.splitlines())


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with a file that is nothing."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.air"
    path.write_bytes(b"\x08\x96\x01 nothing that anybody wrote \xff\xfe")
    return path


FILES = {
    "check": ["check", "{}"],
    "run-air": ["run-air", "{}"],
    "export": ["export", "{}"],
    "compare": ["compare", "{}", "{}"],
    "tune": ["tune", "--show", "{}"],
    "merge": ["tune", "--merge", "{}", "-o", "merged.sqlite"],
}
PROGRAMS = [name for name, command in COMMANDS.items() if command.runs_program]


@pytest.mark.parametrize("name", ["missing.air", "broken.air", "folder", "broken.py"])
@pytest.mark.parametrize("command", FILES.values(), ids=FILES)
def test_bad_files_are_one_error(
    command: list[str], name: str, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken.parent / "folder").mkdir()
    (broken.parent / "broken.py").write_text("def f(:\n")
    before = sorted(os.listdir())
    assert main([word.format(name) for word in command]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"torchair {command[0]}: ") and "Traceback" not in shown.err
    assert not shown.out and sorted(os.listdir()) == before


@pytest.mark.parametrize("command", PROGRAMS)
def test_missing_programs_are_one_error(
    command: str, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "missing.py"]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"torchair {command}: can't open file 'missing.py': no such file\n"
    assert not shown.out and os.listdir() == [broken.name]
    for folder in (".", ""):
        assert main([command, folder]) == 2
        assert "it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trace", "verify", "report"])
def test_places_that_cannot_be_written_are_told_before_the_program_runs(
    command: str, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = broken.with_name("script.py")
    script.write_text("raise SystemExit('it ran')\n")
    assert main([command, "-o", str(broken / "place"), str(script)]) == 2
    assert "nothing can be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run-air", "x.air", "--repeat", "-1"], "'-1' is not an integer of at least 0"),
        (["run-air", "x.air", "--repeat", "ten"], "'ten' is not an integer"),
        (["run", "--devices", "0", "x.py"], "'0' is not an integer of at least 1"),
        (["compare", "a", "b", "--rtol", "-1"], "'-1' is not a number of at least 0"),
        (["compare", "a", "b", "--rtol", "nan"], "'nan' is not a number of at least 0"),
    ],
)
def test_ranges_are_checked(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_a_traceback_is_shown_on_request(broken: Path) -> None:
    with pytest.raises(SerializationError):
        main(["--traceback", "check", "missing.air"])


def test_sentences() -> None:
    @pretty_error_msg
    def engine() -> None:
        raise ValueError("what is wrong")

    with pytest.raises(ValueError, match="Traceback") as caught:
        engine()
    assert sentence(caught.value) == "what is wrong"
    assert sentence(KeyError("x")) == "KeyError: 'x' (`torchair --traceback ...` shows where)"
