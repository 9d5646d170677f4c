"""The check of one form of a graph: is each value what its FX node makes of the values before it?

So an error is found where it is made, and what follows from it is no error. Nodes that the form has
no value for, as those inside of a kernel, are computed on the way, in their own types and in
float64.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchair.verification.judge import Difference, difference, is_explained, leaves
from torchair.verification.watching import Randomness, SeenRun
from torchair.verification.wide import WideGraph, run_shaken, widened


@dataclass(frozen=True)
class Wrong:
    """The first value that is wrong."""

    node: fx.Node  # that computes it
    difference: Difference
    what: str  # "", "result 2" or "argument 1"
    region: tuple[fx.Node, ...]  # nodes between it and the values before it
    inputs: tuple[tuple[str, Any], ...]  # those values, by name


class _Found(Exception):
    def __init__(self, wrong: Wrong) -> None:
        super().__init__(wrong.node.name)
        self.wrong = wrong


class LocalCheck(WideGraph):
    """Runs an FX graph over the values of one of its forms."""

    def __init__(self, gm: fx.GraphModule, seen: SeenRun) -> None:
        super().__init__(gm)
        self._seen = seen
        self._known: dict[fx.Node, Any] = {}  # nodes whose value is the form's, or an argument

    def first_wrong(self, args: Sequence[Any], start: Randomness) -> Wrong | None:
        """The first value that is wrong, None if all are right."""
        try:
            with torch.no_grad(), start.again():
                results = self.run(*args)
                self._check_results(results)
                self._check_arguments(args)
        except _Found as found:
            return found.wrong
        return None

    def run_node(self, n: fx.Node) -> Any:
        """A node over the values before it; its own value is put in the place of the result."""
        made = super().run_node(n)
        if n.op != "call_function":
            if n.op == "placeholder":
                updated = isinstance(made, Tensor) and any(map(_writes, n.users))
                self._known[n] = made.clone() if updated else made  # as it was before
            return made
        truths = list(leaves(self.wide[n])) if n in self.wide else list(leaves(made))
        members: list[Any] = []
        for i, (eager, truth) in enumerate(zip(leaves(made), truths, strict=True)):
            value = self._seen.values.get((n.name, i))
            if value is None or not isinstance(eager, Tensor):
                members.append((eager, truth))
                continue
            self._judge(n, i, value, eager, truth)
            own = _laid_out_like(eager, value)
            members.append((own, widened(own)))
            self._known[n] = made
        if n.target is operator.getitem and n.args[0] in self._known:
            self._known[n] = made
        if n not in self._known:
            return made
        whole = _refilled(made, [own for own, _ in members])
        if n in self.wide:
            self.wide[n] = _refilled(self.wide[n], [truth for _, truth in members])
        self._known[n] = whole
        return whole

    def _check_results(self, results: Any) -> None:
        (output,) = self.module.graph.find_nodes(op="output")  # type: ignore[union-attr, operator]
        made = results if isinstance(results, list | tuple) else (results,)
        sources = output.args[0] if isinstance(output.args[0], list | tuple) else output.args
        if len(made) != len(self._seen.results):
            text = f"{len(self._seen.results)} results instead of {len(made)}"
            raise _Found(self._wrong(output, Difference(float("inf"), 0, 0, text)))
        rows = zip(self._seen.results, made, self.results, sources, strict=True)
        for i, (got, eager, truth, source) in enumerate(rows):
            node = source if isinstance(source, fx.Node) else output
            self._judge(node, 0, got, eager, truth, f"result {i}")

    def _check_arguments(self, args: Sequence[Any]) -> None:
        nodes = self.module.graph.find_nodes(op="placeholder")  # type: ignore[union-attr, operator]
        rows = zip(self._seen.args, args, nodes, strict=True)
        for i, (got, eager, node) in enumerate(rows):
            if not isinstance(eager, Tensor) or got is eager:
                continue
            writer = next((u for u in reversed(list(node.users)) if _writes(u)), node)
            self._judge(writer, 0, got, eager, self.wide.get(writer), f"argument {i}")

    def _judge(
        self, node: fx.Node, index: int, got: Any, eager: Any, truth: Any, what: str = ""
    ) -> None:
        """Raise for a value that is wrong. Where it is, the nodes that lead to it are shaken: what
        moves as much by rounding, as the small difference of large numbers does, is right."""
        wrong = difference(got, eager, truth)
        if wrong is None:
            return
        found = self._wrong(node, wrong, what)
        shaken = list(leaves(run_shaken(found.region, dict(found.inputs))))
        moved = shaken[index] if index < len(shaken) else None
        if not is_explained(wrong, got, eager, truth, moved):
            raise _Found(found)

    def _wrong(self, node: fx.Node, wrong: Difference, what: str = "") -> Wrong:
        """The finding, with the nodes that lie between it and known values."""
        region: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if at in region or at in inputs:
                continue
            if at.op != "call_function" or (at in self._known and at is not node):
                inputs[at] = None
            else:
                region[at] = None
                waiting += at.all_input_nodes
        order = tuple(n for n in self.module.graph.nodes if n in region)  # type: ignore[union-attr]
        given = tuple((n.name, self._value(n)) for n in inputs if n.op != "output")
        return Wrong(node, wrong, what, order, given)

    def _value(self, node: fx.Node) -> Any:
        if node in self._known:
            return self._known[node]
        return self.fetch_attr(str(node.target)) if node.op == "get_attr" else self.env.get(node)


def _laid_out_like(eager: Tensor, value: Tensor) -> Tensor:
    """A value with the strides of eager's, which views after it may count on."""
    if value.device == eager.device and value.stride() == eager.stride():
        return value
    return torch.empty_like(eager).copy_(value)


def _refilled(tree: Any, members: Sequence[Any]) -> Any:
    """A result of a node with other members; those that are None stay."""
    if not isinstance(tree, list | tuple):
        return members[0]
    rest = iter(members)
    return type(tree)([None if m is None else next(rest) for m in tree])


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
