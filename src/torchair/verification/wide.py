"""FX nodes in float64: the truth that rounding is measured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchair.verification.judge import leaves

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_BITS = {"aten.view.dtype"}  # what looks at bits means something else in another type


def widened(value: Any) -> Any:
    """A floating tensor in double precision; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    wide = wide_type(value.dtype)
    return value.detach().clone() if wide is value.dtype else value.detach().to(wide)


def wide_type(dtype: Any) -> Any:
    """The type that stands for a floating or complex one; anything else as it is."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return torch.float64
    return _WIDE.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype


def run_wide(node: fx.Node, env: Callable[[fx.Node], Any], eager: Any) -> Any:
    """The result of a call in double precision; eager's, widened, where there is no such thing:
    random numbers, operators that know one type only, bits of numbers."""
    if not _has_truth(node.target):
        return _all_widened(eager)
    args = fx.node.map_aggregate(fx.map_arg(node.args, env), wide_type)
    kwargs = fx.node.map_aggregate(fx.map_arg(node.kwargs, env), wide_type)
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operator may refuse a type in any way
        return _all_widened(eager)
    return made if _alike(made, eager) else _all_widened(eager)


def _has_truth(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return callable(target) and not isinstance(target, torch._ops.HigherOrderOperator)
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and str(target) not in _BITS


def _all_widened(tree: Any) -> Any:
    return fx.node.map_aggregate(tree, widened) if isinstance(tree, list | tuple) else widened(tree)


def _alike(made: Any, eager: Any) -> bool:
    mine, theirs = list(leaves(made)), list(leaves(eager))
    return len(mine) == len(theirs) and all(_fits(a, b) for a, b in zip(mine, theirs, strict=True))


def _fits(made: Any, eager: Any) -> bool:
    if not isinstance(eager, Tensor) or not isinstance(made, Tensor):
        return type(made) is type(eager)
    return made.shape == eager.shape and made.dtype is wide_type(eager.dtype)


class WideGraph(fx.Interpreter):
    """A whole graph in double precision, beside a run in its own types that serves where double
    precision does not exist."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.wide: dict[fx.Node, Any] = {}
        self.results: Sequence[Any] = ()

    def run_node(self, n: fx.Node) -> Any:
        """Both results of a node."""
        made = super().run_node(n)
        self.wide[n] = self.truth(n, made)
        for done in self.user_to_last_uses.get(n, []):
            self.wide.pop(done, None)
        return made

    def truth(self, n: fx.Node, made: Any) -> Any:
        """The result of a node in double precision."""
        if n.op == "output":
            self.results = [
                self.wide[x] if isinstance(x, fx.Node) else x
                for x in (n.args[0] if isinstance(n.args[0], list | tuple) else n.args)
            ]
            return None
        if n.op == "call_function":
            return run_wide(n, self.wide.__getitem__, made)
        return _all_widened(made)
