"""Stacks of Python functions with the time spent in each, as FlameGraph reads them."""

from __future__ import annotations

from collections import Counter

from torchair.emulate.profiles.events import Operator, Profile

STACK_METRICS = ("self_cpu_time_total", "self_npu_time_total")


def stacks(profile: Profile, metric: str) -> str:
    """A line for each stack, outermost function first: names, then whole microseconds."""
    times: Counter[str] = Counter()
    for operator in profile.operators:
        time = _time(operator, metric)
        if operator.stack and time >= 1:
            names = [name.replace(";", ":") for name in reversed(operator.stack)]
            times[";".join([*names, operator.name])] += int(time)
    return "".join(f"{stack} {time}\n" for stack, time in times.items())


def _time(operator: Operator, metric: str) -> float:
    return operator.device_own if metric == "self_npu_time_total" else operator.own
