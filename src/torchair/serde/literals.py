"""What dumps are made of: values as exact text and text as values without eval, nodes as builder
calls, and whether two graphs are the same.
"""

from __future__ import annotations

import ast
import ctypes
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchair.errors import SerializationError
from torchair.ge.attrs import Attr
from torchair.ge.build import COUNT_ATTRS, const_tensor, number_text, returned, tensor_text
from torchair.ge.dtypes import dtype_name, holds, torch_to_ge
from torchair.ge.graph import BuilderCall, Graph, Node, Value
from torchair.ge.prototypes import Prototype, is_declared
from torchair.ge.shapes import Sym, on_wire
from torchair.serde.codec import tensor_bytes
from torchair.torch_private.fake import unset_fake_temporarily

_CHECKED = 10_000  # elements; longer constants print from the tensor, without trying it out
# What `tensor(...)` gives without a dtype: these print bare, all others say their type.
_BARE = (torch.float32, torch.int64, torch.bool, torch.complex64)


def quoted(text: str, escape: Callable[[str], str] | None = None) -> str:
    """A string literal in double quotes, on one line; `escape` writes what is not printable."""
    escape = escape or (lambda c: c.encode("unicode_escape").decode())
    marked = (f"\\{c}" if c in '"\\' else c for c in text)
    return f'"{"".join(c if c.isprintable() else escape(c) for c in marked)}"'


def literal(value: Any, variable: Callable[[Value], str] | None = None) -> str:
    """A number, string, data type, tensor, attribute, list or dict of these as Python text; of a
    value of the graph its `variable`, of a size that varies -1."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(v, variable) for v in value) + "]"
    if isinstance(value, dict):
        members = [f"{literal(k)}: {literal(v, variable)}" for k, v in value.items()]
        return "{" + ", ".join(members) + "}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.dtype):
        return str(torch_to_ge(value))
    if isinstance(value, Attr):
        return attr_text(value)
    if isinstance(value, torch.Tensor):
        return _tensor_argument(value)
    if variable is not None and isinstance(value, Value):
        return const_text(value) if value.node.type == "Const" else variable(value)
    return "-1" if isinstance(value, Sym) else _number(value)


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
        constant = f"ge.build.const_tensor({exact_text(attr.value, code)}, {code})"
        return f'ge.attr.Attr("Tensor", {constant})'
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
    code = value.dtype if holds(value.dtype, tensor.dtype) else torch_to_ge(tensor.dtype)
    readable = attrs.get("_readable_value")
    text = exact_text(tensor, code, None if readable is None else str(readable.value))
    return f"ge.Const({text}, dtype={code})"


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


# ---- nodes as builder calls ----


_RESERVED = ("self", "node")  # words that Graph.set_attr takes itself

CallForm = tuple[BuilderCall, dict[str, Attr]]
"""A call that makes a node, and the attributes that it shows."""


def form_of(node: Node) -> CallForm:
    """The call that makes this node; by its builder if that gives the very same ports and is there
    wherever the text is read, which that of a user's operator is not."""
    if node.type == "Data" and _is_plain_data(node):
        return _data(node)
    if node.type == "NetOutput" and _is_plain_output(node):
        return _net_output(node)
    proto = None if is_declared(node.type) else node.prototype
    special = node.type in ("Data", "NetOutput", "Const")
    if proto is not None and not special and _makes(node, proto):
        return _builder(node, proto)
    return _custom(node)


def _data(node: Node) -> CallForm:
    value = node.outputs[0]
    index = node.attrs["index"]
    kwargs: dict[str, Any] = {"index": index.value, "dtype": value.dtype}
    if value.shape is not None:
        kwargs["shape"] = on_wire(value.shape)
    kwargs |= {"placement": value.device_type or "NPU", "node_name": node.name}
    return BuilderCall("Data", [], kwargs, value), {"index": index}


def _is_plain_data(node: Node) -> bool:
    index = node.attrs.get("index")
    one = not node.inputs and [v.port for v in node.outputs] == ["y"]
    placed = one and node.outputs[0].device_type in ("", "CPU", "NPU")
    return placed and index is not None and index.kind == "Int"


def _net_output(node: Node) -> CallForm:
    shown = [b.outputs[0] for b in node.control if b.outputs and b.type != "Const"]
    kwargs: dict[str, Any] = {"dependencies": shown}
    if node.name != "NetOutput":
        kwargs["node_name"] = node.name
    return BuilderCall("NetOutput", [node.inputs["input"]], kwargs, None), {}


def _is_plain_output(node: Node) -> bool:
    inputs = node.inputs.get("input")
    if list(node.inputs) != ["input"] or not isinstance(inputs, list) or node.outputs:
        return False
    return len(set(inputs)) == len(inputs)  # the builder drops repeated results


def _makes(node: Node, proto: Prototype) -> bool:
    """Whether the builder, given this node's inputs and attributes, makes exactly this node."""
    if list(node.inputs) != [p.name for p in proto.inputs]:
        return False
    for port in proto.inputs:
        slot = node.inputs[port.name]
        if isinstance(slot, list) != (port.kind == "dynamic"):
            return False
        if slot is None and port.kind == "required":
            return False
    if any(name in node.inputs or name in _RESERVED for name in node.attrs):
        return False
    missing = [a.name for a in proto.attrs if a.required and a.name not in node.attrs]
    if any(m not in COUNT_ATTRS or not proto.has_dynamic_output for m in missing):
        return False
    return _groups(node, proto) is not None


def _groups(node: Node, proto: Prototype) -> list[Value | list[Value]] | None:
    """Outputs as the builder returns them; None if their ports are not those of the prototype."""
    rest = list(node.outputs)
    groups: list[Value | list[Value]] = []
    for port in proto.outputs:
        members: list[Value] = []
        if port.kind == "dynamic":
            while rest and rest[0].port == f"{port.name}{len(members)}":
                members.append(rest.pop(0))
            groups.append(members)
        elif rest and rest[0].port == port.name:
            groups.append(rest.pop(0))
        else:
            return None
    return None if rest else groups


def _builder(node: Node, proto: Prototype) -> CallForm:
    groups = _groups(node, proto) or []
    ordered = sorted(proto.attrs, key=lambda a: not a.required)
    attrs = {a.name: node.attrs[a.name] for a in ordered if a.name in node.attrs}
    kwargs = {name: _plain(proto, name, attr) for name, attr in attrs.items()}
    for port, group in zip(proto.outputs, groups, strict=True):
        if isinstance(group, list):
            kwargs[f"size_of_{port.name}"] = len(group)
    kwargs["node_name"] = node.name
    return BuilderCall(node.type, list(node.inputs.values()), kwargs, returned(groups)), attrs


def _plain(proto: Prototype, name: str, attr: Attr) -> Any:
    """The bare value where the builder gives it the right kind, else the attribute itself."""
    bare = proto.by_name[name].kind == attr.kind and attr.kind not in ("Tensor", "Bytes")
    return attr.value if bare else attr


def _custom(node: Node) -> CallForm:
    """The form for any node; what passes and the engine note down follows in lines of its own."""
    noted = [k for k in node.attrs if k.startswith("_") and k.isidentifier()]
    attrs = {k: a for k, a in sorted(node.attrs.items()) if k not in noted}
    kwargs = {
        "inputs": dict(node.inputs),
        "outputs": [v.port for v in node.outputs],
        "attrs": attrs,
        "node_name": node.name,
    }
    return BuilderCall("custom_op", [node.type], kwargs, returned(node.outputs)), attrs


# ---- whether two graphs are the same, and where they differ ----


INTERFACE = ("_input_placements", "_output_dtypes", "_executor_type")  # follows from the nodes
NOT_COMPARED = ("_readable_value", "_force_unknown_shape", *INTERFACE)
"""Attributes that say nothing about what a graph computes; programs do not show them."""


@unset_fake_temporarily()
def same_graph(a: Graph, b: Graph, *, strict: bool = False) -> list[str]:
    """Differences, one line each; none means equal.

    Nodes are matched by name, their order is free. Constants are compared by value at each use,
    whatever their names; symbolic dims count as -1. `strict` also compares graph attributes and
    name, node order, names of constants, symbols, layouts and attributes of descriptions.
    """
    nodes = [{n.name: n for n in g.nodes if strict or n.type != "Const"} for g in (a, b)]
    found = [f"{name}: only in the first" for name in nodes[0].keys() - nodes[1].keys()]
    found += [f"{name}: only in the second" for name in nodes[1].keys() - nodes[0].keys()]
    found.sort()
    for name, node in nodes[0].items():
        if name in nodes[1]:
            found += [f"{name}: {text}" for text in _differences(node, nodes[1][name], strict)]
    if strict:
        found += _graph_differences(a, b)
    return found


def same_attr(a: Attr, b: Attr) -> bool:
    """Equal kind and value. Floats count as single precision, which is what files hold."""
    if a.kind != b.kind:
        return False
    if a.kind == "Tensor":
        return same_tensor(a.value, b.value)
    if a.kind.endswith("Float"):
        return repr(_single(a.value)) == repr(_single(b.value))
    return bool(a.value == b.value)


def _single(value: Any) -> Any:
    return [_single(v) for v in value] if isinstance(value, list) else ctypes.c_float(value).value


def _graph_differences(a: Graph, b: Graph) -> Iterator[str]:
    if a.name != b.name:
        yield f"graph: name {a.name!r} and {b.name!r}"
    if [n.name for n in a.nodes] != [n.name for n in b.nodes]:
        yield "graph: the nodes are in another order"
    yield from (f"graph: {text}" for text in _attr_differences(a.attrs, b.attrs, strict=True))


def _differences(a: Node, b: Node, strict: bool) -> Iterator[str]:
    if a.type != b.type:
        yield f"type {a.type} and {b.type}"
    yield from _input_differences(a, b)
    before = [sorted(n.name for n in x.control if strict or n.type != "Const") for x in (a, b)]
    if before[0] != before[1]:
        yield f"runs after {before[0]} and {before[1]}"
    yield from _attr_differences(a.attrs, b.attrs, strict)
    if len(a.outputs) != len(b.outputs):
        yield f"{len(a.outputs)} and {len(b.outputs)} outputs"
    for mine, other in zip(a.outputs, b.outputs, strict=False):
        yield from (f"output {mine.index}: {t}" for t in _value_differences(mine, other, strict))


def _attr_differences(a: Mapping[str, Attr], b: Mapping[str, Attr], strict: bool) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if name in NOT_COMPARED and not strict:
            continue
        mine, other = a.get(name), b.get(name)
        if mine is None or other is None or not same_attr(mine, other):
            yield f"attribute {name} is {mine} and {other}"


def _input_differences(a: Node, b: Node) -> Iterator[str]:
    mine, other = dict(a.named_slots()), dict(b.named_slots())
    if list(mine) != list(other):
        yield f"inputs {list(mine)} and {list(other)}"
        return
    for port, value in mine.items():
        if not _same_source(value, other[port]):
            yield f"input {port} reads {_source(value)} and {_source(other[port])}"


def _same_source(a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.node.type == b.node.type == "Const":
        mine, other = a.node.attrs.get("value"), b.node.attrs.get("value")
        if a.dtype != b.dtype or mine is None or other is None:
            return False
        return same_attr(mine, other)
    return a.edge == b.edge


def _source(value: Value | None) -> str:
    if value is None:
        return "nothing"
    payload = value.node.attrs.get("value") if value.node.type == "Const" else None
    return value.edge if payload is None else f"{value.edge} = {payload.value}"


def _value_differences(a: Value, b: Value, strict: bool) -> Iterator[str]:
    mine, other = _description(a, strict), _description(b, strict)
    yield from (
        f"{what} {facts} and {other[what]}" for what, facts in mine.items() if facts != other[what]
    )
    if strict:
        yield from _attr_differences(a.attrs, b.attrs, strict)


def _description(value: Value, strict: bool) -> dict[str, Any]:
    facts = {"port": value.port, "type": dtype_name(value.dtype), "dims": on_wire(value.shape)}
    if strict:
        facts["symbolic dims"] = str(value.shape)
        facts |= {"layout": value.layout, "device type": value.device_type}
    return facts
