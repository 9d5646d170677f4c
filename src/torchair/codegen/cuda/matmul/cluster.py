"""Sums that the blocks of a cluster have in parts: each block gets some columns of a tile from all
others, in its shared memory, adds them up, and does with them what the epilogue says.

What is sent comes to where the pieces of the factors were: the ring of stages is of no use between
the last products of a tile and the first pieces of the next one."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import WARPGROUP, number
from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.matmul.epilogue import TileEpilogue, TilePlace
from torchair.codegen.cuda.matmul.forms import BARRIER, BARRIERS, MatmulForm
from torchair.codegen.cuda.writer import GpuWriter

_PACK = 4
"""Floats that a thread sends at a time."""
SENT, FREE, READ = range(BARRIERS)
"""The numbers of its barriers."""


class Cluster:
    """The exchange of a block with the others of its cluster: its barriers, and room for what they
    send, which is that of the stages."""

    def __init__(self, w: GpuWriter, form: MatmulForm, start: str, room: str, thread: str) -> None:
        self.w, self.form, self.start, self.room = w, form, start, room
        self.threads = form.warpgroups * WARPGROUP
        self.thread = number(w, "sub", thread, WARPGROUP)  # among those that multiply
        self.lane = number(w, "and", thread, WARP - 1)
        self.rank = "0"
        if form.split > 1:
            self.rank = w.assembly("mov.u32 $0, %cluster_ctarank;", "i32", "=r")
        # floats that a thread has for each block
        self.count = form.sums // form.split

    def barriers(self) -> list[tuple[str, int]]:
        """One that ends a phase when all others have sent, one when all others have multiplied
        what is in their stages, and one when this block has read what was sent."""
        own = self.threads // WARP
        arrivals = ((self.form.split - 1) * own, (self.form.split - 1) * own, own)
        return [(self._barrier(k), count) for k, count in enumerate(arrivals)]

    def await_room(self, turn: str) -> None:
        """Wait until the stages are free for the pieces of a tile, so many being before it."""
        w = self.w
        self._await(READ, number(w, "and", number(w, "add", turn, 1), 1))

    def share(
        self,
        turn: str,
        sums: Sequence[Sequence[str]],
        place: TilePlace,
        epilogue: TileEpilogue,
    ) -> None:
        """Finish a tile, given the sums of a thread for each 64 rows, and how many tiles were
        before it."""
        w, split = self.w, self.form.split
        parity = number(w, "and", turn, 1)
        self._arrive_at_others(FREE)
        self._await(FREE, parity)
        for block in range(split):
            with w.when(w(f"icmp ne i32 {self.rank}, {block}")):
                self._send(block, self._part(sums, block))
        self._arrive_at_others(SENT)
        self._await(SENT, parity)
        each = self.form.columns // split
        for block in range(split):
            with w.when(w(f"icmp eq i32 {self.rank}, {block}")):
                total = self._added(self._part(sums, block))
                self._arrive_here(READ)
                column = w.add(place.column, str(block * each))
                epilogue.write(TilePlace(place.batch, place.row, column), total)

    def _part(self, sums: Sequence[Sequence[str]], block: int) -> list[Sequence[str]]:
        """The sums of the columns that one block gets."""
        each = self.form.columns // 2 // self.form.split
        return [mine[block * each : (block + 1) * each] for mine in sums]

    def _barrier(self, k: int) -> str:
        return number(self.w, "add", self.start, BARRIER * k)

    def _await(self, k: int, parity: str) -> None:
        hopper.await_phase(self.w, self._barrier(k), parity, cluster=True)

    def _room(self, slot: str) -> str:
        """Where a thread's floats from one of the others are."""
        w = self.w
        far = number(w, "mul", slot, self.threads * self.count * 4)
        mine = number(w, "mul", self.thread, _PACK * 4)
        return number(w, "add", number(w, "add", self.room, far), mine)

    def _send(self, block: int, sums: Sequence[Sequence[str]]) -> None:
        w = self.w
        # how far this block is behind the other one
        behind = number(w, "sub", number(w, "add", self.rank, self.form.split - 1), block)
        room = self._room(number(w, "urem", behind, self.form.split))
        there = hopper.remote(w, room, block)
        flat = [x for mine in sums for x in mine]
        for k in range(0, len(flat), _PACK):
            at = number(w, "add", there, k * self.threads * 4)
            hopper.send(w, at, flat[k : k + _PACK])

    def _added(self, sums: Sequence[Sequence[str]]) -> list[list[str]]:
        """The sums with those that were sent, in the order of the blocks behind this one."""
        w, total = self.w, [list(mine) for mine in sums]
        each = len(total[0])
        for slot in range(self.form.split - 1):
            room = self._room(str(slot))
            for k in range(0, self.count, _PACK):
                got = hopper.received(w, number(w, "add", room, k * self.threads * 4))
                mine = total[k // each]
                for i, x in enumerate(got, k % each):
                    mine[i] = w(f"fadd float {mine[i]}, {x}")
        return total

    def _arrive_here(self, k: int) -> None:
        """What this warp read may be written by the copy engine."""
        w = self.w
        hopper.engine_fence(w)
        w.warp_barrier()
        with w.when(w(f"icmp eq i32 {self.lane}, 0")):
            hopper.arrive(w, self._barrier(k))

    def _arrive_at_others(self, k: int) -> None:
        """What this warp wrote is done, or its products."""
        w = self.w
        w.warp_barrier()
        with w.when(w(f"icmp eq i32 {self.lane}, 0")):
            for block in range(self.form.split):
                with w.when(w(f"icmp ne i32 {self.rank}, {block}")):
                    hopper.arrive_there(w, hopper.remote(w, self._barrier(k), block))
