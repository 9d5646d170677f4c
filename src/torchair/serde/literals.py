"""Python literals of dumps: values as exact text, and text back as values without eval.

Shared by the printer and the loader of the `py` form; knows no nodes and no variables.
"""

from __future__ import annotations

import ast
import numbers
from collections.abc import Iterator
from typing import Any

import torch

from torchair.errors import SerializationError
from torchair.ge.attrs import Attr
from torchair.ge.build import const_tensor, number_text, tensor_text
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Value
from torchair.serde.codec import tensor_bytes

_CHECKED = 10_000  # elements; longer constants print from the tensor, without trying it out
# What `tensor(...)` gives without a dtype: these print bare, all others say their type.
_BARE = (torch.float32, torch.int64, torch.bool, torch.complex64)


def quoted(text: str) -> str:
    """A string literal in double quotes, on one line."""
    return '"' + "".join(map(_character, text)) + '"'


def _character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    return c if c.isprintable() else c.encode("unicode_escape").decode()


def literal(value: Any) -> str:
    """A number, string, data type, tensor, attribute, list or dict of these as Python text."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.dtype):
        return str(torch_to_ge(value))
    if isinstance(value, Attr):
        return attr_text(value)
    if isinstance(value, torch.Tensor):
        return _tensor_argument(value)
    return _number(value)


def _number(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, bytes)):
        return number_text(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return number_text(float(value))
    raise SerializationError(f"{value!r} of type {type(value).__name__} has no text form")


def _tensor_argument(tensor: torch.Tensor) -> str:
    if tensor.dtype in _BARE and (tensor.numel() or tensor.dtype is torch.float32):
        return tensor_text(tensor)
    code = torch_to_ge(tensor.dtype)
    return f"ge.Const({exact_text(tensor, code)}, dtype={code})"


def attr_text(attr: Attr) -> str:
    """The expression that makes an attribute."""
    if attr.kind == "Tensor":
        code = torch_to_ge(attr.value.dtype)
        held = f"ge.build.const_tensor({exact_text(attr.value, code)}, {code})"
        return f'ge.attr.Attr("Tensor", {held})'
    if attr.kind == "Bytes":
        return f'ge.attr.Attr("Bytes", {attr.value!r})'
    return f"ge.attr.{attr.kind}({literal(attr.value)})"


def const_text(value: Value) -> str:
    """A constant at the place where it is used. The readable text stored on the node is taken
    only if it really stands for the node's tensor: it may be stale, or come from a file."""
    attrs = value.node.attrs
    if "value" not in attrs or attrs["value"].kind != "Tensor":
        raise SerializationError(f"the constant {value.edge} holds no tensor")
    tensor = attrs["value"].value
    code = value.dtype if _fits(value.dtype, tensor) else torch_to_ge(tensor.dtype)
    readable = attrs.get("_readable_value")
    text = exact_text(tensor, code, None if readable is None else str(readable.value))
    return f"ge.Const({text}, dtype={code})"


def _fits(code: int, tensor: torch.Tensor) -> bool:
    try:
        return ge_to_torch(code) == tensor.dtype
    except RuntimeError:
        return False


def exact_text(tensor: torch.Tensor, code: int, preferred: str | None = None) -> str:
    """The first text for which `const_tensor(<text>, code)` is this tensor, element by element."""
    for text in _candidates(tensor, preferred if tensor.numel() <= _CHECKED else None):
        if tensor.numel() > _CHECKED or _stands_for(text, code, tensor):
            return text
    raise SerializationError(f"a {tensor.dtype} constant of dims {list(tensor.shape)} has no text")


def _candidates(tensor: torch.Tensor, preferred: str | None) -> Iterator[str]:
    if tensor.is_quantized or tensor.device.type == "meta":
        return
    if not tensor.numel():
        yield "[]" if tensor.dim() == 1 else f"tensor([]).reshape({list(tensor.shape)})"
        return
    if preferred is not None:
        yield preferred
    wide = tensor.to(torch.complex128) if tensor.dtype.is_complex else tensor
    yield number_text(wide.tolist())


def _stands_for(text: str, code: int, tensor: torch.Tensor) -> bool:
    try:
        return same_tensor(const_tensor(value_of(text), code), tensor)
    except Exception:  # a text that does not parse, or whose value torch refuses
        return False


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, dims and elements; one not-a-number is as good as another, 0 and -0 differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if tensor_bytes(a) == tensor_bytes(b):
        return True
    return _one_nan(a) == _one_nan(b)


def _one_nan(tensor: torch.Tensor) -> bytes:
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point:
        return tensor_bytes(tensor)
    wide = tensor.detach().cpu().double()
    return tensor_bytes(wide.masked_fill(wide.isnan(), float("nan")))


def value_of(text: str) -> Any:
    """The value of a literal text; SerializationError for anything that is not one."""
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, SerializationError):
            raise
        raise SerializationError(f"not a literal: {error}") from error


def evaluate(tree: ast.expr) -> Any:
    """A literal: numbers, strings, lists, and the few calls that stand for numbers and tensors."""
    if isinstance(tree, ast.Constant) and tree.value is not Ellipsis:
        return tree.value
    if isinstance(tree, (ast.List, ast.Tuple)):
        members = [evaluate(item) for item in tree.elts]
        return members if isinstance(tree, ast.List) else tuple(members)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_real(tree.operand)
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Sub):
        return _real(tree.left) - _real(tree.right)  # 1e999-1e999 is how not-a-number is written
    if isinstance(tree, ast.Call) and not tree.keywords:
        return _call(tree)
    raise refusal(tree)


def _call(tree: ast.Call) -> Any:
    function = tree.func
    if isinstance(function, ast.Attribute) and function.attr == "reshape" and len(tree.args) == 1:
        tensor = evaluate(function.value)
        if isinstance(tensor, torch.Tensor):
            return tensor.reshape(evaluate(tree.args[0]))
    if isinstance(function, ast.Name) and function.id == "tensor" and len(tree.args) == 1:
        return torch.tensor(evaluate(tree.args[0]))
    if isinstance(function, ast.Name) and function.id == "complex" and len(tree.args) == 2:
        return complex(_real(tree.args[0]), _real(tree.args[1]))
    raise refusal(tree)


def _real(tree: ast.expr) -> float:
    value = evaluate(tree)
    if not isinstance(value, (int, float)):
        raise refusal(tree)
    return value


def refusal(tree: ast.AST) -> SerializationError:
    """The error for a piece of program that a dump never holds."""
    text = ast.unparse(tree) if isinstance(tree, (ast.expr, ast.stmt)) else type(tree).__name__
    return SerializationError(
        f"a graph dump does not hold {type(tree).__name__} such as {text.splitlines()[0][:80]!r}",
        position=f"line {getattr(tree, 'lineno', '?')}",
    )
