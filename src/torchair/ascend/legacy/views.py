"""Names of the original as views of what compiles and runs here: nothing in this file computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.configs.compiler_config import CompilerConfig, FlatConfig
from torchair.convert import registry
from torchair.convert.interpreter import ValuePack
from torchair.deploy import cached
from torchair.npugraph_ex.backend import cache_compile, tree_of
from torchair.pipeline import NpuFxCompiler

# ---- values of a conversion


def unpack_meta_list(args: Sequence[Any]) -> list[Any]:
    """What tracing saw of values, where that is known."""
    return [a.meta if isinstance(a, ValuePack) else a for a in args]


def is_symlist(arg: Any) -> bool:
    """Whether a list has a size among its values."""
    if not isinstance(arg, list | tuple):
        return False
    return any(isinstance(v, ValuePack) and isinstance(v.meta, int | torch.SymInt) for v in arg)


# ---- converters by operator


class _Converters(MutableMapping[Any, Any]):
    """The registry as a table: converters by operator, None where there is none."""

    def __getitem__(self, op: Any) -> Callable[..., Any] | None:
        entry = registry.registered_for(op)
        return None if entry is None else entry.fn

    def __setitem__(self, op: Any, converter: Callable[..., Any]) -> None:
        registry.register_fx_node_ge_converter(op)(converter)

    def __delitem__(self, op: Any) -> None:
        registry.unregister(op)

    def __contains__(self, op: object) -> bool:
        return registry.registered_for(op) is not None

    def __iter__(self) -> Iterator[Any]:
        return iter(registry.registered())

    def __len__(self) -> int:
        return len(registry.registered())


CONVERTERS = _Converters()


# ---- compiled graphs


class NpugraphExCacheFile(cached.NpugraphExCacheFile):
    """Files of methods that npugraph_ex has compiled."""

    @staticmethod
    def get_cache_bin(func: Callable[..., Any], **given: Any) -> str:
        """The path of the file that `npugraph_ex.inference.cache_compile` has for a method."""
        with warnings.catch_warnings(action="ignore"):  # they come with the compilation
            return str(cache_compile(func, **given).path)


class NpugraphExCompiler(NpuFxCompiler):
    """The compiler, made with the flat options of npugraph_ex."""

    def __init__(self, compiler_config: FlatConfig | CompilerConfig | None = None) -> None:
        config = FlatConfig() if compiler_config is None else compiler_config
        super().__init__(tree_of(config) if isinstance(config, FlatConfig) else config)


@dataclass(frozen=True)
class CompiledFxArtifacts:
    """A compiled graph as the text of a program. It is for reading: no code is run from a file
    here, and what `cache_compile` writes is data."""

    version: str = "0.1"
    py_code: str | None = None


class CompiledFxGraph:
    """A compiled graph and the options it was compiled with."""

    def __init__(self, runner: Callable[..., Any], config: Any = None) -> None:
        self.runner, self.config = runner, config

    def __call__(self, *args: Any) -> Any:
        return self.runner(*args)

    def get_code(self) -> str | Callable[..., Any]:
        """The graph as a program where there is one, else what runs."""
        graph = getattr(self.runner, "runner", self.runner)
        return graph.codegen() if hasattr(graph, "codegen") else self.runner

    def dump_artifacts(self) -> CompiledFxArtifacts:
        """The program as a value; RuntimeError where there is none."""
        code = self.get_code()
        if not isinstance(code, str):
            raise RuntimeError(f"Compiled fx type {self.runner} does not support serialize.")
        return CompiledFxArtifacts(py_code=code)
