"""Tuning the kernels of a plan, and using what was found before.

For each request the choices that its target declares are tried one after the other, each with what
was best so far. All kernels of a benchmark must give the same results, and the fastest wins; it
must beat the default kernel in two more benchmarks of both.

A kernel by itself meets caches and memory in another state than between others. So a graph that was
tuned runs against the same one untuned, and configs that do not show are dropped: first those that
gained little, then all."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from torchair.codegen.program import Subject, Trial
from torchair.codegen.requests import Request
from torchair.codegen.target import (
    BY_TORCH,
    DEFAULT_CONFIG,
    BrokenKernels,
    Choices,
    Declined,
    Generated,
    KernelConfig,
    KernelOrder,
    Launch,
    Target,
)
from torchair.codegen.tuned import NAME, TunedKernel, hash_of, tuned_file, version
from torchair.engine.plan.records import Plan
from torchair.engine.run import trial
from torchair.engine.tune import KINDS, PROGRAM, TuneRequest
from torchair.fallbacks import Fallback, note
from torchair.log import logger
from torchair.progress import Progress

WINDOWS = 5
"""Times that each takes its turn."""
WINDOW = 0.008
"""Seconds of a core for one turn, at least one run."""
HOPELESS = 1.5
"""Times the best after any turn, from which on one does not run again."""


@dataclass(frozen=True)
class Candidate:
    """A kernel config whose kernel gives the right results."""

    config: KernelConfig
    made: Generated
    run: Trial


class KernelBenchmark:
    """The kernels of one request. The usual one is always among them, and is what the results of
    the others are compared with."""

    def __init__(
        self,
        order: KernelOrder,
        target: Target,
        stage: trial.Stage,
        threads: int,
        beside: bool = False,
    ) -> None:
        """With `beside` all are launched in blocks of one size: others stand beside them."""
        self._order, self._target = order, target
        self._stage, self._threads = stage, threads
        self._seen: set[str] = set()
        self._launch: Launch | None = None
        (usual,) = self._made([DEFAULT_CONFIG])
        self.usual = self._ready(DEFAULT_CONFIG, usual)
        self._launch = self.usual.made.launch if beside else None
        self._expected = self._results(self.usual.run)

    def enter(self, configs: Iterable[KernelConfig]) -> list[Candidate]:
        """The configs that have a kernel of their own, which computes the same."""
        found = []
        for config, made in zip(configs := list(configs), self._made(configs), strict=True):
            if made is None:
                continue
            candidate = self._ready(config, made)
            pairs = zip(self._results(candidate.run), self._expected, strict=True)
            if all(agree(got, expected) for got, expected in pairs):
                found.append(candidate)
            else:
                note(Fallback.TUNING_DIFFERS, f"tuning: {self._order.label} with {config} is wrong")
        return found

    def _made(self, configs: Sequence[KernelConfig]) -> list[Generated | None]:
        """Compiled kernels; None where there is none, or one that was there before."""
        made = [self._generated(config) for config in configs]
        broken: set[str] = set()
        try:
            self._target.compile_alone([m for m in made if m is not None])
        except BrokenKernels as e:
            broken = set(e.errors)
            note(Fallback.TUNING, f"tuning: {self._order.label} has kernels that do not compile", e)
        return [None if m is None or m.kernel.entry in broken else m for m in made]

    def _generated(self, config: KernelConfig) -> Generated | None:
        try:
            made = self._target.generate(self._order.request, self._order.label, config)
        except Declined as e:
            logger.debug("tuning: %s has no kernel with %s: %s", self._order.label, config, e)
            return None
        except Exception as e:
            note(Fallback.TUNING, f"tuning: {self._order.label} has no kernel with {config}", e)
            return None
        if made.kernel.entry in self._seen or not self._fits(made):
            return None
        self._seen.add(made.kernel.entry)
        return made

    def _fits(self, made: Generated) -> bool:
        """Whether the others of its launch can stay where they are."""
        old, new = self._launch, made.launch
        if old is None or new is None:
            return True
        return (old.block, old.cluster, old.shared) == (new.block, new.cluster, new.shared)

    def _ready(self, config: KernelConfig, made: Generated | None) -> Candidate:
        assert made is not None, "the usual kernel is there"
        return Candidate(config, made, self._stage.trial(made, self._threads))

    def _results(self, run: Callable[[], object]) -> list[torch.Tensor]:
        self._stage.clear()
        run()
        return self._stage.results()


def times(candidates: Sequence[Candidate], windows: int = WINDOWS) -> list[float]:
    """Microseconds that a step takes, the best of all runs: others who compute on this machine, or
    a thread that was moved, only ever make it slower. They take turns, so that all meet them."""
    best = [float("inf")] * len(candidates)
    for candidate in candidates:
        candidate.run()
    for _ in range(windows):
        limit = HOPELESS * min(best)
        for k, candidate in enumerate(candidates):
            if best[k] <= limit:
                best[k] = min(
                    best[k], trial.least_time(candidate.run, candidate.run.threads, WINDOW)
                )
    return [1e6 * t / e.run.steps for t, e in zip(best, candidates, strict=True)]


def agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether results are equal up to rounding: of the type they are in, and of sums in float32
    that were added in another order. What neither has written is alike in both."""
    if not got.is_floating_point():
        return torch.equal(got, expected)
    a, b = got.double(), expected.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))
    if not a.numel():
        return True
    rounding = 2 * torch.finfo(got.dtype).eps * b.abs() if got.dtype.itemsize < 4 else 0.0
    return bool(((a - b).abs() <= rounding + 2e-5 * b.abs().max()).all())


STEP = 0.01
"""Part of its time by which a value of a choice must be better than the one so far."""
_NEAR, _MIDDLE = 1 << 20, 32 << 20  # bytes that nearer caches hold


class Tuning:
    """Kernel configs of one graph: those that files know, and those that are measured."""

    def __init__(self, target: Target, work_path: str | None, tuned: str | None) -> None:
        """`work_path` is a folder for results, `tuned` a file that is only read."""
        self._target = target
        self._own = tuned_file(Path(work_path) / NAME) if work_path is not None else None
        given = tuned_file(tuned) if tuned is not None else None
        self._files = [f for f in (self._own, given) if f is not None]
        self.chosen: list[TunedKernel] = []  # configs that were found here, other than the usual
        self._open: tuple[tuple[str, ...], str, float] | None = None
        """Program, machine and margin of the graph whose threads are to be counted."""
        # configs, and torch's, which seems faster
        self._rivals: list[tuple[TunedKernel, TunedKernel]] = []

    def choose(self, plan: Plan) -> None:
        """Take the configs that are known for the kernels of a plan, before they are generated."""
        machine = self._machine(plan)
        known: dict[int, tuple[Request, KernelConfig]] = {}

        def config_of(request: Request) -> KernelConfig:
            if id(request) not in known:
                known[id(request)] = request, self._config(request, machine)
            return known[id(request)][1]

        plan.config_of = config_of
        for order in {id(s.code.order): s.code.order for s in plan.native_steps}.values():
            order.choose(config_of(order.request))
        program = self._known(program_of(plan), machine)
        fewer = DEFAULT_CONFIG if program is None else KernelConfig.read(program.config)
        plan.threads = fewer.integer("threads", 0) if fewer.within(_fewer()) else 0

    def _config(self, request: Request, machine: str) -> KernelConfig:
        found = self._known(request, machine)
        config = DEFAULT_CONFIG if found is None else KernelConfig.read(found.config)
        if config.within(self._target.choices(request)):
            return config
        logger.warning("tuning: a %s cannot be served with %s", KINDS[type(request)], config)
        return DEFAULT_CONFIG

    def tune(self, plan: Plan, content: trial.ConstantSource, tune_request: TuneRequest) -> None:
        """Measure what is not known yet, and keep it at once. It ends early when its time is over
        or with Ctrl-C."""
        assert self._own is not None, "results need a place"
        machine = self._machine(plan)
        todo = [
            (subject, choices)
            for subject in _distinct(self._target.subjects(plan), tune_request.share)
            if tune_request.includes(subject.order.request, subject.order.label)
            and not any(step.code.numbers for step in subject.steps)
            and self._known(subject.order.request, machine) is None
            and (choices := self._target.choices(subject.order.request))
        ]
        program, small = program_of(plan), plan.work <= SMALL
        several = small and plan.all_native and self._target.threads(plan.work) > 1
        if PROGRAM in tune_request.kinds and several and self._known(program, machine) is None:
            self._open = program, machine, tune_request.margin
        end = time.monotonic() + tune_request.budget_seconds
        done = 0
        try:
            with Progress("tuning kernels", len(todo)) as bar:
                for subject, choices in todo:
                    if time.monotonic() >= end:
                        break
                    bar.next(subject.order.label)
                    found = self._measured(subject, plan, content, choices, tune_request, machine)
                    if found is not None:
                        self._own.add(found)
                        self.chosen += [found] if found.config else []
                    done += 1
        except KeyboardInterrupt:
            warnings.warn(
                f"tuning was interrupted: {done} of {len(todo)} kernels are tuned. The rest use "
                "default settings and will be tuned by the next compilation",
                UserWarning,
                stacklevel=2,
            )
        if done < len(todo):
            logger.info("%d of %d kernels are tuned", done, len(todo))

    def confirm(self, session: Tuned, inputs: Sequence[torch.Tensor]) -> None:
        """Keep the configs that were just found if the graph is faster with them, then see whether
        it is with fewer threads."""
        try:
            for least in (LITTLE, float("inf")):
                if not self.chosen:
                    break
                tuned, usual = session.alone(inputs), session.untuned(inputs).alone(inputs)
                if tuned is None or usual is None or shows(tuned, usual):
                    break
                self._drop(least)
                session.take(inputs, True)
            self._try_torch(session, inputs)
            self._count_threads(session, inputs)
        except KeyboardInterrupt:
            warnings.warn(
                "tuning was interrupted before the whole graph was measured: it runs with the "
                "kernel settings found so far",
                UserWarning,
                stacklevel=2,
            )

    def _try_torch(self, session: Tuned, inputs: Sequence[torch.Tensor]) -> None:
        """Let torch run what it seems to be faster at, and keep that if the graph is faster so."""
        rivals, self._rivals = self._rivals, []
        own = session.alone(inputs) if rivals else None
        if own is None:
            return
        assert self._own is not None
        now = {f.request: f for f in self.chosen}
        for _, theirs in rivals:
            self._own.add(theirs)
        session.take(inputs, True)
        by_torch = session.alone(inputs)
        if by_torch is None or not shows(by_torch, own):
            for mine, _ in rivals:
                self._own.add(
                    now.get(mine.request, replace(mine, config="", microseconds=mine.usual))
                )
            session.take(inputs, True)

    def _count_threads(self, session: Tuned, inputs: Sequence[torch.Tensor]) -> None:
        call = session.alone(inputs) if self._open is not None else None
        if self._open is None or call is None:
            return
        assert self._own is not None
        counts = _fewer()["threads"]
        (program, machine, margin), self._open = self._open, None
        call()
        usual, spent = with_threads(call, [torch.get_num_threads(), *map(int, counts)])
        best = min(spent, key=lambda n: spent[n])
        config = f"threads={best}" if spent[best] <= (1 - margin) * usual else ""
        about = f"{PROGRAM} of {len(program)} kernels"
        least = 1e6 * (spent[best] if config else usual)
        self._own.add(
            TunedKernel(hash_of(program), machine, version(), about, config, least, 1e6 * usual)
        )
        if config:
            session.take(inputs, True)

    def _drop(self, least: float) -> None:
        """Forget configs that were found here and gain less than this part of their time: the usual
        kernels have won."""
        assert self._own is not None
        kept = [f for f in self.chosen if f.microseconds <= (1 - least) * f.usual]
        for found in self.chosen:
            if found not in kept:
                self._own.add(replace(found, config="", microseconds=found.usual))
        self.chosen = kept

    def _measured(self, subject: Subject, *rest: Any) -> TunedKernel | None:
        """What was found for a kernel, None where it cannot be measured: that costs no graph."""
        try:
            return self._tuned(subject, *rest)
        except Exception as e:
            note(Fallback.TUNING, f"tuning: {subject.order.label} is not measured", e)
            return None

    def _tuned(
        self,
        subject: Subject,
        plan: Plan,
        content: trial.ConstantSource,
        choices: Choices,
        tune_request: TuneRequest,
        machine: str,
    ) -> TunedKernel:
        order = subject.order
        stage = trial.Stage(subject.steps, plan, content, self._target)
        about = f"{KINDS[type(order.request)]} {order.label}"
        if stage.overwrites:
            return TunedKernel(hash_of(order.request), machine, version(), about, "", 0.0, 0.0)
        threads = self._target.threads(plan.work)
        benchmark = KernelBenchmark(order, self._target, stage, threads, subject.beside)
        best = _walk(benchmark, choices)
        config, usual, spent = _proven(benchmark.usual, best, tune_request.margin)
        logger.info("%s: %.1f us, %s %.1f us", order.label, usual, config, spent)
        found = TunedKernel(
            hash_of(order.request), machine, version(), about, str(config), spent, usual
        )
        if BY_TORCH.within(choices):
            rival = stage.library(order.request, threads)
            theirs = _beaten(best if config else benchmark.usual, rival, tune_request.margin)
            if theirs:
                self._rivals.append(
                    (found, replace(found, config=str(BY_TORCH), microseconds=theirs))
                )
        return found

    def _known(self, request: object, machine: str) -> TunedKernel | None:
        for file in self._files:
            found = file.find(request, machine)
            if found is not None:
                return found
        return None

    def _machine(self, plan: Plan) -> str:
        """Where a kernel runs: processor, threads that are counted, and how far the memory of its
        plan is."""
        size = trial.far_bytes(plan)
        distances = (("near", _NEAR), ("middle", _MIDDLE))
        far = next((name for name, limit in distances if size < limit), "far")
        count = self._target.threads(plan.work)
        threads = f", {count} threads" if count else ""
        return f"{self._target.processor}{threads}, {far} memory"


def _walk(benchmark: KernelBenchmark, choices: Choices) -> Candidate:
    """The best of what the choices allow, one after the other."""
    best = benchmark.usual
    for name, values in choices.items():
        rivals = benchmark.enter(best.config.having(name, value) for value in values)
        if not rivals:
            continue
        mine, *spent = times([best, *rivals])
        least = min(spent)
        if least < (1 - STEP) * mine:
            best = rivals[spent.index(least)]
    return best


def _proven(usual: Candidate, best: Candidate, margin: float) -> tuple[KernelConfig, float, float]:
    """The better of two, and what the usual one and it take. The other must win by a margin twice:
    where something else disturbs a benchmark, it rarely does so in the next one again."""
    before, after = times([usual, best]) if best.config else times([usual]) * 2
    if after <= (1 - margin) * before:
        again, later = times([usual, best])
        before, after = min(before, again), min(after, later)
        if later <= (1 - margin) * again and after <= (1 - margin) * before:
            return best.config, before, after
    return DEFAULT_CONFIG, before, before


def _beaten(own: Candidate, rival: trial.LibraryTrial | None, margin: float) -> float:
    """Microseconds of torch's kernel if it is right, and faster by a margin twice; else 0."""
    if rival is None or not agree(*rival.exact()):
        return 0.0
    theirs = Candidate(BY_TORCH, own.made, rival)
    for _ in range(2):
        mine, spent = times([own, theirs])
        if spent > (1 - margin) * mine:
            return 0.0
    return spent


def _distinct(found: Sequence[Subject], share: float) -> list[Subject]:
    """One kernel for each request that makes up a share of the work; those that make up most come
    first, so that the time for tuning is spent where it pays. It stands beside others if any of its
    kind does."""
    kinds: dict[str, list[Subject]] = {}
    for subject in found:
        kinds.setdefault(hash_of(subject.order.request), []).append(subject)
    work = {name: sum(s.work for s in alike) for name, alike in kinds.items()}
    least = share * sum(work.values())
    return [
        replace(kinds[name][0], beside=any(s.beside for s in kinds[name]))
        for name in sorted(kinds, key=lambda name: -work[name])
        if work[name] >= least
    ]


# ---- the graph as a whole ----

TimedCall = Callable[[], Any]
LITTLE = 0.1
"""Part of its time that a kernel gains, below which its config is dropped first."""
SHOWS = 0.99
"""Part of the time of the untuned graph that a tuned one may take."""
ROUNDS = 15
"""Turns that each takes."""
GRAPH_WINDOW = 0.02
"""Seconds of a turn, at least one call."""


class Tuned(Protocol):
    """A session whose kernels were tuned."""

    def alone(self, inputs: Sequence[torch.Tensor]) -> TimedCall | None:
        """A call for inputs like these that has no effects; None where there is none."""

    def untuned(self, inputs: Sequence[torch.Tensor]) -> Tuned:
        """The same graph with the usual kernels."""

    def take(self, inputs: Sequence[torch.Tensor], frozen: bool) -> None:
        """Begin anew."""


SMALL = 2_000.0
"""Microseconds of work, about, that fewer threads than there are might do as well."""


def program_of(plan: Plan) -> tuple[str, ...]:
    """What the native steps of a plan are known by."""
    return tuple(hash_of(s.code.order.request) for s in plan.native_steps)


def _fewer() -> Choices:
    """Numbers of threads below that of torch."""
    most = torch.get_num_threads()
    return {"threads": [str(n) for n in (1, 2, 4, 8, 16) if n < most]}


def with_threads(call: TimedCall, counts: Sequence[int]) -> tuple[float, dict[int, float]]:
    """Seconds of a call with the first number of threads, and with each of the others. They take
    turns, and all are measured by the clock."""
    most, best = torch.get_num_threads(), dict.fromkeys(counts, float("inf"))
    try:
        for _ in range(ROUNDS):
            for n in counts:
                torch.set_num_threads(n)
                best[n] = min(best[n], trial.least_time(call, counts[0], GRAPH_WINDOW))
    finally:
        torch.set_num_threads(most)
    return best.pop(counts[0]), best


def shows(tuned: TimedCall, usual: TimedCall) -> bool:
    """Whether a call is faster than another: the best of both, which take turns."""
    best = {tuned: float("inf"), usual: float("inf")}
    for call in best:
        call()
    for _ in range(ROUNDS):
        for call in best:
            spent = trial.least_time(call, torch.get_num_threads(), GRAPH_WINDOW)
            best[call] = min(best[call], spent)
    return best[tuned] <= SHOWS * best[usual]
