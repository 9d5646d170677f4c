"""Typed attributes of nodes and tensor descriptions: `attr.Int(3)`, `attr.ListInt([1, 2])`.

Plain Python values tagged with the kind that decides their wire form. No protobuf here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

AttrKind = Literal[
    "Int", "Float", "Bool", "Str", "DataType", "ListInt", "ListFloat", "ListBool", "ListStr",
    "ListDataType", "ListListInt", "ListListFloat", "Tensor", "Bytes",
]  # fmt: skip
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


Int = AttrMaker("Int")
Float = AttrMaker("Float")
Bool = AttrMaker("Bool")
Str = AttrMaker("Str")
DataType = AttrMaker("DataType")
ListInt = AttrMaker("ListInt")
ListFloat = AttrMaker("ListFloat")
ListBool = AttrMaker("ListBool")
ListStr = AttrMaker("ListStr")
ListDataType = AttrMaker("ListDataType")
ListListInt = AttrMaker("ListListInt")
ListListFloat = AttrMaker("ListListFloat")

_ATTR_TYPE_MAP: dict[str, AttrMaker] = {
    f"VT_{name}": kind
    for name, kind in {
        "INT": Int, "FLOAT": Float, "BOOL": Bool, "STRING": Str, "DATA_TYPE": DataType,
        "LIST_INT": ListInt, "LIST_FLOAT": ListFloat, "LIST_BOOL": ListBool,
        "LIST_STRING": ListStr, "LIST_DATA_TYPE": ListDataType, "LIST_LIST_INT": ListListInt,
        "LIST_LIST_FLOAT": ListListFloat,
    }.items()
}  # fmt: skip
"""Kinds by the names that files and the engine's operator definitions have for them."""
