"""What `deadlock_check` does where graphs are captured: the captured graph as a task file, and its
communication judged against the cores of the device.

Events order whatever shares memory in such a graph (fx/passes/streams.py). What is left to go wrong
is communication on streams that nothing orders: each waits for cores that the other one has.
"""

from __future__ import annotations

import os
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchair.ascend.gegraph_check.graphs import VECTOR_CORES, TaskFile, judge
from torchair.ascend.gegraph_check.tasks import sounds_like_communication
from torchair.fx.passes.streams import event_key, mark_streams
from torchair.fx.source import source_line
from torchair.log import speaking
from torchair.operators.generic import is_collective
from torchair.process import world
from torchair.torch_private.dispatch import OpOverload
from torchair.trace import Trace, numbered_directory

air = torch.ops.air
_RECORDS = (air.record.default, air.tagged_event_record.default)
_WAITS = (air.wait.default, air.tagged_event_wait.default)


def check_captured(gm: fx.GraphModule, name: str, trace: Trace) -> None:
    """Write the task files of a graph, print what was found, and warn of it. Files go to the debug
    folder of the compilation."""
    together = world()
    rank = 0 if together is None else together[1]
    now = datetime.now(tz=UTC).strftime("%Y%m%d%H%M%S%f")
    stem = _folder(trace) / f"{name}_id_{id(gm)}_rank_{rank}_pid_{os.getpid()}_ts_{now}"
    risks = judge(str(stem), fx_tasks(gm))
    if risks:
        text = f"{len(risks)} pair(s) of communication operators need too many cores"
        warnings.warn(f"graph {name} has stream problems: {text}", UserWarning, stacklevel=2)


def _folder(trace: Trace) -> Path:
    return trace.directory or numbered_directory(speaking())


def fx_tasks(gm: fx.GraphModule) -> list[dict[str, Any]]:
    """Events of the task file of a captured graph: its kernels, and the events between streams.

    A wait is for the latest record of its event. Events that are recorded outside the graph order
    nothing inside."""
    graph = gm.graph
    mark_streams(graph)
    labels = list(dict.fromkeys([None, *(n.meta["stream_label"] for n in graph.nodes)]))
    tasks = TaskFile([label or "default stream" for label in labels])
    limits = _StreamLimits()
    handles: dict[tuple[object, ...], int] = {}
    for count, node in enumerate(graph.nodes):
        stream = labels.index(node.meta["stream_label"])
        if node.target in _RECORDS:
            handles[event_key(node)] = count
            tasks.add(f"EVENT_RECORD_{count}", stream, {"Task Type": "EVENT_RECORD"})
        elif node.target in _WAITS:
            for key in _awaited(node):
                if key in handles:
                    tasks.add(f"EVENT_WAIT_{handles[key]}", stream, {"Task Type": "EVENT_WAIT"})
        elif not limits.follows(node, stream) and _computes(node):
            tasks.add(node.name, stream, _described(node, limits.vector(stream)))
    return tasks.events


def _awaited(node: fx.Node) -> list[tuple[object, ...]]:
    if node.target is air.wait.default:
        return [event_key(mark) for mark in node.all_input_nodes]
    return [event_key(node)]


class _StreamLimits:
    """Vector cores that each stream may use at the moment, as `limit_core_num` sets them."""

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        self._saved: dict[fx.Node, int] = {}

    def vector(self, stream: int) -> int:
        """Vector cores of a stream."""
        return self._now.get(stream, VECTOR_CORES)

    def follows(self, node: fx.Node, stream: int) -> bool:
        """Whether a node reads or sets limits; what it sets holds from here on."""
        if node.target is air.get_stream_limit.default:
            self._saved[node] = self.vector(stream)
            return True
        if node.target is not air.set_stream_limit.default:
            return False
        given: Any = node.args[0]
        self._now[stream] = self._saved[given] if isinstance(given, fx.Node) else int(given[1])
        return True


def _computes(node: fx.Node) -> bool:
    """Whether a node starts a kernel: views, scopes and waits for collectives start none."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    waits = target._schema.name.endswith("::wait_tensor")
    return not (target.is_view or waits or target.namespace == "air")


def _described(node: fx.Node, vector_cores: int) -> dict[str, Any]:
    target = str(node.target)
    args: dict[str, Any] = {
        "Task Type": "KERNEL_AIVEC",
        "Numblocks": vector_cores,
        "Schem Mode": 0,
        "op": target,
        "source": source_line(node),
    }
    if is_collective(target) or sounds_like_communication(target):
        args |= {"Schem Mode": 1, "ExtendInfo": {"taskType": "communication"}}
    return args
