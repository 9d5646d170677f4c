"""A load for a server on the loopback address: many clients at once, each answer read as a stream,
and what became of all of them."""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
PATIENCE = 600  # seconds; a machine that is busy with other things is no reason to lose a request


@dataclass
class Outcome:
    """What became of a request, and when."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    whole: float = 0.0
    end: str | None = None
    trouble: str = ""

    @property
    def complete(self) -> bool:
        """The text is there, up to its end."""
        return self.status == 200 and self.end in ("length", "stop")

    @property
    def lost(self) -> bool:
        """Neither a text nor a clear no."""
        return not self.complete and self.status != 503


def get(port: int, path: str) -> Any:
    """What a server says at a path."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def ask(port: int, body: bytes) -> Outcome:
    """Send one request and read its answer to the end."""
    outcome, start = Outcome(), time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        outcome.status = response.status
        if response.status != 200:
            outcome.trouble = response.read().decode(errors="replace")
        else:
            _read(response, outcome, start)
    except (OSError, http.client.HTTPException, ValueError) as e:
        outcome.trouble, outcome.end = f"{type(e).__name__}: {e}", None
    finally:
        connection.close()
    outcome.whole = time.perf_counter() - start
    return outcome


def _read(response: http.client.HTTPResponse, outcome: Outcome, start: float) -> None:
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            outcome.trouble, outcome.end = event["error"]["message"], "error"
            continue
        (choice,) = event["choices"]
        outcome.first = outcome.first or time.perf_counter() - start
        outcome.tokens += choice["token_ids"]
        outcome.end = choice["finish_reason"]


def wishes(count: int, vocabulary: int, longest: int) -> list[bytes]:
    """Requests of different lengths, the same in every run."""
    drawn = random.Random(0)
    return [
        json.dumps(
            {
                "prompt": [drawn.randrange(vocabulary) for _ in range(drawn.randint(2, longest))],
                "max_tokens": drawn.randint(4, 32),
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Load:
    """All outcomes, in the order of the requests, and the seconds they took together."""

    outcomes: Sequence[Outcome]
    seconds: float

    def __add__(self, later: Load) -> Load:
        return Load([*self.outcomes, *later.outcomes], self.seconds + later.seconds)

    def counts(self) -> dict[str, int]:
        """How many were answered, told to come again, and lost."""
        complete = sum(o.complete for o in self.outcomes)
        lost = sum(o.lost for o in self.outcomes)
        refused = len(self.outcomes) - complete - lost
        return {"complete": complete, "refused": refused, "lost": lost}

    @property
    def rate(self) -> float:
        """Tokens a second, of all clients together."""
        return sum(len(o.tokens) for o in self.outcomes) / self.seconds

    def latencies(self, which: Callable[[Outcome], float]) -> str:
        """p50, p90 and p99 in milliseconds."""
        times = sorted(which(o) for o in self.outcomes if o.complete)
        return "/".join(f"{1e3 * percentile(times, p):.0f}" for p in (50, 90, 99))


def same(*sides: Sequence[Outcome]) -> bool:
    """Whether each side has a complete text, and all complete ones have the same tokens. A refusal
    says nothing about a text."""
    texts = [[o.tokens for o in side if o.complete] for side in sides]
    return all(texts) and all(text == texts[0][0] for side in texts for text in side)


def percentile(times: Sequence[float], percent: int) -> float:
    """The least of the sorted times that so many percent do not exceed."""
    return times[max(0, math.ceil(len(times) * percent / 100) - 1)] if times else math.nan


def run(port: int, requests: Sequence[bytes], clients: int) -> Load:
    """Send all requests, as many at once as there are clients."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        outcomes = list(pool.map(lambda body: ask(port, body), requests))
    return Load(outcomes, time.perf_counter() - start)
