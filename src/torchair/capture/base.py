"""What a capture is made from and what it leaves: the one interface of all devices.

A `Substrate` captures a graph for one graph key into a `Recording`: a device graph bound to the
memory of a pool. Keys, limits, recapture and the lives of results are not its business; see
`graph.py` and `outputs.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.engine.run.held import Held

Forward = Callable[..., Sequence[Any]]
"""The graph as a function of its arguments; it may update arguments and what it computed."""


@dataclass(frozen=True)
class ArgumentKinds:
    """Positions of the arguments of a graph by kind."""

    parameters: tuple[int, ...] = ()  # tensors that stay where they are: parameters and buffers
    users: tuple[int, ...] = ()  # tensors that are only read
    mutated: tuple[int, ...] = ()  # tensors that the graph updates


@dataclass(frozen=True)
class CaptureOptions:
    """What the user chose, in plain values."""

    clone_input: bool = True
    share_results: bool = False  # the next replay may overwrite results: the user asked for it
    frozen_parameter: bool = False
    reuse: bool = True  # keys of one graph share memory
    limit: int = 64
    evict: bool = False  # at the limit forget the key used least recently, instead of falling back
    pool: tuple[int, int] | None = None
    error_mode: str = "global"
    fallback: bool = True  # a graph that cannot be captured runs without; otherwise it is an error
    warmups: int = 0
    force_recapture: bool = False


@dataclass(frozen=True)
class Kept:
    """A result that is not in the pool: None, a number, or a tensor that the graph holds."""

    value: Any


@dataclass(frozen=True)
class OfArgument:
    """A result that is a view of an argument of the call, or the argument itself."""

    make: Callable[[Sequence[Any]], torch.Tensor]


@dataclass(frozen=True)
class Pooled:
    """A tensor in the pool. Results with the same `group` share one storage object; equal ones are
    one tensor, so give `twin` a number of its own where they must be different objects."""

    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0  # in the storage, in elements
    twin: int = 0


ResultSource = Kept | OfArgument | Pooled


class Recording(abc.ABC):
    """A captured graph for one key. A call is `feed`, `replay`, `write_back`, `results`."""

    held: Held | None = None  # arguments of which it has copies, another object after each change
    by_operators = False  # whether a call is calls of torch operators

    @abc.abstractmethod
    def feed(self, args: Sequence[Any]) -> None:
        """Bring the arguments of a call to where the graph reads them."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the graph."""

    @abc.abstractmethod
    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """Results of the replay. `hold` matters where results are shared: the tensors themselves
        are kept for the next calls."""

    def release(self) -> None:  # noqa: B027  (most hold none)
        """Hold results no longer: from now on only the user does."""

    def call(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """One call of the graph."""
        self.feed(args)
        self.replay()
        self.write_back(args)
        return self.results(args, hold)

    def profiled(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """One call, in a way that a profiler sees its kernels."""
        return self.call(args, hold)

    def write_back(self, args: Sequence[Any]) -> None:  # noqa: B027  (most have nothing to do)
        """Bring updated arguments back to the caller's, where the graph has copies of its own."""

    def renew(self, args: Sequence[Any]) -> bool:
        """Bring such copies up to date; False where the graph must be captured anew."""
        return True

    @abc.abstractmethod
    def reset(self) -> None:
        """Give the memory back."""


@dataclass
class ToCapture:
    """What is to be captured."""

    name: str  # of the FX graph
    forward: Forward
    args: Sequence[Any]  # of the call that asks for it
    kinds: ArgumentKinds
    options: CaptureOptions


class Substrate(abc.ABC):
    """A way to capture on one kind of device, for one FX graph."""

    @abc.abstractmethod
    def capture(self, request: ToCapture) -> Recording:
        """Capture; nothing that the user can see is computed yet. CaptureError where it cannot."""

    @abc.abstractmethod
    def pool_handle(self) -> tuple[int, int]:
        """The handle of the pool that captures of this graph take memory from."""

    def busy(self) -> bool:
        """Whether the caller is being captured himself: nothing can be captured meanwhile."""
        return False

    def limits(self) -> Any:
        """Limits of the current stream that a captured graph depends on."""
        return None

    def finish(self) -> None:  # noqa: B027  (a device that runs at once has nothing to wait for)
        """Wait for all work, before captured graphs are thrown away."""

    def trim(self) -> None:  # noqa: B027
        """Give unused memory back to the system."""
