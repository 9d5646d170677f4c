"""What Dynamo must know of the device, told when Dynamo is imported: that takes a second, and
scripts that compile nothing do not pay for it."""

from __future__ import annotations

from typing import Any

import torch

from torchair.emulate import npu_module, statistics, streams
from torchair.emulate.state import DEVICE_TYPE, STATE
from torchair.process import when_imported


def install_hooks() -> None:
    """Tell Dynamo now if it is there, else when it comes."""
    when_imported(
        {
            "torch._dynamo.device_interface": _add_interface,
            "torch._dynamo.trace_rules": _add_rules,
        }
    )


def _add_interface(device_interface: Any) -> None:
    interface = _interface(device_interface.DeviceInterface)
    names = [DEVICE_TYPE, *(f"{DEVICE_TYPE}:{i}" for i in range(STATE.count))]
    for name in names:
        device_interface.register_interface_for_device(name, interface)


def _add_rules(trace_rules: Any) -> None:
    """`with torch.npu.stream(...)` belongs into a graph, as it does for other accelerators."""
    in_graph = trace_rules.TorchInGraphFunctionVariable
    for name in ("stream", "set_stream"):
        trace_rules.manual_torch_name_rule_map[f"torch.{DEVICE_TYPE}.{name}"] = in_graph
    trace_rules.get_torch_obj_rule_map.cache_clear()


def _interface(base: Any) -> Any:
    class Worker:
        """For processes that compile kernels, which nobody does for this device."""

        set_device = staticmethod(npu_module.set_device)
        current_device = staticmethod(npu_module.current_device)
        get_device_properties = staticmethod(npu_module.get_device_properties)

    members: dict[str, Any] = {
        "device": streams.device,
        "Event": streams.Event,
        "Stream": streams.Stream,
        "Worker": Worker,
        "current_device": npu_module.current_device,
        "set_device": npu_module.set_device,
        "device_count": npu_module.device_count,
        "is_available": npu_module.is_available,
        "exchange_device": npu_module._exchange_device,
        "maybe_exchange_device": npu_module._exchange_device,
        "stream": streams.stream,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "get_raw_stream": _raw_stream,
        "synchronize": npu_module.synchronize,
        "get_device_properties": npu_module.get_device_properties,
        "get_compute_capability": npu_module.get_device_capability,
        "is_bf16_supported": npu_module.is_bf16_supported,
        "memory_allocated": statistics.memory_allocated,
        "_set_stream_by_id": _set_stream_by_id,
        "is_triton_capable": _not_capable,
    }
    functions = {k: v if isinstance(v, type) else staticmethod(v) for k, v in members.items()}
    return type("NpuInterface", (base,), {**functions, "__doc__": "The device for Dynamo."})


def _raw_stream(device: int) -> int:
    return streams.current_stream(device).stream_id


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    streams.set_stream(
        streams.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


def _not_capable(device: torch.types.Device = None) -> bool:
    return False
