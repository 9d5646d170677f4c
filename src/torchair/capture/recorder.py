"""A tape: torch calls recorded once, then replayed on the very same memory.

Knows operators and their schemas; arguments and results of a graph are not its business.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from torchair.capture.base import over
from torchair.capture.rehearsal import size_follows_data
from torchair.engine.run.fixed import SIZE_HINT
from torchair.errors import CaptureError
from torchair.fx.forms import OutForm, out_form, written
from torchair.fx.source import fx_text, origin_of
from torchair.ops.purity import is_foreign, is_pure
from torchair.torch_private import pytree
from torchair.torch_private.dispatch import (
    AutoDispatchBelowADInplaceOrView,
    DisableAutocast,
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    has_kernel,
)
from torchair.torch_private.tensors import internal_overlap, storage_use_count

ReplayStep = Callable[[], Any]
_ATEN = torch.ops.aten

# Results whose contents are undefined: their memory is all that is needed.
_UNSET = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
# Operators that copy, and which argument.
_COPIES = {
    _ATEN.clone.default: 0,
    _ATEN._to_copy.default: 0,
    _ATEN.lift_fresh_copy.default: 0,
    _ATEN.copy.default: 1,
}
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_COLLECTIVES = "_c10d_functional"
# Operators that order work on streams: replays are in order anyway.
_ORDER = frozenset(
    {"scope_enter", "scope_exit", "record", "wait", "keep", "set_stream_limit",
     "record_tagged_stream", "record_tagged_stream_", "tagged_event_record", "tagged_event_wait",
     "tagged_event_record_on_stream", "tagged_event_wait_on_stream", "tagged_stream_wait_stream"}
)  # fmt: skip
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class CallSite:
    """Where a call comes from: the operator, the node of an FX graph, the line of a program."""

    op: Any
    node: fx.Node | None
    line: str | None

    @property
    def source(self) -> str | None:
        """The line of the user's program."""
        origin = None if self.node is None else origin_of(self.node)
        return self.line if origin is None else origin.line

    def error(self, message: str, hint: str | None = None) -> CaptureError:
        """An error that names the place."""
        node = None if self.node is None else fx_text(self.node)
        return CaptureError(f"{self.op} {message}", node=node, source=self.source, hint=hint)

    def __str__(self) -> str:
        name = None if self.node is None else f"node {self.node.name}"
        return ", ".join(filter(None, (str(self.op), name, self.source)))


@contextmanager
def below_autograd() -> Iterator[None]:
    """Calls as a graph makes them: no gradients, no version counters, no autocast."""
    with AutoDispatchBelowADInplaceOrView(), DisableAutocast():
        yield


class Tape:
    """Recorded calls in their order."""

    def __init__(self) -> None:
        self.steps: list[ReplayStep] = []
        self.places: list[CallSite] = []

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: ReplayStep, place: CallSite) -> None:
        """Append a call."""
        self.steps.append(step)
        self.places.append(place)

    def replay(self) -> None:
        """Make all calls again, below autograd and autocast as they were recorded."""
        step: ReplayStep | None = None
        with below_autograd():
            try:
                for step in self.steps:
                    step()
            except Exception as error:
                if step is not None:
                    error.add_note(f"while replaying {self.places[self.steps.index(step)]}")
                raise


@dataclass
class _RecordedMemory:
    """A storage that recorded calls touch."""

    keeper: torch.Tensor
    made: bool  # by a recorded call; otherwise it was there before
    aliases: int = 1  # tensors of ours that look at it, `keeper` among them
    written: bool = False

    def is_free(self, size: int, alone: int) -> bool:
        """Whether only the tape refers to it, so that no call recorded from now on reads it."""
        fits = self.keeper.untyped_storage().nbytes() == size
        return fits and _holders(self.keeper) == alone + self.aliases - 1


def _holders(tensor: torch.Tensor) -> int:
    """A number that counts everything that refers to the storage of a tensor."""
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata) + sys.getrefcount(storage)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tells storages apart."""
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Puts the calls made inside on a tape, with the tensors they were made on.

    Calls run while they are recorded: what follows depends on the sizes of their results. `finish`
    undoes what they did to memory and random generators that were there before. A storage that only
    the tape refers to serves again for later results of the same size.

    `lists` is asked for those list arguments of a call that replays are to read anew.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        lists: Callable[[Any], Mapping[str, list[int]]] = lambda op: {},
        copies: Collection[tuple[torch.Tensor, bool]] = (),
    ) -> None:
        """`copies` stand for arguments, which are or are not all there is in their memory."""
        super().__init__()
        self._copies = {storage_id(t): whole for t, whole in copies}
        self.tape = Tape()
        self.node: fx.Node | None = None  # where we are, when an FX graph is being run
        self._lists = lists
        self._memory: dict[int, _RecordedMemory] = {}
        self._by_size: dict[int, list[_RecordedMemory]] = {}
        self._alone = _holders(torch.empty(1))
        self._saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._generators = {torch.default_generator: torch.default_generator.get_state()}

    def finish(self) -> Tape:
        """The tape; everything else is as it was before recording."""
        for storage, before in reversed(self._saved):
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)
        for generator, state in self._generators.items():
            generator.set_state(state)
        self._saved.clear()
        self._memory.clear()
        self._by_size.clear()
        return self.tape

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that recorded calls allocated."""
        return getattr(self._memory.get(storage_id(tensor)), "made", False)

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether recorded calls update the memory of a tensor."""
        return getattr(self._memory.get(storage_id(tensor)), "written", False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if has_kernel(func.name(), _COMPOSITE):
                with self:  # no operator of its own: what it consists of is recorded
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            if _is_aside(func):
                return func(*args, **kwargs)
        if func is _ATEN.lift_fresh.default and storage_id(args[0]) not in self._memory:
            func = _ATEN.clone.default  # numbers of the program become a new tensor at each replay
        with below_autograd():
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = CallSite(func, self.node, None if self.node is not None else _calling_line())
        self._prepare(func, args, kwargs, place)
        if _only_acts(func):  # prints, asserts: later, not while recording
            self._add(func, args, kwargs, [], place)
            return None
        made = func(*args, **kwargs)
        if isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags:
            return made  # it changed what its tensor looks at, and computed nothing
        leaves = pytree.tree_leaves(made)
        fresh = [t for t in leaves if isinstance(t, torch.Tensor) and self._is_new(t, place)]
        if not fresh:
            _refuse_numbers(func, args, kwargs, leaves, place)
            if not _has_effect(func):
                return made
        kept = self._keep_all(func, fresh)
        self._add(func, args, kwargs, [kept.get(id(leaf)) for leaf in leaves], place)
        if all(kept[id(t)] is t for t in fresh):
            return made
        return pytree.tree_map(lambda leaf: kept.get(id(leaf), leaf), made)

    def _prepare(self, func: Any, args: Any, kwargs: Any, place: CallSite) -> None:
        """Refuse what cannot be recorded; note what the call refers to, save what it updates."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_op = isinstance(func, OpOverload)
        if is_op:
            _refuse_dependence(func, args, kwargs, place)
        if func is _ATEN.as_strided.default:
            self._refuse_around(place, *args, **kwargs)
        for tensor in tensors:
            self._note(tensor, place)
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf not in self._generators:
                self._generators[leaf] = leaf.get_state()
        for value in written(func, args, kwargs) if is_op else tensors:
            if isinstance(value, torch.Tensor):
                self._save(value)

    def _refuse_around(
        self,
        place: CallSite,
        tensor: torch.Tensor,
        size: Any,
        stride: Any,
        storage_offset: int | None = None,
    ) -> None:
        """Arguments of later calls may begin anywhere in their memory."""
        whole = self._copies.get(storage_id(tensor))
        if whole is False or (whole and storage_offset is not None):
            raise place.error("reads memory around an argument, of which a replay has a copy")

    def _note(self, tensor: torch.Tensor, place: CallSite) -> None:
        _refuse_layout(tensor, place)
        number = storage_id(tensor)
        if number not in self._memory:
            self._memory[number] = _RecordedMemory(tensor.detach(), made=False)

    def _is_new(self, tensor: torch.Tensor, place: CallSite) -> bool:
        _refuse_layout(tensor, place)
        return storage_id(tensor) not in self._memory

    def _save(self, tensor: torch.Tensor) -> None:
        memory = self._memory[storage_id(tensor)]
        if not memory.made and not memory.written:
            storage = tensor.untyped_storage()
            self._saved.append((storage, storage.clone()))
        memory.written = True

    # ---- results ----

    def _keep_all(self, func: Any, fresh: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """For each new result, by its id, the tensor that stands for it from now on."""
        if getattr(func, "namespace", None) == _COLLECTIVES:
            for tensor in fresh:
                torch.ops._c10d_functional.wait_tensor(tensor)
        numbers = [storage_id(t) for t in fresh]
        return {
            id(t): self._keep(t, reuse=numbers.count(number) == 1)
            for t, number in zip(fresh, numbers, strict=True)
        }

    def _keep(self, tensor: torch.Tensor, reuse: bool) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        same_size = self._by_size.setdefault(size, [])
        if reuse and size and _is_plain(tensor):
            for memory in same_size:
                if memory.is_free(size, self._alone):
                    storage, like = memory.keeper.untyped_storage(), tensor
                    return over(storage, like.dtype, like.shape, like.stride()).copy_(tensor)
        memory = _RecordedMemory(tensor.detach(), made=True)
        if self._memory.setdefault(storage_id(tensor), memory) is memory:
            same_size.append(memory)
        return tensor

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of our own: what the program does to the layout of its tensor is not our call's
        business."""
        self._memory[storage_id(tensor)].aliases += 1
        return tensor.detach()

    # ---- steps ----

    def _add(
        self, func: Any, args: Any, kwargs: Any, kept: list[torch.Tensor | None], place: CallSite
    ) -> None:
        """Put a call on the tape; `kept` are its new results among all of its results."""
        if isinstance(func, OpOverload) and func.name().split(".")[0] in _UNSET:
            return
        lists = self._lists(func)
        form = None if lists else _form(func, args, kwargs, kept)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._alias, (args, kwargs))
        outs = [None if t is None else self._alias(t) for t in kept]
        if form is not None:
            self.tape.add(form(args, kwargs, outs), place)
            return
        call: ReplayStep = partial(getattr(func, "_op", func), *args, **kwargs)
        if lists:
            call = _late_call(func, args, kwargs, lists)
        if any(out is not None for out in outs):
            wait = getattr(func, "namespace", None) == _COLLECTIVES
            call = partial(_call_and_copy, call, outs, place, wait)
        self.tape.add(call, place)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor owns its storage from the start and can be written."""
    return (
        tensor.storage_offset() == 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and internal_overlap(tensor) == 0
    )


def _late_call(func: Any, args: Any, kwargs: Any, lists: Mapping[str, list[int]]) -> ReplayStep:
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    fixed = {name: value for name, value in given.items() if name not in lists}
    return lambda: func(**fixed, **{name: list(items) for name, items in lists.items()})


def _call_and_copy(
    call: ReplayStep, outs: Sequence[torch.Tensor | None], place: CallSite, wait: bool
) -> None:
    """For operators that allocate their results."""
    for out, new in zip(outs, pytree.tree_leaves(call()), strict=True):
        if out is None:
            continue
        if out.shape != new.shape:
            raise place.error(
                f"made a result of {list(new.shape)} that was {list(out.shape)} when the graph was "
                "captured: its size follows from data",
                SIZE_HINT,
            )
        if wait:
            torch.ops._c10d_functional.wait_tensor(new)
        unexpanded(out).copy_(unexpanded(new))


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Every element once, of a tensor with strides of zero."""
    if 0 not in tensor.stride():
        return tensor
    strides = tensor.stride()
    dims = [min(n, 1) if s == 0 else n for n, s in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(dims, strides)


# ---- operators that write where they are told ----


def _form(func: Any, args: Any, kwargs: Any, kept: Sequence[Any]) -> Any:
    """How to let a call write right where its results are kept, None if it cannot."""
    results = [t for t in kept if t is not None]
    numbers = {storage_id(t) for t in results}
    separate = len(numbers) == len(kept) and all(map(_is_plain, results))
    if not separate or not isinstance(func, OpOverload) or func._schema.is_mutable:
        return None
    if func in _COPIES:
        source = _COPIES[func]
        return lambda args, kwargs, outs: partial(_ATEN.copy_.default._op, outs[0], args[source])
    form = out_form(func)
    if form is None or not _works(form, func, args, kwargs, results):
        return None
    return partial(_out_call, form)


def _out_call(form: OutForm, args: Any, kwargs: Any, outs: Sequence[Any]) -> ReplayStep:
    options = {k: v for k, v in kwargs.items() if k not in form.dropped}
    given = [list(outs)] if form.listed else outs
    return partial(form.op._op, *args, **options, **dict(zip(form.names, given, strict=True)))


def _works(form: OutForm, op: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> bool:
    """Whether the form gives the very same results, tried out on memory of its own."""
    trials = [t.new_empty_strided(t.shape, t.stride()) for t in results]
    layouts = [(t.shape, t.stride(), t.data_ptr()) for t in trials]
    try:
        _out_call(form, args, kwargs, trials)()
        unmoved = layouts == [(t.shape, t.stride(), t.data_ptr()) for t in trials]
        random = torch.Tag.nondeterministic_seeded in op.tags
        return unmoved and (random or all(map(_equal, trials, results)))
    except Exception:  # not all forms have kernels for all that their operators take
        return False


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    inexact = a.is_floating_point() or a.is_complex()
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if inexact else torch.equal(a, b)


# ---- what operators do ----


def _is_aside(op: OpOverload) -> bool:
    """Whether a call is nothing that replays would have to do again."""
    if op.namespace == "air":
        return op.name().partition("::")[2].split(".")[0] in _ORDER
    return op.namespace == "profiler" or op is _ATEN.detach_.default


def _only_acts(func: Any) -> bool:
    """Whether nothing that is recorded later depends on a call."""
    is_op = isinstance(func, OpOverload)
    return is_op and not func._schema.returns and not func._schema.is_mutable


def _has_effect(func: Any) -> bool:
    """Whether a call matters beyond new results."""
    return not is_pure(func)


def _refuse_dependence(func: Any, args: Any, kwargs: Any, place: CallSite) -> None:
    if torch.Tag.data_dependent_output in func.tags:
        raise place.error("needs a value on the host that the graph computes", SIZE_HINT)
    if size_follows_data(func, args, kwargs):
        raise place.error("makes a result whose size follows from data", SIZE_HINT)


def _refuse_numbers(
    func: Any, args: Any, kwargs: Any, leaves: Sequence[Any], place: CallSite
) -> None:
    """What a custom operator reads from a tensor is not known to be the same in each replay."""
    numbers = any(isinstance(leaf, (bool, int, float)) for leaf in leaves)
    own = not is_foreign(func)
    tensors = any(isinstance(a, torch.Tensor) for a in pytree.tree_leaves((args, kwargs)))
    if numbers and tensors and not own:
        raise place.error("returns a number that may follow from data", SIZE_HINT)


def _refuse_layout(tensor: torch.Tensor, place: CallSite) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise place.error(f"works on a tensor of the layout {kind}, which has no fixed memory")


def _calling_line() -> str | None:
    """The line of the program that is making a call, outside of torch and of this file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((__file__, _TORCH)):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
