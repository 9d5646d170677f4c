"""Capture on the CPU: the engine's program over fixed memory behaves like a private copy."""

import copy
import gc
import logging
import os
import re
import warnings
import weakref
from contextlib import nullcontext as _calm
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import npugraph_ex
import torchair
from capture_tools import one_thread
from models import (
    BERT,
    LLAMA,
    MLP,
    RESNET,
    Bert,
    Llama,
    Mlp,
    ResNet,
    bert_inputs,
    build,
    llama_inputs,
    mlp_inputs,
    resnet_inputs,
)
from tolerance import assert_close_to_reference
from torchair.capture import AclGraph, graph_pool_handle
from torchair.capture.base import Substrate
from torchair.capture.cpu import CapturePool
from torchair.concrete import AclConcreteGraph
from torchair.errors import CaptureError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured(function, dynamic=False, **options):
    """A function in capture mode, and the graphs that it is compiled to."""
    graphs = []
    config = torchair.CompilerConfig()
    config.mode = "npugraph_ex"
    for name, value in options.items():
        section = config.experimental_config if hasattr(config.experimental_config, name) else None
        setattr(section or config.debug.aclgraph, name, value)
    compiler = torchair.get_npu_backend(compiler_config=config)

    def backend(gm, inputs, **kwargs):
        made = AclConcreteGraph.__init__

        def init(self, *args, **more):
            made(self, *args, **more)
            graphs.append(self)

        AclConcreteGraph.__init__ = init
        try:
            return compiler(gm, inputs, **kwargs)
        finally:
            AclConcreteGraph.__init__ = made

    return torch.compile(function, backend=backend, dynamic=dynamic), graphs


def test_shared_results_of_one_key_are_the_same_tensor():
    run, graphs = captured(lambda x: x * 2, share_results=True)
    first = run(torch.ones(4))
    second = run(torch.full((4,), 3.0))
    assert first is second
    torch.testing.assert_close(first, torch.full((4,), 6.0))
    assert len(graphs) == 1


def test_log_lines(caplog):
    caplog.set_level(logging.DEBUG, logger="torchair")
    run, graphs = captured(lambda x, y: x.add_(y), static_capture_size_limit=1, dynamic=True)
    x, y = torch.zeros(4), torch.ones(4)
    for other in (x, x, torch.zeros(4)):
        with pytest.warns(UserWarning, match="limit reached") if other is not x else _calm():
            run(other, y)
    name = graphs[0].name
    said = [r.getMessage() for r in caplog.records if f" {name}" in r.getMessage()]
    said = [
        line.partition(f" {name}")[0]
        for line in said
        if ("AclGraph" in line or "capture" in line)
        and not line.startswith(("Codegen for graph", "fx code of"))
    ]
    assert said == [
        "No find captured AclGraph of fx_graph",
        "Success to capture fx_graph",
        "For graph",
        "Find captured AclGraph of fx_graph",
        "The current AclGraph no needs to be recaptured of fx_graph",
        "The current AclGraph needs to be recaptured for fx_graph",
    ]


@pytest.mark.filterwarnings("ignore:frozen_parameter")
def test_an_exchanged_frozen_weight_is_captured_anew_and_the_log_says_both(caplog):
    model = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    run, _ = captured(model, frozen_parameter=True)
    x = torch.randn(2, 4)
    run(x), run(x)
    caplog.set_level(logging.DEBUG, logger="torchair")
    for again, told in ((True, ("needs to be", "no needs to be")), (False, ("no needs to be",))):
        if again:
            model.weight.data = torch.randn(4, 4)
        caplog.clear()
        torch.testing.assert_close(run(x), x @ model.weight.t())
        said = re.findall(r"The current AclGraph (needs to be|no needs to be) recapt", caplog.text)
        assert tuple(said) == told


@pytest.mark.parametrize("shared", [False, True])
def test_steps_of_a_call_are_timed_for_the_log(caplog, shared):
    run, _ = captured(lambda x, y: (x.add_(y), x * 2), dynamic=True, share_results=shared)
    x, y = torch.zeros(4), torch.ones(4)
    caplog.set_level(logging.INFO, logger="torchair")
    run(x, y)
    assert "overhead" not in caplog.text
    caplog.set_level(logging.DEBUG, logger="torchair")
    for step in (2, 3):
        caplog.clear()
        added, doubled = run(x, y)
        assert added is x and x.tolist() == [step] * 4 and doubled.tolist() == [2 * step] * 4
        said = [r.getMessage() for r in caplog.records]
        line = r"The operation of \[npugraph_ex overhead\] (.*) phase \(.*: \w+\) cost [0-9.]+s\."
        timed = [found[1] for m in said if (found := re.fullmatch(line, m))]
        assert timed == ["generate graph_key", "process input", "get updated params"]


def test_memory_of_keys_is_told(caplog):
    caplog.set_level(logging.DEBUG, logger="torchair")
    for separate, first, second in (
        (False, "When mempool reuse is enabled in fx_graph", "After setting to original memory"),
        (True, "memory pool reuse is disable: no mempool", "memory pool reuse is disable: no m"),
    ):
        caplog.clear()
        run, _ = captured(torch.abs, dynamic=True, disable_mempool_reuse_in_same_fx=separate)
        for size in (3, 4, 3):
            run(torch.ones(size))
        said = [r.getMessage() for r in caplog.records if " fx_graph " in r.getMessage()]
        told = [m for m in said if "pool" in m or "memory" in m]
        assert len(told) == 2 and told[0].startswith(first) and told[1].startswith(second)


def test_a_result_as_the_next_input():
    run, _ = captured(lambda x: torch.roll(x, 1) + torch.flip(x, [0]))
    x = torch.randn(64)
    expected, got = x, x
    for _ in range(5):
        expected = torch.roll(expected, 1) + torch.flip(expected, [0])
        got = run(got)
    torch.testing.assert_close(got, expected)


def test_a_view_of_a_result_as_the_next_input():
    run, _ = captured(lambda x: torch.cat([x, x + 1]))
    y = run(torch.randn(8))
    half = y[4:12]
    expected = torch.cat([half, half + 1])
    torch.testing.assert_close(run(half), expected)


def test_inputs_in_another_layout():
    run, graphs = captured(lambda x: x.softmax(-1), dynamic=True)
    x = torch.randn(6, 6)
    torch.testing.assert_close(run(x), x.softmax(-1))
    graph = graphs[0].graph
    for other in (
        torch.randn(6, 6).t(),
        torch.randn(6, 12)[:, ::2],
        torch.randn(1, 6).expand(6, 6),
    ):
        torch.testing.assert_close(graph.call(_arguments(graph, other))[0], other.softmax(-1))
    assert len(graph.captured) == 1


def _arguments(graph, tensor):
    (position,) = graph.kinds.users
    args = [tensor.shape[0]] * 2
    args[position] = tensor
    return args


def test_inputs_are_not_kept_alive():
    run, _ = captured(lambda x: x + 1)
    x = torch.randn(1000)
    run(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_results_outlive_the_model():
    run, graphs = captured(lambda x: x.sin() + 1)
    x = torch.randn(1000)
    y = run(x)
    expected = x.sin() + 1
    del run
    graphs.clear()
    torch._dynamo.reset()
    gc.collect()
    torch.testing.assert_close(y, expected)


def test_clone_input_off_writes_into_the_first_input():
    run, _ = captured(lambda x: x + 1, clone_input=False)
    first, second = torch.zeros(4), torch.full((4,), 5.0)
    run(first)
    torch.testing.assert_close(run(second), torch.full((4,), 6.0))
    torch.testing.assert_close(first, second)


def test_clone_output_gives_memory_of_its_own():
    run, _ = captured(lambda x: (x + 1, x * 2), enable_output_clone=True)
    a = run(torch.zeros(4))
    b = run(torch.ones(4))
    torch.testing.assert_close(a[0], torch.ones(4))
    torch.testing.assert_close(b[0], torch.full((4,), 2.0))


def test_mutated_inputs_stay_where_they_are():
    def step(cache, x):
        cache.mul_(2).add_(x)
        return cache.sum()

    run, graphs = captured(step)
    cache, expected = torch.zeros(8), torch.zeros(8)
    for k in range(4):
        x = torch.full((8,), float(k))
        torch.testing.assert_close(run(cache, x), step(expected, x))
        torch.testing.assert_close(cache, expected)
    assert len(graphs[0].graph.captured) == 1


def test_results_that_are_arguments_or_views_of_them():
    def both(x, y):
        return x, x.t(), x + y

    run, _ = captured(both)
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        same, view, total = run(x, y)
        assert same.data_ptr() == x.data_ptr()
        assert view.data_ptr() == x.data_ptr()
        torch.testing.assert_close(view, x.t())
        torch.testing.assert_close(total, x + y)


def test_random_operators_draw_anew():
    run, _ = captured(lambda x: torch.nn.functional.dropout(x, 0.5, training=True))
    x = torch.ones(1000)
    first = run(x).clone()
    second = run(x).clone()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    third = run(x).clone()
    torch.manual_seed(7)
    torch.testing.assert_close(run(x), third)


def test_several_keys_share_a_block():
    run, graphs = captured(lambda x: (x @ x.t()).relu(), dynamic=True, share_results=True)
    for n in (32, 16, 8, 32, 24, 8):
        x = torch.randn(n, 64)
        torch.testing.assert_close(run(x), (x @ x.t()).relu(), rtol=1e-5, atol=1e-4)
    metas = graphs[0].graph.captured.values()
    assert len(metas) == 4
    assert len({id(m.recording._block) for m in metas}) == 1


def test_keys_that_do_not_share_memory():
    run, graphs = captured(
        lambda x: x + 1, dynamic=True, disable_mempool_reuse_in_same_fx=True, share_results=True
    )
    held = [(n, run(torch.full((n,), float(n)))) for n in (4, 8, 16)]
    for n, result in held:
        torch.testing.assert_close(result, torch.full((n,), n + 1.0))
    assert run(torch.zeros(4)) is held[0][1]
    blocks = {id(m.recording._block) for m in graphs[0].graph.captured.values()}
    assert len(blocks) == 3


def test_pool_grows_and_avoids():
    pool = CapturePool(graph_pool_handle())
    small = pool.take(100, shared=True)
    assert pool.take(50, shared=True) is small
    large = pool.take(1000, shared=True)
    assert large is not small and large.size >= 1000
    inside = large.address + 5
    assert pool.take(900, shared=True, avoid=[inside]) is not large
    assert pool.take(10, shared=False) is not pool.take(10, shared=False)


def test_evicting_keeps_replaying():
    run, graphs = captured(
        lambda x: x * 3, dynamic=True, static_capture_size_limit=2, evict_captures=True
    )
    for n in (4, 5, 6, 4, 5, 6):
        torch.testing.assert_close(run(torch.ones(n)), torch.full((n,), 3.0))
    graph = graphs[0].graph
    assert not graph.fallen_back and len(graph.captured) == 2


def test_evicting_waits_for_replays(monkeypatch):
    """On a device one may be under way, in memory that is free afterwards."""
    seen, drop = [], AclGraph._drop
    monkeypatch.setattr(Substrate, "finish", lambda self: seen.append("finish"))
    monkeypatch.setattr(AclGraph, "_drop", lambda *given: (seen.append("drop"), drop(*given)))
    run, _ = captured(
        lambda x: x * 3, dynamic=True, static_capture_size_limit=1, evict_captures=True
    )
    for n in (4, 5):
        run(torch.ones(n))
    assert seen == ["finish", "drop"]


@pytest.mark.parametrize("share", [False, True])
def test_shared_results_that_repeat_elements(share):
    index = torch.tensor([0, 2, 4])
    run, _ = captured(lambda x: torch.take(x, index).expand(3, -1), share_results=share)
    for _ in range(3):
        x = torch.randn(8)
        torch.testing.assert_close(run(x), x[index].expand(3, -1))


def rows_above_zero(x):
    return x[x[:, 0] > 0].sum(0)


@pytest.mark.parametrize("fallback", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data(fallback):
    run, _ = captured(rows_above_zero, capture_fallback=fallback)
    x = torch.randn(8, 3)
    if fallback:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for sign in (1, -1, 1):
                torch.testing.assert_close(run(sign * x), rows_above_zero(sign * x))
        (text,) = [str(w.message) for w in warned if w.category is UserWarning]
        assert "runs without capture: aten.index.Tensor makes a result whose size" in text
        assert "node: index\n" in text and "test_capture_cpu" in text
    else:
        with pytest.raises(CaptureError, match="depends on data") as caught:
            run(x)
        assert "test_capture_cpu" in str(caught.value)


def decided(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def repeated(x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1]


def attended(x):
    return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + q - k)


def normalised(x):
    return F.batch_norm(x.half(), None, None, training=True).float()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [decided, repeated, attended, normalised])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_what_torch_has_no_sizes_for_is_captured_where_tracing_knows_them(function, dynamic):
    run, graphs = captured(function, dynamic=dynamic)
    for _ in range(3):
        x = torch.randn(2, 3, 16, 16)
        torch.testing.assert_close(run(x), function(x), rtol=2e-3, atol=2e-3)
    assert [len(g.graph.captured) for g in graphs] == [1]


@pytest.mark.parametrize("inner", [F.dropout, lambda x: F.scaled_dot_product_attention(x, x, x)])
def test_checkpointed_parts_are_captured(inner):
    def function(x):
        return checkpoint(lambda x: inner(x.sin()), x, use_reentrant=False).square().sum()

    gradients = []
    for run in (captured(function)[0], torch.compile(function, backend="aot_eager")):
        for seed in range(2):
            x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(5))
            x.requires_grad_()
            torch.manual_seed(seed)
            run(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_a_capture_draws_nothing():
    def noisy(x):
        return F.dropout(x, 0.5) + torch.rand(4)

    def drawn(f, x):
        torch.manual_seed(1)
        return f(x), torch.get_rng_state()

    run, graphs = captured(noisy, dynamic=True)
    for n in (5, 5, 6, 6, 5):
        (got, state), (wanted, after) = (drawn(f, torch.ones(n, 4)) for f in (run, noisy))
        assert torch.equal(got, wanted) and torch.equal(state, after)
    assert len(graphs[0].graph.captured) == 2


def test_warm_ups_leave_no_trace():
    def step(state, x):
        state.add_(F.dropout(x, 0.5))
        return state * 2

    run, _ = captured(step, capture_warmups=2)
    state, expected = torch.zeros(16), torch.zeros(16)
    torch.manual_seed(3)
    after = [run(state, torch.ones(16)), torch.get_rng_state()]
    run, _ = captured(step)
    torch.manual_seed(3)
    wanted = [run(expected, torch.ones(16)), torch.get_rng_state()]
    torch.testing.assert_close(after, wanted)
    torch.testing.assert_close(state, expected)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore:.*limit reached")
def test_nothing_grows_with_sizes():
    run, graphs = captured(lambda x: (x * 2).relu() @ x.t(), dynamic=True)
    before = 0
    with one_thread():  # others would wait for each other
        for n in range(2, 502):
            x = torch.randn(n, 8)
            assert torch.allclose(run(x), (x * 2).relu() @ x.t(), rtol=1e-4, atol=1e-4), n
            if n == 250:
                before = resident()
    assert graphs[0].graph.fallen_back and not graphs[0].graph.captured
    assert resident() - before < 2**24


def test_nothing_stays_of_graphs_that_are_gone():
    gm = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.randn(4))
    alive, before = [], 0
    for k in range(200):
        call = npugraph_ex.compile_fx(gm)
        for n in (1, 2):
            x = torch.full((4,), n / 2)
            torch.testing.assert_close(call(x)[0], x.sin() + 1)
        alive.append(weakref.ref(call.__wrapped__.runner.graph))
        if k == 100:
            del call
            before = resident()
    del call
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert resident() - before < 2**23


def test_streams_run_side_by_side():
    def branches(x):
        with torchair.scope.npu_stream_switch("1"):
            a = torch.cumsum(x.sin(), 0)
        with torchair.scope.npu_stream_switch("2"):
            b = torch.cumsum(x.cos(), 0)
        return a * b

    run, graphs = captured(branches)
    for _ in range(5):
        x = torch.randn(1000, dtype=torch.float64)
        torch.testing.assert_close(run(x), torch.cumsum(x.sin(), 0) * torch.cumsum(x.cos(), 0))
    assert len(graphs[0]._engine.session.last_plan().schedule.lanes) == 3


MODELS = {
    "mlp": (Mlp, MLP["tiny"], lambda c: mlp_inputs(c)),
    "resnet": (ResNet, RESNET["tiny"], lambda c: resnet_inputs(c)),
    "bert": (Bert, BERT["tiny"], lambda c: bert_inputs(c, 2, 12)),
    "llama": (Llama, LLAMA["tiny"], lambda c: llama_inputs(c, 1, 4)),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:frozen_parameter")
@torch.no_grad()
def test_models(name, frozen):
    kind, config, make = MODELS[name]
    model = build(kind, config)
    run, graphs = captured(copy.deepcopy(model), frozen_parameter=frozen)
    for _ in range(3):
        before, inputs = copy.deepcopy(model), make(config)
        expected = model(*inputs)
        assert_close_to_reference(before, inputs, run(*inputs), expected)
    assert all(len(g.graph.captured) == 1 for g in graphs)


def test_training_keeps_what_backward_needs():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    run, _ = captured(copy.deepcopy(model))
    inputs = [torch.randn(5, 8) for _ in range(2)]
    expected = [model(x).square().sum() for x in inputs]
    got = [run(x).square().sum() for x in inputs]  # both forwards before the first backward
    torch.testing.assert_close(got, expected)
    sum(expected).backward()
    sum(got).backward()
    theirs = [p.grad for p in model.parameters()]
    ours = [p.grad for p in run._orig_mod.parameters()]
    torch.testing.assert_close(ours, theirs)
