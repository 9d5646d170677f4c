"""Whole models on a GPU that is not here: every kernel of their plans runs on the machine of numpy.
Results are as exact as eager's; under batch-invariant numerics a row has the same bits alone and in
a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchair
from compiling import compiled
from models import (
    Bert,
    BertConfig,
    Llama,
    LlamaConfig,
    Mlp,
    MlpConfig,
    bert_inputs,
    build,
    llama_inputs,
    mlp_inputs,
)
from native_check import check_sessions
from ptx_target import PtxTarget
from quantised import quantise
from random_graphs import Maker
from tolerance import assert_close, double_copy, to_double
from torchair.codegen.cuda.jit import describe
from torchair.engine.compile import TARGETS
from torchair.verification.judge import same_bits

MOST = 6
BATCHES = (1, 2, 5)
SMALL = LlamaConfig(1, 64, 2, 1, 32, 128, 96, 40, attention="grouped")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxTarget]:
    """One with three multiprocessors instead of the CPU."""
    target = PtxTarget(describe((9, 0), 3))
    monkeypatch.setitem(TARGETS, "cpu", lambda index: target)
    torch._dynamo.reset()
    with torch.no_grad():
        yield target
    torch._dynamo.reset()


class Model:
    """A model for some batch, and its calls one after the other, for the largest batch."""

    def __init__(
        self, make: Callable[[int], nn.Module], calls: list[tuple[Tensor, ...]], by_row: list[int]
    ) -> None:
        """`by_row` are the arguments that have a row for each member of the batch."""
        self.make, self.calls, self._by_row = make, calls, by_row

    def arguments(self, call: tuple[Tensor, ...], batch: int) -> list[Tensor]:
        return [x[:batch] if k in self._by_row else x for k, x in enumerate(call)]

    def run(self, batch: int, numerics: str, dynamic: bool | None = False) -> list[Tensor]:
        """The results of all calls, with memory of their own."""
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.numerics = numerics
        fast = compiled(self.make(batch), config, dynamic=dynamic)
        return [fast(*self.arguments(call, batch)).clone() for call in self.calls]


def mlp() -> Model:
    config = MlpConfig(2, 64)
    calls = [mlp_inputs(config, MOST, torch.bfloat16)]
    return Model(lambda batch: build(Mlp, config).to(torch.bfloat16), calls, [0])


def bert() -> Model:
    config = BertConfig(1, 64, 2, 128)
    calls = [bert_inputs(config, MOST, 9)]
    return Model(lambda batch: build(Bert, config).to(torch.bfloat16), calls, [0, 1, 2])


def llama(bits: int = 0) -> Model:
    """A prompt of some tokens, then two of one."""

    def make(batch: int) -> nn.Module:
        model = build(Llama, replace(SMALL, batch=batch)).to(torch.bfloat16)
        if bits:
            quantise(model, bits, 32)
        return model

    wide = replace(SMALL, batch=MOST)
    steps = ((0, 7), (7, 1), (8, 1))
    return Model(make, [llama_inputs(wide, count, start) for start, count in steps], [0])


MODELS: dict[str, Callable[[], Model]] = {"mlp": mlp, "bert": bert, "llama": llama}


@pytest.mark.parametrize("batch", [1, MOST])
@pytest.mark.parametrize("name", [*MODELS, "llama of 4 bits"])
@pytest.mark.filterwarnings("ignore")
def test_models_are_as_exact_as_eager(name: str, batch: int, gpu: PtxTarget) -> None:
    model = llama(4) if name.endswith("bits") else MODELS[name]()
    eager = model.make(batch)
    wide = double_copy(eager)
    for call, got in zip(model.calls, model.run(batch, "default"), strict=True):
        given: Any = model.arguments(call, batch)
        assert_close(got, eager(*copy.deepcopy(given)), wide(*to_double(given)))
    assert gpu.ran


@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_depend_on_its_batch(name: str, gpu: PtxTarget) -> None:
    model = MODELS[name]()
    among = model.run(MOST, "batch_invariant")
    exact = double_copy(model.make(MOST))
    eager = model.make(MOST)
    for call, got in zip(model.calls, among, strict=True):
        assert_close(got, eager(*call), exact(*to_double(call)))
    for batch in BATCHES:
        for found, expected in zip(model.run(batch, "batch_invariant"), among, strict=True):
            assert same_bits(found, expected[:batch]), batch
    assert gpu.ran


@pytest.mark.filterwarnings("ignore:numerics")  # attention of a length that is not known
@pytest.mark.parametrize("name", ["mlp", "bert"])
def test_a_row_does_not_depend_on_whether_the_batch_is_known(name: str, gpu: PtxTarget) -> None:
    model = MODELS[name]()
    among = model.run(MOST, "batch_invariant")
    gpu.ran.clear()
    for batch in (2, 3):
        for found, expected in zip(model.run(batch, "batch_invariant", True), among, strict=True):
            assert same_bits(found, expected[:batch]), batch
    assert gpu.ran


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_usually_a_row_depends_on_its_batch(name: str) -> None:
    model = MODELS[name]()
    pairs = zip(model.run(1, "default"), model.run(MOST, "default"), strict=True)
    assert not all(same_bits(alone, among[:1]) for alone, among in pairs)


@pytest.mark.parametrize("seed", range(2000, 2012))
@pytest.mark.filterwarnings("ignore")
def test_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch, gpu: PtxTarget) -> None:
    """Over memory that holds no numbers before: a value that another one overwrites shows."""
    monkeypatch.setenv("TORCHAIR_POISON", "1")
    check_sessions(Maker(seed, nodes=25), [lambda n: n] * 2)
    assert gpu.ran
