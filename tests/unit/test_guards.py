"""Guards of calls without Dynamo: what fits passes, natively and in Python, and nothing else."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

from torchair.codegen.cpu.native_guard import ANY, DictEntry, EqualValue, TensorLike, native_guard
from torchair.codegen.cpu.target import cpu
from torchair.deploy.guards import Condition, Expected, Guards, ValueSpec

X = torch.zeros(2, 3)
OTHERS = {
    "dims": torch.zeros(2, 4),
    "rank": torch.zeros(2, 3, 1),
    "type": torch.zeros(2, 3, dtype=torch.float64),
    "strides": torch.zeros(3, 2).t(),
    "gradient": torch.zeros(2, 3, requires_grad=True),
    "sparse": torch.zeros(2, 3).to_sparse(),
    "negated": torch._neg_view(torch.zeros(2, 3)),
    "device": torch.zeros(2, 3, device="meta"),
    "subclass": torch.zeros(2, 3).as_subclass(type("Mine", (torch.Tensor,), {})),
    "no tensor": 7,
    "None": None,
}


def guard_of(*records, entries=()):
    made = native_guard(cpu().library, len(records), records, entries)
    assert made is not None, "this torch and this Python are known"
    return made[0]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_guard_and_its_python_twin_refuse_another(kind):
    native = guard_of(TensorLike(0, X, (2, 3), (3, 1)))
    guards = Guards([Expected.of("x", X)])
    assert native(X) is True and native(X + 1) is True
    assert native(OTHERS[kind]) is False
    assert guards.check([X]) and not guards.check([OTHERS[kind]])
    error = guards.mismatch([OTHERS[kind]])
    assert error is not None and error.name == "x" and str(error.expected) in str(error)


def test_what_makes_no_difference_passes():
    native = guard_of(TensorLike(0, X, (2, 3), (3, 1)))
    with torch.no_grad():
        assert native(OTHERS["gradient"]) is True  # nobody records
    with torch.inference_mode():
        assert native(torch.zeros(2, 3)) is True
    assert native(torch.nn.Parameter(X, requires_grad=False)) is True
    assert native(torch.zeros(9)[3:].view(2, 3)) is True
    assert native() is False and native(X, X) is False
    row = guard_of(TensorLike(0, torch.zeros(1, 3), (1, 3), (ANY, 1)))
    assert row(torch.zeros(2, 3)[:1]) is True and row(torch.zeros(1, 3).as_strided((1, 3), (9, 1)))


@pytest.mark.parametrize(
    ("value", "others"),
    [
        (1, [2, True, 1.0, None]),
        (True, [1, False]),
        (0.0, [-0.0, 0, 1e-300]),
        (float("nan"), [0.0]),
        ("ab", ["abc", b"ab"]),
        (None, [0, False]),
        (2**70, [2**70 + 1]),
    ],
)
def test_numbers_and_texts_are_compared_by_class_and_value(value, others):
    native, guards = guard_of(EqualValue(0, value)), Guards([ValueSpec("n", value)])
    same = type(value)(repr(value)) if isinstance(value, int | float) and value != 1 else value
    if isinstance(value, bool):
        same = value
    assert native(same) is True and guards.check([same])
    for other in others:
        assert native(other) is False and not guards.check([other])
    assert repr(value) in str(guards.mismatch(others[:1]))


def test_entries_see_parameters_replaced_moved_and_removed():
    model = torch.nn.Linear(3, 3)
    entry = DictEntry(model._parameters, "weight", model.weight)
    native = guard_of(entries=[entry])
    with torch.no_grad():
        model.weight.add_(1)
    assert native() is True  # written to in place
    model.weight.data = torch.zeros(3, 3)
    assert native() is False
    native = guard_of(entries=[DictEntry(model._parameters, "weight", model.weight)])
    model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert native() is False
    del model.weight
    assert native() is False


def test_named_sizes_agree_and_keep_conditions():
    a, b = torch.zeros(4, 6), torch.zeros(6, 4).t()
    specs = [Expected.of("a", a, {0: "s0"}), Expected.of("b", b, {0: "s0"})]
    guards = Guards(specs, ["s0 % 2 == 0 and s0 >= 2"])
    for n in (4, 6, 8, 4):
        assert guards.check([torch.zeros(n, 6), torch.zeros(6, n).t()])
    assert not guards.check([torch.zeros(8, 6), torch.zeros(6, 10).t()])
    assert "s0=8" in str(guards.mismatch([torch.zeros(8, 6), torch.zeros(6, 10).t()]))
    assert not guards.check([torch.zeros(5, 6), torch.zeros(6, 5).t()])
    error = guards.mismatch([torch.zeros(5, 6), torch.zeros(6, 5).t()])
    assert "dim 0 of a" in str(error) and "s0 = 5" in str(error)
    assert not guards.check([torch.zeros(8, 6), torch.zeros(8, 6)])  # b is laid out otherwise


def test_guards_survive_as_data():
    specs = [Expected.of("x", X, {1: "n"}), ValueSpec("eps", 1e-5), ValueSpec("mask", None)]
    guards = Guards(specs, ["n != 7", "max(n, 2) * 2 < 100"])
    again = Guards.from_data(json.loads(json.dumps(guards.to_data())))
    assert again.specs == guards.specs and again.to_data() == guards.to_data()
    assert again.check([torch.ones(2, 5), 1e-5, None])
    assert not again.check([torch.ones(2, 7), 1e-5, None])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "n.real",
        "n[0]",
        "(lambda: n)()",
        "n <",
        "'a' * n",
        "max(*n)",
        "math.exp(n)",
        "torch.load(n)",
    ],
)
def test_only_arithmetic_is_a_condition(text):
    with pytest.raises(ValueError, match="not a condition on sizes"):
        Condition(text)
    data = {"specs": [], "conditions": [text]}
    with pytest.raises(ValueError, match="not a condition on sizes"):
        Guards.from_data(data)


def test_conditions_compute_as_python_does():
    for text in (
        "n - 3 - 1",
        "-n // 2 + n % 3",
        "min(n, 4) * 2 == 8 or not n < 3",
        "2 * (n - 1)",
        "n**2 - 3**n",
        "1.0 / (torch.sym_float(n) ** 0.5) >= 0.0",
        "math.floor(n / 2) ** 2",
    ):
        for n in (2, 5, 9):
            known = {"n": n, "torch": torch, "math": math}
            assert Condition(text).value({"n": n}) == eval(text, known)


def test_a_power_from_a_file_is_no_long_number():
    with pytest.raises(OverflowError):
        Condition("n**n**n**n").value({"n": 9})


def test_guards_serve_several_threads():
    native = guard_of(TensorLike(0, X, (2, 3), (3, 1)))
    wrong = []

    def ask():
        for k in range(2000):
            given = X if k % 2 else OTHERS["dims"]
            if native(given) is not bool(k % 2):
                wrong.append(k)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
