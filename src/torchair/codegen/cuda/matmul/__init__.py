"""Products of many rows on the tensor cores of compute capability 9.0, with their epilogue in
registers."""

from __future__ import annotations

from torchair.codegen.cuda.hopper import DTYPES, LINE
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.matmul.forms import (
    LARGE,
    Layout,
    MatmulForm,
    Sizes,
    candidates,
    default,
    wins,
)
from torchair.codegen.cuda.matmul.loop import TensorMatmul
from torchair.codegen.cuda.matmul.operands import factors
from torchair.codegen.requests import MatMul, Product
from torchair.codegen.target import Anchor, Declined, Kernel, Launch

USUAL = (1, 64, 4096, 4096)
"""Batch, m, n and k that a batch-invariant form is chosen for, where they are not known."""


def matmul(
    request: Product,
    gpu: Gpu,
    label: str = "matmul",
    form: MatmulForm | None = None,
    early: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of a product with its epilogue, and how to launch it. Raises Declined for products
    that are not served."""
    form = form or default_form(request, gpu)
    why = refusal(request, gpu, form)
    if why:
        raise Declined(why)
    writer = TensorMatmul(request, gpu, form, early)
    writer.write()
    return writer.w.kernel(label), writer.launch()


def refusal(request: Product, gpu: Gpu, form: MatmulForm = LARGE) -> str | None:
    """Why a product is not served in a form."""
    matmul = request.matmul
    if not serves_any_rows(matmul, gpu):
        return f"tensor cores of another kind, or products of {matmul.dtype}"
    if 0 in (matmul.batch, matmul.m, matmul.n, matmul.k):
        return "products of nothing"
    found = factors(matmul, (form.rows, form.columns), form.kept)
    return next((why for f in found if (why := f.refusal())), None)


def serves_any_rows(matmul: MatMul, gpu: Gpu) -> bool:
    """Whether there is a kernel for products of this kind, however many rows they have."""
    return gpu.capability == (9, 0) and matmul.dtype in DTYPES and matmul.weight is None


def default_form(request: Product, gpu: Gpu) -> MatmulForm:
    """The form of a product that nobody has chosen another one for. Sizes that are not known are
    taken for usual ones where the product is to be batch-invariant."""
    matmul = request.matmul
    steady = matmul.batch_invariant
    asked = (matmul.batch, matmul.m, matmul.n, matmul.k)
    given = [
        n if isinstance(n, int) else usual if steady else 0
        for n, usual in zip(asked, USUAL, strict=True)
    ]
    if not all(given):
        return LARGE
    form = default(Sizes(*given), gpu.multiprocessors, layout_of(matmul), steady)
    return LARGE if refusal(request, gpu, form) else form


def layout_of(matmul: MatMul) -> Layout:
    """What forms have to know of the factors."""
    known = isinstance(matmul.m, int) and matmul.a[2] == 1
    return Layout(8 if matmul.b[1] == 1 else LINE, known)  # rows across the sum: whole lines


def forms(request: Product, gpu: Gpu) -> list[MatmulForm]:
    """Forms that are worth measuring, the default first; none of a product that is not served."""
    if refusal(request, gpu):
        return []
    matmul, first = request.matmul, default_form(request, gpu)
    sizes = [n for n in (matmul.batch, matmul.m, matmul.n, matmul.k) if isinstance(n, int)]
    if matmul.batch_invariant or len(sizes) < len(USUAL):
        return [first]
    others = candidates(Sizes(*sizes), gpu.multiprocessors, layout=layout_of(matmul))
    found = dict.fromkeys((first, LARGE, *others))
    return [form for form in found if not refusal(request, gpu, form)]


def declines(anchor: Anchor, gpu: Gpu) -> str | None:
    """Why a product of many rows is left to the library, whatever its strides are. One that is to
    be batch-invariant is served whether that is faster or not, and of any number of rows."""
    batch, m, n, k = anchor.sizes or (None,) * 4
    if gpu.capability != (9, 0) or anchor.dtype not in DTYPES or anchor.quantised:
        return "torch's libraries serve many rows"
    lines = (m if anchor.turned else k, k if anchor.along else n)
    if any(line is not None and line % 8 for line in lines):
        return "its rows are no multiples of 16 bytes"
    if anchor.batch_invariant:
        unknown = "a dim that is contiguous in memory is not known"
        return unknown if None in lines or 0 in anchor.sizes else None
    if batch is None or m is None or n is None or k is None:
        return "torch's libraries serve many rows, and their number is not known"
    if n % 8:
        return "rows of its results are no multiples of 16 bytes"
    along = anchor.along and not anchor.turned
    if not all((batch, m, n, k)) or not wins(batch, m, n, k, gpu.multiprocessors, along):
        return "torch's libraries are faster"
    return None
