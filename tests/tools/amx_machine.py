"""An interpreter of Intel's tile instructions, so that AMX kernels run on any processor.

`interpreted` gives a kernel whose tile instructions call the functions here, one register file for
the process. What the processor would refuse is an error: a register that is not configured, a shape
that does not fit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchair.codegen.llvm import binding
from torchair.codegen.target import Kernel

_PREFIX = "torchair.amx."
_NAMES = (
    "ldtilecfg",
    "tilerelease",
    "tilezero",
    "tileloadd64",
    "tilestored64",
    "tdpbf16ps",
    "tdpbssd",
)


class TileMachine:
    """Eight registers of at most 16 rows of 64 bytes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []  # rows, bytes of a row; none before configuration
        self.tiles: list[np.ndarray] = []
        self.executed: dict[str, int] = dict.fromkeys(_NAMES, 0)
        self.errors: list[str] = []

    def ldtilecfg(self, at: int) -> None:
        """Shapes of the registers, which are cleared."""
        given = np.frombuffer(ctypes.string_at(at, 64), np.uint8)
        assert given[0] == 1 and not given[1:16].any(), "palette 1, no row begun"
        widths, rows = given[16:48].view(np.uint16), given[48:64]
        assert (rows[:8] <= 16).all() and (widths[:8] <= 64).all()
        assert not rows[8:].any() and not widths[8:].any(), "there are eight registers"
        assert ((rows == 0) == (widths == 0)).all(), "no rows, no bytes"
        self.shapes = [(int(r), int(c)) for r, c in zip(rows[:8], widths[:8], strict=True)]
        self.tiles = [np.zeros(shape, np.uint8) for shape in self.shapes]

    def tilerelease(self) -> None:
        """No register can be used any more."""
        self.shapes, self.tiles = [], []

    def tilezero(self, number: int) -> None:
        """Clear a register."""
        self._tile(number)[:] = 0

    def tileloadd64(self, number: int, at: int, line: int) -> None:
        """Rows from memory that are `line` bytes apart."""
        tile = self._tile(number)
        for row in range(len(tile)):
            tile[row] = np.frombuffer(ctypes.string_at(at + row * line, tile.shape[1]), np.uint8)

    def tilestored64(self, number: int, at: int, line: int) -> None:
        """Rows to memory."""
        for row, data in enumerate(self._tile(number)):
            ctypes.memmove(at + row * line, data.tobytes(), data.nbytes)

    def tdpbf16ps(self, sums: int, a: int, b: int) -> None:
        """Pairs of bfloat16, in float32."""
        c, x, y = self._factors(sums, a, b, np.uint16)
        wide = [(v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in (x, y)]
        total = c.view(np.float32)
        total[:] = total + np.einsum("mkp,knp->mn", *wide)

    def tdpbssd(self, sums: int, a: int, b: int) -> None:
        """Fours of bytes with signs, in int32."""
        c, x, y = self._factors(sums, a, b, np.int8)
        c.view(np.int32)[:] += np.einsum("mkp,knp->mn", x.astype(np.int32), y.astype(np.int32))

    def _tile(self, number: int) -> np.ndarray:
        assert self.tiles and self.shapes[number][0], f"register {number} is not configured"
        return self.tiles[number]

    def _factors(
        self, sums: int, a: int, b: int, kind: type[np.generic]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums, A as [row, k, part] and B as [k, column, part] of 32 bits."""
        assert len({sums, a, b}) == 3, "one register twice"
        c, x, y = (self._tile(n) for n in (sums, a, b))
        assert len(c) == len(x) and c.shape[1] == y.shape[1] and x.shape[1] == 4 * len(y)
        parts = 4 // np.dtype(kind).itemsize
        return c, *(t.view(kind).reshape(len(t), -1, parts) for t in (x, y))


MACHINE = TileMachine()
_KEPT: list[object] = []  # functions that native code calls


def _defined(name: str) -> None:
    address, byte, line = ctypes.c_void_p, ctypes.c_uint8, ctypes.c_int64
    kinds = {
        "ldtilecfg": (address,),
        "tilerelease": (),
        "tilezero": (byte,),
        "tileloadd64": (byte, address, line),
        "tilestored64": (byte, address, line),
    }.get(name, (byte, byte, byte))

    def run(*given: int) -> None:
        MACHINE.executed[name] += 1
        step: Callable[..., None] = getattr(MACHINE, name)
        try:
            step(*given)
        except Exception as e:  # it cannot pass through native code
            MACHINE.errors.append(f"{name}{given}: {e}")

    function = ctypes.CFUNCTYPE(None, *kinds)(run)
    _KEPT.append(function)
    symbol = ctypes.cast(function, ctypes.c_void_p).value
    binding().add_symbol(_PREFIX + name, symbol)


def interpreted(kernel: Kernel) -> Kernel:
    """The same kernel, its tile instructions done here; `MACHINE.errors` says what went wrong."""
    if not _KEPT:
        for name in _NAMES:
            _defined(name)
    MACHINE.errors.clear()

    def there(text: str) -> str:
        for name in _NAMES:
            text = text.replace(f"@llvm.x86.{name}(", f'@"{_PREFIX}{name}"(')
        return text

    declarations = type(kernel.declarations)(there(d) for d in kernel.declarations)
    return replace(kernel, text=there(kernel.text), declarations=declarations)
