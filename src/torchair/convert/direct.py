"""Torch operators that are one GE operator each: a row of a table instead of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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


def _converter(target: Any, row: Direct) -> Callable[..., Any]:
    op_type, words, scale = row.type, row.words, factor if "~" in row.inputs else promote
    parted = [text.partition("=") for text in row.attrs.split()]
    renamed = [(ge_name, name or ge_name) for ge_name, _, name in parted]

    @cache
    def ports() -> list[tuple[str, str, str]]:
        given, every = schema_of(target).arguments, row.inputs == "*"
        names = [a.name for a in given if every or "Tensor" in str(a.type)]
        return [n.partition(":") for n in (not every and row.inputs.split()) or names]

    def attributes(given: dict[str, Any], dtype: Any) -> dict[str, Any]:
        attrs = dict(row.fixed)
        for ge_name, name in renamed:
            value = dtype if name == "@" else given[name.strip("[]")]
            plain(value)
            value = words[ge_name][value] if ge_name in words else value
            attrs[ge_name] = [value] if name.startswith("[") else value
        return attrs

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        given = bound(schema_of(target), args, kwargs) | _LITERALS
        attrs = attributes(given, getattr(meta_outputs, "dtype", None))
        inputs = [given[name] for name, _, _ in ports()]
        if row.alike:
            alike(*inputs)
        made = builder(op_type)(*inputs, **attrs)
        return wanted(made, meta_outputs) if isinstance(meta_outputs, list) else made

    def promoting(*args: Any, meta_outputs: TensorSpec, **kwargs: Any) -> Any:
        given, result = bound(schema_of(target), args, kwargs) | _LITERALS, meta_outputs.dtype
        values = []
        for name, marked, dtype in ports():
            if name.startswith("~"):
                values.append(scale(result, given[name[1:]]))
            elif dtype or (row.promoted and not marked):
                wanted = DataType[f"DT_{dtype}"] if dtype else result
                values.append(promote(wanted, given[name]))
            else:
                values.append(given[name])
        made = builder(op_type)(*values, **attributes(given, result))
        return cast_result(made, result) if row.recast else promote(result, made)

    casts = row.promoted or row.recast or any(mark in row.inputs for mark in ":~")
    return promoting if casts else convert
