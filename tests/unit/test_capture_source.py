"""Captured graphs as programs: their text, and that they run."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchair.capture.graph import AclGraphCacheInfo
from torchair.capture.source import Constants, rand_strided, render

SOURCE = Path(__file__).resolve().parents[2] / "src"
aten = torch.ops.aten


def described(graph: fx.GraphModule, **facts: Any) -> AclGraphCacheInfo:
    """What the run time must know of a graph whose arguments are all user inputs."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    tensors = {
        n.name: i
        for i, n in enumerate(placeholders)
        if isinstance(n.meta.get("val"), torch.Tensor) and n.name not in facts.get("mutated", ())
    }
    return AclGraphCacheInfo("graph_7", user_inputs_mapping=tensors, **facts)


def program(graph: fx.GraphModule, folder: Path, **facts: Any) -> dict[str, Any]:
    """The names that the program of a graph defines."""
    file = folder / "output_code.py"
    file.write_text(render(graph, {}, described(graph, **facts)))
    return runpy.run_path(str(file))


def traced(function: Any, *args: Any, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)


# ---- the text


def test_golden():
    graph = traced(lambda x: (x + torch.tensor([1.5, float("inf")]), x[1:]), torch.ones(3, 2))
    text = render(graph, {"clone_input": "1", "frozen_parameter": "0"}, described(graph))
    text = re.sub(r" *# File:.*\n", "", text)  # lines of this file
    head, _, rest = text.partition("aclgraph_cache_info = AclGraphCacheInfo(\n")
    fields, _, tail = rest.partition(")\n")
    assert head == GOLDEN_HEAD
    assert tail == GOLDEN_TAIL
    assert fields.splitlines()[0] == '    fx_graph_name="graph_7",'
    assert "    user_inputs_mapping={'x_1': 0}," in fields.splitlines()
    assert len(fields.splitlines()) == len(dataclasses.fields(AclGraphCacheInfo))


GOLDEN_HEAD = """\
# graph_7 as a program: `python output_code.py` calls `kernel` twice with random
# numbers. Custom operators have to be imported first.

import torch
from math import inf

from torchair.capture.graph import AclGraph, AclGraphCacheInfo
from torchair.capture.source import Constants, assert_size_stride, rand_strided

tensor_constants = Constants()
tensor_constants._tensor_constant0 = torch.tensor([1.5, inf], dtype=torch.float32)


def forward(*args, node_info=[], is_capturing: bool = False):
    x_1, = args
    # No stacktrace found for following nodes
    _tensor_constant0: "f32[2]" = tensor_constants._tensor_constant0
    lift_fresh_copy: "f32[2]" = torch.ops.aten.lift_fresh_copy.default(_tensor_constant0);  _tensor_constant0 = None
    add: "f32[3, 2]" = torch.ops.aten.add.Tensor(x_1, lift_fresh_copy);  lift_fresh_copy = None
    slice_1: "f32[2, 2]" = torch.ops.aten.slice.Tensor(x_1, 0, 1, 9223372036854775807);  x_1 = None
    return (add, slice_1)


compile_configs = {}
compile_configs["clone_input"] = "1"
compile_configs["frozen_parameter"] = "0"
acl_graph = AclGraph(fx_forward=forward, config=compile_configs)
"""  # noqa: E501

GOLDEN_TAIL = """\
acl_graph.load(aclgraph_cache_info)

_is_first_run = True


def kernel(*args, **kwargs):
    global _is_first_run
    if _is_first_run:
        assert_size_stride(args[0], (3, 2), (2, 1))
        _is_first_run = False
    return acl_graph(*args, **kwargs)


def main():
    x_1 = rand_strided((3, 2), (2, 1), dtype=torch.float32, device='cpu')
    args = [x_1]
    kernel(*args)
    return kernel(*args)


if __name__ == "__main__":
    main()
"""


def test_symbols():
    def function(n, x, y):
        return x.repeat(2, 1)[: n // 2] + 1, y * n

    graph = traced(function, 6, torch.ones(6, 4), torch.ones(8), symbolic=True)
    inputs = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    first, width, second = inputs[0], inputs[1].shape[1], inputs[2].shape[0]
    lines = render(graph, {}, described(graph)).splitlines()
    a, b, c = str(first), str(width), str(second)
    kernel = lines[lines.index("def kernel(*args, **kwargs):") :]
    assert kernel[3:9] == [
        f"        {a} = args[0]",
        f"        {b} = args[1].size(1)",
        f"        {c} = args[2].size(0)",
        f"        assert_size_stride(args[1], ({a}, {b}), ({b}, 1))",
        f"        assert_size_stride(args[2], ({c},), (1,))",
        "        _is_first_run = False",
    ]
    main = lines[lines.index("def main():") :]
    assert main[1:7] == [
        f"    {a} = 2",
        f"    {b} = 3",
        f"    {c} = 4",
        f"    n_1 = {a}",
        f"    x_1 = rand_strided(({a}, {b}), ({b}, 1), dtype=torch.float32, device='cpu')",
        f"    y_1 = rand_strided(({c},), (1,), dtype=torch.float32, device='cpu')",
    ]


def test_what_has_no_literal_is_refused():
    graph = traced(lambda x: (x + 1,), torch.ones(3))
    with pytest.raises(TypeError, match="of type object has no literal"):
        render(graph, {"x": object()}, described(graph))
    with pytest.raises(TypeError, match=r"torch.float32} of type dict has no literal"):
        render(graph, {}, described(graph, updated_ops_param={"x": torch.float32}))


def test_scopes_import_their_operators():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.call_function(torch.ops.air.scope_enter.default, (["_user_stream_label"], ["1"], True))
    y = graph.call_function(aten.add.Tensor, (x, 1))
    graph.call_function(torch.ops.air.scope_exit.default, (True,))
    graph.output((y,))
    module = fx.GraphModule({}, graph)
    text = render(module, {}, described(module))
    assert "import torchair.ops\n" in text
    assert "torch.ops.air.scope_enter.default(['_user_stream_label'], ['1'], True)" in text


# ---- constants


CONSTANTS = {
    "float32": torch.tensor([1.1, -0.0, float("nan"), float("-inf"), 1e-42]),
    "float64": torch.tensor([[0.1], [1e300]], dtype=torch.float64),
    "bfloat16": torch.tensor([1.1, 3e38], dtype=torch.bfloat16),
    "float16": torch.tensor([1.1], dtype=torch.float16),
    "float8": torch.tensor([1.1, 2.5]).to(torch.float8_e4m3fn),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int64": torch.tensor([2**62, -(2**63)]),
    "bool": torch.tensor([[True, False]]),
    "complex64": torch.tensor([1 - 2j, complex("nan")], dtype=torch.complex64),
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 3, dtype=torch.int32),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
}


def holding(value: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.get_attr("part.value"),))
    root = torch.nn.Module()
    root.part = torch.nn.Module()
    root.part.value = value
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_exact(name, tmp_path):
    constant = CONSTANTS[name]
    (result,) = program(holding(constant), tmp_path)["forward"]()
    assert result.dtype == constant.dtype and result.shape == constant.shape
    assert result.stride() == constant.stride() and not result.requires_grad
    if constant.numel():
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (result, constant)]
        assert torch.equal(*raw)


def test_large_constants_are_left_out(tmp_path):
    graph = holding(torch.zeros(64, 64))
    text = render(graph, {}, described(graph))
    reason = "it is torch.float32 of [64, 64], more than 1024 elements"
    assert f"# error: value is missing here, {reason}\n" in text
    with pytest.raises(
        RuntimeError, match=r"value is not part of this program: it is torch.float32"
    ):
        program(graph, tmp_path)["forward"]()


def test_other_values_are_left_out(tmp_path):
    graph = holding(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="it is of type Linear"):
        program(graph, tmp_path)["forward"]()


def test_constants_by_name():
    constants = Constants()
    constants.leave_out("big", "it is big")
    constants.small = 1
    assert constants.small == 1
    with pytest.raises(AttributeError, match="nothing named 'other'"):
        _ = constants.other
    with pytest.raises(RuntimeError, match="big is not part of this program: it is big"):
        _ = constants.big


# ---- running


def test_inputs_of_any_layout():
    x = rand_strided((2, 3), (1, 2), dtype=torch.bfloat16, device="cpu")
    assert x.shape == (2, 3) and x.stride() == (1, 2) and x.dtype == torch.bfloat16
    assert rand_strided((3, 0), (1, 1), dtype=torch.float32, device="cpu").shape == (3, 0)
    assert rand_strided((4, 2), (0, 1), dtype=torch.float32, device="cpu")[1:].std() > 0
    assert rand_strided((), (), dtype=torch.complex64, device="cpu").dtype == torch.complex64
    assert rand_strided((2,), (1,), dtype=torch.int64, device="cpu").tolist() == [0, 0]


def function(x, w, y):
    y.add_(x.sum(0))
    return (x @ w).relu() + y, x[1:], torch.full((2,), float("-inf"))


def test_kernel_and_main(tmp_path):
    args = torch.randn(3, 4), torch.randn(4, 4), torch.zeros(4)
    names = program(traced(function, *args), tmp_path, mutated_user_inputs=["y_1"])
    wanted_y = args[2].clone()
    for _ in range(2):
        results = names["kernel"](*args)
        wanted = function(*args[:2], wanted_y)
        for r, w in zip((*results, args[2]), (*wanted, wanted_y), strict=True):
            assert torch.equal(r, w) and r.stride() == w.stride()
    assert results[1].data_ptr() == args[0][1:].data_ptr()
    assert [tuple(r.shape) for r in names["main"]()] == [(3, 4), (2, 4), (2,)]


def test_kernel_checks_its_first_call(tmp_path):
    names = program(traced(lambda x: (x + 1,), torch.ones(3, 4)), tmp_path)
    for _ in range(2):
        with pytest.raises(
            AssertionError, match="size 4 and stride 4, expected size 3 and stride 4 at dim=0"
        ):
            names["kernel"](torch.ones(4, 4))
    with pytest.raises(AssertionError, match="stride"):
        names["kernel"](torch.ones(4, 3).t())
    assert torch.equal(names["kernel"](torch.ones(3, 4))[0], torch.full((3, 4), 2.0))


def test_graphs_in_graphs(tmp_path):
    def function(x):
        return (torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - torch.ones(3), (x,)),)

    graph = traced(function, torch.ones(3))
    names = program(graph, tmp_path)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(names["forward"](x)[0], function(x)[0])
        assert torch.equal(names["kernel"](x)[0], function(x)[0])


def test_python_functions_are_imported(tmp_path):
    graph = fx.Graph()
    n = graph.placeholder("n")
    half = graph.call_function(torch.sym_float, (n,))
    import math

    up = graph.call_function(math.ceil, (half,))
    graph.output((graph.call_function(aten.full.default, ([up], float("nan"))),))
    (result,) = program(fx.GraphModule({}, graph), tmp_path)["forward"](3)
    assert result.shape == (3,) and result.isnan().all()


def test_as_a_script(tmp_path):
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 4), torch.zeros(4))
    file = tmp_path / "output_code.py"
    file.write_text(render(graph, {}, described(graph, mutated_user_inputs=["y_1"])))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
