"""Move the tasks of a file so that a viewer shows the order events keep: a wait begins when what
it waits for has ended.

    python -m torchair.ascend.gegraph_check.align_trace tasks.json tasks.aligned.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchair.ascend.gegraph_check import tasks as trace
from torchair.store import FilePath


def align_trace_json(
    input: FilePath, output: FilePath | None = None, merge_gap: float = 0.0
) -> str:
    """Write a file in which no task begins before the one ahead of it in its stream has ended, nor
    a wait before its event was fired; tasks of a stream are `merge_gap` microseconds apart.

    Without `output` the file is `<input>.aligned.json`. Returns its path.
    """
    events = trace.read_events(input)
    tasks = trace.tasks_of(events)
    begins = _begins(tasks, {id(t) for t in trace.set_clocks(tasks)}, merge_gap)
    aligned = [dict(e) for e in events]
    for task in tasks:
        aligned[task.number]["ts"] = begins[task.number]
    target = f"{str(input).removesuffix('.json')}.aligned.json"
    return trace.write_events(target if output is None else output, aligned)


def _begins(tasks: Sequence[trace.TraceTask], stuck: set[int], gap: float) -> dict[int, float]:
    """When each task begins, from the earliest on: as in the file, or later."""
    begins: dict[int, float] = {}
    ends: dict[str, float] = {}
    fired: dict[str, float] = {}
    for task in sorted(tasks, key=lambda t: (sum(t.clock.values()), t.number)):
        begin = float(task.event.get("ts", 0))
        if task.stream in ends:
            begin = max(begin, ends[task.stream] + gap)
        waits = trace.handle_of(task, trace.WAITS)
        if waits is not None and id(task) not in stuck:
            begin = max(begin, fired.get(waits[1], begin))
        begins[task.number] = begin
        ends[task.stream] = begin + float(task.event.get("dur", 0))
        record = trace.handle_of(task, trace.RECORDS)
        if record is not None:
            fired[record[1]] = ends[task.stream]
    return begins


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = trace.tool_arguments("align_trace", __doc__)
    parser.add_argument("output", nargs="?", help="file, <input>.aligned.json if not given")
    options = parser.parse_args(arguments)
    print(align_trace_json(options.input, options.output, options.merge_gap))
    return 0


if __name__ == "__main__":
    sys.exit(main())
