"""Nested arguments and results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchair.torch_private.table import Names, required

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec as TreeSpec

REGISTRY_MODULE = "torch.utils._pytree"
_USE = "nested arguments and results"
_TAKEN = (
    "TreeSpec", "keystr", "register_pytree_node", "tree_flatten", "tree_flatten_with_path",
    "tree_is_leaf", "tree_leaves", "tree_map", "tree_map_only", "tree_structure", "tree_unflatten",
    "treespec_dumps", "treespec_loads",
)  # fmt: skip
NAMES = Names(__name__, {n: required(f"{REGISTRY_MODULE}:{n}", _USE) for n in _TAKEN})

__getattr__ = NAMES.find
