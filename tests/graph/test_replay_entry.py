"""Calls of graphs that a GPU replays as one native call, over a driver that is none: right for any
arguments, and the usual path where something is to be ordered, prepared or told."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchair
from capture_tools import compiled, equal, fresh, graphs
from host_driver import Host, HostDriver, aligned, executable, host, kernel
from torchair.capture import base
from torchair.capture.native_replay import (
    ALIGNED,
    FIXED,
    FREE,
    LOOKED_AT,
    REFUSED,
    CallArgument,
    NativeReplay,
)
from torchair.codegen.cuda.graphs import ExecutableGraph, Patch

ENOUGH = 8  # calls before there is an entry


def layers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.gelu(x) * 2, x.sum(0)


def warm(fast: Callable[..., Any], *args: Any) -> None:
    for _ in range(ENOUGH):
        fast(*args)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Host:
    fresh()
    return host(monkeypatch)


def alone(there: Host, call: Callable[[], Any], served: int) -> Any:
    """A call of which so many are served by an entry."""
    before = there.served
    result = call()
    assert there.served - before == served
    assert not there.driver.errors
    return result


# ---- the native function alone


def replay(
    driver: HostDriver, kinds: list[int], nodes: int = 2, updated: Any = (), faults: Any = ()
) -> NativeReplay:
    run = executable(driver, len(kinds), nodes)
    table = run.table()
    assert table is not None
    pieces = [CallArgument(64, kind) for kind in kinds]
    bound = (ctypes.c_int64 * len(kinds))()
    return NativeReplay(table, pieces, bound, updated, faults, run)


def test_only_kernels_of_what_moved_get_new_arguments() -> None:
    driver = HostDriver()
    nodes = [kernel(1, 2), kernel(2, 2)]
    driver.live = {1: [0, 0], 2: [0, 0]}
    patches = [Patch(0, 0, 0, 0), Patch(0, 1, 1, 8), Patch(1, 0, 1, -16)]
    with driver.installed():
        run = ExecutableGraph(0x1000, nodes, patches, 2)
    run._enter = lambda: None
    table = run.table()
    assert table is not None
    pieces, bound = [CallArgument(8, FREE)] * 2, (ctypes.c_int64 * 2)()
    native = NativeReplay(table, pieces, bound, (), (), run)
    native.given[:] = [256, 512]
    assert native.run() == 0 and driver.updates == [1, 2]
    native.given[:] = [1024, 512]
    assert native.run() == 0 and driver.updates == [1, 2, 1]
    assert native.run() == 0 and driver.updates == [1, 2, 1]
    assert driver.live == {1: [1024, 520], 2: [496, 0]}
    assert len(driver.launches) == 3


def test_it_exchanges_what_python_exchanges() -> None:
    """Whole words and halves, several of one piece in a node, in any order."""
    rng = random.Random(0)
    for _ in range(20):
        runs, drivers = [], [HostDriver(), HostDriver()]
        chosen = [
            Patch(rng.randrange(3), w, rng.randrange(4), rng.randrange(64), half)
            for w in range(6)
            for half in rng.choice([("",), ("low",), ("high",), ("low", "high")])  # type: ignore[attr-defined]
        ]
        for driver in drivers:
            driver.live = {n + 1: [0] * 6 for n in range(3)}
            with driver.installed():
                runs.append(
                    ExecutableGraph(0x1000, [kernel(n + 1, 6) for n in range(3)], chosen, 4)
                )
            runs[-1]._enter = lambda: None
        table = runs[1].table()
        assert table is not None
        bound = (ctypes.c_int64 * 4)()
        native = NativeReplay(table, [CallArgument(64, FREE)] * 4, bound, (), (), runs[1])
        before = [0] * 4
        for _ in range(6):
            wanted = [rng.choice([b or 4096, rng.randrange(2**40)]) for b in before]
            moved = [(k, a) for k, a in enumerate(wanted) if a != before[k]]
            with drivers[0].installed():
                runs[0].exchange(moved)
            native.given[:] = wanted
            assert native.run() == 0
            assert drivers[0].live == drivers[1].live
            before = wanted


@pytest.mark.parametrize(
    ("given", "refused"),
    [([256, 77], False), ([257, 77], True), ([4096, 77], True), ([4096 - 256, 77], False),
     ([8192 - 256, 77], True), ([8192, 77], False)],
)  # fmt: skip
def test_addresses_that_python_must_look_at(given: list[int], refused: bool) -> None:
    driver = HostDriver()
    native = replay(driver, [LOOKED_AT, FREE], updated=[(4096, 8192)])
    native.given[:] = given
    assert native.run() == (REFUSED if refused else 0)
    assert bool(driver.launches) == (not refused) == bool(driver.updates)
    assert list(native.bound) == ([0, 0] if refused else given)


def test_what_must_stay_and_words_of_bad_indices() -> None:
    driver, words = HostDriver(), torch.zeros(3, dtype=torch.int64)
    native = replay(driver, [FREE, FIXED], faults=[(words.data_ptr(), 3)])
    native.bound[1] = native.given[1] = 4096
    assert native.run() == 0
    native.given[1] = 8192
    assert native.run() == REFUSED
    native.given[1] = 4096
    words[2] = 1
    assert native.run() == REFUSED and len(driver.launches) == 1


def test_errors_of_the_driver_are_negative() -> None:
    driver = HostDriver()
    native = replay(driver, [FREE, FREE])
    native.given[:] = [256, 512]
    for name in ("set", "launch"):
        driver.refuses = {name}
        native.bound[:] = [0, 0]
        assert native.run() == -2
        assert native.run() == (0 if name == "set" else -2)  # nothing left to be exchanged
    driver.refuses = set()
    assert native.run() == 0


# ---- calls through torch.compile


@torch.no_grad()
def test_calls_that_are_alike_are_served(there: Host) -> None:
    fast, kept = compiled(layers), []
    warm(fast, aligned(8, 4))
    for _ in range(5):
        x = aligned(8, 4)
        got = alone(there, lambda x=x: fast(x), 1)
        kept.append((x, got))
    for x, got in kept:
        equal(got, layers(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "odd",
    [
        lambda: aligned(8, 4, shift=1),
        lambda: aligned(4, 8).t(),
        lambda: aligned(8, 1).expand(8, 4),
    ],
)
def test_others_take_the_usual_path(there: Host, odd: Callable[[], torch.Tensor]) -> None:
    fast = compiled(layers)
    warm(fast, aligned(8, 4))
    (graph,) = graphs()
    for make, served in ((odd, 0), (lambda: aligned(8, 4), 1), (odd, 0)):
        x = make()
        (entry,) = there.substrates[0].made._entries
        got = alone(there, lambda x=x, entry=entry: entry([x]), served)
        equal(tuple(graph.call([x])) if got is None else got, layers(x))


@torch.no_grad()
def test_the_usual_path_leaves_what_an_entry_finds(there: Host) -> None:
    """They exchange addresses in the same graph, in turns."""
    fast = compiled(layers)
    x, y = aligned(8, 4), aligned(8, 4)
    warm(fast, x)
    (graph,) = graphs()
    for given, by_entry in ((x, True), (y, False), (x, True), (x, False), (y, False), (y, True)):
        if by_entry:
            got = alone(there, lambda given=given: fast(given), 1)
        else:
            got = graph.call([given])
        equal(tuple(got), layers(given))


@torch.no_grad()
def test_another_stream_and_a_recording_are_the_usual_path(there: Host) -> None:
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    there.order.current = 7
    alone(there, lambda: fast(x), 0)
    alone(there, lambda: fast(x), 1)
    assert there.driver.launches[-2:] == [7, 7]
    there.order.here = False
    alone(there, lambda: fast(x), 0)
    there.order.here, there.order.capturing = True, True
    launched = len(there.driver.launches)
    equal(alone(there, lambda: fast(x), 0), layers(x))
    assert len(there.driver.launches) == launched, "a graph was launched while its caller records"


@torch.no_grad()
def test_a_driver_that_refuses_once(there: Host) -> None:
    """The usual path finds out what is wrong, and captures with copies if the driver insists."""
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    (substrate,) = there.substrates
    entry = substrate.made._entries[0]
    there.driver.refuses = {"set"}
    replayed = entry.replay
    status = replayed.take_status

    def take_status() -> int:
        there.driver.refuses = set()  # well again when the usual path asks
        return status()

    replayed.take_status = take_status
    y = aligned(8, 4)
    equal(alone(there, lambda: fast(y), 0), layers(y))
    assert not substrate.copied
    del replayed.take_status
    z = aligned(8, 4)
    equal(fast(z), layers(z))
    there.driver.refuses = {"set"}
    for _ in range(3):
        z = aligned(8, 4)
        equal(fast(z), layers(z))
    assert substrate.copied == 1 and not substrate.made._entries


@torch.no_grad()
def test_threads_take_turns(there: Host) -> None:
    fast = compiled(layers)
    warm(fast, aligned(8, 4))
    wrong = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(50):
                x = aligned(8, 4)
                y, _ = fast(x)
                if not torch.allclose(y, layers(x)[0], atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not there.driver.errors and there.served > 100


@torch.no_grad()
def test_small_arguments_of_many_kernels_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    there = host(monkeypatch, nodes=20)
    fast = compiled(layers)
    warm(fast, aligned(8, 4))
    for _ in range(3):
        x = aligned(8, 4)
        there.driver.updates.clear()
        there.driver.copies.clear()
        equal(alone(there, lambda x=x: fast(x), 1), layers(x))
        ((to, source, size),) = there.driver.copies
        assert (source, size) == (x.data_ptr(), 128) and to != source


@torch.no_grad()
def test_bad_indices_are_told_by_the_usual_path(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    words = torch.zeros(2, dtype=torch.int64)
    there = host(monkeypatch, faults=(words,))
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    words[1] = 1
    with pytest.raises(IndexError, match="a bad index"):
        fast(x)
    equal(alone(there, lambda: fast(x), 1), layers(x))


@torch.no_grad()
def test_gradients_autocast_and_modes_are_the_usual_path(there: Host) -> None:
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    with torch.profiler.profile():
        alone(there, lambda: fast(x), 0)
    alone(there, lambda: fast(x), 1)


@torch.no_grad()
def test_an_evicted_graph_has_no_entry(there: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    (graph,), entry = graphs(), there.substrates[0].made._entries[0]
    graph._drop(next(iter(graph.captured.values())))
    assert entry([x]) is None
    equal(alone(there, lambda: fast(x), 0), layers(x))


@torch.no_grad()
def test_calls_by_an_entry_count_as_use(there: Host) -> None:
    """What was used least recently is forgotten first."""
    fast, x = compiled(lambda x: (x + 1,), dynamic=True), aligned(8, 4)
    fast(x)
    (graph,) = graphs()
    graph.options = replace(graph.options, limit=2, evict=True)
    fast(x)
    (first,), entry = graph.captured, graph.entry([8, 4, x])
    fast(aligned(9, 4))
    assert entry is not None and entry([9, 4, x]) is None  # a number of the key
    (y,) = entry([8, 4, x]) or ()
    equal(y, x + 1)
    fast(aligned(10, 4))
    assert first in graph.captured and len(graph.captured) == 2


# ---- through torchair.compile


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return F.gelu(y), y.sum(0)


@torch.no_grad()
def test_calls_without_dynamo_are_served(there: Host) -> None:
    model, x = Model(), aligned(8, 4)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    fast = torchair.compile(model, x, config=config)
    warm(fast, x)
    for _ in range(3):
        y = aligned(8, 4)
        equal(alone(there, lambda y=y: fast(y), 1), model(y))
    y = aligned(8, 4, shift=1)
    equal(alone(there, lambda: fast(y), 0), model(y))
    with torch.autocast("cpu"), pytest.raises(Exception, match="autocast"):
        fast(x)
    model.linear.weight = nn.Parameter(torch.randn(4, 4))
    equal(fast(x), model(x))
    model.linear.weight.mul_(2)
    warm(fast, x)
    equal(alone(there, lambda: fast(x), 1), model(x))
    with pytest.raises(torchair.errors.InputError):
        fast(aligned(9, 4))
    assert ALIGNED == 256


@torch.no_grad()
def test_an_entry_is_made_anew_when_it_refuses_some_in_a_row(there: Host) -> None:
    """Not when it refuses one now and then: making one takes longer than a call."""
    fast, x, odd = compiled(layers), aligned(8, 4), aligned(8, 4, shift=1)
    warm(fast, x)
    (entry,) = there.substrates[0].made._entries
    for _ in range(70):
        fast(x)
        equal(fast(odd), layers(odd))
    assert there.substrates[0].made._entries == [entry]
    for _ in range(8):
        fast(odd)
    (other,) = there.substrates[0].made._entries
    assert other is not entry
    equal(alone(there, lambda: fast(x), 1), layers(x))


@torch.no_grad()
@pytest.mark.parametrize("dynamo", [True, False])
def test_views_of_arguments_are_views_of_those_of_the_call(there: Host, dynamo: bool) -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x[1:3]

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    fast = compiled(views) if dynamo else torchair.compile(views, aligned(8, 4), config=config)
    warm(fast, aligned(8, 4))
    for _ in range(3):
        x = aligned(8, 4)
        y, view = fast(x)
        equal((y, view), views(x))
        assert view.data_ptr() == x[1:].data_ptr()


@torch.no_grad()
def test_results_that_are_views_of_arguments_are_made_of_those_of_the_call(there: Host) -> None:
    fast, x = compiled(layers), aligned(8, 4)
    warm(fast, x)
    (graph,) = graphs()
    (meta,) = graph.captured.values()
    recording: Any = meta.recording
    recording.sources.append(base.OfArgument(lambda args: args[0][2:]))
    recording.outputs._make = None  # to be prepared again
    y = aligned(8, 4)
    entry = graph.entry([y])
    assert entry is not None
    found = entry([y]) or ()
    equal(tuple(found), (*layers(y), y[2:]))
    assert found[2].data_ptr() == y[2:].data_ptr()
    assert graph.entry([y], lambda graph: graph.guard_of_call([y], [0], [], [])) is None


def functions(call: Callable[[], Any]) -> list[str]:
    """Functions of Python and of C that a call enters."""
    found: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)
        elif event == "c_call":
            found.append(arg.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    if "native_guard" not in found:
        return found
    driver = len(found) - found[::-1].index("_launch") + 1  # what stands in for it
    return [*found[: found.index("native_guard") + 1], *found[driver:]]


@torch.no_grad()
def test_a_call_enters_few_functions(there: Host) -> None:
    """Of ours: through `torch.compile`, behind what Dynamo calls; and all of `torchair.compile`."""
    x, config = aligned(8, 4), torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    fast = torchair.compile(layers, x, config=config)
    warm(fast, x)
    there.driver.run = None
    found = functions(lambda: fast(x))
    assert "again" in found and "native_guard" in found, "no entry has served it"
    assert len(found) <= 15, found
    torch._dynamo.reset()
    through = compiled(layers)
    warm(through, x)
    there.driver.run = None
    found = functions(lambda: through(x))
    mine = found[found.index("is_grad_enabled") :]
    mine = mine[: mine.index("finish") + 2]
    assert "native_guard" in mine and len(mine) <= 15, mine


@torch.no_grad()
def test_what_a_graph_updates_must_be_where_it_was(there: Host) -> None:
    def fn(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        state.add_(1.0)
        return y + state.sum()

    fast, x, state = compiled(fn), aligned(8, 4), aligned(8, 4)
    other = state.clone()
    for _ in range(ENOUGH):
        equal(fast(state, x), fn(other, x))
    version = state._version
    equal(alone(there, lambda: fast(state, x), 1), fn(other, x))
    equal(state, other)
    assert state._version == version + 2  # the stand-in writes to it by torch, which counts too
    # an argument over what is updated is read as it was
    (graph,), (entry,) = graphs(), there.substrates[0].made._entries
    assert entry([state, state]) is None
    equal(graph.call([state, state])[0], fn(other, other.clone()))
    elsewhere = state.clone()
    assert entry([elsewhere, x]) is None
    equal(fast(elsewhere, x), fn(other, x))
    equal(elsewhere, other)
    assert not torch.equal(state, other), "another tensor was updated"
