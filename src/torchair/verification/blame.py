"""Who made an error: the forms that a graph goes through are checked in order, and the passes and
rules before the first wrong one are bisected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from torchair.concrete import AclConcreteGraph, GeConcreteGraph, ReplayedGraph
from torchair.concrete.acl import own_arguments
from torchair.configs.compiler_config import Settings
from torchair.convert.registry import find
from torchair.devices import device_of
from torchair.fx.passes import CAPTURE_PASSES, FX_KIND, FX_PASSES
from torchair.fx.source import source_line
from torchair.passes import FxContext, Pass, PassRunner
from torchair.pipeline import convert, engine_settings, own_copy
from torchair.progress import Progress
from torchair.runner import Compilation
from torchair.torch_private.dispatch import DisableTorchFunction
from torchair.torch_private.fake import unset_fake_temporarily
from torchair.trace import Trace
from torchair.verification import forms
from torchair.verification.forms import LocalCheck, Randomness, SeenRun, Wrong
from torchair.verification.report import Author

_EVERYTHING = 1 << 30
Found = TypeVar("Found")


@dataclass(frozen=True)
class Blame:
    """An error, and who made it."""

    wrong: Wrong
    stage: Author
    culprit: str


@dataclass
class WatchedCall:
    """One call of a compiled graph: the arguments as they were, and what came of it."""

    args: Sequence[Any]
    start: Randomness
    seen: SeenRun


class Permits:
    """Lets the first replacements of rules pass and refuses all others."""

    def __init__(self, most: int = _EVERYTHING) -> None:
        self._most = most
        self.made: list[tuple[str, str]] = []  # names of rule and node, in order

    def __call__(self, rule: str, node: str) -> bool:
        if len(self.made) >= self._most:
            return False
        self.made.append((rule, node))
        return True


class Suspects:
    """All forms of one compiled graph, made anew for a call that went wrong."""

    def __init__(self, compilation: Compilation, call: WatchedCall, steps: Progress) -> None:
        self._compilation, self._call, self._steps = compilation, call, steps
        self._device = device_of([a for a in call.args if isinstance(a, Tensor)])
        self._settings = Settings.of(compilation.config)
        self._engine_settings = engine_settings(compilation.config)
        self._gm = self._device.on_host(compilation.gm)
        self._start = call.start.on_host(call.args)

    # ---- forms ----

    @cached_property
    def _optimized_fx(self) -> fx.GraphModule:
        return self._passed(self._gm, FX_PASSES)

    def _passed(
        self, gm: fx.GraphModule, passes: Sequence[Pass], count: int = _EVERYTHING
    ) -> fx.GraphModule:
        own, asked = own_copy(gm), self._compilation
        runner = PassRunner(FX_KIND, self._settings, Trace(most=count))
        runner.run(passes, own, FxContext(asked.inputs, asked.config, "verified"))
        own.recompile()
        return own

    def _converted(self) -> GeConcreteGraph:
        given, static = self._compilation.inputs, self._compilation.static
        own = own_copy(self._optimized_fx)
        conversion = convert(own, given, self._engine_settings, static, "verified")
        return GeConcreteGraph(conversion, self._engine_settings, self._device)

    def _in_engine(self, passes: int, permits: Permits) -> GeConcreteGraph:
        """The GE graph in the engine after so many passes, GE's and the engine's."""
        graph, trace = self._converted(), Trace(most=passes)
        graph.state.permits = permits
        graph.optimize_graph_without_runtime(observer=trace)
        graph.session.trace = trace
        graph.compile(graph.collect(self._arguments()))
        self._passes = [r.name for r in trace.records]
        return graph

    # ---- running and checking ----

    def _arguments(self) -> list[Any]:
        return own_arguments(self._gm, self._device.host_arguments(self._call.args))

    def _observe(self, run: Callable[[list[Any]], Found]) -> Found:
        with torch.no_grad(), self._start.again():
            return run(self._arguments())

    def _check(self, base: fx.GraphModule, seen: SeenRun) -> Wrong | None:
        bits = self._settings.numerics == "strict"
        return LocalCheck(base, seen, bits).first_wrong(self._arguments(), self._start)

    def _check_ge(self, graph: GeConcreteGraph) -> Wrong | None:
        device = self._device.name
        return self._check(
            self._optimized_fx, self._observe(lambda args: forms.run_ge(graph, args, device))
        )

    # ---- stages, in order ----

    def first(self) -> Blame | None:
        """The first error, None if each form is as good as eager."""
        stages = [self._of_fx_passes]
        if self._is_in_engine:
            stages += [self._of_converters, self._of_ge_passes, self._of_kernels]
        else:
            stages += [self._of_capture_passes]
        stages += [self._of_call]
        with unset_fake_temporarily(), DisableTorchFunction():
            for stage in stages:
                self._steps.next(stage.__name__.removeprefix("_of_").replace("_", " "))
                if (blame := stage()) is not None:
                    return blame
        return None

    @property
    def _is_in_engine(self) -> bool:
        made = self._compilation.made
        return not isinstance(made, AclConcreteGraph) or made.storable() is not None

    def _of_fx_passes(self) -> Blame | None:
        return self._bisected(Author.FX_PASS, FX_PASSES, self._gm)

    def _of_capture_passes(self) -> Blame | None:
        return self._bisected(Author.CAPTURE_PASS, CAPTURE_PASSES, self._optimized_fx)

    def _bisected(
        self, stage: Author, passes: Sequence[Pass], base: fx.GraphModule
    ) -> Blame | None:
        def wrong(count: int) -> Wrong | None:
            after = self._passed(base, passes, count)
            return self._check(base, self._observe(lambda args: forms.run_fx(after, args)))

        if wrong(_EVERYTHING) is None:
            return None
        enabled = [p.name for p in passes if p.enabled(self._settings)]
        count, found = first_found(len(enabled), wrong, self._steps)
        return Blame(found, stage, enabled[count - 1])

    def _of_converters(self) -> Blame | None:
        wrong = self._check_ge(self._converted())
        if wrong is None:
            return None
        entry = find(wrong.node.target)
        place = f" ({entry.file}:{entry.line})" if entry is not None and entry.file else ""
        return Blame(wrong, Author.CONVERTER, f"of {wrong.node.target}{place}")

    def _of_ge_passes(self) -> Blame | None:
        def wrong(passes: int, permits: Permits) -> Wrong | None:
            return self._check_ge(self._in_engine(passes, permits))

        if wrong(_EVERYTHING, Permits()) is None:
            return None
        names = self._passes
        count, found = first_found(len(names), lambda k: wrong(k, Permits()), self._steps)
        permits = Permits()
        wrong(count, permits)
        made = len(permits.made)
        rules, last = first_found(made, lambda k: wrong(count, Permits(k)), self._steps)
        if not rules:  # wrong without any rule
            return Blame(found, Author.GE_PASS, names[count - 1])
        rule, node = permits.made[rules - 1]
        return Blame(last, Author.RULE, f"{rule} at {node}, in {names[count - 1]}")

    def _of_kernels(self) -> Blame | None:
        graph, base = self._in_engine(_EVERYTHING, Permits()), self._optimized_fx
        seen = self._observe(lambda args: forms.run_steps(graph, args))
        wrong = self._check(base, seen)
        if wrong is not None:
            around = frozenset(n.name for n in wrong.region)
            place = self._device.name
            step = self._observe(lambda args: forms.worst_step(graph, seen, args, place, around))
            names = " ".join(n.name for n in step.also or [step.node])
            return Blame(wrong, Author.KERNEL, f"of {names}")
        wrong = self._check(base, self._observe(lambda args: forms.run_program(graph, args)))
        return None if wrong is None else Blame(wrong, Author.PROGRAM, "whose steps run together")

    def _of_call(self) -> Blame | None:
        """What the caller got, if no form of the graph gives that."""
        seen = self._call.seen
        host = replace(seen, args=self._device.host_arguments(seen.args))
        wrong = self._check(self._optimized_fx, host)
        if wrong is None:
            return None
        if isinstance(self._compilation.made, AclConcreteGraph | ReplayedGraph):
            return Blame(wrong, Author.REPLAY, "gives what no run of the graph gives")
        return Blame(wrong, Author.CALL, "gives what the first run of the graph does not give")


def first_found(
    most: int, look: Callable[[int], Wrong | None], steps: Progress
) -> tuple[int, Wrong]:
    """The smallest count in 0..most with which something is wrong, as it is with `most`; and what
    that is."""
    low, high, found = -1, most, None
    while high - low > 1:
        middle = (low + high) // 2
        steps.next(f"of {most} changes the first {middle}")
        if (here := look(middle)) is None:
            low = middle
        else:
            high, found = middle, here
    found = found or look(high)
    assert found is not None
    return high, found


def lines_of(gm: fx.GraphModule) -> dict[int, str]:
    """Lines of the model by the number that tracing gave to what was done there: the backward of
    an operator has the number of its forward."""
    found = ((n.meta.get("seq_nr", -1), source_line(n)) for n in gm.graph.nodes)
    return {number: line for number, line in found if number >= 0 and line}


def line_of(node: fx.Node, forward: Mapping[int, str]) -> str:
    """File, line and text of the model; the module where no line is known."""
    line = source_line(node) or forward.get(node.meta.get("seq_nr", -1), "")
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    return line or (f"module {path}" if path else "")
