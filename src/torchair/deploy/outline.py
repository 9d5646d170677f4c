"""How the results of a model are nested, as JSON that a file holds: tuples, lists, dicts, and the
fields of other classes. Nothing is imported or executed to build them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torchair.deploy.trees import Fields
from torchair.errors import SerializationError

Path = tuple[str | int, ...]
_PLAIN = (bool, int, float, str, type(None))
_DEEP = 12


class NotNested(Exception):
    """A result that no file can tell."""


def outline(value: Any, leaf: Callable[[Any], dict[str, Any] | None], depth: int = 0) -> Any:
    """The nesting of a value as JSON; `leaf` tells where a tensor comes from, None for all else."""
    known = leaf(value)
    if known is not None:
        return known
    if isinstance(value, _PLAIN):
        return {"constant": value}
    if depth == _DEEP:
        raise NotNested("results are nested too deeply")
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [outline(v, leaf, depth + 1) for v in value]}
    if isinstance(value, Mapping):
        kind = "fields" if is_dataclass(value) else "dict"
        if not all(isinstance(k, _PLAIN) for k in value):
            raise NotNested("a dict has keys that are neither numbers nor texts")
        return {kind: [[k, outline(v, leaf, depth + 1)] for k, v in value.items()]}
    if is_dataclass(value):
        named = {f.name: getattr(value, f.name) for f in fields(value)}
        return {"fields": [[k, outline(v, leaf, depth + 1)] for k, v in named.items()]}
    return {"fields": _attributes(value, leaf, depth)}


def _attributes(value: Any, leaf: Callable[[Any], Any], depth: int) -> list[Any]:
    """Those of an object that can be told, as a cache has them."""
    found = []
    for name, part in getattr(value, "__dict__", {}).items():
        try:
            found.append([name, outline(part, leaf, depth + 1)])
        except NotNested:
            continue
    if not found:
        raise NotNested(f"a result is a {type(value).__name__}")
    return found


Build = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class Builder:
    """Makes results of the flat ones of a call, and of what else they may be: `reach` finds an
    argument by its path, `weights` are tensors of the model."""

    def __init__(
        self, tree: Any, count: int, reach: Callable[[Mapping[str, Any], Path], Any],
        weights: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._count, self._reach, self._weights = count, reach, weights
        self.build: Build = self._read(tree, 0)

    def _read(self, tree: Any, depth: int) -> Build:
        if not isinstance(tree, dict) or len(tree) != 1 or depth > _DEEP:
            raise SerializationError(f"no nesting of results: {tree!r:.60}")
        ((kind, inner),) = tree.items()
        made = getattr(self, f"_{kind}", None) if kind in _KINDS else None
        if made is None:
            raise SerializationError(f"results are nested in {kind!r}, which is not known")
        found: Build = made(inner, depth + 1)
        return found

    def _result(self, index: Any, depth: int) -> Build:
        if type(index) is not int or not 0 <= index < self._count:
            raise SerializationError(f"there is no result {index!r}")
        return lambda results, given: results[index]

    def _argument(self, path: Any, depth: int) -> Build:
        keys = tuple(path) if isinstance(path, list) else ()
        if not keys or not all(isinstance(k, (str, int)) for k in keys):
            raise SerializationError(f"a result is the argument {path!r}, which is no path")
        return lambda results, given: self._reach(given, keys)

    def _weight(self, name: Any, depth: int) -> Build:
        tensor = self._weights.get(name) if isinstance(name, str) else None
        if tensor is None:
            raise SerializationError(f"a result is the weight {name!r}, which is not in the file")
        return lambda results, given: tensor

    def _constant(self, value: Any, depth: int) -> Build:
        if not isinstance(value, _PLAIN):
            raise SerializationError("a result is neither a number nor a text")
        return lambda results, given: value

    def _several(self, inner: Any, depth: int) -> list[Build]:
        if not isinstance(inner, list):
            raise SerializationError("results are nested in nothing")
        return [self._read(part, depth) for part in inner]

    def _list(self, inner: Any, depth: int) -> Build:
        parts = self._several(inner, depth)
        return lambda results, given: [part(results, given) for part in parts]

    def _tuple(self, inner: Any, depth: int) -> Build:
        parts = self._several(inner, depth)
        return lambda results, given: tuple([part(results, given) for part in parts])

    def _dict(self, inner: Any, depth: int, kind: type[dict[Any, Any]] = dict) -> Build:
        pairs: list[Any] = inner if isinstance(inner, list) else [None]
        if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], _PLAIN) for p in pairs):
            raise SerializationError("a dict of results is damaged")
        keys = [k for k, _ in pairs]
        parts = self._several([v for _, v in pairs], depth)
        return lambda results, given: kind(
            zip(keys, [part(results, given) for part in parts], strict=True)
        )

    def _fields(self, inner: Any, depth: int) -> Build:
        return self._dict(inner, depth, Fields)


_KINDS = ("result", "argument", "weight", "constant", "list", "tuple", "dict", "fields")
