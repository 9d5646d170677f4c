"""How an operator of the `npu` library appears in a GE graph, as data: converters and the meaning
of the GE operator are both made of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from torchair.torch_private.dispatch import parse_schema

GE_TYPES = 256
"""A type number from here on is GE's number plus this."""


@dataclass(frozen=True)
class GeForm:
    """The GE operator that a torch operator becomes.

    Inputs and attributes of the GE operator are the arguments of the same name; `names` has those
    with another name, by the name that GE has. `types` are attributes that name a type: torch_npu
    has other numbers for them. `fixed` attributes are always the same, or a function of all
    arguments; `defaults` have a value where the argument is None. A number that has no place
    in GE is a private attribute of the node; for a tensor without one the generic node takes the
    call. `unused` arguments have no effect on values. `words` has what GE calls values of torch, by
    attribute; `casts` the types of GE that arguments are cast to.

    An output with the name of an input is that input updated. `copied` arguments are copied before;
    new values of the `assigned` ones go to the graph's inputs: of what an operator updates and its
    schema does not say so. `results` are the outputs that torch returns, by the names of their
    ports, where that is neither all of them nor those that are no updated inputs.

    The kernel of the GE operator is that of the first operator with this type.
    """

    type: str
    names: Mapping[str, str] = field(default_factory=dict)
    types: Sequence[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unused: Sequence[str] = ()
    collective: bool = False  # talks to other processes
    words: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    copied: Sequence[str] = ()
    assigned: Sequence[str] = ()
    results: Sequence[str] = ()
    product: bool = False  # multiplies matrices

    @staticmethod
    def private(name: str) -> str:
        """The attribute that holds an argument which GE does not have."""
        return f"_argument_{name}"

    def argument(self, name: str) -> str:
        """The argument of the torch operator behind a name of GE."""
        return self.names.get(name, name)

    def returned(
        self, outputs: Sequence[str], inputs: Collection[str], returns: int
    ) -> Sequence[str]:
        """Ports of the outputs that an operator with so many results returns, in its order."""
        if self.results or len(outputs) == returns:
            return self.results or outputs
        return [port for port in outputs if port not in inputs]


@dataclass(frozen=True)
class TensorMeta:
    """A tensor as far as its type and dims are known; dims may be expressions.

    Has what fake kernels ask of a tensor, so that they are shape rules of GE operators too. These
    may compute with dims, and not compare them.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def new_empty(self, dims: Any, dtype: torch.dtype | None = None) -> TensorMeta:
        """A result of other dims."""
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        return TensorMeta(dims, dtype or self.dtype)

    def dim(self) -> int:
        """Number of dims."""
        return len(self.shape)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes; TypeError if one is an expression that cannot be compared."""
    traced = isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt)
    return torch.sym_min(a, b) if traced else min(a, b)


class Arguments(SimpleNamespace):
    """The arguments of one call by name. Those that were not given have their default."""


class OperatorCall:
    """Arguments of an operator by name, and the call with them."""

    def __init__(self, schema: str) -> None:
        self._text = schema

    @cached_property
    def arguments(self) -> list[Any]:
        """What the schema says of each argument."""
        return list(self._schema.arguments)

    @property
    def returns(self) -> int:
        """Number of results."""
        return len(self._schema.returns)

    @cached_property
    def _schema(self) -> Any:
        return parse_schema(f"npu::{self._text}")

    def record(self, args: Sequence[Any], named: Mapping[str, Any]) -> Arguments:
        """The arguments of a call, by place and by name."""
        given = {a.name: a.default_value for a in self.arguments}
        given |= {a.name: value for a, value in zip(self.arguments, args, strict=False)}
        return Arguments(**given | dict(named))

    def run(self, function: Any, given: Mapping[str, Any]) -> Any:
        """Call a kernel; arguments that are not given have their default."""
        places: list[Any] = []
        named: dict[str, Any] = {}
        for argument in self.arguments:
            value = given.get(argument.name, argument.default_value)
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                places.append(value)
        return function(*places, **named)
