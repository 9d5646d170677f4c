"""`cache_compile`: a method of a module, compiled once and kept in a folder as data.

A later process reads graph, guards and names of weights from there, and kernels from the disk. It
traces nothing, so it loads neither Dynamo nor AOTAutograd. So do functions and methods in a file
of the caller's choice, which are loaded without their source.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from torchair.configs.compiler_config import CompilerConfig, engine_keys, warn_about
from torchair.configs.options import MAX_AUTOTUNE, NPUGRAPH_EX, given
from torchair.deploy import stored
from torchair.deploy.call_version import Version, autocast_types
from torchair.deploy.compiled import CompiledModel, shape_of
from torchair.deploy.guards import TracedGraph
from torchair.deploy.tensor_refs import Roots, SharedMemory, roots_of
from torchair.deploy.trees import CallShape
from torchair.errors import InputError
from torchair.fallbacks import Fallback, note
from torchair.flags import Flags
from torchair.garbage import no_garbage_collection
from torchair.log import logger, warn_once
from torchair.process import world
from torchair.store import FilePath
from torchair.trace import label, start_debug_log


def cache_compile(
    func: Callable[..., Any],
    *,
    config: CompilerConfig | None = None,
    dynamic: bool = True,
    cache_dir: str | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    backend: Callable[..., Any] | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    ge_cache: bool = False,
    **ignored: Any,
) -> CachedMethod:
    """A bound method of a module, compiled at its first call, or taken from `cache_dir`.

    It runs under `torch.no_grad()`. The folder is `<class>_<dynamic or static>_<hash of module and
    options>`, then one for each rank, then one of the method's name.
    """
    start_debug_log()
    known = given(config_of(config, backend), CompilerConfig)
    warn_about(known)
    ranks = global_rank, tp_rank, pp_rank
    return CachedMethod(func, known, dynamic, cache_dir, ranks, custom_decompositions, ge_cache)


def config_of(config: Any, backend: Callable[..., Any] | None) -> Any:
    """The configuration that both arguments agree on, None where none has one."""
    theirs = getattr(backend, "keywords", {}).get("compiler_config")
    if config is not None and theirs is not None and config != theirs:
        raise ValueError(
            "config in current backend is different from the config during cache generation."
        )
    return config if config is not None else theirs


Ranks = tuple[int | None, int | None, int | None]
"""Which of all processes this is, of those with parts of tensors, of those with layers."""


def rank_folder(whole: int | None, tensor: int | None, pipeline: int | None) -> str:
    """The name of the folder of this process, empty where it is alone."""
    size, rank = world() or (1, 0)
    number = rank if whole is None else whole
    parts = [f"world{size}global_rank{number}"] if size > 1 else []
    named = (("tp_rank", tensor), ("pp_rank", pipeline))
    return "_".join([*parts, *(f"{name}{n}" for name, n in named if n is not None)])


class CachedCall(CompiledModel):
    """A function or method that is compiled when it is first called, and kept in a file."""

    def __init__(
        self,
        func: Callable[..., Any],
        config: CompilerConfig,
        dynamic: bool,
        decompositions: Mapping[Any, Any] | None,
        path: Path | None = None,
    ) -> None:
        super().__init__(func, config, dynamic, "recompile", dict(decompositions or {}))
        self._path = path
        self._unsaved: tuple[stored.Artifact, TracedGraph] | None = None
        self._keeps = True  # until calls turn out to need several versions

    @property
    def path(self) -> Path:
        """The file."""
        assert self._path is not None
        return self._path

    def _usual_path(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.versions else no_garbage_collection():
            with self._lock:
                if not self.versions:
                    self._begin(args, kwargs)
            with label("cache_compiler inference"):
                result = super()._usual_path(*args, **kwargs)
        if self._unsaved is not None:
            self._save()
        return result

    def _begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.add(args, kwargs)

    def _options(self) -> dict[str, str]:
        local, process = self._config.as_dict()
        around = {"autocast": on} if (on := autocast_types()) else {}
        return {k: str(v) for k, v in {**process, **local, **around}.items()}

    def _source(self) -> str:
        extra = [f"{op}{stored.code_hash(f)}" for op, f in self._decompositions.items()]
        return stored.fingerprint(self.model) + "".join(extra)

    @property
    def _name(self) -> str:
        return self.model.__qualname__

    def add(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Version:
        """Compile for calls like this one; a second time nothing is kept any more."""
        if self.versions and self._keeps:
            reason = str(self.versions[0].mismatch(args, kwargs)).replace("\n", "; ")
            self._keeps = False
            warnings.warn(f"Skip cache as {self._name} recompiled: {reason}")
            self._remove()
        return super().add(args, kwargs)

    def trace(self, shape: CallShape) -> Any:
        traced, refs = super().trace(shape)
        if self._keeps:
            from torchair.deploy import storing

            try:
                known = storing.stored(traced, refs, shape, roots_of(self.model))
                made = stored.Artifact(
                    name=f"{self._name}{inspect.signature(self.model)}",
                    date=datetime.now(UTC).isoformat(timespec="seconds"),
                    mode=self._config.mode.value,
                    source=self._source(),
                    options=self._options(),
                    versions=stored.library_versions(),
                    **known,
                )
                self._unsaved = made, traced
            except stored.NotStored as e:
                self._keeps = False
                self._not_cached(e)
        return traced, refs

    def _save(self) -> None:
        from torchair.deploy import storing

        assert self._unsaved is not None
        (made, traced), self._unsaved = self._unsaved, None
        try:
            storing.finish(made, traced)
            made.write(self.path)
            logger.info("cache of %s: %s", made.name, self.path)
        except (OSError, RuntimeError) as e:
            self._not_cached(e)

    def _not_cached(self, error: Exception) -> None:
        note(Fallback.CACHE_FILE, f"{self._name} is not cached", error)
        warnings.warn(f"{self._name} is not cached: {error}")

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)


class CachedMethod(CachedCall):
    """A method that is compiled, or read from its folder, when it is first called."""

    def __init__(
        self,
        func: Callable[..., Any],
        config: CompilerConfig,
        dynamic: bool,
        cache_dir: str | None,
        ranks: Ranks,
        decompositions: Mapping[Any, Any] | None,
        ge_cache: bool = False,
    ) -> None:
        owner = getattr(func, "__self__", None)
        if not inspect.ismethod(func):
            raise ValueError(f"cache_compile takes a bound method of a module, not {func!r}")
        if not isinstance(owner, torch.nn.Module):
            kind = type(owner).__name__
            raise ValueError(f"cache_compile takes a method of a torch.nn.Module, not of a {kind}")
        super().__init__(func, config, dynamic, decompositions)
        captures = config.mode.value != MAX_AUTOTUNE
        if ge_cache and captures:
            warn_once("ge_cache has no effect in the modes that capture: leave it out")
        words = [type(owner).__name__, "dynamic" if dynamic else "static"]
        if captures:
            words.append("aclgraphcache")
        elif ge_cache:
            words.append("gecache")
        self._owner, self._kind, self._ranks = owner, "_".join(words), ranks
        self._root_folder = _root(cache_dir)
        foreign = _foreign(self._root_folder)
        if foreign is not None:  # its files are neither trusted nor replaced
            self._keeps = False
            self._not_cached(foreign)

    @property
    def path(self) -> Path:
        """The file of this method, for the process that asks."""
        if self._path is None:
            digest = hashlib.md5(self._identity().encode(), usedforsecurity=False).hexdigest()
            folder = self._root_folder / f"{self._kind}_{digest}" / rank_folder(*self._ranks)
            self._path = Path(os.path.realpath(folder / self.model.__name__ / stored.FILE))
        return self._path

    def _identity(self) -> str:
        """What the folder stands for: the module as text, options, the user's passes."""
        options = ",".join(f"{k}={v}" for k, v in self._options().items())
        passes = [
            stored.code_hash(getattr(self._config, f"post_grad_custom_{which}_pass").value)
            for which in ("pre", "post")
        ]
        tuned = self._options().get(engine_keys()["tuned"])  # a file that decides about kernels
        contents = [_content_hash(tuned)] if tuned is not None else []
        return "\n".join([str(self._owner), options, *passes, *contents])

    def _begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The first call: read the file, or compile."""
        if not self._keeps:
            super()._begin(args, kwargs)
            return
        if self.path.exists():
            try:
                self.versions.append(self._read(args, kwargs))
                return
            except Exception as e:  # whatever is wrong with a file, it is made again
                reason = str(e).partition("\n")[0] or type(e).__name__
                warnings.warn(
                    f"clear broken cache {self.path.parent}: {reason}; "
                    f"{self._name} is compiled again"
                )
                note(Fallback.CACHE_FILE, f"the cache of {self._name} is made again", e)
                self._remove()
        else:
            self._warn_other_options()
        super()._begin(args, kwargs)

    def _warn_other_options(self) -> None:
        """A method that is kept under other options has another folder: say which they are."""
        where = self.path.relative_to(os.path.realpath(self._root_folder)).parts[1:]
        now = self._options()
        for file in sorted(Path(os.path.realpath(self._root_folder)).glob(f"{self._kind}_*")):
            try:
                then = stored.Artifact.read(file.joinpath(*where)).options
            except (OSError, ValueError):
                continue
            changed = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k)]
            if changed:
                changes = [f"{k} was {then.get(k)}, now it is {now.get(k)}" for k in changed]
                warnings.warn(f"{self._name} is compiled again: {'; '.join(changes)}")
                return

    def _read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Version:
        found = stored.Artifact.read(self.path)
        stored.check_versions(found)
        if found.source != self._source():
            raise stored.NotStored("the code of the method, or of what it calls, has changed")
        shape, roots = shape_of(self.model, args, kwargs), roots_of(self.model)
        made = stored.loaded(found, roots, shape, self._config)
        if made.fitting(args, kwargs) is None:
            raise made.mismatch(args, kwargs)
        return made

    def _remove(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)  # the folder of this method alone


def _root(cache_dir: str | None) -> Path:
    return Path(cache_dir or Flags.read().cache_home or ".torchair_cache").expanduser()


def _foreign(root: Path) -> Exception | None:
    """Why a cache folder is not used: it is another user's, or out of reach."""
    try:
        if hasattr(os, "getuid") and root.stat().st_uid != os.getuid():
            return PermissionError(
                f"the cache folder {root} belongs to another user; choose one of yours"
            )
    except FileNotFoundError:
        return None  # not yet
    except OSError as error:
        return error
    return None


def _content_hash(path: str) -> str:
    try:
        return hashlib.md5(Path(path).read_bytes(), usedforsecurity=False).hexdigest()
    except OSError:  # gone since it was set: nothing is tuned
        return ""


# ---- files of the caller's choice, under names of the original's internal module ----


class CacheFile:
    """Where `cache_compile` keeps a method, and in which version."""

    VERSION, FILE = stored.VERSION, stored.FILE

    @staticmethod
    def get_cache_bin(func: Callable[..., Any], **given: Any) -> str:
        """The path of the file that `cache_compile` has for a method, given the same."""
        with warnings.catch_warnings(action="ignore"):  # they come with the compilation
            return str(cache_compile(func, **given).path)


class NpugraphExCacheFile(CacheFile):
    """The same under npugraph_ex."""

    VERSION = stored.VERSIONS[NPUGRAPH_EX]


class CacheSaver:
    """Files of compiled methods as a whole."""

    @staticmethod
    def remove_cache(path: FilePath) -> None:
        """Remove a file of `get_cache_bin` with its folder, or that folder."""
        folder = Path(path).parent if Path(path).name == stored.FILE else Path(path)
        shutil.rmtree(folder, ignore_errors=True)


class _Compiled:
    """Compiles once, for inputs that are given first, into a file that is given last."""

    KIND: type
    WORD = ""

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        config: CompilerConfig | None = None,
        dynamic: bool = True,
    ) -> None:
        if not isinstance(func, self.KIND):
            raise ValueError(f"{type(self).__name__} takes a {self.WORD}, not {func!r}")
        self._func, self._config, self._dynamic = func, given(config, CompilerConfig), dynamic
        self._inputs: tuple[Any, Any] | None = None
        self._saved = False

    def for_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the call that is traced."""
        self._inputs = args, kwargs
        return self

    def save_to(self, path: FilePath) -> Any:
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
        result = CachedCall(self._func, self._config, self._dynamic, None, target)(*args, **kwargs)
        if not target.exists():
            raise RuntimeError(f"{target} was not written; the warning before this says why")
        return result


class NoGuardFunction(_Compiled):
    """A plain function. Modules that it names are found again by their names."""

    KIND, WORD = FunctionType, "function"

    @classmethod
    def load(cls, path: FilePath) -> FromFile:
        """The function of a file; modules that it uses are globals of the caller."""
        known = sys._getframe(1).f_globals
        found = stored.Artifact.read(Path(path))
        weights = [w["name"] for w in found.weights if w["name"]]
        if any(not name.startswith("<") for name in weights):
            raise ValueError(f"{path} holds a method: load it with a module as `self`")
        roots: dict[str, Any] = {}
        for name in {name[1:].partition(">")[0] for name in weights}:
            roots[f"<{name}>"] = known.get(name)
            if not isinstance(known.get(name), torch.nn.Module):
                raise ValueError(
                    f"the function uses a module {name}, which is not a global of the caller"
                )
        return FromFile(found, roots)


class NoGuardMethod(_Compiled):
    """A method of a module."""

    KIND, WORD = MethodType, "bound method"

    @classmethod
    def load(cls, path: FilePath, *, self: torch.nn.Module) -> FromFile:
        """The method of a file, for a module that is like the first one."""
        return FromFile(stored.Artifact.read(Path(path)), {"": self})


class FromFile(CompiledModel):
    """What a file holds, as a function. A call of another kind is an AssertionError."""

    def __init__(self, found: stored.Artifact, roots: Roots) -> None:
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

    def _usual_path(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if not self.versions:
                self.versions.append(self._version(args, kwargs))
        return super()._usual_path(*args, **kwargs)

    def _version(self, args: Any, kwargs: Mapping[str, Any]) -> Version:
        shape = CallShape(args, dict(kwargs), self._found.arguments["names"])
        try:
            stored.check_versions(self._found)
            return stored.loaded(self._found, self._roots, shape, self._config)
        except stored.NotStored as e:
            raise ValueError(f"{self._found.name} cannot be loaded: {e}") from e

    def _find(self, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return super()._find(args, kwargs)
        except InputError as e:
            raise AssertionError(str(e)) from e

    def _eagerly(self, reason: SharedMemory, args: Any, kwargs: Any) -> Any:
        raise AssertionError(str(reason)) from reason
