"""The FX passes of the modes that capture: what each turns into what, and that nobody can tell."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from capture_programs import (
    apply,
    assert_same_effect,
    checked,
    inputs,
    program,
    text,
    traced,
)
from torchair import CompilerConfig, ops
from torchair.configs.settings import Settings
from torchair.fx.capture import CAPTURE_PASSES, caution, events
from torchair.ops.events import DEFAULT_STREAM
from torchair.scope import limit_core_num, npu_stream_switch

aten, air = torch.ops.aten, torch.ops.air
A, B = "reinplace_inplaceable_ops_pass", "reinplace_input_mutated_ops"


def x34():
    return torch.randn(3, 4)


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def written(gm):
    """Targets that write."""
    nodes = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [str(n.target) for n in nodes if n.target._schema.is_mutable]


def expect(gm, wanted):
    lines = [line.strip() for line in wanted.strip().splitlines()]
    assert text(gm).splitlines() == lines, "\n" + text(gm)


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
    gm.meta["graph_name"] = "graph_7"
    apply(gm, "apply_event_closure_with_multi_stream")
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
    monkeypatch.setattr(events, "device_of", lambda graph: device)


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
        "aten.rand.default", "air.scope_enter.default", "aten.add.Tensor",
        "air.scope_exit.default", "air.wait.default",
    ]  # fmt: skip


def test_copy_onto_itself_goes():
    gm = make_fx(lambda x, y: (x.copy_(x), x.copy_(y), x + 1)[2], tracing_mode="fake")(x34(), x34())
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    for copy_ in copies:
        copy_.replace_all_uses_with(copy_.args[0])
    apply(gm, "eliminate_self_copy")
    assert written(gm) == ["aten.copy_.default"]


# ---- intermediate values


def _chain(x):
    a = x * 2
    b = a.exp()
    return (b + 1).relu()


def test_values_take_the_memory_of_dead_ones():
    gm = checked(_chain, x34(), passes=[A])
    expect(
        gm,
        """
        mul = mul.Tensor(x_1, 2)
        exp = exp_.default(mul)
        add = add_.Tensor(exp, 1)
        relu = relu_.default(add)
        return relu
        """,
    )


def test_updates_of_views_are_done_in_place():
    def fn(x):
        a = x * 2
        a[1].add_(1)
        a.t()[0, 1:].zero_()
        return a

    gm = checked(fn, x34(), passes=["eliminate_dead_code", A])
    expect(
        gm,
        """
        mul = mul.Tensor(x_1, 2)
        select = select.int(mul, 0, 1)
        add = add_.Tensor(select, 1)
        t_1 = t.default(mul)
        select_3 = select.int(t_1, 0, 0)
        slice_2 = slice.Tensor(select_3, 0, 1, 9223372036854775807)
        zero = zero_.default(slice_2)
        t_2 = t.default(mul)
        t_3 = t.default(t_2)
        return t_3
        """,
    )


def _with_part(x):
    a = x + 1
    return a[0] * 2, a.exp()


STAY = {
    "argument": lambda x, y: x + 1,
    "view of an argument": lambda x, y: x[1:].t() + 1,
    "used later": lambda x, y: (lambda a: (a.exp(), a.sum()))(aten.mm(x, y.t())),
    "view used later": lambda x, y: (lambda a: (a.exp(), a[1:].sum()))(aten.mm(x, y.t())),
    "returned too": lambda x, y: (lambda a: (a, a.exp()))(aten.mm(x, y.t())),
    "view returned too": lambda x, y: (lambda a: (a[0], a.exp()))(aten.mm(x, y.t())),
    "smaller than the result": lambda x, y: aten.sum.dim_IntList(x, [0]) + y,
    "other shape": lambda x, y: aten.sum.dim_IntList(x, [0]) + y[:1],
    "other type": lambda x, y: aten.mm(x, y.t()) > 1,
    "promoted": lambda x, y: aten.argmax(x, 0) + y[0],
    "argument twice": lambda x, y: (lambda a: a * a)(aten.mm(x, y.t())),
    "with a view of itself": lambda x, y: (lambda a: a * a[0])(aten.mm(x, y.t())),
    "elements share memory": lambda x, y: aten.sum.dim_IntList(x, [0]).expand(3, 4) + 1,
    "part of something returned": lambda x, y: aten.mm(x, y.t())[0] + 1,
    "constant": lambda x, y: CONSTANT + x,
    "used as bits": lambda x, y: (lambda a: (a.exp(), a.view(torch.int32).sum()))(
        aten.mm(x, y.t())
    ),
    "result seen as bits": lambda x, y: aten.mm(x, y.t()).exp().view(torch.int32),
    "other strides": lambda x, y: aten.mm(x, y.t())[:, :2] + 1,
}
CONSTANT = torch.ones(3, 4)


@pytest.mark.parametrize("name", STAY)
def test_values_that_others_need_stay(name):
    args = [x34(), x34()]
    gm = checked(STAY[name], *args, passes=["eliminate_dead_code", A])
    assert written(gm) == [], text(gm)


def test_arguments_are_never_changed():
    x = x34()
    gm = apply(traced(lambda x: (x.view(-1)[1:] + 1, x.t().exp()), x), A)
    kept = x.clone()
    gm(x)
    assert torch.equal(x, kept) and written(gm) == []


def test_graph_of_real_tensors_is_understood():
    def fn(x):
        a = x * 2
        return a.exp(), a.view(-1)[3:] + 1

    x = x34()
    gm = traced(fn, x, mode="real")
    before = copy.deepcopy(gm)
    assert_same_effect(before, apply(gm, A), [x])


def test_a_pass_that_fails_is_left_out(monkeypatch):
    said = []
    monkeypatch.setattr(
        caution.logger, "warning", lambda text, *args, **_: said.append(text % args)
    )
    gm = traced(_chain, x34())
    before = text(gm)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    by_name = {p.name: p.fn for p in CAPTURE_PASSES}
    by_name[A](gm, (), None)
    assert text(gm) == before and said[0].startswith(f"the pass {A} is left out")


# ---- inputs of the graph


def test_arguments_are_updated_in_place():
    def fn(x, cache, index, row):
        cache.index_put_((index,), row)
        x.t()[1:].mul_(2)
        return cache.sum(0) + x[0]

    args = [x34(), torch.zeros(5, 4), torch.tensor([1, 3]), torch.randn(2, 4)]
    gm = checked(fn, *args, passes=["eliminate_dead_code", A, B])
    expect(
        gm,
        """
        index_put = index_put_.default(cache_1, [index_1], row_1)
        t = t.default(x_1)
        slice_1 = slice.Tensor(t, 0, 1, 9223372036854775807)
        mul = mul_.Tensor(slice_1, 2)
        t_1 = t.default(x_1)
        t_2 = t.default(t_1)
        sum_1 = sum.dim_IntList(index_put, [0])
        select_1 = select.int(t_2, 0, 0)
        add = add_.Tensor(sum_1, select_1)
        return add
        """,
    )


def test_several_updates_of_one_argument():
    def fn(x):
        x[0].add_(1)
        y = x * 2
        x[1].mul_(2)
        x.t()[0].zero_()
        return y

    gm = checked(fn, x34(), passes=["eliminate_dead_code", A, B])
    assert written(gm) == ["aten.add_.Tensor", "aten.mul_.Tensor", "aten.zero_.default"]


def _old_value_needed(x, y):
    new = x * 2
    z = aten.mm(x, y.t())
    x.copy_(new)
    return z


def _part_of_old_value_needed(x, y):
    part = x[:2]
    new = x * 2
    z = aten.mm(part, y.t())
    x.copy_(new)
    return z


def _value_is_returned_too(x, y):
    new = x * 2
    x.copy_(new)
    return new


def _view_of_value_is_returned_too(x, y):
    new = x * 2
    x.copy_(new)
    return new[0]


def _other_argument(x, y):
    x.copy_(y * 2)


def _both_from_one(x, y):
    new = x * 2
    x.copy_(new)
    y.copy_(new)


def _value_outlives_its_copy(x, y):
    value = x[0] * 3
    x[0].copy_(value)
    x.zero_()
    return value.sum()


COPIES = {  # how many copies to arguments are left
    "old value needed": (_old_value_needed, 1),
    "part of old value needed": (_part_of_old_value_needed, 1),
    "value is returned too": (_value_is_returned_too, 1),
    "view of value is returned too": (_view_of_value_is_returned_too, 1),
    "other argument": (_other_argument, 1),
    "both from one": (_both_from_one, 1),
    "other type": (lambda x, y: (x.copy_((x * 2).double()), None)[1], 1),
    "value outlives its copy": (_value_outlives_its_copy, 0),
    "through a transpose": (lambda x, y: x.t().add_(y.t()).sum(), 0),
    "by a view with another shape": (lambda x, y: x.view(2, 6).mul_(2).sum(), 0),
    "other part needed": (lambda x, y: (lambda part: (x[1:].mul_(2), part.sum())[1])(x[:1]), 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_to_arguments(name):
    fn, left = COPIES[name]
    gm = checked(fn, x34(), x34(), passes=["eliminate_dead_code", A, B])
    plain = [n for n in gm.graph.nodes if n.target is aten.copy_.default]
    plain = [n for n in plain if n.args[0].op == "placeholder"]
    assert len(plain) == left, text(gm)


def test_returning_an_updated_argument():
    gm = aot_graph(lambda x: x.mul_(2), x34())
    before = copy.deepcopy(gm)
    assert_same_effect(before, apply(gm), [x34()])
    expect(
        gm,
        """
        mul = mul_.Tensor(arg0_1, 2)
        return (arg0_1,)
        """,
    )


def _stream_and_update(order):
    def fn(x):
        with npu_stream_switch("1"):
            y = x.exp()
            mark = ops.record()
        if order:
            ops.wait([mark])
        x.add_(1)
        return x * 2, y

    return fn


@pytest.mark.parametrize(
    ("mode", "ordered", "in_place"),
    [
        ("reduce-overhead", True, False),
        ("npugraph_ex", True, True),
        ("npugraph_ex", False, False),
    ],
)
def test_several_streams(mode, ordered, in_place):
    config = CompilerConfig()
    config.mode = mode
    gm = traced(_stream_and_update(ordered), x34())
    before = copy.deepcopy(gm)
    apply(gm, config=config)
    assert_same_effect(before, gm, [x34()])
    assert ("aten.copy_.default" not in targets(gm)) == in_place


# ---- operators that write to several arguments


@pytest.fixture
def library():
    """Operators in a library of their own, with kernels and fake kernels."""
    lib = torch.library.Library("capture_tests", "FRAGMENT")

    def add_to(x, y):
        x.add_(y)

    def two(x, y, z, *, scale=1.0):
        x.add_(z)
        y.mul_(scale)
        return z + x

    def many(xs, y):
        for x in xs:
            x.add_(y)
        return y + 1, y + 2

    for schema, kernel, fake in (
        ("add_to(Tensor(a!)? x, Tensor y) -> ()", add_to, lambda x, y: None),
        ("two(Tensor(a!) x, Tensor(b!) y, Tensor z, *, float scale=1.0) -> Tensor", two,
         lambda x, y, z, *, scale=1.0: torch.empty_like(z)),
        ("many(Tensor(a!)[] xs, Tensor y) -> (Tensor, Tensor)", many,
         lambda xs, y: (torch.empty_like(y), torch.empty_like(y))),
    ):  # fmt: skip
        lib.define(schema)
        name = schema.partition("(")[0]
        lib.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"capture_tests::{name}", fake, lib=lib)
    yield torch.ops.capture_tests
    lib._destroy()


def aot_graph(fn, *args, dynamic=False):
    """The inference graph of AOTAutograd, with copies to arguments in it."""
    from torch._functorch.aot_autograd import aot_module_simplified

    found = []

    def keep(gm, _):
        found.append(gm)
        return gm

    def backend(gm, example_inputs):
        return aot_module_simplified(
            gm, example_inputs, fw_compiler=keep, keep_inference_input_mutations=True
        )

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*map(torch.clone, args))
    return found[0]


def test_functionalized_operators_write_to_arguments(library):
    def fn(x, y):
        library.add_to(x[1:], y)
        z = y + 1
        library.add_to(z, y)
        w = z.clone()
        return library.two(x[0], w, y, scale=2.0), z, w

    args = [torch.randn(3, 2), torch.randn(2)]
    gm = aot_graph(fn, *args)
    before = copy.deepcopy(gm)
    apply(gm, A, B, "decompose_auto_functionalized")
    assert_same_effect(before, gm, args)
    expect(
        gm,
        """
        slice_tensor = slice.Tensor(arg0_1, 0, 1, 3)
        add_to_default = add_to.default(slice_tensor, arg1_1)
        add = add.Tensor(arg1_1, 1)
        add_to_default_1 = add_to.default(add, arg1_1)
        clone = clone.default(add)
        as_strided_default = as_strided.default(arg0_1, (2,), (1,), 0)
        two_default = two.default(as_strided_default, clone, arg1_1, scale=2.0)
        return (two_default, add, clone)
        """,
    )


def test_functionalized_operators_copy_what_is_needed(library):
    def fn(x, y):
        z = x.t()[1:].exp()
        old = z.sum(0)
        library.add_to(z.t()[:, 1], y)
        library.add_to(None, y)
        a, b = library.many([x[0], x[1:], z[0]], y)
        return a, b, old, z * old

    args = [torch.randn(3, 3), torch.randn(3)]
    for passes in ([A, B, "decompose_auto_functionalized"], ["decompose_auto_functionalized"]):
        gm = aot_graph(fn, *args)
        before = copy.deepcopy(gm)
        apply(gm, *passes)
        assert not any("auto_functionalized" in t for t in targets(gm))
        assert_same_effect(before, gm, args)


def test_functionalized_operators_with_dynamic_sizes(library):
    def fn(x, y):
        library.add_to(x.t()[1], y)
        z = (y * 2)[1:]
        library.add_to(z, z + 1)
        return z

    gm = aot_graph(fn, torch.randn(5, 4), torch.randn(5), dynamic=True)
    apply(gm)
    assert "aten.clone.default" not in targets(gm)
    plain = aot_graph(fn, torch.randn(5, 4), torch.randn(5), dynamic=True)
    apply(plain, "decompose_auto_functionalized")
    for graph in (gm, plain):
        x, y = torch.randn(7, 3), torch.randn(7)
        wanted_x = x.clone()
        wanted = fn(wanted_x, y)
        torch.testing.assert_close([graph(7, 3, x, y)[0], x], [wanted, wanted_x])


@pytest.fixture
def npu():
    """Stand-ins for operators of an NPU stack."""
    lib = torch.library.Library("npu", "FRAGMENT")

    def pure(x1, x2, gamma):
        return gamma * x1, x1 + x2, x2 * 2

    def in_place(x1, x2, gamma):
        out, new1, new2 = pure(x1, x2, gamma)
        x1.copy_(new1)
        x2.copy_(new2)
        return out

    attention = "(Tensor query, Tensor key, *, SymInt[]? actual_seq_lengths=None"
    name = "npu_fused_infer_attention_score"

    def attend(query, key, *, actual_seq_lengths=None):
        return query @ key.mT, query.sum(-1)

    def attend_out(query, key, *, actual_seq_lengths=None, workspace, attention_out, softmax_lse):
        results = attend(query, key)
        return attention_out.copy_(results[0]), softmax_lse.copy_(results[1])

    def room(query, key, *, actual_seq_lengths=None):
        return query.new_empty(7)

    outs = "Tensor(a!) attention_out, Tensor(b!) softmax_lse) -> (Tensor(a!), Tensor(b!))"
    for schema, kernel in {
        "npu_add_rms_norm_v2_functional(Tensor a, Tensor b, Tensor c) -> (Tensor, Tensor, Tensor)":
            pure,
        "npu_add_rms_norm_v2(Tensor(a!) a, Tensor(b!) b, Tensor c) -> Tensor": in_place,
        f"{name}{attention}) -> (Tensor, Tensor)": attend,
        f"{name}.out{attention}, Tensor? workspace=None, {outs}": attend_out,
        f"_{name}_get_max_workspace{attention}) -> Tensor": room,
    }.items():  # fmt: skip
        lib.define(schema)
        lib.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")
    yield torch.ops.npu
    lib._destroy()


def test_operator_with_two_updates_is_done_in_place(npu):
    def fn(x, y, gamma):
        a, b = x + 1, y + 1
        out, new, other = npu.npu_add_rms_norm_v2_functional(a, b, gamma)
        out2, new2, other2 = npu.npu_add_rms_norm_v2_functional(x, y, gamma)
        x.copy_(new2)
        y.copy_(other2)
        return aten.mm(out, new.t()), other.sum(), out2

    gm = checked(fn, x34(), x34(), x34(), passes=["eliminate_dead_code", A, B])
    assert targets(gm).count("npu.npu_add_rms_norm_v2.default") == 2
    assert "aten.copy_.default" not in targets(gm)


def test_operator_with_two_updates_stays_if_one_is_not_wanted(npu):
    def fn(x, y, gamma):
        out, new, other = npu.npu_add_rms_norm_v2_functional(x, y, gamma)
        x.copy_(new)
        return out, other

    gm = checked(fn, x34(), x34(), x34(), passes=["eliminate_dead_code", A, B])
    assert "npu.npu_add_rms_norm_v2_functional.default" in targets(gm)


# ---- what an NPU has beside


def test_attention_gets_its_memory(npu):
    def fn(query, key):
        out, lse = npu.npu_fused_infer_attention_score(query, key, actual_seq_lengths=[1, 2])
        return out * 2, lse

    gm = checked(fn, x34(), x34(), passes=["replace_dynamic_workspace_ops"])
    name = "npu_fused_infer_attention_score"
    lengths = "actual_seq_lengths=[1, 2]"
    memory = "dtype=torch.float32, device=cpu, pin_memory=False"
    expect(
        gm,
        f"""
        _{name}_get_max_workspace_default = _{name}_get_max_workspace.default(query_1, key_1, {lengths})
        empty_memory_format = empty.memory_format([3, 3], {memory})
        empty_memory_format_1 = empty.memory_format([3], {memory})
        {name}_out = {name}.out(query_1, key_1, {lengths}, workspace=_{name}_get_max_workspace_default, attention_out=empty_memory_format, softmax_lse=empty_memory_format_1)
        getitem = getitem({name}_out, 0)
        getitem_1 = getitem({name}_out, 1)
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
