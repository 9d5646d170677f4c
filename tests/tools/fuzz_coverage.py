"""What of the compiler a run of random programs has exercised: passes, rules, patterns, and reasons
why rules, patterns and fusion decline.

The lists of all there are come from the tables of the compiler and, for reasons, from its source:
every text that a rule raises and that fusion may return. A reason that is met and not in the list
is an error, so neither can grow old.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torchair
import torchair.ascend.rules  # its rules are in the tables once it is loaded
from fuzz_unreached import UNREACHED
from random_templates import TEMPLATES
from torchair.engine.fuse.units import _Fuser
from torchair.engine.optimize.passes import ENGINE_PASSES, GE_PASSES, GraphState
from torchair.engine.optimize.rules import PATTERNS, RULES
from torchair.fx.passes import CAPTURE_PASSES, FX_PASSES, fused
from torchair.ge import rewrite
from torchair.passes import PassRunner

HOME = Path(torchair.__file__).parent
RULE_FILES = ("ge/rewrite.py", "engine/optimize/rules/*.py", "ascend/rules/*.py")
FUSION_FILES = (
    "engine/fuse/*.py",
    "engine/units/kernels.py",
    "codegen/cpu/target.py",
    "operators/*.py",
    "ascend/operators/*.py",
)
OTHER_TEXTS = ("processor", "_missing")  # functions of these files that give no reason
GOAL = 0.95

Key = tuple[str, str]
"""What is exercised: its kind, and its name or text; a text is preceded by its file."""


# ---- all there is ----


def _template(node: ast.expr | None) -> str:
    """A text with braces where values go, "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if constant else ""  # type: ignore[union-attr]


def _texts(node: ast.expr | None) -> list[str]:
    """The texts that an expression may give."""
    found, todo = list[str](), [node]
    while todo:
        one = todo.pop()
        if isinstance(one, ast.IfExp):
            todo += [one.body, one.orelse]
        elif isinstance(one, ast.BoolOp):
            todo += one.values
        elif isinstance(one, ast.Lambda):
            todo.append(one.body)
        elif text := _template(one):
            found.append(text)
    return found


def _trees(patterns: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    for pattern in patterns:
        for path in sorted(HOME.glob(pattern)):
            yield path.stem, ast.parse(path.read_text())


def _raised(tree: ast.Module) -> list[str]:
    """Texts of all `Mismatch` that a file makes."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call))
    ours = (n for n in calls if getattr(n.func, "id", "") == "Mismatch")
    return [t for n in ours for t in _texts(n.args[0])]


def _returned(tree: ast.Module) -> list[str]:
    """Texts that functions return which give a text or something else."""
    found = list[str]()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in OTHER_TEXTS:
            continue
        kinds = "" if function.returns is None else ast.unparse(function.returns)
        if re.search(r"\bstr\b", kinds):
            returns = (n for n in ast.walk(function) if isinstance(n, ast.Return))
            found += [t for n in returns for t in _texts(n.value)]
    return found


@cache
def everything() -> tuple[Key, ...]:
    """All that could be exercised."""
    passes = (*FX_PASSES, *CAPTURE_PASSES, *GE_PASSES, *ENGINE_PASSES)
    found = [("pass", p.name) for p in passes]
    found += [("rule", r.name) for r in RULES]
    found += [("pattern", p.name) for p in PATTERNS] + [("pattern", n) for n in fused.PATTERNS]
    found += [
        ("rule declines", f"{stem}: {text}")
        for stem, tree in _trees(RULE_FILES)
        for text in _raised(tree)
    ]
    found += [
        ("fusion declines", text) for _, tree in _trees(FUSION_FILES) for text in _returned(tree)
    ]
    found += [("second size", template) for _, template in TEMPLATES]
    return tuple(dict.fromkeys(found))


@cache
def _matchers(kind: str) -> tuple[tuple[re.Pattern[str], Key], ...]:
    keys = [k for k in everything() if k[0] == kind]
    keys.sort(key=lambda k: k[1].count("{}"))  # a text without values is meant first
    expressions = [re.escape(k[1]).replace(r"\{\}", ".*") for k in keys]
    return tuple(zip(map(re.compile, expressions), keys, strict=True))


def known(kind: str, text: str) -> Key:
    """The reason that a text is; one that nobody listed is an error."""
    for expression, key in _matchers(kind):
        if expression.fullmatch(text):
            return key
    raise LookupError(f"{kind}: {text!r} is a reason that the list in tests/ does not know")


# ---- what was met ----


@contextmanager
def watched(met: set[Key]) -> Iterator[None]:
    """What is exercised inside is added to a set."""
    raised, noted = rewrite.Mismatch.__init__, GraphState.note
    ran, tried, declined = PassRunner._run_one, _Fuser._try, _Fuser._declines
    names = {p.name for p in PATTERNS}

    def mismatch(self: Any, reason: str, about: Any = None) -> None:
        stem = Path(sys._getframe(1).f_code.co_filename).stem
        met.add(known("rule declines", f"{stem}: {reason}"))
        raised(self, reason, about)

    def note(self: GraphState, name: str, done: bool) -> None:
        if done:
            met.add(("pattern" if name in names else "rule", name))
        noted(self, name, done)

    def run_one(self: PassRunner, step: Any, *args: Any) -> Any:
        look = ran(self, step, *args)
        if self.trace.records and self.trace.records[-1].changed:
            met.add(("pass", step.name))
        return look

    def reason(fn: Any) -> Any:
        def asked(self: Any, *args: Any) -> str | None:
            text: str | None = fn(self, *args)
            if text:
                met.add(known("fusion declines", text))
            return text

        return asked

    def debug_print(level: int, text: str) -> None:
        met.add(("pattern", text.removeprefix("torchair pattern ").split()[0]))

    with ExitStack() as stack:
        for where, name, new in (
            (rewrite.Mismatch, "__init__", mismatch),
            (GraphState, "note", note),
            (PassRunner, "_run_one", run_one),
            (_Fuser, "_try", reason(tried)),
            (_Fuser, "_declines", reason(declined)),
            (fused, "debug_print", debug_print),
        ):
            stack.enter_context(patch.object(where, name, new))
        yield


@dataclass
class Coverage:
    """What has been exercised of everything."""

    met: set[Key] = field(default_factory=set)

    def missing(self, kind: str) -> list[str]:
        """What of a kind has not been met."""
        return [name for k, name in everything() if k == kind and (k, name) not in self.met]

    def share(self) -> float:
        """Which part of the compiler has been met of what programs can reach; operators with second
        sizes count apart."""
        parts = {k for k in everything() if k[0] != "second size"} - (UNREACHED.keys() - self.met)
        return len(self.met & parts) / len(parts)

    def text(self) -> str:
        """A line for each kind, then what was not met, with the reason where one is known."""
        kinds = list(dict.fromkeys(k for k, _ in everything()))
        lines = ["exercised of all there is:"]
        for kind in kinds:
            total = sum(k == kind for k, _ in everything())
            lines.append(f"  {kind:16s}{total - len(self.missing(kind)):5d} of {total}")
        lines.append(
            f"  {'together':16s}{100 * self.share():5.1f} % of what can be reached, the goal is "
            f"{100 * GOAL:.0f} %"
        )
        for kind in kinds:
            for name in self.missing(kind):
                why = UNREACHED.get((kind, name), "by chance")
                lines.append(f"  not met: {kind} {name!r} ({why})")
        return "\n".join(lines)
