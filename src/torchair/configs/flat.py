"""``FlatConfig``, the ``CompilerConfig`` of ``npugraph_ex``: the options of capture in one list.

It gives no option a meaning of its own: ``tree`` writes them all into the tree of options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchair.configs.aliases import FLAT_ALIASES, apply_options, check_names
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.options import (
    INT64_MAX,
    NPUGRAPH_EX,
    CallableValue,
    DictOptionValue,
    EngineOptions,
    IntListValue,
    IntRangeValue,
    MustExistedPathValue,
    OptionValue,
    RawValue,
    Section,
    leaves,
)


class Switch(OptionValue):
    """A boolean option that reads back as a real ``bool``."""

    def __init__(self, default: bool) -> None:
        super().__init__(default, [True, False])

    def normalise(self, raw: Any) -> bool:
        return bool(raw)


class FlatConfig(Section):
    """All options of ``npugraph_ex``: assigning validates, reading gives the option object."""

    public_name = "npugraph_ex.CompilerConfig"

    force_eager = Switch(False)
    use_graph_pool = RawValue(None)
    reuse_graph_pool_in_same_fx = Switch(True)
    capture_limit = IntRangeValue(64, 1, INT64_MAX)
    clone_input = Switch(True)
    clone_output = Switch(False)
    share_results = Switch(False)
    disable_static_kernel_compile_cache = Switch(False)
    static_kernel_compile = Switch(False)
    frozen_parameter = Switch(False)
    remove_noop_ops = Switch(True)
    remove_cat_ops = Switch(True)
    inplace_pass = Switch(True)
    input_inplace_pass = Switch(True)
    pattern_fusion_pass = Switch(True)
    post_grad_custom_pre_pass = CallableValue(None)
    post_grad_custom_post_pass = CallableValue(None)
    dump_tensor_data = Switch(False)
    data_dump_stage = OptionValue("optimized", ["original", "optimized"])
    data_dump_dir = MustExistedPathValue("./")
    _vllm_aclnn_static_kernel_sym_index = IntRangeValue(0, 0, INT64_MAX)
    _vllm_aclnn_static_kernel_sym_range = IntListValue(None)
    super_kernel_optimize = Switch(False)
    super_kernel_optimize_options = DictOptionValue(None)
    super_kernel_debug_options = DictOptionValue(None)
    deadlock_check = Switch(False)
    capture_error_mode = OptionValue("global", ["global", "thread_local", "relaxed"])
    capture_fallback = Switch(True)
    mode = OptionValue(NPUGRAPH_EX, [NPUGRAPH_EX])
    force_recapture = Switch(False)

    def update(self, options: Mapping[str, Any]) -> None:
        """Set options by name; after an unknown name (``ValueError``) none is set."""
        check_names(options, FLAT_ALIASES)
        for name, value in options.items():
            setattr(self, name, value)

    def tree(self) -> CompilerConfig:
        """The same options as a tree, in the mode ``npugraph_ex``."""
        config = CompilerConfig()
        given = {name: raw for name, raw in leaves(self) if raw is not None}
        apply_options(config, given, FLAT_ALIASES)
        return config

    def as_dict(self, mode: str | None = None) -> EngineOptions:
        """All values under their flat names; there are no global options."""
        return {name: option.value for name, option in vars(self).items()}, {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatConfig) and dict(leaves(self)) == dict(leaves(other))
