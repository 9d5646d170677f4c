"""`torchair.verify`: a model in eager mode and compiled, side by side. Each graph is checked in
each call: against eager, and where that differs by more than a few bits against float64."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchair.backend import config_in, get_npu_backend
from torchair.concrete import AclConcreteGraph, ConcreteGraph, ReplayedGraph
from torchair.concrete.acl import copied, mutated_arguments
from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.fallbacks import Fallback, note, strictness
from torchair.progress import Progress
from torchair.runner import Compilation, GmRunner, observed
from torchair.torch_private import dynamo
from torchair.torch_private.fake import unset_fake_temporarily
from torchair.torch_private.pytree import tree_leaves, tree_map
from torchair.verification.blame import Blame, Suspects, WatchedCall, line_of, lines_of
from torchair.verification.forms import LocalCheck, Randomness, SeenRun, Wrong
from torchair.verification.judge import close, difference, no_number, same_bits
from torchair.verification.report import Author, Finding, GraphReport, Report, write_script

FOLDER = "torchair_verify"
_VERSIONS = 256  # of one function that Dynamo may keep: each verification makes its own


def verify(
    model: Callable[..., Any],
    *inputs: Any,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    more: Sequence[Sequence[Any]] = (),
    training: bool = False,
    every_node: bool = False,
    folder: str | os.PathLike[str] = FOLDER,
    **keywords: Any,
) -> Report:
    """Compile a model, call it as `model(*inputs, **keywords)`, and compare with eager.

    The same inputs come again in another order of elements, then as they were, then those of
    `more`, so that what is captured is replayed too. The report is true if all is right; else it
    names the node, the line and who made the error. `training` runs the backward of all results as
    well. With `every_node` all nodes are compared even where results are right.
    """
    known = config_in(mode, config)
    begun = time.perf_counter()
    options = VerifyOptions(Path(folder), every_node)
    verifier = Verifier(options)
    plain = getattr(model, "_orig_mod", model)
    compiled = torch.compile(plain, backend=get_npu_backend(compiler_config=known), dynamic=dynamic)
    first = (inputs, keywords)
    calls = [first, tree_map(reordered, first), first, *((args, keywords) for args in more)]
    calls = [tree_map(_own, call) for call in calls]  # all at once: each has memory of its own
    limits = dynamo.config.patch(recompile_limit=_VERSIONS, cache_size_limit=_VERSIONS)
    with _restored(plain), limits, observed(verifier), options.steps as steps:
        for number, (args, named) in enumerate(calls):
            steps.next(f"call {number}")
            _call(compiled, args, named, training)
    verifier.report.seconds = time.perf_counter() - begun
    return verifier.report


def _call(model: Callable[..., Any], args: Any, keywords: Any, training: bool) -> None:
    if not training:
        with torch.no_grad():
            model(*args, **keywords)
        return
    results = [t for t in tree_leaves(model(*args, **keywords)) if isinstance(t, Tensor)]
    loss = [t.float().sum() for t in results if t.requires_grad and not t.is_complex()]
    if loss:
        torch.stack(loss).sum().backward()


def _own(value: Any) -> Any:
    """A copy that the model may change."""
    made = copied(value)
    return made.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else made


def reordered(value: Any) -> Any:
    """A tensor with the same elements in another order: still valid indices, masks and numbers."""
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return value
    with torch.no_grad():
        return value.detach().flip(list(range(value.dim()))).requires_grad_(value.requires_grad)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Leave parameters, gradients and buffers of a model as they were."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, copied(b)) for b in model.buffers()]
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        with torch.no_grad():
            for p, grad in grads:
                p.grad = grad
            for buffer, before in buffers:
                buffer.copy_(before)


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asks of a verification."""

    folder: Path  # for programs that show an error again
    every_node: bool = False  # look at all nodes even where the results are right
    steps: Progress = field(default_factory=lambda: Progress("torchair verify"))  # to show progress


class Verifier:
    """Puts a check around each graph that is compiled."""

    def __init__(self, options: VerifyOptions) -> None:
        self.report = Report()
        self._options = options
        self._lines: dict[int, str] = {}  # of the model, see `lines_of`

    def __call__(self, compilation: Compilation) -> GmRunner:
        name = f"graph {len(self.report.graphs) + 1}"
        if compilation.phase != "forward":
            name += f", {compilation.phase}"
        entry = GraphReport(name, sum(n.op == "call_function" for n in compilation.gm.graph.nodes))
        self.report.graphs.append(entry)
        if not isinstance(compilation.made, ConcreteGraph):
            entry.notes.append("it is not compiled: its options or its tensors ask for that")
            return compilation.runner
        self._lines |= lines_of(compilation.gm)
        check = _GraphCheck(compilation, entry, self._options, self._lines)
        return GmRunner(check, compilation.runner.trace)


@dataclass(frozen=True)
class _ResultBefore:
    """A result as it was handed out."""

    number: int
    tensor: Tensor
    content: Tensor
    version: int  # torch counts writes to it, but not those of our kernels

    @property
    def is_overwritten(self) -> bool:
        if self.tensor._version != self.version:
            return False
        return difference(self.tensor, self.content) is not None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _GraphCheck:
    """One graph."""

    def __init__(
        self,
        compilation: Compilation,
        entry: GraphReport,
        options: VerifyOptions,
        lines: Mapping[int, str],
    ) -> None:
        self._compilation, self._entry, self._options = compilation, entry, options
        self._lines = lines
        self._gm = compilation.gm
        nodes = self._gm.graph.find_nodes(op="placeholder")
        mutated = set(mutated_arguments(self._gm))
        self._mutated = [i for i, n in enumerate(nodes) if n in mutated]
        self._kept = [i for i, n in enumerate(nodes) if n in mutated or i not in compilation.static]
        settings = Settings.of(compilation.config)
        self._mode, self._strict = settings.mode, settings.strict
        self._bits = settings.numerics == "strict"
        replays = isinstance(compilation.made, AclConcreteGraph | ReplayedGraph)
        self._owned = replays and not settings.capture.share_results  # results belong to the caller
        self._before: list[_ResultBefore] = []  # results of the call before

    def entry(self, args: Sequence[Any]) -> Any:
        """Run the compiled graph, and look at what it gave."""
        if self._entry.finding is not None:
            return self._compilation.runner.run(args)
        before, start = list(args), Randomness()
        for i in self._kept:
            before[i] = copied(args[i])
        after = list(args)  # the callee may empty the list
        results = self._compilation.runner.run(args)
        number, self._entry.calls = self._entry.calls, self._entry.calls + 1
        call = WatchedCall(before, start, SeenRun(list(results), after))
        try:
            self._look(call, number)
            self._look_back(call, number)
        except Exception as e:  # the program of the user goes on
            with strictness(self._strict):
                note(Fallback.VERIFY, f"verify could not look at {self._entry.name}", e)
            why = (str(e).splitlines() or [type(e).__name__])[0]
            self._entry.unchecked += 1
            self._entry.notes.append(f"call {number} could not be checked: {why}")
        return results

    def _look(self, call: WatchedCall, number: int) -> None:
        if not self._options.every_node and self._is_right(call):
            return
        with self._options.steps as steps:
            blame = Suspects(self._compilation, call, steps).first()
        if blame is not None:
            self._entry.finding = self._finding(blame, number)
        elif not self._options.every_node:
            note = f"call {number} differs from eager by rounding that many nodes amplify"
            self._entry.notes.append(note)

    def _look_back(self, call: WatchedCall, number: int) -> None:
        """Whether the results of the call before are what they were: replays must not write where
        an earlier one left its results."""
        if not self._owned:
            return
        (output,) = self._gm.graph.find_nodes(op="output")
        for earlier in self._before:
            if self._entry.finding is None and earlier.is_overwritten:
                error = no_number("it changed after it was handed out")
                source = output.args[0][earlier.number]
                wrong = Wrong(source, error, f"result {earlier.number} of the call before", (), ())
                blame = Blame(wrong, Author.REPLAY, "writes where an earlier one left its results")
                self._entry.finding = self._finding(blame, number)
        given = {_memory(a) for a in call.seen.args if isinstance(a, Tensor)}
        self._before = [
            _ResultBefore(i, r, copied(r), r._version)
            for i, r in enumerate(call.seen.results)
            if isinstance(r, Tensor) and _memory(r) not in given
        ]

    def _is_right(self, call: WatchedCall) -> bool:
        """Whether results and updated arguments are as good as those of eager."""
        args = list(call.args)
        for i in self._mutated:
            args[i] = copied(args[i])
        with unset_fake_temporarily(), torch.no_grad():
            with call.start.again():
                made = self._gm(*args)
            if self._is_close(call.seen, SeenRun(list(made), args)):
                return True
            for i in self._mutated:
                args[i] = copied(call.args[i])
            check = LocalCheck(self._gm, call.seen, self._bits)
            return check.first_wrong(args, call.start) is None

    def _is_close(self, seen: SeenRun, eager: SeenRun) -> bool:
        alike = same_bits if self._bits else close
        pairs = [*zip(seen.results, eager.results, strict=True)]
        pairs += [(seen.args[i], eager.args[i]) for i in self._kept]
        return all(
            alike(got, wanted) if isinstance(wanted, Tensor) else got == wanted
            for got, wanted in pairs
        )

    def _finding(self, blame: Blame, number: int) -> Finding:
        wrong, node = blame.wrong, blame.wrong.node
        line, title = line_of(node, self._lines), f"{node.target} ({node.name}): {wrong.difference}"
        stem = f"{self._entry.name}_{node.name}"
        script = write_script(wrong, self._mode, f"{title}. {line}", self._options.folder, stem)
        return Finding(
            blame.stage,
            blame.culprit,
            node.name,
            str(node.target),
            line,
            wrong.what,
            str(wrong.difference),
            wrong.difference.error,
            wrong.difference.allowed,
            number,
            script,
        )
