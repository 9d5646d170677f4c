"""Rows of a batch on a GPU, some of them computed alone: kernels whose results must not depend on
the others. They run on the machine of numpy, or on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import cuda_tools
import ptx_machine
from cuda_cases import MORE as GEMV_MORE
from cuda_cases import Q_MORE, Q_OUT, AttentionCase, ProductCase, QuantisedCase, given
from cuda_tools import HOPPER
from matmul_cases import FIRST_SIZE, MORE, ONE, OUT, A, MatmulCase
from nest_plain import as_words, into_memory
from torchair.codegen.cuda.gemv import gemv
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.matmul import matmul
from torchair.codegen.cuda.matmul.forms import MatmulForm
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.loops import Access, Expr, Nest, Store, const, load, op, reduce, simplify
from torchair.codegen.requests import Product, Request
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Kernel, Launch

MOST = 9
"""Rows of a batch of nests."""
Run = Callable[
    [Kernel, Launch, Sequence[np.ndarray], Sequence[int], Mapping[int, int]], list[np.ndarray]
]
"""Runs a kernel on memory, given the words behind the addresses, and by how many bytes operands are
moved: what it leaves."""


def on_numpy(
    kernel: Kernel,
    launch: Launch,
    memory: Sequence[np.ndarray],
    words: Sequence[int] = (),
    shifts: Mapping[int, int] | None = None,
    gpu: Gpu = HOPPER,
    blocks: int | None = None,
) -> list[np.ndarray]:
    """Run on the machine of numpy, in so many clusters of blocks."""
    there = ptx_machine.Memory(1 << 24)
    addresses = [there.place(m, (shifts or {}).get(k, 0)) for k, m in enumerate(memory)]
    room = there.place(np.zeros(max(1, launch.scratch), np.uint8))
    given_ = [*addresses, *words, room]
    count = blocks and blocks * launch.cluster
    ptx_machine.launch(kernel, launch, gpu, there, given_, count)
    return [there.read(a, m) for a, m in zip(addresses, memory, strict=True)]


def on_gpu(
    kernel: Kernel,
    launch: Launch,
    memory: Sequence[np.ndarray],
    words: Sequence[int] = (),
    shifts: Mapping[int, int] | None = None,
) -> list[np.ndarray]:
    """Run on the GPU."""
    tensors = []
    for k, m in enumerate(memory):
        far = (shifts or {}).get(k, 0)
        area = torch.empty(m.nbytes + far, dtype=torch.uint8, device="cuda")
        tensors.append(area[far:])
        tensors[-1].copy_(torch.from_numpy(np.ascontiguousarray(m).view(np.uint8).reshape(-1)))
    cuda_tools.run(kernel, launch, tensors, words)
    found = [t.cpu().numpy() for t in tensors]
    return [x.view(m.dtype).reshape(m.shape) for x, m in zip(found, memory, strict=True)]


IN_TWO: Run = partial(on_numpy, blocks=2)
"""In fewer blocks than there are tiles."""


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
        self,
        rows: slice,
        gpu: Gpu,
        run: Run,
        invariant: bool = True,
        counted: Collection[int] = (),
    ) -> list[np.ndarray]:
        """Both results of some rows, as bits. Sizes that are `counted` are words."""
        size = math.prod(self.inner)
        pick = np.random.default_rng(7)
        all_ = pick.standard_normal((MOST, size + self.pad)).astype(np.float32)
        x = np.ascontiguousarray(into_memory(all_, self.dtype)[rows])
        batch = len(x)
        kept = size // math.prod(self.inner[k] for k in self.reduced)
        memory = [x, np.zeros(batch * kept, np.float32), np.zeros(batch * size, x.dtype)]
        nest, words = as_words(self.nest(batch), len(memory), lambda n: n in counted)
        kernel, launch = print_nest(
            nest, gpu, scratch=len(memory) + len(words), batch_invariant=invariant
        )
        found = run(kernel, launch, memory, words, {0: self.shift})
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
    run: Run = IN_TWO,
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
    made = generated(asked) if form is None else matmul(asked, HOPPER, form=form)
    return run(*made, memory, [count], {})[OUT]


def generated(request: Request, gpu: Gpu = HOPPER) -> tuple[Kernel, Launch]:
    """What a target makes of a request."""
    made = CudaTarget(0, gpu).generate(request, "kernel")
    assert made.launch is not None
    return made.kernel, made.launch


def few_rows(case: ProductCase | QuantisedCase, rows: slice, invariant: bool = True) -> np.ndarray:
    """Some rows of a GEMV, unrounded."""
    memory, integers = list(case.work(HOPPER).memory), isinstance(case, QuantisedCase)
    out, more = (Q_OUT, Q_MORE) if integers else (OUT, GEMV_MORE)
    memory[A] = np.ascontiguousarray(memory[A][rows])
    count = len(memory[A])
    memory[out] = np.zeros((count, case.n), np.float32)
    memory[more] = np.ascontiguousarray(memory[more][rows])
    own = dataclasses.replace(case, m=count).matmul
    nest = Nest((count, case.n), (Store(Access(out, "f32", (case.n, 1)), given(0)),))
    request = Product(dataclasses.replace(own, batch_invariant=invariant), nest)
    return on_numpy(*gemv(request, HOPPER), memory, [case.n], blocks=2)[out]


# ---- attention


def attended(
    case: AttentionCase,
    rows: slice,
    run: Run = on_numpy,
    gpu: Gpu = HOPPER,
    invariant: bool = True,
    counted: bool = False,
) -> list[np.ndarray]:
    """Outputs and logarithms of sums of some members of a batch, whose size may be a word."""
    memory = [np.ascontiguousarray(m[rows]) for m in case.work(HOPPER).memory]
    batch = SizeArgument(len(memory)) if counted else len(memory[0])
    request = dataclasses.replace(case.request, batch=batch, batch_invariant=invariant)
    return run(*generated(request, gpu), memory, [len(memory[0])], {})[4:]
