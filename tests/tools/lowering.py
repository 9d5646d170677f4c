"""Run one operator through its lowering rule and compare it with the operator table's torch kernel.

The operator becomes a graph of one node. Tensors feed it as graph inputs, anything else as a
constant. With `dynamic` equal sizes of the inputs share a symbol, so that one kernel serves
all sizes; the words of another run come from the recipe that the first one left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cuda_tools import run_nest_on_gpu
from torchair.codegen.cpu.jit import Library, host, run_kernel
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import Nest, simplify, with_words
from torchair.codegen.sizes import GuardSet
from torchair.codegen.target import Kernel
from torchair.codegen.text.writer import Machine
from torchair.engine.lower import Operand, build_nest, single
from torchair.ge.build import Const, Data, builder
from torchair.ge.dtypes import FLOAT_TYPES, DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.ge.shapes import Sym, contiguous_strides, evaluate, symbol
from torchair.operators import Op, infer, row_of
from torchair.operators.core import TYPES, loops_of
from torchair.operators.reference import tensor_args

TIMES_EAGER = 4  # another order of rounding may cost up to this many errors of eager
FLOOR = 4  # and never less than this many units in the last place of the element
_UNTOLD = DataType.DT_UNDEFINED
ON_GPU = os.environ.get("TORCHAIR_TEST_DEVICE") == "cuda"  # the same cases on a GPU
GUARD = 64  # elements around a result that must stay as they are
LIBRARIES: dict[Machine, Library] = {}


class Constant:
    """A tensor that is part of the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def constant(value: Any, dtype: torch.dtype) -> Constant:
    """A number or list of a type, as converters put it into the graph."""
    return Constant(torch.tensor(value, dtype=dtype))


class Host:
    """An integer that steers sizes: a constant, a symbol where sizes are symbols."""

    def __init__(self, value: int) -> None:
        self.value = value


class OneNode:
    """A graph of one operator, with a kernel for the layouts of its first inputs."""

    def __init__(
        self,
        op_type: str,
        *inputs: Any,
        dynamic: bool = False,
        only: Sequence[int] | None = None,
        **attrs: Any,
    ) -> None:
        """With `only`, these results of the operator are computed, else all."""
        self.op_type, self.inputs, self.dynamic = op_type, inputs, dynamic
        self.feeds: list[tuple[Value, torch.Tensor]] = []
        self.hosts: list[tuple[Value, int]] = []
        with Graph("g", infer):
            result = builder(op_type)(*(self._fed(x) for x in inputs), **attrs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.node: Node = first.node
        self.wanted = list(range(len(self.node.outputs)) if only is None else only)
        for value in self.node.outputs:  # a type that tracing tells
            value.dtype = DataType.DT_FLOAT if value.dtype == _UNTOLD else value.dtype

    @property
    def results(self) -> list[Value]:
        """The results that are computed."""
        return [self.node.outputs[k] for k in self.wanted]

    def _fed(self, x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], torch.Tensor):
            return [self._fed(t) for t in x]
        if isinstance(x, Host):
            return self._host(x.value)
        if not isinstance(x, torch.Tensor):
            return Const(x.tensor) if isinstance(x, Constant) else x
        dims = [symbol(f"s{n}") if self.dynamic and n > 1 else n for n in x.shape]
        dtype, index = torch_to_ge(x.dtype), len(self.feeds)
        value = Data(index=index, dtype=dtype, shape=dims, placement="NPU")
        self.feeds.append((value, x))
        return value

    def _host(self, n: int) -> Value:
        if not self.dynamic:
            return Const(n, dtype=DataType.DT_INT64)
        index = len(self.hosts)
        value = Data(index=index, dtype=DataType.DT_INT64, shape=[], placement="CPU")
        self.hosts.append((value, n))
        return value

    @property
    def declined(self) -> str | None:
        """Why the rule does not take this node."""
        row = row_of(self.op_type)
        assert row is not None
        return row.unfit(Op(self.node))

    # ---- what is right ----

    def expected(self, wide: bool = False) -> list[torch.Tensor]:
        """Results of the operator table's kernel, of float64 inputs if `wide`."""
        row = row_of(self.op_type)
        assert row is not None
        tensors = dict(self.feeds)

        def get(value: Value) -> torch.Tensor:
            found = tensors[value] if value in tensors else value.node.attr("value")
            return found.double() if wide and found.is_floating_point() else found.clone()

        op = Op(self.node, widened) if wide else Op(self.node)
        made = row.kernel(op)(*tensor_args(self.node, row, get))
        found = list(made) if isinstance(made, (tuple, list)) else [made]
        return [found[k] for k in self.wanted]

    # ---- what the rule gives ----

    def sizes(self, inputs: Sequence[torch.Tensor], hosts: Sequence[int]) -> dict[str, int]:
        """What the symbols stand for."""
        found = {str(v.content): n for (v, _), n in zip(self.hosts, hosts, strict=True)}
        for (value, _), x in zip(self.feeds, inputs, strict=True):
            for d, n in zip(value.shape or (), x.shape, strict=True):
                if isinstance(d, Sym):
                    assert found.setdefault(str(d), n) == n, "sizes do not fit the graph"
        return found

    def compile(self, machine: Machine, permuted: bool = False) -> tuple[Kernel, GuardSet]:
        """The kernel for the inputs given at first; results may be stored with dims reversed."""
        nest, guards = self.nest(permuted)
        return print_nest(nest, machine), guards

    def nest(self, permuted: bool = False) -> tuple[Nest, GuardSet]:
        """What is printed for them, and what it takes from the sizes."""
        guards = GuardSet()
        hosts = [n for _, n in self.hosts]
        env: dict[str, Any] = self.sizes([t for _, t in self.feeds], hosts)
        if self.dynamic:
            env = {name: guards.variable(n) for name, n in env.items()}

        def fact(value: Value) -> Fact:
            content = value.content
            if content is not None:
                known = evaluate(content if isinstance(content, tuple) else (content,), env)
                content = known if isinstance(content, tuple) else known[0]
            return Fact(value.dtype, evaluate(value.shape or (), env), content)

        operands: dict[Value, Operand] = {}
        for value, x in self.operand_tensors():
            shape = tuple(fact(value).shape or ())
            strides = tuple(x.stride()) if not x.is_contiguous() else contiguous_strides(shape)
            operands[value] = Operand(len(operands), TYPES[value.dtype], shape, strides)
        for value in self.results:
            shape = tuple(fact(value).shape or ())
            strides = contiguous_strides(shape[::-1])[::-1] if permuted else None
            strides = strides or contiguous_strides(shape)
            operands[value] = Operand(len(operands), TYPES[value.dtype], shape, strides)
        nest = build_nest(single(self.node), operands, self.results, fact)
        return with_words(simplify(nest), lambda n: guards.word(n, len(operands))), guards

    def operand_tensors(self) -> Iterator[tuple[Value, torch.Tensor]]:
        """Values that live in memory besides the results: the inputs and constants with dims."""
        yield from self.feeds
        for value in dict.fromkeys(self.node.values()):
            if value.node.type == "Const" and value.shape != ():
                yield value, value.node.attr("value")

    def run(
        self,
        *inputs: torch.Tensor,
        hosts: Sequence[int] = (),
        threads: int = 1,
        machine: Machine | None = None,
        permuted: bool = False,
    ) -> list[torch.Tensor]:
        """Results of the generated kernel on other inputs, on those given at first if there are
        none. With `permuted` they are stored as if their dims were reversed."""
        nest, guards = self.nest(permuted)
        given = list(inputs) or [t for _, t in self.feeds]
        env = self.sizes(given, hosts or [n for _, n in self.hosts])
        words = guards.recipe()(list(env.values()) if self.dynamic else [])
        assert words is not None, "the kernel is not made for these sizes"
        tensors = given + [t for _, t in self.operand_tensors()][len(given) :]
        results = [self._result(v, env, permuted, tensors) for v in self.results]
        operands = [*tensors, *(view for view, _ in results)]
        if ON_GPU and machine is None:
            run_nest_on_gpu(nest, operands, len(tensors), words)
        else:
            machine = machine or host()
            library = LIBRARIES.setdefault(machine, Library(machine))
            pointers = [t.data_ptr() for t in operands]
            run_kernel(library, print_nest(nest, machine), [*pointers, *words], threads)
        for view, whole in results:
            _check_guards(view, whole)
        return [view for view, _ in results]

    def _result(
        self, value: Value, env: dict[str, int], permuted: bool, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a result in the middle of memory that must not change."""
        dims = evaluate(value.shape or (), env)
        count = 1
        for n in dims:
            count *= n
        whole = torch.full((count + 2 * GUARD,), 77, dtype=ge_to_torch(value.dtype))
        inner = whole[GUARD : GUARD + count]
        view = inner.view(dims[::-1]).permute(*reversed(range(len(dims)))) if permuted else None
        view = inner.view(dims) if view is None else view
        if loops_of(self.op_type).kind == "update":
            view.copy_(tensors[0])
        return view, whole


def widened(value: Value) -> Fact:
    """What is known of a value if all floats were float64."""
    real = value.dtype in FLOAT_TYPES
    return Fact(DataType.DT_DOUBLE if real else value.dtype, value.shape, value.content)


def _check_guards(view: torch.Tensor, whole: torch.Tensor) -> None:
    kept = torch.full((GUARD,), 77, dtype=whole.dtype)
    assert torch.equal(whole[:GUARD], kept), "written before the result"
    assert torch.equal(whole[GUARD + view.numel() :], kept), "written past the result"


def assert_as_good(got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    """Integers equal eager. Floats are as near to the truth in float64 as eager is, times some;
    what is not finite equals eager."""
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape), (got.dtype, got.shape)
    if not got.dtype.is_floating_point:
        torch.testing.assert_close(got, eager, rtol=0, atol=0)
        return
    finite = eager.isfinite() & truth.isfinite()
    better = eager.isnan() & truth.isinf()  # vectors of eager lose an infinity here and there
    right = torch.where(better, truth.to(eager.dtype), eager)
    torch.testing.assert_close(got[~finite], right[~finite], rtol=0, atol=0, equal_nan=True)
    g, e, t = got[finite].double(), eager[finite].double(), truth[finite].double()
    if not g.numel():
        return
    info = torch.finfo(got.dtype)
    allowed = FLOOR * info.eps * t.abs() + TIMES_EAGER * (e - t).abs().max() + info.tiny
    if got.dtype == torch.float64:  # the truth is no better than this
        allowed += 16 * FLOOR * info.eps * t.abs().max()
    worst = ((g - t).abs() - allowed).argmax()
    text = f"got {g[worst]}, eager {e[worst]}, truth {t[worst]}"
    assert (g - t).abs()[worst] <= allowed[worst], text


def check_node(one: OneNode, threads: Sequence[int] = (1, 3), **options: Any) -> None:
    """The kernel of a node gives what the operator table gives, with these numbers of threads."""
    assert one.declined is None, one.declined
    eager, truth = one.expected(), one.expected(wide=True)
    for count in threads:
        results = one.run(threads=count, **options)
        for got, e, t in zip(results, eager, truth, strict=True):
            assert_as_good(got, e, t)


def check(op_type: str, *inputs: Any, threads: Sequence[int] = (1, 3), **attrs: Any) -> None:
    """Lower one operator for these inputs, run it and compare."""
    check_node(OneNode(op_type, *inputs, **attrs), threads)


def check_dynamic(op_type: str, *variants: Sequence[Any], **attrs: Any) -> None:
    """The kernel made for the sizes of the first inputs serves the sizes of all others."""
    one = OneNode(op_type, *variants[0], dynamic=True, **attrs)
    kernels = set()
    for inputs in variants:
        again = OneNode(op_type, *inputs, **attrs)
        hosts = [x.value for x in inputs if isinstance(x, Host)]
        results = one.run(*(t for _, t in again.feeds), hosts=hosts, threads=2)
        kernels.add(one.compile(host())[0].entry)
        for got, e, t in zip(results, again.expected(), again.expected(wide=True), strict=True):
            assert_as_good(got, e, t)
    assert len(kernels) == 1


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same elements with different strides: as they are, transposed, and every second of a
    larger tensor."""
    spread = torch.stack([x, x], dim=-1)[..., 0]
    transposed = x.permute(*reversed(range(x.dim()))).contiguous()
    return {
        "contiguous": x,
        "transposed": transposed.permute(*reversed(range(x.dim()))),
        "spread": spread,
    }
