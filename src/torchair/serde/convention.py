"""The calling convention of a graph as JSON text, and back by a reader that trusts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch

from torchair.errors import SerializationError
from torchair.ge import signature as kinds
from torchair.ge.shapes import Sym
from torchair.ge.signature import Computed, GraphResult, InputSource, InputView, Signature
from torchair.serde.codec import dims_text, parse_dims

_RESULTS: dict[str, Callable[..., GraphResult]] = {
    "fixed": kinds.Fixed,
    "computed": Computed,
    "scalar": kinds.ComputedScalar,
    "view": InputView,
    "part": kinds.ResultView,
    "symbol": kinds.SymbolResult,
}
_NAMES = {made: name for name, made in _RESULTS.items()}


@dataclass
class Convention:
    """How a finished graph is called: its signature, whose inputs are those of the graph after all
    passes, and which of its outputs update which inputs."""

    signature: Signature = field(default_factory=Signature)
    assigned: dict[int, int] = field(default_factory=dict)


def to_text(convention: Convention) -> str:
    """JSON text; SerializationError when a result is something that files do not hold."""
    signature = convention.signature
    return json.dumps(
        {
            "inputs": [_record(s) for s in signature.inputs],
            "results": [{"is": _NAMES[type(r)], **_record(r)} for r in signature.results],
            "symbols": signature.symbols,
            "arguments": signature.arguments,
            "assigned": sorted(convention.assigned.items()),
        },
        separators=(",", ":"),
    )


def from_text(text: str) -> Convention:
    """The convention of such a text; SerializationError for anything else."""
    try:
        found = json.loads(text)
        inputs = [_source(r) for r in found["inputs"]]
        results = [_result(r) for r in found["results"]]
        symbols = {
            _str(k): (_int(a), None if d is None else _int(d))
            for k, (a, d) in found["symbols"].items()
        }
        arguments = _int(found["arguments"])
        assigned = {_int(k): _int(v) for k, v in found["assigned"]}
    except SerializationError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise SerializationError(f"a calling convention is damaged: {problem}") from error
    return Convention(Signature(inputs, results, symbols, arguments), assigned)


def check(convention: Convention, inputs: int, outputs: int) -> None:
    """Whether a convention is one for a graph with so many inputs and outputs."""
    signature = convention.signature
    arguments = {a for s in signature.inputs for a in s.args}
    arguments |= {r.arg for r in signature.results if isinstance(r, InputView)}
    arguments |= {arg for arg, _ in signature.symbols.values()}
    used = {r.index for r in kinds.computed(signature.results)}
    used |= {r.index for r in signature.results if isinstance(r, kinds.ComputedScalar)}
    used |= set(convention.assigned)
    updated = set(convention.assigned.values())
    wrong = (
        len(signature.inputs) != inputs
        or not all(0 <= k < outputs for k in used)
        or not all(0 <= i < inputs and signature.inputs[i].args for i in updated)
        or not all(0 <= a < signature.arguments for a in arguments)
    )
    if wrong:
        raise SerializationError(
            f"a calling convention for {len(signature.inputs)} inputs does not fit a graph with "
            f"{inputs} inputs and {outputs} outputs"
        )


def _record(made: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(made, f.name)) for f in fields(made) if f.compare}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Sym):
        text = dims_text([value], "")
        if parse_dims(text) != (value,):
            raise SerializationError(f"the size {value} is beyond what files hold")
        return {"size": text}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Computed):
        return {"computed": _record(value)}
    if isinstance(value, torch.Tensor) and not value.numel() and value.dim() == 1:
        return {"empty": str(value.dtype).removeprefix("torch.")}
    raise SerializationError(f"a result is a {type(value).__name__}, which files do not hold")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(v) for v in plain)
    if not isinstance(plain, dict):
        return plain
    ((kind, text),) = plain.items()
    if kind == "computed":
        return _result({"is": kind, **text})
    if kind == "size":
        (size,) = parse_dims(_str(text))
        return size
    if kind == "empty":
        return torch.empty(0, dtype=_dtype(text))
    raise SerializationError(f"a calling convention holds {kind!r}, which is not read")


def _source(record: Mapping[str, Any]) -> InputSource:
    made = InputSource(
        tuple(_int(a) for a in record["args"]),
        record["kind"],
        _int(record["dtype"]),
        bool(record["static"]),
        _int(record["count"]),
    )
    known = made.kind in get_args(kinds.SourceKind)
    if not known or (made.kind in ("tensor", "scalar", "opaque") and len(made.args) != 1):
        raise SerializationError(f"an input of kind {made.kind!r} has {len(made.args)} arguments")
    if not 0 <= made.count < 1 << 32:
        raise SerializationError(f"{made.count} random offsets are not drawn")
    return made


def _result(record: Mapping[str, Any]) -> GraphResult:
    values = {k: _value(v) for k, v in record.items() if k != "is"}
    for name in ("index", "arg", "alias_group"):
        if name in values:
            _int(values[name])
    for dims in (values.get("shape", ()), values.get("strides", ())):
        if not all(isinstance(d, Sym) or (type(d) is int and d >= 0) for d in dims):
            raise SerializationError(f"{dims} are not dims")
    cast = values.get("cast", "")
    if cast not in kinds.CASTS:
        _dtype(cast)
    if "pending" in values:
        values["pending"] = _pending(values["pending"])
    if "base" in values and not isinstance(values["base"], Computed):
        raise SerializationError(f"{values['base']!r} is nothing that a result is a part of")
    if "device" in values:
        torch.device(_str(values["device"]))
    return _RESULTS[record["is"]](**values)


def _pending(found: Any) -> kinds.Pending:
    made = kinds.Pending(*found)
    if not set(made) <= set(kinds.PENDING):
        raise SerializationError(f"{found!r} is nothing that a tensor leaves to its readers")
    return made


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _str(name), None)
    if not isinstance(found, torch.dtype):
        raise SerializationError(f"{name!r} is not a type of torch")
    return found


def _int(value: Any) -> int:
    if type(value) is not int:
        raise SerializationError(f"{value!r} is not an integer")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise SerializationError(f"{value!r} is not a text")
    return value
