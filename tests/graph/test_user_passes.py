"""Passes of users: how they are called, what is said of a graph they break, and the log."""

from __future__ import annotations

import logging

import pytest
import torch

import torchair

aten = torch.ops.aten
PRE, POST = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


def compiled_with_passes(fn, dynamic=False, mode="max-autotune", **passes):
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.mode = mode
    for name, user in passes.items():
        setattr(config, name, user)
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), config


def find(gm, target):
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node


def fn(x):
    return torch.relu(x + 1) * 2


def test_passes_get_graph_inputs_and_config():
    seen = []

    def user(gm, example_inputs, config):
        seen.append(
            (isinstance(gm, torch.fx.GraphModule), [tuple(x.shape) for x in example_inputs], config)
        )
        return "ignored"

    run, config = compiled_with_passes(fn, **{PRE: user, POST: user})
    x = torch.randn(3)
    torch.testing.assert_close(run(x), fn(x))
    assert seen == [(True, [(3,)], config)] * 2


@pytest.mark.parametrize("name", [PRE, POST])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_pass_changes_the_graph(name, dynamic):
    def user(gm, example_inputs, config):
        node = find(gm, aten.relu.default)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(aten.neg.default, (node.args[0],))
        node.replace_input_with(node.args[0], new)

    run, _ = compiled_with_passes(fn, dynamic, **{name: user})
    for size in (3, 5) if dynamic else (3,):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), torch.relu(-(x + 1)) * 2)


def test_types_of_what_follows_a_change_are_worked_out_anew():
    def user(gm, example_inputs, config):
        node = find(gm, aten.add.Tensor)
        with gm.graph.inserting_after(node):
            wide = gm.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float64})
        find(gm, aten.relu.default).replace_input_with(node, wide)
        last = find(gm, aten.mul.Tensor)
        with gm.graph.inserting_after(last):
            back = gm.graph.call_function(aten._to_copy.default, (last,), {"dtype": torch.float32})
        gm.graph.output_node().replace_input_with(last, back)

    run, _ = compiled_with_passes(fn, **{PRE: user})
    x = torch.randn(3)
    torch.testing.assert_close(run(x), fn(x))


def reads_later(gm):
    first, last = find(gm, aten.add.Tensor), find(gm, aten.mul.Tensor)
    find(gm, aten.relu.default).replace_input_with(first, last)


def no_function(gm):
    find(gm, aten.relu.default).target = "relu"


def fails(gm):
    node = find(gm, aten.relu.default)
    node.target = aten.mm.default
    node.args = (node.args[0], node.args[0])


def other_shape(gm):
    node = find(gm, aten.relu.default)
    node.target = aten.sum.default


def fewer_results(gm):
    gm.graph.output_node().args = ((),)


def erased(gm):
    node = find(gm, aten.relu.default)
    last = find(gm, aten.mul.Tensor)
    args = last.args
    last.args = (last.all_input_nodes[0].args[0], 2)
    gm.graph.erase_node(node)
    last.args = args


BROKEN = {
    reads_later: "reads mul, which is only computed later",
    no_function: "'relu' cannot be called",
    fails: "mm",
    other_shape: r"result 0 is torch.float32\[\] instead of torch.float32\[2, 3\]",
    fewer_results: "it returns 0 values instead of 1",
    erased: "reads relu, which is not in the graph any more",
}


@pytest.mark.parametrize("name", [PRE, POST])
@pytest.mark.parametrize("breaks", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_graph_names_pass_and_node(breaks, name):
    def spoils(gm, example_inputs, config):
        breaks(gm)

    run, _ = compiled_with_passes(fn, **{name: spoils})
    with pytest.raises(Exception, match=BROKEN[breaks]) as caught:
        run(torch.randn(2, 3))
    text = str(caught.value)
    assert f"pass {name} left an invalid graph: " in text and "spoils, " in text
    node = next(line for line in text.splitlines() if line.startswith("  node: "))
    assert "test_user_passes.py" in text and "^" not in node


def test_an_error_of_the_pass_names_it():
    def raises(gm, example_inputs, config):
        raise KeyError("no such node")

    run, _ = compiled_with_passes(fn, **{PRE: raises})
    with pytest.raises(Exception, match="no such node") as caught:
        run(torch.randn(2))
    cause = caught.value
    notes = []
    while cause is not None:
        notes += getattr(cause, "__notes__", [])
        cause = cause.__cause__ or cause.__context__ or getattr(cause, "inner_exception", None)
    assert any(f"raised by {PRE}" in n for n in notes) or f"raised by {PRE}" in str(caught.value)


def test_passes_run_in_capture_mode_too():
    seen = []

    def user(gm, example_inputs, config):
        seen.append(find(gm, aten.relu.default).name)
        find(gm, aten.relu.default).target = aten.abs.default

    with pytest.warns(UserWarning):
        run, _ = compiled_with_passes(fn, mode="reduce-overhead", **{PRE: user})
    x = torch.randn(3)
    torch.testing.assert_close(run(x), torch.abs(x + 1) * 2)
    assert seen == ["relu"]


def test_the_log_tells_what_each_pass_changed():
    def user(gm, example_inputs, config):
        node = find(gm, aten.relu.default)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(aten.abs.default, (node,))
        node.replace_all_uses_with(new, lambda n: n is not new)
        find(gm, aten.add.Tensor).target = aten.sub.Tensor

    texts = []

    class Handler(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler, level = Handler(), torchair.logger.level
    torchair.logger.addHandler(handler)
    torchair.logger.setLevel(logging.DEBUG)
    try:
        compiled_with_passes(fn, **{PRE: user})[0](torch.randn(3))
    finally:
        torchair.logger.removeHandler(handler)
        torchair.logger.setLevel(level)
    (text,) = [t for t in texts if t.startswith(f"After fx graph pass({PRE}) optimization:")]
    lines = text.splitlines()
    assert lines[1].startswith("cost: 0.")
    assert lines[2:] == [
        "before 5 nodes, after 6 nodes",
        "removed nodes: none",
        "added nodes: abs_default",
        "operation kinds:",
        "  name           cnt(before)   cnt(after)   diff",
        "  total                    5            6     +1",
        "  call_function            3            4     +1",
        "  output                   1            1     +0",
        "  placeholder              1            1     +0",
        "targets:",
        "  name              cnt(before)   cnt(after)   diff",
        "  total                       5            6     +1",
        "  aten.abs.default            0            1     +1",
        "  aten.add.Tensor             1            0     -1",
        "  aten.sub.Tensor             0            1     +1",
    ]
    for when in ("before", "after"):
        said = f"[forward] {when} [{PRE}] execution, graph is graph()"
        assert any(t.startswith(said) for t in texts)
