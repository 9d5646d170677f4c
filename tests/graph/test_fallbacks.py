"""Nothing silent: fallbacks are counted, explained, told once, and errors under `strict`."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair
from torchair import fallbacks
from torchair.codegen.cpu.target import cpu
from torchair.convert import registry
from torchair.engine.optimize import passes as engine_passes
from torchair.engine.plan.planner import Planner
from torchair.engine.units import native_units
from torchair.errors import FallbackError
from torchair.fallbacks import Fallback, note
from torchair.verification import judge

SOURCES = Path(torchair.__file__).parent
X = torch.randn(3, 4)


def counts() -> Counter[str]:
    found = torch._dynamo.utils.counters[fallbacks.COUNTERS]
    return Counter({k: n for k, n in found.items() if k.startswith("fallback_")})


def backend(strict: bool) -> Any:
    config = torchair.CompilerConfig()
    config.debug.strict = strict
    return torchair.get_npu_backend(compiler_config=config)


def crash(*_given: Any, **_named: Any) -> Any:
    raise ZeroDivisionError("provoked")


def _converter(monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find

    def crashing(target: Any) -> Any:
        entry = find(target)
        return entry if entry is None else type(entry)(**{**vars(entry), "fn": crash})

    monkeypatch.setattr("torchair.convert.interpreter.find", crashing)


def _folding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_passes, "run_node", crash)


def _generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_units.NativeUnits, "_call", crash)


def _llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, kernels: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(type(cpu().library), "add", refuse)


def _plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_family", crash)


def _no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu(), "available", lambda: "no LLVM here")


def folded(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full((4,), 2.0).cumsum(0)


def odd(x: torch.Tensor) -> torch.Tensor:
    return (x * 41).sin() + x.sigmoid() * 17


FAILURES: dict[str, tuple[Any, Any, Fallback]] = {
    "converter": (_converter, odd, Fallback.CONVERTER),
    "folding": (_folding, folded, Fallback.CONSTANT_FOLDING),
    "generator": (_generator, odd, Fallback.KERNEL),
    "LLVM": (_llvm, lambda x: (x * 43).cos() + x.tanh(), Fallback.KERNEL),
    "no native code": (_no_native_code, odd, Fallback.NATIVE_CODE),
    "plan": (_plan, odd, Fallback.SHAPE_POLYMORPHIC_PLAN),
}


@pytest.mark.usefixtures("fallbacks_allowed")
@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_counted_told_and_errors_under_strict(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provoke, fn, kind = FAILURES[name]
    provoke(monkeypatch)
    torch._dynamo.reset()
    before = counts()
    with pytest.warns(UserWarning, match="counters"):
        fast = torch.compile(fn, backend=backend(False), dynamic=name == "plan")
        torch.testing.assert_close(fast(X), fn(X))
    assert (counts() - before)[kind.counter] >= 1
    torch._dynamo.reset()
    with pytest.raises(Exception, match=kind.lost):
        torch.compile(fn, backend=backend(True), dynamic=name == "plan")(X)
    monkeypatch.setenv("TORCHAIR_STRICT", "1")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=kind.lost):
        torch.compile(fn, backend=backend(False), dynamic=name == "plan")(X)


def test_an_operator_without_a_converter_is_counted_and_no_failure() -> None:
    torch._dynamo.reset()
    before = counts()
    with warnings.catch_warnings(action="error"):
        fast = torch.compile(torch.special.i0e, backend=backend(True))
        torch.testing.assert_close(fast(X), torch.special.i0e(X))
    assert (counts() - before) == {Fallback.GENERIC_NODE.counter: 1}


@pytest.mark.usefixtures("fallbacks_allowed")
def test_explain_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    _folding(monkeypatch)
    with warnings.catch_warnings(action="ignore"):
        told = torchair.explain(folded)(X)
    assert {r.kind for r in told.fallbacks} == {Fallback.CONSTANT_FOLDING}
    assert "constant_folding: Fill" in str(told) and "ZeroDivisionError: provoked" in str(told)


@pytest.mark.usefixtures("fallbacks_allowed")
def test_the_user_is_told_once_and_how_to_see_more() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        note(Fallback.FX_PASS, "the pass a is left out", ValueError("first"))
        note(Fallback.KERNEL, "no native code for b", ValueError("second"))
        note(Fallback.GENERIC_NODE, "c without a converter")
    (said,) = [str(w.message) for w in found]
    assert said.startswith("the pass a is left out (ValueError: first)")
    for remedy in ("torchair.explain", "counters['torchair']", "config.debug.strict"):
        assert remedy in said


def test_an_error_of_strict_is_not_swallowed_further_up() -> None:
    inner = FallbackError("further down")
    with fallbacks.strictness(False), pytest.raises(FallbackError) as seen:
        note(Fallback.GENERIC_NODE, "further up", inner)
    assert seen.value is inner


def test_what_the_oracle_lacks_is_told_apart_from_its_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(x)).graph
    node = next(n for n in graph.nodes if n.op == "call_function")
    before = counts()
    refused = RuntimeError("not implemented for 'Double'")

    def refuse(*_given: Any) -> Any:
        raise refused

    monkeypatch.setattr(judge, "_wide_call", refuse)
    assert torch.equal(judge.run_wide(node, lambda n: X, X), X.double())
    assert (counts() - before) == {Fallback.NO_ORACLE.counter: 1}
    monkeypatch.setattr(judge, "_wide_call", crash)
    with pytest.raises(FallbackError, match="oracle crashed"):
        judge.run_wide(node, lambda n: X, X)


def test_counts_from_before_dynamo_are_handed_over() -> None:
    program = (
        "import sys, torchair; from torchair.fallbacks import Fallback, note\n"
        "note(Fallback.GENERIC_NODE, 'early')\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo; note(Fallback.GENERIC_NODE, 'late')\n"
        "assert torch._dynamo.utils.counters['torchair']['fallback_generic_node'] == 2\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _handlers() -> list[tuple[str, ast.ExceptHandler, str]]:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler):
                caught = "BaseException" if node.type is None else ast.unparse(node.type)
                if caught in ("Exception", "BaseException"):
                    where = f"{path.relative_to(SOURCES)}:{node.lineno}"
                    found.append((where, node, lines[node.lineno - 1]))
    return found


def test_broad_handlers_raise_or_count_or_say_why() -> None:
    handlers = _handlers()
    assert len(handlers) > 30
    for where, handler, line in handlers:
        inside = [n for statement in handler.body for n in ast.walk(statement)]
        raises = any(isinstance(n, ast.Raise) for n in inside)
        called = {ast.unparse(n.func) for n in inside if isinstance(n, ast.Call)}
        assert raises or called & {"note", "_note"} or "#" in line, f"{where} hides errors"
    for path in SOURCES.rglob("*.py"):
        assert "suppress(Exception)" not in path.read_text(), path
