"""Compiled functions and methods in a file of the caller's choice, loaded without their source.

The names are those of the original's internal module, `torchair.inference._cache_compiler`."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.options import MAX_AUTOTUNE, NPUGRAPH_EX
from torchair.deploy.artifact import FILE, VERSION, VERSIONS, Artifact
from torchair.deploy.cached import (
    CachedMethod,
    cache_compile,
    check_versions,
    config_of,
    engine_settings,
)
from torchair.deploy.compiled import CompiledModel
from torchair.deploy.homes import Roots
from torchair.deploy.sharing import SharedMemory
from torchair.deploy.stored import NotStored, loaded
from torchair.deploy.trees import CallShape
from torchair.deploy.version import Version
from torchair.errors import InputError

Path_ = str | os.PathLike[str]


class CacheFile:
    """Where `cache_compile` keeps a method, and in which version."""

    VERSION, FILE = VERSION, FILE

    @staticmethod
    def get_cache_bin(func: Callable[..., Any], **given: Any) -> str:
        """The path of the file that `cache_compile` has for a method, given the same."""
        with warnings.catch_warnings(action="ignore"):  # they come with the compilation
            return str(cache_compile(func, **given).path)


class NpugraphExCacheFile(CacheFile):
    """The same under npugraph_ex."""

    VERSION = VERSIONS[NPUGRAPH_EX]


class CacheSaver:
    """Files of compiled methods as a whole."""

    @staticmethod
    def remove_cache(path: Path_) -> None:
        """Remove a file of `get_cache_bin` with its folder, or that folder."""
        folder = Path(path).parent if Path(path).name == FILE else Path(path)
        shutil.rmtree(folder, ignore_errors=True)


class _Compiled:
    """Compiles once, for inputs that are given first, into a file that is given last."""

    KIND: type
    WORD = ""

    def __init__(
        self, func: Callable[..., Any], *, config: CompilerConfig | None = None,
        dynamic: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(func, self.KIND):
            raise ValueError(f"{type(self).__name__} takes a {self.WORD}, not {func!r}")
        self._func, self._config, self._dynamic = func, config_of(config, None), dynamic
        self._inputs: tuple[Any, Any] | None = None
        self._saved = False

    def for_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the call that is traced."""
        self._inputs = args, kwargs
        return self

    def save_to(self, path: Path_) -> Any:
        """Compile, run once and write the file; the result of that call."""
        if self._inputs is None:
            raise RuntimeError("say what to compile for first: for_inputs(...).save_to(path)")
        if self._saved:
            raise RuntimeError("save_to is called once; make another object for another file")
        target = Path(os.path.abspath(path))
        if target.exists():
            raise ValueError(f"{target} exists: choose another path, or remove it")
        self._saved = True
        (args, kwargs), self._inputs = self._inputs, None
        result = _Saving(self._func, self._config, self._dynamic, target)(*args, **kwargs)
        if not target.exists():
            raise RuntimeError(f"{target} was not written; the warning before this says why")
        return result


class NoGuardFunction(_Compiled):
    """A plain function. Modules that it names are found again by their names."""

    KIND, WORD = FunctionType, "function"

    @classmethod
    def load(cls, path: Path_) -> FromFile:
        """The function of a file; modules that it uses are globals of the caller."""
        known = sys._getframe(1).f_globals
        found = Artifact.read(Path(path))
        weights = [w["name"] for w in found.weights if w["name"]]
        if any(not name.startswith("<") for name in weights):
            raise ValueError(f"{path} holds a method: load it with a module as `self`")
        names = {name[1:].partition(">")[0] for name in weights}
        return FromFile(found, {f"<{n}>": _module(n, known.get(n)) for n in names})


class NoGuardMethod(_Compiled):
    """A method of a module."""

    KIND, WORD = MethodType, "bound method"

    @classmethod
    def load(cls, path: Path_, *, self: torch.nn.Module) -> FromFile:
        """The method of a file, for a module that is like the first one."""
        return FromFile(Artifact.read(Path(path)), {"": self})


def _module(name: str, found: Any) -> torch.nn.Module:
    if not isinstance(found, torch.nn.Module):
        raise ValueError(f"the function uses a module {name}, which is not a global of the caller")
    return found


class _Saving(CachedMethod):
    """A call that writes its file where it is told to."""

    def __init__(
        self, func: Any, config: CompilerConfig, dynamic: bool, target: Path
    ) -> None:
        CompiledModel.__init__(self, func, config, dynamic, "recompile", {})
        self._method, self._path = func, target
        self._unsaved, self._keeps = None, True
        self._captures = config.mode.value != MAX_AUTOTUNE

    def _tell_other_options(self) -> None:
        """There is no folder of others."""


class FromFile(CompiledModel):
    """What a file holds, as a function. A call of another kind is an AssertionError."""

    def __init__(self, found: Artifact, roots: Roots) -> None:
        config = CompilerConfig()
        with warnings.catch_warnings(action="ignore"):  # of an old name of a mode
            config.mode = found.mode
        super().__init__(self._missing, config, False, "error", {})
        self._found, self._roots = found, roots

    @staticmethod
    def _missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a file holds no source")

    def __repr__(self) -> str:
        return f"<compiled {self._found.name}>"

    def _slowly(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if not self.versions:
                self.versions.append(self._version(args, kwargs))
        return super()._slowly(*args, **kwargs)

    def _version(self, args: Any, kwargs: Mapping[str, Any]) -> Version:
        shape = CallShape(args, dict(kwargs), self._found.arguments["names"])
        try:
            check_versions(self._found)
            return loaded(
                self._found, self._roots, shape, engine_settings(self._config), self._config
            )
        except NotStored as e:
            raise ValueError(f"{self._found.name} cannot be loaded: {e}") from e

    def _find(self, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return super()._find(args, kwargs)
        except InputError as e:
            raise AssertionError(str(e)) from e

    def _eagerly(self, reason: SharedMemory, args: Any, kwargs: Any) -> Any:
        raise AssertionError(str(reason)) from reason
