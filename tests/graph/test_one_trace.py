"""AOTAutograd without its first run of a graph: `outlined` says what that would have found, and the
second run checks it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from torchair.backend import compile_with_aot
from torchair.configs.compiler_config import CompilerConfig
from torchair.fx.size_arithmetic import remembered_sizes
from torchair.torch_private.aot import NotAsOutlined, outlined


def new(x, y):
    return x @ y, (x + y).relu()


def written_inside(x, y):
    z = x + y
    z.view(-1).mul_(2)
    return (z,)


def written(x, y):
    x.add_(1)
    return (x @ y,)


def view_of_argument(x, y):
    return x.t(), x + y


def view_of_result(x, y):
    z = x + y
    return z, z.t()


@pytest.fixture
def runs(monkeypatch):
    """How often graphs were run in order to be traced."""
    made, run = [], PropagateUnbackedSymInts.run
    monkeypatch.setattr(
        PropagateUnbackedSymInts, "run", lambda *args, **more: made.append(1) or run(*args, **more)
    )
    return made


def compiled(fn, outline, *args):
    """What torch.compile makes of a function, traced once if it is as its outline."""

    def backend(gm, inputs):
        def traced():
            return compile_with_aot(gm, inputs, CompilerConfig(), {})

        if not outline:
            return traced()
        nodes = gm.graph.output_node().args[0]
        with outlined([n.meta["example_value"] for n in nodes]):
            return traced()

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend=backend, dynamic=True)(*args)


@pytest.mark.parametrize("fn", [new, written_inside])
def test_graphs_that_make_new_tensors_are_run_once(fn, runs):
    args = torch.randn(5, 5), torch.randn(5, 5)
    for found, wanted in zip(compiled(fn, True, *args), fn(*args), strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(runs) == 1
    compiled(fn, False, *args)
    assert len(runs) == 3


@pytest.mark.parametrize("fn", [written, view_of_argument, view_of_result])
def test_other_graphs_are_found_out(fn):
    args = torch.randn(5, 5), torch.randn(5, 5)
    kept = [x.clone() for x in args]
    with pytest.raises((NotAsOutlined, torch._dynamo.exc.BackendCompilerFailed), match="Outlined"):
        compiled(fn, True, *args)
    assert all(torch.equal(x, y) for x, y in zip(args, kept, strict=True))
    for found, wanted in zip(compiled(fn, False, *args), fn(*kept), strict=True):
        torch.testing.assert_close(found, wanted)


def branches(x, y):
    z = torch.cat([x, y]).reshape(-1, 2 * x.shape[1])
    if x.shape[0] + y.shape[0] > 12:
        z = z * 2
    return z.transpose(0, 1).contiguous(), z.numel() - x.shape[0]


def test_sizes_computed_once_leave_results_and_guards_as_they_were():
    """Also while Dynamo traces, as the plug-in for vLLM does."""
    graphs = []

    def run(around):
        torch._dynamo.reset()
        count, found = CompileCounter(), []
        for rows in (4, 6, 8, 4, 10):
            x, y = torch.arange(rows * 3.0).view(rows, 3), torch.ones(rows, 3)
            with around():
                plain = torch.compile(branches, backend=count, dynamic=True)(x, y)
                ours = torch.compile(branches, backend="torchair", dynamic=True)(x, y)
            for a, b, expected in zip(plain, ours, branches(x, y), strict=True):
                torch.testing.assert_close(a, expected)
                torch.testing.assert_close(b, expected)
                found.append(a)
        graphs.append(count.frame_count)
        return found

    torch.testing.assert_close(run(remembered_sizes), run(nullcontext))
    assert graphs == [2, 2]
