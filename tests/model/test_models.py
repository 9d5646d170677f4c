"""Whole models through torch.compile: equal to eager within what float64 says is rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from compiling import compiled
from generic_nodes import collect_generic_nodes, report
from tolerance import assert_close, assert_close_to_reference, double_copy, to_double

FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A model and two sets of inputs; the second has other sizes."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    other_inputs: Callable[[torch.dtype], tuple[Tensor, ...]]


def _bert(config: models.BertConfig) -> Case:
    return Case(
        lambda: models.build(models.Bert, config),
        lambda dtype: models.bert_inputs(config),
        lambda dtype: models.bert_inputs(config, batch=3, length=17, seed=1),
    )


_mlp, _resnet = models.MLP["tiny"], models.RESNET["tiny"]
CASES = {
    "mlp": Case(
        lambda: models.build(models.Mlp, _mlp),
        lambda dtype: models.mlp_inputs(_mlp, dtype=dtype),
        lambda dtype: models.mlp_inputs(_mlp, batch=7, dtype=dtype, seed=1),
    ),
    "resnet": Case(
        lambda: models.build(models.ResNet, _resnet),
        lambda dtype: models.resnet_inputs(_resnet, dtype=dtype),
        lambda dtype: models.resnet_inputs(_resnet, batch=3, image=48, dtype=dtype, seed=1),
    ),
    "bert": _bert(models.BERT["tiny"]),
    "bert explicit": _bert(models.BERT["tiny explicit"]),
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---- the yardstick


@pytest.mark.parametrize("dtype", FLOATS, ids=("float32", "bfloat16"))
def test_tolerance_takes_rounding_and_refuses_faults(dtype: torch.dtype) -> None:
    case = CASES["mlp"]
    model, inputs = case.build().to(dtype), case.inputs(dtype)
    with torch.no_grad():
        eager = model(*inputs)
    assert_close_to_reference(model, inputs, eager, eager)
    truth = double_copy(model)(*to_double(inputs))
    assert_close_to_reference(model, inputs, truth.to(dtype), eager)
    for fault in (128 * torch.finfo(dtype).eps, float("nan")):
        wrong = eager.clone()
        wrong[1, 2] += fault
        with pytest.raises(AssertionError, match="result 0"):
            assert_close_to_reference(model, inputs, wrong, eager)


# ---- inference


@pytest.mark.parametrize("dtype", FLOATS, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", CASES)
def test_inference(name: str, dynamic: bool, dtype: torch.dtype, record_property: Any) -> None:
    case = CASES[name]
    model = case.build().to(dtype)
    fast = compiled(model, dynamic=dynamic)
    sizes = [case.inputs, case.other_inputs, case.inputs] if dynamic else [case.inputs] * 2
    with torch.no_grad(), collect_generic_nodes() as generic:
        for make in sizes:
            inputs = make(dtype)
            assert_close_to_reference(model, inputs, fast(*inputs), model(*inputs))
    report(name, generic, record_property)


@pytest.mark.parametrize("name", CASES)
def test_a_result_outlives_the_next_call(name: str) -> None:
    case = CASES[name]
    fast = compiled(case.build(), dynamic=False)
    inputs = case.inputs(torch.float32)
    with torch.no_grad():
        first = fast(*inputs)
        kept = first.clone()
        changed = [x * 2 if x.is_floating_point() else x.flip(0) for x in inputs]
        second = fast(*changed)
        assert torch.equal(first, kept) and not torch.equal(first, second)


def test_calls_from_several_threads_do_not_share_memory() -> None:
    case, config = CASES["bert"], models.BERT["tiny"]
    model = case.build()
    fast = compiled(model, dynamic=False)
    calls = [models.bert_inputs(config, seed=seed) for seed in range(32)]

    @torch.no_grad()
    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        return fast(*inputs)

    run(calls[0])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, calls))
    with torch.no_grad():
        for inputs, got in zip(calls, results, strict=True):
            assert_close_to_reference(model, inputs, got, model(*inputs))


def test_a_step_may_read_a_value_and_its_transpose() -> None:
    """Its result must not be written over the value while the transpose is still read."""

    def symmetric(x: Tensor) -> Tensor:
        y = x.exp()
        z = y + y.t()
        return torch.where(x > 0, z, z.t()) * 2

    x = models.mlp_inputs(models.MlpConfig(dim=8), batch=8)[0]
    torch.testing.assert_close(compiled(symmetric, dynamic=False)(x), symmetric(x))


# ---- Llama with a cache


@pytest.mark.parametrize("dtype", FLOATS, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", ("tiny", "tiny explicit"))
def test_llama_decodes_with_a_static_cache(
    name: str, dynamic: bool, dtype: torch.dtype, record_property: Any
) -> None:
    """A prompt and steps, the eager copy and the float64 copy in step; logits and cache agree."""
    config = models.LLAMA[name]
    eager = models.build(models.Llama, config).to(dtype)
    mine, truth = copy.deepcopy(eager), double_copy(eager)
    fast = compiled(mine, dynamic=dynamic)
    with torch.no_grad(), collect_generic_nodes() as generic:
        start = 0
        for length in (7, 1, 1, 4, 1, 1) if dynamic else (1,) * 5:
            inputs = models.llama_inputs(config, length, start)
            assert_close(fast(*inputs), eager(*inputs), truth(*to_double(inputs)))
            assert_close(mine.cache(), eager.cache(), truth.cache())
            start += length
    assert all(x[:, :, :start].any(-1).all() and not x[:, :, start:].any() for x in mine.cache())
    report(f"llama {name}", generic, record_property)


def test_compiled_and_eager_steps_share_a_cache() -> None:
    """The cache a compiled step leaves behind is what an eager step continues from."""
    config = models.LLAMA["tiny"]
    eager = models.build(models.Llama, config)
    mine, truth = copy.deepcopy(eager), double_copy(eager)
    fast = compiled(mine, dynamic=False)
    with torch.no_grad():
        for start in range(6):
            inputs = models.llama_inputs(config, 1, start)
            got = (fast if start % 2 else mine)(*inputs)
            assert_close(got, eager(*inputs), truth(*to_double(inputs)))
            assert_close(mine.cache(), eager.cache(), truth.cache())


# ---- training


@pytest.mark.parametrize("dtype", FLOATS, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", ("mlp", "resnet"))
def test_training(name: str, dynamic: bool, dtype: torch.dtype, record_property: Any) -> None:
    """Loss, gradients, SGD steps and, in batch norm, running statistics agree with eager."""
    case = CASES[name]
    eager = case.build().to(dtype).train()
    mine, truth = copy.deepcopy(eager), double_copy(eager)
    fast = compiled(mine, dynamic=dynamic)
    with collect_generic_nodes() as generic:
        for make in (case.inputs, case.other_inputs if dynamic else case.inputs):
            inputs = make(dtype)
            got, expected = _step(fast, mine, inputs), _step(eager, eager, inputs)
            assert_close(got, expected, _step(truth, truth, to_double(inputs)))
    report(f"{name} training", generic, record_property)


def _step(call: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """One step of SGD: loss, gradients of inputs and parameters, the state after it."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    loss = call(*inputs).square().mean()
    loss.backward()
    gradients = [x.grad for x in (*inputs, *model.parameters())]
    assert all(g is not None for g in gradients)
    optimizer.step()
    state = model.state_dict().values()
    return [loss, *(g.clone() for g in gradients), *(x.clone() for x in state)]
