"""Operators that capture calls with memory and lists from outside, under the original's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchair.capture.updates import UPDATABLE, register_updatable
from torchair.fx.capture.workspace import WORKSPACE_OPS, WorkspaceOp


@dataclass(frozen=True)
class StaticWorkspaceReplaceFunc:
    """The form of an operator that is captured: where its results and its workspace go, and which
    lists of integers replays update."""

    get_workspace: Callable[..., Any] | None
    out_operator: Any
    workspace_keys: Sequence[str]
    output_keys: Sequence[str]
    updated_param_keys: Sequence[str]


class _ReplaceFuncs(MutableMapping[Any, StaticWorkspaceReplaceFunc]):
    """What the pass `replace_dynamic_workspace_ops` and updates between replays know, as one
    table by operator."""

    def __setitem__(self, op: Any, entry: StaticWorkspaceReplaceFunc) -> None:
        workspace = next(iter(entry.workspace_keys), "workspace")
        outputs = tuple(entry.output_keys)
        WORKSPACE_OPS[op] = WorkspaceOp(entry.out_operator, outputs, entry.get_workspace, workspace)
        if entry.updated_param_keys:
            for form in (op, entry.out_operator):
                register_updatable(form, entry.updated_param_keys)

    def __getitem__(self, op: Any) -> StaticWorkspaceReplaceFunc:
        known = WORKSPACE_OPS[self._key(op)]
        updates = UPDATABLE.get(str(op))
        return StaticWorkspaceReplaceFunc(
            known.asks,
            known.out,
            [known.workspace] if known.asks is not None else [],
            list(known.outputs),
            list(updates.parameters) if updates is not None else [],
        )

    def __delitem__(self, op: Any) -> None:
        entry = WORKSPACE_OPS.pop(self._key(op))
        for form in (op, entry.out):
            UPDATABLE.pop(str(form), None)

    def __iter__(self) -> Iterator[Any]:
        return iter(WORKSPACE_OPS)

    def __len__(self) -> int:
        return len(WORKSPACE_OPS)

    @staticmethod
    def _key(op: Any) -> Any:
        """Operators of libraries that may come later are known by their names."""
        return op if op in WORKSPACE_OPS else str(op)


REPLACE_FUNC_MAP = _ReplaceFuncs()
