"""The same compiler on CUDA tensors; run with `make test-cuda` on a machine with a GPU."""

import copy
import threading

import pytest
import torch

import torchair
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
from torchair.errors import InputError
from torchair.pipeline import NpuFxCompiler

pytestmark = pytest.mark.cuda

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


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_models_equal_eager(case, dynamic, dtype):
    kind, config, first, second = CASES[case]
    model = build(kind, config).to("cuda", dtype)
    fast = torch.compile(
        model, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True
    )
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
