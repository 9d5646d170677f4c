"""Requests and answers as JSON, in the form of OpenAI's completions, which vLLM and SGLang speak as
well. What cannot be served is refused with a status and a sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from serving.batcher import End, Event

DEFAULT = 16  # tokens of an answer, where a request does not say
GREEDY = {"temperature": 0, "top_p": 1, "n": 1, "best_of": 1}


class Refused(Exception):
    """A request that is not served: the status of HTTP and a sentence for the user."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence

    def body(self) -> dict[str, Any]:
        """The answer that says so."""
        return {"error": {"message": self.sentence, "code": self.status}}


@dataclass(frozen=True)
class Wish:
    """What a request asks for."""

    prompt: tuple[int, ...]
    limit: int
    stream: bool


def read(body: bytes, words: Any, vocabulary: int, context: int) -> Wish:
    """The wish of a request; Refused with 400 and a sentence if there is something wrong."""
    try:
        asked = json.loads(body)
    except ValueError as e:
        raise Refused(400, f"the body is no JSON: {e}") from None
    if not isinstance(asked, dict):
        raise Refused(400, 'the body must be an object such as {"prompt": "...", "max_tokens": 16}')
    for name, value in GREEDY.items():
        if asked.get(name) not in (None, value):
            raise Refused(400, f"{name} must be {value}: this server takes the likeliest token")
    prompt, limit = _prompt(asked.get("prompt"), words, vocabulary), _limit(asked)
    stream = asked.get("stream", False)
    if not isinstance(stream, bool):
        raise Refused(400, f"stream must be true or false, not {json.dumps(stream)}")
    if len(prompt) + limit > context:
        raise Refused(
            400,
            f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together more than "
            f"the {context} that a text can have here",
        )
    return Wish(prompt, limit, stream)


def _prompt(given: Any, words: Any, vocabulary: int) -> tuple[int, ...]:
    if isinstance(given, str):
        given = words.encode(given)
    elif not isinstance(given, list) or any(type(t) is not int for t in given):
        raise Refused(400, "prompt must be a text, or a list of numbers of tokens")
    beyond = next((t for t in given if not 0 <= t < vocabulary), None)
    if beyond is not None:
        raise Refused(400, f"the prompt has token {beyond}, but they go from 0 to {vocabulary - 1}")
    if not given:
        raise Refused(400, "the prompt is empty")
    return tuple(given)


def _limit(asked: dict[str, Any]) -> int:
    limit = asked.get("max_tokens", DEFAULT)
    if type(limit) is not int or limit < 1:
        raise Refused(400, f"max_tokens must be a number from 1 on, not {json.dumps(limit)}")
    return limit


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


def piece(text: str, tokens: list[int], end: End | None) -> dict[str, Any]:
    """A piece of an answer, or all of it."""
    choice = {
        "index": 0, "text": text, "token_ids": tokens,
        "finish_reason": None if end is None else end.value,
    }  # fmt: skip
    return {"object": "text_completion", "choices": [choice]}


async def whole(events: AsyncIterator[Event], wish: Wish, words: Any) -> dict[str, Any]:
    """The answer in one piece; Refused if the model has failed."""
    tokens: list[int] = []
    async for event in events:
        if not isinstance(event, End):
            tokens.append(event)
        elif event is End.ERROR:
            raise Refused(500, "the model has failed while it wrote this text")
        else:
            end = event
    usage = {"prompt_tokens": len(wish.prompt), "completion_tokens": len(tokens)}
    return {**piece(words.decode(tokens), tokens, end), "usage": usage}


async def lines(events: AsyncIterator[Event], words: Any) -> AsyncIterator[str]:
    """The answer as events of a server, one for each token."""
    writer = Writer(words)
    async for event in events:
        if isinstance(event, End):
            yield _line(piece(writer.finish(), [], event))
        else:
            yield _line(piece(writer.add(event), [event], None))
    yield "data: [DONE]\n\n"


def _line(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
