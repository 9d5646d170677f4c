"""Arguments and results as flat lists: tuples, lists and dicts of plain classes and dataclasses
quickly, whatever else torch's pytrees know as they do it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

from torchair.torch_private import pytree

_LEAF: Any = object()
_PLAIN = (tuple, list, dict)


class CallShape:
    """How the arguments of one call are nested. `flat` is the way back from calls of that shape."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """`names` are those of positional arguments."""
        self.count, self.keys = len(args), tuple(kwargs)
        self.names = tuple(names)
        self._plain = True
        self.leaves: list[Any] = []
        self.labels: list[str] = []
        self._steps: list[Any] = []  # in the order of a walk: a leaf, or class and keys
        self._records: dict[int, Any] = {}  # dataclasses, by their step
        named = [*zip(self.names, args, strict=False), *kwargs.items()]
        self._walk([(v, label) for label, v in named][::-1])
        self.simple = self._plain and all(s is _LEAF for s in self._steps)
        """Whether every argument is a leaf."""
        self._spec = None if self._plain else pytree.tree_structure((tuple(args), kwargs))
        if self._spec is not None:
            paths, _ = pytree.tree_flatten_with_path((tuple(args), kwargs))
            self.labels = [self._label(path) for path, _ in paths]
            self.leaves = [leaf for _, leaf in paths]

    def _walk(self, stack: list[tuple[Any, str]]) -> None:
        while stack:
            value, label = stack.pop()
            if is_record(value):
                names = tuple(f.name for f in fields(value))
                self._records[len(self._steps)] = value
                self._steps.append((type(value), names))
                stack += [(getattr(value, n), f"{label}.{n}") for n in names][::-1]
                continue
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
        first = self.names[key] if isinstance(key, int) else key
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
            if type(value) is not kind:
                return None
            if kind not in _PLAIN:
                stack.extend([getattr(value, n) for n in reversed(keys)])
            elif len(value) != len(keys):
                return None
            elif kind is not dict:
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
        if len(args) > max(self.count, len(self.names)):
            return None
        if len(args) > self.count:
            rest |= dict(zip(self.names[self.count : len(args)], args[self.count :], strict=True))
            args = args[: self.count]
        missing = self.names[len(args) : self.count]
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
        for k, step in reversed(list(enumerate(self._steps))):
            if step is _LEAF:
                values.append(rest.pop())
                continue
            kind, keys = step
            parts = dict(zip(keys, [values.pop() for _ in keys], strict=True))
            if k in self._records:
                values.append(_with(copy.copy(self._records[k]), parts))
            else:
                values.append(parts if kind is dict else kind(parts.values()))
        values.reverse()
        return values[: self.count], dict(zip(self.keys, values[self.count :], strict=True))

    def forget(self) -> None:
        """Do not hold the arguments of the first call any more; nothing can be `restored` then."""
        self.leaves, self._records = [], {}


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass that torch's pytrees do not know: its fields count."""
    return is_dataclass(value) and not isinstance(value, type) and pytree.tree_is_leaf(value)


def _with(record: Any, parts: dict[str, Any]) -> Any:
    for name, part in parts.items():
        object.__setattr__(record, name, part)  # a frozen one, too
    return record


class Fields(dict[str, Any]):
    """The fields of a result whose class is not in this process: keys, attributes, and in order."""

    def __getitem__(self, key: Any) -> Any:
        return [*self.values()][key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class _Record:
    """A dataclass as a node of pytrees: its class by name, its fields."""

    module: str
    name: str
    fields: dict[str, Any]


_classes: WeakValueDictionary[tuple[str, str], type] = WeakValueDictionary()


def packed(result: Any) -> Any:
    """A result with a node that pytrees know for each dataclass that they do not."""
    return pytree.tree_map(_noted, result)


def _noted(value: Any) -> Any:
    if not is_record(value):
        return value
    kind = type(value)
    _classes[kind.__module__, kind.__qualname__] = kind
    values = {f.name: packed(getattr(value, f.name)) for f in fields(value)}
    return _Record(kind.__module__, kind.__qualname__, values)


def _record_of(values: Any, context: Any) -> Any:
    """The dataclass, if its class is there: nothing is imported for that, nothing of it runs."""
    module, name, names = context
    parts = dict(zip(names, values, strict=True))
    found: Any = _classes.get((module, name)) or sys.modules.get(module)
    if not isinstance(found, type):
        for part in name.split("."):
            found = getattr(found, part, None)
    fits = isinstance(found, type) and is_dataclass(found)
    if not fits or {f.name for f in fields(found)} != set(names):
        return Fields(parts)
    return _with(object.__new__(found), parts)


pytree.register_pytree_node(
    _Record,
    lambda r: ([*r.fields.values()], (r.module, r.name, tuple(r.fields))),
    _record_of,
    serialized_type_name="torchair.record",
    to_dumpable_context=list,
    from_dumpable_context=lambda c: (c[0], c[1], tuple(c[2])),
)


_IMPORTING = ("__enum__", "collections.defaultdict")  # what torch imports modules for


def spec_text(spec: pytree.TreeSpec) -> str:
    """A nesting as text; NotImplementedError where it has none that can be read again."""
    text = pytree.treespec_dumps(spec)
    if any(word in text for word in _IMPORTING):
        raise NotImplementedError("results are in a defaultdict, or have an enum for a key")
    return text


def spec_of(text: str) -> pytree.TreeSpec:
    """The nesting of such a text, for which nothing is imported; ValueError for another text."""
    if any(word in text for word in _IMPORTING):
        raise ValueError("it names modules, and a file must not import modules")
    return pytree.treespec_loads(text)


def only(leaves: Sequence[Any]) -> Any:
    """The result of a call that has one leaf."""
    return leaves[0]


def result_of(
    spec: pytree.TreeSpec, constants: Mapping[int, Any]
) -> Callable[[Sequence[Any]], Any]:
    """A function from the leaves that are not `constants` to the result of a call."""
    if constants:
        finish, count = result_of(spec, {}), spec.num_leaves

        def with_constants(tensors: Sequence[Any]) -> Any:
            rest = iter(tensors)
            return finish([constants[k] if k in constants else next(rest) for k in range(count)])

        return with_constants
    if spec.is_leaf():
        return only
    if spec.type in (tuple, list) and all(c.is_leaf() for c in spec.children()):
        return spec.type
    return lambda leaves: pytree.tree_unflatten(list(leaves), spec)
