"""cache_compile: a method compiled once and kept as data; when it is used, and when made again."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import npugraph_ex.inference
import pytest
import torch
from torch import nn

import torchair
from torchair.deploy import cached
from torchair.deploy.stored import Artifact, ReadyCall
from torchair.devices.base import GraphCall
from torchair.inference import cache_compile, readable_cache

COUNT = itertools.count()


class Block(nn.Module):
    """A small model with weights, a switch, a number, a buffer that it updates, and a value that
    is another one in each process."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 8), nn.Linear(8, 6), scale
        self.config = SimpleNamespace(width=8, _own_hash=next(COUNT))
        self.register_buffer("total", torch.zeros(6))

    def step(self, x: torch.Tensor, bias: float = 1.0) -> dict[str, Any]:
        y = self.down(torch.relu(self.up(x))) * self.scale + bias
        self.total.add_(y.sum(0))
        return {"y": y, "parts": [y.amax(-1), None, 3]}

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.up(x.float()), -1)

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + torch.rand(8)


def config(mode: str = "max-autotune", **options: Any) -> torchair.CompilerConfig:
    made = torchair.CompilerConfig()
    made.mode = mode
    for name, value in options.items():
        setattr(made.experimental_config, name, value)
    return made


def compiled_to_file(model: nn.Module, folder: Path, method: str = "plain", **given: Any) -> Any:
    return cache_compile(getattr(model, method), cache_dir=str(folder), **given)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the static `plain` for inputs of 3 x 6."""
    made = compiled_to_file(Block(), tmp_path, dynamic=False)
    made(torch.randn(3, 6))
    assert made.path.exists()
    return tmp_path


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_another_model_of_the_class_takes_what_is_there(
    tmp_path: Path, traced: list[Any], mode: str, dynamic: bool
) -> None:
    for turn in range(2):
        model = Block()
        twin = Block()
        twin.load_state_dict(model.state_dict())
        call = compiled_to_file(model, tmp_path, "step", config=config(mode), dynamic=dynamic)
        assert call.path.exists() == bool(turn)
        for rows in (3, 3, 5, 3) if dynamic else (3, 3, 3):
            x = torch.randn(rows, 6)
            with torch.no_grad():
                same(call(x), twin.step(x))
        same(model.total, twin.total)
        assert len(traced) == 1 and call.path.exists()
    kind = "aclgraphcache_" if mode == "reduce-overhead" else ""
    found = Artifact.read(call.path)
    assert found.finished != dynamic  # the graph as it runs, where sizes are known
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"Block_{'dynamic' if dynamic else 'static'}_{kind}")
    assert call.path == folder / "step" / "compiled_module"
    assert call.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("calls", [1, 4])
def test_weights_may_be_frozen_and_changed(
    tmp_path: Path, traced: list[Any], dynamic: bool, calls: int
) -> None:
    frozen = config(frozen_parameter=True)
    x = torch.randn(33, 6)
    for turn in range(2):
        model = Block()
        call = compiled_to_file(model, tmp_path, config=frozen, dynamic=dynamic)
        with torch.no_grad():
            for _ in range(calls):  # from the third on in one native call
                same(call(x), model.plain(x))
            assert isinstance(_runner(call), ReadyCall) == bool(turn)
            model.up.weight.mul_(2)
            same(call(x), model.plain(x))
            model.up.bias = nn.Parameter(torch.randn(8))
            for _ in range(calls):
                same(call(x), model.plain(x))
    assert len(traced) == 1


def test_other_sizes_of_a_static_method_end_its_cache(kept: Path, traced: list[Any]) -> None:
    model = Block()
    call = compiled_to_file(model, kept, dynamic=False)
    call(torch.randn(3, 6))
    assert not traced
    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match="Skip cache as Block.plain recompiled.*dims"):
        got = call(x)
    with torch.no_grad():
        same(got, model.plain(x))
        same(call(x[:3]), model.plain(x[:3]))
    assert len(traced) == 1 and not call.path.exists()


class _Other:
    """Changes to a model or a process, each with what is said about it."""

    @staticmethod
    def source(monkeypatch: pytest.MonkeyPatch) -> Block:
        monkeypatch.setattr(Block, "plain", lambda self, x: torch.relu(self.up(x)))
        Block.plain.__name__ = "plain"
        return Block()

    @staticmethod
    def helper(monkeypatch: pytest.MonkeyPatch) -> Block:
        monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # torch's own is no change
        monkeypatch.setattr(Block, "extra", 4, raising=False)
        return Block()

    @staticmethod
    def version(monkeypatch: pytest.MonkeyPatch) -> Block:
        now = {**cached.stored.library_versions(), "torch": "9.9"}
        monkeypatch.setattr(cached.stored, "library_versions", lambda: now)
        return Block()

    @staticmethod
    def number(monkeypatch: pytest.MonkeyPatch) -> Block:
        return Block(scale=3.0)

    @staticmethod
    def setting(monkeypatch: pytest.MonkeyPatch) -> Block:
        model = Block()
        model.config.width = 9
        return model

    @staticmethod
    def mode(monkeypatch: pytest.MonkeyPatch) -> Block:
        return Block().eval()

    @staticmethod
    def weight(monkeypatch: pytest.MonkeyPatch) -> Block:
        model = Block()
        model.up.weight = nn.Parameter(torch.randn(6, 8).t())
        return model

    @staticmethod
    def tied(monkeypatch: pytest.MonkeyPatch) -> Block:
        model = Block()
        model.total = model.down.bias
        return model

    @staticmethod
    def buffer(monkeypatch: pytest.MonkeyPatch) -> Block:
        model = Block()
        model.total = model.total.double()
        return model

    @staticmethod
    def nothing(monkeypatch: pytest.MonkeyPatch) -> Block:
        return Block()


CODE = "the code of the method, or of what it calls, has changed"
BROKEN = "clear broken cache .*: "
ARGUMENT = f"{BROKEN}the argument x is not what the call was compiled for"


@pytest.mark.parametrize(
    ("change", "x", "options", "reason"),
    [
        (_Other.source, None, {}, BROKEN + CODE),
        (_Other.helper, None, {}, BROKEN + CODE),
        (_Other.version, None, {}, f"{BROKEN}it was made with torch .*, this is 9.9"),
        (_Other.number, None, {}, f"{BROKEN}scale was 2.0, now it is 3.0"),
        (_Other.setting, None, {}, f"{BROKEN}config.width was 8, now it is 9"),
        (_Other.mode, None, {}, f"{BROKEN}down.training was True, now it is False"),
        (_Other.weight, None, {}, f"{BROKEN}strides of up.weight: compiled"),
        (_Other.tied, None, {}, f"{BROKEN}the module has other weights"),
        (_Other.buffer, None, {}, f"{BROKEN}dtype of total: compiled float32, now float64"),
        (_Other.nothing, torch.randn(4, 6), {}, ARGUMENT),
        (_Other.nothing, torch.randn(6, 3).t(), {}, ARGUMENT),
        (_Other.nothing, torch.randn(3, 6, dtype=torch.float64), {}, ARGUMENT),
        (
            _Other.nothing,
            None,
            {"topology_sorting_strategy": "BFS"},
            "Block.plain is compiled again: ge.topoSortingMode was 1, now it is 0",
        ),
    ],
    ids=[
        "source",
        "helper",
        "version",
        "number",
        "setting",
        "mode",
        "weight",
        "tied",
        "buffer",
        "dims",
        "strides",
        "type",
        "option",
    ],
)
def test_what_has_changed_is_said_and_compiled_again(
    kept: Path,
    traced: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], Block],
    x: torch.Tensor | None,
    options: dict[str, Any],
    reason: str,
) -> None:
    model = change(monkeypatch)
    x = torch.randn(3, 6) if x is None else x
    with pytest.warns(UserWarning, match=reason):
        got = compiled_to_file(model, kept, dynamic=False, config=config(**options))(x)
    with torch.no_grad():
        same(got, model.plain(x))
    assert len(traced) == 1
    compiled_to_file(model, kept, dynamic=False, config=config(**options))(x)
    assert len(traced) == 1  # the new one was kept


def test_folders_tell_options_modules_and_ranks_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        compiled_to_file(Block(), tmp_path, **given).path
        for given in (
            {},
            {"dynamic": False},
            {"config": config(remove_noop_ops=False)},
            {"tp_rank": 1},
            {"tp_rank": 1, "pp_rank": 0},
            {"ge_cache": True},
        )
    ]
    assert len(set(paths)) == 6
    assert paths[3].parts[-3] == "tp_rank1" and paths[4].parts[-3] == "tp_rank1_pp_rank0"
    assert paths[5].parts[-3].startswith("Block_dynamic_gecache_")
    with pytest.warns(UserWarning, match="ge_cache has no effect in the modes that capture"):
        path = compiled_to_file(Block(), tmp_path, config=config("npugraph_ex"), ge_cache=True).path
    assert path.parts[-3].startswith("Block_dynamic_aclgraphcache_") and "gecache" not in str(path)
    distributed = torch.distributed
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 2)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    assert compiled_to_file(Block(), tmp_path).path.parts[-3] == "world4global_rank2"
    assert compiled_to_file(Block(), tmp_path, global_rank=3).path.parts[-3] == "world4global_rank3"
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "home"))
    assert cache_compile(Block().plain).path.is_relative_to(tmp_path / "home")


def test_what_cannot_be_a_cached_method_is_refused() -> None:
    with pytest.raises(ValueError, match="a bound method"):
        cache_compile(lambda x: x)
    with pytest.raises(ValueError, match=r"method of a torch\.nn\.Module, not of a list"):
        cache_compile(type("list", (), {"f": lambda self: 1})().f)
    backend = torchair.get_npu_backend(compiler_config=config())
    with pytest.raises(ValueError, match="different from the config during cache generation"):
        cache_compile(Block().plain, config=config(remove_noop_ops=False), backend=backend)
    assert (
        cache_compile(Block().plain, backend=backend)._config is backend.keywords["compiler_config"]
    )


def test_a_folder_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where root has made it: the method is compiled, nothing is read or written there."""
    block, x = Block(), torch.randn(3, 6)
    compiled_to_file(block, tmp_path)(x)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    monkeypatch.setattr(cached.os, "getuid", lambda: 12345)
    monkeypatch.setattr(Artifact, "read", None)
    with pytest.warns(UserWarning, match=r"is not cached: the cache folder .* another user"):
        method = compiled_to_file(block, tmp_path)
    torch.testing.assert_close(method(x), block.plain(x))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_random_numbers_are_refused_and_gradients_not_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="random"):
        compiled_to_file(Block(), tmp_path, "noisy")(torch.randn(3, 6))
    result = compiled_to_file(Block(), tmp_path)(torch.randn(3, 6))
    with pytest.raises(RuntimeError, match="does not require grad"):
        result.sum().backward()


class Part(nn.Module):
    """A module that its owner has in a list only."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.full((6,), 2.0)
        self.inner = nn.Linear(6, 6)


class Loose(nn.Module):
    """Tensors in plain attributes, in lists, dicts and objects, and in modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.held = torch.randn(6), [torch.ones(6), torch.zeros(3, 6)]
        self.table = {"deep": [SimpleNamespace(scale=torch.randn(6))]}
        self.parts, self.never = [Part(), Part()], torch.randn(9)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        self.held[1].add_(x)
        y = x * self.held[0] + self.shift * self.table["deep"][0].scale
        for part in self.parts:
            y = part.inner(y) * part.gain
        return y + self.held[1] + AROUND(x)


AROUND = nn.Linear(6, 6)


def test_tensors_that_are_no_buffers_are_found_again(tmp_path: Path, traced: list[Any]) -> None:
    x = torch.randn(3, 6)
    for turn in range(2):
        model = Loose()
        call = compiled_to_file(model, tmp_path, dynamic=False)
        assert call.path.exists() == bool(turn)

        def check(model: Loose = model, call: Any = call) -> None:
            for _ in range(3):
                twin = copy.deepcopy(model)
                with torch.no_grad():
                    same(call(x), twin.plain(x))
                same(model.held, twin.held)

        check()
        model.shift.mul_(3)  # in place, and another tensor, wherever it is
        check()
        model.held[0] = torch.randn(6)
        model.table["deep"][0].scale = torch.randn(6)
        model.parts[1].inner.weight = nn.Parameter(torch.randn(6, 6))
        model.never = torch.randn(2)
        check()
    assert len(traced) == 1
    model.parts[0] = Part()
    with pytest.warns(
        UserWarning, match=r"recompiled: parts\[0\] of the model has changed since it was compiled"
    ):
        check()
    assert len(traced) == 2


def test_modules_in_closures_are_found_again(tmp_path: Path, traced: list[Any]) -> None:
    def made(helper: nn.Module) -> nn.Module:
        class Closed(nn.Module):
            def plain(self, x: torch.Tensor) -> torch.Tensor:
                return helper(x) + 1

        return Closed()

    x = torch.randn(3, 6)
    for _ in range(2):
        helper = nn.Linear(6, 6)
        call = compiled_to_file(made(helper), tmp_path)
        with torch.no_grad():
            same(call(x), helper(x) + 1)
            helper.weight.mul_(2)
            same(call(x), helper(x) + 1)
    assert len(traced) == 1


@dataclass
class Meta:
    data: torch.Tensor
    is_prompt: bool


class Serving(nn.Module):
    """A model that has its cached methods itself, and hands dataclasses to them and back."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.cached = {
            True: cache_compile(self.prompt, cache_dir=str(folder)),
            False: cache_compile(self.decode, cache_dir=str(folder)),
        }

    def forward(self, x: Meta, rest: list[torch.Tensor]) -> Meta:
        return self.cached[x.is_prompt](x, rest)

    def prompt(self, x: Meta, rest: list[torch.Tensor]) -> Meta:
        return Meta(self.up(x.data) + rest[0], x.is_prompt)

    def decode(self, x: Meta, rest: list[torch.Tensor]) -> Meta:
        return Meta(self.up(x.data) - rest[0], x.is_prompt)


def test_a_model_with_a_method_for_each_kind_of_call(tmp_path: Path, traced: list[Any]) -> None:
    for _ in range(2):
        model = Serving(tmp_path)
        for rows, prompt in ((3, True), (2, True), (3, False), (4, False), (3, True)):
            x, y = torch.randn(rows, 6), torch.randn(rows, 6)
            got = model(Meta(x, prompt), [y])
            assert type(got) is Meta and got.is_prompt is prompt
            with torch.no_grad():
                same(got.data, model.up(x) + (y if prompt else -y))
    assert len(traced) == 2 and len(list(tmp_path.rglob("compiled_module"))) == 2


def test_a_model_of_transformers(tmp_path: Path, traced: list[Any]) -> None:
    from transformers import LlamaConfig, LlamaModel

    sizes = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = torch.tensor([[1, 5, 3]])
    for _ in range(2):
        model = LlamaModel(sizes).eval()
        got = compiled_to_file(model, tmp_path, "forward", dynamic=False)(input_ids=tokens)
        with torch.no_grad():
            expected = model(input_ids=tokens)
        assert type(got) is type(expected)
        same(got.last_hidden_state, expected.last_hidden_state)
    assert len(traced) == 1


class Branch(nn.Module):
    """A graph with graphs inside."""

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def test_what_cannot_be_kept_runs_without(tmp_path: Path, traced: list[Any]) -> None:
    x, model = torch.randn(3, 6), Block()
    model.pair = (torch.ones(6), None)
    with pytest.warns(UserWarning, match=r"Block.plain is not cached: pair\[0\] is a tensor in a"):
        compiled_to_file(model, tmp_path)(x)
    with pytest.warns(UserWarning, match="Branch.plain is not cached: a file cannot hold"):
        same(compiled_to_file(Branch(), tmp_path)(-x.abs()), -x.abs() - 1)
    eagerly = config()
    eagerly.debug.run_eagerly = True
    with pytest.warns(UserWarning, match="Block.plain is not cached: options ask for"):
        compiled_to_file(Block(), tmp_path, config=eagerly)(x)
    assert not list(tmp_path.rglob("compiled_module"))


def test_a_flipped_bit_anywhere_is_noticed(kept: Path, traced: list[Any]) -> None:
    (path,) = kept.rglob("compiled_module")
    whole = path.read_bytes()
    generator = random.Random(0)
    for position in [*range(70), *generator.sample(range(len(whole)), 60), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        with pytest.raises(ValueError, match=r"damaged|not a compiled module"):
            Artifact.from_bytes(bytes(damaged))
    for length in (0, 5, 27, 60, 90, len(whole) - 1):
        with pytest.raises(ValueError, match=r"damaged|not a compiled module"):
            Artifact.from_bytes(whole[:length])
    path.write_bytes(damaged)
    model, x = Block(), torch.randn(3, 6)
    with pytest.warns(UserWarning, match="clear broken cache .*: it is damaged"):
        got = compiled_to_file(model, kept, dynamic=False)(x)
    with torch.no_grad():
        same(got, model.plain(x))
    assert path.exists() and len(traced) == 1


NESTING = '[1, {"type": "%s", "context": %s, "children_spec": []}]'
FACTORY = """{"default_factory_module": "this", "default_factory_name": "c", "dict_context": []}"""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("convention", '{"inputs": 5}'),
        ("graph", b"\x00\x01"),
        ("guards", {"specs": [{"kind": "Exploit"}], "conditions": []}),
        ("guards", {"specs": [], "conditions": ["__import__('os').system('true')"]}),
        ("result", '[1, {"type": "os.system"}]'),
        ("result", NESTING % ("builtins.dict", r'"[{\"__enum__\": 1, \"fqn\": \"this:c\"}]"')),
        ("result", NESTING % ("collections.defaultdict", FACTORY)),
        ("weights", [{"name": "no such"}]),
        ("version", "0.0.1"),
        ("plan", {"steps": 1}),
        ("plan", {"taken": [], "order": [0], "plan": None}),
        ("plan", {"inputs": 1}),
        ("plan", {"places": []}),
        ("plan", {"arena": -1, "roots": [[0, "arena", 0, 64, -1, None]]}),
        ("plan", {"outputs": [[0, None, [1 << 40]]]}),
        ("plan", {"outputs": [[None, [8, 1], [2, 8]]]}),  # less than what is computed
    ],
)
def test_a_file_of_other_content_is_only_data(
    kept: Path, traced: list[Any], field: str, value: Any
) -> None:
    """Whoever can write a right checksum can say what he likes; none of it is executed."""
    (path,) = kept.rglob("compiled_module")
    found = Artifact.read(path)
    assert found.plan is not None
    if field == "plan":
        recipe = value.get("plan", {**found.plan["plan"], **value})
        for output in value.get("outputs", []):
            if output[0] is None:
                output[0] = found.plan["plan"]["outputs"][0][0]
        found.plan = {**found.plan, **value, "plan": recipe}
    else:
        found.plan = None  # or the graph would not be read
        setattr(found, field, value)
    path.write_bytes(found.to_bytes())
    with pytest.warns(UserWarning, match="clear broken cache"):
        compiled_to_file(Block(), kept, dynamic=False)(torch.randn(3, 6))
    assert len(traced) == 1


@pytest.mark.parametrize("lost", ["kernels", "processor", "store"])
def test_a_plan_that_is_not_for_this_process_is_made_again(
    kept: Path, traced: list[Any], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = kept.rglob("compiled_module")
    found = Artifact.read(path)
    assert found.plan is not None
    recipe = found.plan["plan"]
    if lost == "kernels":
        recipe["kernels"] = [[f"{entry}_", "0" * 64, n] for entry, _, n in recipe["kernels"]]
    elif lost == "processor":
        recipe["maker"]["with"][-2] += ",+avx1024"
    else:
        monkeypatch.setattr(ReadyCall, "of", lambda *_: None)
    path.write_bytes(found.to_bytes())
    model, x = Block(), torch.randn(3, 6)
    call = compiled_to_file(model, kept, dynamic=False)
    with torch.no_grad():
        same(call(x), model.plain(x))
    assert isinstance(_runner(call), GraphCall) and not traced


def _runner(call: Any) -> Any:
    return call.versions[0]._traced.runner.runner


def test_a_plan_from_a_file_runs_as_any_other(
    kept: Path, tmp_path: Path, traced: list[Any]
) -> None:
    model, x = Block(), torch.randn(3, 6)
    call = compiled_to_file(model, kept, dynamic=False)
    with torch.no_grad():
        expected = model.plain(x)
    same(call(x), expected)
    assert isinstance(_runner(call), ReadyCall) and call._fast_path == call._usual_path
    for _ in range(3):
        same(call(x), expected)
    assert call._fast_path != call._usual_path  # one native call by now
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(call._usual_path, [x] * 16):
            same(got, expected)
    with torch.profiler.profile() as seen:
        same(call(x), expected)
    assert any("softmax" in e.key.lower() for e in seen.key_averages())
    assert call.summary().native_share == 1.0  # what knows more than results: the graph
    block = torch.empty(call.summary().feature_memory_size + 64, dtype=torch.uint8)
    call.update_graph_feature_memory_base(block)
    same(call(x), expected)
    assert not traced


@pytest.mark.parametrize("calls", [1, 4])
def test_a_plan_from_a_file_is_for_the_sizes_of_its_first_call(
    tmp_path: Path, traced: list[Any], calls: int
) -> None:
    """Other sizes are planned from the graph, which is read then."""
    for turn in range(2):
        model = Block()
        call = compiled_to_file(model, tmp_path)
        for k, rows in enumerate((3, 5, 3, 4, 5)):
            for _ in range(calls):  # from the third on in one native call
                x = torch.randn(rows, 6)
                with torch.no_grad():
                    same(call(x), model.plain(x))
            assert isinstance(_runner(call), ReadyCall) == bool(turn)
            if turn:
                assert (_runner(call)._opened is None) == (k == 0)
    assert len(traced) == 1


class Lookup(nn.Module):
    """Reads by indices, has constants of the graph, and updates an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, index: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.table(index) * torch.tensor([1.0, 2.0, 0.5, -1.0])
        cache.index_copy_(0, torch.tensor([1]), found[:1])
        return found.sum(0), cache + 1


def test_a_plan_from_a_file_has_constants_updates_and_errors(
    tmp_path: Path, traced: list[Any]
) -> None:
    index = torch.tensor([4, 0])
    for turn in range(2):
        model = Lookup()
        call = cache_compile(model.forward, dynamic=False, cache_dir=str(tmp_path))
        for _ in range(3):
            ours, theirs = torch.ones(3, 4), torch.ones(3, 4)
            with torch.no_grad():
                same(call(index, ours), model(index, theirs))
            same(ours, theirs)
        assert isinstance(_runner(call), ReadyCall) == bool(turn)
        with pytest.raises(IndexError, match=r"out of range.*test_cache_compile|Gather"):
            call(torch.tensor([4, 7]), torch.ones(3, 4))
    assert len(traced) == 1


class Running(nn.Module):
    """Reads its argument after it has updated a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x * self.total


@pytest.mark.filterwarnings("ignore:the call updates total, and")
def test_a_file_tells_which_buffers_are_updated(tmp_path: Path, traced: list[Any]) -> None:
    """An argument inside of one is as eager has it, and no reason to compile again."""
    for _ in range(2):
        model, twin, x = Running(), Running(), torch.randn(6)
        call = cache_compile(model.forward, dynamic=False, cache_dir=str(tmp_path))
        for inside in (True, False, False, False, True):
            given = (model.total, twin.total) if inside else (x, x)
            same(call(given[0]), twin(given[1]))
            same(model.total, twin.total)
    assert len(traced) == 1 and Artifact.read(call.path).written == [0]


def test_a_file_that_others_may_read_or_write_is_not_used(kept: Path, traced: list[Any]) -> None:
    (path,) = kept.rglob("compiled_module")
    path.chmod(0o644)
    with pytest.warns(UserWarning, match="clear broken cache .* has the mode 0o644"):
        compiled_to_file(Block(), kept, dynamic=False)(torch.randn(3, 6))
    assert len(traced) == 1 and path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchair.store._write_new", refuse)
    model, x = Block(), torch.randn(3, 6)
    call = compiled_to_file(model, tmp_path)
    with pytest.warns(UserWarning, match="Block.plain is not cached: .*No space left"):
        got = call(x)
    with torch.no_grad():
        same(got, model.plain(x))
    assert not call.path.exists()


def test_processes_may_compile_the_same_at_once(tmp_path: Path, traced: list[Any]) -> None:
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                compiled_to_file(Block(), tmp_path)(torch.randn(3, 6))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in children] == [0, 0]
    compiled_to_file(Block(), tmp_path)(torch.randn(3, 6))
    assert not traced


def test_a_cache_can_be_read_by_people(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = kept.rglob("compiled_module")
    target = kept / "shown.py"
    text = readable_cache(path, file=target)
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("=" * 100) and "name: Block.plain(x: 'torch.Tensor')" in text
    for part in (" graph module ", " inputs ", " guards ", " compile options "):
        assert part.center(100, "-") in text
    assert "up.weight: float32[8, 6] strides [6, 1] on cpu  weight" in text
    assert "x: float32[3, 6]" in text and "scale == 2.0" in text
    shown = target.read_text()
    assert shown.startswith("# ===") and "ge.SoftmaxV2(" in shown
    assert target.stat().st_mode & 0o777 == 0o600
    assert readable_cache(path, print_output=False) == text
    assert capsys.readouterr().out == ""
    target.chmod(0o644)
    with pytest.raises(PermissionError):
        readable_cache(path, False, target)
    link = kept / "link"
    link.symlink_to(path)
    for bad in (link, kept / "nothing"):
        with pytest.raises(ValueError):
            readable_cache(bad, False)
    with pytest.raises(ValueError):
        readable_cache(path, False, link)


def test_npugraph_ex_has_the_same(tmp_path: Path, traced: list[Any]) -> None:
    made = npugraph_ex.CompilerConfig()
    made.clone_output = True
    for _ in range(2):
        model, x = Block(), torch.randn(3, 6)
        call = npugraph_ex.inference.cache_compile(
            model.plain, config=made, cache_dir=str(tmp_path), options={"clone_input": False}
        )
        with torch.no_grad():
            same(call(x), model.plain(x))
    assert len(traced) == 1 and "aclgraphcache" in str(call.path)
    text = npugraph_ex.inference.readable_cache(call.path, print_output=False)
    assert "mode: npugraph_ex" in text


PROGRAM = """
import json, sys, torch, torchair
from torchair.inference import cache_compile

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(6, 8)

    def forward(self, x):
        return torch.softmax(self.up(x), -1)

x = torch.arange(18.0).reshape(3, 6) / 10
config = torchair.CompilerConfig()
config.mode = sys.argv[2]
dynamic = sys.argv[3] == "True"
call = cache_compile(Net().forward, config=config, cache_dir=sys.argv[1], dynamic=dynamic)
there = call.path.exists()
values = [call(x).tolist() for _ in range(4)][-1]
print(json.dumps([there, values, list(sys.modules), call._fast_path != call._usual_path]))
"""

TRACERS = {
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torchair.convert",
    "torchair.pipeline",
}
SYMPY = {"sympy", "torch.fx.experimental.symbolic_shapes"}
COMPILER = {
    "torchair.operators",
    "torchair.engine.fuse",
    "torchair.engine.lower",
    "torchair.ge",
    "torchair.serde",
    "google.protobuf",
    "torchair.codegen.requests",
}


@pytest.mark.parametrize(
    ("mode", "dynamic", "heavy"),
    [
        ("max-autotune", False, {*TRACERS, *COMPILER, *SYMPY}),
        ("max-autotune", True, {*TRACERS, *COMPILER, *SYMPY}),
        ("reduce-overhead", False, {*TRACERS, *SYMPY}),
        ("reduce-overhead", True, TRACERS),
    ],
)
def test_a_later_process_loads_no_tracer(
    tmp_path: Path, mode: str, dynamic: bool, heavy: set[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, program, tmp_path / "cache", mode, str(dynamic)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert [there for there, *_ in found] == [False, True]
    assert found[0][1] == found[1][1]
    assert not heavy & set(found[1][2])
    assert found[1][3] == (mode == "max-autotune")


@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_a_file_is_for_the_autocast_it_was_compiled_under(tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    for enabled in (True, False, True):
        model = Block()
        call = cache_compile(model.plain, cache_dir=str(tmp_path), dynamic=False)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for _ in range(4):
                torch.testing.assert_close(call(x), model.plain(x), rtol=1e-5, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 2
