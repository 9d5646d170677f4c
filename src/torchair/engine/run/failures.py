"""Errors of steps: what failed, with the node and the line of the model it comes from."""

from __future__ import annotations

from torchair.engine.plan.records import Step
from torchair.errors import GraphError


class StepFailure(Exception):
    """What a step raised, with the step."""

    def __init__(self, step: Step, error: BaseException) -> None:
        super().__init__(str(error))
        self.step, self.error = step, error


class StepError(GraphError):
    """What failed, with the node and the line of the model it comes from."""

    def __init__(self, step: Step, error: Exception) -> None:
        self.step = step
        node = step.node
        source = node.origin.line if node.origin else "unknown source line"
        super().__init__(f"{node.type} failed: {error}", node=f"{node.name} ({source})")


_KINDS = (IndexError, ValueError, TypeError, NotImplementedError, AssertionError, ZeroDivisionError)
_ERRORS = {kind: type(f"Step{kind.__name__}", (StepError, kind), {}) for kind in _KINDS}
"""Step errors that are what eager raises as well."""


def explain(step: Step, error: Exception) -> StepError:
    """The error to raise for what a step raised, of the same builtin class."""
    made = next((e for kind, e in _ERRORS.items() if isinstance(error, kind)), StepError)
    return made(step, error)
