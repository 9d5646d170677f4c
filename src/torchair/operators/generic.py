"""Kernels that are not ours: the generic node, which looks a torch operator up and calls it, and
the operators that users gave a kernel with `ge.register_kernel`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from torchair.errors import GraphError, MissingHostValue
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.prototypes import UserKernel, prototype
from torchair.ge.shapes import is_static
from torchair.operators import core
from torchair.operators.core import DimOrder, Op, Row, TorchKernel, Trait, add_row, all_contiguous
from torchair.operators.opaque import object_of
from torchair.torch_private.dispatch import (
    DisableTorchDispatch,
    HigherOrderOperator,
    OpOverload,
)
from torchair.torch_private.fake import FakeTensorMode
from torchair.torch_private.pytree import tree_flatten, tree_map_only


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
        higher = isinstance(packet, HigherOrderOperator)
        return packet if higher else getattr(packet, overload or "default")
    except AttributeError:
        raise GraphError(f"torch has no operator {name!r}; import the library it is in") from None


_functions: dict[str, Callable[..., Any]] = {}  # by the name of the operator


def call_directly(name: str, function: Callable[..., Any]) -> None:
    """Let generic nodes call a function in the place of the torch operator of that name.

    It must do what the operator does on the device of its arguments. It is called with autograd
    off, and torch's dispatcher is not asked.
    """
    _functions[name] = function


def _callee(node: Node) -> Any:
    """What a generic node calls: the function that stands for its operator, or the operator."""
    name = node.attr("target")
    found = _functions.get(name) or finished(find_target(node))
    places = _RANDOM_STATES.get(name.removesuffix(".default"))
    return found if places is None else _with_state_on_host(found, places)


_RANDOM_STATES = {
    "aten::_scaled_dot_product_efficient_attention_backward": (7, 8),
    "aten::_efficient_attention_backward": (12, 13),
}
"""Gradients of attention that read the state which the forward has drawn with, and where it stands
among their arguments."""


def _with_state_on_host(target: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """These operators read the random state on the host, or on the GPU where they are captured,
    wherever the forward has left it: on the GPU if it was captured itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        captured = args[0].is_cuda and torch.cuda.is_current_stream_capturing()
        place = args[0].device if captured else torch.device("cpu")
        given = list(args)
        with DisableTorchDispatch():  # a rehearsal of a recording refuses to read on the host
            for k in places:
                state = args[k]
                if state.device == place:
                    continue
                if captured:  # a number on the host is part of the key of a recording
                    dims = {"dtype": state.dtype, "device": place}
                    given[k] = torch.full(state.shape, state.item(), **dims)
                else:
                    given[k] = state.cpu()
        return target(*given, **kwargs)

    return call


Read = Callable[[str, int], Any]
"""Gives an argument that is an input of the node: its kind, and which input."""


def _decode(x: Any, get: Read, node: Node) -> Any:
    if isinstance(x, list):
        return [_decode(v, get, node) for v in x]
    if not isinstance(x, dict):
        return x
    ((kind, v),) = x.items()
    if kind in _INPUTS:
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


_INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "scalar": torch.Tensor.item,
    "opaque": object_of,
}
"""How arguments are made of inputs, by their kind."""


@dataclass(frozen=True)
class _Input:
    """An argument that is an input of the node."""

    kind: str
    index: int


def literals(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and named arguments of a generic node, with places in those of its inputs."""
    spec = json.loads(node.attr("arguments"))
    return [_decode(a, _Input, node) for a in spec["args"]], _decode(spec["kwargs"], _Input, node)


class GenericArguments:
    """The arguments of a generic node, decoded once; a call only puts its tensors in."""

    def __init__(self, node: Node) -> None:
        args, kwargs = literals(node)
        self._args = [_reader(a) for a in args]
        self._kwargs = {name: _reader(value) for name, value in kwargs.items()}

    def __call__(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for one call."""
        kwargs = {name: read(tensors) for name, read in self._kwargs.items()}
        return [read(tensors) for read in self._args], kwargs


def _reader(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """A function from the inputs of the node to one argument."""
    if isinstance(tree, _Input):
        make, index = _INPUTS[tree.kind], tree.index
        return itemgetter(index) if tree.kind == "tensor" else lambda t: make(t[index])
    if not any(isinstance(leaf, _Input) for leaf in tree_flatten(tree)[0]):
        return lambda tensors: tree
    return lambda t: tree_map_only(_Input, lambda x: _INPUTS[x.kind](t[x.index]), tree)


def _kernel(op: Op) -> TorchKernel:
    node = op.node
    target, arguments = _callee(node), GenericArguments(node)
    restored, fresh = _layout_restorer(node), _gives_fresh(target)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors = restored(tensors)
        args, kwargs = arguments(tensors)
        results = _leaves(target(*args, **kwargs))
        return list(results) if fresh else [_own(r, tensors) for r in results]

    return run


def _update_kernel(op: Op) -> TorchKernel:
    """A torch operator that changes its first tensor, which is the result."""
    target, arguments = _callee(op.node), GenericArguments(op.node)
    first, *_ = layouts(op.node)
    restored = _layout_restorer(op.node, skip=1)

    def change(out: torch.Tensor, others: list[torch.Tensor]) -> None:
        own = out if first is None else first.arranged(out)
        args, kwargs = arguments([own, *restored(others)])
        target(*args, **kwargs)
        if own is not out:
            out.copy_(own)

    return _writes_anew(change) if op.attr("fresh") else core.writes_first(change)


def _writes_anew(change: Callable[..., Any]) -> TorchKernel:
    """A kernel from one that updates a tensor whose content is not defined: nothing is copied."""

    def run(x: torch.Tensor, *rest: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.empty_like(x) if out is None else out
        change(made, *rest)
        return made

    return run


def _layout_restorer(node: Node, skip: int = 0) -> Callable[[list[Any]], list[Any]]:
    """Brings inputs into the layouts that tracing saw, all but the first ones."""
    orders = layouts(node)[skip:]
    noted = json.loads(node.attr("arguments")).get("layouts") or []
    gaps = [n.get("strides") if n else None for n in noted][skip:] or [None] * len(orders)
    ranked = [v.shape != () for v in node.values()[skip:]]  # numbers and handles have one layout
    given = enumerate(zip(orders, gaps, ranked, strict=True))
    checked = [(k, order, gap) for k, (order, gap, varies) in given if order is not None and varies]

    def restore_layouts(tensors: list[Any]) -> list[Any]:
        made = tensors
        for k, order, strides in checked:
            t = _with_strides(order.arranged(tensors[k]), strides)
            if t is not tensors[k]:
                made = list(tensors) if made is tensors else made
                made[k] = t
        return made

    return restore_layouts if checked else lambda tensors: tensors


def _with_strides(t: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """A tensor with these strides: itself, or a copy. Plans have no memory with gaps."""
    if strides is None or t.stride() == tuple(strides):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def layouts(node: Node) -> list[DimOrder | None]:
    """How tracing saw the tensors of a generic node in memory, which its operator may rely on;
    contiguous where nothing is noted, None where it is not known."""
    noted = json.loads(node.attr("arguments")).get("layouts")
    if noted is None:
        return all_contiguous(node)
    return [None if n is None else DimOrder(tuple(n["dims"]), n["dense"]) for n in noted]


def finished(target: Any) -> Any:
    """A collective that waits for its results: planned buffers that it reads are reused soon."""
    if not is_collective(str(target)):
        return target
    wait = torch.ops._c10d_functional.wait_tensor
    return lambda *args, **kwargs: [wait(t) for t in _leaves(target(*args, **kwargs))]


def is_collective(target: str) -> bool:
    """Whether a torch operator talks to other processes, by its name."""
    return target.startswith(("_c10d_functional", "c10d_functional", "npu_define"))


def _gives_fresh(target: Any) -> bool:
    """Whether results are known to be in memory of their own: torch's schemas are true of that."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    inexact = torch.Tag.maybe_aliasing_or_mutating in target.tags
    return not inexact and all(r.alias_info is None for r in target._schema.returns)


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

    if _opaque_inputs(node):  # their fake kernels would ask for objects, which calls have
        return declared
    orders = [order or DimOrder() for order in layouts(node)]

    def get(kind: str, i: int) -> Any:
        if kind == "tensor":
            dims: Any = facts[i].shape
            dtype = ge_to_torch(facts[i].dtype)
            return torch.empty_strided(dims, orders[i].strides(dims), dtype=dtype, device="meta")
        if facts[i].content is None:
            raise MissingHostValue(f"a size argument of {node} is not known")
        return facts[i].content

    spec = json.loads(node.attr("arguments"))
    given = [_decode(spec[part], get, node) for part in ("args", "kwargs")]
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), given)
    # Without a tensor among its arguments an operator would run: it must not know the difference.
    pretend = nullcontext() if facts else FakeTensorMode()
    try:
        with pretend:
            results = list(_leaves(find_target(node)(*args, **kwargs)))
    except Exception as e:  # data-dependent or without meta kernel: dims come with the data
        raise MissingHostValue(f"{node}: {e}") from e
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _inputs_of_kind(node: Node, wanted: str) -> list[Value]:
    found: list[Value] = []

    def get(kind: str, i: int) -> None:
        if kind == wanted:
            found.append(node.values()[i])

    spec = json.loads(node.attr("arguments"))
    _decode([spec["args"], spec["kwargs"]], get, node)
    return found


def _scalar_inputs(node: Node) -> list[Value]:
    """Inputs that the operator takes as Python numbers."""
    return _inputs_of_kind(node, "scalar")


def _opaque_inputs(node: Node) -> list[Value]:
    """Inputs that are handles of objects."""
    return _inputs_of_kind(node, "opaque")


add_row("TorchCall", _rule, _kernel, Trait.RANDOM, also_host=_scalar_inputs, layouts=layouts)
add_row(
    "TorchUpdate",
    core.like_first,
    _update_kernel,
    Trait.RANDOM | Trait.WRITES_FIRST,
    out=True,
    also_host=_scalar_inputs,
    layouts=layouts,
)


# ---- rows of the operators that users gave a kernel with `ge.register_kernel` ----

_made: dict[str, tuple[UserKernel, Row]] = {}


@core.rows_of_users
def _row(kernel: UserKernel) -> Row:
    known = _made.get(kernel.type)
    if known is None or known[0] is not kernel:
        known = _made[kernel.type] = (kernel, _new_row(kernel))
    return known[1]


def _new_row(kernel: UserKernel) -> Row:
    # What a function does besides its results is not known: RANDOM is neither folded nor merged.
    traits, make, in_place = Trait.RANDOM, _function, _works_in_place(kernel)
    if in_place:
        traits, make = traits | Trait.WRITES_FIRST, _update
    return Row(
        kernel.type,
        lambda op: _facts(op, kernel),
        lambda op: make(op, kernel),
        traits,
        out=in_place,
        layouts=all_contiguous,
    )


def _works_in_place(kernel: UserKernel) -> bool:
    """Whether all that the operator does is to update its first input."""
    proto = prototype(kernel.type)
    if proto is None or not proto.inputs:
        return False
    first = (proto.inputs[0].name,)
    return kernel.updates == first == tuple(p.name for p in proto.outputs)


def _attributes(op: Op) -> dict[str, Any]:
    """Attributes by name, with defaults; types of tensors as torch knows them."""
    proto = op.node.prototype
    names = [n for n in op.node.attrs if not n.startswith("_")]
    kinds = {n: op.node.attrs[n].kind for n in names}
    for spec in proto.attrs if proto is not None else ():
        kinds.setdefault(spec.name, spec.kind)
    return {n: _plain(kind, op.attr(n)) for n, kind in kinds.items()}


def _plain(kind: str, value: Any) -> Any:
    if kind == "DataType" and value is not None:
        return ge_to_torch(value)
    return [ge_to_torch(v) for v in value] if kind == "ListDataType" and value else value


# ---- dims and types of the results ----


def _facts(op: Op, kernel: UserKernel) -> list[Fact]:
    """Ask the rule, or the function, on tensors without data; symbols stay as tracing saw them."""
    slots = op.node.inputs.items()
    facts = [op.list(p) if isinstance(slot, list) else op.get(p) for p, slot in slots]
    if not all(is_static(f.shape) for f in _flat(facts)):
        return [Fact(v.dtype, v.shape) for v in op.node.outputs]
    tensors = _each(facts, _meta)
    try:
        results = _call(op, kernel, tensors, kernel.shape_rule or kernel.function)
    except Exception as e:
        if kernel.shape_rule is not None:
            raise
        raise MissingHostValue(f"dims of {op.node} come with the data: {e}") from e
    return [Fact(torch_to_ge(r.dtype), tuple(r.shape)) for r in results]


def _meta(fact: Fact) -> torch.Tensor:
    dims: Any = fact.shape
    return torch.empty(dims, dtype=ge_to_torch(fact.dtype), device="meta")


def _each(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Lists with their members changed, those that are None aside."""
    if _is_list(tree):
        return [_each(member, change) for member in tree]
    return None if tree is None else change(tree)


# ---- running ----


def _function(op: Op, kernel: UserKernel) -> TorchKernel:
    return lambda *given: _call(op, kernel, _contiguous(_owned(op, kernel, given)), kernel.function)


def _update(op: Op, kernel: UserKernel) -> TorchKernel:
    def update(first: torch.Tensor, *others: Any) -> None:
        whole = first.contiguous()
        _call(op, kernel, [whole, *_contiguous(others)], kernel.function)
        if whole is not first:
            first.copy_(whole)

    return core.writes_first(update)


def _contiguous(tensors: Sequence[Any]) -> Any:
    """A kernel may be C code that reads memory from begin to end."""
    return _each(tensors, torch.Tensor.contiguous)


def _owned(op: Op, kernel: UserKernel, tensors: Sequence[Any]) -> list[Any]:
    """Arguments with copies of what the function changes: values of a graph do not change."""
    ports = zip(op.node.inputs, tensors, strict=True)
    return [_each(t, torch.clone) if p in kernel.updates else t for p, t in ports]


def _call(
    op: Op, kernel: UserKernel, tensors: Sequence[Any], function: Callable[..., Any]
) -> list[torch.Tensor]:
    """All outputs of the node: updated inputs in their place, the others from the function."""
    others = iter(_flat(function(*tensors, **_attributes(op))))
    updated = _updated(op, kernel, tensors)
    names = [v.port for v in op.node.outputs]
    results: list[Any] = [updated[n] if n in updated else next(others, None) for n in names]
    missing = [n for n, r in zip(names, results, strict=True) if not isinstance(r, torch.Tensor)]
    if missing or next(others, None) is not None:
        returned = [n for n in names if n not in updated]
        raise ValueError(
            f"the function of {kernel.type} must return one tensor for each of {returned}"
        )
    return results


def _updated(op: Op, kernel: UserKernel, tensors: Sequence[Any]) -> dict[str, Any]:
    """Inputs that the function changed, by the names of their outputs."""
    found: dict[str, Any] = {}
    for port, t in zip(op.node.inputs, tensors, strict=True):
        if port in kernel.updates:
            found |= {f"{port}{i}": x for i, x in enumerate(t)} if _is_list(t) else {port: t}
    return found


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _flat(returned: Any) -> list[Any]:
    if _is_list(returned):
        return [leaf for member in returned for leaf in _flat(member)]
    return [] if returned is None else [returned]
