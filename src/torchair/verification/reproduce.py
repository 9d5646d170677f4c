"""A short program that shows an error again: the nodes around it, and their inputs in a file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchair.store import atomic_write
from torchair.verification.local import Wrong

_PROGRAM = '''"""{title}"""

import torch
import torchair
from pathlib import Path

def model({names}):
{body}
    return {result}

inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
print(torchair.verify(model, *inputs, mode={mode!r}))
'''


def write_script(wrong: Wrong, mode: str, title: str, folder: Path, stem: str) -> Path | None:
    """Write program and inputs, and give the program's path; None if an argument of a node cannot
    be written down."""
    names = [name for name, _ in wrong.inputs]
    values = [value for _, value in wrong.inputs]
    if not all(isinstance(v, Tensor | int | float | bool) for v in values) or not wrong.region:
        return None
    try:
        body = [f"    {n.name} = {_call(n)}" for n in wrong.region]
    except ValueError:
        return None
    text = _PROGRAM.format(
        title=title.replace('"', "'").replace("\\", "/"), names=", ".join(names),
        body="\n".join(body), result=wrong.node.name, mode=mode,
    )  # fmt: skip
    name = re.sub(r"\W", "_", stem)
    file = io.BytesIO()
    torch.save([_plain(v) for v in values], file)
    atomic_write(folder / f"{name}.pt", file.getvalue())
    return atomic_write(folder / f"{name}.py", text.encode())


def _plain(value: Any) -> Any:
    """A tensor with the memory that it shows only, on the host if torch reads no other there."""
    if not isinstance(value, Tensor):
        return value
    kept = value.detach()
    return kept.clone() if kept.device.type in ("cpu", "cuda") else kept.cpu()


def _call(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        called = f"torch.ops.{space}.{name}.{target._overloadname}"
    elif getattr(target, "__module__", "") in ("_operator", "operator"):
        if target.__name__ == "getitem":
            return f"{_text(node.args[0])}[{_text(node.args[1])}]"
        called = f"__import__('operator').{target.__name__}"
    else:
        raise ValueError(f"{target} has no name")
    args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"{called}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return _listed(value)
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if abs(value) < float("inf") else f"float('{value}')"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    raise ValueError(f"{value!r} cannot be written down")


def _listed(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(_text, values))}]"
