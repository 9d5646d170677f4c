"""`npu_print`: the text, the same from eager code, AOTAutograd and a graph, and its order."""

from __future__ import annotations

import pytest
import torch

import torchair
from compiling import compiled
from op_harness import convert
from torchair.engine.optimize.passes.ordering import explicit_order_for_side_effect_nodes
from torchair.operators.core import row_of
from torchair.ops import npu_print
from torchair.ops.output import tensor_text

WAYS = ["eager", "aot_eager", "torchair", "torchair dynamic", "torchair eagerly", "npugraph_ex"]


def executed(way, fn):
    """The function as one way of execution runs it, in one graph."""
    torch._dynamo.reset()
    if way == "eager":
        return fn
    if way == "aot_eager":
        return torch.compile(fn, backend="aot_eager", fullgraph=True)
    if way == "npugraph_ex":
        options = {"capture_fallback": False}
        return torch.compile(fn, backend="npugraph_ex", fullgraph=True, options=options)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = way == "torchair eagerly"
    return compiled(fn, config, dynamic=way == "torchair dynamic")


ROW = "[0 1 2 ... 7 8 9]"
TEXTS = {
    "row": (lambda x: npu_print("hello, tensor:", x), torch.arange(10), f"hello, tensor: {ROW}"),
    "ends": (
        lambda x: npu_print(x, summarize_size=1),
        torch.full((10, 10), -1),
        "[[-1 ... -1]\n ...\n [-1 ... -1]]",
    ),
    "all": (
        lambda x: npu_print(x, summarize_size=-1),
        torch.arange(10).view(2, 5),
        "[[0 1 2 3 4]\n [5 6 7 8 9]]",
    ),
    "just fits": (lambda x: npu_print(x), torch.arange(6), "[0 1 2 3 4 5]"),
    "one dim cut": (
        lambda x: npu_print(x, summarize_size=1),
        torch.arange(6).view(2, 3),
        "[[0 ... 2]\n [3 ... 5]]",
    ),
    "number": (lambda x: npu_print(x), torch.tensor(2.5), "2.5"),
    "truth": (lambda x: npu_print(x), torch.tensor(True), "1"),
    "truths": (lambda x: npu_print(x), torch.tensor([True, False]), "[1 0]"),
    "digits": (
        lambda x: npu_print(x),
        torch.tensor([1 / 3, 1e20, 0.5]),
        "[0.333333343 1.00000002e+20 0.5]",
    ),
    "double": (lambda x: npu_print(x), torch.tensor([1 / 3]).double() / 1, "[0.333333343]"),
    "not finite": (
        lambda x: npu_print(x),
        torch.tensor([float("inf"), -float("inf"), float("nan")]),
        "[inf -inf nan]",
    ),
    "bfloat16": (lambda x: npu_print(x), torch.tensor([0.1]).bfloat16(), "[0.100097656]"),
    "half": (lambda x: npu_print(x), torch.tensor([0.1]).half(), "[0.0999755859]"),
    "detail": (
        lambda x: npu_print("x", x, tensor_detail=True),
        torch.arange(10).view(2, 5),
        "x tensor([[0 1 2 3 4]\n [5 6 7 8 9]], shape=[2, 5], dtype=torch.int64)",
    ),
    "detail of bfloat16": (
        lambda x: npu_print(x, tensor_detail=True),
        torch.tensor([0.5, 1]).bfloat16(),
        "tensor([0.5 1], shape=[2], dtype=torch.bfloat16)",
    ),
    "empty": (
        lambda x: npu_print(x, tensor_detail=True),
        torch.empty(0, 3, dtype=torch.int32),
        "tensor([], shape=[0, 3], dtype=torch.int32)",
    ),
    "words": (
        lambda x: npu_print("{} is {{}}", x, 7, 0.5, True),
        torch.tensor(1),
        "{} is {{}} 1 7 0.5 True",
    ),
    "two": (lambda x: npu_print(x, "and", x * 2), torch.tensor([1, 2]), "[1 2] and [2 4]"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_text(way, name, capsys):
    show, x, text = TEXTS[name]

    def fn(x):
        show(x)
        return x.clone()

    run = executed(way, fn)
    assert torch.equal(run(x), x) or "finite" in name
    assert capsys.readouterr().out == text + "\n"
    run(x)
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("way", WAYS)
def test_order_across_updates_of_what_is_printed(way, capsys):
    def fn(x, y):
        npu_print("before", x)
        x.add_(1)
        npu_print("after", x)
        y.mul_(x)
        x.copy_(y)
        npu_print("end", x, y)
        return y.sum()

    x, y = torch.arange(3.0), torch.ones(3) * 2
    wanted = "before [0 1 2]\nafter [1 2 3]\nend [2 4 6] [2 4 6]\n"
    run = executed(way, fn)
    assert run(x, y) == 12 and torch.equal(x, torch.tensor([2.0, 4, 6]))
    assert capsys.readouterr().out == wanted


def test_dynamic_sizes_and_numbers(capsys):
    def fn(x, n):
        npu_print(x, n, x.shape[0], tensor_detail=True)
        return x + n

    run = executed("torchair dynamic", fn)
    for size, n in ((3, 5), (4, 6), (9, 6)):
        x = torch.arange(float(size))
        run(x, n)
        graph_text = capsys.readouterr().out
        fn(x, n)
        assert graph_text == capsys.readouterr().out


def test_print_in_training(capsys):
    def fn(x):
        y = x.sin()
        npu_print("y", y)
        return y.sum()

    x = torch.zeros(2, requires_grad=True)
    executed("torchair", fn)(x).backward()
    assert torch.equal(x.grad, torch.ones(2))
    assert capsys.readouterr().out == "y [0 0]\n"


def test_graph_has_a_text_and_a_print():
    def fn(x):
        npu_print("x:", x.bfloat16(), summarize_size=2)
        npu_print("end", x)
        return x + 1

    graph = convert(fn, torch.ones(3)).graph
    types = [n.type for n in graph.nodes if n.type not in ("Data", "Const")]
    printed = ["StringFormat", "PrintV2"]
    assert types == ["Cast", "Cast", *printed, *printed, "Add", "NetOutput"]
    text = graph.node("StringFormat")
    assert (text.attr("template"), text.attr("placeholder"), text.attr("summarize")) == (
        "x: {}",
        "{}",
        2,
    )
    assert text.attr("_kernel") == "extend"
    prints = [graph.node("PrintV2"), graph.node("PrintV2_1")]
    assert graph.keep_alive == prints and not set(prints) & set(graph.output.control)
    explicit_order_for_side_effect_nodes(graph)
    assert prints[1] in graph.output.control and prints[0] in prints[1].control


def test_a_graph_that_only_prints(capsys):
    def fn(x):
        npu_print(x)

    executed("torchair", fn)(torch.ones(2))
    assert capsys.readouterr().out == "[1 1]\n"


def test_rows_name_the_stream(capsys):
    graph = convert(lambda x: npu_print(x), torch.ones(2)).graph
    node = graph.node("PrintV2")
    row = row_of("PrintV2")
    from torchair.ge import attr
    from torchair.operators import Op

    node.attrs["output_stream"] = attr.Str("stderr")
    row.kernel(Op(node))(torch.tensor(list(b"text"), dtype=torch.uint8))
    assert capsys.readouterr() == ("", "text\n")


@pytest.mark.parametrize(
    ("args", "options", "error", "text"),
    [
        ((None,), {}, TypeError, "NoneType"),
        (([1],), {}, TypeError, "list"),
        (("a", 1), {}, ValueError, "at least one tensor"),
        ((), {}, ValueError, "at least one tensor"),
        ((torch.ones(1),), {"summarize_size": 3.2}, TypeError, "float"),
        ((torch.ones(1),), {"summarize_size": 0}, ValueError, "got 0"),
        ((torch.ones(1),), {"summarize_size": -2}, ValueError, "got -2"),
        ((torch.ones(1),), {"tensor_detail": 1}, TypeError, "detail must be bool, got int$"),
    ],
)
def test_errors(args, options, error, text):
    with pytest.raises(error, match=text):
        npu_print(*args, **options)


def test_large_tensors_are_cut_before_they_are_read():
    assert tensor_text(torch.zeros(1).expand(1 << 40), 1) == "[0 ... 0]"
