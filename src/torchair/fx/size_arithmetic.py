"""Arithmetic of symbolic sizes that is done once for each pair of expressions.

While a graph is traced each fake tensor asks whether it is contiguous, how many elements it has and
whether its elements overlap: some fifty sums, products and comparisons of its sizes, each in Python
and in sympy. A model of equal layers asks the same again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any

from torchair.locks import Lock, in_child
from torchair.torch_private.symbols import SymNode, get_proxy_mode

OPERATIONS = (
    "_add", "_sub", "_mul", "_eq", "_ne", "_gt", "_lt", "_le", "_ge", "_and_", "_or_", "_sym_max",
    "_sym_min",
)  # fmt: skip
"""Methods of a symbolic number whose result follows from the two expressions alone."""
SizeMethod = Callable[[Any, Any], Any]

_lock = Lock()
_inside = 0  # calls of `remembered_sizes`, of all threads
_originals: dict[str, SizeMethod] = {}
_numbers = frozenset((int, bool))


class _TracingState(local):
    """Whether this thread computes a number that is traced into a graph."""

    inside = False


_traced = _TracingState()


@contextmanager
def remembered_sizes() -> Iterator[None]:
    """Inside, equal operations on equal expressions of a tracing give the same symbolic number."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore()


def _install() -> None:
    for name in OPERATIONS:
        original = getattr(SymNode, name, None)
        if original is not None:
            _originals[name] = original
            setattr(SymNode, name, _remembering(original))


def _restore() -> None:
    for name, original in _originals.items():
        setattr(SymNode, name, original)
    _originals.clear()


def _remembering(compute: SizeMethod) -> SizeMethod:
    known: dict[tuple[Any, ...], Any] = {}

    @wraps(compute)
    def operation(self: Any, other: Any) -> Any:
        if get_proxy_mode():
            return _separately(compute, self, other)
        a, b, env = self.hint, other.hint, self.shape_env
        # Sizes that only running tells have no hint.
        if type(a) not in _numbers or type(b) not in _numbers or env is None or _traced.inside:
            return compute(self, other)
        key = id(env), self.pytype, other.pytype, a, b, self.expr, other.expr
        found = known.get(key)
        if found is None:
            found = known[key] = compute(self, other)  # which keeps `env`, and so its id
        return found

    return operation


def _separately(compute: SizeMethod, a: Any, b: Any) -> Any:
    """What is traced into a graph is a number of its own: the graph would have nodes for equal ones
    that others use."""
    before, _traced.inside = _traced.inside, True
    try:
        return compute(a, b)
    finally:
        _traced.inside = before


@in_child
def _forget() -> None:
    """Other threads that were inside do not exist any more."""
    global _inside
    if _inside:
        _inside = 0
        _restore()
