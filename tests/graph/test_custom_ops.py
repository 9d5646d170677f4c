"""Operators of users: generic nodes, converters by hand and generated, kernels, updates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import torchair
from torchair import ge
from torchair.convert.automatic import ge_type, generate, rule_text
from torchair.convert.registry import unregister
from torchair.errors import ConversionError, GraphError
from torchair.ge.graph import Graph
from torchair.ge.prototypes import _declared, prototype, unregister_kernel
from torchair.serde import read_graph, render

F = ge.DataType.DT_FLOAT


@pytest.fixture
def lib():
    """A library of torch operators for one test; declared GE types go with it."""
    before = set(_declared)
    library = torch.library.Library("custom_define", "FRAGMENT")
    yield library
    for op_type in set(_declared) - before:
        del _declared[op_type]
        unregister_kernel(op_type)
    library._destroy()


def define(lib, schema, function, fake=None):
    """Define a torch operator; its kernel serves as fake kernel too where none is given."""
    lib.define(schema)
    name = schema.partition("(")[0]
    lib.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"custom_define::{name}", fake or function, lib=lib)
    return getattr(torch.ops.custom_define, name).default


def compiled_with_graphs(fn, dynamic=False, **options):
    """The function in one graph, and the graphs it was converted to."""
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    for name, value in options.items():
        setattr(config.experimental_config, name, value)
    graphs = []

    def backend(gm, inputs):
        from torch._functorch.aot_autograd import aot_module_simplified

        from torchair.backend import boxed

        def compile_one(graph, examples):
            runner = torchair.get_compiler(config)(graph, examples)
            graphs.append(runner.runner.graph)
            return boxed(runner)

        return aot_module_simplified(
            gm, inputs, fw_compiler=compile_one, keep_inference_input_mutations=True
        )

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), graphs


def check(fn, *sizes, dynamic=False, **options):
    """Compare with eager, updates of arguments too; the types in the (only) graph."""
    run, graphs = compiled_with_graphs(fn, dynamic, **options)
    for n in sizes or (4,):
        mine = torch.randn(n, n), torch.randn(n, n)
        theirs = [t.clone() for t in mine]
        with torch.no_grad():
            torch.testing.assert_close(run(*mine), fn(*theirs))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
    (graph,) = graphs
    return [n.type for n in graph.nodes]


# ---- the generic node


def test_schema_kernel_and_fake_are_enough(lib):
    op = define(lib, "twice(Tensor x, int n) -> (Tensor, Tensor)", lambda x, n: (x * n, x + n))

    def fn(x, y):
        a, b = op(x, 3)
        return a + b * y

    assert "TorchCall" in check(fn)
    assert "TorchCall" in check(fn, 4, 6, dynamic=True)


def test_an_operator_without_results_runs(lib):
    seen = []
    op = define(lib, "look(Tensor x) -> ()", lambda x: seen.append(x.sum()), lambda x: None)
    torch.fx.node.has_side_effect(op)

    def fn(x, y):
        op(x)
        return x + y

    check(fn)
    assert len(seen) == 2 and torch.equal(*seen)


def accumulate(x, y, alpha):
    x.add_(y, alpha=alpha)


def declare_accumulate():
    ge.register_operator("Accumulate", inputs=["x", "y"], outputs=["x"], attrs={"alpha": "Float"})


UPDATES = {
    "whole": lambda op: lambda x, y: (op(x, y, 2.0), x * 2)[1:],
    "slice": lambda op: lambda x, y: (op(x[1:3], y[1:3], 2.0), x * 2)[1:],
    "column": lambda op: lambda x, y: (op(x.t()[0], y[1], 2.0), x * 2)[1:],
    "block": lambda op: lambda x, y: (op(x[1:, 1:], y[1:, 1:], 0.5), x * 2)[1:],
    "twice": lambda op: lambda x, y: (op(x, y, 2.0), op(x[:2], y[:2], 3.0), x + y)[2:],
    "computed": lambda op: lambda x, y: update_of_computed(op, x, y),
    "the other": lambda op: lambda x, y: (op(x, y.clone(), 1.0), op(y, x, 1.0), x + y)[2:],
}


def update_of_computed(op, x, y):
    z = (y + 1).t()
    op(z[0], x[0], 2.0)
    return (z,)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_in_place(lib, name, declared, dynamic):
    op = define(lib, "accumulate(Tensor(a!) x, Tensor y, float alpha) -> ()", accumulate)
    if declared:
        declare_accumulate()
    types = check(UPDATES[name](op), *((4, 5) if dynamic else (4,)), dynamic=dynamic)
    assert ("Accumulate" in types, "TorchUpdate" in types) == (declared, not declared)


def test_several_updates_and_results(lib):
    def kernel(y, x, zs, scale=1.0):
        x.add_(y)
        for z in zs:
            z.mul_(scale)
        return y + 1, y * 3

    op = define(
        lib,
        "several(Tensor y, Tensor(a!) x, Tensor(b!)[] zs, *, float scale=2.0) -> (Tensor, Tensor)",
        kernel,
        lambda y, x, zs, scale=1.0: (torch.empty_like(y), torch.empty_like(y)),
    )

    def fn(x, y):
        z = y.exp()
        a, b = op(y.clone(), x, [z, y], scale=4.0)
        return a + z, b

    assert "TorchCall" in check(fn)
    torchair.register_fx_node_ge_converter(op)(
        lambda y, x, zs, *, scale: ge.custom_op(
            "Several",
            inputs={"y": y, "x": x, "zs": zs},
            outputs=["x", ("zs", 2), "a", "b"],
            attrs={"scale": ge.attr.Float(scale)},
        )[2:]
    )

    def ge_kernel(y, x, zs, *, scale):
        x += y
        for z in zs:
            z *= scale
        return y + 1, y * 3

    try:
        with pytest.raises(Exception, match="the operator table has no operator 'Several'"):
            check(fn)
        ge.register_kernel("Several", None, ge_kernel, updates=["x", "zs"])
        assert "Several" in check(fn)
    finally:
        unregister(op)
        unregister_kernel("Several")


def test_a_converter_without_an_output_for_the_update(lib):
    op = define(lib, "accumulate(Tensor(a!) x, Tensor y, float alpha) -> ()", accumulate)
    torchair.register_fx_node_ge_converter(op)(
        lambda x, y, alpha: ge.custom_op("Accumulate", inputs={"x": x, "y": y})
    )
    try:
        assert "TorchUpdate" in check(UPDATES["whole"](op))
    finally:
        unregister(op)


def test_a_converter_of_several_operators_that_update(lib):
    def step(x, y):
        x.add_(y)
        return x * y

    op = define(lib, "twice(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: step(x, step(x, y)))
    ge.register_operator("AddInto", inputs=["x", "y"], outputs=["x", "z"])
    ge.register_kernel("AddInto", None, step, updates=["x"])

    @torchair.register_fx_node_ge_converter(op)
    def convert(x, y):
        x, z = ge.custom_op("AddInto", inputs={"x": x, "y": y}, outputs=["x", "z"])
        return ge.custom_op("AddInto", inputs={"x": x, "y": z}, outputs=["x", "z"])[1]

    try:
        assert check(lambda x, y: op(x, y)).count("AddInto") == 2
    finally:
        unregister(op)


def test_generic_updates_travel_with_a_file(lib):
    op = define(lib, "accumulate(Tensor(a!) x, Tensor y, float alpha) -> ()", accumulate)
    run, graphs = compiled_with_graphs(UPDATES["whole"](op))
    run(torch.ones(2, 2), torch.ones(2, 2))
    (node,) = [n for n in graphs[0].nodes if n.type == "TorchUpdate"]
    assert node.attr("target") == "custom_define::accumulate"
    assert json.loads(node.attr("arguments"))["args"] == [{"tensor": 0}, {"tensor": 1}, 2.0]
    assert not graphs[0].objects


def test_strict_mode_names_the_operator_that_updates(lib):
    op = define(lib, "accumulate(Tensor(a!) x, Tensor y, float alpha) -> ()", accumulate)
    with pytest.raises(Exception, match=r"custom_define\.accumulate\.default ge_converter is not"):
        check(UPDATES["whole"](op), strict_converters=True)


# ---- kernels


def test_a_registered_kernel_runs_in_place(lib):
    seen = []

    def kernel(x, y, *, alpha):
        if x.device.type == "cpu":
            seen.append(x.data_ptr())
        x.add_(y, alpha=alpha)

    op = define(lib, "accumulate(Tensor(a!) x, Tensor y, float alpha) -> ()", accumulate)
    declare_accumulate()
    ge.register_kernel("Accumulate", None, kernel, updates=["x"])
    run, graphs = compiled_with_graphs(lambda x, y: op(x, y, 2.0))
    x, y = torch.ones(3), torch.ones(3)
    run(x, y)
    assert torch.equal(x, torch.full((3,), 3.0)) and seen == [x.data_ptr()]
    assert [n.type for n in graphs[0].nodes if n.type in ("TensorMove", "Assign")] == []


def test_kernels_get_every_kind_of_argument(lib):
    op = define(
        lib,
        "kinds(Tensor x, Tensor? y, Tensor[] zs, int n, int[] dims, ScalarType dtype, str word, "
        "bool? flag=None) -> Tensor",
        lambda x, y, zs, n, dims, dtype, word, flag=None: x.to(dtype) * n,
    )
    got = []

    def kernel(x, y, zs, *, n, dims, dtype, word, flag):
        got.append((y, len(zs), n, dims, dtype, word, flag))
        return x.to(dtype) * n

    ge.register_operator(
        "Kinds",
        inputs=["x", "y?", "zs*"],
        outputs=["out"],
        attrs={
            "n": "Int",
            "dims": "ListInt",
            "dtype": "DataType",
            "word": "Str",
            "flag": ("Bool", True),
        },
    )

    def fn(x, y):
        return op(x, None, [y, x], 3, [1, 0], torch.float64, "w")

    assert "Kinds" in check(fn)
    ge.register_kernel("Kinds", None, kernel)
    check(fn)
    assert got[-1] == (None, 2, 3, [1, 0], torch.float64, "w", True)


def test_a_shape_rule_is_asked(lib):
    op = define(lib, "pairs(Tensor x) -> Tensor", lambda x: x.repeat(2, 1))
    ge.register_operator("Pairs", inputs=["x"], outputs=["y"])
    asked = []

    def shapes(x):
        asked.append((x.device.type, tuple(x.shape)))
        return x.new_empty(2 * x.shape[0], x.shape[1])

    ge.register_kernel(
        "Pairs", shapes, lambda x: torch.from_numpy(x.numpy().repeat(1, 0)).repeat(2, 1)
    )
    assert "Pairs" in check(lambda x, y: op(x) * 2, 3, 5, dynamic=True)
    assert asked and all(device == "meta" for device, _ in asked)


def test_a_function_that_needs_data_gives_dims_with_the_data(lib):
    def kernel(x):
        return x[: int(x.abs().sum() > 0) + 1]

    op = define(lib, "first(Tensor x) -> Tensor", kernel, lambda x: x[:2])
    ge.register_operator("First", inputs=["x"], outputs=["y"])
    ge.register_kernel("First", None, kernel)
    assert "First" in check(lambda x, y: op(x) + 1)


def test_a_kernel_with_too_few_results():
    with Graph("g") as graph:
        x = ge.Data(index=0, dtype=F, shape=[2], placement="CPU")
        results = ge.custom_op("OwnPair", inputs={"x": x}, outputs=["a", "b"])
        ge.NetOutput(list(results))
    ge.register_kernel("OwnPair", None, lambda x: x)
    try:
        from torchair.operators import interpret

        with pytest.raises(ValueError, match=r"OwnPair must return one tensor for each of \['a'"):
            interpret(graph, [torch.ones(2)])
    finally:
        unregister_kernel("OwnPair")


def test_operators_of_the_package_keep_their_meaning():
    with pytest.raises(ValueError, match="Add is an operator of the package"):
        ge.register_kernel("Add", None, torch.sub)
    with pytest.raises(ValueError, match="'Add' is known already"):
        ge.register_operator("Add", inputs=["x"], outputs=["y"])


@pytest.mark.parametrize(
    ("ports", "attrs", "text"),
    [
        (["x-y"], {}, "'x-y' is not a port"),
        (["x"], {"a": "Number"}, "attr type: Number, name: a is not legal"),
    ],
)
def test_declarations_are_checked(ports, attrs, text):
    with pytest.raises(ValueError, match=text):
        ge.register_operator("Wrong", inputs=ports, outputs=["y"], attrs=attrs)


def test_declared_operators_are_read_where_they_are_unknown(lib, tmp_path):
    ge.register_operator("OwnPair", inputs=["x"], outputs=["y"], attrs={"n": "Int"})
    with Graph("g") as graph:
        x = ge.Data(index=0, dtype=F, shape=[2], placement="CPU", node_name="x")
        ge.NetOutput([ge.OwnPair(x, n=3)])
    file = tmp_path / "graph.py"
    file.write_bytes(render(graph, "py"))
    del _declared["OwnPair"]
    node = read_graph(file).node("OwnPair")
    assert node.attr("n") == 3 and node.inputs["x"].node.name == "x"


# ---- custom_op and node names


@pytest.fixture
def values():
    with Graph("g") as graph:
        x = ge.Data(index=0, dtype=F, shape=[2], placement="CPU")
        yield SimpleNamespace(graph=graph, x=x)


def test_positional_form_says_what_is_wrong(values, lib):
    ge.register_operator(
        "OwnForm", inputs=["a", "b?", "c*"], outputs=["y"], attrs={"n": "Int", "t": "DataType"}
    )
    x = values.x
    y = ge.custom_op("OwnForm", x, None, [x, x], 3, torch.int32)
    assert y.node.attr("t") == ge.DataType.DT_INT32 and y.node.inputs["b"] is None
    assert "n" not in ge.custom_op("OwnForm", x, x, [], None, None).node.attrs
    wrong = [
        (("OwnForm", x), IndexError, r"expected 5 args but got 1. Its inputs are \(a, b, c\)"),
        (("OwnForm", 1, None, [], 3, 0), TypeError, "type: required, type must be Tensor."),
        (("OwnForm", x, 1, [], 3, 0), TypeError, "type: optional, type must be Tensor or None."),
        (("OwnForm", x, None, x, 3, 0), TypeError, "type: dynamic, type must be list or tuple."),
        (("OwnForm", x, None, [], "no", 0), ValueError, "attribute 'n' is a Int, got 'no'"),
        (("OwnForm", x, None, [], 3, torch.bits8), RuntimeError, "convert torch type torch.bits8"),
        (("NoSuchType", x), RuntimeError, "No AscendIR NoSuchType was found"),
    ]  # fmt: skip
    for args, error, text in wrong:
        with pytest.raises(error, match=text):
            ge.custom_op(*args)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"inputs": 3}, "Invalid input type:int vs expect one of [None, dict]"),
        (
            {"inputs": {"x": 1}},
            "Invalid input 'x' type:int vs expect one of [None, ge.Tensor, list[ge.Tensor]]",
        ),
        ({"inputs": {"x": [3]}}, "Invalid input 'x'[0] type:int vs expect 'ge.Tensor'"),
        ({"attrs": [1]}, "Invalid attrs type:list vs expect one of [None, dict]"),
        (
            {"attrs": {"n": 1}},
            "Invalid attr 'n' type:int vs expect one of [ge.attr.Bool, ge.attr.DataType, "
            "ge.attr.Float, ge.attr.Int, ge.attr.ListBool, ge.attr.ListDataType, "
            "ge.attr.ListFloat, ge.attr.ListInt, ge.attr.ListListFloat, ge.attr.ListListInt, "
            "ge.attr.ListStr, ge.attr.Str]",
        ),
        ({"outputs": 3}, "Invalid output type:int vs expect one of [list, tuple]"),
        ({"outputs": [3]}, "Invalid output type:int vs expect one of [str, tuple[str, int]]"),
        ({"outputs": [("y",)]}, "Invalid output type:tuple[str] vs expect tuple[str, int]"),
    ],
)
def test_keyword_form_complains_as_the_original(values, kwargs, text):
    with pytest.raises(AssertionError) as caught:
        ge.custom_op("OwnForm", **kwargs)
    assert str(caught.value) == f"{text} for custom op 'OwnForm'."


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"node_name": "  "}, "must not be blank"),
        ({"node_name": "Data"}, "is used already"),
    ],
)
def test_keyword_form_says_what_is_wrong(values, kwargs, text):
    before = len(values.graph)
    with pytest.raises(AssertionError, match=text):
        ge.custom_op("OwnForm", **kwargs)
    assert len(values.graph) == before


def test_a_constant_of_a_value_is_refused(values):
    with pytest.raises(ValueError, match=r"ge.Const takes a Python value"):
        ge.Const(values.x)


# ---- generated converters


def test_names_of_ge_operators(lib):
    for name in ("my_op_test", "my_op_test_functional"):
        op = define(lib, f"{name}(Tensor x) -> Tensor", torch.abs)
        assert ge_type(op) == "MyOpTest"


def test_a_functional_operator_for_one_that_updates(lib):
    op = define(
        lib,
        "my_op_test(Tensor self, Tensor indices, Tensor updates) -> Tensor",
        lambda self, indices, updates: self + updates,
    )
    ge.register_operator("MyOpTest", inputs=["self", "indices", "updates"], outputs=["self"])

    def fn(x, y):
        return op(x, y, y * 2) + x

    types = check(fn)
    assert "MyOpTest" in types and types.index("TensorMove") < types.index("MyOpTest")


MISFITS = {
    "is not an instance of OpOverload and does not support auto-generate converter.": None,
    "this op has scalar input: s, not support": ("(Tensor x, Scalar s) -> Tensor", {}),
    "this op has scalar input: s, not support ": ("(Tensor x, Scalar[] s) -> Tensor", {}),
    "No AscendIR Misfit was found to be registered.": ("(Tensor x) -> Tensor", None),
    r"the number of torch tensor inputs does not match the AscendIR Misfit inputs. torch tensor "
    r"inputs: \['x', 'y'\], AscendIR inputs: \[\('x', 'required'\)\].": (
        "(Tensor x, Tensor y) -> Tensor", {}),
    r"the number of torch non-tensor inputs greater than the AscendIR Misfit attrs. torch non-"
    r"tensor inputs: \['m', 'n'\], AscendIR attrs: \[\('n', 'VT_INT'\)\].": (
        "(Tensor x, int m, int n) -> Tensor", {}),
    "torch outputs count: 2, AscendIR Misfit outputs: 1.": ("(Tensor x) -> (Tensor, Tensor)", {}),
    "torch inplace count: 1, AscendIR inplace count: 0.": ("(Tensor(a!) x) -> ()", {}),
}  # fmt: skip


@pytest.mark.parametrize("text", MISFITS)
def test_why_no_converter_is_generated(lib, text):
    if MISFITS[text] is None:
        target = torch.fx.GraphModule({}, torch.fx.Graph())
    else:
        schema, attrs = MISFITS[text]
        lib.define(f"misfit{schema}")
        target = torch.ops.custom_define.misfit.default
        if attrs is not None:
            ge.register_operator("Misfit", inputs=["x"], outputs=["y"], attrs={"n": "Int"})
    with pytest.raises(ConversionError, match=text.strip()) as caught:
        generate(target)
    assert isinstance(caught.value, RuntimeError)
    assert "custom_define.misfit.default" in str(caught.value) or MISFITS[text] is None


def test_built_in_operators_get_no_generated_converter():
    with pytest.raises(RuntimeError, match="PyTorch built-in ops not support"):
        generate(torch.ops.aten.add.Tensor)


def test_ports_and_attributes_of_unknown_kinds_are_refused(lib):
    with pytest.raises(ValueError, match=r"attr type: VT_NAMED_ATTRS, name: n is not legal, attr"):
        ge.register_operator("OwnKind", inputs=["x"], outputs=[], attrs={"n": "VT_NAMED_ATTRS"})
    with pytest.raises(ValueError, match=r"input name: x, param type: \?\* is not legal, param"):
        ge.register_operator("OwnKind", inputs=["x?*"], outputs=[])
    ge.register_operator("OwnKind", inputs=["x"], outputs=["y"], attrs={"n": "VT_LIST_INT"})
    assert prototype("OwnKind").attrs[0].kind == "ListInt"


def test_a_declared_operator_that_does_not_fit_is_an_error(lib):
    op = define(lib, "misfit(Tensor x, int m, int n) -> Tensor", lambda x, m, n: x * m + n)
    ge.register_operator("Misfit", inputs=["x"], outputs=["y"], attrs={"n": "Int"})
    with pytest.raises(Exception, match="torch non-tensor inputs greater than the AscendIR Misfit"):
        check(lambda x, y: op(x, 2, 3))


def test_a_node_without_meaning_names_the_way_out(lib):
    op = define(lib, "unknown(Tensor x) -> Tensor", torch.abs)
    torchair.register_fx_node_ge_converter(op)(
        lambda x: ge.custom_op("Unknown", inputs={"x": x}, outputs=["y"])
    )
    try:
        with pytest.raises(GraphError, match=r"ge\.register_kernel\('Unknown'"):
            check(lambda x, y: op(x))
    finally:
        unregister(op)


# ---- formulas of dims


def rule_of(op, *args):
    return json.loads(rule_text(op, args, {}))


def test_formulas_of_dims(lib):
    op = define(
        lib,
        "shapes(Tensor x, Tensor? y, int n) -> (Tensor, Tensor)",
        lambda x, y, n: (
            x.new_empty(x.shape[0] * 2 + 1, x.shape[1] // n),
            x.new_empty(x.shape[0] + y.shape[0], dtype=torch.int64),
        ),
    )
    assert rule_of(op, torch.ones(4, 6), torch.ones(5), 3) == {
        "shape": {
            "inputs": [["s0", "s1"], ["s2"]],
            "outputs": [["(1 + (2*s0))", "Floor(Div(s1, 3))"], ["(s0 + s2)"]],
        },
        "dtype": [ge.DataType.DT_FLOAT, ge.DataType.DT_INT64],
    }


def test_nodes_of_users_carry_the_formulas(lib):
    op = define(lib, "twice_as_long(Tensor x) -> Tensor", lambda x: torch.cat([x, x]))
    ge.register_operator("TwiceAsLong", inputs=["x"], outputs=["y"])
    run, graphs = compiled_with_graphs(lambda x: op(x) + 1)
    x = torch.randn(3, 2)
    torch.testing.assert_close(run(x), torch.cat([x, x]) + 1)
    (node,) = [n for n in graphs[0].nodes if n.type == "TwiceAsLong"]
    assert json.loads(node.attr("_inference_rule"))["shape"] == {
        "inputs": [["s0", "s1"]],
        "outputs": [["(2*s0)", "s1"]],
    }


def test_dims_without_a_formula_have_no_rule(lib):
    op = define(
        lib,
        "some(Tensor x) -> Tensor",
        lambda x: x[: x.shape[0] & 6].clone(),
        lambda x: x.new_empty(x.shape[0] & 6),
    )
    with pytest.raises(ValueError, match="has no form in a rule"):
        rule_text(op, (torch.ones(3),), {})
    ge.register_operator("Some", inputs=["x"], outputs=["y"])
    run, graphs = compiled_with_graphs(lambda x: op(x) + 1)
    x = torch.randn(14)
    torch.testing.assert_close(run(x), x[:6] + 1)
    (node,) = [n for n in graphs[0].nodes if n.type == "Some"]
    assert node.attr("_inference_rule") is None


# ---- layouts: operators get what tracing promised

LAYOUTS = {
    "product": lambda op: lambda x, y: op(x @ y.mT),
    "sum": lambda op: lambda x, y: op(x + y.mT),
    "chain": lambda op: lambda x, y: op(torch.softmax((x @ y) * y.mT, -1)) + 1,
    "contiguous": lambda op: lambda x, y: op(x.mT.contiguous()) + op((y * 2).mT.contiguous()),
    "transposed": lambda op: lambda x, y: op((x + y).mT) + op(y.mT),
    "kept": lambda op: lambda x, y: op(y.mT + 1) * 2,
    "part": lambda op: lambda x, y: op((x.mT + y.mT)[1:3]),
    "several": lambda op: lambda x, y: op(op(x.mT * 2) + y.mT.relu()),
}


@pytest.fixture
def reader(lib):
    """An operator that reads memory from begin to end, as C code may, and the strides it saw."""
    seen = []

    def read(x):
        seen.append(x.stride())
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return whole[x.storage_offset() :][: x.numel()].clone().view(x.shape)

    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return define(lib, "read(Tensor x) -> Tensor", read, fake), seen


@pytest.mark.parametrize("mode", ("max-autotune", "reduce-overhead"))
@pytest.mark.parametrize("dynamic", (False, True))
def test_operators_see_the_strides_of_tracing(reader, mode, dynamic):
    op, seen = reader
    config = torchair.CompilerConfig()
    config.mode = mode
    backend = torchair.get_npu_backend(compiler_config=config)
    for name, make in LAYOUTS.items():
        torch._dynamo.reset()
        fn = make(op)
        run = torch.compile(fn, backend=backend, dynamic=dynamic)
        for n in (4, 6) if dynamic else (4, 4):
            x, y = torch.randn(n, n), torch.randn(n, n)
            seen.clear()
            wanted = fn(x, y)
            strides = list(seen)
            torch.testing.assert_close(run(x, y), wanted, msg=lambda m, name=name: f"{name}: {m}")
            assert seen[-len(strides) :] == strides, name


def test_operators_see_channels_last_where_tracing_does(reader):
    op, seen = reader
    run, _ = compiled_with_graphs(lambda x: op(torch.relu(x) * 2) + op(torch.relu(x.contiguous())))
    seen.clear()
    run(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert set(seen) == {(60, 1, 15, 3), (60, 20, 5, 1)}


def test_kernels_of_users_get_contiguous_tensors(lib):
    op = define(lib, "plain(Tensor x) -> Tensor", lambda x: x * 2)
    seen = []

    def kernel(x):
        seen.append(x.is_contiguous())
        return x * 2

    ge.register_operator("Plain", inputs=["x"], outputs=["y"])
    ge.register_kernel("Plain", None, kernel)
    check(lambda x, y: op(x + y.mT) + op(y.mT))
    assert seen[-2:] == [True, True]


def test_dims_that_follow_from_strides():
    def fn(indices, weight, offsets):
        return torch.nn.functional.embedding_bag(indices, weight.t() * 2, offsets, mode="sum")

    run, _ = compiled_with_graphs(fn)
    indices, offsets = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 2])
    for weight in (torch.randn(8, 5), torch.randn(8, 5, requires_grad=True)):
        got = run(indices, weight, offsets)
        torch.testing.assert_close(got, fn(indices, weight, offsets))


def test_attention_by_torch_of_transposed_operands():
    def attend(z):
        v = z @ z.mT  # a native result beside an operand of the same dims, transposed
        return torch.nn.functional.scaled_dot_product_attention(v, v, v)

    run, _ = compiled_with_graphs(attend, dynamic=True)
    for shape in ((2, 2, 31, 9), (3, 2, 17, 17), (3, 2, 17, 17)):
        z = torch.randn(shape)
        torch.testing.assert_close(run(z), attend(z))
