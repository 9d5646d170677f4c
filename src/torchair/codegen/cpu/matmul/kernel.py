"""Kernels for matrix products: which way suits which product, and the kernel made so."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from torchair.codegen.cpu.matmul import amx, forms, mmla, quantised, split_int, strassen
from torchair.codegen.cpu.matmul.pack import PackPanels, PackPanelScales, PackWeight, load_column
from torchair.codegen.cpu.matmul.quantised import SCALES, DecodingForm, WrittenForm
from torchair.codegen.cpu.matmul.split_int import IntegerForm, SplitIntForm, splits_rows
from torchair.codegen.cpu.matmul.tile import (
    USUAL,
    Arithmetic,
    ProductValues,
    StoreTile,
    Tile,
    TileCut,
    widest_tile,
)
from torchair.codegen.loops import Nest
from torchair.codegen.requests import MatMul, Product
from torchair.codegen.sizes import BYTES, STORAGE, Element, Size, SizeArgument
from torchair.codegen.target import DEFAULT_CONFIG, Choices, Generated, KernelConfig, Pack
from torchair.codegen.text.point import emit_point, positions
from torchair.codegen.text.writer import KernelWriter, Machine

B = 1  # word of its address

LONG = 512
"""Sums so long hardly notice how they end: dot products suit them for any number of rows."""

FAR = 1 << 20
"""Bytes of B that do not stay in a near cache."""

FormName = Literal[
    "panel", "direct", "dot", "copy", "decoded", "written", "split_int", "strassen", "bytes"
]
"""How B is read, see `_forms`."""

PACKED: tuple[FormName, ...] = ("panel", "decoded", "split_int", "bytes", "strassen")
"""Forms that read B as it was laid out ahead of time."""

FORMS: dict[FormName, type[forms.ProductForm]] = {
    "panel": forms.PanelForm, "direct": forms.DirectForm, "dot": forms.DotForm,
    "copy": forms.CopyForm, "decoded": DecodingForm, "written": WrittenForm,
    "split_int": SplitIntForm, "bytes": IntegerForm,
}  # fmt: skip

IN_TILE_REGISTERS: dict[FormName, type[forms.ProductForm]] = {
    "panel": forms.PanelForm,
    "copy": forms.CopyForm,
    "written": WrittenForm,
    "bytes": forms.PanelForm,
}
"""Forms whose panels AMX can read, and what is written then: bytes need no shift there."""

IN_SMALL_MATRICES: tuple[FormName, ...] = ("panel", "bytes")
"""Forms whose panels are packed for ARM's products of small matrices, where it has these."""


@dataclass(frozen=True)
class Choice:
    """The form of a product, the one for more rows of A than a limit, and their tiles."""

    few: FormName
    many: FormName
    limit: int
    tile: Tile
    dots: int  # rows of A at once in dot products
    cut: TileCut = USUAL

    def known(self, m: Size) -> FormName | None:
        """The form, unless it turns out only at run time."""
        if self.few == self.many:
            return self.few
        if isinstance(m, SizeArgument):
            return None
        return self.few if m <= self.limit else self.many


def choose(spec: MatMul, machine: Machine, config: KernelConfig = DEFAULT_CONFIG) -> Choice:
    """The form of a product, and the tiles it is made of."""
    few, many, limit = _invariant_form(spec, machine) or _forms(spec, machine)
    if form := next((f for f in get_args(FormName) if f == config.choice("form")), None):
        few, many, limit = form, form, 0
    packed = few in PACKED or spec.weight is not None
    tile, dots = _tile(spec, machine, packed), _rows_of_dots(spec, machine)
    if chosen := config.choice("tile"):
        tile = Tile.read(chosen)
        dots = min(dots, tile.rows)
    cut = TileCut(*(config.integer(name, value) for name, value in asdict(USUAL).items()))
    return Choice(few, many, limit, tile, dots, cut)


def _forms(spec: MatMul, machine: Machine) -> tuple[FormName, FormName, int]:
    """The forms for few and for many rows, by cost, and what is few.

    panel   packed ahead of time: nothing is faster, whatever m is
    direct  B runs along n: its rows are vectors already. Pairs have to be mixed from two rows
            for every tile of A, which is worth it for two tiles
    dot     B runs along k: dot products need no other layout, but end with sums over lanes that
            take the time of 30 k, or of 60 in pairs
    copy    copying B to panels takes the time of 5 rows of A, so m / 5 more than k / 30 makes it
            worth it; and it is the only way if neither stride is 1
    decoded, written   B holds integers, see quantised.py
    digits  the same, for bytes and bfloat16, see split_int.py
    seven   Strassen, of halves, see strassen.py; never chosen without having been measured
    bytes   A and B do, see split_int.py
    """
    if spec.dtype == "i8":
        return "bytes", "bytes", 0
    if spec.weight is not None:
        return "split_int" if splits_rows(spec, machine) else "decoded", "written", forms.FEW
    pairs = Arithmetic.of(spec.dtype, machine).pair == 2
    if _packing_pays(spec):
        return "panel", "panel", 0
    if forms.contiguous(spec) == "n":
        return ("direct", "copy", 8) if pairs else ("direct", "direct", 0)
    if forms.contiguous(spec) == "k" and spec.a[2] == 1:
        if isinstance(spec.k, SizeArgument):
            return "dot", "copy", 4
        if amx.worth_it(spec, machine):
            return "dot", "copy", amx.FEW
        if isinstance(spec.m, SizeArgument) and spec.k >= LONG:
            return "dot", "dot", 0  # half the code for nearly the same speed
        return "dot", "copy", max(4, spec.k // (12 if pairs else 6))
    return "copy", "copy", 0


def _invariant_form(spec: MatMul, machine: Machine) -> tuple[FormName, FormName, int] | None:
    """One form for any number of rows, None where none is wanted. Tiles add up along k one by one,
    dot products lane by lane; within either the rows beside a row change nothing."""
    if not spec.batch_invariant or spec.dtype == "i8":
        return None
    if spec.weight is not None:
        form: FormName = "split_int" if splits_rows(spec, machine) else "decoded"
    elif spec.constant:
        form = "panel"
    elif forms.contiguous(spec) == "k" and spec.a[2] == 1:
        form = "dot"
    else:
        form = "copy"
    return form, form, 0


def _packing_pays(spec: MatMul) -> bool:
    """One row reads each weight once, in an order that is as good as packed unless the weights
    come from far away."""
    if spec.m != 1 or isinstance(spec.n, SizeArgument) or isinstance(spec.k, SizeArgument):
        return bool(spec.constant)
    return bool(spec.constant) and spec.n * spec.k * BYTES[spec.dtype] >= FAR


def product(
    request: Product, machine: Machine, label: str, config: KernelConfig = DEFAULT_CONFIG
) -> Generated:
    """The kernel of a product with its epilogue."""
    store = _epilogue(request.epilogue, request.matmul.m)
    return matmul(request.matmul, machine, store, label, config)


def matmul(
    spec: MatMul,
    machine: Machine,
    store: StoreTile,
    label: str = "matmul",
    config: KernelConfig = DEFAULT_CONFIG,
) -> Generated:
    """The kernel of a product. `store` is called wherever a vector of results is finished."""
    w, choice = KernelWriter(machine), choose(spec, machine, config)
    if spec.weight is not None and not quantised.is_grouped(spec):
        store = _scaled(store, spec.weight.scales)
    if choice.few == "bytes" and not amx.suits(spec, machine):
        store = split_int.whole(store, machine)
    values, known = ProductValues(w, spec), choice.known(spec.m)
    if known:
        scratch = _write(known, values, choice, store)
    else:
        scratch = 0
        for form, test in ((choice.few, "sle"), (choice.many, "sgt")):
            with w.when(w(f"icmp {test} i64 {values.m}, {choice.limit}")):
                scratch = max(scratch, _write(form, values, choice, store))
    return Generated(w.kernel(label), scratch, _packs(spec, machine, choice))


def _write(name: FormName, values: ProductValues, choice: Choice, store: StoreTile) -> int:
    """Write a product in some form; bytes of scratch memory that each thread needs."""
    if name == "strassen":
        loops: forms.TileLoops = strassen.StrassenLoops(values, choice.tile, choice.cut, store)
    else:
        form, tile = FORMS[name], Tile(choice.dots, 1) if name == "dot" else choice.tile
        if name in IN_SMALL_MATRICES and mmla.suits(values.spec, values.w.machine):
            form = mmla.MmlaForm
        if name in IN_TILE_REGISTERS and amx.worth_it(values.spec, values.w.machine):
            form, tile = IN_TILE_REGISTERS[name], Tile(amx.tallest(values.spec.m), tile.vectors)
        loops = forms.TileLoops(values, form(values, tile, choice.cut), store)
    loops.write()
    return loops.form.bytes


def _packs(spec: MatMul, machine: Machine, choice: Choice) -> dict[int, Pack]:
    """How constants are to be laid out, by word."""
    turned = spec.constant == "nk"
    if choice.few in IN_SMALL_MATRICES and mmla.suits(spec, machine):
        return {B: mmla.PackMatrices(machine, turned, choice.tile.vectors)}
    if choice.few == "panel":
        usual = choice.tile.vectors == widest_tile(spec.dtype, machine).vectors
        return {B: PackPanels(machine, turned, 0 if usual else choice.tile.vectors)}
    if choice.few == "strassen":
        return {B: strassen.PackHalves(machine, turned, choice.tile.vectors)}
    if choice.few == "bytes":
        panels: dict[int, Pack] = {B: PackPanels(machine, turned)}
        shifted = not amx.suits(spec, machine)
        return panels | ({split_int.SUMS: split_int.PackSums(machine, turned)} if shifted else {})
    if spec.weight is None:
        return {}
    assert isinstance(spec.n, int)
    scales = PackPanelScales(machine, spec.n, turned)
    weight = PackWeight(machine, spec.weight.bits, turned, splits_rows(spec, machine))
    packs: dict[int, Pack] = {B: weight, SCALES: scales}
    return packs | ({quantised.OFFSETS: scales} if spec.weight.offsets else {})


def _scaled(store: StoreTile, dtype: Element) -> StoreTile:
    """Sums of columns that have one scale each."""

    def scale(w: KernelWriter, at: tuple[str, str, str], vector: str, mask: str | None) -> None:
        scales = load_column(w, dtype, w.offset(w.pointer(SCALES), STORAGE[dtype], at[2]), "0")
        store(w, at, w(f"fmul {w.vector('float')} {vector}, {scales}"), mask)

    return scale


def _epilogue(nest: Nest, rows: Size) -> StoreTile:
    def store(w: KernelWriter, at: tuple[str, str, str], vector: str, mask: str | None) -> None:
        batch, row, column = at
        index = [*positions(w, w.add(w.mul(batch, w.size(rows)), row), nest.axes[:-1]), column]
        emit_point(w, nest.stores, index, len(nest.axes) - 1, [vector], mask)

    return store


def _rows_of_dots(spec: MatMul, machine: Machine) -> int:
    """Rows of A at once in dot products: many, since each reads B again; few if k is unknown, as
    the code for its end is long and the form is used for few rows only."""
    if isinstance(spec.k, SizeArgument):
        return _balanced(spec.m, 3)
    return _balanced(spec.m, 6 if machine.registers >= 32 else 4)


def _tile(spec: MatMul, machine: Machine, packed: bool) -> Tile:
    """The tallest tile for a product: one that divides m, so that one function does it all, or
    else tiles of about equal height."""
    widest = widest_tile(spec.dtype, machine)
    vectors = widest.vectors if packed else _vectors(spec, machine, widest.vectors)
    tallest = min(8, widest.rows * widest.vectors // vectors)
    enough = 4 if machine.registers >= 32 else widest.rows
    if isinstance(spec.m, SizeArgument):
        return Tile(enough, vectors)
    fitting = [rows for rows in range(tallest, enough - 1, -1) if spec.m % rows == 0]
    rows = fitting[0] if spec.m and fitting else _balanced(spec.m, tallest)
    return Tile(rows, vectors)


def _vectors(spec: MatMul, machine: Machine, widest: int) -> int:
    """The width of panels that are made while running: one that wastes the fewest columns, or a
    larger one if few tiles would touch a new page of memory for every narrow row of them."""
    if isinstance(spec.n, SizeArgument):
        return widest
    if forms.contiguous(spec) == "n" and isinstance(spec.m, int) and spec.m <= 2 and spec.n >= 1024:
        return 2 * widest
    needed = max(1, -(-spec.n // machine.lanes))
    narrowest = min(2, needed, widest)

    def columns(vectors: int) -> int:
        """Vectors of all panels of that width, those that are not needed included."""
        return -(-needed // vectors) * vectors

    return min(range(widest, narrowest - 1, -1), key=columns)


def _balanced(m: Size, tallest: int) -> int:
    """The height of tiles of about equal height."""
    if isinstance(m, SizeArgument) or m == 0:
        return tallest
    return -(-m // -(-m // tallest))


# ---- choices ----


TILES = (
    "14x2",
    "12x2",
    "8x2",
    "9x3",
    "8x3",
    "6x4",
    "5x4",
    "4x4",
    "3x8",
    "2x8",
    "1x8",
    "1x4",
    "1x2",
)
"""Shapes of tiles, as far as registers hold them."""
HEIGHTS = (6, 5, 4, 3, 2, 1)
"""Rows of tiles over panels of integers."""
PANELS = tuple(str(k << 10) for k in (192, 96, 32, 16))
STRIPS = ("48", "24", "96", "192")
AHEAD = tuple(str(k << 10) for k in (16, 8, 4, 32, 0))


def matmul_choices(request: Product, machine: Machine) -> Choices:
    """Nothing for sizes that vary, for float64, for batches of batches, and where all sizes must
    have one form."""
    spec = request.matmul
    sizes = (spec.batch, spec.m, spec.n, spec.k)
    varies = not all(isinstance(size, int) and size > 0 for size in sizes)
    if spec.batch_invariant or spec.dtype == "f64" or varies or spec.outer is not None:
        return {}
    usual = choose(spec, machine)
    if spec.weight is not None or spec.dtype == "i8":
        return _integer_choices(spec, machine, usual.tile)
    found: dict[str, tuple[str, ...]] = {
        "form": _configs_of(spec, machine, usual.tile),
        "tile": _tiles(spec, machine, usual.tile),
        "panel": PANELS,
    }
    assert isinstance(spec.m, int)
    if spec.m > 24:
        found["strip"] = STRIPS
    elif spec.m <= usual.tile.rows and not forms.fits_cache(spec):
        found["ahead"] = AHEAD
    several = {name: values for name, values in found.items() if len(values) > 1}
    return several | {"by": ("torch",)}


def _integer_choices(spec: MatMul, machine: Machine, usual: Tile) -> Choices:
    """Where B holds integers: rows of a tile, which is as wide as the panels, and whether few rows
    decode them in registers."""
    assert isinstance(spec.m, int)
    found = {"tile": tuple(f"{rows}x{usual.vectors}" for rows in HEIGHTS if rows <= spec.m)}
    few, most = (
        ("split_int", forms.FEW) if splits_rows(spec, machine) else ("decoded", 2 * forms.FEW)
    )
    if spec.weight is not None and spec.m <= most:
        found = {"form": (few, "written")} | found
    return found


def _configs_of(spec: MatMul, machine: Machine, tile: Tile) -> tuple[str, ...]:
    """Ways to read B that are right for its layout."""
    found = ["panel"] if spec.constant else []
    found += ["strassen"] if strassen.suits_strassen(spec, machine, tile.vectors) else []
    if forms.contiguous(spec) == "n":
        found.append("direct")
    elif forms.contiguous(spec) == "k" and spec.a[2] == 1:
        found.append("dot")
    return (*found, "copy")


def _tiles(spec: MatMul, machine: Machine, usual: Tile) -> tuple[str, ...]:
    """Tiles that registers hold, and no taller than A."""
    assert isinstance(spec.m, int)
    registers = machine.registers - 1
    fitting = []
    for text in (str(usual), *TILES):
        tile = Tile.read(text)
        fits = (tile.rows + 1) * tile.vectors <= registers
        tall = tile.rows <= spec.m and (tile.rows >= 4 or spec.m < 2 * tile.rows)
        if text not in fitting and (text == str(usual) or (fits and tall)):
            fitting.append(text)
    return tuple(fitting)
