"""The passes that compute in place, on intermediate values and on inputs of the graph; and
`auto_functionalized` calls -> the operators themselves, on copies or, where it makes
no difference, on the arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from torchair.configs.options import NPUGRAPH_EX
from torchair.fx.forms import ManyInPlace, is_written, many_in_place_forms
from torchair.fx.passes import values
from torchair.fx.passes.memory import place_of
from torchair.fx.passes.reinplace import Reinplacer
from torchair.log import logger
from torchair.passes import NO_CONTEXT, FxContext
from torchair.torch_private import dynamo
from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload
from torchair.torch_private.tensors import clone_preserve_strides

aten = torch.ops.aten
_FIRST, _SECOND = "auto_functionalized", "auto_functionalized_v2"
_KEPT = "only_clone_these_tensors"


def kind_of(node: fx.Node) -> str | None:
    """Which of the two forms a node is; None if it is neither, or calls no plain operator."""
    target = node.target
    if not isinstance(target, HigherOrderOperator) or not node.args:
        return None
    name = target.name()
    plain = isinstance(node.args[0], OpOverload)
    return name if plain and name in (_FIRST, _SECOND) else None


def _written_arguments(node: fx.Node) -> list[str]:
    return [a.name for a in _schema(node).arguments if is_written(a)]


def _schema(node: fx.Node) -> Any:
    return node.args[0]._schema  # type: ignore[union-attr]


def _bases(node: fx.Node) -> dict[Any, Any]:
    """The tensors that are written to, by the name or number that tells them apart."""
    if kind_of(node) == _SECOND:
        return dict(enumerate(node.kwargs.get("_all_bases", ())))  # type: ignore[arg-type]
    return {name: node.kwargs.get(name) for name in _written_arguments(node)}


def _makes_its_outputs(node: fx.Node) -> bool:
    """Whether the operator is an `out=` form: what it writes to is not given but made."""
    return any(f"_{name}_dtype" in node.kwargs for name in _written_arguments(node))


def result_at(node: fx.Node, index: int) -> fx.Node | None:
    """The node that takes a result of a call with several; one node, if there are more."""
    takers = sorted(u for u in node.users if u.target is operator.getitem and u.args[1] == index)
    for other in takers[1:]:
        other.replace_all_uses_with(takers[0])
        node.graph.erase_node(other)
    return takers[0] if takers else None


# ---- which arguments need no copy


def refine(work: Reinplacer, node: fx.Node) -> None:
    """Find the arguments that the operator may write to as they are."""
    if kind_of(node) is None or _makes_its_outputs(node):
        return
    first = max(1, len(_schema(node).returns))
    copied: list[Any] = []
    taken: set[int] = set()
    for position, (key, base) in enumerate(_bases(node).items()):
        try:
            if not isinstance(base, fx.Node) or not taken.isdisjoint(work.memory.of(base)):
                raise values.NotApplicable(
                    "it is no single tensor, or shares memory with another argument"
                )
            result = result_at(node, first + position)
            storages = work.memory.of(base)
            work.take(work.check(node, base, result, anywhere=True), base, result)
            taken |= storages
            if result is not None:
                work.replace(result, base)
        except values.NotApplicable as reason:
            logger.debug("reinplace failed: %s gets a copy of %s: %s", node, base, reason)
            copied.append(key)
            _count_copy(node, base)
    node.meta[_KEPT] = copied


def _count_copy(node: fx.Node, base: Any) -> None:
    """Note a copy where torch notes its own."""
    if dynamo.ReinplaceCounters is None or dynamo.ReInplaceTrigger is None:
        return
    first = kind_of(node) == _FIRST
    kinds = dynamo.ReInplaceTrigger
    trigger = kinds.AUTO_FUNC_V1 if first else kinds.AUTO_FUNC_V2
    tensors = values.tensors_in(base.meta.get("val")) if isinstance(base, fx.Node) else []
    dynamo.ReinplaceCounters.add_missed_opportunities(trigger, 1)
    sizes = [t.numel() * t.element_size() for t in tensors]
    dynamo.ReinplaceCounters.add_missed_bytes(trigger, sum(n for n in sizes if isinstance(n, int)))


# ---- the operators themselves


def decompose_auto_functionalized(gm: fx.GraphModule) -> None:
    """Call the operator that writes, after copies of the arguments that must keep their content."""
    for node in list(gm.graph.nodes):
        if kind_of(node) is not None:
            with gm.graph.inserting_before(node):
                _Decomposition(gm.graph, node).run()


class _Decomposition:
    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph = graph
        self._node = node
        self._schema = _schema(node)

    def run(self) -> None:
        """Replace the node."""
        made = _makes_its_outputs(self._node)
        bases = {} if made else self._copies()
        kwargs = {a.name: self._argument(a, bases, made) for a in self._schema.arguments}
        plain = [a.name for a in self._schema.arguments if not a.kwarg_only]
        args = [kwargs.pop(name) for name in plain]  # where people write them
        op: Any = self._node.args[0]
        call = self._add(op, *args, **kwargs)
        if made:
            self._node.replace_all_uses_with(call)
        else:
            self._hand_out(call, bases)
        self._graph.erase_node(self._node)

    def _add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return values.add_call(self._graph, target, args, kwargs, like=self._node)

    def _copies(self) -> dict[Any, Any]:
        bases = _bases(self._node)
        copied = self._node.meta.get(_KEPT, list(bases))
        return {k: self._copy(b) if k in copied else b for k, b in bases.items()}

    def _copy(self, base: Any) -> Any:
        """A copy with the strides and the offset of the original, which views count on."""
        if isinstance(base, (list, tuple)):
            return [self._copy(b) for b in base]
        value = values.tensor_of(base)
        if value is None:
            return base
        offset, steps = place_of(value).area
        dense = offset == 0 and (not steps or (len(steps) == 1 and steps[0][1] == 1))
        return self._add(aten.clone.default if dense else clone_preserve_strides, base)

    def _argument(self, argument: Any, bases: dict[Any, Any], made: bool) -> Any:
        given, name = self._node.kwargs, argument.name
        if not is_written(argument):
            return given.get(name, argument.default_value)
        if made:
            size, stride = given[f"_{name}_size"], given[f"_{name}_stride"]
            options = {"dtype": given[f"_{name}_dtype"], "device": given[f"_{name}_device"]}
            return self._add(aten.empty_strided.default, size, stride, **options)
        if kind_of(self._node) == _FIRST:
            return bases[name]
        if f"_{name}_length" not in given:
            return self._view(f"_{name}", bases)
        length: Any = given[f"_{name}_length"]
        return length and [self._view(f"_{name}_{i}", bases) for i in range(length)]

    def _view(self, prefix: str, bases: dict[Any, Any]) -> Any:
        """An argument, as a view of the tensor that it is in."""
        given: Any = self._node.kwargs
        index = given[f"{prefix}_base_index"]
        if index is None:
            return None
        base = bases[index]
        if f"{prefix}_alias" in given:
            return self._add(aten.alias.default, base)
        if f"{prefix}_storage_offset" in given:
            layout = [given[f"{prefix}_{part}"] for part in ("size", "stride", "storage_offset")]
            return self._add(aten.as_strided.default, base, *layout)
        if f"{prefix}_slice_dim" in given:
            bounds = [given[f"{prefix}_slice_{part}"] for part in ("dim", "start", "end")]
            return self._add(aten.slice.Tensor, base, *bounds)
        return base

    def _hand_out(self, call: fx.Node, bases: dict[Any, Any]) -> None:
        """Readers of results and of written tensors get them from the operator and the copies."""
        returns = len(self._schema.returns)
        first = max(1, returns)
        written = list(bases.values())
        for user in list(self._node.users):
            index: Any = user.args[1]
            if index < first and returns != 1:
                user.args = (call, index)
            else:
                user.replace_all_uses_with(written[index - first] if index >= first else call)
                self._graph.erase_node(user)


_Forms = dict[Any, ManyInPlace]


@values.cautious
def reinplace_inplaceable_ops_pass(gm: fx.GraphModule, context: FxContext = NO_CONTEXT) -> None:
    """Compute values in the memory of values that nothing reads any more."""
    values.ensure_values(gm)
    work = Reinplacer(gm.graph, inputs=False, others=True, by_events=_trusts_events(context))
    work.run(partial(_many, many_in_place_forms()))


@values.cautious
def reinplace_input_mutated_ops(gm: fx.GraphModule, context: FxContext = NO_CONTEXT) -> None:
    """Compute the new value of an input in place, instead of copying it there in the end."""
    updates = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not updates and not any(kind_of(node) for node in gm.graph.nodes):
        return
    values.ensure_values(gm)
    work = Reinplacer(gm.graph, inputs=True, others=False, by_events=_trusts_events(context))
    many = partial(_many, many_in_place_forms())
    work.run(lambda work, node: refine(work, node) if kind_of(node) else many(work, node))


def _trusts_events(context: FxContext) -> bool:
    """The mode npugraph_ex lets several streams use a value that is overwritten, in order."""
    return str(getattr(getattr(context.config, "mode", None), "value", None)) == NPUGRAPH_EX


def _many(forms: _Forms, work: Reinplacer, node: fx.Node) -> None:
    """An operator that updates several arguments: in place if that works for all of them."""
    form = forms.get(node.target)
    if form is None:
        return
    written = [node.args[position] for position in form.written]
    results = [result_at(node, form.first_new + i) for i in range(len(written))]
    pairs = list(zip(written, results, strict=True))
    plans = [work.check(node, into, result) for into, result in pairs]
    if len({copy for copies in plans for copy in copies}) != sum(map(len, plans)):
        raise values.NotApplicable("a copy belongs to two of its results")
    for (into, result), copies in zip(pairs, plans, strict=True):
        work.take(copies, into, result)
        if result is not None:
            work.replace(result, into)
    _retarget(work, node, form)


def _retarget(work: Reinplacer, node: fx.Node, form: ManyInPlace) -> None:
    node.target = form.op
    node.meta["val"] = node.meta["val"][: form.first_new]
    if form.first_new == 1:
        node.meta["val"] = node.meta["val"][0]
        alone = result_at(node, 0)
        if alone is not None:
            work.replace(alone, node)
