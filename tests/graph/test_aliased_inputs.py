"""Arguments that share memory: the same tensor twice, halves, overlapping parts, views of views;
read, or one or both updated; and how they share it changes between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchair

Tensors = tuple[torch.Tensor, ...]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---- two arguments of eight numbers in a piece of memory

PAIRS: dict[str, tuple[int, Callable[[torch.Tensor], Tensors]]] = {
    "unrelated": (16, lambda b: (b[:8].clone(), b[8:].clone())),
    "same": (8, lambda b: (b, b)),
    "twice": (12, lambda b: (b[:8], b[:8].view(2, 4).view(8))),
    "twice in more": (20, lambda b: (b[:8], b[:8].view(2, 4).view(8))),
    "twice in less": (8, lambda b: (b[:8], b[:8].view(2, 4).view(8))),
    "halves": (16, lambda b: (b[:8], b[8:])),
    "halves the other way": (16, lambda b: (b[8:], b[:8])),
    "with a gap": (24, lambda b: (b[1:9], b[12:20])),
    "overlapping": (20, lambda b: (b[:8], b[4:12])),
    "overlapping the other way": (20, lambda b: (b[4:12], b[:8])),
    "interleaved": (16, lambda b: (b[::2], b[1::2])),
    "views of views": (24, lambda b: (b[2:][1:9], b[2:][3:].view(-1)[:8])),
    "whole and view": (8, lambda b: (b, b[:8].view(8))),
}

CALLS: dict[str, tuple[str, ...]] = {
    "apart": ("halves", "halves the other way", "unrelated", "with a gap", "halves"),
    "one memory": ("twice", "twice in more", "twice in less", "same", "twice in more"),
    "overlapping": ("overlapping", "overlapping"),  # torch guards no offsets
    "overlapping the other way": ("overlapping the other way", "overlapping the other way"),
    "interleaved": ("interleaved", "interleaved"),
    "views of views": ("views of views", "views of views"),
    "whole and view": ("whole and view", "whole and view"),
}

# ---- what is done with them


def read(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * y, y[1:], x[:2]


def update_first(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(1)
    return x + y


def update_second(x: torch.Tensor, y: torch.Tensor) -> Any:
    y.mul_(2)
    return x - y


def update_both(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[0] = 100
    y[1] = 200
    return x + y


def update_parts(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[2:5].mul_(3)
    y[1::2].sub_(1)
    return x * 2, y.sum()


def exchange(x: torch.Tensor, y: torch.Tensor) -> Any:
    old = x * 2
    x.copy_(y.clone())
    y.copy_(old)
    return old + 1


FUNCTIONS = (read, update_first, update_second, update_both, update_parts, exchange)


def called(fn: Any, kind: str) -> tuple[list[torch.Tensor], list[bool]]:
    """Results, arguments and all of their memory after one call; which results are views."""
    size, arguments = PAIRS[kind]
    memory = torch.arange(float(size))
    args = arguments(memory)
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    shared = [torch._C._is_alias_of(r, a) for r in results for a in args]
    return [t.clone() for t in (*results, *args, memory)], shared


@pytest.mark.parametrize("mode", ("max-autotune", "reduce-overhead"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_aliased_inputs(fn: Any, dynamic: bool, mode: str) -> None:
    config = torchair.CompilerConfig()
    config.mode = mode
    backend = torchair.get_npu_backend(compiler_config=config)
    for name, kinds in CALLS.items():
        torch._dynamo.reset()
        call = torch.compile(fn, backend=backend, dynamic=dynamic)
        for kind in kinds:
            (got, shares), (wanted, shared) = called(call, kind), called(fn, kind)
            for g, w in zip(got, wanted, strict=True):
                torch.testing.assert_close(g, w, msg=lambda m, n=name: f"{n}: {m}")
            assert shares == shared, name


@pytest.mark.parametrize("backend", ("torchair", "npugraph_ex"))
def test_a_view_of_an_updated_part_begins_where_the_argument_does(backend: str) -> None:
    def fn(x: torch.Tensor, n: int) -> Tensors:
        x[1:].add_(1)
        return x.expand(n, *x.shape), x[1:, 2:]

    call = torch.compile(fn, backend=backend, dynamic=True)
    for offset in (1, 3, 0, 2):  # torch guards no offsets
        x = torch.randn(40).as_strided((2, 4), (9, 2), offset)
        other = x.clone()
        results, wanted = call(x, 3), fn(other, 3)
        assert torch.equal(x, other)
        assert all(map(torch.equal, results, wanted))
        memory = {t.untyped_storage().data_ptr() for t in (x, *results)}
        assert len(memory) == 1


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a view": lambda x: x.flatten().as_strided((2, 2), (2, 1)) * 2,
    "of a part": lambda x: x[1:].as_strided((2, 2), (2, 1)) + 1,
    "from an offset": lambda x: x.as_strided((2, 2), (1, 2), 1) * 2,
    "of a view from an offset": lambda x: x.flatten().as_strided((2, 2), (2, 1), 3) * 2,
    "of a part that varies": lambda x: x.t()[1:].as_strided((2, 2), (x.shape[1], 1)) + 1,
    "of a part from a size": lambda x: x[1:].as_strided((2, 2), (2, 1), x.shape[0]) + 1,
    "of a part of a part": lambda x: x.as_strided((9,), (1,), 2)[3:].as_strided((2, 2), (2, 1)) + 1,
}
STATIC = ("of a part", "from an offset")


@pytest.mark.parametrize("backend", ("torchair", "npugraph_ex"))
@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_of_arguments_that_begin_anywhere(name: str, backend: str) -> None:
    call = torch.compile(STRIDED[name], backend=backend, dynamic=name not in STATIC)
    for x in anywhere():
        assert torch.equal(call(x), STRIDED[name](x))


def anywhere() -> Iterator[torch.Tensor]:
    """A tensor that is all its memory, then others of these dims; torch guards no offsets."""
    yield torch.arange(24).view(4, 6)
    for offset in (0, 3, 5, 5):
        yield torch.arange(60)[offset : offset + 24].view(4, 6)


@pytest.mark.parametrize("options", ({"share_results": True}, {"clone_input": False}))
def test_memory_of_arguments_that_are_copied_is_not_read_in_a_capture(options: Any) -> None:
    fn = STRIDED["of a view from an offset"]
    call = torch.compile(fn, backend="npugraph_ex", options=options)
    first, *others = anywhere()
    with pytest.warns(UserWarning, match="reads memory around an argument"):
        assert torch.equal(call(first), fn(first))
    for x in others:
        assert torch.equal(call(x), fn(x))


def test_a_view_of_an_argument_that_is_updated_has_its_strides() -> None:
    """torch's own tracing makes it with the strides of the new value."""

    def fn(x: torch.Tensor) -> Tensors:
        whole = x.unsqueeze(1)
        part = whole.tensor_split(2, 0)[1]
        whole.mul_(2)
        return whole.double(), part

    x = torch.randn(50)[1:49].view(4, 12)[:, ::2]
    other = x.clone()
    results, wanted = torch.compile(fn, backend="torchair", dynamic=True)(x), fn(other)
    assert torch.equal(x, other) and all(map(torch.equal, results, wanted))


@pytest.mark.parametrize("mode", ["max-autotune", "npugraph_ex"])
def test_results_may_be_written_to_while_gradients_are_recorded(mode: str) -> None:
    """A view that was made without gradients cannot: no result is one that eager has not."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(4, 5), x[1:] * 1, torch.zeros(4, 5, dtype=torch.complex64), x.sum(0)

    config = torchair.CompilerConfig()
    config.mode = mode
    x = torch.randn(4, 5, requires_grad=True)
    backend = torchair.get_npu_backend(compiler_config=config)
    for result in torch.compile(fn, backend=backend)(x):
        result[0] = x[0].sum()
        assert result.requires_grad


# ---- views of one tensor, whose dims lie otherwise in memory

BASES = {
    "contiguous": ((5, 3, 2), (6, 2, 1)),
    "strides of single rows": ((33, 1, 1), (1, 33, 33)),
    "one element": ((1, 1, 1), (5, 6, 7)),
    "transposed": ((5, 1, 2), (1, 99, 5)),
    "permuted": ((5, 3, 2), (1, 5, 15)),
    "turned inside": ((5, 3, 2), (6, 1, 3)),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("mode", ["max-autotune", "npugraph_ex"])
def test_views_of_a_base_are_updated_twice(base: str, mode: str) -> None:
    def run(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        rows = first.t().reshape(1, -1)
        second.clamp_(-1, 1)
        rows.neg_()
        return first * 2

    config = torchair.CompilerConfig()
    config.mode = mode
    backend = torchair.get_npu_backend(compiler_config=config)
    fast = torch.compile(run, backend=backend, fullgraph=True)
    for _ in range(3):
        given = [torch.empty_strided(*BASES[base]).normal_()]
        given.append(torch.empty_strided(*BASES[base]).copy_(given[0]))
        columns = [x[:, 0] for x in given]
        got, wanted = (f(c, c[..., -1]) for f, c in zip((fast, run), columns, strict=True))
        assert torch.equal(got, wanted)
        assert torch.equal(*given)
