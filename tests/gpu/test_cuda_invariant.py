"""Batch-invariant numerics on a GPU: a row has the same bits alone and in a batch. Kernels on the
machine of numpy, and models on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cuda_cases import MORE as G_MORE
from cuda_cases import Q_MORE, Q_OUT, AttentionCase, ProductCase, QuantisedCase, given
from cuda_graphs import data
from cuda_tools import HOPPER, OLDER, on_machine
from flash_cases import FlashCase
from matmul_cases import FIRST_SIZE, MORE, ONE, OUT, SPLIT, A, MatmulCase
from models import LLAMA, MLP, Llama, Mlp, build, llama_inputs, mlp_inputs
from native_check import capture
from nest_plain import as_words, into_memory
from ptx_machine import Memory, launch
from quantised import quantise
from torchair import ge
from torchair.codegen.cuda.attention import default_form
from torchair.codegen.cuda.gemv import gemv
from torchair.codegen.cuda.jit import Gpu, describe
from torchair.codegen.cuda.matmul import forms, matmul
from torchair.codegen.cuda.matmul.forms import MatmulForm
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.loops import Access, Expr, Nest, Store, const, load, op, reduce, simplify
from torchair.codegen.requests import Product
from torchair.codegen.sizes import SizeArgument
from torchair.engine.inspect.dry_run import dry_run
from torchair.engine.units.batches import warn_of_rows
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.graph import Graph, Node, Value
from torchair.operators import Trait, has_trait, infer

FEW = describe((9, 0), 3)
"""A GPU with three multiprocessors."""
MOST = 9


# ---- reductions, norms, softmax


@dataclass(frozen=True)
class RowsCase:
    """What is computed of the elements of each row of a batch."""

    kind: str  # sums, softmax or norm
    inner: tuple[int, ...]  # the dims of a row
    reduced: tuple[int, ...] = (-1,)  # those of them that are reduced
    dtype: str = "f32"
    pad: int = 0  # elements behind each row
    shift: int = 0  # bytes that the rows are moved by

    def __str__(self) -> str:
        more = f"+{self.pad}" * bool(self.pad) + f"@{self.shift}" * bool(self.shift)
        sizes = "x".join(map(str, self.inner))
        return f"{self.kind}-{sizes}-over{self.reduced}-{self.dtype}{more}"

    def nest(self, batch: int) -> Nest:
        """Word 0 are the rows, 1 sums, 2 what has as many elements as the rows."""
        rank, size = len(self.inner), math.prod(self.inner)
        along = tuple(math.prod(self.inner[k + 1 :]) for k in range(rank))
        reduced = frozenset(1 + k % rank for k in self.reduced)
        kept = [n for k, n in enumerate(self.inner, 1) if k not in reduced]
        far, sums = math.prod(kept), []
        for k in range(1, rank + 1):
            sums.append(0 if k in reduced else math.prod(kept[len([s for s in sums if s]) + 1 :]))
        x = load(Access(0, self.dtype, (size + self.pad, *along)))
        total, whole = FORMULAS[self.kind](x, math.prod(self.inner[k] for k in self.reduced))
        stores = [Store(Access(1, "f32", (far, *sums)), total)]
        if whole is not None:
            stores.append(Store(Access(2, self.dtype, (size, *along)), whole))
        return simplify(Nest((batch, *self.inner), tuple(stores), reduced))

    def run(
        self, rows: slice, gpu: Gpu = FEW, invariant: bool = True, counted: bool = False
    ) -> list[np.ndarray]:
        """Both results of some rows, as bits. The size of the batch may be a word."""
        size = math.prod(self.inner)
        pick = np.random.default_rng(7)
        all_ = pick.standard_normal((MOST, size + self.pad)).astype(np.float32)
        x = np.ascontiguousarray(into_memory(all_, self.dtype)[rows])
        batch = len(x)
        kept = size // math.prod(self.inner[k] for k in self.reduced)
        memory = [x, np.zeros(batch * kept, np.float32), np.zeros(batch * size, x.dtype)]
        nest, words = as_words(self.nest(batch), len(memory), lambda n: counted and n == batch)
        kernel, launch = print_nest(
            nest, gpu, scratch=len(memory) + len(words), batch_invariant=invariant
        )
        shifts = {0: self.shift}
        found = on_machine((kernel, launch, words), gpu, memory, shifts=shifts)
        return [np.ascontiguousarray(m.reshape(batch, -1)).view(np.uint8) for m in found[1:]]


def _softmax(x: Expr, count: int) -> tuple[Expr, Expr]:
    power = Expr("exp", "f32", (op("sub", x, reduce("max", x)),))
    total = reduce("sum", power)
    return total, op("div", power, total)


def _norm(x: Expr, count: int) -> tuple[Expr, Expr]:
    mean = op("mul", reduce("sum", x), const(1 / count, "f32"))
    far = op("sub", x, mean)
    variance = op("mul", reduce("sum", op("mul", far, far)), const(1 / count, "f32"))
    scale = Expr("rsqrt", "f32", (op("add", variance, const(1e-5, "f32")),))
    return variance, op("mul", far, scale)


FORMULAS: dict[str, Callable[[Expr, int], tuple[Expr, Expr | None]]] = {
    "sums": lambda x, count: (reduce("sum", op("mul", x, x)), None),
    "softmax": _softmax,
    "norm": _norm,
}
ROWS = [
    RowsCase("sums", (7,)),
    RowsCase("sums", (10_000,)),
    RowsCase("sums", (768,), dtype="bf16", shift=2),
    RowsCase("sums", (768,), pad=1),
    RowsCase("softmax", (100,)),
    RowsCase("softmax", (300,), pad=3),
    RowsCase("softmax", (2051,), dtype="bf16"),
    RowsCase("norm", (768,), dtype="bf16"),
    RowsCase("norm", (4096,), dtype="f16", pad=2),
    RowsCase("sums", (12, 40), (0,)),  # few terms, each thread alone
    RowsCase("sums", (100, 40), (0,), pad=1),
    RowsCase("norm", (70, 24), (0,), "bf16", shift=2),
    RowsCase("sums", (40, 3, 12), (0, 2)),
    RowsCase("sums", (200, 3, 48), (0, 2), pad=1),
    RowsCase("softmax", (16, 2, 600), (0, 2), "bf16", pad=1),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_sums_of_a_row_do_not_depend_on_the_batch(case: RowsCase) -> None:
    among = case.run(slice(MOST))
    assert among[0].any()
    for rows, gpu, counted in (
        (slice(1), FEW, False),
        (slice(8, 9), HOPPER, False),
        (slice(3, 5), FEW, True),
    ):
        for found, expected in zip(case.run(rows, gpu, True, counted), among, strict=True):
            np.testing.assert_array_equal(found, expected[rows], f"rows {rows}")


@pytest.mark.parametrize("case", [ROWS[1], ROWS[3]], ids=str)
def test_usual_sums_of_a_row_depend_on_the_batch(case: RowsCase) -> None:
    among = case.run(slice(MOST), invariant=False)[0]
    alone = [case.run(slice(k, k + 1), invariant=False)[0] for k in range(MOST)]
    assert not np.array_equal(among, np.concatenate(alone))


# ---- products


LINEAR = MatmulCase(64, 136, 200, ONE, "gelu", out="f32")
SAME = [
    MatmulForm(8, 1, 1, 4),
    MatmulForm(48, 1, 1, 3, lines=2),
    MatmulForm(64, 2, 1, 3, alternate=True),
    MatmulForm(64, 1, 2, 2),
    MatmulForm(128, 2, 1, 2),
    MatmulForm(256),
]
"""Forms without a split."""


def results_of(
    case: MatmulCase,
    rows: slice,
    form: MatmulForm | None = None,
    invariant: bool = True,
    counted: bool = False,
) -> np.ndarray:
    """Some rows of a product, in the form that the target chooses or in another one. Their number
    may be a word."""
    memory = case.work(HOPPER).memory
    for word in (A, OUT, MORE):
        memory[word] = np.ascontiguousarray(memory[word].reshape(case.m, -1)[rows])
    count = len(memory[A])
    product, m = case.product(), SizeArgument(FIRST_SIZE) if counted else count
    asked = Product(
        dataclasses.replace(product.matmul, m=m, batch_invariant=invariant),
        dataclasses.replace(product.epilogue, axes=(m, case.n)),
    )
    if form is None:
        generated = CudaTarget(0, HOPPER).generate(asked, "product")
        kernel, how = generated.kernel, generated.launch
    else:
        kernel, how = matmul(asked, HOPPER, form=form)
    assert how is not None
    there = Memory()
    addresses = [there.place(m) for m in memory]
    launch(kernel, how, HOPPER, there, [*addresses, count], 2 * how.cluster)
    return there.read(addresses[OUT], memory[OUT])


@pytest.mark.parametrize("epilogue", ["gelu", "residual"])
@pytest.mark.parametrize("turned", ["", "b"])
def test_products_of_a_row_do_not_depend_on_the_batch(epilogue: str, turned: str) -> None:
    case = dataclasses.replace(LINEAR, epilogue=epilogue, turned=turned)
    among, work = results_of(case, slice(case.m)), case.work(HOPPER)
    memory = list(work.memory)
    memory[OUT] = among
    work.check(memory)
    for first, count in ((0, 1), (9, 1), (2, 2), (60, 4), (5, 5), (0, 17)):
        rows = slice(first, first + count)
        found = results_of(case, rows, counted=count % 2 == 0)
        np.testing.assert_array_equal(found, among[rows], f"rows {rows}")


@pytest.mark.parametrize(
    "case",
    [
        ProductCase(4, 9, 520, "f32"),
        ProductCase(4, 6, 4096),
        QuantisedCase(4, 40, 512),
        QuantisedCase(4, 16, 4096, 4, 128, "bf16", "f32"),
    ],
    ids=str,
)
def test_up_to_four_rows_have_the_same_bits(case: ProductCase | QuantisedCase) -> None:
    """Where there are no tensor cores for any number of rows, and with integers."""
    among, usual = few_rows(case, slice(4)), few_rows(case, slice(4), invariant=False)
    differ = False
    for rows in (slice(1), slice(2, 4), slice(1, 4)):
        np.testing.assert_array_equal(few_rows(case, rows), among[rows], f"rows {rows}")
        differ |= not np.array_equal(few_rows(case, rows, invariant=False), usual[rows])
    assert differ, "the usual kernels follow from the number of rows"


def few_rows(case: ProductCase | QuantisedCase, rows: slice, invariant: bool = True) -> np.ndarray:
    """Some rows of a GEMV, unrounded."""
    memory, integers = list(case.work(HOPPER).memory), isinstance(case, QuantisedCase)
    out, more = (Q_OUT, Q_MORE) if integers else (OUT, G_MORE)
    memory[A] = np.ascontiguousarray(memory[A][rows])
    count = len(memory[A])
    memory[out] = np.zeros((count, case.n), np.float32)
    memory[more] = np.ascontiguousarray(memory[more][rows])
    own = dataclasses.replace(case, m=count).matmul
    nest = Nest((count, case.n), (Store(Access(out, "f32", (case.n, 1)), given(0)),))
    request = Product(dataclasses.replace(own, batch_invariant=invariant), nest)
    kernel, how = gemv(request, HOPPER)
    there = Memory()
    addresses = [there.place(m) for m in memory]
    launch(kernel, how, HOPPER, there, [*addresses, case.n], 2)
    return there.read(addresses[out], memory[out])


@pytest.mark.parametrize("form", SAME, ids=str)
def test_forms_without_a_split_give_the_same_bits(form: MatmulForm) -> None:
    rows = slice(3, 6)
    expected = results_of(LINEAR, slice(LINEAR.m))[rows]
    np.testing.assert_array_equal(results_of(LINEAR, rows, form), expected)


def test_usual_products_of_a_row_depend_on_the_batch() -> None:
    """Few rows are a GEMV, and few tiles may be split."""
    among = results_of(LINEAR, slice(LINEAR.m), invariant=False)
    assert not np.array_equal(results_of(LINEAR, slice(2), invariant=False), among[:2])
    assert not np.array_equal(results_of(LINEAR, slice(LINEAR.m), SPLIT), among)


SIZES = [(1, 8, 8), (1, 4096, 4096), (8, 1024, 4096), (64, 14336, 4096), (4096, 4096, 14336)]


@pytest.mark.parametrize("turned", ["", "b"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_invariant_forms_have_no_split_and_no_choices(
    sizes: tuple[int, int, int], turned: str
) -> None:
    product = MatmulCase(*sizes, ONE, turned=turned).product()
    asked = dataclasses.replace(
        product, matmul=dataclasses.replace(product.matmul, batch_invariant=True)
    )
    (form,) = forms(asked, HOPPER)
    assert form.split == 1 and form.is_sound() and not (turned and form.columns % 64)
    assert not CudaTarget(0, HOPPER).choices(asked)
    if not turned:
        assert CudaTarget(0, HOPPER).choices(product)
    busy = -(-sizes[0] // form.rows) * -(-sizes[1] // form.columns)
    assert turned or busy > HOPPER.multiprocessors // 2 or sizes[1] == 8


# ---- attention


@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize("length", [1, 3, 70])
def test_attention_does_not_depend_on_the_batch(length: int, mask: str | None) -> None:
    small = length <= 4
    case = (AttentionCase if small else FlashCase)(4, 2, length, 300, 64, mask=mask, batch=3)
    among = attended(case, slice(3))
    for rows in (slice(1), slice(2, 3), slice(1, 3)):
        found = attended(case, rows, counted=rows.stop == 3)
        np.testing.assert_array_equal(found, among[rows], f"rows {rows}")


def attended(
    case: AttentionCase,
    rows: slice,
    gpu: Gpu = HOPPER,
    invariant: bool = True,
    counted: bool = False,
) -> np.ndarray:
    """The outputs of some members of a batch, whose size may be a word."""
    work = case.work(gpu)
    memory = [m[rows] for m in work.memory]
    batch = SizeArgument(len(memory)) if counted else len(memory[0])
    request = dataclasses.replace(case.request, batch=batch, batch_invariant=invariant)
    generated = CudaTarget(0, gpu).generate(request, "attention")
    assert generated.launch is not None
    there = Memory()
    addresses = [there.place(np.ascontiguousarray(m)) for m in memory]
    words = [*addresses, len(memory[0])]
    launch(generated.kernel, generated.launch, gpu, there, words)
    return there.read(addresses[4], memory[4])


def test_usual_attention_depends_on_the_batch() -> None:
    case = AttentionCase(2, 2, 1, 600, 64, "f32", batch=70)
    request = case.request
    one = dataclasses.replace(request, batch=1)
    assert default_form(one, HOPPER) != default_form(request, HOPPER)
    forms_ = [
        default_form(dataclasses.replace(r, batch_invariant=True), HOPPER) for r in (one, request)
    ]
    assert forms_[0] == forms_[1] == default_form(one, HOPPER)
    case = dataclasses.replace(case, batch=3)
    among = attended(case, slice(3), FEW, invariant=False)
    assert not np.array_equal(attended(case, slice(1), FEW, invariant=False), among[:1])
    among = attended(case, slice(3), FEW)
    assert np.array_equal(attended(case, slice(1), FEW), among[:1])


# ---- whole graphs


def graph_of(name: str, batch: int) -> tuple[Graph, dict[Value, torch.Tensor], dict[int, int]]:
    """A model's graph as if it were on a GPU, its frozen values, and which inputs it updates."""
    config = dataclasses.replace(LLAMA["tiny grouped"], head_dim=64, dim=256, ffn=512)
    kinds = {"mlp": (Mlp, MLP["16 layers"]), "llama": (Llama, config)}
    model = build(*kinds[name.split()[-1]]).to(torch.bfloat16)
    if name.startswith("quantised"):
        quantise(model, bits=4, group=128)
    is_mlp = name == "mlp"
    inputs = mlp_inputs(MLP["16 layers"], batch) if is_mlp else llama_inputs(config, batch, start=3)
    given = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs]
    torch._dynamo.reset()
    with capture() as found, torch.no_grad():
        torch.compile(model, backend="torchair")(*given)
    session = found[0].session
    for node in session.graph.nodes:
        for value in node.outputs:
            value.device_type = "NPU"
    return session.graph, session.current.units.frozen, session.loaded.state.assigned


@pytest.mark.parametrize("name", ("mlp", "llama"))
def test_products_of_a_model_have_one_kernel_for_all_batches(name: str) -> None:
    orders = {}
    for batch in (1, 16):
        graph, frozen, assigned = graph_of(name, batch)
        made = dry_run(graph, HOPPER, assigned, frozen, batch_invariant=True)
        assert not [s for s in made.plan.steps if s.native is None and s.kind != "view"]
        jobs = [job for bundle in made.launches for job in bundle]
        assert all(len(job.steps) == 1 for job in jobs)
        requests = [job.order.request for job in jobs]
        assert all(r.matmul.batch_invariant for r in requests if isinstance(r, Product))
        assert all(j.launch.shared for j in jobs if isinstance(j.order.request, Product))
        orders[batch] = [job.order.label for job in jobs]
        units = NativeUnits(graph, CudaTarget(0, HOPPER), frozen, batch_invariant=True)
        assert not units.following_rows() and not [n for n in units.fusion.alone if has_sums(n)]
        print(
            name, batch, len(made.launches), len(dry_run(graph, HOPPER, assigned, frozen).launches)
        )
    assert sorted(orders[1]) == sorted(orders[16])


def has_sums(node: Node) -> bool:
    return has_trait(node, Trait.CONTRACTION | Trait.REDUCTION)


@pytest.mark.parametrize(
    ("name", "gpu", "type_"),
    [("quantised llama", HOPPER, "WeightQuantBatchMatmulV2"), ("llama", OLDER, "MatMul")],
)
def test_products_whose_kernel_follows_from_their_rows_are_named(
    name: str, gpu: Gpu, type_: str
) -> None:
    graph, frozen, _ = graph_of(name, 1)
    units = NativeUnits(graph, CudaTarget(0, gpu), frozen, batch_invariant=True)
    assert type_ in {n.type for n in units.following_rows()}
    with pytest.warns(UserWarning, match=f"another kernel of .*{type_} for more"):
        warn_of_rows(units.following_rows())


def test_a_product_that_turns_out_to_be_the_library_s_is_named() -> None:
    """Its rows are not evenly spaced in memory, which only its strides say."""
    with Graph("g", infer) as graph:
        turned = ge.Transpose(data(0, 4, 3, 64), [1, 0, 2])
        ge.NetOutput([ge.MatMulV2(turned, data(1, 72, 64), transpose_x2=True)])
    with pytest.warns(UserWarning, match="torch's kernels compute MatMulV2"):
        dry_run(graph, HOPPER, batch_invariant=True)
