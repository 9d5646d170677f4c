"""Graphs of torch.compile that are entered natively, and calls that are not like those before."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import torchair
from like_eager import assert_same as same
from torchair.concrete import fast_path
from torchair.engine.run import native
from torchair.errors import InputError


class Net(nn.Module):
    """Two layers, and a buffer that it may update."""

    def __init__(self, updates: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(4, 3))
        self.scale = 1.0
        self.updates = updates

    def forward(self, x):
        y = self.second(torch.relu(self.first(x))) * self.scale
        if self.updates:
            self.seen.index_copy_(0, torch.arange(4), y)
        return y + 1 if self.training else y


@pytest.fixture(autouse=True)
def compile_anew():
    """Entries of other tests, and of models that were compiled with fewer guards, are gone."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def paths(monkeypatch):
    """The fast paths that are made."""
    found: list[fast_path._FastPath] = []
    make = fast_path._FastPath.__init__

    def noted(self, *args):
        make(self, *args)
        found.append(self)

    monkeypatch.setattr(fast_path._FastPath, "__init__", noted)
    return found


def through(model, frozen=False, **keywords):
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True, **keywords)


def ready(compiled, model, x, calls=6):
    """Calls until the native guard is there."""
    for _ in range(calls):
        same(compiled(x), model(x))


def served(path):
    """Calls that the native guard has taken since it was asked last."""
    assert path._entry is not None
    return path._entry.guarded.take_hits()


@pytest.mark.filterwarnings("ignore:frozen_parameter")
@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_calls_from_the_fourth_on_are_native_and_see_all_that_changes(paths, frozen):
    model = Net().eval()
    compiled = through(model, frozen)
    ready(compiled, model, torch.randn(4, 6))
    (path,) = paths
    assert served(path) == 3
    for change in (
        lambda: model.first.weight.add_(1),  # its version
        lambda: model.first.weight.copy_(torch.randn(8, 6)),
        lambda: setattr(model.first.weight, "data", torch.randn(8, 6)),  # its address
        lambda: setattr(model.second, "bias", nn.Parameter(torch.randn(3))),  # the object
        lambda: model.load_state_dict(Net().state_dict()),
    ):
        change()
        for _ in range(12):
            x = torch.randn(4, 6)
            same(compiled(x), model(x))
    ready(compiled, model, torch.randn(4, 6), 60)  # after changes there is a guard only in time
    assert served(path) > 0
    wide = torch.randn(4, 12)[:, ::2]  # other strides: a graph of their own
    ready(compiled, model, wide)
    ready(compiled, model, torch.randn(4, 6))
    model.train()
    ready(compiled, model, torch.randn(4, 6))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "autocast"])
def test_state_of_torch_is_what_it_is_in_the_call(paths, mode):
    model = Net().eval().requires_grad_(False)
    compiled = through(model)
    x = torch.randn(4, 6)
    with torch.no_grad():
        ready(compiled, model, x)
    around = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }[mode]
    with around():
        for _ in range(5):
            result, expected = compiled(x), model(x)
            same(result, expected)
            assert result.dtype == expected.dtype
            assert result.is_inference() == expected.is_inference()
            assert result.requires_grad == expected.requires_grad
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        compiled(given).sum().backward()
        assert given.grad is not None
    with torch.no_grad():
        ready(compiled, model, x)


@torch.no_grad()
def test_buffers_are_updated_and_their_versions_counted(paths):
    model, eager = Net(updates=True).eval(), Net(updates=True).eval()
    eager.load_state_dict(model.state_dict())
    compiled = through(model)
    for _ in range(8):
        x = torch.randn(4, 6)
        before = model.seen._version
        same(compiled(x), eager(x))
        same(model.seen, eager.seen)
        assert model.seen._version > before
    assert served(paths[0]) == 5


@torch.no_grad()
def test_results_come_in_order_and_are_new_tensors(paths):
    def model(x, y):
        a, b = x + y, x * y
        return b, a, b - a

    compiled = through(model)
    kept = []
    for _ in range(6):
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        kept.append((compiled(x, y), model(x, y)))
    for results, expected in kept:
        for got, wanted in zip(results, expected, strict=True):
            same(got, wanted)
    assert served(paths[0]) == 3


@torch.no_grad()
def test_results_that_share_memory_keep_the_wrapper(paths):
    compiled = through(lambda x: (x.view(-1), x + 1))
    for _ in range(5):
        x = torch.randn(2, 3)
        view, more = compiled(x)
        assert view.data_ptr() == x.data_ptr()
        same(more, x + 1)
    assert all(c._entry is None for c in paths)


@torch.no_grad()
def test_two_models_of_one_class_take_turns(paths):
    models = [Net().eval() for _ in range(2)]
    calls = [through(m) for m in models]
    for _ in range(30):
        for call, model in zip(calls, models, strict=True):
            x = torch.randn(4, 6)
            same(call(x), model(x))


@torch.no_grad()
def test_threads_do_not_meet_in_one_program():
    model = Net().eval()
    compiled = through(model)
    ready(compiled, model, torch.randn(4, 6))
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(100):
                x = torch.randn(4, 6)
                if not torch.allclose(compiled(x), model(x), atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_neither_arguments_nor_models_are_kept():
    model, x = Net().eval(), torch.randn(4, 6)
    compiled = through(model)
    ready(compiled, model, x)
    argument, weight = weakref.ref(x), weakref.ref(model.first.weight)
    del x
    gc.collect()
    assert argument() is None
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


@torch.no_grad()
def test_a_profiler_and_debug_logs_see_each_call(paths):
    model, x = Net().eval(), torch.randn(4, 6)
    compiled = through(model)
    ready(compiled, model, x)
    served(paths[0])
    with torch.profiler.profile() as profile:
        same(compiled(x), model(x))
    assert any("npu_fx_compiler" in e.key for e in profile.key_averages())
    assert served(paths[0]) == 0


@torch.no_grad()
def test_memory_of_the_user_is_used_from_the_next_call_on(paths):
    model = Net().eval()
    compiled = through(model)
    ready(compiled, model, torch.randn(4, 6))
    (path,) = paths
    assert served(path) == 3
    session = path._graph.session
    block = torch.full((session.summary().feature_memory_size,), 7, dtype=torch.uint8)
    session.update_graph_feature_memory_base(block)
    ready(compiled, model, torch.randn(4, 6))
    assert path._entry is None and (block != 7).any()


@torch.no_grad()
def test_a_bad_index_is_an_index_error(paths):
    table = nn.Embedding(5, 3)
    compiled = through(lambda i: table(i) + 1)
    for _ in range(5):
        same(compiled(torch.tensor([1, 4])), table(torch.tensor([1, 4])) + 1)
    assert served(paths[0])
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 5]))
    same(compiled(torch.tensor([2, 0])), table(torch.tensor([2, 0])) + 1)


@torch.no_grad()
def test_a_bad_index_is_the_error_of_its_own_call_alone(paths, monkeypatch):
    table, good = nn.Embedding(5, 3), torch.tensor([2, 0])
    compiled = through(lambda i: table(i) + 1)
    ready(compiled, lambda i: table(i) + 1, good)
    assert served(paths[0])
    read = native.GuardedEntry.failure

    def failure(entry):
        same(compiled(good), table(good) + 1)  # as another thread may call before it is read
        return read(entry)

    monkeypatch.setattr(native.GuardedEntry, "failure", failure)
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 5]))
    same(compiled(good), table(good) + 1)
    assert served(paths[0])


# ---- guards that the user leaves out ----


UNGUARDED = {"guard_filter_fn": torchair.skip_model_guards_unsafe}
LIMIT = 3
FUNCTION = nn.functional.relu


@torch.no_grad()
def test_without_guards_on_the_model_all_that_is_not_promised_is_seen(monkeypatch):
    model = Net().eval()
    compiled = through(model, options=dict(UNGUARDED))
    ready(compiled, model, torch.randn(4, 6))
    ready(compiled, model, torch.randn(5, 6))
    ready(compiled, model, torch.randn(4, 6).double().float())
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.second.weight.data = torch.randn(3, 8)
    ready(compiled, model, torch.randn(4, 6))
    model.train()
    ready(compiled, model, torch.randn(4, 6))
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.randn(4, 6)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"shape|mat1|size"):
        compiled(torch.randn(4, 7))
    with torch.enable_grad():
        compiled(torch.randn(4, 6)).sum().backward()
        assert model.first.weight.grad is not None

    def by_global(x):
        return x * LIMIT

    call = through(by_global, options=dict(UNGUARDED))
    same(call(torch.ones(2)), torch.full((2,), 3.0))
    monkeypatch.setitem(globals(), "LIMIT", 5)
    same(call(torch.ones(2)), torch.full((2,), 5.0))


@pytest.mark.parametrize("other", [torch.neg, nn.functional.silu, abs, max])
@torch.no_grad()
def test_without_guards_on_the_model_a_function_by_a_name_of_its_own_is_seen(other, monkeypatch):
    def by_name(x):
        return FUNCTION(x)

    call, x = through(by_name, options=dict(UNGUARDED)), torch.randn(1)
    for function in (FUNCTION, other, FUNCTION):
        monkeypatch.setitem(globals(), "FUNCTION", function)
        same(call(x), function(x))


@torch.no_grad()
def test_without_guards_on_the_model_its_attributes_are_as_they_were():
    model = Net().eval()
    compiled, guarded = through(model, options=dict(UNGUARDED)), None
    x = torch.randn(4, 6)
    before = compiled(x)
    model.scale = 2.0
    same(compiled(x), before)  # the promise is broken
    torch._dynamo.reset()
    guarded = through(model)
    same(guarded(x), 2 * before)


@torch.no_grad()
def test_models_of_one_class_without_guards_are_isolated():
    models = [Net().eval(), Net().eval()]
    models[1].scale = 3.0
    calls = [through(m, options=dict(UNGUARDED), isolate_recompiles=True) for m in models]
    guarded = through(models[1])
    for _ in range(5):
        x = torch.randn(4, 6)
        for call, model in zip([*calls, guarded], [*models, models[1]], strict=True):
            same(call(x), model(x))


@pytest.mark.parametrize("calls", [1, 6])
@pytest.mark.parametrize("change", ["dims", "strides", "dtype"])
@torch.no_grad()
def test_without_guards_on_the_model_another_kind_of_parameter_is_an_error(calls, change):
    model = nn.Linear(6, 6, bias=False).eval()
    compiled = through(model, options=dict(UNGUARDED))
    ready(compiled, model, torch.randn(4, 6), calls)
    other = {
        "dims": torch.randn(2, 6),
        "strides": torch.randn(6, 6).t(),
        "dtype": torch.randn(6, 6, dtype=torch.float64),
    }[change]
    model.weight = nn.Parameter(other)
    with pytest.raises(InputError, match="a parameter has changed"):
        compiled(torch.randn(4, 6))


def test_results_made_of_other_tensors_are_still_made_of_them(paths):
    def run(x):
        return TwoTensor(x * 2, x + 1)

    x = torch.randn(3)
    with torch.no_grad():
        for fast in (torch.compile(run, backend="torchair"), torchair.compile(run)):
            for _ in range(6):
                made = fast(x)
                assert type(made) is TwoTensor
                same(made.a, x * 2)
                same(made.b, x + 1)
    assert not paths


class Wrapped(torch.Tensor):
    """A tensor made of one other; its sum is a plain tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):  # torch prints what it traces
        return "Wrapped()"

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = [a.inner if isinstance(a, Wrapped) else a for a in args]
        made = function(*given, **(kwargs or {}))
        return made if function is torch.ops.aten.sum.default else Wrapped(made)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_arguments_made_of_one_tensor_are_taken_apart(mode):
    def run(x, y):
        return (x * 3).sum() + y

    fast = through(run) if mode == "max-autotune" else captured(run)
    with torch.no_grad():
        for _ in range(6):
            x, y = torch.randn(2, 5)
            same(fast(Wrapped(x), y), run(x, y))
            same(fast(x, y), run(x, y))


# ---- captured graphs


@pytest.fixture
def usual(monkeypatch):
    """Calls of captured graphs that AOTAutograd's wrapper has taken."""
    taken = []
    make = fast_path._Entering

    def entering(wrapped, *given):
        def noted(*args):
            taken.append(len(args))
            return wrapped(*args)

        return make(noted, *given)

    monkeypatch.setattr(fast_path, "_Entering", entering)
    return taken


def captured(model):
    config = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):  # the mode has a newer name
        config.mode = "reduce-overhead"
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


@pytest.mark.parametrize("make", [through, captured])
@pytest.mark.parametrize("calls", [0, 6])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_tangents_are_what_eager_computes(make, calls, mode):
    def run(x, y):
        return x.sin() * y

    fast = make(run)
    for _ in range(calls):
        with mode():
            same(fast(torch.ones(3), torch.ones(3)), run(torch.ones(3), torch.ones(3)))
    for _ in range(5):
        x, y, tangent = torch.randn(3, 3)
        with mode(), forward_ad.dual_level():
            found = forward_ad.unpack_dual(fast(forward_ad.make_dual(x, tangent), y))
            same(found.primal, x.sin() * y)
            same(found.tangent, x.cos() * y * tangent)
            same(fast(x, y), x.sin() * y)
        with mode():
            same(fast(x, y), x.sin() * y)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "autocast"])
def test_captured_graphs_need_no_wrapper_where_no_mode_is_to_be_set(usual, mode):
    model, x = Net().requires_grad_(False), torch.randn(4, 6)
    fast = captured(model)
    modes = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "grad": torch.enable_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    for _ in range(3):
        with modes[mode]:
            got, wanted = fast(x), model(x)
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
        assert (got.dtype, got.requires_grad) == (wanted.dtype, wanted.requires_grad)
        assert got.is_inference() == wanted.is_inference()
    assert len(usual) == (3 if mode in ("grad", "autocast") else 0)


@torch.no_grad()
def test_captured_graphs_update_buffers_and_count_versions(usual):
    model = Net(updates=True)
    eager, fast = copy.deepcopy(model), captured(model)
    for _ in range(3):
        x, before = torch.randn(4, 6), model.seen._version
        same(fast(x), eager(x))
        same(model.seen, eager.seen)
        assert model.seen._version == before + 1
    assert not usual
