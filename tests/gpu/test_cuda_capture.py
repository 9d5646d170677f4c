"""Captured graphs on CUDA; run with `make test-cuda` on a machine with a GPU."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from capture_cases import CASES
from capture_tools import compiled, compiled_ex, counted, equal, fresh
from models import (
    BERT,
    LLAMA,
    RESNET,
    Bert,
    Llama,
    ResNet,
    bert_inputs,
    build,
    llama_inputs,
    resnet_inputs,
)
from tolerance import assert_close_to_reference
from torchair.capture.base import ArgumentKinds, CaptureOptions, ToCapture
from torchair.capture.cuda import DeviceSubstrate
from torchair.capture.updates import Updates
from torchair.errors import CaptureError
from torchair.ops import npu_print

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    fresh()
    yield
    fresh()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA)


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    CASES[name](CUDA)


# ---- models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config", "inputs"),
    [
        (Bert, BERT["tiny"], lambda c, k: bert_inputs(c, 2, 12, seed=k)),
        (ResNet, RESNET["tiny"], lambda c, k: resnet_inputs(c, seed=k)),
    ],
)
@torch.no_grad()
def test_models_equal_eager(kind, config, inputs, dtype):
    model = build(kind, config).to(CUDA, dtype)
    fast = compiled(model)
    for k in range(3):
        args = [x.to(CUDA, dtype if x.is_floating_point() else None) for x in inputs(config, k)]
        assert_close_to_reference(model, args, fast(*args), model(*args))
    assert counted() == [1]


@pytest.mark.parametrize("preset", ["tiny", "tiny explicit", "tiny grouped"])
@torch.no_grad()
def test_a_decoder_updates_its_cache_once_a_call(preset):
    config = LLAMA[preset]
    model = build(Llama, config).to(CUDA)
    eager = copy.deepcopy(model)
    fast = compiled(model)
    for step in range(6):
        inputs = [x.to(CUDA) for x in llama_inputs(config, 1, start=step)]
        equal(fast(*inputs), eager(*inputs))
    for mine, theirs in zip(model.cache(), eager.cache(), strict=True):
        equal(mine, theirs)
    assert counted() == [1]


def test_statistics_of_batch_norm_count_each_call_once():
    model = nn.BatchNorm1d(4).to(CUDA).train()
    eager = copy.deepcopy(model)
    fast = compiled(model)
    for _ in range(4):
        x = random(8, 4)
        equal(fast(x), eager(x))
    equal(model.running_mean, eager.running_mean)
    assert model.num_batches_tracked.item() == 4


@torch.no_grad()
def test_constants_of_the_host_are_captured():
    def fn(x):
        table = torch.arange(x.shape[0], dtype=torch.float32).to(x.device)
        return x * table[:, None] + torch.full((1,), 2.0).to(x.device) + torch.tensor(3.0)

    fast = compiled(fn, dynamic=True)
    for rows in (3, 5, 3):
        x = random(rows, 2)
        equal(fast(x), fn(x))
    assert counted() == [2]


# ---- the steady state


@torch.no_grad()
def test_replays_do_not_wait_for_the_device():
    model = nn.Linear(8, 8).to(CUDA)
    fast = compiled(lambda x, y: (model(x) + y, x[1:]), dynamic=True)
    inputs = [(random(n, 8), random(n, 8)) for n in (3, 4, 3, 4)]
    for pair in inputs:
        fast(*pair)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pair in inputs:
            fast(*pair)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_callers_on_other_streams_take_turns():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).to(CUDA)
    fast = compiled(model, clone_output=True)
    inputs = [random(64, 256) for _ in range(12)]
    expected = [model(x) for x in inputs]
    fast(inputs[0])
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for k, x in enumerate(inputs):
        with torch.cuda.stream(streams[k % 3]):
            got.append(fast(x))
    torch.cuda.synchronize()
    equal(got, expected)


@torch.no_grad()
def test_side_streams_are_part_of_the_graph():
    def fn(x, y):
        a = x @ y
        torch.ops.air.scope_enter(["_user_stream_label"], ["side"])
        b = torch.tanh(x) @ y
        torch.ops.air.scope_exit()
        return a + b, b

    fast = compiled(fn)
    for _ in range(3):
        x, y = random(32, 32), random(32, 32)
        equal(fast(x, y), (x @ y + torch.tanh(x) @ y, torch.tanh(x) @ y))
    assert counted() == [1]


# ---- memory


@torch.no_grad()
def test_keys_of_a_graph_share_memory():
    """Intermediates alone are in the memory of a graph: 32 MiB here, in segments of their own."""

    def fn(x):
        return (x.exp() * 2).sin() + x

    def reserved(**options: Any) -> int:
        fresh()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        fast = compiled(fn, dynamic=True, **options)
        for rows in (8192, 8191, 8190, 8189):
            x = random(rows, 1024)
            equal(fast(x), fn(x))
            del x
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    shared, apart = reserved(), reserved(reuse_graph_pool_in_same_fx=False)
    assert apart > 2.5 * shared, (shared, apart)


@torch.no_grad()
def test_results_outlive_the_graph():
    fast = compiled(lambda x: x * 2, dynamic=True)
    xs = [random(1000), random(2000)]
    kept = [fast(x) for x in xs][-1]
    del fast
    fresh()
    gc.collect()
    torch.cuda.empty_cache()
    filler = [torch.full((1000,), -1.0, device=CUDA) for _ in range(200)]
    equal(kept, xs[-1] * 2)
    del filler


@torch.no_grad()
def test_memory_is_given_back():
    def run() -> None:
        fast = compiled(lambda x: (x.exp() + 1) * x, dynamic=True)
        for rows in (1000, 2000):
            fast(random(rows, 1000))

    run()
    fresh()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        run()
        fresh()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


# ---- what cannot be captured


@torch.library.custom_op("capture_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Waits for the device, which nobody can tell from outside."""
    torch.cuda.current_stream().synchronize()
    return x + 1


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def as_good_as_new() -> None:
    """Stream, allocator, generators and captures work."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(10, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    fresh()
    fast = compiled(lambda x: torch.nn.functional.dropout(x, 0.5) + x)
    for _ in range(2):
        assert fast(torch.ones(100, device=CUDA)).min() >= 1
    assert counted() == [1]


def masked(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return torch.ops.capture_test.waits(y) * 2


def test_a_capture_that_breaks_leaves_no_trace():
    with torch.no_grad(), pytest.raises(CaptureError) as failed:
        compiled(masked, capture_fallback=False)(random(5))
    assert "capture_test.waits" in str(failed.value.node)
    assert "torch.ops.capture_test.waits(y) * 2" in str(failed.value.source)
    as_good_as_new()


@torch.no_grad()
def test_graphs_that_cannot_be_captured_run_without():
    fast = compiled_ex(masked)
    x = random(5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            equal(fast(x), masked(x))
    (text,) = [str(w.message) for w in warned if "runs without capture" in str(w.message)]
    assert "capture_test.waits" in text and "torch.ops.capture_test.waits(y) * 2" in text
    as_good_as_new()


@torch.no_grad()
def test_graphs_that_print_are_not_captured(capsys):
    def shown(x):
        npu_print("x is", x, summarize_size=1)
        return x + 1

    fast, x = compiled_ex(shown), torch.arange(5.0, device=CUDA)
    with pytest.warns(UserWarning, match="runs without capture: .*print"):
        for _ in range(2):
            equal(fast(x), x + 1)
    assert capsys.readouterr().out == "x is [0 ... 4]\n" * 2


def refused(forward: Any, *args: Any) -> CaptureError:
    """The error of a direct capture."""
    users = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    request = ToCapture(
        "graph_1", forward, list(args), ArgumentKinds(users=users), CaptureOptions()
    )
    with torch.no_grad(), pytest.raises(CaptureError) as failed:
        DeviceSubstrate(CUDA, None, Updates()).capture(request)
    as_good_as_new()
    return failed.value


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x, y: (x[x > 0],), "needs to know on the host"),
        (lambda x, y: (x * x.sum().item(),), "needs to know on the host"),
        (lambda x, y: (x.cpu(),), "between host and device"),
        (lambda x, y: (x * y.sum(),), "argument that is on the CPU"),
    ],
)
def test_what_no_recording_holds_is_refused_before_it_starts(forward, words):
    assert words in str(refused(forward, random(4), torch.tensor([2.0])))


@torch.no_grad()
def test_a_refused_graph_has_changed_nothing():
    state = random(4)
    before = state.clone()

    def forward(x, state):
        state.add_(torch.rand(4, device=CUDA))
        return (x.nonzero(),)

    kinds = ArgumentKinds(users=(0,), mutated=(1,))
    request = ToCapture("graph_1", forward, [random(4), state], kinds, CaptureOptions())
    generator = torch.cuda.get_rng_state()
    with pytest.raises(CaptureError):
        DeviceSubstrate(CUDA, None, Updates()).capture(request)
    assert torch.equal(state, before)
    assert torch.equal(torch.cuda.get_rng_state(), generator)


@torch.no_grad()
def test_a_caller_that_is_captured_gets_the_operators():
    fast = compiled(lambda x: x + 1, dynamic=True)
    fast(random(3))
    x, graph = random(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    x.fill_(2)
    graph.replay()
    equal(y, torch.full_like(y, 3))
    assert counted() == [1]
    equal(fast(x), x + 1)
    assert counted() == [2]


@torch.no_grad()
def test_a_caller_that_is_captured_is_told():
    fast = compiled(lambda x: x + 1, dynamic=True, capture_fallback=False)
    fast(random(3))
    x, graph = random(4), torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="its caller is being captured"), torch.cuda.graph(graph):
        fast(x)  # which needs a capture of its own
    equal(fast(x), x + 1)
    assert counted() == [2]
