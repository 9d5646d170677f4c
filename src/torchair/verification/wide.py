"""FX nodes in float64: the truth that rounding is measured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    try:
        made = _wide_call(node, env)
    except Exception:  # an operator may refuse a type in any way
        return _all_widened(eager)
    return made if _alike(made, eager) else _all_widened(eager)


def _wide_call(node: fx.Node, env: Callable[[fx.Node], Any]) -> Any:
    args = fx.node.map_aggregate(fx.map_arg(node.args, env), wide_type)
    kwargs = fx.node.map_aggregate(fx.map_arg(node.kwargs, env), wide_type)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def run_shaken(region: Sequence[fx.Node], inputs: Mapping[str, Any]) -> Any:
    """The result of the last of some nodes in double precision, with every number on the way off by
    as much as rounding to its type may do: how far results move shows what rounding explains. None
    where there is no such thing."""
    shake = _Shaking()
    env = {name: shake(value, value) for name, value in inputs.items()}
    try:
        for node in region:
            if not _has_truth(node.target):
                return None
            env[node.name] = shake(_wide_call(node, lambda n: env[n.name]), node.meta.get("val"))
    except Exception:  # as above
        return None
    return env[region[-1].name] if region else None


class _Shaking:
    """Moves numbers by a part of a unit in the last place, the same in every run."""

    def __init__(self) -> None:
        self._numbers = torch.Generator().manual_seed(0)

    def __call__(self, tree: Any, like: Any) -> Any:
        if isinstance(tree, list | tuple):
            members = like if isinstance(like, list | tuple) else [None] * len(tree)
            return type(tree)(self(a, b) for a, b in zip(tree, members, strict=False))
        dtype = like.dtype if isinstance(like, Tensor) else None
        if not isinstance(tree, Tensor) or dtype is None or not dtype.is_floating_point:
            return widened(tree)
        noise = torch.rand(tree.shape, dtype=torch.float64, generator=self._numbers) * 2 - 1
        return widened(tree) * (1 + torch.finfo(dtype).eps / 2 * noise.to(tree.device))


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
