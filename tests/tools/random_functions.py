"""Random functions of torch operators, written as source text so that a failing one can be read.

A line is kept if it runs: it is tried on real tensors while the function grows. Comparisons and
positions of maxima take only values that every way of computing gives bit by bit.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import random_helpers
import torchair
from fuzz_judge import parts, unchanged
from random_graphs import FLOATS, Noise, Resize
from random_templates import AUTOCASTS, BROAD, NUMBERS, SMALL, SUBJECTS, TABLES

SIZES = (2, 3, 4, 5, 7, 8, 16, 17, 33)
MOST = 4000  # elements of a value
NAMES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
KNOWN = {"torch": torch, "F": F, "h": random_helpers, "torchair": torchair}  # in all lines
COMPLEX = (torch.complex64, torch.complex64, torch.complex128)
FITS: dict[str, Callable[[torch.Tensor], bool]] = {
    "whole": lambda x: not x.is_floating_point(), "truth": lambda x: x.dtype is torch.bool,
    "any": lambda x: True, "changes": lambda x: True, "complex": torch.is_complex,
    "complex exact": torch.is_complex,
}  # fmt: skip
"""What a template of a kind is for; others are for floating-point numbers."""
MADE = re.compile(r"\b(v\d+) = ")  # the value that a line makes
DRAWN = re.compile(r"rand|dropout|bernoulli|normal\(|uniform_|exponential_")
WAYS = ("plain", "permuted", "spread", "expanded", "channels_last", "offset")


class Program:
    """One function with inputs for it. `wide` runs it in float64."""

    def __init__(
        self,
        seed: int,
        lines: int = 8,
        changes: bool = True,
        tiny: bool = False,
        broad: bool = False,
        numbers: Sequence[int | float] = (),
        subject: str = "",
        first: tuple[str, str] | None = None,
    ) -> None:
        """With `tiny` sizes of 0 and 1 are as frequent as others; with `broad` there are more
        operators and types, and arguments may be results. `numbers` are the first values of two
        arguments that are Python's. A `subject` has templates of its own; the `first` line is of
        the template that is asked for, if there is one."""
        self.numbers = dict(zip("ns", numbers, strict=False))
        self.tables = BROAD if broad else TABLES
        self.subject = SUBJECTS.get(subject, {})
        self.casts = subject == "autocast"
        self.pick = random.Random(seed)
        self.name = f"<random function {seed}>"
        self.least = 0 if tiny else 1  # elements of a value
        self.sizes = self.pick.sample(SIZES, 3)
        if tiny:
            self.sizes[:2] = [0, 1] if self.pick.random() < 0.5 else [1, 1]
        self.floats = self.pick.choices(FLOATS, [6, 2, 2, 2], k=2)
        self.makes: list[Callable[[Resize], Any]] = []
        self.given: list[str] = []
        self.body: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        self.exact: set[str] = set()
        for _ in range(self.pick.randint(2, 4)):
            self._input(self.pick.choice(self.floats))
        for dtype in (torch.int64, torch.bool, *(SMALL if broad else ())):
            if self.pick.random() < (0.15 if dtype in SMALL else 0.4):
                self._input(dtype)
        for _ in range(self.pick.randint(1, 2) if subject == "complex" else 0):
            self._input(self.pick.choice(COMPLEX))
        self._indices()
        self.reached = first is not None and self._first(*first)
        tries = 0
        while len(self.body) < lines and tries < 40 * lines:
            tries += 1
            change = changes and self.pick.random() < 0.15
            self._change() if change else self._line()
        if all(n in self.given for n in self.values):
            self.body.append(f"v0 = {self.given[0]}.clone()")
            self.values["v0"] = self.values[self.given[0]].clone()
        made = [n for n in self.values if n not in self.given]
        count = min(len(made), self.pick.randint(1, 4))
        self.results = made[-1:] + self.pick.sample(made, count)
        self.results += self._drawn()
        if broad and self.pick.random() < 0.15:
            self.results.append(self.pick.choice(self.given))

    def _drawn(self) -> list[str]:
        """Values that are drawn: torch leaves out a draw that nobody reads, and those after it then
        differ from eager's."""
        lines = [line for line in self.body if DRAWN.search(line)]
        return [m[1] for line in lines if (m := MADE.search(line))]

    # ---- inputs ----

    def _dims(self) -> list[int]:
        rank = self.pick.choices([0, 1, 2, 3, 4], [1, 2, 6, 6, 3])[0]
        dims = [
            1 if self.pick.random() < 0.1 else self.pick.choice(self.sizes) for _ in range(rank)
        ]
        return dims if torch.Size(dims).numel() <= MOST else dims[:2]

    def _input(self, dtype: torch.dtype) -> None:
        dims, seed = self._dims(), self.pick.getrandbits(32)
        way = self.pick.choices(WAYS, [6, 2, 1, 1, 1, 1])[0]
        self._given(lambda size: laid_out(Noise(seed), dtype, [size(n) for n in dims], way))

    def _indices(self) -> None:
        """Positions 0 to 2, which every dim of three has."""
        self._given(lambda size: torch.tensor([1, 0, 2]))

    def _given(self, make: Callable[[Resize], torch.Tensor]) -> None:
        name = f"x{len(self.given)}"
        self.makes.append(make)
        self.given.append(name)
        self.values[name] = make(lambda n: n)
        self.exact.add(name)

    def inputs(self, size: Resize = lambda n: n) -> list[torch.Tensor]:
        """Inputs, perhaps of other sizes."""
        return [make(lambda n: size(n) if n > 1 else n) for make in self.makes]

    # ---- lines ----

    def _first(self, kind: str, template: str) -> bool:
        """Begin with a line of a template; False if no values here fit it."""
        fit = FITS.get(kind, torch.is_floating_point)
        for _ in range(30):
            names = [n for n in self.values if not self._is_index(n) and fit(self.values[n])]
            if not names:
                break
            text, used = self._filled(template, self.pick.choice(names))
            if kind == "changes":
                if self._changed(text, used[0]):
                    return True
            elif self._made(kind, text, used):
                return True
        return False

    def _line(self) -> None:
        a = self._recent()
        x = self.values[a]
        kind = "any"
        if x.is_floating_point():
            kind = self.pick.choices(["loses", "keeps", "needs", "casts", "any"], [9, 3, 1, 1, 7])[
                0
            ]
        elif x.is_complex():
            kind = self.pick.choices(["complex", "complex exact", "any"], [5, 2, 2])[0]
        elif self.pick.random() < 0.6:
            kind = "truth" if x.dtype == torch.bool else "whole"
        table = self.tables.get(kind, ())
        if kind in self.subject and (not table or self.pick.random() < 0.5):
            table = self.subject[kind]
        if self.numbers and kind in NUMBERS and self.pick.random() < 0.4:
            table = NUMBERS[kind]
        self._made(kind, *self._filled(self.pick.choice(table), a))

    def _made(self, kind: str, text: str, used: list[str]) -> bool:
        """Add a line that makes a value, if it can be."""
        exact = all(u in self.exact for u in used)
        if kind == "needs" and not exact:
            return False
        name = f"v{len(self.body)}"
        line = f"{name} = {text}"
        if self.casts and kind == "loses" and self.pick.random() < 0.7:
            line = self.pick.choices(AUTOCASTS, [6, 2, 1])[0] + line
        made = self._tried(line, name)
        if made is None:
            return False
        self.body.append(line)
        self.values[name] = made
        if exact and kind not in ("loses", "casts", "complex"):
            self.exact.add(name)
        return True

    def _change(self) -> None:
        a = self._recent()
        if self._overlaps(self.values[a]):
            return
        self._changed(self._filled(self.pick.choice(self.tables["changes"]), a)[0], a)

    def _changed(self, text: str, a: str) -> bool:
        """Add a line that changes a value, if it can be."""
        if self._overlaps(self.values[a]):
            return False
        before = {n: v.clone() for n, v in self.values.items()}
        if self._tried(text) is None:
            for n, v in before.items():
                assert unchanged(parts(v), parts(self.values[n])), text
            return False
        self.body.append(text)
        memory = self.values[a].untyped_storage().data_ptr()
        for n, v in self.values.items():
            if v.untyped_storage().data_ptr() == memory and self.values[a].is_floating_point():
                self.exact.discard(n)
        return True

    def _overlaps(self, x: torch.Tensor) -> bool:
        """Whether elements of this memory have several places in some view of it."""
        memory = x.untyped_storage().data_ptr()
        views = [v for v in self.values.values() if v.untyped_storage().data_ptr() == memory]
        return any(map(overlapping, views))

    def _recent(self) -> str:
        names = [n for n in self.values if not self._is_index(n)]
        return names[-1 - min(int(self.pick.expovariate(0.5)), len(names) - 1)]

    def _is_index(self, name: str) -> bool:
        return name == self.given[-1]

    def _filled(self, template: str, a: str) -> tuple[str, list[str]]:
        """The template with names in it, and those it reads."""
        x = self.values[a]
        like = [n for n, v in self.values.items() if v.dtype == x.dtype and not self._is_index(n)]
        masks = [n for n, v in self.values.items() if v.dtype == torch.bool] or [a]
        real = [n for n, v in self.values.items() if v.is_floating_point()]
        rank = max(x.dim(), 1)
        names = {
            "a": a,
            "b": self._fitting(x, like),
            "c": self.pick.choice(like),
            "m": self.pick.choice(masks),
            "x": (p := self.pick.choice(real)),
            "y": self._fitting(
                self.values[p],
                [n for n in real if self.values[n].dtype == self.values[p].dtype],
            ),
            "j": self.given[-1],
            "k": self.given[-1],
        }
        used = [n for k, n in names.items() if f"{{{k}}}" in template]
        dims = {"d": self.pick.randrange(rank), "e": self.pick.randrange(rank), "n": "n", "s": "s"}
        return template.format(**names, **dims), used

    def _fitting(self, x: torch.Tensor, names: Sequence[str]) -> str:
        same = [n for n in names if self.values[n].shape == x.shape]
        return self.pick.choice(same if same and self.pick.random() < 0.6 else list(names))

    def _tried(self, line: str, name: str = "") -> torch.Tensor | None:
        """What a line gives that makes the value of a name, or anything if it changes a value; None
        if it does not run or is too large."""
        names: dict[str, Any] = {**KNOWN, **NAMES, **self.numbers, **self.values}
        try:
            if not name:
                trial = {n: v.clone() for n, v in self.values.items()}
                exec(line, {**names, **trial})
            exec(line, names)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None
        made = names[name] if name else torch.ones(())
        fits = isinstance(made, torch.Tensor) and self.least <= made.numel() <= MOST
        return made if fits or not name else None

    # ---- the function ----

    @property
    def source(self) -> str:
        """The text of the function."""
        lines = [f"def function({', '.join([*self.given, *self.numbers])}):", *self.body]
        lines.append(f"return {', '.join(self.results)},")
        return "\n    ".join(lines) + "\n"

    def function(self) -> Callable[..., Any]:
        """The function itself, in a module of its own, where Dynamo looks for what it reads."""
        text = self.source
        linecache.cache[self.name] = (len(text), None, text.splitlines(True), self.name)
        module = sys.modules["random_program"] = ModuleType("random_program")
        vars(module).update({**KNOWN, **NAMES})
        exec(compile(text, self.name, "exec"), vars(module))
        return vars(module)["function"]

    def wide(
        self,
        inputs: Sequence[torch.Tensor],
        backward: bool = False,
        numbers: Sequence[int | float] = (),
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results and inputs after it ran in float64, with `backward` gradients too, and everything
        it computed."""
        names = self._widened(inputs, numbers)
        given = wanting_gradients([names[n] for n in self.given]) if backward else []
        for line in self.body:
            self._run_wide(line, names)
        ends = [names[n] for n in [*self.results, *self.given]]
        ends += gradients([names[n] for n in self.results], given)
        return ends, [v for n, v in names.items() if n in self.values]

    def by_lines(
        self, inputs: Sequence[torch.Tensor], numbers: Sequence[int | float] = ()
    ) -> list[torch.Tensor]:
        """Results where every line computes, in its own types, from what float64 has so far. It
        changes its inputs."""
        wide = self._widened(inputs, numbers)
        names: dict[str, Any] = {**KNOWN, **NAMES}
        names |= zip([*self.numbers, *self.given], [*numbers, *inputs], strict=True)
        made: dict[str, torch.Tensor] = {}
        for line in self.body:
            exec(line, names)
            self._run_wide(line, wide)
            known = [n for n in self.values if n in names]
            assigned = MADE.search(line)
            made |= {n: names[n].clone() for n in ([assigned[1]] if assigned else known)}
            for n in known:
                if not overlapping(names[n]):
                    names[n].copy_(wide[n])
        return [made.get(n, names[n]) for n in self.results]

    def _widened(
        self, inputs: Sequence[torch.Tensor], numbers: Sequence[int | float]
    ) -> dict[str, Any]:
        """Names that a program in float64 knows at first."""
        names: dict[str, Any] = {**KNOWN, **dict.fromkeys(NAMES, torch.float64)}
        names |= zip(self.numbers, numbers, strict=True)
        wholes: dict[int, torch.Tensor] = {}  # memory that several inputs may share, in float64
        for name, x in zip(self.given, inputs, strict=True):
            wide = torch.complex128 if x.is_complex() else torch.float64
            inexact = x.is_floating_point() or x.is_complex()
            if not inexact or not x.numel():
                names[name] = x.to(wide) if inexact else x.clone()
                continue
            storage = x.untyped_storage()
            if storage.data_ptr() not in wholes:
                flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
                wholes[storage.data_ptr()] = flat.to(wide, copy=True)
            whole = wholes[storage.data_ptr()]
            names[name] = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        return names

    def _run_wide(self, line: str, names: dict[str, Any]) -> None:
        """One line in float64."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of quotients of integers
        try:
            exec(line.replace(".float()", ".double()"), names)
            if (made := MADE.search(line)) is not None:
                self._keep_apart(made[1], names)
                names[made[1]] = _as_wide(names[made[1]])
        finally:
            torch.set_default_dtype(usual)

    def _keep_apart(self, name: str, names: dict[str, Any]) -> None:
        """A conversion that copies does so in float64 too, where it has nothing to convert."""
        there = _memory(names[name])
        shared = [n for n in self.values if n in names and _memory(names[n]) == there]
        if any(_memory(self.values[n]) != _memory(self.values[name]) for n in shared):
            names[name] = names[name].clone()


def _as_wide(x: torch.Tensor) -> torch.Tensor:
    """Random numbers, which are the same in float32 alone, as float64."""
    return x.double() if x.is_floating_point() else x


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def wanting_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that can have gradients, which are asked for from now on."""
    return [t.requires_grad_() for t in tensors if t.is_floating_point() or t.is_complex()]


def gradients(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a sum of all results, with weights that every type can tell."""
    ends = [r for r in results if r.requires_grad]
    if not ends or not given:
        return []
    weights = [((torch.arange(r.numel()) % 17 - 8) / 8).to(r.dtype).reshape(r.shape) for r in ends]
    return list(torch.autograd.grad(ends, given, weights, materialize_grads=True))


def overlapping(x: torch.Tensor) -> bool:
    """Whether elements of a tensor lie on each other: it is expanded, or windows."""
    end = 0  # of what inner dims reach
    for s, n in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if s <= end:
            return True
        end += s * (n - 1)
    return False


def laid_out(noise: Noise, dtype: torch.dtype, dims: Sequence[int], way: str) -> torch.Tensor:
    """A random tensor in one of the layouts that callers pass in."""
    if way == "channels_last" and len(dims) == 4:
        return noise.strided(dtype, dims).to(memory_format=torch.channels_last)
    if way == "offset" and dims:
        return noise.strided(dtype, [dims[0] + 2, *dims[1:]])[2:]
    return noise.strided(dtype, dims, way)
