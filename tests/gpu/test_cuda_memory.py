"""Memory of plans for a GPU: it is placed after steps have been joined and moved, so nothing that a
launch still needs is overwritten, neither by launches nor by steps that run one by one. None of it
needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cuda_graphs import data
from cuda_tools import HOPPER
from random_graphs import Maker
from torchair import ge
from torchair.codegen.program import Allocation
from torchair.engine.compile import GraphCompiler
from torchair.engine.inspect.dry_run import DryRun, dry_run
from torchair.engine.options import EngineOptions
from torchair.engine.packaged import RecordingGpu
from torchair.engine.plan import records
from torchair.engine.plan.records import Plan, Step
from torchair.engine.session.loaded import checked_state
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.trace import Trace


def turns(plan: Plan) -> list[list[Step]]:
    """Steps that run at the same time: those of a launch, or of all branches of a fork."""
    launches: dict[int, list[Any]] = {}
    for launch in plan.launches:
        launches.setdefault(id(launch[0]), []).append(launch)
    part_of = {id(s): p for group in plan.groups for p in group for s in p.steps}
    found: list[list[Step]] = []
    for group in plan.groups:
        parts = [p for p in group if not p.is_view]
        own = [x for x in plan.launches if part_of[id(x[0])] in parts]
        if len(parts) == 1 and own:
            found += own
        elif parts:
            found.append([s for p in parts for s in p.steps])
    return found


def overwritten(plan: Plan, order: Sequence[Sequence[Step]]) -> list[str]:
    """What finds other content than was written for it, or is written beside another in one
    turn."""
    owner: dict[int, int] = {}  # of each cache line of the arena: a buffer
    faults: list[str] = []

    def lines(allocation: Allocation) -> range:
        return range(allocation.offset // 64, -(-(allocation.offset + allocation.bytes) // 64))

    def used(slots: Sequence[int]) -> list[Allocation]:
        return [r for r in (plan.place(s)[0] for s in slots) if r.kind == "arena"]

    def check(steps: Sequence[Step], allocations: Sequence[Allocation]) -> None:
        for r in allocations:
            if any(owner.get(line) != r.buffer for line in lines(r)):
                faults.append(f"{[s.node.name for s in steps]}: buffer {r.buffer}")

    for steps in order:
        made = [r for s in steps for r in used(s.outs)]
        read = [r for s in steps for r in used(s.reads)]
        inside = {r.buffer for r in made}
        check(steps, [r for r in read if r.buffer not in inside])
        for r in made:
            owner.update(dict.fromkeys(lines(r), r.buffer))
        check(steps, [*read, *made])
    check([], used([o.slot for o in plan.outputs] + [w.value_slot for w in plan.write_backs]))
    return faults


def compiled(seed: int) -> tuple[GraphCompiler, Plan]:
    """A random graph and its plan, compiled for a GPU that is not here."""
    made = Maker(seed, nodes=30)
    for node in made.graph.nodes:
        for value in node.outputs:
            value.device_type = "NPU"
    state, target = checked_state(made.graph, None), RecordingGpu(HOPPER)
    compiler = GraphCompiler(made.graph, state, EngineOptions.of({}, {}), "meta", (), target)
    compiler.optimize(Trace())
    compiler.fuse({})
    inputs = [x.to("meta") for x in made.inputs]
    plan = compiler.program(inputs, compiler.inputs.reader(inputs), lambda plan: plan)
    assert isinstance(plan, Plan)
    return compiler, plan


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_launch_overwrites_what_is_read_later(first: int) -> None:
    moved = 0
    for seed in range(first, first + 10):
        compiler, plan = compiled(seed)
        assert not overwritten(plan, turns(plan))
        assert not overwritten(plan, [[s] for s in plan.steps if s.kind != "view"])
        moved += len(plan.native_steps) > len(plan.launches)
        fixed = all(t.is_contiguous() for t in Maker(seed, nodes=30).inputs)
        assert not fixed or compiler.preview().arena_size == plan.arena_size
    assert moved


def test_memory_that_is_given_away_too_early_is_found() -> None:
    """The check itself: with lives counted in steps alone, launches overwrite each other."""
    plan = columns(4).plan
    assert not overwritten(plan, turns(plan))
    for buffer in plan.arena.buffers:
        buffer.begin, buffer.end = 0, -1
    plan.arrange(plan.arena.place([b.size for b in plan.arena.buffers]))
    assert overwritten(plan, turns(plan))
    assert not overwritten(plan, [[s] for s in plan.steps])


def columns(count: int) -> DryRun:
    """Sums over the columns of several large results, which do not depend on each other."""
    with Graph("g", infer) as graph:
        values = [data(i, 1024, 512, dtype=DataType.DT_FLOAT) for i in range(count)]
        ge.NetOutput([ge.ReduceSum(ge.SoftmaxV2(x, axes=[-1]), ge.Const([0])) for x in values])
    return dry_run(graph, HOPPER)


def test_large_results_stand_side_by_side_as_long_as_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2 MB each: two more than one fit into 4 MB."""
    plan = columns(6).plan
    most = plan.arena_floor + records.MORE
    assert len(plan.launches) < len(plan.steps) and plan.arena_floor < plan.arena_size <= most
    monkeypatch.setattr(records, "MORE", 0)
    strict = columns(6).plan
    assert strict.arena_size == strict.arena_floor == plan.arena_floor
