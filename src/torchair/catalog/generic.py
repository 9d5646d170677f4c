"""Meaning of the generic node: look the torch operator up and call it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Order, Trait, add_row, all_contiguous
from torchair.errors import GraphError, MissingHostValue
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import is_static


def find_target(node: Node) -> Any:
    """The torch operator a generic node calls."""
    name: str = node.attr("target")
    if name.startswith("object:"):
        found = node.graph.objects.get(name)
        if found is None:
            raise GraphError(f"{node} calls a Python object that does not travel with a file")
        return found
    return _overload(name)


def _overload(name: str) -> Any:
    """The operator of that name as it is now: a library may have been defined anew."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
        higher = isinstance(packet, torch._ops.HigherOrderOperator)
        return packet if higher else getattr(packet, overload or "default")
    except AttributeError:
        raise GraphError(f"torch has no operator {name!r}; import the library it is in") from None


def _decode(x: Any, get: Callable[[str, int], Any], node: Node) -> Any:
    if isinstance(x, list):
        return [_decode(v, get, node) for v in x]
    if not isinstance(x, dict):
        return x
    ((kind, v),) = x.items()
    if kind in ("tensor", "scalar"):
        return get(kind, v)
    if kind == "tuple":
        return tuple(_decode(e, get, node) for e in v)
    if kind == "dict":
        return {k: _decode(e, get, node) for k, e in v}
    if kind == "complex":
        return complex(*v)
    if kind == "torch":
        return getattr(torch, v)
    if kind == "device":
        return torch.device(v)
    if kind == "op":
        return _overload(v)
    if kind == "object":
        return node.graph.objects[v]
    raise GraphError(f"{node} has an argument of unknown kind {kind!r}")


def _kernel(op: Op) -> Kernel:
    node = op.node
    target = finished(find_target(node))
    spec = json.loads(node.attr("arguments"))
    orders = layouts(node)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        given = zip(tensors, orders, strict=True)
        tensors = [t if order is None else order.settled(t) for t, order in given]

        def get(kind: str, i: int) -> Any:
            return tensors[i].item() if kind == "scalar" else tensors[i]

        kwargs = _decode(spec["kwargs"], get, node)
        results = _leaves(target(*_decode(spec["args"], get, node), **kwargs))
        return [_own(r, tensors) for r in results]

    return run


def layouts(node: Node) -> list[Order | None]:
    """How tracing saw the tensors of a generic node in memory, which its operator may rely on;
    contiguous where nothing is noted, None where it is not known."""
    noted = json.loads(node.attr("arguments")).get("layouts")
    if noted is None:
        return all_contiguous(node)
    return [None if n is None else Order(tuple(n["dims"]), n["dense"]) for n in noted]


def finished(target: Any) -> Any:
    """A collective that waits for its results: planned buffers that it reads are reused soon."""
    if not is_collective(str(target)):
        return target
    wait = torch.ops._c10d_functional.wait_tensor
    return lambda *args, **kwargs: [wait(t) for t in _leaves(target(*args, **kwargs))]


def is_collective(target: str) -> bool:
    """Whether a torch operator talks to other processes, by its name."""
    return target.startswith(("_c10d_functional", "c10d_functional", "npu_define"))


def _own(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """A result in memory of its own: view operators hand out their input's."""
    place = result.untyped_storage().data_ptr()
    shared = any(t.untyped_storage().data_ptr() == place for t in inputs) if place else False
    return result.clone() if shared else result


def _leaves(result: Any) -> Iterator[torch.Tensor]:
    """Results as a flat list of tensors: a number is a 0-d tensor, None an empty one, so that
    every result of the operator keeps its place."""
    if isinstance(result, (list, tuple)):
        for member in result:
            yield from _leaves(member)
    elif isinstance(result, torch.Tensor):
        yield result
    else:
        yield torch.empty(0) if result is None else torch.tensor(result)


def _rule(op: Op) -> list[Fact]:
    """What tracing saw, where sizes are those of then; else ask the operator's own meta kernel.
    Unknown dims when an input's are unknown."""
    node = op.node
    facts = op.list("x")
    declared = [Fact(v.dtype, v.shape) for v in node.outputs]
    if not all(is_static(f.shape) for f in facts):
        return declared
    traced = all(f.shape == v.shape for f, v in zip(facts, node.values(), strict=True))
    if traced and all(is_static(f.shape) for f in declared):
        return declared

    orders = [order or Order() for order in layouts(node)]

    def get(kind: str, i: int) -> Any:
        if kind == "tensor":
            dims: Any = facts[i].shape
            dtype = ge_to_torch(facts[i].dtype)
            return torch.empty_strided(dims, orders[i].strides(dims), dtype=dtype, device="meta")
        if facts[i].content is None:
            raise MissingHostValue(f"a size argument of {node} is not known")
        return facts[i].content

    spec = json.loads(node.attr("arguments"))
    args = _on_meta(_decode(spec["args"], get, node))
    kwargs = _on_meta(_decode(spec["kwargs"], get, node))
    try:
        results = list(_leaves(find_target(node)(*args, **kwargs)))
    except Exception as e:  # data-dependent or without meta kernel: dims come with the data
        raise MissingHostValue(f"{node}: {e}") from e
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    if isinstance(x, dict):
        return {k: _on_meta(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_on_meta(v) for v in x)
    return x


def _scalar_inputs(node: Node) -> list[Value]:
    """Inputs that the operator takes as Python numbers."""
    found: list[Value] = []

    def get(kind: str, i: int) -> None:
        if kind == "scalar":
            found.append(node.values()[i])

    spec = json.loads(node.attr("arguments"))
    _decode([spec["args"], spec["kwargs"]], get, node)
    return found


add_row(
    "TorchCall", _rule, _kernel, Trait.RANDOM, also_host=_scalar_inputs, layouts=layouts
)  # fmt: skip
