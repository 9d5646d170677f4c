"""The CPU engine as a whole: every unit against the operator table, models, fallbacks, threads."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import torchair
from compiling import compiled_afresh as compiled
from like_eager import twin
from native_check import capture, check_units, differences, largest, native_types
from random_functions import Program
from random_graphs import Maker
from torchair.codegen.cpu.target import cpu
from torchair.codegen.poison import Area, pattern
from torchair.engine.session import TorchNpuGraph
from torchair.engine.units import native_units

# ---- every unit of random graphs


@pytest.mark.parametrize("seed", range(40))
def test_units_of_random_graphs(seed: int) -> None:
    made = Maker(seed)
    check_units(made.graph, made.inputs)


@pytest.mark.parametrize("seed", range(100, 108))
def test_units_with_extreme_values(seed: int) -> None:
    made = Maker(seed, extreme=True)
    check_units(made.graph, made.inputs)


@pytest.mark.parametrize("seed", range(12))
def test_units_of_dynamic_graphs_serve_other_sizes(seed: int) -> None:
    made = Maker(seed, dynamic=True)
    first = check_units(made.graph, made.inputs)
    for resize in (lambda n: n + 1, lambda n: n + 16):
        check_units(made.graph, made.resized(resize), natives=first)


# ---- random functions, through torch.compile


def compare(program: Program, call: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Results and updated inputs are as good as eager's."""
    mine, theirs = [twin(x) for x in inputs], [twin(x) for x in inputs]
    wanted, got = [*program.function()(*theirs), *theirs], [*call(*mine), *mine]
    truth, all_values = program.wide(inputs)
    scale = largest(all_values)
    for k, (g, w, t) in enumerate(zip(got, wanted, truth, strict=True)):
        wrong = differences(g, w, t.double() if t.is_floating_point() else t, scale)
        assert not wrong, f"{k}: {wrong}\n{program.source}"


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is read before something was written there is NaN."""
    monkeypatch.setenv("TORCHAIR_POISON", "1")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(16))
def test_random_functions(seed: int) -> None:
    program = Program(seed)
    call = compiled(program.function())
    with torch.no_grad():
        for _ in range(2):
            compare(program, call, program.inputs(lambda n: n))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(20, 26))
def test_random_functions_of_many_sizes(seed: int) -> None:
    program = Program(seed, changes=False)
    call = compiled(program.function(), dynamic=True)
    with torch.no_grad():
        for resize in (lambda n: n, lambda n: n + 1, lambda n: 2 * n):
            inputs = program.inputs(resize)
            try:
                program.wide([twin(x) for x in inputs])
            except (RuntimeError, IndexError):
                continue  # these sizes do not fit together in eager either
            compare(program, call, inputs)


# ---- whole models


MODELS = {
    "mlp": (models.Mlp, models.MLP["tiny"], models.mlp_inputs),
    "bert": (models.Bert, models.BERT["tiny"], models.bert_inputs),
    "llama": (models.Llama, models.LLAMA["tiny"], models.llama_inputs),
    "resnet": (models.ResNet, models.RESNET["tiny"], models.resnet_inputs),
}


@pytest.mark.parametrize("frozen", (False, True), ids=("free", "frozen"))
@pytest.mark.parametrize("name", MODELS)
def test_models_are_native(name: str, frozen: bool) -> None:
    kind, config, inputs = MODELS[name]
    model, args = models.build(kind, config), inputs(config)
    with torch.no_grad(), capture() as found:
        got = compiled(model, frozen_parameter=frozen)(*args)
        torch.testing.assert_close(got, model(*args), rtol=1e-4, atol=1e-5)
    (one,) = found
    one.check_units()
    share = one.share
    print(f"{name}: {share:.1%} of the nodes are native")
    if name != "resnet" or frozen:
        assert share > 0.95


def new_gelu(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def test_an_epilogue_may_read_the_product_twice_through_a_view() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    x = torch.randn(2, 5, 32)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return new_gelu(F.linear(x, weight, bias))

    def also(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.linear(x, weight, bias)
        return new_gelu(y), y.transpose(0, 1).softmax(0)

    for fn in (rows, also):
        with torch.no_grad():
            torch.testing.assert_close(compiled(fn)(x), fn(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "view"),
    (
        ((1, 1, 5), (1, 5, 1), (1, 1)),
        ((1, 3, 5), (1, 5, 4), (3, 4)),
        ((2, 3, 5), (2, 5, 4), (2, 1, 3, 4)),
        ((6, 5), (5, 4), (2, 3, 4)),
    ),
    ids=str,
)
def test_a_product_is_stored_beside_an_epilogue_of_another_rank(
    a: tuple[int, ...], b: tuple[int, ...], view: tuple[int, ...]
) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = a @ b
        return product.view(view).abs(), product

    given = torch.randn(a), torch.randn(b)
    torch.testing.assert_close(compiled(fn)(*given), fn(*given))


@pytest.mark.parametrize("dims", ((), (1,), (6,), (5, 1), (5, 6)), ids=str)
def test_a_bias_may_be_broadcast(dims: tuple[int, ...]) -> None:
    bias, a, b = torch.randn(dims), torch.randn(5, 4), torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.addmm)(bias, a, b), torch.addmm(bias, a, b))


def test_what_torch_returns_in_another_type_is_converted_before_native_code_reads_it() -> None:
    names = ("input", "weight", "bias", "mean", "variance")
    given = [torch.randn(5, 5, 5), *(torch.rand(5) for _ in names[1:])]

    def update(*args: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._batch_norm_with_update(*args, 0.5, 0.6)[0]

    mine = [x.bfloat16() for x in given]
    theirs = [x.bfloat16() for x in given]
    with torch.no_grad():
        torch.testing.assert_close(compiled(update)(*mine), update(*theirs))
    torch.testing.assert_close(mine, theirs)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 8, -1)
        return F.gelu(self.out(scores @ v)).square().mean()


def test_training_runs_natively_and_gradients_are_right() -> None:
    torch.manual_seed(0)
    model, tokens = Trained(), torch.randint(20, (3, 7))
    model(tokens).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with capture() as found:
        compiled(model)(tokens).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)
    types = {t for one in found for t in native_types(one.plan)}
    assert {"LayerNormGradV3", "SoftmaxGrad", "GeluGrad"} <= types
    assert types & {"MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2"}


# ---- switches and faults


def steps_of(call: Callable[..., Any], *args: Any) -> list[str]:
    with capture() as found:
        call(*args)
    return [s.kind for one in found for s in one.plan.steps]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_turned_rows_that_end_with_one_element_of_a_short_type(dtype: torch.dtype) -> None:
    """The last element of a row leaves the first one of the next alone."""
    x = torch.randn(17, 18) * 5
    got = compiled(lambda x: x.t().contiguous().to(dtype))(x)
    assert torch.equal(got, x.t().to(dtype))


def test_native_code_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    assert steps_of(compiled(lambda x: x.exp() + 1), x) == ["native"]
    assert "native" not in steps_of(compiled(lambda x: x.exp() + 1, native_code=False), x)
    monkeypatch.setenv("TORCHAIR_NATIVE", "0")
    assert "native" not in steps_of(compiled(lambda x: x.exp() + 1), x)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_what_nothing_writes_is_poisoned(monkeypatch, mode, dynamic) -> None:
    """Kernels that do nothing leave NaN in results, in each kind of program."""
    weight = torch.randn(8, 3)
    x = torch.randn(4, 8)
    config = torchair.CompilerConfig()
    config.mode = mode
    config.debug.aclgraph.share_results = True
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    for fn in (lambda x: (x.exp() @ weight).tanh(), lambda x: (x.exp() @ weight).sort()[0].tanh()):
        call = torch.compile(fn, backend=backend, dynamic=dynamic)
        with torch.no_grad():
            torch.testing.assert_close(call(x), fn(x))
            with monkeypatch.context() as idle:
                idle.setattr(cpu(), "driver", lambda: lambda base: 0)
                torch._dynamo.reset()
                assert call(x).isnan().all()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_poison_of_integers_and_truth(monkeypatch, mode, dynamic) -> None:
    """Integers that nothing writes are bytes 0xA5; what is true or false is neither throughout."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.floor().int() + 3, x > 0, x.long() - 1, x.to(torch.uint8) * 2

    config = torchair.CompilerConfig()
    config.mode = mode
    config.debug.aclgraph.share_results = True
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    call, x = torch.compile(fn, backend=backend, dynamic=dynamic), torch.rand(4, 8) * 9
    for got, wanted in zip(call(x), fn(x), strict=True):
        assert torch.equal(got, wanted)
    with monkeypatch.context() as idle:
        idle.setattr(cpu(), "driver", lambda: lambda base: 0)
        torch._dynamo.reset()
        small, truth, large, bytes = call(x)
    assert (small == 0xA5A5A5A5 - 2**32).all() and (bytes == 0xA5).all()
    assert (large == 0xA5A5A5A5A5A5A5A5 - 2**64).all()
    assert truth.any() and not truth.all()
    assert set(truth.view(torch.uint8).flatten().tolist()) == {0, 1}


def test_poison_is_of_the_type_that_comes_first() -> None:
    """Buffers of several types may have one place, one after the other."""
    whole, part, later = torch.float32, torch.int32, torch.bool
    made = pattern(24, [Area(0, 12, 1, whole), Area(8, 8, 0, part), Area(8, 16, 2, later)])
    assert made.tolist() == [0xFF] * 8 + [0xA5] * 8 + [1, 0] * 4


@pytest.mark.usefixtures("poison")
def test_small_buffers_of_dynamic_graphs_are_apart() -> None:
    """What torch leaves in a buffer is not scratch memory of the kernels that follow."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) * (x * x)

    call, x = compiled(fn, dynamic=True), torch.randn(7)
    torch.testing.assert_close(call(x), fn(x))


@pytest.mark.usefixtures("fallbacks_allowed")
def test_without_llvm_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu(), "available", lambda: "no LLVM here")
    x, call = torch.randn(4, 8), compiled(lambda x: x.exp() + 1)
    with pytest.warns(UserWarning, match="no native code on this machine .no LLVM here"):
        assert "native" not in steps_of(call, x)
    torch.testing.assert_close(call(x), x.exp() + 1)


def test_level_4_prints_new_kernels_as_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHAIR_DEBUG", "4")
    weight = torch.randn(8, 8)
    compiled(lambda x: torch.softmax(x @ weight, -1))(torch.randn(4, 8))
    said = capsys.readouterr().out
    assert (
        """\
torchair kernel softmaxv2
for a0 in range(4)
for a1 in range(8)  # reduced
    t0 = f32 word0[8 * a0 + a1]
    t1 = max(t0)
    t2 = exp(t0 - t1)
    t3 = sum(t2)
    f32 word1[8 * a0 + a1] = t2 * (1.0 / t3)
"""
        in said
    )
    assert "torchair kernel matmul" in said and "MatMul(dtype='f32', batch=1, m=4" in said


def test_one_filter_with_two_normalisations_is_packed_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            nn.init.constant_(self.two.weight, 3.0)
            nn.init.constant_(self.two.bias, 0.5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(self.conv(x)).relu(), self.two(self.conv(y)).relu()

    model = Twice().eval()
    x, y = torch.randn(2, 1, 4, 8, 8)
    with torch.no_grad():
        got = compiled(model, frozen_parameter=True)(x, y)
        torch.testing.assert_close(got, model(x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fallbacks_allowed")
def test_a_generator_that_fails_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, unit: Any, *args: Any) -> Any:
        raise ValueError("this generator has a fault")

    monkeypatch.setattr(native_units.NativeUnits, "_call", broken)
    x = torch.randn(4, 8)
    call = compiled(lambda x: x.exp() + 1)
    with pytest.warns(UserWarning, match="no native code for Exp") as said:
        torch.testing.assert_close(call(x), x.exp() + 1)
        call(x)
    assert len([w for w in said if "native" in str(w.message)]) == 1


@pytest.mark.usefixtures("fallbacks_allowed")
def test_a_kernel_that_llvm_refuses_runs_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, kernels: Any) -> None:
        raise RuntimeError("refused")

    x = torch.randn(3, 11)
    call = compiled(lambda x: (x * 7).sin() + x)
    monkeypatch.setattr(type(cpu().library), "add", refuse)
    with pytest.warns(UserWarning, match="refused"):
        torch.testing.assert_close(call(x), (x * 7).sin() + x)


def test_bad_index_raises_and_the_next_call_works() -> None:
    table = torch.randn(5, 3)
    call = compiled(lambda i: table[i] * 2)
    good = torch.tensor([4, 0])
    torch.testing.assert_close(call(good), table[good] * 2)
    with pytest.raises(RuntimeError, match=r"out of range(.|\n)*test_native.py"):
        call(torch.tensor([5, 0]))
    torch.testing.assert_close(call(good), table[good] * 2)


# ---- threads


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def hammer(calls: int) -> None:
    """Four threads call one session with sizes of their own; every result is compared."""
    weight = torch.randn(24, 24)

    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.gelu(x @ weight) + x, -1).sum(0)

    sizes = [2, 3, 5, 17, 64]
    inputs = {n: torch.randn(n, 24) for n in sizes}
    with torch.no_grad(), capture() as found:
        call = compiled(work, dynamic=True)
        wanted = {n: call(x) for n, x in inputs.items()}
    session: TorchNpuGraph = found[0].session
    rest = found[0].inputs
    place = next(i for i, t in enumerate(rest) if t.shape == inputs[2].shape)
    wrong: list[str] = []

    def body(seed: int) -> None:
        for k in range(calls // 4):
            n = sizes[(k * 7 + seed) % len(sizes)]
            given = [inputs[n] if i == place else t for i, t in enumerate(rest)]
            given = [
                torch.tensor(n) if t.dim() == 0 and t.dtype == torch.int64 else t for t in given
            ]
            (got,) = session.run(given)
            if not torch.equal(got, wanted[n]):
                wrong.append(f"{n}: {(got - wanted[n]).abs().max()}")

    def all_threads() -> None:
        threads = [threading.Thread(target=body, args=(s,)) for s in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    all_threads()
    gc.collect()
    before = resident()
    all_threads()
    gc.collect()
    assert not wrong, wrong[:3]
    assert resident() - before < 32 << 20


def test_threads_with_varying_sizes() -> None:
    hammer(4000)


@pytest.mark.slow
def test_many_calls_from_threads() -> None:
    hammer(50_000)


def test_number_of_threads_is_honoured() -> None:
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    call = compiled(lambda a, b: F.relu(a @ b))
    before = torch.get_num_threads()
    try:
        for n in (2, 1):
            torch.set_num_threads(n)
            torch.testing.assert_close(call(a, b), F.relu(a @ b), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)
