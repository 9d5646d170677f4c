"""Where a model keeps its tensors. Loads no tracer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, eq=False)
class Link:
    """A container or module on the way to a tensor: the dict or list that holds it, its key."""

    place: Any
    key: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Home:
    """A tensor of a model: the dict or list that holds it, its key there, its full name. One that
    is `loose` is neither a parameter nor a buffer; `via` leads to it."""

    place: Any
    key: Any
    name: str
    loose: bool = False
    via: tuple[Link, ...] = ()

    def read(self) -> torch.Tensor:
        """What is there now."""
        return self.place[self.key]

    @classmethod
    def nowhere(cls) -> Home:
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
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    held = {name: c.cell_contents for name, c in cells if _is_filled(c)}
    known = function.__globals__
    held |= {name: known[name] for name in code.co_names if name in known}
    for name, value in held.items():
        if isinstance(value, torch.nn.Module) and value is not owner:
            found[f"<{name}>"] = value
    return found


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def homes_of(roots: Roots) -> list[list[Home]]:
    """Where tensors are, for each all its places: parameters and buffers, then what modules have in
    plain attributes, lists, dicts and objects."""
    found: dict[int, list[Home]] = {}
    seen: set[tuple[int, str]] = set()
    walk = HomeWalk(roots)
    for prefix, module, via in walk.modules:
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if tensor is None or (id(place), key) in seen:
                    continue
                seen.add((id(place), key))
                home = Home(place, key, f"{prefix}.{key}" if prefix else key, via=via)
                for inner in _within(home):
                    found.setdefault(id(inner.read()), []).append(inner)
    for home in walk.loose:
        found.setdefault(id(home.read()), []).append(home)
    return list(found.values())


def _within(home: Home) -> list[Home]:
    """The tensors that a parameter of a class of its own is made of, as a quantised one is: graphs
    are made of those. Else the parameter itself."""
    tensor = home.read()
    if not is_traceable_wrapper_subclass(tensor):
        return [home]
    names, held = tensor.__tensor_flatten__()[0], getattr(tensor, "__dict__", {})
    if not all(isinstance(held.get(n), torch.Tensor) and _is_plain(held[n]) for n in names):
        return [home]
    via = (*home.via, Link(home.place, home.key, home.name, tensor))
    return [Home(held, n, f"{home.name}.{n}", via=via) for n in names]


_OWN = frozenset(vars(torch.nn.Module()))  # attributes that every module has
_DEEP = 6  # containers in containers
_MOST = 20_000  # values that are looked at


class HomeWalk:
    """Looks through modules and what their attributes hold."""

    def __init__(self, roots: Roots) -> None:
        self.modules: list[tuple[str, torch.nn.Module, tuple[Link, ...]]] = []
        """All of them, also those in lists and dicts of modules; what leads to them."""
        self.loose: list[Home] = []
        """Tensors in plain attributes, and in lists, dicts and objects that are there."""
        self.hidden: list[str] = []
        """Tensors that nothing can be put in the place of, and those of a special kind."""
        self._seen: set[int] = set()
        self._work: list[tuple[str, Any, tuple[Link, ...]]] = []
        for name, root in roots.items():
            self._take(root, name, ())
        for name, held, via in self._work:  # which grows
            self._open(name, held, via)

    def _take(self, root: torch.nn.Module, name: str, via: tuple[Link, ...]) -> None:
        for prefix, module in root.named_modules(prefix=name):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self.modules.append((prefix, module, via))
                self._work.append((prefix, module, via))

    def _open(self, name: str, held: Any, via: tuple[Link, ...]) -> None:
        if isinstance(held, (list, tuple)):
            items = [(f"{name}[{k}]", k, v) for k, v in enumerate(held)]
        elif isinstance(held, dict):
            items = [(f"{name}[{k!r}]", k, v) for k, v in held.items()]
        else:
            own = _OWN if isinstance(held, torch.nn.Module) else ()
            held = vars(held)
            items = [(f"{name}.{k}" if name else k, k, v) for k, v in held.items() if k not in own]
        for label, key, value in items:
            further = via if isinstance(held, tuple) else (*via, Link(held, key, label, value))
            if isinstance(value, torch.Tensor):
                if isinstance(held, tuple) or not _is_plain(value):
                    self.hidden.append(label)
                else:
                    self.loose.append(Home(held, key, label, True, via))
            elif isinstance(value, torch.nn.Module):
                self._take(value, label, further)
            elif len(via) < _DEEP and self._is_new(value):
                self._seen.add(id(value))
                self._work.append((label, value, further))

    def _is_new(self, value: Any) -> bool:
        return id(value) not in self._seen and len(self._seen) < _MOST and _may_hold(value)


def _is_plain(t: torch.Tensor) -> bool:
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_quantized:
        return False
    return t.layout is torch.strided and t.device.type != "meta" and not t.is_conj()


def _may_hold(value: Any) -> bool:
    """Whether tensors may be in a value: a container, or an object of a class of somebody's own."""
    if isinstance(value, (list, tuple, dict)):
        return bool(value)
    known = type(value).__module__.partition(".")[0] in ("builtins", "torch", "torchair")
    return not known and not callable(value) and hasattr(value, "__dict__")
