"""Builders: `ge.Add(x, y)` adds one node to the default graph, for every operator prototype, and
`ge.custom_op` one of any operator type.

A builder takes the declared inputs by position or name, attributes by keyword, promotes Python
numbers, lists and torch tensors to Const, and returns the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from torchair.errors import GraphError
from torchair.ge import attrs as attr
from torchair.ge import dtypes
from torchair.ge.attrs import KINDS, Attr
from torchair.ge.dtypes import ConverterErrorMsg, DataType, torch_to_ge
from torchair.ge.graph import BuilderCall, Fact, Graph, Node, Slot, Value, get_default_ge_graph
from torchair.ge.prototypes import AttrSpec, Port, Prototype, prototype
from torchair.ge.shapes import Dim, Sym, symbol

COUNT_ATTRS = ("num_split", "num", "N", "num_partitions", "output_num", "top_paths")
"""Attributes that say how many outputs there are; a builder may be told otherwise."""
_SMALL = 64  # integers of Consts up to this length are known to shape rules


def Const(
    v: Any, dtype: int | None = None, node_name: str | None = None, readable: bool = True
) -> Value:
    """A constant from a number, a list, or a tensor of torch or numpy."""
    if isinstance(v, Value):
        raise ValueError(f"ge.Const takes a Python value or a torch tensor, not the tensor {v}")
    graph = get_default_ge_graph()
    tensor = const_tensor(torch.as_tensor(v) if isinstance(v, np.ndarray) else v, dtype)
    node = graph.add("Const", node_name)
    node.attrs["value"] = Attr("Tensor", tensor)
    if readable:
        node.attrs["_readable_value"] = attr.Str(_readable(v))
    value = add_output(node, "y")
    value.learn(const_fact(tensor))
    return value


def const_tensor(v: Any, dtype: int | None = None) -> torch.Tensor:
    """The tensor that a constant of this Python value holds."""
    target = None if dtype is None else dtypes.ge_to_torch(dtype)
    if isinstance(v, torch.Tensor):
        tensor = v.detach()
        return (tensor if target is None else tensor.to(target)).contiguous()
    if target is None:
        target = _default_dtype(v)
    return torch.tensor(v, dtype=target)


def _default_dtype(v: Any) -> torch.dtype:
    if isinstance(v, (list, tuple)) and not v:
        return torch.int32
    first = v
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, bool):
        return torch.bool
    if isinstance(first, np.generic) and not isinstance(first, float):
        return torch.as_tensor(first).dtype
    if isinstance(first, complex):
        return torch.complex64
    flat_float = isinstance(first, float) or (
        isinstance(v, (list, tuple)) and any(isinstance(x, float) for x in v)
    )
    return torch.float32 if flat_float else torch.int64


def const_fact(tensor: torch.Tensor) -> Fact:
    """Type, dims and, for short integer vectors, the content of a constant."""
    known = None
    integral = not (
        tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.is_quantized
    )
    small = integral and tensor.dim() <= 1 and tensor.numel() <= _SMALL
    if small and tensor.device.type != "meta":
        known = tuple(tensor.tolist()) if tensor.dim() else tensor.item()
    return Fact(torch_to_ge(tensor.dtype), tuple(tensor.shape), known)


def _readable(v: Any) -> str:
    """What a person sees of a value; files have the exact text where this one is not."""
    if isinstance(v, torch.Tensor):
        return repr(v.detach())
    return repr(v) if isinstance(v, np.ndarray) else number_text(v)


def tensor_text(t: torch.Tensor) -> str:
    """A tensor as an exact Python expression."""
    t = t.detach().cpu()
    t = t.int_repr() if t.is_quantized else t
    if t.dtype.is_complex and t.numel():
        return f"tensor({number_text(t.to(torch.complex128).tolist())})"
    exact = t.double() if t.dtype.is_floating_point else t
    text = f"tensor({number_text(exact.tolist())})"
    return text if t.numel() else f"tensor([]).reshape({list(t.shape)})"


def number_text(v: Any) -> str:
    """A number or nested list as a Python expression that needs no names (inf, nan included)."""
    if isinstance(v, (list, tuple)):
        return "[" + ", ".join(number_text(x) for x in v) + "]"
    if isinstance(v, complex):
        return f"complex({number_text(v.real)}, {number_text(v.imag)})"
    if isinstance(v, float):
        if v != v:
            return "(1e999-1e999)"
        if v in (float("inf"), float("-inf")):
            return "1e999" if v > 0 else "-1e999"
    return repr(v)


def Data(
    *,
    index: int,
    dtype: int,
    shape: Sequence[Dim] | None = None,
    placement: str = "NPU",
    node_name: str | None = None,
) -> Value:
    """A graph input. A dim of -1 becomes a symbol named after the input; no shape: any rank."""
    assert placement in ("CPU", "NPU"), f"placement must be 'CPU' or 'NPU', got {placement!r}"
    graph = get_default_ge_graph()
    node = graph.add("Data", node_name)
    node.attrs["index"] = attr.Int(index)
    value = add_output(node, "y")
    dims = None if shape is None or list(shape) == [-2] else _input_dims(node.name, shape)
    host_size = dims == () and dtype == DataType.DT_INT64 and placement == "CPU"
    value.learn(Fact(dtype, dims, symbol(node.name) if host_size else None))
    value.layout, value.device_type = "ND", placement
    given = {"index": index, "dtype": dtype, "shape": shape, "placement": placement}
    if shape is None:
        del given["shape"]
    _journal(graph, "Data", [], given | {"node_name": node_name}, value)
    return value


def _input_dims(name: str, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(
        symbol(f"{name}_d{i}") if isinstance(d, int) and d < 0 else d for i, d in enumerate(shape)
    )


def NetOutput(
    inputs: Sequence[Value], *, dependencies: Sequence[Value] = (), node_name: str | None = None
) -> None:
    """The graph's end: its results, each value once, and what else must have run."""
    graph = get_default_ge_graph()
    node = graph.add("NetOutput", node_name)
    node.set_input("input", list(dict.fromkeys(inputs)))
    for dependency in dependencies:
        node.after(dependency.node)
    graph.journal.append("")
    _journal(graph, "NetOutput", [list(inputs)], {"dependencies": list(dependencies)}, None)


def Clone(x: Value, *, dependencies: Sequence[Value] = (), node_name: str | None = None) -> Value:
    """A copy of a tensor (operator TensorMove)."""
    assert isinstance(x, Value), f"ge.Clone takes a ge.Tensor, got {type(x).__name__}"
    return builder("TensorMove")(x, dependencies=dependencies, node_name=node_name)


@cache
def builder(op_type: str) -> Callable[..., Any]:
    """The builder function of an operator type; AttributeError when there is no such type."""
    special: dict[str, Callable[..., Any]] = {"Const": Const, "Data": Data, "NetOutput": NetOutput}
    if op_type in special:
        return special[op_type]
    proto = prototype(op_type)
    if proto is None:
        raise AttributeError(f"no operator {op_type!r} among the GE prototypes")

    def build(*args: Any, dependencies: Any = (), node_name: str | None = None, **kw: Any) -> Any:
        return _build(proto, args, kw, dependencies, node_name)

    build.__name__ = build.__qualname__ = op_type
    build.__doc__ = _signature_text(proto)
    return build


def _signature_text(proto: Prototype) -> str:
    marks = {"required": "", "optional": "?", "dynamic": "*"}
    inputs = [p.name + marks[p.kind] for p in proto.inputs]
    attrs = [a.name if a.required else f"{a.name}={a.default!r}" for a in proto.attrs]
    outputs = ", ".join(p.name for p in proto.outputs) or "None"
    return f"{proto.type}({', '.join([*inputs, '*', *attrs])}) -> {outputs}"


def _build(
    proto: Prototype, args: Sequence[Any], kw: dict[str, Any], deps: Any, node_name: str | None
) -> Any:
    graph = get_default_ge_graph()
    given = _bind(proto, args, kw)
    slots = _promote(proto, given)
    node = graph.add(proto.type, node_name)
    for port, slot in slots.items():
        node.set_input(port, slot)
    sizes = {k: v for k, v in kw.items() if k.startswith("size_of_")}
    for name, value in kw.items():
        if name not in given and name not in sizes and value is not None:
            node.attrs[name] = _typed(f"ge.{proto.type}", proto.by_name[name], value, TypeError)
    for dependency in deps or ():
        assert isinstance(dependency, Value), "dependencies must be ge.Tensor"
        node.after(dependency.node)
    result = _declared(node, [_output(node, proto, port, sizes) for port in proto.outputs])
    if graph.depth == 0:
        shown = {k: v for k, v in kw.items() if k not in given}
        if deps:
            shown["dependencies"] = list(deps)
        if node_name is not None:
            shown["node_name"] = node_name
        _journal(graph, proto.type, _positional(proto, given), _in_order(proto, shown), result)
    return result


def _bind(proto: Prototype, args: Sequence[Any], kw: dict[str, Any]) -> dict[str, Any]:
    names = [p.name for p in proto.inputs]
    if len(args) > len(names):
        raise TypeError(f"ge.{proto.type} takes {len(names)} inputs {names}, got {len(args)}")
    given = dict(zip(names, args, strict=False))
    specs = proto.by_name
    for key, value in kw.items():
        if key in names:
            if key in given:
                raise TypeError(f"ge.{proto.type} got input {key!r} twice")
            given[key] = value
        elif key not in specs and not key.startswith("size_of_"):
            legal = ", ".join([*names, *specs])
            raise TypeError(f"ge.{proto.type} has no argument {key!r}; it takes {legal}")
    missing = [p.name for p in proto.inputs if p.kind != "optional" and given.get(p.name) is None]
    if missing:
        raise TypeError(f"ge.{proto.type} needs input {missing[0]!r}")
    lacking = [a.name for a in proto.attrs if a.required and kw.get(a.name) is None]
    lacking = [a for a in lacking if not (a in COUNT_ATTRS and proto.has_dynamic_output)]
    if lacking:
        raise TypeError(f"ge.{proto.type} needs attribute {lacking[0]!r}")
    return given


def _positional(proto: Prototype, given: dict[str, Any]) -> list[Any]:
    shown = [given.get(p.name) for p in proto.inputs]
    while shown and shown[-1] is None and proto.inputs[len(shown) - 1].name not in given:
        shown.pop()
    return shown


def _in_order(proto: Prototype, shown: dict[str, Any]) -> dict[str, Any]:
    order = [a.name for a in sorted(proto.attrs, key=lambda a: not a.required)]
    ranked = sorted(shown, key=lambda k: order.index(k) if k in order else len(order))
    return {k: shown[k] for k in ranked}


def _typed(op: str, spec: AttrSpec, value: Any, wrong: type[Exception]) -> Attr:
    if isinstance(value, Attr):
        return value
    if isinstance(value, torch.dtype):
        value = torch_to_ge(value)
    try:
        return Attr(spec.kind, value)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as e:
        raise wrong(f"{op}: attribute {spec.name!r} is a {spec.kind}, got {value!r}") from e


def _promote(proto: Prototype, given: dict[str, Any]) -> dict[str, Slot]:
    tensors = [v for slot in given.values() for v in (slot if _is_list(slot) else [slot])]
    types = {v.dtype for v in tensors if isinstance(v, Value)}
    slots: dict[str, Slot] = {}
    for port in proto.inputs:
        value = given.get(port.name)
        if port.kind == "dynamic":
            assert _is_list(value), f"ge.{proto.type}: input {port.name} takes a list of tensors"
            slots[port.name] = [_promote_one(proto, port, v, types) for v in value or ()]
        elif value is None:
            slots[port.name] = None
        else:
            slots[port.name] = _promote_one(proto, port, value, types)
    return slots


def _is_list(v: Any) -> bool:
    return isinstance(v, (list, tuple))


def _promote_one(proto: Prototype, port: Port, value: Any, types: set[int]) -> Value:
    if isinstance(value, Value):
        return value
    if isinstance(value, Sym) or (_is_list(value) and any(isinstance(v, Value) for v in value)):
        raise TypeError(
            f"ge.{proto.type}: input {port.name} got {value!r}; pack symbolic sizes with ge.Pack"
        )
    if isinstance(value, torch.Tensor):
        return Const(value)
    return Const(value, dtype=_const_dtype(proto, port, value, types))


def _const_dtype(proto: Prototype, port: Port, value: Any, types: set[int]) -> int | None:
    plain = _default_dtype(value)
    if port.is_index:
        return max(port.types) if value not in ([], ()) else DataType.DT_INT32
    if plain is torch.float32:
        return _single(proto, types & dtypes.FLOAT_TYPES, DataType.DT_FLOAT)
    if plain is torch.int64:
        return _single(proto, types & dtypes.INT_TYPES, DataType.DT_INT64)
    return torch_to_ge(plain)


def _single(proto: Prototype, found: set[int], default: int) -> int:
    assert len(found) <= 1, (
        f"ge.{proto.type}: a Python number next to tensors of different types {sorted(found)}; "
        "make it a ge.Const with an explicit dtype"
    )
    return found.pop() if found else default


def _output(
    node: Node, proto: Prototype, port: Port, sizes: dict[str, int]
) -> str | tuple[str, int]:
    """The name of an output, with their number if there are several of it."""
    if port.kind != "dynamic":
        return port.name
    count = sizes.get(f"size_of_{port.name}")
    return port.name, _output_count(node, proto) if count is None else count


def returned(groups: Sequence[Any]) -> Any:
    """What a builder returns: nothing, an output or a list of them, or a tuple of several."""
    if not groups:
        return None
    return groups[0] if len(groups) == 1 else tuple(groups)


def add_output(node: Node, port: str) -> Value:
    """Append one output to a node."""
    value = Value(node, len(node.outputs), port)
    node.outputs.append(value)
    return value


def _output_count(node: Node, proto: Prototype) -> int:
    for name in COUNT_ATTRS:
        if name in node.attrs:
            return int(node.attrs[name].value)
    lists = [s for s in node.inputs.values() if isinstance(s, list)]
    assert lists, f"ge.{proto.type}: say how many outputs with size_of_{proto.outputs[0].name}="
    return len(lists[0])


def infer_node(node: Node) -> None:
    """Let the graph's injected rules fill in types and dims of a node's outputs."""
    if node.graph.infer is None:
        return
    for value, fact in zip(node.outputs, node.graph.infer(node), strict=True):
        value.learn(fact)


def _journal(graph: Graph, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
    if not graph.depth:
        graph.journal.append(BuilderCall(name, args, kwargs, result))


def connect(node: Node, edges: Sequence[str], names: Sequence[str]) -> None:
    """Give a node what it reads and waits for, by edge texts and, for what it reads, names as files
    have them; GraphError where these do not fit."""
    for edge in edges:
        if edge.endswith(":-1"):
            node.after(node.graph.node(edge.removesuffix(":-1")))
    data = [edge for edge in edges if not edge.endswith(":-1")]
    if len(data) != len(names):
        raise GraphError(
            f"operator {node.name!r} has {len(data)} inputs and {len(names)} descriptions",
            hint="each input has a description, control edges have none",
        )
    values = [node.graph.value(edge) if edge else None for edge in data]
    for port, slot in _slots_by_port(node.prototype, names, values):
        if port in node.inputs:
            raise GraphError(f"two inputs are named {port!r}")
        node.set_input(port, slot)


def _slots_by_port(
    proto: Prototype | None, names: Sequence[str], values: Sequence[Value | None]
) -> list[tuple[str, Slot]]:
    """Inputs by port: `x0`, `x1` become one list where the prototype says that x is variable."""
    variable = [p.name for p in proto.inputs if p.kind == "dynamic"] if proto else []
    fixed = {p.name for p in proto.inputs if p.kind != "dynamic"} if proto else set()
    found: list[tuple[str, Slot]] = []
    lists: dict[str, list[Value]] = {port: [] for port in variable}
    for name, value in zip(names, values, strict=True):
        port = next((p for p in variable if name == f"{p}{len(lists[p])}"), None)
        apart = port is not None and lists[port] and found[-1][0] != port
        if port is None or value is None or name in fixed or apart:
            found.append((name, value))
            continue
        if not lists[port]:
            found.append((port, lists[port]))
        lists[port].append(value)
    taken = {port for port, _ in found}
    return _with_empty(proto, found, [port for port in variable if port not in taken])


def _with_empty(
    proto: Prototype | None, found: list[tuple[str, Slot]], empty: list[str]
) -> list[tuple[str, Slot]]:
    """Variable ports without members leave no trace in a file; put them where they are declared."""
    declared = [p.name for p in proto.inputs] if proto else []
    for port in empty:
        later = declared[declared.index(port) + 1 :]
        place = next((i for i, (name, _) in enumerate(found) if name in later), len(found))
        found.insert(place, (port, []))
    return found


# ---- `ge.custom_op`, by position or with explicit ports ----


_KEYWORD_FORM = "use the keyword form custom_op(type, inputs={...}, outputs=[...], attrs={...})"
_WANTED: dict[str, tuple[Any, str]] = {
    "required": (Value, ConverterErrorMsg.INPUT_TYPE_REQUIRED),
    "dynamic": ((list, tuple), ConverterErrorMsg.INPUT_TYPE_DYNAMIC),
    "optional": ((Value, type(None)), ConverterErrorMsg.INPUT_TYPE_OPTIONAL),
}


def custom_op(
    op_type: str,
    *args: Any,
    inputs: dict[str, Slot] | None = None,
    outputs: list[str | tuple[str, int]] | None = None,
    attrs: dict[str, Attr] | None = None,
    node_name: str | None = None,
) -> Any:
    """Add one operator. Positional arguments follow the prototype: inputs, then attributes.

    The keyword form names every port itself and takes operator types without a prototype too.
    """
    if args:
        return _by_position(op_type, args, node_name)
    wrong = _wrong_inputs(inputs) or _wrong_attrs(attrs) or _wrong_outputs(outputs)
    if wrong is not None:
        raise AssertionError(f"Invalid {wrong} for custom op '{op_type}'.")
    node = get_default_ge_graph().add(op_type, node_name)
    for port, slot in (inputs or {}).items():
        node.set_input(port, slot)
    node.attrs.update(attrs or {})
    return _declared(node, outputs or [])


def _kind(value: Any) -> str:
    return type(value).__name__


def _wrong_inputs(inputs: Any) -> str | None:
    """What is wrong with inputs, None if they are a dict of ports."""
    if not isinstance(inputs, dict | None):
        return f"input type:{_kind(inputs)} vs expect one of [None, dict]"
    for port, slot in (inputs or {}).items():
        if not isinstance(slot, Value | None | list | tuple):
            expected = "one of [None, ge.Tensor, list[ge.Tensor]]"
            return f"input '{port}' type:{_kind(slot)} vs expect {expected}"
        for i, value in enumerate(slot if isinstance(slot, (list, tuple)) else []):
            if not isinstance(value, Value):
                return f"input '{port}'[{i}] type:{_kind(value)} vs expect 'ge.Tensor'"
    return None


def _wrong_attrs(attrs: Any) -> str | None:
    if not isinstance(attrs, dict | None):
        return f"attrs type:{_kind(attrs)} vs expect one of [None, dict]"
    for name, value in (attrs or {}).items():
        if not isinstance(value, Attr):
            allowed = sorted(f"ge.attr.{kind}" for kind in KINDS if kind not in ("Tensor", "Bytes"))
            return f"attr '{name}' type:{_kind(value)} vs expect one of [{', '.join(allowed)}]"
    return None


def _wrong_outputs(outputs: Any) -> str | None:
    if not isinstance(outputs, list | tuple | None):
        return f"output type:{_kind(outputs)} vs expect one of [list, tuple]"
    for item in outputs or ():
        if not isinstance(item, str | list | tuple):
            return f"output type:{_kind(item)} vs expect one of [str, tuple[str, int]]"
        if not isinstance(item, str) and [type(part) for part in item] != [str, int]:
            parts = ", ".join(_kind(part) for part in item)
            return f"output type:tuple[{parts}] vs expect tuple[str, int]"
    return None


def _declared(node: Node, outputs: Sequence[str | tuple[str, int]]) -> Any:
    """Give a node its outputs, and those what is known of them; as a builder returns them."""
    groups: list[Any] = []
    for item in outputs:
        if isinstance(item, str):
            groups.append(add_output(node, item))
        else:
            groups.append([add_output(node, f"{item[0]}{i}") for i in range(item[1])])
    infer_node(node)
    return returned(groups)


def _by_position(op_type: str, args: Sequence[Any], node_name: str | None) -> Any:
    proto = prototype(op_type)
    if proto is None:
        reason = ConverterErrorMsg.GE_IR_NOT_REGISTERED.format(name=op_type)
        raise RuntimeError(
            f"{reason} Declare it with ge.register_operator({op_type!r}, ...), or {_KEYWORD_FORM}"
        )
    expected = len(proto.inputs) + len(proto.attrs)
    if len(args) != expected:
        reason = ConverterErrorMsg.ARGS_COUNT_MISMATCH.format(
            op_type=op_type, expected=expected, actual=len(args)
        )
        inputs, attrs = _listed(proto.inputs), _listed(proto.attrs)
        raise IndexError(f"{reason} Its inputs are {inputs}, its attributes {attrs}")
    fed = {p.name: _input(op_type, p, v) for p, v in zip(proto.inputs, args, strict=False)}
    given = {
        a.name: _typed(op_type, a, v, ValueError)
        for a, v in zip(proto.attrs, args[len(proto.inputs) :], strict=True)
        if v is not None
    }
    assert not proto.has_dynamic_output, f"{op_type} has a variable output; {_KEYWORD_FORM}"
    outputs: list[str | tuple[str, int]] = [p.name for p in proto.outputs]
    return custom_op(op_type, inputs=fed, outputs=outputs, attrs=given, node_name=node_name)


def _listed(specs: Sequence[Port | AttrSpec]) -> str:
    return f"({', '.join(s.name for s in specs)})"


def _input(op_type: str, port: Port, value: Any) -> Slot:
    kinds, reason = _WANTED[port.kind]
    if not isinstance(value, kinds):
        message = reason.format(op_type=op_type, name=port.name, param_type=port.kind)
        raise TypeError(f"{message} It is a {type(value).__name__}")
    return value
