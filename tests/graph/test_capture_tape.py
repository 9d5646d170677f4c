"""The tape: recorded calls, replayed with other inputs, do what eager execution does."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import models
from random_functions import Program
from tape_tools import Captured
from torchair.capture.base import (
    FixedResult,
    OfArgument,
    Pooled,
)
from torchair.capture.recorder import Recorder
from torchair.errors import CaptureError, InputError
from torchair.fx.forms import out_form

aten = torch.ops.aten


def changed(args: Sequence[Any], seed: int) -> list[Any]:
    """Arguments of the same layout with other numbers; indices stay."""
    noise = torch.Generator().manual_seed(seed)
    args = copy.deepcopy(list(args))
    for a in args:
        if isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()):
            flat = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
            flat.mul_(torch.rand(flat.shape, generator=noise).add(0.5).to(a.dtype))
    return args


def same(result: Any, wanted: Any) -> None:
    """Same value, type and layout."""
    if not isinstance(wanted, torch.Tensor):
        assert result == wanted and type(result) is type(wanted)
        return
    assert result.stride() == wanted.stride() or wanted.numel() == 0
    torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def sharing(values: Sequence[Any]) -> list[list[bool]]:
    """Which values lie in one memory."""
    memory = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else v for v in values]
    return [[a == b for b in memory] for a in memory]


def identity(values: Iterable[Any]) -> list[list[bool]]:
    """Which tensors are one object."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return [[a is b for b in tensors] for a in tensors]


def check(
    function: Callable[..., Any],
    *args: Any,
    mutated: Sequence[int] = (),
    parameters: Sequence[int] = (),
    calls: int = 3,
    clone_input: bool = True,
) -> Captured:
    """Capture, then compare some calls with eager ones: results, updates, aliasing."""
    before = copy.deepcopy(list(args))
    captured = Captured(function, args, mutated, parameters, clone_input)
    for a, b in zip(args, before, strict=True):
        same(a, b)  # capture is not a call
    for seed in range(calls):
        fresh = changed(before, seed)
        wanted_args = copy.deepcopy(fresh)
        for i in (*mutated, *parameters):  # these stay where they are
            with torch.no_grad():
                args[i].untyped_storage().copy_(fresh[i].untyped_storage())
            fresh[i] = args[i]
        wanted = function(*wanted_args)
        results = captured(*fresh)
        assert len(results) == len(wanted)
        for r, w in zip((*results, *fresh), (*wanted, *wanted_args), strict=True):
            same(r, w)
        assert sharing((*results, *fresh)) == sharing((*wanted, *wanted_args))
        computed = [not isinstance(s, OfArgument) for s in captured.recording.sources]
        assert identity(compress(results, computed)) == identity(compress(wanted, computed))
        assert [any(r is a for a in fresh) for r in results] == [
            any(w is a for a in wanted_args) for w in wanted
        ]
    return captured


def noise(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(sum(dims))).to(dtype)


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: (
        models.build(models.Mlp, models.MLP["tiny"]),
        lambda seed: models.mlp_inputs(models.MLP["tiny"], seed=seed),
    ),
    "resnet": lambda: (
        models.build(models.ResNet, models.RESNET["tiny"]).eval(),
        lambda seed: models.resnet_inputs(models.RESNET["tiny"], seed=seed),
    ),
    "bert": lambda: (
        models.build(models.Bert, models.BERT["tiny"]),
        lambda seed: models.bert_inputs(models.BERT["tiny"], seed=seed),
    ),
    "llama": lambda: (
        models.build(models.Llama, models.LLAMA["tiny"]),
        lambda seed: models.llama_inputs(models.LLAMA["tiny"], seed=seed),
    ),
}


# ---- small functions


def updates_part(x):
    x[0].add_(1)
    return (x.sum(0),)


def fills_new(x):
    y = torch.empty_like(x)
    y[::2] = x[::2]
    y[1::2] = 0
    return (y,)


def accumulates(x):
    total = torch.zeros(4)
    for row in x:
        total += row
        total = total.clone()
    return (total,)


def transposes_in_place(x):
    y = x * 2
    y.t_()
    z = y + 1
    y.unsqueeze_(0)
    return y, z


def puts(x, i):
    y = x.clone()
    y.index_put_((i,), torch.ones(3, 4), accumulate=True)
    y[x > 0] = -1
    return y, x.index_put((i,), torch.zeros(3, 4))


def out_of_place(x):
    y = torch.empty(0)
    torch.add(x, 1, out=y)
    z = torch.empty(4, 4)
    torch.matmul(x, x, out=z)
    return y, z


def sorts(x):
    values, order = x.sort(-1)
    top = x.topk(2)
    return values, order, top.values, top.indices, torch.max(x, 0).indices


def norms(x):
    y = F.layer_norm(x, (4,))
    z = F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True)
    return y, z, torch.var_mean(x, 0)[1]


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one op": (lambda x: (x + 1,), (noise(4, 4),)),
    "scalars": (lambda x, n: (x * n, n + 1), (noise(4, 4), 3)),
    "views": (lambda x: ((x.t() * 2).t()[1:], x.t().contiguous().view(-1)), (noise(4, 4),)),
    "chain": (lambda x: (x.exp().sin().cos().tanh().exp().sin(),), (noise(4, 4),)),
    "cat": (lambda x, y: (torch.cat([x, y, x]), torch.stack([x, y], -1)), (noise(4, 4),) * 2),
    "split": (lambda x: (*(x + 1).split(1), *(x * 2).chunk(2, 1)), (noise(4, 4),)),
    "unbind": (lambda x: (*(x + 1).unbind(1),), (noise(4, 4),)),
    "one storage": (lambda x: ((y := x + 1), y[1:], y.t(), y), (noise(4, 4),)),
    "argument": (lambda x: (x, x + 1, x), (noise(4, 4),)),
    "views of arguments": (lambda x, y: (x[1:, ::2], y.t(), x.flatten()), (noise(4, 4),) * 2),
    "view of a type": (lambda x: (x.view(torch.int32), x.view(torch.int16)[:, 1:]), (noise(4, 4),)),
    "expand": (lambda x: ((x + 1).expand(3, 4, 4), x.sum().expand(5)), (noise(4, 4),)),
    "constants": (
        lambda x: (torch.ones(3), torch.arange(5), torch.full_like(x, 2), x + torch.eye(4)),
        (noise(4, 4),),
    ),
    "new memory": (fills_new, (noise(4, 4),)),
    "in place on a view": (lambda x: ((y := x.clone()).t().add_(x), y), (noise(4, 4),)),
    "layout in place": (transposes_in_place, (noise(4, 4),)),
    "accumulate": (accumulates, (noise(5, 4),)),
    "index": (
        lambda x, i: (x[i], x[:, i], x.gather(0, i[None])), (noise(4, 4), torch.tensor([1, 0, 2])),
    ),
    "index_put": (puts, (noise(4, 4), torch.tensor([1, 0, 1]))),
    "out": (out_of_place, (noise(4, 4),)),
    "several results": (sorts, (noise(4, 4),)),
    "norms": (norms, (noise(4, 4),)),
    "products": (
        lambda x, y: (x @ y, F.linear(x, y, x[0]), torch.bmm(x[None], y[None])), (noise(4, 4),) * 2
    ),
    "convolution": (
        lambda x, w: (F.conv2d(x, w, padding=1), F.max_pool2d(x, 2)),
        (noise(2, 3, 8, 8), noise(4, 3, 3, 3)),
    ),
    "attention": (
        lambda x: (F.scaled_dot_product_attention(x, x, x, is_causal=True),), (noise(2, 3, 8, 4),)
    ),
    "types": (lambda x: (x.to(torch.bfloat16), x.double().half(), (x > 0).int()), (noise(4, 4),)),
    "bfloat16": (lambda x: (x.softmax(-1), x @ x), (noise(4, 4, dtype=torch.bfloat16),)),
    "complex": (
        lambda x: (
            (y := x * 2j).real, y.conj() + 1, torch.view_as_real(y), x.conj(), x.conj().imag,
        ),
        (noise(4, 4).to(torch.complex64),),
    ),
    "where": (
        lambda x: (torch.where(x > 0, x, -x), x.clamp(-1, 1), x.masked_fill(x > 0, 0)),
        (noise(4, 4),),
    ),
    "foreach": (
        lambda x, y: (*torch._foreach_add([x, y], 1), *torch._foreach_mul([x, y], [y, x])),
        (noise(4, 4),) * 2,
    ),
    "empty": (lambda x: (x + 1, x.sum(0), torch.cat([x, x]), x[0:0]), (noise(0, 4),)),
    "zero dims": (lambda x: (x * 2, x.reshape(1), x.sum()), (noise(),)),
    "nothing": (lambda x: (None, 7, "text"), (noise(4, 4),)),
    "no arguments": (lambda: (torch.arange(4) * 2,), ()),
    "cumulative": (lambda x: (x.cumsum(0), x.flip(0), x.roll(1), x.tril()), (noise(4, 4),)),
    "repeat": (
        lambda i: (i.repeat_interleave(2), i.repeat_interleave(i, output_size=3)),
        (torch.tensor([1, 0, 2]),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("clone_input", [True, False])
def test_like_eager(name, clone_input):
    function, args = FUNCTIONS[name]
    check(function, *[copy.deepcopy(a) for a in args], clone_input=clone_input)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("layout in place", "out")])
def test_like_eager_as_a_graph(name):
    function, args = FUNCTIONS[name]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if len(tensors) < len(args):
        return
    graph = make_fx(function)(*copy.deepcopy(tensors))
    check(graph, *copy.deepcopy(tensors))


@pytest.mark.parametrize("seed", range(60))
def test_random_functions(seed):
    program = Program(seed, lines=10)
    function, args = program.function(), program.inputs()
    before = copy.deepcopy(args)
    with torch.no_grad():
        function(*args)
    mutated = [i for i, (a, b) in enumerate(zip(args, before, strict=True)) if not a.equal(b)]
    check(function, *before, mutated=mutated)


def test_a_thousand_replays():
    def function(x, cache, position):
        cache[0] = x.mean(0)
        y = torch.cat([cache, x]).softmax(-1)
        return y, y[1:3].t(), cache.sum(1), x.view(-1)

    x, cache = noise(3, 4), noise(2, 4)
    captured = Captured(function, (x, cache, 1), mutated=(1,))
    again = cache.clone()
    for seed in range(1000):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        for r, w in zip(captured(x, cache, 1), function(x, again, 1), strict=True):
            assert torch.equal(r, w) and r.stride() == w.stride()
        assert torch.equal(cache, again)


# ---- memory


def test_updates_of_arguments():
    x = noise(4, 4)
    captured = check(updates_part, x, mutated=(0,))
    assert captured.recording._updated == []
    check(updates_part, x)  # an update that nobody announced is brought back too
    check(updates_part, x, clone_input=False)


def test_a_parameter_is_read_where_it_is():
    w = torch.nn.Parameter(noise(4, 4))
    captured = check(lambda x, w: (x @ w, w), noise(2, 4), w, parameters=(1,))
    with torch.no_grad():
        w.fill_(2)
    result, returned = captured(torch.ones(2, 4), w)
    assert returned is w and torch.equal(result, torch.full((2, 4), 8.0))


def test_the_first_input_is_the_buffer_if_inputs_are_not_cloned():
    first, second = torch.ones(3), torch.full((3,), 5.0)
    captured = Captured(lambda x: (x * 2, x), (first,), clone_input=False)
    result, returned = captured(second)
    assert torch.equal(result, torch.full((3,), 10.0)) and returned is second
    assert torch.equal(first, second)  # it was overwritten
    first.fill_(7)
    assert torch.equal(captured(first)[0], torch.full((3,), 14.0))


def test_inputs_in_one_memory_get_buffers_of_their_own():
    base = noise(8)
    captured = Captured(lambda x, y: (x + y, y), (base[:4], base[2:6]), clone_input=False)
    x, y = noise(4), noise(4) * 3
    result, returned = captured(x, y)
    assert torch.equal(result, x + y) and returned is y


def test_shared_results_stay_in_their_memory():
    captured = Captured(lambda x: (x + 1,), (noise(4, 4),), share_results=True)
    (first,) = captured(torch.zeros(4, 4))
    (second,) = captured(torch.ones(4, 4))
    assert first is second and torch.equal(first, torch.full((4, 4), 2.0))
    assert captured.recording.storage(0).data_ptr() == first.data_ptr()


def test_memory_of_dead_values_serves_again():
    def function(x):
        for _ in range(20):
            x = x + 1
        return (x,)

    captured = check(function, noise(16, 16))
    outs = [step.keywords["out"] for step in captured.recording._tape.steps]
    assert len(outs) == 20 and len({t.data_ptr() for t in outs}) == 2


def test_memory_that_somebody_holds_does_not_serve_again():
    held: list[Any] = []

    def function(x):
        y = x + 1
        held.append(y[1:])
        z = x + 2
        held.append(z.untyped_storage())
        del y, z
        return (x + 3, x + 4)

    captured = Captured(function, (torch.zeros(4, 4),))
    captured(torch.ones(4, 4))
    outs = [step.keywords["out"] for step in captured.recording._tape.steps]
    assert len({t.data_ptr() for t in outs}) == 4
    assert torch.equal(held[0], torch.full((3, 4), 2.0))


def test_reset_gives_memory_back():
    captured = Captured(lambda x: (x + 1,), (noise(4, 4),))
    storage = captured.recording.storage(0)
    captured.recording.reset()
    del captured
    gc.collect()
    assert torch.empty(0).set_(storage).shape == (16,)


def test_a_tensor_that_the_graph_holds_is_a_result():
    constant = noise(4)
    captured = Captured(lambda x: (constant, constant[1:], x + constant), (noise(4),))
    kinds = [type(s) for s in captured.recording.sources]
    assert kinds == [FixedResult, FixedResult, Pooled]
    constant.mul_(2)
    results = captured(torch.zeros(4))
    assert results[0] is constant and torch.equal(results[2], constant)


def test_a_constant_that_the_graph_updates():
    counter = torch.zeros(1)

    def function(x):
        counter.add_(1)
        return (x + counter,)

    captured = Captured(function, (torch.zeros(1),))
    assert counter.item() == 0
    assert [captured(torch.zeros(1))[0].item() for _ in range(3)] == [1, 2, 3]
    assert counter.item() == 3


def test_numbers_in_the_program_are_new_at_each_call():
    def function(x):
        total = torch.tensor([1.0, 2.0])
        total += x
        return (total,)

    check(function, noise(2))


def test_memory_that_recording_resized_is_as_before():
    target = torch.arange(3.0)

    def function(x):
        torch.add(x, 1, out=target.detach().resize_(8))
        return (x * 2,)

    Captured(function, (noise(8),))
    assert target.tolist() == [0, 1, 2] and target.untyped_storage().nbytes() == 12


def test_sources_tell_where_results_are():
    captured = Captured(lambda x: ((y := x + 1), y[1:], x, x[1:], 3), (noise(4, 4),))
    pooled, part, argument, view, number = captured.recording.sources
    assert pooled == Pooled(0, torch.float32, (4, 4), (4, 1), 0, 0)
    assert part == Pooled(0, torch.float32, (3, 4), (4, 1), 4, 1)
    assert isinstance(argument, OfArgument) and isinstance(view, OfArgument)
    assert number == FixedResult(3)


def test_conjugates_become_results_of_their_own():
    x = noise(4, 4).to(torch.complex64)
    captured = Captured(lambda x: ((x * 2j).conj(), (x * 2j).conj().imag), (x,))
    for result, wanted in zip(captured(x), ((x * 2j).conj(), -(x * 2j).imag), strict=True):
        assert torch.equal(result, wanted) and not result.is_conj() and not result.is_neg()


def test_other_layouts_of_an_input():
    captured = Captured(lambda x: (x + 1,), (noise(4, 4).t(),))
    (result,) = captured(torch.arange(16.0).view(4, 4))
    assert torch.equal(result, torch.arange(16.0).view(4, 4) + 1)
    with pytest.raises(InputError, match=r"expected: torch.float32 \[4, 4\]"):
        captured(noise(4, 5))
    with pytest.raises(InputError, match="float64"):
        captured(noise(4, 4).double())
    with pytest.raises(InputError, match="strides"):
        Captured(lambda x: (x[1:],), (noise(4, 4),))(noise(4, 4).t())


@pytest.mark.parametrize(
    "layout", [lambda x: x.t(), lambda x: x[:1].expand(4, 4), lambda x: x[::2, 1:], lambda x: x[0]]
)
@pytest.mark.parametrize("clone_input", [True, False])
def test_layouts_of_inputs(layout, clone_input):
    def function(x):
        return x + 1, x.t() if x.dim() == 2 else x, x[1:], x.sum(0)

    base = noise(4, 4)
    captured = Captured(function, (layout(base),), clone_input=clone_input)
    for seed in range(3):
        x = layout(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        results, wanted = captured(x), function(x)
        for r, w in zip(results, wanted, strict=True):
            same(r, w)
        assert sharing((*results, x)) == sharing((*wanted, x))


# ---- random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x),
        torch.rand_like,
        lambda x: x.bernoulli(0.5),
        lambda x: torch.randn(3),
        lambda x: torch.empty(5).uniform_(),
        lambda x: torch.randint(9, (4,)),
        lambda x: torch.randperm(9),
        lambda x: x.abs().multinomial(2),
        lambda x: torch.normal(x, 1.0),
    ],
)
def test_random_numbers_are_drawn_anew(draw):
    def function(x):
        return draw(x), draw(x + 1)

    x = noise(8, 8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    captured = Captured(function, (x,))
    assert torch.equal(torch.get_rng_state(), state)  # capture draws nothing
    first = [r.clone() for r in captured(x)]
    second = captured(x)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(1)
    for wanted in (function(x), function(x)):
        results, first = first, list(second)
        for r, w in zip(results, wanted, strict=True):
            assert torch.equal(r, w)


def test_generators_of_the_user_are_left_alone():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    captured = Captured(lambda x: (torch.rand(4, generator=generator) + x,), (torch.zeros(4),))
    assert torch.equal(generator.get_state(), state)
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(captured(torch.zeros(4))[0], wanted)


# ---- what cannot be captured


def nonzero(x):
    return (x.nonzero(),)


def item(x):
    return (x * x.sum().item(),)


def masks(x):
    return (x[x > 0],)


def unique(x):
    return (torch.unique(x),)


def decides(x):
    return (x + 1,) if x.sum() > 0 else (x - 1,)


REFUSED = {
    nonzero: "aten.nonzero.default makes a result whose size follows from data",
    item: "aten._local_scalar_dense.default needs a value on the host that the graph computes",
    masks: "aten.index.Tensor makes a result whose size follows from data",
    unique: "aten._unique2.default makes a result whose size follows from data",
    decides: "aten._local_scalar_dense.default needs a value on the host",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function):
    x = noise(4, 4)
    before, state = x.clone(), torch.get_rng_state()
    with pytest.raises(CaptureError) as error:
        Captured(function, (x,))
    assert REFUSED[function] in str(error.value)
    assert f"test_capture_tape.py:{function.__code__.co_firstlineno + 1} in" in error.value.source
    assert "torch.where for decisions" in error.value.hint
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), state)


def test_memory_around_an_argument_is_not_in_its_copy():
    def function(x):
        return (x.select(1, 0).as_strided((2, 2), (2, 1)) * 2,)

    whole, more = noise(6, 3), noise(6, 3)
    (got,) = Captured(function, (whole,))(more)
    assert torch.equal(got, function(more)[0])
    for part in (noise(6, 6)[:, ::2], noise(7, 3)[1:]):
        with pytest.raises(CaptureError, match="reads memory around an argument"):
            Captured(function, (part,))
        (got,) = Captured(function, (part,), clone_input=False)(part)
        assert torch.equal(got, function(part)[0])
    with pytest.raises(CaptureError, match="reads memory around an argument"):  # nor of later ones
        Captured(lambda x: (x.as_strided((2, 2), (2, 1), 3) * 2,), (whole,))


def test_refused_nodes_are_named():
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    found = graph.call_function(aten.nonzero.default, (doubled,))
    found.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    return y.nonzero()'
    graph.output((found,))
    with pytest.raises(CaptureError) as error:
        Captured(fx.GraphModule({}, graph), (noise(4, 4),))
    assert error.value.node == "nonzero_default = torch.ops.aten.nonzero.default(mul_tensor)"
    assert error.value.source.endswith('"model.py", line 7, in forward    return y.nonzero()')


def test_arguments_are_whole_after_a_failed_capture():
    def function(x):
        x.add_(1)
        torch.rand(3)
        return (x.nonzero(),)

    x = torch.zeros(3)
    state = torch.get_rng_state()
    with pytest.raises(CaptureError):
        Captured(function, (x,), mutated=(0,))
    assert torch.equal(x, torch.zeros(3)) and torch.equal(torch.get_rng_state(), state)


@pytest.fixture(scope="module")
def library():
    """Operators whose sizes or numbers follow from data, which no tag tells."""
    made = torch.library.Library("tape_test", "DEF")
    made.define("positives(Tensor x) -> Tensor")
    made.define("count(Tensor x) -> int")
    made.define("halves(Tensor x) -> (Tensor, Tensor)")
    made.define("note(Tensor x) -> ()")
    made.define("swap(Tensor(a!) x, Tensor(b!) y) -> Tensor")
    noted: list[float] = []

    def swap(x, y):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x - y

    made.impl("positives", lambda x: x[x > 0], "CPU")
    made.impl("count", lambda x: int((x > 0).sum()), "CPU")
    made.impl("halves", lambda x: (x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()), "CPU")
    made.impl("note", lambda x: noted.append(x.sum().item()), "CPU")
    made.impl("swap", swap, "CPU")
    yield noted
    made._destroy()


def test_sizes_that_change_between_replays(library):
    captured = Captured(lambda x: (torch.ops.tape_test.positives(x),), (torch.ones(3),))
    assert torch.equal(captured(torch.full((3,), 2.0))[0], torch.full((3,), 2.0))
    with pytest.raises(CaptureError, match=r"tape_test.positives.default made a result of \[2\]"):
        captured(torch.tensor([1.0, -1.0, 1.0]))


def test_numbers_of_custom_operators_are_refused(library):
    with pytest.raises(CaptureError, match=r"count.default returns a number"):
        Captured(lambda x: (x * torch.ops.tape_test.count(x),), (torch.ones(3),))


def test_custom_operators(library):
    check(lambda x: torch.ops.tape_test.halves(x), noise(6, 2))
    check(lambda x, y: (torch.ops.tape_test.swap(x, y),), noise(3), noise(3) + 1, mutated=(0, 1))
    captured = Captured(lambda x: (torch.ops.tape_test.note(x), x + 1)[1:], (torch.ones(3),))
    assert library == []  # capture is not a call
    captured(torch.full((3,), 2.0))
    captured(torch.full((3,), 5.0))
    assert library == [6.0, 15.0]


def test_sparse_tensors_are_refused():
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo"):
        Captured(lambda x: (x.to_sparse(),), (noise(3, 3),))


def test_errors_of_a_replay_name_the_call():
    captured = Captured(lambda x, i: (x[i],), (noise(4), torch.tensor([1, 2])))
    with pytest.raises(IndexError) as error:
        captured(noise(4), torch.tensor([1, 9]))
    assert "while replaying aten.index.Tensor, " in error.value.__notes__[0]
    assert "test_capture_tape.py" in error.value.__notes__[0]


# ---- surroundings


def test_in_inference_mode_and_out_of_it():
    def function(x, y):
        y.add_(x)
        return x.view(-1) + 1, F.linear(x, y)

    with torch.inference_mode():
        x, y = noise(4, 4), noise(4, 4)
        captured = Captured(function, (x, y), mutated=(1,))
        again = y.clone()
        captured(x, y)
        function(x, again)
        assert torch.equal(y, again)
        again.add_(x)
    result = captured(x, y)
    assert torch.equal(y, again)
    assert torch.equal(result[0], x.view(-1) + 1) and torch.equal(result[1], F.linear(x, y))


def test_autograd_and_autocast_are_left_out():
    w = torch.nn.Parameter(noise(4, 4))
    captured = Captured(lambda x, w: (x @ w, w * 2), (noise(4, 4), w), parameters=(1,))
    with torch.autocast("cpu"):
        product, doubled = captured(noise(4, 4), w)
    assert product.dtype == torch.float32 and not product.requires_grad
    assert torch.equal(product, noise(4, 4) @ w.detach()) and not doubled.requires_grad


def test_control_flow_operators_are_called_again():
    def function(x):
        return (torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),)

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3))
    captured = Captured(graph, (torch.ones(3),))
    assert torch.equal(captured(torch.ones(3))[0], torch.full((3,), 2.0))
    assert torch.equal(captured(-torch.ones(3))[0], torch.full((3,), -2.0))


def test_scopes_and_events_are_not_replayed():
    def function(x):
        air.scope_enter(["_user_stream_label"], ["1"], True)
        mark = air.record()
        y = x + 1
        air.wait([mark])
        air.scope_exit(True)
        return (y,)

    air = torch.ops.air
    assert check(function, noise(3)).calls == ["aten.add.Tensor"]


def test_printing_is_replayed(capfd):
    def function(x):
        torch.ops.air.print([x * 2], "{}", "{}", 3, False)
        return (x + 1,)

    captured = Captured(function, (torch.zeros(1),))
    assert capfd.readouterr().out == ""
    captured(torch.ones(1))
    captured(torch.full((1,), 3.0))
    assert capfd.readouterr().out.split() == ["[2]", "[6]"]


def test_collectives_are_waited_for():
    def function(x):
        total = collective.wait_tensor(collective.all_reduce(x + 1, "sum", "0"))
        y = x * 2
        collective.wait_tensor(collective.all_reduce_(y, "sum", "0"))
        return total + 1, y

    collective = torch.ops._c10d_functional
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        captured = check(function, noise(64, 64))
    finally:
        distributed.destroy_process_group()
    assert captured.calls.count("_c10d_functional.wait_tensor.default") == 2


@pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "llama"])
def test_models(name):
    """Graphs of AOTAutograd, with parameters where they are and buffers that are updated."""
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    captures: list[Captured] = []

    def compiler(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        held = {id(t) for t in (*model.parameters(), *model.buffers())}
        made: list[Captured] = []

        def call(*args: Any) -> Any:
            if not made:
                fixed = [i for i, a in enumerate(args) if id(a) in held]
                made.append(Captured(graph, args, parameters=fixed))
                captures.append(made[0])
            return made[0](*args)

        return call

    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, dynamic=False)
        for seed in range(3):
            args = inputs(seed)
            torch.testing.assert_close(compiled(*args), model(*args), rtol=0, atol=0)
    assert len(captures) == 1 and len(captures[0].calls) > 5


def test_a_recorder_without_a_function():
    x, y = torch.ones(3), torch.zeros(3)
    recorder = Recorder()
    with recorder:
        z = x * 2
        y.add_(z)
        views = z[1:]
    tape = recorder.finish()
    assert torch.equal(y, torch.zeros(3))
    x.fill_(4)
    tape.replay()
    assert torch.equal(y, torch.full((3,), 8.0)) and torch.equal(views, torch.full((2,), 8.0))
    assert [str(p.op) for p in tape.places] == ["aten.mul.Tensor", "aten.add_.Tensor"]


def test_a_recorded_training_step():
    w = torch.nn.Parameter(noise(4, 4))
    x = noise(4, 4)

    def loss(w, x):
        return (x @ w).tanh().exp().sum()

    recorder = Recorder()
    with recorder:
        (gradient,) = torch.autograd.grad(loss(w, x), w)
    tape = recorder.finish()
    x.mul_(2)
    tape.replay()
    (wanted,) = torch.autograd.grad(loss(w, x), w)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


# ---- forms that write results in place


@pytest.mark.parametrize(
    ("op", "form"),
    [
        (aten.add.Tensor, "aten.add.out"),
        (aten.cat.default, "aten.cat.out"),
        (aten.sum.dim_IntList, "aten.sum.IntList_out"),
        (aten.zeros.default, "aten.zeros.out"),
        (aten.topk.default, "aten.topk.values"),
        (aten.relu_.default, None),
        (aten._foreach_add.List, "aten._foreach_add.List_out"),
        (aten.arange.start_step, "aten.arange.start_out"),
        (aten.t.default, None),
        (aten.native_layer_norm.default, "aten.native_layer_norm.out"),
    ],
)
def test_out_forms(op, form):
    found = out_form(op)
    assert (None if found is None else str(found.op)) == form


def test_what_is_recorded():
    def function(x):
        y = x.t() + 1
        y.mul_(2)
        z = torch.empty(4, 4)
        z.copy_(y[:, :4])
        return z.double(), y.t().view(-1)

    captured = check(function, noise(4, 4))
    assert captured.calls == [
        "aten.add.Tensor",
        "aten.mul_.Tensor",
        "aten.copy_.default",
        "aten._to_copy.default",
    ]
