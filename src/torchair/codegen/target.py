"""What a target is asked for and answers with: a device with kernels of its own, as the engine sees
it. First it makes code, then it runs what it made.

The engine says what is to be computed (`requests`), the target answers with code. It knows nothing
of graphs: what it must know of a node to decline it is in a `Anchor`. On a CPU a kernel is a native
function `void kernel(i64 tid, i64 nt, ptr words)`. Each of `nt` threads calls it, and it does the
share of thread `tid`. `words` is an array of 64-bit words: first the addresses of its operands,
then the sizes and strides that are not known when the code is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from torchair.codegen.sizes import Element, Size

if TYPE_CHECKING:
    from torchair.codegen.program import (
        ApartStep,
        Memory,
        NativePart,
        PersistentKernel,
        PlanFamily,
        SizedPart,
        Subject,
        TargetPlan,
        TargetStep,
        Trial,
    )
    from torchair.codegen.requests import Request


# ---- kernel configs: choices that a generator would otherwise make itself ----


Choices = Mapping[str, Sequence[str]]
"""What may be chosen: values by name. What is not chosen is left to the generator."""


@dataclass(frozen=True)
class KernelConfig:
    """Choices for one kernel by name (tile, form, unroll), sorted by name."""

    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, text: str) -> KernelConfig:
        """From the text of a config, like `form=panel tile=6x4`. ValueError if it is none."""
        pairs = [word.partition("=") for word in text.split()]
        if not all(name and sign and value for name, sign, value in pairs):
            raise ValueError(f"{text!r} is not a kernel config: name=value is expected")
        return cls(tuple(sorted((name, value) for name, _, value in pairs)))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)

    def __bool__(self) -> bool:
        return bool(self.settings)

    def having(self, name: str, value: str) -> KernelConfig:
        """The same but for one choice."""
        return KernelConfig(tuple(sorted({**dict(self.settings), name: value}.items())))

    def choice(self, name: str) -> str:
        """A choice, empty where it is left to the generator."""
        return dict(self.settings).get(name, "")

    def integer(self, name: str, default: int) -> int:
        """A choice that is a number."""
        return int(self.choice(name) or default)

    def within(self, choices: Choices) -> bool:
        """Whether all that was chosen may be."""
        return all(value in choices.get(name, ()) for name, value in self.settings)


DEFAULT_CONFIG = KernelConfig()
"""The default: everything is left to the generator."""
BY_TORCH = KernelConfig((("by", "torch"),))
"""No kernel is made: nodes run one by one with those of torch."""


# ---- generated code ----


@dataclass(frozen=True)
class TensorTile:
    """Pieces of a tensor that a copy engine brings into shared memory by themselves: a parameter
    of a kernel beside its words, made from the address in `word`. Sizes and strides count elements;
    the first dim is contiguous."""

    word: int
    dtype: Element
    dims: tuple[Size, ...]
    strides: tuple[Size, ...]  # of the dims behind the first
    box: tuple[int, ...]  # elements of a piece along each dim

    def numbers(self, word: Callable[[int], int]) -> tuple[list[int], list[int]]:
        """Dims and strides, given the numbers in words."""
        dims, strides = (
            [n if isinstance(n, int) else word(n.index) for n in part]
            for part in (self.dims, self.strides)
        )
        return dims, strides


@dataclass(frozen=True)
class Kernel:
    """The code of one kernel: function definitions, of which `entry` follows the convention.

    Two kernels with the same text are the same kernel; `entry` is derived from the text.
    """

    entry: str
    text: str
    declarations: frozenset[str]
    words: Mapping[int, str] = field(default_factory=dict, hash=False)
    """The types of those that are parameters, in order, where words are passed one by one."""
    tensors: tuple[TensorTile, ...] = ()
    """Parameters behind these words."""
    room: int = 0
    """Bytes of shared memory of a block, where its caller gives it that."""

    @classmethod
    def of(
        cls,
        label: str,
        body: Callable[[str], str] | str,
        declared: Iterable[str],
        words: Mapping[int, str] | None = None,
        tensors: Sequence[TensorTile] = (),
    ) -> Kernel:
        """A kernel from text in which `@ENTRY` stands for the name, which becomes unique. It hangs
        on the tensors too: their sizes are not in the text."""
        text = body if isinstance(body, str) else body("ENTRY")
        known = f"{text}{tuple(tensors)}" if tensors else text
        entry = f"{label}_{hashlib.blake2b(known.encode(), digest_size=8).hexdigest()}"
        named = text.replace("@ENTRY", f"@{entry}")
        return cls(entry, named, frozenset(declared), words or {}, tuple(tensors))


@dataclass(frozen=True)
class Launch:
    """How many threads run a kernel where the caller decides that: `per_block` units of work are
    taken by a block in one turn, and the product of `units` is their number."""

    block: int  # threads of a block
    per_block: int
    units: tuple[Size, ...]
    shared: int = 0  # bytes of shared memory asked for at the launch
    most: int = 0  # the largest number of blocks, 0: as many as there are units
    cluster: int = 1  # blocks that start together and read each other's shared memory
    early: bool = False  # programmatic dependent launch: it waits itself for the launch before it
    resident: int = 0  # blocks of a multiprocessor that count on each other, 0: none does
    room: int = 0  # how many of them there is room for, at most
    even: bool = True  # rather fewer blocks than `most`, if then all have as much to do
    scratch: int = 0  # bytes of scratch memory; what is zero in the first of them stays zero
    together: bool = False  # cooperative launch: all blocks are resident, and may wait for others
    tile: tuple[int, ...] = ()  # of each of the `units` so many are one, all 1 where it is empty

    @property
    def most_blocks(self) -> int:
        """The number of blocks, 0 where words tell it."""
        return self.blocks(lambda word: 0) if all(isinstance(n, int) for n in self.units) else 0

    def blocks(self, word: Callable[[int], int]) -> int:
        """The number of blocks, given the numbers in words."""
        sizes = [n if isinstance(n, int) else word(n.index) for n in self.units]
        tile = self.tile or (1,) * len(sizes)
        units = math.prod(-(-n // size) for n, size in zip(sizes, tile, strict=True))
        count = max(1, -(-units // self.per_block))
        if not self.even:
            return min(count, self.most or count)
        # All blocks take as many turns, or one less.
        turns = -(-count // self.most) if self.most else 1
        return -(-count // turns)


Pack = Callable[[torch.Tensor], torch.Tensor]
"""A packing function for a constant: a frozen record, so that equal ones compare equal."""


def by_column(scales: torch.Tensor, n: int, transposed: bool) -> torch.Tensor:
    """Scales as [n, groups]: they may be one number, a row, or a matrix either way round."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1)
    if scales.dim() == 2 and not (transposed and scales.shape[0] == n):
        return scales.t()
    return scales.reshape(n, -1)


@dataclass(frozen=True)
class Generated:
    """What came of a request: the kernel, and what the choice made for it asks of the caller."""

    kernel: Kernel
    scratch: int = 0  # bytes that each thread needs, aligned to 64
    pack: Mapping[int, Pack] = field(default_factory=dict)  # by word: its constant is laid out so
    launch: Launch | None = None  # None where the caller counts threads


class Declined(Exception):
    """A request that a target has no kernel for."""


class BrokenKernels(Exception):
    """Kernels that could not be compiled, by name."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        super().__init__(", ".join(errors))
        self.errors = errors


ANY_ROWS = 1 << 62
"""As many rows of a product as there may be."""
AnchorKind = Literal["matmul", "conv", "attention", "pool"]


@dataclass(frozen=True)
class Anchor:
    """What is known of an operator with a generator of its own before sizes are."""

    kind: AnchorKind
    dtype: Element | None  # of its operands, None for a type that no kernel knows
    constant: bool = False  # its weights are the same in every call
    width: int | None = None  # features of the widest head of attention, None if that is not known
    rows: int | None = None  # of a product, or queries of attention; None if that is not known
    along: bool = False  # the second operand of a product is stored row by row along the sum
    quantised: bool = False  # the second operand of a product holds integers that have scales
    turned: bool = False  # the first operand of a product is stored across the sum
    sizes: tuple[int | None, ...] = ()  # batch, m, n and k of a product, as far as they are known
    batch_invariant: bool = False  # whether its sums must not depend on the batch


class Buildable(Protocol):
    """A plan, or one of a shape family: what its native steps run."""

    @property
    def new_natives(self) -> Sequence[Any]:
        """The calls whose kernels may have to be made."""


class Target(Protocol):
    """A device that kernels are generated for, and that runs them."""

    @property
    def name(self) -> str:
        """As in the name of a torch device: "cpu", "cuda"."""

    @property
    def processor(self) -> str:
        """The processor that runs the kernels: what is fast on one need not be on another."""

    channels_last: bool
    """Whether results of convolutions are best laid out with channels last."""
    piecewise: bool
    """Whether a nest may come in pieces, where choices by position change."""
    resizes: bool
    """Whether a program changes its sizes: one plan serves all those of a dynamic graph."""
    quantised: int
    """How many rows products with quantised weights may have that there are kernels for."""
    library_channels_last: bool
    """Whether the library convolves short floats best with channels last."""

    @property
    def drawing_threads(self) -> int:
        """How many threads torch's kernels on this device draw random numbers with at most; 0 where
        kernels of ours cannot draw the same."""

    splits_lists: bool
    """Whether what is done to one member of several lists of tensors is best one kernel."""
    splits_batch_norms: bool
    """Whether the sums of a batch norm in training are best kernels of their own: all threads of
    the device add up a channel, and what follows is a map over elements."""
    outer_batches: bool
    """Whether products take matrices that lie in batches of batches."""
    splits_group_norms: bool
    """Whether a group norm is best sums over channels and a map over elements; else it is torch's
    kernel."""
    overlaps: bool
    """Whether calls of libraries run at the same time if they follow one another and none needs
    another."""

    shares_sums: bool
    """Whether kernels of nests use scratch memory for reductions that they share."""

    def available(self) -> str | None:
        """Why no kernels can be made or run on this machine, None if they can."""

    def declines(self, anchor: Anchor) -> str | None:
        """Why an operator cannot be served, whatever its sizes are; None if it can."""

    def keeps_rows(self, anchor: Anchor) -> bool:
        """Whether the kernel of an operator that is served can order sums whatever the batch is."""

    def choices(self, request: Request) -> Choices:
        """What of the kernel of a request may be chosen by measuring, the most telling choice
        first; nothing where the target does not measure."""

    def generate(
        self, request: Request, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        """The kernel of a request, and what its caller must know. Raises Declined if there is
        none."""

    # ---- running ----

    enters: bool
    """Whether a part of native steps is an `EnteredPart`, which native code enters by itself."""
    replays: bool
    """Whether the device records the work of a plan and repeats it."""

    def schedule(self, plan: TargetPlan) -> Sequence[Sequence[TargetStep]]:
        """Decide which native steps of a plan are computed together, before memory is placed, and
        generate the kernels of those. Gives the steps of each launch, in order; a step that several
        compute is in each of theirs. Nothing where steps run one after the other."""

    def persistent(self, plan: TargetPlan) -> tuple[list[PersistentKernel], list[ApartStep]]:
        """Launches of a plan that became one, as it was asked for, and steps that are no part of
        one though they were asked for. Memory has its place."""

    def build(self, plan: Buildable) -> None:
        """Make machine code of what a plan runs, as far as it is new. Raises BrokenKernels for
        kernels that cannot be compiled; the others are there then."""

    def bind(
        self, steps: Sequence[TargetStep], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> NativePart:
        """Consecutive native steps over the memory of a program, ready to be run on so many
        threads. The slots `last` come at the end of its `sources`, where the target `enters`."""

    def bind_sized(
        self,
        family: PlanFamily,
        threads: int,
        last: Sequence[int],
        scratch: Callable[[int], torch.Tensor] | None,
    ) -> SizedPart:
        """The native steps of all plans of a shape family, where the target `resizes`."""

    # ---- measuring ----

    reach: int
    """Bytes that no cache holds."""

    def threads(self, work: float) -> int:
        """Threads that run steps of so many microseconds of work, 0 where kernels have all that
        they want."""

    def subjects(self, plan: TargetPlan) -> list[Subject]:
        """The kernels of a plan, in order."""

    def copied(self, tensor: torch.Tensor, packed: bool = False) -> torch.Tensor:
        """A copy in memory like that of operands, or of constants that were `packed`."""

    def trial(
        self,
        made: Generated,
        words: Sequence[Mapping[int, int]],
        steps: int,
        threads: int,
        keep: Any,
    ) -> Trial:
        """A compiled kernel by itself: `steps` times in a run, with each of these words in turn.
        It holds what it needs to `keep`."""

    def recorded(self, run: Callable[[], object], keep: Any) -> Callable[[], object]:
        """Work of the device that can be repeated and measured, recorded where it `replays`."""

    def compile_alone(self, made: Sequence[Generated]) -> None:
        """Make machine code of kernels that are to be run by themselves."""

    def machine_text(self, generated: Generated) -> str:
        """The code of a kernel as a text, for people: assembly, or PTX."""

    @property
    def seconds(self) -> float:
        """Time spent in compiling so far."""

    def work(self, moved: int, points: int, flops: float) -> float:
        """About how many microseconds one thread needs to read and write so many bytes, compute so
        many simple values and multiply so often."""


class KernelOrder:
    """A request to a target, with a label for its kernel. Planning needs no more; the code is
    generated when it is asked for."""

    def __init__(self, target: Target, request: Request, label: str) -> None:
        self.request, self.label = request, label
        self._target = target
        self.config = DEFAULT_CONFIG
        self.failed: Exception | None = None  # why there is no code
        self._made: Generated | None = None

    @property
    def generated(self) -> Generated:
        """The code that serves the request, generated once. Not a `cached_property`: before Python
        3.12 that has one lock for all objects, which a child of `fork` may find taken for ever."""
        if self._made is None:
            self._made = self._target.generate(self.request, self.label, self.config)
        return self._made

    def choose(self, config: KernelConfig) -> None:
        """Generate the code with this config; code of another config is dropped."""
        if config != self.config:
            self.config = config
            self._made = None

    def machine_text(self) -> str:
        """Its machine code as a text."""
        return self._target.machine_text(self.generated)
