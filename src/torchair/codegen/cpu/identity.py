"""The native test whether the tensors of a call are those of an earlier one: objects, addresses,
version counters, and contents, of which each call looks at some places and at one slice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.layouts import known
from torchair.codegen.cpu.templates import filled, table_words, written_out
from torchair.codegen.target import Kernel

HITS = 0
"""Word of a table that counts the calls that passed the test."""

_RECORD = 5  # words: position, object, implementation, address, version

CONTENTS = ("stale", "samples", "samples.at", "slices", "slices.at", "cursor", "turn")
"""Words about contents: whether the user said that they have changed; how many samples and slices
there are and where; the slice that is looked at next, and how many in one call."""

SAMPLE = 2  # words: address, content
SLICE = 3  # words: address, bytes, hash

_TEXT = """
define i64 @ENTRY(ptr %given, ptr %table) #0 {
entry:
  %found = alloca ptr
WORDS
  %size = call i64 %size.of(ptr %given)
  equal i64 %size, %length then head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %alike ]
  %more = icmp slt i64 %i, %records
  br i1 %more, label %look, label %contents.ask
look:
  %i.at = mul i64 %i, RECORDWORDS
  %i.word = add i64 %i.at, HEADWORDS
  %record = getelementptr i64, ptr %table, i64 %i.word
  %position = load i64, ptr %record
  %object = word ptr %record, 1
  %mine = call ptr %item(ptr %given, i64 %position)
  call void %release(ptr %mine)
  equal ptr %mine, %object then inner
inner:
  %handle = getelementptr i8, ptr %object, i64 %inside
  %impl = load i64, ptr %handle
  %impl.then = word i64 %record, 2
  equal i64 %impl, %impl.then then place
place:
  %ignored = call i32 %address.of(ptr %handle, ptr %found)
  %address = load i64, ptr %found
  %address.then = word i64 %record, 3
  equal i64 %address, %address.then then counted
counted:
  %version.then = word i64 %record, 4
  %counts = icmp sge i64 %version.then, 0
  br i1 %counts, label %written, label %alike
written:
  %version = call i64 %version.of(ptr %handle)
  equal i64 %version, %version.then then alike
alike:
  %i.next = add i64 %i, 1
  br label %head
contents.ask:
  %copied = icmp ne ptr %contents, null
  br i1 %copied, label %contents.look, label %yes
contents.look:
  %same = call i64 %contents.same(ptr %contents)
  equal i64 %same, 1 then yes
yes:
  %hits = load i64, ptr %table
  %hits.next = add i64 %hits, 1
  store i64 %hits.next, ptr %table
  ret i64 1
other:
  ret i64 0
}
"""

_CONTENTS_TEXT = """
HASH
define i64 @ENTRY(ptr %table) #0 {
entry:
WORDS
  equal i64 %stale, 0 then samples.head
samples.head:
  %k = phi i64 [ 0, %entry ], [ %k.next, %sample ]
  %differ = phi i32 [ 0, %entry ], [ %differ.next, %sample ]
  %k.more = icmp slt i64 %k, %samples
  br i1 %k.more, label %sample, label %sampled
sample:
  %k.at = mul i64 %k, SAMPLEWORDS
  %pair = getelementptr i64, ptr %samples.at, i64 %k.at
  %at = load ptr, ptr %pair
  %now = load i32, ptr %at, align 1
  %then = word i32 %pair, 1
  %changed = xor i32 %now, %then
  %differ.next = or i32 %differ, %changed
  %k.next = add i64 %k, 1
  br label %samples.head
sampled:
  equal i32 %differ, 0 then slices.head
slices.head:
  %j = phi i64 [ 0, %sampled ], [ %j.next, %slice.same ]
  %place = phi i64 [ %cursor, %sampled ], [ %place.next, %slice.same ]
  %j.more = icmp slt i64 %j, %turn
  br i1 %j.more, label %slice, label %yes
slice:
  %j.at = mul i64 %place, SLICEWORDS
  %record = getelementptr i64, ptr %slices.at, i64 %j.at
  %slice.at = load ptr, ptr %record
  %bytes = word i64 %record, 1
  %hash.then = word i64 %record, 2
  %hash.now = call i64 @ENTRY.hash(ptr %slice.at, i64 %bytes)
  equal i64 %hash.now, %hash.then then slice.same
slice.same:
  %j.next = add i64 %j, 1
  %after = add i64 %place, 1
  %last = icmp sge i64 %after, %slices
  %place.next = select i1 %last, i64 0, i64 %after
  br label %slices.head
yes:
  %cursor.at = getelementptr i64, ptr %table, i64 CURSOR
  store i64 %place, ptr %cursor.at
  ret i64 1
other:
  ret i64 0
}
"""

# Each lane is a polynomial over its words with an odd factor, modulo 2**32, and the results are
# weighted with odd factors modulo 2**64: a change within one word is always seen.
_LANES, _ROWS = 16, 4
_VECTOR = f"<{_LANES} x i32>"
_WIDE = f"<{_LANES} x i64>"
_FACTOR, _ROW_FACTOR, _BYTE_FACTOR = 16777619, 40503, 1099511628211
_WEIGHT = 0x9E3779B97F4A7C15

_HASH_TEXT = """
define LINKAGE i64 @NAME(ptr %at, i64 %bytes) #0 {
entry:
  %rounds = udiv i64 %bytes, ROUND
  %behind = mul i64 %rounds, ROUND
  br label %wide.head
wide.head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %wide ]
PHIS
  %i.more = icmp ult i64 %i, %behind
  br i1 %i.more, label %wide, label %join
wide:
STEPS
  %i.next = add i64 %i, ROUND
  br label %wide.head
join:
JOINED
  br label %row.head
row.head:
  %r = phi i64 [ %behind, %join ], [ %r.next, %row ]
  %h = phi VECTOR [ %joined, %join ], [ %h.next, %row ]
  %r.next = add i64 %r, ROWBYTES
  %r.more = icmp ule i64 %r.next, %bytes
  br i1 %r.more, label %row, label %byte.head
row:
  %r.at = getelementptr i8, ptr %at, i64 %r
  %r.now = load VECTOR, ptr %r.at, align 1
  %h.scaled = mul VECTOR %h, FACTORS
  %h.next = add VECTOR %h.scaled, %r.now
  br label %row.head
byte.head:
  %b = phi i64 [ %r, %row.head ], [ %b.next, %byte ]
  %t = phi i64 [ 0, %row.head ], [ %t.next, %byte ]
  %b.more = icmp ult i64 %b, %bytes
  br i1 %b.more, label %byte, label %done
byte:
  %b.at = getelementptr i8, ptr %at, i64 %b
  %b.now = load i8, ptr %b.at
  %b.word = zext i8 %b.now to i64
  %t.scaled = mul i64 %t, BYTEFACTOR
  %t.next = add i64 %t.scaled, %b.word
  %b.next = add i64 %b, 1
  br label %byte.head
done:
  %h.wide = zext VECTOR %h to WIDE
  %h.weighted = mul WIDE %h.wide, WEIGHTS
  %h.sum = call i64 @llvm.vector.reduce.add.vLANESi64(WIDE %h.weighted)
  %t.weighted = mul i64 %t, BYTEFACTOR
  %sum = add i64 %h.sum, %t.weighted
  ret i64 %sum
}
"""
_REDUCE = f"declare i64 @llvm.vector.reduce.add.v{_LANES}i64({_WIDE})"


def _hash_text(name: str, linkage: str) -> str:
    """The function of an address and a number of bytes; its `name` is without the @."""
    row = 4 * _LANES
    phis, steps = [], []
    for k in range(_ROWS):
        phis.append(f"  %h{k} = phi {_VECTOR} [ zeroinitializer, %entry ], [ %n{k}, %wide ]")
        steps += [
            f"  %o{k} = add i64 %i, {row * k}",
            f"  %p{k} = getelementptr i8, ptr %at, i64 %o{k}",
            f"  %x{k} = load {_VECTOR}, ptr %p{k}, align 1",
            f"  %m{k} = mul {_VECTOR} %h{k}, FACTORS",
            f"  %n{k} = add {_VECTOR} %m{k}, %x{k}",
        ]
    joined = []
    for k in range(1, _ROWS):
        before, after = "%h0" if k == 1 else f"%j{k - 1}", f"%j{k}" if k < _ROWS - 1 else "%joined"
        joined += [
            f"  %s{k} = mul {_VECTOR} {before}, {_splat(_ROW_FACTOR)}",
            f"  {after} = add {_VECTOR} %s{k}, %h{k}",
        ]
    weights = ", ".join(f"i64 {(k + 1) * _WEIGHT % 2**63 | 1}" for k in range(_LANES))
    return filled(
        _HASH_TEXT,
        NAME=name,
        LINKAGE=linkage,
        PHIS="\n".join(phis),
        STEPS="\n".join(steps),
        JOINED="\n".join(joined),
        ROUND=str(row * _ROWS),
        ROWBYTES=str(row),
        VECTOR=_VECTOR,
        WIDE=_WIDE,
        BYTEFACTOR=str(_BYTE_FACTOR),
        FACTORS=_splat(_FACTOR),
        WEIGHTS=f"<{weights}>",
        LANES=str(_LANES),
    )


def _splat(number: int) -> str:
    return "<" + ", ".join([f"i32 {number}"] * _LANES) + ">"


@cache
def hash_function(library: Library) -> Callable[[int, int], int]:
    """The hash of memory: of an address and a number of bytes."""
    kinds = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    return ctypes.CFUNCTYPE(*kinds)(library.address(_hash_kernel()))


def _hash_kernel() -> Kernel:
    return Kernel.of("hash", _hash_text("ENTRY", ""), [_REDUCE])


@cache
def contents_address(library: Library) -> int:
    """Where the test of contents is: a function of the address of their words."""
    return library.address(_contents_kernel())


def _contents_kernel() -> Kernel:
    counts = {"SAMPLEWORDS": SAMPLE, "SLICEWORDS": SLICE, "CURSOR": CONTENTS.index("cursor")}
    numbers = [name for name in CONTENTS if not name.endswith(".at")]
    words = {name: str(count) for name, count in counts.items()}
    head = table_words(CONTENTS, numbers)
    text = filled(_CONTENTS_TEXT, **words, **{"WORDS\n": head})
    text = written_out(filled(text, HASH=_hash_text("ENTRY.hash", "internal")))
    return Kernel.of("contents", text, [_REDUCE])


@cache
def contents_test(library: Library) -> Callable[[int], int]:
    """Whether contents are as they were, of the address of their words; in one call of it some of
    them are looked at. It keeps the interpreter lock."""
    kinds = (ctypes.c_int64, ctypes.c_void_p)
    return ctypes.PYFUNCTYPE(*kinds)(contents_address(library))


_NUMBERS = ("records", "length", "inside")
_FUNCTIONS = ("size.of", "item", "release", "address.of", "version.of")
_WORDS = (*_NUMBERS, *_FUNCTIONS, "contents", "contents.same")  # after the hits


@dataclass(frozen=True)
class KnownTensor:
    """A tensor among the arguments; a `version` of -1 is not asked for."""

    position: int
    tensor: torch.Tensor
    address: int
    version: int = -1


class ContentsWords(Protocol):
    """Contents that are looked at."""

    @property
    def address(self) -> int:
        """Where the words named CONTENTS are."""


def test_of(
    library: Library,
    length: int,
    tensors: Sequence[KnownTensor],
    contents: ContentsWords | None = None,
) -> tuple[Callable[[Any], int], Any] | None:
    """A test of a list or tuple of `length` arguments, and the table it counts its hits in; None
    where native code must not read objects. The table keeps `contents`, which it points to."""
    found = known()
    if found is None:
        return None
    about = 0 if contents is None else contents.address
    head = {"records": len(tensors), "length": length, "contents": about}
    head |= {name: found[name] for name in ("inside", *_FUNCTIONS)}
    head["contents.same"] = contents_address(library)
    words = [0, *(head[name] for name in _WORDS)]
    for t in tensors:
        words += (t.position, id(t.tensor), t.tensor._cdata, t.address, t.version)
    table: Any = (ctypes.c_int64 * len(words))(*words)
    table.keep_alive = contents
    entry = _test(library)
    at = ctypes.cast(table, ctypes.c_void_p)  # which keeps the table
    return lambda given: entry(given, at), table


@cache
def _test(library: Library) -> Any:
    """The test as a Python callable that keeps the interpreter lock."""
    kinds = (ctypes.c_int64, ctypes.py_object, ctypes.c_void_p)
    return ctypes.PYFUNCTYPE(*kinds)(test_address(library))


@cache
def test_address(library: Library) -> int:
    """Where the test is: a function of a list or tuple and a table."""
    return library.address(_test_kernel())


def _test_kernel() -> Kernel:
    words = {"RECORDWORDS": str(_RECORD), "HEADWORDS": str(HITS + 1 + len(_WORDS))}
    head = table_words(_WORDS, _NUMBERS, HITS + 1)
    text = filled(_TEXT, **words, **{"WORDS\n": head})
    return Kernel.of("same", written_out(text), ())


def identity_kernels() -> list[Kernel]:
    """All native functions here: a package brings them along."""
    return [_hash_kernel(), _contents_kernel(), _test_kernel()]
