"""The dispatcher: operators, keys, modes that see every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchair.torch_private.table import Names, feature, required

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

NAMES = Names(
    __name__,
    {
        "OpOverload": required("torch._ops:OpOverload", "the targets of FX nodes"),
        "OpOverloadPacket": required(
            "torch._ops:OpOverloadPacket", "converters of all overloads of an operator"
        ),
        "HigherOrderOperator": required(
            "torch._ops:HigherOrderOperator", "the targets of FX nodes"
        ),
        "DispatchKey": required("torch._C:DispatchKey", "kernels of operators"),
        "DispatchKeySet": feature(
            "torch._C:DispatchKeySet", "streams in eager mode, the emulated device"
        ),
        "TorchDispatchMode": feature(
            "torch.utils._python_dispatch:TorchDispatchMode",
            "capture, calls of operators that are watched",
        ),
        "is_traceable_wrapper_subclass": feature(
            "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
            "tensors made of others, in torchair.compile",
        ),
        "AutoDispatchBelowADInplaceOrView": feature(
            "torch._C:_AutoDispatchBelowADInplaceOrView", "replays without autograd"
        ),
        "DisableAutocast": feature("torch._C:_DisableAutocast", "capture on a CPU"),
        "DisableTorchDispatch": required(
            "torch._C:_DisableTorchDispatch", "gradients of attention with dropout on a GPU"
        ),
        "DisableTorchFunction": required(
            "torch._C:DisableTorchFunction", "calls under a default device"
        ),
        "ExcludeDispatchKeyGuard": feature(
            "torch._C:_ExcludeDispatchKeyGuard", "streams in eager mode, the emulated device"
        ),
        "is_any_autocast_enabled": required(
            "torch._C:_is_any_autocast_enabled", "calls of torchair.compile under autocast"
        ),
        "is_functorch_wrapped_tensor": required(
            "torch._C._functorch:is_functorch_wrapped_tensor", "calls under torch.func"
        ),
        "is_torch_function_mode_enabled": required(
            "torch._C:_is_torch_function_mode_enabled", "calls under a default device"
        ),
        "all_operator_names": feature("torch._C:_dispatch_get_all_op_names", "lists of operators"),
        "has_kernel": feature(
            "torch._C:_dispatch_has_kernel_for_dispatch_key",
            "capture on a CPU, the emulated device",
        ),
        "has_computed_kernel": required(
            "torch._C:_dispatch_has_computed_kernel_for_dispatch_key",
            "whether an operator can be called on a device",
        ),
        "dispatch_keys": feature("torch._C:_dispatch_keys", "tests of arguments in native code"),
        "schemas_of": feature(
            "torch._C:_jit_get_schemas_for_operator", "operators of the npu library"
        ),
        "takes_numbers_as_tensors": feature(
            "torch._C:_should_allow_numbers_as_tensors", "the emulated device"
        ),
        "parse_schema": required("torch._C:parse_schema", "operators of the npu library"),
        "set_grad_enabled": required("torch._C:_set_grad_enabled", "calls without autograd"),
        "set_multithreading_enabled": feature(
            "torch._C:_set_multithreading_enabled", "the emulated device"
        ),
    },
)

__getattr__ = NAMES.find
