"""Pages that name parts of the code: what they name is there, and nothing is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import layers

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "torchair"
GLOSSARY = ROOT / "docs" / "glossary.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

Term = tuple[str, list[str]]


def terms() -> list[Term]:
    """Rows of the glossary: the term, and what stands in backticks where it lives."""
    found = []
    for line in GLOSSARY.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "term":
            found.append((cells[0], re.findall(r"`([^`]+)`", cells[2])))
    return found


def sources(place: str) -> str:
    """The text of a file or of all files of a folder."""
    path = PACKAGE / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text("utf-8") for file in files)


@pytest.mark.parametrize("term", terms(), ids=lambda term: term[0])
def test_terms_live_where_the_glossary_says(term: Term) -> None:
    named = term[1]
    places = [n for n in named if "/" in n or n.endswith(".py")]
    missing = [place for place in places if not (PACKAGE / place).exists()]
    assert not missing
    text = "\n".join(map(sources, places))
    words = {word for n in named if n not in places for word in n.split(".")}
    assert not {word for word in words if not re.search(rf"\b{re.escape(word)}\b", text)}


def test_the_glossary_has_terms() -> None:
    assert len(terms()) > 50


def test_architecture_lists_every_package() -> None:
    text = ARCHITECTURE.read_text("utf-8")
    table = text.split("## Packages")[1].split("## ")[0]
    first = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    named = {name.split("/")[0] for cell in first for name in re.findall(r"`([^`]+)`", cell)}
    there = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there - {"__init__.py", "__main__.py"} == named


def test_architecture_shows_the_layers() -> None:
    """Packages in the order of layers, without the package itself and what starts it."""
    text = ARCHITECTURE.read_text("utf-8")
    block = text.split("`tests/tools/layers.py`, which is:")[1].split("\n\n")[1]
    shown = [set(layer.split()) for layer in block.split(">")]
    above = [layer for layer in layers.LAYERS if layer > 14]
    assert shown[0] == {"__init__"}
    assert {layers.LAYERS[layer] for layer in above} == {("__main__",), ("",)}
    assert shown[1:] == [set(layers.LAYERS[n]) for n in sorted(layers.LAYERS, reverse=True)][2:]
