"""Programs whose lanes run beside each other: on threads on the CPU, on streams of a GPU.

A lane walks through its tasks. Before a task it waits for the events of others, after it it fires
its own. What a plan's schedule says is all there is to know: nothing is decided at run time.
"""

from __future__ import annotations

import abc
import os
import threading
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch

from torchair.codegen.cpu.openmp import limit_threads
from torchair.codegen.program import BadIndex, Memory
from torchair.engine.plan.records import Plan, Schedule, Step
from torchair.engine.run.executor import Program, RunStep, prepared, with_debug_print
from torchair.engine.run.memory import PlaceMemory
from torchair.engine.run.native import StepFailure
from torchair.flags import debug_level
from torchair.torch_private.dispatch import set_grad_enabled


class LaneObserver(Protocol):
    """An observer of a running program."""

    alone: bool
    """Whether each native step runs by itself, so that it can be told from others."""

    def begin(self) -> None:
        """A call begins."""

    def wrap(self, run: RunStep, steps: Sequence[int], lane: str) -> RunStep:
        """What to run instead of `run`, which does these steps."""

    def end(self) -> None:
        """The call has ended."""


Watch = Callable[[Plan], LaneObserver]
"""Makes a recorder for each program of a plan."""


def bind_lanes(plan: Plan, place: PlaceMemory | None = None, watch: Watch | None = None) -> Program:
    """A program for a plan with a schedule, on the device that the plan is for."""
    kind = ThreadLanes if plan.streams is None else StreamLanes
    return kind(plan, place, watch)


@dataclass(slots=True)
class _LaneTask:
    """One thing that a lane does."""

    run: RunStep
    lane: int
    steps: list[int]
    step: Step  # to name in errors
    waits: list[Any] = field(default_factory=list)
    posts: list[Any] = field(default_factory=list)
    other_lanes: list[int] = field(default_factory=list)  # slots that torch allocated elsewhere


class LaneProgram(Program, abc.ABC):
    """A plan with a schedule, bound to memory."""

    def __init__(
        self, plan: Plan, place: PlaceMemory | None = None, watch: Watch | None = None
    ) -> None:
        assert plan.schedule is not None
        self._schedule: Schedule = plan.schedule
        self._recorder = watch(plan) if watch is not None else None
        self._apart = debug_level() >= 5  # each step says what it does
        super().__init__(plan, place)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        if self._recorder is None:
            return super().run(inputs)
        self._recorder.begin()
        outputs = super().run(inputs)
        self._recorder.end()
        return outputs

    def _prepare(self) -> list[RunStep]:
        """Views of arguments, then all lanes together."""
        steps, first = self.plan.steps, self._schedule.first
        threads = max(1, torch.get_num_threads() // len(self._schedule.lanes))
        self._memory = Memory(self.plan, self.arena.data_ptr())
        tasks = [
            [self._task(piece, lane, threads) for piece in self._pieces(lane)]
            for lane in range(len(self._schedule.steps))
        ]
        self._arrange(tasks, threads)
        self._positions = [*first, 0]
        return [*(prepared(steps[k], self.arena, self.plan) for k in first), self._go]

    @abc.abstractmethod
    def _arrange(self, tasks: list[list[_LaneTask]], threads: int) -> None:
        """Take over the tasks of each lane, and make their events."""

    @abc.abstractmethod
    def _go(self, registers: list[Any]) -> None:
        """Run all lanes."""

    def _pieces(self, lane: int) -> list[list[int]]:
        """What is bound as one: single steps where each is to be told from others."""
        if self._apart or (self._recorder is not None and self._recorder.alone):
            return [[k] for k in self._schedule.steps[lane]]
        return self._schedule.pieces(lane, self.plan.steps)

    def _task(self, piece: list[int], lane: int, threads: int) -> _LaneTask:
        steps = [self.plan.steps[k] for k in piece]
        run: RunStep
        if steps[0].kind == "native":
            part = self._bound(steps, self._memory, threads)
            self.parts.append(part)
            run = part.bind()
            run = with_debug_print(steps[0], run, self.plan) if self._apart else run
        else:
            views = [self.plan.steps[k] for k in self._schedule.views.get(piece[0], ())]
            runs = [prepared(s, self.arena, self.plan) for s in (steps[0], *views)]
            run = runs[0] if len(runs) == 1 else partial(_in_turn, runs)
        if self._recorder is not None:
            run = self._recorder.wrap(run, piece, self._schedule.lanes[lane])
        return _LaneTask(run, lane, piece, steps[0])


def _in_turn(runs: Sequence[RunStep], registers: list[Any]) -> None:
    for run in runs:
        run(registers)


# ---- threads ----


class ThreadLanes(LaneProgram):
    """Lanes on threads: the caller's own takes the first lane, workers take the others."""

    def _arrange(self, tasks: list[list[_LaneTask]], threads: int) -> None:
        self._threads, self._tasks = threads, tasks
        ends = {t.steps[-1]: t for lane in tasks for t in lane}
        begins = {t.steps[0]: t for lane in tasks for t in lane}
        self._events: list[LockType] = []  # locked until they are set
        for before, k in self._schedule.events:
            event = _unset_event()
            self._events.append(event)
            ends[before].posts.append(event)
            begins[k].waits.append(event)
        self._done = [_unset_event() for _ in tasks[1:]]
        self._failure: StepFailure | None = None

    def _go(self, registers: list[Any]) -> None:
        self._failure = None
        work = self._work_inferring if torch.is_inference_mode_enabled() else self._work
        thread_pool = workers()
        for tasks, done in zip(self._tasks[1:], self._done, strict=True):
            try:
                thread_pool.give(partial(work, tasks, registers), done)
            except Exception as e:  # there is no thread to be had
                self._stop(tasks, 0, e)
                done.release()
        if self._done:
            self._work(self._tasks[0], registers)
        else:
            self._walk(self._tasks[0], registers)
        for done in self._done:
            done.acquire()
        if self._failure is not None:
            self._raise(self._failure)

    def _raise(self, failure: StepFailure) -> None:
        for event in self._events:
            event.acquire(False)  # unset again, even if a lane was stopped before it
        if not isinstance(failure.error, Exception):
            raise failure.error
        raise failure from failure.error

    def _work(self, tasks: Sequence[_LaneTask], registers: list[Any]) -> None:
        with limit_threads(self._threads):
            self._walk(tasks, registers)

    def _work_inferring(self, tasks: Sequence[_LaneTask], registers: list[Any]) -> None:
        with torch.inference_mode():
            self._work(tasks, registers)

    def _walk(self, tasks: Sequence[_LaneTask], registers: list[Any]) -> None:
        """A lane from begin to end. Whatever happens, its events fire, so that no lane waits
        forever; after a failure the others stop at their next task."""
        fired = 0
        try:
            for task in tasks:
                for event in task.waits:
                    event.acquire()
                if self._failure is not None:
                    break
                task.run(registers)
                fired += 1
                for event in task.posts:
                    event.release()
        except BaseException as e:  # raised again when all lanes have ended
            self._stop(tasks, fired, e)
        else:
            self._let_go(tasks[fired:])

    def _stop(self, tasks: Sequence[_LaneTask], at: int, error: BaseException) -> None:
        step = error.step if isinstance(error, BadIndex) else tasks[at].step
        self._failure = self._failure or StepFailure(step, error)
        self._let_go(tasks[at:])

    def _let_go(self, tasks: Sequence[_LaneTask]) -> None:
        for task in tasks:
            for event in task.posts:
                event.release()


def _unset_event() -> LockType:
    """A lock as an event: one thread sets it once, another waits for it once and unsets it."""
    event = allocate_lock()
    event.acquire()
    return event


# ---- streams of a device ----


class StreamLanes(LaneProgram):
    """Lanes on streams: the caller issues all steps, in the order of the plan."""

    def _arrange(self, tasks: list[list[_LaneTask]], threads: int) -> None:
        self._module: Any = torch.get_device_module(torch.device(self.plan.device))
        self._streams = [
            stream_of(self.plan.device, label) if label else None for label in self._schedule.lanes
        ]
        self._tasks = sorted((t for lane in tasks for t in lane), key=lambda t: t.steps[0])
        by_step = {t.steps[0]: t for t in self._tasks}
        events = {before: self._module.Event() for before, _ in self._schedule.events}
        for before, k in self._schedule.events:
            by_step[before].posts[:] = [events[before]]
            by_step[k].waits.append(events[before])
        for k, slots in self._schedule.other_lanes.items():
            near = [s for s in slots if self.plan.place(s)[0].device == self.plan.device]
            by_step[k].other_lanes = near
        self._fork = self._module.Event()
        self._joins = [(s, self._module.Event()) for s in self._streams if s is not None]
        # slots that torch allocated in a lane and that the caller's stream reads in the end
        at_end = {o.slot for o in self.plan.outputs} | {w.value_slot for w in self.plan.write_backs}
        near = [s for s in at_end if self.plan.place(s)[0].device == self.plan.device]
        self._leaving = [s for s in near if self.plan.place(s)[0].kind == "torch"]

    def _go(self, registers: list[Any]) -> None:
        caller = self._module.current_stream(self.plan.device)
        streams = [caller if s is None else s for s in self._streams]
        self._fork.record(caller)
        for stream, _ in self._joins:
            stream.wait_event(self._fork)
        try:
            self._issue(streams, registers)
        finally:
            self._module.set_stream(caller)
            for stream, event in self._joins:
                event.record(stream)
                caller.wait_event(event)
        for slot in self._leaving:
            registers[slot].record_stream(caller)

    def _issue(self, streams: Sequence[Any], registers: list[Any]) -> None:
        now = None
        for task in self._tasks:
            stream = streams[task.lane]
            if stream is not now:
                self._module.set_stream(stream)
                now = stream
            for event in task.waits:
                stream.wait_event(event)
            for slot in task.other_lanes:
                registers[slot].record_stream(stream)
            try:
                task.run(registers)
            except Exception as e:
                raise StepFailure(task.step, e) from e
            for event in task.posts:
                event.record(stream)


@cache
def stream_of(device: str, label: str) -> Any:
    """The stream of a label, the same for all graphs of a process."""
    return torch.get_device_module(torch.device(device)).Stream(device=device)


# ---- threads: started when they are needed, kept for the next call ----

LaneWork = Callable[[], None]

_SPARE = 16  # threads that wait for work; a burst of calls does not hold more forever


class Workers:
    """Threads without work."""

    def __init__(self) -> None:
        self._free: deque[_Worker] = deque()
        self._process = os.getpid()

    def give(self, work: LaneWork, done: LockType) -> None:
        """Let a thread do this and then release `done`; `work` must not raise."""
        if self._process != os.getpid():  # a child of fork has none of our threads
            self._free, self._process = deque(), os.getpid()
        try:
            worker = self._free.pop()
        except IndexError:
            worker = _Worker(self)
            worker.start()
        worker.take(work, done)

    def back(self, worker: _Worker) -> bool:
        """A thread is ready for more; False if there are enough."""
        if len(self._free) >= _SPARE:
            return False
        self._free.append(worker)
        return True


class _Worker(threading.Thread):
    def __init__(self, thread_pool: Workers) -> None:
        super().__init__(name="torchair lane", daemon=True)
        self._thread_pool = thread_pool
        self._wake = allocate_lock()
        self._wake.acquire()
        self._task: tuple[LaneWork, LockType] | None = None

    def take(self, work: LaneWork, done: LockType) -> None:
        """Do this next."""
        self._task = (work, done)
        self._wake.release()

    def run(self) -> None:
        """Work until there are enough threads without this one."""
        set_grad_enabled(False)
        torch.get_num_threads()  # torch sets the number of this thread now, and not later
        stays = True
        while stays:
            self._wake.acquire()
            assert self._task is not None
            (work, done), self._task = self._task, None
            work()
            del work
            stays = self._thread_pool.back(self)
            done.release()


@cache
def workers() -> Workers:
    """The threads of this process."""
    return Workers()
