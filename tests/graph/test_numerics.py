"""`config.numerics`: eager's bits under `strict`, results of a row whatever the batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchair
from models import Bert, BertConfig, bert_inputs, build
from native_check import capture
from torchair.convert.exact import keeps_bits
from torchair.verification.judge import same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")  # each test compiles the same forward

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def config(numerics: str, frozen: bool = False) -> torchair.CompilerConfig:
    made = torchair.CompilerConfig()
    made.numerics = numerics
    made.experimental_config.frozen_parameter = frozen
    return made


@contextmanager
def working_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Block(nn.Module):
    """Norms, products, attention, a gated activation and a softmax."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 80), nn.Linear(width, 80)
        self.down, self.head = nn.Linear(80, width), nn.Linear(width, 99)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        parts = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(b, t, width)
        x = x + self.out(mixed)
        y = self.after(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y) * 0.7)
        return F.log_softmax(self.head(x), -1)


# ---- default


def test_equal_elements_deviate_from_their_mean_by_nothing() -> None:
    """Were the mean off by a rounding error, that over the root of epsilon would be the result."""
    rows = (100 * torch.randn(40, 1)).repeat(1, 1000)
    norm = torchair.compile(lambda x: F.layer_norm(x, x.shape[1:]), (rows,))
    assert torch.equal(norm(rows), torch.zeros_like(rows))


# ---- strict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strict_values_and_gradients_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype)
    twin = copy.deepcopy(model)
    backend = torchair.get_npu_backend(compiler_config=config("strict"))
    compiled = torch.compile(twin, backend=backend)
    x = torch.randn(3, 7, 32).to(dtype)
    with torch.no_grad():
        assert same_bits(compiled(x), model(x))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for run, mine in zip((model, compiled), inputs, strict=True):
        run(mine).square().sum().backward()
    assert same_bits(inputs[1].grad, inputs[0].grad)
    for (name, a), b in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad), name


def test_strict_dropout_draws_what_eager_draws() -> None:
    def model(x: Tensor) -> Tensor:
        return F.dropout(x * x, 0.3, training=True) + torch.rand_like(x)

    x = torch.randn(9, 33)
    compiled = torchair.compile(model, (x,), config=config("strict"))
    results = []
    for run in (model, compiled):
        torch.manual_seed(3)
        results.append(run(x))
    assert same_bits(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_strict_stores_what_eager_stores(dtype: torch.dtype) -> None:
    """A chain that would keep unrounded numbers in registers."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return ((x * y + x) * y - x / y).to(torch.float32) * 3.0

    x, y = (torch.randn(5, 37).to(dtype) for _ in range(2))
    assert same_bits(torchair.compile(model, (x, y), config=config("strict"))(x, y), model(x, y))


def test_strict_sums_of_a_slice_are_ordered_as_in_eager() -> None:
    """torch's kernels add up a tensor with gaps row by row, one without gaps as a whole."""

    def model(x: Tensor) -> Tensor:
        return (x + 0.1)[:, :50].sum()

    x = torch.randn(64, 77)
    assert same_bits(torchair.compile(model, (x,), config=config("strict"))(x), model(x))


def test_strict_updates_arguments() -> None:
    def model(cache: Tensor, place: Tensor, new: Tensor) -> Tensor:
        cache[0].index_copy_(0, place, new)
        return cache.softmax(-1)

    caches = [torch.ones(2, 4, 3) for _ in range(2)]
    place, new = torch.tensor([1]), torch.randn(1, 3)
    backend = torchair.get_npu_backend(compiler_config=config("strict"))
    compiled = torch.compile(model, backend=backend)
    assert same_bits(compiled(caches[0], place, new), model(caches[1], place, new))
    assert same_bits(*caches)


def test_strict_sizes_of_results_are_known_to_plans() -> None:
    def model(x: Tensor) -> Tensor:
        return x[::3].repeat_interleave(2, 0).softmax(0)

    backend = torchair.get_npu_backend(compiler_config=config("strict"))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (7, 11):
        x = torch.randn(rows)
        assert same_bits(compiled(x), model(x))


def node(target: Any, *operands: Any, result: torch.dtype = torch.float32) -> fx.Node:
    graph = fx.Graph()
    args = []
    for operand in operands:
        if isinstance(operand, torch.dtype):
            args.append(graph.placeholder("x"))
            args[-1].meta["val"] = torch.empty(2, dtype=operand)
        else:
            args.append(operand)
    made = graph.call_function(target, tuple(args))
    made.meta["val"] = torch.empty(2, dtype=result)
    return made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (node(aten.add.Tensor, torch.float32, torch.float32), True),
        (node(aten.add.Tensor, torch.float32, torch.float32, 0.5), False),  # torch may fuse alpha
        (node(aten.mul.Tensor, torch.float32, 0.1), True),
        (node(aten.mul.Tensor, torch.bfloat16, 0.1, result=torch.bfloat16), False),  # in float32
        (node(aten.div.Tensor, torch.int64, torch.int64), False),
        (node(aten.relu.default, torch.bfloat16, result=torch.bfloat16), True),
        (node(aten._to_copy.default, torch.float32, result=torch.int32), False),
        (node(aten._to_copy.default, torch.int32), True),
        (node(aten.exp.default, torch.float32), False),
        (node(aten.sqrt.default, torch.float32), False),  # of a library that rounds otherwise
        (node(aten.bernoulli.default, torch.float32), False),
        (node(aten.view.default, torch.float32, [2]), True),
    ],
    ids=lambda v: str(v) if isinstance(v, bool) else str(v.target),
)
def test_which_operators_keep_bits(given: fx.Node, expected: bool) -> None:
    assert keeps_bits(given) == expected


def test_verify_judges_bits_under_strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torchair.convert import interpreter

    def model(x: Tensor) -> Tensor:
        return F.gelu(x) * 2

    x = torch.randn(40, 41)
    assert torchair.verify(model, x, config=config("strict"), folder=tmp_path)
    monkeypatch.setattr(interpreter, "keeps_bits", lambda node: True)
    report = torchair.verify(model, x, config=config("strict"), folder=tmp_path)
    assert not report
    assert "gelu" in str(report) and "other bits" in str(report)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant"):
        config("exact")


# ---- batch_invariant


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, frozen: bool) -> None:
    torch.manual_seed(1)
    model, x = Block().to(dtype).eval(), torch.randn(33, 5, 32).to(dtype)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        backend = torchair.get_npu_backend(compiler_config=config("batch_invariant", frozen))
        compiled = torch.compile(model, backend=backend, dynamic=True)
        whole = compiled(x)
        for rows, threads in ((1, 2), (2, 1), (3, 2), (8, 1), (17, 2)):
            with working_threads(threads):
                assert same_bits(compiled(x[:rows]), whole[:rows]), (rows, threads)


def test_what_is_fused_changes_no_bit() -> None:
    """With a batch of one the positions have the dims of the words, so other nodes are fused."""
    given, fused = BertConfig(1, 64, 2, 128), []
    model, inputs = build(Bert, given).to(torch.bfloat16), bert_inputs(given, 4, 9)
    results = []
    for batch in (1, 4):
        with warnings.catch_warnings(), torch.no_grad(), capture() as found:
            warnings.simplefilter("ignore")
            backend = torchair.get_npu_backend(compiler_config=config("batch_invariant"))
            torch._dynamo.reset()
            rows = [x[:batch] for x in inputs]
            results.append(torch.compile(model, backend=backend, dynamic=False)(*rows))
        fused.append(sorted(len(u.nodes) for u in found[0].session.current.units.fusion.units))
    assert fused[0] != fused[1]
    assert same_bits(results[0], results[1][:1])


def test_a_row_of_images_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 7),
    ).eval()
    x = torch.randn(9, 32, 12, 12)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        results = [
            torchair.compile(model, (x[:n],), config=config("batch_invariant", frozen=True))(x[:n])
            for n in (1, 9)
        ]
    assert same_bits(results[0], results[1][:1])


def test_operators_that_torch_computes_are_named() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="torch's kernels compute Conv2D"):
        torchair.compile(model, (x,), config=config("batch_invariant"))(x)
