"""The documents tell the truth: examples run, quoted output is real, links resolve, code parses."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

import layers
from pages import ROOT, blocks
from processes import run_forked

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Programs, what the end of their output must be, and the pages that quote them.
PROGRAMS = {
    "examples/tour.py": ("", ["README.md", "docs/tour.md"]),
    "examples/custom_op.py": ("", ["docs/writing_converters.md"]),
    "examples/own_operators.py": ("caller's cache: True", ["docs/custom_ops.md"]),
    "examples/patterns.py": ("", ["docs/patterns.md"]),
    "examples/collectives.py": ("equal to one process", ["docs/collectives.md"]),
    "examples/native.py": ("equal to eager", ["docs/cpu_engine.md"]),
    "examples/gpu_kernel.py": ("kernels for sm_90", ["docs/gpu_engine.md"]),
    "examples/streams.py": ("", ["docs/streams.md"]),
    "examples/replay.py": ("equal to eager", ["docs/npugraph_ex.md"]),
    "examples/deploy.py": ("second: read", ["docs/deploy.md"]),
    "examples/export.py": ("", ["docs/export.md"]),
    "examples/package.py": ("gives what eager gives", ["docs/package.md"]),
    "examples/quantised.py": ("weights say: True", ["docs/quantisation.md"]),
    "examples/reliability.py": ("equal to eager", ["docs/reliability.md"]),
    "examples/report.py": ("kernels", ["docs/report.md"]),
    "examples/tuning.py": (" results", ["docs/tuning.md"]),
    "examples/card.py": ("exit code 1", ["docs/card_dumps.md"]),
    "examples/verify.py": ("lines show it again", ["docs/verify.md"]),
    "docs/tiny_torchair.py": ("equal to eager", []),
}


def run(arguments: list[str], folder: Path) -> str:
    """What a Python program prints, run in a folder of its own with our sources on the path."""
    done = run_forked(*arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(text: str) -> str:
    """Text without what differs between machines: our folder, carets under source lines."""
    lines = text.replace(f"{ROOT}{os.sep}", "").splitlines()
    return "\n".join(re.sub(r"\s+[\^~]+$", "", line).rstrip() for line in lines)


def pieces(block: str) -> list[str]:
    """A quotation, cut where it says that lines are left out."""
    return [p.strip("\n") for p in re.split(r"^\.\.\.$", block, flags=re.MULTILINE)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_print_what_pages_quote(program, tmp_path):
    end, pages = PROGRAMS[program]
    output = plain(run([str(ROOT / program)], tmp_path))
    assert output.endswith(end)
    for page in pages:
        quoted = [p for b in blocks(ROOT / page, "text") for p in pieces(b)]
        assert quoted
        missing = [p for p in quoted if f"\n{plain(p)}\n" not in f"\n{output}\n"]
        assert not missing, f"{page} quotes what {program} does not print:\n" + "\n\n".join(missing)


def test_readme_example_runs(tmp_path):
    (example,) = blocks(ROOT / "README.md", "python")
    run(["-c", example], tmp_path)
    stems = sorted(f.name.partition("_rank_")[0] for f in tmp_path.iterdir())
    assert stems == ["dynamo_optimized_graph_1", "dynamo_original_graph_1"]


@pytest.mark.parametrize(
    "page, program",
    [
        ("tour.md", "tour.py"),
        ("card_dumps.md", "card.py"),
        ("streams.md", "streams.py"),
        ("cpu_engine.md", "native.py"),
        ("writing_converters.md", "custom_op.py"),
        ("npugraph_ex.md", "replay.py"),
        ("custom_ops.md", "own_operators.py"),
        ("deploy.md", "deploy.py"),
        ("export.md", "export.py"),
        ("package.md", "package.py"),
        ("reliability.md", "reliability.py"),
        ("report.md", "report.py"),
        ("trainers.md", "trainers.py"),
        ("tuning.md", "tuning.py"),
    ],
)
def test_quoted_code_is_the_one_that_runs(page, program):
    source = (ROOT / "examples" / program).read_text()
    quoted = [x.strip() for b in blocks(ROOT / "docs" / page, "python") for x in b.splitlines()]
    assert quoted
    assert not [line for line in quoted if line not in source]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    targets = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [t for t in targets if t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_parse(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_files_of_ten_changes_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = page.partition("## Ten changes")[2].partition("## Decisions")[0].splitlines()
    rows = [row for row in rows if row.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        for path in re.findall(r"`([\w/<>]+(?:/|\.py|\.txt))`", row):
            known = path.replace("<family>", "*").replace("<subject>", "*")
            assert list((ROOT / "src" / "torchair").glob(known)), path


def linear_files(tmp_path, monkeypatch, *args):
    """Files of a Linear with the number of their functions that run, and the page about them."""
    page = (ROOT / "docs" / "tour.md").read_text().partition("## 10 The files of a Linear\n")[2]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no kernel is there yet
    printed = run([str(ROOT / "tests" / "tools" / "called_files.py"), *args], tmp_path)
    return json.loads(printed.splitlines()[-1]), page


def test_files_of_a_linear_are_those_that_the_tour_lists(tmp_path, monkeypatch):
    counted, page = linear_files(tmp_path, monkeypatch)
    way, beside = page.partition("On a GPU the walk")[0].split("\nThe other ")
    walked = re.findall(r"^\d+\. \[([^]]+)\]", way, re.MULTILINE)
    asked = [
        f
        for line in re.findall(r"^- .*$", beside, re.MULTILINE)
        for f in re.findall(r"\[([^]]+)\]\(", line)
    ]
    assert sorted([*walked, *asked]) == sorted(counted)
    assert f"functions of {len(counted)} files" in way and beside.startswith(f"{len(asked)} files")
    # Who is walked is not a matter of taste: of each other file few functions run, unless it
    # belongs to a package that knows neither graphs nor kernels.
    layer = {room: n for n, rooms in layers.LAYERS.items() for room in rooms}
    knowing = [f for f in asked if layer[f.partition("/")[0].removesuffix(".py")] >= layer["ge"]]
    assert not [f for f in knowing if counted[f] >= 10]
    assert len(walked) <= 55


def test_files_of_a_linear_on_a_gpu_are_those_that_the_tour_lists(tmp_path, monkeypatch):
    counted, page = linear_files(tmp_path, monkeypatch, "cuda")
    here, beside = page.split("On a GPU the walk")
    listed = re.findall(r"^- \[([^]]+)\]", beside, re.MULTILINE)
    known = re.findall(r"\[([\w/]+\.py)\]\(", here)
    assert sorted(listed) == sorted({*counted} - {*known, "engine/inspect/dry_run.py"})
