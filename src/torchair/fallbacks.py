"""Fallbacks: what the compiler did in a lesser way than it should have. Each is counted in
``torch._dynamo.utils.counters["torchair"]``, kept for ``torchair.explain``, reported once
per process, and an error under ``config.debug.strict``. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchair.errors import FallbackError
from torchair.flags import strict_by_environment
from torchair.locks import Lock
from torchair.log import logger, warn_once
from torchair.torch_private.dynamo import loaded_utils

COUNTERS = "torchair"
"""Name of our counters in ``torch._dynamo.utils.counters``."""

_PREFIX = "fallback_"  # of their keys
_KEPT = 1000  # records; the counters know all


class Fallback(Enum):
    """What was given up: the name of its counter, and whether that is a failure. A decline by
    design is counted, and no error under ``strict``."""

    CONVERTER = "converter", True, "a converter crashed: torch's kernel runs the operator"
    GENERIC_NODE = "generic_node", False, "an operator has no converter: torch's kernel runs it"
    TRACING = "tracing", False, "torch traces an operator wrongly: torch's kernel runs it"
    SHAPE_FORMULA = "shape_formula", False, "an operator has no shape formula"
    FX_PASS = "fx_pass", True, "a pass crashed: it is undone"
    CONSTANT_FOLDING = "constant_folding", True, "a constant could not be computed ahead"
    REFUSED_CONSTANT = "refused_constant", False, "an operator refuses constants: so it will later"
    SHAPE_POLYMORPHIC_PLAN = "shape_polymorphic_plan", True, "each size is planned by itself"
    FIXED_PLAN = "fixed_plan", False, "a graph cannot have one plan for all sizes"
    KERNEL = "kernel", True, "a kernel could not be generated or compiled: torch's kernels run"
    NATIVE_CODE = "native_code", True, "there is no native code: torch's kernels run"
    NATIVE_GUARD = "native_guard", False, "arguments are checked in Python: untested versions"
    CAPTURE = "capture", False, "a graph cannot be captured: it runs without capture"
    RECORDED_CALLS = "recorded_calls", True, "a graph is recorded call by call"
    REPLAY_COPIES = "replay_copies", False, "a replay copies arguments and results"
    CAPTURE_LIMIT = "capture_limit", False, "too many sizes: a graph runs without capture"
    TUNING = "tuning", True, "a tuning trial failed"
    TUNING_DIFFERS = "tuning_differs", False, "a kernel that differs by more than rounding loses"
    UNPACKED_WEIGHTS = "unpacked_weights", False, "weights change too often to be packed"
    ORACLE = "oracle", True, "verify judges a node by eager: its own oracle crashed"
    NO_ORACLE = "no_oracle", False, "verify judges a node by eager: torch has no wider kernel"
    VERIFY = "verify", True, "verify could not look at a call"
    INSPECTION = "inspection", True, "a graph could not be timed or reported on"
    EXPORT_STRUCTURE = "export_structure", False, "an exported model returns its results as a tuple"
    CACHE_FILE = "cache_file", False, "a file was broken or could not be written"

    def __init__(self, counter: str, fails: bool, lost: str) -> None:
        self.counter = _PREFIX + counter
        self.fails = fails
        self.lost = lost


@dataclass(frozen=True)
class FallbackRecord:
    """One fallback: its kind, what it was about, and the error behind it."""

    kind: Fallback
    what: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.reason})" if self.reason else self.what


_strict: ContextVar[bool] = ContextVar("torchair_strict", default=False)
_records: deque[FallbackRecord] = deque(maxlen=_KEPT)
_noted = 0  # records so far, those forgotten too
_early: Counter[str] = Counter()  # counts from before Dynamo was loaded
_lock = Lock()


@contextmanager
def strictness(strict: bool) -> Iterator[None]:
    """Failures inside are errors if this is so; the environment may ask for that everywhere."""
    token = _strict.set(strict)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Whether a failure is an error here and now."""
    return _strict.get() or strict_by_environment()


def note(kind: Fallback, what: str, error: BaseException | None = None) -> None:
    """Take note of a fallback; FallbackError where that is a failure and ``strict`` is on. An error
    that ``strict`` raised further down goes on."""
    if isinstance(error, FallbackError):
        raise error
    reason = "" if error is None else f"{type(error).__name__}: {_first_line(error)}"
    record = FallbackRecord(kind, what, reason)
    _count(record)
    if not kind.fails:
        logger.info("%s", record)
        return
    if is_strict():
        raise FallbackError(
            f"{record}",
            kind=kind.counter.removeprefix(_PREFIX),
            lost=kind.lost,
            hint="report it; without config.debug.strict and TORCHAIR_STRICT it is a fallback",
        ) from error
    logger.warning("%s", record, exc_info=error)
    warn_once(
        f"{record}. Results are right and may be slower: {kind.lost}. Later fallbacks do not warn: "
        "torchair.explain(model)(...) lists them, torch._dynamo.utils.counters['torchair'] counts "
        "them, torchair.logger shows them at level WARNING, config.debug.strict makes them errors",
        stacklevel=3,
        key="fallback",
    )


def _count(record: FallbackRecord) -> None:
    global _noted
    with _lock:
        _noted += 1
        _records.append(record)
        dynamo = loaded_utils()
        counters = getattr(dynamo, "counters", None)  # None while that is being imported
        (_early if counters is None else counters[COUNTERS])[record.kind.counter] += 1


def hand_over(dynamo: Any) -> None:
    """Add what was counted before Dynamo was loaded to its counters."""
    with _lock:
        if _early:
            dynamo.counters[COUNTERS].update(_early)
            _early.clear()


def total() -> int:
    """How many fallbacks there were in this process."""
    return _noted


def since(number: int) -> Counter[FallbackRecord]:
    """Fallbacks after the first ``number`` of this process, each with how often it was taken."""
    with _lock:
        new = min(_noted - number, len(_records))
        return Counter(list(_records)[len(_records) - new :])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
