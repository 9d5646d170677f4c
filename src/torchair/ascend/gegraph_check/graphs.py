"""What `debug.deadlock_check` does with a GE graph: findings about its streams, the graph as a task
file, and its communication judged against the cores of the device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from torchair.ascend.gegraph_check.deadlock_check import Conflict, deadlock_check
from torchair.ascend.gegraph_check.filter_operators import filter_comm_ops
from torchair.ascend.gegraph_check.tasks import sounds_like_communication, write_events
from torchair.engine.inspect.check import Fault, check_graph
from torchair.engine.optimize.passes.ordering import Lanes, communicates
from torchair.engine.plan.streams import LaneOrder
from torchair.ge.graph import NO_WORK, Graph, Node
from torchair.operators import Trait, has_trait

VECTOR_CORES = 48
"""Vector cores of the device that budgets are checked for, where options name no number."""


def report(
    graph: Graph, assigned: Mapping[int, int], lanes: Lanes, cores: str = "", folder: str = "."
) -> list[Fault]:
    """Check a graph, and its communication against the cores of the device: task files go to
    `folder`, findings are printed and warned of. `cores` is the option `aicore_num`."""
    findings = check_graph(graph, assigned, lanes)
    for finding in findings:
        print(finding)
    now = datetime.now().strftime("%Y%m%d%H%M%S")
    number = graph.name.rpartition("_")[2]
    stem = f"{folder}/debug_output_graph_{number}_timestamp{now}_pid_{os.getpid()}"
    risks = judge(stem, graph_tasks(graph, lanes, cores, VECTOR_CORES))
    if findings or risks:
        text = "; ".join(str(f).split("\n")[0] for f in findings)
        text = text or f"{len(risks)} pair(s) of communication operators need too many cores"
        warnings.warn(f"graph {graph.name} has stream problems: {text}", UserWarning, stacklevel=2)
    return findings


def judge(stem: str, tasks: Sequence[Mapping[str, Any]]) -> list[Conflict]:
    """Write a task file and the communication of it, and print which of that may never end."""
    write_events(f"{stem}.json", tasks)
    filtered = filter_comm_ops(f"{stem}.json", f"{stem}_filtered.json")
    return deadlock_check(filtered, f"{stem}_filtered_deadlock_check.json", VECTOR_CORES)


# ---- the graph as a task file: what a device with streams and events would run ----
#
# Times are made up, one unit for each task, so that a viewer shows the order.

_UNIT = 10.0  # microseconds


class TaskFile:
    """Events of a task file: the names of its streams, then the tasks that are added."""

    def __init__(self, streams: Sequence[str]) -> None:
        self.events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": name}}
            for i, name in enumerate(streams)
        ]
        self._count = 0

    def add(self, name: str, stream: int, args: Mapping[str, Any]) -> None:
        """One more task, after all those before."""
        at = {"pid": 0, "tid": stream, "ts": self._count * _UNIT, "dur": _UNIT}
        self.events.append({"name": name, "ph": "X", **at, "args": {"TaskId": self._count, **args}})
        self._count += 1


def graph_tasks(
    graph: Graph, lanes: Lanes, cores: str = "", vector_cores: int = 48
) -> list[dict[str, Any]]:
    """Events of the task file of a graph. `cores` is `"<cube>|<vector>"`, what an operator may use
    unless it says so itself; without it an operator may use `vector_cores`, and half of them
    cube cores."""
    nodes = [n for n in graph.nodes if n.type not in NO_WORK]
    labels = list(dict.fromkeys(["", *map(lanes.of, nodes)]))
    number = {n: k for k, n in enumerate(nodes)}
    needs = [
        {number[x] for x in n.producers() if number.get(x, k) < k} for k, n in enumerate(nodes)
    ]
    order = LaneOrder([labels.index(lanes.of(n)) for n in nodes], needs)
    handles: dict[int, list[tuple[int, int]]] = {}  # of a node: (waiting node, handle)
    for handle, (before, k) in enumerate((b, k) for k, bs in order.waits.items() for b in bs):
        handles.setdefault(before, []).append((k, handle))
    awaited = {(b, k): handle for b, pairs in handles.items() for k, handle in pairs}
    limits = _limits(cores, vector_cores)
    tasks = TaskFile([label or "default stream" for label in labels])
    add = tasks.add
    for k, node in enumerate(nodes):
        stream = order.lane[k]
        for before in order.waits.get(k, ()):
            add(f"EVENT_WAIT_{awaited[before, k]}", stream, {"Task Type": "EVENT_WAIT"})
        add(node.name, stream, _described(node, limits))
        for after, handle in handles.get(k, ()):
            args = {"Task Type": "EVENT_RECORD", "for": nodes[after].name}
            add(f"EVENT_RECORD_{handle}", stream, args)
    return tasks.events


def _limits(cores: str, vector_cores: int) -> tuple[int, int]:
    """Cube and vector cores that an operator may use."""
    cube, _, vector = cores.partition("|")
    return (
        int(cube) if cube.strip().isdecimal() else vector_cores // 2,
        int(vector) if vector.strip().isdecimal() else vector_cores,
    )


def _described(node: Node, limits: tuple[int, int]) -> dict[str, Any]:
    cube = has_trait(node, Trait.CONTRACTION)
    limit = limits[0] if cube else limits[1]
    own = node.attr("_op_aicore_num" if cube else "_op_vectorcore_num", "")
    blocks = int(own) if str(own).isdecimal() else limit
    source = node.origin.line if node.origin is not None else ""
    args: dict[str, Any] = {
        "Task Type": "KERNEL_AICORE" if cube else "KERNEL_AIVEC",
        "Numblocks": blocks,
        "Schem Mode": 0,
        "op": node.type,
        "source": source,
    }
    if communicates(node) or sounds_like_communication(node.type):
        args |= {"Schem Mode": 1, "ExtendInfo": {"taskType": "communication"}}
    return args
