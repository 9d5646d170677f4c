"""The steps of a compiled graph: what each computes, why it ends there, what it moves and costs;
and what this machine could do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from torchair.codegen.kernel_cache import key_of, store
from torchair.codegen.streams import streams_of
from torchair.devices.base import GraphCall, StepWatcher
from torchair.engine.inspect.timeline import row_name
from torchair.engine.plan.records import Plan, Step, flat_slots
from torchair.engine.run.executor import RunStep
from torchair.ge.graph import Node, Value
from torchair.log import logger
from torchair.operators import Trait, has_trait
from torchair.process import LoadMeter, processor
from torchair.torch_private import cuda

# ---- what this machine can do, measured once and kept on disk ----

_SIDES = {"cpu": 256, "cuda": 4096}  # of the matrices that are multiplied
_FAR = {"cpu": 32 << 20, "cuda": 512 << 20}  # bytes that are copied, more than caches hold
_NEAR = 256 << 10  # bytes that are copied in a cache
_TRIES = 40  # the best counts: others may be busy with the machine
LOADED = 0.25  # cores of other processes from which on times are said to be too long
_HEAD_START = 400_000  # cycles that a GPU is busy with while it is asked for what is timed


@dataclass(frozen=True)
class MachineRates:
    """The most that was seen, with as many threads as torch has."""

    bytes: float  # of memory, read and written in a second
    near: float  # the same, of a cache
    operations: float  # additions and multiplications of float32 in a second
    others: float = 0.0  # cores that other processes kept busy meanwhile

    @property
    def loaded(self) -> bool:
        """Whether the machine can probably do more."""
        return self.others > LOADED

    def least_seconds(self, moved: float, operations: float) -> float:
        """About how long the machine needs to move and compute so much."""
        rate = self.bytes if moved > 4 * _NEAR else self.near
        return max(moved / rate, operations / self.operations)

    def with_seen(self, moved: float, operations: float, seconds: float) -> MachineRates:
        """The same, or better where something that ran shows that the machine can do more."""
        shown = moved / seconds
        places = (shown, 0.0) if moved > 4 * _NEAR else (0.0, shown)
        return self.or_better(MachineRates(*places, operations / seconds, self.others))

    def or_better(self, other: MachineRates) -> MachineRates:
        """The better of both, figure by figure."""
        most = MachineRates(*map(max, astuple(self), astuple(other)))
        return replace(most, others=min(self.others, other.others))


def rates(device: str, units: Sequence[UnitRow] = ()) -> MachineRates:
    """Of a device, as `cpu` or `cuda:0`: measured once, and kept. If one of these kernels has more
    than all, the machine was busy when they were measured, and they are measured again; as they
    are when others kept it busy then, and there is less to do now."""
    threads = torch.get_num_threads()
    gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if gpu else processor() or "cpu"
    key = key_of("rates of a machine 4", name, str(threads), torch.__version__)
    known = _kept(key)
    fits = known is not None and all(u.share(known) <= 1 for u in units if u.seconds)
    if known is not None and fits and not _quieter(known):
        return known
    with LoadMeter() as meter:
        made = _measured(device)
    made = replace(made, others=round(meter.others, 2))
    made = made if known is None else made.or_better(known)
    store().put(key, json.dumps(asdict(made)).encode())
    return made


def _quieter(known: MachineRates) -> bool:
    """Whether rates were measured on a busy machine that is less busy now."""
    return known.loaded and hasattr(os, "getloadavg") and os.getloadavg()[0] < known.others


def _kept(key: str) -> MachineRates | None:
    known = store().get(key)
    try:
        return None if known is None else MachineRates(**json.loads(known))
    except (ValueError, TypeError) as e:
        logger.warning("rates of this machine are measured again: %s", e)
        return None


def _measured(device: str) -> MachineRates:
    kind = "cpu" if streams_of(device) is None else "cuda"
    side, far = _SIDES[kind], _copying(_FAR[kind], device)
    dtypes = (torch.float32, torch.bfloat16) if kind == "cuda" else (torch.float32,)
    if kind == "cuda":  # to read alone may be quicker
        source = torch.ones(_FAR[kind] // 4, device=device)
        far = max(far, _FAR[kind] / _best(source.sum, device))
    products = [_multiplying(side, dtype, device) for dtype in dtypes]
    return MachineRates(far, _copying(_NEAR, device), 2 * side**3 / min(products))


def _multiplying(side: int, dtype: torch.dtype, device: str) -> float:
    a = torch.ones(side, side, dtype=dtype, device=device)
    b, c = torch.ones_like(a), torch.empty_like(a)
    return _best(lambda: torch.mm(a, b, out=c), device)


def _copying(size: int, device: str) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: str) -> float:
    return max(min(seconds_of(work, device) for _ in range(_TRIES)), 1e-9)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """What some work takes. A GPU tells the time itself, and is busy until it has been asked for
    all of it: what the host does meanwhile does not count."""
    if not device.startswith("cuda"):
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cuda.sleep(_HEAD_START)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


_PRODUCTS = ("MatMul", "BatchMatMul")
_PICKS = ("Gather", "IndexByTensor")  # of which a part of the first operand is read
_REPEATS = 3  # timed runs, of which the best counts


RunKind = Literal["native", "torch", "copy"]


@dataclass(frozen=True, repr=False)
class UnitRow:
    """One step."""

    name: str  # torch operators that it computes
    kind: RunKind
    why: str  # what ended a unit, why a node is not native, why a copy is made
    moved: int  # bytes read and written
    operations: int
    seconds: float
    line: str  # of the model
    step: int = -1  # of the plan, by number; -1 for what is done after all steps

    def __repr__(self) -> str:
        return f"<{self.kind} step {self.name}, {self.seconds * 1e6:,.0f} us>"

    def share(self, rates: MachineRates) -> float:
        """How near it comes to what the machine can do."""
        return rates.least_seconds(self.moved, self.operations) / self.seconds


class _StepTimer(StepWatcher):
    """Notes the time and the tensors of each step."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: dict[int, float] = {}
        self.tensors: dict[int, tuple[list[Any], list[Any]]] = {}

    def around(self, number: int, run: RunStep, registers: list[Any]) -> None:
        """Time a step."""
        step = self.plan.steps[number]
        given = [registers[s] for s in dict.fromkeys(flat_slots(step.args))]
        spent = seconds_of(lambda: run(registers), self._device)
        self.seconds[number] = min(spent, self.seconds.get(number, spent))
        self.tensors[number] = (given, [registers[s] for s in step.outs])


def unit_rows(call: GraphCall, args: Sequence[Any], device: str) -> list[UnitRow]:
    """All steps of the plan for a call, timed one by one. Arguments that the graph updates are to
    be copies."""
    inputs = call.collect(args)
    call.compile(inputs)
    clock = _StepTimer(device)
    for _ in range(_REPEATS):
        call.session.run_watched(inputs, clock.of)
    reasons = _reasons(call.session.variant_for(inputs))
    rows = [
        _row(k, step, clock.seconds[k], *clock.tensors[k], reasons)
        for k, step in enumerate(clock.plan.steps)
        if k in clock.seconds and step.kind != "view"
    ]
    return rows + _copies_at_the_end(clock.plan)


def _copies_at_the_end(plan: Plan) -> list[UnitRow]:
    """Results and arguments that are copied after all steps."""
    why = "its memory is not its own, and results belong to the caller"
    copies = [(f"result {k}", o.slot, why) for k, o in enumerate(plan.outputs) if o.always_copy]
    why = "it is updated after all reads of it"
    copies += [(f"input {w.input_slot}", w.input_slot, why) for w in plan.write_backs]
    return [
        UnitRow(name, "copy", why, 2 * plan.place(slot)[0].size, 0, 0.0, "")
        for name, slot, why in copies
    ]


def _reasons(session: Any) -> dict[Node, str]:
    """Why units end where they do, and why nodes are in none."""
    if session.units is None:
        return {}
    fusion = session.units.fusion
    found: dict[Node, str] = {n: why for n, why in fusion.alone.items() if why}
    for unit in fusion.units:
        why = unit.why or "nothing joined after it"
        found |= {n: why for n in unit.nodes}
    return found


def _row(
    number: int,
    step: Step,
    seconds: float,
    given: list[Any],
    made: list[Any],
    reasons: dict[Node, str],
) -> UnitRow:
    kinds: dict[str, RunKind] = {"native": "native", "copy": "copy"}
    kind = kinds.get(step.kind, "torch")
    why = reasons.get(step.node, "")
    if kind == "copy":
        view = has_trait(step.node, Trait.VIEW)
        why = "a view of it needs another layout" if view else "it is updated, and still read"
    packed = step.native.packed.values() if step.native else []
    moved = _moved(step, given, made) + sum(map(_bytes, packed))
    origin = step.node.origin
    return UnitRow(
        row_name(step).removeprefix("torchair::"),
        kind,
        why,
        moved,
        _operations(step, given, made),
        seconds,
        origin.line if origin is not None else "",
        number,
    )


def _moved(step: Step, given: list[Any], made: list[Any]) -> int:
    """Bytes that a step reads and writes. Of a table that indices pick from it reads as much as it
    makes; of memory that it updates in place it touches as much as it puts there."""
    nodes = step.also or [step.node]
    read, written = [_bytes(t) for t in given], sum(map(_bytes, made))
    if read and any(n.type.startswith(_PICKS) for n in nodes):
        table = read.index(max(read))
        read[table] = min(read[table], written)
    places = {t.data_ptr() for t in made if isinstance(t, Tensor)}
    kept = [k for k, t in enumerate(given) if isinstance(t, Tensor) and t.data_ptr() in places]
    if kept and any(has_trait(n, Trait.WRITES_FIRST) for n in nodes):
        return 2 * sum(size for k, size in enumerate(read) if k not in kept)
    return sum(read) + written


def _bytes(value: Any) -> int:
    members = value if isinstance(value, list) else [value]
    return sum(t.numel() * t.element_size() for t in members if isinstance(t, Tensor))


def _operations(step: Step, given: list[Any], made: list[Any]) -> int:
    """Multiplications and additions, one for each node and element outside of sums."""
    points = max((t.numel() for t in [*given, *made] if isinstance(t, Tensor)), default=0)
    outs = [t for t in made if isinstance(t, Tensor)]
    nodes = step.also or [step.node]
    sums = 2 * sum(map(_depth, nodes)) * outs[0].numel() if outs else 0
    return points * len(nodes) + sums


def _depth(node: Node) -> int:
    """Terms of each sum of a product, a convolution or attention."""
    if node.type.startswith(_PRODUCTS):
        turned = node.attr("transpose_x1") or node.attr("adj_x1")
        return _dim(node.values()[0], -2 if turned else -1)
    if node.type.startswith("Conv2D"):
        dims = node.values()[1].shape or ()
        return int(torch.Size(d for d in dims[1:] if isinstance(d, int)).numel())
    if "Attention" in node.type and len(node.values()) > 1:
        return 2 * _dim(node.values()[1], -2)
    return 0


def _dim(value: Value, axis: int) -> int:
    shape = value.shape or ()
    found = shape[axis] if len(shape) >= -axis else 0
    return found if isinstance(found, int) else 0
