"""The same compiler on CUDA tensors; run with `make test-cuda` on a machine with a GPU."""

import copy
import json
import random
import threading

import pytest
import torch

import torchair
from compiling import compiled
from lane_tools import Delays, Sessions
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
from random_graphs import Maker
from tolerance import assert_close_to_reference
from torchair import ge, scope
from torchair.engine.inspect.check import check_plan
from torchair.engine.run.executor import Program
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError, InputError
from torchair.pipeline import NpuFxCompiler

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_dynamo")]

CASES = {
    "mlp": (Mlp, MLP["tiny"], lambda c: mlp_inputs(c), lambda c: mlp_inputs(c, 7)),
    "resnet": (ResNet, RESNET["tiny"], lambda c: resnet_inputs(c), lambda c: resnet_inputs(c, 3)),
    "bert": (
        Bert, BERT["tiny"], lambda c: bert_inputs(c, 2, 12), lambda c: bert_inputs(c, 3, 9)
    ),
    "bert explicit": (
        Bert, BERT["tiny explicit"], lambda c: bert_inputs(c, 2, 12),
        lambda c: bert_inputs(c, 3, 9),
    ),
}  # fmt: skip


def to_cuda(inputs, dtype):
    return tuple(x.to("cuda", dtype if x.is_floating_point() else None) for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_models_equal_eager(case, dynamic, dtype):
    kind, config, first, second = CASES[case]
    model = build(kind, config).to("cuda", dtype)
    fast = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True)
    for make in (first, second) if dynamic else (first,):
        inputs = to_cuda(make(config), dtype)
        got = fast(*inputs)
        assert got.device.type == "cuda"
        assert_close_to_reference(model, inputs, got, model(*inputs))


@pytest.mark.parametrize("preset", ["tiny", "tiny explicit"])
@torch.no_grad()
def test_decoder_updates_its_cache(preset):
    config = LLAMA[preset]
    model = build(Llama, config).cuda()
    eager = copy.deepcopy(model)
    fast = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False, fullgraph=True)
    for step in range(4):
        inputs = to_cuda(llama_inputs(config, 1, start=step), torch.float32)
        torch.testing.assert_close(fast(*inputs), eager(*inputs), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(model.cache(), eager.cache(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_training_step_equals_eager():
    config = MLP["tiny"]
    model = build(Mlp, config).cuda().train()
    eager = copy.deepcopy(model)
    (x,) = to_cuda(mlp_inputs(config), torch.float32)
    torch.compile(model, backend=torchair.get_npu_backend())(x).square().sum().backward()
    eager(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_streams_and_threads_do_not_share_buffers():
    model = build(Mlp, MLP["16 layers"]).cuda()
    fast = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
    inputs = [torch.randn(4, 64, device="cuda") for _ in range(8)]
    fast(inputs[0])
    expected = [model(x) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(20):
                got = fast(inputs[i])
            stream.synchronize()
        if not torch.allclose(got, expected[i], rtol=1e-4, atol=1e-4):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@torch.no_grad()
def test_cpu_tensor_into_a_cuda_graph_is_a_clear_error():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4, device="cuda")
    traced = make_fx(lambda a: torch.relu(a) + 1, tracing_mode="fake")(x)
    run = NpuFxCompiler()(traced, [x])
    torch.testing.assert_close(run(x)[0], torch.relu(x) + 1)
    with pytest.raises(InputError, match="cpu"):
        run(x.cpu())


@torch.no_grad()
def test_mixed_devices_and_creation():
    def fn(x, scale):
        mask = torch.arange(x.shape[1], device=x.device) < 3
        return torch.where(mask, x, torch.zeros_like(x)) * scale + torch.full((1,), 2.0).cuda()

    fast = torch.compile(fn, backend=torchair.get_npu_backend(), dynamic=True)
    for n in (5, 8):
        x = torch.randn(2, n, device="cuda")
        torch.testing.assert_close(fast(x, 3), fn(x, 3))
        torch.testing.assert_close(fast(x, torch.tensor(2.5)), fn(x, torch.tensor(2.5)))


# ---- streams


class _Sleeps(Delays):
    """The device sleeps before some steps, on the stream of their lane."""

    def wrap(self, run, steps, lane):
        def delayed(registers):
            if self._pick.random() < 0.5:
                torch.cuda._sleep(self._pick.randrange(200_000))
            run(registers)

        return delayed


def _branches(x, y):
    with scope.npu_stream_switch("left"):
        a = torch.softmax(x @ y, -1)
        a = torch.roll(a, 1, 0).sort(-1).values
    with scope.npu_stream_switch("right"):
        b = torch.roll(torch.tanh(y @ x), 1, 1)
        b = b.cumsum(0) - b.mean()
    return a + b, a.sum(), b, torch.roll(a, 3, 0)


@torch.no_grad()
def test_labels_are_streams_of_the_device(monkeypatch):
    sessions = Sessions(monkeypatch)
    sessions.watch = _Sleeps()
    fast = compiled(_branches)
    for _ in range(5):
        x, y = torch.randn(2, 512, 512, device="cuda").unbind()
        wanted = _branches(x, y)
        for _ in range(20):
            got = fast(x, y)
            again = [t.clone() for t in got]
            del got  # the next call may have this memory
            for g, w in zip(again, wanted, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert sessions.plan.schedule.lanes == ["", "left", "right"]
    assert check_plan(sessions.plan) == []


@torch.no_grad()
def test_updates_in_place_on_streams(monkeypatch):
    def step(cache, new):
        with scope.npu_stream_switch("reader"):
            old = torch.exp(cache).cumsum(0)
        with scope.npu_stream_switch("writer"):
            cache.mul_(0.5).add_(new)
        return old, cache - 1

    sessions = Sessions(monkeypatch)
    sessions.watch = _Sleeps()
    fast = compiled(step)
    mine, new = torch.randn(2, 256, 256, device="cuda").unbind()
    mine, theirs = mine.clone(), mine.clone()
    for _ in range(30):
        for got, wanted in zip(fast(mine, new), step(theirs, new), strict=True):
            torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_on_streams(seed):
    pick = random.Random(seed)
    made = Maker(seed, nodes=20)
    for node in made.graph.nodes:
        if node.type not in ("Data", "Const", "NetOutput") and pick.random() < 0.6:
            node.attrs["_user_stream_label"] = ge.attr.Str(pick.choice("ab"))
    session = TorchNpuGraph("random")
    session.load(made.graph, device="cuda:0")
    session.watch = _Sleeps(seed)
    inputs = [t.cuda() for t in made.inputs]
    try:
        got = session.run(inputs)
    except GraphError as e:
        assert "not implemented for" in str(e)  # types that torch has no kernel for on CUDA
        return
    plan = session.last_plan()
    with torch.no_grad():
        wanted = Program(plan).run(inputs)
    for _ in range(5):
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g, w, equal_nan=True)
        got = session.run(inputs)


@torch.library.custom_op("lane_test::positive", mutates_args=())
def _positive(x: torch.Tensor) -> torch.Tensor:
    if x.min() <= 0:
        raise ValueError("not positive")
    return x.clone()


_positive.register_fake(torch.empty_like)


@torch.no_grad()
def test_an_error_on_a_stream_leaves_the_graph_usable():
    def model(x, y):
        with scope.npu_stream_switch("s"):
            a = torch.ops.lane_test.positive(x)
        return a, y.cumsum(0)

    fast = compiled(model)
    good, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    for x in (good, -good, good):
        if x is good:
            torch.testing.assert_close(fast(x, y), model(x, y))
        else:
            with pytest.raises(GraphError, match="not positive"):
                fast(x, y)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@torch.no_grad()
def test_streams_from_threads_and_in_a_graph_capture():
    fast = compiled(_branches)
    x, y = torch.randn(2, 64, 64, device="cuda").unbind()
    wanted = _branches(x, y)
    wrong = []

    def work():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = fast(x, y)
            torch.cuda.current_stream().synchronize()
        if not all(torch.allclose(g, w, atol=1e-4) for g, w in zip(got, wanted, strict=True)):
            wrong.append(got)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fast(x, y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            got = fast(x, y)
    x += 1
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, _branches(x, y), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_timeline_of_device_streams(tmp_path):
    config = torchair.CompilerConfig()
    config.debug.timeline.type = "json"
    config.debug.timeline.path = str(tmp_path)
    fast = compiled(_branches, config)
    x, y = torch.randn(2, 64, 64, device="cuda").unbind()
    fast(x, y)
    fast(x, y)
    (path,) = tmp_path.iterdir()
    slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["stream"] for e in slices} == {"", "left", "right"}
    assert all(e["dur"] >= 0 for e in slices)
