"""Native functions, operators and reductions over NaN, infinities, both zeros, subnormal, largest
and smallest numbers, in every type, against float64. Eager is no judge here: its vectors lose an
infinity or a sign here and there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lowering import LIBRARIES, widened
from maths_cases import BINARY, UNARY
from nest_plain import PLAIN
from torchair.codegen.cpu.jit import Library, host, run_kernel
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import OPERATORS, Access, Nest, Store, load, op, simplify
from torchair.codegen.text.maths import FUNCTIONS
from torchair.engine.lower import Group, Operand, build_nest, reduced_space
from torchair.ge.build import Data, builder
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Graph, Node, Value
from torchair.ge.shapes import contiguous_strides
from torchair.operators import Op, infer, row_of
from torchair.operators.core import TYPES
from torchair.operators.reference import tensor_args

INF, NAN = math.inf, math.nan
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
each_float = pytest.mark.parametrize("name", FLOATS)


def special(dtype: torch.dtype) -> torch.Tensor:
    """NaN, and of both signs: zero, infinity, the largest, the smallest normal, two subnormal and a
    few common numbers."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    sizes = [
        0.0,
        INF,
        info.max,
        info.smallest_normal,
        info.smallest_normal / 4,
        least,
        0.5,
        1,
        2,
        3,
    ]
    signed = [NAN, *sizes, *(-s for s in sizes)]
    return torch.tensor(signed, dtype=torch.float64).to(dtype)


def pairs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Two tensors: all pairs of special numbers."""
    s = special(dtype).double()
    return [x.contiguous() for x in torch.cartesian_prod(s, s).to(dtype).unbind(1)]


def wrong(
    got: torch.Tensor, truth: torch.Tensor, ulps: float, signed: bool = True, scale: Any = 0.0
) -> torch.Tensor:
    """Which elements are not what the truth in float64 rounds to, give or take some units in the
    last place, of `scale` too if the result is what remains of larger numbers."""
    if not got.dtype.is_floating_point:
        return got != truth.to(got.dtype)
    info = torch.finfo(got.dtype)
    g, t = got.double(), truth.double()
    exact = g == t.to(got.dtype).double()
    if signed:
        exact &= g.signbit() == t.signbit()
    room = ulps * info.eps * (t.abs() + scale) + ulps * info.smallest_normal * info.eps
    near = ((g - t).abs() <= room) & ((t != 0) | (not signed))
    over = (t.abs() > info.max * (1 - ulps * info.eps)) & g.isinf() & (g.sign() == t.sign())
    return ~(exact | near | over | (g.isnan() & t.isnan()))


def report(name: str, bad: torch.Tensor, got: Any, truth: Any, inputs: Sequence[Any]) -> list[str]:
    """Lines about the first wrong elements."""
    places = bad.nonzero()[:3].tolist()
    return [
        f"{name}{[float(x[p[0]]) if x.dim() == 1 else x[p[0]].tolist() for x in inputs]}"
        f" at {p}: {got[tuple(p)].item()}, not {truth[tuple(p)].item()}"
        for p in places
    ]


def run(nest: Nest, tensors: Sequence[torch.Tensor]) -> None:
    library = LIBRARIES.setdefault(host(), Library(host()))
    run_kernel(library, print_nest(simplify(nest), host()), [t.data_ptr() for t in tensors])


# ---- operators of the loop IR and functions of the maths library, all in one kernel ----

_FEW = ("neg", "abs", "sign", "isnan", "isinf", "isfinite")
_OF_TRUTH = ("and", "or", "xor", "not", "where", "shl", "shr")
"""Operators of truth values and integers, which the tests of integers are about."""


def in_float64(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(*(x.double().numpy() for x in inputs))))


def references(count: int) -> dict[str, Callable[..., Any]]:
    """Operators and functions of so many operands, over float64 arrays."""
    plain = {k: PLAIN[k] for k in OPERATORS if k not in _OF_TRUTH and (k in _FEW) == (count == 1)}
    library = UNARY if count == 1 else {k: f for k, (f, _) in BINARY.items() if k not in OPERATORS}
    return plain | library | ({"log1p": np.log1p} if count == 1 else {})  # torch's loses the least


def test_all_operators_and_functions_are_here() -> None:
    known = {*references(1), *references(2), *_OF_TRUTH}
    assert known >= OPERATORS | set(FUNCTIONS)


@each_float
@pytest.mark.parametrize("count", [1, 2], ids=["one operand", "two operands"])
def test_operators_and_functions(name: str, count: int) -> None:
    dtype = FLOATS[name]
    inputs = [special(dtype)] if count == 1 else pairs(dtype)
    size = len(inputs[0])
    args = [load(Access(k, name, (1,))) for k in range(count)]
    results, stores, table = [], [], references(count)
    for k, kind in enumerate(table, count):
        value = op(kind, *args)
        stored = "bool" if value.dtype == "bool" else name
        stores.append(Store(Access(k, stored, (1,)), value))
        results.append(torch.full((size,), 77).to(torch.bool if stored == "bool" else dtype))
    run(Nest((size,), tuple(stores)), [*inputs, *results])
    problems = []
    for (kind, function), got in zip(table.items(), results, strict=True):
        truth = in_float64(function, inputs)
        bad = wrong(got, truth, 64 if name == "f64" else 2.5)
        problems += report(kind, bad, got, truth, inputs)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_operators_on_integers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    s = torch.tensor([info.min, info.max, info.max - 1, 0, 1, 2, 7, *[-1] * (info.min < 0)])
    inputs = [x.contiguous() for x in torch.cartesian_prod(s, s).to(dtype).unbind(1)]
    types = [
        "Add", "Sub", "Mul", "Maximum", "Minimum", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal",
        "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
        "LeftShift", "RightShift",
    ]  # fmt: skip
    check_nodes(inputs, [(t, {}, 0.0, True) for t in types])
    single = ["Abs", "Neg", "Sign", "Square", "Invert", "LogicalNot", "Relu", "Ceil"]
    check_nodes([s.to(dtype)], [(t, {}, 0.0, True) for t in single])


# ---- operators of graphs that are formulas of those, all in one kernel ----

Row = tuple[str, dict[str, Any], float, bool]
"""An operator, its attributes, units in the last place, and whether a zero has its sign."""


class Nodes:
    """Nodes over the same inputs as one loop nest."""

    def __init__(self, inputs: Sequence[torch.Tensor], reduced: frozenset[int]) -> None:
        self.inputs, self.reduced = inputs, reduced
        self.graph = Graph("g", infer)
        with self.graph:
            self.data = [
                Data(index=k, dtype=torch_to_ge(x.dtype), shape=list(x.shape), placement="NPU")
                for k, x in enumerate(inputs)
            ]
        self.nodes: list[Node] = []

    def add(self, type_: str, *more: Any, **attrs: Any) -> Node:
        """A node of which all inputs are operands, and then `more`."""
        with self.graph:
            made = builder(type_)(*self.data, *more, **attrs)
        node: Node = (made[0] if isinstance(made, (tuple, list)) else made).node
        row = row_of(type_)
        assert row is not None and row.unfit(Op(node)) is None, type_
        for value in node.outputs:  # a type that tracing tells
            value.dtype = DataType.DT_FLOAT if value.dtype == DataType.DT_UNDEFINED else value.dtype
        self.nodes.append(node)
        return node

    def run(self, wanted: Sequence[Value]) -> dict[Value, torch.Tensor]:
        """Results of the kernel."""
        results = {v: torch.full(v.shape, 77).to(ge_to_torch(v.dtype)) for v in wanted}
        tensors = dict(zip(self.data, self.inputs, strict=True)) | results
        operands = {
            v: Operand(k, TYPES[v.dtype], tuple(t.shape), contiguous_strides(tuple(t.shape)))
            for k, (v, t) in enumerate(tensors.items())
        }
        group = Group(self.nodes, self.data[0], self.reduced)
        group.spaces = {v: reduced_space(v, self.data[0], self.reduced) for v in wanted}
        run(build_nest(group, operands, wanted, lambda v: v.fact), list(tensors.values()))
        return results

    def truth(self, node: Node) -> list[torch.Tensor]:
        """Results of torch's kernel in float64."""
        row, tensors = row_of(node.type), dict(zip(self.data, self.inputs, strict=True))
        assert row is not None

        def get(v: Value) -> torch.Tensor:
            found = tensors[v] if v in tensors else v.node.attr("value")
            return found.double() if found.is_floating_point() else found.clone()

        made = row.kernel(Op(node, widened))(*tensor_args(node, row, get))
        return list(made) if isinstance(made, (tuple, list)) else [made]


def check_nodes(
    inputs: Sequence[torch.Tensor],
    rows: Sequence[Row],
    references: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Elementwise operators over these operands, all in one kernel."""
    nodes = Nodes(inputs, frozenset())
    for type_, attrs, _, _ in rows:
        nodes.add(type_, **attrs)
    results = nodes.run([n.outputs[0] for n in nodes.nodes])
    problems = []
    for node, (type_, attrs, ulps, signed) in zip(nodes.nodes, rows, strict=True):
        got, reference = results[node.outputs[0]], (references or {}).get(type_)
        truth = nodes.truth(node)[0] if reference is None else in_float64(reference, inputs)
        bad = wrong(got, truth, ulps, signed)
        problems += report(f"{type_} {attrs or ''}", bad, got, truth, inputs)
    assert not problems, "\n".join(problems)


ONE: list[tuple[str, dict[str, Any]]] = [
    ("Reciprocal", {}), ("Square", {}), ("Log", {"base": 3.0}), ("Relu", {}), ("Elu", {}),
    ("CeluV2", {"alpha": 0.7}), ("GeluV2", {"approximate": "tanh"}), ("HardShrink", {}),
    ("HardSigmoid", {"alpha": 0.16666666, "beta": 0.5}), ("HardSwish", {}), ("LeakyRelu", {}),
    ("LogSigmoid", {}), ("Mish", {}), ("SoftShrink", {}), ("SoftplusV2", {}),
    ("SoftplusV2", {"beta": 2.0, "threshold": 5.0}), ("Swish", {}), ("Swish", {"scale": 2.0}),
    ("NanToNum", {"nan": 1.0, "posinf": 2.0, "neginf": 3.0}), ("LogicalNot", {}),
]  # fmt: skip
TWO: list[tuple[str, dict[str, Any]]] = [
    ("TruncateDiv", {}), ("Xlogy", {}), ("LogicalAnd", {}), ("LogicalOr", {}),
    ("GeluGradV2", {"approximate": "none"}), ("GeluGradV2", {"approximate": "tanh"}),
    ("EluGradV2", {"is_result": False}), ("HardShrinkGrad", {}), ("HardSigmoidGrad", {}),
    ("HardSwishGrad", {}), ("LeakyReluGrad", {}), ("MishGrad", {}), ("SoftShrinkGrad", {}),
    ("SoftplusV2Grad", {}), ("HardtanhGrad", {}), ("ReluGrad", {}),
    ("ThresholdGradV2D", {"threshold": 0.5}),
]  # fmt: skip
_UNSIGNED = ("SoftShrink",)
"""Where the sign of a zero is eager's own secret: it depends on the place in a vector."""


def ulps_of(name: str) -> float:
    """Several steps of float32; float64 is judged by a formula that is no better itself."""
    return {"f32": 8.0, "f64": 4000.0}.get(name, 1.0)


@each_float
@pytest.mark.parametrize("count", [1, 2], ids=["one operand", "two operands"])
def test_operators_of_graphs(name: str, count: int) -> None:
    dtype, table = FLOATS[name], ONE if count == 1 else TWO
    inputs = [special(dtype)] if count == 1 else pairs(dtype)
    rows = [(t, attrs, ulps_of(name), t not in _UNSIGNED) for t, attrs in table]
    if name == "f64":  # the square of the largest double is too large for the judge
        rows = [r for r in rows if r[1] != {"approximate": "tanh"}]
    check_nodes(inputs, rows)


# ---- reductions, all over the same rows in one kernel ----


def special_rows(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Rows of common numbers with two special ones at different places, and rows of one only."""
    s = special(dtype).double()
    pick = torch.Generator().manual_seed(0)
    rows = torch.randn(len(s) ** 2, count, generator=pick, dtype=torch.float64)
    both, k = torch.cartesian_prod(s, s), torch.arange(len(s) ** 2)
    rows[k, k % count] = both[:, 0]
    rows[k, (7 * k + count - 1) % count] = both[:, 1]
    return torch.cat([rows, s[:, None].expand(-1, count)]).to(dtype)


_AXES = ([1],)
REDUCTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any], bool]] = [
    ("ReduceSum", _AXES, {}, True),
    ("ReduceMax", _AXES, {}, True),
    ("ReduceMin", _AXES, {}, True),
    ("ReduceProd", _AXES, {}, True),
    ("ReduceMean", _AXES, {}, False),
    ("ReduceLogSumExp", _AXES, {}, True),
    ("EuclideanNorm", _AXES, {}, False),
    ("LpNormV2", (), {"p": 1.0, "axes": [1]}, True),
    ("LpNormV2", (), {"p": 2.0, "axes": [1]}, False),
    ("LpNormV2", (), {"p": 3.0, "axes": [1]}, False),
    ("LpNormV2", (), {"p": 0.0, "axes": [1]}, True),
    ("LpNormV2", (), {"p": 2.0**31, "axes": [1]}, True),
    ("LpNormV2", (), {"p": -(2.0**31), "axes": [1]}, True),
    ("ReduceStdV2", (), {"dim": [1]}, True),
    ("SoftmaxV2", (), {"axes": [1]}, True),
    ("LogSoftmaxV2", (), {"axes": [1]}, True),
    ("ArgMaxWithValue", (), {"dimension": 1}, True),
    ("ArgMinWithValue", (), {"dimension": 1}, True),
    ("LayerNormV4", ([19], None, None), {}, False),
]
"""Operators with inputs and attributes, and whether they hold for numbers at the ends of the range
too: sums of squares and the sum inside of a mean leave the type of their operands."""


@each_float
def test_reductions(name: str) -> None:
    dtype = FLOATS[name]
    x = special_rows(dtype, 19)
    nodes = Nodes([x], frozenset({1}))
    wanted: list[tuple[str, bool, Value, torch.Tensor]] = []
    for type_, inputs, attrs, whole in REDUCTIONS:
        node = nodes.add(type_, *inputs, **attrs)
        kept = node.outputs if type_.startswith("Arg") else node.outputs[:1]
        truths = nodes.truth(node)
        named = f"{type_} {attrs or ''}"
        wanted += [(named, whole, v, t) for v, t in zip(kept, truths, strict=False)]
    results = nodes.run([v for _, _, v, _ in wanted])
    info = torch.finfo(dtype)
    size = x.double().abs()
    finite = size.where(size.isfinite(), 0.0)
    far = ((finite > info.max / 4) | ((finite > 0) & (finite <= info.smallest_normal))).any(1)
    problems = []
    for named, whole, value, truth in wanted:
        got = results[value]
        scale = finite.amax(1, keepdim=truth.dim() > 1)
        scale = scale.clamp(max=30) if named.startswith(("Soft", "Log", "Layer")) else scale
        bad = wrong(got, truth, 32.0, signed=False, scale=scale)
        bad &= True if whole and name != "f64" else ~far.reshape(-1, *[1] * (bad.dim() - 1))
        problems += report(named, bad, got, truth, [x])
    assert not problems, "\n".join(problems)
