"""Computing in place: when it is done, when not, and that nobody can tell."""

import copy

import pytest
import torch

from capture_programs import (
    apply,
    assert_same_effect,
    checked,
    expect,
    targets,
    text,
    traced,
    written,
    x34,
)
from torchair import CompilerConfig, ops
from torchair.fx import forms
from torchair.fx.passes import CAPTURE_PASSES
from torchair.passes import FxContext
from torchair.scope import npu_stream_switch

aten = torch.ops.aten
A, B = "reinplace_inplaceable_ops_pass", "reinplace_input_mutated_ops"


# ---- intermediate values


def _chain(x):
    a = x * 2
    b = a.exp()
    return (b + 1).relu()


def test_values_take_the_memory_of_dead_ones():
    gm = checked(_chain, x34(), passes=[A])
    expect(
        gm,
        """
        mul = mul.Tensor(x_1, 2)
        exp = exp_.default(mul)
        add = add_.Tensor(exp, 1)
        relu = relu_.default(add)
        return relu
        """,
    )


def test_updates_of_views_are_done_in_place():
    def fn(x):
        a = x * 2
        a[1].add_(1)
        a.t()[0, 1:].zero_()
        return a

    gm = checked(fn, x34(), passes=["eliminate_dead_code", A])
    expect(
        gm,
        """
        mul = mul.Tensor(x_1, 2)
        select = select.int(mul, 0, 1)
        add = add_.Tensor(select, 1)
        t_1 = t.default(mul)
        select_3 = select.int(t_1, 0, 0)
        slice_2 = slice.Tensor(select_3, 0, 1, 9223372036854775807)
        zero = zero_.default(slice_2)
        t_2 = t.default(mul)
        t_3 = t.default(t_2)
        return t_3
        """,
    )


STAY = {
    "argument": lambda x, y: x + 1,
    "view of an argument": lambda x, y: x[1:].t() + 1,
    "used later": lambda x, y: (lambda a: (a.exp(), a.sum()))(aten.mm(x, y.t())),
    "view used later": lambda x, y: (lambda a: (a.exp(), a[1:].sum()))(aten.mm(x, y.t())),
    "returned too": lambda x, y: (lambda a: (a, a.exp()))(aten.mm(x, y.t())),
    "view returned too": lambda x, y: (lambda a: (a[0], a.exp()))(aten.mm(x, y.t())),
    "smaller than the result": lambda x, y: aten.sum.dim_IntList(x, [0]) + y,
    "other shape": lambda x, y: aten.sum.dim_IntList(x, [0]) + y[:1],
    "other type": lambda x, y: aten.mm(x, y.t()) > 1,
    "promoted": lambda x, y: aten.argmax(x, 0) + y[0],
    "argument twice": lambda x, y: (lambda a: a * a)(aten.mm(x, y.t())),
    "with a view of itself": lambda x, y: (lambda a: a * a[0])(aten.mm(x, y.t())),
    "elements share memory": lambda x, y: aten.sum.dim_IntList(x, [0]).expand(3, 4) + 1,
    "part of something returned": lambda x, y: aten.mm(x, y.t())[0] + 1,
    "constant": lambda x, y: CONSTANT + x,
    "used as bits": lambda x, y: (lambda a: (a.exp(), a.view(torch.int32).sum()))(
        aten.mm(x, y.t())
    ),
    "result seen as bits": lambda x, y: aten.mm(x, y.t()).exp().view(torch.int32),
    "other strides": lambda x, y: aten.mm(x, y.t())[:, :2] + 1,
}
CONSTANT = torch.ones(3, 4)


@pytest.mark.parametrize("name", STAY)
def test_values_that_others_need_stay(name):
    args = [x34(), x34()]
    gm = checked(STAY[name], *args, passes=["eliminate_dead_code", A])
    assert written(gm) == [], text(gm)


def test_an_update_through_reshape_is_copied_back():
    """Real strides can differ from traced ones, and then `reshape` copies."""

    def fn(x):
        a = x * 2
        a.view(-1)[1:3].add_(1)
        return a

    gm = traced(fn, x34())
    before = copy.deepcopy(gm)
    apply(gm, "eliminate_dead_code", A)
    assert "aten.add.Tensor" in targets(gm) and "aten.slice_scatter.default" not in targets(gm)
    assert_same_effect(before, gm, [x34()])
    other = torch.randn(4, 3).t()  # as if tracing had been wrong
    assert torch.equal(gm(other), (other * 2 + torch.tensor([0, 1, 1, 0] + [0] * 8).view(3, 4)))


def test_arguments_are_never_changed():
    x = x34()
    gm = apply(traced(lambda x: (x.view(-1)[1:] + 1, x.t().exp()), x), A)
    kept = x.clone()
    gm(x)
    assert torch.equal(x, kept) and written(gm) == []


def test_graph_of_real_tensors_is_understood():
    def fn(x):
        a = x * 2
        return a.exp(), a.view(-1)[3:] + 1

    x = x34()
    gm = traced(fn, x, mode="real")
    before = copy.deepcopy(gm)
    assert_same_effect(before, apply(gm, A), [x])


@pytest.mark.usefixtures("fallbacks_allowed")
def test_a_pass_that_fails_is_left_out():
    gm = traced(_chain, x34())
    before = text(gm)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    by_name = {p.name: p.fn for p in CAPTURE_PASSES}
    with pytest.warns(UserWarning, match=f"the pass {A} is left out"):
        by_name[A](gm, FxContext())
    assert text(gm) == before


# ---- inputs of the graph


def test_arguments_are_updated_in_place():
    def fn(x, cache, index, row):
        cache.index_put_((index,), row)
        x.t()[1:].mul_(2)
        return cache.sum(0) + x[0]

    args = [x34(), torch.zeros(5, 4), torch.tensor([1, 3]), torch.randn(2, 4)]
    gm = checked(fn, *args, passes=["eliminate_dead_code", A, B])
    expect(
        gm,
        """
        index_put = index_put_.default(cache_1, [index_1], row_1)
        t = t.default(x_1)
        slice_1 = slice.Tensor(t, 0, 1, 9223372036854775807)
        mul = mul_.Tensor(slice_1, 2)
        t_1 = t.default(x_1)
        t_2 = t.default(t_1)
        sum_1 = sum.dim_IntList(index_put, [0])
        select_1 = select.int(t_2, 0, 0)
        add = add_.Tensor(sum_1, select_1)
        return add
        """,
    )


def test_several_updates_of_one_argument():
    def fn(x):
        x[0].add_(1)
        y = x * 2
        x[1].mul_(2)
        x.t()[0].zero_()
        return y

    gm = checked(fn, x34(), passes=["eliminate_dead_code", A, B])
    assert written(gm) == ["aten.add_.Tensor", "aten.mul_.Tensor", "aten.zero_.default"]


def _old_value_needed(x, y):
    new = x * 2
    z = aten.mm(x, y.t())
    x.copy_(new)
    return z


def _part_of_old_value_needed(x, y):
    part = x[:2]
    new = x * 2
    z = aten.mm(part, y.t())
    x.copy_(new)
    return z


def _value_is_returned_too(x, y):
    new = x * 2
    x.copy_(new)
    return new


def _view_of_value_is_returned_too(x, y):
    new = x * 2
    x.copy_(new)
    return new[0]


def _other_argument(x, y):
    x.copy_(y * 2)


def _both_from_one(x, y):
    new = x * 2
    x.copy_(new)
    y.copy_(new)


def _value_outlives_its_copy(x, y):
    value = x[0] * 3
    x[0].copy_(value)
    x.zero_()
    return value.sum()


COPIES = {  # how many copies to arguments are left
    "old value needed": (_old_value_needed, 1),
    "part of old value needed": (_part_of_old_value_needed, 1),
    "value is returned too": (_value_is_returned_too, 1),
    "view of value is returned too": (_view_of_value_is_returned_too, 1),
    "other argument": (_other_argument, 1),
    "both from one": (_both_from_one, 1),
    "other type": (lambda x, y: (x.copy_((x * 2).double()), None)[1], 1),
    "value outlives its copy": (_value_outlives_its_copy, 0),
    "through a transpose": (lambda x, y: x.t().add_(y.t()).sum(), 0),
    "by a view with another shape": (lambda x, y: x.view(2, 6).mul_(2).sum(), 0),
    "other part needed": (lambda x, y: (lambda part: (x[1:].mul_(2), part.sum())[1])(x[:1]), 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_to_arguments(name):
    fn, left = COPIES[name]
    gm = checked(fn, x34(), x34(), passes=["eliminate_dead_code", A, B])
    plain = [n for n in gm.graph.nodes if n.target is aten.copy_.default]
    plain = [n for n in plain if n.args[0].op == "placeholder"]
    assert len(plain) == left, text(gm)


def test_returning_an_updated_argument():
    gm = aot_graph(lambda x: x.mul_(2), x34())
    before = copy.deepcopy(gm)
    assert_same_effect(before, apply(gm), [x34()])
    expect(
        gm,
        """
        mul = mul_.Tensor(arg0_1, 2)
        return (arg0_1,)
        """,
    )


def _stream_and_update(order):
    def fn(x):
        with npu_stream_switch("1"):
            y = x.exp()
            mark = ops.record()
        if order:
            ops.wait([mark])
        x.add_(1)
        return x * 2, y

    return fn


@pytest.mark.parametrize(
    ("mode", "ordered", "in_place"),
    [
        ("reduce-overhead", True, False),
        ("npugraph_ex", True, True),
        ("npugraph_ex", False, False),
    ],
)
def test_several_streams(mode, ordered, in_place):
    config = CompilerConfig()
    config.mode = mode
    gm = traced(_stream_and_update(ordered), x34())
    before = copy.deepcopy(gm)
    apply(gm, config=config)
    assert_same_effect(before, gm, [x34()])
    assert ("aten.copy_.default" not in targets(gm)) == in_place


# ---- operators that write to several arguments


@pytest.fixture
def library():
    """Operators in a library of their own, with kernels and fake kernels."""
    lib = torch.library.Library("capture_tests", "FRAGMENT")

    def add_to(x, y):
        x.add_(y)

    def two(x, y, z, *, scale=1.0):
        x.add_(z)
        y.mul_(scale)
        return z + x

    def many(xs, y):
        for x in xs:
            x.add_(y)
        return y + 1, y + 2

    for schema, kernel, fake in (
        ("add_to(Tensor(a!)? x, Tensor y) -> ()", add_to, lambda x, y: None),
        (
            "two(Tensor(a!) x, Tensor(b!) y, Tensor z, *, float scale=1.0) -> Tensor",
            two,
            lambda x, y, z, *, scale=1.0: torch.empty_like(z),
        ),
        (
            "many(Tensor(a!)[] xs, Tensor y) -> (Tensor, Tensor)",
            many,
            lambda xs, y: (torch.empty_like(y), torch.empty_like(y)),
        ),
    ):
        lib.define(schema)
        name = schema.partition("(")[0]
        lib.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"capture_tests::{name}", fake, lib=lib)
    yield torch.ops.capture_tests
    lib._destroy()


def aot_graph(fn, *args, dynamic=False):
    """The inference graph of AOTAutograd, with copies to arguments in it."""
    from torch._functorch.aot_autograd import aot_module_simplified

    found = []

    def keep(gm, _):
        found.append(gm)
        return gm

    def backend(gm, example_inputs):
        return aot_module_simplified(
            gm, example_inputs, fw_compiler=keep, keep_inference_input_mutations=True
        )

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*map(torch.clone, args))
    return found[0]


def test_functionalized_operators_write_to_arguments(library):
    def fn(x, y):
        library.add_to(x[1:], y)
        z = y + 1
        library.add_to(z, y)
        w = z.clone()
        return library.two(x[0], w, y, scale=2.0), z, w

    args = [torch.randn(3, 2), torch.randn(2)]
    gm = aot_graph(fn, *args)
    before = copy.deepcopy(gm)
    apply(gm, A, B, "decompose_auto_functionalized")
    assert_same_effect(before, gm, args)
    expect(
        gm,
        """
        slice_tensor = slice.Tensor(arg0_1, 0, 1, 3)
        add_to_default = add_to.default(slice_tensor, arg1_1)
        add = add.Tensor(arg1_1, 1)
        add_to_default_1 = add_to.default(add, arg1_1)
        clone = clone.default(add)
        as_strided_default = as_strided.default(arg0_1, (2,), (1,), 0)
        two_default = two.default(as_strided_default, clone, arg1_1, scale=2.0)
        return (two_default, add, clone)
        """,
    )


def test_functionalized_operators_copy_what_is_needed(library):
    def fn(x, y):
        z = x.t()[1:].exp()
        old = z.sum(0)
        library.add_to(z.t()[:, 1], y)
        library.add_to(None, y)
        a, b = library.many([x[0], x[1:], z[0]], y)
        return a, b, old, z * old

    args = [torch.randn(3, 3), torch.randn(3)]
    for passes in ([A, B, "decompose_auto_functionalized"], ["decompose_auto_functionalized"]):
        gm = aot_graph(fn, *args)
        before = copy.deepcopy(gm)
        apply(gm, *passes)
        assert not any("auto_functionalized" in t for t in targets(gm))
        assert_same_effect(before, gm, args)


def test_functionalized_operators_with_dynamic_sizes(library):
    def fn(x, y):
        library.add_to(x.t()[1], y)
        z = (y * 2)[1:]
        library.add_to(z, z + 1)
        return z

    gm = aot_graph(fn, torch.randn(5, 4), torch.randn(5), dynamic=True)
    apply(gm)
    assert "aten.clone.default" not in targets(gm)
    plain = aot_graph(fn, torch.randn(5, 4), torch.randn(5), dynamic=True)
    apply(plain, "decompose_auto_functionalized")
    for graph in (gm, plain):
        x, y = torch.randn(7, 3), torch.randn(7)
        wanted_x = x.clone()
        wanted = fn(wanted_x, y)
        torch.testing.assert_close([graph(7, 3, x, y)[0], x], [wanted, wanted_x])


@pytest.fixture
def both(monkeypatch):
    """An operator that updates two arguments, and its functional twin."""
    lib = torch.library.Library("capture_tests", "FRAGMENT")

    def pure(x, y, gamma):
        return gamma * x, x + y, y * 2

    def in_place(x, y, gamma):
        out, new, other = pure(x, y, gamma)
        x.copy_(new)
        y.copy_(other)
        return out

    lib.define("both_functional(Tensor x, Tensor y, Tensor g) -> (Tensor, Tensor, Tensor)")
    lib.define("both(Tensor(a!) x, Tensor(b!) y, Tensor g) -> Tensor")
    lib.impl("both_functional", pure, "CompositeExplicitAutograd")
    lib.impl("both", in_place, "CompositeExplicitAutograd")
    monkeypatch.setitem(forms.MANY_IN_PLACE, ("capture_tests", "both"), (0, 1))
    yield torch.ops.capture_tests.both_functional
    lib._destroy()


def test_operator_with_two_updates_is_done_in_place(both):
    def fn(x, y, gamma):
        a, b = x + 1, y + 1
        out, new, other = both(a, b, gamma)
        out2, new2, other2 = both(x, y, gamma)
        x.copy_(new2)
        y.copy_(other2)
        return aten.mm(out, new.t()), other.sum(), out2

    gm = checked(fn, x34(), x34(), x34(), passes=["eliminate_dead_code", A, B])
    assert targets(gm).count("capture_tests.both.default") == 2
    assert "aten.copy_.default" not in targets(gm)


def test_operator_with_two_updates_stays_if_one_is_not_wanted(both):
    def fn(x, y, gamma):
        out, new, other = both(x, y, gamma)
        x.copy_(new)
        return out, other

    gm = checked(fn, x34(), x34(), x34(), passes=["eliminate_dead_code", A, B])
    assert "capture_tests.both_functional.default" in targets(gm)
