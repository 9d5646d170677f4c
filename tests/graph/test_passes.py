"""What each documented pass turns into what; the debug tree tests only know their names."""

import gc

import pytest
import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import torchair
from torchair import ge
from torchair.ascend import ops as npu
from torchair.engine.optimize.passes import GraphState, apply_rules
from torchair.engine.optimize.passes.forms import (
    move_mm_weight_transpose_after_bitcast,
    move_transpose_into_mm,
)
from torchair.engine.optimize.passes.ordering import (
    explicit_order_for_cmo,
    explicit_order_for_side_effect_nodes,
    mapping_assign_op_to_graph_output,
    optimize_reference_op_redundant_copy,
)
from torchair.errors import ScopeError
from torchair.fx.passes import user as user_passes
from torchair.fx.passes.builtin import optimize_noop_ops, recover_view_inplace_pattern
from torchair.fx.passes.streams import check_scopes
from torchair.garbage import no_garbage_collection
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.ge.rewrite import verify
from torchair.operators import infer
from torchair.operators.slicing import END

aten = torch.ops.aten
F, I8 = DataType.DT_FLOAT, DataType.DT_INT8


def traced(fn, *inputs):
    return make_fx(functionalize(fn), tracing_mode="fake")(*inputs)


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def data(index, shape, dtype=F):
    return Data(index=index, dtype=dtype, shape=list(shape), placement="CPU")


NOOPS = {
    "slice": lambda x: aten.slice.Tensor(x, 0, 0, 2**63 - 1) + 1,
    "repeat": lambda x: x.repeat(1, 1) + 1,
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)) + 1,
    "pow": lambda x: x.pow(1) + 1,
    "cat": lambda x: torch.cat([x]) + 1,
    "view": lambda x: x.view(3, 4) + 1,
    "clone": lambda x: x.clone() + 1,
    "copy": lambda x: aten.copy.default(x, x) + 1,
    "slice_scatter": lambda x: aten.slice_scatter.default(x, x) + 1,
}


@pytest.mark.parametrize("name", NOOPS)
def test_calls_that_change_nothing_go(name):
    gm, x = traced(NOOPS[name], torch.randn(3, 4)), torch.randn(3, 4)
    optimize_noop_ops(gm)
    gm.recompile()
    assert targets(gm) == [aten.add.Tensor]
    torch.testing.assert_close(gm(x), x + 1)


def test_a_copy_that_keeps_memory_apart_stays():
    gm = traced(lambda x: x.clone(), torch.randn(3))
    optimize_noop_ops(gm)
    assert targets(gm) == [aten.clone.default]


def test_a_copy_over_other_memory_is_what_is_copied():
    def fn(x, y):
        part = x.slice_scatter(y[1:], 0, 1)
        return torch.zeros_like(x).copy_(y) + 1, x.slice_scatter(y) * 2, part

    inputs = torch.randn(3, 4), torch.randn(3, 4)
    gm = traced(fn, *inputs)
    optimize_noop_ops(gm)
    gm.recompile()
    left = targets(gm)
    assert aten.copy.default not in left and left.count(aten.slice_scatter.default) == 1
    torch.testing.assert_close(gm(*inputs), fn(*inputs))


def test_a_slice_that_cuts_stays():
    gm = traced(lambda x: x[1:] + 1, torch.randn(3, 4))
    before = targets(gm)
    optimize_noop_ops(gm)
    assert targets(gm) == before and aten.slice.Tensor in before


def test_cache_update_through_a_view_becomes_in_place():
    npu.define()

    def fn(cache, index, update):
        new = torch.ops.npu.scatter_update(cache.view(2, 6), index, update, 1)
        cache.copy_(new.view(3, 4))
        return index + 1

    gm = make_fx(fn, tracing_mode="fake")(torch.zeros(3, 4), torch.zeros(2), torch.zeros(2, 1))
    recover_view_inplace_pattern(gm)
    names = [n.name for n in gm.graph.nodes]
    assert torch.ops.npu.scatter_update_.default in targets(gm)
    assert aten.copy_.default not in targets(gm) and "scatter_update_inplace" in names


def test_other_operators_become_in_place_through_a_view(monkeypatch):
    from torchair.patterns._recover_view_inplace_pattern import _INPLACE_OPS_MAP, InplaceOpInfo

    monkeypatch.setitem(_INPLACE_OPS_MAP, aten.mul.Tensor, InplaceOpInfo(aten.mul_.Tensor))

    def fn(x, y):
        x.copy_((x.view(12) * y).view(3, 4))
        return y + 1

    gm = make_fx(fn, tracing_mode="fake")(torch.ones(3, 4), torch.ones(12))
    recover_view_inplace_pattern(gm)
    gm.recompile()
    assert targets(gm) == [aten.view.default, aten.mul_.Tensor, aten.add.Tensor]
    x, y = torch.ones(3, 4), torch.full((12,), 2.0)
    gm(x, y)
    assert x.eq(2).all()


def test_user_replacement_is_applied(monkeypatch):
    torch._dynamo.reset()
    for kept in ("WAITING", "REGISTERED", "_matcher"):
        monkeypatch.setattr(user_passes, kept, [])  # other tests must not meet this pattern
    torchair.register_replacement(
        lambda x, y: torch.sin(x) * torch.cos(y),
        lambda x, y: (torch.sin(x + y) + torch.sin(x - y)) / 2,
        [torch.randn(2), torch.randn(2)],
    )
    seen = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = lambda gm, inputs, config: seen.extend(targets(gm))
    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        fast = torch.compile(
            lambda x, y: torch.sin(x) * torch.cos(y),
            backend=torchair.get_npu_backend(compiler_config=config),
        )
        torch.testing.assert_close(fast(x, y), torch.sin(x) * torch.cos(y))
    assert aten.cos.default not in seen and seen.count(aten.sin.default) == 2


def test_unmatched_super_kernel_scopes_are_refused():
    lib = torch.library.Library("npu", "FRAGMENT")
    lib.define("super_kernel_scope_begin(str name) -> ()")
    gm = traced(lambda x: x + 1, torch.randn(2))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.npu.super_kernel_scope_begin.default, ("a",))
    with pytest.raises(ScopeError, match="super_kernel"):
        check_scopes(gm)


def test_copy_before_an_update_of_an_input_goes():
    with Graph("g", infer) as g:
        x, i, u = data(0, (4, 3)), data(1, (2,), DataType.DT_INT32), data(2, (2, 3))
        new = ge.InplaceIndexAdd(ge.TensorMove(x), i, u, None, axis=0)
        ge.Assign(x, new)
        NetOutput([])
    optimize_reference_op_redundant_copy(g, GraphState())
    assert "TensorMove" not in [n.type for n in g.nodes] and new.node.inputs["var"] is x


def test_copy_stays_when_the_old_value_is_read():
    with Graph("g", infer) as g:
        x, i, u = data(0, (4, 3)), data(1, (2,), DataType.DT_INT32), data(2, (2, 3))
        ge.Assign(x, ge.InplaceIndexAdd(ge.TensorMove(x), i, u, None, axis=0))
        NetOutput([ge.Abs(x)])
    optimize_reference_op_redundant_copy(g, GraphState())
    assert "TensorMove" in [n.type for n in g.nodes]


def test_no_copy_of_what_an_update_copies_anyway():
    """A copy that nobody but the update reads goes, whatever it is a copy of."""
    with Graph("g", infer) as g:
        x, i, u = data(0, (4, 3)), data(1, (2,), DataType.DT_INT32), data(2, (2, 3))
        alone = ge.InplaceIndexAdd(ge.TensorMove(x), i, u, None, axis=0)
        shared = ge.TensorMove(x)
        NetOutput([alone, ge.InplaceIndexAdd(shared, i, ge.Abs(shared), None, axis=0)])
    apply_rules(g, GraphState())
    assert alone.node.inputs["var"] is x
    assert [n.type for n in g.nodes].count("TensorMove") == 1


@pytest.mark.parametrize("assigned", [{}, {1: 0}, {0: 0}], ids=["none", "another", "this"])
def test_parts_are_put_back_into_an_input_that_keeps_them(assigned):
    """Else the whole would be copied, to write a part of it a second time."""
    with Graph("g", infer) as g:
        x, part = data(0, (6, 3)), data(1, (2, 3))
        before, behind = (ge.StridedSliceV2(x, [b], [e], [0], [1]) for b, e in ((0, 1), (3, END)))
        joined = ge.ConcatV2([before, part, behind], 0, N=3)
        NetOutput([joined, ge.Abs(x)])
    apply_rules(g, GraphState(assigned=assigned))
    types = [n.type for n in g.nodes]
    this = assigned == {0: 0}
    assert ("StridedSliceAssign" in types, "ConcatV2" in types) == (this, not this)


def test_prints_and_prefetches_are_chained():
    with Graph("g") as g:
        x = data(0, (2,))
        prints = [ge.custom_op("PrintV2", inputs={"x": x}, node_name=f"p{i}") for i in range(2)]
        for i in range(2):
            ge.custom_op("Cmo", inputs={"src": x}, node_name=f"c{i}")
        NetOutput([x])
    assert prints == [None, None]
    explicit_order_for_side_effect_nodes(g, GraphState())
    explicit_order_for_cmo(g, GraphState())
    for stem in "pc":
        assert g.node(f"{stem}0") in g.node(f"{stem}1").control
        assert g.node(f"{stem}1") in g.output.control


def test_updates_wait_for_prints_of_the_old_value():
    with Graph("g", infer) as g:
        x, y = data(0, (2,)), data(1, (2,))
        for name, value in (("old", x), ("new", ge.Abs(x)), ("other", ge.Neg(y))):
            text = ge.StringFormat([value], template="{}", placeholder="{}", node_name=name)
            ge.PrintV2(text, node_name=f"print_{name}")
        total = ge.Add(x, y)
        ge.Assign(x, total)
        ge.PrintV2(ge.StringFormat([total, x], template="{}{}", placeholder="{}"), node_name="both")
        NetOutput([total])
    state = GraphState()
    mapping_assign_op_to_graph_output(g, state)
    explicit_order_for_side_effect_nodes(g, state)
    assert [n.name for n in total.node.control] == ["print_old"]
    verify(g)


def test_weight_transposes_of_quantised_products():
    with Graph("g") as g:
        x, w = data(0, (2, 4), I8), data(1, (3, 4), I8)
        cast = ge.Bitcast(ge.Transpose(w, [1, 0]), type=I8)
        product = ge.custom_op(
            "QuantBatchMatmulV4", inputs={"x1": x, "x2": cast}, outputs=["y"], node_name="v4"
        )
        cast3 = ge.Bitcast(ge.Transpose(w, [1, 0]), type=I8)
        other = ge.custom_op(
            "QuantBatchMatmulV3", inputs={"x1": x, "x2": cast3}, outputs=["y"], node_name="v3"
        )
        NetOutput([product, other])
    move_transpose_into_mm(g, GraphState())
    assert g.node("v4").attr("transpose_x2") is True and cast.node.inputs["x"] is w
    move_mm_weight_transpose_after_bitcast(g, GraphState())
    moved = g.node("v3").inputs["x2"]
    assert moved.node.type == "Transpose" and moved.node.inputs["x"].node.type == "Bitcast"


def test_a_name_of_a_weight_is_looked_through():
    """Torch traces `view(dtype)` with a `detach`, an Identity between the Bitcast and a product."""
    with Graph("g") as g:
        x, w = data(0, (2, 4), I8), data(1, (3, 4), I8)
        first, second = (
            ge.Identity(ge.Bitcast(ge.Transpose(w, [1, 0]), type=I8)) for _ in range(2)
        )
        inputs = {"x1": x, "x2": first}
        product = ge.custom_op("QuantBatchMatmulV4", inputs=inputs, outputs=["y"], node_name="v4")
        inputs = {"x1": x, "x2": second}
        other = ge.custom_op("QuantBatchMatmulV3", inputs=inputs, outputs=["y"], node_name="v3")
        NetOutput([product, other])
    move_transpose_into_mm(g, GraphState())
    bitcast = g.node("v4").inputs["x2"].node.inputs["x"].node
    assert g.node("v4").attr("transpose_x2") is True and bitcast.inputs["x"] is w
    move_mm_weight_transpose_after_bitcast(g, GraphState())
    assert g.node("v3").inputs["x2"].node.type == "Transpose"


def test_debug_levels_print_graphs_and_steps(monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHAIR_DEBUG", "5")
    torch.compile(lambda x: x.abs() + 1, backend=torchair.get_npu_backend())(torch.randn(3))
    printed = capsys.readouterr().out
    assert "torchair graph_" in printed and "torchair pass apply_rules" in printed
    assert "Abs_0 = ge.Abs(" in printed and "torchair step native Abs+Add Abs -> [3]" in printed


def test_compiling_collects_no_garbage_and_leaves_collection_as_it_was():
    seen = []
    with no_garbage_collection():
        with no_garbage_collection():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
    assert (seen, gc.isenabled()) == ([False, False], True)
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
