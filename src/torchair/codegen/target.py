"""What a target is asked for: a device with kernels of its own, as the engine sees it.

The engine says what is to be computed (`requests`), the target answers with code. It knows nothing
of graphs: what it must know of a node to decline it is in a `Head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from torchair.codegen.kernel import Generated, Kernel
from torchair.codegen.ways import AS_EVER, Choices, Way

if TYPE_CHECKING:
    from torchair.codegen.requests import Request

HeadKind = Literal["matmul", "conv", "attention", "pool"]


@dataclass(frozen=True)
class Head:
    """What is known of an operator with a generator of its own before sizes are."""

    kind: HeadKind
    dtype: str | None  # of its operands, None for a type that no kernel knows
    constant: bool = False  # its weights are the same in every call
    width: int | None = None  # features of the widest head of attention, None if that is not known
    rows: int | None = None  # of a product, or queries of attention; None if that is not known
    along: bool = False  # the second operand of a product is stored row by row along the sum
    quantised: bool = False  # the second operand of a product holds integers that have scales


class Target(Protocol):
    """A device that kernels are generated for."""

    @property
    def name(self) -> str:
        """As in the name of a torch device: "cpu", "cuda"."""

    @property
    def processor(self) -> str:
        """Who runs the kernels: what is fast on one need not be on another."""

    @property
    def channels_last(self) -> bool:
        """Whether results of convolutions are best laid out with channels last."""

    @property
    def piecewise(self) -> bool:
        """Whether a nest may come in pieces, where choices by position change."""

    @property
    def resizes(self) -> bool:
        """Whether a program changes its sizes: one plan serves all those of a dynamic graph."""

    @property
    def quantised(self) -> bool:
        """Whether there are kernels for products with quantised weights."""

    @property
    def library_channels_last(self) -> bool:
        """Whether the library convolves short floats best with channels last."""

    @property
    def overlaps(self) -> bool:
        """Whether calls of libraries run at the same time if they follow one another and none needs
        another."""

    def available(self) -> str | None:
        """Why no kernels can be made or run on this machine, None if they can."""

    def declines(self, head: Head) -> str | None:
        """Why an operator cannot be served, whatever its sizes are; None if it can."""

    def choices(self, request: Request) -> Choices:
        """What of the kernel of a request may be chosen by measuring, the most telling choice
        first; nothing where the target does not measure."""

    def generate(self, request: Request, label: str, way: Way = AS_EVER) -> Generated:
        """The kernel of a request, and what its caller must know. Raises Declined if there is
        none."""

    def compile(self, kernels: Sequence[Kernel]) -> None:
        """Make machine code of those that are new. Raises BrokenKernels for those that cannot be;
        the others are there then."""

    def machine_text(self, generated: Generated) -> str:
        """The code of a kernel as a text, for people: assembly, or PTX."""

    @property
    def seconds(self) -> float:
        """Time spent in compiling so far."""

    def work(self, moved: int, points: int, flops: float) -> float:
        """About how many microseconds one thread needs to read and write so many bytes, compute so
        many simple values and multiply so often."""


class Order:
    """A request to a target, with a label for its kernel. Whoever plans needs no more; the code is
    generated when it is asked for."""

    def __init__(self, target: Target, request: Request, label: str) -> None:
        self.request, self.label = request, label
        self._target = target
        self.way = AS_EVER  # chosen before the code is asked for
        self.failed: Exception | None = None  # why there is no code

    @cached_property
    def generated(self) -> Generated:
        """The code that serves the request."""
        return self._target.generate(self.request, self.label, self.way)

    def machine_text(self) -> str:
        """Its machine code as a text."""
        return self._target.machine_text(self.generated)
