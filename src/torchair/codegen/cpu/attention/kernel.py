"""Fused attention: softmax(scale * q kᵀ + mask) v without the matrix of scores in memory."""

from __future__ import annotations

from torchair.codegen.cpu.attention.decode import Decode, decode_areas
from torchair.codegen.cpu.attention.prefill import Prefill
from torchair.codegen.cpu.attention.spec import FEW_ROWS, Sizes, dots_bf16
from torchair.codegen.cpu.attention.tile import prefill_areas
from torchair.codegen.kernel import Generated
from torchair.codegen.requests import Attention
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.ways import AS_EVER, Choices, Way

KEYS = ("64", "32", "128", "256")
"""Keys of a block of prefill."""


def attention(
    spec: Attention, machine: Machine, label: str = "attention", way: Way = AS_EVER
) -> Generated:
    """The kernel of a spec. There is a form for few queries and one for many; if the number of
    queries is given at run time, the kernel has both."""
    w = KernelWriter(machine)
    few, many = _forms(spec)
    if form := way.word("form"):
        few, many = form == "decode", form == "prefill"
    decode = decode_areas(spec, machine).bytes if few else 0
    per_thread = max(decode, prefill_areas(spec, machine, way).bytes if many else 0)
    if few and many:
        _both(w, spec, per_thread)
    elif few:
        Decode(w, spec, per_thread, w).write()
    else:
        Prefill(w, spec, per_thread, w, way).write()
    return Generated(w.kernel(label), per_thread)


def choices(spec: Attention, machine: Machine) -> Choices:
    """The form, where few query rows leave a choice, and the blocks of prefill. Nothing for sizes
    that vary."""
    if not spec.rows or not isinstance(spec.span, int) or not isinstance(spec.batch, int):
        return {}
    few = spec.rows <= FEW_ROWS
    if few and dots_bf16(spec, machine):
        return {}  # prefill rounds more
    most = 4 if machine.registers >= 32 else 3
    lines = -(-spec.rows // machine.lanes)
    queries = tuple(str(n) for n in range(min(most, lines), 0, -1))
    forms = {"form": ("decode", "prefill")} if few else {}
    return {**forms, "queries": queries, "keys": KEYS}


def _forms(spec: Attention) -> tuple[bool, bool]:
    """Whether a kernel of this spec may meet few, and many, query rows."""
    if spec.rows is not None:
        return spec.rows <= FEW_ROWS, spec.rows > FEW_ROWS
    return (spec.group or 1) <= FEW_ROWS, True


def _both(w: KernelWriter, spec: Attention, per_thread: int) -> None:
    """Both forms as functions, and the choice between them."""
    few = w(f"icmp sle i64 {Sizes(w, spec).rows}, {FEW_ROWS}")
    many = w(f"xor i1 {few}, true")
    forms: list[tuple[str, str, type[Decode] | type[Prefill]]]
    forms = [("few", few, Decode), ("many", many, Prefill)]
    for name, condition, form in forms:
        part = KernelWriter(w.machine)
        form(part, spec, per_thread, w).write()
        w.declared.update(part.declared)
        signature = f"void @ENTRY.{name}(i64 %tid, i64 %nt, ptr noalias %words)"
        w.helper(name, part.text(f"internal {signature}"))
        with w.when(condition):
            w.do(f"call {signature}")
