"""A loaded and warmed model with its batches: all that a replica is, whoever carries requests."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chat import loaded
from serving.batcher import Batcher, Full, stream
from serving.decoder import Decoder, Sizes
from serving.protocol import Refused, Wish, lines, read, whole


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


class Words:
    """A tokenizer that leaves out what marks the end of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class Service:
    """Made when it is ready: what takes time is done before."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        wanted = argparse.Namespace(model=settings.model, size=settings.size, dtype=settings.dtype)
        model, words = loaded(wanted)
        self.words = words if settings.model is None else Words(words)
        folder = Path(settings.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.decoder = Decoder(model, settings.sizes, settings.way, folder)
        self.warming = self.decoder.warm()
        self.batcher = Batcher(self.decoder, settings.waiting, stops_of(model))

    def read(self, body: bytes) -> Wish:
        """What a request asks for; Refused if there is something wrong."""
        return read(body, self.words, self.decoder.vocabulary, self.settings.sizes.context)

    async def whole(self, wish: Wish) -> dict[str, Any]:
        """The answer in one piece."""
        return await whole(self._events(wish), wish, self.words)

    def lines(self, wish: Wish) -> AsyncIterator[str]:
        """The answer token by token. Refused here if there is no place, not later."""
        return lines(self._events(wish), self.words)

    def _events(self, wish: Wish) -> Any:
        try:
            return stream(self.batcher, wish.prompt, wish.limit)
        except Full as e:
            raise Refused(503, str(e)) from None

    def health(self) -> dict[str, Any]:
        """What a replica says about itself."""
        running, waiting = self.batcher.load
        return {
            "way": self.settings.way, "process": os.getpid(), "warming_s": self.warming,
            "vocabulary": self.decoder.vocabulary, "context": self.settings.sizes.context,
            "rows": list(self.settings.sizes.rows), "running": running, "waiting": waiting,
        }  # fmt: skip


def stops_of(model: Any) -> frozenset[int]:
    """Tokens that end a text; a random model has none."""
    stops = model.generation_config.eos_token_id
    if stops is None or not model.name_or_path:
        return frozenset()
    return frozenset(stops if isinstance(stops, list) else [stops])
