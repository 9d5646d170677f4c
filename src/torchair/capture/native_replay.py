"""A replay with exchanged addresses as one native function: arguments are looked at, their
addresses compared with those in the graph, kernels get new ones, and the graph is launched. Python
does the same in `exchange.py`, for calls that this function refuses.

The function runs behind a native guard (`codegen/cpu/native_guard.py`), which writes the addresses
of arguments and results into the table. Its caller holds the lock of the graph.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.native_guard import Task
from torchair.codegen.cpu.target import cpu
from torchair.codegen.cpu.templates import filled, table_words, written_out
from torchair.codegen.cuda.graphs import GraphTable
from torchair.codegen.target import Kernel

HEAD = (
    "status", "pieces", "pieces.at", "given", "bound", "updated", "updated.at", "patches",
    "nodes", "list", "round", "exec", "stream", "launch", "memcpy", "words", "words.at",
    "served",
)  # fmt: skip
"""Words of the table. `words` are those in which kernels note bad indices: (address, number)."""
_NUMBERS = frozenset({"status", "pieces", "updated", "round", "words", "served"})

PIECE = ("first", "end", "size", "copy", "kind")
"""Words of a piece of memory: its patches, its bytes, where it is copied to, and its `Kind`."""
PATCH = ("target", "offset", "half", "node")
NODE = ("setter", "handle", "params", "context", "seen")
"""Words of a node; `context` is 0 for kernels, whose setter takes none."""

FREE, LOOKED_AT, FIXED = 0, 1, 2
"""Kinds of pieces: any address will do; one that may be read by kernels of libraries; only the one
that is bound."""
ALIGNED = 256
"""Bytes. Kernels were chosen for addresses that are multiples of it."""
REFUSED = 1
"""Status of a call that Python must serve. Codes of the driver are negative."""

_LOOP = """  br label %NAME.head
NAME.head:
  %NAME = phi i64 [ START, %FROM ], [ %NAME.more, %NAME.next ]
  %NAME.in = icmp slt i64 %NAME, END
  br i1 %NAME.in, label %NAME.body, label %NAME.done
NAME.next:
  %NAME.more = add i64 %NAME, 1
  br label %NAME.head
NAME.body:
"""

_TEXT = """
define void @ENTRY(ptr %table) #0 {
entry:
  %listed = alloca i64
  store i64 0, ptr %listed
HEAD
LOOP w 0 %words entry
  %w.word = mul i64 %w, 2
  %w.at = getelementptr i64, ptr %words.at, i64 %w.word
  %faults = word ptr %w.at, 0
  %count = word i64 %w.at, 1
LOOP f 0 %count w.body
  %fault = word i64 %faults, %f
  %fine = icmp eq i64 %fault, 0
  br i1 %fine, label %f.next, label %refused
f.done:
  br label %w.next
w.done:

LOOP p 0 %pieces w.done
  %now = word i64 %given, %p
  %then = word i64 %bound, %p
  %same = icmp eq i64 %now, %then
  br i1 %same, label %p.next, label %look
look:
  %p.word = mul i64 %p, PIECEWORDS
  %p.at = getelementptr i64, ptr %pieces.at, i64 %p.word
  %size = word i64 %p.at, 2
  %kind = word i64 %p.at, 4
  switch i64 %kind, label %p.next [
    i64 1, label %aligned
    i64 2, label %refused
  ]
aligned:
  %low.bits = and i64 %now, ALIGNEDMASK
  %is.aligned = icmp eq i64 %low.bits, 0
  br i1 %is.aligned, label %apart, label %refused
apart:
  %now.end = add i64 %now, %size
LOOP u 0 %updated apart
  %u.word = mul i64 %u, 2
  %u.at = getelementptr i64, ptr %updated.at, i64 %u.word
  %u.low = word i64 %u.at, 0
  %u.high = word i64 %u.at, 1
  %before = icmp ult i64 %now, %u.high
  %behind = icmp ult i64 %u.low, %now.end
  %both = and i1 %before, %behind
  br i1 %both, label %refused, label %u.next
u.done:
  br label %p.next
p.done:

  %round.next = add i64 %round, 1
  %round.at = getelementptr i64, ptr %table, i64 ROUNDAT
  store i64 %round.next, ptr %round.at
LOOP b 0 %pieces p.done
  %b.word = mul i64 %b, PIECEWORDS
  %b.at = getelementptr i64, ptr %pieces.at, i64 %b.word
  %b.now = word i64 %given, %b
  %copy = word i64 %b.at, 3
  %copied = icmp ne i64 %copy, 0
  br i1 %copied, label %bring, label %compare
bring:
  %b.size = word i64 %b.at, 2
  %brought = call i32 %memcpy(i64 %copy, i64 %b.now, i64 %b.size, ptr %stream)
  %brought.well = icmp eq i32 %brought, 0
  br i1 %brought.well, label %compare, label %bring.failed
bring.failed:
  br label %failed
compare:
  %wanted = select i1 %copied, i64 %copy, i64 %b.now
  %b.then.at = getelementptr i64, ptr %bound, i64 %b
  %b.then = load i64, ptr %b.then.at
  %stays = icmp eq i64 %wanted, %b.then
  br i1 %stays, label %b.next, label %moved
moved:
  store i64 %wanted, ptr %b.then.at
  %first = word i64 %b.at, 0
  %end = word i64 %b.at, 1
LOOP q %first %end moved
  %q.word = mul i64 %q, PATCHWORDS
  %q.at = getelementptr i64, ptr %patches, i64 %q.word
  %target = word ptr %q.at, 0
  %offset = word i64 %q.at, 1
  %half = word i64 %q.at, 2
  %node = word i64 %q.at, 3
  %address = add i64 %wanted, %offset
  %is.half = icmp ne i64 %half, 0
  br i1 %is.half, label %write.half, label %write.whole
write.half:
  %low = trunc i64 %address to i32
  store i32 %low, ptr %target
  br label %note
write.whole:
  store i64 %address, ptr %target
  br label %note
note:
  %n.word = mul i64 %node, NODEWORDS
  %n.at = getelementptr i64, ptr %nodes, i64 %n.word
  %seen.at = getelementptr i64, ptr %n.at, i64 4
  %seen = load i64, ptr %seen.at
  %known = icmp eq i64 %seen, %round.next
  br i1 %known, label %q.next, label %append
append:
  store i64 %round.next, ptr %seen.at
  %place = load i64, ptr %listed
  %list.at = getelementptr i64, ptr %list, i64 %place
  store i64 %node, ptr %list.at
  %place.next = add i64 %place, 1
  store i64 %place.next, ptr %listed
  br label %q.next
q.done:
  br label %b.next
b.done:

  %changed = load i64, ptr %listed
LOOP s 0 %changed b.done
  %s.node = word i64 %list, %s
  %s.word = mul i64 %s.node, NODEWORDS
  %s.at = getelementptr i64, ptr %nodes, i64 %s.word
  %setter = word ptr %s.at, 0
  %handle = word ptr %s.at, 1
  %params = word ptr %s.at, 2
  %context = word ptr %s.at, 3
  %is.kernel = icmp eq ptr %context, null
  br i1 %is.kernel, label %set.kernel, label %set.other
set.kernel:
  %set.a = call i32 %setter(ptr %exec, ptr %handle, ptr %params)
  br label %set
set.other:
  %set.b = call i32 %setter(ptr %exec, ptr %handle, ptr %params, ptr %context)
  br label %set
set:
  %set.code = phi i32 [ %set.a, %set.kernel ], [ %set.b, %set.other ]
  %set.well = icmp eq i32 %set.code, 0
  br i1 %set.well, label %s.next, label %set.failed
set.failed:
  br label %failed
s.done:

  %launched = call i32 %launch(ptr %exec, ptr %stream)
  %launched.well = icmp eq i32 %launched, 0
  br i1 %launched.well, label %fine.end, label %launch.failed
launch.failed:
  br label %failed
fine.end:
  %served.next = add i64 %served, 1
  %served.at = getelementptr i64, ptr %table, i64 SERVEDAT
  store i64 %served.next, ptr %served.at
  ret void
failed:
  %code = phi i32 [ %brought, %bring.failed ], [ %set.code, %set.failed ],
    [ %launched, %launch.failed ]
  %wide = sext i32 %code to i64
  %negative = sub i64 0, %wide
  store i64 %negative, ptr %table
  ret void
refused:
  store i64 REFUSEDCODE, ptr %table
  ret void
}
"""


def _text() -> str:
    """The function in LLVM's language; its name is ENTRY."""
    text = filled(_TEXT, **{"HEAD\n": table_words(HEAD, _NUMBERS)})
    text = _LOOPS.sub(lambda m: filled(_LOOP, **m.groupdict()), text)
    return written_out(
        filled(
            text,
            PIECEWORDS=str(len(PIECE)),
            PATCHWORDS=str(len(PATCH)),
            NODEWORDS=str(len(NODE)),
            ALIGNEDMASK=str(ALIGNED - 1),
            SERVEDAT=str(HEAD.index("served")),
            ROUNDAT=str(HEAD.index("round")),
            REFUSEDCODE=str(REFUSED),
        )
    )


_LOOPS = re.compile(r"^LOOP (?P<NAME>\S+) (?P<START>\S+) (?P<END>\S+) (?P<FROM>\S+)$", re.M)


@cache
def _address(library: Library) -> int:
    return library.address(Kernel.of("replay", _text(), ()))


@dataclass(frozen=True)
class CallArgument:
    """A piece of memory that a call brings along: `kind` tells what its address may be, `copy`
    where the graph has a copy of it, if it reads one."""

    size: int
    kind: int
    copy: int = 0


class NativeReplay:
    """The table of one graph, and the function that reads it."""

    def __init__(
        self,
        graph: GraphTable,
        pieces: Sequence[CallArgument],
        bound: ctypes.Array[ctypes.c_int64],
        updated: Sequence[tuple[int, int]],
        faults: Sequence[tuple[int, int]],
        retained: Any,
    ) -> None:
        """`bound` are the addresses in the graph, which Python exchanges too; `updated` are ranges
        of memory that no piece may overlap; `faults` are words, by address and number, that must be
        zero; `retained` is what the graph refers to."""
        self._library, self.bound = cpu().library, bound
        self.given = (ctypes.c_int64 * len(pieces))(*bound)
        numbers = {n: k for k, n in enumerate(graph.nodes)}
        patches, described = list[int](), list[int]()
        for k, piece in enumerate(pieces):
            first = len(patches) // len(PATCH)
            for target, offset, half, node in graph.patches[k] if k < len(graph.patches) else ():
                patches += (target, offset, half, numbers[node])
            end = len(patches) // len(PATCH)
            described += (first, end, piece.size, piece.copy, piece.kind)
        nodes = [word for node in graph.nodes.values() for word in (*node, 0)]
        lists = {
            "pieces.at": described,
            "updated.at": [word for pair in updated for word in pair],
            "patches": patches,
            "nodes": nodes,
            "list": [0] * len(graph.nodes),
            "words.at": [word for pair in faults for word in pair],
        }
        self._lists = {n: (ctypes.c_int64 * max(1, len(x)))(*x) for n, x in lists.items()}
        head = dict.fromkeys(HEAD, 0) | {n: ctypes.addressof(x) for n, x in self._lists.items()}
        head |= {"pieces": len(pieces), "updated": len(updated), "words": len(faults)}
        head |= {"given": ctypes.addressof(self.given), "bound": ctypes.addressof(bound)}
        head |= {"exec": graph.exec, "launch": graph.launch, "memcpy": graph.memcpy}
        self.table = (ctypes.c_int64 * len(HEAD))(*(head[name] for name in HEAD))
        self._retained = graph, retained

    def place(self, piece: int) -> int:
        """Where the address of a piece is to be written."""
        return ctypes.addressof(self.given) + 8 * piece

    @property
    def task(self) -> Task:
        """What a native guard is to run. The interpreter lock is free meanwhile: a launch may wait
        for the device."""
        table = ctypes.addressof(self.table)
        status = table + 8 * STATUS
        return Task(table, _address(self._library), 1, status, 1, long=True, keep_alive=self)

    def run(self) -> int:
        """Run it for the addresses in `given`; the status, which is 0 again."""
        _callable(self._library)(ctypes.addressof(self.table))
        return self.take_status()

    @property
    def served(self) -> int:
        """Launches so far."""
        return self.table[HEAD.index("served")]

    def take_status(self) -> int:
        """The status of the call before."""
        status, self.table[STATUS] = self.table[STATUS], 0
        return status


@cache
def _callable(library: Library) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_address(library))


STATUS, STREAM = HEAD.index("status"), HEAD.index("stream")
