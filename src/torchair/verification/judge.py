"""How far a result may be from the truth. Float64 measures rounding; nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from torchair.fallbacks import Fallback, note
from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload
from torchair.torch_private.pytree import tree_leaves, tree_map

TIMES_EAGER = 8  # other orders of rounding may cost up to this many errors of eager
FLOOR = 8  # and never less than this many units in the last place of the largest value
FLOOR_WIDE = 256  # the same where nothing is wider: eager itself is the judge


@dataclass(frozen=True)
class Difference:
    """Why a tensor is wrong: its largest error, and the largest that rounding explains."""

    error: float
    allowed: float
    scale: float
    what: str = ""  # where it is not the values that differ, or not by a number

    def __str__(self) -> str:
        if self.what:
            return self.what
        return f"error {self.error:.3g}, rounding explains {self.allowed:.3g}"


def difference(got: Any, eager: Any, truth: Any = None) -> Difference | None:
    """What is wrong with a result, None if it is as good as eager. `truth` is the same in float64,
    None where there is none."""
    if not isinstance(eager, Tensor):
        return _of_numbers(got, eager)
    if not isinstance(got, Tensor):
        return no_number(f"{type(got).__name__} instead of a tensor")
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return no_number(f"{_described(got)} instead of {_described(eager)}")
    if not eager.numel() or got is eager:
        return None
    got, eager = near(got), near(eager)
    known = near(truth) if isinstance(truth, Tensor) and truth.shape == eager.shape else None
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        return _of_integers(got, eager, known)
    return _of_floats(got, eager, known)


def is_explained(wrong: Difference, got: Any, eager: Any, truth: Any, moved: Any) -> bool:
    """Whether a difference is no larger than what rounding on the way does: `moved` is the truth
    where every number was off by that much."""
    if not isinstance(moved, Tensor) or not isinstance(got, Tensor) or moved.shape != got.shape:
        return False
    if got.dtype.is_floating_point:
        real = truth if isinstance(truth, Tensor) else eager
        far = (near(moved).double() - near(real).double()).abs().max() if got.numel() else 0.0
        return wrong.error <= TIMES_EAGER * float(far)
    return difference(got, eager, moved) is None


def near(tensor: Tensor) -> Tensor:
    """A tensor where it can be compared: on the GPU, or on the host."""
    plain = tensor.detach()
    return plain if plain.device.type in ("cpu", "cuda") else plain.cpu()


def close(got: Tensor, eager: Tensor) -> bool:
    """Whether two results are so close that float64 need not be asked: then one is right if the
    other is."""
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return False
    got, eager = near(got), near(eager)
    if not eager.dtype.is_floating_point:
        return bool(torch.equal(got, eager))
    if not eager.numel():
        return True
    wide = torch.float64 if eager.dtype is torch.float64 else torch.float32
    off = (got.to(wide) - eager.to(wide)).abs().max()
    scale = eager.to(wide).abs().max()
    return bool(off <= FLOOR / 2 * torch.finfo(eager.dtype).eps * scale)  # False where NaN is


def same_bits(got: Any, eager: Any) -> bool:
    """Whether a result holds eager's numbers to the last bit, signs of zeros included; a NaN is a
    NaN. What strict numerics promise."""
    if not isinstance(eager, Tensor) or not isinstance(got, Tensor):
        return _of_numbers(got, eager) is None
    kinds = [(t.dtype, t.shape, t.layout) for t in (got, eager)]
    if kinds[0] != kinds[1]:
        return False
    if eager.layout is not torch.strided:
        return bool(torch.equal(got, eager))
    got, eager = near(got), near(eager)
    if eager.dtype.is_complex:
        got, eager = (torch.view_as_real(t.resolve_conj()) for t in (got, eager))
    if not eager.dtype.is_floating_point:
        return bool(torch.equal(got, eager))
    equal = (got == eager) & (torch.signbit(got) == torch.signbit(eager))
    return bool((equal | (got.isnan() & eager.isnan())).all())


def _of_numbers(got: Any, eager: Any) -> Difference | None:
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if got == eager or (got != got and eager != eager):
        return None
    allowed = FLOOR_WIDE * torch.finfo(torch.float64).eps
    floats = isinstance(eager, float) and isinstance(got, float)
    if floats and abs(got - eager) <= allowed * abs(eager):
        return None
    return no_number(f"{got!r} instead of {eager!r}")


def _of_integers(got: Tensor, eager: Tensor, truth: Tensor | None) -> Difference | None:
    wrong = got != eager
    if truth is not None and truth.dtype == got.dtype:
        wrong &= got != truth  # eager's rounding may have decided otherwise
    count = int(wrong.sum())
    return no_number(f"{count} of {got.numel()} elements differ") if count else None


def _of_floats(got: Tensor, eager: Tensor, truth: Tensor | None) -> Difference | None:
    dtype = got.dtype
    if dtype.is_complex:
        mine, theirs = (torch.view_as_real(t.resolve_conj()) for t in (got, eager))
        wide = None if truth is None else torch.view_as_real(truth.resolve_conj())
        return _of_floats(mine, theirs, wide)
    eps, own = torch.finfo(dtype).eps, truth is None or dtype is torch.float64
    mine, theirs = got.double(), eager.double()
    real = theirs if truth is None or own else truth.double()
    finite = mine.isfinite() & theirs.isfinite() & real.isfinite()
    if not bool(finite.all()):
        wrong = ~finite & ~_same(mine, theirs) & ~_same(mine, real.to(dtype).double())
        if bool(wrong.any()):
            return no_number(f"{int(wrong.sum())} elements are not finite, or should not be")
        mine, theirs, real = (torch.where(finite, t, 0.0) for t in (mine, theirs, real))
    error, eagers, scale = torch.stack(
        [(mine - real).abs().max(), (theirs - real).abs().max(), real.abs().max()]
    ).tolist()
    floor = (FLOOR_WIDE if dtype is torch.float64 else FLOOR) * eps * scale
    allowed = max(TIMES_EAGER * eagers, floor, torch.finfo(dtype).smallest_normal)
    return None if error <= allowed else Difference(error, allowed, scale)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def no_number(text: str) -> Difference:
    """A difference that has no number, as a text."""
    return Difference(float("inf"), 0.0, 0.0, text)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def leaves(tree: Any) -> list[Any]:
    """What an FX node gives, one by one; None is left out."""
    return [member for member in tree_leaves(tree) if member is not None]


_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_FUSED = {
    f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("flash", "efficient", "cudnn")
}  # of GPUs, without double precision
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
    made: Any = None
    if _has_truth(node.target):
        try:
            made = _wide_call(node, env)
            if str(node.target) in _FUSED:
                made = type(eager)([made[0], *map(widened, eager[1:])])
        except Exception as e:
            _note(node, e)
    return made if _alike(made, eager) else tree_map(widened, eager)


def _wide_call(node: fx.Node, env: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = tree_map(wide_type, fx.map_arg((node.args, node.kwargs), env))
    if str(node.target) in _FUSED:
        return (_attention(node.target, args, kwargs),)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _attention(target: Any, args: Any, kwargs: Any) -> Tensor:
    """The first result of a fused attention, which knows short types only, by the general one."""
    names = [a.name for a in target._schema.arguments]
    given = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given |= dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p"):
        raise ValueError("it draws random numbers")
    q, k, v = (given[name] for name in ("query", "key", "value"))
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        given.get("attn_bias"),
        is_causal=given["is_causal"],
        scale=given["scale"],
        enable_gqa=q.shape[1] != k.shape[1],
    )


def run_shaken(region: Sequence[fx.Node], inputs: Mapping[str, Any]) -> Any:
    """The result of the last of some nodes in double precision, with every number on the way off by
    as much as rounding to its type may do: how far results move shows what rounding explains. None
    where there is no such thing."""
    shake = partial(_shaken, torch.Generator().manual_seed(0))
    env = {name: shake(value, value) for name, value in inputs.items()}
    for node in region:
        if not _has_truth(node.target):
            return None
        try:
            env[node.name] = shake(_wide_call(node, lambda n: env[n.name]), node.meta.get("val"))
        except Exception as e:
            _note(node, e)
            return None
    return env[region[-1].name] if region else None


def _note(node: fx.Node, error: Exception) -> None:
    """An operator may refuse a type, which torch says with these errors; others are our own."""
    refused = isinstance(error, RuntimeError | TypeError | ValueError)
    kind = Fallback.NO_ORACLE if refused else Fallback.ORACLE
    note(kind, f"{node.name} ({node.target}) is judged by eager", error)


def _shaken(numbers: torch.Generator, tree: Any, like: Any) -> Any:
    """Numbers moved by a part of a unit in the last place of the type that they have in `like`."""
    if isinstance(tree, list | tuple):
        members = like if isinstance(like, list | tuple) else [None] * len(tree)
        return type(tree)(_shaken(numbers, a, b) for a, b in zip(tree, members, strict=False))
    if not (isinstance(tree, Tensor) and isinstance(like, Tensor) and like.is_floating_point()):
        return widened(tree)
    noise = torch.rand(tree.shape, dtype=torch.float64, generator=numbers) * 2 - 1
    return widened(tree) * (1 + torch.finfo(like.dtype).eps / 2 * noise.to(tree.device))


def _has_truth(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return callable(target) and not isinstance(target, HigherOrderOperator)
    if str(target) in _FUSED:  # random only where it drops numbers
        return True
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and str(target) not in _BITS


def _alike(made: Any, eager: Any) -> bool:
    mine, theirs = leaves(made), leaves(eager)
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
            given = n.args[0] if isinstance(n.args[0], list | tuple) else n.args
            self.results = [self.wide[x] if isinstance(x, fx.Node) else x for x in given]
            return None
        if n.op == "call_function":
            return run_wide(n, self.wide.__getitem__, made)
        return tree_map(widened, made)
