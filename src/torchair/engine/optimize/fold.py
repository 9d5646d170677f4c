"""Small integers that only depend on sizes: computed while planning, constants of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchair.engine.plan.strides import HOST_SIZE, as_list, count_of, is_known
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact, Node, Value
from torchair.operators import Op, Row, Trait
from torchair.operators.reference import tensor_args


def folded(
    node: Node, row: Row, facts: Sequence[Fact], fact: Callable[[Value], Fact]
) -> list[torch.Tensor] | None:
    """The results of a node, None if sizes alone do not tell them. `facts` are those of the
    results as far as the shape rule knows them."""
    if not node.outputs or row.has(Trait.SIDE_EFFECT | Trait.RANDOM):
        return None
    if all(is_known(f) for f in facts):
        return [tensor_of(f) for f in facts]
    inputs = [fact(v) for v in node.values()]
    small = all(f.shape is not None and count_of(f) <= HOST_SIZE for f in facts)
    if not small or not inputs or not all(is_known(f) for f in inputs):
        return None
    result = row.kernel(Op(node, fact))(*tensor_args(node, row, lambda v: tensor_of(fact(v))))
    pairs = zip(facts, as_list(result), strict=True)
    return [torch.tensor(t.tolist(), dtype=ge_to_torch(f.dtype)).reshape(t.shape) for f, t in pairs]


def tensor_of(fact: Fact) -> torch.Tensor:
    """The tensor of a value whose content is known."""
    made = torch.tensor(fact.content, dtype=ge_to_torch(fact.dtype))
    return made.reshape(fact.shape)  # type: ignore[arg-type]
