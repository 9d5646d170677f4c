"""A recorded graph of a device that reads copies of arguments and whose results are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from torchair.capture import base
from torchair.capture.accelerator import PoolOwner, StreamOrder
from torchair.engine.plan.records import extent, picker
from torchair.engine.run.native import same_as
from torchair.torch_private.functions import foreach_copy

Feed = Callable[[Sequence[Any]], None]


class ResultForms:
    """What is known of the results of a capture, while they are alive."""

    def __init__(
        self, given: Sequence[Any], constants: list[torch.Tensor], results: Sequence[Any]
    ) -> None:
        """`given` is what the graph ran on."""
        self.given, self.constants = given, constants
        self.sources: list[base.ResultSource] = []
        self.storages: list[torch.UntypedStorage] = []
        self.places: list[tuple[int, int]] = []  # address and size by group
        self._positions: dict[int, int] = {}
        for i, value in enumerate(given):
            if isinstance(value, torch.Tensor):
                self._positions.setdefault(value.untyped_storage().data_ptr(), i)
        self._groups: dict[int, int] = {}
        self._twins: dict[int, int] = {}
        self._constants = {t.untyped_storage().data_ptr() for t in constants}
        for result in results:
            self.sources.append(self._source(result))

    def _source(self, result: Any) -> base.ResultSource:
        if not isinstance(result, torch.Tensor):
            return base.FixedResult(result)
        address = result.untyped_storage().data_ptr()
        if address in self._positions and result.numel():
            position = self._positions[address]
            whole = self.given[position]
            same = _layout(result) == _layout(whole)
            view = base.view_of(position, whole, result)
            return base.OfArgument(itemgetter(position) if same else view)
        if result.device.type == "cpu":
            return base.OfArgument(lambda args: result.clone())
        if not result.numel():
            return base.FixedResult(result.new_empty_strided(result.shape, result.stride()))
        if address in self._constants:
            return base.FixedResult(result)
        return self._pooled(result, address)

    def _pooled(self, result: torch.Tensor, address: int) -> base.Pooled:
        group = self._groups.setdefault(address, len(self.places))
        if group == len(self.places):
            storage = result.untyped_storage()
            self.storages.append(storage)
            self.places.append((address, storage.nbytes()))
        return base.pooled(result, group, self._twins.setdefault(id(result), len(self.sources)))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class Inputs:
    """Brings arguments to where a graph reads them."""

    def __init__(
        self, positions: list[int], targets: list[torch.Tensor], request: base.ToCapture
    ) -> None:
        examples = [request.args[i] for i in positions]
        self._positions, self._targets = positions, targets
        self._pick = picker(positions)
        self._check = same_as(examples).check if examples else None
        self._whole = all(torch.ops.aten.is_non_overlapping_and_dense(t) for t in targets)
        self._flat = [_flattened(t) for t in targets]
        self._addresses = [] if request.options.clone_input else [t.data_ptr() for t in targets]
        self.feed = self._chosen(request.options.clone_input)

    def _chosen(self, private: bool) -> Callable[[Sequence[Any]], None]:
        if not self._positions:
            return lambda args: None
        if not private:
            return self._where_moved
        if not self._whole:
            return self._spans
        return self._one if len(self._positions) == 1 else self._all

    def _one(self, args: Sequence[Any]) -> None:
        source = args[self._positions[0]]
        if not self._check(source):  # type: ignore[misc]
            self._checked(args)
        self._targets[0].copy_(source, non_blocking=True)

    def _all(self, args: Sequence[Any]) -> None:
        sources = self._pick(args)
        if not self._check(*sources):  # type: ignore[misc]
            self._checked(args)
        foreach_copy(self._targets, sources, True)

    def _spans(self, args: Sequence[Any]) -> None:
        """Some arguments have gaps or repeat elements: all that they span is copied."""
        sources = self._pick(args)
        if self._check(*sources):  # type: ignore[misc]
            foreach_copy(self._flat, [_flattened(s) for s in sources], True)
            return
        self._checked(args)
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def _where_moved(self, args: Sequence[Any]) -> None:
        """Without private copies the tensors of the first call are what the graph reads."""
        for position, address, target in zip(
            self._positions, self._addresses, self._targets, strict=True
        ):
            source = args[position]
            if source.data_ptr() != address:
                target.copy_(source, non_blocking=True)

    def _checked(self, args: Sequence[Any]) -> None:
        """Other strides or other bits of autograd do no harm, another type or size does."""
        for position, target in zip(self._positions, self._targets, strict=True):
            given = args[position]
            kind = (given.dtype, given.shape, given.device)
            if kind != (target.dtype, target.shape, target.device):
                raise base.misfit(position, given, target, "device")


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,))


class DeviceRecording(base.PooledRecording):
    """A device graph, what it reads and where its results are."""

    def __init__(
        self,
        graph: Any,
        memory: PoolOwner,
        order: StreamOrder,
        feeds: list[Feed],
        results: ResultForms,
        request: base.ToCapture,
    ) -> None:
        super().__init__(request.options.share_results)
        self._graph = graph
        self._memory = memory
        self._storages = None if request.options.reuse else results.storages
        frozen = request.kinds.parameters if request.options.frozen_parameter else ()
        self._read = [*results.constants, *(request.args[i] for i in frozen)]  # come what may
        self._places = results.places
        self._enter, self._feeds, self._launch = order.enter, feeds, graph.replay
        self.sources = results.sources

    def feed(self, args: Sequence[Any]) -> None:
        self._enter()
        if torch.is_grad_enabled():  # copies are not part of a backward graph
            with torch.no_grad():
                return self._bring(args)
        self._bring(args)

    def _bring(self, args: Sequence[Any]) -> None:
        for feed in self._feeds:
            feed(args)

    def replay(self) -> None:
        self._launch()

    def storage(self, group: int) -> torch.UntypedStorage:
        if self._storages is not None:
            return self._storages[group]
        return self._memory.result_at(*self._places[group])

    def reset(self) -> None:
        self._graph.reset()
        super().reset()
