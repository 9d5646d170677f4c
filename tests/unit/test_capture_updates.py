"""Lists that operators take from the host: found in a graph, and read anew by each replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchair.capture.base import ArgumentKinds, CaptureOptions, ToCapture
from torchair.capture.graph import AclGraphCacheInfo
from torchair.capture.keys import key_entries
from torchair.capture.source import render
from torchair.capture.tape import TapeSubstrate
from torchair.capture.updates import (
    UPDATABLE,
    DeviceLists,
    Site,
    Updates,
    find_updates,
    register_updatable,
)
from torchair.errors import CaptureError

aten = torch.ops.aten


def rows(x, lengths, *, starts=None, scale=1):
    """For each row the sum of the elements from its start, as many as its length."""
    starts = starts or [0] * len(lengths)
    sums = [x[i, s : s + n].sum() for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    return torch.stack(sums) * scale


def rows_on_device(x, lengths, *, starts=None, scale=1):
    position = torch.arange(x.shape[1], device=x.device)
    first = torch.zeros_like(lengths) if starts is None else starts
    inside = (position >= first[:, None]) & (position < (first + lengths)[:, None])
    return torch.where(inside, x[: len(lengths)], 0.0).sum(1) * scale


@pytest.fixture(scope="module", autouse=True)
def library():
    made = torch.library.Library("updates_test", "DEF")
    arguments = "Tensor x, SymInt[] lengths, *, SymInt[]? starts=None, int scale=1"
    for name in ("rows", "host_rows"):
        made.define(f"{name}({arguments}) -> Tensor")
        made.impl(name, rows, "CPU")
        made.impl(name, lambda x, lengths, **kwargs: x.new_empty(len(lengths)), "Meta")
    register_updatable(torch.ops.updates_test.rows.default, ("lengths", "starts"), rows_on_device)
    register_updatable(torch.ops.updates_test.host_rows.default, ("lengths", "starts"))
    yield
    for name in ("rows", "host_rows"):
        del UPDATABLE[f"updates_test.{name}.default"]
    made._destroy()


def traced(function: Any, *args: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*args)


def attention(x, n, m):
    op = torch.ops.updates_test.rows
    y = x + 1
    return op(y, [n, m, 4]), op(x, [n, m, 4], scale=2), op(y, [1, 1], starts=[m, 0]), op(x, [2, 2])


@pytest.fixture
def graph() -> fx.GraphModule:
    return traced(attention, torch.ones(3, 8), 5, 6)


# ---- reading a graph


def test_rules_and_sites(graph):
    updates = find_updates(graph)
    assert updates.rules == (
        (("index", 1), ("index", 2), ("fixed", 4)),
        (("fixed", 1), ("fixed", 1)),
        (("index", 2), ("fixed", 0)),
    )
    op = "updates_test.rows.default"
    assert updates.sites == (
        Site("rows", op, {"lengths": 0}),
        Site("rows_1", op, {"lengths": 0}),
        Site("rows_2", op, {"lengths": 1, "starts": 2}),
        Site("rows_3", op, {}),
    )
    assert updates.values([None, 7, 8]) == [[7, 8, 4], [1, 1], [8, 0]]
    assert updates.ignored == {1, 2}
    assert key_entries(graph, updates.ignored) == ((0, False),)  # its size is not known


def test_a_number_with_another_use_belongs_to_the_key():
    op = torch.ops.updates_test.rows
    graph = traced(lambda x, n, m: (op(x, [n, m]) + m,), torch.ones(2, 8), 5, 6)
    updates = find_updates(graph)
    assert updates.rules == ((("index", 1), ("index", 2)),)
    assert updates.ignored == {1}
    assert key_entries(graph, updates.ignored) == ((0, False), (2, True))


def test_a_number_that_is_also_a_size_belongs_to_the_key():
    op = torch.ops.updates_test.rows
    graph = traced(lambda x, n: (op(x, [n, 2]),), torch.ones(2, 8), 8)
    assert graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1].node.expr == (
        graph.graph.find_nodes(op="placeholder")[1].meta["val"].node.expr
    )
    assert find_updates(graph).ignored == frozenset()


def test_a_number_that_is_returned_belongs_to_the_key():
    op = torch.ops.updates_test.rows
    graph = traced(lambda x, n: (op(x, [n, 2]), n), torch.ones(2, 8), 5)
    assert find_updates(graph).ignored == frozenset()


def test_graphs_without_such_operators(graph):
    plain = traced(lambda x, n: (x + n,), torch.ones(2, 8), 5)
    assert find_updates(plain) == Updates()
    assert Updates().values([1]) == []


def test_computed_numbers_are_refused():
    op = torch.ops.updates_test.rows
    graph = traced(lambda x, n: (op(x, [n + 1, 2]),), torch.ones(2, 8), 5)
    with pytest.raises(RuntimeError) as error:
        find_updates(graph)
    assert "'lengths' of updates_test.rows.default cannot be updated" in str(error.value)
    assert "holds add, neither a number nor an argument of the graph" in str(error.value)
    assert "node: rows: torch.float32[2]cpu = " in str(error.value)


def test_lists_from_elsewhere_are_refused():
    graph = fx.Graph()
    x, lengths = graph.placeholder("x"), graph.placeholder("lengths")
    graph.output((graph.call_function(torch.ops.updates_test.rows.default, (x, lengths)),))
    with pytest.raises(RuntimeError, match="it must be a list, not lengths"):
        find_updates(fx.GraphModule({}, graph))


def test_tensors_in_lists_are_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 8)
    graph.output((graph.call_function(torch.ops.updates_test.rows.default, (x, [x])),))
    with pytest.raises(RuntimeError, match="holds x, neither"):
        find_updates(fx.GraphModule({}, graph))


def test_registering_checks_the_schema():
    op = torch.ops.updates_test.rows.default
    for name in ("x", "scale", "nothing"):
        with pytest.raises(ValueError, match=f"no list of integers named '{name}'"):
            register_updatable(op, (name,))


def test_known_operators():
    assert UPDATABLE["npu.npu_fused_infer_attention_score.default"].parameters == (
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "actual_shared_prefix_len",
    )
    assert UPDATABLE["atb._npu_paged_attention.default"].parameters == ("context_lens",)


def test_plain_values_and_back(graph):
    updates = find_updates(graph)
    info = AclGraphCacheInfo(
        updated_ops_param=updates.parameters(), ops_update_rulers=updates.rulers()
    )
    assert info.ops_update_rulers["rows_2"] == {
        "lengths": [("fixed", 1), ("fixed", 1)],
        "starts": [("index", 2), ("fixed", 0)],
    }
    assert "('updates_test.rows.default', ['lengths'])" in render(graph, {}, info)
    again = Updates.from_literals(info.updated_ops_param, info.ops_update_rulers)
    assert again.sites == updates.sites and again.rules == updates.rules


# ---- replays on the CPU


def captured(forward: Any, updates: Updates, args: Any) -> Any:
    request = ToCapture("g", forward, args, ArgumentKinds((), (0,)), CaptureOptions())
    recording = TapeSubstrate(updates).capture(request)

    def call(*args: Any) -> Any:
        return recording.call(args, hold=True)

    return call


@pytest.mark.parametrize("as_graph", [True, False])
def test_replays_read_new_lists(graph, as_graph):
    x = torch.randn(3, 8)
    call = captured(graph if as_graph else attention, find_updates(graph), (x, 5, 6))
    for n in range(1, 9):
        for m in range(1, 8):
            x = torch.randn(3, 8)
            for r, w in zip(call(x, n, m), attention(x, n, m), strict=True):
                assert torch.equal(r, w)


def test_without_updates_lists_stay(graph):
    x = torch.randn(3, 8)
    call = captured(graph, Updates(), (x, 5, 6))
    for r, w in zip(call(x, 1, 1), attention(x, 5, 6), strict=True):
        assert torch.equal(r, w)


def test_calls_must_be_those_of_the_graph(graph):
    updates, x = find_updates(graph), torch.randn(3, 8)
    with pytest.raises(CaptureError, match=r"not called: \['rows_1', 'rows_2', 'rows_3'\]"):
        captured(lambda x, n, m: (torch.ops.updates_test.rows(x, [n]),), updates, (x, 5, 6))
    with pytest.raises(CaptureError, match="more often than its graph says"):
        captured(lambda *a: (*attention(*a), *attention(*a)), updates, (x, 5, 6))


# ---- lists on a device


def test_only_operators_with_a_form_are_updated_on_a_device(graph):
    assert find_updates(graph, on_device=True) == find_updates(graph)
    op = torch.ops.updates_test.host_rows
    host = traced(lambda x, n: (op(x, [n, 2]),), torch.ones(2, 8), 5)
    assert find_updates(host).ignored == {1}
    assert find_updates(host, on_device=True) == Updates()


def run_forms(graph: fx.GraphModule, device: torch.device) -> None:
    updates = find_updates(graph, on_device=True)
    lists = DeviceLists(updates, device)
    assert [len(t) for t in lists.tensors] == [3, 2, 2]
    x = torch.randn(3, 8)
    there = x.to(device)
    for n, m in ((5, 6), (1, 2), (8, 1), (3, 3), (2, 7), (7, 2)):
        lists.fill((x, n, m))
        with lists.forms():
            results = attention_but_last(there)
        for r, w in zip(results, attention(x, n, m), strict=False):
            torch.testing.assert_close(r.cpu(), w)


def attention_but_last(x):
    """What is captured, with numbers that do not matter."""
    return attention(x, 1, 1)[:3]


def test_forms_read_device_lists(graph):
    run_forms(graph, torch.device("cpu"))


def test_no_lists_at_all():
    lists = DeviceLists(Updates(), torch.device("cpu"))
    lists.fill((1, 2))
    assert lists.tensors == []


def test_a_form_is_needed():
    op = torch.ops.updates_test.host_rows
    host = traced(lambda x, n: (op(x, [n, 2]),), torch.ones(2, 8), 5)
    lists = DeviceLists(find_updates(host), torch.device("cpu"))
    with pytest.raises(CaptureError, match="has no form for capture"), lists.forms():
        op(torch.ones(2, 8), [5, 2])


@pytest.mark.cuda
def test_replays_on_cuda_read_new_lists(graph):
    device = torch.device("cuda")
    updates = find_updates(graph, on_device=True)
    lists = DeviceLists(updates, device)
    x = torch.randn(3, 8)
    there = x.to(device)
    lists.fill((x, 5, 6))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), lists.forms():
        attention_on_cuda(there)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), lists.forms():
        results = attention_on_cuda(there)
    for turn in range(50):
        n, m = 1 + turn % 8, 1 + turn % 7
        lists.fill((x, n, m))
        captured.replay()
        kept = [r.clone() for r in results]
        for r, w in zip(kept, attention(x, n, m), strict=False):
            torch.testing.assert_close(r.cpu(), w)


def attention_on_cuda(x):
    """The calls that have forms: the operator itself has no kernel there."""
    op = torch.ops.updates_test.rows
    y = x + 1
    return op(y, [1, 1, 4]), op(x, [1, 1, 4], scale=2), op(y, [1, 1], starts=[1, 0])
