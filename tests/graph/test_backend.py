"""The backend through torch.compile: results, memory, errors and configuration, against eager."""

from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_function, aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

import torchair
from compiling import compiled
from like_eager import LIKE_EAGER, assert_like_eager, check, x23, x44
from torchair import ge
from torchair.concrete import GeConcreteGraph
from torchair.convert.registry import unregister
from torchair.engine.compile import GraphCompiler
from torchair.engine.options import finalize_graph_engine
from torchair.engine.session import TorchNpuGraph
from torchair.errors import (
    ConversionError,
    GraphError,
    InputError,
    ScopeError,
)
from torchair.fx.tracing import correct_fake_values
from torchair.ge.build import Data, builder
from torchair.ge.graph import Graph, TensorSpec

aten = torch.ops.aten
NetOutput = builder("NetOutput")


@pytest.fixture(autouse=True)
def fresh_process_state():
    torch._dynamo.reset()
    counters.clear()
    finalize_graph_engine()
    torch.manual_seed(0)
    yield
    finalize_graph_engine()


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


# ---- everything a caller can see is as in eager


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LIKE_EAGER)
def test_like_eager(name, dynamic):
    fn, args = LIKE_EAGER[name]
    check(fn, *args(), dynamic=dynamic)


@pytest.mark.parametrize("cut", ["swapped", "unbound"])
def test_views_of_what_a_number_makes(cut):
    """From the second number on it is an argument of the graph, for which torch adds nodes."""

    def fn(x, s):
        y = x * s
        return (y.swapaxes(0, 0), y) if cut == "swapped" else (*y.unbind(0), y)

    call = compiled(fn)
    for s in (0.5, 1.5, 2.0):
        assert_like_eager(fn, call, [x23(), s])


def test_number_selects_a_row_of_fixed_sizes():
    """Nothing but a number differs from call to call: kernels have to read it."""
    x = torch.randn(4, 3)
    torch._dynamo.mark_static(x)
    check(lambda n: x.select(0, n - 1) + 1, 1, dynamic=True, others=[[3], [2], [4]])


def test_convolution_without_channels():
    """Torch gives as many channels as come in, where none come in."""
    sizes = ((2, 3, 48), (2, 31, 32), (2, 0, 3), (2, 3, 48))
    first, *others = [[torch.randn(s)] for s in sizes]
    check(lambda x: F.conv1d(x, x, padding=1).relu(), *first, dynamic=True, others=others)


def test_strides_of_results_follow_those_of_arguments():
    """Sizes of a stride that no tensor has as a dim."""

    def fn(x):
        y = x.select_scatter(x.select(1, 0) * 2, 1, 0)
        return y, y[1:], y.t()

    sizes = ((5, 11, 2), (5, 10, 2), (6, 18, 3), (7, 22, 3), (7, 7, 1))
    first, *others = [[torch.randn(n, m)[:, ::step]] for n, m, step in sizes]
    check(fn, *first, dynamic=True, others=others)


def test_what_torch_traces_wrongly_is_mended():
    """As torch 2.11 has it: what is scattered into a tensor that repeats, zeros that replace a
    transposed one, and the sums of attention in float64."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default

    def fn(x, y, q):
        sums = attention(q, q, q)[1]
        return aten.select_scatter(x, x[0] * 2, 0, 0), aten.zero(y) + 1, sums.exp()

    x, y = torch.randn(3).expand(4, 3), torch.randn(3, 4).t()
    args = x, y, torch.randn(1, 2, 5, 4, dtype=torch.float64)
    gm = make_fx(fn, tracing_mode="fake")(*args)
    for node in gm.graph.nodes:
        meta = node.meta.get("val")
        if node.target is aten.select_scatter.default:
            node.meta["val"] = meta.as_strided(meta.shape, (0, 1))
        elif node.target is attention:
            node.meta["val"] = meta[0], meta[1].float()
        elif node.op == "call_function" and isinstance(meta, torch.Tensor):
            node.meta["val"] = meta.float().contiguous()
    correct_fake_values(gm)
    results = gm.graph.output_node().args[0]
    for result, wanted in zip(results, fn(*args), strict=True):
        meta = result.meta["val"]
        assert (meta.dtype, meta.stride()) == (wanted.dtype, wanted.stride()), result


def test_argument_may_begin_elsewhere_in_its_memory():
    """Guards do not look at storage offsets."""
    whole = torch.randn(6, 3)
    check(lambda x: (x[1:], x + 1, x.t()), whole[:3], others=[[whole[2:5]], [whole[3:]]])
    run = traced(lambda x: (x[1:], x * 2), whole[:3])
    part, double = run(whole[3:])
    assert part.data_ptr() == whole[4].data_ptr()
    torch.testing.assert_close(double, whole[3:] * 2)


def traced(fn: Any, *args: Any, config: Any = None) -> Any:
    """A function compiled by the bare compiler, without Dynamo and its guards."""
    kept = []
    compiler = torchair.get_compiler(config)

    def keep(gm: Any, inputs: Any) -> Any:
        kept.append(compiler(gm, inputs))
        return kept[0]

    with torch.no_grad():
        aot_function(fn, fw_compiler=keep)(*args)
    return kept[0]


# ---- buffers, modules, sizes


class Counting(nn.Module):
    """A module with state that calls change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.tensor(0))
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.total += self.linear(x).sum(0)
        self.calls.add_(1)
        return self.total * x


def test_buffers_are_updated():
    model, reference = Counting(), Counting()
    reference.load_state_dict(model.state_dict())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            x = x23()
            torch.testing.assert_close(call(x), reference(x))
    assert model.calls.item() == 3
    torch.testing.assert_close(model.total, reference.total)


def test_batch_norm_in_training_updates_its_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(compiled(model)(x), reference(x))
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_key_value_cache_over_many_steps():
    def step(cache, position, new):
        cache.index_copy_(1, position, new)
        return torch.softmax((cache * new).sum(-1), -1)

    call = compiled(step)
    mine = torch.zeros(2, 16, 4)
    theirs = mine.clone()
    for i in range(16):
        position, new = torch.tensor([i]), torch.randn(2, 1, 4)
        torch.testing.assert_close(call(mine, position, new), step(theirs, position, new))
    torch.testing.assert_close(mine, theirs)
    assert graphs_compiled() == 1


def test_caller_may_write_into_a_returned_view():
    call = compiled(lambda x: (x[1:], x + 1))
    x = torch.zeros(3, 2)
    view, more = call(x)
    view.fill_(7)
    assert x.tolist() == [[0, 0], [7, 7], [7, 7]]
    assert more.eq(1).all()


def test_dynamic_serves_other_sizes_and_static_recompiles():
    def fn(x, y):
        return (x @ y).softmax(-1).reshape(-1, 2) + x.shape[0]

    sizes = [(2, 3, 4), (4, 5, 6), (3, 7, 8), (8, 3, 4)]
    args = [[torch.randn(a, b), torch.randn(b, c)] for a, b, c in sizes]
    for dynamic, expected in ((True, 1), (False, len(sizes)), (None, 2)):
        torch._dynamo.reset()
        counters.clear()
        check(fn, *args[0], dynamic=dynamic, others=args[1:])
        assert graphs_compiled() == expected, dynamic


def test_scalar_argument_is_a_symbol_or_a_constant():
    for dynamic, expected in ((True, 1), (False, 3)):
        torch._dynamo.reset()
        counters.clear()
        call = compiled(lambda x, n: (x * n, n + 1), dynamic=dynamic)
        for n in (2, 5, 9):
            assert_like_eager(lambda x, n: (x * n, n + 1), call, [x23(), n])
        assert graphs_compiled() == expected


def test_mark_static_keeps_a_size_fixed():
    call = compiled(lambda x, n: x * n, dynamic=True)
    for rows, n in ((2, 3), (2, 4), (5, 3), (5, 6)):
        x = torch.randn(rows, 3)
        torch._dynamo.mark_static(x)
        torch.testing.assert_close(call(x, n), x * n)
    assert graphs_compiled() == 2


def test_symbolic_results():
    def fn(x):
        return x.shape[0], x.shape[0] * x.shape[1] + 1, x.reshape(-1).shape[0] // 2, x.sum(0)

    check(fn, x23(), dynamic=True, others=[[torch.randn(5, 4)], [torch.randn(7, 2)]])


def test_sizes_seen_before_are_not_planned_again(monkeypatch):
    run = traced_dynamic(lambda x: torch.relu(x).sum(0) * 2)
    planned = []
    plan = GraphCompiler.plan
    monkeypatch.setattr(GraphCompiler, "plan", lambda *args: planned.append(1) or plan(*args))
    for n in [*range(2, 302), 2, 3, 301]:
        x = torch.randn(n, 3)
        (got,) = run(n, x)
        torch.testing.assert_close(got, torch.relu(x).sum(0) * 2)
    assert len(planned) == 299  # the example had one of the sizes


def traced_dynamic(fn: Any) -> Any:
    """The runner behind a dynamic compile of `fn` on a (n, 3) tensor; takes n and the tensor."""
    kept = []
    compiler = torchair.get_compiler()

    def keep(gm: Any, inputs: Any) -> Any:
        kept.append(compiler(gm, inputs))
        return kept[-1]

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=keep)

    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(fn, backend=backend)(x)
    return kept[0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_threads_share_one_compiled_model(dynamic):
    def fn(x, y):
        z = torch.relu(x) @ y
        return (z.softmax(-1) + z.mean()).t(), z.sum()

    # Without fullgraph: Dynamo's count of compiled frames is one for all threads of the process.
    call = compiled(fn, dynamic=dynamic, fullgraph=False)
    # Equal outer sizes would be a graph of their own in torch 2.15, with any backend.
    sizes = [(4, 8, 6)] if not dynamic else [(2, 3, 4), (4, 8, 6), (16, 5, 7), (9, 9, 8)]
    args = [
        (torch.randn(a, b), torch.randn(b, c)) for _ in range(16 // len(sizes)) for a, b, c in sizes
    ]
    expected = [fn(*a) for a in args]
    call(*args[0])

    def work(start: int) -> int:
        for k in range(60):
            i = (start * 7 + k) % len(args)
            for got, wanted in zip(call(*args[i]), expected[i], strict=True):
                torch.testing.assert_close(got, wanted)
        return start

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
    assert graphs_compiled() == 1


def test_several_models_in_one_process():
    models = [nn.Linear(3, n) for n in (2, 4)] + [nn.Sequential(nn.Linear(3, 3), nn.GELU())]
    calls = [compiled(m) for m in models]
    x = x23()
    with torch.no_grad():
        for _ in range(2):
            for model, call in zip(models, calls, strict=True):
                torch.testing.assert_close(call(x), model(x))


def test_data_dependent_sizes():
    def fn(x):
        where = torch.nonzero(x > 0)
        return where, x[x > 0] * 2, where.shape[0]

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        check(fn, x44(), others=[[torch.full((4, 4), -1.0)], [torch.ones(4, 4)]])
        check(lambda x: x[x > 0].sum() + 1, x44(), others=[[-torch.ones(4, 4)]])
    assert graphs_compiled() == 2


def test_scalar_outputs_of_the_graph():
    def fn(x):
        n = x.sum().item()
        return n, x + n

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = compiled(fn)
        for x in (x23(), x23()):
            (n, y), (m, z) = call(x), fn(x)
            assert n == pytest.approx(m, rel=1e-6)
            torch.testing.assert_close(y, z)


def test_training_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    reference = copy.deepcopy(model)
    call = compiled(model)
    mine = torch.randn(5, 4, requires_grad=True)
    theirs = mine.detach().clone().requires_grad_()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    for _ in range(3):
        got, wanted = call(mine), reference(theirs)
        torch.testing.assert_close(got, wanted)
        got.square().mean().backward()
        wanted.square().mean().backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_training_with_other_sizes():
    model = nn.Linear(4, 3)
    call = compiled(model, dynamic=True)
    for n in (2, 5, 7):
        model.zero_grad()
        x = torch.randn(n, 4, requires_grad=True)
        call(x).relu().sum().backward()
        mine = (model.weight.grad.clone(), x.grad.clone())
        model.zero_grad()
        y = x.detach().clone().requires_grad_()
        model(y).relu().sum().backward()
        torch.testing.assert_close(mine, (model.weight.grad, y.grad))
    assert graphs_compiled() == 1


def test_exported_program():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    exported = torch.export.export(model, (x23(),)).module()
    x = x23()
    with torch.no_grad():
        torch.testing.assert_close(compiled(exported)(x), model(x))


def test_inference_mode_then_no_grad():
    model = nn.Linear(3, 2)
    call, x = compiled(model), x23()
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x))
        y = x + 1  # an inference tensor as input
        torch.testing.assert_close(call(y), model(y))
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
        assert torch.is_grad_enabled() is False
    assert call(x).requires_grad
    assert torch.is_grad_enabled()


# ---- entry points and configuration

ROOT = Path(__file__).resolve().parents[2]


def test_get_npu_backend_takes_keywords_only():
    parameters = inspect.signature(torchair.get_npu_backend).parameters
    assert {n: p.kind for n, p in parameters.items()} == {
        "compiler_config": inspect.Parameter.KEYWORD_ONLY,
        "custom_decompositions": inspect.Parameter.KEYWORD_ONLY,
    }
    with pytest.raises(TypeError):
        torchair.get_npu_backend(torchair.CompilerConfig())


def test_backend_is_a_partial_with_its_configuration():
    config = torchair.CompilerConfig()
    table = {aten.gelu.default: lambda x: x}
    backend = torchair.get_npu_backend(compiler_config=config, custom_decompositions=table)
    assert isinstance(backend, functools.partial)
    assert backend.keywords["compiler_config"] is config
    assert backend.keywords["decompositions"] == table
    assert isinstance(
        torchair.get_npu_backend().keywords["compiler_config"], torchair.CompilerConfig
    )


def test_entry_points_are_declared():
    from torchair.backend import torchair_backend

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = project["entry-points"]["torch_dynamo_backends"]
    ours = {n: "torchair.backend:torchair_backend" for n in ("torchair", "npu")}
    ours["npugraph_ex"] = "torchair.npugraph_ex.backend:npugraph_ex_backend"
    assert names == ours
    x = x23()
    torch.testing.assert_close(torch.compile(lambda x: x + 1, backend=torchair_backend)(x), x + 1)


def test_backend_names_need_no_import():
    code = """
    import sys, torch
    x = torch.randn(3, 2)
    for name in ("torchair", "npu", "npugraph_ex"):
        torch._dynamo.reset()
        y = torch.compile(torch.nn.ReLU(), backend=name)(x)
        torch.testing.assert_close(y, x.relu())
    assert "torchair" in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_get_compiler_in_a_hand_written_backend():
    config = torchair.CompilerConfig()
    seen = []

    def backend(gm, inputs):
        compiler = torchair.get_compiler(config)

        def spy(graph, examples):
            seen.append(compiler(graph, examples))
            return seen[-1]

        return aot_module_simplified(gm, inputs, fw_compiler=spy)

    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    call = torch.compile(model, backend=backend)
    torch.testing.assert_close(call(x), model(x))
    call(x).sum().backward()
    assert x.grad is not None and model.weight.grad is not None
    assert len(seen) == 2
    assert all(isinstance(s.runner, GeConcreteGraph) for s in seen)


def test_custom_decompositions_are_used(tmp_path):
    def quick_gelu(x, approximate="none"):
        return x * torch.sigmoid(1.702 * x)

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(tmp_path)
    backend = torchair.get_npu_backend(
        compiler_config=config, custom_decompositions={aten.gelu.default: quick_gelu}
    )
    x = x23()
    call = torch.compile(torch.nn.functional.gelu, backend=backend)
    torch.testing.assert_close(call(x), quick_gelu(x))
    text = next(tmp_path.glob("dynamo_original_*")).read_text()
    assert "ge.Sigmoid(" in text and "ge.Gelu(" not in text


def test_configuration_is_not_changed_by_compiling():
    config = torchair.CompilerConfig()
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    before = copy.deepcopy(config)
    call = compiled(lambda x: x + 1, config)
    call(x23())
    backend = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    torch.compile(lambda x: x + 2, backend=backend, options={"remove_noop_ops": False})(x23())
    torch._dynamo.reset()
    torch.compile(lambda x: x + 3, backend=backend, mode="max-autotune")(x23())
    assert config == before


@pytest.mark.parametrize("backend", ["torchair", "npugraph_ex"])
def test_modes_of_torch_compile(backend):
    x = x23()
    modes = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    for mode in modes:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(torch.sin, backend=backend, mode=mode)(x), x.sin())
    with pytest.raises(Exception, match=r"(?s)unknown mode 'fastest'.*max-autotune, "):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend=backend, mode="fastest")(x)


def test_options_of_torch_compile():
    backend = torchair.get_npu_backend()
    seen = []
    options = {"post_grad_custom_post_pass": lambda gm, inputs, config: seen.append(config)}
    x = x23()
    torch.testing.assert_close(
        torch.compile(lambda x: x + 1, backend=backend, options=options)(x), x + 1
    )
    assert len(seen) == 1
    assert seen[0].post_grad_custom_post_pass.value is options["post_grad_custom_post_pass"]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"options": {"no_such_option": 1}}, ["no_such_option", "remove_noop_ops", "clone_input"]),
        ({"options": {"inplace_pass": "test"}}, ["test", "[True, False]"]),
        ({"mode": "no-such-mode"}, ["no-such-mode", "max-autotune", "reduce-overhead"]),
    ],
)
def test_wrong_options_and_modes_name_the_legal_ones(arguments, texts):
    call = torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(), **arguments)
    with pytest.raises(BackendCompilerFailed) as caught:
        call(x23())
    for text in texts:
        assert text in str(caught.value)
    assert isinstance(caught.value.inner_exception, ValueError)


def test_run_eagerly_runs_the_fx_graph():
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    model = Counting()
    reference = copy.deepcopy(model)
    call = compiled(model, config)
    x = x23()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(x), reference(x))
    torch.testing.assert_close(model.total, reference.total)
    run = traced(lambda x: (x + 1).reshape(-1), x, config=config)
    assert isinstance(run.runner, torch.fx.GraphModule)
    assert aten.reshape.default in [n.target for n in run.runner.graph.nodes]


def test_global_options_conflict_is_reported_and_survived():
    x = x23()
    assert compiled(lambda x: x + 1)(x) is not None
    other = torchair.CompilerConfig()
    other.ge_config.oo_level = "O1"
    with pytest.raises(ValueError, match=r"(?s)other global options.*O1"):
        compiled(lambda x: x + 2, other)(x)
    torch.testing.assert_close(compiled(lambda x: x + 3)(x), x + 3)
    finalize_graph_engine()
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(lambda x: x + 4, other)(x), x + 4)


# ---- converters of the user


@pytest.fixture
def own_tanh():
    """A way to register a converter of tanh for one test."""
    yield torchair.register_fx_node_ge_converter(aten.tanh.default)
    unregister(aten.tanh.default)


def _tanh_plus_one(x):
    return torch.tanh(x) + 1


def test_converter_that_raises_is_named(own_tanh):
    @own_tanh
    def broken(self, meta_outputs=None):
        raise KeyError("no such thing")

    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(_tanh_plus_one)(x23())
    error = caught.value.inner_exception
    assert isinstance(error, ConversionError)
    for text in (
        "aten.tanh.default",
        "KeyError: 'no such thing'",
        "broken (",
        "tanh(Tensor self) -> Tensor",
        "return torch.tanh(x) + 1",
        "test_backend.py",
    ):
        assert text in str(error)
    x = x23()
    torch.testing.assert_close(compiled(lambda x: x * 3)(x), x * 3)  # the process goes on


def test_own_converter_overrides_and_gets_the_expected_results(own_tanh):
    seen = []

    @own_tanh
    def first(self, meta_outputs: TensorSpec = None):
        raise AssertionError("a later registration wins")

    @own_tanh
    def doubled(self, meta_outputs: TensorSpec = None):
        seen.append(meta_outputs)
        return ge.Mul(self, ge.Const(2.0, dtype=meta_outputs.dtype))

    x = x23()
    torch.testing.assert_close(compiled(_tanh_plus_one, dynamic=False)(x), x * 2 + 1)
    assert seen[0].dtype == 0 and tuple(seen[0].size) == (2, 3)
    unregister(aten.tanh.default)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(_tanh_plus_one)(x), x.tanh() + 1)


def test_own_converter_with_wrong_result_is_refused(own_tanh):
    @own_tanh
    def wrong(self):
        return ge.Cast(self, dst_type=9)

    with pytest.raises(BackendCompilerFailed, match=r"should have type torch\.float32"):
        compiled(_tanh_plus_one)(x23())


def test_strict_converters_refuse_the_generic_node():
    config = torchair.CompilerConfig()
    config.experimental_config.strict_converters = True
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(lambda x: torch.special.i0(x), config)(x23())
    assert isinstance(caught.value.inner_exception, ConversionError)
    for text in (
        "aten.i0.default ge_converter is not implemented!",
        "register_fx_node_ge_converter(torch.ops.aten.i0.default)",
    ):
        assert text in str(caught.value)
    torch._dynamo.reset()
    check(lambda x: torch.special.i0(x) + 1, x23())


# ---- passes of the user


def _insert(op: Any, *args: Any) -> Any:
    def custom_pass(gm, example_inputs, config):
        first = next(n for n in gm.graph.nodes if n.op == "call_function")
        with gm.graph.inserting_before(first):
            gm.graph.call_function(op, args)

    return custom_pass


@pytest.mark.parametrize(
    ("custom_pass", "missing"),
    [
        (
            _insert(torch.ops.air.scope_enter.default, ["_user_stream_label"], ["s"]),
            "there is no paired call to the torch.ops.air.scope_exit operator",
        ),
        (
            _insert(torch.ops.air.scope_exit.default),
            "you must first call the torch.ops.air.scope_enter operator",
        ),
    ],
    ids=["only_enter", "only_exit"],
)
def test_unbalanced_scopes(custom_pass, missing):
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = custom_pass
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(lambda x: x + 1, config)(x23())
    assert isinstance(caught.value.inner_exception, ScopeError)
    assert missing in str(caught.value)
    assert "graph break" in str(caught.value)


@pytest.mark.parametrize("when", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_pass_that_breaks_the_graph_is_named(when):
    def broken(gm, example_inputs, config):
        stranger = torch.fx.Graph().placeholder("stranger")
        gm.graph.output_node().args = ((stranger,),)

    config = torchair.CompilerConfig()
    setattr(config, when, broken)
    with pytest.raises(BackendCompilerFailed, match=f"pass {when} left an invalid graph") as caught:
        compiled(lambda x: x + 1, config)(x23())
    assert isinstance(caught.value.inner_exception, GraphError)


def test_error_of_a_pass_reaches_the_user():
    def failing(gm, example_inputs, config):
        raise LookupError("what the pass says")

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = failing
    with pytest.raises(BackendCompilerFailed, match="what the pass says") as caught:
        compiled(lambda x: x + 1, config)(x23())
    assert isinstance(caught.value.inner_exception, LookupError)


def test_pass_may_insert_operators_without_metadata():
    def negate(gm, example_inputs, config):
        for node in list(gm.graph.nodes):
            if node.target is aten.add.Tensor:
                with gm.graph.inserting_after(node):
                    made = gm.graph.call_function(aten.neg.default, (node,))
                node.replace_all_uses_with(made, delete_user_cb=lambda user, m=made: user is not m)

    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = negate
    x = x23()
    torch.testing.assert_close(compiled(lambda x: (x + 1) * 2, config)(x), -(x + 1) * 2)
    torch._dynamo.reset()
    call = compiled(lambda x: (x + 1) * 2, config, dynamic=True)
    torch.testing.assert_close(call(x), -(x + 1) * 2)


# ---- wrong inputs at run time


def _session() -> TorchNpuGraph:
    with Graph("graph_1") as graph:
        x = Data(index=0, dtype=0, shape=[2, 3], placement="CPU", node_name="left")
        y = Data(index=1, dtype=0, shape=[2, 3], placement="CPU", node_name="right")
        NetOutput([ge.Add(x, y)])
    session = TorchNpuGraph("graph_1")
    session.load(graph)
    session.compile()
    return session


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda: torch.randn(3, 2), ["[2, 3]", "[3, 2]"]),
        (lambda: torch.randn(2), ["[2, 3]", "[2]"]),
        (lambda: torch.ones(2, 3, dtype=torch.int64), ["torch.float32", "torch.int64"]),
        (lambda: torch.empty(2, 3, device="meta"), ["cpu", "meta"]),
        (lambda: None, ["tensor", "is None"]),
        (lambda: 3, ["tensor", "int"]),
    ],
    ids=["dims", "rank", "type", "device", "none", "number"],
)
def test_input_that_does_not_fit_is_named(wrong, expected):
    session = _session()
    good = x23()
    for _ in range(2):  # before and after a run that went well
        with pytest.raises(InputError) as caught:
            session.run([good, wrong()])
        assert (caught.value.index, caught.value.name) == (1, "right")
        for text in expected:
            assert text in str(caught.value)
        torch.testing.assert_close(session.run([good, good])[0], good * 2)


def test_wrong_number_of_inputs():
    with pytest.raises(InputError, match=r"(?s)wrong number of inputs.*expected: 2.*got: 1"):
        _session().run([x23()])


def test_kernel_that_fails_at_run_time_names_the_source_line():
    call = compiled(lambda x, i: x[i] + 1)
    x = x23()
    torch.testing.assert_close(call(x, torch.tensor([1])), x[[1]] + 1)
    with pytest.raises((IndexError, RuntimeError)) as caught:
        call(x, torch.tensor([7]))
    assert "test_backend.py" in str(caught.value)
    torch.testing.assert_close(call(x, torch.tensor([0])), x[[0]] + 1)
