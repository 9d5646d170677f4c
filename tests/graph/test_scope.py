"""Scopes, marks and events: what eager code, tracing and graphs that run make of them."""

import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchair
from capture_programs import apply, assert_same_effect, inputs, program, traced
from torchair import ops, scope
from torchair.errors import ScopeError
from torchair.fx.passes.streams import check_scopes
from torchair.ops import streams
from torchair.ops.streams import open_scopes, scopes_closed

air = torch.ops.air


def graph_of(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def entered(gm):
    nodes = gm.graph.find_nodes(op="call_function", target=air.scope_enter.default)
    return [dict(zip(n.args[0], n.args[1], strict=True)) for n in nodes]


SCOPES = {
    "stream": (
        lambda: scope.npu_stream_switch("s"),
        {"_user_stream_label": "s", "_user_stream_priority": "0", "_enable_inner_parallel": "True"},
    ),
    "stream with options": (
        lambda: scope.npu_stream_switch("s", 2, False),
        {"_user_stream_label": "s", "_user_stream_priority": "2",
         "_enable_inner_parallel": "False"},
    ),
    "super kernel": (
        lambda: scope.super_kernel("k", "stream-fusion=1"),
        {"_super_kernel_scope": "k", "_super_kernel_options": "stream-fusion=1"},
    ),
    "no super kernel": (
        lambda: scope.super_kernel(None),
        {"_super_kernel_scope": "", "_super_kernel_options": ""},
    ),
    "cores": (
        lambda: scope.limit_core_num(4, 5),
        {"_op_aicore_num": "4", "_op_vectorcore_num": "5"},
    ),
    "timeout": (lambda: scope.op_never_timeout(False), {"_op_exec_never_timeout": "False"}),
    "dump": (lambda: scope.data_dump(), {"torchair_enable_data_dump": "True"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCOPES)
def test_scope_marks_the_graph_and_nothing_else(name):
    make, attributes = SCOPES[name]

    def fn(x):
        with make():
            return x + 1

    x = torch.randn(3)
    assert torch.equal(fn(x), x + 1) and open_scopes() == []
    gm = graph_of(fn, x)
    check_scopes(gm)
    assert entered(gm) == [attributes] and torch.equal(gm(x), x + 1)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"^op_never_timeout\(\) argument 'enable' must be bool"):
        scope.op_never_timeout(1)
    with pytest.raises(ValueError, match="at least one"):
        ops.wait([])
    with pytest.raises(ValueError, match="at least one"):
        ops.wait(None)
    with pytest.raises(ValueError, match="takes tensors, got int"):
        ops.wait([1])
    with pytest.raises(NotImplementedError, match="max-autotune"):
        scope.npu_wait_tensor(torch.ones(1), torch.ones(1))


def test_scopes_close_when_the_block_fails():
    seen = []
    with pytest.raises(KeyError), scope.npu_stream_switch("s"):
        seen.append(open_scopes())
        raise KeyError
    assert seen == [[]]


def test_running_a_graph_opens_scopes():
    air.scope_enter(["a"], ["1"], need_execute=True)
    air.scope_enter(["b"], ["2"], need_execute=True)
    try:
        assert open_scopes() == [{"a": "1"}, {"b": "2"}]
    finally:
        air.scope_exit(need_execute=True)
        air.scope_exit(need_execute=True)
    with pytest.raises(ScopeError, match=r"first call the torch\.ops\.air\.scope_enter operator"):
        air.scope_exit(need_execute=True)


def test_scopes_of_a_graph_that_fails_are_closed():
    with pytest.raises(ZeroDivisionError), scopes_closed():
        air.scope_enter(["a"], ["1"], need_execute=True)
        raise ZeroDivisionError
    assert open_scopes() == []


def test_threads_have_scopes_of_their_own():
    seen = []
    air.scope_enter(["a"], ["1"], need_execute=True)
    thread = threading.Thread(target=lambda: seen.append(open_scopes()))
    thread.start()
    thread.join()
    air.scope_exit(need_execute=True)
    assert seen == [[]]


def test_events_have_unique_tags():
    event = ops.npu_create_tagged_event("test_events_have_unique_tags")
    with pytest.raises(ValueError, match="is used already"):
        ops.npu_create_tagged_event("test_events_have_unique_tags")
    ops.npu_tagged_event_record(event)
    ops.npu_tagged_event_wait(event)
    for function in (ops.npu_tagged_event_record, ops.npu_tagged_event_wait):
        with pytest.raises(ValueError, match="npu_create_tagged_event"):
            function(torch.ones(1))


def test_unknown_tags_when_running():
    for tag in ("never created", "test_events_have_unique_tags inside"):
        with pytest.raises(AssertionError, match=tag):
            air.tagged_event_wait(tag, tag.endswith("inside"))
    with pytest.raises(AssertionError, match="never created"):
        air.tagged_event_record("never created")
    air.tagged_event_record("made by a pass", True)
    air.tagged_event_wait("made by a pass", True)


def everything(x, y):
    event = EVENT
    with scope.limit_core_num(1, 2):
        a = x + 1
        with scope.npu_stream_switch("1"):
            mark = ops.record()
            b = a * 2
            ops.npu_tagged_event_record(event)
        ops.wait([mark, b])
        ops.npu_tagged_event_wait(event)
        ops.npu_record_tagged_stream(b, "1")
    with scope.op_never_timeout(), scope.data_dump(), scope.super_kernel("k"):
        return b + y


EVENT = ops.npu_create_tagged_event("test_scope.everything")


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead", "npugraph_ex"])
def test_whole_functions_compile_in_every_mode(mode):
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.mode = mode
    backend = torchair.get_npu_backend(compiler_config=config)
    x, y = torch.randn(3), torch.randn(3)
    wanted = everything(x, y)
    call = torch.compile(everything, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(x, y), wanted)
    assert open_scopes() == []


def test_recording_a_stream_is_no_update():
    gm = traced(lambda x: (ops.npu_record_tagged_stream(x, "s"), x + 1)[1], torch.ones(2))
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert names == ["air.record_tagged_stream.default", "aten.add.Tensor"]


def test_wait_tensor_in_max_autotune():
    def fn(x, y):
        a, b = x * 2, y - 1
        scope.npu_wait_tensor(b, a)
        return a, b.exp()

    torch._dynamo.reset()
    graphs = []

    def keep(gm, example_inputs, config):
        graphs.append(gm)

    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = keep
    backend = torchair.get_npu_backend(compiler_config=config)
    x, y = torch.randn(3), torch.randn(3)
    with torch.no_grad():
        got = torch.compile(fn, backend=backend, fullgraph=True)(x, y)
    torch.testing.assert_close(got, (x * 2, (y - 1).exp()))
    (waits,) = graphs[0].graph.find_nodes(op="call_function", target=air.wait_tensor.default)
    assert [str(user.target) for user in waits.users] == ["aten.exp.default"]  # `b` means the wait


def test_streams_by_id_do_nothing_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(streams, "accelerator", lambda: None)
    assert air.current_stream() == ["0", "0", "0"] and air.get_stream_limit() == [0, 0]
    air.set_stream_limit([1, 2])
    air.tagged_event_record_on_stream("by id", "1", "0", "1", True)
    air.tagged_event_wait_on_stream("by id", "1", "0", "1", True)
    air.tagged_stream_wait_stream("1", "0", "1", "2", "0", "1")


# ---- streams of a GPU


def _slow(x):
    for _ in range(20):
        x = (x @ x).tanh()
    return x


def _far_apart(x):
    """Long work on one stream, whose result another needs at once; values die in between."""
    with scope.npu_stream_switch("1"):
        a = _slow(x)
    b = a + 1
    with scope.npu_stream_switch("2"):
        c = _slow(b * 0.01) + a
        parts = torch.cat([c.exp(), b.sin()])
    x.add_(b.mean())
    with scope.npu_stream_switch("1"):
        d = _slow(x * 0.01) - c
    return a + d, parts.sum(0), c


@pytest.mark.cuda
@pytest.mark.parametrize("captured", [False, True])
def test_streams_keep_values_right(captured):
    torch.manual_seed(0)
    x = torch.randn(1024, 1024, device="cuda") * 0.1
    gm = traced(_far_apart, x)
    want_x = x.clone()
    want = _far_apart(want_x)
    apply(gm)
    place = x.clone()
    run = _captured(gm, place) if captured else lambda: gm(place)
    for _ in range(5):
        place.copy_(x)
        got = run()
        torch.cuda.synchronize()
        torch.testing.assert_close([*got, place], [*want, want_x])


def _captured(gm, x):
    kept = x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gm(x)
    torch.cuda.synchronize()
    x.copy_(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gm(x)

    def run():
        graph.replay()
        return results

    return run


@pytest.mark.cuda
def test_scopes_switch_streams():
    seen = []

    def look(_):
        seen.append(torch.cuda.current_stream().stream_id)

    torch.zeros(1, device="cuda")
    look(None)
    for label in ("1", "2", "1"):
        air.scope_enter(["_user_stream_label"], [label], need_execute=True)
        look(None)
    for _ in range(3):
        air.scope_exit(need_execute=True)
    look(None)
    assert seen[0] == seen[4] and seen[1] == seen[3] and len(set(seen)) == 3
    with scope.npu_stream_switch("1"):
        assert torch.cuda.current_stream().stream_id == seen[0]  # eager code stays where it is
    with pytest.raises(KeyError), scopes_closed():
        air.scope_enter(["_user_stream_label"], ["1"], need_execute=True)
        raise KeyError
    assert torch.cuda.current_stream().stream_id == seen[0]


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_two_scopes_of_a_training_graph_both_end(mode):
    """Torch's partitioner takes equal calls without results for one, so the second end was lost."""

    def fn(x):
        with scope.npu_stream_switch("1"):
            a = (x * 2).tanh()
        with scope.npu_stream_switch("2"):
            b = x.sin()
        return (a + x) * b

    config = torchair.CompilerConfig()
    config.mode = mode
    x = torch.randn(3, 8, requires_grad=True)
    call = torch.compile(fn, backend=torchair.get_npu_backend(compiler_config=config))
    (got,), (wanted,) = (torch.autograd.grad(f(x).sum(), x) for f in (call, fn))
    torch.testing.assert_close(got, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_random_functions_on_streams(mode):
    config = torchair.CompilerConfig()
    config.mode = mode
    for seed in range(60):
        args = [t.cuda() for t in inputs(seed)]
        gm = traced(program(seed, streams=True), *args)
        before = traced(program(seed, streams=True), *args)
        apply(gm, config=config)
        for _ in range(3):
            assert_same_effect(before, gm, args)


@pytest.mark.cuda
def test_events_and_streams_by_id():
    x = torch.zeros(1 << 20, device="cuda")
    event = ops.npu_create_tagged_event("test_events_and_streams_by_id")
    here, side = air.current_stream(), torch.cuda.Stream()
    there = [str(side.stream_id), str(side.device_index), str(side.device_type)]
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.add_(1)
    air.tagged_event_record_on_stream(event.tag, *there)
    ops.npu_tagged_event_wait(event)
    y = x * 2
    air.tagged_stream_wait_stream(*there, *here)
    with torch.cuda.stream(side):
        x.zero_()
    ops.npu_record_tagged_stream(y, "1")
    torch.cuda.synchronize()
    assert y.min().item() == 2 and x.max().item() == 0
