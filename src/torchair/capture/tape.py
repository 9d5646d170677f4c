"""Capture of any function on the CPU: its operators are recorded on a tape and replayed. It serves
graphs that the engine does not convert, and generated programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from torchair.capture import base
from torchair.capture.recorder import Recorder, below_autograd, storage_id, unexpanded
from torchair.capture.rehearsal import NodeByNode, graph_of
from torchair.capture.updates import SitesInOrder, Updates
from torchair.engine.run.native import same_as
from torchair.torch_private.dispatch import AutoDispatchBelowADInplaceOrView
from torchair.torch_private.functions import foreach_copy


class TapeSubstrate(base.Substrate):
    """Captures a function of CPU tensors by recording the operators that it calls.

    Each capture has memory of its own. `updates` tells which operators take lists of numbers that
    differ between calls with one key.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    def capture(self, request: base.ToCapture) -> base.Recording:
        return TapeRecording(request, self._updates)


@dataclass(frozen=True)
class _TapeBuffer:
    """Where the tape reads a user input, in the layout of the first one."""

    position: int
    tensor: torch.Tensor
    target: torch.Tensor  # the same without elements that lie on each other
    address: int | None  # of memory that the caller may hand in again; None if it is ours alone

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this very memory was handed in."""
        return self.address is not None and tensor.data_ptr() == self.address

    def check(self, tensor: torch.Tensor, rigid: bool) -> None:
        """Refuse what cannot be copied here; `rigid` asks for the same strides too."""
        first = self.tensor
        alike = tensor.shape == first.shape and tensor.dtype is first.dtype
        if not alike or (rigid and tensor.stride() != first.stride()):
            raise base.misfit(self.position, tensor, first, "strides")


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all there is in its memory."""
    size = tensor.untyped_storage().nbytes()
    return not tensor.storage_offset() and tensor.numel() * tensor.element_size() == size


class TapeRecording(base.PooledRecording):
    """A tape with the buffers of its inputs and the storages of its results."""

    by_operators = True

    def __init__(self, request: base.ToCapture, updates: Updates) -> None:
        super().__init__(request.options.share_results)
        self._updates = updates
        self._lists: list[list[int]] = [[] for _ in updates.rules]
        with torch.inference_mode(False), torch.no_grad():
            given = self._place_inputs(request)
        self.feed(request.args)
        sites = SitesInOrder(updates.sites)
        own = [b for b in self._buffers if b.address is None]
        copies = [(b.tensor, _is_whole(request.args[b.position])) for b in own]
        lists = self._lists
        recorder = Recorder(lambda op: {k: lists[n] for k, n in sites.take(op).items()}, copies)
        try:
            with torch.inference_mode(False), below_autograd(), recorder:
                results = [
                    r.resolve_conj().resolve_neg()
                    if isinstance(r, torch.Tensor) and recorder.is_made(r)
                    else r
                    for r in _run(request.forward, given, recorder)
                ]
            sites.finish()
            self._describe(results, given, recorder)
        finally:
            self._tape = recorder.finish()

    # ---- arguments ----

    def _place_inputs(self, request: base.ToCapture) -> list[Any]:
        """Arguments as the function sees them: buffers for user inputs, all others themselves."""
        args = request.args
        given = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        self._buffers: list[_TapeBuffer] = []
        for i in request.kinds.users:
            own = request.options.clone_input or _shares_memory(i, args)
            if own:
                given[i] = given[i].new_empty_strided(args[i].shape, args[i].stride())
            address = None if own else given[i].data_ptr()
            self._buffers.append(_TapeBuffer(i, given[i], unexpanded(given[i]), address))
        self._check = same_as([args[b.position] for b in self._buffers]).check
        # Inputs whose strides have to stay: elements lie on each other, or results are views.
        self._rigid = {b.position for b in self._buffers if 0 in b.tensor.stride()}
        return given

    def feed(self, args: Sequence[Any]) -> None:
        tensors = [args[b.position] for b in self._buffers]
        if not self._check(*tensors):
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                buffer.check(tensor, buffer.position in self._rigid)
        targets, sources = [], []
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if not buffer.holds(tensor):
                targets.append(buffer.target)
                sources.append(tensor if buffer.target is buffer.tensor else unexpanded(tensor))
        with AutoDispatchBelowADInplaceOrView():
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            elif targets:
                foreach_copy(targets, sources)
        for target, value in zip(self._lists, self._updates.values(args), strict=True):
            target[:] = value

    def replay(self) -> None:
        self._tape.replay()

    def write_back(self, args: Sequence[Any]) -> None:
        for buffer in self._updated:
            if not buffer.holds(args[buffer.position]):
                with AutoDispatchBelowADInplaceOrView():
                    args[buffer.position].copy_(buffer.tensor)

    # ---- results ----

    def _describe(self, results: Sequence[Any], given: Sequence[Any], recorder: Recorder) -> None:
        """Where each result is to be found. Results that share a storage form a group."""
        self._updated = [b for b in self._buffers if recorder.is_written(b.tensor)]
        self._groups: list[torch.Tensor] = []
        self.sources: list[base.ResultSource] = []
        groups: dict[int, int] = {}
        for result in results:
            if not isinstance(result, torch.Tensor):
                self.sources.append(base.FixedResult(result))
            elif not recorder.is_made(result):
                self.sources.append(self._from_outside(result, given))
            else:
                group = groups.setdefault(storage_id(result), len(self._groups))
                if group == len(self._groups):
                    self._groups.append(result.detach())
                twin = next(n for n, other in enumerate(results) if other is result)
                self.sources.append(base.pooled(result, group, twin))

    def _from_outside(self, result: torch.Tensor, given: Sequence[Any]) -> base.ResultSource:
        """A result in memory that was there before: an argument, a view of one, or a constant."""
        tensors = {i: t for i, t in enumerate(given) if isinstance(t, torch.Tensor)}
        for i, tensor in tensors.items():
            if tensor is result:
                return base.OfArgument(itemgetter(i))
        for i, tensor in tensors.items():
            if storage_id(tensor) == storage_id(result):
                self._rigid.add(i)
                return base.OfArgument(base.view_of(i, tensor, result))
        return base.FixedResult(result)

    def storage(self, group: int) -> torch.UntypedStorage:
        return self._groups[group].untyped_storage()


def _run(forward: base.Forward, args: Sequence[Any], recorder: Recorder) -> Sequence[Any]:
    graph = graph_of(forward)
    if graph is None:
        return forward(*args)
    try:
        return NodeByNode(graph, recorder).run(*args, enable_io_processing=False)
    finally:
        recorder.node = None


def _shares_memory(position: int, args: Sequence[Any]) -> bool:
    tensors = {i: a.untyped_storage() for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    spans = {i: (s.data_ptr(), s.data_ptr() + s.nbytes()) for i, s in tensors.items()}
    low, high = spans.pop(position)
    return any(start < high and low < end for start, end in spans.values())
