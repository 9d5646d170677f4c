"""What the page about operators of the `npu` library calls right: the tests compare it with a
reference."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from npu_cases import MODULES
from torchair.ascend import ops as npu
from torchair.ascend.npu_page import data_lines


class _Called(TorchDispatchMode):
    """Notes the operators of the `npu` library that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("npu", "atb"):
            self.names.add(func._opname)
        return func(*args, **kwargs or {})


def called(case: Any) -> set[str]:
    with _Called() as seen:
        case.call(*(t.clone() for t in case.inputs))
    return seen.names


def test_what_is_called_right_has_a_reference():
    cases = [case for module in MODULES for case in import_module(module).CASES]
    names = set().union(*(called(case) for case in cases))
    assert set(data_lines("proven.txt")) == names, "correct ascend/ops/proven.txt"


@pytest.mark.parametrize("file", ["proven.txt", "limits.txt"])
def test_data_names_operators_that_exist(file):
    known = {o.base for o in npu.operators()}
    assert set(data_lines(file)) <= known


def test_what_is_not_written_has_a_reason():
    known = {o.base for o in npu.operators()}
    written = {name for name, why in data_lines("wanted.txt").items() if why} & known
    assert not written, f"written, so no reason is needed: {written}"
