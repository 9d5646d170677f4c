"""Memory figures of a device, under the names that scripts know from accelerators."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

from torchair.emulate.memory import METERS, Meter
from torchair.emulate.state import STATE


def _meter(device: Any) -> Meter:
    return METERS[STATE.index_of(device)]


def memory_allocated(device: Any = None) -> int:
    """Bytes of living tensors."""
    return _meter(device).allocated


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were in use at a time."""
    return _meter(device).most_allocated


def memory_reserved(device: Any = None) -> int:
    """Bytes in use, or freed since and not given back."""
    return _meter(device).reserved


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes that were reserved at a time."""
    return _meter(device).most_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    """Measure peaks from now on."""
    _meter(device).reset_peaks()


def empty_cache() -> None:
    """Give reserved memory back that is not in use."""
    for meter in METERS:
        meter.release()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes free and bytes in all: those of the host."""
    STATE.index_of(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The figures by name, as far as they exist here."""
    meter = _meter(device)
    return OrderedDict(
        {
            "active_bytes.all.current": meter.allocated,
            "active_bytes.all.peak": meter.most_allocated,
            "allocated_bytes.all.current": meter.allocated,
            "allocated_bytes.all.peak": meter.most_allocated,
            "allocation.all.allocated": meter.allocations,
            "allocation.all.current": meter.pieces,
            "allocation.all.freed": meter.frees,
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "reserved_bytes.all.current": meter.reserved,
            "reserved_bytes.all.peak": meter.most_reserved,
        }
    )


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures as a table."""
    stats = memory_stats(device)
    width = max(map(len, stats))
    return "\n".join(f"{name:{width}} {value:>16,}" for name, value in stats.items())


FUNCTIONS = {
    f.__name__: f
    for f in (
        memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved,
        reset_peak_memory_stats, empty_cache, mem_get_info, memory_stats, memory_summary,
    )
}  # fmt: skip
