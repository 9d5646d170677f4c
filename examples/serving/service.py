"""A loaded and warmed model with its batches: all that a replica is, whoever carries requests."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from chat import loaded
from serving.answers import Piece, pieces
from serving.batcher import Batcher, Closed, End, Full, TextStream
from serving.decoder import Decoder, Sizes
from serving.protocol import Served, read
from serving.wire import CLOSED, Kind, Refused


@dataclass(frozen=True)
class Settings:
    """What a replica serves, and how. Without `model`, a folder of a checkpoint, it is a random
    one of a size that examples/chat.py knows."""

    model: str | None = None
    size: str = "tiny"
    dtype: str = "float32"
    way: str = "torchair"
    folder: str = str(Path("~/.cache/torchair-serving").expanduser())
    threads: int = 1
    waiting: int = 64
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def name(self) -> str:
        """Of the model, for clients."""
        return f"random-{self.size}" if self.model is None else Path(self.model).name


class Words:
    """A tokenizer that leaves out what marks the end of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None):
            self.chat = self._chat

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, with the begin of the answer."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self._tokenizer.encode(text, add_special_tokens=False)


class Service:
    """Made when it is ready: what takes time is done before."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        wanted = argparse.Namespace(model=settings.model, size=settings.size, dtype=settings.dtype)
        model, words = loaded(wanted)
        folder = Path(settings.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.decoder = Decoder(model, settings.sizes, settings.way, folder)
        self.words = words if settings.model is None else Words(words)
        self._served = Served(
            settings.name, self.words, self.decoder.vocabulary, settings.sizes.context
        )
        self.warming = self.decoder.warm()
        self._ready_since = time.time()
        self._stops = stops_of(model)
        self.batcher = Batcher(self.decoder, settings.waiting, self._stops)

    async def text(
        self, body: bytes, kind: Kind, before: Sequence[int] = (), seed: int = 0
    ) -> AsyncGenerator[dict[str, Any]]:
        """The text that a request asks for, in plain values: what the request is, then pieces. The
        tokens that came `before` from another replica are not made again. Refused if there is
        something wrong, or no place."""
        asked = read(body, kind, self._served, seed)
        start = {
            "prompt_tokens": len(asked.prompt),
            "stream": asked.stream,
            "include_usage": asked.include_usage,
        }
        if before and (len(before) >= asked.limit or before[-1] in self._stops):
            end = End.STOP if before[-1] in self._stops else End.LENGTH
            yield start
            yield asdict(Piece(end=end.value))
            return
        try:
            events = TextStream(
                self.batcher,
                [*asked.prompt, *before],
                asked.limit - len(before),
                asked.sampling,
                len(before),
            )
        except Full as e:
            raise Refused(503, str(e), code="overloaded") from None
        except Closed as e:
            raise Refused(503, str(e), code=CLOSED) from None
        try:
            yield start
            async for piece in pieces(events, self.words, asked.stop, before):
                yield asdict(piece)
        finally:
            await events.aclose()  # its row is for another text

    def health(self) -> dict[str, Any]:
        """What a replica says about itself."""
        running, waiting = self.batcher.load
        return {
            "way": self.settings.way,
            "process": os.getpid(),
            "warming_s": self.warming,
            "ready_since": self._ready_since,
            "model": self.settings.name,
            "vocabulary": self.decoder.vocabulary,
            "context": self.settings.sizes.context,
            "rows": list(self.settings.sizes.rows),
            "running": running,
            "waiting": waiting,
        }


def stops_of(model: Any) -> frozenset[int]:
    """Tokens that end a text; a random model has none."""
    stops = model.generation_config.eos_token_id
    if stops is None or not model.name_or_path:
        return frozenset()
    return frozenset(stops if isinstance(stops, list) else [stops])
