"""What passes know of a node's value from its fake result, and calls and sizes that are added to a
graph.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from typing import Any

import torch
from torch import fx

from torchair.fallbacks import Fallback, note
from torchair.fx.forms import tensors_in, written
from torchair.ge.shapes import Dim, from_torch
from torchair.log import logger
from torchair.passes import NO_CONTEXT, call_pass
from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload
from torchair.torch_private.fake import FakeTensor, FakeTensorMode

aten = torch.ops.aten
_UNKNOWN = object()


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake result of a node that gives one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the memory of a fake tensor, as long as that tensor lives."""
    return tensor.untyped_storage()._cdata


def dims(sizes: Sequence[Any]) -> tuple[Dim, ...]:
    """Sizes or strides that can be compared without guards."""
    return tuple(from_torch(d) for d in sizes)


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call takes, each as often as it is taken."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to. What cannot be known counts as written."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    target = node.target
    if isinstance(target, OpOverload):
        return [a for a in written(target, node.args, node.kwargs) if isinstance(a, fx.Node)]
    if isinstance(target, HigherOrderOperator):
        return [] if target.name().startswith("auto_functionalized") else arguments_of(node)
    return [] if node.op == "call_function" else arguments_of(node)


_ABOUT_SIZES = (
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    torch.ops.air.keep.default,
)


def reads_nothing(node: fx.Node) -> bool:
    """Whether a call looks at its tensors without touching what they hold: views, sizes."""
    if node.target is operator.getitem or node.target in _ABOUT_SIZES:
        return True
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    made = {storage_of(t) for t in tensors_in(node.meta.get("val"))}
    given = {storage_of(t) for a in node.all_input_nodes for t in tensors_in(a.meta.get("val"))}
    return bool(made) and made <= given


def device_of(graph: fx.Graph) -> torch.device | None:
    """The accelerator that a graph computes on, None for the CPU."""
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            if tensor.device.type not in ("cpu", "meta"):
                return tensor.device
    return None


# ---- new calls


def fake_result(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode | None = None,
) -> Any:
    """What a call gives on the fake results of its arguments, in their mode by default."""
    plain, named = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    if mode is None:
        values = tensors_in([*plain, *named.values()])
        mode = next((t.fake_mode for t in values if isinstance(t, FakeTensor)), FakeTensorMode())
    with mode:
        return target(*plain, **named)


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
    value: Any = _UNKNOWN,
) -> fx.Node:
    """A call at the insertion point of a graph, from the same line of the model as `like`. Its
    result is `value`, or is found with fake tensors."""
    made = graph.call_function(target, tuple(args), dict(kwargs or {}))
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "stream_label"):
        if key in like.meta:
            made.meta[key] = like.meta[key]
    made.meta["val"] = value if value is not _UNKNOWN else fake_result(target, args, kwargs or {})
    return made


# ---- results that tell which nodes share memory


def ensure_values(gm: fx.GraphModule) -> None:
    """See to it that every node has a fake result, and that views share memory in those. A graph
    that was traced with real tensors has results without that."""
    if all(_describes_results(node, gm) for node in gm.graph.nodes):
        return
    given = [tensor_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    modes = {t.fake_mode for t in given if isinstance(t, FakeTensor)}
    mode = modes.pop() if len(modes) == 1 else FakeTensorMode()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = _in_mode(node.meta.get("val"), mode)
        elif node.op == "get_attr":
            node.meta["val"] = _in_mode(_attribute(node, gm), mode)
        elif node.op == "call_function":
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs, mode)


def _describes_results(node: fx.Node, gm: fx.GraphModule) -> bool:
    if node.op == "get_attr":
        return "val" in node.meta or not isinstance(_attribute(node, gm), torch.Tensor)
    if node.op != "call_function":
        return True
    schema = getattr(node.target, "_schema", None)
    if "val" not in node.meta:
        return schema is not None and not schema.returns
    if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
        return True
    base, results = tensor_of(node.args[0] if node.args else None), tensors_in(node.meta["val"])
    return base is None or all(storage_of(t) == storage_of(base) for t in results)


def _attribute(node: fx.Node, gm: fx.GraphModule) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _in_mode(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, FakeTensor):
        return mode.from_tensor(value)
    if value.fake_mode is mode:
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


# ---- sizes as arguments of new calls: numbers, or nodes that compute them from inputs


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "Pow": operator.pow, "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": torch.sym_max, "Min": torch.sym_min,
}  # fmt: skip


def dim_with(expr: Any, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """The first tensor among nodes that has a symbol as a size, and which dim that is."""
    for node in nodes:
        tensor = tensor_of(node)
        for dim, size in enumerate(tensor.shape if tensor is not None else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == expr:
                return node, dim
    return None


class SizeNodes:
    """Makes nodes for symbolic sizes, each once, right behind the placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[Any, Any] = {}
        self._placeholders = graph.find_nodes(op="placeholder")
        self._last: Any = self._placeholders[-1] if self._placeholders else None
        for node in self._placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                self._nodes.setdefault(value.node.expr, node)

    def __repr__(self) -> str:
        return str({str(expr): str(node) for expr, node in self._nodes.items()})

    def of(self, size: Any) -> int | fx.Node | None:
        """A size as an argument, None where the inputs do not tell it."""
        known = from_torch(size)
        return known if isinstance(known, int) else self._argument(known.expr)

    def all_of(self, sizes: Any) -> list[int | fx.Node] | None:
        """Several sizes, None if one of them is not known."""
        found = [self.of(size) for size in sizes]
        return None if any(size is None for size in found) else found  # type: ignore[return-value]

    def _argument(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr not in self._nodes:
            self._nodes[expr] = self._symbol(expr) if expr.is_Symbol else self._computed(expr)
        return self._nodes[expr]

    def _symbol(self, expr: Any) -> fx.Node | None:
        found = dim_with(expr, self._placeholders)
        return None if found is None else self._call(torch.ops.aten.sym_size.int, *found)

    def _computed(self, expr: Any) -> fx.Node | None:
        function = _OPERATORS.get(type(expr).__name__)
        parts = [self._argument(part) for part in expr.args]
        if function is None or any(part is None for part in parts):
            return None
        return reduce(lambda a, b: self._call(function, a, b), parts)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with self._graph.inserting_after(self._last):
            value = function(*values)
            self._last = add_call(self._graph, function, args, like=self._last, value=value)
        return self._last


# ---- a node that a pass leaves, and a graph that an analysis cannot handle: it is said so


class NotApplicable(Exception):
    """Says why a node stays as it is."""


def cautious(fn: Callable[..., None]) -> Callable[..., None]:
    """A pass that is left out, with a warning, where a graph has something it cannot handle; what
    it had changed by then is undone."""

    @wraps(fn)
    def run(gm: fx.GraphModule, context: Any = NO_CONTEXT) -> None:
        logger.debug("processing %s_pass", fn.__name__.removesuffix("_pass"))
        before = copy.deepcopy(gm.graph)
        try:
            call_pass(fn, gm, context)
        except NotImplementedError:
            raise
        except Exception as error:
            gm.graph = before
            note(Fallback.FX_PASS, f"the pass {fn.__name__} is left out", error)

    return run
