"""From a GE graph and the sizes of one call to a Plan.

Every value gets a slot. Views are worked out on meta tensors, so that they cost nothing or become
one copy; small integers that steer shapes are computed now; the rest becomes steps that write into
planned buffers. Values whose dims only the data tell become late steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.catalog import Op, Row, Trait, infer, row_of
from torchair.catalog.reference import tensor_args
from torchair.engine.fuse import Unit
from torchair.engine.memory import Buffer, lower_bound, place
from torchair.engine.natives import Natives
from torchair.engine.plan import OutputSpec, Plan, Root, Step, WriteBack
from torchair.engine.strides import (
    HOST_SIZE,
    as_list,
    content_of,
    count_of,
    dense_strides,
    flat_slots,
    is_dense,
    is_known,
    is_writable,
    meta_of,
    same_strides,
    shares,
    with_strides,
)
from torchair.errors import GraphError, MissingHostValue
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.ge.shapes import Sym, evaluate

_WORTH_FREEING = 1 << 16  # bytes that a kernel allocated; less is dropped when the call ends
_SKIPPED = ("Data", "RefData", "NetOutput")


@dataclass(frozen=True)
class Layout:
    """What an output must look like. Results of one alias group may share memory."""

    dims: tuple[Any, ...]  # may be symbolic, like the strides
    strides: tuple[Any, ...]
    alias_group: int
    offset: Any = None  # where it must begin in its memory, None if that does not matter


class Planner:
    """Makes plans for one graph; `assigned` maps an output to the input it updates."""

    def __init__(
        self,
        graph: Graph,
        device: str = "cpu",
        assigned: dict[int, int] | None = None,
        layouts: Sequence[Layout | None] | None = None,
        natives: Natives | None = None,
    ) -> None:
        self.graph = graph
        self.device = device
        self.natives = natives
        constants = [n for n in graph.nodes if n.type == "Const"]
        self.order: list[Unit | Node] = [n for n in graph.nodes if n.type not in _SKIPPED]
        if natives is not None:
            self.order = [*constants, *natives.fusion.order]
        if graph.output is None:
            raise GraphError("the graph has no NetOutput", graph=graph.name)
        self.results: list[Value] = graph.output.values()
        self.assigned = assigned or {}
        self.layouts = list(layouts) if layouts is not None else [None] * len(self.results)

    def plan(
        self, inputs: Sequence[Fact], strides: Sequence[tuple[int, ...] | None] | None = None
    ) -> Plan:
        """A plan for inputs of these types and dims; strides are contiguous where none is given."""
        return _Build(self, inputs, strides or [None] * len(inputs)).run()


class _Build:
    """One run of planning."""

    def __init__(
        self, planner: Planner, inputs: Sequence[Fact], strides: Sequence[tuple[int, ...] | None]
    ) -> None:
        self.p = planner
        self.plan = Plan(device=planner.device, inputs=len(inputs))
        self.facts: dict[Value, Fact] = {}
        self.slot: dict[Value, int] = {}
        self.root: dict[int, Root] = {}
        self.metas: dict[int, torch.Tensor | None] = {}
        self.members: dict[int, list[Value]] = {}  # by root slot
        self.done: set[Node] = set()
        self.devices: dict[Value, str] = {}
        self.data = [n.outputs[0] for n in planner.graph.data]
        for value, fact, own in zip(self.data, inputs, strides, strict=True):
            self.facts[value] = fact
            self.devices[value] = "cpu" if value.device_type == "CPU" else planner.device
            meta = meta_of(fact)
            root = self._new_root(value, "input", meta if own is None else with_strides(meta, own))
            frozen = planner.natives.frozen.get(value) if planner.natives is not None else None
            if frozen is not None:
                root.kind, self.plan.constants[root.slot] = "const", frozen
        self.env = self._symbols()

    def run(self) -> Plan:
        for item in self.p.order:
            if isinstance(item, Unit):
                self._unit(item)
            else:
                self._node(item)
                self.done.add(item)
        self._outputs(self.env)
        self._write_backs()
        self._place()
        self._bind_views()
        return self.plan

    @property
    def now(self) -> int:
        """Index of the step about to be added."""
        return len(self.plan.steps)

    # ---- slots and memory ----

    def _new_slot(self, value: Value | None, root: Root | None, meta: torch.Tensor | None) -> int:
        slot = self.plan.slots
        self.plan.slots += 1
        self.metas[slot] = meta
        if value is not None:
            self.slot[value] = slot
        if root is not None:
            self.root[slot] = root
            if value is not None:
                self.members.setdefault(root.slot, []).append(value)
        return slot

    def _new_root(self, value: Value | None, kind: str, meta: torch.Tensor | None) -> Root:
        slot = self._new_slot(None, None, meta)
        device = self.devices.get(value, self.p.device) if value is not None else self.p.device
        shown = meta if meta is not None else torch.empty(0, device="meta")
        root = Root(slot, kind, shown, device, self.now, self.now)
        self.plan.roots.append(root)
        self.root[slot] = root
        if value is not None:
            self.slot[value] = slot
            self.members.setdefault(slot, []).append(value)
        return root

    def _fact(self, value: Value) -> Fact:
        return self.facts[value]

    def _touch(self, slots: Sequence[int], when: int | None = None) -> None:
        for slot in slots:
            root = self.root[slot]
            root.last = max(root.last, self.now if when is None else when)

    # ---- nodes ----

    def _node(self, node: Node) -> None:
        row = row_of(node.type)
        if row is None:
            raise GraphError(f"the catalogue has no operator {node.type!r}", node=node.name)
        self._choose_device(node, row)
        if row.has(Trait.CONSTANT):
            return self._constant(node.outputs[0], node.attr("value"))
        facts = self._infer(node)
        self.facts.update(zip(node.outputs, facts, strict=True))
        if self._fold(node, row, facts):
            return None
        unknown = any(f.shape is None for f in facts)
        if unknown or any(self.metas[self.slot[v]] is None for v in node.values()):
            return self._late(node, row)
        return self._view(node, row) if row.has(Trait.VIEW) else self._compute(node, row)

    def _choose_device(self, node: Node, row: Row) -> None:
        if self.p.device == "cpu":
            return
        fed = [v for port, _, v in node.slots() if v is not None and port not in row.host]
        data = [v for v in fed if v.node.type != "Const"]
        near = self.p.device
        if data and all(self.devices.get(v) == "cpu" for v in data):
            near = "cpu"
        for value in node.outputs:
            stamped = {"CPU": "cpu", "NPU": self.p.device}.get(value.device_type)
            self.devices[value] = stamped or near

    def _infer(self, node: Node) -> list[Fact]:
        unknown = [Fact(v.dtype) for v in node.outputs]
        if any(self.facts[v].shape is None for v in node.values()):
            return unknown
        try:
            facts = infer(node, self._fact)
        except Exception as e:
            where = node.origin.line if node.origin else "unknown source line"
            raise GraphError(
                f"{node.type} cannot take these sizes: {e}", node=f"{node.name} ({where})"
            ) from e
        return unknown if any(f.dtype == DataType.DT_UNDEFINED for f in facts) else facts

    def _fold(self, node: Node, row: Row, facts: list[Fact]) -> bool:
        """Small integers that only depend on sizes become constants of the plan."""
        if not node.outputs or row.has(Trait.SIDE_EFFECT | Trait.RANDOM):
            return False
        if not all(is_known(f) for f in facts):
            inputs = [self.facts[v] for v in node.values()]
            small = all(f.shape is not None and count_of(f) <= HOST_SIZE for f in facts)
            if not small or not inputs or not all(is_known(f) for f in inputs):
                return False
            facts = self._evaluate(node, row)
        for value, fact in zip(node.outputs, facts, strict=True):
            tensor = torch.tensor(fact.content, dtype=ge_to_torch(fact.dtype))
            self._constant(value, tensor.reshape(fact.shape))  # type: ignore[arg-type]
        return True

    def _evaluate(self, node: Node, row: Row) -> list[Fact]:
        def tensor(v: Value) -> torch.Tensor:
            fact = self.facts[v]
            made = torch.tensor(fact.content, dtype=ge_to_torch(fact.dtype))
            return made.reshape(fact.shape)  # type: ignore[arg-type]

        result = row.kernel(Op(node, self._fact))(*tensor_args(node, row, tensor))
        return [
            Fact(self.facts[v].dtype, tuple(t.shape), t.tolist())
            for v, t in zip(node.outputs, as_list(result), strict=True)
        ]

    def _constant(self, value: Value, tensor: torch.Tensor) -> None:
        dtype = self.facts[value].dtype if value in self.facts else value.dtype
        self.facts[value] = Fact(dtype, tuple(tensor.shape), content_of(tensor))
        root = self._new_root(value, "const", tensor.to("meta"))
        self.plan.constants[root.slot] = tensor.to(root.device)

    def _view(self, node: Node, row: Row) -> None:
        slot = self.slot[node.values()[0]]
        kernel = row.kernel(Op(node, self._fact))
        base = self.metas[slot]
        assert base is not None
        views = as_list(kernel(base))
        if any(not shares(v, base) for v in views):
            slot, base = self._copy(node, slot, base)
            views = as_list(kernel(base))
        self._touch([slot])
        root = self.root[slot]
        outs = [
            self._new_slot(value, root, meta)
            for value, meta in zip(node.outputs, views, strict=True)
        ]
        self.plan.steps.append(Step(node, "view", kernel, [slot], outs))

    def _copy(self, node: Node, slot: int, base: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Lay a strided value out anew so that the view after it is one."""
        self._touch([slot])
        dense = torch.empty_like(base, memory_format=torch.contiguous_format)
        made = self._new_root(None, "arena", dense)
        made.device = self.root[slot].device
        self.plan.steps.append(Step(node, "copy", None, [slot], [made.slot]))
        return made.slot, dense

    def _compute(self, node: Node, row: Row) -> None:
        try:
            kernel = row.kernel(Op(node, self._fact))
        except MissingHostValue:
            return self._late(node, row)
        args = tensor_args(node, row, self.slot.__getitem__)
        before = self._successor(node, row)
        self._touch([self.slot[v] for v in node.values()])
        kind = "arena" if row.out else "torch"
        roots = [self._new_root(v, kind, meta_of(self.facts[v])) for v in node.outputs]
        if before is not None:
            roots[0].successor_of = before
        made = [r.slot for r in roots]
        self.plan.steps.append(Step(node, "out" if row.out else "call", kernel, args, made))
        return None

    def _successor(self, node: Node, row: Row) -> Root | None:
        """The buffer of an input that this elementwise step may overwrite, if it ends here."""
        if not (row.out and row.has(Trait.ELEMENTWISE) and len(node.outputs) == 1):
            return None
        wanted = self.metas_like(self.facts[node.outputs[0]])
        for value in node.values():
            slot = self.slot[value]
            root = self.root[slot]
            if root.kind != "arena" or self.metas[slot] is not root.meta:
                continue
            if (root.meta.shape, root.meta.dtype) == wanted and self._ends_here(root, node):
                return root
        return None

    def metas_like(self, fact: Fact) -> tuple[Any, torch.dtype]:
        """Dims and type to compare a buffer with."""
        return torch.Size(fact.shape or ()), ge_to_torch(fact.dtype)  # type: ignore[arg-type]

    def _ends_here(self, root: Root, node: Node) -> bool:
        """Whether this node is the last reader, and reads no other view of the same memory."""
        slots = [self.slot[v] for v in node.values()]
        if any(self.root[s] is root and self.metas[s] is not root.meta for s in slots):
            return False
        readers = {u for v in self.members.get(root.slot, []) for u in v.users()}
        return all(u is node or u in self.done for u in readers)

    # ---- native units ----

    def _unit(self, unit: Unit) -> None:
        """One kernel for all nodes of a unit, or its nodes one by one if that cannot be."""
        assert self.p.natives is not None
        inside = sorted([*unit.nodes, *unit.views], key=self.p.natives.position.__getitem__)
        for node in inside:
            facts = self._infer(node)
            self.facts.update(zip(node.outputs, facts, strict=True))
        known = all(self.metas[self.slot[v]] is not None for v in unit.inputs)
        if not known or any(self.facts[v].shape is None for v in unit.outputs):
            return self._one_by_one(unit, inside)
        outs = {v: self._native_meta(unit, v) for v in unit.outputs}
        layouts = {v: self.metas[self.slot[v]] for v in unit.inputs} | outs
        call = self.p.natives.emit(unit, self._fact, layouts.__getitem__)  # type: ignore[arg-type]
        if call is None:
            return self._one_by_one(unit, inside)
        slots = [self.slot[v] for v in unit.inputs]
        for slot in slots:
            root = self.root[slot]
            if root.kind == "torch":
                root.settled = True
        self._touch(slots)
        made = {v: self._new_root(v, "arena", meta) for v, meta in outs.items()}
        for root in made.values():
            root.fixed = True
        places = {v: self.slot[v] for v in [*unit.inputs, *unit.outputs]}
        native = self.p.natives.bind(call, places)
        update = self.p.natives.updated(unit)
        if update is not None:
            slots = [self.slot[update], *(s for s in slots if s != self.slot[update])]
            native.copies = True
        native.pointwise = self.p.natives.is_pointwise(unit)
        node = unit.group.nodes[-1] if update is not None else unit.head
        step = Step(node, "native", None, list(slots), [r.slot for r in made.values()])
        step.native, step.also = native, unit.nodes
        self.plan.steps.append(step)
        self.done.update(inside)
        return None

    def _one_by_one(self, unit: Unit, inside: list[Node]) -> None:
        for node in inside:
            if node not in self.done and node.outputs[0] not in self.slot:
                self._node(node)
            self.done.add(node)

    def _native_meta(self, unit: Unit, value: Value) -> torch.Tensor:
        """Dims and strides a native result gets: what was promised of it, or those of an operand
        of the same dims, so that layouts such as channels-last carry through."""
        assert self.p.natives is not None
        meta = meta_of(self.facts[value])
        updated = self.p.natives.updated(unit)
        if updated is not None:
            own = self.metas[self.slot[updated]]
            return own if own is not None else meta
        if value in self.p.results:
            k = self.p.results.index(value)
            layout = self.p.layouts[k]
            if layout is None or k in self.p.assigned:
                return meta
            strides = evaluate(layout.strides, self.env)
            return with_strides(meta, strides) if is_dense(meta.shape, strides) else meta
        for v in unit.inputs:
            like = self.metas[self.slot[v]]
            if like is not None and like.shape == meta.shape and not like.is_contiguous():
                if is_dense(like.shape, like.stride()):
                    return with_strides(meta, like.stride())
        return meta

    def _late(self, node: Node, row: Row) -> None:
        args = tensor_args(node, row, self.slot.__getitem__)
        self._touch([self.slot[v] for v in node.values()])
        outs = []
        for value in node.outputs:
            self.facts[value] = Fact(value.dtype)
            outs.append(self._new_root(value, "torch", None).slot)
        slots = {v: self.slot[v] for v in node.values()}
        self.plan.steps.append(Step(node, "late", None, args, outs, slots=slots))

    # ---- the end of the graph ----

    def _symbols(self) -> dict[str, int]:
        env: dict[str, int] = {}
        for value in self.data:
            fact = self.facts[value]
            if isinstance(value.content, Sym) and value.content.expr.is_Symbol and is_known(fact):
                env[value.content.expr.name] = fact.content
            for declared, real in zip(value.shape or (), fact.shape or (), strict=False):
                if isinstance(declared, Sym) and declared.expr.is_Symbol:
                    env[declared.expr.name] = real  # type: ignore[assignment]
        return env

    def _outputs(self, env: dict[str, int]) -> None:
        members = Counter(self._group(k) for k in range(len(self.p.results)))
        wanted = [self._wanted(k, self.slot[v], env) for k, v in enumerate(self.p.results)]
        laid_out: set[int] = set()
        for k, value in enumerate(self.p.results):
            slot = self.slot[value]
            self._touch([slot], self.now)
            if k not in self.p.assigned and slot not in laid_out:
                laid_out.add(slot)
                self._lay_out(slot, wanted[k])
        owner: dict[int, int] = {}  # root slot: the alias group that has it
        for k, value in enumerate(self.p.results):
            slot = self.slot[value]
            if k in self.p.assigned:
                self.plan.outputs.append(OutputSpec(slot))
                continue
            group, root = self._group(k), self.root[slot]
            mine = root.kind in ("arena", "fresh", "torch")
            mine = mine and owner.setdefault(root.slot, group) == group
            offset = self._offset(k, env)
            spec = self._leave(slot, root, wanted[k], offset, mine, shared=members[group] > 1)
            spec.again = any(slot == before.slot for before in self.plan.outputs)
            self.plan.outputs.append(spec)

    def _group(self, k: int) -> int:
        layout = self.p.layouts[k]
        return layout.alias_group if layout is not None else -1 - k

    def _lay_out(self, slot: int, wanted: tuple[int, ...] | None) -> None:
        """Give a buffer that leaves the graph whole the strides it must have, and its views
        theirs."""
        root, meta = self.root[slot], self.metas[slot]
        if meta is None or meta is not root.meta or root.kind != "arena" or wanted is None:
            return
        if root.fixed:
            return
        if same_strides(meta, wanted) or not is_dense(meta.shape, wanted):
            return
        root.meta = self.metas[slot] = with_strides(meta, wanted)
        for step in self.plan.steps:
            if step.kind != "view" or self.root[step.args[0]] is not root:
                continue
            assert step.kernel is not None
            views = as_list(step.kernel(self.metas[step.args[0]]))
            self.metas.update(zip(step.outs, views, strict=True))

    def _offset(self, k: int, env: dict[str, int]) -> int | None:
        layout = self.p.layouts[k]
        if layout is None or layout.offset is None:
            return None
        try:
            return evaluate([layout.offset], env)[0]
        except KeyError:  # a size that only the data tell
            return None

    def _leave(
        self, slot: int, root: Root, wanted: tuple[int, ...] | None, offset: int | None,
        mine: bool, shared: bool,
    ) -> OutputSpec:  # fmt: skip
        meta = self.metas[slot]
        if meta is None or root.kind == "torch":
            usable = wanted is None or meta is None or is_writable(meta.shape, wanted)
            copied = not mine or (offset or 0) != 0
            return OutputSpec(slot, wanted if usable else None, copied, offset or 0)
        wanted = wanted if wanted is not None else dense_strides(meta)
        whole = meta.numel() >= root.meta.numel() or shared  # else a copy frees the larger buffer
        in_place = offset is None or offset == meta.storage_offset()
        if mine and whole and in_place and same_strides(meta, wanted):
            root.kind = "fresh"
            return OutputSpec(slot, wanted)
        if not is_writable(meta.shape, wanted):
            wanted = dense_strides(meta)
        return OutputSpec(slot, wanted, True, offset or 0)

    def _wanted(self, k: int, slot: int, env: dict[str, int]) -> tuple[int, ...] | None:
        layout, meta = self.p.layouts[k], self.metas[slot]
        if layout is None or meta is None:
            return None
        try:
            dims, strides = evaluate(layout.dims, env), evaluate(layout.strides, env)
        except KeyError:  # a size that only the data tell
            return None
        if dims != tuple(meta.shape):
            made = self.p.results[k]
            raise GraphError(
                f"output {k} has dims {list(meta.shape)}, tracing promised {list(dims)}",
                node=made.node.name,
            )
        return strides

    def _write_backs(self) -> None:
        written = {self.slot[self.data[d]] for d in self.p.assigned.values()}
        for k, d in self.p.assigned.items():
            target = self.slot[self.data[d]]
            source = self.slot[self.p.results[k]]
            root = self.root[source]
            if source == target or self._tie(source, target):
                continue
            staged = root.kind == "input" and root.slot in written
            self.plan.write_backs.append(WriteBack(target, source, staged))

    def _tie(self, source: int, target: int) -> bool:
        """Let the value be computed in the memory of the input it updates, if no one needs the
        old content any more."""
        root, data = self.root[source], self.root[target]
        if root.kind != "arena" or self.metas[source] is not root.meta:
            return False
        if root.meta.shape != data.meta.shape or root.meta.dtype != data.meta.dtype:
            return False
        if self.p.natives is not None and root.meta.stride() != data.meta.stride():
            return False
        if data.last > root.first or root.tied_to >= 0 or data.tied_to >= 0:
            return False
        if data.last == root.first and not self._updates(root, target):
            return False
        root.kind, root.tied_to, data.tied_to = "tied", target, target
        return True

    def _updates(self, root: Root, target: int) -> bool:
        """Whether the step that makes this value may read the input while overwriting it."""
        step = self.plan.steps[root.first]
        row = row_of(step.node.type)
        assert row is not None
        if step.native is not None and not step.native.copies:
            return step.native.pointwise and all(
                self.metas[a] is self.root[a].meta for a in step.args if self.root[a].slot == target
            )
        reads = [a for a in flat_slots(step.args) if self.root[a].slot == target]
        if row.has(Trait.WRITES_FIRST):
            return step.args[0] == target and len(reads) == 1
        return row.has(Trait.ELEMENTWISE) and all(a == target for a in reads)

    def _place(self) -> None:
        arena = [r for r in self.plan.roots if r.kind == "arena"]
        buffers: dict[int, Buffer] = {}
        chosen: dict[int, Buffer] = {}
        for root in arena:
            before = root.successor_of
            if before is not None and before.kind == "arena" and before.last == root.first:
                buffer = chosen[before.slot]
                buffer.last = max(buffer.last, root.last)
            else:
                buffer = buffers[root.slot] = Buffer(root.size, root.first, root.last)
            chosen[root.slot] = buffer
        self.plan.arena_size = place(list(buffers.values()))
        self.plan.arena_floor = lower_bound(list(buffers.values()))
        for root in arena:
            root.offset = chosen[root.slot].offset

    def _bind_views(self) -> None:
        """Views of planned or constant memory are made once, the others at every call."""
        for slot, root in self.root.items():
            large = self.metas[slot] is None or root.size >= _WORTH_FREEING
            if root.kind == "torch" and root.last < self.now and large:
                self.plan.steps[root.last].frees.append(slot)
        self._copy_before_updates()
        kept: list[Step] = []
        read = self._read_by_torch()
        for step in self.plan.steps:
            planned = step.kind == "view" and self.root[step.args[0]].kind in ("arena", "const")
            if step.kind != "view" or read.intersection(step.outs):
                (self.plan.bound if planned else kept).append(step)
        self.plan.steps = kept
        self.plan.read = read
        self.plan.places = {
            slot: (root, self._bytes(slot)) for slot, root in self.root.items()
        }

    def _copy_before_updates(self) -> None:
        """Native code that updates parts of a value begins with a copy, if it is not in place."""
        steps: list[Step] = []
        for step in self.plan.steps:
            updates = step.native is not None and step.native.copies
            if updates and self.root[step.outs[0]].kind != "tied":
                steps.append(Step(step.node, "copy", None, [step.args[0]], [step.outs[0]]))
            steps.append(step)
        self.plan.steps = steps

    def _bytes(self, slot: int) -> int:
        meta = self.metas[slot]
        return 0 if meta is None else int(meta.storage_offset()) * meta.element_size()

    def _read_by_torch(self) -> set[int]:
        """Slots that must exist as tensors, because torch works on them or they leave."""
        read = {o.slot for o in self.plan.outputs}
        read |= {s for w in self.plan.write_backs for s in (w.input_slot, w.value_slot)}
        for step in reversed(self.plan.steps):
            if step.kind == "native":
                continue
            if step.kind != "view" or read.intersection(step.outs):
                read |= {*flat_slots(step.args), *step.outs, *step.slots.values()}
        return read
