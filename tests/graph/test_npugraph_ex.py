"""npugraph_ex: its flat options, its doors, its logger and folders, and models end to end."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import re
import subprocess
import sys
import tomllib
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
import torchair
from torchair.capture import graph_pool_handle
from torchair.configs.compiler_config import FLAT_ALIASES, FlatConfig, Settings
from torchair.configs.options import OptionValue, leaves, read_path
from torchair.fx.passes.user import register_replacement
from torchair.npugraph_ex.backend import npugraph_ex_backend, tree_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "npugraph_ex.md"
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_process_state():
    torch._dynamo.reset()
    counters.clear()
    yield
    torchair.logger.setLevel(logging.ERROR)
    npugraph_ex.logger.setLevel(logging.ERROR)


def compiled_ex(fn: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile` with the backend of the entry point."""
    return torch.compile(fn, backend=npugraph_ex_backend, options=options, **kwargs)


def counted(what: str) -> int:
    """The sum of our counters of one kind over all graphs."""
    found = counters["npugraph_ex"].items()
    return sum(n for name, n in found if re.fullmatch(rf"{what}_graph_\d+", name))


# ---- the package


def test_public_names():
    assert npugraph_ex.__all__ == [
        "get_npu_backend",
        "get_compiler",
        "compile_fx",
        "CompilerConfig",
        "logger",
        "register_replacement",
    ]
    assert all(getattr(npugraph_ex, name) is not None for name in npugraph_ex.__all__)
    assert npugraph_ex.register_replacement is register_replacement
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = npugraph_ex.no_such_name


def run_fresh(code: str, folder: Path, **environment: str) -> str:
    """What a program prints in a new interpreter that knows only our sources."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)],
        env={**kept, "PYTHONPATH": str(Path(torchair.__file__).parent.parent), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_names_are_the_same_modules_and_light(tmp_path):
    code = """
    import sys
    import npugraph_ex.scope
    from npugraph_ex.ops import as_air_ops
    import torchair.npugraph_ex as other
    assert npugraph_ex is other and npugraph_ex.scope is other.scope
    assert as_air_ops is other.ops.as_air_ops
    assert not {"torch._dynamo", "torch._inductor", "torchair.convert"} & set(sys.modules)
    """
    assert run_fresh(code, tmp_path) == ""


# ---- the flat configuration

DEFAULTS = {
    "numerics": "default",
    "force_eager": False,
    "use_graph_pool": None,
    "reuse_graph_pool_in_same_fx": True,
    "capture_limit": "64",
    "clone_input": True,
    "clone_output": False,
    "share_results": False,
    "disable_static_kernel_compile_cache": False,
    "static_kernel_compile": False,
    "frozen_parameter": False,
    "remove_noop_ops": True,
    "remove_cat_ops": True,
    "inplace_pass": True,
    "input_inplace_pass": True,
    "pattern_fusion_pass": True,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "dump_tensor_data": False,
    "data_dump_stage": "optimized",
    "data_dump_dir": "./",
    "_vllm_aclnn_static_kernel_sym_index": "0",
    "_vllm_aclnn_static_kernel_sym_range": None,
    "super_kernel_optimize": False,
    "super_kernel_optimize_options": None,
    "super_kernel_debug_options": None,
    "deadlock_check": False,
    "capture_error_mode": "global",
    "capture_fallback": True,
    "mode": "npugraph_ex",
    "force_recapture": False,
}

OTHER_VALUES: dict[str, Any] = {
    "numerics": "strict",
    "use_graph_pool": (0, 7),
    "capture_limit": 3,
    "post_grad_custom_pre_pass": print,
    "post_grad_custom_post_pass": print,
    "data_dump_stage": "original",
    "data_dump_dir": ".",
    "_vllm_aclnn_static_kernel_sym_index": 2,
    "_vllm_aclnn_static_kernel_sym_range": [4, 8],
    "super_kernel_optimize_options": {"a": 1},
    "super_kernel_debug_options": {"b": 2},
    "capture_error_mode": "thread_local",
    "mode": "npugraph_ex",
}


def test_options_and_defaults():
    config = npugraph_ex.CompilerConfig()
    assert len(DEFAULTS) == 28 + 3
    assert config.as_dict() == (DEFAULTS, {})
    assert {name: getattr(config, name).value for name in DEFAULTS} == DEFAULTS
    assert all(type(config.as_dict()[0][n]) is type(v) for n, v in DEFAULTS.items())


def test_defaults_and_legal_values_agree_with_the_tree():
    flat, tree = FlatConfig(), FlatConfig().tree()
    assert set(FLAT_ALIASES) == set(DEFAULTS)
    expected = torchair.CompilerConfig()
    expected.mode = "npugraph_ex"
    assert tree == expected
    for name, alias in FLAT_ALIASES.items():
        behind = attrgetter(alias.path)(tree)
        if isinstance(behind, OptionValue) and name != "mode":
            assert getattr(flat, name).accepts == behind.accepts, name


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_each_option_reaches_its_place_in_the_tree(name):
    config = FlatConfig()
    value = OTHER_VALUES.get(name, not DEFAULTS[name])
    setattr(config, name, value)
    alias, tree = FLAT_ALIASES[name], config.tree()
    assert read_path(tree, alias.path) == (not value if alias.inverted else value)
    plain = FlatConfig().tree()
    changed = [path for path, now in leaves(tree) if now != read_path(plain, path)]
    assert changed == ([] if name == "mode" else [alias.path])


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("inplace_pass", "test", ValueError, "[True, False]"),
        ("capture_error_mode", "strict", ValueError, "['global', 'thread_local', 'relaxed']"),
        ("capture_limit", 0, ValueError, "int in [1, 9223372036854775807]"),
        ("capture_limit", "3", ValueError, "int in [1, 9223372036854775807]"),
        ("mode", "max-autotune", ValueError, "['npugraph_ex']"),
        ("data_dump_stage", "middle", ValueError, "['original', 'optimized']"),
        ("data_dump_dir", "./missing", FileNotFoundError, "existing directory"),
        ("post_grad_custom_pre_pass", 1, TypeError, "callable or None"),
        ("super_kernel_optimize_options", "a=1", TypeError, "dict or None"),
        ("_vllm_aclnn_static_kernel_sym_range", 4, TypeError, "list of int or None"),
        ("_vllm_aclnn_static_kernel_sym_index", -1, ValueError, "int in [0, "),
        ("clone_outputs", True, ValueError, "Did you mean 'clone_output'"),
    ],
)
def test_wrong_values_are_refused(name, value, error, text):
    config = FlatConfig()
    with pytest.raises(error, match=re.escape(text)):
        setattr(config, name, value)
    assert config == FlatConfig()


def test_unknown_names_set_nothing():
    config = FlatConfig()
    with pytest.raises(ValueError, match="'typo'") as caught:
        config.update({"clone_output": True, "typo": 1})
    assert ", ".join(sorted(DEFAULTS)) in str(caught.value)
    assert config == FlatConfig()


def test_equality_and_copies():
    config = FlatConfig()
    config.update({"capture_limit": 5, "post_grad_custom_post_pass": print})
    clone = copy.deepcopy(config)
    assert clone == config and config != FlatConfig() and config != "config"
    clone.capture_limit = 6
    assert config.capture_limit.value == "5"
    with pytest.raises(TypeError):
        hash(config)


def test_settings_of_all_options_of_capture():
    config = FlatConfig()
    config.update({name: OTHER_VALUES.get(name, not value) for name, value in DEFAULTS.items()})
    settings = Settings.of(config.tree())
    assert settings.mode == "npugraph_ex" and settings.run_eagerly is True
    chosen = settings.capture
    assert (chosen.clone_input, chosen.clone_output) == (False, True)
    assert (settings.inplace_pass, settings.input_inplace_pass) == (False, False)
    assert (settings.remove_cat_ops, settings.remove_noop_ops) == (False, False)
    assert (chosen.limit, chosen.pool) == (3, (0, 7))
    assert (chosen.reuse, chosen.force_recapture) == (False, True)
    assert chosen.error_mode == "thread_local"
    assert (settings.tensor_dump, settings.tensor_dump_stage) == (True, "original")
    assert settings.tensor_dump_path == "./worldsize1_global_rank0"


# ---- documentation


def documented_options() -> list[list[str]]:
    section = PAGE.read_text().split("## Options\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_page_lists_each_option_with_its_default_and_legal_values():
    config = FlatConfig()
    assert [row[:3] for row in documented_options()] == [
        [f"`{name}`", getattr(config, name).accepts, f"`{raw!r}`"] for name, raw in leaves(config)
    ]


# ---- doors


def test_backend_is_a_partial_with_its_configuration():
    config = FlatConfig()
    table = {aten.gelu.default: lambda x: x}
    backend = npugraph_ex.get_npu_backend(compiler_config=config, custom_decompositions=table)
    assert isinstance(backend, functools.partial)
    assert backend.keywords == {"compiler_config": config, "decompositions": table}
    assert backend.keywords["compiler_config"] is config
    with pytest.raises(TypeError):
        npugraph_ex.get_npu_backend(config)
    assert isinstance(npugraph_ex.get_npu_backend().keywords["compiler_config"], FlatConfig)


def test_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["torch_dynamo_backends"]["npugraph_ex"]
    assert declared == f"{npugraph_ex_backend.__module__}:{npugraph_ex_backend.__name__}"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"options": {"no_such": 1}}, ["'no_such'", ", ".join(sorted(DEFAULTS))]),
        ({"options": {"inplace_pass": "test"}}, ["'test'", "[True, False]"]),
        ({"options": {"capture_error_mode": "x"}}, ["['global', 'thread_local', 'relaxed']"]),
        ({"options": {"capture_limit": 0}}, ["capture_limit", "int in [1, "]),
        ({"options": {"mode": "reduce-overhead"}}, ["'reduce-overhead'", "['npugraph_ex']"]),
        ({"mode": "fastest"}, ["'fastest'", "reduce-overhead", "npugraph_ex"]),
    ],
)
def test_wrong_options_name_the_legal_ones(arguments, texts):
    call = torch.compile(lambda x: x + 1, backend=npugraph_ex_backend, **arguments)
    with pytest.raises(BackendCompilerFailed) as caught:
        call(torch.randn(3))
    assert isinstance(caught.value.inner_exception, ValueError)
    for text in texts:
        assert text in str(caught.value)


def test_a_pool_that_is_none_is_refused_when_the_graph_is_built():
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled_ex(lambda x: x + 1, {"use_graph_pool": (1, 2)})(torch.randn(3))
    assert isinstance(caught.value.inner_exception, TypeError)


def test_options_leave_the_configuration_alone():
    config = FlatConfig()
    config.clone_output = True
    before = copy.deepcopy(config)
    backend = npugraph_ex.get_npu_backend(compiler_config=config)
    x = torch.randn(2, 3)
    call = torch.compile(lambda x: x + 1, backend=backend, options={"remove_noop_ops": False})
    torch.testing.assert_close(call(x), x + 1)
    assert config == before


def warned(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in found]


def test_defaults_do_not_warn():
    assert warned(npugraph_ex.get_npu_backend) == []
    assert warned(lambda: compiled_ex(lambda x: x + 1)(torch.randn(3))) == []


def test_switches_without_effect_warn_under_their_flat_names():
    config = FlatConfig()
    config.update({"static_kernel_compile": True, "deadlock_check": True})
    (text,) = warned(lambda: npugraph_ex.get_npu_backend(compiler_config=config))
    assert text == (
        "no effect on this device: config.static_kernel_compile: kernels of CPU and CUDA are not "
        "compiled for single shapes (leave it out)"
    )


def test_frozen_parameter_reminds_of_its_promise():
    config = FlatConfig()
    config.frozen_parameter = True
    (text,) = warned(lambda: npugraph_ex.get_npu_backend(compiler_config=config))
    assert "frozen_parameter" in text


def test_user_passes_get_the_flat_configuration():
    seen = []

    def user_pass(gm: Any, example_inputs: Any, config: Any) -> None:
        seen.append((config, [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]))

    options = {"post_grad_custom_pre_pass": user_pass, "post_grad_custom_post_pass": user_pass}
    x = torch.randn(2, 3)
    call = compiled_ex(lambda x: x.view(-1) + 1, options)
    torch.testing.assert_close(call(x), x.view(-1) + 1)
    configs, targets = zip(*seen, strict=True)
    assert all(isinstance(c, FlatConfig) and c.clone_input.value is True for c in configs)
    assert targets == (
        ["aten.view.default", "aten.add.Tensor"],
        ["aten.reshape.default", "aten.add.Tensor"],
    )


def test_tree_keeps_absent_passes_absent():
    assert tree_of(FlatConfig()) == FlatConfig().tree()


# ---- operators and scopes


def traced_targets(fn: Any, *args: Any) -> list[str]:
    """The operators that reach a compiler behind AOTAutograd."""
    targets: list[str] = []

    def compiler(gm: Any, example_inputs: Any) -> Any:
        targets.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return gm

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return targets


def limited(x: torch.Tensor) -> torch.Tensor:
    with npugraph_ex.scope.limit_core_num(4, 8):
        y = x + 1
    return y * 2


def test_limit_core_num_marks_a_block_of_the_graph():
    assert traced_targets(limited, torch.randn(3)) == [
        "air.scope_enter.default",
        "aten.add.Tensor",
        "air.scope_exit.default",
        "aten.mul.Tensor",
    ]
    seen = []
    options = {
        "post_grad_custom_pre_pass": lambda gm, inputs, config: seen.append(
            [n.args for n in gm.graph.nodes if "scope_enter" in str(n.target)]
        )
    }
    torch._dynamo.reset()
    x = torch.randn(3)
    torch.testing.assert_close(compiled_ex(limited, options, fullgraph=True)(x), limited(x))
    assert seen == [[(["_op_aicore_num", "_op_vectorcore_num"], ["4", "8"])]]


def test_operators_are_those_of_air():
    def marked(x: torch.Tensor) -> torch.Tensor:
        torch.ops.npugraph_ex.scope_enter(["_user_stream_label"], ["s"])
        y = x + 1
        mark = torch.ops.npugraph_ex.record()
        torch.ops.npugraph_ex.scope_exit()
        torch.ops.npugraph_ex.wait([mark])
        return y * 2

    x = torch.randn(3)
    torch.testing.assert_close(marked(x), (x + 1) * 2)
    assert traced_targets(marked, x) == [
        "air.scope_enter.default",
        "aten.add.Tensor",
        "air.record.default",
        "air.scope_exit.default",
        "air.wait.default",
        "aten.mul.Tensor",
    ]


@pytest.mark.parametrize("name", sorted(npugraph_ex.ops._AIR_OPS))
def test_operators_have_the_schema_of_air(name):
    ours, air = (getattr(getattr(torch.ops, n), name).default for n in ("npugraph_ex", "air"))
    assert str(ours._schema) == str(air._schema).replace("air::", "npugraph_ex::")
    assert npugraph_ex.ops._AIR_OPS[name] is air


def only_enter(gm: Any, example_inputs: Any, config: Any) -> None:
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(first):
        scope = (["_user_stream_label"], ["s"])
        gm.graph.call_function(torch.ops.npugraph_ex.scope_enter.default, scope)


def test_scopes_that_a_pass_inserts_are_checked():
    call = compiled_ex(lambda x: x + 1, {"post_grad_custom_post_pass": only_enter})
    with pytest.raises(BackendCompilerFailed, match="no paired call to the torch"):
        call(torch.randn(3))


# ---- logger and debug folder


@pytest.fixture
def lines():
    """What both loggers say in a test, as (logger, level, text)."""
    said: list[tuple[str, str, str]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((self.name, record.levelname, record.getMessage()))
            assert self.name == record.name

    keepers = []
    for owner in (torchair.logger, npugraph_ex.logger):
        keeper = Keeper()
        keeper.name = owner.name
        owner.addHandler(keeper)
        keepers.append((owner, keeper))
    yield said
    for owner, keeper in keepers:
        owner.removeHandler(keeper)


def test_compiler_speaks_through_the_logger_of_the_surface(lines):
    assert npugraph_ex.logger.name == "npugraph_ex"
    x = torch.randn(3)
    torchair.logger.setLevel(logging.INFO)
    compiled_ex(lambda x: x + 1)(x)
    assert lines == []
    npugraph_ex.logger.setLevel(logging.DEBUG)
    torchair.logger.setLevel(logging.ERROR)
    torch._dynamo.reset()
    call = compiled_ex(lambda x: x + 2)
    call(x)
    texts = [text for name, _, text in lines if name == "npugraph_ex"]
    assert {name for name, _, _ in lines} == {"npugraph_ex"}
    assert "compiler inputs" in texts and "runtime inputs" in texts
    assert any(text.startswith("Success to capture fx_graph") for text in texts)
    del lines[:]
    call(x)
    assert ("npugraph_ex", "DEBUG", "runtime outputs") in lines
    del lines[:]
    torch.compile(lambda x: x + 3, backend=torchair.get_npu_backend())(x)
    assert lines == []


def test_log_line_names_the_surface(capsys):
    npugraph_ex.logger.setLevel(logging.INFO)
    compiled_ex(lambda x: x + 1)(torch.randn(3))
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(
        rf"\[INFO\] NPUGRAPH_EX\({os.getpid()},[\w.]+\):[\d-]+ [\d:.]+ "
        r"\[pipeline\.py:\d+\]\d+ compiler inputs",
        first,
    )


DEBUG_PROGRAM = """
import torch, npugraph_ex
from torch.fx.experimental.proxy_tensor import make_fx
from torchair.npugraph_ex.backend import npugraph_ex_backend
x = torch.randn(2, 3)
torch.compile(lambda x: x.view(-1) + 1, backend=npugraph_ex_backend)(x)
npugraph_ex.compile_fx(make_fx(lambda x: (x + 1,))(x), [x])(x)
"""


def test_debug_folder_is_named_after_the_surface(tmp_path):
    output = run_fresh(DEBUG_PROGRAM, tmp_path, TORCH_COMPILE_DEBUG="1")
    (run,) = (tmp_path / "torch_compile_debug").glob("run_*-pid_*")
    root = run / "npugraph_ex"
    assert not (run / "torchair").exists()
    assert sorted(p.name for p in root.iterdir()) == ["compile__0", "debug.log", "model__0"]
    folders = sorted(p.name for p in (root / "model__0").iterdir())
    assert folders[:2] == ["dynamo_out_graph.txt", "forward"]
    (first, *_) = sorted(p.name for p in (root / "compile__0" / "compile_fx").iterdir())
    assert first == "000_aot_compile_fx_graph.txt"
    log = (root / "debug.log").read_text()
    assert "NPUGRAPH_EX(" in log and "compiler inputs" in log and "TORCHAIR(" not in log
    assert "NPUGRAPH_EX(" in output and "TORCHAIR(" not in output


# ---- end to end


class Block(nn.Module):
    """Attention with a cache of keys and values, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.heads, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("cache", torch.zeros(2, 8, 32))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x)).chunk(3, dim=-1)
        self.cache[0].index_copy_(0, self.position, k)
        self.cache[1].index_copy_(0, self.position, v)
        self.position.add_(1)
        keys, values = (t.view(8, 4, 8).transpose(0, 1) for t in self.cache)
        scores = q.view(1, 4, 8).transpose(0, 1) @ keys.transpose(1, 2)
        seen = torch.arange(8) < self.position
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")) / 8**0.5, dim=-1)
        x = x + self.out((weights @ values).transpose(0, 1).reshape(1, 32))
        return x + self.down(F.gelu(self.up(self.last(x))))


def same_as_eager(options: dict[str, Any]) -> None:
    """Five decode steps of a block, compiled and not: results and caches."""
    torch.manual_seed(0)
    model = Block().eval()
    reference = copy.deepcopy(model)
    call = compiled_ex(model, options)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(1, 32)
            torch.testing.assert_close(call(x.clone()), reference(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.cache, reference.cache, rtol=1e-4, atol=1e-5)
    assert model.position.item() == 5


WITHOUT_FILES = sorted(set(DEFAULTS) - {"dump_tensor_data", "data_dump_stage", "data_dump_dir"})


@pytest.mark.filterwarnings("ignore:no effect on this device")
@pytest.mark.filterwarnings("ignore:frozen_parameter is on")
@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_each_option_keeps_results_right(name):
    passes = {"post_grad_custom_pre_pass": lambda *_: None} | {
        "post_grad_custom_post_pass": lambda *_: None,
        "use_graph_pool": graph_pool_handle(),
    }
    value = passes.get(name, OTHER_VALUES.get(name, not DEFAULTS[name]))
    same_as_eager({name: value})


def test_a_block_is_captured_once_and_replayed():
    same_as_eager({})
    assert counted("captured") == 1
    assert counted("recapture_due_to_mutated_input_change") == 0


def test_results_are_overwritten_if_they_are_shared():
    x, y = torch.randn(4), torch.randn(4)
    call = compiled_ex(lambda x: x + 1, {"share_results": True})
    first = call(x)
    assert call(y) is first
    torch.testing.assert_close(first, y + 1)
    for options in ({}, {"share_results": True, "clone_output": True}):
        torch._dynamo.reset()
        call = compiled_ex(lambda x: x + 1, options)
        first, second = call(x), call(y)
        torch.testing.assert_close(first, x + 1)
        torch.testing.assert_close(second, y + 1)


def test_first_tensor_is_the_buffer_without_clone_input():
    call = compiled_ex(lambda x: x + 1, {"clone_input": False})
    x, y = torch.zeros(4), torch.ones(4)
    call(x)
    torch.testing.assert_close(call(y), y + 1)
    torch.testing.assert_close(x, y)
    torch._dynamo.reset()
    x = torch.zeros(4)
    call = compiled_ex(lambda x: x + 1)
    call(x)
    call(y)
    torch.testing.assert_close(x, torch.zeros(4))


def test_calls_run_eagerly_beyond_the_limit():
    call = compiled_ex(lambda x: x.sin() + 1, {"capture_limit": 2}, dynamic=True)
    for n in (3, 4):
        x = torch.randn(n)
        torch.testing.assert_close(call(x), x.sin() + 1)
    assert counted("captured") == 2
    with pytest.warns(UserWarning, match=r": capture_limit reached, 2 .* Raise capture_limit, "):
        call(torch.randn(5))
    assert counted("captured") == 0
    for n in (3, 5, 6):
        x = torch.randn(n)
        torch.testing.assert_close(call(x), x.sin() + 1)
    assert counted("captured") == 0


def test_force_eager_captures_nothing():
    x = torch.randn(4)
    call = compiled_ex(lambda x: x.sin() + 1, {"force_eager": True})
    first, second = call(x), call(x)
    torch.testing.assert_close(first, x.sin() + 1)
    assert first.data_ptr() != second.data_ptr()
    assert counted("captured") == 0


def test_force_recapture_captures_each_call_anew():
    call = compiled_ex(lambda x: x.sin() + 1, {"force_recapture": True})
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(call(x), x.sin() + 1)
    assert counted("captured") == 1
    assert counted("recapture_due_to_force_recapture") == 2


def test_two_graphs_in_one_pool():
    pool = graph_pool_handle()
    x = torch.randn(8, 8)
    calls = [compiled_ex(fn, {"use_graph_pool": pool}) for fn in (torch.sin, torch.cos)]
    for _ in range(2):
        for call, fn in zip(calls, (torch.sin, torch.cos), strict=True):
            torch.testing.assert_close(call(x), fn(x))
    assert counted("captured") == 2


@pytest.mark.filterwarnings("ignore:frozen_parameter is on")
def test_parameters_that_move_are_captured_anew():
    for frozen, captures in ((False, 2), (True, 1)):
        torch._dynamo.reset()
        counters.clear()
        model = nn.Linear(4, 4).eval()
        call = compiled_ex(model, {"frozen_parameter": frozen})
        x = torch.randn(2, 4)
        with torch.no_grad():
            call(x)
            model.weight.data = torch.randn(4, 4)
            result = call(x)
        assert counted("captured") == captures  # frozen ones are not in the key
        torch.testing.assert_close(result, model(x))


def test_training_is_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    reference = copy.deepcopy(model)
    call = compiled_ex(model)
    for _ in range(3):
        x = torch.randn(5, 4)
        call(x).square().sum().backward()
        reference(x).square().sum().backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_custom_decompositions_are_used():
    called = []

    def decomposed(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        called.append(approximate)
        return x * torch.sigmoid(x)

    backend = npugraph_ex.get_npu_backend(custom_decompositions={aten.gelu.default: decomposed})
    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(F.gelu, backend=backend)(x), x * torch.sigmoid(x))
    assert called == ["none"]


# ---- compile_fx and get_compiler


def traced(fn: Any, *args: Any) -> Any:
    return make_fx(fn, tracing_mode="fake")(*args)


@pytest.mark.parametrize("with_inputs", [True, False])
def test_compile_fx(with_inputs):
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x @ y) + 1, x.sum()

    x, y = torch.randn(3, 4), torch.randn(4, 3)
    gm = traced(fn, x, y)
    text = gm.code
    call = npugraph_ex.compile_fx(gm, [x, y] if with_inputs else None)
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(4, 3)
        torch.testing.assert_close(tuple(call(x, y)), fn(x, y))
    assert gm.code == text
    assert counted("captured") == 1


def test_compile_fx_updates_arguments():
    def fn(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        aten.copy_.default(total, total + x)
        return (x * 2,)

    x, total = torch.randn(3), torch.zeros(3)
    call = npugraph_ex.compile_fx(traced(fn, x, total), [x, total])
    for n in (1, 2):
        (double,) = call(x, total)
        torch.testing.assert_close(double, x * 2)
        torch.testing.assert_close(total, x * n)


def test_compile_fx_options():
    gm = traced(lambda x: (x.sin(),), torch.randn(3))
    with pytest.raises(ValueError, match="'typo'"):
        npugraph_ex.compile_fx(gm, options={"typo": 1})
    x = torch.randn(3)
    call = npugraph_ex.compile_fx(gm, options={"force_eager": True})
    torch.testing.assert_close(call(x)[0], x.sin())
    assert counted("captured") == 0


def test_compile_fx_says_that_it_needs_values():
    gm = torch.fx.symbolic_trace(lambda x: (aten.sin.default(x),))
    with pytest.raises(ValueError, match=r"placeholders x .*example_inputs"):
        npugraph_ex.compile_fx(gm)


def test_compiler_for_hand_written_backends():
    config = FlatConfig()
    config.clone_output = True
    compiler = npugraph_ex.get_compiler(config)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    x, y = torch.randn(4), torch.randn(4)
    call = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with torch.no_grad():
        first, second = call(x), call(y)
    torch.testing.assert_close(first, x.sin() + 1)
    torch.testing.assert_close(second, y.sin() + 1)
    assert counted("captured") == 1
