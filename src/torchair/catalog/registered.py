"""Rows of the operators that users gave a kernel with `ge.register_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Row, Trait, add_source, all_contiguous, writes_first
from torchair.errors import MissingHostValue
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact
from torchair.ge.operators import UserKernel, user_kernel
from torchair.ge.prototypes import prototype

_made: dict[str, tuple[UserKernel, Row]] = {}


def _row(op_type: str) -> Row | None:
    kernel = user_kernel(op_type)
    if kernel is None:
        return None
    known = _made.get(op_type)
    if known is None or known[0] is not kernel:
        known = _made[op_type] = (kernel, _new_row(kernel))
    return known[1]


add_source(_row)


def _new_row(kernel: UserKernel) -> Row:
    # What a function does besides its results is not known: RANDOM is neither folded nor merged.
    traits, make, in_place = Trait.RANDOM, _function, _works_in_place(kernel)
    if in_place:
        traits, make = traits | Trait.WRITES_FIRST, _update
    return Row(
        kernel.type,
        lambda op: _facts(op, kernel),
        lambda op: make(op, kernel),
        traits,
        out=in_place,
        layouts=all_contiguous,
    )


def _works_in_place(kernel: UserKernel) -> bool:
    """Whether all that the operator does is to update its first input."""
    proto = prototype(kernel.type)
    if proto is None or not proto.inputs:
        return False
    first = (proto.inputs[0].name,)
    return kernel.updates == first == tuple(p.name for p in proto.outputs)


def _attributes(op: Op) -> dict[str, Any]:
    """Attributes by name, with defaults; types of tensors as torch knows them."""
    proto = op.node.prototype
    names = [n for n in op.node.attrs if not n.startswith("_")]
    kinds = {n: op.node.attrs[n].kind for n in names}
    for spec in proto.attrs if proto is not None else ():
        kinds.setdefault(spec.name, spec.kind)
    return {n: _plain(kind, op.attr(n)) for n, kind in kinds.items()}


def _plain(kind: str, value: Any) -> Any:
    if kind == "DataType" and value is not None:
        return ge_to_torch(value)
    return [ge_to_torch(v) for v in value] if kind == "ListDataType" and value else value


# ---- dims and types of the results ----


def _facts(op: Op, kernel: UserKernel) -> list[Fact]:
    """Ask the rule, or the function, on tensors without data; symbols stay as tracing saw them."""
    slots = op.node.inputs.items()
    facts = [op.list(p) if isinstance(slot, list) else op.get(p) for p, slot in slots]
    if not all(_is_static(f) for f in facts):
        return [Fact(v.dtype, v.shape) for v in op.node.outputs]
    tensors = [_meta(f) for f in facts]
    try:
        results = _call(op, kernel, tensors, kernel.shape_rule or kernel.function)
    except Exception as e:
        if kernel.shape_rule is not None:
            raise
        raise MissingHostValue(f"dims of {op.node} come with the data: {e}") from e
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _is_static(fact: Any) -> bool:
    if isinstance(fact, list):
        return all(_is_static(f) for f in fact)
    return fact is None or (fact.shape is not None and all(isinstance(d, int) for d in fact.shape))


def _meta(fact: Any) -> Any:
    if isinstance(fact, list):
        return [_meta(f) for f in fact]
    if fact is None:
        return None
    return torch.empty(fact.shape, dtype=ge_to_torch(fact.dtype), device="meta")


# ---- running ----


def _function(op: Op, kernel: UserKernel) -> Kernel:
    def run(*tensors: Any) -> list[torch.Tensor]:
        return _call(op, kernel, _contiguous(_own(op, kernel, tensors)), kernel.function)

    return run


def _update(op: Op, kernel: UserKernel) -> Kernel:
    def update(first: torch.Tensor, *others: Any) -> None:
        whole = first.contiguous()
        _call(op, kernel, [whole, *_contiguous(others)], kernel.function)
        if whole is not first:
            first.copy_(whole)

    return writes_first(update)


def _own(op: Op, kernel: UserKernel, tensors: Sequence[Any]) -> list[Any]:
    """Arguments with copies of what the function changes: values of a graph do not change."""
    ports = zip(op.node.inputs, tensors, strict=True)
    return [_copy(t) if p in kernel.updates else t for p, t in ports]


def _contiguous(tensors: Sequence[Any]) -> list[Any]:
    """A kernel may be C code that reads memory from begin to end."""
    return [
        _contiguous(t) if isinstance(t, list) else None if t is None else t.contiguous()
        for t in tensors
    ]


def _copy(x: Any) -> Any:
    if isinstance(x, list):
        return [_copy(t) for t in x]
    return None if x is None else x.clone()


def _call(
    op: Op, kernel: UserKernel, tensors: Sequence[Any], function: Callable[..., Any]
) -> list[torch.Tensor]:
    """All outputs of the node: updated inputs in their place, the others from the function."""
    others = iter(_flat(function(*tensors, **_attributes(op))))
    updated = _updated(op, kernel, tensors)
    names = [v.port for v in op.node.outputs]
    results: list[Any] = [updated[n] if n in updated else next(others, None) for n in names]
    missing = [n for n, r in zip(names, results, strict=True) if not isinstance(r, torch.Tensor)]
    if missing or next(others, None) is not None:
        returned = [n for n in names if n not in updated]
        raise ValueError(
            f"the function of {kernel.type} must return one tensor for each of {returned}"
        )
    return results


def _updated(op: Op, kernel: UserKernel, tensors: Sequence[Any]) -> dict[str, Any]:
    """Inputs that the function changed, by the names of their outputs."""
    found: dict[str, Any] = {}
    for port, t in zip(op.node.inputs, tensors, strict=True):
        if port in kernel.updates:
            found |= {f"{port}{i}": x for i, x in enumerate(t)} if _is_list(t) else {port: t}
    return found


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _flat(returned: Any) -> list[Any]:
    if _is_list(returned):
        return [leaf for member in returned for leaf in _flat(member)]
    return [] if returned is None else [returned]
