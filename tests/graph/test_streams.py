"""Streams executed for real: which lane runs what, what keeps order, that values are eager's."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

import torchair
from compiling import compiled
from lane_tools import Delays, Late, Meeting, Names, Sessions
from random_graphs import Maker
from torchair import ops, scope
from torchair.codegen.cpu.openmp import limit_threads
from torchair.codegen.program import range_of
from torchair.engine.inspect.check import check_plan
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.ordering import COMMUNICATION
from torchair.engine.options import finalize_graph_engine
from torchair.engine.plan.streams import LaneOrder, order_of
from torchair.engine.run.executor import Program
from torchair.engine.run.lanes import Workers
from torchair.engine.run.native import NativeProgram
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError
from torchair.ge import attrs as attr
from torchair.ge.signature import InputSource


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    finalize_graph_engine()
    yield
    torch._dynamo.reset()
    finalize_graph_engine()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    return Sessions(monkeypatch)


# ---- the documented example


class TwoStreams(torch.nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        abs = torch.abs(mm)
        add = torch.add(abs, 1)
        sub = torch.sub(x, mm)
        return add, sub


def insert_streams(gm: Any, example_inputs: Any, config: Any) -> None:
    """mm and abs on stream_1, sub after abs: the pass of the documentation."""
    graph, air, aten = gm.graph, torch.ops.air, torch.ops.aten
    for node in graph.nodes:
        if node.target == aten.mm.default:
            with graph.inserting_before(node):
                graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
        if node.target == aten.abs.default:
            with graph.inserting_after(node):
                record = graph.call_function(air.record.default, ())
            with graph.inserting_after(record):
                graph.call_function(air.scope_exit.default, ())
        if node.target == aten.sub.Tensor:
            with graph.inserting_before(node):
                graph.call_function(air.wait.default, ([record],))


def run_two_streams(folder: Path, calls: int = 1) -> None:
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = insert_streams
    config.debug.timeline.type = "json"
    config.debug.timeline.path = str(folder)
    model, x = TwoStreams(), torch.randn(3, 3)
    fast = compiled(model, config)
    for _ in range(calls):
        for got, wanted in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted)


def test_example_attributes_and_control_edge(tmp_path, sessions):
    run_two_streams(tmp_path)
    graph = sessions.made[0].graph
    labels = {n.name: n.attr("_user_stream_label", "") for n in graph.nodes}
    assert {name for name, label in labels.items() if label == "stream_1"} == {"MatMul", "Abs"}
    assert list(graph.node("Sub").control) == [graph.node("Abs")]
    assert [n.name for n in graph.nodes if n.control] == ["Sub"]


def test_example_lanes_and_events(tmp_path, sessions):
    run_two_streams(tmp_path)
    plan = sessions.plan
    schedule = plan.schedule
    names = [[plan.steps[k].node.name for k in order] for order in schedule.steps]
    assert schedule.lanes == ["", "stream_1"]
    assert names == [["Sub", "Add"], ["MatMul", "Abs"]]
    pairs = [(plan.steps[a].node.name, plan.steps[b].node.name) for a, b in schedule.events]
    assert pairs == [("Abs", "Sub")]  # that MatMul comes before Sub follows
    assert sessions.made[0].summary().streams == 2


def test_example_timeline(tmp_path):
    run_two_streams(tmp_path, calls=3)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("timeline_graph_") and path.suffix == ".json"
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "default stream", 1: "stream_1"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["call"] for e in slices} == {0, 1, 2}
    last = {e["name"]: e for e in slices if e["args"]["call"] == 2}
    shown = {
        name: (rows[e["tid"]], e["args"]["nodes"], e["args"]["types"]) for name, e in last.items()
    }
    assert shown == {
        "MatMul": ("stream_1", ["MatMul"], ["MatMul"]),
        "Abs": ("stream_1", ["Abs"], ["Abs"]),
        "Sub": ("default stream", ["Sub"], ["Sub"]),
        "Add": ("default stream", ["Add"], ["Add"]),
    }
    ends = {name: e["ts"] + e["dur"] for name, e in last.items()}
    assert ends["MatMul"] <= last["Abs"]["ts"] and ends["Abs"] <= last["Sub"]["ts"]
    assert last["Sub"]["args"]["source"].endswith("in forward    sub = torch.sub(x, mm)")
    arrows = [e for e in events if e["name"] == "event"]
    assert [e["ph"] for e in arrows] == ["s", "f"] * 3


def test_timeline_by_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_TIMELINE", str(tmp_path))
    fast = compiled(lambda x: torch.softmax(x * 2, -1).sort().values)
    x = torch.randn(4, 8)
    for _ in range(20):
        fast(x)
    (path,) = tmp_path.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["default stream"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["call"] for e in slices} == set(range(4, 20))  # the last sixteen
    assert [e["name"] for e in slices[:2]] == ["Mul+SoftmaxV2", "Sort"]


def test_timeline_of_a_graph_without_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_TIMELINE", str(tmp_path))
    compiler = torchair.get_compiler()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    call = compiler(torch.fx.GraphModule({}, graph), [given := torch.randn(3)])
    assert torch.equal(call(given)[0], given)


# ---- the order of steps


def _random_order(seed: int) -> tuple[list[int], list[set[int]]]:
    pick = random.Random(seed)
    count = pick.randint(2, 24)
    lane = [pick.choice([-1, 0, 0, 1, 1, 2, 3]) for _ in range(count)]
    lane[0] = max(lane[0], 0)
    real = [k for k in range(count) if lane[k] >= 0]
    needs = [
        {j for j in real if j < k and pick.random() < 0.15} if lane[k] >= 0 else set()
        for k in range(count)
    ]
    used = sorted({x for x in lane if x >= 0})
    return [used.index(x) if x >= 0 else -1 for x in lane], needs


def _reach(lane: list[int], edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs of steps of which the first surely precedes the second, the plain way."""
    last: dict[int, int] = {}
    all_edges = set(edges)
    for k, own in enumerate(lane):
        if own >= 0 and own in last:
            all_edges.add((last[own], k))
        last[own] = k
    before: list[set[int]] = [set() for _ in lane]
    for k in range(len(lane)):
        for a, b in all_edges:
            if b == k:
                before[k] |= before[a] | {a}
    return {(a, k) for k, found in enumerate(before) for a in found}


@pytest.mark.parametrize("seed", range(60))
def test_events_keep_the_order_and_none_is_superfluous(seed):
    lane, needs = _random_order(seed)
    order = LaneOrder(lane, needs)
    wanted = _reach(lane, {(a, k) for k, found in enumerate(needs) for a in found})
    events = {(a, k) for k, found in order.waits.items() for a in found}
    real = [k for k, own in enumerate(lane) if own >= 0]
    assert _reach(lane, events) == wanted
    assert {(a, b) for a, b in combinations(real, 2) if order.before(a, b)} == wanted
    for event in events:
        assert _reach(lane, events - {event}) != wanted


# ---- random graphs on random lanes


def _labelled(seed: int, dynamic: bool) -> Maker:
    """A random graph with random labels, and some waits."""
    pick = random.Random(seed)
    made = Maker(seed, nodes=pick.choice([10, 20, 40]), dynamic=dynamic)
    nodes = [n for n in made.graph.nodes if n.type not in ("Data", "Const", "NetOutput")]
    labels, now = ["", "a", "b", "c"][: pick.choice([2, 3, 4])], ""
    for node in nodes:
        now = pick.choice(labels) if pick.random() < 0.4 else now
        if now:
            node.attrs["_user_stream_label"] = attr.Str(now)
    for _ in range(pick.randint(0, 4) if len(nodes) > 1 else 0):
        i, j = sorted(pick.sample(range(len(nodes)), 2))
        nodes[j].after(nodes[i])
    return made


def _updates(made: Maker, seed: int) -> dict[int, int]:
    """Some results that replace an input of their dims."""
    pick = random.Random(seed)
    left = {n.outputs[0]: n.attr("index") for n in made.graph.data}
    found: dict[int, int] = {}
    for k, value in enumerate(made.graph.output.values()):
        fits = [x for x in left if (x.dtype, x.shape) == (value.dtype, value.shape)]
        if fits and pick.random() < 0.6:
            found[k] = left.pop(fits[0])
    return found


def _check_random(seed: int, native: bool, dynamic: bool) -> int:
    """Values of a labelled graph under delays against the same plan, one step after the other;
    returns how many events there were."""
    made = _labelled(seed, dynamic)
    session = TorchNpuGraph("random")
    state = GraphState(
        [InputSource((i,)) for i in range(len(made.graph.data))], _updates(made, seed)
    )
    session.load(made.graph, {"torchair.nativeCode": str(int(native))}, state=state)
    session.watch = Delays(seed, alone=seed % 2 == 0)
    events = 0
    for size in (lambda n: n, lambda n: n + 1) if dynamic else (lambda n: n,):
        inputs = [t.contiguous() for t in made.resized(size)]
        mine, theirs = ([t.clone() for t in inputs] for _ in range(2))
        got = session.run(mine)
        plan = session.last_plan()
        assert check_plan(plan) == []
        assert plan.schedule.waits == _waits_without_reuse(session)
        lanes = len(plan.schedule.lanes)
        events += len(plan.schedule.events)
        # Torch's kernels round differently on other numbers of threads.
        with torch.no_grad(), limit_threads(max(1, torch.get_num_threads() // lanes)):
            wanted = Program(plan).run(theirs)
        for g, w in zip([*got, *mine], [*wanted, *theirs], strict=True):
            assert torch.equal(g.double().nan_to_num(), w.double().nan_to_num())
    return events


def _waits_without_reuse(session: TorchNpuGraph) -> dict[int, list[int]]:
    """Events that a plan would need if no two buffers shared memory."""
    plan = session.last_plan()

    def where(allocation: Any) -> tuple[int, int, int]:
        return (allocation.slot, 0, 1) if allocation.kind == "arena" else range_of(allocation)

    order = order_of(
        plan.steps, lambda slot: plan.places[slot][0], where, session.current.compiler.lanes
    )
    return order.waits


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_random_graphs_on_random_lanes(native, monkeypatch):
    monkeypatch.setenv("TORCHAIR_POISON", "1")
    assert sum(_check_random(seed, native, dynamic=False) for seed in range(40)) > 50


def test_random_graphs_of_several_sizes():
    assert sum(_check_random(3 * seed, True, dynamic=True) for seed in range(12)) > 20


# ---- lanes meet


def two_branches(x, y):
    with scope.npu_stream_switch("left"):
        a = torch.softmax(x @ y, -1)
        a = a.sort(-1).values * 2
    with scope.npu_stream_switch("right"):
        b = torch.tanh(y @ x)
        b = b.cumsum(0) - b.mean()
    return a + b, a.sum(), b


def test_a_thousand_repetitions_under_delays(sessions):
    sessions.watch = Delays(7, 5e-5)
    fast = compiled(two_branches)
    torch.manual_seed(0)
    for k in range(10):
        x, y = torch.randn(8, 8) + k, torch.randn(8, 8)
        first = fast(x, y)
        for got, wanted in zip(first, two_branches(x, y), strict=True):
            torch.testing.assert_close(got, wanted)
        for _ in range(100):
            for got, wanted in zip(fast(x, y), first, strict=True):
                assert torch.equal(got, wanted)
    assert sessions.plan.schedule.lanes == ["", "left", "right"]


def test_lanes_run_at_the_same_time(sessions):
    sessions.watch = Meeting("Sort", "Cumsum")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for got, wanted in zip(compiled(two_branches)(x, y), two_branches(x, y), strict=True):
        torch.testing.assert_close(got, wanted)
    assert not sessions.watch.barrier.broken


def test_updates_in_place_wait_for_readers_on_other_streams(sessions):
    def step(cache, new):
        with scope.npu_stream_switch("reader"):
            old = torch.exp(cache).cumsum(0)
        with scope.npu_stream_switch("writer"):
            cache.mul_(2).add_(new)
        with scope.npu_stream_switch("reader"):
            later = cache - 1
        return old, later

    sessions.watch = Delays(3)
    fast = compiled(step)
    for k in range(50):
        torch.manual_seed(k)
        cache, new = torch.randn(6, 5), torch.randn(6, 5)
        mine, theirs = cache.clone(), cache.clone()
        for got, wanted in zip(fast(mine, new), step(theirs, new), strict=True):
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(mine, theirs)
    assert any(r.kind == "tied" for r in sessions.plan.allocations)


@pytest.mark.parametrize("late", ["", "s"])
def test_what_torch_allocates_stays_as_long_as_any_lane_needs_it(late, sessions):
    def model(x):
        rolled = torch.roll(x, 1, 0)
        with scope.npu_stream_switch("s"):
            a = torch.sort(rolled).values
            b = torch.cumsum(rolled, 1)
        c = torch.cumsum(rolled, 0)
        return a, b, c, torch.sort(rolled, descending=True).values

    sessions.watch = Late(late)
    config = torchair.CompilerConfig()
    config.experimental_config.native_code = False
    x = torch.randn(256, 128)
    fast = compiled(model, config)
    for _ in range(2):
        for got, wanted in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted)
    assert any(r.kind == "torch" for r in sessions.plan.allocations)


def test_calls_from_several_threads():
    fast = compiled(two_branches)
    inputs = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
    expected = [fast(*pair) for pair in inputs]
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(100):
                for got, wanted in zip(fast(*inputs[k]), expected[k], strict=True):
                    assert torch.equal(got, wanted)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_inference_tensors_on_other_streams():
    def step(x, y):
        with scope.npu_stream_switch("s"):
            x.add_(1)
            z = torch.sort(y).values
        return z + x

    fast = compiled(step)
    with torch.inference_mode():
        mine, y = torch.ones(4), torch.tensor([3.0, 1.0, 2.0, 0.0])
        theirs = mine.clone()
        for _ in range(2):
            torch.testing.assert_close(fast(mine, y), step(theirs, y))
        torch.testing.assert_close(mine, theirs)


def test_sizes_that_vary(sessions):
    sessions.watch = Delays(1)
    fast = compiled(two_branches, dynamic=True)
    for n in (3, 8, 5, 8, 17):
        x, y = torch.randn(n, n), torch.randn(n, n)
        for got, wanted in zip(fast(x, y), two_branches(x, y), strict=True):
            torch.testing.assert_close(got, wanted)
        assert len(sessions.plan.schedule.lanes) == 3
    assert len(sessions.made) == 1


def test_sizes_that_only_the_data_tell():
    def pick(x):
        with scope.npu_stream_switch("s"):
            found = torch.nonzero(x > 0).sum(0)
        return found, torch.exp(x).cumsum(0)

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        fast = compiled(pick, dynamic=True)
        for n in (5, 9):
            x = torch.randn(n)
            for got, wanted in zip(fast(x), pick(x), strict=True):
                torch.testing.assert_close(got, wanted)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


def test_random_operators_draw_in_one_order():
    def noise(x):
        a = torch.poisson(x)
        with scope.npu_stream_switch("s"):
            b = torch.poisson(x + 1)
        return a, b, torch.poisson(x + 2)

    fast = compiled(noise)
    x = torch.rand(200) * 5
    draws = []
    for _ in range(10):
        torch.manual_seed(5)
        draws.append(torch.cat(fast(x)))
    assert all(torch.equal(d, draws[0]) for d in draws)


# ---- errors


def test_an_error_names_its_line_and_the_next_call_works(sessions):
    def look_up(table, index, y):
        with scope.npu_stream_switch("s"):
            found = torch.gather(table, 0, index).sort().values
        return found.sum(), y.cumsum(0)

    for native in (True, False):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.experimental_config.native_code = native
        fast = compiled(look_up, config)
        table, y = torch.randn(6), torch.randn(4)
        good, bad = torch.tensor([1, 5, 0]), torch.tensor([1, 6, 0])
        for index in (good, bad, good, bad, good):
            if index is good:
                for got, wanted in zip(
                    fast(table, index, y), look_up(table, index, y), strict=True
                ):
                    torch.testing.assert_close(got, wanted)
                continue
            with pytest.raises(GraphError, match="index") as caught:
                fast(table, index, y)
            assert "found = torch.gather(table, 0, index)" in str(caught.value)
        assert len(sessions.plan.schedule.lanes) == 2


def test_other_lanes_stop_after_an_error(sessions):
    """A lane that waits for one that failed does not wait for ever."""

    def chain(x, index):
        with scope.npu_stream_switch("s"):
            a = torch.gather(x, 0, index).sort().values
        b = a.cumsum(0)
        with scope.npu_stream_switch("t"):
            c = torch.sort(b).values
        with scope.npu_stream_switch("s"):
            d = c.cumsum(0)
        return d

    fast = compiled(chain)
    x = torch.randn(5)
    torch.testing.assert_close(fast(x, torch.tensor([4, 0])), chain(x, torch.tensor([4, 0])))
    for _ in range(3):
        with pytest.raises(GraphError):
            fast(x, torch.tensor([9, 0]))
    torch.testing.assert_close(fast(x, torch.tensor([3, 1])), chain(x, torch.tensor([3, 1])))


# ---- memory, fusion, options


def test_buffers_of_unordered_steps_are_apart(sessions):
    def wide(x):
        with scope.npu_stream_switch("a"):
            a = x.cumsum(0).sort(0).values.cumsum(1)
        b = x.cumsum(1).sort(1).values.cumsum(0)
        return a.sum() + b.sum()

    def same_without_labels(x):
        a = x.cumsum(0).sort(0).values.cumsum(1)
        b = x.cumsum(1).sort(1).values.cumsum(0)
        return a.sum() + b.sum()

    x = torch.randn(32, 32)
    compiled(wide)(x)
    plan = sessions.plan
    compiled(same_without_labels)(x)
    assert sessions.plan.schedule is None
    assert plan.arena_size > sessions.plan.arena_size
    assert check_plan(plan) == []


def test_single_stream(sessions):
    config = torchair.CompilerConfig()
    config.ge_config.enable_single_stream = True
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for got, wanted in zip(compiled(two_branches, config)(x, y), two_branches(x, y), strict=True):
        torch.testing.assert_close(got, wanted)
    assert sessions.plan.schedule is None
    assert sessions.made[0].summary().streams == 1
    labels = {n.attr("_user_stream_label", "") for n in sessions.made[0].graph.nodes}
    assert labels == {"", "left", "right"}  # the graph still says what the model says


def test_a_graph_without_labels_takes_the_direct_way(sessions):
    x = torch.randn(4, 8)
    compiled(lambda x: torch.softmax(x * 2, -1) + 1)(x)
    assert sessions.plan.schedule is None
    assert NativeProgram.suits(sessions.plan)


def test_nodes_of_two_streams_are_not_fused(sessions):
    def chain(x):
        y = torch.exp(x * 2)
        with scope.npu_stream_switch("s"):
            z = torch.tanh(y + 1)
        return z * 3

    x = torch.randn(6)
    torch.testing.assert_close(compiled(chain)(x), chain(x))
    types = [[n.type for n in s.also] for s in sessions.plan.steps]
    assert types == [["Mul", "Exp"], ["Add", "Tanh"], ["Mul"]]


def test_units_end_where_streams_meet(sessions):
    """Work that waits for nothing is not fused with what does, nor what others wait for with what
    comes after it."""

    def model(x, y):
        with scope.npu_stream_switch("s"):
            b = torch.exp(y * 2)
        a = torch.tanh(x * 3)
        c = torch.sqrt(a + b)
        with scope.npu_stream_switch("s"):
            d = torch.sin(a - 1)
        return torch.abs(c) * 5, d

    args = torch.rand(6), torch.rand(6)
    for got, wanted in zip(compiled(model)(*args), model(*args), strict=True):
        torch.testing.assert_close(got, wanted)
    types = sorted([n.type for n in s.also] for s in sessions.plan.steps)
    assert types == [
        ["Add", "Sqrt", "Abs", "Mul"],
        ["Mul", "Exp"],
        ["Mul", "Tanh"],
        ["Sub", "Sin"],
    ]


def test_rules_do_not_join_streams(sessions):
    def linear(x, w, b):
        with scope.npu_stream_switch("s"):
            y = x @ w
        return y + b

    args = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    torch.testing.assert_close(compiled(linear)(*args), linear(*args))
    graph = sessions.made[0].graph
    labels = {n.type: n.attr("_user_stream_label", "") for n in graph.nodes}
    assert labels["MatMul"] == "s" and labels["Add"] == ""


@pytest.mark.parametrize("strategy", ["BFS", "DFS", "RDFS", "StableRDFS"])
def test_topology_decides_the_order_in_a_lane(strategy, sessions):
    def model(x):
        a, b = torch.exp(x), torch.sqrt(x)
        with scope.npu_stream_switch("s"):
            c = torch.sin(b)
        return c, torch.tanh(a), torch.cos(b)

    config = torchair.CompilerConfig()
    config.experimental_config.topology_sorting_strategy = strategy
    config.experimental_config.native_code = False
    sessions.watch = Names()
    x = torch.rand(9)
    for got, wanted in zip(compiled(model, config)(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted)
    order = [name for name, lane in sessions.watch.ran if not lane]
    expected = {
        "BFS": ["Exp", "Sqrt", "Tanh", "Cos"],
        "DFS": ["Exp", "Tanh", "Sqrt", "Cos"],
        "RDFS": ["Sqrt", "Exp", "Tanh", "Cos"],
        "StableRDFS": ["Exp", "Sqrt", "Tanh", "Cos"],
    }[strategy]
    assert order == expected
    assert [name for name, lane in sessions.watch.ran if lane] == ["Sin"]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_communication_overlaps_with_computing(sessions):
    def model(x):
        total = collectives.all_reduce(x * 2, "sum", [0])
        return total + 1, torch.sort(x).values

    config = torchair.CompilerConfig()
    config.experimental_config.cc_parallel_enable = True
    sessions.watch = Meeting("HcomAllReduce", "Sort")
    x = torch.randn(5)
    for got, wanted in zip(compiled(model, config)(x), model(x), strict=True):
        torch.testing.assert_close(got, torch.as_tensor(wanted))
    assert sessions.plan.schedule.lanes == ["", COMMUNICATION]


@pytest.mark.usefixtures("process_group")
def test_communication_stays_in_line_by_default(sessions):
    fast = compiled(lambda x: collectives.all_reduce(x * 2, "sum", [0]) + 1)
    assert torch.equal(fast(torch.ones(3)), torch.full((3,), 3.0))
    assert sessions.plan.schedule is None


# ---- threads


def test_workers_are_kept_and_not_taken_over_by_a_child(monkeypatch):
    crew, ran = Workers(), []

    def run() -> None:
        done = threading.Lock()
        done.acquire()
        crew.give(lambda: ran.append(threading.get_ident()), done)
        assert done.acquire(timeout=20)

    run()
    run()
    assert ran[0] == ran[1]
    monkeypatch.setattr("torchair.engine.run.lanes.os.getpid", lambda: -1)
    run()
    assert ran[2] != ran[0]


def test_a_lane_takes_its_share_of_threads():
    total = torch.get_num_threads()
    with limit_threads(1):
        assert torch.get_num_threads() == 1
        with limit_threads(64):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == total


# ---- acceptance scenarios 14 to 16: what the graph says


def test_wait_for_a_tensor_orders_the_next_operator_of_its_stream(sessions):
    def model(x):
        add = x + 1
        with scope.npu_stream_switch("1"):
            ops.wait([add])
            a = torch.sqrt(x)
            b = torch.exp(a)
        return add, b

    x = torch.rand(4)
    for got, wanted in zip(compiled(model)(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted)
    graph = sessions.made[0].graph
    assert [c.name for c in graph.node("Sqrt").control] == ["Add"]
    assert not graph.node("Exp").control


def test_record_is_after_the_last_operator_of_its_stream(sessions):
    def model(x):
        with scope.npu_stream_switch("1"):
            a = torch.sqrt(x)
            mark = ops.record()
        b = torch.exp(x)
        c = torch.sin(b)
        ops.wait([mark])
        return a, torch.tanh(c)

    x = torch.rand(4)
    compiled(model)(x)
    graph = sessions.made[0].graph
    assert [c.name for c in graph.node("Tanh").control] == ["Sqrt"]


def test_waits_add_up_for_the_next_operator_of_their_stream(sessions):
    def model(x):
        a, b = torch.sqrt(x), torch.exp(x)
        with scope.npu_stream_switch("1"):
            ops.wait([a])
        c = torch.sin(x)
        with scope.npu_stream_switch("1"):
            ops.wait([b])
            d = torch.tanh(x)
        return a, b, c, d

    compiled(model)(torch.rand(4))
    graph = sessions.made[0].graph
    assert [c.name for c in graph.node("Tanh").control] == ["Sqrt", "Exp"]
    assert not graph.node("Sin").control


def test_wait_tensor_orders_later_uses(sessions):
    def model(x, y):
        first = torch.sort(x).values
        scope.npu_wait_tensor(y, first)
        return first, torch.cumsum(y, 0)

    sessions.watch = Names()
    x, y = torch.randn(4), torch.randn(4)
    got = compiled(model)(x, y)
    torch.testing.assert_close(got, (torch.sort(x).values, torch.cumsum(y, 0)))
    graph = sessions.made[0].graph
    assert [c.name for c in graph.node("Identity").control] == ["Sort"]
    assert [name for name, _ in sessions.watch.ran] == ["Sort", "Cumsum"]


def test_nested_scopes(sessions):
    def model(x):
        with scope.super_kernel("outer", "feed-sync-all=1"):
            with scope.npu_stream_switch("s", 3, False):
                a = torch.sqrt(x)
            with scope.super_kernel(None):
                b = torch.exp(x)
        with scope.op_never_timeout(True), scope.op_never_timeout(False):
            c = torch.sin(x)
        with scope.limit_core_num(4, 5):
            d = torch.tanh(x)
        return a, b, c, d

    x = torch.rand(4)
    for got, wanted in zip(compiled(model)(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted)
    graph = sessions.made[0].graph
    shown = {
        n.type: {k: a.value for k, a in n.attrs.items() if k.startswith("_")}
        for n in graph.nodes
        if n.type in ("Sqrt", "Exp", "Sin", "Tanh")
    }
    assert shown == {
        "Sqrt": {
            "_super_kernel_scope": "outer",
            "_super_kernel_options": "feed-sync-all=1",
            "_user_stream_label": "s",
            "_user_stream_priority": "3",
            "_enable_inner_parallel": False,
        },
        "Exp": {},
        "Sin": {"_op_exec_never_timeout": False},
        "Tanh": {"_op_aicore_num": "4", "_op_vectorcore_num": "5"},
    }


def test_time_limits_are_bools():
    with pytest.raises(TypeError):
        scope.op_never_timeout(1)
