"""Torch operators that are one GE operator each: a row of a table instead of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from torchair.convert.operands import alike, cast_result, factor, plain, promote, wanted
from torchair.convert.registry import bound, builtin, schema_of
from torchair.ge.build import builder
from torchair.ge.dtypes import DataType
from torchair.ge.graph import TensorSpec


@dataclass(frozen=True)
class Direct:
    """A torch operator that is one GE operator.

    `inputs` are arguments of the schema in the order of GE's ports, all tensors if none are named,
    all arguments for `*`. `x:INT64` is cast to that type and `x:` to none, `~x` is a scale beside
    the result, `None` an unfed port, `1` and `[0]` are what they are. `attrs` are those that become
    attributes: `ge=torch` where names differ, `ge=[torch]` where GE has a list of one, `ge=@` the
    type of the result. `words` has the words for what torch numbers, `fixed` the attributes that
    are always the same.
    """

    type: str
    inputs: str = ""
    attrs: str = ""
    promoted: bool = False  # inputs are cast to the type of the result
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    recast: bool = False  # a Cast of the result, whatever its type is
    fixed: Mapping[str, Any] = field(default_factory=dict)
    alike: bool = False  # inputs of different types are declined


def direct(table: Mapping[Any, Direct | str], **same: Any) -> None:
    """Register rows, or just types with what is the `same` for all of them, for torch operators."""
    for target, row in table.items():
        row = Direct(row, **same) if isinstance(row, str) else row
        builtin(target, depth=2)(_converter(target, row))


def of_aten(names: Mapping[str, str]) -> dict[Any, str]:
    """A table for `direct` from GE types and torch's names for them: `pow.Scalar`, or `sqrt` for
    `sqrt.default`."""
    named = [(name.partition("."), op_type) for op_type, n in names.items() for name in n.split()]
    aten = torch.ops.aten
    return {getattr(getattr(aten, p), o or "default"): op_type for (p, _, o), op_type in named}


_LITERALS = {"None": None, "1": 1, "[0]": [0]}


@dataclass(frozen=True)
class _DirectPort:
    """An input of a GE operator: an argument or a literal, and the type that it is cast to."""

    name: str
    is_scale: bool
    dtype: int | None  # of this input alone
    keeps_type: bool

    @classmethod
    def read(cls, text: str) -> _DirectPort:
        """From a word of `Direct.inputs`."""
        name, marked, dtype = text.partition(":")
        own = DataType[f"DT_{dtype}"] if dtype else None
        return cls(name.removeprefix("~"), name.startswith("~"), own, marked != "" and own is None)

    def cast(self, value: Any, result: int, promoted: bool) -> Any:
        """The value of this input beside a result of type `result`."""
        if self.is_scale:
            return factor(result, value)
        if self.dtype is not None:
            return promote(self.dtype, value)
        return promote(result, value) if promoted and not self.keeps_type else value


class _DirectRow:
    """A row with the schema of its torch operator."""

    def __init__(self, target: Any, row: Direct) -> None:
        self.target, self.row = target, row
        parted = [text.partition("=") for text in row.attrs.split()]
        self._attrs = [(ge_name, name or ge_name) for ge_name, _, name in parted]

    @cached_property
    def ports(self) -> list[_DirectPort]:
        """In the order of GE's ports."""
        arguments, named = schema_of(self.target).arguments, self.row.inputs
        if named == "*":
            texts = [a.name for a in arguments]
        elif named:
            texts = named.split()
        else:
            texts = [a.name for a in arguments if "Tensor" in str(a.type)]
        return list(map(_DirectPort.read, texts))

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name, and the literals that rows may name."""
        return bound(schema_of(self.target), args, kwargs) | _LITERALS

    def attributes(self, given: dict[str, Any], dtype: Any) -> dict[str, Any]:
        """Attributes of the GE operator; `dtype` is that of the result."""
        attrs = dict(self.row.fixed)
        for ge_name, name in self._attrs:
            value = dtype if name == "@" else given[name.strip("[]")]
            plain(value)
            if ge_name in self.row.words:
                value = self.row.words[ge_name][value]
            attrs[ge_name] = [value] if name.startswith("[") else value
        return attrs


def _converter(target: Any, row: Direct) -> Callable[..., Any]:
    casts = row.promoted or row.recast or ":" in row.inputs or "~" in row.inputs
    return _casting(_DirectRow(target, row)) if casts else _plain(_DirectRow(target, row))


def _plain(known: _DirectRow) -> Callable[..., Any]:
    """A converter that feeds arguments as they are."""
    op_type, row = known.row.type, known.row

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = known.given(args, kwargs)
        attrs = known.attributes(given, getattr(meta_outputs, "dtype", None))
        inputs = [given[port.name] for port in known.ports]
        if row.alike:
            alike(*inputs)
        made = builder(op_type)(*inputs, **attrs)
        return wanted(made, meta_outputs) if isinstance(meta_outputs, list) else made

    return convert


def _casting(known: _DirectRow) -> Callable[..., Any]:
    """A converter that casts arguments, its result, or both."""
    op_type, row = known.row.type, known.row

    def convert(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Any:
        given, result = known.given(args, kwargs), meta_outputs.dtype
        values = [p.cast(given[p.name], result, row.promoted) for p in known.ports]
        made = builder(op_type)(*values, **known.attributes(given, result))
        return cast_result(made, result) if row.recast else promote(result, made)

    return convert
