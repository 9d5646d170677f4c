"""Models compiled inside of trainers and pipelines give what eager mode gives. Tools that are not
installed are skipped; `make trainers` installs them."""

from __future__ import annotations

import pytest

from trainers import TOOLS, outcome_of

GRAPHS = {
    "trainer": 2,  # forward and backward
    "accelerate": 2,
    "lightning": 2,
    "diffusers": 1,
    "diffusers_blocks": 3,  # two kinds of blocks, of which one is traced with another layout too
    "sentence_transformers": 1,  # for all lengths
    "peft": 2,
    "generate": 1,  # decode; transformers leaves prefill in eager mode
    "sgd": 2,  # the first step has no momentum
    "adamw": 1,
}
"""That are compiled, and not one more."""


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_gives_what_eager_gives(name: str) -> None:
    tool = TOOLS[name]
    for package in tool.needs:
        pytest.importorskip(package)
    found = outcome_of(tool)
    assert found.graphs == GRAPHS[name]
    assert found.difference < 1e-4  # of float32, after a few steps
