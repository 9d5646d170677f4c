"""Arguments and results as flat lists: tuples, lists and dicts of plain classes quickly, whatever
else torch's pytrees know as they do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

_LEAF: Any = object()
_PLAIN = (tuple, list, dict)


class Shape:
    """How the arguments of one call are nested. `flat` is the way back from calls of that shape."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """`names` are those of positional arguments."""
        self.count, self.keys = len(args), tuple(kwargs)
        self._names = tuple(names)
        self._plain = True
        self.leaves: list[Any] = []
        self.labels: list[str] = []
        self._steps: list[Any] = []  # in the order of a walk: a leaf, or class and keys
        named = [*zip(self._names, args, strict=False), *kwargs.items()]
        self._walk([(v, label) for label, v in named][::-1])
        self.simple = all(s is _LEAF for s in self._steps)
        """Whether every argument is a leaf."""
        self._spec = None if self._plain else pytree.tree_structure((tuple(args), kwargs))
        if self._spec is not None:
            paths, _ = pytree.tree_flatten_with_path((tuple(args), kwargs))
            self.labels = [self._label(path) for path, _ in paths]
            self.leaves = [leaf for _, leaf in paths]

    def _walk(self, stack: list[tuple[Any, str]]) -> None:
        while stack:
            value, label = stack.pop()
            if type(value) not in _PLAIN:
                self._plain &= pytree.tree_is_leaf(value)
                self._steps.append(_LEAF)
                self.leaves.append(value)
                self.labels.append(label)
                continue
            keys = list(value) if type(value) is dict else range(len(value))
            self._steps.append((type(value), tuple(keys)))
            stack += [(value[k], f"{label}[{k!r}]") for k in keys][::-1]

    def _label(self, path: Sequence[Any]) -> str:
        key = path[1].idx if path[0].idx == 0 else path[1].key
        first = self._names[key] if isinstance(key, int) else key
        return first + pytree.keystr(tuple(path[2:]))

    def flat(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of a call, None if it is not of this shape."""
        if len(args) != self.count or tuple(kwargs) != self.keys:
            moved = self._moved(args, kwargs)
            if moved is None:
                return None
            args, kwargs = moved
        if self.simple:
            return [*args, *kwargs.values()]
        if self._spec is not None:
            leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
            return leaves if spec == self._spec else None
        return self._quickly([*args, *kwargs.values()][::-1])

    def _quickly(self, stack: list[Any]) -> list[Any] | None:
        found = []
        for step in self._steps:
            value = stack.pop()
            if step is _LEAF:
                found.append(value)
                continue
            kind, keys = step
            if type(value) is not kind or len(value) != len(keys):
                return None
            if kind is not dict:
                stack.extend(reversed(value))
            elif tuple(value) == keys or set(value) == set(keys):
                stack.extend([value[k] for k in reversed(keys)])
            else:
                return None
        return found

    def _moved(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """The same call with arguments by position that were so in the first one."""
        rest = dict(kwargs)
        if len(args) > self.count:
            rest |= dict(zip(self._names[self.count : len(args)], args[self.count :], strict=False))
            args = args[: self.count]
        missing = self._names[len(args) : self.count]
        if any(n not in rest for n in missing):
            return None
        moved = [*args, *(rest.pop(n) for n in missing)]
        return (moved, {k: rest[k] for k in self.keys}) if set(rest) == set(self.keys) else None

    def restored(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments of this shape with other leaves."""
        if self._spec is not None:
            args, kwargs = pytree.tree_unflatten(list(leaves), self._spec)
            return args, kwargs
        values: list[Any] = []  # built from the last step to the first, so that parts come first
        rest = list(leaves)
        for step in reversed(self._steps):
            if step is _LEAF:
                values.append(rest.pop())
                continue
            kind, keys = step
            parts = [values.pop() for _ in keys]
            values.append(dict(zip(keys, parts, strict=True)) if kind is dict else kind(parts))
        values.reverse()
        return values[: self.count], dict(zip(self.keys, values[self.count :], strict=True))


def result_of(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A function from leaves to the result of a call."""
    if spec.is_leaf():
        return lambda leaves: leaves[0]
    plain = spec.type in (tuple, list) and all(c.is_leaf() for c in spec.children())
    if plain:
        return spec.type if spec.type is tuple else list
    return lambda leaves: pytree.tree_unflatten(list(leaves), spec)
