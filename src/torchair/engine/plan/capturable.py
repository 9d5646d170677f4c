"""Whether a plan can be captured: not if it leaves sizes open until the data are there."""

from __future__ import annotations

import torch

from torchair.engine.plan.records import Plan
from torchair.errors import CaptureError
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node
from torchair.operators.generic import find_target

SIZE_HINT = "use an operator whose result has a fixed size, and torch.where for decisions"
_DATA = "makes a result whose size depends on data"
_PRINTS = "npu_print prints on the host, which a device does not wait for"
_NO_META = "has no meta kernel that tells the sizes of its results"
_PYTHON = "runs functions of Python, which do not tell the sizes of their results"
# Why a graph cannot be captured, and what the user can do about it.
_HINTS = {
    _DATA: SIZE_HINT,
    _PRINTS: "print outside of the compiled function, or use the mode max-autotune",
    _NO_META: "register one with torch.library.register_fake",
    _PYTHON: "make them an operator with torch.library.custom_op and register_fake",
}
_SIZES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def check_capturable(plan: Plan) -> None:
    """CaptureError if only the data tell some dims of a plan, or if it prints and runs on a device;
    it names the first node."""
    if not plan.on_host:
        said = next((s.node for s in plan.steps if s.node.type == "PrintV2"), None)
        if said is not None:
            raise _error(said, _PRINTS, _HINTS[_PRINTS])
    open_ended = (s.node for s in plan.steps if s.kind == "late")
    late = next((node for node in open_ended if not _is_only_said(node)), None)
    if late is None:
        return
    target, why = _reason(late)
    raise _error(late, f"{target} {why}", _HINTS[why])


def _error(node: Node, message: str, hint: str) -> CaptureError:
    origin = node.origin
    name = origin.fx_name if origin is not None and origin.fx_name else node.name
    source = None if origin is None else origin.line
    return CaptureError(message, node=name, source=source, hint=hint)


def _is_only_said(node: Node) -> bool:
    """Whether what a node makes is text to be printed, if anything: nothing is computed from it."""
    return all(v.dtype == DataType.DT_STRING for v in node.outputs)


def _reason(node: Node) -> tuple[str, str]:
    """What the node calls, and why its sizes are open."""
    if node.type != "TorchCall":
        return node.type, _DATA
    target = find_target(node)
    if isinstance(target, torch._ops.OpOverload):
        if any(tag in target.tags for tag in _SIZES):
            return str(target), _DATA
        return str(target), _NO_META
    return str(target), _PYTHON
