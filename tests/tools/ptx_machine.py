"""A machine for PTX in numpy, so that the values of GPU kernels are tested where there is no GPU.

It runs the threads of a block, or of the blocks of a cluster, in step where they are at the same
place. What must be done by a whole warp or block waits until all are there; a warp that never meets
is an error, and so is an access to memory that is nobody's.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import ptx_tensor_cores as tensor_cores
from torchair.codegen.cuda.jit import TENSOR_MAP, Entry, Gpu, ptx
from torchair.codegen.cuda.super_entry import SuperEntry
from torchair.codegen.target import Kernel, Launch

WARP = 32
GLOBAL = 1 << 32  # where global memory begins
SHARED = 1 << 24  # where the shared memory of the first block begins, as others see it
BLOCK = 1 << 18  # from the shared memory of one block to that of the next
LOCAL = 1 << 20  # where the memory of a thread begins
MAPS = 1 << 50  # what the copy engine is told about the first tensor
TYPES: dict[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "pred": np.bool_,
    **{
        f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}").type
        for kind in "sub"
        for bits in (8, 16, 32, 64)
    },
}
WIDTH = {
    "p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64, "h": np.uint16,
    "SP": np.uint64, "SPL": np.uint64,
}  # fmt: skip
SPACES = ("shared", "global", "local", "shared_cta", "shared_cluster", "param")
Values = np.ndarray
Order = Literal["together", "up", "down", "random"]
CHANGES = 0.02
"""How often the order of blocks changes, where it is random."""


@dataclass
class Instruction:
    """One line of code: `op.part.part a, b, c`, done by threads whose predicate holds."""

    parts: list[str]
    args: list[Any]  # names, literals, lists of them for vectors, (address, offset)
    predicate: str | None = None
    negated: bool = False

    @property
    def waits(self) -> str | None:
        """Who must be here before this can be done: a warp, a warpgroup, a block or a cluster, or
        that a barrier has ended a "phase"."""
        if self.parts[:2] == ["mbarrier", "try_wait"]:
            return "phase"
        if self.parts[0] == "wgmma":
            return "warpgroup"
        if self.parts[0] in ("shfl", "vote", "mma") or "warp" in self.parts:
            return "warp"
        if self.parts[0] in ("bar", "barrier"):
            if "arrive" in self.parts:
                return None
            if len(self.args) == 2:  # that so many threads are at a barrier of this number
                return "number"
            return "cluster" if "cluster" in self.parts else "block"
        return None

    @property
    def polls(self) -> bool:
        """Whether this reads what other blocks write while it may be read again and again."""
        return self.parts[0] == "ld" and "acquire" in self.parts


@dataclass
class Function:
    """An entry and the functions that it calls: their code, where labels are, parameters, and
    memory. Registers of a function are told from those of others by its number behind their name:
    nobody calls itself."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)  # where in the memory of a thread
    local_bytes: int = 0
    called: dict[str, list[str]] = field(default_factory=dict)  # parameters of functions


# ---- reading the text ----


def parse(text: str, name: str, asked: int = 0) -> tuple[Function, dict[str, tuple[int, int]]]:
    """An entry of a module, and the global variables: address and size. So many bytes of shared
    memory are asked for at the launch."""
    text = re.sub(r"//[^\n]*", "", text)
    head, _, rest = text.partition(f".entry {name}(")
    found, names = Function(), r"[\w$%.]+"
    variables: dict[str, tuple[int, int]] = {}
    for match in re.finditer(rf"\.global .*?\.b8 ({names})\[(\d+)\]", head):
        variables[match[1]] = (GLOBAL + 256 * len(variables), int(match[2]))
    for match in re.finditer(rf"\.shared .*?\.b8 ({names})\[(\d*)\]", head):
        _share(found, match[1], int(match[2] or asked))
    parameters, _, body = rest.partition(")")
    found.parameters = re.findall(rf"({names})(?:\[\d+\])?\s*(?:,|$)", parameters.strip())
    _read_body(found, body)
    functions = rf"\.func\s+({names})\s*\(([^)]*)\)[^;{{]*(?={{)"
    for number, match in enumerate(re.finditer(functions, head)):
        found.labels[match[1]] = len(found.code)
        found.called[match[1]] = re.findall(rf"({names})\s*(?:,|$)", match[2].strip())
        _read_body(found, re.sub(r"(%(?:SPL?|[a-z]+\d+))\b", rf"\1_{number}", head[match.end() :]))
        own = found.code[found.labels[match[1]] :]
        for instruction in own:
            if instruction.parts[0] == "ret":
                instruction.args = [match[1]]
    return found, variables


def _read_body(found: Function, text: str) -> None:
    body = text[text.index("{") + 1 : text.index("\n}")]
    for statement in re.split(r";|(?<=:)\s", body):
        _read(found, statement.strip().lstrip("}").strip())


def _share(found: Function, name: str, size: int) -> None:
    found.shared[name] = found.shared_bytes
    found.shared_bytes += -(-size // 16) * 16


def _read(found: Function, statement: str) -> None:
    if statement.startswith(".shared"):
        name, size = re.findall(r"([\w$%.]+)\[(\d+)\]", statement)[0]
        _share(found, name, int(size))
    elif statement.startswith(".local"):
        name, size = re.findall(r"([\w$%.]+)\[(\d+)\]", statement)[0]
        found.local[name] = found.local_bytes
        found.local_bytes += -(-int(size) // 16) * 16
    elif statement.endswith(":"):
        found.labels[statement[:-1]] = len(found.code)
    elif statement and not statement.startswith(("{", "}", ".")):
        found.code.append(_instruction(statement))


def _instruction(statement: str) -> Instruction:
    predicate, negated = None, False
    if statement.startswith("@"):
        guard, statement = statement.split(None, 1)
        negated, predicate = guard[1] == "!", guard.lstrip("@!")
    if statement.startswith("call"):
        name, given = re.fullmatch(r"call\S*\s+([\w$]+)\s*,\s*\(([^()]*)\)", statement).groups()  # type: ignore[union-attr]
        return Instruction(["call"], [name, re.findall(r"[\w$]+", given)], predicate, negated)
    name, _, rest = statement.partition(" " if " " in statement.split("\t")[0] else "\t")
    args = [_argument(a) for a in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", rest)]
    parts = name.strip().replace("::", "_").split(".")
    return Instruction(parts, args, predicate, negated)


def _argument(text: str) -> Any:
    if text.startswith("{"):
        return [_argument(x) for x in re.findall(r"[^,\s{}]+", text)]
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return (_argument(base), int(offset or 0))
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(np.float32)
    if text.startswith("0d"):
        return np.array(int(text[2:], 16), np.uint64).view(np.float64)
    return int(text.rstrip("U"), 0) if text[0] in "-0123456789" else text


# ---- memory ----


class Memory:
    """Bytes of global memory, of which some belong to somebody."""

    def __init__(self, size: int = 1 << 22) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.owned = np.zeros(size, np.bool_)
        self.end = 1 << 16

    def place(self, data: np.ndarray, shift: int = 0) -> int:
        """Copy an array to memory, `shift` bytes behind a multiple of 256: its address."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        start = -(-self.end // 256) * 256 + shift
        self.bytes[start : start + raw.size] = raw
        self.owned[start : start + raw.size] = True
        self.end = start + raw.size + 256
        return GLOBAL + start

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        """An array as it is now."""
        start = address - GLOBAL
        found = self.bytes[start : start + like.nbytes].copy()
        return found.view(like.dtype).reshape(like.shape)


# ---- running ----


class Blocks:
    """The threads of some blocks that run together."""

    def __init__(self, run: Run, first: int, count: int, order: Order, seed: int = 0) -> None:
        self.run, self.count, self.order = run, count * run.threads, order
        self.pick = np.random.default_rng(seed)
        self.turns = self.pick.permutation(count)
        self.function = run.function
        self.registers: dict[str, Values] = {}
        number = np.arange(self.count)
        self.block = number // run.threads
        self.special = {
            "%tid.x": (number % run.threads).astype(np.uint32),
            "%ctaid.x": (first + self.block).astype(np.uint32),
            "%nctaid.x": np.full(self.count, run.blocks, np.uint32),
            "%cluster_ctarank": self.block.astype(np.uint32),
            "%laneid": (number % WARP).astype(np.uint32),
        }
        self.shared = np.full(count * BLOCK, 0xFF, np.uint8)  # NaN, whatever is read from it
        self.shared_owned = np.zeros(count * BLOCK, np.bool_)
        for k in range(count):
            self.shared_owned[k * BLOCK : k * BLOCK + self.function.shared_bytes] = True
        self.at = np.zeros(self.count, np.int64)
        self.done = np.zeros(self.count, np.bool_)
        self.polled = np.zeros(self.count, np.bool_)
        self.groups = {
            "warp": number // WARP,
            "warpgroup": number // tensor_cores.WARPGROUP,
            "block": self.block,
            "cluster": number * 0,
        }
        self.barriers = tensor_cores.Barriers()
        self.local = np.full((self.count, self.function.local_bytes), 0xFF, np.uint8)
        self.passed: dict[str, Values] = {}  # parameters of calls
        self.back = {name: np.zeros(self.count, np.int64) for name in self.function.called}
        """Where threads go on when a function returns."""

    def go(self) -> None:
        """Run all threads to their end."""
        targets = set(self.function.labels.values())
        with np.errstate(all="ignore"):
            while not self.done.all():
                place, active = self._next()
                while True:
                    instruction = self.function.code[place]
                    if instruction.parts[0] in ("bra", "call", "ret", "exit"):
                        self._jump(instruction, place, active)
                        break
                    self.execute(instruction, active)
                    if instruction.polls:
                        self.polled |= active
                    place += 1
                    self.at[active] = place
                    if place in targets or self.function.code[place].waits:
                        break

    def _next(self) -> tuple[int, Values]:
        """The first place where threads are that need not wait for others. Threads that polled
        memory which others write come after those that did not: a loop of theirs may wait."""
        for later, order in ((self.polled, self.order), (np.zeros_like(self.polled), "together")):
            found = self._first(~(self.done | later), order)
            if found is not None:
                return found
            self.polled[:] = False
        raise RuntimeError(f"threads wait at {np.unique(self.at[~self.done])} for others")

    def _first(self, among: Values, order: Order) -> tuple[int, Values] | None:
        """The first place where some of these threads are that need not wait for others: of all, of
        one warp after the other, or of some warps by chance."""
        warps = self.groups["warp"]
        numbers = range(self.count // WARP)
        turns: dict[Order, Callable[[], Iterable[Values]]] = {
            "together": lambda: [among],
            "up": lambda: (among & (warps == warp) for warp in numbers),
            "down": lambda: (among & (warps == warp) for warp in reversed(numbers)),
            "random": lambda: self._by_chance(among),
        }
        for mine in turns[order]():
            for place in np.unique(self.at[mine]):
                ready = self._ready(int(place))
                if (ready & mine).any():
                    alone = self.function.code[place].waits is None
                    return int(place), ready & mine if alone else ready
        return None

    def _by_chance(self, among: Values) -> Iterable[Values]:
        """One block as far as it can go, often one warp of it alone, then the next block in an
        order that changes now and then."""
        if self.pick.random() < CHANGES:
            self.pick.shuffle(self.turns)
        for block in self.turns:
            mine = among & (self.block == block)
            if self.pick.random() < 0.5:
                warps = np.unique(self.groups["warp"][mine])
                if warps.size:
                    yield mine & (self.groups["warp"] == self.pick.choice(warps))
            yield mine

    def _ready(self, place: int) -> Values:
        """Threads at a place for which all others are there that they must wait for."""
        here = (self.at == place) & ~self.done
        instruction = self.function.code[place]
        who = instruction.waits
        if who is None:
            return here
        if who == "phase":
            return here & tensor_cores.passed(self, instruction, here)
        if who == "number":
            return here & tensor_cores.complete(self, instruction, here)
        others = ~here if who in ("warp", "warpgroup") else ~here & ~self.done
        return here & ~np.isin(self.groups[who], np.unique(self.groups[who][others]))

    def _jump(self, instruction: Instruction, place: int, active: Values) -> None:
        taken = active & self.predicate(instruction)
        self.at[active] = place + 1
        if instruction.parts[0] == "bra":
            self.at[taken] = self.function.labels[instruction.args[0]]
        elif instruction.parts[0] == "call":
            name, given = instruction.args
            self.back[name][taken] = place + 1
            self.at[taken] = self.function.labels[name]
            for parameter, passed in zip(self.function.called[name], given, strict=True):
                self.pass_on(parameter, self.passed[passed], taken)
        elif instruction.args:
            self.at[taken] = self.back[instruction.args[0]][taken]
        else:
            self.done |= taken
            for block in np.unique(self.block[taken]):
                if self.done[self.block == block].all():  # its memory goes with it
                    self.shared_owned[block * BLOCK : (block + 1) * BLOCK] = False

    def pass_on(self, name: str, values: Values, active: Values) -> None:
        """Set a parameter of a call of the active threads."""
        before = self.passed.get(name, np.zeros(self.count, np.uint64))
        self.passed[name] = np.where(active, values, before)

    def predicate(self, instruction: Instruction) -> Values:
        if instruction.predicate is None:
            return np.ones(self.count, np.bool_)
        found = self.registers[instruction.predicate]
        return ~found if instruction.negated else found

    def execute(self, instruction: Instruction, active: Values) -> None:
        if instruction.predicate is not None:
            active = active & self.predicate(instruction)
        if active.any():
            run_instruction(self, instruction, active)

    # ---- registers ----

    def value(self, argument: Any, kind: str) -> Values:
        """An argument as values of a type."""
        t = TYPES[kind]
        if isinstance(argument, np.ndarray):
            return np.full(self.count, argument).view(t)
        if isinstance(argument, int):
            return (
                np.full(self.count, argument & (1 << 64) - 1, np.uint64)
                .astype(np.dtype(f"u{np.dtype(t).itemsize}"))
                .view(t)
            )
        if argument in self.special:
            return self.special[argument].astype(t)
        if argument in self.function.shared:
            return np.full(self.count, self.function.shared[argument], np.uint64).astype(t)
        if argument in self.function.local:
            start = LOCAL + self.function.local[argument]
            return np.full(self.count, start, np.uint64).astype(t)
        if argument in self.run.parameters:
            return np.full(self.count, self.run.parameters[argument], np.uint64).astype(t)
        if argument in self.run.variables:
            return np.full(self.count, self.run.variables[argument][0], np.uint64).astype(t)
        if argument not in self.registers:  # never set: anything, such as NaN
            width = self._width(argument)
            self.registers[argument] = np.full(self.count, -1, np.int64).astype(width)
        found = self.registers[argument]
        if t is np.bool_ or found.dtype == np.bool_:
            return found
        return found.astype(f"u{np.dtype(t).itemsize}").view(t)

    def _width(self, name: str) -> np.dtype:
        return np.dtype(WIDTH[re.match(r"%([a-zA-Z]+)", name)[1]])  # type: ignore[index]

    def keep(self, name: str, values: Values, active: Values) -> None:
        """Set a register of the active threads."""
        if name == "_":
            return
        width = self._width(name)
        if width != np.bool_:
            values = np.ascontiguousarray(values)
            if values.dtype.kind != "i":  # others are filled up with zeros, not with their sign
                values = values.view(f"u{values.dtype.itemsize}")
            values = values.astype(width)
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, width)
        self.registers[name] = np.where(active, values, self.registers[name])

    # ---- memory ----

    def where(self, space: str, address: Any, active: Values) -> tuple[Values, Values, Values]:
        """Memory, who owns it, and positions in it, for threads that are active."""
        base, offset = address
        place = self.value(base, "u64")[active].astype(np.int64) + offset
        own = self.block[active] * BLOCK
        if space in ("shared", "shared_cta"):
            return self.shared, self.shared_owned, place + own
        if space == "local":
            flat = self.local.reshape(-1)
            mine = np.flatnonzero(active) * self.local.shape[1]
            return flat, np.ones(flat.size, np.bool_), place - LOCAL + mine
        if space == "shared_cluster":
            return self.shared, self.shared_owned, place - SHARED
        if space == "":
            inside = (place >= SHARED) & (place < SHARED + self.shared.size)
            if inside.all():
                return self.shared, self.shared_owned, place - SHARED
            assert not inside.any(), "threads of one instruction in different memories"
        return self.run.memory.bytes, self.run.memory.owned, place - GLOBAL

    def bytes_at(self, space: str, address: Any, size: int, active: Values) -> tuple[Values, Any]:
        data, owned, place = self.where(space, address, active)
        assert (place % size == 0).all(), f"an address that is no multiple of {size}"
        every = place[:, None] + np.arange(size)
        assert ((every >= 0) & (every < data.size)).all() and owned[every].all(), (
            f"an access to {space or 'generic'} memory that is nobody's: {place[:4]}"
        )
        return data, every


@dataclass
class Run:
    """A launch."""

    function: Function
    variables: dict[str, tuple[int, int]]
    memory: Memory
    threads: int
    parameters: dict[str, int]
    blocks: int  # of the grid
    maps: dict[int, tensor_cores.Tensor] = field(default_factory=dict)
    coherent: Written | None = None  # checks loads past the caches


def launch(
    kernel: Kernel,
    how: Launch,
    gpu: Gpu,
    memory: Memory,
    words: Sequence[int],
    blocks: int | None = None,
    order: Order = "together",
) -> None:
    """Run a kernel with these words, in as many blocks as its launch says or as are given. Warps
    go on together, or each in turn as far as it can, so that a missing barrier shows."""
    entry = Entry((kernel,), how.block)
    function, variables = parse(ptx([entry], gpu), entry.name, how.shared)
    count = blocks or how.blocks(lambda k: words[k])
    maps = {
        MAPS + TENSOR_MAP * k: tensor_cores.Tensor(t, words[t.word], *t.numbers(words.__getitem__))
        for k, t in enumerate(kernel.tensors)
    }
    given = [count, *(words[k] for k in kernel.words), *maps]
    for address, size in variables.values():
        memory.owned[address - GLOBAL : address - GLOBAL + size] = True
    run = Run(
        function,
        variables,
        memory,
        how.block,
        dict(zip(function.parameters, given, strict=True)),
        count,
        maps,
    )
    together = count if how.together else how.cluster
    for first in range(0, count, together):
        Blocks(run, first, together, order).go()


def launch_persistent(
    entry: SuperEntry,
    gpu: Gpu,
    memory: Memory,
    given: Sequence[int],
    blocks: int,
    order: Order = "together",
    seed: int = 0,
) -> None:
    """Run a persistent kernel with these parameters, all of its blocks beside each other."""
    function, variables = parse(ptx([entry], gpu), entry.name, entry.shared)
    for address, size in variables.values():
        memory.owned[address - GLOBAL : address - GLOBAL + size] = True
    parameters = dict(zip(function.parameters, given, strict=True))
    run = Run(function, variables, memory, entry.block, parameters, blocks, coherent=Written())
    Blocks(run, 0, blocks, order, seed).go()


class Written:
    """Global memory that a launch has written. What is read only must not be among it: it may come
    from a cache that does not know."""

    def __init__(self) -> None:
        self._lines: set[int] = set()

    def note(self, places: Values) -> None:
        """These bytes were written."""
        self._lines.update(np.unique(places // 4).tolist())

    def check(self, places: Values) -> None:
        """These bytes are read as if nobody wrote them."""
        late = self._lines.intersection(np.unique(places // 4).tolist())
        assert not late, "ld.global.nc of memory that this launch has written"


# ---- instructions ----


def run_instruction(b: Blocks, i: Instruction, active: Values) -> None:
    name, kind = i.parts[0], i.parts[-1]
    if name in ("ld", "st"):
        _memory(b, i, active)
    elif name == "bar" and len(i.args) == 2:
        tensor_cores.meet(b, i, active)
    elif name in ("bar", "barrier", "membar", "fence", "griddepcontrol", "setmaxnreg"):
        return
    elif name in ("atom", "red"):
        _counted(b, i, active)
    elif name in tensor_cores.INSTRUCTIONS:
        tensor_cores.INSTRUCTIONS[name](b, i, active)
    elif name == "shfl":
        _shuffle(b, i, active)
    elif name == "vote":
        _vote(b, i, active)
    elif name == "redux":
        _reduce(b, i, active)
    elif name == "mma":
        _tensor_cores(b, i, active)
    elif name == "setp":
        _compare(b, i, active)
    elif name == "mov" and (isinstance(i.args[0], list) or isinstance(i.args[1], list)):
        _regroup(b, i, active)
    elif name == "cvt":
        _convert(b, i, active)
    else:
        b.keep(i.args[0], _computed(b, i, kind), active)


def _computed(b: Blocks, i: Instruction, kind: str) -> Values:
    name, parts = i.parts[0], i.parts
    if kind == "bf16":
        wide = (b.value(a, "b16").astype(np.uint32) << 16 for a in i.args[1:])
        return _as_bf16(OPERATIONS[name](*(x.view(np.float32) for x in wide)).astype(np.float32))
    if kind == "u16x2":
        pairs = (np.ascontiguousarray(b.value(a, "b32")).view(np.uint16) for a in i.args[1:])
        return OPERATIONS[name](*pairs).view(np.uint32)
    if kind in ("bf16x2", "f16x2"):
        return _in_pairs(OPERATIONS[name], kind, [b.value(a, "b32") for a in i.args[1:]])
    if name == "selp":
        x, y = (b.value(a, kind) for a in i.args[1:3])
        return np.where(b.value(i.args[3], "pred"), x, y)
    if name == "cvta":
        x = b.value(i.args[1], "u64")
        if "global" in parts or "param" in parts or "local" in parts:
            return x
        own = (SHARED + b.block * BLOCK).astype(np.uint64)
        return x - own if "to" in parts else x + own
    if name == "mapa":
        x, rank = b.value(i.args[1], "u32"), b.value(i.args[2], "u32")
        return (x + SHARED + rank * BLOCK).astype(np.uint32)
    if name in ("shl", "shr"):
        x, by = b.value(i.args[1], kind), b.value(i.args[2], "u32").astype(np.int64)
        return _shifted(name, x, by)
    if name in ("mul", "mad") and "wide" in parts:
        return _wide(b, i, kind)
    args = [b.value(a, kind) for a in i.args[1:]]
    if name in ("mul", "mad") and "hi" in parts:
        bits = args[0].dtype.itemsize * 8
        high = (args[0].astype(object) * args[1].astype(object)) >> bits
        return high.astype(args[0].dtype)
    return OPERATIONS[name](*args)


def _halves(x: Values, kind: str) -> list[Values]:
    """The two short floats in each register, the lower first."""
    parts = [(x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)]
    if kind.startswith("f16"):
        return [p.view(np.float16).astype(np.float32) for p in parts]
    return [(p.astype(np.uint32) << np.uint32(16)).view(np.float32) for p in parts]


def _in_pairs(operation: Callable[..., Values], kind: str, args: list[Values]) -> Values:
    sides = zip(*(_halves(x, kind) for x in args), strict=True)
    short = _as_f16 if kind == "f16x2" else _as_bf16
    low, high = (short(operation(*side).astype(np.float32)).astype(np.uint32) for side in sides)
    return low | (high << np.uint32(16))


def _tensor_cores(b: Blocks, i: Instruction, active: Values) -> None:
    """mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 d, a, b, c of a whole warp."""
    assert i.parts[3:] == ["m16n8k32", "row", "col", "s32", "s8", "s8", "s32"], i.parts
    warps = b.count // WARP
    targets, first, second, sums = i.args
    lane = np.arange(WARP)
    row, pair, four = lane // 4, 2 * (lane % 4), 4 * (lane % 4)
    rows, columns = np.zeros((warps, 16, 32), np.int32), np.zeros((warps, 32, 8), np.int32)
    total = np.zeros((warps, 16, 8), np.int32)
    for k, name in enumerate(first):
        for side, x in enumerate(_four_bytes(b, name)):
            rows[:, row + 8 * (k % 2), four + side + 16 * (k // 2)] = x.reshape(warps, WARP)
    for k, name in enumerate(second):
        for side, x in enumerate(_four_bytes(b, name)):
            columns[:, four + side + 16 * k, row] = x.reshape(warps, WARP)
    places = [(row + 8 * (k // 2), pair + k % 2) for k in range(4)]
    for name, (at, column) in zip(sums, places, strict=True):
        total[:, at, column] = b.value(name, "s32").reshape(warps, WARP)
    total = total + rows @ columns
    for name, (at, column) in zip(targets, places, strict=True):
        b.keep(name, total[:, at, column].reshape(-1), active)


def _four_bytes(b: Blocks, name: Any) -> list[Values]:
    """The bytes of each register, the lowest first, with their signs."""
    x = b.value(name, "b32")
    return [(x >> np.uint32(8 * k)).astype(np.uint8).view(np.int8) for k in range(4)]


def _shifted(name: str, x: Values, by: Values) -> Values:
    bits = x.dtype.itemsize * 8
    short = np.minimum(by, bits - 1).astype(x.dtype)
    if name == "shl":
        return np.where(by < bits, x << short, x.dtype.type(0))
    signed = x.dtype.kind == "i"
    return np.where((by < bits) | signed, x >> short, x.dtype.type(0))


def _wide(b: Blocks, i: Instruction, kind: str) -> Values:
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    x, y = (b.value(a, kind).astype(TYPES[wide]) for a in i.args[1:3])
    return x * y if i.parts[0] == "mul" else x * y + b.value(i.args[3], wide)


def _fma(a: Values, b: Values, c: Values) -> Values:
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    if a.dtype.kind == "f":
        return (a.astype(np.longdouble) * b + c).astype(a.dtype)
    return a * b + c


def _divided(a: Values, b: Values) -> Values:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    if a.dtype.kind == "u":
        return a // safe
    return (np.sign(a) * np.sign(safe) * (abs(a) // abs(safe))).astype(a.dtype)


def _bits_of(x: Values, first: Values, count: Values) -> Values:
    bits = x.dtype.itemsize * 8
    first, count = (v.astype(np.int64) & 0xFF for v in (first, count))
    top = _shifted("shl", x, np.maximum(bits - first - count, 0))
    return _shifted("shr", top, np.maximum(bits - count, 0))  # with the sign, if x has one


def _inserted(a: Values, b: Values, first: Values, count: Values) -> Values:
    """The lowest bits of one value in place of some of another one."""
    mask = ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)) << first.astype(np.uint64)
    moved = a.astype(np.uint64) << first.astype(np.uint64)
    return ((b.astype(np.uint64) & ~mask) | (moved & mask)).astype(b.dtype)


def _permuted(a: Values, b: Values, chosen: Values) -> Values:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, np.uint64)
    for k in range(4):
        which = (chosen.astype(np.uint64) >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> ((which & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        result |= np.where(which >= 8, sign, byte) << np.uint64(8 * k)
    return result.astype(np.uint32)


def _either(ufunc: Callable[..., Values]) -> Callable[..., Values]:
    """The smaller or larger; of floats the one that is a number."""
    floats = {np.minimum: np.fmin, np.maximum: np.fmax}[ufunc]  # type: ignore[index]
    return lambda a, b: (floats if a.dtype.kind == "f" else ufunc)(a, b)


def _signed(a: Values, b: Values) -> Values:
    """The second with the sign of the first."""
    return np.copysign(b, a)


OPERATIONS: dict[str, Callable[..., Values]] = {
    "mov": lambda x: x, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "mad": lambda a, b, c: a * b + c, "fma": _fma, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "not": operator.invert, "neg": operator.neg, "abs": np.abs,
    "min": _either(np.minimum), "max": _either(np.maximum), "div": _divided,
    "rem": lambda a, b: a - _divided(a, b) * b, "sqrt": np.sqrt, "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2, "lg2": np.log2, "bfe": _bits_of,
    "prmt": _permuted, "bfi": _inserted, "copysign": _signed,
}  # fmt: skip
COMPARISONS: dict[str, Callable[..., Values]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _compare(b: Blocks, i: Instruction, active: Values) -> None:
    kind, how = i.parts[-1], i.parts[1]
    x, y = (b.value(a, kind) for a in i.args[-2:])
    missing = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(b.count, np.bool_)
    if how in ("nan", "num"):
        result = missing if how == "nan" else ~missing
    elif x.dtype.kind == "f":
        ordered = COMPARISONS[how if how in COMPARISONS else how[:-1]](x, y) & ~missing
        result = ordered | missing if how not in COMPARISONS else ordered
    else:
        result = COMPARISONS[how](x, y)
    b.keep(i.args[0], result, active)


def _regroup(b: Blocks, i: Instruction, active: Values) -> None:
    """Registers as parts of a wider one, and back."""
    whole = f"b{i.parts[-1][1:]}"
    target, source = i.args
    if isinstance(target, list):
        bits = int(whole[1:]) // len(target)
        x = b.value(source, whole).astype(np.uint64)
        for k, name in enumerate(target):
            part = (x >> np.uint64(k * bits)) & np.uint64((1 << bits) - 1)
            b.keep(name, part.astype(f"u{bits // 8}"), active)
        return
    bits = int(whole[1:]) // len(source)
    total = np.zeros(b.count, np.uint64)
    for k, name in enumerate(source):
        total |= b.value(name, f"b{bits}").astype(np.uint64) << np.uint64(k * bits)
    b.keep(target, total.astype(TYPES[whole]), active)


def _convert(b: Blocks, i: Instruction, active: Values) -> None:
    target, source = i.parts[-2:]
    if "bf16" in (target, source):
        _convert_bf16(b, i, active)
        return
    if target in ("f16x2", "bf16x2"):
        short = _as_bf16 if target == "bf16x2" else _as_f16
        high, low = (short(b.value(a, source)) for a in i.args[1:])
        b.keep(i.args[0], low.astype(np.uint32) | (high.astype(np.uint32) << 16), active)
        return
    x = b.value(i.args[1], source)
    if x.dtype.kind == "f" and np.dtype(TYPES[target]).kind != "f":
        round_ = {"rzi": np.trunc, "rni": np.round, "rmi": np.floor, "rpi": np.ceil}
        x = next(f for n, f in round_.items() if n in i.parts)(x)
        limits = np.iinfo(TYPES[target])
        x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), limits.min, limits.max)
    elif x.dtype.kind == "f" and target == source:
        round_ = {"rzi": np.trunc, "rni": np.round, "rmi": np.floor, "rpi": np.ceil}
        x = next((f for n, f in round_.items() if n in i.parts), lambda v: v)(x)
    b.keep(i.args[0], x.astype(TYPES[target]), active)


def _convert_bf16(b: Blocks, i: Instruction, active: Values) -> None:
    if i.parts[-1] == "bf16":
        bits = b.value(i.args[1], "b16").astype(np.uint32) << 16
        b.keep(i.args[0], bits.view(np.float32), active)
        return
    b.keep(i.args[0], _as_bf16(b.value(i.args[1], "f32")), active)


def _as_f16(x: Values) -> Values:
    return x.astype(np.float16).view(np.uint16)


def _as_bf16(x: Values) -> Values:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _shuffle(b: Blocks, i: Instruction, active: Values) -> None:
    """shfl.sync.bfly|idx|up|down.b32 d, a, b, c, mask; all threads of a warp are here."""
    name = i.args[0]
    x, by = b.value(i.args[-4], "b32"), b.value(i.args[-3], "u32").astype(np.int64)
    lane = np.arange(b.count)
    within, first = lane % WARP, lane // WARP * WARP
    source = {
        "bfly": within ^ by,
        "idx": by % WARP,
        "up": within - by,
        "down": within + by,
    }[i.parts[2]]
    source = np.where((source < 0) | (source >= WARP), within, source)
    b.keep(name, x[first + source], active)


def _reduce(b: Blocks, i: Instruction, active: Values) -> None:
    """redux.sync.max.u32 of a whole warp."""
    assert i.parts[2:] == ["max", "u32"] and active.reshape(-1, WARP).all(1).any(), i.parts
    found = b.value(i.args[1], "u32").reshape(-1, WARP).max(1)
    b.keep(i.args[0], np.repeat(found, WARP), active)


def _vote(b: Blocks, i: Instruction, active: Values) -> None:
    x = b.value(i.args[1], "pred").reshape(-1, WARP)
    if "ballot" in i.parts:
        found = (x.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
    else:
        found = x.any(1) if "any" in i.parts else x.all(1)
    b.keep(i.args[0], np.repeat(found, WARP), active)


def _counted(b: Blocks, i: Instruction, active: Values) -> None:
    """atom.add.acq_rel.gpu.u32 d, [a], n: one thread after the other. red.release.gpu.global.add
    has no d."""
    assert "add" in i.parts and i.parts[-1] == "u32", i.parts
    target = i.args[0] if i.parts[0] == "atom" else "_"
    address, count = i.args[-2:]
    data, places = b.bytes_at("", address, 4, active)
    found, more = np.zeros(b.count, np.uint32), b.value(count, "u32")[active]
    for k, (thread, place) in enumerate(zip(np.flatnonzero(active), places, strict=True)):
        old = data[place].view(np.uint32)
        found[thread] = old[0]
        data[place] = (old + more[k]).view(np.uint8)
    b.keep(target, found, active)


def _parameter(b: Blocks, i: Instruction, active: Values) -> None:
    """A parameter of the launch is the same for all threads, one of a call is not."""
    if i.parts[0] == "st":
        ((name, offset), register), kind = i.args, i.parts[-1]
        assert not offset, i
        values = b.value(register, f"u{kind[1:]}" if kind[0] in "bu" else kind)
        bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
        b.pass_on(name, bits.astype(np.uint64), active)
        return
    register, (name, offset) = i.args
    if name in b.passed:
        assert not offset, i
        b.keep(register, b.passed[name].view(np.int64), active)
        return
    b.keep(register, np.full(b.count, b.run.parameters[name], np.int64), active)


def _memory(b: Blocks, i: Instruction, active: Values) -> None:
    kind = i.parts[-1]
    space = next((p for p in i.parts if p in SPACES), "")
    reads = i.parts[0] == "ld"
    registers, address = (i.args[0], i.args[1]) if reads else (i.args[1], i.args[0])
    if space == "param":
        _parameter(b, i, active)
        return
    many = registers if isinstance(registers, list) else [registers]
    t = np.dtype(TYPES[kind])
    data, places = b.bytes_at(space, address, t.itemsize * len(many), active)
    if b.run.coherent is not None and data is b.run.memory.bytes:
        if "nc" in i.parts:
            b.run.coherent.check(places)
        elif not reads:
            b.run.coherent.note(places)
    for k, register in enumerate(many):
        mine = places[:, k * t.itemsize : (k + 1) * t.itemsize]
        if reads:
            found = np.zeros(b.count, t)
            found[active] = np.ascontiguousarray(data[mine]).view(t)[:, 0]
            b.keep(register, found, active)
        else:
            values = np.ascontiguousarray(b.value(register, kind)[active])
            data[mine] = values.view(np.uint8).reshape(-1, t.itemsize)
