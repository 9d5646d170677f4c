"""Operators of other libraries may do anything: no pass leaves them out, computes them while
compiling, merges equal calls, or changes the order of two. `aot_eager` says what must happen."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import torchair
from tape_tools import Captured
from torchair import ge
from torchair.capture.rehearsal import host_nodes
from torchair.convert.generic import torch_call
from torchair.engine.optimize.passes import (
    GraphState,
    fold_constants,
    merge_common,
    remove_dead_code,
)
from torchair.engine.optimize.passes.ordering import (
    choose_order,
    explicit_order_for_side_effect_nodes,
)
from torchair.fx.passes.builtin import eliminate_dead_code
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.labels import STREAM_LABEL
from torchair.operators import infer
from torchair.operators.purity import draws, is_foreign, is_pure
from torchair.ops import purity

F = DataType.DT_FLOAT
SEEN: list[str] = []
EFFECTS = torch.library.Library("effects_test", "DEF")


def _define(schema, kernel, fake):
    EFFECTS.define(schema)
    name = schema.partition("(")[0]

    def run(*args):
        SEEN.append(f"{name} {args[-1]}" if isinstance(args[-1], int) else name)
        return kernel(*args)

    EFFECTS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"effects_test::{name}", fake, lib=EFFECTS)


def _none(x, n):
    return x.new_empty(0)


def _later(x, _):
    return x + len(SEEN)


def _like(x, _):
    return x.clone()


_define("empty(Tensor x, int n) -> Tensor", _none, _none)
_define("nothing(Tensor x, int n) -> ()", lambda x, n: None, lambda x, n: None)
_define("value(Tensor x, int n) -> Tensor", _later, _like)
_define("read(Tensor x, Tensor after) -> Tensor", _later, _like)
_define("made(int n) -> Tensor", lambda n: torch.ones(2) * len(SEEN), lambda n: torch.empty(2))
ops = torch.ops.effects_test
torch.fx.node.has_side_effect(ops.nothing.default)

PROGRAMS = {
    "empty result that is read": lambda x: ops.read(x * 2, ops.empty(x + 1, 1)),
    "empty result that is returned": lambda x: (ops.empty(x, 1), x + 1),
    "no result": lambda x: (ops.nothing(x, 1), ops.nothing(x * 2, 2), x + 1)[2],
    "equal calls": lambda x: ops.value(x, 1) + ops.value(x, 1),
    "constant arguments": lambda x: x + ops.made(1) + ops.made(1),
    "order against data": lambda x: in_order(ops.value(x.exp().sum(), 1), x),
    "order of kinds": lambda x: (ops.value(x.exp(), 1), ops.empty(x, 2), ops.value(x, 3))[::-1],
    "draws": lambda x: (ops.value(torch.rand(2) + x, 1), torch.rand(2))[::-1],
    "draws that only give a shape": lambda x: (ops.value(x, 1), torch.rand_like(torch.rand(2) + x)),
}


def in_order(first, x):
    """The first call waits for more than the others."""
    ops.nothing(x, 2)
    second = ops.value(x, 3)
    return second, first


def calls(program, backend):
    torch._dynamo.reset()
    run = torch.compile(program, backend=backend, dynamic=False)
    found = []
    for seed in range(3):
        SEEN.clear()
        torch.manual_seed(seed)
        with torch.no_grad():
            results = run(torch.ones(2))
        found.append((list(SEEN), [torch.as_tensor(r).tolist() for r in results]))
    return found


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_call_runs_once_and_in_order(program):
    expected = calls(program, "aot_eager")
    assert expected[0][0]
    for mode in ("max-autotune", "npugraph_ex"):
        config = torchair.CompilerConfig()
        config.mode = mode
        assert calls(program, torchair.get_npu_backend(compiler_config=config)) == expected, mode


def test_a_foreign_operator_is_seen_in_deployed_functions():
    expected = calls(PROGRAMS["empty result that is read"], "aot_eager")
    run = torchair.compile(PROGRAMS["empty result that is read"], (torch.ones(2),))
    for seen, results in expected:
        SEEN.clear()
        with torch.no_grad():
            got = run(torch.ones(2)).tolist()
        assert (got, SEEN) == (results, seen)


# ---- the passes, one by one


@pytest.fixture
def graph():
    with Graph("effects", infer) as made:
        yield made


def value(x, number):
    made = torch_call(ops.value.default, (x, number), {}, 1, {}).outputs[0]
    made.learn(ge.graph.Fact(F, (2,)))
    return made


def kinds(graph):
    return [n.attr("target", n.type) for n in graph.nodes]


def test_dead_code_stays(graph):
    x = Data(index=0, dtype=F, shape=[2], placement="CPU")
    value(x, 1)
    ge.Exp(x)
    torch_call(torch.ops.aten.cumsum.default, (x, 0), {}, 1, {})
    NetOutput([x])
    remove_dead_code(graph, GraphState())
    assert kinds(graph) == ["Data", "effects_test::value", "NetOutput"]


def test_constants_are_not_folded(graph):
    SEEN.clear()
    NetOutput([value(ge.Const(torch.ones(2)), 1), ge.Exp(ge.Const(torch.ones(2)))])
    fold_constants(graph, GraphState())
    assert kinds(graph).count("effects_test::value") == 1 and "Exp" not in kinds(graph)
    assert SEEN == []


def test_equal_calls_are_not_merged(graph):
    x = Data(index=0, dtype=F, shape=[2], placement="CPU")
    NetOutput([value(x, 1), value(x, 1), ge.Exp(x), ge.Exp(x)])
    merge_common(graph, GraphState())
    assert (kinds(graph).count("effects_test::value"), kinds(graph).count("Exp")) == (2, 1)


@pytest.mark.parametrize("topology", ["DFS", "BFS", "RDFS", "StableRDFS"])
def test_no_topology_changes_the_order(graph, topology):
    x = Data(index=0, dtype=F, shape=[2], placement="CPU")
    slow = value(ge.Exp(ge.Exp(ge.Exp(x))), 1)
    NetOutput([value(x, 2), ge.Exp(value(x, 3)), slow])
    explicit_order_for_side_effect_nodes(graph, GraphState())
    choose_order(graph, GraphState(topology=topology))
    numbers = [n.attr("arguments") for n in graph.nodes if is_foreign(n)]
    assert ["1]" in numbers[0], "2]" in numbers[1], "3]" in numbers[2]] == [True] * 3


def test_streams_are_not_ordered_against_each_other(graph):
    x = Data(index=0, dtype=F, shape=[2], placement="CPU")
    calls = [value(x, n).node for n in range(4)]
    for node in calls[1::2]:
        node.attrs[STREAM_LABEL] = ge.attr.Str("second")
    NetOutput([c.outputs[0] for c in calls])
    explicit_order_for_side_effect_nodes(graph, GraphState())
    assert [list(c.control) for c in calls] == [[], [], [calls[0]], [calls[1]]]


def fx_graph(*targets):
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.empty(2)
    for target in targets:
        made.call_function(target, (x, 1) if target is not ops.made.default else (1,))
    made.output((x,))
    return fx.GraphModule({}, made)


def test_dead_code_of_fx_graphs_stays():
    gm = fx_graph(ops.value.default, ops.empty.default, torch.ops.aten.add.Scalar)
    eliminate_dead_code(gm)
    left = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert left == [ops.value.default, ops.empty.default]


def test_recordings_know_no_value_of_a_foreign_operator():
    gm = fx_graph(ops.made.default)
    (call,) = gm.graph.find_nodes(op="call_function", target=ops.made.default)
    call.meta["val"] = torch.empty(2)
    assert list(host_nodes(gm.graph)) == []


def test_recordings_hold_calls_with_empty_results():
    def function(x):
        ops.empty(x, 1)
        return (ops.read(x, ops.empty(x, 2)),)

    run = Captured(function, (torch.ones(2),))
    for _ in range(2):
        SEEN.clear()
        run(torch.ones(2))
        assert SEEN == ["empty 1", "empty 2", "read"]


OPERATORS = {
    torch.ops.aten.add.Tensor: True,
    torch.ops.prims.convert_element_type.default: True,
    torch.ops.aten.view.default: True,
    torch.ops.aten.add_.Tensor: False,
    torch.ops.aten.bernoulli.default: False,
    torch.ops.aten._assert_async.msg: False,
    torch.ops.effects_test.value.default: False,
    torch.ops.higher_order.cond: False,
}


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_which_operators_are_pure(op):
    assert purity.is_pure(op) is OPERATORS[op]


def test_which_nodes_are_pure(graph):
    x = Data(index=0, dtype=F, shape=[2], placement="CPU")
    known = {ge.Exp(x).node: True, value(x, 1).node: False}
    known[torch_call(torch.ops.aten.cumsum.default, (x, 0), {}, 1, {})] = True
    known[torch_call(torch.ops.aten.bernoulli.default, (x,), {}, 1, {})] = False
    assert {n: is_pure(n) for n in known} == known


# ---- effects that torch orders by tokens

CHECKED = {
    "cholesky": (torch.linalg.cholesky, -torch.eye(3)),
    "inverse": (torch.linalg.inv, torch.zeros(3, 3)),
    "solve": (lambda a: torch.linalg.solve(a, torch.ones(3)), torch.zeros(3, 3)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_torch_run(name):
    function, wrong = CHECKED[name]
    torch._dynamo.reset()
    run = torch.compile(function, backend="torchair")
    good = torch.eye(3) * 2
    torch.testing.assert_close(run(good), function(good))
    with pytest.raises(torch.linalg.LinAlgError):
        run(wrong)


class OwnError(Exception):
    """An error that only its library knows."""


def test_errors_of_foreign_operators_keep_their_class():
    def refuse(x, n):
        raise OwnError("not today")

    _define("refuse(Tensor x, int n) -> Tensor", refuse, _like)
    torch._dynamo.reset()
    with pytest.raises(OwnError, match="not today"):
        torch.compile(lambda x: ops.refuse(x, 1), backend="torchair")(torch.ones(2))


ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention


@pytest.mark.parametrize(
    ("op", "args", "draw"),
    [
        (torch.ops.aten.bernoulli.default, ("x",), True),
        (torch.ops.aten.cumsum.default, ("x", 0), False),
        (ATTENTION.default, ("x", "x", "x", None, True), False),
        (ATTENTION.default, ("x", "x", "x", None, True, 0.0), False),
        (ATTENTION.default, ("x", "x", "x", None, True, 0.1), True),
        (ATTENTION.default, ("x", "x", "x", None, True, "rate"), True),
        (
            torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
            (*["x"] * 4, None, *["x"] * 4, 0.1, [True, True, True, False]),
            False,
        ),
    ],
)
def test_which_nodes_draw(graph, op, args, draw):
    """Attention that draws nothing may be replayed at other addresses; its gradient is given the
    state that it drew with."""
    x = Data(index=0, dtype=F, shape=[1, 2, 8, 8], placement="CPU")
    rate = Data(index=1, dtype=F, shape=[], placement="CPU")
    given = tuple({"x": x, "rate": rate}[a] if isinstance(a, str) else a for a in args)
    assert draws(torch_call(op, given, {}, 4, {})) is draw
