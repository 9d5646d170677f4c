"""The server on Ray, where that is installed: `make serve`. All of it on the loopback address."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving import load

pytestmark = pytest.mark.slow
pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
PATIENCE = 300  # seconds until a test gives up waiting


def free_port() -> int:
    with HTTPServer((load.HOST, 0), BaseHTTPRequestHandler) as server:
        return server.server_port


@contextmanager
def served(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server with a random model in eager mode, ended in the end."""
    program = [sys.executable, "examples/serve.py", "--port", str(port), "--backend", "eager"]
    server = subprocess.Popen(
        [*program, "--cache", str(folder), *options],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield server
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.terminate()
        server.wait(PATIENCE)


def status_of(port: int, path: str) -> int:
    """The status of a GET, 0 while nobody listens."""
    connection = http.client.HTTPConnection(load.HOST, port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def asking(**asked: Any) -> bytes:
    return json.dumps({"prompt": [1, 2], "stream": True, **asked}).encode()


def test_replicas_lose_nothing_while_they_are_replaced(tmp_path):
    options = ["--load", "12", "--clients", "6", "--restart", "--context", "128"]
    options += ["--cache", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "examples/serve.py", *options],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 of 12 texts are the same" in done.stdout
    replaced = re.findall(r"process (\d+) gave way to (\d+)", done.stdout)
    assert len(replaced) == 2 and all(old != new for old, new in replaced)


def test_healthy_means_warm_and_clients_of_openai_are_served(tmp_path):
    port = free_port()
    with served(tmp_path, port) as server:
        deadline = time.monotonic() + PATIENCE
        while status_of(port, "/-/healthz") != 200:
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        healthy = time.time()
        health = load.get(port, "/health")
        assert health["ready_since"] <= healthy
        assert os.getpriority(os.PRIO_PROCESS, health["process"]) == os.nice(0)
        bad = load.ask(port, b'{"prompt": ""}')
        assert bad.status == 400 and "the prompt is empty" in bad.trouble
        assert status_of(port, "/elsewhere") == 404
        by_openai(port)


def by_openai(port: int) -> None:
    openai = pytest.importorskip("openai")
    address = f"http://{load.HOST}:{port}/v1"
    client = openai.OpenAI(base_url=address, api_key="none", timeout=PATIENCE)
    (name,) = [model.id for model in client.models.list()]
    asked = dict(model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=5, seed=1)
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens == 5
    chunks = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="Hello")
    assert caught.value.code == "model_not_found"


def test_a_text_goes_on_when_its_replica_is_killed(tmp_path):
    port, asked = free_port(), asking(max_tokens=400, seed=7, temperature=0.9)
    with served(tmp_path, port, "--context", "512") as server, ThreadPoolExecutor(1) as pool:
        assert server.stdout is not None and "ready after" in server.stdout.readline()
        whole = load.ask(port, asked)
        assert whole.complete and len(whole.tokens) == 400
        again = pool.submit(load.ask, port, asked)
        while not (health := load.get(port, "/health"))["running"]:
            assert not again.done()
        os.kill(health["process"], signal.SIGKILL)
        assert again.result(PATIENCE).complete
        assert again.result().tokens == whole.tokens
        assert load.get(port, "/health")["process"] != health["process"]


def test_a_full_queue_refuses_and_the_end_waits_for_texts(tmp_path):
    port, long = free_port(), asking(max_tokens=500, temperature=0)
    with served(tmp_path, port, "--waiting", "1", "--context", "512") as server:
        assert server.stdout is not None and "ready after" in server.stdout.readline()
        many = load.run(port, [long] * 32, clients=32)  # 9 are taken, as many wait
        assert many.counts()["refused"] >= 1 and many.counts()["lost"] == 0
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(load.ask, port, long) for _ in range(2)]
            while load.get(port, "/health")["running"] < 2:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            assert all(t.result().complete and len(t.result().tokens) == 500 for t in texts)
