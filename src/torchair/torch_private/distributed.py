"""Collectives in graphs and groups of processes."""

from __future__ import annotations

from torchair.torch_private.table import Names, feature

FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
NAMES = Names(
    __name__,
    {
        "functional_collectives": feature(FUNCTIONAL_COLLECTIVES, "collectives in graphs"),
        "get_group_tag": feature(
            "torch.distributed.distributed_c10d:_get_group_tag", "collectives in graphs"
        ),
        "resolve_group_by_ranks_and_tag": feature(
            "torch.distributed.distributed_c10d:_resolve_group_name_by_ranks_and_tag",
            "collectives in graphs",
        ),
        "resolve_process_group": feature(
            "torch.distributed.distributed_c10d:_resolve_process_group", "collectives in graphs"
        ),
        "world": feature("torch.distributed.distributed_c10d:_world", "the emulated device"),
    },
)


def define_older_operators() -> None:
    """Load the operators of collectives that functional ones replaced: graphs may have them."""
    NAMES.find("functional_collectives")


__getattr__ = NAMES.find
