"""Kernels for matrix products: which way suits which product, and the kernel made so."""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.cpu.matmul.blocked import Loops
from torchair.codegen.cpu.matmul.forms import (
    CopyForm,
    DirectForm,
    DotForm,
    Form,
    PanelForm,
    contiguous,
    copied_bytes,
)
from torchair.codegen.cpu.matmul.pack import pack
from torchair.codegen.cpu.matmul.spec import MatMul, Numbers, Product, Store, Tile, widest_tile
from torchair.codegen.cpu.matmul.store import plain_store
from torchair.codegen.kernel import Kernel
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import Size, Word

__all__ = ["MatMul", "Store", "matmul", "pack", "plain_store", "scratch_bytes"]

LONG = 512
"""Sums so long hardly notice how they end: dot products suit them for any number of rows."""


@dataclass(frozen=True)
class Choice:
    """The form of a product, and the one for more rows of A than a limit."""

    few: str
    many: str
    limit: int = 0

    def known(self, m: Size) -> str | None:
        """The form, unless it turns out only at run time."""
        if self.few == self.many:
            return self.few
        if isinstance(m, Word):
            return None
        return self.few if m <= self.limit else self.many


def choose(spec: MatMul, machine: Machine) -> Choice:
    """The form of a product, by cost.

    panel   packed ahead of time: nothing is faster, whatever m is
    direct  B runs along n: its rows are vectors already. Pairs have to be mixed from two rows
            for every tile of A, which is worth it for two tiles
    dot     B runs along k: dot products need no other layout, but end with sums over lanes that
            take the time of 30 k, or of 60 in pairs
    copy    copying B to panels takes the time of 5 rows of A, so m / 5 more than k / 30 makes it
            worth it; and it is the only way if neither stride is 1
    """
    pairs = Numbers.of(spec.dtype, machine).pair == 2
    if spec.packed:
        return Choice("panel", "panel")
    if contiguous(spec) == "n":
        return Choice("direct", "copy", 8) if pairs else Choice("direct", "direct")
    if contiguous(spec) == "k" and spec.a[2] == 1:
        if isinstance(spec.k, Word):
            return Choice("dot", "copy", 4)
        if isinstance(spec.m, Word) and spec.k >= LONG:
            return Choice("dot", "dot")  # half the code for nearly the same speed
        return Choice("dot", "copy", max(4, spec.k // (12 if pairs else 6)))
    return Choice("copy", "copy")


def matmul(spec: MatMul, machine: Machine, store: Store, label: str = "matmul") -> Kernel:
    """The kernel of a product. `store` is called wherever a vector of results is finished."""
    w = KernelWriter(machine)
    product, choice = Product(w, spec), choose(spec, machine)
    known = choice.known(spec.m)
    if known:
        Loops(product, _form(known, product), store).write()
        return w.kernel(label)
    for form, test in ((choice.few, "sle"), (choice.many, "sgt")):
        with w.when(w(f"icmp {test} i64 {product.m}, {choice.limit}")):
            Loops(product, _form(form, product), store).write()
    return w.kernel(label)


def scratch_bytes(spec: MatMul, machine: Machine) -> int:
    """Bytes of scratch memory that each thread needs."""
    choice = choose(spec, machine)
    known = choice.known(spec.m)
    forms = {known} if known else {choice.few, choice.many}
    tile = _tile(spec, machine)
    copying = forms & {"copy", "direct"}
    return max((copied_bytes(spec, machine, tile, form) for form in copying), default=0)


def _form(name: str, product: Product) -> Form:
    if name == "dot":
        return DotForm(product, _rows_of_dots(product.spec, product.w.machine))
    tile = _tile(product.spec, product.w.machine)
    kinds = {"panel": PanelForm, "direct": DirectForm, "copy": CopyForm}
    return kinds[name](product, tile)


def _rows_of_dots(spec: MatMul, machine: Machine) -> int:
    """Rows of A at once in dot products: many, since each reads B again; few if k is unknown, as
    the code for its end is long and the form is used for few rows only."""
    if isinstance(spec.k, Word):
        return _balanced(spec.m, 3)
    return _balanced(spec.m, 6 if machine.registers >= 32 else 4)


def _tile(spec: MatMul, machine: Machine) -> Tile:
    """The tallest tile for a product: one that divides m, so that one function does it all, or
    else tiles of about equal height."""
    widest = widest_tile(spec.dtype, machine)
    vectors = widest.vectors if spec.packed else _vectors(spec, machine, widest.vectors)
    tallest = min(8, widest.rows * widest.vectors // vectors)
    enough = 4 if machine.registers >= 32 else widest.rows
    if isinstance(spec.m, Word):
        return Tile(enough, vectors)
    fitting = [rows for rows in range(tallest, enough - 1, -1) if spec.m % rows == 0]
    rows = fitting[0] if spec.m and fitting else _balanced(spec.m, tallest)
    return Tile(rows, vectors)


def _vectors(spec: MatMul, machine: Machine, widest: int) -> int:
    """The width of panels that are made while running: one that wastes the fewest columns, or a
    larger one if few tiles would touch a new page of memory for every narrow row of them."""
    if isinstance(spec.n, Word):
        return widest
    if contiguous(spec) == "n" and isinstance(spec.m, int) and spec.m <= 2 and spec.n >= 1024:
        return 2 * widest
    needed = max(1, -(-spec.n // machine.lanes))
    narrowest = min(2, needed, widest)
    return min(range(widest, narrowest - 1, -1), key=lambda v: -(-needed // v) * v)


def _balanced(m: Size, tallest: int) -> int:
    """The height of tiles of about equal height."""
    if isinstance(m, Word) or m == 0:
        return tallest
    return -(-m // -(-m // tallest))
