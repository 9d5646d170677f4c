"""Programs for one thing each: a rule, a pattern, a reason to decline. Sizes, types, layouts and
the way they are run are random all the same.

The inputs of a recipe read `name=type[dims]`: `f` is any of float32, bfloat16 and float16, `h` one
of the last two, `H` float16, `s` float32, `d` float64, `i` int64, `j` int32, `n` int8, `u` uint8,
`b` bool, `z` complex64; a dim that is a letter is a size that may vary. Its lines assign values;
the last one is returned, or what `return` says.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from random_functions import KNOWN, NAMES, WAYS, Program, laid_out
from random_graphs import Noise, Resize
from random_recipe_table import TABLE
from torchair.ascend import ops as npu

npu.define()

TYPES = {
    "f": (torch.float32, torch.float32, torch.bfloat16, torch.float16),
    "h": (torch.bfloat16, torch.float16), "s": (torch.float32,), "d": (torch.float64,),
    "i": (torch.int64,), "n": (torch.int8,), "b": (torch.bool,), "z": (torch.complex64,),
    "j": (torch.int32,), "u": (torch.uint8,), "H": (torch.float16,),
}  # fmt: skip
SIZES = (2, 3, 4, 5, 7, 8)
INPUT = re.compile(r"(\w+)=(\w)\[([\w,]*)\]")


@dataclass(frozen=True)
class Recipe:
    """Inputs and lines of a program, and how it must be run."""

    inputs: str
    lines: str
    settings: dict[str, Any] = field(default_factory=dict)


RECIPES = tuple(
    Recipe(inputs, lines, settings[0] if settings else {}) for inputs, lines, *settings in TABLE
)


class Written(Program):
    """The program of a recipe."""

    def __init__(self, seed: int, recipe: Recipe) -> None:
        self.pick = random.Random(seed)
        self.name = f"<recipe {seed}>"
        self.numbers, self.given, self.makes, self.values = {}, [], [], {}
        self.exact, self.body, self.reached = set(), [], False
        self.sizes = dict(zip("ABCDE", self.pick.choices(SIZES, k=5), strict=True))
        self.least = 0
        names: dict[str, str] = {}
        types = {letter: self.pick.choice(found) for letter, found in TYPES.items()}
        for name, letter, dims in INPUT.findall(recipe.inputs):
            names[name] = f"x{len(self.given)}"
            self._typed(types[letter], [d for d in dims.split(",") if d])
        *lines, last = [line.strip() for line in recipe.lines.split(";")]
        if not last.startswith("return "):
            lines, last = [*lines, last], f"return {self._assigned(last)}"
        for line in lines:
            if name := self._assigned(line):
                place = line.index(f"{name} = ")
                made = f"v{len(self.body)}"
                start, rest = line[:place], line[place + len(name) :]
                self.body.append(f"{start}{made}{_renamed(rest, names)}")
                names[name] = made
            else:
                self.body.append(_renamed(line, names))
        self.results = _renamed(last.removeprefix("return "), names).replace(" ", "").split(",")
        self._run()

    def _typed(self, dtype: torch.dtype, dims: list[str]) -> None:
        seed, way = self.pick.getrandbits(32), self.pick.choices(WAYS, [9, 2, 1, 0, 1, 1])[0]

        def make(size: Resize) -> torch.Tensor:
            new = [int(d) if d.isdigit() else size(self.sizes[d]) for d in dims]
            return laid_out(Noise(seed), dtype, new, way)

        self._given(make)

    def inputs(self, size: Resize = lambda n: n) -> list[torch.Tensor]:
        """Inputs, perhaps of other sizes."""
        return [make(size) for make in self.makes]

    def _assigned(self, line: str) -> str:
        found = re.match(r"(?:with [^:]*: )?(\w+) = ", line)
        return found[1] if found else ""

    def _run(self) -> None:
        """Learn the values of all names."""
        names: dict[str, Any] = {**KNOWN, **NAMES, **self.values}
        names |= {n: v.clone() for n, v in self.values.items()}
        for line in self.body:
            exec(line, names)
        made = {n: v for n, v in names.items() if re.fullmatch(r"v\d+", n)}
        self.values |= made


def _renamed(line: str, names: dict[str, str]) -> str:
    """A line with the names of values that programs have, but for names of keywords."""
    return re.sub(
        r"(?<![.\w'])([a-zA-Z_]\w*)(?![\w(']|=[^=])", lambda m: names.get(m[1], m[1]), line
    )
