"""Warnings about a configuration: options its mode does not use, and promises the user makes.

Must not import the root of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchair.configs.options import (
    CAPTURE_MODES,
    MAX_AUTOTUNE,
    REDUCE_OVERHEAD,
    Section,
    leaves,
    read_path,
)
from torchair.log import warn_once

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

_SINGLE_SHAPES = "kernels of CPU and CUDA are not compiled for single shapes"
_SUPER_KERNELS = "CPU and CUDA have no super kernels"
_EXPORT = "it is for dynamo_export"

UNSUPPORTED: Mapping[str, str] = {
    "experimental_config.aclgraph._aclnn_static_shape_kernel": _SINGLE_SHAPES,
    "experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir": _SINGLE_SHAPES,
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range": _SINGLE_SHAPES,
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index": _SINGLE_SHAPES,
    "experimental_config.aclgraph._disable_static_kernel_compile_cache": _SINGLE_SHAPES,
    "experimental_config.aclgraph._super_kernel_optimize": _SUPER_KERNELS,
    "experimental_config.aclgraph._super_kernel_optimize_options": _SUPER_KERNELS,
    "experimental_config.aclgraph._super_kernel_debug_options": _SUPER_KERNELS,
    "experimental_config.npu_fx_pass": "norms, rotary embeddings and attention are found by the "
    "rules of the engine",
    "experimental_config.static_model_ops_lower_limit": "graphs are not split into parts of fixed "
    "and of varying sizes",
    "experimental_config.tiling_schedule_optimize": "tiling schedules belong to NPU kernels",
    "dump_config.dump_config_path": "the file is for the runtime of an NPU",
    "export.export_path_dir": _EXPORT,
    "export.export_name": _EXPORT,
    "export.weight_name": _EXPORT,
    "export.inputs_name": _EXPORT,
    "export.experimental.auto_atc_config_generated": _EXPORT,
    "export.experimental.enable_lite_export": _EXPORT,
    "experimental_config.enable_ref_data": "inputs that a graph updates are updated either way; "
    "dynamo_export writes RefData",
}
"""Options that do nothing in a compiled graph on this device, and why."""

_EXPORTED = ("export.", "experimental_config.enable_ref_data")  # what dynamo_export reads

CAPTURE_ONLY = ("debug.aclgraph.", "aclgraph_config.", "dump_config.data_dump_stage")
"""Beginnings of the names of options for the modes that capture."""

ENGINE_ONLY = (
    "debug.timeline.", "debug.fx_summary.", "debug.deadlock_check", "dump_config.dump_mode",
    "dump_config.quant_dumpable", "dump_config.dump_step", "dump_config.dump_layer",
    "dump_config.dump_data", "experimental_config.memory_efficiency",
    "experimental_config.strict_converters", "inference_config.", "ge_config.aicore_num",
)  # fmt: skip
"""The same for the mode max-autotune, beside those of ``INEFFECTIVE``."""

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
        warn_once(
            f"config may not take effect or report error in {mode} mode: {listed}",
            UserWarning,
            stacklevel=3,
        )
    if mode == REDUCE_OVERHEAD:
        warn_once(
            "mode 'reduce-overhead' is deprecated; use the 'npugraph_ex' backend instead",
            DeprecationWarning,
            stacklevel=3,
        )


def warn_unsupported(config: Section, names: Mapping[str, str] | None = None) -> None:
    """Issue one ``UserWarning`` for all options that are set and do nothing.

    ``names`` gives the name under which the user knows the option at a path.
    """
    mode, known = read_path(config, "mode"), names or {}
    exports = bool(read_path(config, "export.export_mode"))
    warned = {text.partition(":")[0] for text in ineffective_options(config)}
    defaults = dict(leaves(type(config)()))
    found = [
        f"config.{known.get(path, path)}: {why}"
        for path, value in leaves(config)
        if value != defaults.get(path)
        and f"config.{path}" not in warned
        and (why := why_idle(path, mode)) is not None
        and not (exports and path.startswith(_EXPORTED))
    ]
    if found:
        listed = "; ".join(found)
        warn_once(f"no effect on this device: {listed} (leave it out)", UserWarning, stacklevel=3)


def why_idle(path: str, mode: str) -> str | None:
    """Why an option does nothing in a mode; None if it does something."""
    if path in UNSUPPORTED:
        return UNSUPPORTED[path]
    if mode not in CAPTURE_MODES:
        return "it is for the modes that capture" if path.startswith(CAPTURE_ONLY) else None
    idle = path.startswith(ENGINE_ONLY) or path in INEFFECTIVE[REDUCE_OVERHEAD]
    if not idle or path == "dump_config.enable_dump":  # which dumps in another way there
        return None
    if path == "debug.deadlock_check":
        return "captured graphs are not checked for deadlocks"
    return "it is for the mode max-autotune"


def warn_frozen_parameter(config: Section) -> None:
    """Remind the user, once ``frozen_parameter`` is on, of the promise that comes with it."""
    if read_path(config, "experimental_config.frozen_parameter"):
        warn_once(
            "frozen_parameter is on: parameters should keep their address and contents for as long "
            "as the compiled model is used; each change costs time, so switch it off where they "
            "change often",
            UserWarning,
            stacklevel=3,
        )


def _matches(value: Any, values: tuple[Any, ...]) -> bool:
    return value is not None and (values is _ANY or value in values)
