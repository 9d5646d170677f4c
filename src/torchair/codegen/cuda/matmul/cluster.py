"""Sums that the blocks of a cluster have in parts: each block gets some columns of a tile from all
others, in its shared memory, adds them up, and does with them what the epilogue says."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import WARPGROUP, number
from torchair.codegen.cuda.jit import WARP
from torchair.codegen.cuda.matmul.epilogue import TileEpilogue, TilePlace
from torchair.codegen.cuda.matmul.forms import BARRIER, MatmulForm
from torchair.codegen.cuda.writer import GpuWriter

_PACK = 4
"""Floats that a thread sends at a time."""


class Cluster:
    """The exchange of a block with the others of its cluster. Behind its barriers at `start` is
    room for what they send."""

    def __init__(self, w: GpuWriter, form: MatmulForm, start: str, thread: str) -> None:
        self.w, self.form, self.start = w, form, start
        self.threads = form.warpgroups * WARPGROUP
        self.thread = number(w, "sub", thread, WARPGROUP)  # among those that multiply
        self.lane = number(w, "and", thread, WARP - 1)
        self.rank = "0"
        if form.split > 1:
            self.rank = w.assembly("mov.u32 $0, %cluster_ctarank;", "i32", "=r")
        # floats that a thread has for each block
        self.count = form.sums // form.split

    def barriers(self) -> list[tuple[str, int]]:
        """One that ends a phase when all have sent, one when all have read what was sent."""
        warps = (self.form.split - 1) * self.threads // WARP
        return [(number(self.w, "add", self.start, BARRIER * k), warps) for k in range(2)]

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
        hopper.await_phase(w, self._barrier(1), number(w, "xor", parity, 1), cluster=True)
        for block in range(split):
            with w.when(w(f"icmp ne i32 {self.rank}, {block}")):
                self._send(block, self._part(sums, block))
        self._arrive_at_others(0)
        hopper.await_phase(w, self._barrier(0), parity, cluster=True)
        each = self.form.columns // split
        for block in range(split):
            with w.when(w(f"icmp eq i32 {self.rank}, {block}")):
                total = self._added(self._part(sums, block))
                self._arrive_at_others(1)
                column = w.add(place.column, str(block * each))
                epilogue.write(TilePlace(place.batch, place.row, column), total)

    def _part(self, sums: Sequence[Sequence[str]], block: int) -> list[Sequence[str]]:
        """The sums of the columns that one block gets."""
        each = self.form.columns // 2 // self.form.split
        return [mine[block * each : (block + 1) * each] for mine in sums]

    def _barrier(self, k: int) -> str:
        return number(self.w, "add", self.start, BARRIER * k)

    def _room(self, slot: str) -> str:
        """Where a thread's floats from one of the others are."""
        w = self.w
        far = number(w, "mul", slot, self.threads * self.count * 4)
        mine = number(w, "mul", self.thread, _PACK * 4)
        start = number(w, "add", self.start, 2 * BARRIER)
        return number(w, "add", number(w, "add", start, far), mine)

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

    def _arrive_at_others(self, k: int) -> None:
        """What this warp wrote is done, or what it read."""
        w = self.w
        w.warp_barrier()
        with w.when(w(f"icmp eq i32 {self.lane}, 0")):
            for block in range(self.form.split):
                with w.when(w(f"icmp ne i32 {self.rank}, {block}")):
                    hopper.arrive_there(w, hopper.remote(w, self._barrier(k), block))
