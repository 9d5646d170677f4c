"""How the tensors a graph computes, and its inputs, become the results of the FX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torchair.ge.graph import Graph
from torchair.ge.shapes import Shape

NO_OFFSET = 2**63 - 1
"""What stands for the offset of a random operator where none is given."""


@dataclass(frozen=True)
class Fixed:
    """A result known at compile time (None, a number)."""

    value: Any


@dataclass(frozen=True)
class Computed:
    """Output `index` of the GE graph, laid out with the strides that tracing promised."""

    index: int
    shape: Shape
    strides: Shape
    alias_group: int  # results of one group share memory in the traced program
    same: bool = True  # else another tensor object over the same memory
    offset: Any = None  # where it must begin in its memory, if that matters
    device: str = "cpu"  # where tracing saw it


@dataclass(frozen=True)
class ComputedScalar:
    """A Python number that only running the graph gives."""

    index: int


CASTS = ("", "view_as_real", "view_as_complex", "detach")
"""Functions of torch that a view is seen through."""

PENDING = ("", "conj", "neg", "conj neg")
"""What a tensor leaves to its readers: torch conjugates and negates lazily."""


class Pending(NamedTuple):
    """What a base leaves to its readers, and what a view of its memory does. A view that only takes
    elements of its base has what the base has, and names neither."""

    base: str = ""
    view: str = ""


PLAIN = Pending()


@dataclass(frozen=True)
class InputView:
    """A view of argument `arg`, never computed by the graph."""

    arg: int
    shape: Shape
    strides: Shape
    offset: Any  # from where the argument begins, in elements of the view
    same: bool = False  # the very argument object
    cast: str = ""  # one of CASTS or the name of another type
    pending: Pending = PLAIN
    traced: Callable[..., Any] | None = field(default=None, compare=False)
    """The view as it was traced, of all arguments: gradients of an argument that repeats are those
    of its elements. Files have no gradients and do not hold it."""


@dataclass(frozen=True)
class ResultView:
    """A view of what the graph computes, which may be a result itself or not."""

    base: Computed
    shape: Shape
    strides: Shape
    offset: Any  # from where the base begins, in elements of the view
    cast: str = ""  # as for a view of an argument
    name: str = ""  # views of one name are one tensor
    pending: Pending = PLAIN


@dataclass(frozen=True)
class SymbolResult:
    """An expression over the sizes of the call."""

    expr: Any


GraphResult = Fixed | Computed | ComputedScalar | InputView | ResultView | SymbolResult


def computed(results: Iterable[GraphResult]) -> list[Computed]:
    """Outputs of the graph that results are, or are views of."""
    found = [r.base if isinstance(r, ResultView) else r for r in results]
    return [r for r in found if isinstance(r, Computed)]


SourceKind = Literal["tensor", "scalar", "packed", "random", "opaque"]
"""Scalars and handles of opaque objects are 0-d, packed numbers and random offsets 1-d."""


@dataclass(frozen=True)
class InputSource:
    """Where a Data node gets its tensor from: an argument, numbers packed from several, or
    nothing: random operators have no offset then and draw from the generators of torch."""

    args: tuple[int, ...]
    kind: SourceKind = "tensor"
    dtype: int = 0
    static: bool = False  # a parameter: the same tensor in every call
    count: int = 0  # of random offsets


@dataclass
class Signature:
    """Inputs, results and symbols of a converted FX graph."""

    inputs: list[InputSource] = field(default_factory=list)  # by Data index
    results: list[GraphResult] = field(default_factory=list)
    symbols: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # name: (arg, dim)
    arguments: int = 0  # of a call, also those that nothing reads

    def renumbered(self, places: Mapping[int, int]) -> Signature:
        """For arguments in other places; KeyError where one that is needed has none."""
        inputs = [replace(s, args=tuple(places[a] for a in s.args)) for s in self.inputs]
        results: list[GraphResult] = [
            replace(r, arg=places[r.arg]) if isinstance(r, InputView) else r for r in self.results
        ]
        symbols = {name: (places[a], d) for name, (a, d) in self.symbols.items() if a in places}
        return Signature(inputs, results, symbols, len(places))


@dataclass(frozen=True)
class Conversion:
    """The result of converting one FX graph."""

    graph: Graph
    signature: Signature
    generic: dict[str, int]  # torch operators that went to the generic node: how often
