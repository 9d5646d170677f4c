"""Print a loop nest as a kernel: elementwise work, reductions, and both fused.

The parallel axes are cut into units that threads share. In a unit, each phase walks through the
loops that are left, several vectors at a time; what does not change in a loop is written before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cpu.nest.cross import CrossPrinter, crossing
from torchair.codegen.cpu.nest.share import Body, Walk, Walks
from torchair.codegen.kernel import Generated, Kernel
from torchair.codegen.loops import Nest
from torchair.codegen.requests import Loops
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.plan import Plan, make_plan
from torchair.codegen.text.point import Slot
from torchair.codegen.text.unit import UnitWriter, static_slots, tail_mask
from torchair.codegen.text.values import prefix_mask
from torchair.codegen.text.writer import KernelWriter

BLOCK = 2048
"""Elements of a long vector axis that one unit takes, where there are other parallel axes."""
ENOUGH = 64
"""Units that are enough for any number of threads."""


def loops(request: Loops, machine: Machine, label: str) -> Generated:
    """The kernel of a nest. Its scratch memory is on the stack."""
    return Generated(print_nest(request.nest, machine, label, request.more))


def print_nest(
    nest: Nest, machine: Machine, label: str = "nest", more: Sequence[Nest] = ()
) -> Kernel:
    """The kernel of a nest whose sizes and strides are ints or words. The last axis is the one
    that vectors lie along. A store must not change what another point of the nest loads. With
    `more`, one kernel does the work of several nests."""
    w, walks = KernelWriter(machine), Walks()
    for one in (nest, *more):
        _write(w, one, machine, walks)
    walks.write()
    return w.kernel(label)


def _write(w: KernelWriter, nest: Nest, machine: Machine, walks: Walks) -> None:
    crossed = crossing(nest, w.lanes)
    if crossed is not None:
        CrossPrinter(w, make_plan(nest, w.lanes, machine.fma, form=((), 1)), crossed).run()
        return
    plan = make_plan(nest, w.lanes, machine.fma)
    if plan.row_limit is None:
        _Printer(w, plan, walks).run()
        return
    walks.write()
    size = w.size(nest.axes[-1])
    with w.when(w(f"icmp sle i64 {size}, {plan.row_limit}")):
        _Printer(w, plan, walks).run()
        walks.write()
    with w.when(w(f"icmp sgt i64 {size}, {plan.row_limit}")):
        _Printer(w, make_plan(nest, w.lanes, machine.fma, unlimited=True), walks).run()
        walks.write()


class _Printer:
    """Cuts a nest into units."""

    def __init__(self, w: KernelWriter, plan: Plan, walks: Walks) -> None:
        self.w, self.plan, self.walks = w, plan, walks
        self.unit = UnitWriter(w, plan)
        self.outer = [a for a in range(plan.vector_axis) if a not in plan.nest.reduced]
        self.outer_sizes = [w.size(plan.nest.axes[a]) for a in self.outer]
        self.size = plan.nest.axes[-1]

    def run(self) -> None:
        """Write the whole kernel."""
        plan, size = self.plan, self.w.size(self.size)
        reduced = plan.vector_axis in plan.nest.reduced
        if plan.vector_axis in plan.loops:
            if not reduced:
                self._long_rows()
            else:
                self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size)))
        elif plan.loops and not reduced:
            self._columns()
        else:
            assert isinstance(self.size, int)
            slots = static_slots(self.size, self.w.lanes)
            if reduced and not slots:  # the results of reducing nothing are stored
                slots = [Slot(0, prefix_mask(self.w.lanes, 0))]
            if slots:
                self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size), slots))

    def _unit(
        self, positions: Sequence[str], bounds: tuple[str, str], slots: Sequence[Slot] = ()
    ) -> None:
        index = dict(zip(self.outer, positions, strict=False))
        self.unit.unit(index, bounds, slots)

    def _units(self, sizes: Sequence[str], body: Body) -> None:
        self.walks.add(Walk(self.unit, tuple(sizes), body))

    # ---- forms ----

    def _long_rows(self) -> None:
        """Elementwise along an axis of many vectors: cut it too if other axes are few."""
        w, size = self.w, self.w.size(self.size)
        if not self.outer:
            low, high = w.share(size, 4 * w.lanes)
            with w.when(w(f"icmp slt i64 {low}, {high}")), self.unit.point.scope():
                self.unit.thread()
                self._unit([], (low, high))
            return
        block = self._block()
        if block is None:
            self._units(self.outer_sizes, lambda p: self._unit(p, ("0", size)))
            return
        blocks = w.div(w.add(size, str(block - 1)), str(block))

        def body(positions: list[str]) -> None:
            low = w.mul(positions[-1], str(block))
            self._unit(positions, (low, w.least(w.add(low, str(block)), size)))

        self._units([*self.outer_sizes, blocks], body)

    def _block(self) -> int | None:
        """How long the pieces of a row are, or None if rows stay whole."""
        if not isinstance(self.size, int):
            return BLOCK
        rows = 1
        for a in self.outer:
            n = self.plan.nest.axes[a]
            rows *= n if isinstance(n, int) else 8
        pieces = min(-(-ENOUGH // max(1, rows)), self.size // (BLOCK // 2))
        return None if pieces <= 1 else -(-self.size // (pieces * BLOCK // 8)) * (BLOCK // 8)

    def _columns(self) -> None:
        """Reduced axes around the vector axis: units of several whole vectors, then the rest."""
        w, lanes = self.w, self.w.lanes
        step = self.plan.slots * lanes
        slots = [Slot(k * lanes) for k in range(self.plan.slots)]
        size = w.size(self.size)
        full = w.div(size, str(step))
        if full != "0":
            self._units(
                [*self.outer_sizes, full],
                lambda p: self._unit(p[:-1], (w.mul(p[-1], str(step)), size), slots),
            )
        if isinstance(self.size, int):
            left, start = static_slots(self.size % step, lanes), str(self.size // step * step)
            if left:
                self._units(self.outer_sizes, lambda p: self._unit(p, (start, size), left))
            return
        start = w.mul(full, str(step))
        count = w.div(w.add(w.sub(size, start), str(lanes - 1)), str(lanes))

        def rest(positions: list[str]) -> None:
            first = w.add(start, w.mul(positions[-1], str(lanes)))
            mask = tail_mask(w, w.sub(size, first))
            self._unit(positions[:-1], (first, size), [Slot(0, mask)])

        self._units([*self.outer_sizes, count], rest)
