"""The flat names of options and where each of them lives in the tree.

Works on any tree that has the paths; must not import the root of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torchair.configs.options import Section, read_path, write_path
from torchair.errors import did_you_mean


class Alias(NamedTuple):
    """The path behind a flat name; ``inverted`` when the tree holds the opposite switch."""

    path: str
    inverted: bool = False


_CAPTURE = "debug.aclgraph."
_KERNEL = "experimental_config.aclgraph."

OPTION_ALIASES: Mapping[str, Alias] = {
    "force_eager": Alias("debug.run_eagerly"),
    "use_graph_pool": Alias("aclgraph_config.use_custom_pool"),
    "reuse_graph_pool_in_same_fx": Alias(f"{_CAPTURE}disable_mempool_reuse_in_same_fx", True),
    "capture_limit": Alias(f"{_CAPTURE}static_capture_size_limit"),
    "clone_input": Alias(f"{_CAPTURE}clone_input"),
    "clone_output": Alias(f"{_CAPTURE}enable_output_clone"),
    "share_results": Alias(f"{_CAPTURE}share_results"),
    "capture_fallback": Alias(f"{_CAPTURE}capture_fallback"),
    "static_kernel_compile": Alias(f"{_KERNEL}_aclnn_static_shape_kernel"),
    "super_kernel_optimize": Alias(f"{_KERNEL}_super_kernel_optimize"),
    "super_kernel_optimize_options": Alias(f"{_KERNEL}_super_kernel_optimize_options"),
    "super_kernel_debug_options": Alias(f"{_KERNEL}_super_kernel_debug_options"),
    "frozen_parameter": Alias("experimental_config.frozen_parameter"),
    "remove_noop_ops": Alias("experimental_config.remove_noop_ops"),
    "remove_cat_ops": Alias(f"{_CAPTURE}remove_cat_ops"),
    "inplace_pass": Alias(f"{_CAPTURE}disable_reinplace_inplaceable_ops_pass", True),
    "input_inplace_pass": Alias(f"{_CAPTURE}disable_reinplace_input_mutated_ops_pass", True),
    "pattern_fusion_pass": Alias("experimental_config.pattern_fusion_pass"),
    "post_grad_custom_pre_pass": Alias("post_grad_custom_pre_pass"),
    "post_grad_custom_post_pass": Alias("post_grad_custom_post_pass"),
    "dump_tensor_data": Alias("dump_config.enable_dump"),
    "data_dump_stage": Alias("dump_config.data_dump_stage"),
    "data_dump_dir": Alias("dump_config.dump_path"),
    "_vllm_aclnn_static_kernel_sym_index": Alias(f"{_KERNEL}_aclnn_static_shape_kernel_sym_index"),
    "_vllm_aclnn_static_kernel_sym_range": Alias(
        f"{_KERNEL}_aclnn_static_shape_kernel_sym_value_range"
    ),
}
"""The names of ``torch.compile(options=...)`` with the backends of ``get_npu_backend``."""

FLAT_ALIASES: Mapping[str, Alias] = {
    **OPTION_ALIASES,
    "disable_static_kernel_compile_cache": Alias(f"{_KERNEL}_disable_static_kernel_compile_cache"),
    "deadlock_check": Alias("debug.deadlock_check"),
    "capture_error_mode": Alias(f"{_CAPTURE}capture_error_mode"),
    "force_recapture": Alias(f"{_CAPTURE}force_recapture"),
    "mode": Alias("mode"),
}
"""The names of the flat configuration of ``npugraph_ex``: all of the above and five more."""


def apply_options(
    config: Section, options: Mapping[str, Any], aliases: Mapping[str, Alias] = OPTION_ALIASES
) -> None:
    """Set flat ``options`` on ``config``; after an unknown name (``ValueError``) none is set."""
    check_names(options, aliases)
    for name, value in options.items():
        alias = aliases[name]
        write_path(config, alias.path, _inverse(value) if alias.inverted else value)


class NpugraphexConfig:
    """The options of one config under their flat names: a view, so tree and view never disagree."""

    def __init__(self, config: Section) -> None:
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name not in OPTION_ALIASES:
            raise AttributeError(f"{type(self).__name__} has no option '{name}'")
        alias = OPTION_ALIASES[name]
        value = read_path(self.__dict__["_config"], alias.path)
        return _inverse(value) if alias.inverted else value

    def __setattr__(self, name: str, value: Any) -> None:
        apply_options(self.__dict__["_config"], {name: value})

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPTION_ALIASES]

    def as_dict(self) -> dict[str, Any]:
        """The current value of each flat name."""
        return {name: getattr(self, name) for name in OPTION_ALIASES}


def check_names(options: Iterable[str], aliases: Mapping[str, Alias]) -> None:
    """Raise a ``ValueError`` that lists the legal names at the first one that is not."""
    for name in options:
        if name not in aliases:
            raise ValueError(
                f"unknown compile option '{name}'; the options are: {', '.join(sorted(aliases))}."
                f"{did_you_mean(name, aliases)}"
            )


def _inverse(value: Any) -> Any:
    # Anything but a switch stays as it is: the option rejects it and shows what the user wrote.
    return not value if isinstance(value, int) and value in (0, 1) else value
