"""Locks in a child of `fork`: whatever other threads held, the child can take."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llvmlite.binding import ffi
from torch import distributed as dist
from torch._dynamo import convert_frame
from torch._functorch import aot_autograd

import torchair.deploy.tracing  # noqa: F401  (repairs what it changes)
from torchair import locks
from torchair.codegen.target import KernelOrder
from torchair.fx import tracing
from torchair.garbage import no_garbage_collection
from torchair.ops import hcom
from torchair.torch_private import aot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
_SECONDS = 20


@contextmanager
def another_thread_inside(*managers: Any) -> Iterator[None]:
    """A thread that has entered these, and leaves them at the end."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager)
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def succeeds_in_a_child(work: Callable[[], bool]) -> bool:
    """Whether a forked process returns True in time."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
            code = not work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_locks_of_other_threads_are_free_in_a_child() -> None:
    made = [locks.Lock(), locks.RLock(), convert_frame.compile_lock, ffi.lib._lock._lock]
    with another_thread_inside(*made):
        assert not any(lock.acquire(blocking=False) for lock in made)
        assert succeeds_in_a_child(lambda: all(lock.acquire(timeout=1) for lock in made))
        assert not any(lock.acquire(blocking=False) for lock in made)  # in the parent they are held


def test_a_lock_of_the_forking_thread_stays_its_own() -> None:
    lock = locks.RLock()
    with lock:
        assert succeeds_in_a_child(lambda: lock._is_owned() and lock.release() is None)


def test_what_other_threads_would_undo_is_undone_in_a_child() -> None:
    op = torch.ops.aten.upsample_nearest2d.vec
    before = dict(op.py_kernels)

    def undone() -> bool:
        with (
            no_garbage_collection(),
            tracing.without_decomposition(),
        ):  # as the child itself compiles
            inside = not gc.isenabled() and op.py_kernels != before
        return inside and gc.isenabled() and op.py_kernels == before

    with another_thread_inside(no_garbage_collection(), tracing.without_decomposition()):
        assert not gc.isenabled() and op.py_kernels != before
        assert succeeds_in_a_child(lambda: gc.isenabled() and op.py_kernels == before and undone())
    assert gc.isenabled() and op.py_kernels == before


def test_changes_of_another_thread_while_it_traces_are_not_seen_or_undone_in_a_child() -> None:
    def is_compiling() -> bool:
        return torch.compiler._is_compiling_flag

    with another_thread_inside(aot.compiling()):
        assert is_compiling()
        assert succeeds_in_a_child(lambda: not is_compiling())
    assert not is_compiling()


def test_graphs_of_other_threads_are_traced_by_aotautograd_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aot_autograd, "run_functionalized_fw_and_collect_metadata", lambda f: f)
    monkeypatch.setattr(aot_autograd, "aot_stage1_graph_capture", lambda _, f: f)

    def graph() -> None: ...

    def traced() -> list[Any]:
        collected = aot_autograd.run_functionalized_fw_and_collect_metadata(graph)
        return [collected, aot_autograd.aot_stage1_graph_capture(None, graph)]

    with another_thread_inside(aot.traced_once([torch.ones(2)])):
        assert traced() == [graph, graph]
    with pytest.raises(ZeroDivisionError), aot.traced_once([torch.ones(2)]):
        assert graph not in traced()
        1 / 0  # noqa: B018
    assert traced() == [graph, graph]


def test_collectives_of_other_threads_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "broadcast", lambda *_: calls.append("torch"))
    monkeypatch.setitem(hcom._PATCHED, "broadcast", lambda *_: calls.append("traced"))
    monkeypatch.setitem(hcom._TRACED, "broadcast", lambda *_: calls.append("traced"))
    own = dist.broadcast
    with another_thread_inside(hcom.traced_collectives()):
        assert dist.broadcast is not own
        dist.broadcast(torch.ones(1), 0)
    with pytest.raises(ZeroDivisionError), hcom.traced_collectives():
        dist.broadcast(torch.ones(1), 0)
        1 / 0  # noqa: B018
    assert calls == ["torch", "traced"] and dist.broadcast is own


def test_code_is_generated_in_a_child_while_another_thread_generates() -> None:
    """`functools.cached_property` would keep the child waiting, before Python 3.12."""
    begun, leave = threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        leave.wait()
        return "slow"

    def order(generate: Callable[[], str]) -> Any:
        target: Any = SimpleNamespace(generate=lambda *_: generate())
        return KernelOrder(target, None, "kernel")  # type: ignore[arg-type]

    slow, quick = order(wait), order(lambda: "quick")
    thread = threading.Thread(target=lambda: slow.generated)
    thread.start()
    begun.wait()
    try:
        assert succeeds_in_a_child(lambda: quick.generated == "quick")
    finally:
        leave.set()
        thread.join()
