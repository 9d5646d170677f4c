"""A third target: loop nests and products are interpreted with numpy, nothing is compiled.

All that a target must be is in this file. `TARGETS["cpu"] = lambda index: PlainTarget()` has the
engine use it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from nest_plain import NUMPY, Plain, from_bf16, from_memory, into_memory, to_bf16
from torchair.codegen import loops
from torchair.codegen.loops import Access, Expr, Nest, Store, with_words
from torchair.codegen.program import (
    ApartStep,
    ArgumentLayout,
    BadIndex,
    Memory,
    NativePart,
    PersistentKernel,
    Subject,
    TargetPlan,
    TargetStep,
)
from torchair.codegen.requests import Loops, Product, Request
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import (
    DEFAULT_CONFIG,
    Anchor,
    Buildable,
    Choices,
    Declined,
    Generated,
    Kernel,
    KernelConfig,
)

FLOATS = ("f32", "f64", "bf16", "f16")
MATHS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch.nn.functional if name in ("gelu", "silu") else torch, name)
    for name in loops.MATHS
}
"""Functions as torch computes them, here in float64."""


class PlainTarget:
    """Numpy, on memory of the host."""

    name = processor = "plain"
    channels_last = piecewise = resizes = library_channels_last = overlaps = False
    shares_sums = False
    splits_lists = False
    drawing_threads = 0
    splits_batch_norms = False
    outer_batches = False
    splits_group_norms = False
    enters = replays = False
    quantised = reach = 0
    seconds = 0.0

    def __init__(self) -> None:
        self.ran: list[str] = []
        """Names of the kernels that have run."""

    # ---- making ----

    def available(self) -> str | None:
        return None

    def declines(self, anchor: Anchor) -> str | None:
        plain = anchor.kind == "matmul" and anchor.dtype in FLOATS and not anchor.quantised
        return None if plain and not anchor.constant else "torch serves it"

    def keeps_rows(self, anchor: Anchor) -> bool:
        return True

    def choices(self, request: Request) -> Choices:
        return {}

    def generate(
        self, request: Request, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        if not isinstance(request, Loops | Product):
            raise Declined(f"no interpreter for {type(request).__name__}")
        return Generated(Kernel.of(label, f"@ENTRY {request}", ()))

    def machine_text(self, generated: Generated) -> str:
        return generated.kernel.text

    def work(self, moved: int, points: int, flops: float) -> float:
        return moved / 1e3

    # ---- running ----

    def schedule(self, plan: TargetPlan) -> Sequence[Sequence[TargetStep]]:
        """Every step is interpreted by itself."""
        return ()

    def persistent(self, plan: TargetPlan) -> tuple[list[PersistentKernel], list[ApartStep]]:
        """Steps run one after the other in any case."""
        return [], []

    def build(self, plan: Buildable) -> None:
        """There is no machine code."""

    def compile_alone(self, made: Sequence[Generated]) -> None:
        """There is none."""

    def bind(
        self, steps: Sequence[TargetStep], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> PlainPart:
        return PlainPart(steps, memory, self.ran)

    # ---- what this one does not offer: programs that change their sizes, measuring ----

    def bind_sized(self, *given: Any) -> NoReturn:
        raise NotImplementedError

    def threads(self, work: float) -> int:
        return 1

    def subjects(self, plan: TargetPlan) -> list[Subject]:
        return []

    def copied(self, tensor: torch.Tensor, packed: bool = False) -> torch.Tensor:
        return tensor.clone()

    def trial(self, *given: Any) -> NoReturn:
        raise NotImplementedError

    def recorded(self, run: Callable[[], object], keep: Any) -> Callable[[], object]:
        return run


class PlainPart(NativePart):
    """Steps over the memory of a program."""

    def __init__(self, steps: Sequence[TargetStep], memory: Memory, ran: list[str]) -> None:
        self.steps, self._ran = list(steps), ran
        self.layout = ArgumentLayout(steps, memory.plan)
        self._offsets = {slot: memory.plan.places[slot][1] for *_, slot in self.layout.patches}
        self._faults = (ctypes.c_int64 * max(1, len(self.layout.faults)))()
        self._words = [0] * self.layout.end
        self.layout.write_fixed(self._words, ctypes.addressof(self._faults))
        self.layout.write_sized(self._words, memory, self.steps)

    def call(self) -> Callable[[list[int]], None]:
        def run(addresses: list[int]) -> None:
            for word, source, slot in self.layout.patches:
                self._words[word] = addresses[source] + self._offsets[slot]
            for step, at in zip(self.steps, self.layout.blocks, strict=True):
                self._ran.append(step.code.kernel.entry)
                interpret(step.code.order.request, self._words[at : at + step.code.words])
            faulty = [k for (_, k), f in zip(self.layout.faults, self._faults, strict=False) if f]
            if faulty:
                self._faults[:] = [0] * len(self._faults)
                raise BadIndex(self.steps[faulty[0]])

        return run


def interpret(request: Request, words: Sequence[int]) -> None:
    """Compute what a request asks for, given the words of its argument block."""

    def size(n: Any) -> int:
        return words[n.index] if isinstance(n, SizeArgument) else n

    if isinstance(request, Loops):
        for nest in (request.nest, *request.more):
            Interpreter(with_words(nest, size), words).run()
        return
    assert isinstance(request, Product)
    spec = request.matmul
    m, n, k, batch = (size(x) for x in (spec.m, spec.n, spec.k, spec.batch))
    a = _operand(words[0], spec.dtype, (batch, m, k), [size(s) for s in spec.a])
    b = _operand(words[1], spec.dtype, (batch, k, n), [size(s) for s in spec.b])
    epilogue = with_words(request.epilogue, size)
    made = np.matmul(a.astype(np.float64), b.astype(np.float64))
    kind = np.float64 if spec.dtype == "f64" else np.float32
    Interpreter(epilogue, words, made.astype(kind).reshape(epilogue.axes)).run()


def _operand(address: int, dtype: str, dims: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    index: Any = 0
    for at, (n, stride) in enumerate(zip(dims, strides, strict=True)):
        shape = [1] * len(dims)
        shape[at] = n
        index = index + np.arange(n).reshape(shape) * stride
    index = np.broadcast_to(index, dims)
    return from_memory(Pointer(address, dtype)[index], dtype)


class Pointer:
    """Elements of memory, from an address on."""

    def __init__(self, address: int, dtype: str) -> None:
        self._address, self._dtype = address, np.dtype(NUMPY[dtype])

    def _memory(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Memory from the first to the last element that is touched, and the places in it."""
        first, last = int(index.min()), int(index.max())
        size = self._dtype.itemsize
        raw = (ctypes.c_char * ((last - first + 1) * size)).from_address(
            self._address + first * size
        )
        return np.frombuffer(raw, self._dtype), index - first

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        if not index.size:
            return np.empty(index.shape, self._dtype)
        memory, places = self._memory(index)
        return memory[places]

    def __setitem__(self, index: np.ndarray, values: np.ndarray) -> None:
        if index.size:
            memory, places = self._memory(index)
            memory[places] = values


class Interpreter(Plain):
    """A nest over memory of a plan; `given` is what the epilogue of a product gets."""

    def __init__(self, nest: Nest, words: Sequence[int], given: np.ndarray | None = None) -> None:
        super().__init__(nest, ())
        self._words, self._given = words, given

    def places(self, place: Access) -> tuple[np.ndarray, Any]:
        index, mask = super().places(place)
        shape = np.broadcast_shapes(index.shape, np.shape(mask))
        return np.broadcast_to(index, shape), np.broadcast_to(mask, shape)

    def value(self, x: Expr) -> Any:
        args = [self.values[id(a)] for a in x.args]
        if x.kind == "given":
            return self._given
        if x.kind == "load":
            return self._loaded(x.data)
        if x.kind == "narrow":
            return from_bf16(to_bf16(args[0])) if x.data == "bf16" else args[0].astype(np.float16)
        if x.kind == "verify":
            if not np.all(args[0]):
                ctypes.c_int64.from_address(self._words[x.data]).value = 1
            return args[0]
        if x.kind in MATHS and x.dtype in ("f32", "f64"):
            wide = [torch.from_numpy(np.array(a, np.float64)) for a in args]
            return MATHS[x.kind](*wide).numpy()
        return super().value(x)

    def _loaded(self, place: Access) -> np.ndarray:
        index, mask = self.places(place)
        got = np.zeros(index.shape, from_memory(np.empty(0, NUMPY[place.dtype]), place.dtype).dtype)
        memory = Pointer(self._words[place.operand], place.dtype)
        got[mask] = from_memory(memory[index[mask]], place.dtype)
        return got

    def store(self, s: Store) -> None:
        if not math.prod(self._kept(s)):
            return
        index, mask = self.places(s.access)
        value = into_memory(self.values[id(s.value)], s.access.dtype)
        shape = np.broadcast_shapes(index.shape, value.shape, self._kept(s))
        index, value, mask = (np.broadcast_to(x, shape) for x in (index, value, mask))
        Pointer(self._words[s.access.operand], s.access.dtype)[index[mask]] = value[mask]

    def _kept(self, s: Store) -> tuple[int, ...]:
        """Dims that a store runs over: of the axes that are not reduced."""
        return tuple(1 if k in self.nest.reduced else n for k, n in enumerate(self.nest.axes))


def run_slice() -> None:
    """The whole operator slice with this target; prints how many samples are right."""
    from conformance.cases import call_of
    from conformance.check import check
    from conformance.choose import read_slice
    from torchair.engine.compile import TARGETS

    target = PlainTarget()
    TARGETS["cpu"] = lambda index: target
    outcomes = []
    for chosen in read_slice():
        target.ran.clear()
        outcome = check(chosen.case, call_of(chosen.case))
        outcomes.append((outcome.right, bool(target.ran)))
        if not outcome.right:
            print(chosen.case, outcome.reason)
    right, ran = (sum(column) for column in zip(*outcomes, strict=True))
    print(f"{right} of {len(outcomes)} samples are right, kernels of the target ran in {ran}")


if __name__ == "__main__":
    run_slice()
