"""Conformance: the compiler on PyTorch's own operator database, compared with eager.

cases.py    which samples there are, and each of them as a function of tensors
check.py    one case: eager, ours, and AOTAutograd alone when ours is wrong
watch.py    which converters a compilation really used
workers.py  many cases in subprocesses, with a time limit per operator; pool.py runs them
report.py   tables, the JSON report, and the verdict against known.toml
runner.py   the command line: python -m tests.conformance --help
slice.json  the small choice of cases that the test-suite runs (choose.py made it)
extra.py    hand-written functions for converters that no sample of the database reaches
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from types import ModuleType

if importlib.util.find_spec("expecttest") is None:
    # Torch's databases bring test cases along, which derive from one of expecttest's. None of them
    # runs here, so where the package is missing any class will do.
    sys.modules["expecttest"] = _stand_in = ModuleType("expecttest")
    _stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
