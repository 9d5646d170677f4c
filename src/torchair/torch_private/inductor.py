"""What is used of Inductor: its pattern matcher, and the form of compiled code in caches."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature, required

NAMES = Names(
    __name__,
    {
        "OutputCode": required("torch._inductor.output_code:OutputCode", "AOTAutograd's cache"),
        "pattern_matcher": feature("torch._inductor.pattern_matcher", "register_replacement"),
    },
)

__getattr__ = NAMES.find
