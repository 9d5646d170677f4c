"""Storages, aliases, and functional tensors."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature, optional, required

NAMES = Names(
    __name__,
    {
        "is_alias_of": feature("torch._C:_is_alias_of", "results that share memory"),
        "storage_use_count": feature("torch._C:_storage_Use_Count", "capture on a CPU"),
        "to_dlpack": feature("torch._C:_to_dlpack", "the emulated device"),
        "from_dlpack": feature("torch._C:_from_dlpack", "the emulated device"),
        "storage_at": feature(
            "torch._C:_construct_storage_from_data_pointer", "tensors over memory of others"
        ),
        "StorageBase": feature("torch.storage:_StorageBase", "the emulated device"),
        "GeneratorBase": feature("torch._C:Generator", "the emulated device"),
        "internal_overlap": feature("torch:_debug_has_internal_overlap", "capture on a CPU"),
        "empty_strided_cpu": optional(
            "torch._C._dynamo.guards:_empty_strided_cpu", "a quicker allocation of results"
        ),
        "empty_strided_cuda": optional(
            "torch._C._dynamo.guards:_empty_strided_cuda", "the same on CUDA, where it is used"
        ),
        "same_addresses": optional(
            "torch._C:_tensors_data_ptrs_at_indices_equal",
            "a quicker comparison of addresses; only builds with CUDA have it",
        ),
        "is_functional_tensor": feature("torch:_is_functional_tensor", "streams in eager mode"),
        "from_functional_tensor": feature("torch:_from_functional_tensor", "streams in eager mode"),
        "sync": feature("torch:_sync", "streams in eager mode"),
        "functionalize_replace": feature(
            "torch:_functionalize_replace", "operators of the npu library that write to arguments"
        ),
        "functionalize_commit_update": feature(
            "torch:_functionalize_commit_update",
            "operators of the npu library that write to arguments",
        ),
        "functionalize_sync": feature(
            "torch:_functionalize_sync", "operators of the npu library that write to arguments"
        ),
        "clone_preserve_strides": feature(
            "torch._prims_common:clone_preserve_strides",
            "operators that update copies of their arguments",
        ),
        "computation_dtype": required(
            "torch._prims_common:get_computation_dtype", "types that attention sums up in"
        ),
    },
)

__getattr__ = NAMES.find
