"""A slice of the matrix of `generate`; `python tests/generate_matrix.py` runs all of it."""

from __future__ import annotations

from generate_matrix import outcomes


def test_tokens_are_those_of_eager_and_compilations_are_few() -> None:
    found = list(outcomes("llama", 6, ("drawn",)))
    assert len(found) == 4
    assert all(o.good for o in found), "\n".join(map(str, found))
