"""An NVIDIA GPU as a target: its generators, what they decline, rates, which forms of a kernel may
be chosen by measuring, and how plans are launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from torchair.codegen import philox, target
from torchair.codegen.cuda import flash
from torchair.codegen.cuda import matmul as tensor_cores
from torchair.codegen.cuda.attention import attention
from torchair.codegen.cuda.attention import forms as forms_of_attention
from torchair.codegen.cuda.driver import GpuLibrary, available, library
from torchair.codegen.cuda.gemv import forms, gemv
from torchair.codegen.cuda.generators import drawing_threads
from torchair.codegen.cuda.jit import Entry, Gpu, foreign, ptx
from torchair.codegen.cuda.jobs import launches_of
from torchair.codegen.cuda.nest import NestShape, print_nest, shapes
from torchair.codegen.cuda.run import Launches, SharedLaunches, entry_alone, entry_of
from torchair.codegen.cuda.super_kernel import SuperKernel
from torchair.codegen.cuda.tiles import B, packs_of
from torchair.codegen.cuda.trial import GpuTrial, Replay
from torchair.codegen.llvm import binding
from torchair.codegen.program import (
    ApartStep,
    Memory,
    PersistentKernel,
    PlanFamily,
    SizedPart,
    Subject,
    TargetPlan,
    TargetStep,
)
from torchair.codegen.requests import Attention, Joint, Loops, MatMul, Product, Request

TYPES = ("f32", "bf16", "f16")
WIDEST_HEAD = 256  # features of a head of attention
FEW = 4
"""Rows of a product, or queries of attention, that kernels of our own are for. More are served by
torch's libraries, with our kernels around them."""


class CudaTarget:
    """One GPU."""

    channels_last = False
    piecewise = False
    resizes = False
    quantised = FEW
    library_channels_last = True
    splits_lists = True
    splits_batch_norms = True
    outer_batches = False
    splits_group_norms = False
    overlaps = True
    shares_sums = True
    enters = False
    replays = True
    reach = 128 << 20

    def __init__(self, index: int, machine: Gpu | None = None) -> None:
        """With a `machine` kernels are generated for that one, which need not be here."""
        self.index = index
        self.name = f"cuda:{index}"
        self._own = None if machine is None else GpuLibrary(index, machine)
        self._joints: dict[Any, Joint | None] = {}
        self._orders: dict[tuple[Any, target.KernelConfig], target.KernelOrder | None] = {}

    @property
    def drawing_threads(self) -> int:
        """Of a GPU that is here only if its torch draws as expected, which is tried once."""
        if self._own is not None:
            machine = self._own.machine
            return machine.threads // philox.BLOCK * philox.BLOCK * machine.multiprocessors
        return drawing_threads(self.index)

    @property
    def library(self) -> GpuLibrary:
        """The kernels of this GPU."""
        return self._own or library(self.index)

    @property
    def _machine(self) -> Gpu:
        return self.library.machine

    @property
    def processor(self) -> str:
        """The GPU and its driver, which makes the machine code; one that is not here is known by
        its architecture."""
        if self._own is not None:
            return f"cuda {self._own.machine.name}"
        return f"{self.library.device}, driver {self.library.driver}"

    def available(self) -> str | None:
        """The driver, a device or LLVM may be missing; a package may bring what LLVM would make."""
        missing = available()
        if missing is not None:
            return missing
        try:
            binding()
        except ImportError as e:
            return None if self.library.provided else str(e)
        return None

    def declines(self, anchor: target.Anchor) -> str | None:
        """Why there is no generator for an operator."""
        if anchor.kind not in ("matmul", "attention") or anchor.dtype not in TYPES:
            return "torch's libraries serve it"
        if anchor.kind == "matmul" and anchor.batch_invariant and self.keeps_rows(anchor):
            return None
        if anchor.rows is None or not 1 <= anchor.rows <= FEW:
            if anchor.kind == "matmul":
                return tensor_cores.declines(anchor, self._machine)
            return flash.declines(anchor, self._machine)
        if anchor.quantised:
            return None if anchor.constant else "its quantised weights may change"
        if anchor.kind == "matmul":
            return None if anchor.along else "its matrix is not stored along the sum"
        wide = anchor.width is None or anchor.width > WIDEST_HEAD or anchor.width % 8
        return "its heads are too wide" if wide else None

    def keeps_rows(self, anchor: target.Anchor) -> bool:
        """Products on tensor cores add up along k step by step, those of few rows and those of
        integers by their number of rows."""
        if anchor.kind != "matmul":
            return True
        return not tensor_cores.declines(replace(anchor, batch_invariant=True), self._machine)

    def choices(self, request: Request) -> target.Choices:
        """The form of a product or an attention, and the pieces of a nest; none where sums must
        not depend on them."""
        if _is_invariant(request):
            return {}
        if isinstance(request, Loops):
            return shapes(request.nest)
        forms = self._forms(request)
        return {"form": list(forms)} if len(forms) > 1 else {}

    def _forms(self, request: Request) -> dict[str, Any]:
        """Forms of a kernel by their texts, the usual first."""
        machine = self._machine
        if isinstance(request, Product) and self._is_wide(request):
            return {str(form): form for form in tensor_cores.forms(request, machine)}
        if isinstance(request, Product | Joint):
            return {str(form): form for form in forms(request, machine)}
        if isinstance(request, Attention) and _has_many_queries(request):
            return {str(form): form for form in flash.forms(request)}
        if isinstance(request, Attention):
            return {str(form): form for form in forms_of_attention(request, machine)}
        return {}

    def generate(
        self, request: Request, label: str, config: target.KernelConfig = target.DEFAULT_CONFIG
    ) -> target.Generated:
        """The kernel of a request."""
        machine, word = self._machine, config.choice("form")
        form = self._forms(request)[word] if word else None
        if isinstance(request, Loops):
            shape = NestShape(config.integer("lanes", 0), config.integer("threads", 0))
            kernel, launch = print_nest(
                request.nest,
                machine,
                label,
                shape=shape,
                early=True,
                scratch=request.scratch,
                batch_invariant=request.batch_invariant,
            )
        elif isinstance(request, Product) and self._is_wide(request):
            kernel, launch = tensor_cores.matmul(request, machine, label, form, early=True)
        elif isinstance(request, Joint) and self._is_wide(request.product):
            raise target.Declined("a product on tensor cores is computed alone")
        elif isinstance(request, Product | Joint):
            kernel, launch = gemv(request, machine, label, form, early=True)
        elif isinstance(request, Attention) and _has_many_queries(request):
            kernel, launch = flash.flash(request, machine, label, form, early=True)
        elif isinstance(request, Attention):
            kernel, launch = attention(request, machine, label, form=form, early=True)
        else:
            raise target.Declined(f"no GPU kernel for {type(request).__name__}")
        unknown = foreign([kernel])
        if unknown:
            raise target.Declined(f"no GPU has the functions {', '.join(sorted(unknown))}")
        return target.Generated(kernel, launch.scratch, _packs(request), launch)

    def _is_wide(self, request: Product) -> bool:
        """Whether a product has more rows than a GEMV is for, or may have."""
        matmul = request.matmul
        if matmul.batch_invariant and tensor_cores.serves_any_rows(matmul, self._machine):
            return True
        few = isinstance(matmul.m, int) and matmul.m <= FEW and matmul.batch == 1
        return not few and matmul.weight is None

    def joined(
        self,
        key: Any,
        make: Callable[[], Joint | None],
        label: str,
        config_of: Callable[[Joint], target.KernelConfig],
    ) -> target.KernelOrder | None:
        """A kernel for several requests at once, made once for requests like these; None if there
        is none."""
        if key not in self._joints:
            self._joints[key] = make()
        request = self._joints[key]
        if request is None:
            return None
        config = config_of(request)
        if (key, config) not in self._orders:
            order = target.KernelOrder(self, request, label)
            order.config = config
            self._orders[key, config] = order if _is_served(order) else None
        return self._orders[key, config]

    # ---- running ----

    def schedule(self, plan: TargetPlan) -> Sequence[Sequence[TargetStep]]:
        """Join kernels, and choose which stand side by side in a launch."""
        return [
            [part[k] for job in bundle for k in job.steps]
            for part in plan.native_parts
            for bundle in self._shared(part, plan).groups
        ]

    def _shared(self, steps: Sequence[TargetStep], plan: TargetPlan) -> SharedLaunches:
        """The launches of a part; of one that was not scheduled now."""
        key = ("launches", *(id(s.code.operands) for s in steps))
        if key not in plan.layouts:
            plan.layouts[key] = SharedLaunches(steps, plan, self.joined, self._part)
        return plan.layouts[key]

    def _part(self, order: target.KernelOrder) -> target.Generated:
        """What an order asks for as a part of a persistent kernel."""
        machine = replace(self._machine, persistent=True)
        return CudaTarget(self.index, machine).generate(order.request, order.label, order.config)

    def entries(self, plan: TargetPlan) -> list[Entry]:
        """What the launches of a plan run."""
        machine = self._machine
        units = [
            u for part in plan.native_parts for u in self._shared(part, plan).units(plan, machine)
        ]
        return [u.entry if isinstance(u, SuperKernel) else entry_of(u, machine) for u in units]

    def persistent(self, plan: TargetPlan) -> tuple[list[PersistentKernel], list[ApartStep]]:
        """Those of all parts."""
        kernels: list[PersistentKernel] = []
        apart: list[ApartStep] = []
        for part in plan.native_parts:
            shared = self._shared(part, plan)
            units = shared.units(plan, self._machine)
            kernels += [u.told(part) for u in units if isinstance(u, SuperKernel)]
            apart += shared.apart
        return kernels, apart

    def build(self, plan: Any) -> None:
        """Machine code of all launches."""
        for part in plan.native_parts:
            self._shared(part, plan).built(self.library, plan)

    def bind(
        self, steps: Sequence[TargetStep], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> Launches:
        """Steps as launches; for a part of a plan that is built nothing is compiled."""
        return Launches(steps, memory, self._shared(steps, memory.plan), self.library)

    def bind_sized(
        self,
        family: PlanFamily,
        threads: int,
        last: Sequence[int],
        scratch: Callable[[int], torch.Tensor] | None,
    ) -> SizedPart:
        """A plan of a GPU is for one set of sizes."""
        raise NotImplementedError("a GPU does not resize programs")

    # ---- measuring ----

    def threads(self, work: float) -> int:
        """A kernel has as many as it wants."""
        return 0

    def subjects(self, plan: TargetPlan) -> list[Subject]:
        """The kernels of all launches."""
        return [
            Subject(job.order, [steps[k] for k in job.steps], len(bundle) > 1)
            for steps, part in launches_of(plan, self.joined)
            for bundle in part
            for job in bundle
        ]

    def copied(self, tensor: torch.Tensor, packed: bool = False) -> torch.Tensor:
        """A copy on the device."""
        return tensor.clone()

    def trial(
        self,
        made: target.Generated,
        words: Sequence[Mapping[int, int]],
        steps: int,
        threads: int,
        keep: Any,
    ) -> GpuTrial:
        """Launches of one kernel."""
        return GpuTrial(made, words, self.library, keep)

    def recorded(self, run: Callable[[], object], keep: Any) -> Replay:
        """A graph of the device."""
        return Replay(run, torch.device("cuda", self.index), keep)

    def compile_alone(self, made: Sequence[target.Generated]) -> None:
        """Machine code of kernels that stand alone in a launch, several at a time."""
        entries = {m.kernel.entry: entry_alone(m) for m in made}
        errors = self.library.add(list(entries.values()))
        broken = {k: errors[e.name] for k, e in entries.items() if e.name in errors}
        if broken:
            raise target.BrokenKernels(broken)

    def machine_text(self, generated: target.Generated) -> str:
        """PTX of a launch of this kernel alone."""
        return ptx([entry_alone(generated)], self.library.machine)

    @property
    def seconds(self) -> float:
        """Time spent in compiling so far."""
        return self.library.seconds

    def work(self, moved: int, points: int, flops: float) -> float:
        """Microseconds of the whole device."""
        return 2.0 + moved / 3e6


def _packs(request: Request) -> Mapping[int, target.Pack]:
    """How the constants of a product, and those of its partner, are to be laid out."""
    if isinstance(request, Joint):
        own, partner = packs_of(request.product.matmul), request.partner
        return own if partner is None else {**own, **{w - B + partner.word: own[w] for w in own}}
    return packs_of(request.matmul) if isinstance(request, Product) else {}


def _is_invariant(request: Request) -> bool:
    """Whether no bit of its results may depend on the batch."""
    if isinstance(request, Joint):
        request = request.product
    asks = request.matmul if isinstance(request, Product) else request
    return isinstance(asks, Loops | MatMul | Attention) and asks.batch_invariant


def _has_many_queries(request: Attention) -> bool:
    """Whether an attention has more queries than share the keys in registers."""
    return not isinstance(request.length, int) or request.length > FEW


def _is_served(order: target.KernelOrder) -> bool:
    try:
        return order.generated.launch is not None
    except target.Declined:
        return False


@cache
def cuda(index: int) -> CudaTarget:
    """The target of a GPU of this process."""
    return CudaTarget(index)
