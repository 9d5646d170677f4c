"""Tensors whose conjugation or negation is pending, and views of memory as another type: arguments,
results and what is saved for gradients show the same numbers as in eager mode, with the same bits
pending, in the same memory."""

from __future__ import annotations

import pytest
import torch

import torchair
from torchair.errors import InputError
from torchair.ge.signature import InputView, Pending, Signature
from torchair.serde.convention import Convention, from_text, to_text

FUNCTIONS = {
    "conj": lambda x: x.conj(),
    "real": lambda x: x.conj().real,
    "imag": lambda x: x.conj().imag,
    "product": lambda x: (x * x.conj()).real,
    "adjoint product": lambda x: x.mH @ x,
    "sum": lambda x: x.conj() + 1,
    "clone": lambda x: x.conj().clone(),
    "slice": lambda x: x.conj()[1:],
    "transposed": lambda x: x.H,
    "of a result": lambda x: (x * 2).conj(),
    "part of a result": lambda x: (x * 2).conj().imag,
    "several": lambda x: (x.conj(), x.conj().imag, x + 1, x.conj().real * 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.conj(), x),
    "chain": lambda x: (x.conj() * x).conj().imag + x.imag,
    "negated": lambda x: -(x.conj().imag),
    "complex of parts": lambda x: torch.complex(x.conj().imag, x.real),
}


def several(results):
    return results if isinstance(results, tuple) else (results,)


def described(t, base):
    inside = t.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    return t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), inside


def check(function, argument, grad, base=None):
    """Compare with eager on two copies of one base, whose view the argument is."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    base = torch.randn(3, 4, dtype=torch.cfloat) if base is None else base
    bases = [base.clone().requires_grad_(grad) for _ in range(2)]
    run = torch.compile(function, backend="torchair", dynamic=False)
    found = [several(f(argument(b))) for f, b in zip((run, function), bases, strict=True)]
    for got, expected in zip(*found, strict=True):
        assert described(got, bases[0]) == described(expected, bases[1])
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*bases)
    if grad:
        torch.testing.assert_close(*(slope(r, b) for r, b in zip(found, bases, strict=True)))


def slope(results, base):
    total = sum((r.abs() ** 2).sum() * (k + 1) for k, r in enumerate(results))
    return torch.autograd.grad(total, base)[0]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_of_conjugates(function):
    check(function, lambda base: base, grad=True)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_arguments_that_are_conjugates(function):
    check(function, lambda base: base.conj(), grad=False)


NEGATIVE = {
    "computed": lambda x: (x + 1, x * x, x.relu(), x.sum(), x @ x.t()),
    "views": lambda x: (x.t(), x[1:]),
    "copy": lambda x: x.clone(),
    "updated": lambda x: x.mul_(2),
    "read and updated": lambda x: (x.add_(1), x * 2)[1],
}


@pytest.mark.parametrize("function", NEGATIVE.values(), ids=NEGATIVE)
def test_arguments_with_a_pending_sign(function):
    check(function, lambda base: base.conj().imag, grad=False)


VIEWS = {
    "complex": lambda x: torch.view_as_complex(x.view(6, 2, 2)),
    "part": lambda x: torch.view_as_complex(x.view(6, 2, 2))[1:, 0],
    "conjugate": lambda x: torch.view_as_complex(x.view(6, 2, 2)).conj(),
    "integers": lambda x: x.view(torch.int32),
    "bytes": lambda x: x.view(torch.uint8)[1:],
}


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_results_that_show_an_argument_as_another_type(function):
    check(function, lambda base: base, grad=False, base=torch.randn(6, 4))


def test_zeros_without_memory_are_no_argument_of_native_code():
    def run(x):
        return x * 2 + 1

    torch._dynamo.reset()
    given = torch.ones(4), torch._efficientzerotensor(4)
    with torch.no_grad():
        traced, fast = torch.compile(run, backend="torchair"), torchair.compile(run)
        for _ in range(5):
            for x in given:
                torch.testing.assert_close(traced(x), run(x))
        for _ in range(5):
            torch.testing.assert_close(fast(given[0]), run(given[0]))
            with pytest.raises(InputError, match="a tensor with memory"):
                fast(given[1])


def test_files_hold_what_is_pending():
    view = InputView(0, (3,), (2,), 0, False, "view_as_real", Pending("conj", "neg"))
    signature = Signature(results=[view], arguments=1)
    assert from_text(to_text(Convention(signature, {}))).signature.results == [view]


def test_constants_are_resolved():
    constant = torch.randn(3, dtype=torch.cfloat).conj()
    run = torch.compile(lambda x: x * constant, backend="torchair")
    torch.testing.assert_close(run(torch.ones(3)), constant.resolve_conj())
