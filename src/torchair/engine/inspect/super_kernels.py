"""`torchair.scope.super_kernel`: what a scope asks for as one kernel is one segment of native code
here, steps that run in one call with nothing of torch between them, and on a GPU one persistent
kernel. Says where that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchair.engine.inspect.timeline import row_name
from torchair.engine.plan.records import Plan, Step
from torchair.errors import ScopeError
from torchair.ge.graph import Node
from torchair.labels import SUPER_KERNEL, SUPER_KERNEL_OPTIONS
from torchair.log import logger

_CHECK = "strict-scope-check"
_ANSWERS = ("bypass", "abort")


@dataclass(frozen=True)
class ScopeBreak:
    """A step that a scope is not one segment for."""

    scope: str
    step: Step
    why: str = ""  # its kernel is no part of one for all

    @property
    def reason(self) -> str:
        """Which step, and why it ends a segment."""
        node = self.step.node
        what = row_name(self.step).removeprefix("torchair::")
        if node.type == "TorchCall":
            what = _text(node, "target")
        if self.why:
            return f"{what} is launched by itself: {self.why}"
        if self.step.kind == "native":
            return f"{what} of the scope runs on another stream"
        return f"{what} has no native kernel here ({self.step.kind})"


def check_super_kernels(plan: Plan) -> None:
    """ScopeError for a scope with `strict-scope-check=abort` that is not one segment; others are
    logged."""
    for found in breaks(plan):
        text = f"the scope is not one kernel: {found.reason}"
        if _aborts(plan, found.scope):
            origin = found.step.node.origin
            raise ScopeError(text, scope=found.scope, source=origin.line if origin else None)
        logger.info("super_kernel %r: %s", found.scope, text)


def breaks(plan: Plan) -> Iterator[ScopeBreak]:
    """The first break of each scope."""
    apart = {id(a.step): a.reason for a in plan.target.persistent(plan)[1]} if plan.target else {}
    for scope, steps in _scopes(plan).items():
        run = plan.steps[min(steps) : max(steps) + 1]
        found = next((s for s in run if s.kind != "native"), None)
        if found is None and plan.schedule is not None:
            lanes = plan.schedule.steps
            lane = next(lane for lane in lanes if min(steps) in lane)
            found = next((plan.steps[k] for k in steps if k not in lane), None)
        late = next((s for s in run if id(s) in apart), None)
        if found is not None:
            yield ScopeBreak(scope, found)
        elif late is not None:
            yield ScopeBreak(scope, late, apart[id(late)])


def _scopes(plan: Plan) -> dict[str, list[int]]:
    """Numbers of steps by scope."""
    found: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        for scope in dict.fromkeys(_text(n, SUPER_KERNEL) for n in _nodes(step)):
            if scope:
                found.setdefault(scope, []).append(number)
    return found


def _nodes(step: Step) -> list[Node]:
    return step.also or [step.node]


def _text(node: Node, key: str) -> str:
    value = node.attrs.get(key)
    return "" if value is None else str(value.value)


def _aborts(plan: Plan, scope: str) -> bool:
    """What the options of a scope, `key=value:key=value`, say about breaks."""
    given = {
        _text(n, SUPER_KERNEL_OPTIONS)
        for s in plan.steps
        for n in _nodes(s)
        if _text(n, SUPER_KERNEL) == scope
    }
    pairs = [word.partition("=") for text in given for word in text.split(":")]
    asked = {value for key, _, value in pairs if key == _CHECK}
    for value in asked - {*_ANSWERS}:
        raise ScopeError(f"{_CHECK}={value}: {' or '.join(_ANSWERS)} is expected", scope=scope)
    return "abort" in asked
