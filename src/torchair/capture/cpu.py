"""Capture on the CPU: a call runs the plan that was made for its key, and results are the caller's.

A user input is read where it is, which has the same effect as a private copy: a replay ends before
the call returns. With `share_results` a plan is bound to fixed memory instead, see `fixed.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchair.capture import base
from torchair.codegen.cpu.jit import ALIGNMENT
from torchair.engine.plan.inputs import result_maker, viewer
from torchair.engine.plan.records import picker
from torchair.engine.run.fixed import Placed
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.native import same_as
from torchair.engine.session.recording import PlanRecording
from torchair.ge.signature import Computed, ComputedScalar, GraphResult, InputView, ResultView
from torchair.locks import Lock

if TYPE_CHECKING:
    from torchair.devices.base import GraphCall


class EngineSubstrate(base.Substrate):
    """Captures of one graph, all with the kernels of one session."""

    def __init__(self, graph: GraphCall, pool: tuple[int, int] | None) -> None:
        self._graph = graph
        self.pool = pool_of(pool)

    def capture(self, request: base.ToCapture) -> base.Recording:
        if request.options.share_results:
            return FixedRecording(self._graph, request, self.pool)
        return EngineRecording(self._graph, request)

    def trim(self) -> None:
        self.pool.clear()


class EngineRecording(base.Recording):
    """A plan of the session, which keeps it ready."""

    def __init__(self, graph: GraphCall, request: base.ToCapture) -> None:
        self._graph, args = graph, request.args
        inputs = graph.collect(args)
        graph.compile(inputs)
        kept = () if request.options.clone_input else request.kinds.users
        graph.session.recording(inputs).planned(copied=bool(kept))
        self._buffers = {i: args[i] for i in kept}
        self._args: Sequence[Any] = ()
        self._results: tuple[Any, ...] = ()

    def call(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        graph = self._graph
        inputs = graph.collect(self._brought(args) if self._buffers else args)
        return graph.build_results(graph.session.run(inputs), args)

    def feed(self, args: Sequence[Any]) -> None:
        self._args = args

    def replay(self) -> None:
        self._results = self.call(self._args, False)

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        results, self._args, self._results = self._results, (), ()
        return results

    def _brought(self, args: Sequence[Any]) -> list[Any]:
        given = list(args)
        for i, first in self._buffers.items():
            given[i] = base.brought(i, given[i], first)
        return given


# ---- shared results: the graph's plan bound to fixed memory ----


class FixedRecording(base.PooledRecording):
    """A fixed program and where it gets its inputs from."""

    def __init__(self, graph: GraphCall, request: base.ToCapture, pool: CapturePool) -> None:
        self._graph, kinds, options = graph, request.kinds, request.options
        super().__init__(options.share_results)
        args = request.args
        inputs = list(graph.collect(args))
        graph.compile(inputs)
        fixed = [args[i].data_ptr() for i in (*kinds.parameters, *kinds.mutated)]
        self._block: AlignedMemory

        def memory(size: int) -> torch.Tensor:
            self._block = pool.take(size, options.reuse, fixed)
            return self._block.memory[:size]

        self._variant = graph.session.variant_for(inputs)
        self._program = PlanRecording(self._variant, inputs).fix(memory)
        self._hold(len(args))
        self._sizes = [
            args[a] if dim is None else args[a].shape[dim]
            for a, dim in graph.signature.symbols.values()
        ]
        self._numbers = {i: a for i, a in enumerate(args) if not isinstance(a, torch.Tensor)}
        self._choose_inputs(request)

    def _choose_inputs(self, request: base.ToCapture) -> None:
        """Inputs that differ from call to call, and the checks that they are as captured."""
        users, program = set(request.kinds.users), self._program
        moving = [
            (k, s.args[0])
            for k, s in enumerate(self._graph.state.inputs)
            if s.kind == "tensor" and s.args[0] in users
        ]
        if program.given is not None:
            moving = [(k, i) for k, i in moving if k in program.words]
        self._moving = moving
        examples = [request.args[i] for _, i in moving]
        self._layouts = [(tuple(t.shape), t.stride(), t.dtype) for t in examples]
        self._asides: list[torch.Tensor | None] = [None] * len(moving)
        self._pinned = not request.options.clone_input
        if self._pinned:
            self._asides = list(examples)
        self._guards = same_as(examples)
        self._pick = picker([i for _, i in moving])
        self._words = [program.words.get(k, -1) for k, _ in moving]
        self._forget()

    def _hold(self, count: int) -> None:
        """Remember the weights that were packed, among so many arguments."""
        self._packed = packed = self._variant.frozen_tensors
        if packed is not None:
            place = {k: self._graph.state.inputs[k].args[0] for k in packed.tensors}
            tensors = {place[k]: t for k, t in packed.tensors.items()}
            self.frozen_tensors = FrozenTensors(
                tensors, count, [place[k] for k in packed.copied], packed.contents
            )

    def renew(self, args: Sequence[Any]) -> bool:
        if self.frozen_tensors is None or self.frozen_tensors.same(args):
            return True
        before = self._packed
        assert before is not None
        before.add_hits(self.frozen_tensors.hits)
        variant = self._graph.session.variant_for(self._graph.collect(args))
        now = variant.frozen_tensors
        if variant is not self._variant or now is None:
            return False
        if now is not before:
            self._hold(len(args))
        return now.is_over(before)

    def _forget(self) -> None:
        """Hold no input of a call longer than it runs."""
        if not self._pinned:
            for k, _ in self._moving:
                self._program.inputs[k] = None  # type: ignore[call-overload]

    def feed(self, args: Sequence[Any]) -> None:
        program, block = self._program, self._block
        tensors = self._pick(args)
        if self._pinned or not self._guards.check(*tensors):
            tensors = [self._in_layout(n, t) for n, t in enumerate(tensors)]
        low, high, given = block.address, block.end, program.given
        for n, (word, tensor) in enumerate(zip(self._words, tensors, strict=True)):
            address = tensor.data_ptr()
            if low <= address < high:  # results of an earlier call: this one overwrites them
                tensor = self._copied(n, tensor)
                address = tensor.data_ptr()
            if given is None:
                program.inputs[self._moving[n][0]] = tensor
            else:
                given[word] = address

    def _in_layout(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the captured layout."""
        first = self._asides[number] if self._pinned else None
        if first is not None:
            return base.brought(self._moving[number][1], tensor, first)
        shape, strides, dtype = self._layouts[number]
        if tensor.dtype is not dtype or tensor.shape != shape:
            wanted = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            raise base.misfit(self._moving[number][1], tensor, wanted)
        plain = tensor.stride() == strides and not tensor.is_conj() and not tensor.is_neg()
        return tensor if plain else self._copied(number, tensor)

    def _copied(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        aside = self._asides[number]
        if aside is None:
            shape, strides, dtype = self._layouts[number]
            with torch.inference_mode(False):
                aside = torch.empty_strided(shape, strides, dtype=dtype)
            self._asides[number] = aside
        with torch.no_grad():
            return aside.copy_(tensor)

    def replay(self) -> None:
        """The first one tells where results are; later ones only run."""
        self._program.run()
        names = list(self._graph.signature.symbols)
        results = enumerate(self._graph.signature.results)
        self.sources = [self._source(k, r, names) for k, r in results]
        self._forget()
        self.replay = self._program.run if self._program.given is not None else self._run  # type: ignore[method-assign]

    def _run(self) -> None:
        self._program.run()
        self._forget()

    def profiled(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """Results by a program of the session, which shows its kernels, brought to where they
        belong; that is known after the first replay."""
        if not self._program.places:
            return self.call(args, hold)
        self.feed(args)
        with torch.no_grad():
            self._program.put(self._graph.session.run(self._graph.collect(args)))
        self._forget()
        self.write_back(args)
        return self.results(args, hold)

    def _source(self, number: int, result: GraphResult, names: list[str]) -> base.ResultSource:
        sizes = self._sizes
        if isinstance(result, Computed):
            return self._computed(result, 0 if result.same else 1 + number)
        if isinstance(result, ComputedScalar):
            tensor = self._tensor(self._program.places[result.index])
            return base.OfArgument(lambda args: tensor.item())  # type: ignore[arg-type, return-value]
        if isinstance(result, ResultView):
            return self._view(result, names)
        make = result_maker(result, names)
        if isinstance(result, InputView):
            return base.OfArgument(lambda args: make((), args, sizes))
        return base.FixedResult(make((), self._numbers, sizes))

    def _computed(self, result: Computed, twin: int) -> base.ResultSource:
        place, same = self._program.places[result.index], result.same
        if isinstance(place, Placed):
            like = place.dtype, place.shape, place.strides, place.offset
            return base.Pooled(place.piece, *like, twin)
        if isinstance(place, torch.Tensor):
            return base.FixedResult(place if same else torch.ops.aten.alias.default(place))
        position = self._graph.state.inputs[place].args[0]
        if same:
            return base.OfArgument(lambda args: args[position])
        return base.OfArgument(lambda args: torch.ops.aten.alias.default(args[position]))

    def _view(self, result: ResultView, names: list[str]) -> base.ResultSource:
        """A view of a result, in the same memory."""
        of, make, sizes = self._computed(result.base, 0), viewer(result, names), self._sizes
        if isinstance(of, base.FixedResult):
            return base.FixedResult(make(of.value, sizes))
        if isinstance(of, base.OfArgument):
            argument = of.make
            return base.OfArgument(lambda args: make(argument(args), sizes))
        view = make(self._tensor(self._program.places[result.base.index]), sizes)
        twin = 1 + self._graph.signature.results.index(result)
        return base.pooled(view, of.group, twin)

    def _tensor(self, place: Any) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place
        assert isinstance(place, Placed)
        storage = self.storage(place.piece)
        return base.over(storage, place.dtype, place.shape, place.strides, place.offset)

    def storage(self, group: int) -> torch.UntypedStorage:
        return self._block.storage(*self._program.piece(group))


# ---- memory, and handles of pools ----


_handles = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """A new handle; graphs compiled with the same one take their memory from one pool."""
    return (0, next(_handles))


class AlignedMemory:
    """Aligned memory that does not move. Storages made from it keep it alive."""

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):
            memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        self.memory = memory[start : start + size]
        self.address = self.memory.data_ptr()
        self.end = self.address + size
        self.size = size
        self._bytes = memoryview(self.memory.numpy())  # type: ignore[arg-type]

    def holds(self, address: int) -> bool:
        """Whether something begins in this block."""
        return self.address <= address < self.end

    def storage(self, offset: int, size: int) -> torch.UntypedStorage:
        """A storage object of its own over some of the bytes."""
        if not size:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        made = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=offset)
        return made.untyped_storage()


class CapturePool:
    """Blocks for the captures of one FX graph, or of all graphs with the same handle."""

    def __init__(self, handle: tuple[int, int]) -> None:
        self.handle = handle
        self._shared: list[AlignedMemory] = []

    def take(self, size: int, shared: bool, avoid: Iterable[int] = ()) -> AlignedMemory:
        """A block of at least `size` bytes that holds none of the addresses `avoid`; a shared one
        may serve other keys too."""
        if not shared:
            return AlignedMemory(size)
        known = list(avoid)
        for block in self._shared:
            if block.size >= size and not any(map(block.holds, known)):
                return block
        grown = max([size, *(2 * b.size for b in self._shared if b.size < size)])
        self._shared.append(AlignedMemory(grown))
        return self._shared[-1]

    def clear(self) -> None:
        """Forget shared blocks; those in use live on until they are freed."""
        self._shared.clear()


_pools: weakref.WeakValueDictionary[tuple[int, int], CapturePool] = weakref.WeakValueDictionary()
_lock = Lock()


def pool_of(handle: tuple[int, int] | None) -> CapturePool:
    """The pool of a handle, which means the same everywhere; a new pool without one."""
    with _lock:
        handle = handle or graph_pool_handle()
        pool = _pools.get(handle)
        if pool is None:
            pool = _pools[handle] = CapturePool(handle)
        return pool
