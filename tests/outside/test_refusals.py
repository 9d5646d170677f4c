"""What eager refuses is refused here, by the same class of error: at the first call, when a plan
exists, and without Dynamo. A slice of `python -m tests.conformance --errors`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchair
from conformance import errors, types
from conformance.cases import Group
from conformance.report import read_known

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR, CONVOLUTION = torch.nn.Linear(4, 5), torch.nn.Conv2d(3, 4, 3)
WEIGHT = torch.randn(4, 5)
ROWS = torch.tensor([0, 1])
CALLS = {
    "linear": (LINEAR, (2, 4)),
    "matmul": (lambda x: x @ WEIGHT, (2, 4)),
    "matmul of batches": (lambda x: torch.matmul(x[None, None], WEIGHT), (2, 4)),
    "addmm": (lambda x: torch.addmm(torch.ones(5), x, WEIGHT), (2, 4)),
    "convolution": (CONVOLUTION, (1, 3, 6, 6)),
    "index_put": (lambda x: torch.ones(3, 4).index_put((ROWS,), x), (2, 4)),
    "index_add": (lambda x: torch.ones(3, 4).index_add(0, ROWS, x), (2, 4)),
    "layer_norm": (lambda x: F.layer_norm(torch.ones(2, 4), (4,), x[0]), (2, 4)),
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CALLS)
def test_types_that_do_not_mix(name):
    function, dims = CALLS[name]
    right, wrong = torch.ones(dims), torch.ones(dims, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        function(wrong)
    torch._dynamo.reset()
    run = torch.compile(function, backend="torchair")
    with pytest.raises(RuntimeError):
        run(wrong)
    torch._dynamo.reset()
    run = torch.compile(function, backend="torchair")
    torch.testing.assert_close(run(right), function(right))
    with pytest.raises(RuntimeError):
        run(wrong)


def test_types_that_do_not_mix_without_dynamo():
    with pytest.raises(RuntimeError, match="same dtype"):
        torchair.compile(LINEAR, (torch.ones(2, 4).double(),))(torch.ones(2, 4).double())
    run = torchair.compile(LINEAR, (torch.ones(2, 4),))
    torch.testing.assert_close(run(torch.ones(2, 4)), LINEAR(torch.ones(2, 4)))
    with pytest.raises(torchair.errors.InputError):
        run(torch.ones(2, 4).double())


def test_norms_of_short_floats_have_parameters_in_float32():
    def function(x, weight):
        return F.layer_norm(x, (4,), weight)

    x, weight = torch.randn(2, 4).bfloat16(), torch.rand(4)
    run = torch.compile(function, backend="torchair")
    torch.testing.assert_close(run(x, weight), function(x, weight))


SLICE = [
    *((errors, op) for op in ("gather", "take", "masked_select", "trace")),
    *((types, op) for op in ("mm", "baddbmm", "amax", "sub", "nn.functional.nll_loss", "pow")),
    *((types, op) for op in ("cholesky_inverse", "nn.functional.batch_norm", "linalg.lu_factor")),
]


@pytest.mark.parametrize(
    ("source", "op"), SLICE, ids=[f"{source.MODE}-{op}" for source, op in SLICE]
)
def test_slice_of_the_operator_database(source, op):
    group = Group(op, "float32", source.MODE)
    found = [o for o in source.outcomes(group) if not isinstance(o, int)]
    assert found
    assert [o.reason for o in found if o.status == "failed"] == []


def test_excused_inputs_have_reasons():
    assert all(entry.reason for entry in read_known(errors.EXCUSED))
