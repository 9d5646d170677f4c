"""Check one torch function through conversion and the operator table, without the engine.

The function is traced as AOTAutograd would, converted, run by the reference interpreter and
compared with eager; every inferred type and shape is compared with the tensor really produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from torchair.convert import Conversion, GraphConverter
from torchair.engine.plan.inputs import no_offsets
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.shapes import evaluate, free_symbols
from torchair.ge.signature import (
    Computed,
    ComputedScalar,
    Fixed,
    InputView,
    ResultView,
    SymbolResult,
)
from torchair.operators import infer, interpret

TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
    torch.float8_e4m3fn: dict(rtol=0.0, atol=0.0),
    torch.float8_e5m2: dict(rtol=0.0, atol=0.0),
    torch.float8_e8m0fnu: dict(rtol=0.0, atol=0.0),
}


def convert(fn: Any, *inputs: Any, dynamic: bool = False, **options: Any) -> Conversion:
    """Trace and convert a function of tensors."""
    mode = "symbolic" if dynamic else "fake"
    traced = make_fx(functionalize(fn), tracing_mode=mode)(*inputs)
    examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    return GraphConverter(traced, "graph_1", infer, **options).run(*examples)


def check(
    fn: Any,
    *inputs: Any,
    dynamic: bool = False,
    generic: bool = False,
    other_inputs: Any = None,
    **options: Any,
) -> Conversion:
    """Convert, run and compare; with `generic=False` no operator may use the generic node.

    `other_inputs` are a second set of arguments (other sizes) for the same dynamic graph.
    """
    conversion = convert(fn, *inputs, dynamic=dynamic, **options)
    assert generic or not conversion.generic, f"generic nodes: {conversion.generic}"
    for arguments in [inputs] + ([other_inputs] if other_inputs is not None else []):
        _compare(conversion, fn, arguments, traced=arguments is inputs)
    return conversion


def _compare(conversion: Conversion, fn: Any, inputs: Any, traced: bool) -> None:
    mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    got = run(conversion, mine, traced)
    expected = fn(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    expected = [expected] if not isinstance(expected, (list, tuple)) else list(expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        if not isinstance(e, torch.Tensor):
            assert g == e
            continue
        assert g.dtype == e.dtype and g.shape == e.shape, (g.dtype, g.shape, e.dtype, e.shape)
        tolerance = TOLERANCE.get(e.dtype, dict(rtol=1e-7, atol=1e-7))
        torch.testing.assert_close(g, e, equal_nan=True, **tolerance)


def run(conversion: Conversion, args: Any, traced: bool = True) -> list[Any]:
    """Reference execution of a converted graph on real arguments."""
    signature = conversion.signature
    env = {
        name: args[a] if dim is None else args[a].shape[dim]
        for name, (a, dim) in signature.symbols.items()
    }
    feeds = []
    for source in signature.inputs:
        if source.kind == "random":
            feeds.append(no_offsets(source.count))
            continue
        value = args[source.args[0]]
        feeds.append(value if isinstance(value, torch.Tensor) else torch.tensor(value))

    # Tracing gives equal sizes one symbol and may simplify dims for the sizes it saw; arguments
    # of other sizes may break both on purpose, so then only our own rules are held to it.
    fits = all(
        evaluate(n.outputs[0].shape, env) == tuple(t.shape)
        for n, t in zip(conversion.graph.data, feeds, strict=True)
    )

    def watch(node: Any, results: Any) -> None:
        for value, tensor in zip(node.outputs, results, strict=True):
            if value.dtype != DataType.DT_UNDEFINED:
                assert tensor.dtype == ge_to_torch(value.dtype), (node, value, tensor.dtype)
            promised = "_fx_tensor_name" in value.attrs and not traced
            known = env.keys() if fits and not promised else set()
            if value.shape is not None and free_symbols(value.shape) <= known:
                dims = evaluate(value.shape, env)
                assert tuple(tensor.shape) == dims, (node, value, tensor.shape)

    outs = interpret(conversion.graph, feeds, watch)
    results: list[Any] = []
    for r in signature.results:
        if isinstance(r, Computed):
            results.append(outs[r.index])
        elif isinstance(r, ComputedScalar):
            results.append(outs[r.index].item())
        elif isinstance(r, Fixed):
            results.append(r.value)
        elif isinstance(r, SymbolResult):
            results.append(evaluate([r.expr], env)[0])
        else:
            assert isinstance(r, InputView | ResultView)
            base = args[r.arg] if isinstance(r, InputView) else _laid_out(r.base, outs, env)
            if r.cast:
                base = getattr(torch, r.cast)(base)
            dims = evaluate([*r.shape, *r.strides, r.offset], env)
            n = len(r.shape)
            results.append(torch.as_strided(base, dims[:n], dims[n : 2 * n], dims[-1]))
    return results


def _laid_out(r: Computed, outs: Sequence[torch.Tensor], env: dict[str, int]) -> torch.Tensor:
    """An output of the graph with the strides that were promised of it."""
    dims = evaluate([*r.shape, *r.strides], env)
    n, found = len(r.shape), outs[r.index]
    return torch.empty_strided(dims[:n], dims[n:], dtype=found.dtype).copy_(found)
