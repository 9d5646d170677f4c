"""Text of tokens as they come: characters that need several tokens, stop strings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.batcher import End, Event


class Writer:
    """Text of tokens as they come. What only later tokens make a character of waits for them."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._tokens: list[int] = []
        self._begin = self._told = 0  # tokens that are decoded again, tokens that were told

    def add(self, token: int) -> str:
        """The text that this token adds."""
        self._tokens.append(token)
        return self._new(complete=False)

    def finish(self) -> str:
        """The text of what still waits."""
        return self._new(complete=True)

    def _new(self, complete: bool) -> str:
        before, now = (
            self._words.decode(tokens) if tokens else ""
            for tokens in (self._tokens[self._begin : self._told], self._tokens[self._begin :])
        )
        if now.endswith("\ufffd") and not complete:
            return ""
        self._begin, self._told = self._told, len(self._tokens)
        return now[len(before) :]


@dataclass
class StopText:
    """A text up to the first of some strings. What may be the begin of one waits."""

    stops: Sequence[str]
    stopped: bool = False
    _waiting: str = ""

    def add(self, text: str) -> str:
        """What of the text so far can be shown now."""
        whole, self._waiting = self._waiting + text, ""
        found = [at for stop in self.stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped = True
            return whole[: min(found)]
        kept = max((_begun(whole, stop) for stop in self.stops), default=0)
        self._waiting = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def finish(self) -> str:
        """What still waits, when there is no more."""
        text, self._waiting = self._waiting, ""
        return text


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the begin of a stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: str | None = None  # the finish reason, of the last piece


async def pieces(
    events: AsyncIterator[Event], words: Any, stops: Sequence[str] = (), before: Sequence[int] = ()
) -> AsyncGenerator[Piece]:
    """An answer token by token, up to a stop string. Of tokens that came `before` nothing is
    shown: who reads has them."""
    writer, text = Writer(words), StopText(stops)
    for token in before:
        text.add(writer.add(token))
    async for event in events:
        if isinstance(event, End):
            rest = text.add(writer.finish())
            yield Piece(rest + ("" if text.stopped else text.finish()), [], event.value)
            return
        shown = text.add(writer.add(event))
        yield Piece(shown, [event], "stop" if text.stopped else None)
        if text.stopped:
            return
