"""Products of many rows on the tensor cores of compute capability 9.0, with their epilogue in
registers."""

from __future__ import annotations

from torchair.codegen.cuda.hopper import DTYPES
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.matmul.forms import LARGE, MatmulForm
from torchair.codegen.cuda.matmul.loop import TensorMatmul
from torchair.codegen.cuda.matmul.operands import factors
from torchair.codegen.requests import Product
from torchair.codegen.target import Declined, Kernel, Launch


def matmul(
    request: Product,
    gpu: Gpu,
    label: str = "matmul",
    form: MatmulForm | None = None,
    early: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of a product with its epilogue, and how to launch it. Raises Declined for products
    that are not served."""
    why = refusal(request, gpu)
    if why:
        raise Declined(why)
    writer = TensorMatmul(request, gpu, form or LARGE, early)
    writer.write()
    return writer.w.kernel(label), writer.launch()


def refusal(request: Product, gpu: Gpu) -> str | None:
    """Why a product is not served."""
    matmul = request.matmul
    if gpu.capability != (9, 0):
        return "tensor cores of another kind"
    if matmul.dtype not in DTYPES or matmul.weight is not None:
        return f"products of {matmul.dtype}"
    if 0 in (matmul.batch, matmul.m, matmul.n, matmul.k):
        return "products of nothing"
    return next((why for f in factors(matmul, (64, 64)) if (why := f.refusal())), None)
