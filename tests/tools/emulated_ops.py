"""PyTorch's operator database on the emulated device against the CPU: values and gradients.

Run it: `python tests/tools/emulated_ops.py`. Operators are checked in processes of their
own, so that one that crashes takes no other with it. The last line counts what was right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

SOURCE = Path(__file__).resolve().parents[2] / "src"
SAMPLES = 12  # of each operator
CHUNK = 24  # operators checked in one process
PREFERRED = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)

UNDEFINED = ("empty", "new_empty")  # what these hold is anybody's guess
INDICES_ON_HOST = ("tensor_split",)  # torch wants them there, whatever the device

WRONG = {
    "sparse.mm:reduce": "no sparse tensors",
    "sparse.sampled_addmm": "no sparse tensors",
    "to_sparse": "no sparse tensors",
}
"""What is known not to work on the device, with the reason."""


NOT_ON_CPU = "not on the CPU either"


class NotOnCpu(Exception):
    """An operator that the CPU does not have either."""


def operators() -> dict[str, Any]:
    """The entries of the database by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}:{op.variant_test_name}".rstrip(":"): op for op in op_db}


def dtype_of(op: Any) -> torch.dtype:
    """float32, or the first type that an operator without it has."""
    supported = op.supported_dtypes("cpu")
    found = next((d for d in PREFERRED if d in supported), None)
    if found is None or op.name.startswith("jiterator"):
        raise NotOnCpu(op.name)
    return found


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Some calls of an operator, always the same ones."""
    torch.manual_seed(0)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
        if number == SAMPLES:
            return
        yield sample


def moved(tree: Any, device: str) -> Any:
    """Arguments as leaves on a device."""

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return copied(x.detach(), device).requires_grad_(x.requires_grad)
        if x == "cpu" and isinstance(x, str):
            return device
        return torch.device(device) if isinstance(x, torch.device) else x

    return tree_map(move, tree)


def copied(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on a device, with memory around it that a view does not show."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return x.clone().to(device)
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage().clone()).to(device)
    empty = torch.empty(0, dtype=x.dtype, device=device)
    return empty.set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def called(op: Any, sample: Any, device: str) -> tuple[list[Any], list[Any]]:
    """Results and gradients of one call."""
    (first, *rest), kwargs = moved((sample.input, *sample.args), device), sample.kwargs
    args = [first, *(sample.args if op.name in INDICES_ON_HOST else rest)]
    kwargs = moved(kwargs, device)
    leaves = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
    torch.manual_seed(1)
    results = tree_leaves(op(*args, **kwargs))
    if sample.output_process_fn_grad is not None:
        results = tree_leaves(
            sample.output_process_fn_grad(results[0] if len(results) == 1 else tuple(results))
        )
    wanted = [t for t in leaves if t.requires_grad]
    made = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not wanted or not made:
        return results, []
    ones = [torch.ones_like(r) for r in made]
    return results, list(torch.autograd.grad(made, wanted, ones, allow_unused=True))


def compare(ours: Any, theirs: Any, what: str, device: str, content: bool = True) -> None:
    """Raise if something is not as on the CPU."""
    if not isinstance(theirs, torch.Tensor):
        assert ours == theirs or (ours != ours and theirs != theirs), f"{what}: {ours}, {theirs}"
        return
    assert isinstance(ours, torch.Tensor), f"{what} is no tensor"
    assert ours.device.type == device or theirs.numel() == 0, f"{what} is on {ours.device}"
    assert ours.stride() == theirs.stride(), f"{what}: strides {ours.stride()}, {theirs.stride()}"
    assert ours.dtype is theirs.dtype and ours.shape == theirs.shape, f"{what}: type or dims"
    if not content:
        return
    torch.testing.assert_close(
        ours.cpu(), theirs, equal_nan=True, msg=lambda m: f"{what}: {m.splitlines()[0]}"
    )


def check(name: str, op: Any, device: str) -> str:
    """Empty if an operator is right, else the first thing that is wrong."""
    try:
        dtype = dtype_of(op)
        for number, sample in enumerate(samples_of(op, dtype)):
            expected, grads = called(op, sample, "cpu")
            results, ours = called(op, sample, device)
            assert len(results) == len(expected) and len(ours) == len(grads), "other results"
            for k, (r, e) in enumerate(zip(results, expected, strict=True)):
                content = not op.name.startswith(UNDEFINED)
                compare(r, e, f"sample {number} result {k}", device, content)
            for k, (r, e) in enumerate(zip(ours, grads, strict=True)):
                if e is not None:
                    compare(r, e, f"sample {number} gradient {k}", device)
    except NotOnCpu:
        return NOT_ON_CPU
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200] if str(e) else ''}"
    return ""


def work(names: list[str]) -> None:
    """Check operators in this process, one line of output for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torchair import emulate

    assert emulate.install()
    table = operators()
    for name in names:
        print(json.dumps([name, None]), flush=True)  # begun
        print(json.dumps([name, check(name, table[name], "npu")]), flush=True)


def run_chunk(names: list[str]) -> dict[str, str]:
    """Check operators in another process, in as many as it takes if some crash."""
    found: dict[str, str] = {}
    rest = list(names)
    while rest:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--work", *rest],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        begun = None
        for line in done.stdout.splitlines():
            if line.startswith("["):
                name, problem = json.loads(line)
                begun = name
                if problem is not None:
                    found[name], begun = problem, None
        if begun is None and done.returncode != 0 and not found.keys() & set(rest):
            raise RuntimeError(done.stderr)
        if begun is not None:
            found[begun] = f"the process ended with {done.returncode}"
        rest = [n for n in rest if n not in found]
    return found


def run_all(names: list[str], jobs: int) -> dict[str, str]:
    """What is wrong with each operator."""
    chunks = [names[k : k + CHUNK] for k in range(0, len(names), CHUNK)]
    found: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for part in pool.map(run_chunk, chunks):
            found |= part
    return found


def main() -> int:
    """Check, print what is wrong, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators with this in the name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    names = [n for n in operators() if options.only in n]
    found = run_all(names, options.jobs)
    absent = [name for name, problem in found.items() if problem == NOT_ON_CPU]
    wrong = {n: problem for n, problem in found.items() if problem not in ("", NOT_ON_CPU)}
    for name, problem in wrong.items():
        print(f"{name}: {problem}", "" if name not in WRONG else f"(known: {WRONG[name]})")
    same = len(names) - len(wrong)
    print(f"{same} of {len(names)} entries as on the CPU, {len(absent)} of them on neither")
    return 0 if wrong.keys() <= WRONG.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
