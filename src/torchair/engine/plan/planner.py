"""From a GE graph and the sizes of one call to a Plan.

Every value gets a slot. Views are worked out on meta tensors, so that they cost nothing or become
one copy; small integers that steer shapes are computed now; the rest becomes steps that write into
planned buffers. Values with data-dependent shapes become late steps.

Dynamic shapes are planned over GuardedInts. Every decision becomes a guard of the resulting
`ShapeFamily`, a shape-polymorphic plan for all sizes that satisfy the guards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.program import Allocation, AllocationKind, Native
from torchair.codegen.sizes import GuardedInt, GuardSet, Int, is_known, value_of
from torchair.codegen.streams import HOST
from torchair.engine import strides as layout
from torchair.engine.fuse.units import Unit
from torchair.engine.optimize.passes.forms import is_wanted_channels_last
from torchair.engine.optimize.passes.ordering import Lanes
from torchair.engine.plan.ending import Ending, OutputLayout, Promises
from torchair.engine.plan.inputs import Reader
from torchair.engine.plan.records import Plan, Step
from torchair.engine.plan.shape_family import ShapeFamily, ShapePlan
from torchair.engine.strides import Meta, NoShapeFamily, Strided, same_dims, same_strides
from torchair.engine.units.native_units import NativeUnits
from torchair.errors import GraphError, MissingHostValue
from torchair.fallbacks import Fallback, note
from torchair.ge.dtypes import DataType
from torchair.ge.graph import INPUTS, Fact, Graph, Node, Value
from torchair.ge.shapes import Sym, contiguous_strides, evaluate, free_symbols, is_static
from torchair.operators import DimOrder, Op, Row, Trait, has_trait, infer, row_of
from torchair.operators.contraction import is_channels_last
from torchair.operators.reference import tensor_args

_SKIPPED = (*INPUTS, "NetOutput")
_TRIES = 4  # of one graph to make a shape family, that fail
_FAMILIES = 32  # kept for one graph


class Planner:
    """Makes plans for one graph; `assigned` maps an output to the input it updates."""

    def __init__(
        self,
        graph: Graph,
        device: str = HOST,
        assigned: dict[int, int] | None = None,
        layouts: Sequence[OutputLayout | None] = (),
        natives: NativeUnits | None = None,
        lanes: Lanes | None = None,
        compact: bool = False,
    ) -> None:
        self.graph, self.compact = graph, compact
        self.lanes = lanes or None
        self.device = device
        self.natives = natives
        constants = [n for n in graph.nodes if n.type == "Const"]
        self.order: list[Unit | Node] = [n for n in graph.nodes if n.type not in _SKIPPED]
        if natives is not None:
            prepared = [n for n in graph.nodes if n in natives.prepared.nodes]
            self.order = [*constants, *prepared, *natives.fusion.order]
        if graph.output is None:
            raise GraphError("the graph has no NetOutput", graph=graph.name)
        data = [n.outputs[0] for n in graph.data]
        self.promises = Promises(graph.output.values(), data, assigned or {}, layouts)
        self._families: list[ShapeFamily] = []
        self._failed = 0

    def plan(
        self, inputs: Sequence[Fact], strides: Sequence[tuple[int, ...] | None] | None = None
    ) -> Plan:
        """A plan for inputs of these types and dims; strides are contiguous where none is given."""
        return _PlanBuilder(self, inputs, strides or [None] * len(inputs)).ending().run()

    def shape_plan(self, given: Sequence[int]) -> ShapePlan | None:
        """The plan for inputs like these, if it is one of a shape family that is there."""
        for family in self._families:
            values = family.fit(given)
            if values is not None:
                return ShapePlan(family, given, values)
        return None

    def learn(
        self,
        inputs: Sequence[Fact],
        strides: Sequence[tuple[int, ...]],
        reader: Reader,
        given: Sequence[int],
    ) -> Plan | ShapePlan:
        """A plan with the family that it is of, or by itself if there can be none; `given` is what
        `reader` tells of the inputs."""
        if self._failed == _TRIES:
            return self.plan(inputs, strides)
        try:
            family = self._family(inputs, strides, reader, given)
        except Exception as e:  # which planning for these sizes alone does not meet, or explains
            plan = self.plan(inputs, strides)
            self._failed += 1
            kind = (
                Fallback.FIXED_PLAN
                if isinstance(e, NoShapeFamily)
                else Fallback.SHAPE_POLYMORPHIC_PLAN
            )
            note(kind, f"{self.graph.name}: other sizes will be planned anew", e)
            return plan
        self._families = [family, *self._families][:_FAMILIES]
        shape_plan = self.shape_plan(given)
        assert shape_plan is not None, "a family has the plan that it was made with"
        return shape_plan

    def _family(
        self,
        inputs: Sequence[Fact],
        strides: Sequence[tuple[int, ...]],
        reader: Reader,
        given: Sequence[int],
    ) -> ShapeFamily:
        """Plans over GuardedInts for what was read of the inputs; twins are one."""
        if any(self.promises.data[i].shape is None for i in reader.inputs):
            raise NoShapeFamily("inputs may have any number of dims")
        guards = GuardSet()
        numbers: list[Int] = [guards.variable(n) for n in given]
        for place, twin in reader.twins(given).items():
            guards.assume(numbers[place], "==", numbers[twin], True)
            numbers[place] = numbers[twin]
        facts, own = list(inputs), list[Any](strides)
        for i, input_facts in reader.facts(numbers).items():
            dims: Any = inputs[i].shape if input_facts.dims is None else input_facts.dims
            facts[i] = Fact(inputs[i].dtype, dims, input_facts.content)
            if input_facts.strides is not None:
                dense = same_strides(layout.meta_of(inputs[i]), strides[i])
                own[i] = _row_after_row(dims, input_facts.strides) if dense else input_facts.strides
        build = _PlanBuilder(self, facts, own, traced=True)
        ending = build.ending()
        return ShapeFamily(ending.open(), guards, build.sized, build.fact, ending.lanes)


def _row_after_row(dims: Sequence[Int], strides: Sequence[Int]) -> Sequence[Int]:
    """Strides that follow from dims, under the condition that they are those given."""
    own: Any = contiguous_strides(tuple(dims))  # type: ignore[arg-type]
    if all(is_known(n, 1) or s == w or n == 1 for n, s, w in zip(dims, own, strides, strict=True)):
        return own
    raise NoShapeFamily(f"an input of dims {dims} has strides {strides}")


class _PlanBuilder:
    """One run of planning, `traced` if sizes may be GuardedInts."""

    def __init__(
        self,
        planner: Planner,
        inputs: Sequence[Fact],
        strides: Sequence[tuple[int, ...] | None],
        traced: bool = False,
    ) -> None:
        self.p, self.traced = planner, traced
        target = None if planner.natives is None else planner.natives.target
        self.plan = Plan(device=planner.device, target=target, inputs=len(inputs))
        self.facts: dict[Value, Fact] = {}
        self.slot: dict[Value, int] = {}
        self.allocation: dict[int, Allocation] = {}
        self.metas: dict[int, Meta] = {}  # None where it is data-dependent
        self.members: dict[int, list[Value]] = {}  # by allocation slot
        self.done: set[Node] = set()
        self.devices: dict[Value, str] = {}
        self.sized: dict[int, Fact] = {}  # constants with GuardedInts, by slot
        self.named: dict[Sym, Int] = {}  # sizes by what the graph calls them
        self.data = planner.promises.data
        for value, fact, own in zip(self.data, inputs, strides, strict=True):
            self.facts[value] = fact = self._one_by_name(value, fact)
            self.devices[value] = HOST if value.device_type == "CPU" else planner.device
            allocation = self._new_allocation(value, "input", self._meta(fact, own))
            frozen = planner.natives.frozen.get(value) if planner.natives is not None else None
            if frozen is not None:
                allocation.kind, self.plan.constants[allocation.slot] = "const", frozen
        self.env = layout.symbols_of((v, self.facts[v]) for v in self.data)

    def ending(self) -> Ending:
        """What completes the plan: all steps are there."""
        for item in self.p.order:
            if isinstance(item, Unit):
                self._unit(item)
            else:
                self._node(item)
                self.done.add(item)
        return Ending(
            self.plan,
            self.slot,
            self.allocation,
            self.metas,
            self.env,
            self.p.promises,
            native=self.p.natives is not None,
            compact=self.p.compact,
            lanes=self.p.lanes,
        )

    @property
    def now(self) -> int:
        """Index of the step about to be added."""
        return len(self.plan.steps)

    # ---- slots and memory ----

    def _new_slot(self, value: Value | None, allocation: Allocation, meta: Meta) -> int:
        slot = self.plan.slots
        self.plan.slots += 1
        self.metas[slot], self.allocation[slot] = meta, allocation
        if value is not None:
            self.slot[value] = slot
            self.members.setdefault(allocation.slot, []).append(value)
        return slot

    def _new_allocation(self, value: Value | None, kind: AllocationKind, meta: Meta) -> Allocation:
        device = self.devices.get(value, self.p.device) if value is not None else self.p.device
        shown = meta if meta is not None else torch.empty(0, device="meta")
        allocation = Allocation(self.plan.slots, kind, shown, device, self.now, self.now)
        self.plan.allocations.append(allocation)
        self._new_slot(value, allocation, meta)
        return allocation

    def fact(self, value: Value) -> Fact:
        """What is known of a value."""
        return self.facts[value]

    def _meta(self, fact: Fact, strides: Sequence[int] | None = None) -> Meta:
        return (layout.strided if self.traced else layout.meta_of)(fact, strides)

    def _meta_like(self, t: torch.Tensor) -> Meta:
        return Strided(t.shape, t.stride(), t.dtype) if self.traced else t.to("meta")

    def _touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.allocation[slot].last = max(self.allocation[slot].last, self.now)

    # ---- nodes ----

    def _node(self, node: Node) -> None:
        row = row_of(node.type)
        if row is None:
            raise GraphError(
                f"the operator table has no operator {node.type!r}",
                node=node.name,
                hint=f"give it a kernel with torchair.ge.register_kernel({node.type!r}, ...)",
            )
        self._choose_device(node, row)
        if row.has(Trait.CONSTANT):
            return self._constant(node.outputs[0], node.attr("value"))
        facts = self._infer(node)
        self.facts.update(zip(node.outputs, facts, strict=True))
        if self._prepared(node) or self._fold(node, row, facts):
            return None
        unknown = any(f.shape is None for f in facts)
        if unknown or any(self.metas[self.slot[v]] is None for v in node.values()):
            return self._late(node, row)
        return self._view(node, row) if row.has(Trait.VIEW) else self._compute(node, row)

    def _choose_device(self, node: Node, row: Row) -> None:
        if self.p.device == HOST:
            return
        fed = [v for port, _, v in node.slots() if v is not None and port not in row.host]
        data = [v for v in fed if v.node.type != "Const"]
        near = self.p.device
        if data and all(self.devices.get(v) == HOST for v in data):
            near = HOST
        for value in node.outputs:
            stamped = {"CPU": HOST, "NPU": self.p.device}.get(value.device_type)
            self.devices[value] = stamped or near

    def _infer(self, node: Node) -> list[Fact]:
        unknown = [Fact(v.dtype) for v in node.outputs]
        if any(self.facts[v].shape is None for v in node.values()):
            return unknown
        try:
            facts = infer(node, self.fact)
        except NoShapeFamily:
            raise
        except Exception as e:
            where = node.origin.line if node.origin else "unknown source line"
            raise GraphError(
                f"{node.type} cannot take these sizes: {e}", node=f"{node.name} ({where})"
            ) from e
        as_traced = any(isinstance(d, Sym) for f in facts for d in f.shape or ())
        facts = [self._with_promises(v, f) for v, f in zip(node.outputs, facts, strict=True)]
        if as_traced:
            self._ask(node, facts)
        return unknown if any(f.dtype == DataType.DT_UNDEFINED for f in facts) else facts

    def _ask(self, node: Node, facts: list[Fact]) -> None:
        """A rule that leaves dims as tracing saw them is asked about the sizes of this plan."""
        for own, fact in zip(infer(node, self._plain), facts, strict=True):
            dims = layout.each_size(value_of, fact).shape
            known = own.shape is not None and is_static(own.shape)
            if known and dims is not None and tuple(own.shape or ()) != dims:
                raise NoShapeFamily(f"{node.name} has other dims than the graph says")

    def _with_promises(self, value: Value, fact: Fact) -> Fact:
        """What tracing knows of a value, where the rule of its node leaves something open. The type
        of what nothing reads does not matter."""
        dtype, shape = fact.dtype, value.shape if fact.shape is None else fact.shape
        if dtype == DataType.DT_UNDEFINED and not value.uses:
            dtype = DataType.DT_FLOAT
        if any(isinstance(d, Sym) for d in shape or ()):
            names = free_symbols(shape or ())
            shape = evaluate(shape or (), self.env) if names <= set(self.env) else None
        if dtype != fact.dtype or shape is not fact.shape:
            fact = Fact(dtype, shape)
        return self._one_by_name(value, fact)

    def _one_by_name(self, value: Value, fact: Fact) -> Fact:
        """Sizes that the graph calls the same are one GuardedInt, under the condition that they
        are."""
        if not self.traced or not layout.numbers_in(fact):
            return fact
        names = iter((*(value.shape or fact.shape or ()), *layout.as_tuple(value.content)))
        return layout.each_size(lambda n: self._size(next(names, n), n), fact)

    def _size(self, name: Any, number: Any) -> Any:
        if name is None or not isinstance(number, GuardedInt):
            return number
        known = self.named.setdefault(name, number) if isinstance(name, Sym) else name
        if known != number:
            return number
        number.guards.equate(number, known)
        return known

    def _prepared(self, node: Node) -> bool:
        """Whether a node was computed before the first call: its results are constants then."""
        natives = self.p.natives
        if natives is None or node not in natives.prepared.nodes:
            return False
        for value in node.outputs:
            tensor = natives.frozen[value]
            allocation = self._new_allocation(value, "const", self._meta_like(tensor))
            self.plan.constants[allocation.slot] = tensor
        return True

    def _fold(self, node: Node, row: Row, facts: list[Fact]) -> bool:
        """Small integers that only depend on sizes become constants of the plan, unless how many
        there are depends on sizes too."""
        if any(v.shape is not None and not is_static(v.shape) for v in node.outputs):
            return False
        found = layout.folded(node, row, facts, self.fact)
        for value, fact in zip(node.outputs, found or (), strict=False):
            if layout.numbers_in(fact):
                flat = len(fact.shape or ()) < 2
                self.facts[value] = fact if flat else Fact(fact.dtype, fact.shape)
                self.sized[self._new_allocation(value, "const", self._meta(fact)).slot] = fact
            else:
                self._constant(value, layout.tensor_of(fact))
        return found is not None

    def _constant(self, value: Value, tensor: torch.Tensor) -> None:
        dtype = self.facts[value].dtype if value in self.facts else value.dtype
        self.facts[value] = Fact(dtype, tuple(tensor.shape), layout.content_of(tensor))
        allocation = self._new_allocation(value, "const", self._meta_like(tensor))
        self.plan.constants[allocation.slot] = tensor.to(allocation.device)

    def _view(self, node: Node, row: Row) -> None:
        slot = self.slot[node.values()[0]]
        kernel = row.kernel(Op(node, self.fact))
        base = self.metas[slot]
        views = layout.as_list(kernel(base))
        if any(not layout.shares(v, base) for v in views):
            slot, base = self._copy(node, slot, base)
            views = layout.as_list(kernel(base))
        self._touch([slot])
        allocation = self.allocation[slot]
        outs = [
            self._new_slot(value, allocation, meta)
            for value, meta in zip(node.outputs, views, strict=True)
        ]
        self.plan.steps.append(Step(node, "view", kernel, [slot], outs))

    def _copy(self, node: Node, slot: int, base: Meta) -> tuple[int, Meta]:
        """Lay a strided value out anew so that the view after it is one."""
        self._touch([slot])
        dense = layout.with_strides(base, layout.dense_strides(base))
        made = self._new_allocation(None, "arena", dense)
        made.device = self.allocation[slot].device
        self.plan.steps.append(Step(node, "copy", None, [slot], [made.slot]))
        return made.slot, dense

    def _compute(self, node: Node, row: Row) -> None:
        try:
            kernel = row.kernel(Op(node, self._plain if self.traced else self.fact))
        except MissingHostValue:
            return self._late(node, row)
        args = tensor_args(node, row, self.slot.__getitem__)
        before = self._successor(node, row)
        self._touch([self.slot[v] for v in node.values()])
        kind: AllocationKind = "arena" if row.out else "torch"
        allocations = [
            self._new_allocation(v, kind, self._torch_meta(node, row, v)) for v in node.outputs
        ]
        if before is not None:
            allocations[0].successor_of = before
        made = [r.slot for r in allocations]
        self.plan.steps.append(Step(node, "out" if row.out else "call", kernel, args, made))
        return None

    def _plain(self, value: Value) -> Fact:
        return layout.each_size(value_of, self.facts[value])

    def _torch_meta(self, node: Node, row: Row, value: Value) -> Meta:
        """What a result of torch will look like; where it is read as it is, another is copied."""
        meta = self._meta(self.facts[value])
        if row.has(Trait.CHANNELS_LAST):
            return layout.in_format(meta, torch.channels_last)
        if not row.has(Trait.KEEPS_FORMAT) or meta.dim() != 4:
            return meta
        read = [self.metas[self.slot[v]] for v in node.values()]
        if not any(m is not None and is_channels_last(layout.plain(m)) for m in read):
            return meta
        return layout.in_format(meta, torch.channels_last)

    def _successor(self, node: Node, row: Row) -> Allocation | None:
        """The buffer of an input that this step may overwrite, if it ends here: an operand of an
        elementwise one, or what it updates."""
        if not row.out or len(node.outputs) != 1:
            return None
        candidates = node.values() if row.has(Trait.ELEMENTWISE) else []
        if row.has(Trait.WRITES_FIRST) and node.values().count(node.values()[0]) == 1:
            candidates = node.values()[:1]
        made = self._meta(self.facts[node.outputs[0]])
        for value in candidates:
            slot = self.slot[value]
            allocation = self.allocation[slot]
            if allocation.kind != "arena" or self.metas[slot] is not allocation.meta:
                continue
            alike = allocation.meta.dtype == made.dtype and same_dims(
                allocation.meta.shape, made.shape
            )
            if alike and self._ends_here(allocation, node):
                return allocation
        return None

    def _ends_here(self, allocation: Allocation, node: Node) -> bool:
        """Whether this node is the last reader, and reads no other view of the same memory."""
        slots = [self.slot[v] for v in node.values()]
        if any(
            self.allocation[s] is allocation and self.metas[s] is not allocation.meta for s in slots
        ):
            return False
        readers = {u for v in self.members.get(allocation.slot, []) for u in v.users()}
        return all(u is node or u in self.done for u in readers)

    # ---- native units ----

    def _unit(self, unit: Unit) -> None:
        """One kernel for all nodes of a unit, or its nodes one by one if that cannot be."""
        assert self.p.natives is not None
        inside = self.p.natives.inside(unit)
        for node in inside:
            if (row := row_of(node.type)) is not None:
                self._choose_device(node, row)
            self.facts.update(zip(node.outputs, self._infer(node), strict=True))
        if not self._may_be_native(unit):
            return self._one_by_one(unit, inside)
        outs = {v: self._native_meta(unit, v) for v in unit.outputs}
        metas = {v: self.metas[self.slot[v]] for v in unit.inputs} | outs
        call = self.p.natives.emit(unit, self.fact, metas.__getitem__)
        if call is None:
            return self._one_by_one(unit, inside)
        self._add_native_step(unit, call, outs)
        self.done.update(inside)
        return None

    def _may_be_native(self, unit: Unit) -> bool:
        """Whether layouts of inputs and dims of results are known, and all are on the device."""
        return (
            all(self.metas[self.slot[v]] is not None for v in unit.inputs)
            and all(self.facts[v].shape is not None for v in unit.outputs)
            and self._is_on_device([*unit.inputs, *unit.outputs])
        )

    def _add_native_step(self, unit: Unit, call: Native, outs: Mapping[Value, Meta]) -> None:
        """The step of a kernel, whose results `outs` get memory in the arena."""
        assert self.p.natives is not None
        slots = [self.slot[v] for v in unit.inputs]
        for slot in slots:
            allocation = self.allocation[slot]
            allocation.strict_strides = allocation.strict_strides or allocation.kind == "torch"
            allocation.fixed = allocation.fixed or allocation.kind == "arena"
        self._touch(slots)
        made = {v: self._new_allocation(v, "arena", meta) for v, meta in outs.items()}
        for allocation in made.values():
            allocation.fixed = True
        call.operands = [self.slot[v] for v in (*unit.inputs, *unit.outputs)]
        call.pointwise = self.p.natives.is_pointwise(unit)
        node, update = unit.anchor, self.p.natives.updated(unit)
        if update is not None:
            again = self.p.natives.rereads(unit)
            slots = [self.slot[update], *(s for s in slots if again or s != self.slot[update])]
            call.copies, node = True, unit.group.nodes[-1]
        step = Step(node, "native", None, list(slots), [r.slot for r in made.values()])
        step.native, step.also, step.values = call, unit.nodes, list(made)
        self.plan.steps.append(step)

    def _is_on_device(self, values: Sequence[Value]) -> bool:
        """Whether all values live where kernels run: some of a GPU's graph are on the host."""
        here = self.p.device
        return here == HOST or all(self.devices.get(v, here) == here for v in values)

    def _one_by_one(self, unit: Unit, inside: list[Node]) -> None:
        for node in inside:
            if node not in self.done and node.outputs[0] not in self.slot:
                self._node(node)
            self.done.add(node)

    def _native_meta(self, unit: Unit, value: Value) -> Meta:
        """A native result. Its strides are what was promised of it, what the kernel of a reader
        asks for, or those of an operand of the same dims, so that layouts such as channels-last
        carry through."""
        assert self.p.natives is not None
        meta, promises = self._meta(self.facts[value]), self.p.promises
        updated = self.p.natives.updated(unit)
        if updated is not None:
            return layout.laid_out(meta, self.metas[self.slot[updated]].stride())
        if value in promises.results:
            k = promises.results.index(value)
            promised = None if k in promises.assigned else promises.strides(k, self.env)
            return layout.laid_out(meta, promised)
        if has_trait(value.node, Trait.CHANNELS_LAST):
            return layout.in_format(meta, torch.channels_last)
        asked = layout_asked_for(value)
        if asked is not None:
            return layout.in_order(meta, asked)
        if self.p.natives.target.library_channels_last and is_wanted_channels_last(value):
            return layout.in_format(meta, torch.channels_last)
        rows = meta.dim() - 1 in unit.group.reduced  # these are walked through as a whole
        for v in unit.inputs:
            like = self.metas[self.slot[v]]
            if same_dims(like.shape, meta.shape) and (not rows or _keeps_channels(unit, like)):
                plain = layout.plain(like)
                if not plain.is_contiguous() and layout.is_dense(plain.shape, plain.stride()):
                    return layout.laid_out(meta, like.stride())
        if rows:
            return meta
        source = self.metas[self.slot[unit.inputs[0]]] if unit.kind == "pool" else None
        close = source is not None and source.stride()[1] == 1
        if close or (unit.kind == "conv" and self.p.natives.target.channels_last):
            return layout.in_format(meta, torch.channels_last)
        return meta

    def _late(self, node: Node, row: Row) -> None:
        if self.traced:
            raise NoShapeFamily(f"the shape of {node.name} is data-dependent")
        args = tensor_args(node, row, self.slot.__getitem__)
        self._touch([self.slot[v] for v in node.values()])
        outs = []
        for value in node.outputs:
            self.facts[value] = Fact(value.dtype)
            outs.append(self._new_allocation(value, "torch", None).slot)
        slots = {v: self.slot[v] for v in node.values()}
        self.plan.steps.append(Step(node, "late", None, args, outs, slots=slots))


def _keeps_channels(unit: Unit, meta: Meta) -> bool:
    """Whether a unit reduces the points of channels-last images for each channel, as a batch norm
    or a group norm does."""
    reduced = set(unit.group.reduced) - {0}
    return reduced == {2, 3} and is_channels_last(layout.plain(meta))


def layout_asked_for(value: Value) -> DimOrder | None:
    """The layout that the kernel of some reader wants a value in, if it minds."""
    for node in value.users():
        row = row_of(node.type)
        if row is not None and row.layouts is not None:
            pairs = zip(node.values(), row.layouts(node), strict=True)
            found = next((order for v, order in pairs if v is value and order is not None), None)
            if found is not None:
                return found
    return None
