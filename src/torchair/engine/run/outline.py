"""Where the words of a native segment go.

That depends on the steps and on the kinds of memory they use, not on sizes: segments of plans that
differ in numbers only share an `Outline`, and binding one writes numbers and addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchair.codegen.cpu.driver import BARRIER, HEADER, PATCH, STEP
from torchair.engine.plan.records import Plan, Root, Step

LINE = 8  # words in a cache line

Range = tuple[int, int, int]
"""A piece of memory: (space, first byte, last + 1); the arena is space -1."""


class Outline:
    """Positions in the memory of a segment, all in words: a header, a line for the barrier, the
    records of steps, their argument blocks, patches, addresses given by the caller, faults."""

    def __init__(self, steps: Sequence[Step], plan: Plan, last: Sequence[int]) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not."""
        self.records = HEADER + LINE
        self.blocks: list[int] = []  # where the argument block of each step begins
        self.numbers: list[tuple[int, int]] = []  # where the numbers of each step are
        self.packed: list[tuple[int, torch.Tensor]] = []  # (word, constant)
        self.placed: list[tuple[int, int]] = []  # (word, slot) in the arena
        self.constants: list[tuple[int, int]] = []  # (word, slot)
        self.scratch: list[int] = []
        self.faults: list[tuple[int, int]] = []  # (word, number of the step)
        given: list[tuple[int, int]] = []  # (word, slot)
        end = self.records + STEP * len(steps)
        for k, step in enumerate(steps):
            self._add(k, step, end, plan, given)
            end += step.code.words
        self._arrange(given, plan, last)
        self.patches_at, end = end, end + PATCH * len(self.patches)
        self.sources_at, end = end, end + len(self.sources)
        self.faults_at, end = end, end + len(self.faults)
        self.total = end
        self._find_writes(steps, plan)

    def _add(self, k: int, step: Step, at: int, plan: Plan, given: list[tuple[int, int]]) -> None:
        code = step.code
        end = at + code.words
        self.blocks.append(at)
        self.numbers.append((end - len(code.numbers), end))
        lists = {"arena": self.placed, "const": self.constants}
        for word, slot in enumerate(code.slots, at):
            if isinstance(slot, torch.Tensor):
                self.packed.append((word, slot))
            elif isinstance(slot, int):
                lists.get(plan.place(slot)[0].kind, given).append((word, slot))
            elif slot == "scratch":
                self.scratch.append(word)
            else:
                self.faults.append((word, k))

    def _arrange(self, given: list[tuple[int, int]], plan: Plan, last: Sequence[int]) -> None:
        """Slots whose address is asked for at each call, and the words that it goes to."""
        owners = [_owner(plan.place(slot)[0]) for _, slot in given]
        self.sources = [s for s in dict.fromkeys(owners) if s not in last] + list(last)
        number = {s: k for k, s in enumerate(self.sources)}
        self.patches = [
            (word, number[owner], slot) for (word, slot), owner in zip(given, owners, strict=True)
        ]

    def _find_writes(self, steps: Sequence[Step], plan: Plan) -> None:
        """For each step the memory that it reads and that it writes, as far as steps write it."""
        written = {_space(plan.place(s)[0]) for step in steps for s in step.outs}
        self._touched: list[tuple[list[int], list[int]]] = []
        for step in steps:
            read = [plan.place(s)[0] for s in step.args if isinstance(s, int)]
            ins = [r.slot for r in read if _space(r) in written]
            self._touched.append((ins, [plan.place(s)[0].slot for s in step.outs]))
        self._owners = {s for ins, outs in self._touched for s in (*ins, *outs)}
        before = [([], []), *self._touched]
        self._sure = [  # steps that wait for the one before, wherever memory is
            not {*ins, *outs}.isdisjoint(written) or not set(outs).isdisjoint(read)
            for (ins, outs), (read, written) in zip(self._touched, before, strict=False)
        ]

    def ranges(self, plan: Plan) -> list[tuple[list[Range], list[Range]]]:
        """For each step the memory that it reads, as far as steps write it, and that it writes."""
        found = {s: range_of(plan.places[s][0]) for s in self._owners}
        return [([found[s] for s in ins], [found[s] for s in outs]) for ins, outs in self._touched]

    def barriers(self, steps: Sequence[Step], plan: Plan) -> list[int]:
        """Flags of the steps: those wait for all threads that touch what was just written."""
        ranges = {s: range_of(plan.places[s][0]) for s in self._owners}
        flags: list[int] = []
        reads: list[Range] = []
        writes: list[Range] = []
        scratch = 0
        for step, (args, made), sure in zip(steps, self._touched, self._sure, strict=True):
            ins, outs = [ranges[s] for s in args], [ranges[s] for s in made]
            own = step.code.scratch
            waits = sure or bool(scratch and own and scratch != own)
            waits = waits or meet(ins, writes) or meet(outs, writes) or meet(outs, reads)
            if waits and flags:
                reads, writes, scratch = [], [], 0
            reads += ins
            writes += outs
            scratch = own or scratch
            flags.append(BARRIER if waits else 0)
        return flags


def _owner(root: Root) -> int:
    """The slot with the tensor that a root is the memory of."""
    return root.tied_to if root.kind == "tied" else root.slot


def _space(root: Root) -> int:
    return -1 if root.kind == "arena" else _owner(root)


def range_of(root: Root) -> Range:
    """Where a root is; an empty one in the arena meets no other."""
    if root.kind == "arena" and root.bytes:
        return -1, root.offset, root.offset + root.bytes
    return _owner(root), 0, 1


def meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether two lots of memory have a byte in common."""
    for space, first, end in some:
        for space2, first2, end2 in others:
            if space == space2 and first < end2 and first2 < end:
                return True
    return False
