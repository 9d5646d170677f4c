"""Communication tasks that may run at the same time and then need more cores than there are.

Such tasks wait for all of their blocks. Two that each have a part of the cores wait forever.

    python -m torchair.ascend.gegraph_check.deadlock_check tasks.json risks.json --aivec-total 48
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from torchair.ascend.gegraph_check import tasks as trace
from torchair.store import FilePath

PREFIX = "dead_lock_"
WIDTH = 49.5
"""Microseconds that a task of a conflict is drawn with, so that it can be found."""


@dataclass(frozen=True)
class Conflict:
    """Two tasks that nothing orders, and that need more vector cores than there are."""

    first: trace.TraceTask
    second: trace.TraceTask
    total: int

    def __str__(self) -> str:
        need = self.first.vector_cores + self.second.vector_cores
        return (
            f"CONFLICT: {_shown(self.first)}  <->  {_shown(self.second)}  sum={need} > {self.total}"
        )


def _shown(task: trace.TraceTask) -> str:
    return f"[stream {task.stream} TaskId={task.id}] {task.name} ({task.vector_cores} AIVEC)"


def find_conflicts(tasks: Sequence[trace.TraceTask], aivec_total: int) -> list[Conflict]:
    """Pairs of communication tasks on different streams that no event orders and that together
    need too many vector cores. Tasks must have clocks."""
    suspects = [t for t in tasks if t.is_communication and t.needs_all_blocks and t.vector_cores]
    return [
        Conflict(a, b, aivec_total)
        for a, b in combinations(suspects, 2)
        if a.stream != b.stream
        and not a.after(b)
        and not b.after(a)
        and a.vector_cores + b.vector_cores > aivec_total
    ]


def deadlock_check(
    input_path: FilePath, output_path: FilePath, aivec_total: int, merge_gap: float = 0.0
) -> list[Conflict]:
    """Print the risks of a task file, and write it again with the tasks of conflicts marked, if
    there are any. `merge_gap` is accepted for files that were not filtered; order, not time,
    decides."""
    events = trace.read_events(input_path)
    tasks = trace.tasks_of(events)
    print(f"{len(tasks)} tasks on {len({t.stream for t in tasks})} streams", file=sys.stderr)
    for task in trace.set_clocks(tasks):
        print(f"{_shown(task)} waits for what never happens before it", file=sys.stderr)
    conflicts = find_conflicts(tasks, aivec_total)
    if not conflicts:
        print("[RESULT] No deadlock risks detected.")
        return []
    print(f"[RESULT] Deadlock risk detected! {len(conflicts)} conflicting pair(s):")
    for conflict in conflicts:
        print(conflict)
    for number in {t.number for c in conflicts for t in (c.first, c.second)}:
        event = events[number]
        events[number] = {**event, "name": f"{PREFIX}{event.get('name', '')}", "dur": WIDTH}
    trace.write_events(output_path, events)
    return conflicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 1 if there are risks."""
    parser = trace.tool_arguments("deadlock_check", __doc__)
    parser.add_argument("output", help="file to write if there are risks")
    parser.add_argument("--aivec-total", type=int, required=True, help="vector cores of the device")
    options = parser.parse_args(arguments)
    found = deadlock_check(options.input, options.output, options.aivec_total, options.merge_gap)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
