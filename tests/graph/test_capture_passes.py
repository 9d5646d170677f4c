"""The FX passes of the modes that capture: what each turns into what, and that nobody can tell."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from capture_programs import (
    apply,
    assert_same_effect,
    checked,
    expect,
    inputs,
    program,
    targets,
    text,
    traced,
    written,
    x34,
)
from torchair import CompilerConfig, ops
from torchair.configs.compiler_config import Settings
from torchair.fx.passes import CAPTURE_PASSES, allocation, streams
from torchair.fx.passes.values import cautious
from torchair.ops.streams import DEFAULT_STREAM
from torchair.scope import limit_core_num, npu_stream_switch

aten, air = torch.ops.aten, torch.ops.air
A, B = "reinplace_inplaceable_ops_pass", "reinplace_input_mutated_ops"


def test_names_order_and_switches():
    assert [p.name for p in CAPTURE_PASSES] == [
        "remove_cat_ops",
        "apply_event_closure_with_multi_stream",
        "apply_event_record",
        "eliminate_dead_code",
        "reinplace_inplaceable_ops_pass",
        "reinplace_input_mutated_ops",
        "decompose_auto_functionalized",
        "eliminate_self_copy",
        "replace_dynamic_workspace_ops",
        "replace_core_limit_nodes",
        "resolve_default_stream_markers",
    ]
    config = CompilerConfig()
    config.mode = "reduce-overhead"
    assert off(config) == {"eliminate_self_copy"}
    config.debug.aclgraph.remove_cat_ops = False
    config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass = True
    assert off(config) == {"eliminate_self_copy", "remove_cat_ops", A}
    config.mode = "npugraph_ex"
    config.debug.aclgraph.disable_reinplace_input_mutated_ops_pass = True
    assert off(config) == {"remove_cat_ops", A, B, "decompose_auto_functionalized"}


def off(config):
    settings = Settings.of(config)
    return {p.name for p in CAPTURE_PASSES if not p.enabled(settings)}


# ---- remove_cat_ops


def test_inputs_of_cat_are_computed_in_its_result():
    gm = checked(
        lambda x, y: torch.cat([x.exp(), y.sin()]) + 1, x34(), x34(), passes=["remove_cat_ops"]
    )
    expect(
        gm,
        """
        empty_memory_format = empty.memory_format([6, 4], dtype=torch.float32, device=cpu, pin_memory=False)
        slice_tensor = slice.Tensor(empty_memory_format, 0, 0, 3)
        exp_out = exp.out(x_1, out=slice_tensor)
        slice_tensor_1 = slice.Tensor(empty_memory_format, 0, 3, 6)
        sin_out = sin.out(y_1, out=slice_tensor_1)
        add = add.Tensor(empty_memory_format, 1)
        return add
        """,  # noqa: E501
    )


CATS = {
    "exp/exp": lambda x, y: torch.cat([x.exp(), y.exp()]),
    "exp/sin/update": lambda x, y: torch.cat([x.exp(), y.sin(), x.clone().add_(1)]),
    "sum/mean": lambda x, y: torch.cat([x.sum(0), y.mean(0)]),
    "views of an input": lambda x, y: (lambda e: torch.cat([e, y.sin()]).sum() + e[1:].t().sum())(
        x.exp()
    ),
    "negative dim": lambda x, y: torch.cat([x.exp(), y.sin()], -2),
}


@pytest.mark.parametrize("name", CATS)
def test_cats_that_go(name):
    gm = checked(CATS[name], x34(), x34(), passes=["remove_cat_ops"])
    assert "aten.cat.default" not in targets(gm)


def _returns_input_of_cat(x, y):
    part = x.exp()
    return torch.cat([part, y.sin()]), part


def _cat_is_updated(x, y):
    both = torch.cat([x.exp(), y.sin()])
    return aten.mul_.Tensor(both, 2)


KEPT_CATS = {
    "other dim": lambda x, y: torch.cat([x.exp(), y.sin()], 1),
    "views": lambda x, y: torch.cat([x.view(12), y.view(12)]),
    "arguments": lambda x, y: torch.cat([x, y]),
    "twice the same": lambda x, y: (lambda e: torch.cat([e, e]))(x.exp()),
    "several cats": lambda x, y: (lambda e: (torch.cat([e, y]), torch.cat([e, x.sin()])))(x.exp()),
    "other type": lambda x, y: torch.cat([x.exp(), y.sin().double()]),
    "other strides": lambda x, y: torch.cat([x.t().exp(), y.t().sin()]),
    "returned": _returns_input_of_cat,
    "random": lambda x, y: torch.cat([torch.bernoulli(x.sigmoid()), y.sin()]).shape[0] + x,
    "no out form": lambda x, y: torch.cat([x.exp(), torch.ops.aten._to_copy(y).view(3, 4)]),
    "seen as integers": lambda x, y: (
        lambda e: torch.cat([e, y.sin()]).sum() + e.view(torch.int32).sum()
    )(x.exp()),
}


@pytest.mark.parametrize("name", KEPT_CATS)
def test_cats_that_stay(name):
    torch.manual_seed(0)
    gm = traced(KEPT_CATS[name], x34(), x34())
    before = text(gm)
    apply(gm, "remove_cat_ops")
    if name == "no out form":
        assert "aten.cat.default" in targets(gm)
    else:
        assert text(gm) == before


def test_a_cat_that_is_written_to_stays():
    gm = make_fx(_cat_is_updated, tracing_mode="fake")(x34(), x34())
    apply(gm, "remove_cat_ops")
    assert "aten.cat.default" in targets(gm)


def test_cat_of_dynamic_sizes():
    def fn(x, y):
        return torch.cat([x.exp(), y.sin(), x.neg()]) * 2

    gm = traced(fn, torch.randn(5, 4), torch.randn(7, 4), mode="symbolic")
    apply(gm, "remove_cat_ops")
    assert "aten.cat.default" not in targets(gm)
    assert "aten.sym_size.int" in targets(gm)
    for sizes in ((5, 7), (3, 2), (9, 9)):
        args = [torch.randn(n, 4) for n in sizes]
        torch.testing.assert_close(gm(*args), fn(*args))


def test_cat_on_a_side_stream_is_allocated_there():
    def fn(x):
        a = x.exp()
        with npu_stream_switch("s"):
            return torch.cat([a, x.sin()]) + 1

    gm = checked(fn, x34(), passes=["remove_cat_ops"])
    label = "['_user_stream_label'], ['s']"
    assert f"scope_enter_default = scope_enter({label})" in text(gm).replace(".default(", "(")
    assert text(gm).index("scope_enter_default") < text(gm).index("empty_memory_format")
    assert text(gm).index("empty_memory_format") < text(gm).index("exp_out")


# ---- events


def _two_streams(x):
    a = x + 1
    with npu_stream_switch("1"):
        b = a * 2
        with npu_stream_switch("2"):
            c = x.exp()
    return b + c


def test_side_streams_start_and_end_with_the_graph():
    gm = traced(_two_streams, x34())
    apply(gm, "apply_event_closure_with_multi_stream", graph_name="graph_7")
    keys = "['_user_stream_label', '_user_stream_priority', '_enable_inner_parallel']"
    expect(
        gm,
        f"""
        tagged_event_record_default = tagged_event_record.default(graph_7_add, True)
        add = add.Tensor(x_1, 1)
        scope_enter = scope_enter.default({keys}, ['1', '0', 'True'], need_execute=True)
        tagged_event_wait_default_1 = tagged_event_wait.default(graph_7_add, True)
        mul = mul.Tensor(add, 2)
        scope_enter_1 = scope_enter.default({keys}, ['2', '0', 'True'], need_execute=True)
        tagged_event_wait_default = tagged_event_wait.default(graph_7_add, True)
        exp = exp.default(x_1)
        tagged_event_record_default_1 = tagged_event_record.default(graph_7_scope_exit, True)
        scope_exit = scope_exit.default(need_execute=True)
        tagged_event_record_default_2 = tagged_event_record.default(graph_7_scope_exit_1, True)
        scope_exit_1 = scope_exit.default(need_execute=True)
        add_1 = add.Tensor(mul, exp)
        tagged_event_wait_default_2 = tagged_event_wait.default(graph_7_scope_exit, True)
        tagged_event_wait_default_3 = tagged_event_wait.default(graph_7_scope_exit_1, True)
        return add_1
        """,
    )
    x = x34()
    torch.testing.assert_close(gm(x), _two_streams(x))


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_an_input_that_a_side_stream_updates_is_updated_in_place(mode):
    def fn(x, y):
        with npu_stream_switch("1"):
            x.add_(y)
            return x * 2

    config = CompilerConfig()
    config.mode = mode
    gm = checked(fn, x34(), x34(), config=config)
    assert "aten.add_.Tensor" in targets(gm) and "aten.copy_.default" not in targets(gm)


def test_without_streams_nothing_is_added():
    def fn(x):
        with limit_core_num(1, 2):
            return x + 1

    gm = traced(fn, x34())
    before = text(gm)
    apply(gm, "apply_event_closure_with_multi_stream", "apply_event_record")
    assert text(gm) == before


def test_waiting_for_a_tensor_is_waiting_for_a_mark():
    def fn(x):
        with npu_stream_switch("1"):
            a = x + 1
            mark = ops.record()
        ops.wait([a, x])
        b = x * 2
        ops.wait([mark, a])
        return a + b

    gm = checked(fn, x34(), passes=["apply_event_record"])
    lines = [line for line in text(gm).splitlines() if "scope" not in line]
    assert lines == [
        "record_default_1 = record.default()",
        "add = add.Tensor(x_1, 1)",
        "record_default = record.default()",
        "record = record.default()",
        "wait = wait.default([record_default, record_default_1])",
        "mul = mul.Tensor(x_1, 2)",
        "wait_1 = wait.default([record, record_default])",
        "add_1 = add.Tensor(add, mul)",
        "return add_1",
    ]


def on_accelerator(monkeypatch):
    """Let the passes treat CPU graphs as those of an accelerator, which they can run on."""
    device = torch.device("cpu")
    monkeypatch.setattr(streams.values, "device_of", lambda graph: device)


def test_data_between_streams_is_waited_for(monkeypatch):
    on_accelerator(monkeypatch)
    gm = traced(_two_streams, x34())
    apply(gm, "apply_event_closure_with_multi_stream")
    lines = [line for line in text(gm).splitlines() if "scope" not in line and "tagged" not in line]
    assert lines == [
        "add = add.Tensor(x_1, 1)",
        "record_default = record.default(device=cpu)",
        "wait_default = wait.default([record_default])",
        "mul = mul.Tensor(add, 2)",
        "record_default_1 = record.default(device=cpu)",
        "exp = exp.default(x_1)",
        "record_default_2 = record.default(device=cpu)",
        "wait_default_1 = wait.default([record_default_1])",
        "wait_default_2 = wait.default([record_default_2])",
        "add_1 = add.Tensor(mul, exp)",
        "keep_default = keep.default([add, mul, exp])",
        "return add_1",
    ]


class Execution(torch.fx.Interpreter):
    """Runs a graph and notes for each node what it can have to wait for, from real memory."""

    def __init__(self, gm):
        super().__init__(gm, garbage_collect_values=False)
        self.stack, self.last, self.marks = [None], {}, {}
        self.stream, self.behind, self.touched, self.kept, self.given = {}, {}, {}, set(), set()

    def run_node(self, node):
        name = str(node.target)
        if name == "air.scope_enter.default":
            labels = dict(zip(node.args[0], node.args[1], strict=True))
            self.stack.append(labels.get("_user_stream_label", self.stack[-1]))
        if name == "air.scope_exit.default":
            self.stack.pop()
        stream = self.stream[node] = self.stack[-1]
        self.behind[node] = {*self.behind.get(self.last.get(stream), ()), self.last.get(stream)}
        self.last[stream] = node
        if name == "air.wait.default":
            for mark in node.args[0]:
                self.behind[node] |= {mark, *self.behind[mark]}
        if name == "air.tagged_event_record.default":
            self.marks[node.args[0]] = node
        if name == "air.tagged_event_wait.default":
            mark = self.marks[node.args[0]]
            self.behind[node] |= {mark, *self.behind[mark]}
        result = super().run_node(node)
        self.note(node, result)
        return result

    def note(self, node, result):
        if node.op in ("placeholder", "get_attr"):
            self.given.add(result.untyped_storage().data_ptr())
        values = {a: self.env[a] for a in node.all_input_nodes if isinstance(self.env[a], T)}
        old = {v.untyped_storage().data_ptr() for v in values.values()}
        if str(node.target) == "air.keep.default":
            self.kept = old
        elif isinstance(node.target, torch._ops.OpOverload) and isinstance(result, T):
            new = result.untyped_storage().data_ptr()
            writes = node.target._schema.is_mutable or new not in old
            if new in old and not writes:
                return  # a view
            for place in old | {new}:
                self.touched.setdefault(place, []).append((node, writes and place == new))


T = torch.Tensor


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_streams_never_race(monkeypatch, mode):
    """Any two nodes that touch the same memory, one of them writing, are ordered; and memory that
    several streams touch is kept until the end."""
    on_accelerator(monkeypatch)
    config = CompilerConfig()
    config.mode = mode
    crossings = updates = 0
    for seed in range(20):
        args = inputs(seed)
        gm = traced(program(seed, streams=True), *args)
        before = copy.deepcopy(gm)
        apply(gm, config=config)
        assert_same_effect(before, gm, args)
        updates += len(written(gm))
        execution = Execution(gm)
        execution.run(*args)
        own = execution.given | {0}  # 0: of tensors without elements
        for place, uses in execution.touched.items():
            streams = {execution.stream[node] for node, _ in uses}
            crossings += len(streams) > 1
            assert len(streams) == 1 or place in execution.kept | own, text(gm)
            for i, (late, writes) in enumerate(uses):
                for early, wrote in uses[:i]:
                    if place and (writes or wrote):
                        assert early is late or early in execution.behind[late], text(gm)
    assert crossings > 20 and updates > 20


# ---- dead code


def test_dead_code_goes_and_effects_stay():
    def fn(x):
        x.exp()
        torch.rand(3)
        with npu_stream_switch("1"):
            y = x + 1
        ops.wait([y])
        x.sin()
        return y

    gm = apply(traced(fn, x34()), "eliminate_dead_code")
    assert targets(gm) == [
        "aten.rand.default",
        "air.scope_enter.default",
        "aten.add.Tensor",
        "air.scope_exit.default",
        "air.wait.default",
    ]


def test_copy_onto_itself_goes():
    gm = make_fx(lambda x, y: (x.copy_(x), x.copy_(y), x + 1)[2], tracing_mode="fake")(x34(), x34())
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    for copy_ in copies:
        copy_.replace_all_uses_with(copy_.args[0])
    apply(gm, "eliminate_self_copy")
    assert written(gm) == ["aten.copy_.default"]


# ---- what an NPU has beside


@pytest.fixture
def attend(monkeypatch):
    """Stands for an attention operator of an NPU stack."""
    lib = torch.library.Library("capture_tests", "FRAGMENT")

    def kernel(query, key, *, lengths=None):
        return query @ key.mT, query.sum(-1)

    def in_given_memory(query, key, *, lengths=None, workspace, out, lse):
        results = kernel(query, key)
        return out.copy_(results[0]), lse.copy_(results[1])

    def question(query, key, *, lengths=None):
        return query.new_empty(7)

    arguments = "(Tensor query, Tensor key, *, SymInt[]? lengths=None"
    memory = "Tensor? workspace=None, Tensor(a!) out, Tensor(b!) lse"
    for schema, function in (
        (f"attend{arguments}) -> (Tensor, Tensor)", kernel),
        (f"attend.out{arguments}, {memory}) -> (Tensor(a!), Tensor(b!))", in_given_memory),
        (f"attend_room{arguments}) -> Tensor", question),
    ):
        lib.define(schema)
        lib.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    name = "capture_tests.attend"
    entry = allocation.WorkspaceOp(f"{name}.out", ("out", "lse"), f"{name}_room.default")
    monkeypatch.setattr(allocation, "WORKSPACE_OPS", {f"{name}.default": entry})
    yield torch.ops.capture_tests.attend
    lib._destroy()


def test_attention_gets_its_memory(attend):
    def fn(query, key):
        out, lse = attend(query, key, lengths=[1, 2])
        return out * 2, lse

    gm = checked(fn, x34(), x34(), passes=["replace_dynamic_workspace_ops"])
    memory = "dtype=torch.float32, device=cpu, pin_memory=False"
    expect(
        gm,
        f"""
        attend_room_default = attend_room.default(query_1, key_1, lengths=[1, 2])
        empty_memory_format = empty.memory_format([3, 3], {memory})
        empty_memory_format_1 = empty.memory_format([3], {memory})
        attend_out = attend.out(query_1, key_1, lengths=[1, 2], workspace=attend_room_default, out=empty_memory_format, lse=empty_memory_format_1)
        getitem = getitem(attend_out, 0)
        getitem_1 = getitem(attend_out, 1)
        mul = mul.Tensor(getitem, 2)
        return (mul, getitem_1)
        """,  # noqa: E501
    )


def test_limits_of_cores_follow_scopes_and_streams():
    def fn(x):
        with limit_core_num(4, 8):
            a = x + 1
            with npu_stream_switch("1"):
                b = a * 2
                with limit_core_num(2, 3):
                    b = b.exp()
        with npu_stream_switch("2"):
            c = x.sin()
        return b, c

    gm = checked(fn, x34(), passes=["replace_core_limit_nodes"])
    keys = "['_user_stream_label', '_user_stream_priority', '_enable_inner_parallel']"
    expect(
        gm,
        f"""
        get_stream_limit_default = get_stream_limit.default()
        set_stream_limit_default = set_stream_limit.default([4, 8])
        add = add.Tensor(x_1, 1)
        scope_enter_1 = scope_enter.default({keys}, ['1', '0', 'True'])
        get_stream_limit_default_1 = get_stream_limit.default()
        set_stream_limit_default_1 = set_stream_limit.default([4, 8])
        mul = mul.Tensor(add, 2)
        get_stream_limit_default_2 = get_stream_limit.default()
        set_stream_limit_default_2 = set_stream_limit.default([2, 3])
        exp = exp.default(mul)
        set_stream_limit_default_3 = set_stream_limit.default(get_stream_limit_default_2)
        set_stream_limit_default_4 = set_stream_limit.default(get_stream_limit_default_1)
        scope_exit_1 = scope_exit.default()
        set_stream_limit_default_5 = set_stream_limit.default(get_stream_limit_default)
        scope_enter_3 = scope_enter.default({keys}, ['2', '0', 'True'])
        sin = sin.default(x_1)
        scope_exit_3 = scope_exit.default()
        return (exp, sin)
        """,
    )


def test_marks_of_the_default_stream_are_resolved():
    gm = traced(lambda x: x + 1, x34())
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        gm.graph.call_function(
            air.tagged_stream_wait_stream.default, ("3", "0", "1", *DEFAULT_STREAM)
        )
    apply(gm, "resolve_default_stream_markers")
    expect(
        gm,
        """
        current_stream_default = current_stream.default()
        getitem = getitem(current_stream_default, 0)
        getitem_1 = getitem(current_stream_default, 1)
        getitem_2 = getitem(current_stream_default, 2)
        add = add.Tensor(x_1, 1)
        tagged_stream_wait_stream_default = tagged_stream_wait_stream.default(3, 0, 1, getitem, getitem_1, getitem_2)
        return add
        """,  # noqa: E501
    )
    x = x34()
    assert torch.equal(gm(x), x + 1)


# ---- all of them, on random functions


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_functions(first):
    """Whatever the passes do, a caller sees the same; and they do something."""
    updates = 0
    for seed in range(first, first + 20):
        gm = checked(program(seed), *inputs(seed))
        updates += len([name for name in written(gm) if "copy_" not in name])
    assert updates > 20


@pytest.mark.usefixtures("fallbacks_allowed")
def test_a_pass_that_fails_changes_nothing():
    def halfway(gm, context):
        gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0].target = None
        raise KeyError("something unforeseen")

    x = torch.randn(3)
    gm = make_fx(lambda x: x.sin() + 1)(x)
    with pytest.warns(UserWarning, match="something unforeseen"):
        cautious(halfway)(gm)
    gm.recompile()
    torch.testing.assert_close(gm(x), x.sin() + 1)
