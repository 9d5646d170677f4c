"""The table of operators holds together: what a row says on one side fits the other sides."""

from __future__ import annotations

import pytest

from torchair.ge.prototypes import prototype
from torchair.operators import Row, Trait, rows
from torchair.operators.core import ANY, add_row, call, same_as

ROWS = {t: row for t, row in rows().items() if prototype(t) is not None}


def ports(row: Row) -> set[str]:
    """Names of the inputs that GE's prototype has."""
    proto = prototype(row.type)
    assert proto is not None
    return {p.name for p in proto.inputs}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_sides_of_a_row_fit(row):
    assert row.host <= ports(row)
    assert row.types and row.types <= ANY
    assert row.is_native or row.types == ANY, "types of native code that is not there"
    assert row.loops is None or row.anchor is None
    if row.loops is None:
        return
    kind = row.loops.kind
    assert (row.loops.reduces is not None) == (kind == "reduce")
    assert (row.loops.domain in ports(row)) == (kind in ("reduce", "update"))
    assert row.has(Trait.WRITES_FIRST) == (kind == "update")
    assert kind == "map" or not row.has(Trait.ELEMENTWISE)
    assert not row.has(Trait.SIDE_EFFECT | Trait.RANDOM), "fusion would lose its order"


def test_no_type_has_two_rows():
    kernel = call(lambda x: x)
    with pytest.raises(ValueError, match="Relu has a row already"):
        add_row("Relu", same_as("x"), kernel)
    assert rows()["Relu"].kernel is not kernel
