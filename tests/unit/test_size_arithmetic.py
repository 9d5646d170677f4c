"""Arithmetic of symbolic sizes while a graph is traced: done once, with the same results."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes as shapes
from torch.fx.experimental.sym_node import SymNode

from torchair.fx.size_arithmetic import OPERATIONS, remembered_sizes

BEFORE = {name: getattr(SymNode, name) for name in OPERATIONS}


def symbols(*hints: int) -> tuple[shapes.ShapeEnv, list[torch.SymInt]]:
    """Sizes that may vary."""
    env = shapes.ShapeEnv(duck_shape=False)
    kinds: Any = [shapes.DimDynamic.DYNAMIC] * len(hints)
    context: Any = shapes.StatelessSymbolicContext(dynamic_sizes=kinds)
    mode = FakeTensorMode(shape_env=env)
    sizes = mode.from_tensor(torch.empty(hints), symbolic_context=context).shape
    return env, list(sizes)


def test_an_operation_is_done_once_for_equal_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    _, (a, b) = symbols(5, 7)
    monkeypatch.setattr(SymNode, "_mul", lambda a, b: done.append(1) or BEFORE["_mul"](a, b))
    with remembered_sizes():
        first, second = (a * b + 3, a * b + 3)
        assert len(done) == 1 and first.node is second.node
        assert (a * 2).node is not (b * 2).node
    _ = a * b, a * b
    assert len(done) == 5


@pytest.mark.parametrize("operation", [operator.add, operator.mul, operator.eq, operator.lt])
def test_numbers_of_other_types_and_tracings_stay_apart(operation: Any) -> None:
    (_, (a, _)), (_, (other, _)) = symbols(5, 7), symbols(5, 7)
    with remembered_sizes():
        plain, real, elsewhere = operation(a, 3), operation(a, 3.0), operation(other, 3)
        assert plain.node.shape_env is not elsewhere.node.shape_env
    expected = operation(a, 3), operation(a, 3.0), operation(other, 3)
    for found, right in zip((plain, real, elsewhere), expected, strict=True):
        assert type(found) is type(right)
        assert (found.node.expr, found.node.hint) == (right.node.expr, right.node.hint)


def test_what_is_learnt_of_sizes_counts_from_then_on() -> None:
    _, (a, b) = symbols(6, 6)
    with remembered_sizes():
        assert str((a == b).node.expr).startswith("Eq(")
        torch._check(a == b)
        assert (a == b).node.maybe_as_bool() is True
        assert (a - b).node.maybe_as_int() == 0


def test_sizes_that_only_running_tells_are_left_alone() -> None:
    env, _ = symbols(5)
    u = env.create_unbacked_symint()
    with remembered_sizes():
        assert (u + 1).node is not (u + 1).node


def test_threads_leave_torch_as_it_was() -> None:
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        with remembered_sizes():
            inside.set()
            go.wait(30)

    thread = threading.Thread(target=other)
    with remembered_sizes():
        thread.start()
        inside.wait(30)
    assert SymNode._add is not BEFORE["_add"]
    go.set()
    thread.join()
    assert all(getattr(SymNode, name) is known for name, known in BEFORE.items())
