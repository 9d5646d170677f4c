"""The result tables of programs from outside: files, comparison, and a planted wrong result."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from conformance.pool import Done
from outside import modules, trial
from outside.judging import compiled, complaint, counted
from outside.table import DOCS, Change, Journal, Right, Row, compare, finish, read, write

ROWS = [
    Row("b", "max-autotune", Right.YES, 1, 2, 0.51234, 0.25, 1.5, "samples: 3"),
    Row("a", "npugraph_ex", Right.NO, note="result 0: two\nlines"),
    Row("a", "max-autotune", Right.UNKNOWN),
]


def finished(rows: list[Row], path: Path, **options: bool) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=140)
    status = finish(rows, path, console=console, **options)
    return status, console.file.getvalue()


def test_a_file_is_sorted_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write(path, ROWS)
    text = path.read_text()
    assert text.startswith("model,mode,right,graph_breaks,fallbacks,compile_s,")
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == ["a", "a", "b"]
    again = read(path)
    assert again[2] == replace(ROWS[0], compile_s=0.512)
    assert again[1] == replace(ROWS[1], note="result 0: two lines")
    write(path, again)
    assert path.read_text() == text


def test_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same model and mode"):
        write(tmp_path / "x.csv", [ROWS[0], ROWS[0]])
    (tmp_path / "y.csv").write_text("model,right\na,yes\n")
    with pytest.raises(ValueError, match="columns"):
        read(tmp_path / "y.csv")
    assert read(tmp_path / "none.csv") == []


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (Right.YES, Right.NO, "worse"),
        (Right.YES, Right.UNKNOWN, "worse"),
        (Right.UNKNOWN, Right.NO, "worse"),
        (None, Right.NO, "worse"),
        (Right.YES, None, "lost"),
        (Right.NO, Right.YES, "better"),
        (Right.UNKNOWN, Right.YES, "better"),
    ],
)
def test_changes_are_named(before: Right | None, now: Right | None, kind: str) -> None:
    old, new = ([Row("m", "max-autotune", r)] if r else [] for r in (before, now))
    assert [c.kind for c in compare(old, new)] == [kind]


def test_what_is_as_it_was_is_no_change() -> None:
    slower = [replace(r, speed=0.1, compile_s=9.0, note="other") for r in ROWS]
    assert compare(ROWS, slower) == []
    assert compare([], [ROWS[0]]) == []
    more = replace(ROWS[0], fallbacks=3)
    assert compare(ROWS, [more, *ROWS[1:]]) == [Change(ROWS[0], more)]


def test_the_exit_status_tells_of_regressions(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    assert finished(ROWS, path, update=True)[0] == 0
    assert finished(ROWS, path)[0] == 0
    worse = replace(ROWS[0], right=Right.NO, note="error 1")
    status, text = finished([worse, *ROWS[1:]], path)
    assert status == 1 and "worse" in text and "right: yes -> no" in text
    assert finished(ROWS[1:], path)[0] == 1  # a row is lost
    assert finished(ROWS[1:], path, partial=True)[0] == 0
    assert finished([worse], path, partial=True, update=True)[0] == 0
    assert len(read(path)) == 3 and read(path)[2].right is Right.NO


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state" / "x.csv"
    Journal(path).add(ROWS[1])
    again = Journal(path)
    assert ROWS[1].key in again and ROWS[0].key not in again
    again.add(ROWS[0])
    assert len(read(path)) == 2 and not Journal(path, fresh=True).rows
    assert [r.key for r in again.end()] == [ROWS[1].key, ROWS[0].key]
    assert not path.exists()


def test_a_planted_wrong_result_is_found() -> None:
    x = torch.randn(4, 5)
    eager, truth = (x.exp(), [x.sum()]), (x.double().exp(), [x.double().sum()])
    assert complaint(eager, eager, truth) == ""
    off = eager[0].clone()
    off[1, 2] *= 1 + 1e-4
    assert complaint((off, eager[1]), eager, truth).startswith("result 0: error")
    assert "instead of" in complaint((eager[0].double(), eager[1]), eager, truth)
    assert complaint((eager[0],), eager, truth) == "1 results instead of 2"


def test_rounding_of_inputs_explains_a_difference() -> None:
    def fn(x: Tensor) -> Tensor:
        return x - x.mean()  # of numbers that are nearly equal

    x = 1000 + torch.rand(16)
    program = trial.Program("x", fn, [x])
    got, eager, truth = fn(x) * (1 + 1e-4), fn(x.double()).float(), fn(x.double())
    assert complaint(got, eager, truth)
    moved = [fn(trial.shaken(program, seed).args[0]) for seed in range(3)]
    assert complaint(got, eager, truth, moved) == ""
    assert complaint(got * 1.1, eager, truth, moved)


def test_breaks_and_fallbacks_are_counted() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return torch.linalg.matrix_exp(y)

    with counted() as counts, torch.no_grad():
        compiled(fn, "max-autotune")(torch.eye(3))
    assert sum(counts.graph_breaks.values()) == 1
    assert counts.fallbacks["generic_node"] == 1 and str(counts) == "generic_node:1"


def test_the_files_of_the_repository_can_be_read() -> None:
    for path in DOCS.glob("*.csv"):
        assert read(path), path


class Scaled(nn.Module):
    """A parameter, a buffer that a call changes, and a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.weight).sin()


def plant(monkeypatch: pytest.MonkeyPatch, ours: Any, theirs: Any = lambda fn: fn) -> None:
    """Give the trial these compilers instead of ours and aot_eager."""
    monkeypatch.setattr(
        trial, "compiled", lambda fn, mode, _: (theirs if mode == "aot_eager" else ours)(fn)
    )


def off(fn: Any) -> Any:
    """A compiler whose results are a little off."""
    return lambda *args: fn(*args) * (1 + 1e-4)


def crashing(fn: Any) -> Any:
    raise RuntimeError("a planted crash")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "right"),
    [
        (lambda fn: fn, off, Right.YES),
        (off, lambda fn: fn, Right.NO),
        (off, off, Right.UNKNOWN),
        (crashing, lambda fn: fn, Right.NO),
        (crashing, crashing, Right.UNKNOWN),
        (off, crashing, Right.NO),
    ],
)
def test_a_trial_finds_what_is_planted(
    monkeypatch: pytest.MonkeyPatch, ours: Any, theirs: Any, right: Right, training: bool
) -> None:
    plant(monkeypatch, ours, theirs)
    program = trial.Program("x", Scaled(), [torch.randn(2, 3)])
    found = trial.tried(program, "max-autotune", training=training, timing=True)
    assert found.right is right, found.why
    assert (found.speed is not None) == (right is Right.YES)


def test_a_wrong_sample_makes_a_row_wrong() -> None:
    good, bad = trial.Finding("s0", Right.YES), trial.Finding("s1", Right.NO, "error 1")
    task = ("nn.X", "max-autotune", 0)
    row = modules.row_of(Done(task, [good, bad]))
    assert row is not None and row.right is Right.NO
    assert row.note == "1 of 2 samples; s1: error 1"
    lost = modules.row_of(Done(task, [good], "over 9 s"))
    assert lost is not None and lost.right is Right.NO and "over 9 s" in lost.note
    nothing = trial.Finding("s0", Right.UNKNOWN, "eager: no gradient")
    assert modules.row_of(Done(task, [nothing])) is None


def test_a_module_of_the_database_is_right() -> None:
    found = list(modules.findings(("nn.PReLU", "max-autotune training", 2)))
    assert [f.right for f in found] == [Right.YES, Right.YES]
    assert found[0].seconds and found[0].aot_eager and found[0].speed
