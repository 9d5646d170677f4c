"""The end of planning: how results leave, which inputs are updated in place, where memory is.

Everything before has given values slots, and slots memory and strides; nothing here looks at nodes
again, so a plan made anew for other sizes ends in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.codegen.program import Allocation
from torchair.codegen.sizes import value_of
from torchair.engine import strides as layout
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.plan import records
from torchair.engine.plan.arena import Arena, Buffer
from torchair.engine.plan.streams import LaneSharing, lanes_used, schedule_of
from torchair.engine.strides import Meta, SizeFormula, dense_strides, is_writable, same_strides
from torchair.errors import GraphError
from torchair.ge.graph import Value
from torchair.operators import Trait, row_of

_WORTH_FREEING = 1 << 16  # bytes that a kernel allocated; less is dropped when the call ends


@dataclass(frozen=True)
class OutputLayout:
    """What an output must look like. Results of one alias group may share memory."""

    dims: tuple[Any, ...]  # may be symbolic, like the strides
    strides: tuple[Any, ...]
    alias_group: int
    offset: Any = None  # where it must begin in its memory, None if that does not matter


class Promises:
    """What was promised of the results of a graph; `assigned` maps one to the input it updates."""

    def __init__(
        self,
        results: Sequence[Value],
        data: Sequence[Value],
        assigned: Mapping[int, int],
        layouts: Sequence[OutputLayout | None] = (),
    ) -> None:
        """`layouts` are those of the first results; nothing is promised of the others."""
        self.results, self.data, self.assigned = list(results), list(data), dict(assigned)
        self.layouts = [*layouts, *[None] * len(self.results)][: len(self.results)]
        self._formulas: dict[tuple[int, str], SizeFormula] = {}

    def dims(self, k: int, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Dims of a result; None for data-dependent ones, or if none were promised."""
        return self._evaluate(k, "dims", sizes)

    def strides(self, k: int, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Strides of a result, None as for dims."""
        return self._evaluate(k, "strides", sizes)

    def offset(self, k: int, sizes: Mapping[str, Any]) -> int | None:
        """Where a result must begin in its memory, None if that does not matter."""
        promised = self.layouts[k]
        if promised is None or promised.offset is None:
            return None
        found = self._evaluate(k, "offset", sizes)
        return None if found is None else found[0]

    def _evaluate(self, k: int, what: str, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
        promised = self.layouts[k]
        if promised is None:
            return None
        formula = self._formulas.get((k, what))
        if formula is None:
            found = getattr(promised, what)
            formula = SizeFormula(found if isinstance(found, tuple) else (found,))
            self._formulas[k, what] = formula
        try:
            return formula(sizes)
        except KeyError:  # a data-dependent size
            return None


@dataclass
class Ending:
    """Completes a plan that has its steps and allocations, of which nothing is placed."""

    plan: records.Plan
    slot: Mapping[Value, int]
    allocation: dict[int, Allocation]
    metas: dict[int, Meta]
    sizes: Mapping[str, Any]  # values of symbols
    p: Promises
    native: bool  # generated code is on: strides are fixed when it is made
    compact: bool  # look longer for an arrangement of little memory
    lanes: Lanes | None  # of the graph, if nodes have more than one

    def __post_init__(self) -> None:
        self.now = len(self.plan.steps)
        if self.lanes is not None and len(lanes_used(self.lanes, self.plan.steps)) < 2:
            self.lanes = None

    def run(self) -> records.Plan:
        """The plan, whose buffers `lives.place_memory` places. Those of lanes are placed here:
        which step waits for which follows from where they are."""
        plan = self.open()
        if self.lanes is not None:
            plan.arrange(plan.arena.place([b.size for b in plan.arena.buffers]))
            plan.schedule = schedule_of(plan, self.lanes)
        return plan

    def open(self) -> records.Plan:
        """The plan, without places of its buffers: sizes need not be known."""
        self._outputs()
        self._write_backs()
        self._find_buffers()
        self._bind_views()
        return self.plan

    def _outputs(self) -> None:
        members = Counter(self._group(k) for k in range(len(self.p.results)))
        wanted = [self._wanted(k, self.slot[v]) for k, v in enumerate(self.p.results)]
        laid_out: set[int] = set()
        for k, value in enumerate(self.p.results):
            slot = self.slot[value]
            self.allocation[slot].last = max(self.allocation[slot].last, self.now)
            if k not in self.p.assigned and slot not in laid_out:
                laid_out.add(slot)
                self._lay_out(slot, wanted[k])
        owner: dict[int, int] = {}  # allocation slot: the alias group that has it
        for k, value in enumerate(self.p.results):
            slot = self.slot[value]
            if k in self.p.assigned:
                self.plan.outputs.append(records.OutputSpec(slot))
                continue
            group, allocation = self._group(k), self.allocation[slot]
            mine = allocation.kind in ("arena", "fresh", "torch")
            mine = mine and owner.setdefault(allocation.slot, group) == group
            offset = self.p.offset(k, self.sizes)
            spec = self._leave(slot, allocation, wanted[k], offset, mine, shared=members[group] > 1)
            spec.again = any(slot == before.slot for before in self.plan.outputs)
            self.plan.outputs.append(spec)

    def _group(self, k: int) -> int:
        promised = self.p.layouts[k]
        return promised.alias_group if promised is not None else -1 - k

    def _lay_out(self, slot: int, wanted: tuple[int, ...] | None) -> None:
        """Give a buffer that leaves the graph whole the strides it must have, and its views
        theirs."""
        allocation, meta = self.allocation[slot], self.metas[slot]
        if (
            meta is None
            or meta is not allocation.meta
            or allocation.kind != "arena"
            or wanted is None
        ):
            return
        if allocation.fixed:
            return
        if same_strides(meta, wanted) or not layout.is_dense(meta.shape, wanted):
            return
        allocation.meta = self.metas[slot] = layout.with_strides(meta, wanted)
        for step in self.plan.steps:
            if step.kind != "view" or self.allocation[step.args[0]] is not allocation:
                continue
            assert step.kernel is not None
            views = layout.as_list(step.kernel(self.metas[step.args[0]]))
            self.metas.update(zip(step.outs, views, strict=True))

    def _leave(
        self,
        slot: int,
        allocation: Allocation,
        wanted: tuple[int, ...] | None,
        offset: int | None,
        mine: bool,
        shared: bool,
    ) -> records.OutputSpec:
        meta = self.metas[slot]
        if meta is None or allocation.kind == "torch":
            usable = wanted is None or meta is None or is_writable(meta.shape, wanted)
            copied = not mine or (offset or 0) != 0
            return records.OutputSpec(slot, wanted if usable else None, copied, offset or 0)
        wanted = wanted if wanted is not None else dense_strides(meta)
        # else a copy frees the larger buffer
        whole = meta.numel() >= allocation.meta.numel() or shared
        in_place = offset is None or offset == meta.storage_offset()
        if mine and whole and in_place and same_strides(meta, wanted):
            allocation.kind = "fresh"
            alone = meta.numel() == allocation.meta.numel() and meta.storage_offset() == 0
            return records.OutputSpec(slot, wanted, shape=tuple(meta.shape) if alone else None)
        if not is_writable(meta.shape, wanted):
            wanted = dense_strides(meta)
        return records.OutputSpec(slot, wanted, True, offset or 0)

    def _wanted(self, k: int, slot: int) -> tuple[int, ...] | None:
        meta = self.metas[slot]
        dims, strides = self.p.dims(k, self.sizes), self.p.strides(k, self.sizes)
        if meta is None or dims is None or strides is None:
            return None
        if dims != tuple(meta.shape):
            raise GraphError(
                f"output {k} has dims {list(meta.shape)}, tracing promised {list(dims)}",
                node=self.p.results[k].node.name,
            )
        return strides

    def _write_backs(self) -> None:
        written = {self.slot[self.p.data[d]] for d in self.p.assigned.values()}
        for k, d in self.p.assigned.items():
            target = self.slot[self.p.data[d]]
            source = self.slot[self.p.results[k]]
            allocation = self.allocation[source]
            if source == target or self._tie(source, target):
                continue
            staged = allocation.kind == "input" and allocation.slot in written
            self.plan.write_backs.append(records.WriteBack(target, source, staged))

    def _tie(self, source: int, target: int) -> bool:
        """Let the value be computed in the memory of the input it updates, if no one needs the
        old content any more."""
        allocation, data = self.allocation[source], self.allocation[target]
        meta = self.metas[source]
        if allocation.kind != "arena" or meta is None or not self._covers(source):
            return False
        if meta.shape != data.meta.shape or meta.dtype != data.meta.dtype:
            return False
        if (self.native or meta is not allocation.meta) and meta.stride() != data.meta.stride():
            return False
        if data.last > allocation.first or allocation.tied_to >= 0 or data.tied_to >= 0:
            return False
        if data.last == allocation.first and not self._updates(allocation, target):
            return False
        allocation.kind, allocation.tied_to, data.tied_to = "tied", target, target
        return True

    def _covers(self, slot: int) -> bool:
        """Whether a value is all of the memory it is in, element by element: that itself, or other
        dims of it."""
        meta, whole = self.metas[slot], self.allocation[slot].meta
        if meta is None or meta is whole:
            return meta is whole
        if meta.dtype != whole.dtype or meta.numel() != whole.numel() or meta.storage_offset() != 0:
            return False
        return all(m.stride() == dense_strides(m) for m in (meta, whole))

    def _updates(self, allocation: Allocation, target: int) -> bool:
        """Whether the step that makes this value may read the input while overwriting it."""
        step = self.plan.steps[allocation.first]
        row = row_of(step.node.type)
        assert row is not None
        if step.native is not None and not step.native.copies:
            return step.native.pointwise and all(
                self.metas[a] is self.allocation[a].meta
                for a in step.args
                if self.allocation[a].slot == target
            )
        reads = [a for a in records.flat_slots(step.args) if self.allocation[a].slot == target]
        if row.has(Trait.WRITES_FIRST):
            return step.args[0] == reads[0] and len(reads) == 1 and self._covers(reads[0])
        return row.has(Trait.ELEMENTWISE) and all(a == target for a in reads)

    def _find_buffers(self) -> None:
        """Which allocations are in the arena, and which of them one after the other in one
        buffer."""
        arena = [r for r in self.plan.allocations if r.kind == "arena"]
        buffers: list[Buffer] = []
        sharing = None
        if self.lanes is not None:
            sharing = LaneSharing(self.plan.steps, self.allocation.__getitem__, self.lanes)
        for allocation in arena:
            if (before := self._taken_over(allocation, sharing)) is not None:
                allocation.buffer = before.buffer
                buffers[allocation.buffer].last = max(
                    buffers[allocation.buffer].last, allocation.last
                )
            else:
                allocation.buffer = len(buffers)
                buffers.append(Buffer(allocation.size, allocation.first, allocation.last))
        apart = None
        if sharing is not None:
            inside: list[list[Allocation]] = [[] for _ in buffers]
            for allocation in arena:
                inside[allocation.buffer].append(allocation)
            spans = [sharing.span(allocations) for allocations in inside]
            apart = lambda a, b: spans[a].apart(spans[b])  # noqa: E731
        self.plan.arena = Arena(buffers, apart, self.compact)

    def _taken_over(self, allocation: Allocation, sharing: LaneSharing | None) -> Allocation | None:
        """The allocation whose buffer this one takes over, if that is not needed any more; elements
        must be where they were."""
        before = allocation.successor_of
        if before is None or before.kind != "arena" or before.last != allocation.first:
            return None
        if before.meta.stride() != allocation.meta.stride():
            return None
        return before if sharing is None or sharing.ends_at(before, allocation.first) else None

    def _bind_views(self) -> None:
        """Views of planned or constant memory are made once, the others at every call."""
        for slot, allocation in self.allocation.items():
            if allocation.kind != "torch" or allocation.last >= self.now:
                continue
            if self.metas[slot] is None or value_of(allocation.size) >= _WORTH_FREEING:
                self.plan.steps[allocation.last].frees.append(slot)
        self._copy_before_updates()
        kept: list[records.Step] = []
        read = self._read_by_torch()
        for step in self.plan.steps:
            planned = step.kind == "view" and self.allocation[step.args[0]].kind in (
                "arena",
                "const",
            )
            if step.kind != "view" or read.intersection(step.outs):
                (self.plan.bound if planned else kept).append(step)
        self.plan.steps = kept
        self.plan.read = read
        self.plan.places = {
            slot: (allocation, 0 if self.metas[slot] is allocation.meta else self._bytes(slot))
            for slot, allocation in self.allocation.items()
        }

    def _copy_before_updates(self) -> None:
        """Native code that updates parts of a value begins with a copy, if it is not in place."""
        steps: list[records.Step] = []
        for step in self.plan.steps:
            updates = step.native is not None and step.native.copies
            if (
                updates
                and self.allocation[step.outs[0]].tied_to != self.allocation[step.args[0]].slot
            ):
                steps.append(records.Step(step.node, "copy", None, [step.args[0]], [step.outs[0]]))
            steps.append(step)
        self.plan.steps = steps

    def _bytes(self, slot: int) -> int:
        meta = self.metas[slot]
        return 0 if meta is None else meta.storage_offset() * meta.element_size()

    def _read_by_torch(self) -> set[int]:
        """Slots that must exist as tensors, because torch works on them or they leave."""
        read = {o.slot for o in self.plan.outputs}
        read |= {s for w in self.plan.write_backs for s in (w.input_slot, w.value_slot)}
        for step in reversed(self.plan.steps):
            if step.kind != "native" and (step.kind != "view" or read.intersection(step.outs)):
                read |= {*step.reads, *step.outs}
        return read
