"""The conversion driver on small functions."""

from unittest import mock

import pytest
import torch

from op_harness import check, convert
from torchair.convert import registry
from torchair.convert.registry import builtin


def test_linear_and_scale():
    def fn(x, w, b):
        return torch.addmm(b, x, w.t()) * 3 - b

    conversion = check(fn, torch.randn(4, 8), torch.randn(5, 8), torch.randn(5))
    assert [n.type for n in conversion.graph.nodes if n.type != "Const"] == [
        "Data",
        "Data",
        "Data",
        "Transpose",
        "MatMulV2",
        "Mul",
        "Add",
        "Mul",
        "Cast",
        "Sub",
        "NetOutput",
    ]


def test_generic_node_for_unknown_operator():
    conversion = check(lambda x: torch.special.i0(x) + 1, torch.randn(3, 4), generic=True)
    assert conversion.generic == {"aten.i0.default": 1}
    assert "TorchCall" in [n.type for n in conversion.graph.nodes]


def test_dynamic_graph_serves_other_sizes():
    def fn(x, y):
        return (x + y).reshape(x.shape[0] * 2, -1) * x.shape[1]

    check(
        fn,
        torch.randn(4, 6),
        torch.randn(4, 6),
        dynamic=True,
        other_inputs=(torch.randn(3, 8), torch.randn(3, 8)),
        generic=True,
    )


def test_view_chain_folds_to_one_transpose():
    def fn(x):
        return x.view(2, 3, 4).transpose(0, 1).transpose(0, 1).permute(2, 0, 1).reshape(4, 6) + 1

    types = [n.type for n in convert(fn, torch.randn(6, 4)).graph.nodes]
    assert types.count("Transpose") == 1 and types.count("Reshape") == 0
    check(fn, torch.randn(6, 4))


def test_output_that_views_an_input_is_not_computed():
    conversion = check(lambda x: (x[1:], x.t(), x + 1), torch.randn(3, 4), generic=True)
    assert len(conversion.graph.output.values()) == 1


def test_permute_of_a_permute():
    def fn(x):
        return x.permute(0, 2, 1, 3).permute(2, 0, 1, 3) + 1

    conversion = check(fn, torch.randn(2, 5, 3, 8))
    assert [n.type for n in conversion.graph.nodes].count("Transpose") == 1


def test_an_operator_has_one_converter_of_ours():
    with pytest.raises(AssertionError, match="two converters"):
        builtin(torch.ops.aten.relu.default)(lambda self: self)


def test_a_converter_gets_what_it_names_with_the_defaults_of_torch():
    aten = torch.ops.aten
    with mock.patch.dict(registry._builtin, clear=True):
        builtin(aten.add.Tensor)(lambda self, alpha, **others: (self, alpha, others))
        builtin(aten.sub.Tensor)(lambda other: other)
        builtin(aten.rsub.Tensor, filled=True)(lambda self, **others: others)
        calls = {n: registry._builtin[getattr(aten, n).Tensor].fn for n in ("add", "sub", "rsub")}
    assert calls["add"]("a", "b") == ("a", 1, {"other": "b"})
    assert calls["sub"]("a", other="b") == "b"
    assert calls["rsub"]("a", "b") == {"other": "b", "alpha": 1}
