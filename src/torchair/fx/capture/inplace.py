"""The passes that compute in place, on intermediate values and on inputs of the graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from torchair.fx.capture.caution import cautious
from torchair.fx.capture.forms import ManyInPlace, many_in_place_forms
from torchair.fx.capture.functionalized import kind_of, refine, result_at
from torchair.fx.capture.reinplace import Reinplacer, Stays
from torchair.fx.capture.values import ensure_values

_Forms = dict[Any, ManyInPlace]


@cautious
def reinplace_inplaceable_ops_pass(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Compute values in the memory of values that nobody reads any more."""
    ensure_values(gm)
    work = Reinplacer(gm.graph, inputs=False, others=True, by_events=_trusts_events(config))
    work.run(partial(_many, many_in_place_forms()))


@cautious
def reinplace_input_mutated_ops(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Compute the new value of an input in place, instead of copying it there in the end."""
    updates = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not updates and not any(kind_of(node) for node in gm.graph.nodes):
        return
    ensure_values(gm)
    work = Reinplacer(gm.graph, inputs=True, others=False, by_events=_trusts_events(config))
    work.run(partial(_functionalized_or_many, many_in_place_forms()))


def _trusts_events(config: Any) -> bool:
    """The mode npugraph_ex lets several streams use a value that is overwritten, in order."""
    return str(getattr(getattr(config, "mode", None), "value", None)) == "npugraph_ex"


def _functionalized_or_many(forms: _Forms, work: Reinplacer, node: fx.Node) -> None:
    if kind_of(node) is not None:
        refine(work, node)
    else:
        _many(forms, work, node)


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
        raise Stays("a copy belongs to two of its results")
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
