"""The benchmarks start: each explains itself, and what they share measures the right thing."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHARED = ("common", "contestants", "ggml", "inside", "learners", "workloads")
PROGRAMS = sorted(f.stem for f in BENCH.glob("*.py") if f.stem not in SHARED)


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def run(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    """A benchmark in this process, which has loaded torch already."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    runpy.run_path(str(BENCH / f"{program}.py"), run_name="__main__")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_benchmark_has_help(program, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, program, "--help")
    assert left.value.code == 0
    assert program in capsys.readouterr().out


@pytest.fixture
def three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP of the benchmarks, smaller: it compiles sooner."""
    from models import MLP
    from workloads import WORKLOADS

    small = replace(WORKLOADS["tiny MLP b1"], config=MLP["tiny"])
    monkeypatch.setitem(WORKLOADS, "tiny MLP b1", small)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compile_time --preset tiny --pairs 1", ("aot_eager", "beyond")),
        ("cold --only MLP --no-inductor", ("aot_eager", "warm cache", "importing torch")),
        ("conversion --layers 1 --rounds 1", ("FX to GE", "native code")),
        ("deep --nodes 72", ("FX to GE", "fusion", "72")),
        ("cpu --quick --only MLP --no-inductor", ("eager", "native part alone", "torchair frozen")),
        (
            "gpu --list --only train,chain",
            ("train BERT 6 layers b16 t128", "train Llama", "chain linear + gelu 8192 bf16"),
        ),
        (
            "generate --layers 1 --lengths 8 --cache dynamic --only max-autotune --here",
            ("new", "repeated", "seen", "peak"),
        ),
        ("latency --quick --only MLP --no-inductor", ("against eager",)),
        ("llm --preset tiny --quick --no-peers --only bfloat16 --only int8", ("vs bf16", "decode")),
        ("memory --preset tiny --way torchair", ("libraries", "steady")),
        ("memory --sizes 3 --way torchair", ("a tenth", "all")),
        ("prologue --quick", ("Dynamo", "native code", "skip_model_guards")),
        ("start --quick --only cached", ("torch", "weights", "beyond", "target")),
        ("streams --quick", ("one lane", "two lanes", "ratio")),
        ("training --quick --no-inductor --only MLP", ("ours / eager", "geometric mean")),
        ("verify --calls 1 --only mlp", ("eager", "verified", "right")),
    ],
)
@pytest.mark.usefixtures("three_layers")
def test_a_short_run_prints_its_figures(command, words, monkeypatch, capsys):
    run(monkeypatch, *command.split())
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_a_peer_that_is_not_known_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "cpu", "--peers", "nobody")
    assert "nobody" in capsys.readouterr().err


def test_the_best_window_counts_and_contestants_take_turns():
    from common import interleaved

    seen = []
    times = interleaved({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2, 1e-3)
    assert set(times) == {"a", "b"} and all(0 < t < 1 for t in times.values())
    turns = [x for i, x in enumerate(seen) if not i or seen[i - 1] != x]
    assert turns == ["a", "b"] * 3  # one to learn how long they take, and the two windows


def test_the_driver_alone_computes_the_model():
    from contestants import torchair_backend
    from inside import driver_of

    model = torch.nn.Linear(8, 8)
    x = torch.randn(2, 8)
    drive = driver_of(model, (x,), torchair_backend())
    assert drive is not None
    result = drive.__defaults__[0][1]
    x += 1
    drive()
    torch.testing.assert_close(result, model(x))


def test_kernels_are_counted_and_forgotten():
    from contestants import torchair_backend
    from inside import forget_kernels, kernels

    def call(x):
        return x * 3 + 1

    x = torch.randn(5)
    compiled = torch.compile(call, backend=torchair_backend(), dynamic=False)
    forget_kernels()
    before = kernels()
    torch.testing.assert_close(compiled(x), call(x))
    assert kernels() > before
    forget_kernels()
    torch.testing.assert_close(compiled(x), call(x))  # what is bound keeps its code


def test_grouped_attention_is_attention_with_repeated_heads():
    from models import LLAMA, Llama, build, llama_inputs

    plain, grouped = LLAMA["tiny"], LLAMA["tiny grouped"]
    inputs = llama_inputs(plain, 5)
    expected = build(Llama, plain)(*inputs)
    torch.testing.assert_close(build(Llama, grouped)(*inputs), expected)


def test_contestants_train_copies_of_one_model():
    pytest.importorskip("transformers")
    from contestants import FLOOR, OURS
    from learners import RECIPES, prepared_step

    name = "train ViT-B 6 layers b32"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "image_size": 16, "patch_size": 8}
    recipe = RECIPES[name]
    small = replace(recipe, batch=(2, 3, 16, 16), changes={**recipe.changes, **sizes})
    with torch.enable_grad():
        losses = [prepared_step(one, small, "cpu").losses for one in (FLOOR, OURS[0])]
    assert losses[0][0] > losses[0][-1]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2, atol=0.0)


def test_a_model_that_learns_otherwise_is_found():
    import gpu
    from learners import Trained

    right = Trained(torch.empty, [4.0, 3.0])
    gpu.check_losses({"eager": right, "ours": Trained(torch.empty, [4.0, 3.01])})
    with pytest.raises(AssertionError, match="ours: losses"):
        gpu.check_losses({"eager": right, "ours": Trained(torch.empty, [4.0, 4.0])})
