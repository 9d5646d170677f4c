"""The server's API: requests that are read or refused, sampling against NumPy, answers in the form
of OpenAI's, and streams that lose their replica. No model and no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from chat import Numbers
from serving import gateway as gateways
from serving.answers import Piece, StopText, Writer, pieces
from serving.batcher import End, Event
from serving.gateway import ATTEMPTS, Gateway, Lost, Reply
from serving.load import Outcome, same
from serving.protocol import Request, Served, read
from serving.sampling import GREEDY, Sampling, choose, drawn, probabilities, sample
from serving.wire import CLOSED, Kind, Refused

VOCABULARY = 99
SERVED = Served("tiny", Numbers(VOCABULARY), VOCABULARY, 32)


# ---- sampling


def reference(scores: np.ndarray, how: Sampling) -> np.ndarray:
    """The distribution, token by token in NumPy."""
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    order = order[: how.top_k] if how.top_k else order
    exact = scores[order].astype(np.float64)
    weights = np.exp((exact - exact[0]) / how.temperature)
    weights /= weights.sum()
    found, mass = np.zeros(len(scores)), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= how.top_p:
            break
        found[token] = weight
        mass += weight
    return found / found.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.6), (12, 0.35), (3, 1e-9)])
def test_probabilities_are_those_of_numpy(temperature, top_k, top_p):
    how = Sampling(temperature, top_k, top_p)
    for seed in range(5):
        drawing = np.random.default_rng(seed)
        scores = drawing.normal(size=50).astype(np.float32) * 3
        scores[7] = scores[3]  # equal ones
        found = probabilities(torch.from_numpy(scores), how).numpy()
        assert np.allclose(found, reference(scores, how), rtol=1e-9, atol=1e-15)
        assert (found > 0).sum() <= (top_k or 50)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    scores, how, count = torch.tensor([2.0, 1.0, 0.0, -1.0]), Sampling(seed=11), 4000
    found = np.bincount([sample(scores, how, step) for step in range(count)], minlength=4) / count
    expected = reference(scores.numpy(), how)
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)


def test_seeds_are_reproducible_and_differ():
    texts = {seed: [drawn(seed, step) for step in range(8)] for seed in (0, 1, -1, 2**63 - 1)}
    assert texts[1] == [drawn(1, step) for step in range(8)]
    values = [value for text in texts.values() for value in text]
    assert len(set(values)) == len(values) and all(0 <= v < 1 for v in values)


def test_rows_of_a_batch_are_chosen_each_in_its_way():
    scores = torch.randn(3, 20)
    how = Sampling(seed=4)
    assert choose(scores, [(GREEDY, 0), (how, 5), (Sampling(top_k=1), 2)]) == [
        int(scores[0].argmax()),
        sample(scores[1], how, 5),
        int(scores[2].argmax()),
    ]


# ---- requests


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"{", "no JSON", None),
        (b"[1]", "must be an object", None),
        (b"{}", "prompt must be one text, or a list of numbers", "prompt"),
        (b'{"prompt": [1, true]}', "prompt must be", "prompt"),
        (b'{"prompt": ["a", "b"]}', "prompt must be one text", "prompt"),
        (b'{"prompt": []}', "the prompt is empty", "prompt"),
        (b'{"prompt": ""}', "the prompt is empty", "prompt"),
        (b'{"prompt": [""]}', "the prompt is empty", "prompt"),
        (b'{"prompt": [1, 99]}', "token 99, but they go from 0 to 98", "prompt"),
        (b'{"prompt": [1], "max_tokens": 0}', "from 1 on, not 0", "max_tokens"),
        (b'{"prompt": [1], "max_tokens": "7"}', 'not "7"', "max_tokens"),
        (b'{"prompt": [1, 2], "max_tokens": 31}', "2 tokens and max_tokens is 31", "prompt"),
        (b'{"prompt": [1], "stream": 1}', "stream must be true or false", "stream"),
        (b'{"prompt": [1], "temperature": 2.5}', "temperature must be a number", "temperature"),
        (b'{"prompt": [1], "temperature": true}', "temperature must be a number", "temperature"),
        (b'{"prompt": [1], "top_p": 0}', "top_p must be a number above 0", "top_p"),
        (b'{"prompt": [1], "top_k": -2}', "top_k must be a whole number", "top_k"),
        (b'{"prompt": [1], "seed": 0.5}', "seed must be a whole number", "seed"),
        (b'{"prompt": [1], "n": 2}', "n is not supported", "n"),
        (b'{"prompt": [1], "stop": [""]}', "stop must be a text", "stop"),
        (b'{"prompt": [1], "stop": ["a", "b", "c", "d", "e"]}', "at most 4", "stop"),
    ],
)
def test_a_bad_request_says_what_is_wrong(body, words, param):
    with pytest.raises(Refused) as caught:
        read(body, Kind.COMPLETION, SERVED)
    error = caught.value.body()["error"]
    assert caught.value.status == 400 and words in error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == param


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages must be a list"),
        ([], "at least one message"),
        ([{"role": "nobody", "content": "a"}], "must have a role"),
        ([{"role": "user", "content": ""}], "is empty"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be texts"),
        ([{"role": "user"}], "must be a text"),
    ],
)
def test_a_bad_conversation_says_what_is_wrong(messages, words):
    with pytest.raises(Refused, match=words) as caught:
        read(json.dumps({"messages": messages}).encode(), Kind.CHAT, SERVED)
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_good_requests_are_read():
    body = b'{"prompt": [1, 2], "max_tokens": 30, "stream": true, "temperature": 0.0, "n": null}'
    how = Sampling(0.0, seed=9)
    assert read(body, Kind.COMPLETION, SERVED, seed=9) == Request((1, 2), 30, True, how)
    text = read(b'{"prompt": "two words", "stop": "x"}', Kind.COMPLETION, SERVED)
    assert len(text.prompt) == 2 and not text.stream and text.stop == ("x",)
    assert text.sampling == Sampling() and text.limit == 16
    about = {"top_k": -1, "top_p": 0.5, "seed": -3, "stream_options": {"include_usage": True}}
    drawn_text = read(json.dumps({"prompt": [1], **about}).encode(), Kind.COMPLETION, SERVED)
    assert drawn_text.sampling == Sampling(1.0, 0, 0.5, -3) and drawn_text.include_usage


def test_a_conversation_is_read_with_the_rest_of_the_context_to_answer():
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "words"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    found = read(json.dumps({"messages": messages}).encode(), Kind.CHAT, SERVED)
    plain = "system: Be short.\nuser: two words\nassistant:"
    assert list(found.prompt) == SERVED.words.encode(plain)
    assert len(found.prompt) + found.limit == SERVED.context
    short = {"messages": messages, "max_completion_tokens": 3}
    assert read(json.dumps(short).encode(), Kind.CHAT, SERVED).limit == 3


def test_an_unknown_model_gets_a_404():
    with pytest.raises(Refused) as caught:
        read(b'{"prompt": [1], "model": "gpt"}', Kind.COMPLETION, SERVED)
    assert caught.value.status == 404 and caught.value.code == "model_not_found"


# ---- text of tokens


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters need several."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_character_of_several_tokens_is_written_whole():
    writer = Writer(Bytes())
    assert [writer.add(t) for t in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert writer.add(0xE2) == "" and writer.finish() == "\ufffd"


def test_what_may_be_the_begin_of_a_stop_string_waits():
    text = StopText(["END", "\n\n"])
    assert [text.add(t) for t in ("a", "E", "N", "x", "\n", "b")] == [
        "a",
        "",
        "",
        "ENx",
        "",
        "\nb",
    ]
    assert text.add("yEN") == "y" and text.add("D more") == "" and text.stopped
    other = StopText(["END"])
    assert other.add("tailE") == "tail" and other.finish() == "E" and not other.stopped


async def events_of(*events: Event) -> Any:
    for event in events:
        yield event


def pieces_of(text: str, end: End, **options: Any) -> list[Piece]:
    async def run() -> list[Piece]:
        events = events_of(*text.encode(), end)
        return [piece async for piece in pieces(events, Bytes(), **options)]

    return asyncio.run(run())


def test_a_text_ends_at_a_stop_string_and_is_the_same_on_another_replica():
    found = pieces_of("one. two", End.LENGTH, stops=[". "])
    assert "".join(p.text for p in found) == "one" and found[-1].end == "stop"
    whole = pieces_of("aé€b", End.LENGTH)
    for cut in range(len("aé€b".encode())):
        before = list("aé€b".encode())[:cut]

        async def rest(before: list[int] = before, cut: int = cut) -> list[Piece]:
            events = events_of(*list("aé€b".encode())[cut:], End.LENGTH)
            return [p async for p in pieces(events, Bytes(), (), before)]

        told = "".join(p.text for p in whole[:cut])
        assert told + "".join(p.text for p in asyncio.run(rest())) == "aé€b"


# ---- answers, and replicas that are lost


class Replicas:
    """Writes texts of tokens that rise, and is lost after some of them."""

    def __init__(self, *lives: int | None) -> None:
        self.lives = list(lives)  # tokens until each call is lost, None for never
        self.calls: list[tuple[list[int], int]] = []
        self.closed = 0

    async def text(
        self, body: bytes, kind: Kind, before: list[int], seed: int
    ) -> AsyncGenerator[dict[str, Any]]:
        asked = read(body, kind, SERVED, seed)
        self.calls.append((list(before), seed))
        life = self.lives.pop(0) if self.lives else None
        try:
            about = {"stream": asked.stream, "include_usage": asked.include_usage}
            yield {"prompt_tokens": len(asked.prompt), **about}
            for step in range(asked.limit - len(before)):
                if step == life:
                    raise Lost("a process is gone")
                token = len(before) + step
                yield {"text": f"{token} ", "tokens": [token], "end": None}
            yield {"text": "", "tokens": [], "end": "length"}
        finally:
            self.closed += 1


async def health() -> Any:
    return {"running": 0}


def reply_to(replicas: Replicas, method: str, path: str, **asked: Any) -> tuple[Reply, list[Any]]:
    """An answer, and its body or the events of its stream."""

    async def run() -> tuple[Reply, list[Any]]:
        gateway = Gateway("tiny", 32, replicas.text, health)
        reply = await gateway.respond(method, path, json.dumps(asked).encode())
        if isinstance(reply.body, bytes):
            return reply, [json.loads(reply.body)]
        lines = [line async for line in reply.body]
        assert lines.pop() == "data: [DONE]\n\n" and reply.media_type == "text/event-stream"
        return reply, [json.loads(line.removeprefix("data: ")) for line in lines]

    return asyncio.run(run())


def test_a_completion_in_one_piece():
    reply, (found,) = reply_to(Replicas(), "POST", Kind.COMPLETION.path, prompt="a b", max_tokens=3)
    (choice,) = found["choices"]
    assert reply.status == 200 and found["object"] == "text_completion" and found["model"] == "tiny"
    assert found["id"].startswith("cmpl-") and isinstance(found["created"], int)
    assert choice["text"] == "0 1 2 " and choice["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_chat_is_streamed_with_roles_and_counts():
    _, events = reply_to(
        Replicas(),
        "POST",
        Kind.CHAT.path,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, counts = events
    assert {c["object"] for c in events} == {"chat.completion.chunk"}
    assert len({c["id"] for c in events}) == 1
    first, *rest = [c["choices"][0]["delta"] for c in chunks]
    assert first == {"role": "assistant", "content": ""}
    assert rest == [{"content": "0 "}, {"content": "1 "}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert counts["choices"] == [] and counts["usage"]["completion_tokens"] == 2


def test_a_chat_in_one_piece():
    messages = [{"role": "user", "content": "Hi"}]
    _, (found,) = reply_to(Replicas(), "POST", Kind.CHAT.path, messages=messages, max_tokens=2)
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "0 1 "}


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_goes_on_when_its_replica_is_lost(stream):
    replicas = Replicas(2, 0)
    asked = {"prompt": [1], "max_tokens": 5, "stream": stream}
    reply, events = reply_to(replicas, "POST", Kind.COMPLETION.path, **asked)
    choices = [e["choices"][0] for e in events]
    assert reply.status == 200 and "".join(c["text"] for c in choices) == "0 1 2 3 4 "
    assert choices[-1]["finish_reason"] == "length"
    assert [before for before, _ in replicas.calls] == [[], [0, 1], [0, 1]]
    assert len({seed for _, seed in replicas.calls}) == 1  # the same random numbers
    assert replicas.closed == 3


def test_a_stream_that_loses_every_replica_ends_with_an_error_event():
    replicas = Replicas(*[1] * ATTEMPTS)
    asked = {"prompt": [1], "max_tokens": 9, "stream": True}
    reply, events = reply_to(replicas, "POST", Kind.COMPLETION.path, **asked)
    *chunks, last = events
    assert reply.status == 200
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[0], [1], [2]]
    assert last["error"]["type"] == "overloaded_error" and "lost" in last["error"]["message"]
    reply, (found,) = reply_to(
        Replicas(*[1] * ATTEMPTS), "POST", Kind.COMPLETION.path, prompt=[1], max_tokens=9
    )
    assert reply.status == 503 and reply.headers == {"Retry-After": "1"} and "error" in found


class Closing(Replicas):
    """Takes no text at the first `closed` calls."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def text(self, *given: Any) -> AsyncGenerator[dict[str, Any]]:
        self.times -= 1
        if self.times >= 0:
            raise Refused(503, "this replica is being shut down; ask again", code=CLOSED)
        async for event in super().text(*given):
            yield event


def test_a_text_goes_to_another_replica_where_one_is_closed(monkeypatch):
    monkeypatch.setattr(gateways, "PAUSE", 0.0)
    asked = {"prompt": [1], "max_tokens": 3}
    reply, (found,) = reply_to(Closing(ATTEMPTS - 1), "POST", Kind.COMPLETION.path, **asked)
    assert reply.status == 200 and found["choices"][0]["text"] == "0 1 2 "
    reply, (found,) = reply_to(Closing(ATTEMPTS), "POST", Kind.COMPLETION.path, **asked)
    assert reply.status == 503 and reply.headers == {"Retry-After": "1"}
    assert "is being shut down" in found["error"]["message"]


def test_health_is_that_of_a_replica_that_is_there(monkeypatch):
    monkeypatch.setattr(gateways, "PAUSE", 0.0)

    def asked(lost: int) -> Reply:
        async def health() -> Any:
            nonlocal lost
            lost -= 1
            if lost >= 0:
                raise Lost("a process is gone")
            return {"running": 0}

        gateway = Gateway("tiny", 32, Replicas().text, health)
        return asyncio.run(gateway.respond("GET", "/health", b""))

    assert asked(ATTEMPTS - 1).body == b'{"running": 0}'
    assert asked(ATTEMPTS).status == 503


def test_refused_requests_have_no_text_to_compare():
    text, other = (Outcome(200, tokens, end="length") for tokens in ([1, 2], [1, 3]))
    refused, lost = Outcome(503), Outcome(200, [1], end="error")
    assert same([text, refused], [text]) and same([lost, text], [text, text])
    assert not same([text, other], [text]) and not same([text], [other])
    assert not same([refused], [text]) and not same([], [text])


def test_a_model_that_fails_ends_a_stream_with_an_error_event():
    class Failing(Replicas):
        async def text(self, *given: Any) -> AsyncGenerator[dict[str, Any]]:
            async for event in super().text(*given):
                yield event
                if event.get("tokens") == [1]:
                    yield {"text": "", "tokens": [], "end": "error"}
                    return

    asked = {"prompt": [1], "max_tokens": 9}
    _, events = reply_to(Failing(), "POST", Kind.COMPLETION.path, **asked, stream=True)
    assert len(events) == 3 and events[-1]["error"]["type"] == "server_error"
    reply, _ = reply_to(Failing(), "POST", Kind.COMPLETION.path, **asked)
    assert reply.status == 500


def test_who_stops_reading_closes_the_text():
    replicas = Replicas()

    async def run() -> None:
        gateway = Gateway("tiny", 32, replicas.text, health)
        body = b'{"prompt": [1], "stream": true}'
        reply = await gateway.respond("POST", Kind.COMPLETION.path, body)
        assert not isinstance(reply.body, bytes)
        await anext(reply.body)
        await reply.body.aclose()

    asyncio.run(run())
    assert replicas.closed == 1


def test_models_and_health_and_what_is_not_there():
    _, (models,) = reply_to(Replicas(), "GET", "/v1/models")
    (card,) = models["data"]
    assert models["object"] == "list" and card["id"] == "tiny" and card["max_model_len"] == 32
    assert reply_to(Replicas(), "GET", "/v1/models/tiny")[1] == [card]
    assert reply_to(Replicas(), "GET", "/health")[1] == [{"running": 0}]
    for method, path in (("GET", "/v1/models/other"), ("GET", "/x"), ("PUT", "/health")):
        reply, (found,) = reply_to(Replicas(), method, path)
        assert reply.status == 404 and found["error"]["type"] == "invalid_request_error"
