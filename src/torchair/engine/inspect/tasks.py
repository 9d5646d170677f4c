"""A GE graph as a task file: what a device with streams and events would run, in which order.

Times are made up, one unit for each task, so that a viewer shows the order. See
`torchair.tools.gegraph_check.tasks` for the form of the file.
"""

from __future__ import annotations

from typing import Any

from torchair.engine.optimize.passes.ordering import communicates
from torchair.engine.plan.streams import LaneOrder, Lanes
from torchair.ge.graph import NO_WORK, Graph, Node
from torchair.operators import Trait, row_of
from torchair.tools.gegraph_check.tasks import sounds_like_communication

_UNIT = 10.0  # microseconds


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
        {number[x] for x in (*(v.node for v in n.values()), *n.control) if number.get(x, k) < k}
        for k, n in enumerate(nodes)
    ]
    order = LaneOrder([labels.index(lanes.of(n)) for n in nodes], needs)
    handles: dict[int, list[tuple[int, int]]] = {}  # of a node: (waiting node, handle)
    for handle, (before, k) in enumerate((b, k) for k, bs in order.waits.items() for b in bs):
        handles.setdefault(before, []).append((k, handle))
    awaited = {(b, k): handle for b, pairs in handles.items() for k, handle in pairs}
    limits = _limits(cores, vector_cores)
    made = _Tasks()
    for k, node in enumerate(nodes):
        stream = order.lane[k]
        for before in order.waits.get(k, ()):
            made.add(f"EVENT_WAIT_{awaited[before, k]}", stream, {"Task Type": "EVENT_WAIT"})
        made.add(node.name, stream, _described(node, limits))
        for after, handle in handles.get(k, ()):
            args = {"Task Type": "EVENT_RECORD", "for": nodes[after].name}
            made.add(f"EVENT_RECORD_{handle}", stream, args)
    names = [_row(i, label or "default stream") for i, label in enumerate(labels)]
    return [*names, *made.events]


class _Tasks:
    """Tasks one after the other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, name: str, stream: int, args: dict[str, Any]) -> None:
        number = len(self.events)
        self.events.append(
            {
                "name": name, "ph": "X", "pid": 0, "tid": stream, "ts": number * _UNIT,
                "dur": _UNIT, "args": {"TaskId": number, **args},
            }
        )  # fmt: skip


def _row(stream: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": stream, "args": {"name": name}}


def _limits(cores: str, vector_cores: int) -> tuple[int, int]:
    """Cube and vector cores that an operator may use."""
    cube, _, vector = cores.partition("|")
    return (
        int(cube) if cube.strip().isdecimal() else vector_cores // 2,
        int(vector) if vector.strip().isdecimal() else vector_cores,
    )


def _described(node: Node, limits: tuple[int, int]) -> dict[str, Any]:
    row = row_of(node.type)
    cube = row is not None and row.has(Trait.CONTRACTION)
    own = node.attr("_op_aicore_num" if cube else "_op_vectorcore_num", "")
    blocks = int(own) if str(own).isdecimal() else limits[0 if cube else 1]
    source = node.origin.line if node.origin is not None else ""
    args: dict[str, Any] = {
        "Task Type": "KERNEL_AICORE" if cube else "KERNEL_AIVEC", "Numblocks": blocks,
        "Schem Mode": 0, "op": node.type, "source": source,
    }  # fmt: skip
    if communicates(node) or sounds_like_communication(node.type):
        args |= {"Schem Mode": 1, "ExtendInfo": {"taskType": "communication"}}
    return args
