"""Generated code against eager: whole random graphs and functions, models, training, faults."""

from __future__ import annotations

import copy
import os
import warnings
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models

pytest.importorskip("transformers")

from architectures import CASES
from compiling import compiled
from like_eager import sharing, twin
from native_check import (
    Captured,
    capture,
    check_sessions,
    check_units,
    differences,
    largest,
    native_types,
)
from random_functions import Program
from random_graphs import Maker
from tolerance import assert_close, double_copy, to_double
from torchair.codegen.cpu.target import CpuTarget
from torchair.engine.run import executor
from torchair.operators import contraction

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---- random graphs as a whole: memory, order, barriers


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_graphs(seed: int) -> None:
    check_sessions(Maker(seed, nodes=25), [lambda n: n] * 2)


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_random_graphs_of_many_sizes(seed: int) -> None:
    sizes = [lambda n: n, lambda n: n + 1, lambda n: n + 16, lambda n: 2 * n, lambda n: n]
    check_sessions(Maker(seed, nodes=18, dynamic=True), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2400))
def test_more_random_graphs(seed: int) -> None:
    made = Maker(seed, nodes=25, extreme=seed % 3 == 0, dynamic=seed % 3 == 1)
    check_units(made.graph, made.inputs)
    check_sessions(made, [lambda n: n] + [lambda n: n + 1] * made.dynamic)


# ---- random functions: values, strides, updates, sharing of memory


def _check_call(program: Program, call: Any, inputs: list[torch.Tensor], dynamic: bool) -> None:
    function = program.function()
    mine, theirs = [twin(x) for x in inputs], [twin(x) for x in inputs]
    wanted, got = list(function(*theirs)), list(call(*mine))
    truth, computed = program.wide(inputs)
    scale = largest(computed)
    pairs = zip([*got, *mine], [*wanted, *theirs], truth, strict=True)
    for k, (g, w, t) in enumerate(pairs):
        wrong = differences(g, w, t, scale)
        assert not wrong, f"{k}: {wrong}\n{program.source}"
    if not all(_same_strides(g, w) for g, w in zip(got, wanted, strict=True)):
        again = torch.compile(function, backend="aot_eager", dynamic=dynamic)
        wanted = again(*[twin(x) for x in inputs])  # tracing promised other strides than eager
        assert all(_same_strides(g, w) for g, w in zip(got, wanted, strict=True)), program.source
    assert set(sharing([*mine, *got])) <= set(sharing([*theirs, *wanted])), program.source


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    sizes = zip(a.stride(), b.stride(), a.shape, strict=True)
    return not a.numel() or all(s == t or n == 1 for s, t, n in sizes)


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_random_functions(seed: int) -> None:
    program = Program(seed)
    call = compiled(program.function())
    with torch.no_grad():
        for _ in range(2):
            _check_call(program, call, program.inputs(), dynamic=False)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_random_functions_of_many_sizes(seed: int) -> None:
    program = Program(seed)
    call = compiled(program.function(), dynamic=True)
    with torch.no_grad():
        for resize in (lambda n: n, lambda n: n + 1, lambda n: 2 * n, lambda n: n):
            inputs = program.inputs(resize)
            if _runs(program, inputs):
                _check_call(program, call, inputs, dynamic=True)


def _runs(program: Program, inputs: list[torch.Tensor]) -> bool:
    """Whether inputs of these sizes fit together in eager."""
    try:
        program.function()(*[twin(x) for x in inputs])
    except (RuntimeError, IndexError):
        return False
    return True


# ---- models


def _captured(model: nn.Module, inputs: Any, **options: bool) -> Captured:
    """The graph of a model, which has run once."""
    call = compiled(model, **options)
    with torch.no_grad(), capture() as found:
        call(**inputs) if isinstance(inputs, dict) else call(*inputs)
    (one,) = found
    return one


@pytest.mark.parametrize("name", ("llama", "qwen2", "bert", "gpt2", "vit"))
def test_transformers_are_native(name: str, record_property: Any) -> None:
    """Every unit is right, and hardly a node is left to torch."""
    case = CASES[name]
    one = _captured(case.build(torch.float32), case.arguments(2, 6, torch.float32))
    _check_share(name, one, record_property)
    assert not one.check_units().declined


def test_frozen_resnet_is_native(record_property: Any) -> None:
    config = models.RESNET["tiny"]
    model = models.build(models.ResNet, config)
    one = _captured(model, models.resnet_inputs(config), frozen_parameter=True)
    _check_share("resnet", one, record_property)


def _check_share(name: str, one: Captured, record_property: Any) -> None:
    share = one.session.summary().native_share
    record_property("native_share", share)
    print(f"{name}: {share:.1%} of the nodes are native")
    assert share > 0.95, one.fusion.report()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("bert", "llama"))
def test_dynamic_models_are_native(name: str, dtype: torch.dtype) -> None:
    """The units of a dynamic graph, with the kernels it made for the sizes of its first call."""
    if name == "bert":
        config = models.BERT["tiny explicit"]
        kind, inputs = models.Bert, models.bert_inputs(config)
    else:
        config = models.LLAMA["tiny"]
        kind, inputs = models.Llama, models.llama_inputs(config, length=5)
    model = models.build(kind, config).to(dtype)
    one = _captured(model, inputs, dynamic=True)
    assert one.session.summary().native_share > 0.9
    one.check_units()


# ---- training


class Attended(nn.Module):
    """Embedding, norms, attention written out, feed-forward."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(50, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 64), nn.Linear(64, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        batch, length, dim = x.shape
        heads = self.mix(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))
        return (x + self.down(F.gelu(self.up(self.norm2(x))))).square().mean()


class Convolved(nn.Module):
    """Convolutions, batch norm in training, pooling, a loss over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.cross_entropy(self.head(F.relu(self.second(x)).mean((2, 3))), classes)


def _trained(call: Any, model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    loss = call(*args)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def _check_training(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[Captured]:
    """Gradients are as good as eager's; gives the forward and the backward graph."""
    mine, truth = copy.deepcopy(model), double_copy(model)
    with capture() as found:
        got = _trained(compiled(mine), mine, args)
    expected = _trained(model, model, args)
    assert_close(got, expected, _trained(truth, truth, to_double(args)))
    for one in found:
        one.check_units()
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_training_of_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    forward, backward = _check_training(Attended().to(dtype), (torch.randint(50, (2, 7)),))
    types = native_types(backward.plan)
    assert {"LayerNormGradV3", "SoftmaxGrad", "GeluGrad", "MatMul", "BatchMatMul"} <= types
    by_torch = [s.node.type for s in backward.plan.steps if s.kind in ("out", "call", "late")]
    assert by_torch == ["EmbeddingDenseGrad"]
    assert forward.session.summary().native_share > 0.95
    assert backward.session.summary().native_share > 0.9


def test_training_of_convolutions() -> None:
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 16, 16), torch.randint(5, (2,)))
    forward, backward = _check_training(Convolved(), args)
    assert {"BatchNormV3", "LogSoftmaxV2", "NLLLoss", "MatMulV2"} <= native_types(forward.plan)
    types = native_types(backward.plan)
    assert {"BatchNormGradV3", "LogSoftmaxGrad", "NLLLossGrad", "ReluGrad", "MatMul"} <= types


class Points(nn.Sequential):
    """Convolutions of single points with batch norms between."""

    def __init__(self) -> None:
        ends, norms = (nn.Conv2d(3, 8, 3), MeanSquare()), (nn.BatchNorm2d(8), nn.BatchNorm2d(8))
        one, two = (nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
        super().__init__(ends[0], one, norms[0], nn.ReLU(), two, norms[1], ends[1])


def test_counters_of_batches_and_views_between_kernels_cost_no_calls() -> None:
    """Integers that no size follows from are data, and views do not part native steps."""
    torch.manual_seed(0)
    model = Points()
    forward, _ = _check_training(model, (torch.randn(2, 3, 9, 9),))
    plan = forward.plan
    assert "Add" in native_types(plan)
    assert [s.node.type for s in plan.steps if s.kind not in ("native", "view")] == ["Conv2D"]
    assert "view" in [s.kind for s in plan.steps]
    assert len(executor.Program(plan).parts) == 2  # before and after the convolution


def test_counters_of_batches_count() -> None:
    model = nn.BatchNorm2d(3)
    run = compiled(model)
    for calls in range(1, 4):
        run(torch.randn(2, 3, 4, 4))
        assert model.num_batches_tracked.item() == calls


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("last", (False, True))
def test_batch_norms_of_short_floats_beside_float32(dtype: torch.dtype, last: bool) -> None:
    """As autocast has them: parameters and statistics are of float32."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(9)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm, nn.ReLU(), MeanSquare())
    x = torch.randn(4, 9, 7, 5, dtype=dtype) + 3
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    forward, backward = _check_training(model, (x,))
    assert "BatchNormV3" in native_types(forward.plan)
    assert "BatchNormGradV3" in native_types(backward.plan)


class MeanSquare(nn.Module):
    """A loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_batch_norm_backward_keeps_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's gradient of a convolution would copy a contiguous gradient beside such an input."""
    seen: list[bool] = []

    def backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(contraction.is_channels_last(grad))
        return torch.ops.aten.convolution_backward(grad, x, *rest)

    monkeypatch.setattr(contraction, "aten", SimpleNamespace(convolution_backward=backward))
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)]
    net = nn.Sequential(*(m for layer in layers for m in layer), MeanSquare())
    last = torch.channels_last
    _check_training(net.to(memory_format=last), (torch.randn(4, 8, 6, 6).to(memory_format=last),))
    assert seen and all(seen)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("normalized", ((7,), (5, 7), (3, 5, 7)))
def test_gradients_of_norm_parameters(normalized: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sums over the leading dims, of which there may be none."""
    torch.manual_seed(0)

    class Norm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().sum()

    norm = Norm(normalized, dtype=dtype)
    nn.init.normal_(norm.weight)
    _, backward = _check_training(norm, (torch.randn(3, 5, 7, dtype=dtype),))
    kinds = {s.kind for s in backward.plan.steps}
    assert kinds <= {"native", "view"}


def test_only_wanted_parameters_get_gradients() -> None:
    norm = nn.LayerNorm(8)
    norm.bias.requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    compiled(norm)(x).square().sum().backward()
    got = [norm.weight.grad.clone(), x.grad.clone()]
    norm.weight.grad = x.grad = None
    norm(x).square().sum().backward()
    torch.testing.assert_close(got, [norm.weight.grad, x.grad])


# ---- what happens when something fails


@pytest.mark.usefixtures("fallbacks_allowed")
def test_one_unit_without_code_leaves_the_others_native(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CpuTarget.generate

    def generate(self: Any, request: Any, label: str, *config: Any) -> Any:
        if "softmax" in label:
            raise NotImplementedError("no such loops")
        return real(self, request, label, *config)

    monkeypatch.setattr(CpuTarget, "generate", generate)
    weight = torch.randn(16, 16)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x @ weight).exp() * 2, -1) @ weight

    x, call = torch.randn(4, 16), compiled(fn)
    with torch.no_grad(), capture() as found, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(call(x), fn(x))
    told = [str(w.message) for w in said if "native" in str(w.message)]
    assert len(told) == 1 and "SoftmaxV2" in told[0] and "no such loops" in told[0]
    kinds = [s.kind for s in found[0].plan.steps if s.kind != "view"]
    assert kinds[0] == kinds[-1] == "native" and set(kinds) > {"native"}


def test_bad_index_names_its_line_and_the_next_call_works() -> None:
    """Of several lookups in one program, the error names the one that failed; state stays."""
    first, second = torch.randn(9, 4), torch.randn(5, 4)

    def lookup(i: torch.Tensor, j: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        a = first[i]
        b = second[j] * 2  # this line
        return (a + b).sum(0) + total

    call, total = compiled(lookup), torch.zeros(4)
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 7])
    with torch.no_grad():
        wanted = lookup(good, good, total)
        torch.testing.assert_close(call(good, good, total), wanted)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"out of range(.|\n)*# this line"):
                call(good, bad, total)
            torch.testing.assert_close(call(good, good, total), wanted)
            torch.testing.assert_close(call(bad, good, total), lookup(bad, good, total))


@pytest.mark.parametrize("dynamic", [False, True])
def test_operands_that_are_joined_or_padded_in_pieces(dynamic: bool) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        along = torch.cat((x.relu(), y, x), 1) * 2
        inside = torch.cat((x, y), 2).sigmoid()
        padded = F.pad(x, (0, 0, 40, 24), value=3.0) + 1
        return along, inside, padded, torch.cat((x, y), 1).sum(2)

    call = compiled(model, dynamic=dynamic)
    for rows in (32, 70, 70, 33) if dynamic else (32,):
        x, y = torch.randn(3, rows, 64), torch.randn(3, rows, 64)
        for ours, eager in zip(call(x, y), model(x, y), strict=True):
            torch.testing.assert_close(ours, eager)
