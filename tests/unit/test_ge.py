"""The IR: builders, names, promotion, use lists, verifier and rewrite rules."""

import gc
import weakref

import numpy as np
import pytest
import torch

from torchair import ge
from torchair.errors import GraphError
from torchair.ge import attr
from torchair.ge.build import Data, NetOutput, builder
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Graph, get_default_ge_graph
from torchair.ge.prototypes import known_types, prototype
from torchair.ge.rewrite import Mismatch, RuleSet, rewrite, verify
from torchair.ge.shapes import Sym, broadcast, evaluate, on_wire, symbol
from torchair.operators import infer


@pytest.fixture
def graph():
    with Graph("g", infer) as g:
        yield g


def data(index=0, shape=(2, 3), dtype=DataType.DT_FLOAT, name=None):
    return Data(index=index, dtype=dtype, shape=list(shape), placement="CPU", node_name=name)


def test_every_prototype_parses_and_has_a_builder():
    ours = {
        "TorchCall", "TorchUpdate", "ConvGradients", "PagedUpdate", "ChannelsLast",
        "BatchNormStatistics", "BatchNormScale", "BatchNormSums", "BatchNormInputGrad",
        "NativeDropout", "PhiloxState", "PhiloxMask", "Moments",
        "GroupMoments", "GroupSums",
    }  # fmt: skip
    types = [t for t in known_types() if t not in ours]
    assert len(types) == 1736 + 5  # CANN's, and those that the original makes with custom_op
    for name in types:
        proto = prototype(name)
        assert proto is not None and proto.type == name
        assert callable(getattr(ge, name))
        for spec in proto.attrs:
            if spec.default is not None:
                attr.Attr(spec.kind, spec.default)


def test_unknown_builder_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchOp"):
        _ = ge.NoSuchOp


def test_names_count_up_per_type(graph):
    x = data()
    assert [ge.Abs(x).node.name for _ in range(3)] == ["Abs", "Abs_1", "Abs_2"]
    assert ge.Abs(x, node_name="mine").node.name == "mine"
    with pytest.raises(AssertionError, match="mine"):
        ge.Abs(x, node_name="mine")
    with pytest.raises(AssertionError, match="blank"):
        ge.Abs(x, node_name=" ")


@pytest.mark.parametrize(
    ("dtype", "number", "expected"),
    [
        (DataType.DT_FLOAT16, 2.0, DataType.DT_FLOAT16),
        (DataType.DT_BF16, 2.0, DataType.DT_BF16),
        (DataType.DT_INT32, 2, DataType.DT_INT32),
        (DataType.DT_FLOAT, 2, DataType.DT_INT64),
        (DataType.DT_INT64, 2.5, DataType.DT_FLOAT),
    ],
)
def test_numbers_become_constants_of_the_operands_type(graph, dtype, number, expected):
    ge.Add(data(dtype=dtype), number)
    const = next(n for n in graph.nodes if n.type == "Const")
    assert const.outputs[0].dtype == expected


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (np.array([0.5, 1.5], np.float16), DataType.DT_FLOAT16, "array([0.5, 1.5], dtype=float16)"),
        (np.array([[1]], np.uint8), DataType.DT_UINT8, "array([[1]], dtype=uint8)"),
        (np.float32(0.5), DataType.DT_FLOAT, None),
        ([np.float32(0.5), 1], DataType.DT_FLOAT, None),
        (np.float64(0.5), DataType.DT_FLOAT, None),
        (
            torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2], dtype=torch.int8), 0.5, 0),
            DataType.DT_QINT8,
            None,
        ),
        (torch.tensor([1.0]).half(), DataType.DT_FLOAT16, "tensor([1.], dtype=torch.float16)"),
    ],
)
def test_constants_of_arrays_and_quantised_tensors(graph, number, dtype, text):
    const = ge.Const(number)
    assert const.dtype == dtype
    tensor = const.node.attr("value")
    numbers, expected = (
        t.int_repr() if t.is_quantized else t for t in (tensor, torch.as_tensor(number))
    )
    assert numbers.tolist() == expected.tolist()
    assert text is None or const.node.attr("_readable_value") == text


def test_promotion_refuses_to_guess(graph):
    x, y = data(0, dtype=DataType.DT_FLOAT), data(1, dtype=DataType.DT_FLOAT16)
    with pytest.raises(AssertionError, match="different types"):
        ge.SelectV2(1.0, x, y)


def test_index_ports_take_int64_and_empty_lists_int32(graph):
    ge.Reshape(data(), [3, 2])
    ge.Reshape(data(1, shape=(1,)), [])
    types = [n.outputs[0].dtype for n in graph.nodes if n.type == "Const"]
    assert types == [DataType.DT_INT64, DataType.DT_INT32]


def test_builder_errors_name_the_argument(graph):
    x = data()
    with pytest.raises(TypeError, match="needs input 'x2'"):
        ge.Add(x)
    with pytest.raises(TypeError, match="no argument 'axis'"):
        ge.Add(x, x, axis=1)
    with pytest.raises(TypeError, match="needs attribute 'dst_type'"):
        builder("Cast")(x)
    with pytest.raises(ValueError, match="Python value"):
        ge.Const(x)


def test_values_know_their_readers(graph):
    x = data()
    y = ge.Add(x, x)
    z = ge.ConcatV2([y, x], 0, N=2)
    assert x.users() == [y.node, z.node] and len(x.uses) == 3
    y.replace_with(x)
    assert not y.uses and z.node.inputs["x"] == [x, x]
    graph.remove(y.node)
    with pytest.raises(GraphError, match="reads it"):
        graph.remove(x.node)


def test_dynamic_outputs(graph):
    parts = ge.SplitV(data(shape=(4, 3)), [1, -1], 0, num_split=2)
    assert [p.shape for p in parts] == [(1, 3), (3, 3)]
    assert [p.port for p in parts] == ["y0", "y1"]


def test_custom_op_forms(graph):
    x = data()
    y = ge.custom_op("Abs", x)
    assert y.node.type == "Abs" and y.shape == (2, 3)
    z = ge.custom_op(
        "MyOwn",
        inputs={"a": x, "b": None, "c": [x, y]},
        outputs=["u", ("v", 2)],
        attrs={"k": attr.ListInt([1, 2])},
        node_name="own",
    )
    assert z[0].port == "u" and [v.port for v in z[1]] == ["v0", "v1"]
    assert graph.node("own").attrs["k"].value == [1, 2]
    with pytest.raises(RuntimeError, match="No AscendIR MyOwn was found"):
        ge.custom_op("MyOwn", x)
    with pytest.raises(IndexError, match="expected 1 args but got 2"):
        ge.custom_op("Abs", x, x)
    with pytest.raises(TypeError, match="param type: required"):
        ge.custom_op("Abs", 3)
    with pytest.raises(AssertionError, match="Invalid attr"):
        ge.custom_op("MyOwn", attrs={"k": 1})


def test_attr_kinds():
    assert repr(attr.ListInt((1, 2))) == "ge.attr.ListInt([1, 2])"
    assert attr.Str(b"x") == attr.Str("x") and attr.Int(1) != attr.Float(1)
    with pytest.raises(AssertionError):
        attr.Int(None)
    with pytest.raises(AssertionError):
        attr.ListInt(3)


def test_data_types_are_their_numbers():
    assert DataType(27) is DataType.DT_BF16 is torch_to_ge(torch.bfloat16)
    assert {27: "found"}[DataType.DT_BF16] == {DataType.DT_BF16: "found"}[27]
    shown = f"{DataType.DT_BF16} {DataType.DT_BF16!r} {[DataType.DT_BF16]} {DataType(27).name}"
    assert shown == "27 27 [27] DT_BF16"
    assert attr.DataType(DataType.DT_BF16) == attr.DataType(27)
    for t in (torch.float32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        assert ge_to_torch(torch_to_ge(t)) is t
    with pytest.raises(RuntimeError, match="DT_STRING"):
        ge_to_torch(DataType.DT_STRING)


def test_default_graph_is_per_thread():
    import threading

    seen = []
    with Graph("outer") as outer:
        thread = threading.Thread(target=lambda: seen.append(get_default_ge_graph()))
        thread.start()
        thread.join()
        assert get_default_ge_graph() is outer and seen[0] is not outer


def test_symbolic_dims():
    s, t = symbol("s"), symbol("t")
    assert s + 0 == s and (s * 2) // 2 == s and s - s == 0
    assert broadcast((s, 1), (1, 4)) == (s, 4) and broadcast((s,), (8,)) == (8,)
    with pytest.raises(ValueError, match="broadcast"):
        broadcast((3,), (4,))
    assert on_wire((s, 4)) == [-1, 4] and on_wire(None) == [-2]
    assert evaluate([s * t + 1, s // 2, 7], {"s": 5, "t": 3}) == (16, 2, 7)
    with pytest.raises(TypeError):
        bool(s)
    assert isinstance(s + 1, Sym)


# ---- verifier ----


def test_verifier_accepts_and_names_what_is_wrong(graph):
    x = data(name="x")
    y = ge.Add(x, 1.0)
    NetOutput([y])
    verify(graph)
    other = Graph("other")
    with other:
        stranger = data(name="stranger")
    y.node.inputs["x2"].uses.clear()
    y.node.inputs["x2"] = stranger
    with pytest.raises(GraphError, match="stranger"):
        verify(graph)


def test_verifier_finds_cycles_and_missing_inputs(graph):
    x = data()
    a = ge.Abs(x)
    b = ge.Abs(a)
    a.node.after(b.node)
    with pytest.raises(GraphError, match="cycle"):
        verify(graph)
    a.node.not_after(b.node)
    a.node.set_input("x", None)
    with pytest.raises(GraphError, match="not fed"):
        verify(graph)


def test_verifier_finds_doubled_indices(graph):
    data(0, name="a")
    data(0, name="b")
    with pytest.raises(GraphError, match="index"):
        verify(graph)


# ---- rules ----


OWN_RULES = RuleSet()


@OWN_RULES("Neg")
def DoubleNeg(node, inner):
    inside = node.values()[0]
    if inside.node.type != "Neg":
        return None
    inner.see(inside)
    return lambda: inside.node.values()[0]


@OWN_RULES("Add")
def AddZero(node, inner):
    x, zero = node.values()
    if zero.node.type != "Const" or (zero.node.attr("value") != 0).any():
        return None
    if x.shape != node.outputs[0].shape:
        raise Mismatch("it broadcasts", x)
    return lambda: x


@OWN_RULES("Relu")
def ReluOfProduct(node, inner):
    inner.add(node.values()[0])
    x, w = node.values()[0].node.values()
    return lambda: ge.Sigmoid(ge.MatMulV2(x, w, None, None))


def test_a_set_of_rules_holds_them_in_order_under_their_names():
    assert [r.name for r in OWN_RULES] == ["DoubleNeg", "AddZero", "ReluOfProduct", "OneForAll"]


def test_rules_rewrite_until_nothing_changes(graph):
    x = data()
    y = ge.Neg(ge.Neg(ge.Neg(ge.Neg(x))))
    NetOutput([y])
    assert rewrite(graph, [DoubleNeg]) == 2
    assert graph.output.values() == [x]


def test_a_rule_that_declines_says_why_and_leaves_nothing(graph):
    x = data(shape=(1,))
    y = ge.Add(x, ge.Const([0.0, 0.0], dtype=0))
    NetOutput([y, ge.Add(x, 0.0)])
    said = []
    before = len(graph)
    assert rewrite(graph, [AddZero], said.append) == 1
    assert any("AddZero replaced" in s for s in said)
    assert any("AddZero declined" in s and "it broadcasts" in s for s in said)
    assert len(graph) == before - 1


class Held:
    """What a frame holds."""


def test_a_rule_that_declines_keeps_no_frames(graph):
    """Callers of a compilation have arguments in theirs."""
    held = []

    @RuleSet()("Abs")
    def Declines(node, inner):
        local = Held()
        held.append(weakref.ref(local))
        raise Mismatch("it always does")

    NetOutput([ge.Abs(data())])
    gc.disable()
    try:
        assert rewrite(graph, [Declines], lambda text: None) == 0
        assert [found() for found in held] == [None]
    finally:
        gc.enable()


@OWN_RULES("SplitD")
def OneForAll(node, inner):
    """A split of which one part is read -> another split, its first part for all"""
    (x,) = node.values()
    return lambda: [ge.SplitV(x, [4, 4], 0, num_split=2, size_of_y=2)[0]] * 2


def test_nothing_is_learnt_from_a_result_that_nobody_reads(graph):
    x = data(shape=(8, symbol("s0")))
    first, second = ge.SplitD(x, split_dim=0, num_split=2, size_of_y=2)
    second.shape = (1,)
    result = ge.Neg(first)
    NetOutput([result])
    assert rewrite(graph, [OneForAll]) == 1
    assert result.node.inputs["x"].shape == (4, symbol("s0"))


def test_rule_keeps_names_scopes_and_order(graph):
    x, w = data(0), data(1, shape=(3, 4))
    before = ge.Abs(x)
    product = ge.MatMulV2(x, w, None, None)
    y = ge.Relu(product)
    y.node.attrs["_user_stream_label"] = attr.Str("s1")
    y.node.after(before.node)
    z = ge.Abs(y)
    NetOutput([z, before])
    assert rewrite(graph, [ReluOfProduct]) == 0  # the product is on another stream
    product.node.attrs["_user_stream_label"] = attr.Str("s1")
    assert rewrite(graph, [ReluOfProduct]) == 1
    verify(graph)
    new = z.node.inputs["x"].node
    assert new.type == "Sigmoid" and new.attrs["_user_stream_label"].value == "s1"
    assert any(before.node in n.control for n in graph.nodes)
