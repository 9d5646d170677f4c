"""torch.export."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature

NAMES = Names(
    __name__,
    {
        "composite_operators": feature(
            "torch._export.utils:_collect_all_valid_cia_ops", "exported programs as GE graphs"
        ),
        "composite_decomposition": feature(
            "torch._export.utils:_get_decomp_for_cia", "exported programs as GE graphs"
        ),
    },
)

__getattr__ = NAMES.find
