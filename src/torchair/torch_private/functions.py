"""Functions of torch that are kernels of operators."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature, required

NAMES = Names(
    __name__,
    {
        "nn": required("torch._C._nn", "reference kernels of activations, losses and pooling"),
        "foreach_copy": required("torch:_foreach_copy_", "many copies in one call"),
        "neg_view": required("torch:_neg_view", "arguments that are views with a sign"),
        "softmax_kernel": required("torch:_softmax", "reference kernels"),
        "log_softmax_kernel": required("torch:_log_softmax", "reference kernels"),
        "assert_async": required("torch:_assert_async", "assertions in graphs"),
        "fused_sdp_choice": feature("torch:_fused_sdp_choice", "attention on the emulated device"),
        "flash_sdp_enabled": feature(
            "torch._C:_get_flash_sdp_enabled", "attention on the emulated device"
        ),
        "upsample_output_size": feature(
            "torch._decomp.decompositions:upsample_compute_output_size",
            "upsampling that is kept whole",
        ),
    },
)

__getattr__ = NAMES.find
