"""A compiled method as one file of data, and the way back to a call of it, while it is the same.

A file is a header in JSON and the bytes of a GE graph. Nothing in it is executed. Both parts are
under one checksum, which is compared before they are read; all that they say is checked again by
who uses it. Where plan and kernels are on disk, nothing of the compiler is loaded for a call.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.configs.options import MAX_AUTOTUNE, NPUGRAPH_EX, OptionMaps
from torchair.deploy.call_version import Version
from torchair.deploy.guards import Expected, Guards, TracedGraph
from torchair.deploy.tensor_refs import ModuleWalk, Roots, TensorRef, roots_of, tensor_refs_of
from torchair.deploy.trees import CallShape, spec_of
from torchair.engine.plan.records import picker
from torchair.engine.run.frozen import FrozenTensors
from torchair.engine.run.native import DirectProgram, ProgramPool
from torchair.engine.run.recipe import StoredPlan, plan_of
from torchair.flags import Flags, poisoning
from torchair.locks import Lock
from torchair.log import EVENT_LEVEL, logger
from torchair.runner import GmRunner
from torchair.store import atomic_write, private_dir
from torchair.torch_private.profiler import is_profiling
from torchair.trace import Trace
from torchair.versions import __version__

if TYPE_CHECKING:
    from torchair.deploy.runnable import Runnable
    from torchair.devices.base import GraphCall


# ---- the file ----


FILE = "compiled_module"
VERSIONS = {NPUGRAPH_EX: "1.0.6"}
"""Versions that files have, by mode."""
VERSION = "1.0.5"
"""The one of all other modes."""
_MAGIC = b"torchair compiled module 4\n"  # counts layouts of the file
_DIGEST = 32


@cache
def library_versions() -> dict[str, str]:
    """Versions of all that a compiled graph follows from."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["torchair"] = __version__
    try:
        found["llvmlite"] = metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        found["llvmlite"] = "unknown"
    return found


@dataclass
class Artifact:
    """What a method was compiled to."""

    name: str  # of the method, with its signature
    date: str
    mode: str
    device: str
    source: str  # hash of the code that was traced
    arguments: dict[str, Any]  # how calls are nested
    guards: dict[str, Any]
    tensors: list[int]  # arguments that the graph gets
    weights: list[dict[str, Any]]  # names and specs of the graph's first arguments
    attributes: dict[str, str]  # of modules, as text: numbers that are part of the graph
    convention: str  # how the graph is called
    result: str  # how results are nested
    constants: dict[str, Any]  # leaves of the result that are no tensors
    written: list[int]  # arguments of the graph that calls update
    capture: dict[str, Any] | None  # what capture must know of arguments
    options: dict[str, str]  # for people
    versions: dict[str, str]  # of libraries
    finished: bool = False  # whether the engine has optimised the graph
    plan: dict[str, Any] | None = None  # recipe of the native plan, where the call is one
    version: str = ""
    graph: bytes = b""

    def __post_init__(self) -> None:
        self.version = self.version or VERSIONS.get(self.mode, VERSION)

    def to_bytes(self) -> bytes:
        """The content of a file."""
        known = asdict(self)
        del known["graph"]
        header = json.dumps(known, separators=(",", ":")).encode()
        body = len(header).to_bytes(8, "little") + header + self.graph
        return _MAGIC + _checksum(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """From the content of a file; ValueError where it is damaged or of another version."""
        body = data[len(_MAGIC) + _DIGEST :]
        if not data.startswith(_MAGIC):
            raise ValueError("it is not a compiled module, or one of another version")
        if data[len(_MAGIC) : len(_MAGIC) + _DIGEST] != _checksum(body):
            raise ValueError("it is damaged")
        size = int.from_bytes(body[:8], "little")
        known = json.loads(body[8 : 8 + size])
        if not isinstance(known, dict) or set(known) != {f.name for f in fields(cls)} - {"graph"}:
            raise ValueError("its header is not that of a compiled module")
        expected = VERSIONS.get(known["mode"], VERSION)
        if known["version"] != expected:
            raise ValueError(f"its version is {known['version']}, this one reads {expected}")
        return cls(**known, graph=body[8 + size :])

    def write(self, path: Path) -> None:
        """To a private file, whole or not at all."""
        private_dir(path.parent, 0o700)
        atomic_write(path, self.to_bytes(), 0o600)

    @classmethod
    def read(cls, path: Path) -> Artifact:
        """From a file that belongs to this user alone."""
        return cls.from_bytes(read_private(path))


def read_private(path: Path) -> bytes:
    """The content of a file; ValueError if there is none, PermissionError if others could have
    written it."""
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        owners = {os.lstat(path).st_uid, os.fstat(number).st_uid}
        known = os.fstat(number)
        if not stat.S_ISREG(known.st_mode):
            raise ValueError(f"{path} is not a file")
        if hasattr(os, "getuid") and owners != {os.getuid()}:
            raise PermissionError(f"{path} belongs to another user")
        if stat.S_IMODE(known.st_mode) != 0o600:
            mode = oct(stat.S_IMODE(known.st_mode))
            raise PermissionError(f"{path} has the mode {mode}, expected 0o600")
        return file.read()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


# ---- a plan and kernels from disk, which a warm start runs ----


class ReadyCall:
    """A plan from a file, called with the arguments of its graph."""

    plain = True

    def __init__(
        self,
        stored: StoredPlan,
        taken: Sequence[int],
        order: Sequence[int],
        opened: Callable[[], GraphCall],
    ) -> None:
        """`taken` are the arguments that inputs of the plan are, `order` the outputs that results
        are; `opened` reads the graph."""
        plan = stored.plan
        if len(taken) != plan.inputs or not set(order) <= set(range(len(plan.outputs))):
            raise ValueError("its plan has other inputs or outputs than its graph")
        self.taken, self.order = list(taken), list(order)
        self.collect = picker(self.taken)
        self._stored, self._pool = stored, ProgramPool(plan)
        self._frozen: FrozenTensors | None = None  # weights that are frozen
        self._open = opened
        self._opened: GraphCall | None = None
        self._lock = Lock()

    @classmethod
    def of(
        cls, data: Mapping[str, Any] | None, opened: Callable[[], GraphCall]
    ) -> ReadyCall | None:
        """The call that a file holds; None if it holds none for this process."""
        if data is None or not _unwatched():
            return None
        stored = plan_of(data["plan"])
        return None if stored is None else cls(stored, data["taken"], data["order"], opened)

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Results for the arguments of one call."""
        inputs = self.collect(args)
        if is_profiling() or not self._serves(inputs):
            return self.call.enter(args)
        outputs = self._pool.run(inputs)
        return tuple([outputs[i] for i in self.order])

    entry = run  # what a call enters

    def _serves(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the plan is for these inputs: their sizes are its own, and frozen weights are
        those of the first call."""
        if self._opened is not None or not self._stored.fits(inputs):
            return False
        if not self._stored.frozen:
            return True
        if self._frozen is None:
            with self._lock:
                if self._frozen is None:
                    self._stored.freeze(inputs)
                    weights = {i: inputs[i] for i in self._stored.frozen}
                    self._frozen = FrozenTensors(
                        weights, len(inputs), {i for i, *_ in self._stored.packs}
                    )
        return self._frozen.same(inputs)

    def direct(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[DirectProgram, FrozenTensors | None] | None:
        """A program of its own that Python enters in one call."""
        if not self._serves(inputs):
            return self.call.direct(inputs)
        return DirectProgram(self._stored.plan), self._frozen

    @property
    def call(self) -> GraphCall:
        """The graph in the engine, which is read now; calls go there from now on."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
                self._pool.forget()
            return self._opened


def _unwatched() -> bool:
    """Whether only the results of a graph are asked for."""
    flags = Flags.read()
    verbose = flags.debug or flags.dump or flags.timeline or logger.isEnabledFor(EVENT_LEVEL)
    return flags.native and not verbose and not poisoning()


# ---- the code that a call runs ----


_MOST = 4000  # functions that are looked at
_KNOWN_BY_VERSION = frozenset({"torch", "torchair", "numpy"}) | sys.stdlib_module_names
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


def fingerprint(function: Callable[..., Any]) -> str:
    """Changes with the code of a function or method, of classes of the modules that it uses, and of
    functions and constants that they name."""
    return code_hash(function, *(type(m) for _, m, _ in ModuleWalk(roots_of(function)).modules))


def code_hash(*functions: Callable[..., Any] | None) -> str:
    """A hash of functions and what they name; the same for all that have no code."""
    walk = _CodeWalk()
    for function in functions:
        walk.take(function)
    return walk.result()


class _CodeWalk:
    """Functions and classes to look at, each once."""

    def __init__(self) -> None:
        self._made = hashlib.md5(usedforsecurity=False)
        self._work: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._installed: dict[str, str] = {}  # packages that were met, and their versions

    def take(self, found: Any) -> None:
        """Look at a function, method or class later, unless its version identifies it."""
        if isinstance(found, (staticmethod, classmethod, MethodType)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        found = getattr(found, "__wrapped__", found)
        if not isinstance(found, (FunctionType, type)) or id(found) in self._seen:
            return
        module = getattr(found, "__module__", None) or ""
        if not self._is_known(module) and len(self._seen) < _MOST:
            self._seen[id(found)] = found
            self._work.append(found)

    def _is_known(self, module: str) -> bool:
        """Whether a version identifies a module."""
        package = module.partition(".")[0]
        if package in _KNOWN_BY_VERSION:
            return True
        version = _version_of(package)
        if version is not None:
            self._installed[package] = version
        return version is not None

    def result(self) -> str:
        """The hash of all that was taken and what it names."""
        while self._work:
            found = self._work.pop()
            if isinstance(found, type):
                for base in found.__mro__[1:]:
                    self.take(base)
                for name in sorted(vars(found)):
                    self._value(name, vars(found)[name])
            else:
                self._function(found)
        self._note(repr(sorted(self._installed.items())))
        return self._made.hexdigest()

    def _value(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            self._note(name, _text(value))
        else:
            self.take(value)

    def _function(self, function: FunctionType) -> None:
        self._note(function.__qualname__, repr([*map(_text, function.__defaults__ or ())]))
        known = function.__globals__
        for code in _codes(function.__code__):
            constants = [_text(c) for c in code.co_consts if not isinstance(c, CodeType)]
            self._note(code.co_name, code.co_code.hex(), repr(code.co_names), repr(constants))
            named = [known[n] for n in code.co_names if n in known]
            modules = [v for v in named if isinstance(v, ModuleType)]
            modules = [m for m in modules if not self._is_known(m.__name__)]
            for name in code.co_names:
                self._value(name, known.get(name, sys))
                for module in modules:
                    self.take(vars(module).get(name))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                self._value("cell", cell.cell_contents)

    def _note(self, *texts: str) -> None:
        for text in texts:
            self._made.update(f"{len(text)}:{text}".encode("utf-8", "backslashreplace"))


@cache
def _version_of(package: str) -> str | None:
    """The version of a package that was installed, None for anything else."""
    module = sys.modules.get(package)
    parts = Path(getattr(module, "__file__", None) or "").parts
    installed = "site-packages" in parts or "dist-packages" in parts
    version = getattr(module, "__version__", None) if installed else None
    return version if isinstance(version, str) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    work = [code]
    while work:
        found = work.pop()
        yield found
        work += [c for c in found.co_consts if isinstance(c, CodeType)]


def _text(value: Any) -> str:
    """The same in every process."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_text, value)))
    if isinstance(value, tuple):
        return repr([*map(_text, value)])
    return repr(value) if isinstance(value, (*_PLAIN, complex, slice)) else type(value).__name__


PLAIN = (bool, int, float, str, type(None))


class NotStored(Exception):
    """Why a method is not kept, or what was kept of it not used."""


def loaded(found: Artifact, roots: Roots, shape: CallShape, config: CompilerConfig) -> Version:
    """The version of a method that a file holds; NotStored with the reason if it is for another
    one. `roots` are the modules that it reads."""
    if found.arguments != arguments_of(shape):
        raise NotStored("arguments are nested or named otherwise")
    refs = _tensor_refs(found.weights, roots)
    then, now = found.attributes, numbers_of(roots)
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            raise NotStored(f"{name} was {then.get(name)}, now it is {now.get(name)}")
    guards, engine = Guards.from_data(found.guards), config.as_dict(MAX_AUTOTUNE)
    ready = ReadyCall.of(found.plan, lambda: _runnable(found, engine).call)
    run: Any = ready or _run_of(_runnable(found, engine), found, config)
    runner = GmRunner(run, Trace())
    traced = TracedGraph(
        runner,
        runner,
        list(guards.specs),
        [c.text for c in guards.conditions],
        [int(k) for k in found.tensors],
        spec_of(found.result),
        {int(k): v for k, v in found.constants.items()},
        frozenset(found.written),
    )
    return Version(roots, shape, traced, refs)


def check_versions(found: Artifact) -> None:
    """NotStored if a file was made by other libraries."""
    theirs, ours = found.versions, library_versions()
    for package in sorted({*theirs, *ours}):
        if theirs.get(package) != ours.get(package):
            raise NotStored(
                f"it was made with {package} {theirs.get(package)}, this is {ours.get(package)}"
            )


def _runnable(found: Artifact, engine: OptionMaps) -> Runnable:
    """The graph of a file in the engine."""
    from torchair.deploy.runnable import Runnable
    from torchair.serde.convention import from_text

    options, process = engine
    return Runnable.from_bytes(
        found.graph,
        from_text(found.convention),
        options=options,
        process=process,
        device=found.device,
        finished=found.finished,
    )


def _run_of(runnable: Runnable, found: Artifact, config: CompilerConfig) -> Any:
    if found.capture is None:
        return runnable.call if not runnable.call.replays else runnable
    from torchair.capture.graph import CapturedGraph
    from torchair.devices.base import device_named

    return CapturedGraph(
        runnable.call,
        runnable.graph.name,
        device_named(found.device),
        found.capture,
        Settings.of(config),
    )


def arguments_of(shape: CallShape) -> dict[str, Any]:
    """How arguments of a call are nested."""
    return {
        "names": list(shape.names),
        "labels": list(shape.labels),
        "count": shape.count,
        "keys": list(shape.keys),
    }


def weight_of(places: Sequence[TensorRef]) -> dict[str, Any]:
    """Names and spec of a weight."""
    spec = Expected.of(places[0].name, places[0].read().detach())
    loose = all(h.loose for h in places)
    names = sorted(h.name for h in places)
    return {"names": names, "loose": loose, **json.loads(json.dumps(asdict(spec)))}


def _tensor_refs(weights: Sequence[Mapping[str, Any]], roots: Roots) -> list[list[TensorRef]]:
    """Where the weights of a file are in a model."""
    every = tensor_refs_of(roots)
    there = {h.name: places for places in every for h in places}
    registered = [places for places in every if not all(h.loose for h in places)]
    expected = [w for w in weights if w["name"] and not w["loose"]]
    if len(registered) != len(expected):
        raise NotStored(f"the module has other weights: {len(expected)} were compiled")
    found = []
    for weight in weights:
        places = there.get(weight["name"]) if weight["name"] else [TensorRef.nowhere()]
        if places is None:
            raise NotStored(f"the module has no weight {weight['name']}")
        now = weight_of(places)
        for what, known in weight.items():
            if what != "name" and now[what] != known:
                raise NotStored(f"{what} of {weight['name']}: compiled {known}, now {now[what]}")
        found.append(places)
    return found


def numbers_of(roots: Roots) -> dict[str, str]:
    """Plain values that tracing may have made part of the graph, as text; also those one level
    inside of dicts and of objects such as a configuration, where these are first met. Not a hash:
    it follows from other values, and is another one in each process."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    modules = ModuleWalk(roots).modules
    attributes = [(f"{p}.{k}" if p else k, k, v) for p, m, _ in modules for k, v in vars(m).items()]
    for name, key, value in attributes:
        if key.startswith("_"):  # weights, submodules, hooks
            continue
        if _is_plain(value):
            found[name] = repr(value)
        elif id(value) not in seen and not callable(value):
            seen.add(id(value))
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            plain = ((k, v) for k, v in inner.items() if _is_plain(v))
            found |= {f"{name}.{k}": repr(v) for k, v in plain if not str(k).endswith("_hash")}
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 64 and all(isinstance(v, PLAIN) for v in value)
    return isinstance(value, (*PLAIN, torch.dtype, torch.device, Enum))
