"""Inputs of one graph: what they must be, which of their properties decide about a plan, and how
call arguments become inputs and outputs results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch

from torchair.codegen.streams import HOST
from torchair.engine.plan.ending import OutputLayout
from torchair.engine.plan.records import picker
from torchair.errors import GraphError, InputError
from torchair.ge import signature as sig
from torchair.ge.dtypes import INT_TYPES, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Graph, Value
from torchair.ge.shapes import Shape, Sym, compile_dims, free_symbols, is_static, on_wire
from torchair.operators import steering_nodes
from torchair.operators.opaque import handle_of
from torchair.torch_private.functions import neg_view


class GraphInputs:
    """The inputs of a graph, in index order."""

    def __init__(
        self, graph: Graph, sources: Sequence[sig.InputSource], device: str, strides: bool
    ) -> None:
        """With `strides`, plans are for inputs of certain strides."""
        self.data = [n.outputs[0] for n in graph.data]
        self.dynamic = graph.is_dynamic
        steering = _steering_inputs(graph)
        self.by_value = {i for i, v in enumerate(self.data) if v in steering}
        self.varying: list[int] = []  # those that may differ from call to call
        self._requirements = [_InputCheck(i, v, device) for i, v in enumerate(self.data)]
        self._checks: list[_InputCheck] = []
        known = [s.static for s in sources]
        static = [*known, *[False] * len(self.data)][: len(self.data)]
        self.pick = picker([i for i, fixed in enumerate(static) if not fixed])
        for i, value in enumerate(self.data):
            if not static[i] or not is_static(value.shape):
                self.varying.append(i)
            if not static[i]:
                self._checks.append(self._requirements[i])
        read = [(i, self.data[i], i in self.by_value) for i in self.varying]
        self.reader = Reader(read, strides)
        """Tells what two sets of inputs have in common that one plan serves."""

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse what the graph cannot take, as far as that is seen without sizes."""
        if len(inputs) != len(self.data):
            raise InputError(
                "wrong number of inputs", expected=str(len(self.data)), got=str(len(inputs))
            )
        for check in self._checks:
            check.check(inputs[check.index])

    def facts(self, inputs: Sequence[torch.Tensor]) -> list[Fact]:
        """What planning must know of them."""
        return [self.fact(i, t) for i, t in enumerate(inputs)]

    def fact(self, i: int, t: torch.Tensor) -> Fact:
        """The same of one."""
        self._requirements[i].verify(t)
        content: Any = None
        if i in self.by_value:
            content = tuple(t.tolist()) if t.dim() else t.item()
        return Fact(torch_to_ge(t.dtype), tuple(t.shape), content)


class _InputCheck:
    """What an input must be. Strides are free: kernels read any layout."""

    def __init__(self, index: int, value: Value, device: str) -> None:
        self.index = index
        self._name = value.node.name
        self._dtype = ge_to_torch(value.dtype)
        self._shape = value.shape
        self._rank = None if value.shape is None else len(value.shape)
        self._size = torch.Size(value.shape) if is_static(value.shape) else None  # type: ignore[arg-type]
        self._device = HOST if value.device_type == "CPU" else torch.device(device).type

    def check(self, t: Any) -> None:
        """Kind, place, type and fixed dims; cheap enough for every call."""
        if not isinstance(t, torch.Tensor):
            got = "None" if t is None else f"a {type(t).__name__}"
            problem = f"element {self.index} is {got}: "
            raise self._error(f"a tensor on {self._device}", got, problem)
        if t.device.type != self._device:
            raise self._error(f"a tensor on {self._device}", f"one on {t.device}")
        if t.dtype is not self._dtype:
            raise self._error(f"type {self._dtype}", str(t.dtype))
        wrong = t.dim() != self._rank if self._size is None else t.shape != self._size
        if wrong and self._rank is not None:
            raise self._error(f"dims {on_wire(self._shape)}", str(list(t.shape)))

    def verify(self, t: torch.Tensor) -> None:
        """Dims that may vary too; done once for every new set of sizes."""
        self.check(t)
        if self._shape is None or self._size is not None:
            return
        if not fits(t.shape, self._shape):
            raise self._error(f"dims {on_wire(self._shape)}", str(list(t.shape)))

    def _error(self, expected: str, got: str, problem: str = "") -> InputError:
        return InputError(
            f"{problem}an input does not fit the compiled graph",
            index=self.index,
            name=self._name,
            expected=expected,
            got=got,
        )


def fits(dims: Sequence[int], shape: Shape) -> bool:
    """Whether dims are those of a shape, whose symbolic dims take any."""
    same = (n == d or not isinstance(d, int) for n, d in zip(dims, shape, strict=False))
    return len(dims) == len(shape) and all(same)


def check_hints(data: Sequence[Value], hints: Sequence[Sequence[int]]) -> None:
    """InputError where dims that inputs are said to have do not fit the graph."""
    if len(hints) != len(data):
        raise InputError(
            "wrong number of hint shapes", expected=str(len(data)), got=str(len(hints))
        )
    for i, (value, dims) in enumerate(zip(data, hints, strict=True)):
        if value.shape is not None and not fits(dims, value.shape):
            raise InputError(
                "a hint shape does not fit the graph",
                index=i,
                name=value.node.name,
                expected=on_wire(value.shape),
                got=list(dims),
            )


def check_outputs(outputs: Sequence[Value], expected: Sequence[Sequence[int]]) -> None:
    """GraphError where outputs do not have the dims that the caller expects, if it gave any."""
    if not expected:
        return
    if len(outputs) != len(expected):
        raise _other_outputs("number", len(outputs), len(expected), "outputs")
    for value, dims in zip(outputs, expected, strict=True):
        if value.shape is not None and not fits(dims, value.shape):
            word = "dim" if len(dims) == len(value.shape) else "dim size"
            raise _other_outputs(word, on_wire(value.shape), list(dims), "output")


def _other_outputs(word: str, found: object, expected: object, outputs: str) -> GraphError:
    return GraphError(
        f"The {word} of Ascend net output: {found} is not equal to FX net {outputs}: {expected}",
        hint="give set_hint_shape the dims that the graph was traced with",
    )


def _steering_inputs(graph: Graph) -> set[Value]:
    """Small host inputs whose numbers decide dims or arguments somewhere, or strides of results:
    then nothing reads them."""
    steering = steering_nodes(graph)
    inputs = [n.outputs[0] for n in graph.data]
    found = {v for v in inputs if not v.uses and isinstance(v.content, Sym)}
    return found | {v for v in inputs if v.node in steering and _is_host(v)}


def _is_host(value: Value) -> bool:
    """A scalar or packed sizes, as opposed to a CPU tensor of data."""
    small = value.shape == () or value.content is not None
    given = value.node.type == "Data" and value.device_type == "CPU"
    return small and given and value.dtype in INT_TYPES


# ---- what of the inputs of a call its plan depends on, as one row of integers ----

_MANY = 4  # inputs that look alike and are equal: not by chance


@dataclass(frozen=True)
class InputPart:
    """What is read of one input."""

    index: int
    rank: int  # -1 if any is right
    dims: bool
    strides: bool
    numbers: int = 0  # elements of a host value whose content decides something
    scalar: bool = False
    kind: Any = None  # what the graph says of it: equal for inputs that look alike

    @property
    def width(self) -> int:
        """How many integers are read of one whose rank is known."""
        return self.rank * (self.dims + self.strides) + self.numbers


@dataclass(frozen=True)
class InputFacts:
    """What was read of one input; None where nothing was."""

    dims: tuple[Any, ...] | None
    strides: tuple[Any, ...] | None
    content: Any


class Reader:
    """Reads inputs; `inputs` are the numbers of those it looks at."""

    def __init__(self, values: Sequence[tuple[int, Value, bool]], strides: bool) -> None:
        """`values` are inputs that may differ from call to call, and whether their content counts;
        `strides` says whether plans depend on those."""
        self._parts = [_part(i, v, steers, strides) for i, v, steers in values]
        self.inputs = [p.index for p in self._parts]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        row: list[int] = []
        for part in self._parts:
            x = inputs[part.index]
            if part.rank < 0:
                row.append(x.dim())
            if part.dims:
                row += x.shape
            if part.strides:
                row += x.stride()
            if part.numbers:
                row += x.reshape(-1).tolist()
        return tuple(row)

    def twins(self, row: Sequence[int]) -> dict[int, int]:
        """Places in a row that say the same as an earlier one: those of inputs that look alike, if
        they are many and equal throughout. So are the tensors of a cache, one pair a layer."""
        if any(part.rank < 0 for part in self._parts):
            return {}
        groups: dict[Any, list[tuple[int, int]]] = {}
        end = 0
        for part in self._parts:
            start, end = end, end + part.width
            if part.rank > 0 and not part.numbers:
                groups.setdefault(part.kind, []).append((start, end))
        found: dict[int, int] = {}
        for places in groups.values():
            first, last = places[0]
            if len(places) >= _MANY and len({tuple(row[a:b]) for a, b in places}) == 1:
                for start, end in places[1:]:
                    found.update(zip(range(start, end), range(first, last), strict=True))
        return found

    def facts(self, row: Sequence[Any]) -> dict[int, InputFacts]:
        """What a row says of each input."""
        rest = iter(row)
        found = {}
        for part in self._parts:
            dims = tuple([next(rest) for _ in range(part.rank)]) if part.dims else None
            strides = tuple([next(rest) for _ in range(part.rank)]) if part.strides else None
            numbers = tuple([next(rest) for _ in range(part.numbers)])
            content = numbers[0] if numbers and part.scalar else numbers
            found[part.index] = InputFacts(dims, strides, content if numbers else None)
        return found


def _part(index: int, value: Value, steers: bool, strides: bool) -> InputPart:
    rank = -1 if value.shape is None else len(value.shape)
    numbers = len(value.content) if isinstance(value.content, tuple) else 1
    return InputPart(
        index,
        rank,
        not is_static(value.shape),
        strides and rank != 0,
        numbers if steers else 0,
        scalar=value.shape == (),
        kind=(value.dtype, tuple([d if isinstance(d, int) else None for d in value.shape or ()])),
    )


# ---- the calling convention ----


def input_reader(sources: Sequence[sig.InputSource]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from call arguments to graph inputs."""
    if all(s.kind == "tensor" for s in sources):
        return picker([s.args[0] for s in sources])
    readers = [_reader(s) for s in sources]
    return lambda args: [read(args) for read in readers]


def _reader(source: sig.InputSource) -> Callable[[Sequence[Any]], Any]:
    if source.kind == "tensor":
        return itemgetter(source.args[0])
    dtype = ge_to_torch(source.dtype)
    if source.kind == "random":
        return lambda args: no_offsets(source.count)
    if source.kind == "scalar":
        position = source.args[0]
        return lambda args: torch.tensor(args[position], dtype=dtype)
    if source.kind == "opaque":
        position = source.args[0]
        return lambda args: handle_of(args[position])
    return lambda args: torch.tensor([args[a] for a in source.args], dtype=dtype)


@cache
def no_offsets(count: int) -> torch.Tensor:
    """What random operators get for offsets: they draw from torch's generators, as eager does."""
    return torch.full((count,), sig.NO_OFFSET, dtype=torch.int64, device=HOST)


def layouts_of(results: Sequence[sig.GraphResult], count: int) -> list[OutputLayout | None]:
    """What each output of a graph must look like in memory, where a result promises something."""
    layouts: list[OutputLayout | None] = [None] * count
    for r in sig.computed(results):
        if layouts[r.index] is None:
            layouts[r.index] = OutputLayout(r.shape, r.strides, r.alias_group, r.offset)
    return layouts


def result_builder(
    results: Sequence[sig.GraphResult], symbols: dict[str, tuple[int, int | None]]
) -> Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]:
    """A function from graph outputs and call arguments to the results of the FX graph."""
    if all(isinstance(r, sig.Computed) and r.same for r in results):
        order = [r.index for r in results if isinstance(r, sig.Computed)]
        if len(order) == 1:
            only = order[0]
            return lambda outputs, args: (outputs[only],)
        return lambda outputs, args: tuple([outputs[i] for i in order])
    needed = set().union(*map(sizes_in, results))
    names = [n for n in symbols if n in needed]
    sources = [symbols[n] for n in names]
    makers = [result_maker(r, names) for r in results]
    known = list(results)
    views = [(k, known.index(r)) for k, r in enumerate(known) if isinstance(r, sig.ResultView)]
    again = [(k, first) for k, first in views if first != k]

    def build(outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        sizes = [args[a] if dim is None else args[a].shape[dim] for a, dim in sources]
        made = [make(outputs, args, sizes) for make in makers]
        for k, first in again:
            made[k] = made[first]
        return tuple(made)

    return build


def sizes_in(result: sig.GraphResult) -> set[str]:
    """Sizes that a result is made with, after the run."""
    if isinstance(result, sig.SymbolResult):
        return free_symbols([result.expr])
    if isinstance(result, sig.InputView | sig.ResultView):
        return free_symbols([*result.shape, *result.strides, result.offset])
    return set()


def result_maker(result: sig.GraphResult, names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    """A function from (outputs, arguments, sizes by `names`) to one result."""
    if isinstance(result, sig.Fixed):
        fixed = result.value
        return lambda outputs, args, sizes: fixed
    if isinstance(result, sig.Computed):
        index = result.index
        if result.same:
            return lambda outputs, args, sizes: outputs[index]
        return lambda outputs, args, sizes: torch.ops.aten.alias.default(outputs[index])
    if isinstance(result, sig.ComputedScalar):
        index = result.index
        return lambda outputs, args, sizes: outputs[index].item()
    if isinstance(result, sig.SymbolResult):
        value = compile_dims([result.expr], names)
        return lambda outputs, args, sizes: value(*sizes)[0]
    if isinstance(result, sig.ResultView):
        index, view = result.base.index, viewer(result, names)
        return lambda outputs, args, sizes: view(outputs[index], sizes)
    arg = result.arg
    if result.same:
        return lambda outputs, args, sizes: args[arg]
    if (traced := result.traced) is not None:
        return lambda outputs, args, sizes: traced(*args)
    view = viewer(result, names)
    return lambda outputs, args, sizes: view(args[arg], sizes)


def viewer(
    result: sig.InputView | sig.ResultView, names: Sequence[str]
) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor]:
    """A function from (base, sizes by `names`) to a view of the base."""
    rank = len(result.shape)
    dims = compile_dims([*result.shape, *result.strides, result.offset], names)
    cast = getattr(torch, result.cast) if result.cast else None
    if isinstance(cast, torch.dtype):
        cast = partial(_same_memory, dtype=cast)
    part = _complex_part if cast is torch.view_as_complex else _part_of

    def make(base: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        known = dims(*sizes)
        base = base if cast is None or part is _complex_part else cast(base)
        return part(base, known[:rank], known[rank : 2 * rank], known[-1])

    if result.pending == sig.PLAIN:
        return make
    before, after = (_lazily(p) for p in (result.pending.base, result.pending.view))
    return lambda base, sizes: after(make(before(base), sizes))


def _part_of(base: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(base, shape, strides, base.storage_offset() + offset)


def _complex_part(base: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """Complex numbers in memory of real ones; all but the base is counted in complex numbers."""
    pairs = [*shape, 2], [*[2 * s for s in strides], 1]
    return torch.view_as_complex(_part_of(base, *pairs, 2 * offset))


def _lazily(pending: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What adds pending conjugation and negation to a tensor, or takes it off one that has it."""

    def bend(t: torch.Tensor) -> torch.Tensor:
        t = t.conj() if "conj" in pending else t
        return neg_view(t) if "neg" in pending else t

    return bend


def _same_memory(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of another type that begins where `t` does."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), start, (0,), (1,))
