"""Registration of the device, once in a process: name, hooks, kernels and modules for torch, what
torch's own classes need, and what Dynamo must know."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from torchair.ascend.emulate import state, streams
from torchair.ascend.emulate.choices import register_attention, register_autocast
from torchair.ascend.emulate.facade import npu_module, set_device
from torchair.ascend.emulate.kernels import register_kernels
from torchair.ascend.emulate.state import DEVICE_TYPE, MOST_DEVICES, STATE, Generator, as_npu
from torchair.import_hooks import when_imported
from torchair.torch_private import accelerator, dynamo
from torchair.torch_private.dispatch import set_multithreading_enabled
from torchair.torch_private.tensors import StorageBase

_acc: Any = accelerator.acc


class _NpuGuard(_acc.DeviceGuard):
    """Which device type torch's guards are about."""

    def type_(self) -> Any:
        return accelerator.DeviceType.PrivateUse1


class _NpuHooks(_acc.PrivateUse1Hooks):
    """What torch asks before it uses the device."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_kept: list[Any] = []  # torch holds these without owning them


def register(count: int) -> None:
    """Make `npu:0` to `npu:<count - 1>` devices of this process."""
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"the number of devices is 1 to {MOST_DEVICES}, not {count}")
    STATE.count = count
    state.METERS.extend(map(state.Meter, range(count)))
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    hooks, guard = _NpuHooks(), _NpuGuard()
    _acc.register_python_privateuseone_hook(hooks)
    _acc.register_python_privateuseone_device_guard(guard)
    state.make_generators()
    module = npu_module()
    accelerator.register_device_module(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    libraries = (*register_kernels(), *register_attention(), *register_autocast())
    _kept.extend([hooks, guard, *libraries])
    install_methods()
    # Backward passes of small models wait for a thread of the device's own otherwise.
    set_multithreading_enabled(False)


def install_methods() -> None:
    """Let torch's classes know the device."""
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=False
    )
    torch.Generator = Generator  # type: ignore[misc]
    _install_storages()
    _install_pinned_memory()
    _install_accelerator()


# ---- storages: torch has no allocator to ask for memory of this device ----


def _install_storages() -> None:
    make: Any = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return make(cls, *args, **kwargs)
        if torch.device(device).type != DEVICE_TYPE:
            return make(cls, *args, device=device, **kwargs)
        return _empty_storage(args[0] if args else 0, device)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
    kinds: Any = (StorageBase, torch.storage.TypedStorage)
    for kind, move in zip(kinds, (_storage_to_npu, _typed_storage_to_npu), strict=True):
        kind.npu, kind.is_npu = move, property(lambda self: self.device.type == DEVICE_TYPE)


def _empty_storage(size: int, device: Any) -> torch.UntypedStorage:
    return as_npu(torch.empty(size, dtype=torch.uint8), STATE.index_of(device)).untyped_storage()


def _storage_to_npu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """A copy of a storage on the device, or the storage if it is there."""
    index = STATE.index_of(device)
    if self.device.type == DEVICE_TYPE and self.get_device() == index:
        return self
    return _empty_storage(self.nbytes(), index).copy_(self, non_blocking)


def _typed_storage_to_npu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return self._new_wrapped_storage(_storage_to_npu(self._untyped_storage, device, non_blocking))


# ---- pinned memory: host memory that remembers to be pinned ----


def _install_pinned_memory() -> None:
    pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not self.is_cpu:
            raise RuntimeError(f"cannot pin a tensor on {self.device}: only host memory is pinned")
        if self.is_pinned():
            return self
        made = self.clone()
        pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
        return made

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return self.is_cpu and self.untyped_storage().data_ptr() in pinned

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[method-assign, assignment]


# ---- torch.accelerator, where torch asks a library that is not there ----


def _install_accelerator() -> None:
    module: Any = torch.accelerator
    if module.current_accelerator() != torch.device(DEVICE_TYPE):
        return  # a GPU is this process's accelerator, and stays it
    module.set_device_index = set_device
    module.current_device_index = lambda: STATE.here.device
    module.synchronize = lambda device=None: None
    module.set_stream = streams.set_stream
    for name, function in state.STATISTICS.items():
        if hasattr(module, name):
            setattr(module, name, function)


# ---- Dynamo is told when it is imported: that takes a second, which not all scripts pay for ----


# Names of `torch.npu` that Dynamo knows too.
_OF_WORKERS = ("set_device", "current_device", "get_device_properties")
_OF_DYNAMO = (
    "device",
    "Event",
    "Stream",
    "device_count",
    "is_available",
    "stream",
    "current_stream",
    "set_stream",
    "synchronize",
    "is_bf16_supported",
    "memory_allocated",
)


def install_hooks() -> None:
    """Tell Dynamo now if it is there, else when it comes."""
    when_imported(
        {
            dynamo.DEVICE_INTERFACE: _add_interface,
            dynamo.TRACE_RULES: _add_rules,
            dynamo.DECORATORS: _add_constructors,
            dynamo.USER_DEFINED: _add_classes,
            dynamo.OUTPUT_GRAPH: _allow_records,
            dynamo.STREAMS: _allow_no_stream,
        }
    )


def _add_interface(device_interface: Any) -> None:
    interface = _interface(device_interface.DeviceInterface)
    for name in (DEVICE_TYPE, *(f"{DEVICE_TYPE}:{i}" for i in range(STATE.count))):
        device_interface.register_interface_for_device(name, interface)


def _add_rules(trace_rules: Any) -> None:
    """`with torch.npu.stream(...)` belongs into a graph, as it does for other accelerators."""
    in_graph = trace_rules.TorchInGraphFunctionVariable
    for name in ("stream", "set_stream"):
        trace_rules.manual_torch_name_rule_map[f"torch.{DEVICE_TYPE}.{name}"] = in_graph
    trace_rules.get_torch_obj_rule_map.cache_clear()
    in_graph._get_handlers.cache_clear()  # it has those of `stream`, where something was traced


def _add_classes(user_defined: Any) -> None:
    """`torch.npu.Stream()` and `Event()` inside a graph, as it is for classes of other devices."""
    known = user_defined.UserDefinedClassVariable._in_graph_classes()  # one set for the process
    known.update({streams.Stream, streams.Event})


def _add_constructors(decorators: Any) -> None:
    """Streams and events that a graph makes at each call are those of the device. torch's own
    constructor knows neither their types nor all of their arguments. They are called beside the
    graph, where Dynamo would trace them."""
    utils = dynamo.loaded_utils()
    utils.build_stream = decorators.disable(lambda args, kwargs: streams.Stream(*args, **kwargs))
    utils.build_event = decorators.disable(lambda args, kwargs: streams.Event(*args, **kwargs))


def _allow_records(output_graph: Any) -> None:
    """Let an event be recorded after an argument was updated. Dynamo refuses that for backends
    that update arguments after the graph has run; here it is a step like all others."""
    output_graph.OutputGraph.check_event_record_after_input_mutation = lambda self, stream: None


def _allow_no_stream(variables: Any) -> None:
    """`with torch.npu.stream(None)` changes nothing; Dynamo crashes on it."""
    context = variables.StreamContextVariable
    create = context.create

    def create_or_not(tx: Any, stream: Any, **kwargs: Any) -> Any:
        if stream.is_python_constant() and stream.as_python_constant() is None:
            return dynamo.NullContextVariable()
        return create(tx, stream, **kwargs)

    context.create = staticmethod(create_or_not)


def _interface(base: Any) -> Any:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    named = {name: getattr(npu, name) for name in (*_OF_WORKERS, *_OF_DYNAMO)}
    named |= {
        "exchange_device": npu._exchange_device,
        "maybe_exchange_device": npu._exchange_device,
        "get_compute_capability": npu.get_device_capability,
        "get_raw_stream": lambda device: streams.current_stream(device).stream_id,
        "_set_stream_by_id": lambda *ids: streams.set_stream(streams.Stream.of(*ids)),
        "is_triton_capable": lambda device=None: False,
    }
    members = {k: v if isinstance(v, type) else staticmethod(v) for k, v in named.items()}
    # For processes that compile kernels, which does not happen for this device.
    worker = type("Worker", (), {name: members[name] for name in _OF_WORKERS})
    about = {"__doc__": "The device for Dynamo.", "Worker": worker}
    return type("NpuInterface", (base,), members | about)
