"""Memory that the user hands in: blocks of bytes for constants and intermediates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchair.engine.plan.arena import aligned
from torchair.engine.plan.records import Plan
from torchair.engine.run.memory import ARENA, constant_bytes, laid_out
from torchair.engine.run.native import ProgramPool
from torchair.engine.session.plans import PlanPool
from torchair.errors import GraphError, InputError
from torchair.locks import RLock
from torchair.log import native_logger

if TYPE_CHECKING:
    from torchair.engine.session.variant import WeightVariant
    from torchair.engine.session.weights import WeightVariants


class UserMemory:
    """Blocks of bytes that belong to the user. Calls that use them run one at a time."""

    def __init__(self) -> None:
        self.feature: torch.Tensor | None = None
        self.lock = RLock()
        self._constants: torch.Tensor | None = None
        self._used = 0
        self._moved: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def take_feature(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for intermediates from now on."""
        self.feature = _bytes(block, size, device, "intermediates")

    def take_constants(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for the constants of plans that are made from now on."""
        self._constants = _bytes(block, size, device, "constants")
        self._used, self._moved = 0, {}

    def place(self, slot: int, size: int) -> torch.Tensor | None:
        """Memory for a program, as its plan asks for it."""
        if slot != ARENA or self.feature is None or size > self.feature.numel():
            return None
        return self.feature[:size]

    def put(self, pool: PlanPool) -> None:
        """Let programs of a plan compute here."""
        if isinstance(pool, ProgramPool):
            self._move_constants(pool.plan)
            pool.put(self.place)

    def _move_constants(self, plan: Plan) -> None:
        """Put the constants of a plan into the block, as far as there is room."""
        if self._constants is None:
            return
        for slot, t in plan.constants.items():
            plan.constants[slot] = self._in_block(t)

    def _in_block(self, t: torch.Tensor) -> torch.Tensor:
        key = (t.data_ptr(), t.dtype, t.shape)
        found = self._moved.get(key)
        assert self._constants is not None
        if found is not None or str(t.device.type) != str(self._constants.device.type):
            return t if found is None else found
        size = aligned(t.numel() * t.element_size())
        if not t.is_contiguous() or self._used + size > self._constants.numel():
            native_logger.info("a constant of %s bytes stays outside of the block given", size)
            return t
        place = self._constants[self._used : self._used + size]
        self._used += size
        moved = laid_out(place, t.dtype, t.shape, t.stride()).copy_(t)
        self._moved[key] = self._moved[(moved.data_ptr(), t.dtype, t.shape)] = moved
        return moved


def takes_memory(variant: WeightVariant, plan: Plan | None) -> bool:
    """Whether the graph can compute in memory of the user: its sizes are fixed, and programs are of
    one lane."""
    if plan is None or variant.loaded.graph.is_dynamic:
        return False
    return plan.schedule is None and variant.watch is None


def give_constant_memory(variants: WeightVariants, block: torch.Tensor) -> None:
    """Keep the constants of a graph in a block."""
    _give(
        variants,
        lambda memory, plan, device: memory.take_constants(block, constant_bytes(plan), device),
    )


def give_feature_memory(variants: WeightVariants, block: torch.Tensor) -> None:
    """Compute the intermediates of a graph in a block."""
    _give(
        variants, lambda memory, plan, device: memory.take_feature(block, plan.arena_size, device)
    )


def _give(variants: WeightVariants, take: Callable[[UserMemory, Plan, str], None]) -> None:
    """Have the memory of a graph take a block, and put its programs there."""
    current = variants.current
    loaded, plan = current.loaded, current.last_plan()
    if plan is None or not takes_memory(current, plan):
        raise GraphError(
            "user memory needs a graph of fixed sizes on one stream",
            graph=loaded.name,
            hint="compile with dynamic=False",
        )
    memory = loaded.memory or UserMemory()
    with memory.lock:
        take(memory, plan, loaded.device)
        loaded.memory = memory
        for variant in variants:
            for pool in variant.plans:
                memory.put(pool)


def _bytes(block: torch.Tensor, size: int, device: str, use: str) -> torch.Tensor:
    """A block as bytes that begin at a cache line; InputError if it is not large enough."""
    wanted = torch.device(device)
    if not isinstance(block, torch.Tensor) or not block.is_contiguous():
        raise InputError(f"memory for {use} is a contiguous tensor", got=type(block).__name__)
    if block.device.type != wanted.type:
        raise InputError(
            f"memory for {use} is on another device", expected=device, got=str(block.device)
        )
    whole = block.detach().view(-1).view(torch.uint8)
    whole = whole[-whole.data_ptr() % 64 :]
    if whole.numel() < size:
        raise InputError(
            f"memory for {use} is too small",
            expected=f"{size} bytes after the first address that 64 divides",
            got=f"{whole.numel()} bytes",
            hint="summary() has the sizes; allocate 64 bytes more for its alignment",
        )
    return whole
