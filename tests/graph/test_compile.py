"""torchair.compile: calls without Dynamo, against eager; what they refuse, and what they see."""

from __future__ import annotations

import copy
import functools
import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_structure

import torchair
from like_eager import assert_same, leaves
from torchair.deploy.tracing import TraceError
from torchair.engine.run.native import DirectProgram
from torchair.errors import GraphError, InputError


def same(got, wanted):
    assert tree_structure(got) == tree_structure(wanted)
    for g, w in zip(leaves(got), leaves(wanted), strict=True):
        assert_same(g, w)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.second.weight = nn.Parameter(self.first.weight.detach().t().contiguous())

    def forward(self, x, scale=2.0):
        return torch.relu(self.first(x)) * scale, self.second(self.first(x))


class Counter(nn.Module):
    """Buffers that are written to, and one that is assigned anew."""

    def __init__(self, norm):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.norm = norm

    def forward(self, x):
        self.total.add_(x.sum(0))
        self.calls = self.calls + 1
        return self.norm(x) + self.total


def frozen():
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    return config


def takes_fast_path(compiled):
    return compiled._fast_path != compiled._usual_path


def test_calls_are_eagers_slowly_and_quickly():
    model, x = Net(), torch.randn(4, 6)
    compiled = torchair.compile(model, (x,))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 6)
            same(compiled(x), model(x))
        assert takes_fast_path(compiled)
    first, second = compiled(x), compiled(x)
    assert first[0].data_ptr() != second[0].data_ptr()  # results belong to the caller
    assert compiled.first is model.first


@pytest.mark.parametrize("config", [None, frozen])
@pytest.mark.filterwarnings("ignore:frozen_parameter")
def test_parameters_are_read_as_they_are(config):
    model, x = Net(), torch.randn(4, 6)
    compiled = torchair.compile(model, x, config=config and config())

    def check():
        for _ in range(3):
            same(compiled(x), model(x))
        assert takes_fast_path(compiled)

    with torch.no_grad():
        check()
        model.first.weight.mul_(2)
        check()
        model.first.weight.data = torch.randn(8, 6)
        check()
        model.second.bias = nn.Parameter(torch.randn(6))
        check()
        model.load_state_dict(Net().state_dict())
        check()


def test_another_kind_of_model_is_an_error_or_compiled():
    model, x = Net(), torch.randn(4, 6)
    strict = torchair.compile(model, x)
    lenient = torchair.compile(model, x, on_mismatch="recompile")
    with torch.no_grad():
        for _ in range(3):
            strict(x), lenient(x)
        model.first = nn.Linear(6, 8, dtype=torch.float32)
        with pytest.raises(InputError, match="first of the model"):
            strict(x)
        same(lenient(x), model(x))
        model.second.weight = nn.Parameter(torch.randn(9, 8))
        model.second.bias = nn.Parameter(torch.randn(9))
        same(lenient(x), model(x))
        model.train(False)
        same(lenient(x), model(x))
    assert len(lenient.versions) == 4


def test_tensors_in_lists_and_attributes_are_read_as_they_are():
    model = nn.Linear(6, 6)
    model.shift, model.held, model.last = torch.randn(6), [torch.zeros(4, 6)], None

    def forward(x):
        model.held[0] += x
        model.last = nn.functional.linear(x, model.weight) * model.shift
        return model.last + model.held[0]

    model.forward = forward
    x = torch.randn(4, 6)
    with torch.no_grad():
        model(x)
        compiled = torchair.compile(model, x)
        for change in (None, "shift", "held", "whole"):
            if change == "shift":
                model.shift = model.shift * 2
            elif change == "held":
                model.held[0] = torch.randn(4, 6)
            elif change == "whole":
                model.held = [torch.randn(4, 6)]
                with pytest.raises(
                    InputError, match="held of the model has changed since it was compiled"
                ):
                    compiled(x)
                break
            for _ in range(3):
                before = model.held[0].clone()
                got = compiled(x)
                same(model.held[0], before + x)
                same(got, nn.functional.linear(x, model.weight) * model.shift + before + x)
                same(model.last, got - model.held[0])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.LayerNorm(3)])
def test_buffers_are_updated(norm):
    model, twin = Counter(copy.deepcopy(norm)), Counter(copy.deepcopy(norm))
    compiled = torchair.compile(model, torch.randn(5, 3))
    assert int(model.calls) == 0 and not model.total.any()  # tracing changes nothing
    for _ in range(4):
        x = torch.randn(5, 3)
        with torch.no_grad():
            same(compiled(x), twin(x))
        for name, buffer in twin.named_buffers():
            same(dict(model.named_buffers())[name], buffer)
    assert int(model.calls) == 4
    with pytest.raises(InputError, match="training of the model"):
        model.eval()
        compiled(x)


@functools.cache
def strict_net():
    compiled = torchair.compile(Net(), torch.randn(4, 6))
    for _ in range(3):
        compiled(torch.randn(4, 6))
    return compiled


@pytest.mark.parametrize(
    ("given", "named", "got"),
    [
        (torch.zeros(5, 6), "x", "[5, 6]"),
        (torch.zeros(4, 6, dtype=torch.float64), "x", "float64"),
        (torch.zeros(6, 4).t(), "x", "[1, 4]"),
        (torch.zeros(4, 6, requires_grad=True), "x", "requires_grad"),
        (3, "x", "a int"),
    ],
)
def test_errors_name_argument_expected_and_got(given, named, got):
    compiled, x = strict_net(), torch.randn(4, 6)
    with pytest.raises(InputError, match=named) as error:
        compiled(given)
    assert error.value.name == named and got in str(error.value)
    assert compiled(x)[0].shape == (4, 8)  # and it goes on


def test_an_argument_too_many_is_an_error():
    compiled = torchair.compile(torch.add, (torch.ones(2), torch.ones(2)))
    two = torchair.compile(lambda x, y: x * y, (torch.ones(2), torch.ones(2)))
    for call in (compiled, two):
        with pytest.raises(InputError, match="nesting or names of the arguments"):
            call(torch.ones(2), torch.ones(2), 1)


def test_numbers_are_part_of_the_code():
    compiled = torchair.compile(Net(), (torch.zeros(4, 6), 3.0))
    assert compiled(torch.ones(4, 6), 3.0) and compiled(torch.ones(4, 6), scale=3.0)
    with pytest.raises(InputError, match=r"expected: 3\.0") as error:
        compiled(torch.ones(4, 6), 4.0)
    assert error.value.name == "scale"
    with pytest.raises(InputError, match="nesting or names"):
        compiled(torch.ones(4, 6))
    with pytest.raises(TraceError, match="the argument scale is a object"):
        torchair.compile(Net(), (torch.zeros(4, 6), object()))


def test_other_shapes_are_compiled_anew_when_asked(monkeypatch):
    model, made = Net(), []
    make = DirectProgram.__init__
    monkeypatch.setattr(DirectProgram, "__init__", lambda *a: made.append(a) or make(*a))
    compiled = torchair.compile(model, torch.zeros(4, 6), on_mismatch="recompile")
    with torch.no_grad():
        for n in (4, 5, 4, 4, 5, 5, 5, 4):
            x = torch.randn(n, 6)
            same(compiled(x), model(x))
    assert len(compiled.versions) == len(made) == 2
    with pytest.raises(ValueError, match="on_mismatch"):
        torchair.compile(model, torch.zeros(4, 6), on_mismatch="ignore")


@pytest.mark.parametrize("dynamic", [True, {"x": [0]}])
def test_sizes_may_vary(dynamic):
    model = Net()
    compiled = torchair.compile(model, torch.zeros(4, 6), dynamic=dynamic)
    with torch.no_grad():
        for n in (4, 9, 2, 9, 9, 9, 4):
            x = torch.randn(n, 6)
            same(compiled(x), model(x))
    assert len(compiled.versions) == 1
    with pytest.raises(InputError, match="6") as error:
        compiled(torch.zeros(4, 7))
    assert error.value.name == "x"


def test_conditions_of_tracing_are_kept():
    def even(x, y):
        return x.reshape(-1, 2).sum(1) + y

    compiled = torchair.compile(even, (torch.zeros(8), torch.zeros(4)), dynamic=True)
    for n in (8, 12):
        x, y = torch.randn(n), torch.randn(n // 2)
        same(compiled(x, y), even(x, y))
    with pytest.raises(InputError):
        compiled(torch.zeros(9), torch.zeros(4))
    with pytest.raises(InputError):
        compiled(torch.zeros(8), torch.zeros(5))
    with pytest.raises(ValueError, match="dynamic names z"):
        torchair.compile(even, (torch.zeros(8), torch.zeros(4)), dynamic={"z": [0]})


def test_attention_of_any_width():
    """Tracing asks whether the root of a size is a number above zero."""

    def attend(q, k):
        return F.scaled_dot_product_attention(q, k, k)

    compiled = torchair.compile(attend, (torch.zeros(2, 3, 8), torch.zeros(2, 5, 8)), dynamic=True)
    for width in (8, 12):
        q, k = torch.randn(2, 3, width), torch.randn(2, 5, width)
        same(compiled(q, k), attend(q, k))
    assert len(compiled.versions) == 1


def test_trees_go_in_and_out():
    def step(x, caches, *, options):
        out = [(k + x, v * options["scale"]) for k, v in caches]
        return {"caches": out, "n": len(caches), "first": out[0][0], "none": None}

    def call(n=1.0):
        caches = [(torch.randn(3) * n, torch.randn(3)) for _ in range(2)]
        return (torch.randn(3), caches), {"options": {"scale": torch.tensor(2.0)}}

    args, kwargs = call()
    compiled = torchair.compile(step, args, example_kwargs=kwargs)
    for _ in range(3):
        args, kwargs = call()
        same(compiled(*args, **kwargs), step(*args, **kwargs))
    args[1].append(args[1][0])
    with pytest.raises(InputError, match=r"caches\[1\]\[1\]"):
        compiled(*args, **kwargs)
    bad = (args[0], [(torch.zeros(3), torch.zeros(3)), (torch.zeros(3), torch.zeros(4))])
    with pytest.raises(InputError) as error:
        compiled(*bad, **kwargs)
    assert error.value.name == "caches[1][1]"


@dataclass(frozen=True)
class Meta:
    data: torch.Tensor
    is_prompt: bool


@dataclass
class Found:
    total: torch.Tensor
    more: list


Pair = namedtuple("Pair", "first second")
Single = namedtuple("Single", "only")


@pytest.mark.parametrize("calls", [1, 6])
def test_named_tuples_are_arguments_by_themselves(calls):
    def run(pair):
        return Pair(pair[0] * 2, pair[-1] + pair[0])

    fast = torchair.compile(run)
    for given in (Pair(torch.randn(3), torch.randn(3)), Single(torch.randn(4))):
        for _ in range(calls):
            same(fast(given), run(given))
    same(fast(pair=given), run(given))


def test_dataclasses_go_in_and_out():
    def model(x, rest):
        y = x.data * 2 if x.is_prompt else x.data + rest[0].data
        return Found(y.sum(0), [Meta(y, x.is_prompt), {"y": y + 1}])

    def given(prompt, rows=3):
        return Meta(torch.randn(rows, 4), prompt), [Meta(torch.randn(rows, 4), False)]

    compiled = torchair.compile(model, given(True), on_mismatch="recompile")
    for prompt in (True, True, False, True):
        args = given(prompt)
        got, wanted = compiled(*args), model(*args)
        assert type(got) is Found and type(got.more[0]) is Meta
        assert got.more[0].is_prompt is prompt
        same(
            [got.total, got.more[0].data, got.more[1]["y"]],
            [wanted.total, wanted.more[0].data, wanted.more[1]["y"]],
        )
    assert len(compiled.versions) == 2
    strict = torchair.compile(model, given(True))
    with pytest.raises(InputError, match=r"x\.data is not what(.|\n)*dims \[3, 4\]"):
        strict(*given(True, rows=2))
    with pytest.raises(InputError, match=r"x\.is_prompt"):
        strict(*given(False))


def test_arguments_are_updated_in_place_and_views_are_views():
    def write(cache, x):
        cache[1:3] = x
        return cache.sum(0)

    compiled = torchair.compile(write, (torch.zeros(4, 2), torch.ones(2, 2)))
    for _ in range(4):
        cache, twin, x = torch.ones(4, 2), torch.ones(4, 2), torch.randn(2, 2)
        same(compiled(cache, x), write(twin, x))
        same(cache, twin)
    assert takes_fast_path(compiled)
    half = torchair.compile(lambda x: x[:2], torch.zeros(4))
    given = torch.zeros(4)
    half(given).add_(1)
    assert given.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("example", ["apart", "same", "overlapping"])
@pytest.mark.parametrize("on_mismatch", ["error", "recompile"])
def test_what_arguments_share_is_no_part_of_the_code(example, on_mismatch):
    """Neither what the examples share nor what other calls did; an updated overlap is refused."""

    def update(x, y):
        x.add_(1)
        return x * 2 + y, y * 3

    def given(kind):
        both = torch.arange(24.0).reshape(4, 6)
        return {
            "apart": lambda: (torch.ones(2, 3), torch.arange(6.0).reshape(2, 3)),
            "halves": lambda: (both.view(-1)[:6].view(2, 3), both.view(-1)[6:12].view(2, 3)),
            "columns": lambda: (both[:2, ::2], both[:2, 1::2]),
            "same": lambda: (both.view(-1)[:6].view(2, 3),) * 2,
            "overlapping": lambda: (
                both.as_strided((2, 3), (3, 1)),
                both.as_strided((2, 3), (3, 1), 2),
            ),
        }[kind]()

    compiled = torchair.compile(update, given(example), on_mismatch=on_mismatch)
    kinds = ["apart", "same", "halves", "overlapping", "apart", "apart", "halves", "overlapping"]
    for kind in [*kinds, *["columns"] * 4 * (on_mismatch == "recompile")]:
        mine, theirs = given(kind), given(kind)
        if kind in ("same", "overlapping"):
            with pytest.raises(InputError, match=r"updates its arguments, and [xy] and [xy] share"):
                compiled(*mine)
            continue
        same(compiled(*mine), update(*theirs))
        same(mine, theirs)
    assert len(compiled.versions) <= 2


class Steps(nn.Module):
    """Updates a buffer, every second column of its memory; reads its argument before and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.arange(24.0).reshape(4, 6)[:, ::2])

    def forward(self, x):
        before = x * 2
        self.state.add_(1)
        return before, x + self.state


@pytest.mark.filterwarnings("ignore:the call updates state, and")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_an_argument_inside_of_an_updated_buffer_is_as_eager_has_it(mode):
    """No graph computes such a call, the model does. Columns between those of a buffer are apart
    from it."""
    where = {
        "apart": lambda m: torch.ones(4, 6)[:, ::2],
        "between": lambda m: m.state.as_strided((4, 3), (6, 2), 1),
        "inside": lambda m: m.state,
    }
    model, twin = Steps(), Steps()
    compiled = torchair.compile(model, where["inside"](model), mode=mode)
    eager, model.forward = [], lambda x: eager.append(kind) or Steps.forward(model, x)
    for kind in ["inside", *["apart"] * 4, "inside", "between", "apart", "inside"]:
        same(compiled(where[kind](model)), twin(where[kind](twin)))
        same(model.state, twin.state)
    assert eager == ["inside"] * 3


def test_an_updated_argument_inside_of_a_weight_is_as_eager_has_it():
    """And arguments that are only read may share memory, whatever else is updated."""

    def forward(self, x, y, z):
        z.add_(1)
        return (x + y) @ self.weight

    kind = type("Doubling", (nn.Bilinear,), {"forward": forward})
    model, twin = (kind(3, 3, 1) for _ in range(2))
    for m in (model, twin):
        m.weight = nn.Parameter(torch.eye(3))
    x = torch.randn(2, 3)
    compiled = torchair.compile(model, (x, x, torch.zeros(3)))
    with torch.no_grad():
        for _ in range(4):
            same(compiled(x, x, torch.zeros(3)), twin(x, x, torch.zeros(3)))
        assert takes_fast_path(compiled)
        with pytest.warns(UserWarning, match=r"updates z, and .* z shares memory with weight"):
            got = compiled(x, x, model.weight[1])
        same(got, twin(x, x, twin.weight[1]))
        same(model.weight, twin.weight)
        same(compiled(x, x, torch.zeros(3)), twin(x, x, torch.zeros(3)))


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4)
    compiled = torchair.compile(model, x)
    with torch.no_grad():
        for _ in range(3):
            model[0].weight.add_(1)
            same(compiled(x), model(x))
        model[1].weight = nn.Parameter(torch.randn(4, 4))
        with pytest.raises(InputError, match="several names"):
            compiled(x)


def test_a_bad_index_is_an_index_error():
    table = torch.randn(5, 3)
    compiled = torchair.compile(lambda i, t: t[i] + 1, (torch.zeros(2, dtype=torch.int64), table))
    good = torch.tensor([4, 1])
    for _ in range(3):
        same(compiled(good, table), table[good] + 1)
    with pytest.raises(IndexError):
        compiled(torch.tensor([9, 1]), table)
    same(compiled(good, table), table[good] + 1)


@torch.no_grad()
def test_what_transforms_have_made_is_refused_and_named():
    fast, x = torchair.compile(lambda x: x.sin() * 2, on_mismatch="error"), torch.randn(3)
    for _ in range(6):
        same(fast(x), x.sin() * 2)
    with forward_ad.dual_level():
        with pytest.raises(InputError, match="without tangent"):
            fast(forward_ad.make_dual(x, x))
        same(fast(x), x.sin() * 2)
    for transformed in (torch.func.vmap(fast), torch.func.grad(lambda x: fast(x).sum())):
        with pytest.raises(InputError, match=r"torch\.func"):
            transformed(x)
    same(fast(x), x.sin() * 2)


def test_what_depends_on_data_says_where_to_go():
    with pytest.raises(TraceError, match=r"torch\.compile"):
        torchair.compile(lambda x: x + 1 if x.sum() > 0 else x, torch.zeros(3))


@pytest.mark.filterwarnings("ignore:frozen_parameter")
def test_memory_is_told_and_handed_in():
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(4, 6)
    compiled = torchair.compile(model, x, config=frozen())
    needed = compiled.summary()
    assert needed.static and needed.feature_memory_base_refreshable
    block = torch.zeros(needed.feature_memory_size + 64, dtype=torch.uint8)
    with torch.no_grad():
        for _ in range(3):
            same(compiled(x), model(x))
        assert takes_fast_path(compiled)
        compiled.update_graph_feature_memory_base(block)
        for _ in range(3):
            block.zero_()
            same(compiled(x), model(x))
            assert block.any() == bool(needed.feature_memory_size)
    # weights are frozen all the same
    assert compiled.versions[0].session().current.frozen_tensors is not None


def test_threads_share_a_compiled_model():
    model = Net()
    compiled = torchair.compile(model, torch.zeros(4, 6))
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(4, 6, generator=generator)
            with torch.no_grad():
                if not torch.allclose(compiled(x)[1], model(x)[1], atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_what_a_call_updates_has_another_version():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x, other):
            self.seen.add_(1)
            x.mul_(2)
            return other + self.seen

    model, x, other = Keeps(), torch.ones(4), torch.ones(4)
    call = torchair.compile(model)
    for _ in range(6):
        before = [t._version for t in (model.seen, x, other)]
        call(x, other)
        assert [t._version - v for t, v in zip((model.seen, x, other), before, strict=True)] == [
            1, 1, 0,
        ]  # fmt: skip


def test_packed_weights_follow_what_other_calls_update():
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    model, x = nn.Linear(512, 512).requires_grad_(False), torch.randn(4, 512)
    call = torchair.compile(model, config=config)

    def write_row(weight, place, row):
        weight.index_copy_(0, place, row)

    update = torchair.compile(write_row)
    for k in range(8):
        assert_same(call(x), model(x))
        update(model.weight, torch.tensor([k]), torch.randn(1, 512))


@pytest.mark.parametrize("first", [None, torch.bfloat16])
def test_autocast_is_what_it_is_in_the_call(first):
    model, x = nn.Linear(6, 3), torch.randn(4, 6)

    def cast(dtype):
        return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)

    with torch.no_grad():
        fast = torchair.compile(model)
        for dtype in (first, torch.bfloat16, None, torch.float16, torch.bfloat16, None):
            with cast(dtype):
                for _ in range(5):
                    assert fast(x).dtype is model(x).dtype
        with cast(first):
            strict = torchair.compile(model, x)
        with cast(None if first else torch.bfloat16), pytest.raises(InputError, match="autocast"):
            strict(x)


def test_a_model_is_traced_while_others_call_it():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def encode(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

        def decode(self, x):
            for layer in self.layers:
                x = torch.sigmoid(layer(x))
            return x

    model, x = Coder().requires_grad_(False), torch.randn(4, 8)
    wanted, found, wrong, ready = model.encode(x), model.decode(x), [], threading.Event()

    def work(encode, ends):
        try:
            while not ends.is_set():
                assert_same(encode(x), wanted)
                ready.set()
        except Exception as e:
            wrong.append(e)
            ready.set()

    for _ in range(5):
        ends, encode = threading.Event(), torchair.compile(model.encode)
        encode(x)
        thread = threading.Thread(target=work, args=(encode, ends))
        thread.start()
        ready.wait()
        try:
            assert_same(torchair.compile(model.decode)(x), found)
        finally:
            ends.set()
            thread.join()
        assert not wrong
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_what_a_model_assigns_while_it_is_traced_is_put_back():
    model = nn.LSTM(8, 16, 2, bidirectional=True).eval()  # it makes a new list of its weights
    x, weights = torch.randn(3, 5, 8), model._flat_weights
    with torch.no_grad():
        wanted, _ = model(x)
        for fast in (torchair.compile(model), torchair.compile(model, x)):
            for _ in range(4):
                assert_same(fast(x)[0], wanted)
            assert model._flat_weights is weights
            assert_same(model(x)[0], wanted)
            assert_same(fast(x)[0], wanted)


def test_an_operator_that_torch_cannot_trace_is_named():
    def loss(x, targets):
        sizes = torch.full((2,), 12), torch.tensor([4, 3])
        return nn.functional.ctc_loss(x.log_softmax(-1), targets, *sizes)

    with pytest.raises(TraceError, match=r"aten\._ctc_loss.*(\n.*)*torch\.compile"):
        torchair.compile(loss)(torch.randn(12, 2, 8), torch.randint(1, 6, (2, 4)))


def test_a_tensor_that_a_model_keeps_is_named():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), None

        def forward(self, x):
            self.last = self.layer(x)
            self.register_buffer("scale", self.last.abs().max(), persistent=False)
            return self.last * 2

    model, x = nn.Sequential(Keeps()), torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"keeps a tensor in 0\.(last|scale) when it runs"):
        fast = torchair.compile(model, x)
    assert model[0].last is None and not dict(model.named_buffers())
    assert_same(fast(x), model(x))


def test_modes_that_capture_and_other_doors():
    model, x = Net(), torch.randn(4, 6)
    with pytest.warns(DeprecationWarning, match="reduce-overhead"):
        replayed = torchair.compile(model, x, mode="reduce-overhead")
    bound = torchair.compile(model.forward, x)
    with torch.no_grad():
        for _ in range(3):
            same(replayed(x), model(x))
            same(bound(x=x), model(x))
        model.first.bias.add_(1)
        same(bound(x), model(x))


# ---- as torch.compile is called ----


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, scale=2.0):
        return self.inner(x) * scale


@torch.no_grad()
def test_without_example_inputs_the_first_call_compiles():
    model = Doubling().eval()
    compiled = torchair.compile(model)
    assert not compiled.versions
    with pytest.raises(GraphError, match="nothing is compiled yet"):
        compiled.summary()
    for n in (4, 4, 4, 5, 4, 5, 5, 5):
        x = torch.randn(n, 6)
        same(compiled(x), model(x))
        same(compiled(x, scale=3.0), model(x, scale=3.0))
    assert len(compiled.versions) == 4 and compiled.summary().static
    strict = torchair.compile(model, on_mismatch="error")
    same(strict(torch.ones(4, 6)), model(torch.ones(4, 6)))
    with pytest.raises(InputError):
        strict(torch.ones(5, 6))
    few = torchair.compile(model, recompile_limit=1)
    few(torch.ones(4, 6))
    with pytest.raises(InputError):
        few(torch.ones(5, 6))


@torch.no_grad()
class Scaled(nn.Module):
    """A method that is compiled where it is written."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), factor), requires_grad=False)

    @torchair.compile(options={"frozen_parameter": False})
    def forward(self, x, more=1.0):
        return x * self.factor + more


def test_methods_are_compiled_for_each_object():
    x, models = torch.ones(3), [Scaled(2.0), Scaled(3.0)]
    for _ in range(4):
        for model in models:
            assert_same(model(x), x * model.factor + 1)
            assert_same(model(x, more=2.0), x * model.factor + 2)
    for again in (copy.copy, copy.deepcopy):
        made = again(models[0])
        made._parameters = {"factor": nn.Parameter(torch.full((3,), 5.0), requires_grad=False)}
        for _ in range(4):
            assert_same(made(x), torch.full((3,), 6.0))
            assert_same(models[0](x), torch.full((3,), 3.0))
    assert list(models[0].state_dict()) == ["factor"]


def test_copies_are_compiled_anew():
    model, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3)
    whole = torchair.compile(model)
    model.forward = torchair.compile(model.forward)
    for _ in range(4):
        assert_same(whole(x), model(x))
    for made in (copy.deepcopy(model), copy.deepcopy(whole), copy.copy(whole)):
        for _ in range(4):
            assert_same(made(x), model(x))
    other = copy.deepcopy(model)
    other.weight.zero_()
    for _ in range(4):
        assert_same(other(x), model.bias.expand(4, 2).clone())


def test_keywords_of_torch_compile_mean_what_they_mean_there():
    @torchair.compile(fullgraph=True, backend="torchair", name="twice", isolate_recompiles=True)
    def twice(x):
        return 2 * x

    same(twice(torch.ones(3)), torch.full((3,), 2.0))

    @torchair.compile
    def thrice(x):
        return 3 * x

    same(thrice(torch.ones(3)), torch.full((3,), 3.0))
    model = Doubling().eval()
    assert torchair.compile(model, disable=True) is model
    backend = torchair.get_npu_backend(compiler_config=frozen())
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "frozen_parameter": True}
    for keywords in (
        {"mode": "reduce-overhead", "dynamic": False},
        {"dynamic": True},
        {"backend": backend},
        {"options": options},
    ):
        compiled = torchair.compile(model, **keywords)
        for _ in range(4):
            x = torch.randn(4, 6)
            same(compiled(x), model(x))
    assert compiled._config.experimental_config.frozen_parameter.value == "1"


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"fullgraph": False}, ValueError, "one graph"),
        ({"backend": "inductor"}, ValueError, "its own backend"),
        ({"options": {"no_such_option": 1}}, ValueError, "no_such_option"),
        ({"mode": "default", "options": {"frozen_parameter": True}}, RuntimeError, "Either mode"),
        ({"shapes_spec": None}, TypeError, "unexpected keyword argument 'shapes_spec'"),
        (
            {"config": torchair.CompilerConfig(), "backend": torchair.get_npu_backend()},
            ValueError,
            "not both",
        ),
    ],
)
def test_keywords_that_cannot_be_obeyed_are_errors(keywords, error, message):
    with pytest.raises(error, match=message):
        torchair.compile(Doubling(), **keywords)


@torch.no_grad()
@pytest.mark.parametrize("calls", [0, 5])
def test_a_compiled_module_is_a_part_of_what_is_compiled_around_it(calls):
    model, x = nn.Sequential(Doubling(), nn.ReLU(), Doubling()).eval(), torch.randn(4, 6)
    eager = copy.deepcopy(model)
    model[0].forward = torchair.compile(model[0].forward)
    for _ in range(calls):
        model(x)
    torch._dynamo.reset()
    with torch.no_grad():
        for whole in (torchair.compile(model), torch.compile(model, backend="torchair")):
            for _ in range(5):
                same(whole(x), eager(x))


def test_a_module_within_a_model_is_compiled_in_place():
    model = nn.Sequential(Doubling(), nn.ReLU(), Doubling()).eval()
    eager, seen = copy.deepcopy(model), []
    model[0].forward = torchair.compile(model[0].forward)
    model[0].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(5):
        x = torch.randn(4, 6)
        same(model(x), eager(x))
    assert takes_fast_path(model[0].forward) and len(seen) == 5
    assert model.state_dict().keys() == eager.state_dict().keys()
    other = nn.Sequential(Doubling(), nn.ReLU(), Doubling()).eval()
    for m in (model, eager):
        m.load_state_dict(other.state_dict())
    same(model(x), eager(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("of_the_mode", [False, True])
def test_autocast_in_inference_mode(dynamic: bool, of_the_mode: bool) -> None:
    """Traced in that mode, torch takes `einsum` apart before autocast has cast for it."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.einsum("...i,...i->...", x, x)
        return found, found.norm(dim=0)

    x = torch.randn(3, 5, 8)
    with torch.inference_mode():
        given = x.clone() if of_the_mode else x
        got = torchair.compile(fn, (given,), dynamic=dynamic)(given)
        for mine, eager in zip(got, fn(given), strict=True):
            assert mine.dtype is eager.dtype is torch.bfloat16 and mine.is_inference()
            torch.testing.assert_close(mine, eager)
