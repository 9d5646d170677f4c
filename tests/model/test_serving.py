"""Serving a language model: batches in compiled sizes, rows that are taken over, queues, streams,
a checkpoint behind its gateway. Ray itself is the business of test_serving_ray.py."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

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

from serving import load
from serving.batcher import Batcher, Closed, End, Event, Full, TextStream
from serving.decoder import Decoder, Sizes, check_attention
from serving.gateway import Gateway
from serving.sampling import Sampling, sample
from serving.service import Service, Settings
from serving.wire import Kind

SIZES = Sizes(rows=(1, 2, 4), pieces=(4, 8), context=32)
VOCABULARY = 99
PATIENCE = 300  # seconds until a test gives up waiting for a thread


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
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
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
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


def asked(batcher: Batcher, prompt: list[int], limit: int, **options: Any) -> SimpleQueue[Event]:
    events: SimpleQueue[Event] = SimpleQueue()
    batcher.submit(prompt, limit, events.put, **options)
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
    assert again.prefill([5, 17, 42], 0).argmax() == alone(model, [5, 17, 42], 1)[0]


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


def scores_for(tokens: list[int]) -> torch.Tensor:
    """Scores by which these tokens are the likeliest."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


class Counting:
    """Stands in for a decoder: tokens are numbers that rise, steps happen when they may."""

    def __init__(self) -> None:
        self.sizes = Sizes(rows=(1, 2), pieces=(4,), context=64)
        self.may = threading.Semaphore(0)
        self.prompts: SimpleQueue[int] = SimpleQueue()
        self.moves: list[tuple[int, int]] = []
        self.broken = False

    def prefill(self, prompt: list[int], row: int) -> torch.Tensor:
        self.prompts.put(prompt[0])
        return scores_for([prompt[-1] + 1])[0]

    def decode(self, tokens: list[int], places: list[int]) -> torch.Tensor:
        assert self.may.acquire(timeout=PATIENCE)
        if self.broken:
            raise RuntimeError("no memory")
        return scores_for([t + 1 for t in tokens])

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
    with pytest.raises(Closed, match="shut down"):
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
    with pytest.raises(Closed, match="failed"):
        batcher.submit([1], 1, print)


def test_who_stops_reading_a_stream_cancels_the_text(counting):
    batcher = Batcher(counting, waiting=8)

    async def reader() -> None:
        events = TextStream(batcher, [10], 50)
        assert await anext(events) == 11
        await events.aclose()
        unread = TextStream(batcher, [20], 50)
        await unread.aclose()

    asyncio.run(reader())
    counting.steps(2)
    batcher.close(PATIENCE)
    batcher.check()
    assert batcher.load == (0, 0)


# ---- sampling inside of batches


def test_a_drawn_text_does_not_depend_on_its_neighbours(model, decoder):
    """Each text has random numbers of its own, and the same in every batch."""
    how = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    prompts = [prompt for prompt, _ in wanted(4)]
    found = []
    for count in (4, 1):
        batcher = Batcher(decoder, waiting=8)
        events = [asked(batcher, p, 6, sampling=how) for p in prompts[:count]]
        found.append([collected(e)[0] for e in events])
        batcher.close()
    assert found[0][0] == found[1][0]
    assert found[0][0] == drawn_alone(model, prompts[0], 6, how)
    assert found[0][0] != alone(model, prompts[0], 6)


def drawn_alone(model: Any, prompt: list[int], limit: int, how: Sampling) -> list[int]:
    """The same by the whole model in eager mode, for each token anew."""
    tokens = list(prompt)
    for step in range(limit):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(sample(scores, how, step))
    return tokens[len(prompt) :]


def test_another_replica_goes_on_with_a_text(decoder):
    how = Sampling(seed=5)
    batcher = Batcher(decoder, waiting=8)
    whole, _ = collected(asked(batcher, [5, 17], 8, sampling=how))
    rest, end = collected(asked(batcher, [5, 17, *whole[:3]], 5, sampling=how, before=3))
    batcher.close()
    assert whole[3:] == rest and end is End.LENGTH


# ---- a whole service


def checkpoint(model: Any, folder: Path) -> str:
    """A folder with a model that ends a text with the second token behind `w5 w17 w42`."""
    words = Tokenizer(WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    end = alone(model, [5, 17, 42], 2)[-1]
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{end}")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=end).save_pretrained(folder)
    return str(folder)


def gateway_of(service: Service) -> Gateway:
    async def health() -> Any:
        return service.health()

    return Gateway(service.settings.name, SIZES.context, service.text, health)


def posted(gateway: Gateway, path: str, **asked: Any) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        reply = await gateway.respond("POST", path, json.dumps(asked).encode())
        assert isinstance(reply.body, bytes)
        return reply.status, json.loads(reply.body)

    return asyncio.run(run())


def test_a_checkpoint_is_served_from_its_folder(model, tmp_path):
    where = checkpoint(model, tmp_path / "model")
    service = Service(Settings(where, way="eager", folder=str(tmp_path), sizes=SIZES))
    gateway = gateway_of(service)
    about = {"model": "model", "max_tokens": 5, "temperature": 0}
    status, made = posted(gateway, Kind.COMPLETION.path, prompt="w5 w17 w42", **about)
    (choice,) = made["choices"]
    tokens = alone(model, [5, 17, 42], 2)
    assert status == 200 and choice["token_ids"] == tokens and choice["finish_reason"] == "stop"
    assert choice["text"] == f"w{tokens[0]}"  # without the token that ends it
    assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    status, said = posted(
        gateway, Kind.CHAT.path, messages=[{"role": "user", "content": "w5"}], max_tokens=2
    )
    assert status == 200 and said["usage"]["prompt_tokens"] == 1  # by the template
    assert said["choices"][0]["message"]["role"] == "assistant"
    assert service.health()["running"] == 0 and service.health()["vocabulary"] == VOCABULARY
    service.batcher.close(PATIENCE)
    status, refused = posted(gateway, Kind.COMPLETION.path, prompt="w5")
    assert status == 503 and refused["error"]["type"] == "overloaded_error"


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
