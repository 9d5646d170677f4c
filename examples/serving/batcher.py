"""Texts that are written side by side: a thread that takes requests from a bounded queue, gives
each a row, and computes a token for all rows in turn. A text leaves when it is complete, and the
next one takes its place; nobody waits for the longest text of a batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from serving.sampling import GREEDY, Sampling, choose


class Model(Protocol):
    """What a batcher runs, see `serving.decoder.Decoder`."""

    sizes: Any

    def prefill(self, prompt: Sequence[int], row: int) -> torch.Tensor: ...

    def decode(self, tokens: Sequence[int], places: Sequence[int]) -> torch.Tensor: ...

    def move(self, source: int, target: int, length: int) -> None: ...


class End(Enum):
    """Why a text has ended; the last thing that is delivered for it."""

    LENGTH = "length"
    STOP = "stop"
    ERROR = "error"


Event = int | End


class Full(Exception):
    """The queue has no place."""


class Closed(Exception):
    """No more texts are taken: the replica is being shut down, or its model has failed."""


@dataclass(eq=False)
class Ticket:
    """A text that is wanted, and how far it is."""

    prompt: Sequence[int]
    limit: int
    deliver: Callable[[Event], None]
    sampling: Sampling = GREEDY
    before: int = 0  # tokens at the end of the prompt that are part of the answer
    cancelled: bool = False
    made: int = 0
    token: int = 0  # the one made last, which no row has yet

    @property
    def place(self) -> int:
        """Where the last token goes."""
        return len(self.prompt) + self.made - 1

    @property
    def choice(self) -> tuple[Sampling, int]:
        """How the next token is chosen, and how many of the answer came before."""
        return self.sampling, self.before + self.made


class Batcher:
    """A thread that runs a decoder. `waiting` texts may wait beside those that have a row; `stops`
    are the tokens that end a text."""

    def __init__(self, decoder: Model, waiting: int, stops: frozenset[int] = frozenset()) -> None:
        self.decoder, self._stops = decoder, stops
        self.most = decoder.sizes.rows[-1] + waiting
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []  # by row
        self._changed = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        limit: int,
        deliver: Callable[[Event], None],
        sampling: Sampling = GREEDY,
        before: int = 0,
    ) -> Ticket:
        """Queue a text of at most `limit` tokens. `deliver` is called in our thread with each
        token as it is made, and at last with an End. Full if there is no place, Closed if there
        will be none. The last `before` tokens of the prompt belong to the answer: another
        replica has made them."""
        ticket = Ticket(prompt, limit, deliver, sampling, before)
        with self._changed:
            if self._failure is not None:
                raise Closed(f"the model has failed ({self._failure}); the replica is replaced")
            if self._closing:
                raise Closed("this replica is being shut down; ask again")
            if sum(self.load) >= self.most:
                raise Full(
                    f"the queue is full: {self.most} texts are being written or wait; ask again "
                    "later"
                )
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody reads this text any more: its row is for another."""
        with self._changed:
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Take no more texts, and wait until all that were taken are complete."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def check(self) -> None:
        """Raise if the model has failed."""
        if self._failure is not None:
            raise RuntimeError(f"the model has failed: {self._failure}") from self._failure

    @property
    def load(self) -> tuple[int, int]:
        """How many texts are being written, and how many wait."""
        return len(self._running), len(self._waiting)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as e:  # whatever the model raises, nobody may wait for ever
            with self._changed:
                self._failure = e
                left = [*self._running, *self._waiting]
                self._running, self._waiting = [], deque()
            for ticket in left:
                _deliver(ticket, End.ERROR)

    def _turn(self) -> bool:
        """One prompt at most, then a token for each row. False if there is nothing left to do."""
        with self._changed:
            while not (self._waiting or self._running or self._closing):
                self._changed.wait()
            if not self._waiting and not self._running:
                return False
            free = len(self._running) < self.decoder.sizes.rows[-1]
            ticket = self._waiting.popleft() if self._waiting and free else None
            if ticket is not None:
                self._running.append(ticket)
        if ticket is not None:
            scores = self.decoder.prefill(ticket.prompt, len(self._running) - 1)
            (token,) = choose(scores.unsqueeze(0), [ticket.choice])
            self._take(ticket, token)
        self._leave()
        if self._running:
            texts = self._running
            scores = self.decoder.decode([t.token for t in texts], [t.place for t in texts])
            made = choose(scores, [t.choice for t in texts])
            for ticket, token in zip(texts, made, strict=True):
                self._take(ticket, token)
            self._leave()
        return True

    def _take(self, ticket: Ticket, token: int) -> None:
        """A text has one more token."""
        ticket.token = token
        ticket.made += 1
        _deliver(ticket, token)

    def _leave(self) -> None:
        """Texts that are complete give up their rows, which the last ones take over."""
        for row in reversed(range(len(self._running))):
            ticket = self._running[row]
            end = self._end(ticket)
            if end is None and not ticket.cancelled:
                continue
            last = len(self._running) - 1
            self.decoder.move(last, row, self._running[last].place)
            self._running[row] = self._running[last]
            self._running.pop()
            if end is not None:
                _deliver(ticket, end)

    def _end(self, ticket: Ticket) -> End | None:
        if ticket.token in self._stops:
            return End.STOP
        return End.LENGTH if ticket.made >= ticket.limit else None


def _deliver(ticket: Ticket, event: Event) -> None:
    """A reader that is gone is no reason to stop for the others."""
    if not ticket.cancelled:
        try:
            ticket.deliver(event)
        except Exception:
            ticket.cancelled = True


class TextStream:
    """The tokens of a text as they are made, and why it ended. Who stops reading closes it, and
    the text is cancelled. It is queued at once: Full and Closed are raised here, not when it is
    read."""

    def __init__(
        self,
        batcher: Batcher,
        prompt: Sequence[int],
        limit: int,
        sampling: Sampling = GREEDY,
        before: int = 0,
    ) -> None:
        self._arrived: asyncio.Queue[Event] = asyncio.Queue()
        self._batcher, self._loop, self._ended = batcher, asyncio.get_running_loop(), False
        self._ticket = batcher.submit(prompt, limit, self._deliver, sampling, before)

    def _deliver(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, event)

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._arrived.get()
        self._ended = isinstance(event, End)
        return event

    async def aclose(self) -> None:
        """Nobody reads on."""
        self._batcher.cancel(self._ticket)
