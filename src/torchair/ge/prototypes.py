"""Operator prototypes: ports, types and attributes of all GE operators, and what users add to them.

Those of the package are read from one data file. It is indexed once, and a line is parsed when its
operator is first used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from torchair.ge.attrs import _ATTR_TYPE_MAP, KINDS, AttrKind
from torchair.ge.dtypes import ConverterErrorMsg, DataType

# Operators of our own, in the notation of the data file; and a constant has a result.
_OWN = """\
Const		y	value:Tensor _readable_value:Str=null
TorchCall	x*	y*	target:Str arguments:Str
TorchUpdate	ref x*	y	target:Str arguments:Str fresh:Bool=false
PagedUpdate	cache tokens slots	cache	blocked:Bool=false
NativeDropout	x	y mask	p:Float
PhiloxState		y	increment:Int device:Str
PhiloxMask	state shape:INT32,INT64	mask	keep:Float vector:Int threads:Int first:Int=0
ConvGradients	x filter out_backprop	dx dw	strides:ListInt pads:ListInt \
dilations:ListInt groups:Int data_format:Str
BatchNormStatistics	x weight	mean rstd scale variance	epsilon:Float
BatchNormScale	x mean scale bias	y
BatchNormSums	dy x weight mean rstd	dweight dbias scale slope level
BatchNormInputGrad	dy x mean scale slope level	dx
Moments	x	mean squares	axes:ListInt
GroupMoments	means squares gamma	mean rstd shift scale	points:Int epsilon:Float
GroupSums	total along rstd gamma	dgamma scale slope level	points:Int
ChannelsLast	x	y
"""


TORCH_CALLS = ("TorchCall", "TorchUpdate")
"""Generic nodes: any torch operator, and any that does nothing but update one tensor."""

PortKind = Literal["required", "optional", "dynamic"]
_MARKS: dict[str, PortKind] = {"?": "optional", "*": "dynamic"}


@dataclass(frozen=True)
class Port:
    """One declared input or output."""

    name: str
    kind: PortKind
    types: frozenset[int] = frozenset()  # empty: unconstrained or a type variable

    @property
    def is_index(self) -> bool:
        """Whether the port takes integers only (axes, sizes, counts)."""
        return bool(self.types) and self.types <= {DataType.DT_INT32, DataType.DT_INT64}


@dataclass(frozen=True)
class AttrSpec:
    """One declared attribute."""

    name: str
    kind: AttrKind
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Prototype:
    """What an operator type takes and gives."""

    type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attrs: tuple[AttrSpec, ...]

    @cached_property
    def by_name(self) -> dict[str, AttrSpec]:
        """Attributes by their names."""
        return {spec.name: spec for spec in self.attrs}

    @property
    def has_dynamic_output(self) -> bool:
        return any(p.kind == "dynamic" for p in self.outputs)


class _PrototypeTable:
    """The data file, split in lines by operator name."""

    def __init__(self, text: str) -> None:
        self.groups: dict[str, frozenset[int]] = {}
        self.lines: dict[str, str] = {}
        for line in (text + _OWN).splitlines():
            if line.startswith("@"):
                name, types = line.split("\t")
                self.groups[name] = frozenset(DataType["DT_" + t] for t in types.split(","))
            elif line and not line.startswith("#"):
                self.lines[line.split("\t", 1)[0]] = line

    def types(self, text: str) -> frozenset[int]:
        found: set[int] = set()
        for word in text.split(","):
            if word.startswith("$") or (word.startswith("@") and word not in self.groups):
                return frozenset()
            found |= self.groups[word] if word.startswith("@") else {DataType["DT_" + word]}
        return frozenset(found)

    def ports(self, text: str) -> tuple[Port, ...]:
        ports: list[Port] = []
        for word in text.split():
            name, _, types = word.partition(":")
            kind = _MARKS.get(name[-1:], "required")
            named = self.types(types) if types and types != "~" else frozenset[DataType]()
            known = ports[-1].types if types == "~" else named
            ports.append(Port(name.rstrip("?*"), kind, known))
        return tuple(ports)


@cache
def _table() -> _PrototypeTable:
    here = resources.files(__package__)
    names = ("prototypes.txt", "custom_prototypes.txt")
    return _PrototypeTable("".join(here.joinpath(name).read_text("utf-8") for name in names))


def _attr(text: str) -> AttrSpec:
    head, eq, default = text.partition("=")
    name, kind = head.split(":")
    assert kind in KINDS, text
    return AttrSpec(name, kind, json.loads(default) if eq else None, required=not eq)


_declared: dict[str, Prototype] = {}


def is_declared(op_type: str) -> bool:
    """Whether a user has declared an operator type."""
    return op_type in _declared


def is_users(op_type: str) -> bool:
    """Whether an operator type is none of the package."""
    return prototype(op_type) is None or is_declared(op_type)


def prototype(op_type: str) -> Prototype | None:
    """The prototype of an operator type, or None when it is not an operator we know."""
    return _declared.get(op_type) or _shipped(op_type)


@cache
def _shipped(op_type: str) -> Prototype | None:
    line = _table().lines.get(op_type)
    if line is None:
        return None
    name, inputs, outputs, attrs = [*line.split("\t"), "", "", ""][:4]
    ports = _table().ports(inputs), _table().ports(outputs)
    return Prototype(name, *ports, tuple(_attr(a) for a in attrs.split()))


def known_types() -> list[str]:
    """Names of all operator types."""
    return [*_table().lines, *_declared]


# ---- operators that users add; the operator table makes rows of the kernels kept here ----


@dataclass(frozen=True)
class UserKernel:
    """The meaning of an operator type, given by a user."""

    type: str
    shape_rule: Callable[..., Any] | None
    function: Callable[..., Any]
    updates: tuple[str, ...] = ()


_kernels: dict[str, UserKernel] = {}


def register_operator(
    op_type: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attrs: Mapping[str, str | tuple[str, Any]] | None = None,
) -> None:
    """Declare an operator type, so that `ge.custom_op` and `ge.<Type>` take positional arguments
    and a converter can be generated.

    A port is a name; `name?` may be unfed, `name*` takes a list. An attribute is a kind of
    `ge.attr` ("Float", "ListInt", ...), or a pair of the kind and a default. An output that has
    the name of an input is that input updated.
    """
    specs = tuple(_attr_spec(op_type, name, spec) for name, spec in (attrs or {}).items())
    fed, made = (tuple(_port(op_type, text) for text in ports) for ports in (inputs, outputs))
    proto = Prototype(op_type, fed, made, specs)
    known = prototype(op_type)
    if known is not None and known != proto:
        raise ValueError(f"operator type {op_type!r} is known already, with other ports")
    if known is None:
        _declared[op_type] = proto


def _port(op_type: str, text: str) -> Port:
    name = text.rstrip("?*")
    if not name.isidentifier():
        raise ValueError(f"{text!r} is not a port: a name is wanted, with ? or * behind it")
    mark = text[len(name) :]
    if mark and mark not in _MARKS:
        reason = ConverterErrorMsg.INPUT_TYPE_ILLEGAL
        raise ValueError(reason.format(op_type=op_type, name=name, param_type=mark))
    return Port(name, _MARKS.get(mark, "required"))


def _attr_spec(op_type: str, name: str, spec: str | tuple[str, Any]) -> AttrSpec:
    kind, default, required = (spec, None, True) if isinstance(spec, str) else (*spec, False)
    if kind in _ATTR_TYPE_MAP:
        kind = _ATTR_TYPE_MAP[kind].kind
    if kind not in KINDS:
        reason = ConverterErrorMsg.ATTR_TYPE_ILLEGAL.format(
            op_type=op_type, attr_type=kind, name=name, all_attr_types=_ATTR_TYPE_MAP.keys()
        )
        raise ValueError(f"{reason} Here they may also be written as {KINDS}")
    return AttrSpec(name, kind, default, required)


def register_kernel(
    op_type: str,
    shape_rule: Callable[..., Any] | None,
    function: Callable[..., Any],
    *,
    updates: Sequence[str] = (),
) -> None:
    """Let the engine compute an operator type with a torch function; a later call overrides.

    The function gets the tensors in port order (None for an unfed port, a list for a variable
    one) and the attributes by keyword, and returns a tensor or a tuple of them. `shape_rule` is
    called in the same way with tensors on the `meta` device and tells the results by others on it;
    with None the function itself is asked. `updates` names the inputs that the function changes in
    place: each has an output of the same name, which the function does not return.
    """
    if prototype(op_type) is not None and not is_declared(op_type):
        raise ValueError(
            f"{op_type} is an operator of the package: choose another name for yours, or give it "
            "a row with torchair.operators.core.add_row"
        )
    _kernels[op_type] = UserKernel(op_type, shape_rule, function, tuple(updates))


def unregister_kernel(op_type: str) -> None:
    """Forget the kernel of an operator type."""
    _kernels.pop(op_type, None)


def user_kernel(op_type: str) -> UserKernel | None:
    """What a user registered for an operator type."""
    return _kernels.get(op_type)
