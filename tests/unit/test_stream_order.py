"""Streams: replays follow each other whatever is captured in between, kernels are launched on their
device, branches of a fork do not share memory."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch

from torchair.capture import accelerator
from torchair.capture.accelerator import Accelerator, StreamOrder
from torchair.codegen.cuda import run
from torchair.engine.run.executor import side_by_side


class Stream:
    def __init__(self, number: int, said: list[tuple[int, int]]) -> None:
        self.number, self._said = number, said

    def wait_stream(self, other: Stream) -> None:
        self._said.append((self.number, other.number))


class Device:
    """Streams by number; the current one is what a test sets."""

    def __init__(self) -> None:
        self.current, self.index, self.capturing = 0, 0, False
        self.waits: list[tuple[int, int]] = []
        module = SimpleNamespace(
            current_stream=lambda device: Stream(self.current, self.waits),
            is_current_stream_capturing=lambda: self.capturing,
        )
        functions = {
            "getCurrentRawStream": lambda index: self.current,
            "getDevice": lambda: self.index,
            "isCurrentStreamCapturing": lambda: self.capturing,
        }
        known: Any = SimpleNamespace(module=module, function=functions.__getitem__, kind="cuda")
        self.accelerator: Accelerator = known


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    known = threading.local()
    monkeypatch.setattr(accelerator, "enter_context", lambda: setattr(known, "has", True))
    monkeypatch.setattr(accelerator, "has_context", lambda: getattr(known, "has", False))
    return Device()


def test_a_stream_waits_for_the_one_that_replayed_last(device: Device) -> None:
    order = StreamOrder(device.accelerator, torch.device("cuda", 0))
    for stream in (1, 1, 2, 1):
        device.current = stream
        assert order.enter() == stream
    assert device.waits == [(2, 1), (1, 2)]


def test_a_capture_of_the_caller_is_no_replay(device: Device) -> None:
    """What runs next waits for what ran last."""
    order = StreamOrder(device.accelerator, torch.device("cuda", 0))
    device.current = 1
    order.enter()
    device.current, device.capturing = 2, True
    order.enter()
    device.current, device.capturing = 3, False
    order.enter()
    assert device.waits == [(3, 1)]


def test_what_needs_no_preparation(device: Device) -> None:
    order = StreamOrder(device.accelerator, torch.device("cuda", 0))
    assert order.again() is None  # this thread has no context
    order.enter()
    assert order.again() == 0
    device.current = 1
    assert order.again() is None  # another stream, which has to wait
    order.enter()
    assert order.again() == 1
    device.index = 1
    assert order.again() is None  # the default streams of all devices have one number
    device.index, device.capturing = 0, True
    assert order.again() is None
    device.capturing = False
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(order.again()))
    thread.start()
    thread.join()
    assert found == [None]


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_are_launched_on_their_device(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is the current one: of a plan that the host walks through none else sees to it."""
    here = [current]
    said: list[tuple[int, int]] = []

    class On:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            here.append(self.index)

        def __exit__(self, *error: object) -> None:
            here.pop()

    functions = {"getDevice": lambda: here[-1]}
    private = SimpleNamespace(
        current_raw_stream=lambda index: 100 + index,
        bindings=None,
        device_function=lambda bindings, kind, name: functions[name],
    )
    monkeypatch.setattr(run, "cuda", private)
    monkeypatch.setattr(run, "enter_context", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", On)
    part: Any = object.__new__(run.Launches)
    part.faults, part._library = [], SimpleNamespace(index=1)
    part._patches, part._calls = [], [lambda stream: said.append((here[-1], stream))] * 2
    part.call()([])
    assert said == [(1, 101)] * 2 and here == [current]


def test_what_a_branch_lets_go_of_no_other_branch_gets() -> None:
    """The allocator gives memory to the stream it was made on, at once. Another branch of the same
    fork may be on that stream, while the one that read the memory is still at it."""
    streams: Any = SimpleNamespace(
        recording=True,
        current=SimpleNamespace(record_event=lambda: None, wait_stream=lambda side: None),
        sides=lambda count: [SimpleNamespace(wait_event=lambda event: None)] * count,
        on=lambda side: nullcontext(),
    )
    part: Any = SimpleNamespace(is_view=False)
    gone: list[str] = []
    registers: list[Any] = [torch.ones(1), None]
    finalize(registers[0], gone.append, "freed")
    seen: list[int] = []

    def reads_last(r: list[Any]) -> None:
        r[0] = None

    def makes(r: list[Any]) -> None:
        seen.append(len(gone))
        r[1] = torch.ones(1)

    run_all = side_by_side([(part, makes), (part, reads_last), (part, makes)], streams)
    run_all(registers)
    assert seen == [0, 0] and gone == ["freed"]
