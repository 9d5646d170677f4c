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
