"""The modules `torch_npu` (functions `npu_*`, the device, the profiler) and `torch.npu` (what
scripts ask of a device)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torchair.ascend import ops as npu
from torchair.ascend.emulate import state, streams
from torchair.ascend.emulate.choices import DTYPES
from torchair.ascend.emulate.profiles.recording import mstx
from torchair.ascend.emulate.state import (
    DEVICE_TYPE,
    STATE,
    as_cpu,
    as_npu,
    kept_on_cpu,
    mem_get_info,
)
from torchair.ascend.ops import PACKAGE
from torchair.ascend.ops.formats import TYPE_NUMBERS

TYPES = TYPE_NUMBERS
"""Types that torch_npu has and torch has not, or not under this name: numbers."""

_SUBMODULES = ("npu", "profiler", "distributed", "dynamo", "contrib")


def operators() -> dict[str, Callable[..., Any]]:
    """The functions of the package that compute something, by name: the operators of the `npu`
    library, which are defined first."""
    npu.define()
    spaces = {operator.base: operator.space for operator in npu.operators()}
    return {name: getattr(getattr(torch.ops, spaces[name]), name) for name in sorted(spaces)}


class TorchNpu(ModuleType):
    """`import torch_npu` on a machine without an NPU."""

    __all__: list[str]

    def fill(self) -> None:
        """Give the module its names."""
        self.__doc__ = __doc__
        self.__version__ = f"{torch.__version__.partition('+')[0]}+torchair"
        self.__dict__.update(operators() | TYPES)
        for name in _SUBMODULES:
            setattr(self, name, importlib.import_module(f"{self.__name__}.{name}"))
        importlib.import_module(f"{self.__name__}.profiler.profiler")
        for name in ("torchair", "npugraph_ex"):
            setattr(self.dynamo, name, importlib.import_module(f"{self.__name__}.dynamo.{name}"))
        self.__all__ = sorted(n for n in self.__dict__ if not n.startswith("__"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = self.__dict__.get("__all__", [])
        near = get_close_matches(name, known, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise AttributeError(
            f"torch_npu.{name} is not part of the emulation.{hint} It has: {', '.join(known)}"
        )


# ---- the finder for `import torch_npu`, behind those for real files ----


_OURS = f"{PACKAGE}.dynamo.torchair"
_CAPTURE = f"{PACKAGE}.dynamo.npugraph_ex"

# Modules of the package: the module that stands for each, None for one that only holds others. What
# follows a colon is called on import: some modules are imported for what that does.
MODULES: dict[str, str | None] = {
    f"{PACKAGE}.npu": "torch.npu",
    f"{PACKAGE}.npu.amp": "torch.npu.amp",
    f"{PACKAGE}.profiler": "torchair.ascend.emulate.profiler",
    f"{PACKAGE}.profiler.profiler": "torchair.ascend.emulate.profiler",
    f"{PACKAGE}.distributed": "torchair.ascend.emulate.hccl",
    f"{PACKAGE}.contrib": None,
    f"{PACKAGE}.contrib.transfer_to_npu": "torchair.ascend.emulate.transfer:redirect",
    f"{PACKAGE}.dynamo": None,
    _OURS: "torchair",
    _CAPTURE: "torchair.npugraph_ex",
}


class FacadeFinder(MetaPathFinder, Loader):
    """Finds and makes modules of the emulated package: those that `knows` tells."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self._knows(name):
            return None
        return ModuleSpec(name, self, origin="torchair.ascend.emulate", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return TorchNpu(PACKAGE) if spec.name == PACKAGE else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        inside = name.removeprefix(f"{PACKAGE}.dynamo.").removeprefix("torchair.")
        stands_for = MODULES.get(name, f"torchair.{inside}")
        if isinstance(module, TorchNpu):
            module.fill()
        elif stands_for is not None:
            there, _, on_import = stands_for.partition(":")
            sys.modules[name] = found = importlib.import_module(there)
            if on_import:
                getattr(found, on_import)()


def install_finder() -> None:
    """Answer for the package from now on; for modules of torchair under their names there before
    the path does, which would find their files and load them a second time."""
    if not any(isinstance(f, FacadeFinder) for f in sys.meta_path):
        sys.meta_path.append(FacadeFinder(lambda name: name == PACKAGE or name in MODULES))
        sys.meta_path.insert(
            0, FacadeFinder(lambda name: name.startswith((f"{_OURS}.", f"{_CAPTURE}.")))
        )


# ---- torch.npu ----


NAME = "torchair emulation of an Ascend NPU"


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of a device."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def set_device(device: Any) -> None:
    """Choose a device for this thread."""
    STATE.here.device = STATE.index_of(device)


def _always(answer: Any) -> Callable[..., Any]:
    """A function that has one answer, whatever it is asked with."""
    return lambda *args, **kwargs: answer


def _of_device(answer: Any) -> Callable[..., Any]:
    """A function with one answer for every device that there is."""
    return lambda device=None: (answer, STATE.index_of(device))[0]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: STATE.count > 0,
    "device_count": lambda: STATE.count,
    "current_device": lambda: STATE.here.device,
    "set_device": set_device,
    "synchronize": _of_device(None),  # all work is done
    "get_device_name": _of_device(NAME),
    "get_device_properties": lambda device=None: DeviceProperties(
        NAME, mem_get_info(device)[1], torch.get_num_threads()
    ),  # the host's
    "get_device_capability": _of_device(None),  # there is none, as with the real devices
    "can_device_access_peer": lambda device_id, peer_device_id: (  # all share one memory
        STATE.index_of(device_id) != STATE.index_of(peer_device_id)
    ),
    "get_amp_supported_dtype": lambda: list(DTYPES),  # that autocast may choose
    "is_bf16_supported": _always(True),
    "is_jit_compile_false": _always(True),  # operators are never compiled when they are called
    # Of the real devices: whether they are, and options of the run time. No effect.
    **dict.fromkeys(("set_compile_mode", "set_option"), _always(None)),
    **dict.fromkeys(("init", "_lazy_init", "ipc_collect"), _always(None)),
    "is_initialized": _always(True),
    "_is_in_bad_fork": _always(False),
}


def _exchange_device(index: int) -> int:
    """Choose a device; the one chosen before is returned. A negative number changes nothing."""
    before = STATE.here.device
    if index >= 0:
        STATE.here.device = STATE.checked(index)
    return before


class NpuMemory:
    """How the engine works on tensors of this device: they are in host memory."""

    as_host = staticmethod(as_cpu)
    kept_on_host = staticmethod(kept_on_cpu)
    as_device = staticmethod(as_npu)

    def generator(self, index: int) -> torch.Generator:
        """The default generator of a device."""
        return state.GENERATORS[index]

    def device(self) -> Any:
        """The device for the compiler."""
        from torchair.ascend.emulate.hosted import HostedDevice

        return HostedDevice("cpu", self)

    @property
    def tape(self) -> Any:
        """The capture that is under way in this thread, None if there is none."""
        return STATE.here.tape

    @property
    def rows(self) -> Any:
        """The profiler that wants to know what runs, None if there is none."""
        return STATE.rows


def npu_module() -> ModuleType:
    """The module, ready to be registered as `torch.npu`."""
    module = ModuleType("torch.npu", __doc__)
    module.__path__ = []  # `import torch.npu.amp` is possible
    names = {**_ANSWERS, **state.STATISTICS, **streams.FUNCTIONS, **state.FUNCTIONS}
    names |= dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), _exchange_device)
    names |= {"mstx": mstx, "host": NpuMemory(), "default_generators": tuple(state.GENERATORS)}
    names |= {"config": SimpleNamespace(allow_internal_format=True), "__getattr__": _later}
    names |= {name: SimpleNamespace(allow_hf32=True) for name in ("conv", "matmul")}
    for name, value in names.items():
        setattr(module, name, value)
    module.amp = _amp_module()  # type: ignore[attr-defined]
    return module


def _later(name: str) -> Any:
    if name == "npugraph_ex":
        return importlib.import_module("torchair.npugraph_ex")
    raise AttributeError(f"torch.npu.{name} is not part of the emulation")


class autocast(torch.autocast):
    """`torch.autocast` for this device."""

    def __init__(
        self, enabled: bool = True, dtype: Any = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(DEVICE_TYPE, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for this device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(DEVICE_TYPE, *args, **kwargs)


def _amp_module() -> ModuleType:
    module = ModuleType("torch.npu.amp", "Mixed precision on the device.")
    module.autocast, module.GradScaler = autocast, GradScaler  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module
