"""References to the tensors of a model (container, key, name), and which arguments of a call alias
what it updates. Loads no tracer.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from torchair.deploy.guards import Expected
from torchair.engine.plan.records import picker
from torchair.engine.run.frozen import DictEntry, argument_guard
from torchair.errors import InputError
from torchair.torch_private.dispatch import is_traceable_wrapper_subclass

Via = tuple[tuple[str, DictEntry], ...]
"""Containers and modules on the way to a tensor, each with its name and in what holds it."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a model: the dict or list that holds it, its key there, its full name. One that
    is `loose` is neither a parameter nor a buffer; `via` leads to it."""

    place: Any
    key: Any
    name: str
    loose: bool = False
    via: Via = ()

    def read(self) -> torch.Tensor:
        """What is there now."""
        return self.place[self.key]

    @classmethod
    def nowhere(cls) -> TensorRef:
        """For an argument that the graph does not read."""
        return cls({"": torch.empty(0)}, "", "")


def look(place: Any, key: Any) -> Any:
    """What a dict or list holds, None if nothing."""
    try:
        return place[key]
    except LookupError:
        return None


Roots = Mapping[str, torch.nn.Module]
"""Modules by the beginning of their names: of tensors in `{"": model}` these are the usual ones."""


def roots_of(target: Any) -> dict[str, torch.nn.Module]:
    """The modules whose tensors a callable uses: itself or that of a bound method, and those that
    its function has in closures and globals."""
    while isinstance(target, partial):
        target = target.func
    owner = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
    found = {"": owner} if isinstance(owner, torch.nn.Module) else {}
    function: Any = target.forward if isinstance(target, torch.nn.Module) else target
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return found
    known = function.__globals__
    referenced = {name: known[name] for name in code.co_names if name in known}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # it is empty
            referenced[name] = cell.cell_contents
    for name, value in referenced.items():
        if isinstance(value, torch.nn.Module) and value is not owner:
            found[f"<{name}>"] = value
    return found


def tensor_refs_of(roots: Roots) -> list[list[TensorRef]]:
    """Where tensors are, for each all its places: parameters and buffers, then what modules have in
    plain attributes, lists, dicts and objects."""
    found: dict[int, list[TensorRef]] = {}
    seen: set[tuple[int, str]] = set()
    walk = ModuleWalk(roots)
    for prefix, module, via in walk.modules:
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if tensor is None or (id(place), key) in seen:
                    continue
                seen.add((id(place), key))
                ref = TensorRef(place, key, f"{prefix}.{key}" if prefix else key, via=via)
                for inner in _within(ref):
                    found.setdefault(id(inner.read()), []).append(inner)
    for ref in walk.loose:
        found.setdefault(id(ref.read()), []).append(ref)
    return list(found.values())


def _within(ref: TensorRef) -> list[TensorRef]:
    """The tensors that a parameter of a class of its own is made of, as a quantised one is: graphs
    are made of those. Else the parameter itself."""
    tensor = ref.read()
    if not is_traceable_wrapper_subclass(tensor):
        return [ref]
    parts: Any = tensor
    names, attributes = parts.__tensor_flatten__()[0], getattr(tensor, "__dict__", {})
    inner = [attributes.get(n) for n in names]
    if not all(isinstance(t, torch.Tensor) and _is_plain(t) for t in inner):
        return [ref]
    via = (*ref.via, (ref.name, DictEntry(ref.place, ref.key, tensor)))
    return [TensorRef(attributes, n, f"{ref.name}.{n}", via=via) for n in names]


_OWN = frozenset(vars(torch.nn.Module()))  # attributes that every module has
_DEEP = 6  # containers in containers
_MOST = 20_000  # values that are looked at


class ModuleWalk:
    """Looks through modules and what their attributes hold."""

    def __init__(self, roots: Roots) -> None:
        self.modules: list[tuple[str, torch.nn.Module, Via]] = []
        """All of them, also those in lists and dicts of modules; what leads to them."""
        self.loose: list[TensorRef] = []
        """Tensors in plain attributes, and in lists, dicts and objects that are there."""
        self.hidden: list[str] = []
        """Tensors that nothing can be put in the place of, and those of a special kind."""
        self._seen: set[int] = set()
        self._work: list[tuple[str, Any, Via]] = []
        for name, root in roots.items():
            self._take(root, name, ())
        for name, container, via in self._work:  # which grows
            self._open(name, container, via)

    def _take(self, root: torch.nn.Module, name: str, via: Via) -> None:
        for prefix, module in root.named_modules(prefix=name):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self.modules.append((prefix, module, via))
                self._work.append((prefix, module, via))

    def _open(self, name: str, container: Any, via: Via) -> None:
        items: list[tuple[str, Any, Any]]
        if isinstance(container, (list, tuple)):
            items = [(f"{name}[{k}]", k, v) for k, v in enumerate(container)]
        elif isinstance(container, dict):
            items = [(f"{name}[{k!r}]", k, v) for k, v in container.items()]
        else:
            own = _OWN if isinstance(container, torch.nn.Module) else ()
            container = vars(container)
            items = [
                (f"{name}.{k}" if name else k, k, v) for k, v in container.items() if k not in own
            ]
        for label, key, value in items:
            further = via
            if not isinstance(container, tuple):
                further = (*via, (label, DictEntry(container, key, value)))
            if isinstance(value, torch.Tensor):
                if isinstance(container, tuple) or not _is_plain(value):
                    self.hidden.append(label)
                else:
                    self.loose.append(TensorRef(container, key, label, True, via))
            elif isinstance(value, torch.nn.Module):
                self._take(value, label, further)
            elif id(value) in self._seen or len(via) >= _DEEP or len(self._seen) >= _MOST:
                continue
            elif _may_hold(value):
                self._seen.add(id(value))
                self._work.append((label, value, further))


def _is_plain(t: torch.Tensor) -> bool:
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_quantized:
        return False
    return t.layout is torch.strided and t.device.type != "meta" and not t.is_conj()


def _may_hold(value: Any) -> bool:
    """Whether tensors may be in a value: a container, or an object of a class of the user."""
    if isinstance(value, (list, tuple, dict)):
        return bool(value)
    known = type(value).__module__.partition(".")[0] in ("builtins", "torch", "torchair")
    return not known and not callable(value) and hasattr(value, "__dict__")


# ---- whether a model is what it was ----


class ModelState:
    """The model that a call reads: parameters, buffers, submodules and switches."""

    def __init__(
        self, roots: Roots, refs: Sequence[Sequence[TensorRef]], written: frozenset[int]
    ) -> None:
        """`written` are numbers of what calls update: of tensors of the model, then of arguments"""
        self.refs, self._written = refs, written
        self._specs = [Expected.of(places[0].name, places[0].read().detach()) for places in refs]
        self._parts = _parts(roots, refs)
        self.update_expected()

    def update_expected(self) -> None:
        """Take what is there now for what is expected."""
        self.tensors = [places[0].read() for places in self.refs]
        self._areas: SharedAreas | None = None
        entries = self.entries()
        # Natively: nothing in a dict has changed. Those in lists are with addresses of tensors.
        self._same = argument_guard(0, [], [e for e in entries if isinstance(e.owner, dict)])
        self._listed = [(e, _address(e.value)) for e in entries if not isinstance(e.owner, dict)]

    def sharing(self) -> SharedAreas:
        """What calls update, with the tensors that the model has now."""
        if self._areas is None:
            names = [places[0].name for places in self.refs]
            self._areas = SharedAreas(names, self.tensors, self._written)
        return self._areas

    @property
    def native(self) -> bool:
        """Whether native code can look at all that the model is."""
        return not self._listed

    def entries(self) -> list[DictEntry]:
        """What must be where."""
        refs = [ref for places in self.refs for ref in places]
        return [*(DictEntry(r.place, r.key, r.read()) for r in refs), *self._parts.values()]

    def problem(self) -> InputError | None:
        """What has changed about the model, so that the graph does not serve it any more."""
        if self._same is not None and self._same() and all(map(_is_there, self._listed)):
            return None
        error = self._compared()
        if error is None:
            self.update_expected()
        return error

    def _compared(self) -> InputError | None:
        for spec, places in zip(self._specs, self.refs, strict=True):
            now = [look(h.place, h.key) for h in places]
            found = spec.problem(None if now[0] is None else now[0].detach(), {})
            if found is None and any(t is not now[0] for t in now):
                found = "one tensor under several names", "several"
            if found is not None:
                return _changed(spec.name, *found)
        for name, part in self._parts.items():
            there = look(part.owner, part.key)
            if there is not part.value:
                return _changed(name, _shown(part.value), _shown(there))
        return None


def _parts(roots: Roots, refs: Sequence[Sequence[TensorRef]]) -> dict[str, DictEntry]:
    """Submodules and switches that tracing has relied on, and lists and the like that lead to
    tensors, by name."""
    found: dict[str, DictEntry] = {}
    for prefix, module, _ in ModuleWalk(roots).modules:
        at = f"{prefix}." if prefix else ""
        found[f"{at}training"] = DictEntry(module.__dict__, "training", module.training)
        for key, child in module._modules.items():
            found[f"{at}{key}"] = DictEntry(module._modules, key, child)
    for ref in (ref for places in refs for ref in places):
        found |= dict(ref.via)
    return found


def _changed(name: str, expected: str, got: str) -> InputError:
    return InputError(
        f"{name} of the model has changed since it was compiled",
        name=name,
        expected=expected,
        got=got,
    )


def _is_there(known: tuple[DictEntry, int]) -> bool:
    entry, address = known
    there = look(entry.owner, entry.key)
    return there is entry.value and _address(there) == address


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _shown(part: Any) -> str:
    plain = part is None or isinstance(part, (bool, int, float, str))
    return repr(part) if plain else type(part).__name__


# ---- what a call updates, and what lies there ----


ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]  # dims and strides


class SharedMemory(InputError):
    """A call updates what two of its arguments, or an argument and the model, have in common."""

    of_model = False


def extent(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last."""
    spans = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (1 + spans) * t.element_size() if t.numel() else 0


class _DisjointAreas:
    """Memory that tensors lie in: areas that are apart, in order."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, length in sorted((t.data_ptr(), extent(t)) for t in tensors):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], start + length)
            elif length:
                self._starts.append(start)
                self._ends.append(start + length)

    def overlaps(self, start: int, length: int) -> bool:
        """Whether a piece of memory has a byte in common with one of them."""
        k = bisect_right(self._ends, start)
        return k < len(self._ends) and self._starts[k] < start + length


class SharedAreas:
    """What a call updates, with the tensors that the model has now."""

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], written: frozenset[int]
    ) -> None:
        """`written` is as for `ModelState`."""
        self.tensors = tensors
        self._names, self._written = names, written
        count = len(tensors)
        self._arguments = {k - count for k in written if k >= count}
        updated = _DisjointAreas(t for k, t in enumerate(tensors) if k in written)
        every = _DisjointAreas(tensors) if self._arguments else updated
        self._areas = updated, every  # for arguments that are read, for those that are updated

    def apart(self, addresses: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether arguments, in bytes, lie apart from what is updated. No says nothing yet: they
        may lie between its elements."""
        if not self._arguments:
            return not any(map(self._areas[False].overlaps, addresses, lengths))
        spans = []
        for k, (start, length) in enumerate(zip(addresses, lengths, strict=True)):
            written = k in self._arguments
            if self._areas[written].overlaps(start, length):
                return False
            spans.append((start, start + length, written))
        return _lie_apart(spans)

    def guarding(
        self,
        call: Callable[..., Any],
        slowly: Callable[..., Any],
        arguments: Mapping[int, torch.Tensor],
    ) -> Callable[..., Any]:
        """A call that updates something, if arguments like these, by position, lie apart from that.
        Where the model keeps its tensors, `call` compares."""
        lengths, taken = list(map(extent, arguments.values())), picker(list(arguments))
        address, apart = torch.Tensor.data_ptr, self.apart
        seen: list[int] = []  # addresses that lay apart: those of many calls are the same

        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            try:
                now = list(map(address, taken(args)))
            except (TypeError, IndexError):  # no tensors, or too few of them
                return slowly(*args, **kwargs)
            if now != seen:
                if not apart(now, lengths):
                    return slowly(*args, **kwargs)
                seen = now
            return call(*args, **kwargs)

        return checked

    def problem(self, arguments: Mapping[str, torch.Tensor]) -> SharedMemory | None:
        """The first overlap of a call; None if there is none."""
        given = list(arguments.values())
        if self.apart([t.data_ptr() for t in given], [extent(t) for t in given]):
            return None
        count, names = len(self.tensors), [*self._names, *arguments]
        every = [*self.tensors, *given]
        spans = sorted((t.data_ptr(), extent(t), k) for k, t in enumerate(every))
        for n, (start, length, k) in enumerate(spans):
            for after, more, other in spans[n + 1 :]:
                if after >= start + length:
                    break
                matters = {k, other} & self._written and max(k, other) >= count
                if matters and more and _collide(every[k], every[other], after - start):
                    return self._shared(names, *sorted((k, other)))
        return None

    def _shared(self, names: Sequence[str], first: int, second: int) -> SharedMemory:
        if first >= len(self.tensors):
            return SharedMemory(
                f"the call updates its arguments, and {names[first]} and {names[second]} share "
                "memory",
                name=names[second],
                hint="pass a copy of one, or use torch.compile, which takes such calls",
            )
        updated = names[first if first in self._written else second]
        error = SharedMemory(
            f"the call updates {updated}, and the argument {names[second]} shares memory with "
            f"{names[first]} of the model",
            name=names[second],
            hint="pass a copy of it",
        )
        error.of_model = True
        return error


def _lie_apart(spans: list[tuple[int, int, bool]]) -> bool:
    """Whether no area that is written overlaps another: addresses of both ends, and if it is."""
    spans.sort()
    end = written_end = 0  # of those before
    for start, stop, written in spans:
        if start < (end if written else written_end):
            return False
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end
    return True


def _collide(a: torch.Tensor, b: torch.Tensor, offset: int) -> bool:
    size = a.element_size()
    if b.element_size() != size or offset % size:
        return True
    first, second = ((tuple(t.shape), t.stride()) for t in (a, b))
    return _overlap(first, second, offset // size)


@lru_cache(maxsize=256)
def _overlap(a: ShapeAndStrides, b: ShapeAndStrides, offset: int) -> bool:
    """Whether layouts have a place in common, of which the second begins so many elements later.
    They may lie between each other as columns of a matrix do."""
    ends = (sum((n - 1) * s for n, s in zip(*x, strict=True)) for x in (a, b))
    taken = torch.zeros(1 + max(next(ends), offset + next(ends)), dtype=torch.bool)
    taken.as_strided(*a).fill_(True)
    return bool(taken.as_strided(*b, offset).any())
