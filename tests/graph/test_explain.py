"""`torchair.explain`: graphs, breaks, recompiles, units and what they cost."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchair
from torchair import process
from torchair.explanation import units
from torchair.explanation.api import Break, Collector, Explanation, GraphRow
from torchair.explanation.units import MachineRates
from torchair.runner import observed

PEAK = MachineRates(1e18, 1e18, 1e18)


@pytest.fixture(autouse=True)
def own_state(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(units, "_measured", lambda device: PEAK)
    yield
    torch._dynamo.reset()


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.gelu(x @ w)
    torch._dynamo.graph_break()
    return torch.special.i0(y).softmax(-1).sum(0)


def test_breaks_units_and_operators_without_converter():
    told = torchair.explain(broken)(torch.randn(4, 8), torch.randn(8, 16))
    first, second = told.graphs
    (only,) = told.breaks
    assert "test_explain.py" in only.line and "graph_break()" in only.line and only.count == 1
    assert told.generic == second.generic == {"aten.i0.default": 1} and not first.generic
    (unit,) = first.units
    assert (unit.name, unit.kind, unit.why) == ("mm+gelu", "native", "nothing joined after it")
    assert unit.moved == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert unit.operations >= 2 * 4 * 8 * 16 and "test_explain.py" in unit.line
    assert [(u.name, u.kind) for u in second.units] == [
        ("i0", "torch"),
        ("_softmax", "native"),
        ("sum", "native"),
    ]
    text = str(told)
    assert "graphs 2, breaks 1, recompiles 0" in text and "mm+gelu" in text
    assert "ReduceSum reduces other axes" in text and "% of the machine" in text


def test_shares_of_a_call():
    told = torchair.explain(lambda x: x.softmax(-1))(torch.randn(64, 64))
    times = told.times
    assert times is not None and times.call >= times.graphs >= times.kernels > 0
    assert times.dynamo + times.ours + times.kernels == pytest.approx(times.call)
    assert [g.calls for g in told.graphs] == [5]


def test_recompiles_have_a_reason(monkeypatch):
    @torch.compile(backend=torchair.get_npu_backend(), dynamic=False)
    def explained(x: Any) -> Any:
        return x + 1

    older = [SimpleNamespace(recompile_reason="long ago") for _ in range(4)]
    full = deque(older, maxlen=4)  # as after many compilations
    monkeypatch.setattr(torch._dynamo.utils, "_compilation_metrics", full)
    collector = Collector()
    with observed(collector), torch.no_grad():
        for size in (3, 4):
            explained(torch.randn(size))
    (again,) = collector.explanation().recompiles
    assert "explained" in again.function and "size mismatch at index 0" in again.reason


def test_copies_are_told():
    def reread(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> Any:
        changed = cache.index_copy(0, at, new)
        return changed, cache + 1

    told = torchair.explain(reread)(torch.randn(5, 3), torch.tensor([1]), torch.randn(1, 3))
    copies = [u for g in told.graphs for u in g.units if u.kind == "copy"]
    assert [u.why for u in copies] == ["it is updated, and still read"]


def test_rates_are_kept_and_measured_again_where_they_are_beaten(monkeypatch, tmp_path):
    kept: dict[str, bytes] = {}

    class Store:
        get = staticmethod(kept.get)
        put = staticmethod(kept.__setitem__)

    made = iter([MachineRates(1.0, 9.0, 3.0), MachineRates(2.0, 8.0, 3.0)])
    monkeypatch.setattr(units, "store", Store)
    monkeypatch.setattr(units, "_measured", lambda device: next(made))
    monkeypatch.setattr(units, "LoadMeter", lambda: Busy(0.0))
    assert units.rates("cpu") == units.rates("cpu") == MachineRates(1.0, 9.0, 3.0)
    busy = units.UnitRow("unit", "native", "", 0, 6, 1.0, "")  # twice what was measured
    assert units.rates("cpu", [busy]) == MachineRates(2.0, 9.0, 3.0)
    (data,) = kept.values()
    assert json.loads(data) == {"bytes": 2.0, "near": 9.0, "operations": 3.0, "others": 0.0}


class Busy:
    """A meter that says how many cores others keep busy."""

    def __init__(self, others: float) -> None:
        self.others = others

    def __enter__(self) -> Busy:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""


def test_rates_of_a_busy_machine_are_measured_again_when_it_is_quiet(monkeypatch):
    kept: dict[str, bytes] = {}

    class Store:
        get = staticmethod(kept.get)
        put = staticmethod(kept.__setitem__)

    made, busy = (
        iter([MachineRates(1.0, 1.0, 1.0), MachineRates(2.0, 2.0, 2.0)]),
        iter([Busy(1.5), Busy(0.1)]),
    )
    monkeypatch.setattr(units, "store", Store)
    monkeypatch.setattr(units, "_measured", lambda device: next(made))
    monkeypatch.setattr(units, "LoadMeter", lambda: next(busy))
    monkeypatch.setattr(units.os, "getloadavg", lambda: (4.0, 4.0, 4.0))
    first = units.rates("cpu")
    assert first == units.rates("cpu") == MachineRates(1.0, 1.0, 1.0, 1.5) and first.loaded
    assert "kept 1.5 cores busy" in str(Explanation(rates=first))
    monkeypatch.setattr(units.os, "getloadavg", lambda: (0.2, 4.0, 4.0))
    assert units.rates("cpu") == MachineRates(2.0, 2.0, 2.0, 0.1)
    assert "busy" not in str(Explanation(rates=units.rates("cpu")))


def test_others_are_measured(monkeypatch):
    busy, mine, clock = iter([10.0, 13.0]), iter([2.0, 3.0]), iter([0.0, 2.0])
    monkeypatch.setattr(process, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(process.time, "process_time", lambda: next(mine))
    monkeypatch.setattr(process.time, "perf_counter", lambda: next(clock))
    with process.LoadMeter() as meter:
        pass
    assert meter.others == 1.0  # three seconds of all, of which one is ours, in two


def test_results_are_short_in_a_log_and_tables_in_a_notebook():
    unit = units.UnitRow("mm+<b>", "native", "the end", 8, 4, 2e-6, "model.py:1")
    row = GraphRow("graph 1", "forward", 3, False, 5, 1e-5, {}, [unit])
    told = Explanation([row], [Break("<i>data</i>", "model.py:3")], rates=PEAK)
    assert repr(told) == "<Explanation: graphs 1, breaks 1, recompiles 0>"
    assert repr(told.graphs) == "[<graph 1, forward, 3 nodes, 1 steps>]"
    assert repr(row.units) == "[<native step mm+<b>, 2 us>]"
    html = told._repr_html_()
    assert "mm+&lt;b&gt;" in html and "<b>, " not in html and "&lt;i&gt;data" in html
    assert html.count("<table>") == 1 and "graph 1, forward: 3 nodes" in html


def test_a_machine_is_measured():
    assert units._copying(1 << 16, "cpu") > 0


def test_several_may_look_on():
    outer = Collector()
    with observed(outer):
        told = torchair.explain(lambda x: x + 1)(torch.randn(3))
    assert [u.name for g in told.graphs for u in g.units] == ["add"]
    assert [u.name for g in outer.explanation().graphs for u in g.units] == ["add"]


def test_bytes_of_a_table_are_those_that_are_picked() -> None:
    table, cache = torch.randn(1000, 16), torch.randn(500, 16)

    def model(ids: torch.Tensor, table: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        rows = table[ids]
        cache.index_copy_(0, ids, rows)
        return rows * 2

    found = torchair.explain(model)(torch.tensor([3, 5]), table, cache)
    units = found.graphs[0].units
    assert units and all(0 < u.moved < 1000 for u in units), units
