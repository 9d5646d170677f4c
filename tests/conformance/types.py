"""Types that eager refuses: samples of the operator database with one of their tensors in another
type (`mixed`), or with all of them in a type that the operator does not take (`other`).

Tracing lets many of these pass, so a backend must refuse them. They go through AOTAutograd without
Dynamo, and are judged as error inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from .cases import DEVICE, Call, Case, Group, operators, seed
from .check import FAILED, PASSED, Outcome, eager_compiler, our_compiler
from .errors import Answer, Refusal, judged

MODE = "types"
SAMPLES = 3  # of an operator
MIXED = (torch.float64, torch.bfloat16, torch.int64)
OTHER = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
)


def groups() -> Iterator[Group]:
    """The operators that take floats."""
    for name, op in operators().items():
        if torch.float32 in op.supported_dtypes(DEVICE):
            yield Group(name, "float32", MODE)


def outcomes(group: Group) -> Iterator[int | Outcome]:
    """The outcomes of the calls that eager refuses, each after its index."""
    index = 0
    for said, call in _calls(operators()[group.op], group):
        expected = _raised(call.fn, call)
        if expected is not None:
            yield index
            yield _outcome(Case(group, index), said, call, expected)
            index += 1


def _calls(op: Any, group: Group) -> Iterator[tuple[str, Call]]:
    seed(group)
    tried: set[tuple[int, torch.dtype]] = set()
    for sample in list(islice(op.sample_inputs(DEVICE, torch.float32), SAMPLES)):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        floats = [i for i, t in enumerate(leaves) if _is_float(t)]
        changes = [([i], d) for i in floats for d in MIXED] if len(floats) > 1 else []
        changes += [(floats, d) for d in OTHER] if floats else []
        for places, dtype in changes:
            key = (places[0] if len(places) == 1 else -1, dtype)
            if key in tried:
                continue
            tried.add(key)
            changed = list(leaves)
            for i in places:
                changed[i] = leaves[i].to(dtype)
            yield f"{dtype} at {key[0]}", _call(op, changed, spec)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _call(op: Any, leaves: list[Any], spec: Any) -> Call:
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def fn(*values: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        first, args, kwargs = tree_unflatten(filled, spec)
        return op.op(first, *args, **kwargs)

    return Call(fn, [leaves[i] for i in places])


def _outcome(case: Case, said: str, call: Call, expected: Exception) -> Outcome:
    found = _compiled(call, our_compiler())
    answer = Answer.SAME
    if not isinstance(found, type(expected)):
        answer = judged(found, _compiled(call, eager_compiler))
    text = f"{said}: eager {expected!r:.120}, ours {found!r:.120}"
    return Refusal(case, PASSED if answer.right else FAILED, text, first=answer)


def _compiled(call: Call, compiler: Any) -> Exception | None:
    return _raised(aot_function(call.fn, fw_compiler=compiler), call)


def _raised(fn: Any, call: Call) -> Exception | None:
    try:
        with torch.no_grad():
            fn(*call.fresh())
    except Exception as e:
        return e
    return None
