"""The engine on a GPU as a whole: random functions, architectures of transformers, tokens, sizes
that vary, bad indices. Run with `make test-cuda`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiling import compiled
from like_eager import twin
from models import LLAMA, Llama, build, llama_inputs
from quantised import quantise
from random_functions import Program
from tolerance import assert_close, assert_close_to_reference, double_copy, to_double
from torchair.ascend import ops as npu

pytestmark = pytest.mark.cuda
MODES = ("max-autotune", "reduce-overhead")
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mistral", "gpt2", "bert", "roberta", "t5", "vit", "gemma", "opt",
    "distilbert", "phi", "bart",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def on_gpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.cuda()
    if isinstance(tree, dict):
        return {k: on_gpu(v) for k, v in tree.items()}
    return type(tree)(map(on_gpu, tree)) if isinstance(tree, (list, tuple)) else tree


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, mode: str) -> None:
    from architectures import CASES, MORE

    case = (CASES | MORE)[name]
    model = case.build(torch.float32).cuda()
    inputs = on_gpu(case.arguments(2, 6, torch.float32))
    fast = compiled(model, mode=mode, fullgraph=False)
    for _ in range(2):
        assert_close_to_reference(model, inputs, fast(**inputs), model(**inputs))


@pytest.mark.parametrize("seed", range(24))
def test_random_functions(seed: int) -> None:
    program = Program(seed)
    fn = program.function()
    call = compiled(fn, mode=MODES[seed % 2], fullgraph=False)
    for _ in range(2):
        inputs = on_gpu(program.inputs(lambda n: n))
        eager, got = fn(*map(twin, inputs)), call(*map(twin, inputs))
        truth, _ = program.wide([twin(x) for x in inputs])
        for g, e, t in zip(got, eager, truth, strict=False):
            assert_close([g], [e], [t])


def test_tokens_of_a_billion_parameters() -> None:
    with torch.device("cuda"):
        model = build(Llama, LLAMA["1B"])
    again = copy.deepcopy(model)
    fast = compiled(again)
    tokens, positions = on_gpu(llama_inputs(LLAMA["1B"], 1))
    for step in range(64):
        following = model(tokens, positions).reshape(1, -1).argmax(-1)
        got = fast(tokens, positions).reshape(1, -1).argmax(-1)
        assert torch.equal(got, following), step
        tokens, positions = following.reshape(1, 1), positions + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", (1, 3, 16))
def test_decoding_in_bfloat16(batch: int, mode: str) -> None:
    config = replace(LLAMA["1B"], layers=2, vocab=1000, batch=batch, context=64)
    model = build(Llama, config).cuda().to(torch.bfloat16)
    again, wide = copy.deepcopy(model), double_copy(model)
    fast = compiled(again, mode=mode)
    for step in range(4):
        inputs = on_gpu(llama_inputs(config, 1, start=step))
        assert_close(fast(*inputs), model(*inputs), wide(*to_double(inputs)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 32), (4, 0), (4, 32), (4, 128)])
def test_decoding_with_quantised_weights(bits: int, group: int, mode: str) -> None:
    """Each of three steps with 1, 3 and 16 rows: the last one by the library."""
    for batch in (1, 3, 16):
        config = replace(LLAMA["1B"], layers=2, vocab=1000, batch=batch, context=64)
        model = build(Llama, config).cuda().to(torch.bfloat16)
        quantise(model, bits, group)
        fast, wide = compiled(copy.deepcopy(model), mode=mode), double_copy(model)
        for step in range(3):
            inputs = on_gpu(llama_inputs(config, 1, start=step))
            assert_close(fast(*inputs), model(*inputs), wide(*to_double(inputs)))
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [0, 64])
def test_weights_of_torch_npu(group: int, dtype: torch.dtype) -> None:
    npu.define()
    k, n = 512, 200
    weight = torch.randint(-128, 128, (k, n), dtype=torch.int8, device="cuda")
    rows = k // group if group else 1
    scale = (torch.rand(rows, n, device="cuda") * 0.01).to(dtype)
    offset = torch.randint(-9, 9, (rows, n), device="cuda").to(dtype)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.scale, self.offset = torch.nn.Parameter(scale), torch.nn.Parameter(offset)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.npu.npu_weight_quant_batchmatmul(
                x, self.weight, self.scale, self.offset, antiquant_group_size=group
            )

    model = Product().requires_grad_(False)
    fast = compiled(model, dynamic=False)
    shifts, factors = (x.double().repeat_interleave(k // rows, 0) for x in (offset, scale))
    whole = (weight.double() + shifts) * factors
    for length in (1, 4, 7):
        x = torch.randn(length, k, device="cuda", dtype=dtype)
        truth = x.double() @ whole
        assert_close(fast(x), model(x), truth)


def test_sizes_that_vary() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.layer_norm(x, x.shape[-1:]) @ w, -1) + 1

    fast = compiled(fn, dynamic=True)
    w = torch.randn(24, 24, device="cuda")
    for rows in (2, 3, 5, 16, 129, 3, 2):
        x = torch.randn(rows, 24, device="cuda")
        torch.testing.assert_close(fast(x, w), fn(x, w), rtol=1e-4, atol=1e-5)


def test_a_bad_index_is_told_by_the_next_call() -> None:
    table, good = torch.randn(10, 8, device="cuda"), torch.tensor([1, 2], device="cuda")
    fast = compiled(lambda t, i: t[i] * 2)
    torch.testing.assert_close(fast(table, good), table[good] * 2)
    fast(table, torch.tensor([1, 99], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="index is out of range"):
        fast(table, good)
    torch.testing.assert_close(fast(table, good), table[good] * 2)
