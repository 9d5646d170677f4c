"""What of a product may be chosen by measuring."""

from __future__ import annotations

from torchair.codegen.cpu.matmul.forms import contiguous, fits_cache
from torchair.codegen.cpu.matmul.kernel import choose
from torchair.codegen.cpu.matmul.spec import Tile
from torchair.codegen.requests import MatMul, Product
from torchair.codegen.text.machine import Machine
from torchair.codegen.ways import Choices

TILES = ("14x2", "12x2", "9x3", "8x3", "6x4", "5x4", "4x4", "3x8", "2x8", "1x8", "1x4", "1x2")
"""Shapes of tiles, as far as registers hold them."""
PANELS = tuple(str(k << 10) for k in (192, 96, 32, 16))
STRIPS = ("48", "24", "96", "192")
AHEAD = tuple(str(k << 10) for k in (16, 8, 4, 32, 0))


def choices(request: Product, machine: Machine) -> Choices:
    """Nothing for integers and for sizes that vary: their forms are not alternatives."""
    spec = request.matmul
    sizes = (spec.batch, spec.m, spec.n, spec.k)
    if spec.weight is not None or spec.dtype in ("i8", "f64") or not all(_known(s) for s in sizes):
        return {}
    usual = choose(spec, machine)
    found: dict[str, tuple[str, ...]] = {
        "form": _forms(spec), "tile": _tiles(spec, machine, usual.tile), "panel": PANELS,
    }  # fmt: skip
    assert isinstance(spec.m, int)
    if spec.m > 24:
        found["strip"] = STRIPS
    elif spec.m <= usual.tile.rows and not fits_cache(spec):
        found["ahead"] = AHEAD
    return {name: values for name, values in found.items() if len(values) > 1}


def _known(size: object) -> bool:
    return isinstance(size, int) and size > 0


def _forms(spec: MatMul) -> tuple[str, ...]:
    """Ways to read B that are right for its layout."""
    found = ["panel"] if spec.constant else []
    if contiguous(spec) == "n":
        found.append("direct")
    elif contiguous(spec) == "k" and spec.a[2] == 1:
        found.append("dot")
    return (*found, "copy")


def _tiles(spec: MatMul, machine: Machine, usual: Tile) -> tuple[str, ...]:
    """Tiles that registers hold, and no taller than A."""
    assert isinstance(spec.m, int)
    room = machine.registers - 1
    fitting = []
    for text in (str(usual), *TILES):
        tile = Tile.read(text)
        held = (tile.rows + 1) * tile.vectors <= room
        tall = tile.rows <= spec.m and (tile.rows >= 4 or spec.m < 2 * tile.rows)
        if text not in fitting and (text == str(usual) or (held and tall)):
            fitting.append(text)
    return tuple(fitting)
