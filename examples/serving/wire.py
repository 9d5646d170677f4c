"""Answers and errors in the form of OpenAI's API, which vLLM and SGLang speak as well. Imports
nothing heavy: the process that talks to clients has no model."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any


class Kind(Enum):
    """An endpoint that writes a text: its path, and the names of its answers."""

    COMPLETION = ("/v1/completions", "text_completion", "text_completion", "cmpl-")
    CHAT = ("/v1/chat/completions", "chat.completion", "chat.completion.chunk", "chatcmpl-")

    def __init__(self, path: str, whole: str, chunk: str, prefix: str) -> None:
        self.path, self.whole, self.chunk, self.prefix = path, whole, chunk, prefix


class Refused(Exception):
    """A request that is not served: the status of HTTP, a sentence for the user, the parameter that
    it is about, and a code for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error object."""
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            kind = "overloaded_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


@dataclass(frozen=True)
class Form:
    """What all parts of one answer have in common."""

    kind: Kind
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, text: str, tokens: Sequence[int], end: str, usage: dict[str, int]
    ) -> dict[str, Any]:
        """The answer in one piece."""
        if self.kind is Kind.CHAT:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            choice = {"text": text}
        return {**self._head(self.kind.whole, choice, tokens, end), "usage": usage}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with: of a chat, who speaks."""
        if self.kind is not Kind.CHAT:
            return []
        choice = {"delta": {"role": "assistant", "content": ""}}
        return [self._head(self.kind.chunk, choice, [], None)]

    def chunk(self, text: str, tokens: Sequence[int], end: str | None) -> dict[str, Any]:
        """A part of a stream."""
        if self.kind is Kind.CHAT:
            choice: dict[str, Any] = {"delta": {"content": text} if text or end is None else {}}
        else:
            choice = {"text": text}
        return self._head(self.kind.chunk, choice, tokens, end)

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last part of a stream that was asked for counts."""
        return {**self._about(self.kind.chunk), "choices": [], "usage": usage}

    def _about(self, what: str) -> dict[str, Any]:
        name = f"{self.kind.prefix}{self.id}"
        return {"id": name, "object": what, "created": self.created, "model": self.model}

    def _head(
        self, what: str, choice: dict[str, Any], tokens: Sequence[int], end: str | None
    ) -> dict[str, Any]:
        rest = {"token_ids": list(tokens), "logprobs": None, "finish_reason": end}
        return {**self._about(what), "choices": [{"index": 0, **choice, **rest}]}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def model_card(name: str, created: int, context: int) -> dict[str, Any]:
    """A row of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "torchair",
        "max_model_len": context,
    }


def line(data: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(data)}\n\n"


DONE = "data: [DONE]\n\n"
CLOSED = "replica_closed"
"""The code of a replica that takes no more texts, while others may."""
EVENT_STREAM = "text/event-stream"
