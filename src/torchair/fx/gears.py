"""Gears: the few sizes that a dim may have. Each is planned ahead, others do not fit the graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchair.torch_private import dynamo

DimGears = Mapping[int, Sequence[int]]

_MOST = 100  # gears of a dim, and combinations of all of them


def set_dim_gears(t: torch.Tensor, dim_gears: DimGears) -> None:
    """Say which sizes some dims of an input may have, before the first call with it."""
    known = getattr(t, "dim_gears", None)
    assert known is None or known == dim_gears, (
        f"Tensor {t} already has set dim gears, and it is not supported to set it again."
    )
    for dim, gears in dim_gears.items():
        _check_gears(dim, gears, t.dim())
    t.dim_gears = dict(dim_gears)  # type: ignore[attr-defined]
    for dim in dim_gears:
        dynamo.mark_dynamic(t, dim)


def _check_gears(dim: Any, gears: Any, rank: int) -> None:
    assert isinstance(dim, int), f"Dim index in dim_gears must be an integer, but got {type(dim)}."
    assert 0 <= dim < rank, (
        f"Dim index in dim_gears must be in range [0, {rank - 1}], but got {dim}."
    )
    where = f"dim index {dim} in dim_gears"
    assert isinstance(gears, list | tuple), (
        f"Gears for {where} must be a list or tuple, but got {type(gears)}."
    )
    for i, gear in enumerate(gears):
        element = f"Element at index {i} of value for {where}"
        assert isinstance(gear, int), f"{element} must be an integer, but got {type(gear)}."
        assert gear != 0, (
            f"Gear value at index {i} for dim index {dim} must not be 0, but got {gear}."
        )
    assert 2 <= len(gears) <= _MOST, (
        f"Length of gears for {where} must be in range [2, {_MOST}], but got {len(gears)}."
    )


def gears_of(tensors: Sequence[Any]) -> dict[int, dict[int, tuple[int, ...]]]:
    """The gears that the user has set on the tensors of a call, by position."""
    set_by_user = {k: getattr(t, "dim_gears", None) for k, t in enumerate(tensors)}
    return {
        k: {d: tuple(g) for d, g in sorted(gears.items())}
        for k, gears in set_by_user.items()
        if gears
    }


def traced_inputs(gm: Any) -> list[Any]:
    """The inputs of a graph of Dynamo as it has traced them."""
    return [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]


def keep_to_gears(inputs: Sequence[Any], gears: Mapping[int, DimGears]) -> None:
    """Let guards refuse what is between and beyond the gears, and other sizes of other dims."""
    for k, t in enumerate(inputs):
        if not isinstance(t, torch.Tensor):
            continue
        for dim, size in enumerate(t.shape):
            sizes = gears.get(k, {}).get(dim)
            if sizes is None:
                int(size)  # a guard: this size and no other
            else:
                _keep_to(size, sorted(set(sizes)), f"dim {dim} of input {k}")


def _keep_to(size: Any, gears: Sequence[int], where: str) -> None:
    hint = size if isinstance(size, int) else size.node.hint
    assert hint in gears, f"the size of {where} is {hint}, which is none of its gears {gears}"
    checks = [size >= gears[0], size <= gears[-1]]
    checks += [(size <= a) | (size >= b) for a, b in itertools.pairwise(gears)]
    assert all(bool(check) for check in checks)


def merge(lists: Sequence[Sequence[int]], policy: str) -> list[tuple[int, ...]]:
    """Distinct combinations of the gears of several dims."""
    assert policy in ("zip", "product"), "dynamic_gears_merge_policy only support zip and product."
    if policy == "zip":
        assert len({len(g) for g in lists}) <= 1, (
            "when dynamic_gears_merge_policy is zip, input gears len must same."
        )
    merged: Iterator[Any] = (
        zip(*lists, strict=True) if policy == "zip" else itertools.product(*lists)
    )
    distinct = list(dict.fromkeys(itertools.islice(merged, 0, 200_000)))
    assert len(distinct) <= _MOST, (
        f"The total number of gears set cannot exceed {_MOST}, and the current number of gears is: "
        f"{len(distinct)}"
    )
    return distinct


def combinations(
    inputs: Sequence[Any], gears: Mapping[int, DimGears], policy: str
) -> list[dict[str, int]]:
    """Sizes by symbol, one dict for each combination of gears."""
    dims = [(inputs[k].shape[d], tuple(g)) for k, of in gears.items() for d, g in of.items()]
    distinct = merge([g for _, g in dims], policy)
    named = [str(size.node.expr) for size, _ in dims if not isinstance(size, int)]
    return [
        dict(zip(named, combination, strict=True))
        for combination in distinct
        if len(combination) == len(named)
    ]
