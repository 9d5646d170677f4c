"""Native guard and entry: one function that checks all arguments of a call and, if a program is
bound to it, passes their addresses to the program and runs it.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.layouts import CLASS, PAYLOAD, known, signed, type_code
from torchair.codegen.cpu.templates import filled, table_words, written_out
from torchair.codegen.target import Kernel
from torchair.torch_private.dispatch import dispatch_keys

# ---- the text, and the words that it reads: a head, then entries, records and dims ----


HEAD = (
    "hits", "busy", "length", "entries", "records", "entries.at", "records.at", "inside", "keys.at",
    "mask", "tensor", "parameter", "program", "threads", "faults", "fault.count", "long",
    "contents", "true", "false", "none", "contents.same", "driver",
    "keep", "dict.get", "equal", "save", "restore",
    "address.of", "type.of", "index.of", "rank.of", "sizes.of", "strides.of",
    "version.of", "needs.grad", "grad.mode", "count.threads",
)  # fmt: skip
"""Words of the whole guard."""
_NUMBERS = frozenset(HEAD[:5]) | {"inside", "keys.at", "mask", "threads", "fault.count", "long"}

RECORD = (
    "position", "kind", "object", "class", "keys", "type", "index", "rank", "dims", "target",
    "implementation", "address", "version",
)  # fmt: skip
"""Words for each argument that is looked at."""

ENTRY = ("home", "key", "object", "implementation", "address", "version")
"""Words for each dict that is looked at."""


class ArgumentTest(IntEnum):
    """What is asked of an argument."""

    LIKE = 0  # a tensor of this kind
    EQUAL = 1  # an object of this class that is equal to that
    BITS = 2  # the same for a float, whose bits are compared
    UNCHECKED = 3  # a tensor of ours, whose address is taken
    SAME_TENSOR = 4  # this tensor, where it was


_FACTS = (("type", "i32", "%number"), ("index", "i32", "%number"), ("rank", "i64", "%found"))
"""What a tensor tells by a function: its name, its type, where the function puts it."""

_FACT = """tensor.NAME:
  %NAME.ignored = call i32 %NAME.of(ptr %handle, ptr PLACE)
  %NAME.now = load TYPE, ptr PLACE
  %NAME.then = field TYPE record.NAME
  equal TYPE %NAME.now, %NAME.then then tensor.NEXT
"""

_SIDES = (("size", "%sizes", "%d"), ("stride", "%strides", "%d.behind"))
"""Dims and strides: where a tensor has them, and where in the list of what is expected they are."""

_SIDE = """  %NAME = word i64 LIST, %d
  %NAME.then = word i64 %dims, INDEX
  %NAME.any = icmp eq i64 %NAME.then, -1
  %NAME.same = icmp eq i64 %NAME, %NAME.then
  %NAME.right = or i1 %NAME.any, %NAME.same
"""

_TEXT = """
define ptr @ENTRY(ptr %self, ptr %args, i64 %count) #0 {
entry:
  %found = alloca i64
  %number = alloca i32
  %table = byte ptr %self, PAYLOAD
HEAD
  %complete = icmp eq i64 %count, %length
  %free = icmp eq i64 %busy, 0
  %begin = and i1 %complete, %free
  br i1 %begin, label %entries.head, label %other

entries.head:
  %e = phi i64 [ 0, %entry ], [ %e.next, %entry.alike ]
  %e.more = icmp slt i64 %e, %entries
  br i1 %e.more, label %entry.look, label %records.head
entry.look:
  %e.word = mul i64 %e, ENTRY
  %entry.at = getelementptr i64, ptr %entries.at, i64 %e.word
  %home = field ptr entry.home
  %key = field ptr entry.key
  %there = call ptr %dict.get(ptr %home, ptr %key)
  %e.object = field ptr entry.object
  equal ptr %there, %e.object then entry.kind
entry.kind:
  %e.impl = field i64 entry.implementation
  %e.plain = icmp eq i64 %e.impl, 0
  br i1 %e.plain, label %entry.alike, label %entry.tensor
entry.tensor:
  %e.handle = getelementptr i8, ptr %there, i64 %inside
  %e.now = load i64, ptr %e.handle
  equal i64 %e.now, %e.impl then entry.place
entry.place:
  %e.ignored = call i32 %address.of(ptr %e.handle, ptr %found)
  %e.address = load i64, ptr %found
  %e.address.then = field i64 entry.address
  equal i64 %e.address, %e.address.then then entry.counted
entry.counted:
  %e.version.then = field i64 entry.version
  %e.counts = icmp sge i64 %e.version.then, 0
  br i1 %e.counts, label %entry.written, label %entry.alike
entry.written:
  %e.version = call i64 %version.of(ptr %e.handle)
  equal i64 %e.version, %e.version.then then entry.alike
entry.alike:
  %e.next = add i64 %e, 1
  br label %entries.head

records.head:
  %i = phi i64 [ 0, %entries.head ], [ %i.next, %alike ]
  %more = icmp slt i64 %i, %records
  br i1 %more, label %look, label %contents.ask
look:
  %i.word = mul i64 %i, RECORD
  %record.at = getelementptr i64, ptr %records.at, i64 %i.word
  %position = field i64 record.position
  %mine = word ptr %args, %position
  %class = byte ptr %mine, CLASS
  %handle = getelementptr i8, ptr %mine, i64 %inside
  %kind = field i64 record.kind
  switch i64 %kind, label %tensor.class [
    i64 KIND.EQUAL, label %value
    i64 KIND.BITS, label %value
    i64 KIND.UNCHECKED, label %take
    i64 KIND.SAME_TENSOR, label %kept
  ]

kept:
  %kept.object = field ptr record.object
  equal ptr %mine, %kept.object then kept.inner
kept.inner:
  %kept.now = load i64, ptr %handle
  %kept.then = field i64 record.implementation
  equal i64 %kept.now, %kept.then then kept.place
kept.place:
  %kept.ignored = call i32 %address.of(ptr %handle, ptr %found)
  %kept.address = load i64, ptr %found
  %kept.address.then = field i64 record.address
  equal i64 %kept.address, %kept.address.then then kept.counted
kept.counted:
  %kept.version.then = field i64 record.version
  %kept.counts = icmp sge i64 %kept.version.then, 0
  br i1 %kept.counts, label %kept.written, label %alike
kept.written:
  %kept.version = call i64 %version.of(ptr %handle)
  equal i64 %kept.version, %kept.version.then then alike

value:
  %class.then = field ptr record.class
  equal ptr %class, %class.then then value.kind
value.kind:
  %object = field ptr record.object
  %bits = icmp eq i64 %kind, KIND.BITS
  br i1 %bits, label %value.bits, label %value.equal
value.bits:
  %payload = byte i64 %mine, PAYLOAD
  %wanted = field i64 record.object
  equal i64 %payload, %wanted then alike
value.equal:
  %equal.now = call i32 %equal(ptr %mine, ptr %object, i32 2)
  equal i32 %equal.now, 1 then alike

tensor.class:
  %is.tensor = icmp eq ptr %class, %tensor
  %is.parameter = icmp eq ptr %class, %parameter
  %plain = or i1 %is.tensor, %is.parameter
  br i1 %plain, label %tensor.keys, label %other
tensor.keys:
  %impl = load ptr, ptr %handle
  %keys.now = byte i64 %impl, %keys.at
  %keys.seen = and i64 %keys.now, %mask
  %keys.then = field i64 record.keys
  equal i64 %keys.seen, %keys.then then tensor.type
FACTS
tensor.dims:
  %s0 = call i32 %sizes.of(ptr %handle, ptr %found)
  %sizes = load ptr, ptr %found
  %s1 = call i32 %strides.of(ptr %handle, ptr %found)
  %strides = load ptr, ptr %found
  %dims = field ptr record.dims
  br label %dims.head
dims.head:
  %d = phi i64 [ 0, %tensor.dims ], [ %d.next, %dim.next ]
  %wrong = phi i1 [ 0, %tensor.dims ], [ %wrong.next, %dim.next ]
  %d.more = icmp slt i64 %d, %rank.then
  br i1 %d.more, label %dim.next, label %dims.done
dim.next:
  %d.behind = add i64 %d, %rank.then
SIDES
  %right = and i1 %size.right, %stride.right
  %not.right = xor i1 %right, true
  %wrong.next = or i1 %wrong, %not.right
  %d.next = add i64 %d, 1
  br label %dims.head
dims.done:
  br i1 %wrong, label %other, label %grad.ask
grad.ask:
  %needs = call zeroext i1 %needs.grad(ptr %impl)
  br i1 %needs, label %grad.on, label %take
grad.on:
  %recording = call zeroext i1 %grad.mode()
  br i1 %recording, label %other, label %take
take:
  %target = field ptr record.target
  %wants = icmp ne ptr %target, null
  br i1 %wants, label %take.address, label %alike
take.address:
  %a0 = call i32 %address.of(ptr %handle, ptr %target)
  br label %alike
alike:
  %i.next = add i64 %i, 1
  br label %records.head

contents.ask:
  %copied = icmp ne ptr %contents, null
  br i1 %copied, label %contents.look, label %passed
contents.look:
  %still = call i64 %contents.same(ptr %contents)
  equal i64 %still, 1 then passed
passed:
  %hits.next = add i64 %hits, 1
  store i64 %hits.next, ptr %table
  %runs = icmp ne ptr %program, null
  br i1 %runs, label %run, label %yes
run:
  %busy.at = getelementptr i64, ptr %table, i64 1
  store i64 1, ptr %busy.at
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %parallel, label %go
parallel:
  %now.threads = call i32 %count.threads()
  %now.wide = sext i32 %now.threads to i64
  %fewer = icmp slt i64 %now.wide, %threads
  %used = select i1 %fewer, i64 %now.wide, i64 %threads
  %used.at = getelementptr i64, ptr %program, i64 2
  store i64 %used, ptr %used.at
  br label %go
go:
  %lets = icmp ne i64 %long, 0
  br i1 %lets, label %go.free, label %go.short
go.free:
  %state = call ptr %save()
  call void %driver(ptr %program)
  call void %restore(ptr %state)
  br label %ran
go.short:
  call void %driver(ptr %program)
  br label %ran
ran:
  br label %faults.head
faults.head:
  %f = phi i64 [ 0, %ran ], [ %f.next, %fault ]
  %f.any = phi i64 [ 0, %ran ], [ %f.or, %fault ]
  %f.more = icmp slt i64 %f, %fault.count
  br i1 %f.more, label %fault, label %faults.done
fault:
  %fault.now = word i64 %faults, %f
  %f.or = or i64 %f.any, %fault.now
  %f.next = add i64 %f, 1
  br label %faults.head
faults.done:
  %clean = icmp eq i64 %f.any, 0
  br i1 %clean, label %ended, label %failed
ended:
  store i64 0, ptr %busy.at
  br label %yes
yes:
  call void %keep(ptr %true)
  ret ptr %true
failed:
  call void %keep(ptr %none)
  ret ptr %none
other:
  call void %keep(ptr %false)
  ret ptr %false
}
"""

_FIELD = re.compile(r"  %(\S+) = field (\w+) (record|entry)\.(\w+)$", re.M)


def guard_text() -> str:
    """The function in LLVM's language; its name is ENTRY."""
    names = [*(name for name, *_ in _FACTS[1:]), "dims"]
    facts = "".join(
        filled(_FACT, NAME=name, TYPE=kind, PLACE=place, NEXT=following)
        for (name, kind, place), following in zip(_FACTS, names, strict=True)
    )
    sides = "".join(filled(_SIDE, NAME=n, LIST=words, INDEX=at) for n, words, at in _SIDES)
    head = table_words(HEAD, _NUMBERS)
    text = filled(_TEXT, **{"HEAD\n": head, "FACTS\n": facts, "SIDES\n": sides})
    text = text.replace("mul i64 %e, ENTRY", f"mul i64 %e, {len(ENTRY)}")
    text = text.replace("mul i64 %i, RECORD", f"mul i64 %i, {len(RECORD)}")
    text = filled(text, **{f"KIND.{kind.name}": str(kind.value) for kind in ArgumentTest})
    text = filled(text, CLASS=str(CLASS), PAYLOAD=str(PAYLOAD))
    return written_out(_FIELD.sub(_field, text))


def _field(found: re.Match[str]) -> str:
    name, kind, base, field = found.groups()
    index = (RECORD if base == "record" else ENTRY).index(field)
    return f"  %{name} = word {kind} %{base}.at, {index}"


_OBJECTS = {
    "tensor": torch.Tensor,
    "parameter": torch.nn.Parameter,
    "true": True,
    "false": False,
    "none": None,
}

ANY = -1
"""A dim or a stride that is not compared."""

BUSY = 1
"""Word of a table: a call is running its program, or met a bad index that has not been read yet."""


@dataclass(frozen=True)
class TensorLike:
    """An argument that must be a plain tensor of this kind. `target` is where its address goes."""

    position: int
    sample: torch.Tensor
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    target: int = 0


@dataclass(frozen=True)
class UncheckedTensor:
    """An argument whose address is taken and nothing else is asked: we have made it."""

    position: int
    target: int


@dataclass(frozen=True)
class SameTensor:
    """An argument that must be one certain tensor, where it was; a `version` of -1 is not asked
    for. It is known by its addresses: the caller keeps the tensor alive."""

    position: int
    object: int
    implementation: int
    address: int
    version: int = -1


@dataclass(frozen=True)
class EqualValue:
    """An argument that must be of the class of `value` and equal to it."""

    position: int
    value: Any


@dataclass(frozen=True)
class DictEntry:
    """What a dict must hold under a key: this object, and if it is a tensor, where it was; a
    `version` of -1 is not asked for."""

    owner: dict[str, Any]
    key: str
    value: Any
    version: int = -1


@dataclass(frozen=True)
class Task:
    """A program to run: its address, the driver's, the most threads, and words that kernels set
    when they meet a bad index. `contents` is a test of memory and the words it reads; the guard
    holds `keep_alive`."""

    program: int
    driver: int
    threads: int
    faults: int
    fault_count: int
    long: bool
    contents: tuple[int, int] = (0, 0)
    keep_alive: Any = None


class Table(ctypes.Array):
    """The words that a native guard reads. It keeps what they point to."""

    _type_ = ctypes.c_int64
    _length_ = 0


ArgumentRecord = TensorLike | UncheckedTensor | SameTensor | EqualValue


def native_guard(
    library: Library,
    length: int,
    records: Sequence[ArgumentRecord],
    entries: Sequence[DictEntry] = (),
    task: Task | None = None,
) -> tuple[Callable[..., bool | None], Table] | None:
    """A function of `length` arguments: False if something is not as expected (or if a call of
    another thread is inside), else True; None when its program met a bad index: it takes no call
    then until `table[BUSY]` is 0. And its table. None
    instead where torch or Python are not as this code expects them."""
    found = known()
    if found is None:
        return None
    head = dict.fromkeys(HEAD, 0) | {n: word for n, word in found.items() if n in HEAD}
    head |= {name: id(value) for name, value in _OBJECTS.items()}
    words = len(HEAD)
    head["length"], head["entries"], head["records"] = length, len(entries), len(records)
    first, second = words, words + len(ENTRY) * len(entries)
    dims_at = second + len(RECORD) * len(records)
    total = dims_at + 2 * sum(len(r.dims) for r in records if isinstance(r, TensorLike))
    table: Any = type("Words", (Table,), {"_length_": total})()
    base = ctypes.addressof(table)
    head["entries.at"], head["records.at"] = base + 8 * first, base + 8 * second
    if task is not None:
        head |= {
            "program": task.program,
            "driver": task.driver,
            "threads": task.threads,
            "faults": task.faults,
            "fault.count": task.fault_count,
            "long": int(task.long),
        }
        head["contents.same"], head["contents"] = task.contents
    table[0:words] = [head[name] for name in HEAD]
    table[first:second] = [w for e in entries for w in _entry_words(e)]
    for k, record in enumerate(records):
        at = second + len(RECORD) * k
        fields = _record(record, found["mask"]) | {"dims": base + 8 * dims_at}
        table[at : at + len(RECORD)] = [fields.get(name, 0) for name in RECORD]
        if isinstance(record, TensorLike):
            both = (*record.dims, *record.strides)
            table[dims_at : dims_at + len(both)] = both
            dims_at += len(both)
    # Not what a tensor is compared with: a user may want its memory back.
    table.keep_alive = ([r for r in records if isinstance(r, EqualValue)], entries, task)
    return _callable(library, table), table


def _entry_words(entry: DictEntry) -> tuple[int, ...]:
    tensor = isinstance(entry.value, torch.Tensor)
    place = (entry.value._cdata, entry.value.data_ptr()) if tensor else (0, 0)
    return id(entry.owner), id(entry.key), id(entry.value), *place, entry.version


def _record(record: ArgumentRecord, mask: int) -> dict[str, int]:
    """Words of a record by their names, all but those that are 0; `mask` tells which keys count."""
    if isinstance(record, UncheckedTensor):
        return {
            "position": record.position,
            "kind": ArgumentTest.UNCHECKED,
            "target": record.target,
        }
    if isinstance(record, SameTensor):
        return {"kind": ArgumentTest.SAME_TENSOR, **asdict(record)}
    if isinstance(record, EqualValue):
        kind, value = ArgumentTest.EQUAL, id(record.value)
        if type(record.value) is float:
            (bits,) = struct.unpack("q", struct.pack("d", record.value))
            kind, value = ArgumentTest.BITS, bits
        asked = {"kind": kind, "object": value, "class": id(type(record.value))}
        return {"position": record.position, **asked}
    t = record.sample
    keys = signed(dispatch_keys(t).raw_repr() & mask & (2**64 - 1))
    index = t.device.index if t.device.index is not None else -1
    asked = {"keys": keys, "type": type_code(t.dtype), "index": index, "rank": t.dim()}
    asked |= {"kind": ArgumentTest.LIKE, "target": record.target}
    return {"position": record.position, **asked}


def _callable(library: Library, table: Any) -> Callable[..., bool | None]:
    """The native guard over one table as a builtin function of Python."""
    table.method = _MethodDef(b"native_guard", _entry(library), _FASTCALL, None)
    new = ctypes.pythonapi.PyCMethod_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p]
    return new(ctypes.addressof(table.method), table, None, None)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_FASTCALL = 0x80  # METH_FASTCALL: an array of arguments and their number


@cache
def _entry(library: Library) -> int:
    return library.address(guard_kernel())


def guard_kernel() -> Kernel:
    """The code of native guards."""
    return Kernel.of("native_guard", guard_text(), ())
