"""Check a compiled function against eager in everything a caller can see, and functions for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from compiling import compiled


def twin(x: Any) -> Any:
    """A copy with the same layout, of its own memory."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def sharing(tensors: list[Any]) -> list[tuple[int, int]]:
    """Which pairs are views of one memory."""
    pointers = [
        t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) and t.numel() else None
        for t in tensors
    ]
    pairs = [(i, j) for j in range(len(tensors)) for i in range(j)]
    return [(i, j) for i, j in pairs if pointers[i] is not None and pointers[i] == pointers[j]]


def identical(tensors: list[Any]) -> list[tuple[int, int]]:
    pairs = [(i, j) for j in range(len(tensors)) for i in range(j)]
    return [
        (i, j)
        for i, j in pairs
        if isinstance(tensors[i], torch.Tensor) and tensors[i] is tensors[j]
    ]


def leaves(tree: Any) -> list[Any]:
    return tree_leaves(tree, is_leaf=lambda x: x is None)


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted), (got, wanted)
    if not isinstance(wanted, torch.Tensor):
        assert got == wanted
        return
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if wanted.numel():
        sizes = zip(got.stride(), wanted.stride(), wanted.shape, strict=True)
        assert all(g == w or n == 1 for g, w, n in sizes), (got.stride(), wanted.stride())
    torch.testing.assert_close(got, wanted, equal_nan=True)


def assert_like_eager(fn: Any, call: Any, args: list[Any]) -> Any:
    """Values, types, strides, mutations, aliasing and identity of one call."""
    mine, theirs = [twin(a) for a in args], [twin(a) for a in args]
    got, wanted = leaves(call(*mine)), leaves(fn(*theirs))
    assert len(got) == len(wanted)
    for g, w in zip([*got, *mine], [*wanted, *theirs], strict=True):
        assert_same(g, w)
    assert sharing([*mine, *got]) == sharing([*theirs, *wanted])
    assert identical([*mine, *got]) == identical([*theirs, *wanted])
    return got


def check(fn: Any, *args: Any, dynamic: bool | None = False, others: Any = ()) -> None:
    """One compiled function on these arguments twice, then on others."""
    call = compiled(fn, dynamic=dynamic)
    with torch.no_grad():
        first = assert_like_eager(fn, call, list(args))
        kept = [twin(t) for t in first]
        assert_like_eager(fn, call, [_changed(a) for a in args])
        for g, k in zip(first, kept, strict=True):
            assert_same(g, k)  # results belong to the caller
        for more in others:
            assert_like_eager(fn, call, list(more))


def _changed(x: Any) -> Any:
    """Other numbers in the same layout."""
    if not isinstance(x, torch.Tensor) or not x.numel():
        return x
    y = twin(x)
    whole = torch.empty(0, dtype=x.dtype).set_(y.untyped_storage())
    whole.copy_(whole.flip(0))
    return y


# ---- functions, each with a way to make its arguments


def x23() -> torch.Tensor:
    return torch.randn(2, 3)


def x44() -> torch.Tensor:
    return torch.randn(4, 4)


def _add_in_place(x, y):
    x.add_(y)
    return x * 2


def _return_mutated(x):
    x.mul_(2)
    return x


def _return_mutated_and_more(x):
    x.mul_(2)
    return x, x + 1, x[0]


def _swap(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return a + b


def _rotate(a, b, c):
    t = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(t)


def _clone_then_mutate(x):
    before = x.clone()
    x.add_(1)
    return before, before * 2


def _old_value_needed_late(x):
    y = x + 1
    z = torch.relu(x) - x.sum()
    x.copy_(y)
    return z


def _mutate_through_view(x):
    x[1].add_(10)
    x.t()[0].mul_(3)
    return x.sum(0)


def _old_diagonal(x):
    d = torch.diagonal(x)
    y = x + 1
    out = d * 2 + y.sum()
    x.copy_(y)
    return out


def _old_unfold(x):
    u = x.unfold(1, 2, 1)
    x2 = x * 3
    out = u.sum(-1) + x2.mean()
    x.copy_(x2)
    return out


def _scatter(cache, index, new):
    cache.index_copy_(1, index, new)
    return cache.sum(1)


def _scatter_put(cache, index, new):
    cache[:, index] = new
    return cache[:, :2] * 2


def _scatter_reduce(x, index, src):
    return x.scatter_add_(0, index, src) + 1


def _copy_into_hidden(x, y):
    a, b = -x, y.softmax(-1)
    a.copy_(b)
    return a, b


def _views_of_mutated(x):
    x.mul_(2)
    return x.chunk(2)[1], x[:, x.shape[1] // 2 :], torch.diagonal(x), x.unbind(1)[1]


def _two_updates(x, y):
    x.add_(y)
    y.add_(x)
    return x - y


def _update_with_other_type(x, n):
    x.copy_(n)
    return x / 2


LAYOUT = {
    "transposed": (lambda x: (x + 1).t(), lambda: [x23()]),
    "permuted": (lambda x: (x * 2).permute(2, 0, 1), lambda: [torch.randn(2, 3, 4)]),
    "keeps_strides": (lambda x: torch.relu(x) + 1, lambda: [torch.randn(3, 2).t()]),
    "noncontiguous_reshape": (lambda x: x.reshape(-1) * 2, lambda: [torch.randn(3, 2).t()]),
    "noncontiguous_view": (lambda x: x.unsqueeze(0).transpose(1, 2) + x.sum(), lambda: [x23().t()]),
    "strided_slice": (lambda x: x * 3 - x.mean(1, keepdim=True),
                      lambda: [torch.randn(4, 8)[::2, ::3]]),
    "offset": (lambda x: x.exp(), lambda: [torch.randn(4, 8)[1:, 2:]]),
    "expanded": (lambda x: x + x.sum(0), lambda: [torch.randn(3, 1).expand(3, 4)]),
    "expanded_mm": (lambda x, y: x @ y, lambda: [torch.randn(4).expand(3, 4), x44().t()]),
    "channels_last": (
        lambda x: torch.relu(x) * 2,
        lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ),
    "matmul_of_views": (lambda x, y: x.t() @ y, lambda: [torch.randn(4, 3), torch.randn(4, 5)]),
    "empty": (lambda x: (x + 1, x.sum(), torch.cat([x, x])), lambda: [torch.empty(0, 3)]),
    "empty_matmul": (lambda x, y: x @ y, lambda: [torch.randn(2, 0), torch.randn(0, 3)]),
    "zero_dim": (lambda x, y: (x + y, x * 2, (x > y)),
                 lambda: [torch.tensor(2.0), torch.tensor(3.0)]),
    "zero_dim_broadcast": (lambda x, y: x * y, lambda: [torch.tensor(2.0), x23()]),
    "windows_of_hidden": (lambda x: (x + 1).unfold(1, 2, 1), lambda: [x44()]),
    "repeated_once": (lambda x: torch.logical_not(x.rot90()).repeat(1, 1), lambda: [x23()]),
    "size_one_dims": (lambda x: (x + 1).squeeze(1).unsqueeze(0), lambda: [torch.randn(3, 1, 2)]),
}  # fmt: skip

TYPES = {
    "int64": (lambda x: (x + 1, x // 2, x * x, x.sum()), lambda: [torch.arange(-3, 3)]),
    "int32": (lambda x: (x - 1, x % 4, x / 2), lambda: [torch.arange(6, dtype=torch.int32)]),
    "uint8": (lambda x: (x + 250, x >> 1), lambda: [torch.arange(8, dtype=torch.uint8)]),
    "int8": (lambda x: (x * 100, -x), lambda: [torch.arange(-4, 4, dtype=torch.int8)]),
    "bool": (lambda x, y: (x & y, x | y, ~x, x.any(), x.sum()),
             lambda: [torch.tensor([True, False]), torch.tensor([True, True])]),
    "bfloat16": (lambda x: (x * 2 + 1, x.softmax(-1), x.float()), lambda: [x23().bfloat16()]),
    "float16": (lambda x: (x * 2 + 1, x.sum(0)), lambda: [x23().half()]),
    "float64": (lambda x: (x * 1.1, x.cumsum(0), x.sum().float()), lambda: [x23().double()]),
    "mixed": (lambda x, n: (x + n, n * 2.5, x * True), lambda: [x23(), torch.arange(3)]),
    "complex64": (lambda z: (z * z, z + 1, z.abs(), torch.view_as_real(z * 2)),
                  lambda: [torch.randn(3, dtype=torch.complex64)]),
}  # fmt: skip

ALIASING = {
    "same_object_twice": (lambda x: (x, x), lambda: [x23()]),
    "input_and_computed": (lambda x: (x, x + 1, x), lambda: [x23()]),
    "duplicate": (lambda x: (lambda y: (y, y))(x + 1), lambda: [x23()]),
    "alias_of_output": (lambda x: (lambda y: (y.detach(), y, y.view(2, 3)))(x + 1),
                        lambda: [x23()]),
    "equal_work": (lambda x: (x + 1, x + 1), lambda: [x23()]),
    "view_of_output": (lambda x: (lambda y: (y, y.view(-1)))(x + 1), lambda: [x23()]),
    "views_of_hidden": (lambda x: (lambda y: (y[0], y[1], y.t()))(x + 1), lambda: [x23()]),
    "part_of_hidden": (lambda x: (x + 1)[:1], lambda: [x23()]),
    "view_of_input": (lambda x: (x[1:], x.t(), x.view(-1)), lambda: [x23()]),
    "view_of_offset_input": (lambda x: (x[1:], x + 1), lambda: [torch.randn(5, 3)[2:]]),
    "split": (lambda x: x.split(2, 1), lambda: [torch.randn(2, 6)]),
    "clone_of_input": (lambda x: (x.clone(), x), lambda: [x23()]),
    "clone_of_output": (lambda x: (lambda y: (y, y.clone()))(x + 1), lambda: [x23()]),
    "clone_of_clone": (lambda x: (lambda y: (y.clone(), y))((x + 1).clone()), lambda: [x23()]),
    "noop": (lambda x: (x * 1, x + 0, x.to(torch.float32), x.contiguous()), lambda: [x23()]),
    "reshape_that_copies": (lambda x: x.reshape(-1), lambda: [torch.randn(3, 2).t()]),
    "expand_of_output": (lambda x: (lambda y: (y, y.expand(4, 3)))(x.sum(0)), lambda: [x23()]),
    "real_view_of_input": (lambda z: (torch.view_as_real(z), z * 2),
                           lambda: [torch.randn(3, dtype=torch.complex64)]),
    "complex_view_of_input": (lambda x: (torch.view_as_complex(x), x * 2),
                              lambda: [torch.randn(3, 2)]),
    "bits_of_input": (lambda x: (x.view(torch.int32), x + 1), lambda: [x23()]),
    "bits_of_part": (lambda x: (x[1:].view(torch.int16), x + 1), lambda: [torch.randn(5, 3)[2:]]),
    "expand_alone": (lambda x: x.sum(0).expand(4, 3), lambda: [x23()]),
    "expanded_constant": (lambda x: (torch.ones(3).expand(2, 3), x + 1), lambda: [x23()]),
    "views_of_transposed": (lambda x: (lambda y: (y, y.t(), y.t().view(-1), y[0]))(x.relu()),
                            lambda: [torch.randn(3, 2).t()]),
    "views_before_whole": (lambda x: (lambda y: (y[1:], y.t().view(-1), y))(x.relu()),
                           lambda: [torch.randn(3, 2).t()]),
    "parts_of_strided": (
        lambda x: (lambda y: (y, y[1:], y.t()))(x.select_scatter(x[:, 1] * 2, 1, 0)),
        lambda: [torch.randn(5, 6)[1:, ::2]]),
    "parts_of_hidden_strided": (
        lambda x: (lambda y: (y[1:], y.unsqueeze(2), y.t()))(x.slice_scatter(x[:1] * 2, 0, 1, 2)),
        lambda: [torch.randn(3, 8)[:, ::2].t()]),
    "scattered_into_repeats": (
        lambda x: (lambda y: (y, y[1:], y.t() * 2, y.diagonal_scatter(x[0])))(
            x[0].expand(4, 3).select_scatter(x[1], 0, 2)), lambda: [x23()]),
    "zeros_in_place": (lambda x: (lambda y: (y.zero_() + 1, y))(x.exp()),
                       lambda: [torch.randn(3, 2).t()]),
    "copied_and_turned": (
        lambda x: (lambda y: (y.copy_(x * 2), y.t()))(x.relu()), lambda: [x23()]),
    "cloned_and_turned": (lambda x: (lambda y: (y, y.t()))(x.relu().clone()), lambda: [x23()]),
    "memory_of_view": (
        lambda x: (x.flatten().as_strided((2, 2), (2, 1)), x + 1),
        lambda: [torch.randn(6, 6)[:, :1]]),
    "memory_of_unbound": (
        lambda x: x.unbind(1)[0].as_strided((2, 2), (2, 1)) * 2,
        lambda: [torch.randn(6, 6)[:, ::2]]),
    "memory_of_computed_part": (
        lambda x: (lambda y: (
            y[1:].flatten().as_strided((2, 2), (2, 1)), y[:, :1].flatten().as_strided((2,), (2,)),
            y.t()[1:].as_strided((2,), (3,), 1)))(-x),
        lambda: [x44()]),
    "row_and_whole": (lambda x: (lambda y: (y[..., 0], y))(x - x), lambda: [x23()]),
    "last_of_output": (lambda x: (lambda y: (y, y[:, -1], y[0, 1]))(x * x), lambda: [x44()]),
    "diagonal_and_part": (lambda x: (lambda y: (y.diagonal(), y[1:, 1:], y.diagonal(1)))(x * 2),
                          lambda: [x44()]),
    "parts_of_product": (lambda x: (lambda y: (y.chunk(2, -1)[0].unsqueeze(1), y.chunk(2, -1)[1]))(
        x @ x.mT), lambda: [x44()]),
    "parts_of_different_sizes": (lambda x: x.lgamma().split([1, 3], -2), lambda: [x44()]),
    "part_of_pool": (lambda x: (lambda y: (y[..., -1], y))(F.avg_pool2d(x, 2)),
                     lambda: [torch.randn(2, 3, 9, 10)]),
    "unbound": (lambda x: (lambda y: (*y.unbind(-2), y))(x.softmax(-1)), lambda: [x44()]),
    "windows": (lambda x: (lambda y: (y.unfold(0, 2, 1), y))(x + 2), lambda: [torch.randn(6)]),
    "same_view_twice": (lambda x: (lambda y: (lambda z: (z, y, z))(y[1:]))(x + 1), lambda: [x23()]),
    "equal_views": (lambda x: (lambda y: (y[1:], y[1:], y.view(2, 3)))(x + 1), lambda: [x23()]),
    "squeezed_indices": (lambda x: (lambda s: (s[1].squeeze(1), s[1], s[0]))(x[:, :1].sort(0)),
                         lambda: [x23()]),
    "bits_of_output": (lambda x: (lambda y: (y.view(torch.int32), y[0]))(x + 1), lambda: [x23()]),
    "parts_of_complex": (lambda z: (lambda y: (torch.view_as_real(y), y.real, y))(z * 2),
                         lambda: [torch.randn(3, dtype=torch.complex64)]),
    "diagonal_of_output": (lambda x: torch.diagonal(x.softmax(-1)), lambda: [x44()]),
    "detach": (lambda x: (x.detach(), (x + 1).detach()), lambda: [x23()]),
    "constant": (lambda x: (torch.ones(2), torch.arange(3), x.new_zeros(2)), lambda: [x23()]),
    "nothing_computed": (lambda x, y: (y, x, x), lambda: [x23(), x23()]),
    "plain_values": (lambda x: (x + 1, None, 3, x.shape[0], 2.5, "text", True), lambda: [x23()]),
}  # fmt: skip

MUTATION = {
    "add_in_place": (_add_in_place, lambda: [x23(), x23()]),
    "add_in_place_broadcast": (_add_in_place, lambda: [x23(), torch.randn(3)]),
    "return_mutated": (_return_mutated, lambda: [x23()]),
    "return_mutated_and_more": (_return_mutated_and_more, lambda: [x23()]),
    "swap": (_swap, lambda: [x23(), x23()]),
    "rotate": (_rotate, lambda: [x23(), x23(), x23()]),
    "clone_then_mutate": (_clone_then_mutate, lambda: [x23()]),
    "old_value_needed_late": (_old_value_needed_late, lambda: [x23()]),
    "through_view": (_mutate_through_view, lambda: [x23()]),
    "noncontiguous": (_add_in_place, lambda: [torch.randn(3, 2).t(), x23()]),
    "offset": (_add_in_place, lambda: [torch.randn(4, 3)[2:], x23()]),
    "old_diagonal": (_old_diagonal, lambda: [x44()]),
    "old_unfold": (_old_unfold, lambda: [x44()]),
    "cache": (_scatter, lambda: [torch.zeros(2, 8, 3), torch.tensor([1, 5]), torch.randn(2, 2, 3)]),
    "cache_put": (_scatter_put,
                  lambda: [torch.zeros(2, 8, 3), torch.tensor([1, 5]), torch.randn(2, 2, 3)]),
    "scatter_add": (_scatter_reduce,
                    lambda: [torch.zeros(4, 3), torch.randint(0, 4, (2, 3)), x23()]),
    "copy_into_hidden": (_copy_into_hidden, lambda: [x44(), x44().t()]),
    "views_of_mutated": (_views_of_mutated, lambda: [x44()]),
    "two_updates": (_two_updates, lambda: [x23(), x23()]),
    "other_type": (_update_with_other_type, lambda: [x23(), torch.arange(3)]),
    "zero_": (lambda x: x.zero_() + 1, lambda: [x23()]),
    "fill_zero_dim": (lambda x, y: (x.fill_(3.0), y.add_(x))[1],
                      lambda: [torch.tensor(1.0), x23()]),
}  # fmt: skip

LIKE_EAGER = LAYOUT | TYPES | ALIASING | MUTATION
