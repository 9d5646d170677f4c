"""Writing LLVM IR as text: instructions, loops, conditions, the frame of a kernel, and values in
registers.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchair.codegen.sizes import Element, Size, SizeArgument
from torchair.codegen.target import Kernel


@dataclass(frozen=True)
class Machine:
    """A processor. `bits` is the width of a vector register that generators should use."""

    name: str  # as LLVM knows it
    features: str
    bits: int = 128
    registers: int = 16  # vector registers
    dot_bf16: bool = False  # pairs of bf16 multiplied and added in float32 (AVX-512 BF16, BFDOT)
    dot_i8: bool = False  # four bytes multiplied and added in int32 (AVX-512 VNNI, SDOT)
    fma: bool = False
    arch: str = "x86_64"
    amx_bf16: bool = False  # tile registers that multiply bfloat16
    amx_i8: bool = False  # and bytes
    mmla_bf16: bool = False  # matrices of 2 x 4 bfloat16 multiplied (ARM's BFMMLA)
    mmla_i8: bool = False  # of 2 x 8 bytes (SMMLA)

    @property
    def lanes(self) -> int:
        """Float32 elements in a vector."""
        return self.bits // 32

    @property
    def narrower(self) -> tuple[str, ...]:
        """Widths of shorter vectors that may be as fast."""
        return tuple(str(bits) for bits in (256, 128) if 2 * bits == self.bits)

    @property
    def shifts_bytes(self) -> bool:
        """Whether the instruction for bytes wants its first factor without a sign."""
        return self.dot_i8 and self.arch == "x86_64"

    @property
    def has_bf16(self) -> bool:
        """Whether conversions to bfloat16 are instructions that our text may ask for."""
        return False


IndexText = str | int
"""An i64: a number, or its value in a text."""
_FOLDED: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "udiv": operator.floordiv,
    "urem": operator.mod,
}

SHORT_NAMES = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}
"""How intrinsics name types of floats."""

REASSOCIATE = "reassoc nsz contract"
"""Flags for sums whose order is free: products and reductions. Never nnan or ninf."""


def f32(x: float) -> str:
    """A float32 literal."""
    try:
        (x,) = struct.unpack("f", struct.pack("f", x))
    except OverflowError:
        x = float("inf") if x > 0 else float("-inf")
    return f64(x)


def f64(x: float) -> str:
    """A float64 literal; LLVM writes float32 ones the same way."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"


@dataclass
class Loop:
    """A counted loop while its body is written. Set `next` to the values carried to the next
    round; after the loop `results` are the last ones."""

    index: str
    carried: list[str]
    next: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        """The carried values when the loop has ended."""
        return self.carried


class Writer:
    """The text of one function. A value is a string: an SSA name or a literal.

    `w("add i64 %a, 1")` writes an instruction and returns the name of its result; `w.do(...)`
    writes one without result. Addresses in `entry` are computed before everything else.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lanes = machine.lanes
        self.sums = REASSOCIATE  # flags of sums, none where their order is not free
        self.declared: dict[str, str] = {}
        self.block = "start"  # label of the block being written
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._known: dict[str, str] = {}

    # ---- instructions ----

    def name(self, prefix: str = "v") -> str:
        """A fresh name, without its sign."""
        self._count += 1
        return f"{prefix}{self._count}"

    def __call__(self, text: str) -> str:
        name = f"%{self.name()}"
        self._lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """An instruction without result."""
        self._lines.append(f"  {text}")

    def entry(self, text: str) -> str:
        """An instruction of the entry block, written once however often it is asked for."""
        if text not in self._known:
            name = self._known[text] = f"%{self.name('e')}"
            self._entry.append(f"  {name} = {text}")
        return self._known[text]

    def scratch(self, bytes_: int) -> str:
        """Memory of this thread for the time of the call; for at most some 100 KiB."""
        name = f"%{self.name('s')}"
        self._entry.append(f"  {name} = alloca [{bytes_} x i8], align 64")
        return name

    def call(self, result: str, function: str, *args: tuple[str, str], flags: str = "") -> str:
        """Call a function, declaring it: `w.call("float", "llvm.sqrt.f32", ("float", x))`. A call
        may have fast-math flags."""
        types, given = (", ".join(x) for x in ([t for t, _ in args], [f"{t} {a}" for t, a in args]))
        self.declared[function] = f"declare {result} @{function}({types})"
        text = f"call {flags}{' ' if flags else ''}{result} @{function}({given})"
        if result != "void":
            return self(text)
        self.do(text)
        return ""

    def fused(self, a: str, b: str, c: str, element: str = "float") -> str:
        """a * b + c on vectors, with one rounding where the processor can."""
        t, name = self.vector(element), f"llvm.fmuladd.v{self.lanes}{SHORT_NAMES[element]}"
        return self.call(t, name, (t, a), (t, b), (t, c), flags=REASSOCIATE)

    def dot_pairs(self, a: str, b: str, total: str) -> str:
        """A total and the products of the two bf16 of each lane; for machines with `dot_bf16`."""
        t, pairs = self.vector("float"), f"<{2 * self.lanes} x bfloat>"
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        if self.machine.arch == "aarch64":
            name = f"llvm.aarch64.neon.bfdot.v{self.lanes}f32.v{2 * self.lanes}bf16"
        return self.call(t, name, (t, total), (pairs, a), (pairs, b))

    def prefetch(self, at: str, often: int = 2) -> None:
        """Bring memory that will be read into the cache, the nearer the more often: up to 3."""
        how = ("i32", "0"), ("i32", str(often)), ("i32", "1")
        self.call("void", "llvm.prefetch.p0", ("ptr", at), *how)

    def clear(self, at: str, bytes_: IndexText) -> None:
        """Fill memory with zeros."""
        how = ("i8", "0"), ("i64", str(bytes_)), ("i1", "false")
        self.call("void", "llvm.memset.p0.i64", ("ptr", at), *how)

    def vector(self, element: str) -> str:
        """The vector type of this machine for an element: as many as float32 fit a register."""
        return f"<{self.lanes} x {element}>"

    def splat(self, element: str, value: str, lanes: int | None = None) -> str:
        """A vector of equal elements."""
        n = self.lanes if lanes is None else lanes
        if not value.startswith("%"):
            return f"splat ({element} {value})"
        vt = f"<{n} x {element}>"
        first = self(f"insertelement {vt} poison, {element} {value}, i64 0")
        return self(f"shufflevector {vt} {first}, {vt} poison, <{n} x i32> zeroinitializer")

    def offset(self, pointer: str, element: str, index: IndexText) -> str:
        """The address `index` elements further."""
        if str(index) == "0":
            return pointer
        return self(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    # ---- integers: folded while they are literals ----

    def _integer(self, name: str, a: str, b: str) -> str:
        if a[0] != "%" and b[0] != "%":
            return str(_FOLDED[name](int(a), int(b)))
        return self(f"{name} i64 {a}, {b}")

    def add(self, a: IndexText, b: IndexText) -> str:
        """a + b over i64."""
        a, b = str(a), str(b)
        if a == "0" or b == "0":
            return b if a == "0" else a
        return self._integer("add", a, b)

    def mul(self, a: IndexText, b: IndexText) -> str:
        """a * b over i64."""
        a, b = str(a), str(b)
        if a == "0" or b == "0":
            return "0"
        if a == "1" or b == "1":
            return b if a == "1" else a
        return self._integer("mul", a, b)

    def sub(self, a: IndexText, b: IndexText) -> str:
        """a - b over i64."""
        a, b = str(a), str(b)
        return a if b == "0" else self._integer("sub", a, b)

    def div(self, a: IndexText, b: IndexText) -> str:
        """a / b for numbers that are not negative."""
        a, b = str(a), str(b)
        return a if b == "1" else self._integer("udiv", a, b)

    def ceil(self, a: IndexText, b: IndexText) -> str:
        """a / b rounded up, for numbers that are not negative."""
        return self.div(self.add(a, self.sub(b, 1)), b)

    def rem(self, a: IndexText, b: IndexText) -> str:
        """a % b for numbers that are not negative."""
        a, b = str(a), str(b)
        return "0" if b == "1" else self._integer("urem", a, b)

    def least(self, a: IndexText, b: IndexText) -> str:
        """min(a, b) over i64."""
        if _literal(a) and _literal(b):
            return str(min(int(a), int(b)))
        less = self(f"icmp slt i64 {a}, {b}")
        return self(f"select i1 {less}, i64 {a}, i64 {b}")

    def most(self, a: IndexText, b: IndexText) -> str:
        """max(a, b) over i64."""
        if _literal(a) and _literal(b):
            return str(max(int(a), int(b)))
        return self.call("i64", "llvm.smax.i64", ("i64", str(a)), ("i64", str(b)))

    # ---- control ----

    def label(self, name: str) -> None:
        """Begin a block."""
        self._lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def loop(
        self,
        start: IndexText,
        stop: IndexText,
        step: IndexText = 1,
        carried: Sequence[tuple[str, str]] = (),
    ) -> Iterator[Loop]:
        """`for index in range(start, stop, step)`, with (type, first value) of what is carried."""
        n = self.name("L")
        index = f"%{n}.i"
        names = [f"%{n}.c{k}" for k in range(len(carried))]
        before = self.block
        self.do(f"br label %{n}.head")
        self.label(f"{n}.head")
        hole = len(self._lines)
        test = self(f"icmp slt i64 {index}, {stop}")
        self.do(f"br i1 {test}, label %{n}.body, label %{n}.exit")
        self.label(f"{n}.body")
        loop = Loop(index, names)
        yield loop
        if len(loop.next) != len(carried):
            raise ValueError(f"the loop carries {len(carried)} values, its body gave {loop.next}")
        after = self(f"add i64 {index}, {step}")
        last = self.block
        self.do(f"br label %{n}.head")
        phis = [f"  {index} = phi i64 [ {start}, %{before} ], [ {after}, %{last} ]"]
        phis += [
            f"  {name} = phi {kind} [ {first}, %{before} ], [ {again}, %{last} ]"
            for name, (kind, first), again in zip(names, carried, loop.next, strict=True)
        ]
        self._lines[hole:hole] = phis
        self.label(f"{n}.exit")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """A part that runs only if an i1 is true."""
        n = self.name("W")
        self.do(f"br i1 {condition}, label %{n}.then, label %{n}.done")
        self.label(f"{n}.then")
        yield
        self.do(f"br label %{n}.done")
        self.label(f"{n}.done")

    def changed(
        self, condition: str, values: Sequence[tuple[str, str]], change: Callable[[], list[str]]
    ) -> list[str]:
        """Some (type, value), or what `change` writes in place of them if an i1 is true."""
        before = self.block
        with self.when(condition):
            new = change()
            last = self.block
        return [
            self(f"phi {kind} [ {old}, %{before} ], [ {other}, %{last} ]")
            for (kind, old), other in zip(values, new, strict=True)
        ]

    def text(self, signature: str, attributes: str = "#0") -> str:
        """The whole function: `signature` is what stands between `define` and the brace."""
        head = f"define {signature} {attributes} {{"
        lines = [head, "entry:", *self._entry, "  br label %start", "start:"]
        return "\n".join([*lines, *self._lines, "  ret void", "}", ""])


class KernelWriter(Writer):
    """The entry function of a kernel: `%tid`, `%nt`, and the words of its argument block."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._helpers: dict[str, str] = {}  # other functions
        self._kinds: dict[str, list[str]] = {}  # of their arguments

    def pointer(self, index: int) -> str:
        """The address in a word."""
        return self.entry(f"load ptr, ptr {self._word(index)}")

    def size(self, size: Size) -> str:
        """A size: its literal, or the value of its word."""
        if isinstance(size, SizeArgument):
            return self.entry(f"load i64, ptr {self._word(size.index)}")
        return str(size)

    def readable(self) -> str:
        """An address from which any element can be read: the argument block."""
        return "%words"

    def _word(self, index: int) -> str:
        return self.entry(f"getelementptr i64, ptr %words, i64 {index}")

    def share(self, total: str, unit: int = 1) -> tuple[str, str]:
        """First and last+1 of this thread's part of `range(total)`, cut at multiples of `unit`."""
        blocks = self.ceil(total, unit)
        low = self.div(self.mul(blocks, "%tid"), "%nt")
        high = self.div(self.mul(blocks, self.add("%tid", 1)), "%nt")
        if unit == 1:
            return low, high
        return self.mul(low, unit), self.least(self.mul(high, unit), total)

    @contextmanager
    def function(self, name: str, arguments: str) -> Iterator[KernelWriter]:
        """Another function of the kernel while it is written, which `run` calls."""
        inner = KernelWriter(self.machine)
        inner._helpers, inner._kinds = self._helpers, self._kinds
        yield inner
        self.declared.update(inner.declared)
        self._kinds[name] = [argument.split()[0] for argument in arguments.split(", ")]
        self._helpers[name] = inner.text(f"internal void @ENTRY.{name}({arguments})")

    def run(self, name: str, *values: IndexText) -> None:
        """Call a function of the kernel."""
        given = [f"{kind} {value}" for kind, value in zip(self._kinds[name], values, strict=True)]
        self.do(f"call void @ENTRY.{name}({', '.join(given)})")

    def kernel(self, label: str) -> Kernel:
        """The finished kernel."""
        own = self.text("void @ENTRY(i64 %tid, i64 %nt, ptr noalias %words)")
        return Kernel.of(label, "".join([*self._helpers.values(), own]), self.declared.values())


def _literal(x: IndexText) -> bool:
    return isinstance(x, int) or not x.startswith("%")


# ---- values in registers ----


REGISTER = {
    "f32": "float", "f64": "double", "i64": "i64", "i32": "i32", "i16": "i16",
    "i8": "i8", "u8": "i8", "bool": "i1",
}  # fmt: skip
"""LLVM type of an element in a register; bf16 and f16 exist in memory only."""

BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "bool": 1}
UNSIGNED = frozenset({"u8", "bool"})


def is_float(dtype: Element) -> bool:
    """Whether values of a type are floating point."""
    return dtype in ("f32", "f64")


def shaped(element: str, lanes: int) -> str:
    """A vector type, or the element's own for a scalar."""
    return f"<{lanes} x {element}>" if lanes else element


def register(dtype: Element, lanes: int) -> str:
    """The LLVM type of a value."""
    return shaped(REGISTER[dtype], lanes)


def suffix(dtype: Element, lanes: int) -> str:
    """How intrinsics name the type: v16f32, or f32 for a scalar."""
    element = dtype if is_float(dtype) else f"i{BITS[dtype]}"
    return f"v{lanes}{element}" if lanes else element


def number(value: Any, dtype: Element) -> str:
    """A scalar literal; integers wrap around as a conversion does."""
    if dtype == "f32":
        return f32(float(value))
    if dtype == "f64":
        return f64(float(value))
    if dtype == "bool":
        return "true" if value else "false"
    bits = BITS[dtype]
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def literal(value: Any, dtype: Element, lanes: int) -> str:
    """A literal of either shape."""
    text = number(value, dtype)
    return f"splat ({REGISTER[dtype]} {text})" if lanes else text


def lane_numbers(lanes: int, bits: int, step: int = 1, first: int = 0) -> str:
    """The vector first, first + step, ... as a literal."""
    items = ", ".join(f"i{bits} {first + k * step}" for k in range(lanes))
    return f"<{items}>"


def prefix_mask(lanes: int, count: int) -> str:
    """A literal mask of the first `count` lanes."""
    items = ", ".join(f"i1 {'true' if k < count else 'false'}" for k in range(lanes))
    return f"<{items}>"


def lanes_below(w: Writer, count: str, lanes: int | None = None) -> str:
    """The mask of the first `count` lanes, which is less than 2**31 and may be too many."""
    lanes = lanes or w.lanes
    if not count.startswith("%"):
        return prefix_mask(lanes, int(count))  # which stores know as such
    limit = w.splat("i32", w(f"trunc i64 {count} to i32"), lanes)
    return w(f"icmp ult <{lanes} x i32> {lane_numbers(lanes, 32)}, {limit}")


def select(w: Writer, mask: str, a: str, b: str, dtype: Element, lanes: int) -> str:
    """`a` where the mask is true, else `b`."""
    kind = register(dtype, lanes)
    return w(f"select {shaped('i1', lanes)} {mask}, {kind} {a}, {kind} {b}")


def convert(w: Writer, x: str, source: Element, target: Element, lanes: int) -> str:
    """A value in another type, as torch converts. Out of range floats give some integer."""
    if source == target:
        return x
    if target == "bool":
        compare = "fcmp une" if is_float(source) else "icmp ne"
        return w(f"{compare} {register(source, lanes)} {x}, {literal(0, source, lanes)}")
    if is_float(source):
        return _from_float(w, x, source, target, lanes)
    if is_float(target):
        return _cast(w, "uitofp" if source in UNSIGNED else "sitofp", x, source, target, lanes)
    if BITS[source] == BITS[target]:
        return x
    if BITS[source] > BITS[target]:
        return _cast(w, "trunc", x, source, target, lanes)
    return _cast(w, "zext" if source in UNSIGNED else "sext", x, source, target, lanes)


def _cast(w: Writer, how: str, x: str, source: Element, target: Element, lanes: int) -> str:
    return w(f"{how} {register(source, lanes)} {x} to {register(target, lanes)}")


def _from_float(w: Writer, x: str, source: Element, target: Element, lanes: int) -> str:
    if is_float(target):
        return _cast(w, "fpext" if target == "f64" else "fptrunc", x, source, target, lanes)
    wide: Element = "i64" if target == "i64" else "i32"
    whole = _cast(w, "fptosi", x, source, wide, lanes)
    whole = w(f"freeze {register(wide, lanes)} {whole}")
    return convert(w, whole, wide, target, lanes)
