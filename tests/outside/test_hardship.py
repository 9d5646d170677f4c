"""A slice of what `make hardship` does to files and processes: results stay right."""

from __future__ import annotations

import pytest

import faults
import hardship


@pytest.mark.parametrize("kind", hardship.SUBJECTS)
def test_files_at_bad_moments(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardship, "SUBJECTS", (kind,))
    counts = {
        "killed writers": 8,
        "flipped bits": 25,
        "two at once": 2,
        "full disk": 4,
        "read-only": 1,
    }
    found = hardship.run(counts)
    for (name, trouble), results in found.items():
        refused = name == "Models" and trouble == "flipped bits"
        assert set(results) <= ({"right", "refused"} if refused else {"right"}), (name, trouble)
    flips = found[kind.__name__, "flipped bits"]
    assert flips.total() == 25 and (kind is not hardship.Models or flips["refused"] > 15)


def test_processes_at_bad_moments() -> None:
    found = faults.run({"little memory": 1, "signals": 1})
    assert sum(results.total() for results in found.values()) == 2
