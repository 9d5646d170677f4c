"""What eager refuses: every `error_inputs` of the operator database must raise here too, with the
same class of exception, at the first call of a function and when plans for it exist.

Dynamo and fake tensors refuse much before a backend sees it, and with classes of their own. Where
eager's class cannot be had that way, `aot_eager` is the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .cases import DEVICE, Case, Group, operators, seed
from .check import FAILED, PASSED, UNTRACEABLE, Outcome

EXCUSED = Path(__file__).with_name("errors.toml")
MODE = "errors"


class Answer(StrEnum):
    """What a call that eager refuses came to."""

    SAME = "raised same class"
    REFERENCE = "as aot_eager"
    OTHER = "raised other class"
    RETURNED = "returned numbers"

    @property
    def right(self) -> bool:
        return self in (Answer.SAME, Answer.REFERENCE)


@dataclass
class Refusal(Outcome):
    """The outcome of one error input: at the first call, and after calls that were right."""

    first: Answer | None = None
    later: Answer | None = None


def groups() -> Iterator[Group]:
    """The operators that have error inputs."""
    for name, op in operators().items():
        if getattr(op, "error_inputs_func", None) is not None:
            yield Group(name, "float32", MODE)


def outcomes(group: Group) -> Iterator[int | Outcome]:
    """The outcomes of one operator, each after its index."""
    op = operators()[group.op]
    seed(group)
    right = _right_sample(op)
    for index, wrong in enumerate(list(op.error_inputs(DEVICE))):
        yield index
        yield _outcome(Case(group, index), op, wrong.sample_input, right)


def _right_sample(op: Any) -> Any:
    """A sample that eager takes, None where there is none."""
    for sample in op.sample_inputs(DEVICE, torch.float32):
        if _raised(_function(op), sample) is None:
            return sample
    return None


def _outcome(case: Case, op: Any, wrong: Any, right: Any) -> Outcome:
    expected = _raised(_function(op), wrong)
    if expected is None:
        return Outcome(case, UNTRACEABLE, "eager does not refuse it")
    first, named = _answer(op, [wrong], expected)
    later, named_later = (first, named) if right is None else _answer(op, [right, wrong], expected)
    status = PASSED if first.right and later.right else FAILED
    said = f"eager {_named(expected)}, first call {named}, later {named_later}"
    return Refusal(case, status, said, first=first, later=later)


def _answer(op: Any, calls: Sequence[Any], expected: BaseException) -> tuple[Answer, str]:
    """What the last of several calls of one function comes to; the others are right."""
    found = _last_raised(_compiled(op, "torchair"), calls)
    if isinstance(found, type(expected)):
        return Answer.SAME, _named(found)
    return judged(found, _last_raised(_compiled(op, "aot_eager"), calls)), _named(found)


def judged(found: Exception | None, reference: Exception | None) -> Answer:
    """An answer that is not eager's, beside the one of `aot_eager`."""
    if isinstance(found, type(reference)):
        return Answer.REFERENCE
    return Answer.RETURNED if found is None else Answer.OTHER


def _last_raised(run: Callable[..., Any], calls: Sequence[Any]) -> Exception | None:
    return [_raised(run, sample) for sample in calls][-1]


def _function(op: Any) -> Callable[..., Any]:
    def call(first: Any, args: Any, kwargs: Any) -> Any:
        return op.op(first, *args, **kwargs)

    return call


def _compiled(op: Any, backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(_function(op), backend=backend)


def _raised(run: Callable[..., Any], sample: Any) -> Exception | None:
    """What a call raises."""
    try:
        with torch.no_grad():
            run(sample.input, sample.args, sample.kwargs)
    except Exception as e:
        return e
    return None


def _named(error: BaseException | None) -> str:
    return "returned" if error is None else type(error).__name__


def show(found: Sequence[Outcome], console: Console) -> None:
    """Operators, calls that eager refuses, and what they came to."""
    refusals = [o for o in found if isinstance(o, Refusal)]
    table = Table(title="what eager refuses")
    for name in ("", "operators", "inputs", *(a.value for a in Answer)):
        table.add_column(name, justify="left" if not name else "right")
    for mode in sorted({o.case.group.mode for o in refusals}):
        chosen = [o for o in refusals if o.case.group.mode == mode]
        ops = {o.case.group.op for o in chosen}
        for when in ("first", "later") if mode == MODE else ("first",):
            count = Counter(getattr(o, when) for o in chosen)
            sizes = str(len(ops)), str(len(chosen))
            table.add_row(f"{mode}, {when} call", *sizes, *(str(count[a]) for a in Answer))
    console.print(table)
    console.print(f"{len(found) - len(refusals)} more are no errors of a call in eager mode.")
