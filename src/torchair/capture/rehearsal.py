"""Graphs as something that a device records, from FX or in the engine. One is run once before it is
recorded: that loads libraries, and finds what no recording can hold while everything is still in
order. Knows graphs and operators, no device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchair.capture.base import Forward
from torchair.codegen.cuda.run import Launches, keeping_scratch
from torchair.codegen.program import BadIndex
from torchair.engine.plan.records import extent
from torchair.engine.run.memory import PlaceMemory
from torchair.engine.run.native import StepError, explain
from torchair.errors import CaptureError
from torchair.fx.forms import written
from torchair.fx.source import fx_text, origin_of
from torchair.ge.graph import Origin
from torchair.operators.purity import draws
from torchair.ops.purity import is_pure
from torchair.ops.streams import scopes_closed
from torchair.torch_private import pytree
from torchair.torch_private.dispatch import OpOverload, TorchDispatchMode

if TYPE_CHECKING:
    from torchair.devices.base import GraphCall

_ATEN = torch.ops.aten
_INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
_COPIES = frozenset({"_to_copy", "copy", "copy_", "device_put"})
_SIZES = (_ATEN.sym_size.int, _ATEN.sym_stride.int, _ATEN.sym_numel.default)


class Refusal(Exception):
    """An operator that cannot be part of a recording: why, and what the user can do."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class GraphWalk:
    """A graph as a function that knows at which of its nodes it is.

    `prepare` computes what a graph computes on the host from constants and sizes alone: a recording
    holds what happens on the device, so for a recording those values are constants.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.graph = graph_of(forward)
        self.node: fx.Node | None = None  # where it is, or was last
        self._steps = None if self.graph is None else NodeByNode(self.graph, self)
        self._host = () if self.graph is None else tuple(host_nodes(self.graph.graph))
        self._prepared: dict[fx.Node, Any] = {}

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        with scopes_closed():
            if self._steps is None:
                return self._forward(*args)
            try:
                return self._steps.run(*args, initial_env=dict(self._prepared))
            finally:
                self._steps.forget()

    def prepare(self, args: Sequence[Any]) -> None:
        """Compute the host part for the numbers among the arguments."""
        if self._steps is None or not self._host:
            return
        assert self.graph is not None
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        steps = self._steps
        steps.env = dict(zip(placeholders, args, strict=True))
        for node in self._host:
            steps.env[node] = steps.run_node(node)
        self._prepared = {node: steps.env[node] for node in self._host}
        steps.forget()

    def constants(self) -> list[torch.Tensor]:
        """Tensors that the graph holds, or that were prepared for it."""
        if self.graph is None:
            return []
        names = [str(n.target) for n in self.graph.graph.find_nodes(op="get_attr")]
        values = [*(attrgetter(name)(self.graph) for name in names), *self._prepared.values()]
        return [v for v in values if isinstance(v, torch.Tensor)]

    def error(self, name: str, cause: Exception) -> CaptureError:
        """What is to be raised for a failure: it names the node and the line of the model."""
        node, hint = self.node, getattr(cause, "hint", _HINT)
        text = None if node is None else fx_text(node)
        return _not_captured(name, cause, text, None if node is None else origin_of(node), hint)


def _not_captured(
    name: str, cause: Exception, node: str | None, origin: Origin | None, hint: str | None
) -> CaptureError:
    lines = str(cause).strip().splitlines()
    traceback.clear_frames(cause.__traceback__)  # they hold memory of the device
    return CaptureError(
        f"{name} cannot be captured: {lines[0] if lines else type(cause).__name__}",
        node=node,
        source=None if origin is None else origin.line,
        hint=hint,
    )


_HINT = "leave this part of the model out of torch.compile, so that the rest is captured"


class NodeByNode(fx.Interpreter):
    """Runs a graph node by node; `position.node` is where it is."""

    def __init__(self, graph: fx.GraphModule, position: Any) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._position = position

    def run_node(self, n: fx.Node) -> Any:
        """Run one."""
        self._position.node = n
        return super().run_node(n)

    def forget(self) -> None:
        """Hold neither arguments nor results."""
        self.env, self.args_iter = {}, iter(())


def graph_of(forward: Forward) -> fx.GraphModule | None:
    """The FX graph behind a function, if there is one."""
    owner = forward if isinstance(forward, fx.GraphModule) else getattr(forward, "__self__", None)
    return owner if isinstance(owner, fx.GraphModule) else None


def host_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes whose values the host knows without the device: made from constants and numbers, and
    either on the host or copied from there."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if not isinstance(node.meta.get("val"), torch.Tensor):
                known.add(node)
            continue
        computed = set(node.all_input_nodes) <= known and _is_of_host(node)
        size = node.target in _SIZES and node.all_input_nodes[0].op == "placeholder"
        if node.op == "get_attr" or size or computed:
            known.add(node)
            yield node


def _is_of_host(node: fx.Node) -> bool:
    """Whether an operator on known values gives one."""
    stays = _on_host(node.meta.get("val")) or _is_copy_to_device(node)
    return stays and _is_pure(node) and not _is_written(node)


def _is_pure(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or value is None:
        return False
    known = isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor)
    return known and is_pure(node.target)


def _on_host(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(
        not isinstance(v, torch.Tensor) or v.device.type == "cpu" for v in leaves
    )


def _is_copy_to_device(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    copies = isinstance(node.target, OpOverload) and _name(node.target) in _COPIES
    return copies and isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _name(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


def _is_written(node: fx.Node) -> bool:
    return any(
        isinstance(user.target, OpOverload)
        and any(w is node for w in written(user.target, user.args, user.kwargs))
        for user in node.users
    )


class Rehearsal(TorchDispatchMode):
    """Runs operators eagerly, refuses those that a recording cannot hold, and keeps what arguments
    held before the graph updated them, so that its run leaves no effect."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not traced: a start from a cache need not import Dynamo for that answer

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()
        self._arguments: dict[int, list[torch.Tensor]] = {}
        for tensor in (a for a in args if isinstance(a, torch.Tensor)):
            self._arguments.setdefault(_memory_of(tensor), []).append(tensor)
        self._arguments.pop(0, None)  # empty ones
        self._before: dict[int, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            self._check(func, args, kwargs)
            self.keep(written(func, args, kwargs))
        else:
            self.keep(pytree.tree_leaves((args, kwargs)))  # it does not say what it updates
        return func(*args, **kwargs)

    def keep(self, values: Iterable[Any]) -> None:
        """Remember what arguments hold that are about to be updated."""
        for tensor in values:
            memory = _memory_of(tensor) if isinstance(tensor, torch.Tensor) else 0
            if memory in self._arguments and memory not in self._before:
                self._before[memory] = [t.detach().clone() for t in self._arguments[memory]]

    def restore(self) -> None:
        """Give updated arguments back what they held."""
        for memory, values in self._before.items():
            for tensor, value in zip(self._arguments[memory], values, strict=True):
                tensor.data.copy_(value)
        self._before.clear()

    def _check(self, op: OpOverload, args: Any, kwargs: Any) -> None:
        if op.name().startswith("air::print"):
            raise Refusal("prints are made on the host", "take npu_print out of the model")
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_host = [t for t in tensors if t.device.type == "cpu"]
        if any(t.dim() and _memory_of(t) in self._arguments for t in on_host):  # numbers are keys
            raise Refusal(
                f"{op} reads an argument that is on the CPU, and replays would read the value of "
                "the first call again",
                "pass that argument on the device, or as a Python number",
            )
        if _changes_sides(op, args, kwargs):
            raise Refusal(f"{op} copies between host and device", "keep the value on the device")
        if len(on_host) < len(tensors) and _asks_device(op, args, kwargs):
            raise Refusal(
                f"{op} needs to know on the host what the device computes",
                "use an operator whose result has a fixed size, and torch.where for decisions",
            )


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _changes_sides(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a copy has the host on one side alone."""
    if _name(op) not in _COPIES:
        return False
    if _name(op) == "_to_copy":
        target = kwargs.get("device")
    else:
        target = args[1].device if isinstance(args[1], torch.Tensor) else args[1]
    if target is None:
        return False
    return (torch.device(target).type == "cpu") != (args[0].device.type == "cpu")


def size_follows_data(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether data decide how large a result is."""
    if op is _ATEN.index.Tensor:
        return _has_mask(args[1])
    if op is _ATEN.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in op.tags


def _has_mask(indices: Iterable[Any]) -> bool:
    """Whether one of the tensors that choose elements is a mask: how many it chooses is data."""
    masks = (torch.bool, torch.uint8)
    return any(isinstance(t, torch.Tensor) and t.dtype in masks for t in indices)


def _asks_device(op: OpOverload, args: Any, kwargs: Any) -> bool:
    if _name(op) in _INDEXING:
        return _has_mask(args[1])
    return torch.Tag.data_dependent_output in op.tags or size_follows_data(op, args, kwargs)


class EngineWalk:
    """The same interface as a `GraphWalk`.

    Everything that a run allocates is in the pool of the recording, the arena included, so graphs
    for other keys use the same memory. What stays outside (constants, packed weights, the words in
    which kernels note bad indices) is held by the recording.
    """

    def __init__(self, graph: GraphCall) -> None:
        self._graph = graph
        self._launches: list[Launches] = []
        self._constants: list[torch.Tensor] = []
        self.fresh: dict[int, int] = {}
        """Bytes of the results that a run makes, by the slot of the plan."""

    def __call__(self, args: Sequence[Any], place: PlaceMemory | None = None) -> Sequence[Any]:
        """Run it; `place` gives memory for results, as far as it has any."""
        self._launches, self._constants = [], []  # memory of an earlier run may be used again
        with keeping_scratch():
            results, program = self._graph.once(args, place)
        packed = [x for code in program.plan.natives for x in code.packed.values()]
        self._launches = [x for x in program.parts if isinstance(x, Launches)]
        self._constants = [*program.plan.constants.values(), *packed]
        return results

    def prepare(self, args: Sequence[Any]) -> None:
        """Make the plan: it holds what the host computes, and planning is no part of a run."""
        made = [r for r in self._graph.prepare(args).allocations if r.kind == "fresh"]
        itemsize = {r.slot: r.meta.dtype.itemsize for r in made}
        self.fresh = {
            r.slot: extent(r.meta.shape, r.meta.stride()) * itemsize[r.slot] for r in made
        }

    @property
    def updated(self) -> list[int]:
        """Arguments that a run updates."""
        return self._graph.updated

    @property
    def draws(self) -> bool:
        """Whether operators of the graph take numbers from torch's generator."""
        return any(draws(node) for node in self._graph.graph.nodes)

    def constants(self) -> list[torch.Tensor]:
        """Tensors that the program reads and that only it keeps alive."""
        scratch = [x.scratch for x in self._launches if x.scratch is not None]
        return [*self._constants, *scratch, *(x.faults for x in self._launches)]

    def faults(self) -> list[torch.Tensor]:
        """Words that tell of bad indices; all are zero where `checks` find nothing."""
        return [x.faults for x in self._launches if len(x.faults)]

    def checks(self) -> list[Callable[[Sequence[Any]], None]]:
        """What is to be asked before a replay: whether an earlier one met a bad index."""
        launches = [x for x in self._launches if len(x.faults)]

        def check(args: Sequence[Any]) -> None:
            try:
                for x in launches:
                    x.check()
            except BadIndex as e:
                raise explain(e.step, e) from e

        return [check] if launches else []

    def error(self, name: str, cause: Exception) -> CaptureError:
        """What is to be raised for a failure."""
        if isinstance(cause, CaptureError):
            return cause
        origin = cause.step.node.origin if isinstance(cause, StepError) else None
        node = getattr(cause, "node", None) if origin is None else origin.fx
        hint = getattr(cause.__cause__, "hint", None) or getattr(cause, "hint", None)
        return _not_captured(name, cause, node, origin, hint)
