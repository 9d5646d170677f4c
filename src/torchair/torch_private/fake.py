"""Fake tensors and symbolic sizes of tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchair.torch_private.table import Names, feature, required

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

NAMES = Names(
    __name__,
    {
        "FakeTensor": required(
            "torch._subclasses.fake_tensor:FakeTensor", "what tracing knows of values"
        ),
        "FakeTensorMode": required(
            "torch._subclasses.fake_tensor:FakeTensorMode", "what tracing knows of values"
        ),
        "unset_fake_temporarily": required(
            "torch._subclasses.fake_tensor:unset_fake_temporarily", "constants of graphs"
        ),
        "DataDependentOutputException": feature(
            "torch._subclasses.fake_tensor:DataDependentOutputException", "torchair.compile"
        ),
        "DynamicOutputShapeException": feature(
            "torch._subclasses.fake_tensor:DynamicOutputShapeException", "torchair.compile"
        ),
        "detect_fake_mode": required(
            "torch._guards:detect_fake_mode", "what tracing knows of values"
        ),
        "FakeScriptObject": required(
            "torch._library.fake_class_registry:FakeScriptObject", "arguments that are objects"
        ),
        "is_opaque_value": required(
            "torch._library.opaque_object:is_opaque_value", "arguments that are objects"
        ),
        "shapes_config": feature(
            "torch.fx.experimental._config", "torchair.compile with sizes from zero on"
        ),
    },
)

__getattr__ = NAMES.find
