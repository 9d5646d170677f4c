"""PyTorch's operator database on the emulated device: a slice here, all of it as a slow test."""

from __future__ import annotations

import pytest

import emulated_ops

# One of each kind: views, reductions, random numbers, results of several types, `out=`, gradients
# of convolutions and norms, indices, sparse gradients, linear algebra, attention.
SLICE = (
    "add", "as_strided:partial_views", "bernoulli", "cat", "copysign", "cumsum", "diagonal",
    "empty_strided", "fft.rfft", "index_put", "linalg.eig", "linalg.svd", "logsumexp",
    "max:reduction_with_dim",
    "multinomial", "native_layer_norm", "nn.functional.conv2d", "nn.functional.ctc_loss",
    "nn.functional.dropout", "nn.functional.embedding", "nn.functional.gelu",
    "nn.functional.scaled_dot_product_attention", "sort", "split", "unfold", "unique", "where",
)  # fmt: skip


def test_slice_of_the_database():
    found = emulated_ops.run_chunk(list(SLICE))
    assert found.keys() == set(SLICE)
    assert not {name: problem for name, problem in found.items() if problem}


def test_what_is_known_not_to_work_still_does_not():
    found = emulated_ops.run_chunk(list(emulated_ops.WRONG))
    assert all("parse" in problem for problem in found.values()), found


@pytest.mark.slow
def test_whole_database():
    names = list(emulated_ops.operators())
    found = emulated_ops.run_all(names, jobs=2)
    wrong = {n: p for n, p in found.items() if p not in ("", emulated_ops.NOT_ON_CPU)}
    assert wrong.keys() <= emulated_ops.WRONG.keys(), wrong
    assert len(names) - len(wrong) >= 690
