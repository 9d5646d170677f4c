"""The samples of PyTorch's operator database: names for them, and how to call one."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_unflatten

DEVICE = os.environ.get("TORCHAIR_TEST_DEVICE", "cpu")
DTYPES = ("float32", "bfloat16", "int64", "bool")
# Values; values with symbolic sizes, as torch.compile(dynamic=True) has them; gradients.
MODES = ("forward", "dynamic", "grad")
POOL = 100  # samples of a group that a run chooses from


@dataclass(frozen=True, order=True)
class Group:
    """All samples of one operator in one type: what a worker does in one go."""

    op: str  # OpInfo.full_name: the name and the variant, separated by a dot
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.mode}"


@dataclass(frozen=True, order=True)
class Case:
    """One sample."""

    group: Group
    index: int

    def __str__(self) -> str:
        return f"{self.group} #{self.index}"


@dataclass
class Call:
    """A sample as a function of its tensors, everything else closed over."""

    fn: Callable[..., Any]
    tensors: list[torch.Tensor]

    def fresh(self) -> list[torch.Tensor]:
        """The tensors again, in memory of their own."""
        return [_copy(t) for t in self.tensors]


@cache
def operators() -> dict[str, Any]:
    """The operator database by full name, the operators on lists of tensors included."""
    tables = (
        database.op_db,
        database.foreach_unary_op_db,
        database.foreach_binary_op_db,
        database.foreach_pointwise_op_db,
        database.foreach_reduce_op_db,
        database.foreach_other_op_db,
    )
    return {op.full_name: op for table in tables for op in table}


def groups(mode: str, dtypes: Sequence[str] = DTYPES) -> Iterator[Group]:
    """All groups of a mode; plain values in all types, the other modes in float32 only."""
    dtypes = dtypes if mode == "forward" else ("float32",)
    for name, op in operators().items():
        if mode == "grad" and not op.supports_autograd:
            continue
        supported = op.supported_backward_dtypes if mode == "grad" else op.supported_dtypes
        for dtype in dtypes:
            if getattr(torch, dtype) in supported(DEVICE):
                yield Group(name, dtype, mode)


def calls(group: Group, most: int) -> dict[int, Call]:
    """Samples of a group by index, the same in every run.

    They are spread over the first POOL ones: the first few tend to be the empty and tiny ones.
    """
    pool = _samples(group, max(most, POOL))
    return {i: _call(group, pool[i]) for i in spread(len(pool), most)}


def call_of(case: Case) -> Call:
    """One sample."""
    return _call(case.group, _samples(case.group, case.index + 1)[case.index])


def _samples(group: Group, most: int) -> list[Any]:
    """A list, because running a sample draws random numbers that the next must not depend on."""
    op = operators()[group.op]
    seed(group)
    dtype = getattr(torch, group.dtype)
    return list(islice(op.sample_inputs(DEVICE, dtype, requires_grad=group.mode == "grad"), most))


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0..count-1, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / max(most - 1, 1)
    return sorted({round(i * step) for i in range(most)})


def seed(group: Group) -> None:
    """Start all random numbers that samples are made of; every mode has the same samples."""
    number = zlib.crc32(f"{group.op} {group.dtype}".encode())
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _call(group: Group, sample: Any) -> Call:
    op, grad = operators()[group.op], group.mode == "grad"
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]

    def fn(*values: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        first, args, kwargs = tree_unflatten(filled, spec)
        result = op.op(first, *args, **kwargs)
        # What OpInfo applies before it asks for gradients, to undo a freedom of the result (as
        # the phase of eigenvectors) or to choose the differentiable part.
        return sample.output_process_fn_grad(result) if grad else result

    return Call(fn, tensors)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout; strides and offset are part of what a sample tests."""
    plain = t.layout is torch.strided and not (t.is_conj() or t.is_neg() or t.is_nested)
    if not plain or type(t) is not torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)
    memory = t.untyped_storage().clone()
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    made.set_(memory, t.storage_offset(), t.size(), t.stride())
    return made.requires_grad_(t.requires_grad)
