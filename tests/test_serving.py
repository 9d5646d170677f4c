"""Serving a language model: batches in compiled sizes, rows that are taken over, queues, streams,
requests that are refused. Ray itself is started where it is installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from chat import Numbers
from serving import load
from serving.batcher import Batcher, End, Event, Full, stream
from serving.decoder import Decoder, Sizes, check_attention
from serving.protocol import Refused, Wish, Writer, lines, read, whole
from serving.service import Service, Settings

ROOT = Path(__file__).resolve().parent.parent
SIZES = Sizes(rows=(1, 2, 4), pieces=(4, 8), context=32)
VOCABULARY = 99
PATIENCE = 300  # seconds until a test gives up waiting for a thread


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def decoder(model: Any, folder: Path) -> Decoder:
    made = Decoder(model, SIZES, "torchair", folder)
    made.warm()
    return made


def alone(model: Any, prompt: list[int], limit: int) -> list[int]:
    """What transformers writes behind a prompt, with its own cache."""
    made = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=limit, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def wanted(count: int) -> list[tuple[list[int], int]]:
    """Prompts of all kinds of lengths, and how many tokens are wanted behind them."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for k in range(count):
        length = 1 + (5 * k) % 19
        prompt = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
        found.append((prompt, 1 + (3 * k) % 11))
    return found


def collected(events: SimpleQueue[Event]) -> tuple[list[int], End]:
    """The tokens of a text, and why it ended."""
    tokens: list[int] = []
    while not isinstance(event := events.get(timeout=PATIENCE), End):
        tokens.append(event)
    return tokens, event


def asked(batcher: Batcher, prompt: list[int], limit: int) -> SimpleQueue[Event]:
    events: SimpleQueue[Event] = SimpleQueue()
    batcher.submit(prompt, limit, events.put)
    return events


# ---- the model in compiled sizes


@pytest.mark.parametrize(
    "way", ["torchair", "eager", pytest.param("packed", marks=pytest.mark.slow)]
)
def test_texts_written_together_are_those_written_alone(model, decoder, folder, way, monkeypatch):
    writer = decoder if way == "torchair" else Decoder(model, SIZES, way, folder)
    together: list[int] = []
    decode = writer.decode
    monkeypatch.setattr(writer, "decode", lambda t, p: together.append(len(t)) or decode(t, p))
    batcher = Batcher(writer, waiting=16)
    texts = wanted(10)
    events = [asked(batcher, *text) for text in texts]
    found = [collected(e) for e in events]
    batcher.close()
    assert found == [(alone(model, *text), End.LENGTH) for text in texts]
    assert set(together) == {1, 2, 3, 4}  # three are padded to four


def test_a_second_replica_reads_what_the_first_has_compiled(model, decoder, folder, traced):
    again = Decoder(llama(), SIZES, "torchair", folder)
    again.warm()
    assert not traced
    assert again.prefill([5, 17, 42], 0) == alone(model, [5, 17, 42], 1)[0]


def test_a_text_may_fill_the_context(model, decoder):
    batcher = Batcher(decoder, waiting=2)
    prompt = list(range(20))
    tokens, _ = collected(asked(batcher, prompt, 12))
    batcher.close()
    assert tokens == alone(model, prompt, 12)


@pytest.mark.parametrize("sizes", [dict(rows=()), dict(rows=(2, 1)), dict(pieces=(5,), context=8)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="must be"):
        Sizes(**sizes)


def test_layers_that_see_a_part_of_the_text_are_refused():
    config = MistralConfig(sliding_window=16)
    check_attention(config, context=16)
    with pytest.raises(ValueError, match="sliding_attention"):
        check_attention(config, context=32)


# ---- batches, with a model that counts


class Counting:
    """Stands in for a decoder: tokens are numbers that rise, steps happen when they may."""

    def __init__(self) -> None:
        self.sizes = Sizes(rows=(1, 2), pieces=(4,), context=64)
        self.may = threading.Semaphore(0)
        self.prompts: SimpleQueue[int] = SimpleQueue()
        self.moves: list[tuple[int, int]] = []
        self.broken = False

    def prefill(self, prompt: list[int], row: int) -> int:
        self.prompts.put(prompt[0])
        return prompt[0] + 1

    def decode(self, tokens: list[int], places: list[int]) -> list[int]:
        assert self.may.acquire(timeout=PATIENCE)
        if self.broken:
            raise RuntimeError("no memory")
        return [t + 1 for t in tokens]

    def move(self, source: int, target: int, length: int) -> None:
        if source != target:
            self.moves.append((source, target))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.may.release()


@pytest.fixture
def counting() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.steps(100)  # nobody waits for ever


def test_a_full_queue_says_so_and_has_room_again(counting):
    batcher = Batcher(counting, waiting=1)
    texts = [asked(batcher, [k], 3) for k in (10, 20, 30)]  # two rows, and one that waits
    with pytest.raises(Full, match="queue is full: 3 texts are being written or wait"):
        batcher.submit([40], 3, print)
    counting.steps(10)
    assert [collected(t)[0] for t in texts] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    assert collected(asked(batcher, [50], 2))[0] == [51, 52]


def test_closing_answers_what_was_taken_and_takes_no_more(counting):
    batcher = Batcher(counting, waiting=8)
    texts = [asked(batcher, [10 * k], 4) for k in range(1, 6)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    counting.steps(100)
    closing.join(PATIENCE)
    assert not closing.is_alive() and batcher.load == (0, 0)
    assert all(len(collected(t)[0]) == 4 for t in texts)
    with pytest.raises(Full, match="shut down"):
        batcher.submit([1], 1, print)


def test_a_text_that_nobody_reads_gives_up_its_row(counting):
    batcher = Batcher(counting, waiting=8)
    left = batcher.submit([10], 50, lambda event: None)
    other = asked(batcher, [20], 4)
    assert [counting.prompts.get(timeout=PATIENCE)] == [10]
    counting.steps(1)
    assert counting.prompts.get(timeout=PATIENCE) == 20
    batcher.cancel(left)
    counting.steps(10)
    assert collected(other)[0] == [21, 22, 23, 24]
    batcher.close(PATIENCE)
    assert counting.moves == [(1, 0)] and left.made < 10


def test_a_stop_token_ends_a_text(counting):
    counting.steps(10)
    batcher = Batcher(counting, waiting=8, stops=frozenset({13}))
    assert collected(asked(batcher, [10], 30)) == ([11, 12, 13], End.STOP)


def test_a_model_that_fails_tells_everybody(counting):
    counting.broken = True
    batcher = Batcher(counting, waiting=8)
    texts = [asked(batcher, [k], 4) for k in range(3)]
    batcher.check()
    counting.steps(1)
    assert all(collected(t)[1] is End.ERROR for t in texts)
    batcher.close(PATIENCE)
    with pytest.raises(RuntimeError, match="no memory"):
        batcher.check()
    with pytest.raises(Full, match="failed"):
        batcher.submit([1], 1, print)


def test_who_stops_reading_a_stream_cancels_the_text(counting):
    batcher = Batcher(counting, waiting=8)

    async def reader() -> None:
        events = stream(batcher, [10], 50)
        assert await anext(events) == 11
        await events.aclose()

    asyncio.run(reader())
    counting.steps(2)
    batcher.close(PATIENCE)
    batcher.check()
    assert batcher.load == (0, 0)


# ---- requests and answers


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "no JSON"),
        (b"[1]", "must be an object"),
        (b"{}", "prompt must be a text, or a list of numbers"),
        (b'{"prompt": [1, true]}', "prompt must be"),
        (b'{"prompt": []}', "the prompt is empty"),
        (b'{"prompt": [1, 99]}', "token 99, but they go from 0 to 98"),
        (b'{"prompt": [1], "max_tokens": 0}', "max_tokens must be a number from 1 on, not 0"),
        (b'{"prompt": [1], "max_tokens": "7"}', 'not "7"'),
        (b'{"prompt": [1, 2], "max_tokens": 31}', "2 tokens and max_tokens is 31, together more"),
        (b'{"prompt": [1], "stream": 1}', "stream must be true or false"),
        (b'{"prompt": [1], "temperature": 0.7}', "temperature must be 0"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(body, words):
    with pytest.raises(Refused) as caught:
        read(body, Numbers(VOCABULARY), VOCABULARY, 32)
    assert caught.value.status == 400 and words in caught.value.sentence
    assert caught.value.body()["error"]["message"] == caught.value.sentence


def test_a_good_request_is_read():
    body = b'{"prompt": [1, 2], "max_tokens": 30, "stream": true, "temperature": 0.0, "n": null}'
    assert read(body, Numbers(VOCABULARY), VOCABULARY, 32) == Wish((1, 2), 30, True)
    text = read(b'{"prompt": "two words"}', Numbers(VOCABULARY), VOCABULARY, 32)
    assert len(text.prompt) == 2 and not text.stream


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters need several."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_character_of_several_tokens_is_written_whole():
    writer = Writer(Bytes())
    assert [writer.add(t) for t in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert writer.add(0xE2) == "" and writer.finish() == "\ufffd"


async def events_of(*events: Event) -> Any:
    for event in events:
        yield event


async def lines_of(*events: Event) -> list[str]:
    return [line async for line in lines(events_of(*events), Numbers(VOCABULARY))]


def test_an_answer_is_streamed_token_by_token():
    *told, done = asyncio.run(lines_of(5, 6, End.LENGTH))
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in told]
    assert [c["token_ids"] for c in choices] == [[5], [6], []]
    assert "".join(c["text"] for c in choices) == "5 6 "
    assert [c["finish_reason"] for c in choices] == [None, None, "length"]
    assert done == "data: [DONE]\n\n"


def test_an_answer_in_one_piece():
    wish = Wish((1, 2, 3), 2, False)
    found = asyncio.run(whole(events_of(5, 6, End.STOP), wish, Numbers(VOCABULARY)))
    assert found["choices"][0] | {"index": 0} == found["choices"][0]
    assert found["choices"][0]["token_ids"] == [5, 6]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    with pytest.raises(Refused, match="failed") as caught:
        asyncio.run(whole(events_of(5, End.ERROR), wish, Numbers(VOCABULARY)))
    assert caught.value.status == 500


def checkpoint(model: Any, folder: Path) -> str:
    """A folder with a model that ends a text with the second token behind `w5 w17 w42`."""
    words = Tokenizer(WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    end = alone(model, [5, 17, 42], 2)[-1]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{end}").save_pretrained(folder)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=end).save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_is_served_from_its_folder(model, tmp_path):
    where = checkpoint(model, tmp_path / "model")
    service = Service(Settings(where, way="eager", folder=str(tmp_path), sizes=SIZES))
    wish = service.read(b'{"prompt": "w5 w17 w42", "max_tokens": 5}')
    (choice,) = asyncio.run(service.whole(wish))["choices"]
    tokens = alone(model, [5, 17, 42], 2)
    assert choice["token_ids"] == tokens and choice["finish_reason"] == "stop"
    assert choice["text"] == f"w{tokens[0]}"  # without the token that ends it
    assert service.health()["running"] == 0 and service.health()["vocabulary"] == VOCABULARY
    service.batcher.close(PATIENCE)
    with pytest.raises(Refused) as caught:
        asyncio.run(service.whole(wish))
    assert caught.value.status == 503


# ---- the load


class Cutting(BaseHTTPRequestHandler):
    """A server that answers some, refuses some, and hangs up on the rest."""

    def do_POST(self) -> None:
        limit = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(503 if limit == 2 else 200)
        self.end_headers()
        ends = [None, "length"] if limit == 1 else [None]
        for end in ends:
            choice = {"token_ids": [7], "finish_reason": end}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        """Silence."""


def test_a_load_knows_what_was_lost():
    server = HTTPServer((load.HOST, 0), Cutting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        requests = [json.dumps({"max_tokens": k}).encode() for k in (1, 2, 3)]
        done = load.run(server.server_port, requests, clients=2)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    answered, refused, cut = done.outcomes
    assert answered.complete and answered.tokens == [7, 7] and not answered.lost
    assert refused.status == 503 and not refused.lost and not refused.complete
    assert cut.lost
    assert done.counts() == {"complete": 1, "refused": 1, "lost": 1}
    assert load.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert load.percentile([1.0, 2.0, 3.0, 4.0], 99) == 4.0


@pytest.mark.slow
def test_replicas_of_ray_lose_nothing_while_they_are_replaced(tmp_path):
    pytest.importorskip("ray")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    options = ["--load", "12", "--clients", "6", "--restart", "--context", "128"]
    options += ["--cache", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "examples/serve.py", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 of 12 texts are the same" in done.stdout
    assert done.stdout.count("gave way to") == 2


@pytest.mark.slow
def test_a_server_of_ray_refuses_what_is_bad_and_ends_in_good_order(tmp_path):
    pytest.importorskip("ray")
    port = free_port()
    options = ["--waiting", "1", "--context", "512", "--cache", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "examples/serve.py", *options, "--backend", "eager"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None and "ready after" in server.stdout.readline()
        assert load.get(port, "/health")["rows"] == [1, 2, 4, 8]
        bad = load.ask(port, b'{"prompt": []}')
        assert bad.status == 400 and "the prompt is empty" in bad.trouble
        assert load.get(port, "/elsewhere")["error"]["code"] == 404
        long = json.dumps({"prompt": [1], "max_tokens": 500, "stream": True}).encode()
        many = load.run(port, [long] * 32, clients=32)  # 9 are taken, as many wait
        assert many.counts()["refused"] >= 1 and many.counts()["lost"] == 0
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(load.ask, port, long) for _ in range(2)]
            while load.get(port, "/health")["running"] < 2:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            assert all(t.result().complete and len(t.result().tokens) == 500 for t in texts)
        assert server.wait(PATIENCE) == 0
    finally:
        server.terminate()
        server.wait(PATIENCE)


def free_port() -> int:
    with HTTPServer((load.HOST, 0), Cutting) as server:
        return server.server_port
