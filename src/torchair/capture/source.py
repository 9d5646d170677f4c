"""A captured FX graph as a readable program that runs. The text is written for people and
debuggers; the product never executes it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import fx

from torchair.engine.plan.records import extent
from torchair.torch_private import symbols

_LARGEST = 1024  # elements of a constant that is written out
_PLAIN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
_KNOWN = {  # names that FX puts into its code without an import
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "NoneType = type(None)",
    "torch": "import torch",
    "device": "from torch import device",
    "fx_pytree": "import torch.fx._pytree as fx_pytree",
    "pytree": "import torch.utils._pytree as pytree",
}


# ---- what generated programs import ----


class Constants:
    """Values that a graph holds, by name. Those that a program cannot hold say so when used."""

    def __init__(self) -> None:
        self._absent: dict[str, str] = {}

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a value is not in the program."""
        self._absent[name] = reason

    def __getattr__(self, name: str) -> Any:
        reason = self.__dict__.get("_absent", {}).get(name)
        if reason is None:
            raise AttributeError(f"the graph holds nothing named {name!r}")
        raise RuntimeError(f"{name} is not part of this program: {reason}")


def rand_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A tensor with this layout: random numbers, or zeros where they might be positions."""
    count = extent(size, stride)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        flat = torch.randn(count, dtype=wide, device=device).to(dtype)
    else:
        flat = torch.zeros(count, dtype=dtype, device=device)
    return flat.as_strided(size, stride)


def assert_size_stride(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> None:
    """Make sure that an argument has the layout that a graph was traced for."""
    got = list(zip(tensor.shape, tensor.stride(), strict=True))
    wanted = list(zip(size, stride, strict=True))
    assert len(got) == len(wanted), f"an argument has {len(got)} dims, expected {len(wanted)}"
    for d, ((n, step), (dim, expected)) in enumerate(zip(got, wanted, strict=True)):
        assert n == dim and (step == expected or n == 1), (
            f"an argument has size {n} and stride {step}, expected size {dim} and stride "
            f"{expected} at dim={d}: the graph was traced for {tuple(size)}, {tuple(stride)}"
        )


_PROGRAM = """\
# {name} as a program: `python output_code.py` calls `kernel` twice with random
# numbers. Custom operators have to be imported first.

{imports}
{constants}

{body}

compile_configs = {{}}
{options}acl_graph = AclGraph(fx_forward=forward, config=compile_configs)
aclgraph_cache_info = AclGraphCacheInfo(
{fields})
acl_graph.load(aclgraph_cache_info)

_is_first_run = True


def kernel(*args, **kwargs):
{checks}    return acl_graph(*args, **kwargs)


def main():
{sample}    args = [{args}]
    kernel(*args)
    return kernel(*args)


if __name__ == "__main__":
    main()
"""


def render(
    gm: fx.GraphModule,
    configs: Mapping[str, Any],
    cache_info: Any,
    inputs: Sequence[Any] | None = None,
) -> str:
    """The program of a graph.

    `configs` are the options of the run time and `cache_info` the dataclass that describes the
    graph to it, both plain values. `inputs` are example inputs, the ones of tracing by default.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = [str(n.target) for n in placeholders]
    if inputs is None:
        inputs = [n.meta.get("val") for n in placeholders]
    function = _PrintedFunction(gm, "forward", "tensor_constants")
    parts = {
        "constants": "\n".join(function.constants()),
        "body": "\n".join(function.lines("*args, node_info=[], is_capturing: bool = False")),
        "checks": "".join(f"{line}\n" for line in _checks(inputs)),
        "sample": "".join(f"    {line}\n" for line in _sample(names, inputs)),
    }
    known = [(f.name, getattr(cache_info, f.name)) for f in dataclasses.fields(cache_info)]
    return _PROGRAM.format(
        name=cache_info.fx_graph_name,
        args=", ".join(names),
        imports="\n".join(_imports(function.globals(), "\n".join(parts.values()))),
        options="".join(f'compile_configs["{k}"] = {_literal(v)}\n' for k, v in configs.items()),
        fields="".join(f"    {k}={_literal(v)},\n" for k, v in known),
        **parts,
    )


def _imports(known: Mapping[str, Any], text: str) -> Iterator[str]:
    """Import lines for what the text uses."""
    used = {n: value for n, value in known.items() if re.search(rf"\b{n}\b(?!\s*=)", text)}
    lines = {"import torch", *(_KNOWN[name] for name in used if name in _KNOWN)}
    if "math." in text:
        lines.add("import math")
    yield from sorted(lines, key=lambda line: (line.startswith("from"), line))
    yield ""
    if "torch.ops.air." in text:
        yield "import torchair.ops"
    yield "from torchair.capture.graph import AclGraph, AclGraphCacheInfo"
    ours = [name for name in ("Constants", "assert_size_stride", "rand_strided") if name in text]
    if ours:
        yield f"from torchair.capture.source import {', '.join(ours)}"
    yield ""
    for name, value in used.items():
        if name not in _KNOWN:
            yield _import(name, value)


def _import(name: str, value: Any) -> str:
    """The line that makes `name` stand for a module, function or class."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and path.isidentifier() and getattr(_module(module), path, None) is value:
        return f"from {module} import {path} as {name}"
    return f"{name} = None  # {' '.join(repr(value).split())} cannot be imported"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _literal(value: Any) -> str:
    """Text that stands for a plain value."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    try:
        plain = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        plain = False
    if not plain:
        raise TypeError(f"{text} of type {type(value).__name__} has no literal")
    return text


# ---- functions and their constants ----


class _PrintedFunction:
    """A graph module as the text of a function. Graphs that it holds become functions too."""

    def __init__(self, gm: fx.GraphModule, name: str, constants: str) -> None:
        self._gm, self._name, self._constants = gm, name, constants
        self._code = gm.graph.python_code(root_module=constants, verbose=True)
        self._attributes = {
            str(node.target): attrgetter(str(node.target))(gm)
            for node in gm.graph.nodes
            if node.op in ("get_attr", "call_module")
        }
        self._inner = {
            path: _PrintedFunction(value, f"{name}_{path.replace('.', '_')}", f"{path}_constants")
            for path, value in self._attributes.items()
            if isinstance(value, fx.GraphModule)
        }

    def lines(self, parameters: str = "*args") -> Iterator[str]:
        """The definition."""
        for inner in self._inner.values():
            yield from inner.constants()
            yield ""
            yield from inner.lines()
            yield ""
        for path, inner in self._inner.items():
            yield f"{self._constants}.{path} = {inner._name}"
        if self._inner:
            yield ""
        yield ""
        yield f"def {self._name}({parameters}):"
        names = [str(n.target) for n in self._gm.graph.find_nodes(op="placeholder")]
        if names:
            yield f"    {', '.join(names)}, = args"
        yield from self._body()

    def _body(self) -> list[str]:
        """What FX writes, without its header: that is one line."""
        lines = self._code.src.strip("\n").splitlines()
        start = next(k for k, line in enumerate(lines) if line.startswith("def forward("))
        body = [line.rstrip() for line in lines[start + 1 :]]
        while body and not body[0]:
            del body[0]
        return body

    def globals(self) -> dict[str, Any]:
        """Names that the functions use, and what they stand for."""
        known = dict(self._code.globals)
        for inner in self._inner.values():
            known |= inner.globals()
        return known

    def constants(self) -> Iterator[str]:
        """Lines that make the values the graph holds."""
        if self._attributes:
            yield f"{self._constants} = Constants()"
        for parent in sorted({path.rpartition(".")[0] for path in self._attributes} - {""}):
            parts = parent.split(".")
            for k in range(len(parts)):
                yield f"{self._constants}.{'.'.join(parts[: k + 1])} = Constants()"
        for path, value in self._attributes.items():
            if path in self._inner:
                continue
            owner, _, name = f"{self._constants}.{path}".rpartition(".")
            reason = _why_not(value)
            if reason is None:
                yield f"{owner}.{name} = {_tensor_text(value)}"
            else:
                yield f"# error: {name} is missing here, {reason}"
                yield f"{owner}.leave_out({name!r}, {reason!r})"


def _why_not(value: Any) -> str | None:
    """The reason why a value that a graph holds is not written out."""
    if not isinstance(value, torch.Tensor):
        return f"it is of type {type(value).__name__}"
    known = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"
    if not known or value.layout is not torch.strided or value.is_quantized:
        return f"it is a {type(value).__name__} on {value.device} with layout {value.layout}"
    if value.numel() > _LARGEST:
        return f"it is {value.dtype} of {list(value.shape)}, more than {_LARGEST} elements"
    return None


def _tensor_text(tensor: torch.Tensor) -> str:
    """An expression for the very same numbers in the same layout."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    here = tensor.cpu().contiguous()
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype in _PLAIN and tensor.numel():
        text = f"torch.tensor({here.tolist()}, dtype={dtype})"
    elif tensor.numel():
        raw = here.reshape(-1).view(torch.uint8).tolist()
        text = f"torch.tensor({raw}, dtype=torch.uint8).view({dtype}).reshape({shape})"
    else:
        text = f"torch.empty({shape}, dtype={dtype})"
    if not tensor.is_contiguous():
        text = f"torch.empty_strided({shape}, {tensor.stride()}, dtype={dtype}).copy_({text})"
    return text if tensor.device.type == "cpu" else f"{text}.to({str(tensor.device)!r})"


def _checks(inputs: Sequence[Any]) -> list[str]:
    """The first call makes sure that its arguments are as the graph was traced for."""
    sources = _symbol_sources(inputs)
    checks, used = [], set()
    for i, value in enumerate(inputs):
        empty = isinstance(value, torch.Tensor) and 0 in [d for d in value.shape if type(d) is int]
        if empty or not isinstance(value, torch.Tensor):
            continue
        symbols = _symbols((*value.shape, *value.stride()))
        if symbols <= set(sources):
            used |= symbols
            size, stride = _dims(value.shape), _dims(value.stride())
            checks.append(f"        assert_size_stride(args[{i}], {size}, {stride})")
    if not checks:
        return []
    bound = [f"        {name} = {text}" for name, text in sources.items() if name in used]
    head = ["    global _is_first_run", "    if _is_first_run:"]
    return [*head, *bound, *checks, "        _is_first_run = False"]


def _sample(names: Sequence[str], inputs: Sequence[Any]) -> Iterator[str]:
    """Random inputs; symbols get small different sizes."""
    for name, size in _sample_sizes(inputs).items():
        yield f"{name} = {size}"
    for name, value in zip(names, inputs, strict=True):
        yield f"{name} = {_sample_of(value)}"


def _sample_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size, stride = _dims(value.shape), _dims(value.stride())
        where = f"dtype={value.dtype}, device={str(value.device)!r}"
        return f"rand_strided({size}, {stride}, {where})"
    if isinstance(value, torch.SymBool):
        return "True"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _text(value)
    return _literal(value)


def _sample_sizes(inputs: Sequence[Any]) -> dict[str, str]:
    """A value for each symbol: two more than the position of the first argument that has it."""
    sizes: dict[str, str] = {}
    numbers = [
        (i, v) for i, v in enumerate(inputs) if isinstance(v, (torch.SymInt, torch.SymFloat))
    ]
    for i, value in numbers:
        if value.node.expr.is_Symbol:
            kind = float if isinstance(value, torch.SymFloat) else int
            sizes.setdefault(str(value.node.expr), repr(kind(i + 2)))
    for i, value in enumerate(inputs):
        dims = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for name in sorted(_symbols(dims)):
            sizes.setdefault(name, str(i + 2))
    return sizes


def _symbol_sources(inputs: Sequence[Any]) -> dict[str, str]:
    """Where a call has the values of symbols: in a number, or in the size of a tensor."""
    sources: dict[str, str] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr.is_Symbol:
            sources.setdefault(str(value.node.expr), f"args[{i}]")
    for i, value in enumerate(inputs):
        for d, dim in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(dim, int) and dim.node.expr.is_Symbol:
                sources.setdefault(str(dim.node.expr), f"args[{i}].size({d})")
    return sources


def _symbols(dims: Sequence[Any]) -> set[str]:
    kinds = (torch.SymInt, torch.SymFloat)
    return {str(s) for d in dims if isinstance(d, kinds) for s in d.node.expr.free_symbols}


def _dims(dims: Sequence[Any]) -> str:
    texts = [str(d) if isinstance(d, int) else _text(d) for d in dims]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _text(value: Any) -> str:
    return symbols.PythonPrinter().doprint(value.node.expr)
