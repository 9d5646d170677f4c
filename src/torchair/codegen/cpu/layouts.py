"""What native code relies on beyond documented interfaces: where objects of Python and tensors of
torch have their fields, and symbols of torch's libraries. On only for tested versions, and only
after a self-test in this process; without it everything is done in Python.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from torchair.codegen.llvm import address
from torchair.fallbacks import Fallback, note
from torchair.flags import layout_probes
from torchair.log import warn_once
from torchair.process import has_interpreter_lock
from torchair.torch_private.c_symbols import SYMBOLS, dtype_code
from torchair.torch_private.dispatch import dispatch_keys

TESTED: frozenset[tuple[str, str]] = frozenset({("2.11", "3.12"), ("2.13", "3.11")})
"""Versions of torch and Python whose self-test and test suite passed. Add a row after
`python -m pytest tests/unit/test_layouts.py` has passed with these versions."""

_TESTED_ON = ("Linux", "x86_64")

CLASS = 8
"""Where an object has its class, in bytes."""

PAYLOAD = 16
"""Where a float has its number, and an array of ctypes the address of its memory."""

PYTHON = {
    "keep": "Py_IncRef",
    "release": "Py_DecRef",
    "dict.get": "PyDict_GetItem",
    "equal": "PyObject_RichCompareBool",
    "save": "PyEval_SaveThread",
    "restore": "PyEval_RestoreThread",
    "size.of": "PySequence_Size",
    "item": "PySequence_GetItem",
}


def versions() -> tuple[str, str]:
    """Torch and Python of this process, without their last numbers."""
    return ".".join(torch.__version__.split(".")[:2]), "{}.{}".format(*sys.version_info)


def refusal() -> str | None:
    """Why native code must not read objects in this process; None if it may."""
    wanted = layout_probes()
    if wanted is False:
        return "TORCHAIR_LAYOUT_PROBES is off"
    if not has_interpreter_lock():
        return "this Python has no global interpreter lock"
    if wanted is None and (platform.system(), platform.machine()) != _TESTED_ON:
        return f"{platform.system()} on {platform.machine()} was not tested"
    if wanted is None and versions() not in TESTED:
        return "torch {} with Python {} was not tested".format(*versions())
    return self_test()


def known() -> dict[str, int] | None:
    """Addresses of functions and places in objects by their names; None where they are not to be
    relied on, which is told once."""
    reason = refusal()
    if reason is None:
        return _found()
    if layout_probes() is not False and reason not in _warned:
        _warned.add(reason)
        note(Fallback.NATIVE_GUARD, f"arguments of calls are checked in Python: {reason}")
        warn_once(
            f"{reason}: arguments are checked in Python, which costs some microseconds a call. "
            "TORCHAIR_LAYOUT_PROBES=1 uses native code at your own risk, =0 ends this warning"
        )
    return None


_warned: set[str] = set()


@cache
def _found() -> dict[str, int] | None:
    inside, keys = inside_of_tensors(), place_of_keys()
    if inside is None or keys is None:
        return None
    found: dict[str, int] = {"inside": inside, **keys}
    try:
        found |= {n: address(symbol.found()) for n, symbol in SYMBOLS.items()}
        found |= {n: address(ctypes.pythonapi[symbol]) for n, symbol in PYTHON.items()}
    except (OSError, AttributeError):
        return None
    return found


@cache
def inside_of_tensors() -> int | None:
    """Where an object of class Tensor has its tensor, in bytes; None if that is not clear."""
    probe = torch.ones(3)
    words = torch.Tensor.__basicsize__ // 8
    inner = (ctypes.c_int64 * words).from_address(id(probe))
    places = [8 * k for k in range(2, words) if inner[k] == probe._cdata]
    return places[0] if len(places) == 1 else None


@cache
def place_of_keys() -> dict[str, int] | None:
    """Where a tensor's implementation has its dispatch keys, in bytes, and which of them count:
    not those that tell inference tensors from others."""
    with torch.inference_mode(False):
        plain = torch.ones(2, 3)
        conjugate = torch.ones(2, dtype=torch.complex64).conj()
    with torch.inference_mode():
        inference = torch.ones(2, 3)
    places = []
    for probe in (plain, conjugate, inference):
        words = (ctypes.c_uint64 * 25).from_address(probe._cdata)
        raw = _keys_of(probe)
        places.append({8 * k for k in range(25) if words[k] == raw})
    common = set.intersection(*places)
    if len(common) != 1:
        return None
    differ = _keys_of(plain) ^ _keys_of(inference)
    return {"keys.at": common.pop(), "mask": signed(~differ & (2**64 - 1))}


def _keys_of(tensor: torch.Tensor) -> int:
    return dispatch_keys(tensor).raw_repr()


def signed(word: int) -> int:
    """The same 64 bits as a number that may be negative."""
    return word - 2**64 if word >= 2**63 else word


# ---- the self-test: all that is relied on, tried on tensors of many kinds ----


@cache
def self_test() -> str | None:
    """What is not as native code expects it, None if all is."""
    found = _found()
    if found is None:
        return "torch or Python have other fields or symbols than expected"
    with torch.inference_mode(False), torch.enable_grad():
        for name, probe in _probes():
            wrong = next((w for w, holds in _checks(found, probe) if not holds()), None)
            if wrong is not None:
                return f"the self-test failed: {wrong} of {name}"
        if not _grad_mode_is_seen(found):
            return "the self-test failed: the gradient mode"
    return None


def _probes() -> Iterator[tuple[str, torch.Tensor]]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    yield "a tensor", base
    yield "a number", torch.tensor(3)
    yield "a view", base[1:, :, ::2].mT
    yield "a parameter", torch.nn.Parameter(torch.ones(5))
    yield "a result with gradient", torch.ones(2, 2, requires_grad=True) * 2
    yield "a written tensor", torch.ones(3, dtype=torch.bfloat16).add_(1).mul_(2)
    yield "an empty tensor", torch.empty(0, 7, dtype=torch.bool)
    yield "a conjugate", torch.ones(2, dtype=torch.complex64).conj()
    yield "eight dims", torch.ones(1, 2, 1, 2, 1, 2, 1, 2, dtype=torch.int8)


def _checks(found: dict[str, int], probe: torch.Tensor) -> list[tuple[str, Callable[[], bool]]]:
    """What is asked of a tensor in native code, beside what torch says."""
    handle = id(probe) + found["inside"]
    impl = ctypes.c_int64.from_address(handle).value

    def asked(name: str, kind: Any) -> Any:
        result = kind()
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(found[name])
        return None if function(handle, ctypes.addressof(result)) else result.value

    def dims(name: str) -> tuple[int, ...]:
        place = asked(name, ctypes.c_void_p)
        return tuple((ctypes.c_int64 * probe.dim()).from_address(place)) if probe.dim() else ()

    def called_with(name: str, kind: Any, place: int) -> Any:
        return ctypes.CFUNCTYPE(kind, ctypes.c_void_p)(found[name])(place)

    array, number = (ctypes.c_int64 * 2)(), 0.1
    return [
        ("the implementation", lambda: impl == probe._cdata),
        ("the class", lambda: _word(id(probe) + CLASS) == id(type(probe))),
        ("the dispatch keys", lambda: _word(impl + found["keys.at"]) == signed(_keys_of(probe))),
        ("the address", lambda: (asked("address.of", ctypes.c_void_p) or 0) == probe.data_ptr()),
        ("the number of dims", lambda: asked("rank.of", ctypes.c_int64) == probe.dim()),
        ("the device", lambda: asked("index.of", ctypes.c_int32) in (-1, 0)),
        ("the type", lambda: asked("type.of", ctypes.c_int32) == type_code(probe.dtype)),
        ("the sizes", lambda: dims("sizes.of") == tuple(probe.shape)),
        ("the strides", lambda: dims("strides.of") == probe.stride()),
        (
            "the version",
            lambda: called_with("version.of", ctypes.c_int64, handle) == probe._version,
        ),
        (
            "the gradient",
            lambda: called_with("needs.grad", ctypes.c_bool, impl) == probe.requires_grad,
        ),
        ("an array", lambda: _word(id(array) + PAYLOAD) == ctypes.addressof(array)),
        ("a float", lambda: ctypes.c_double.from_address(id(number) + PAYLOAD).value == number),
    ]


def _word(place: int) -> int:
    return ctypes.c_int64.from_address(place).value


def _grad_mode_is_seen(found: dict[str, int]) -> bool:
    enabled = ctypes.CFUNCTYPE(ctypes.c_bool)(found["grad.mode"])
    with torch.no_grad():
        off = enabled()
    return enabled() and not off


@cache
def type_code(dtype: torch.dtype) -> int:
    """Torch's own number of a type."""
    code = dtype_code(str(dtype).removeprefix("torch."))
    if code is not None:
        return code
    found, probe = ctypes.c_int32(), torch.empty(0, dtype=dtype)
    handle = ctypes.c_void_p(id(probe) + (inside_of_tensors() or 0))
    SYMBOLS["type.of"].found()(handle, ctypes.byref(found))
    return found.value
