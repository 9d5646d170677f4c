"""Attention for many queries on the tensor cores of compute capability 9.0."""

from __future__ import annotations

from torchair.codegen.cuda.flash.forms import WIDEST, FlashForm, declines, default_form, forms
from torchair.codegen.cuda.flash.kernel import FlashAttention
from torchair.codegen.cuda.hopper import DTYPES
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.requests import Attention
from torchair.codegen.target import Declined, Kernel, Launch

__all__ = ["FlashForm", "declines", "default_form", "flash", "forms", "refusal"]


def flash(
    request: Attention,
    gpu: Gpu,
    label: str = "attention",
    form: FlashForm | None = None,
    early: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of an attention, and how to launch it. An `early` one may begin before the launch
    before it ends. Raises Declined for what is not served."""
    why = refusal(request, gpu)
    if why:
        raise Declined(why)
    writer = FlashAttention(request, gpu, form or default_form(request), early)
    writer.write()
    return writer.w.kernel(label), writer.launch()


def refusal(request: Attention, gpu: Gpu) -> str | None:
    """Why an attention is not served."""
    if gpu.capability != (9, 0):
        return "tensor cores of another kind"
    if request.dtype not in DTYPES:
        return f"attention over {request.dtype}"
    group, heads = request.group, request.kv_heads
    if not group or not isinstance(heads, int) or request.heads != group * heads:
        return f"{request.heads} heads over {heads}"
    for width in (request.width, request.value_width):
        if not 1 <= width <= WIDEST or width % 8:
            return f"heads of {width} features"
    for size in (request.length, request.span):
        if not isinstance(size, int) or size < 1:
            return f"{size} queries or keys"
    if request.batch == 0:
        return "a batch of nothing"
    strides = (request.q, request.k, request.v, request.out)
    if any(s[3] != 1 for s in strides):
        return "features that are no neighbours"
    if any(not isinstance(n, int) or n % 8 for s in strides[:3] for n in s[:3]):
        return "rows that do not begin at multiples of 16 bytes"
    return None if request.scale > 0 else f"a scale of {request.scale}"
