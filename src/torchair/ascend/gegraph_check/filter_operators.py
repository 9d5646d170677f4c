"""Keep the tasks that a deadlock can come from: communication, and the events that order it.

python -m torchair.ascend.gegraph_check.filter_operators tasks.json tasks_filtered.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchair.ascend.gegraph_check import tasks as trace
from torchair.store import FilePath


def filter_comm_ops(input_path: FilePath, output_path: FilePath, merge_gap: float = 0.0) -> str:
    """Write the communication tasks and the events of a file to another; returns its path.

    Virtual streams are merged; a task of one begins `merge_gap` microseconds after the task before
    it, unless it does so later anyway. Descriptions of streams and processes stay.
    """
    events = trace.read_events(input_path)
    kept = [dict(e) for e in events if e.get("ph") == "M"]
    ends: dict[str, float] = {}
    for task in trace.tasks_of(events):
        moved = _moved(task, ends, merge_gap)
        if task.is_event or task.is_communication:
            kept.append(moved)
    count = sum(e.get("ph") == "X" for e in kept)
    print(f"{count} of {len(events)} events kept", file=sys.stderr)
    return trace.write_events(output_path, kept)


def _moved(task: trace.TraceTask, ends: dict[str, float], gap: float) -> dict[str, object]:
    begin, moved = float(task.event.get("ts", 0)), {}
    if str(task.event.get("tid", "")) != task.stream:
        begin = max(begin, ends.get(task.stream, begin) + gap)
        moved = {"tid": task.stream}
    ends[task.stream] = begin + float(task.event.get("dur", 0))
    return {**task.event, "ts": begin, **moved}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = trace.tool_arguments("filter_operators", __doc__)
    parser.add_argument("output", help="file to write")
    options = parser.parse_args(arguments)
    print(filter_comm_ops(options.input, options.output, options.merge_gap))
    return 0


if __name__ == "__main__":
    sys.exit(main())
