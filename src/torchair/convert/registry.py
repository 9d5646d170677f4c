"""Which function turns which FX target into GE nodes: registration, and what converters share.

User registrations win over built-in ones, whichever was made first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pkgutil import resolve_name
from typing import Any

from torchair.extensions import load
from torchair.torch_private.dispatch import OpOverload


class Decline(Exception):
    """Raised by a converter for arguments it does not cover; the generic node takes over."""


ASKED = frozenset({"meta_outputs", "meta_inputs", "meta_keywords", "views", "reads"})
"""What a converter gets if it has such a parameter: what tracing saw of the results, the fake
arguments with their strides, those given by name, the folder that makes pending views (which it
then takes as well), and the numbers of the results that are read."""


@dataclass(frozen=True)
class Registration:
    """A registered converter."""

    fn: Callable[..., Any]
    wants: frozenset[str]  # parameters it has among `ASKED`
    by_user: bool
    file: str  # where it is registered, if it is our own, else where it is written
    line: int


_Overload = OpOverload
_user: dict[Any, Registration] = {}
_lite: set[Any] = set()  # operators whose converter of the user stays
_builtin: dict[Any, Registration] = {}


def entry_of(
    fn: Callable[..., Any], by_user: bool, place: tuple[str, int] | None = None
) -> Registration:
    """A converter with what its parameters ask for."""
    wants = ASKED & inspect.signature(fn).parameters.keys()
    code = getattr(fn, "__code__", None)
    file, line = place or ((code.co_filename, code.co_firstlineno) if code else ("", 0))
    return Registration(fn, wants, by_user, file, line)


class Converter:
    """Decorator that registers a converter for one operator when the function is defined."""

    compile_backend: Any = None  # with these two a script checks samples by itself
    result_checker: Any = None

    def __init__(self, aten_op: Any, is_lite: bool = False) -> None:
        """One that `is_lite` is not replaced by a later one that is not."""
        self._aten_op = aten_op
        self._is_lite_converter = is_lite
        self.samples: list[Any] = []  # calls that it is declared to support

    @property
    def _signature(self) -> inspect.Signature:
        """Parameters of the operator, under the name that the original has for them."""
        return inspect.signature(self._aten_op)

    @property
    def supported_cases(self) -> list[Any] | None:
        """The samples, None where none are declared."""
        return self.samples or None

    @supported_cases.setter
    def supported_cases(self, samples: list[Any]) -> None:
        self.samples = samples

    def __call__(self, converter: Callable[..., Any]) -> Converter:
        if self._aten_op in _lite and not self._is_lite_converter:
            return self
        if self._is_lite_converter:
            _lite.add(self._aten_op)
        _user[self._aten_op] = entry_of(converter, by_user=True)
        _show_on(self._aten_op)
        return self

    def check(self) -> list[str]:
        """Try the samples that were declared; what went wrong, none if all give torch's result."""
        found = (sample.check(self._aten_op) for sample in self.samples)
        return [problem for problem in found if problem is not None]


class RegisteredConverter:
    """Stands on an operator, as `_ge_converter`, for the converter that is registered for it.
    Another one put in its place is used instead."""

    is_registered = True

    def __init__(self, op: Any) -> None:
        self._op = op

    @property
    def _entry(self) -> Registration:
        entry = registered_for(self._op)
        assert entry is not None, f"{self._op} has no converter"
        return entry

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._entry.fn

    @property
    def require_meta(self) -> bool:
        """Whether it asks for what tracing saw of the results."""
        return "meta_outputs" in self._entry.wants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry.fn(*args, **kwargs)


def _show_on(target: Any) -> None:
    """Let a torch operator show its converter, unless a user has put one there."""
    if isinstance(target, _Overload) and not hasattr(target, "_ge_converter"):
        setattr(target, "_ge_converter", RegisteredConverter(target))  # noqa: B010


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a converter from a torch operator to GE nodes; a later registration overrides.

    The function gets the operator's arguments with tensors replaced by `ge.Tensor`, and the
    expected results as `meta_outputs` if it has such a parameter. `None` drops the function.
    """
    if aten_op is None:
        return lambda converter: None
    return Converter(aten_op)


def unregister(aten_op: Any) -> None:
    """Forget a user registration; the built-in converter, if any, is back."""
    _user.pop(aten_op, None)
    _lite.discard(aten_op)
    shown = getattr(aten_op, "__dict__", {}).get("_ge_converter")
    if isinstance(shown, RegisteredConverter) and registered_for(aten_op) is None:
        del aten_op._ge_converter


def builtin(
    *targets: Any, depth: int = 1, filled: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a converter of our own for one or more FX targets; None targets are ignored. It gets
    those arguments of a torch operator that it has parameters for, by name, with torch's defaults;
    for `**` the others too, if they are given or all are `filled`. An operator of a library that
    may be loaded later is given by its name. `depth` says how many calls up its file is."""
    caller = sys._getframe(depth)
    place = (caller.f_code.co_filename, caller.f_lineno)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in dict.fromkeys(targets):
            if target is not None:
                assert target not in _builtin, f"two converters for {target}"
                _builtin[target] = entry_of(_by_parameters(fn, target, filled), False, place)
                _show_on(target)
        return fn

    return register


def _by_parameters(fn: Callable[..., Any], target: Any, filled: bool) -> Callable[..., Any]:
    """A function of all arguments of a torch operator from one that names those it needs."""
    parameters = inspect.signature(fn).parameters
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or not isinstance(target, (str, _Overload)):
        return fn
    others = inspect.Parameter.VAR_KEYWORD in kinds
    needed = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}

    @wraps(fn)
    def convert(*args: Any, **kwargs: Any) -> Any:
        known = bound(schema_of(target), args, kwargs, None if filled else needed)
        return fn(**{n: v for n, v in known.items() if others or n in parameters})

    return convert


def find(target: Any) -> Registration | None:
    """The converter of an FX target. One that a user has put on the operator itself, as
    `_ge_converter`, wins over all that are registered."""
    put = getattr(target, "__dict__", {}).get("_ge_converter")
    if put is not None and not getattr(put, "is_registered", False):
        return entry_of(put, by_user=True)
    return registered_for(target)


def registered_for(target: Any) -> Registration | None:
    """The converter that is registered for an FX target."""
    return _user.get(target) or _builtin_for(target)


_EXTENDED = ("air", "atb", "npu")
"""Libraries of torch that an extension has converters for."""


def _builtin_for(target: Any) -> Registration | None:
    found = _builtin.get(target) or _builtin.get(str(target))
    if found is None and str(target).partition(".")[0] in _EXTENDED:
        load("converters")
        found = _builtin.get(str(target))
    return found


def registered() -> dict[Any, Registration]:
    """All converters, user ones on top, with those of extensions."""
    load("converters")
    return _builtin | _user


@cache
def schema_of(target: Any) -> Any:
    """The schema of an operator, which may be given by its name."""
    return (resolve_name(f"torch:ops.{target}") if isinstance(target, str) else target)._schema


def bound(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], needed: set[str] | None = None
) -> dict[str, Any]:
    """The arguments of a call by name; those left out have their default, None without one, if they
    are among the `needed`."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False))
    wanted = [a for a in schema.arguments if needed is None or a.name in needed]
    return {a.name: a.default_value for a in wanted} | given | dict(kwargs)
