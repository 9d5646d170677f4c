"""Samples of arguments that a converter is declared to support, and trying them out.

@declare_supported([Support(F32(2, 3), 1), Support(I64(4), 0)])
@register_fx_node_ge_converter(torch.ops.mine.op.default)
def convert_op(x, dim, meta_outputs=None): ...

assert convert_op.check() == []
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchair.convert.interpreter import GraphConverter
from torchair.convert.registry import Converter
from torchair.operators import infer, interpret
from torchair.torch_private.pytree import tree_flatten, tree_unflatten


class SampleTensor:
    """A tensor to be made: dims and a type, maybe bounds of its numbers, or the numbers."""

    def __init__(
        self,
        *dims: int,
        dtype: torch.dtype,
        value: Any = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        if value_range is not None and len(value_range) != 2:
            raise AssertionError(f"value_range is two numbers, not {value_range}")
        self.dims, self.dtype, self.value, self.range = dims, dtype, value, value_range

    def make(self) -> torch.Tensor:
        """The tensor; the same each time."""
        if self.value is not None:
            return torch.tensor(self.value, dtype=self.dtype)
        low, high = self.range or ((0, 2) if self.dtype == torch.bool else (-2, 3))
        source = torch.Generator().manual_seed(0)
        numbers = torch.rand(self.dims, generator=source) * (high - low) + low
        whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
        numbers = numbers.floor() if whole else numbers
        unsigned = self.dtype == torch.uint8 and self.range is None
        return (numbers.abs() if unsigned else numbers).to(self.dtype)

    def __repr__(self) -> str:
        given = f"{self.value}" if self.value is not None else f"{self.dims}"
        return f"Tensor({given}, {self.dtype})"


class Support:
    """Arguments of one call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        leaves, self._form = tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise AssertionError("a sample names tensors as F32(2, 3) or T([1, 2], dtype=...)")
        self.args, self.kwargs, self._leaves = args, kwargs, leaves

    def check(self, op: Any) -> str | None:
        """What is wrong with the graph of this call, None if it gives what torch gives."""
        made = [x.make() if isinstance(x, SampleTensor) else x for x in self._leaves]
        places = [i for i, x in enumerate(made) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            leaves = list(made)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = tree_unflatten(leaves, self._form)
            return op(*args, **kwargs)

        tensors = [made[i] for i in places]
        try:
            expected = [x for x in tree_flatten(call(*tensors))[0] if x is not None]
            torch.testing.assert_close(_through_graph(call, tensors), expected)
        except Exception as e:  # the answer of a check, which says what failed
            return f"{self}: {e}"
        return None

    def __repr__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"Support({', '.join(shown)})"


def _through_graph(call: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    traced = make_fx(call, tracing_mode="fake")(*tensors)
    examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    conversion = GraphConverter(traced, "sample", infer, strict=True).run(*examples)
    return interpret(conversion.graph, [t.clone() for t in tensors])


_declared: dict[Any, Converter] = {}


def declare_supported(samples: Sequence[Support]) -> Callable[[Converter], Converter]:
    """Attach samples to a converter; `check` of the converter tries them."""

    def declare(converter: Converter) -> Converter:
        converter.supported_cases = list(samples)
        _declared[converter._aten_op] = converter
        return converter

    return declare


def declared() -> dict[Any, Converter]:
    """Converters with samples, by operator."""
    return dict(_declared)


F32, F16, BF16, F64, I64, I32, I16, I8, U8, C64, BOOL = (
    partial(SampleTensor, dtype=dtype)
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.complex64,
        torch.bool,
    )
)


def T(value: Any, *, dtype: torch.dtype) -> SampleTensor:
    """A tensor of these numbers."""
    return SampleTensor(dtype=dtype, value=value)
