"""The engine below torch.compile: memory plan, passes, planner, sessions on hand-built graphs."""

import random
import sys
import warnings

import pytest
import torch

import torchair.engine.session.plans as session_plans
from torchair import ge
from torchair.engine.optimize.passes import ENGINE_PASSES, GE_PASSES, GraphState
from torchair.engine.optimize.passes.ordering import choose_order
from torchair.engine.options import EngineOptions
from torchair.engine.plan.arena import Arena, Buffer, aligned, lower_bound, place, place_compactly
from torchair.engine.run.workspace import WEIGHT
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError, InputError
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.ge.signature import InputSource
from torchair.operators import infer, interpret

F, I64 = DataType.DT_FLOAT, DataType.DT_INT64


def data(index, shape, dtype=F, name=None):
    return Data(index=index, dtype=dtype, shape=list(shape), placement="CPU", node_name=name)


def session(graph, **options):
    s = TorchNpuGraph(graph.name)
    s.load(graph, options)
    s.compile()
    return s


# ---- memory ----


@pytest.mark.parametrize("place", [place, place_compactly])
def test_placement_never_overlaps_live_buffers(place):
    rng = random.Random(0)
    for _ in range(50):
        buffers = [
            Buffer(rng.randrange(1, 5000), first, first + rng.randrange(0, 6))
            for first in (rng.randrange(0, 40) for _ in range(60))
        ]
        total = place(buffers)
        assert lower_bound(buffers) <= total
        for i, a in enumerate(buffers):
            assert a.offset % 64 == 0 and a.offset + a.size <= total
            for b in buffers[:i]:
                alive = a.first <= b.last and b.first <= a.last
                apart = (
                    a.offset + aligned(a.size) <= b.offset or b.offset + aligned(b.size) <= a.offset
                )
                assert apart or not alive


def test_chain_of_elementwise_steps_runs_in_one_buffer():
    with Graph("chain", infer) as g:
        x = data(0, (64, 64))
        y = x
        for _ in range(6):
            y = ge.Tanh(y)
        NetOutput([y])
    s = session(g, **{"torchair.nativeCode": "0"})
    assert s.summary().arena_bytes == 64 * 64 * 4
    t = torch.randn(64, 64)
    expected = t
    for _ in range(6):
        expected = expected.tanh()
    torch.testing.assert_close(s.run([t])[0], expected)


def test_arena_reuses_memory_of_dead_intermediates():
    with Graph("net", infer) as g:
        x = data(0, (128, 128))
        y = x
        for _ in range(8):
            y = ge.MatMul(ge.Abs(y), x, None)
        NetOutput([y])
    summary = session(g).summary()
    assert summary.arena_bytes <= 3 * 128 * 128 * 4
    assert summary.arena_bytes >= summary.arena_floor > 0


def test_memory_efficiency_finds_smaller_arenas():
    rng = random.Random(1)
    plain = compact = floor = 0
    for _ in range(20):
        firsts = [rng.randrange(0, 40) for _ in range(60)]
        made = [Buffer(rng.randrange(1, 9999), f, f + rng.randrange(0, 20)) for f in firsts]
        floor += lower_bound(made)
        before, after = place(made), place_compactly(made)
        assert after <= before
        plain, compact = plain + before, compact + after
    assert compact - floor < (plain - floor) / 2
    assert EngineOptions.of({"ge.featureBaseRefreshable": "1"}, {}).compact
    sizes = [40, 90, 30, 70, 60, 20, 80, 50, 60, 30]
    spans = [Buffer(64 * n, 2 * k % 7, 2 * k % 7 + k % 4) for k, n in enumerate(sizes)]
    least = Arena(spans, compact=True).place([b.size for b in spans]).total
    assert least == place_compactly(spans) <= Arena(spans).place([b.size for b in spans]).total


def network():
    with Graph("net", infer) as g:
        x = data(0, (32, 32))
        weight = ge.Const(torch.arange(1024.0).reshape(32, 32) / 1024)
        y = x
        for _ in range(3):
            y = ge.MatMul(ge.Tanh(ge.Add(y, weight)), weight, None)
        NetOutput([y])
    weight = torch.arange(1024.0).reshape(32, 32) / 1024

    def expected(t):
        for _ in range(3):
            t = (t + weight).tanh() @ weight
        return t

    return g, expected


@pytest.mark.parametrize("native", ["0", "1"])
def test_memory_of_the_user_is_used_and_exchanged(native):
    graph, expected = network()
    s = session(graph, **{"torchair.nativeCode": native})
    known = s.summary()  # before the first run
    assert known.static and known.feature_memory_base_refreshable
    assert known.const_memory_size >= 32 * 32 * 4 and known.feature_memory_size > 0
    blocks = [torch.zeros(known.feature_memory_size + 64, dtype=torch.uint8) for _ in range(2)]
    constants = torch.zeros(known.const_memory_size + 64, dtype=torch.uint8)
    s.set_graph_const_memory_base(constants)
    x = torch.randn(32, 32)
    for block in blocks:
        s.update_graph_feature_memory_base(block)
        torch.testing.assert_close(s.run([x])[0], expected(x))
        assert block.any()
        blocks[0].zero_()
    assert not blocks[0].any()  # the first is not written to any more
    assert constants.any()
    torch.testing.assert_close(s.run([x * 2])[0], expected(x * 2))
    result = s.run([x])[0]
    constants.zero_()  # they are read where they are
    assert not torch.equal(s.run([x])[0], result)


def test_memory_that_does_not_fit_is_refused():
    graph, _ = network()
    s = session(graph)
    size = s.summary().feature_memory_size
    with pytest.raises(InputError, match="too small") as error:
        s.update_graph_feature_memory_base(torch.zeros(8, dtype=torch.uint8))
    assert str(size) in str(error.value)
    with pytest.raises(InputError, match="another device"):
        s.set_graph_const_memory_base(torch.zeros(9999, device="meta"))
    with Graph("dynamic", infer) as g:
        NetOutput([ge.Tanh(data(0, (-1, 4)))])
    with pytest.raises(GraphError, match="fixed sizes"):
        session(g).update_graph_feature_memory_base(torch.zeros(99999))


# ---- what really runs ----


def test_engine_removes_work_the_translation_leaves():
    with Graph("g", infer) as g:
        x, w, b = data(0, (4, 8)), data(1, (5, 8)), data(2, (5,))
        y = ge.MatMulV2(x, ge.Transpose(w, [1, 0]), None, None)
        y = ge.Add(ge.Mul(y, ge.Const(1, dtype=F)), b)
        NetOutput([ge.Cast(ge.Identity(y), dst_type=F)])
    s = session(g)
    kinds = [n.type for n in s.graph.nodes if n.type not in ("Data", "Const", "NetOutput")]
    assert kinds == ["MatMulV2"]
    product = next(n for n in s.graph.nodes if n.type == "MatMulV2")
    assert product.attr("transpose_x2") and product.inputs["bias"] is not None
    tx, tw, tb = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
    torch.testing.assert_close(s.run([tx, tw, tb])[0], torch.addmm(tb, tx, tw.t()))


def test_switches_turn_rules_and_passes_off():
    options = EngineOptions.of(
        {"ge.topoSortingMode": "0"},
        {"ge.optimizationSwitch": "MultiplyByOne:off;merge_common:off", "ge.oo.level": "O1"},
    )
    assert options.switches == {"MultiplyByOne": False, "merge_common": False}
    assert options.topology == "BFS" and options.level == "O1"
    names = [p.name for p in ENGINE_PASSES if p.enabled(options)]
    assert "apply_rules" not in names and "choose_order" in names


def test_constants_fold_and_equal_work_merges():
    with Graph("g", infer) as g:
        x = data(0, (3,))
        c = ge.Add(ge.Const([1.0, 2.0, 3.0], dtype=F), ge.Const([1.0, 1.0, 1.0], dtype=F))
        NetOutput([ge.Mul(ge.Abs(x), c), ge.Mul(ge.Abs(x), c)])
    s = session(g)
    kinds = [n.type for n in s.graph.nodes]
    assert kinds.count("Abs") == kinds.count("Mul") == 1 and "Add" not in kinds
    t = torch.randn(3)
    a, b = s.run([t])
    torch.testing.assert_close(a, t.abs() * torch.tensor([2.0, 3.0, 4.0]))
    torch.testing.assert_close(a, b)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("strategy", ["BFS", "DFS", "RDFS", "StableRDFS"])
def test_every_topology_strategy_gives_a_valid_order(strategy):
    with Graph("g", infer) as g:
        x = data(0, (4, 4))
        a, b = ge.Abs(x), ge.Neg(x)
        c = ge.Add(ge.Abs(a), ge.Neg(b))
        b.node.after(a.node)
        NetOutput([c])
    choose_order(g, GraphState(topology=strategy))
    place_of = {n: i for i, n in enumerate(g.nodes)}
    for n in g.nodes:
        assert all(place_of[v.node] < place_of[n] for v in n.values())
        assert all(place_of[c] < place_of[n] for c in n.control)
    t = torch.randn(4, 4)
    torch.testing.assert_close(interpret(g, [t])[0], t.abs().abs() + t)


# ---- sessions ----


def test_dynamic_session_plans_per_size_and_keeps_a_few(monkeypatch):
    with Graph("g", infer) as g:
        x = data(0, (-1, 4))
        n = ge.Gather(ge.Shape(x, dtype=I64), 0)
        flat = ge.Reshape(x, ge.Pack([ge.Mul(n, 2), 2], N=2, axis=0))
        NetOutput([ge.Add(flat, ge.Cast(n, dst_type=F))])
    s = session(g)
    assert not s.summary().static and s.summary().plans == 0
    for size in (3, 5, 3, 1):
        t = torch.randn(size, 4)
        torch.testing.assert_close(s.run([t])[0], t.reshape(-1, 2) + size)
    assert s.summary().plans == 3
    monkeypatch.setattr(session_plans, "_PLAN_BYTES", 20 * WEIGHT)
    for size in range(1, 40):
        s.run([torch.randn(size, 4)])
    assert s.summary().plans == 20


def test_host_scalar_that_steers_a_shape_is_part_of_the_key():
    with Graph("g", infer) as g:
        n = data(0, (), I64, "n")
        x = data(1, (6, 4))
        NetOutput([ge.Reshape(x, ge.Pack([n, -1], N=2, axis=0))])
    s = session(g)
    t = torch.randn(6, 4)
    for k in (2, 3, 12):
        assert s.run([torch.tensor(k), t])[0].shape == (k, 24 // k)


def test_host_scalar_used_as_data_needs_no_new_plan():
    with Graph("g", infer) as g:
        n = data(0, (), I64, "n")
        x = data(1, (6, 4))
        NetOutput([ge.Mul(x, ge.Cast(n, dst_type=F))])
    s = session(g)
    t = torch.randn(6, 4)
    for k in (2, 3, 12):
        torch.testing.assert_close(s.run([torch.tensor(k), t])[0], t * k)
    assert s.summary().plans == 1


def test_wrong_inputs_are_named():
    with Graph("g", infer) as g:
        NetOutput([ge.Abs(data(0, (2, 3), name="x"))])
    s = session(g)
    good = torch.randn(2, 3)
    for bad, word in [
        ([good, good], "number"),
        ([good.double()], "float64"),
        ([torch.empty(2, 3, device="meta")], "meta"),
        ([None], "element 0 is None"),
    ]:
        with pytest.raises(InputError, match=word):
            s.run(bad)
    torch.testing.assert_close(s.run([good])[0], good.abs())


def test_wrong_dims_are_named():
    with Graph("g", infer) as g:
        NetOutput([ge.Abs(data(0, (-1, 3), name="x"))])
    with pytest.raises(InputError, match="x"):
        session(g).run([torch.randn(2, 4)])


def test_a_kernel_that_fails_names_its_node():
    with Graph("g") as g:
        x = data(0, (-1, 3), name="x")
        y = ge.MatMul(x, x, None, node_name="product")
        y.learn(x.fact)
        NetOutput([y])
    with pytest.raises(GraphError, match="product"):
        session(g).run([torch.randn(2, 3)])


def test_graph_without_output_is_refused():
    with Graph("g", infer) as g:
        data(0, (2,))
    with pytest.raises(GraphError, match="NetOutput"):
        TorchNpuGraph("g").load(g)


def test_results_are_put_into_tensors_of_the_caller():
    with Graph("g", infer) as g:
        x = data(0, (4,))
        NetOutput([ge.Abs(x), ge.Neg(x)])
    own, x = torch.empty(4), torch.randn(4)
    first, second = session(g).run([x], [own])
    assert first is own
    torch.testing.assert_close([own, second], [x.abs(), -x])


def test_a_session_without_graph_says_so():
    with pytest.raises(GraphError, match="no graph is loaded"):
        TorchNpuGraph("g").run([])


def test_assign_to_input_from_a_bare_graph():
    with Graph("g", infer) as g:
        x, y = data(0, (4,)), data(1, (4,))
        total = ge.Add(x, y)
        ge.Assign(x, total)
        NetOutput([ge.Mul(x, ge.Const(2.0, dtype=F))])
    s = session(g)
    a, b = torch.randn(4), torch.randn(4)
    old = a.clone()
    out = s.run([a, b])[0]
    torch.testing.assert_close(out, old * 2)
    torch.testing.assert_close(a, old + b)


def test_update_in_place_needs_no_copy_when_nobody_reads_the_old_value():
    with Graph("g", infer) as g:
        x, y = data(0, (4,)), data(1, (4,))
        total = ge.Add(x, y)
        ge.Assign(x, total)
        NetOutput([ge.Neg(total)])
    s = session(g)
    a, b = torch.randn(4), torch.randn(4)
    expected = a + b
    out = s.run([a, b])[0]
    assert s.last_plan().write_backs == []
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(out, -expected)


def test_sym_pack_becomes_one_input_and_dead_inputs_go():
    with Graph("g", infer) as g:
        a, b, dead = data(0, (), I64), data(1, (), I64), data(2, (3,))
        x = data(3, (6, 4))
        shape = ge.Pack([a, b], N=2, axis=0)
        again = ge.Pack([a, b], N=2, axis=0)
        NetOutput([ge.Reshape(x, shape), ge.Reshape(ge.Abs(x), again)])
    state = GraphState(
        [
            InputSource((0,), "scalar", I64),
            InputSource((1,), "scalar", I64),
            InputSource((2,)),
            InputSource((3,)),
        ]
    )
    for step in GE_PASSES:
        step.fn(g, state)
    assert [s.kind for s in state.inputs] == ["tensor", "packed"]
    assert state.inputs[1].args == (0, 1)
    assert dead.node.name not in g
    s = TorchNpuGraph("g")
    s.load(g, state=state)
    t = torch.randn(6, 4)
    assert [o.shape for o in s.run([t, torch.tensor([8, 3])])] == [(8, 3), (8, 3)]


def test_a_late_view_of_planned_memory_is_kept_safe():
    """`n` comes from data, so the reshape is made at run time, when its source may be reused."""
    with Graph("g", infer) as g:
        x = data(0, (6, 4))
        count = data(1, (5,), I64)
        n = ge.Cast(ge.ReduceSum(count, [0], keep_dims=False), dst_type=I64)
        early = ge.Reshape(ge.Abs(x), ge.Pack([n, -1], N=2, axis=0))
        other = ge.MatMul(ge.Exp(x), x, None, transpose_x1=True)
        NetOutput([ge.MatMul(early, ge.Neg(early), None, transpose_x1=True), other])
    s = session(g)
    t, c = torch.randn(6, 4), torch.tensor([1, 0, 1, 0, 1])
    first, second = s.run([t, c])
    early_value = t.abs().reshape(3, -1)
    torch.testing.assert_close(first, early_value.t() @ -early_value)
    torch.testing.assert_close(second, t.exp().t() @ t)


def test_expanded_strides_are_never_written_to():
    from torchair.engine.plan.planner import OutputLayout

    with Graph("g", infer) as g:
        x = data(0, (3, 1))
        NetOutput([ge.Tile(x, [1, 4]), ge.BroadcastTo(ge.Abs(x), [3, 4])])
    s = TorchNpuGraph("g")
    s.load(g, layouts=[OutputLayout((3, 4), (1, 0), 0), OutputLayout((3, 4), (1, 0), 1)])
    t = torch.randn(3, 1)
    first, second = s.run([t])
    torch.testing.assert_close(first, t.repeat(1, 4))
    torch.testing.assert_close(second, t.abs().expand(3, 4))


def test_unfed_inputs_reach_kernels_that_take_any_number():
    """InplaceIndexAdd has an optional scale and a kernel over `*args`: None must not be lost."""
    with Graph("g", infer) as g:
        x, i, u = data(0, (5, 3)), data(1, (2,), DataType.DT_INT32), data(2, (2, 3))
        NetOutput([ge.InplaceIndexAdd(x, i, u, None, axis=0)])
    s = session(g)
    t, index, update = torch.randn(5, 3), torch.tensor([1, 4], dtype=torch.int32), torch.randn(2, 3)
    torch.testing.assert_close(s.run([t, index, update])[0], t.index_add(0, index, update))


# ---- long graphs ----


def test_a_chain_of_5000_nodes_compiles_without_recursion():
    """Exact operators only, so that the result can be compared bit by bit. Five times as many nodes
    as Python allows calls."""
    rounds = 300
    with Graph("long", infer) as g:
        x, low, high = data(0, (8, 8)), data(1, (8, 8)), data(2, (8, 8))
        h = x
        for _ in range(rounds):
            y = ge.Transpose(ge.Mul(h, -1.0), [1, 0])
            pairs = ge.Mul(ge.Reshape(ge.TensorMove(y), [32, 2]), 2.0)
            h = ge.Add(ge.Mul(ge.Neg(y), ge.Mul(y, low)), ge.Reshape(pairs, [8, 8]))
            h = ge.Minimum(ge.Maximum(h, low), high)
        NetOutput([h])
    assert len(g) > 5 * sys.getrecursionlimit()
    values = [torch.randint(-9, 9, (8, 8)).float() for _ in range(3)]
    expected = values[0]
    for _ in range(rounds):
        y = -expected.t()
        expected = -y * (y * values[1]) + 2 * y
        expected = expected.maximum(values[1]).minimum(values[2])
    torch.testing.assert_close(session(g).run(values)[0], expected, rtol=0, atol=0)


def test_a_unit_of_many_reductions_is_lowered_from_a_deep_stack():
    def from_depth(frames):
        return from_depth(frames - 1) if frames else session(g).run([t])[0]

    with Graph("rows", infer) as g:
        y = data(0, (8, 8))
        for _ in range(40):
            y = ge.SoftmaxV2(y, axes=[-1])
        NetOutput([y])
    t = torch.randn(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(from_depth(700).sum(-1), torch.ones(8))


# ---- dims that only a run knows ----


UNKNOWN_RANK = {
    "rms norm": lambda x: ge.Mul(
        x, ge.Rsqrt(ge.Add(ge.ReduceMean(ge.Mul(x, x), [-1], keep_dims=True), ge.Const(0.1)))
    ),
    "layer norm": lambda x: ge.RealDiv(
        ge.Sub(x, ge.ReduceMean(x, [-1], keep_dims=True)),
        ge.Sqrt(ge.Add(ge.ReduceMean(ge.Square(x), [-1], keep_dims=True), ge.Const(0.1))),
    ),
    "attention": lambda x: ge.BatchMatMul(
        ge.SoftmaxV2(ge.BatchMatMul(x, x, adj_x2=True), axes=[-1]), x
    ),
}


@pytest.mark.parametrize("name", UNKNOWN_RANK)
def test_patterns_leave_values_of_unknown_rank_alone(name):
    with Graph("g", infer) as g:
        x = Data(index=0, dtype=F)
        NetOutput([ge.Add(ge.Mul(UNKNOWN_RANK[name](x), ge.Const(2.0)), ge.Const(1.0))])
    given = torch.randn(2, 3, 3)
    (wanted,) = interpret(g, [given])
    (got,) = session(g).run([given])
    torch.testing.assert_close(got, wanted)
