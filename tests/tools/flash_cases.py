"""Attention of many queries with data and what should come out, in float64: for a GPU and, where
they are small, for the machine of `ptx_machine`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cuda_cases import AttentionCase
from torchair.codegen.cuda.flash import FlashForm, flash
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.requests import Attention
from torchair.codegen.target import Kernel, Launch


@dataclass(frozen=True)
class FlashCase(AttentionCase):
    """Attention of many queries."""

    tiles: FlashForm | None = None
    repeated: bool = False  # all batches have the keys of the first one

    def __str__(self) -> str:
        names = [super().__str__(), str(self.tiles or ""), "repeated" * self.repeated]
        return "-".join(x for x in names if x)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of any attention; repeated keys are there once."""
        q, k, v, *others = super().shapes
        return [q, (1, *k[1:]) if self.repeated else k, v, *others]

    @property
    def request(self) -> Attention:
        """What is asked for."""
        request = super().request
        return dataclasses.replace(request, k=(0, *request.k[1:])) if self.repeated else request

    def generate(self, gpu: Gpu) -> tuple[Kernel, Launch]:
        """The kernel and its launch."""
        return flash(self.request, gpu, form=self.tiles, early=self.early)


_NARROW = FlashForm(1, 64)

SMALL_FLASH = [
    FlashCase(2, 1, 70, 150, 64, tiles=_NARROW, lse=True),
    FlashCase(2, 2, 130, 130, 64, causal=True, tiles=_NARROW, lse=True),
    FlashCase(1, 1, 100, 40, 64, causal=True, tiles=FlashForm(2, 64)),
    FlashCase(1, 1, 40, 200, 64, "f16", causal=True, tiles=FlashForm(1, 32)),
    FlashCase(2, 1, 5, 33, 64, batch=2, repeated=True, tiles=_NARROW),
    FlashCase(1, 1, 20, 130, 128, "f16", tiles=_NARROW, early=True),
    FlashCase(1, 1, 65, 70, 72, value_width=40, causal=True, tiles=_NARROW),
    FlashCase(1, 1, 9, 70, 256, value_width=64, tiles=_NARROW),
    FlashCase(2, 1, 70, 70, 64, mask="bool", per_row=True, hole="none", lse=True, tiles=_NARROW),
    FlashCase(1, 1, 70, 90, 64, mask="bool", tiles=_NARROW),
    FlashCase(2, 1, 66, 70, 64, mask="bf16", per_row=True, causal=True, tiles=_NARROW),
    FlashCase(1, 1, 9, 70, 64, mask="f32", per_row=True, hole="nan", tiles=_NARROW),
    FlashCase(1, 1, 9, 70, 64, mask="f16", per_row=True, hole="inf", tiles=_NARROW),
    FlashCase(1, 1, 9, 70, 64, mask="f32", per_row=True, hole="none", lse=True, tiles=_NARROW),
    FlashCase(2, 1, 130, 200, 64, tiles=FlashForm(2, 64, alternate=True), lse=True),
]
"""Cases that a machine of numpy does in a moment."""

LARGE_FLASH = [
    FlashCase(4, 4, 1024, 1024, 128, batch=2, lse=True),
    FlashCase(8, 2, 1024, 1024, 128, causal=True, lse=True),
    FlashCase(8, 8, 777, 777, 64, batch=3, causal=True, lse=True),
    FlashCase(12, 12, 128, 128, 64, batch=16),
    FlashCase(8, 2, 777, 1333, 128, "f16", causal=True),
    FlashCase(4, 1, 1333, 300, 128, causal=True),
    FlashCase(4, 4, 512, 512, 96, "f16"),
    FlashCase(4, 2, 300, 900, 80, causal=True),
    FlashCase(4, 4, 500, 500, 256, lse=True),
    FlashCase(4, 4, 500, 500, 192, "f16", value_width=128, causal=True),
    FlashCase(2, 2, 300, 400, 32),
    FlashCase(2, 2, 300, 400, 8, causal=True),
    FlashCase(4, 2, 300, 421, 64, mask="bool", per_row=True, hole="none", batch=2),
    FlashCase(4, 2, 300, 421, 128, mask="bool", batch=2, lse=True),
    FlashCase(4, 4, 300, 421, 128, mask="bf16", per_row=True, hole="none"),
    FlashCase(4, 4, 300, 300, 64, "f16", mask="f32", per_row=True, causal=True),
    FlashCase(4, 4, 300, 300, 64, shift=2),
    FlashCase(4, 4, 5, 4000, 128, batch=3, repeated=True),
]
