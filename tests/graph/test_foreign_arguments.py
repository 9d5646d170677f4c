"""Custom operators as serving engines use them: opaque objects, results that are given, and graphs
that AOTAutograd's cache keeps."""

from __future__ import annotations

import pickle
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase

import torchair
from torchair.cacheable import StoredGraph
from torchair.errors import SerializationError
from torchair.operators import generic
from torchair.runner import observed


class LayerName(OpaqueBase):
    """A value that Dynamo hands to graphs as an argument."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __fx_repr__(self):
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


class Counter(OpaqueBase):
    """An object with a state."""

    def __init__(self):
        self.count = 0


register_opaque_type(LayerName, typ="value", hoist=True)
register_opaque_type(Counter, typ="reference")


@pytest.fixture
def lib():
    made = torch.library.Library("serving", "FRAGMENT")
    yield made
    made._destroy()


def define(lib, schema, kernel, fake):
    lib.define(schema)
    name = schema.partition("(")[0]
    lib.impl(name, kernel, "CPU")
    torch.library.register_fake(f"serving::{name}", fake, lib=lib)
    return getattr(torch.ops.serving, name)


@pytest.fixture
def operators(lib):
    """`count` writes x plus a count into a given result, `scale` multiplies by a name's length."""
    places = []

    def count(x, out, counter):
        counter.count += 1
        out.copy_(x[: len(out)] + counter.count)
        places.append((out.data_ptr(), out.is_contiguous()))

    counter, name = (get_opaque_type_name(kind) for kind in (Counter, LayerName))
    op = define(
        lib, f"count(Tensor x, Tensor(a!) out, {counter} c) -> ()", count, lambda x, out, c: None
    )
    scale = define(
        lib,
        f"scale(Tensor x, {name} name) -> Tensor",
        lambda x, name: x * len(name.value),
        lambda x, name: torch.empty_like(x),
    )
    return op, scale, places


def test_objects_are_those_of_each_call(operators):
    count, scale, _ = operators

    def f(x, counter, name):
        out = torch.empty_like(x)
        count(x * 2, out, counter)
        return scale(scale(out + 1, name), LayerName("abc"))

    run = torch.compile(f, backend="torchair", dynamic=True)
    ours, theirs = Counter(), Counter()
    with torch.no_grad():
        for rows in (4, 5, 6):  # sizes and names differ: one graph serves them all
            x, name = torch.randn(rows, 3), LayerName("a" * rows)
            torch.testing.assert_close(run(x, ours, name), f(x, theirs, name))
        other = Counter()
        run(x, other, name)
    assert (ours.count, theirs.count, other.count) == (3, 3, 1)


def test_a_given_result_is_written_where_it_is_read(operators):
    """The operator writes into planned memory: no copy before, none after."""
    count, _, places = operators

    def f(x, counter):
        out = x.new_empty(8, 16)
        count(x, out.view(4, 32), counter)
        return out.relu() + 1

    seen = []
    with observed(lambda made: seen.append(made.made) or made.runner), torch.no_grad():
        run = torch.compile(f, backend="torchair")
        x, counter = torch.randn(4, 32), Counter()
        run(x, counter)
        torch.testing.assert_close(run(x, counter), (x + 2).relu().view(8, 16) + 1)
    kinds = [step.kind for step in seen[0].session.last_plan().steps]
    assert kinds == ["out", "native"]
    assert places[0] == places[1]  # the arena's, in both calls


def test_a_function_stands_for_an_operator(operators):
    """Compiled graphs call it, eager calls the operator."""
    count, _, _ = operators
    seen = []

    def instead(x, out, counter):
        seen.append(counter)
        out.copy_(x * 3)

    def f(x, counter):
        out = torch.empty_like(x)
        count(x, out, counter)
        return out + 1

    with patch.dict(generic._functions), torch.no_grad():
        generic.call_directly("serving::count", instead)
        x, counter = torch.randn(4, 3), Counter()
        torch.testing.assert_close(torch.compile(f, backend="torchair")(x, counter), x * 3 + 1)
    assert seen == [counter] and counter.count == 0


def test_what_others_read_is_not_overwritten(operators):
    count, _, _ = operators

    def f(x, counter):
        base = x + 1
        out = base.clone()
        count(x, out[2:5], counter)
        return out + base

    run = torch.compile(f, backend="torchair")
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(run(x, Counter()), f(x, Counter()))


def test_the_cache_of_aot_autograd_holds_data():
    def f(x, weight):
        return torch.relu(x @ weight) + 1

    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        run = torch.compile(f, backend="torchair", fullgraph=True)
        made = run.aot_compile(((x, weight), {}))
    torch.testing.assert_close(made(x, weight), f(x, weight))
    data = type(made).serialize(made).serialized_data
    again = type(made).deserialize(data, f.__globals__)
    torch.testing.assert_close(again(x, weight), f(x, weight))


def test_a_stored_graph_is_checked():
    seen = []
    with observed(lambda made: seen.append(StoredGraph.of(made.runner)) or made.runner):
        torch.compile(lambda x: x.sin() + 1, backend="torchair")(torch.ones(3))
    data = seen[0].to_bytes()
    assert StoredGraph.from_bytes(data) == pickle.loads(pickle.dumps(seen[0]))
    (result,) = StoredGraph.from_bytes(data).load().run([torch.ones(3)])
    torch.testing.assert_close(result, torch.ones(3).sin() + 1)
    with pytest.raises(SerializationError, match="damaged"):
        StoredGraph.from_bytes(data[:-1] + b"x")


def test_a_graph_that_data_cannot_hold_bypasses_the_cache():
    """One that is captured: it runs, and the cache counts a bypass."""
    backend = torchair.get_npu_backend(compiler_config=captured())
    cache = torch._functorch.config.patch(force_autograd_cache=True, bundled_autograd_cache=True)
    x = torch.ones(3)
    with cache, torch.no_grad():
        run = torch.compile(lambda x: x.cos() * 2, backend=backend)
        torch.testing.assert_close(run(x), x.cos() * 2)
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 1


def captured():
    config = torchair.CompilerConfig()
    config.mode = "npugraph_ex"
    return config
