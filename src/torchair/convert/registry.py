"""Which function turns which FX target into GE nodes.

User registrations win over built-in ones, whichever was made first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Decline(Exception):
    """Raised by a converter for arguments it does not cover; the generic node takes over."""


@dataclass(frozen=True)
class Registration:
    """A registered converter."""

    fn: Callable[..., Any]
    wants_meta: bool  # has a parameter `meta_outputs`
    wants_inputs: bool  # has a parameter `meta_inputs`: the fake arguments, with their strides
    wants_keywords: bool  # has a parameter `meta_keywords`: the fake arguments given by name
    wants_views: bool  # has a parameter `views`: takes pending views and the folder that makes them
    wants_reads: bool  # has a parameter `reads`: the numbers of the results that somebody reads
    by_user: bool


_user: dict[Any, Registration] = {}
_builtin: dict[Any, Registration] = {}


def entry_of(fn: Callable[..., Any], by_user: bool) -> Registration:
    """A converter with what its parameters ask for."""
    names = inspect.signature(fn).parameters
    return Registration(
        fn,
        wants_meta="meta_outputs" in names,
        wants_inputs="meta_inputs" in names,
        wants_keywords="meta_keywords" in names,
        wants_views="views" in names,
        wants_reads="reads" in names,
        by_user=by_user,
    )


class Converter:
    """Decorator that registers a converter for one operator when the function is defined."""

    def __init__(self, aten_op: Any) -> None:
        self._aten_op = aten_op
        self.samples: list[Any] = []  # calls that it is declared to support

    def __call__(self, converter: Callable[..., Any]) -> Converter:
        _user[self._aten_op] = entry_of(converter, by_user=True)
        return self

    def check(self) -> list[str]:
        """Try the samples that were declared; what went wrong, none if all give torch's result."""
        found = (sample.check(self._aten_op) for sample in self.samples)
        return [problem for problem in found if problem is not None]


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


def builtin(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a converter of our own for one or more FX targets; None targets are ignored. An
    operator of a library that may be loaded later is given by its name."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in dict.fromkeys(targets):
            if target is not None:
                assert target not in _builtin, f"two converters for {target}"
                _builtin[target] = entry_of(fn, by_user=False)
        return fn

    return register


def find(target: Any) -> Registration | None:
    """The converter of an FX target. One that somebody has put on the operator itself, as
    `_ge_converter`, wins over all that are registered."""
    put = getattr(target, "__dict__", {}).get("_ge_converter")
    if put is not None and not getattr(put, "is_registered", False):
        return entry_of(put, by_user=True)
    return registered_for(target)


def registered_for(target: Any) -> Registration | None:
    """The converter that is registered for an FX target."""
    return _user.get(target) or _builtin.get(target) or _builtin.get(str(target))


def registered() -> dict[Any, Registration]:
    """All converters, user ones on top."""
    return _builtin | _user


_FUNCTIONAL = "writes to an argument; functionalisation leaves the pure operator in the graph"
_SYNC = "exists on accelerators only and reads batch statistics of other processes: torch's kernel"

LEFT_OUT: dict[str, str] = {
    "aten._fft_c2c.default": "GE has FFT without direction and norm, over one or two dims",
    "aten._native_batch_norm_legit.default": _FUNCTIONAL,
    "aten.batch_norm_backward_elemt.default": _SYNC,
    "aten.batch_norm_backward_reduce.default": _SYNC,
    "aten.batch_norm_elemt.default": _SYNC,
    "aten.bitwise_right_shift_.Tensor": _FUNCTIONAL,
    "aten.erfinv.out": _FUNCTIONAL,
    "aten.expm1.out": _FUNCTIONAL,
    "aten.log_sigmoid_backward.grad_input": _FUNCTIONAL,
    "aten.log_sigmoid_forward.output": _FUNCTIONAL,
    "aten.masked_fill_.Scalar": _FUNCTIONAL,
    "aten.matmul_backward.default": "torch has it for nested tensors only, others see matmuls",
    "aten.mish.out": _FUNCTIONAL,
    "aten.nan_to_num.out": _FUNCTIONAL,
    "higher_order.run_and_save_rng_state": "saves the state of torch's generator, by torch itself",
    "higher_order.run_with_rng_state": "replays with a state of torch's generator, by torch itself",
}
"""Operators of the documented table that go to the generic node on purpose, and why."""
