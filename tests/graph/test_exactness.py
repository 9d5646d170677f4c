"""Numbers of compiled functions that must equal eager's to the last bit: where torch rounds, where
a size of one is broadcast, what has a sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchair
from compiling import compiled

Function = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_same(got: Any, want: Any) -> None:
    """Equal to the last bit, NaN and the signs of zeros included."""
    if isinstance(want, tuple):
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if want.is_floating_point():
        assert torch.equal(got.signbit(), want.signbit())


# ---- short floats ----

ROUNDED: dict[str, Function] = {
    "there and back": lambda x: x.half().float(),
    "there and on": lambda x: x.bfloat16().float() * 3,
    "stored as well": lambda x: (x.half(), x.half().float() + 1),
    "from double": lambda x: x.double().half().double(),
    "compared": lambda x: x.bfloat16() * 1.001 == x.bfloat16(),
    "to integers": lambda x: ((x * 1000).half() * 1.001).int(),
    "floor": lambda x: ((x * 1000).half() * 1.001).floor(),
    "position": lambda x: (x.bfloat16() * 1e-3 + 1).argmax(-1),
    "truth": lambda x: ((x * 1e-6).half() * 1e-3).any(-1),
    "too large": lambda x: ((x * 6e4).half() * 2).isinf(),
    "remainder": lambda x: (x.half() * 3) % 0.25,
    "bound": lambda x: torch.threshold(x.bfloat16().fill_(0.3), 0.3, 7.0),
}
"""A value that was made a short float has no more digits than that: in a cast that was asked for,
and where the last digit decides on a whole step."""


@pytest.mark.parametrize("name", ROUNDED)
def test_short_floats_are_rounded(name: str) -> None:
    x = torch.rand(7, 37, generator=torch.Generator().manual_seed(0))
    assert_same(compiled(ROUNDED[name], dynamic=False)(x), ROUNDED[name](x))


HALVES = (torch.bfloat16, torch.float16)


def _through_memory(h: torch.Tensor) -> torch.Tensor:
    """The same values, by a kernel of torch."""
    return h.unsqueeze(0).cummax(0)[0].squeeze(0)


STORED: dict[str, Function] = {
    "also read as it is": lambda h: (h * 1.1, (h * 1.1).float()),
    "also multiplied": lambda h: (h * 1.1, (h * 1.1).float() * 3),
    "of a product": lambda h: (lambda y: (y, y.float() - 1))(h @ h.T),
    "a term of a sum": lambda h: _through_memory(h / 3) - (-h) / -3,
    "a scaled term": lambda h: torch.sub(_through_memory(h / 3), (-h / 2) / -3, alpha=2),
    "between ends": lambda h: torch.lerp(_through_memory(h / 3), (-h) / -3, 0.25) - h / 3,
    "with a product": lambda h: torch.addcmul((-h) / -3, _through_memory(h / 3), h, value=-1),
}
"""What is stored as a short float is read as one, by its own kernel too; terms of a sum are short
floats, whether they come from memory or not: some of these differences are 0."""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", STORED)
def test_stored_short_floats_are_read_as_such(name: str, dtype: torch.dtype) -> None:
    h = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same(compiled(STORED[name], dynamic=False)(h), STORED[name](h))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_saved_short_floats_cancel(dtype: torch.dtype) -> None:
    """1 / |x| is saved, rounded, and computed once more in the backward."""

    def similarity(x: torch.Tensor) -> torch.Tensor:
        x = x.ravel()
        return F.cosine_similarity(torch.ones_like(x), x, 0)

    for number in (0.784, -8.0625, -0.0433, 2.777, -0.0276):
        x = torch.tensor([number], dtype=dtype, requires_grad=True)
        compiled(similarity, dynamic=False)(x).backward()
        assert x.grad is not None and x.grad.item() == 0.0


def test_norms_read_the_sum_that_is_stored() -> None:
    """Of the elements a fifth would be the next bfloat16 if the norm read the sum as it was
    added."""

    def norm(h: torch.Tensor) -> torch.Tensor:
        wide = h.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)

    def add_and_norm(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor) -> Any:
        h = x + y
        return h, gamma * norm(h).to(h.dtype)

    draws = torch.Generator().manual_seed(0)
    x, y, gamma = (torch.randn(d, generator=draws).bfloat16() for d in ((64, 128), (64, 128), 128))
    h, got = compiled(add_and_norm)(x, y, gamma)
    assert_same(h, x + y)
    assert (got != (gamma.float() * norm(h)).bfloat16()).float().mean() < 0.01


# ---- sizes of one ----


def test_a_size_of_one_that_is_not_a_constant_is_broadcast() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        few = (x * 2)[::3]
        return few.repeat_interleave(2, 0) - 3 * few

    g = compiled(f, dynamic=True)
    for n in (3, 2, 3):  # a third of it, rounded up, is one
        x = torch.arange(float(n)) + 1
        assert_same(g(x), f(x))


def test_sums_of_one_element_have_no_sign() -> None:
    x = torch.tensor([[-0.0, 0.0, -1.0]])

    def f(x: torch.Tensor) -> Any:
        return x.sum(0), x - x.mean(0, keepdim=True), x[:, :1].sum(1), x.amax(0)

    assert_same(compiled(f)(x), f(x))


# ---- errors are what eager raises ----

RAISES: dict[str, tuple[Function, torch.Tensor, type[Exception]]] = {
    "maximum of nothing": (lambda x: (x * 2).max(0)[0], torch.ones(0, 5), IndexError),
    "position in nothing": (lambda x: x.min(0)[1] + 1, torch.ones(0, 5), IndexError),
    "largest of all": (lambda x: x.max(), torch.ones(0, 5), RuntimeError),
    "a slice of nothing": (lambda x: x[4:].max(0)[0], torch.ones(4, 5), IndexError),
    "median of nothing": (lambda x: x.median(0)[0], torch.ones(0, 5), IndexError),
    "lookup": (lambda x: torch.ones(5, 4)[x], torch.tensor([1, 7]), IndexError),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", RAISES)
def test_errors_are_those_of_eager(name: str, dynamic: bool) -> None:
    function, x, kind = RAISES[name]
    for call in (function, compiled(function, dynamic=dynamic)):
        with pytest.raises(kind):
            call(x)


def test_empty_results_of_extremes_are_no_error() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.max(1)[0], x.sum(0), x.argmin(1), x.logsumexp(0)

    x = torch.ones(0, 5)
    assert_same(compiled(f)(x), f(x))


def test_an_extreme_of_nothing_raises_where_another_size_did_not() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[y.shape[0] :].max(0)[0]

    g = compiled(f, dynamic=True)
    x = torch.arange(12.0).reshape(6, 2)
    assert_same(g(x, torch.ones(3)), f(x, torch.ones(3)))
    with pytest.raises(IndexError):
        g(x, torch.ones(6))


# ---- random numbers are those that eager draws, and as many ----

DRAWS: dict[str, Function] = {
    "made": lambda x: (
        torch.rand(7, 5), torch.randn(40), torch.randn(3), torch.randint(9, (6,)),
        torch.randperm(11), torch.rand(3, dtype=torch.float16), torch.rand(4, dtype=torch.double),
    ),
    "alike": lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 2, 9)),
    "in another layout": lambda x: (torch.rand_like(x.t()), F.dropout(x.t()), x.t().bernoulli()),
    "in place": lambda x: (
        x.clone().uniform_(-2, 3), x.clone().normal_(1, 2), x.clone().bernoulli_(0.3),
        x.clone().exponential_(), torch.normal(x, 1.0),
    ),
    "by chance": lambda x: (torch.bernoulli(x), torch.multinomial(x, 3), torch.poisson(x * 9)),
    "dropped": lambda x: (
        F.dropout(x, 0.3), F.alpha_dropout(x, 0.5, True), F.dropout1d(x[None], 0.5),
        F.rrelu(x - 0.5, training=True),
    ),
    "without dims": lambda x: (
        *(torch.bernoulli(t) for t in x[0].unbind()), torch.zeros(5).bernoulli_(x[0, 4]),
        torch.normal(x[0, 1], x[0, 2]), torch.poisson(x[0, 3] * 9), F.dropout(x[0, 0]),
    ),
    "unused": lambda x: (torch.rand(5)[:0].sum() + x, torch.randn(20)),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_eager(name: str, mode: str) -> None:
    config = torchair.CompilerConfig()
    config.mode = mode
    fast = compiled(DRAWS[name], config)
    x = torch.linspace(0.1, 0.9, 60).reshape(5, 12)
    for seed in range(3):
        drawn = []
        for function in (DRAWS[name], fast):
            torch.manual_seed(seed)
            drawn.append((*function(x), torch.rand(2)))
        for wanted, got in zip(*drawn, strict=True):
            torch.testing.assert_close(got, wanted)  # what is scaled may be rounded otherwise


@pytest.mark.parametrize("order", ["BFS", "DFS", "RDFS"])
def test_draws_keep_their_order(order: str) -> None:
    def f(x: torch.Tensor) -> Any:
        late = torch.rand(30)
        early = torch.randn(30).sort().values * torch.poisson(x)
        return early.sum(), late * 2

    config = torchair.CompilerConfig()
    config.experimental_config.topology_sorting_strategy = order
    fast = compiled(f, config)
    x = torch.linspace(1, 5, 30)
    torch.manual_seed(2)
    wanted = f(x)
    torch.manual_seed(2)
    torch.testing.assert_close(fast(x), wanted)
