"""Torch's generators of random numbers on GPUs: whether kernels of ours draw what they draw."""

from __future__ import annotations

from functools import cache

import torch

from torchair.codegen import philox

_TRIED = ((torch.float32, 4), (torch.bfloat16, 8))
"""Types with the elements that torch's dropout takes at once."""
_SIZES = (4096, 4094, 4095)  # divided by such vectors, by shorter ones, by none


@cache
def drawing_threads(index: int) -> int:
    """Threads that torch's kernels draw with at most on this GPU; 0 where its dropout does not draw
    what is expected here, as in another version of torch. The generator stays as it is."""
    found = torch.cuda.get_device_properties(index)
    blocks = found.max_threads_per_multi_processor // philox.BLOCK
    most = blocks * philox.BLOCK * found.multi_processor_count
    device = torch.device("cuda", index)
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng([index]):
        sizes = (*_SIZES, 4 * most + 8)  # the last one in several turns
        same = all(_draws(device, n, dtype, most, k) for n in sizes for dtype, k in _TRIED)
    return most if same else 0


def _draws(
    device: torch.device, elements: int, dtype: torch.dtype, most: int, most_lanes: int
) -> bool:
    """Whether a dropout of so many elements leaves what is expected, and the generator where it
    should be."""
    generator = torch.cuda.default_generators[device.index]
    generator.manual_seed(2**40 + 3)
    generator.set_offset(8)
    mask = torch.ops.aten.native_dropout.default(
        torch.ones(elements, dtype=dtype, device=device), 0.3, True
    )[1]
    layout = philox.layout_of(elements, philox.vector_of(elements, most_lanes), most)
    state = torch.tensor([2**40 + 3, 8], device=device)
    drawn = philox.drawn(state, torch.arange(elements, device=device), layout)
    expected = generator.get_offset() == 8 + philox.increment(elements, most)
    return expected and torch.equal(drawn < philox.chance(0.7), mask)
