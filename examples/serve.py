"""A language model behind HTTP on Ray Serve: replicas that share compiled plans and are warm before
they are healthy, batches in compiled sizes, answers token by token.

    python examples/serve.py                       a random model on port 8000, until Ctrl-C
    python examples/serve.py --model DIR           a checkpoint that lies in a folder
    python examples/serve.py --load 64             64 requests: compiled against eager, then it ends
    python examples/serve.py --load 64 --restart   the same, while replicas are replaced

    curl localhost:8000/v1/completions -d '{"prompt": "Tell me", "max_tokens": 8, "stream": true}'

Needs `pip install torchair[serve]` and `transformers`. docs/serving.md explains it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from rich.console import Console
from rich.table import Table
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chat import SIZES
from serving import load
from serving.decoder import WAYS, Sizes
from serving.gateway import Gateway, Lost
from serving.service import Service, Settings
from serving.wire import Kind, Refused

console = Console(width=110)
HERE = Path(__file__).resolve().parent
STORE = 100 << 20  # bytes of Ray's object store, which nothing here uses
WEB, MODEL = "torchair", "torchair-model"  # the applications
QUIET = {"log_level": "WARNING", "enable_access_log": False}


class Replica:
    """One process with the model. Ray calls it healthy when the constructor has returned."""

    def __init__(self, settings: Settings) -> None:
        self._service = Service(settings)

    async def text(
        self, body: bytes, kind: str, before: Sequence[int], seed: int
    ) -> AsyncIterator[dict[str, Any]]:
        """What a request asks for, or why it is refused, in plain values."""
        try:
            async with aclosing(self._service.text(body, Kind[kind], before, seed)) as events:
                async for event in events:
                    yield event
        except Refused as e:
            yield {"refused": (e.status, e.message, e.param, e.code)}

    def health(self) -> dict[str, Any]:
        """What this replica says about itself."""
        return self._service.health()

    def check_health(self) -> None:
        """Called by Ray now and then; what it raises has this replica replaced."""
        self._service.batcher.check()

    def __del__(self) -> None:
        if hasattr(self, "_service"):  # Ray has waited until all requests were answered
            self._service.batcher.close()


class Web:
    """The process that talks to clients. It has no model, and goes on when a replica is lost."""

    def __init__(self, name: str, context: int) -> None:
        self._replicas = serve.get_deployment_handle("model", MODEL)
        self._gateway = Gateway(name, context, self._text, self._health)

    async def _text(
        self, body: bytes, kind: Kind, before: list[int], seed: int
    ) -> AsyncGenerator[dict[str, Any]]:
        try:
            events = self._replicas.options(stream=True).text.remote(body, kind.name, before, seed)
            async for event in events:
                if "refused" in event:
                    raise Refused(*event["refused"])
                yield event
        except BackPressureError as e:
            raise Refused(503, f"the queue is full: {e}", code="overloaded") from None
        except RayActorError as e:
            raise Lost(str(e)) from e

    async def _health(self) -> Any:
        try:
            return await self._replicas.health.remote()
        except RayActorError as e:
            raise Lost(str(e)) from e

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        reply = await self._gateway.respond(request.method, request.url.path, body)
        kind = Response if isinstance(reply.body, bytes) else StreamingResponse
        return kind(reply.body, reply.status, reply.headers, reply.media_type)


def model_application(settings: Settings, replicas: int) -> Any:
    """The model as Ray Serve runs it, without a route. Requests beyond those that replicas take
    wait in the web process, and beyond that get a 503. A new version starts before the old one
    stops, which answers what it has."""
    taken = settings.sizes.rows[-1] + settings.waiting  # by a Batcher
    deployment = serve.deployment(
        Replica,
        name="model",
        num_replicas=replicas,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": settings.threads},
        max_ongoing_requests=taken,
        max_queued_requests=taken,  # also those on their way to a replica, for a moment
        graceful_shutdown_timeout_s=600,
        health_check_timeout_s=60,
    )
    return deployment.bind(settings)


def web_application(settings: Settings, replicas: int) -> Any:
    """What has a route. It takes more requests than replicas do, so that they say what is full."""
    taken = 2 * (replicas + 1) * (settings.sizes.rows[-1] + settings.waiting)
    deployment = serve.deployment(
        Web,
        name="web",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=max(taken, 256),
        graceful_shutdown_timeout_s=600,
    )
    return deployment.bind(settings.name, settings.sizes.context)


def start(settings: Settings, replicas: int, port: int, address: str | None = None) -> None:
    """Ray and the web's side of Serve: in a cluster that is there, or on this machine alone, where
    replicas and their successors have places at the same time."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
    # Ray runs workers with niceness 15. Beside other programs, replicas would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None:
        # Replicas are processes of their own, which find our modules where this one does.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(HERE), *filter(None, known)]))
        ray.init(
            num_cpus=2 * replicas * settings.threads,
            num_gpus=0,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address=load.HOST,
        )
    else:
        ray.init(address=address, logging_level="warning")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": load.HOST, "port": port}, logging_config=QUIET)


def stop() -> None:
    """End what we have started, which is all of Ray where it was not there before. Requests that
    are being answered are answered first."""
    for name in (WEB, MODEL):
        serve.delete(name)
    ray.shutdown()


def deploy(settings: Settings, replicas: int) -> float:
    """Run the model, or replace the replicas of one that runs; returns the seconds. Only when they
    are warm there is a route, and Ray's proxy says that it is healthy."""
    begin = time.perf_counter()
    application = model_application(settings, replicas)
    serve.run(application, name=MODEL, route_prefix=None, logging_config=QUIET)
    if WEB not in serve.status().applications:
        serve.run(web_application(settings, replicas), name=WEB, logging_config=QUIET)
    return time.perf_counter() - begin


def measure(settings: Settings, options: argparse.Namespace) -> bool:
    """The same requests to the compiled model and to eager, behind the same server. True if none
    was lost and both have written the same texts."""
    columns = ("", "complete", "refused", "lost", "first token", "whole text", "tokens/s")
    shown = Table(*columns, title="p50/p90/p99 in ms")
    outcomes: dict[str, Sequence[load.Outcome]] = {}
    lost = 0
    for way in (settings.way, "eager"):
        done = loaded_with(replace(settings, way=way), options)
        outcomes[way] = done.outcomes
        counts = done.counts()
        lost += counts["lost"]
        shown.add_row(
            way,
            *(str(n) for n in counts.values()),
            done.latencies(lambda o: o.first),
            done.latencies(lambda o: o.whole),
            f"{done.rate:.0f}",
        )
    console.print(shown)
    ours, eager = outcomes.values()
    count: int = options.load
    same = sum(load.same(ours[k::count], eager[k::count]) for k in range(count))
    console.print(f"{same} of {count} texts are the same, token by token")
    return not lost and (same == count or settings.dtype != "float32")


def loaded_with(settings: Settings, options: argparse.Namespace) -> load.Load:
    """Deploy, and send all requests once, or again and again until replicas were replaced and once
    more."""
    deploy(settings, options.replicas)
    health = load.get(options.port, "/health")
    requests = load.wishes(options.load, health["vocabulary"], settings.sizes.context // 8)
    successor = threading.Thread(target=deploy, args=(settings, options.replicas))
    console.print(f"{settings.way}: warm after {health['warming_s']:.1f} s")
    done = load.Load([], 0.0)
    if options.restart:
        successor.start()
        while successor.is_alive():
            done += load.run(options.port, requests, options.clients)
    done += load.run(options.port, requests, options.clients)
    if options.restart:
        after = load.get(options.port, "/health")
        console.print(
            f"{settings.way}: process {health['process']} gave way to {after['process']}, warm "
            f"after {after['warming_s']:.1f} s"
        )
    for outcome in (o for o in done.outcomes if o.lost):
        console.print(f"{settings.way}: {outcome.status} {outcome.trouble}")
    return done


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line says about a replica."""
    folder = str(Path(options.cache).expanduser().resolve())
    model = options.model and str(Path(options.model).resolve())
    return Settings(
        model,
        options.size,
        options.dtype,
        options.backend,
        folder,
        options.threads,
        options.waiting,
        Sizes(context=options.context),
    )


def main() -> int:
    """Serve until the user has enough, or run a load."""
    known = Settings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a checkpoint; without it a random model")
    parser.add_argument("--size", default=known.size, choices=SIZES, help="of a random model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default=known.way, choices=WAYS)
    parser.add_argument("--context", type=int, default=known.sizes.context, help="tokens of a text")
    parser.add_argument("--waiting", type=int, default=known.waiting, help="texts of the queue")
    parser.add_argument("--cache", default=known.folder, help="folder of compiled plans")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--threads", type=int, default=known.threads, help="of a replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", help="of a Ray cluster; without it one is started here")
    parser.add_argument("--load", type=int, help="send so many requests, print latencies and end")
    parser.add_argument("--clients", type=int, default=16, help="requests of a load at once")
    parser.add_argument("--restart", action="store_true", help="replace replicas under the load")
    options = parser.parse_args()
    settings = settings_of(options)
    start(settings, options.replicas, options.port, options.address)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C; Ray has its own
        if options.load:
            return 0 if measure(settings, options) else 1
        seconds = deploy(settings, options.replicas)
        print(f"ready after {seconds:.1f} s: http://{load.HOST}:{options.port}", flush=True)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to be told twice is no reason to hurry
        stop()


if __name__ == "__main__":
    sys.exit(main())
