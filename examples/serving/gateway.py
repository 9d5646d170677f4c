"""Between clients and replicas: endpoints, streams, and what becomes of a text whose replica is
lost. Knows neither Ray nor a model."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from serving.wire import (
    CLOSED,
    DONE,
    EVENT_STREAM,
    Form,
    Kind,
    Refused,
    line,
    model_card,
    usage_of,
)

ATTEMPTS = 3  # replicas that may be lost for one text before it ends with an error
PAUSE = 0.2  # seconds after which another replica is asked in the place of one that is closed


class Lost(Exception):
    """A replica that is gone, with the texts that it was writing."""


Source = Callable[[bytes, Kind, list[int], int], AsyncGenerator[dict[str, Any]]]
"""A text by some replica, `(body, kind, tokens that are there, seed)`, see `Service.text`: first
what the request is, then pieces. Raises Refused and Lost; Refused with the code CLOSED where
another replica may take the text."""


@dataclass(frozen=True)
class Reply:
    """An answer of HTTP: a whole body, or parts of one as they come."""

    status: int
    body: bytes | AsyncIterator[str]
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(data: Any, status: int = 200, **headers: str) -> Reply:
    """An answer in one piece."""
    return Reply(status, json.dumps(data).encode(), headers=headers)


class Gateway:
    """Serves the endpoints of one model."""

    def __init__(
        self, model: str, context: int, source: Source, health: Callable[[], Awaitable[Any]]
    ) -> None:
        self._model, self._source, self._health = model, source, health
        self._card = model_card(model, int(time.time()), context)

    async def respond(self, method: str, path: str, body: bytes) -> Reply:
        """The answer to a request, whatever is wrong with it."""
        try:
            kind = next((k for k in Kind if k.path == path), None)
            if kind is not None and method == "POST":
                return await self._text(kind, body)
            if method == "GET":
                return json_reply(await self._get(path))
            raise Refused(404, f"there is no {method} {path} here", code="unknown_url")
        except Refused as e:
            headers = {"Retry-After": "1"} if e.status == 503 else {}
            return Reply(e.status, json.dumps(e.body()).encode(), headers=headers)

    async def _get(self, path: str) -> Any:
        if path == "/health":
            return await self._healthy()
        if path == "/v1/models":
            return {"object": "list", "data": [self._card]}
        if path == f"/v1/models/{self._model}":
            return self._card
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            raise Refused(404, f"there is no model {name!r} here", "model", "model_not_found")
        raise Refused(404, f"there is no GET {path} here", code="unknown_url")

    async def _healthy(self) -> Any:
        """What a replica says about itself. The one that was asked may be gone: another is."""
        for _ in range(ATTEMPTS):
            try:
                return await self._health()
            except Lost:
                await asyncio.sleep(PAUSE)
        raise Refused(503, f"{ATTEMPTS} replicas were lost", code="lost")

    async def _text(self, kind: Kind, body: bytes) -> Reply:
        events = self._events(kind, body)
        start = await anext(events)  # raises what is refused, while the status can still say so
        form = Form(kind, self._model)
        if start["stream"]:
            return Reply(200, self._lines(form, start, events), EVENT_STREAM)
        return json_reply(await self._whole(form, start, events))

    async def _events(self, kind: Kind, body: bytes) -> AsyncGenerator[dict[str, Any]]:
        """All events of a text. Where a replica is lost, another goes on behind the tokens that are
        there, with the same random numbers."""
        seed, tokens, started = secrets.randbits(63), list[int](), False
        closed: Refused | None = None
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._source(body, kind, tokens, seed)) as source:
                    async for event in source:
                        if "tokens" in event:
                            tokens = [*tokens, *event["tokens"]]
                        elif started:
                            continue  # the start of a text that goes on
                        started = True
                        yield event
                return
            except Lost:
                continue
            except Refused as e:
                if e.code != CLOSED:
                    raise
                closed = e
                await asyncio.sleep(PAUSE)
        lost = f"{ATTEMPTS} replicas were lost while they wrote this text"
        raise closed or Refused(503, lost, code="lost")

    async def _whole(
        self, form: Form, start: dict[str, Any], events: AsyncIterator[dict[str, Any]]
    ) -> dict[str, Any]:
        text, tokens, end = "", list[int](), "error"
        async for event in events:
            text, tokens, end = text + event["text"], tokens + event["tokens"], event["end"]
        if end == "error":
            raise Refused(500, "the model has failed while it wrote this text", code="model_failed")
        return form.whole(text, tokens, end, usage_of(start["prompt_tokens"], len(tokens)))

    async def _lines(
        self, form: Form, start: dict[str, Any], events: AsyncGenerator[dict[str, Any]]
    ) -> AsyncIterator[str]:
        """A stream. Behind the last chunk of a text that is not complete comes an error object."""
        made = 0
        try:
            for chunk in form.first():
                yield line(chunk)
            async for event in events:
                if event["end"] == "error":
                    raise Refused(500, "the model has failed while it wrote this text")
                made += len(event["tokens"])
                yield line(form.chunk(event["text"], event["tokens"], event["end"]))
            if start["include_usage"]:
                yield line(form.usage_chunk(usage_of(start["prompt_tokens"], made)))
        except Refused as e:
            yield line(e.body())
        finally:
            await events.aclose()
        yield DONE
