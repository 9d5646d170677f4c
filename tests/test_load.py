"""Graphs that run without the model they come from, without Dynamo and without their source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import torchair
from torchair.deploy.runnable import Runnable
from torchair.errors import InputError, SerializationError
from torchair.pipeline import NpuFxCompiler
from torchair.serde import from_bytes, to_bytes
from torchair.serde.convention import from_text, to_text

ALONE = {**os.environ, "PYTHONPATH": str(Path(torchair.__file__).parents[1])}

FRESH = """
import json, sys
import torch
from torchair.deploy.runnable import Runnable
from torchair.serde.convention import from_text

folder = sys.argv[1]
read = lambda name: open(f"{folder}/{name}", "rb").read()
call = Runnable.from_bytes(read("graph"), from_text(read("convention").decode()))
x = torch.arange(12.0).reshape(3, 4)
found, turned = call(x, torch.ones(4, 5))
wanted = torch.softmax(x @ torch.ones(4, 5), -1) + 1
assert torch.allclose(found, wanted) and turned.data_ptr() == x.data_ptr()
heavy = ("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torchair.convert")
print([m for m in heavy if m in sys.modules])
"""


class Stored:
    """A backend that notes graphs as files would hold them, before the engine changes them."""

    def __init__(self) -> None:
        self.graph, self.text, self.arguments = b"", "", []

    def __call__(self, gm: Any, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified

        return aot_module_simplified(
            gm, inputs, fw_compiler=self._compile, keep_inference_input_mutations=True
        )

    def _compile(self, gm: Any, inputs: Any) -> Any:
        self.arguments = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        made = NpuFxCompiler()(gm, inputs).runner
        self.graph, self.text = to_bytes(made.graph), to_text(made.convention)
        return made


def stored(fn: Any, *args: Any, dynamic: bool = False) -> Stored:
    torch._dynamo.reset()
    made = Stored()
    with torch.no_grad():
        torch.compile(fn, backend=made, dynamic=dynamic, fullgraph=True)(*args)
    return made


def test_a_stored_graph_runs_in_a_process_without_dynamo(tmp_path: Path) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.softmax(x @ w, -1) + 1, x.t()

    made = stored(fn, torch.randn(3, 4), torch.randn(4, 5))
    (tmp_path / "graph").write_bytes(made.graph)
    (tmp_path / "convention").write_text(made.text)
    run = [sys.executable, "-W", "ignore", "-c", FRESH, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=ALONE)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_sizes_updates_and_bound_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))

    def fn(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(x.sum(0))
        return torch.relu(x @ weight.t()) * x.shape[0]

    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    made = stored(fn, x, torch.zeros(4))
    convention, graph = from_text(made.text), from_bytes(made.graph)
    assert convention.assigned and graph.is_dynamic
    bound = {i: weight.detach() for i, v in enumerate(made.arguments) if _dims(v) == (6, 4)}
    call = Runnable(graph, convention, bound=bound)
    for rows in (3, 7):
        x, seen, expected = torch.randn(rows, 4), torch.ones(4), torch.ones(4)
        given = {0: rows, 1: seen, 2: x}
        args = [given[len(_dims(v))] for i, v in enumerate(made.arguments) if i not in bound]
        (found,) = call(*args)
        assert_close(found, fn(x, expected))
        assert_close(seen, expected)


def _dims(argument: Any) -> tuple[Any, ...]:
    return tuple(getattr(argument, "shape", ()))


def test_results_share_memory() -> None:
    made = stored(lambda x: (lambda y: (y[1:], y, y.t()))(x + 1), torch.randn(3, 4))
    call, x = Runnable.from_bytes(made.graph, from_text(made.text)), torch.randn(3, 4)
    part, whole, turned = call(x)
    assert_close(part, x[1:] + 1)
    whole.zero_()
    assert not part.any() and not turned.any()
    with pytest.raises(SerializationError, match="nothing that a result is a part of"):
        from_text(made.text.replace('"base":{', '"base":5,"name":{'))


def test_what_does_not_fit_is_refused() -> None:
    made = stored(lambda x: x + 1, torch.randn(3))
    call = Runnable.from_bytes(made.graph, from_text(made.text))
    with pytest.raises(InputError, match="wrong number of arguments"):
        call()
    with pytest.raises(InputError, match="does not fit"):
        call(torch.randn(4))
    other = stored(lambda x, y: x + y, torch.randn(3), torch.randn(3))
    with pytest.raises(SerializationError, match="does not fit a graph with 1 inputs"):
        Runnable.from_bytes(made.graph, from_text(other.text))


@pytest.mark.parametrize(
    "damage",
    [
        ('"kind":"tensor"', '"kind":"file"'),
        ('"args":[0]', '"args":["0"]'),
        ('"cast":""', '"cast":"load"'),
        ('"is":"view"', '"is":"exec"'),
        ('"arguments":1', '"arguments":{}'),
        ("{", "["),
    ],
)
def test_a_damaged_convention_is_an_error_of_its_own(damage: tuple[str, str]) -> None:
    made = stored(lambda x: (x + 1, x.t()), torch.randn(3, 4))
    assert damage[0] in made.text
    with pytest.raises(SerializationError):
        from_text(made.text.replace(*damage, 1))
