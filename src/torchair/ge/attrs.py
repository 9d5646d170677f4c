"""Typed attributes of nodes and tensor descriptions: `attr.Int(3)`, `attr.ListInt([1, 2])`.

Plain Python values tagged with the kind that decides their wire form. No protobuf here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchair.errors import GraphError
from torchair.ge import dtypes
from torchair.ge.shapes import on_wire

if TYPE_CHECKING:
    from torchair.ge.graph import Node, Value


AttrKind = Literal[
    "Int",
    "Float",
    "Bool",
    "Str",
    "DataType",
    "ListInt",
    "ListFloat",
    "ListBool",
    "ListStr",
    "ListDataType",
    "ListListInt",
    "ListListFloat",
    "Tensor",
    "Bytes",
]
KINDS: tuple[AttrKind, ...] = get_args(AttrKind)

_CHECKS: dict[str, Callable[[Any], Any]] = {
    "Int": int,
    "Float": float,
    "Bool": bool,
    "Str": lambda v: v.decode() if isinstance(v, bytes) else str(v),
    "DataType": int,
    "Bytes": bytes,
    "Tensor": lambda v: v,
}


class Attr:
    """One attribute: a kind from `KINDS` and its Python value."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str, value: Any) -> None:
        assert kind in KINDS, f"unknown attribute kind {kind!r}, expected one of {KINDS}"
        assert value is not None, f"ge.attr.{kind} needs a value, got None"
        self.kind = kind
        self.value = _normalise(kind, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attr) or self.kind != other.kind:
            return False
        if self.kind == "Tensor":
            return _same_tensor(self.value, other.value)
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((self.kind, repr(self.value)))

    def __repr__(self) -> str:
        return f"ge.attr.{self.kind}({self.value!r})"

    def merge_to(self, attribute: Any) -> None:
        """Put it on a node: `attr.Str("x").merge_to(node.attr["_kernel"])`."""
        attribute.put(self)

    def get(self, attribute: Any) -> Attr | None:
        """The attribute of a node if it is of the same kind as this one, else None."""
        return AttrMaker(self.kind).get(attribute)


def _normalise(kind: str, value: Any) -> Any:
    if kind.startswith("ListList"):
        return [[_CHECKS[kind[8:]](v) for v in row] for row in value]
    if kind.startswith("List"):
        assert isinstance(value, (list, tuple)), f"ge.attr.{kind} needs a list, got {value!r}"
        return [_CHECKS[kind[4:]](v) for v in value]
    return _CHECKS[kind](value)


def _same_tensor(a: Any, b: Any) -> bool:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # Copies, as one element with stride 0 counts as contiguous but cannot be seen as bytes.
    a, b = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class AttrMaker:
    """Makes attributes of one kind, and finds them: `Int(3)`, `Int.get(node.attr["n"])`."""

    def __init__(self, kind: AttrKind) -> None:
        self.kind = kind

    def __call__(self, value: Any) -> Attr:
        if isinstance(value, Attr):
            assert value.kind == self.kind, f"ge.attr.{self.kind} cannot be made of {value!r}"
            return value
        return Attr(self.kind, value)

    def get(self, attribute: Any) -> Attr | None:
        """The attribute of a node if it is of this kind, else None."""
        found: Attr | None = attribute.attr
        return found if found is not None and found.kind == self.kind else None

    def __repr__(self) -> str:
        return f"ge.attr.{self.kind}"


Int, Float, Bool, Str, DataType = (AttrMaker(kind) for kind in KINDS[:5])
ListInt, ListFloat, ListBool, ListStr, ListDataType = (AttrMaker(kind) for kind in KINDS[5:10])
ListListInt, ListListFloat = (AttrMaker(kind) for kind in KINDS[10:12])

_ATTR_TYPE_MAP: dict[str, AttrMaker] = {
    f"VT_{name}": kind
    for name, kind in {
        "INT": Int,
        "FLOAT": Float,
        "BOOL": Bool,
        "STRING": Str,
        "DATA_TYPE": DataType,
        "LIST_INT": ListInt,
        "LIST_FLOAT": ListFloat,
        "LIST_BOOL": ListBool,
        "LIST_STRING": ListStr,
        "LIST_DATA_TYPE": ListDataType,
        "LIST_LIST_INT": ListListInt,
        "LIST_LIST_FLOAT": ListListFloat,
    }.items()
}
"""Kinds by the names that files and the engine's operator definitions have for them."""


# ---- the same as protobuf messages show it, for converters written that way ----


# field of an attribute message: the kind of attribute it is, and what it reads as when unset
_FIELDS: dict[str, tuple[str, Any]] = {
    "i": ("Int", 0),
    "f": ("Float", 0.0),
    "b": ("Bool", False),
    "s": ("Str", b""),
    "dt": ("DataType", 0),
}


class Attribute:
    """One attribute by its fields `i`, `f`, `b`, `s`, `dt` and `list`."""

    __slots__ = ("_attrs", "_name")

    def __init__(self, attrs: dict[str, Attr], name: str) -> None:
        object.__setattr__(self, "_attrs", attrs)
        object.__setattr__(self, "_name", name)

    @property
    def attr(self) -> Attr | None:
        """The attribute itself, None while it is not set."""
        return self._attrs.get(self._name)

    def put(self, attr: Attr) -> None:
        """Make it this attribute."""
        self._attrs[self._name] = attr

    def HasField(self, field: str) -> bool:
        """Whether the attribute is set and of that kind."""
        attr = self.attr
        if attr is None:
            return False
        return attr.kind.startswith("List") if field == "list" else attr.kind == _field(field)[0]

    @property
    def list(self) -> Lists:
        """The fields again, as lists."""
        return Lists(self)

    def __getattr__(self, field: str) -> Any:
        kind, unset = _field(field)
        attr = self.attr
        if attr is None or attr.kind not in (kind, "Bytes" if field == "s" else kind):
            return unset
        return attr.value.encode() if attr.kind == "Str" else attr.value

    def __setattr__(self, field: str, value: Any) -> None:
        self.put(Attr(_field(field)[0], value))

    def __repr__(self) -> str:
        return f"{self._name}: {self.attr}"


class Lists:
    """The list fields of an attribute."""

    __slots__ = ("_attribute",)

    def __init__(self, attribute: Attribute) -> None:
        self._attribute = attribute

    def __getattr__(self, field: str) -> Members:
        return Members(self._attribute, f"List{_field(field)[0]}")


class Members(Sequence[Any]):
    """The members of one list attribute."""

    def __init__(self, attribute: Attribute, kind: str) -> None:
        self._attribute, self._kind = attribute, kind

    def _values(self) -> list[Any]:
        attr = self._attribute.attr
        if attr is None or attr.kind != self._kind:
            return []
        return [v.encode() if isinstance(v, str) else v for v in attr.value]

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __len__(self) -> int:
        return len(self._values())

    def append(self, value: Any) -> None:
        """One more member."""
        self.extend([value])

    def extend(self, values: Iterable[Any]) -> None:
        """More members."""
        self._attribute.put(Attr(self._kind, [*self._values(), *values]))


def _field(field: str) -> tuple[str, Any]:
    if field not in _FIELDS:
        raise AttributeError(f"an attribute has the fields {', '.join(_FIELDS)}, list, not {field}")
    return _FIELDS[field]


class Attributes:
    """Attributes by name, as messages, of what has them in its `attrs`: a graph, node or value."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Attribute:
        return Attribute(self._owner.attrs, name)

    def __contains__(self, name: object) -> bool:
        return name in self._owner.attrs

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner.attrs)

    def __len__(self) -> int:
        return len(self._owner.attrs)

    def __delitem__(self, name: str) -> None:
        del self._owner.attrs[name]

    def items(self) -> list[tuple[str, Attribute]]:
        """Names and attributes."""
        return [(name, self[name]) for name in self]


class NodeAttributes(Attributes):
    """Attributes of a node; called with a name it gives the value, with the prototype's default."""

    __slots__ = ()

    def __call__(self, name: str, default: Any = None) -> Any:
        """Value of an attribute: as set, else the prototype's default, else `default`."""
        found = self._owner.attrs.get(name)
        if found is not None:
            return found.value
        proto = self._owner.prototype
        spec = proto.by_name.get(name) if proto else None
        return default if spec is None or spec.default is None else spec.default


class Edges(Sequence[str]):
    """What a node reads, as `<node>:<output>`, an empty text for what is not fed, and then
    `<node>:-1` for what it waits for."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def _texts(self) -> list[str]:
        data = ["" if value is None else value.edge for _, _, value in self._node.slots()]
        return data + [f"{before.name}:-1" for before in self._node.control]

    def __getitem__(self, index: Any) -> Any:
        return self._texts()[index]

    def __setitem__(self, index: int, edge: str) -> None:
        slots = list(self._node.slots())
        port, position, _ = slots[index]
        self._node.set_input(port, self._node.graph.value(edge), position)

    def __len__(self) -> int:
        return len(self._texts())

    def append(self, edge: str) -> None:
        """Wait for another node, given as `<node>:-1`."""
        name, _, output = edge.rpartition(":")
        if output != "-1":
            raise GraphError(
                f"{edge!r} is not a control edge: operands are given when a node is built",
                node=self._node.name,
                hint="append `tensor.controller`, or set a position",
            )
        self._node.after(self._node.graph.node(name))

    def extend(self, edges: Iterable[str]) -> None:
        """Wait for several nodes."""
        for edge in edges:
            self.append(edge)


@dataclass
class Blank:
    """What a description has in the place of a value: that of an input which is not fed, or of an
    operator that is being written."""

    dtype: int = dtypes.DataType.DT_UNDEFINED
    shape: None = None
    layout: str = ""
    device_type: str = ""
    attrs: dict[str, Attr] = field(default_factory=dict)


def _of_value(name: str, doc: str) -> Any:
    """A field of a description that is one of its value."""

    def get(self: Description) -> Any:
        return getattr(self.value, name)

    def put(self: Description, given: Any) -> None:
        setattr(self.value, name, given)

    return property(get, put, doc=doc)


class Description:
    """The description of a value at one end of an edge."""

    def __init__(self, value: Value | Blank, port: str) -> None:
        self.value, self.name = value, port

    dtype = _of_value(
        "dtype", "Number of the type in `ge.DataType`; those of files are known to files alone."
    )
    layout = _of_value("layout", "Layout tag, as `NCHW`.")
    device_type = _of_value("device_type", "Where the value is, as `NPU`.")

    @property
    def attr(self) -> Attributes:
        """Attributes of the description."""
        return Attributes(self.value)

    @property
    def shape(self) -> SimpleNamespace:
        """Dims as its field `dim`, -1 for those that vary."""
        return SimpleNamespace(dim=on_wire(self.value.shape))

    def CopyFrom(self, other: Description) -> None:
        """Take type and layout over; the name is given afterwards."""
        self.dtype, self.layout = other.dtype, other.layout
