"""Warnings about a configuration: options its mode does not use, and promises the user makes.

Must not import the root of the tree.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torchair.configs.options import CAPTURE_MODES, MAX_AUTOTUNE, REDUCE_OVERHEAD
from torchair.configs.section import Section, leaves, read_path

_ANY: tuple[Any, ...] = ()
"""Stands for every value but None."""

INEFFECTIVE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    MAX_AUTOTUNE: {
        "debug.aclgraph.disable_reinplace_input_mutated_ops_pass": (True,),
        "debug.aclgraph.disable_reinplace_inplaceable_ops_pass": (True,),
        "debug.aclgraph.clone_input": (False,),
        "experimental_config.aclgraph._aclnn_static_shape_kernel": (True,),
        "experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir": _ANY,
    },
    REDUCE_OVERHEAD: {
        "debug.fx_summary.type": ("csv",),
        "export.experimental.auto_atc_config_generated": (True,),
        "export.experimental.enable_record_nn_module_stack": (True,),
        "dump_config.enable_dump": (True,),
        "fusion_config.fusion_switch_file": _ANY,
        "experimental_config.cc_parallel_enable": (True,),
        "experimental_config.static_model_ops_lower_limit": _ANY,
        "experimental_config.topology_sorting_strategy": ("BFS", "RDFS", "StableRDFS"),
        "experimental_config.enable_ref_data": (True,),
        "experimental_config.enable_view_optimize": _ANY,
        "experimental_config.tiling_schedule_optimize": (True,),
        "inference_config.dynamic_gears_merge_policy": ("product",),
        "ge_config.enable_single_stream": (True,),
        "ge_config.oo_level": ("O1",),
        "ge_config.oo_constant_folding": _ANY,
        "ge_config.oo_dead_code_elimination": _ANY,
        "ge_config.export_compile_stat": ("0", "1"),
        "ge_config.aicore_num": _ANY,
        "ge_config.optimization_switch": _ANY,
    },
}
"""Per mode: the values of an option that have no effect there, or may fail."""

UNSUPPORTED: Mapping[str, str] = {
    "experimental_config.aclgraph._aclnn_static_shape_kernel": "kernels of CPU and CUDA are not "
    "compiled for single shapes",
    "experimental_config.aclgraph._super_kernel_optimize": "CPU and CUDA have no super kernels",
    "debug.deadlock_check": "captured graphs are not checked for deadlocks",
}
"""Switches of captured graphs that do nothing here, and why."""

_FEATURES_WITHOUT_EFFECT = {
    REDUCE_OVERHEAD: ("set_dim_gears", "dynamo_export", "scope", "npu_print"),
}


def ineffective_options(config: Section) -> list[str]:
    """The set options that the mode of ``config`` does not honour, as ``config.<path>:<value>``."""
    table = INEFFECTIVE.get(read_path(config, "mode"), {})
    return [
        f"config.{path}:{value}"
        for path, value in leaves(config)
        if path in table and _matches(value, table[path])
    ]


def warn_ineffective(config: Section) -> None:
    """Issue one ``UserWarning`` for all ineffective options; deprecate reduce-overhead."""
    mode = read_path(config, "mode")
    if found := ineffective_options(config):
        listed = ", ".join([*found, *_FEATURES_WITHOUT_EFFECT.get(mode, ())])
        warnings.warn(
            f"config may not take effect or report error in {mode} mode: {listed}",
            UserWarning,
            stacklevel=3,
        )
    if mode == REDUCE_OVERHEAD:
        warnings.warn(
            "mode 'reduce-overhead' is deprecated; use the 'npugraph_ex' backend instead",
            DeprecationWarning,
            stacklevel=3,
        )


def warn_unsupported(config: Section, names: Mapping[str, str] | None = None) -> None:
    """Issue one ``UserWarning`` for all switches of captured graphs that do nothing here.

    ``names`` gives the name under which the user knows the option at a path.
    """
    if read_path(config, "mode") not in CAPTURE_MODES:
        return
    known = names or {}
    found = [
        f"config.{known.get(path, path)}: {why}"
        for path, why in UNSUPPORTED.items()
        if read_path(config, path)
    ]
    if found:
        warnings.warn(f"no effect on this device: {'; '.join(found)}", UserWarning, stacklevel=3)


def warn_frozen_parameter(config: Section) -> None:
    """Remind the user, once ``frozen_parameter`` is on, of the promise that comes with it."""
    if read_path(config, "experimental_config.frozen_parameter"):
        warnings.warn(
            "frozen_parameter is on: parameters should keep their address and contents for as long "
            "as the compiled model is used; each change costs time",
            UserWarning,
            stacklevel=3,
        )


def _matches(value: Any, values: tuple[Any, ...]) -> bool:
    return value is not None and (values is _ANY or value in values)
