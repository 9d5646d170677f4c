"""Tuning the kernels of a plan, and using what was found before.

For each request the choices that its target declares are tried one after the other, each with what
was best so far. The winner must beat the usual kernel in two more races of both.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchair.codegen.target import AS_EVER, Choices, Order, Target, Way
from torchair.codegen.tuned import NAME, Found, hash_of, tuned_file, version
from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.trial import Content, Stage, far_bytes, threads_of
from torchair.engine.tune.race import Entrant, Race, times
from torchair.engine.tune.wish import KINDS, Wish
from torchair.log import logger
from torchair.process import Bar

STEP = 0.01
"""Part of its time by which a value of a choice must be better than the one so far."""
_NEAR, _MIDDLE = 1 << 20, 32 << 20  # bytes that nearer caches hold


class Tuning:
    """The ways of kernels of one graph: those that files know, and those that are measured."""

    def __init__(self, target: Target, work_path: str | None, tuned: str | None) -> None:
        """`work_path` is a folder for results, `tuned` a file that is only read."""
        self._target = target
        self._own = tuned_file(Path(work_path) / NAME) if work_path is not None else None
        given = tuned_file(tuned) if tuned is not None else None
        self._files = [f for f in (self._own, given) if f is not None]
        self.chosen: list[Found] = []  # ways that were found here, other than the usual

    def choose(self, plan: Plan) -> None:
        """Take the ways that are known for the kernels of a plan, before they are generated."""
        machine = self._machine(plan)
        for order in {id(s.code.order): s.code.order for s in _native(plan)}.values():
            found = self._known(order, machine)
            way = AS_EVER if found is None else Way.read(found.way)
            if way.within(self._target.choices(order.request)):
                order.way = way
            else:
                logger.warning("tuning: %s cannot be served with %s", order.label, way)

    def tune(self, plan: Plan, content: Content, wish: Wish) -> None:
        """Measure what is not known yet, and keep it at once. It ends early when its time is over
        or with Ctrl-C."""
        assert self._own is not None, "results need a place"
        machine = self._machine(plan)
        todo = [
            (step, choices)
            for step in _distinct(plan)
            if wish.includes(step.code.order.request, step.code.order.label)
            and not step.code.numbers
            and self._known(step.code.order, machine) is None
            and (choices := self._target.choices(step.code.order.request))
        ]
        end = time.monotonic() + wish.budget_seconds
        done = 0
        try:
            with Bar("tuning kernels", len(todo)) as bar:
                for step, choices in todo:
                    if time.monotonic() >= end:
                        break
                    bar.next(step.code.order.label)
                    found = self._measured(step, plan, content, choices, wish, machine)
                    if found is not None:
                        self._own.add(found)
                        self.chosen += [found] if found.way else []
                    done += 1
        except KeyboardInterrupt:
            warnings.warn(
                f"tuning was interrupted: {done} of {len(todo)} kernels are tuned, the others run "
                "as ever; a later compilation goes on with them",
                UserWarning,
                stacklevel=2,
            )
        if done < len(todo):
            logger.info("%d of %d kernels are tuned", done, len(todo))

    def drop(self, least: float) -> None:
        """Forget ways that were found here and gain less than this part of their time: the usual
        kernels have won."""
        assert self._own is not None
        kept = [f for f in self.chosen if f.microseconds <= (1 - least) * f.usual]
        for found in self.chosen:
            if found not in kept:
                self._own.add(replace(found, way="", microseconds=found.usual))
        self.chosen = kept

    def _measured(self, step: Step, *rest: Any) -> Found | None:
        """What was found for a step, None where it cannot be measured: that costs no graph."""
        try:
            return self._tuned(step, *rest)
        except Exception as e:
            logger.warning("tuning: %s is not measured: %r", step.code.order.label, e)
            return None

    def _tuned(
        self, step: Step, plan: Plan, content: Content, choices: Choices, wish: Wish, machine: str
    ) -> Found:
        order = step.code.order
        stage = Stage(step, plan, content)
        about = f"{KINDS[type(order.request)]} {order.label}"
        if stage.overwrites:
            return Found(hash_of(order.request), machine, version(), about, "", 0.0, 0.0)
        race = Race(order, self._target, stage, threads_of(plan))
        way, usual, spent = _proven(race.usual, _walk(race, choices), wish.margin)
        logger.info("%s: %.1f us, %s %.1f us", order.label, usual, way, spent)
        return Found(hash_of(order.request), machine, version(), about, str(way), spent, usual)

    def _known(self, order: Order, machine: str) -> Found | None:
        for file in self._files:
            found = file.find(order.request, machine)
            if found is not None:
                return found
        return None

    def _machine(self, plan: Plan) -> str:
        """Where a kernel runs: processor, threads, and how far the memory of its plan is."""
        size = far_bytes(plan)
        far = "near" if size < _NEAR else "middle" if size < _MIDDLE else "far"
        return f"{self._target.processor}, {threads_of(plan)} threads, {far} memory"


def _walk(race: Race, choices: Choices) -> Entrant:
    """The best of what the choices allow, one after the other."""
    best = race.usual
    for name, values in choices.items():
        rivals = race.enter(best.way.having(name, value) for value in values)
        if not rivals:
            continue
        mine, *spent = times([best, *rivals])
        least = min(spent)
        if least < (1 - STEP) * mine:
            best = rivals[spent.index(least)]
    return best


def _proven(usual: Entrant, best: Entrant, margin: float) -> tuple[Way, float, float]:
    """The better of two, and what the usual one and it take. The other must win by a margin twice:
    where something else disturbs a race, it rarely does so in the next one again."""
    before, after = times([usual, best]) if best.way else times([usual]) * 2
    if after <= (1 - margin) * before:
        again, later = times([usual, best])
        before, after = min(before, again), min(after, later)
        if later <= (1 - margin) * again and after <= (1 - margin) * before:
            return best.way, before, after
    return AS_EVER, before, before


def _native(plan: Plan) -> list[Step]:
    return [s for s in plan.steps if s.native is not None]


def _distinct(plan: Plan) -> Sequence[Step]:
    """One step for each request."""
    return list({hash_of(s.code.order.request): s for s in reversed(_native(plan))}.values())[::-1]
