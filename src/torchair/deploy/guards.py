"""Guards of a call without Dynamo: what flat arguments must be, compared in one native call.

A spec is data that may be stored. The native comparison is for sizes that came before, each set of
them has a native guard of its own; a new set is compared in Python, with the message if it does not
fit. Conditions on sizes may come from a file: they are read into steps over known operators, and
never executed as code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torchair.engine.run.frozen import ANY, EqualValue, TensorLike, argument_guard
from torchair.errors import InputError, TorchairError
from torchair.runner import GmRunner
from torchair.torch_private import pytree
from torchair.torch_private.dispatch import is_functorch_wrapped_tensor
from torchair.torch_private.forward_ad import computes_tangents, has_tangent

# ---- conditions: `s0 >= 2 and s0 % 8 == 0` ----


_HIGHEST = 16  # power of an integer: a text may come from a file


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is int and type(exponent) is int and 0 <= exponent <= _HIGHEST:
        return base**exponent
    return math.pow(base, exponent)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.Pow: _power,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_CALLS: dict[str, Callable[..., Any]] = {
    "max": max, "min": min, "abs": abs, "round": round, "torch.sym_float": float,
    "torch._sym_sqrt": math.sqrt, "math.floor": math.floor, "math.ceil": math.ceil,
    "math.trunc": math.trunc,
}  # fmt: skip
"""Functions by the names that tracing writes."""
_BOOL: dict[type, Callable[..., Any]] = {
    ast.And: lambda *values: all(values),
    ast.Or: lambda *values: any(values),
}


class Condition:
    """An expression over named sizes. ValueError for a text that holds anything else."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as e:
            raise ValueError(f"not a condition on sizes: {text!r}") from e
        self._steps = self._flat(tree)
        self.names = {value for value, count in self._steps if count < 0}

    def _flat(self, tree: ast.expr) -> list[tuple[Any, int]]:
        """Constants (count 0), names (-1) and functions of `count` values, in postfix order."""
        steps: list[tuple[Any, int]] = []
        stack: list[ast.expr] = [tree]
        while stack:  # a node before its operands, from the right; reversed, that is postfix
            step, operands = self._read(stack.pop())
            steps.append(step)
            stack += operands
        return steps[::-1]

    def _read(self, node: ast.expr) -> tuple[tuple[Any, int], list[ast.expr]]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            return (node.value, 0), []
        if isinstance(node, ast.Name):
            return (node.id, -1), []
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return (_BINARY[type(node.op)], 2), [node.left, node.right]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
            return (_BINARY[type(node.ops[0])], 2), [node.left, node.comparators[0]]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return (_UNARY[type(node.op)], 1), [node.operand]
        if isinstance(node, ast.BoolOp):
            return (_BOOL[type(node.op)], len(node.values)), list(node.values)
        if isinstance(node, ast.Call):
            called = _CALLS.get(ast.unparse(node.func))
            if called is not None and node.args and not node.keywords:
                return (called, len(node.args)), list(node.args)
        raise ValueError(f"not a condition on sizes: {self.text!r}")

    def value(self, sizes: Mapping[str, int]) -> Any:
        """What the expression comes to."""
        stack: list[Any] = []
        for what, count in self._steps:
            if count < 0:
                stack.append(sizes[what])
            elif count == 0:
                stack.append(what)
            else:
                operands = stack[-count:]
                del stack[-count:]
                stack.append(what(*operands))
        return stack[0]


_MOST_CHECKS = 16  # sets of sizes that are compared natively

GuardValue = bool | int | float | str | None


@dataclass(frozen=True)
class Expected:
    """A tensor that a call expects. A dim is a size or the name of one; equal names, equal sizes.

    `strides` holds None where a stride follows from dims (`order`: of dense dims, the outermost
    first) or says nothing (dims of size 1)."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    strides: tuple[int | None, ...]
    order: tuple[int, ...] | None = None
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, t: torch.Tensor, symbols: Mapping[int, str] | None = None) -> Expected:
        """What a tensor is; `symbols` names dims that may vary."""
        named = symbols or {}
        dims = tuple(named.get(i, n) for i, n in enumerate(t.shape))
        order = None
        strides: list[int | None] = [
            None if n == 1 and i not in named else s
            for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True))
        ]
        if named:
            order = _dense_order(t)
            if order is not None:
                strides = [None] * t.dim()
        return cls(name, _dtype_name(t.dtype), dims, tuple(strides), order, str(t.device))

    def problem(self, t: Any, sizes: dict[str, int]) -> tuple[str, str] | None:
        """What was expected and what has come, None if it fits. Notes `sizes` by name."""
        if not isinstance(t, torch.Tensor):
            return "a tensor", "None" if t is None else f"a {type(t).__name__}"
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            return "a plain tensor", f"a {type(t).__name__}"
        if is_functorch_wrapped_tensor(t):
            return "a plain tensor", "one that a transform of torch.func has made"
        if has_tangent(t):
            return "a tensor without tangent", "one of forward-mode differentiation"
        if t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return "a dense tensor without pending conjugation", f"{t.layout}"
        if t._is_zerotensor():
            return "a tensor with memory", "zeros of autograd that have none"
        if str(t.device) != self.device:
            return f"a tensor on {self.device}", f"one on {t.device}"
        if _dtype_name(t.dtype) != self.dtype:
            return f"type {self.dtype}", _dtype_name(t.dtype)
        if not self._same_dims(t, sizes):
            known = [f"{d}={sizes[d]}" if d in sizes else d for d in self.dims]
            return f"dims [{', '.join(map(str, known))}]", f"{list(t.shape)}"
        wanted = self.strides_for(t.shape)
        if any(w is not None and w != s for w, s in zip(wanted, t.stride(), strict=True)):
            return f"strides {['any' if w is None else w for w in wanted]}", f"{list(t.stride())}"
        if t.requires_grad and torch.is_grad_enabled():
            return "a tensor that needs no gradient, or torch.no_grad()", "requires_grad=True"
        return None

    def _same_dims(self, t: torch.Tensor, sizes: dict[str, int]) -> bool:
        if len(self.dims) != t.dim():
            return False
        return all(
            n == (sizes.setdefault(d, n) if isinstance(d, str) else d)
            for d, n in zip(self.dims, t.shape, strict=True)
        )

    def strides_for(self, shape: Sequence[int]) -> list[int | None]:
        """Strides for dims, None where they do not matter."""
        wanted = list(self.strides)
        if self.order is not None:
            step = 1
            for i in reversed(self.order):
                wanted[i] = step
                step *= max(shape[i], 1)
        return [None if n == 1 else s for n, s in zip(shape, wanted, strict=True)]


@dataclass(frozen=True)
class ValueSpec:
    """A number, a text or None that a call expects; it is part of the compiled code."""

    name: str
    value: GuardValue

    def problem(self, given: Any, sizes: dict[str, int]) -> tuple[str, str] | None:
        """As for tensors."""
        if type(given) is type(self.value) and repr(given) == repr(self.value):
            return None
        shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
        return repr(self.value), shown


@dataclass(frozen=True)
class NumberSpec:
    """An integer that may vary; `symbol` is its name in conditions."""

    name: str
    symbol: str

    def problem(self, given: Any, sizes: dict[str, int]) -> tuple[str, str] | None:
        """As for tensors."""
        if type(given) is not int:
            return "an integer", "a tensor" if isinstance(given, torch.Tensor) else repr(given)
        known = sizes.setdefault(self.symbol, given)
        return None if known == given else (f"{self.symbol}={known}", repr(given))


Spec = Expected | ValueSpec | NumberSpec


def mismatch(name: str, made: str, index: int, found: tuple[Any, Any]) -> InputError:
    """An argument that is not what something was `made` for: expected, and got."""
    expected, got = found
    text = f"the argument {name} is not what {made} for"
    return InputError(text, index=index, name=name, expected=expected, got=got)


class Guards:
    """What a compiled call expects of its flat arguments."""

    def __init__(self, specs: Sequence[Spec], conditions: Sequence[str] = ()) -> None:
        """`conditions` are texts over the named sizes."""
        self.specs = tuple(specs)
        self.conditions = tuple(Condition(text) for text in conditions)
        named = {d for s in self.specs for d in _named(s)}
        for c in self.conditions:
            if not c.names <= named:
                raise ValueError(f"a condition names sizes that no argument has: {c.text}")
        self._checks: list[Callable[..., bool | None]] = []

    def check(self, args: Sequence[Any]) -> bool:
        """Whether the arguments are as expected."""
        if computes_tangents():  # native code does not see them
            return self.mismatch(args) is None
        checks = self._checks
        for k, check in enumerate(checks):
            if check(*args):
                if k:
                    checks.insert(0, checks.pop(k))
                return True
        if self.mismatch(args) is not None:
            return False
        made = argument_guard(len(self.specs), self.records(args))
        if made is not None:
            self._checks = [made, *checks][:_MOST_CHECKS]
        return True

    def records(self, args: Sequence[Any]) -> list[TensorLike | EqualValue]:
        """The native comparison with arguments that fit."""
        found: list[TensorLike | EqualValue] = []
        for k, (spec, t) in enumerate(zip(self.specs, args, strict=True)):
            if isinstance(spec, Expected):
                strides = tuple(ANY if s is None else s for s in spec.strides_for(t.shape))
                found.append(TensorLike(k, t, tuple(t.shape), strides))
            else:
                found.append(EqualValue(k, spec.value if isinstance(spec, ValueSpec) else t))
        return found

    def mismatch(self, args: Sequence[Any]) -> InputError | None:
        """The error that tells the first difference, None if there is none."""
        if len(args) != len(self.specs):
            return InputError("wrong number of arguments", expected=len(self.specs), got=len(args))
        sizes: dict[str, int] = {}
        for k, (spec, given) in enumerate(zip(self.specs, args, strict=True)):
            found = spec.problem(given, sizes)
            if found is not None:
                return mismatch(spec.name, "the call was compiled", k, found)
        for condition in self.conditions:
            if not condition.value(sizes):
                used = {n: sizes[n] for n in sorted(condition.names)}
                places = [f"{n} is {self._where(n)}" for n in used]
                return InputError(
                    f"the call was compiled for sizes with {condition.text} ({', '.join(places)})",
                    name=self._where(min(used)) if used else None,
                    expected=condition.text,
                    got=", ".join(f"{n} = {v}" for n, v in used.items()),
                )
        return None

    def _where(self, name: str) -> str:
        spec = next(s for s in self.specs if name in _named(s))
        dim = f"dim {spec.dims.index(name)} of " if isinstance(spec, Expected) else ""
        return f"{dim}{spec.name}"

    def to_data(self) -> dict[str, Any]:
        """Numbers and texts that `from_data` makes the same guards of."""
        return {
            "specs": [{"kind": type(s).__name__, **asdict(s)} for s in self.specs],
            "conditions": [c.text for c in self.conditions],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Guards:
        """Guards from what `to_data` gave. ValueError where that is something else."""
        try:
            specs = [_spec_of(dict(s)) for s in data["specs"]]
            conditions = list(data["conditions"])
        except (KeyError, TypeError) as e:
            raise ValueError(f"these are no guards: {e}") from e
        return cls(specs, conditions)


def _named(spec: Spec) -> tuple[int | str, ...]:
    """Sizes that conditions may be on."""
    if isinstance(spec, NumberSpec):
        return (spec.symbol,)
    return spec.dims if isinstance(spec, Expected) else ()


def _spec_of(data: dict[str, Any]) -> Spec:
    kinds: dict[str, Any] = {c.__name__: c for c in (Expected, ValueSpec, NumberSpec)}
    kind = kinds[data.pop("kind")]
    spec: Spec = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
    if isinstance(spec, Expected):
        right = len(spec.dims) == len(spec.strides)
        right &= all(type(d) in (int, str) for d in spec.dims)
        right &= spec.order is None or sorted(spec.order) == list(range(len(spec.dims)))
        if not right or not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ValueError(f"not a specification of a tensor: {spec}")
    return spec


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense_order(t: torch.Tensor) -> tuple[int, ...] | None:
    """Dims of a dense tensor, the outermost first; None for one with gaps or overlaps."""
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda i: (-strides[i], i))
    step = 1
    for i in reversed(order):
        if t.shape[i] != 1 and strides[i] != step:
            return None
        step *= max(t.shape[i], 1)
    return tuple(order)


# ---- what tracing a model gives ----


class TraceError(TorchairError, RuntimeError):
    """A model cannot be traced without its data."""


@dataclass
class TracedGraph:
    """A compiled graph with what its calls must be."""

    runner: GmRunner | None
    """The graph itself, where nothing is left to do around it."""
    wrapped: Callable[..., Any]
    """The graph with AOTAutograd's wrapper around it."""
    specs: list[Spec]
    conditions: list[str]
    tensors: list[int]
    """The arguments that are tensors; the others are constants."""
    result: pytree.TreeSpec = None  # type: ignore[assignment]
    constants: dict[int, Any] = field(default_factory=dict)
    """Leaves of the result that are no tensors."""
    written: frozenset[int] = frozenset()
    """Arguments of the graph that a call updates: tensors of the model come first."""
    unread: frozenset[int] = frozenset()
    """Tensors of the model that the graph does not read, by their number."""
    graph: GmRunner | None = None
    """The graph, whatever is left to do around it."""
