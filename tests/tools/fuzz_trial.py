"""One random program: how it is made, compiled, called and judged. `fuzz.py` says what for."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchair
from fuzz_coverage import Key
from fuzz_judge import (
    RoundingNoise,
    copied,
    lost,
    memory,
    parts,
    refused,
    rounded,
    strided,
    uncertain,
    unchanged,
    within_noise,
)
from native_check import differences, largest
from random_functions import Program, gradients, overlapping, wanting_gradients
from random_recipes import RECIPES, Written
from random_rewrites import rewritten
from random_templates import TEMPLATES, subject_of
from torchair.concrete import fast_path
from torchair.deploy import call_version

MODES = ("max-autotune", "max-autotune", "reduce-overhead", "npugraph_ex")
SPECIALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, 6e4)
CALLS = 3
CYCLE = (
    *("plain",) * 12, *("recipe",) * 10, *("operator",) * 5, *("npu",) * 12, *("complex",) * 4,
    *("graph",) * 8, *("pair",) * 4, *("functorch",) * 4, *("autocast",) * 3,
    *("higher_order",) * 2, *("draws",) * 2,
)  # fmt: skip
"""What consecutive seeds are about. Kinds besides the subjects of `random_templates`: "plain"
programs, a "graph" of GE operators, a "recipe" for a rule, pattern or reason, an "operator" of
which sizes vary, calls of "npu" operators, a "pair" of a program and another way to write it."""
HALVES = ("halves", "turned", "same", "again", "overlapping")


def turn_of(seed: int, kind: str) -> int:
    """The number of a seed among those of its kind: a run of many has a turn for each recipe, and
    so has a run of one kind."""
    cycle, place = divmod(seed, len(CYCLE))
    places = [k for k, each in enumerate(CYCLE) if each == kind]
    return cycle * len(places) + places.index(place) if place in places else seed


class Weights(torch.nn.Module):
    """A function of which some arguments are buffers of a module."""

    def __init__(self, fn: Callable[..., Any], held: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.fn, self.places = fn, sorted(held)
        for k, t in held.items():
            self.register_buffer(f"held{k}", t)

    def forward(self, *args: Any) -> Any:
        given = list(args)
        for k in self.places:
            given.insert(k, getattr(self, f"held{k}"))
        return self.fn(*given)


@dataclass
class Trial:
    """One random program and the way it is run."""

    seed: int
    kind: str = "plain"

    def __post_init__(self) -> None:
        pick = self.pick = random.Random(self.seed)
        self.mode = pick.choice(MODES)
        self.dynamic = pick.random() < 0.3
        self.automatic = pick.random() < 0.1  # sizes become symbols when they have changed
        self.inference = pick.random() < 0.15
        self.frozen = pick.random() < 0.3
        self.special = pick.random() < 0.2
        self.shared = pick.random() < 0.25
        self.tiny = pick.random() < 0.2
        plain = not self.inference and not self.frozen and not self.special
        self.backward = plain and random.Random(~self.seed).random() < 0.3
        changes = not self.dynamic and not self.frozen and not self.backward
        more = random.Random(f"more of {self.seed}")  # so that older choices stay as they are
        self.poisoned = more.random() < 0.7  # memory that is read unwritten is NaN
        self.threads = 2 if more.random() < 0.2 else 1
        self.changing = more.random() < 0.3  # layouts and sharing of memory, from call to call
        self.fed = more.random() < 0.25 and not self.backward  # with results of the call before
        self.direct = more.random() < 0.15 and not self.backward and self.mode != "npugraph_ex"
        self.counting = more.random() < 0.2  # numbers of Python are arguments
        self.numbers = self._numbers(0)
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []  # of earlier calls, with copies
        self.before: list[tuple[list[torch.Tensor], tuple[int | float, ...]]] = []  # earlier calls
        self.held: dict[int, torch.Tensor] = {}  # arguments that are weights, by place
        self.excused: list[str] = []
        self.native, self.numerics, self.custom = True, "default", False
        self.met: set[Key] = set()  # what this program exercised, as `fuzz_coverage` has it
        self._narrow()
        self.program = self._written(pick.randint(2, 9), changes)
        self.other = rewritten(self.program, more) if self.kind == "pair" else None
        self.broken = more.random() < 0.15 and self.kind not in ("recipe", "operator", "pair")
        self.broken = self.broken and not self.direct  # what is traced as a whole has no breaks
        if self.broken:
            body = self.program.body
            body.insert(more.randint(1, len(body)), "torch._dynamo.graph_break()")

    @property
    def strict(self) -> bool:
        """Whether results shall be eager's bits."""
        return self.numerics == "strict"

    def _narrow(self) -> None:
        """Some kinds of programs are not run in all ways."""
        if self.kind in ("higher_order", "functorch", "recipe", "operator"):
            self.direct = self.inference = self.special = False
        if self.kind != "plain" and random.Random(f"numerics of {self.seed}").random() < 0.1:
            self.numerics = "strict"
        if self.kind == "recipe" and random.Random(f"mode of {self.seed}").random() < 0.5:
            self.mode = "max-autotune"  # most rules and patterns are of this mode
        if self.kind in ("operator", "recipe"):
            self.tiny = self.shared = self.fed = self.counting = self.changing = False
            self.numbers = ()
        if self.kind in ("autocast", "complex", "pair"):
            self.special = False
        if self.kind == "operator":
            self.dynamic, self.frozen, self.automatic = True, False, False
            self.backward = False

    def _written(self, lines: int, changes: bool) -> Program:
        """The program of this kind."""
        if self.kind == "recipe":
            recipe = RECIPES[self._turn(len(RECIPES))]
            for name, value in recipe.settings.items():
                setattr(self, name, value)
            return Written(self.seed, recipe)
        more: dict[str, Any] = {"numbers": self.numbers, "subject": self.kind}
        if self.kind == "operator":
            first = TEMPLATES[self._turn(len(TEMPLATES))]
            more["first"], lines = first, lines // 3
            more["subject"] = subject_of(*first)
        return Program(
            self.seed, lines, changes and self.kind != "pair", self.tiny, broad=True, **more
        )

    def _turn(self, length: int) -> int:
        return turn_of(self.seed, self.kind) % length

    def __str__(self) -> str:
        ways = (
            "dynamic", "automatic", "inference", "frozen", "special", "shared", "tiny", "backward",
            "poisoned", "changing", "fed", "direct", "counting", "broken", "strict",
        )  # fmt: skip
        told = [f"seed {self.seed}", self.kind, self.mode, *(w for w in ways if getattr(self, w))]
        return " ".join([*told, *(["two threads"] if self.threads > 1 else [])])

    def _numbers(self, turn: int) -> tuple[int | float, ...]:
        """What the arguments of a call are that are numbers of Python."""
        other = (turn + self.seed) % 3
        return ((2, 1, 3)[other], (0.5, -1.5, 2.0)[other]) if self.counting else ()

    def arguments(self, turn: int) -> list[torch.Tensor]:
        """Arguments of a call: the first two with the sizes of the program, then perhaps others."""
        varies = (self.dynamic or self.automatic) and turn > 1
        grow = (-1 if self.changing else 2) if varies else 0
        made = self.program.inputs(lambda n: n + grow)
        noise = torch.Generator().manual_seed(1000 * self.seed + turn)
        for t in made:
            if not t.is_floating_point() or not t.numel() or 0 in strided(t):
                continue
            if turn:
                t.copy_(t.clone() * (torch.rand((), generator=noise) + 0.5).item())
            if self.special:
                places = torch.randint(t.numel(), (2,), generator=noise).tolist()
                flat = t.clone().flatten()
                for place in places:
                    flat[place] = self.pick.choice(SPECIALS)
                t.copy_(flat.reshape(t.shape))
        if self.changing and turn == CALLS - 1:
            made = [t.mT.contiguous().mT if t.dim() > 1 and not overlapping(t) else t for t in made]
        made = self._feeding(made) if self.fed else made
        return self._sharing(made, turn) if self.shared else made

    def _feeding(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Arguments that a result of the call before can be are that result itself."""
        for k, t in enumerate(made[:-1]):
            for result, _ in self.results:
                fits = (result.dtype, result.shape, strided(result)) == (
                    t.dtype,
                    t.shape,
                    strided(t),
                )
                lazy = result.is_conj() or result.is_neg()
                if fits and k not in self.held and not overlapping(result) and not lazy:
                    made[k] = result
        self._let_go(made)
        return made

    def _sharing(self, made: list[torch.Tensor], turn: int) -> list[torch.Tensor]:
        """Two arguments become one tensor, or views of one memory in some way."""
        way = random.Random(self.seed).choice(HALVES)
        if self.changing and turn:
            way = random.Random(f"{turn} of {self.seed}").choice((*HALVES, "apart"))
        for i, a in enumerate(made):
            for j in range(i + 1, len(made)):
                same = a.dtype == made[j].dtype and a.shape == made[j].shape
                if same and a.is_contiguous() and a.dim() and a.is_floating_point():
                    both, n = torch.cat([a, made[j]]), len(a)
                    parts = {
                        "halves": (both[:n], both[n:]), "turned": (both[n:], both[:n]),
                        "same": (a, a), "again": (a, a.detach()),
                        "overlapping": (both[:n], both[n // 2 : n + n // 2]),
                        "apart": (a, made[j]),
                    }  # fmt: skip
                    made[i], made[j] = parts[way]
                    return made
        return made

    def run(self) -> str:
        """What is wrong, "" if nothing."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        first = self.arguments(0)
        if self.frozen:
            places = range(1, len(first)) if self.kind == "recipe" else range(1, len(first) - 1, 2)
            self.held = {k: first[k] for k in places}
        call = self._compiled(self._program())
        if self.other is not None:
            self.call_other = self._compiled(self.other.function())
        for turn in range(2 if self.frozen else CALLS):
            args = first if turn == 0 else self.arguments(turn)
            args = [self.held.get(k, t) for k, t in enumerate(args)]
            self.numbers = self._numbers(turn)
            if turn and self.changing:
                self._train()
            try:
                self._called(self._program(), args)
            except (RuntimeError, IndexError, ValueError):
                continue  # these sizes do not fit together in eager either
            before = copied(args)
            wrong = self._one(call, args, before) or self._changed()
            if wrong:
                return f"call {turn}: {wrong}"
            self.before.append((before, self.numbers))
            if turn > 1 and self.kind == "operator" and self.program.reached:
                self.met.add(("second size", TEMPLATES[self._turn(len(TEMPLATES))][1]))
        return ""

    def _train(self) -> None:
        """Weights that are frozen are updated in place all the same."""
        trained = [t for t in self.held.values() if t.is_floating_point() and not overlapping(t)]
        for t in trained:
            t.mul_(0.75)
        self._let_go(trained)

    def _let_go(self, tensors: list[torch.Tensor]) -> None:
        """Results that lie in the memory of these may change from now on."""
        free = [t.untyped_storage().data_ptr() for t in tensors]
        self.results = [r for r in self.results if r[0].untyped_storage().data_ptr() not in free]

    def _changed(self) -> str:
        """What is wrong with results of earlier calls, which belong to whoever got them."""
        same = [unchanged(result, copy) for result, copy in self.results]
        return "" if all(same) else "a result of an earlier call has changed"

    def _program(self) -> Callable[..., Any]:
        """What is compiled, whoever compiles it."""
        function = self.program.function()
        return Weights(function, self.held) if self.held else function

    def _compiled(self, fn: Callable[..., Any]) -> Any:
        if self.direct:
            return self._without_dynamo(fn)
        if self.mode == "npugraph_ex":
            options = {"frozen_parameter": True} if self.frozen else None
            return torch.compile(fn, backend="npugraph_ex", dynamic=self.sizes, options=options)
        backend = torchair.get_npu_backend(compiler_config=self._config())
        return torch.compile(fn, backend=backend, dynamic=self.sizes)

    def _config(self) -> torchair.CompilerConfig:
        config = torchair.CompilerConfig()
        config.mode = self.mode
        config.experimental_config.frozen_parameter = self.frozen
        config.experimental_config.native_code = self.native
        config.numerics = self.numerics
        if self.custom:
            config.post_grad_custom_pre_pass = config.post_grad_custom_post_pass = swap_sums
        return config

    def _without_dynamo(self, fn: Callable[..., Any]) -> Any:
        made: list[Any] = []

        def call(*args: Any) -> Any:
            if not made:
                made.append(
                    torchair.compile(
                        fn,
                        args,
                        config=self._config(),
                        dynamic=self.dynamic,
                        on_mismatch="recompile",
                    )
                )
            return made[0](*args)

        return call

    @property
    def sizes(self) -> bool | None:
        """Whether they are symbols, as `torch.compile` has it."""
        return None if self.automatic else self.dynamic

    def _called(
        self,
        call: Any,
        args: list[torch.Tensor],
        numbers: Sequence[int | float] | None = None,
        own: bool = False,
    ) -> list[torch.Tensor]:
        """Results and arguments after a call with copies of these, or these themselves if they are
        its `own`, then gradients if wanted."""
        given = args if own else copied(args)
        mine = [self.held.get(k, t) for k, t in enumerate(given)]
        torch.manual_seed(self.seed)
        with torch.set_grad_enabled(self.backward):
            asked = wanting_gradients(mine) if self.backward else []
            tensors = [t for k, t in enumerate(mine) if k not in self.held]
            results = call(*tensors, *(self.numbers if numbers is None else numbers))
            made = [*results, *mine, *gradients(results, asked)]
        return [t.detach() for t in made] if self.backward else made

    def _one(self, call: Any, own: list[torch.Tensor], args: list[torch.Tensor]) -> str:
        """What is wrong with a call. It gets arguments of its `own` if results are fed to it; by
        copies of them it is judged."""
        wanted = self._called(self._program(), args)
        try:
            got = self._called(call, own, own=self.fed)
        except Exception as e:
            if self.direct and refused(e):
                return self._excuse(f"refused: {str(e).splitlines()[0]}")
            if not isinstance(plain := self._traced(args), Exception):
                raise
            return self._excuse(f"{type(e).__name__}, {type(plain).__name__} with aot_eager")
        wrong = self._values(args, got, wanted) or self._memory(args, got, wanted)
        if self.other is not None and not wrong and not self.held:
            again = self._called(self.call_other, args)
            wrong = self._values(args, again, got)
            wrong = wrong and f"{wrong}, written as\n{self.other.source}"
        self.results += [(t, t.clone()) for t in got[: len(self.program.results)]]
        return wrong

    def _values(
        self, args: list[torch.Tensor], got: list[torch.Tensor], wanted: list[torch.Tensor]
    ) -> str:
        written = sdpa_kernel(SDPBackend.MATH)  # fused attention gives 0 for scores that are NaN
        torch.manual_seed(self.seed)
        with written, torch.set_grad_enabled(self.backward):
            truth, everything = self.program.wide(args, self.backward, self.numbers)
        truth = [t.detach() for t in truth]
        scale = largest(parts(t.detach()) for t in [*everything, *truth])
        for k, each in enumerate(zip(got, wanted, truth, strict=True)):
            g, w, t = map(parts, each)
            wrong = differences(g, w, t, scale)
            if not wrong:
                continue
            if self.special and uncertain(w, t):
                self._excuse(f"result {k}: eager is not as float64: {wrong}")
                continue
            if rounded(g, w, t, scale, self.program.values.values()):
                self._excuse(f"result {k}: rounding of what it was computed from: {wrong}")
                continue
            if k < len(self.program.results) and self._by_lines(args, k, g, scale):
                self._excuse(f"result {k}: eager gives it if it computes from exact ones: {wrong}")
                continue
            if not unchanged(w, parts(self._filled(args)[k])):
                self._excuse(f"result {k}: eager reads memory that nobody wrote: {wrong}")
                continue
            if k >= len(self.program.results) + len(args) and within_noise(
                g, w, lambda seed, k=k: self._noisy(args, seed, k)
            ):
                self._excuse(f"result {k}: within the noise of rounding to 16 bits: {wrong}")
                continue
            plain = self._traced(args)
            if isinstance(plain, Exception) or not lost(g, parts(plain[k]), w, t, scale):
                return f"result {k}: {wrong}"
            self._excuse(f"result {k}: aot_eager gives the same: {wrong}")
        return ""

    def _filled(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """What eager gives where new memory is filled with NaN. The median along an expanded dim,
        for one, is what was there before."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return self._called(self._program(), args)
        finally:
            torch.use_deterministic_algorithms(False)

    def _noisy(self, args: list[torch.Tensor], seed: int | None, k: int) -> torch.Tensor:
        """A gradient by eager with rounding noise."""
        with RoundingNoise(seed):
            return parts(self._called(self._program(), args)[k])

    def _by_lines(self, args: list[torch.Tensor], k: int, got: torch.Tensor, scale: float) -> bool:
        """Whether eager gives a result if what it computes that from is rounded only once."""
        torch.manual_seed(self.seed)
        eager = parts(self.program.by_lines(copied(args), self.numbers)[k])
        return eager.is_floating_point() and not differences(got, eager, eager.double(), scale)

    def _memory(
        self, args: list[torch.Tensor], got: list[torch.Tensor], wanted: list[torch.Tensor]
    ) -> str:
        own = len(self.program.results) + len(args)  # gradients may lie as they like
        form, eager = memory(got[:own]), memory(wanted[:own])
        if self.held or form == eager:
            return ""
        plain = self._traced(args)
        if isinstance(plain, Exception):
            return f"memory is {form} instead of {eager}"
        promised = memory(plain[:own])
        if form == promised:
            return self._excuse(f"aot_eager gives the same memory, {form}")
        ways = zip(form[0], promised[0], self._promised_strides(args), strict=True)
        if form[1] == promised[1] and all(own in others for own, *others in ways):
            return self._excuse(f"strides are as tracing promised, {form[0]}")
        return f"memory is {form} instead of {promised}"

    def _excuse(self, why: str) -> str:
        """A difference from eager that is not ours: it is told and counted."""
        self.excused.append(why)
        return ""

    def _promised_strides(self, args: list[torch.Tensor]) -> list[list[int]]:
        """What tracing says about results and arguments: kernels themselves may differ from it."""
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:  # some sizes only the data tell
            given = [mode.from_tensor(t, static_shapes=True) for t in args]
            results = self.program.function()(*given, *self.numbers)
            return [strided(t) for t in [*results, *given]]

    def _traced(self, args: list[torch.Tensor]) -> list[torch.Tensor] | Exception:
        """What torch's own tracing makes of the same calls, or how it refuses the last one."""
        torch._dynamo.reset()
        sizes = self.dynamic if self.direct else self.sizes
        plain = torch.compile(self._program(), backend="aot_eager", dynamic=sizes)
        try:
            for before, numbers in self.before:
                self._called(plain, before, numbers)
            return self._called(plain, args)
        except Exception as e:
            return e


def swap_sums(gm: torch.fx.GraphModule, *_: Any) -> None:
    """A pass of a user that changes a graph and not what it computes."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if all(isinstance(a, torch.fx.Node) for a in node.args):
            node.args = node.args[::-1]


@contextmanager
def quiet(poisoned: bool = True) -> Iterator[None]:
    """Warnings and logs of refusals are expected here; gradients are not. Memory that is read
    unwritten is NaN, and a fallback that hides a fault is an error. Native guards serve the second
    call. Dynamo flushes the cache of the processor to time its guards, a fifth of the time of a
    program: not here."""
    poison = patch.dict(os.environ, TORCHAIR_POISON=str(int(poisoned)), TORCHAIR_STRICT="1")
    untimed = patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    early = patch.object(fast_path, "FIRST", 1), patch.object(call_version, "_PATIENCE", 1)
    logging.disable(logging.ERROR)
    try:
        with poison, untimed, early[0], early[1], torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
