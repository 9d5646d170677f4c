"""The cache of plans of one graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchair.engine.plan.inputs import GraphInputs
from torchair.engine.run.native import ProgramPool, same_as
from torchair.engine.run.workspace import ShapePlanPool
from torchair.locks import Lock

_PLAN_BYTES = 1 << 30  # that plans of one dynamic graph may weigh together

PlanPool = ProgramPool | ShapePlanPool
"""Programs of one plan."""


class PlanCache:
    """Plans by what was read of inputs; the one that was not used for longest goes first."""

    def __init__(self, inputs: GraphInputs) -> None:
        self.latest: PlanPool | None = None  # the plan used last; its guards are a quick test
        self.pick = inputs.pick  # inputs that guards look at
        self._by_value = bool(inputs.by_value)
        self._pools: OrderedDict[Any, PlanPool] = OrderedDict()
        self._weight = 0  # of all
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> Iterator[PlanPool]:
        return iter(list(self._pools.values()))

    def get(self, key: Any, inputs: Sequence[torch.Tensor]) -> PlanPool | None:
        """The plan for inputs like these, of which `key` was read."""
        pool = self._pools.get(key)
        if pool is None:
            return None
        if pool is not self.latest:
            with self._lock:
                if key in self._pools:
                    self._pools.move_to_end(key)
        elif not self._by_value and pool.guards is None:  # the second time in turn
            pool.guards = same_as(self.pick(inputs))
        return pool

    def add(self, key: Any, pool: PlanPool) -> None:
        """Keep a plan, and drop others if they weigh too much together."""
        with self._lock:
            rival = self._pools.pop(key, None)  # of another thread
            self._weight += pool.weight - (0 if rival is None else rival.weight)
            self._pools[key] = pool
            while self._weight > _PLAN_BYTES and len(self._pools) > 1:
                self._weight -= self._pools.popitem(last=False)[1].weight

    def use(self, pool: PlanPool) -> None:
        """Take note that a plan is used now."""
        last, self.latest = self.latest, pool
        if last is not None and last is not pool:
            last.guards = None  # not checked any more, and they would fragment memory of results

    def clear(self) -> None:
        """Keep none."""
        with self._lock:
            self._pools.clear()
            self._weight = 0
            self.latest = None

    @property
    def last(self) -> PlanPool | None:
        """The plan that was made or used last."""
        return next(reversed(self._pools.values()), None)
