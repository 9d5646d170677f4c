"""Writing a kernel for a GPU: words of the argument block are parameters, threads have numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.record import FIRST_WAIT, WAITS
from torchair.codegen.sizes import Element, Size, SizeArgument
from torchair.codegen.target import Kernel, TensorTile
from torchair.codegen.text.writer import BITS, KernelWriter, is_float

_REGISTERS = "llvm.nvvm.read.ptx.sreg"
_BYTES = {"i8": 1, "i32": 4, "float": 4, "i64": 8, "double": 8, "i128": 16}
ALONE = ("i64 %block", "i64 %blocks")
"""Parameters of a kernel before its words."""
PART = (
    *ALONE,
    "ptr addrspace(3) %room",
    "i64 %asked",
    "ptr addrspace(3) %item",
    "ptr addrspace(3) %words",
    "i32 %threads",
    "i64 %thread",
    "i32 %barrier",
)
"""Those of a part of a persistent kernel: also its shared memory, where in it that begins which a
launch would be asked for, the record of the item, the words in it, the threads of a block of this
part, the number of this one among them, and that of their barrier."""


class GpuWriter(KernelWriter):
    """The function of a kernel: what the threads of a block do. Its parameters are the number of
    the block, how many there are, and the words that it uses, in their order. Several such
    functions can stand side by side in one launch, see `jit.entry`. `lanes` may be set anew for a
    part of the code."""

    def __init__(self, target: Gpu) -> None:
        super().__init__(target)
        self.gpu = target
        self._words: dict[int, str] = {}  # types of those that it uses
        self._shared: list[str] = []
        self._zeros = ""
        self._placed: dict[int, str] = {}
        self._tensors: list[TensorTile] = []
        self._room = 0  # bytes of the shared memory of a persistent kernel

    # ---- arguments ----

    def place(self, index: int, pointer: str) -> None:
        """Let an operand be at this address, and not at one in a word."""
        self._placed[index] = pointer

    def pointer(self, index: int) -> str:
        if index in self._placed:
            return self._placed[index]
        self._words[index] = "ptr"
        plain = self.entry(f"addrspacecast ptr %w{index} to ptr addrspace(1)")
        return self.entry(f"addrspacecast ptr addrspace(1) {plain} to ptr")  # global, says that

    def size(self, size: Size) -> str:
        if not isinstance(size, SizeArgument):
            return str(size)
        self._words[size.index] = "i64"
        return f"%w{size.index}"

    def tensor(self, tile: TensorTile) -> str:
        """What the copy engine is told about a tensor: an address, as an i64."""
        self._words[tile.word] = "ptr"  # which changes between calls as others do
        if tile not in self._tensors:
            self._tensors.append(tile)
        return self.entry(f"ptrtoint ptr %t{self._tensors.index(tile)} to i64")

    def readable(self) -> str:
        if not self._zeros:
            self._zeros = "@ENTRY.zeros = internal addrspace(1) global [16 x i8] zeroinitializer\n"
        return self.entry("addrspacecast ptr addrspace(1) @ENTRY.zeros to ptr")

    # ---- threads ----

    def thread(self) -> str:
        """The number of this thread in its block, an i64."""
        if self.gpu.persistent:
            return "%thread"
        return self._special("tid.x")

    def block_number(self) -> str:
        """The number of this block among those of the kernel, an i64."""
        return "%block"

    def blocks(self) -> str:
        """How many blocks the kernel has, an i64."""
        return "%blocks"

    def _special(self, register: str) -> str:
        function = f"{_REGISTERS}.{register}"
        self.declared[function] = f"declare i32 @{function}()"
        short = self.entry(f"call i32 @{function}()")
        return self.entry(f"zext i32 {short} to i64")

    def barrier(self) -> None:
        """Wait for all threads of the block; what they wrote to shared memory is there then. A
        persistent kernel may have more threads than this part of it."""
        if self.gpu.persistent:
            code, given = '"bar.sync $0, $1;", "r,r,~{memory}"', "i32 %barrier, i32 %threads"
            self.do(f"call void asm sideeffect {code}({given}) convergent")
            return
        self.call("void", "llvm.nvvm.barrier0")

    def warp_barrier(self) -> None:
        """The same for all threads of the warp."""
        self.call("void", "llvm.nvvm.bar.warp.sync", ("i32", "-1"))

    def fence(self) -> None:
        """What this thread wrote before is seen before what it writes after, and likewise what it
        reads, by all threads of the GPU."""
        self.assembly("fence.acq_rel.gpu;", "void", "~{memory}")

    def arrive(self, counter: str) -> str:
        """Add one to an i32 that other blocks count in too: what it was before."""
        text = "atom.add.acq_rel.gpu.u32 $0, [$1], 1;"
        return self.assembly(text, "i32", "=r,l,~{memory}", ("ptr", counter))

    def await_count(self, counter: str, count: str) -> None:
        """Wait until an i32 that other blocks count in is so large."""
        name = self.name("A")
        self.do(f"br label %{name}.again")
        self.label(f"{name}.again")
        text = "ld.acquire.gpu.u32 $0, [$1];"
        found = self.assembly(text, "i32", "=r,l,~{memory}", ("ptr", counter))
        enough = self(f"icmp uge i32 {found}, {count}")
        self.do(f"br i1 {enough}, label %{name}.enough, label %{name}.again")
        self.label(f"{name}.enough")

    def is_last(self, counter: str, before: str, flag: str) -> str:
        """Whether this block is the last of those that count here, which `before` others are: an
        i1. What the others wrote is there then, and the counter is zero. `flag` is an i32 in shared
        memory."""
        self.fence()
        self.barrier()
        with self.when(self(f"icmp eq i64 {self.thread()}, 0")):
            last = self(f"icmp eq i32 {self.arrive(counter)}, {before}")
            with self.when(last):  # for the next launch
                self.do(f"store i32 0, ptr {counter}")
            self.do(f"store i32 {self(f'zext i1 {last} to i32')}, ptr {flag}")
        self.barrier()
        self.fence()
        return self(f"icmp ne i32 {self(f'load i32, ptr {flag}')}, 0")

    def wait(self) -> None:
        """Wait for the launch before this one, if the GPU began this one early; in a persistent
        kernel, for the items that this one needs."""
        if self.gpu.persistent:
            self._await_items()
            return
        self.assembly("griddepcontrol.wait;", "void", "~{memory}")

    def _await_items(self) -> None:
        """Each of the first threads waits for one counter of the record of this item. The barrier
        hands on what they have seen to all others."""
        count = self._of_item(str(WAITS))
        with self.when(self(f"icmp slt i64 {self.thread()}, {count}")):
            first = self.add(self.mul(self.thread(), "2"), str(FIRST_WAIT))
            counter = self(f"inttoptr i64 {self._of_item(first)} to ptr")
            value = self._of_item(self.add(first, "1"))
            self.await_count(counter, self(f"trunc i64 {value} to i32"))
        self.barrier()

    def _of_item(self, number: str) -> str:
        at = self(f"getelementptr i64, ptr addrspace(3) %item, i64 {number}")
        return self(f"load i64, ptr addrspace(3) {at}")

    def release(self, where: str) -> None:
        """Let the launch after this one begin as far as there is room, if an i1 is true. It waits
        for this one before it reads what others write."""
        if self.gpu.persistent:
            return
        with self.when(where):
            self.assembly("griddepcontrol.launch_dependents;", "void", "~{memory}")

    def assembly(self, text: str, result: str, constraints: str, *args: tuple[str, str]) -> str:
        """Inline PTX that is not moved."""
        given = ", ".join(f"{t} {a}" for t, a in args)
        code = f'call {result} asm sideeffect "{text}", "{constraints}"({given})'
        if result == "void":
            self.do(code)
            return ""
        return self(code)

    def shared(self, element: str, count: int) -> str:
        """Memory of the block, as an address that any load or store takes. The parts of a
        persistent kernel use the same, one after the other."""
        if self.gpu.persistent:
            place = self.entry(f"getelementptr i8, ptr addrspace(3) %room, i64 {self._room}")
            self._room += -(-count * _BYTES[element] // 16) * 16
            return self.entry(f"addrspacecast ptr addrspace(3) {place} to ptr")
        name = f"@ENTRY.shared{len(self._shared)}"
        kind = f"[{count} x {element}]"
        self._shared.append(f"{name} = internal addrspace(3) global {kind} poison, align 16\n")
        return self.entry(f"addrspacecast ptr addrspace(3) {name} to ptr")

    def asked(self, align: int = 16) -> str:
        """Memory of the block whose size the launch tells."""
        return self.entry(f"addrspacecast ptr addrspace(3) {self._asked(align)} to ptr")

    def asked_at(self, align: int) -> str:
        """The same as a place in shared memory, an i32."""
        wide = self.entry(f"ptrtoint ptr addrspace(3) {self._asked(align)} to i64")
        return self.entry(f"trunc i64 {wide} to i32")

    def _asked(self, align: int) -> str:
        if self.gpu.persistent:
            return self.entry("getelementptr i8, ptr addrspace(3) %room, i64 %asked")
        name = "@ENTRY_asked"
        text = f"{name} = external addrspace(3) global [0 x i8], align {align}\n"
        if text not in self._shared:
            self._shared.append(text)
        return name

    def chosen(
        self,
        condition: str | None,
        kind: str,
        values: Callable[[], list[str]],
        otherwise: str = "zeroinitializer",
    ) -> list[str]:
        """What is computed if an i1 is true, or zeros; None is always true. In a persistent kernel
        nothing is "poison": a register that is not set on some way has a value from before the item
        for the assembler, which keeps a place for it all the time."""
        if condition is None:
            return values()
        if self.gpu.persistent and otherwise == "poison":
            otherwise = "zeroinitializer"
        before = self.block
        with self.when(condition):
            found = values()
            last = self.block
        return [self(f"phi {kind} [ {x}, %{last} ], [ {otherwise}, %{before} ]") for x in found]

    def either(
        self, condition: str, kind: str, yes: Callable[[], list[str]], no: Callable[[], list[str]]
    ) -> list[str]:
        """What is computed in one way if an i1 is true, and in another way if it is not."""
        n = self.name("E")
        self.do(f"br i1 {condition}, label %{n}.yes, label %{n}.no")
        configs = []
        for label, values in (("yes", yes), ("no", no)):
            self.label(f"{n}.{label}")
            configs.append([f"[ {x}, %{self.block} ]" for x in values()])
            self.do(f"br label %{n}.done")
        self.label(f"{n}.done")
        return [self(f"phi {kind} {a}, {b}") for a, b in zip(*configs, strict=True)]

    def shuffled(self, x: str, dtype: Element, distance: int) -> str:
        """The value of the thread whose number differs from this one's in one bit."""
        if dtype == "f32":
            return self._bfly("f32", "float", x, distance)
        if dtype in ("f64", "i64"):
            return self._shuffled_wide(x, dtype, distance)
        kind = f"i{BITS[dtype]}"
        wide = x if kind == "i32" else self(f"zext {kind} {x} to i32")
        got = self._bfly("i32", "i32", wide, distance)
        return got if kind == "i32" else self(f"trunc i32 {got} to {kind}")

    def _bfly(self, suffix: str, kind: str, x: str, distance: int) -> str:
        return self.call(
            kind,
            f"llvm.nvvm.shfl.sync.bfly.{suffix}",
            ("i32", "-1"),
            (kind, x),
            ("i32", str(distance)),
            ("i32", str(WARP - 1)),
        )

    def _shuffled_wide(self, x: str, dtype: Element, distance: int) -> str:
        bits = self(f"bitcast double {x} to i64") if is_float(dtype) else x
        low = self(f"trunc i64 {bits} to i32")
        high = self(f"trunc i64 {self(f'lshr i64 {bits}, 32')} to i32")
        low, high = (self._bfly("i32", "i32", part, distance) for part in (low, high))
        upper = self(f"shl i64 {self(f'zext i32 {high} to i64')}, 32")
        both = self(f"or i64 {upper}, {self(f'zext i32 {low} to i64')}")
        return self(f"bitcast i64 {both} to double") if is_float(dtype) else both

    # ---- the kernel ----

    def kernel(self, label: str) -> Kernel:
        """The finished kernel. A part of a persistent one stays a function: the assembler would
        keep values of one part in registers while another one runs."""
        words = dict(sorted(self._words.items()))
        own = [f"{t} %w{k}" for k, t in words.items()]
        tensors = [f"ptr %t{k}" for k in range(len(self._tensors))]
        given, inlined = [*ALONE, *own, *tensors], "alwaysinline"
        if self.gpu.persistent:
            given, inlined = list(PART), "noinline"
            self._entry[:0] = [line for k, x in enumerate(words.items()) for line in _word(k, *x)]
        code = self.text(f"internal void @ENTRY({', '.join(given)})", inlined)
        text = "".join([self._zeros, *self._shared, *self._helpers.values(), code])
        made = Kernel.of(label, text, self.declared.values(), words, self._tensors)
        return replace(made, room=self._room)


def _word(position: int, word: int, kind: str) -> list[str]:
    """Read a word of an item from its record."""
    at = f"  %w{word}.at = getelementptr i64, ptr addrspace(3) %words, i64 {position}"
    return [at, f"  %w{word} = load {kind}, ptr addrspace(3) %w{word}.at"]
