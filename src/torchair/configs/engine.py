"""The sections that steer the engine: experimental, ge, fusion, tuning and inference."""

from __future__ import annotations

from typing import Any

from torchair.configs.options import (
    ALL_MODES,
    CAPTURE_MODES,
    INT64_MAX,
    DictOptionValue,
    FileValue,
    IntListValue,
    IntRangeValue,
    MustExistedPathValue,
    OptionValue,
    Section,
    StrOptionValue,
    flag,
)

# The position of a strategy is its number in the engine.
TOPOLOGY_STRATEGIES = ("BFS", "DFS", "RDFS", "StableRDFS")

_STATIC_KERNEL = "_aclnn_static_shape_kernel"
_SUPER_KERNEL = "_super_kernel_optimize"


def _true_or_false(raw: Any) -> str | None:
    return None if raw is None else str(bool(raw)).lower()


def _only_off(raw: Any) -> str | None:
    return None if raw else "0"


def _strategy_number(strategy: str) -> str:
    return str(TOPOLOGY_STRATEGIES.index(strategy))


def _strategy_of_level(level: str) -> str | None:
    return _strategy_number("StableRDFS") if level == "O1" else None


class AclgraphExperimentalConfig(Section):
    """Kernel specialisation for captured graphs."""

    _aclnn_static_shape_kernel = flag(False).emits(
        _STATIC_KERNEL, modes=CAPTURE_MODES, when=_STATIC_KERNEL
    )
    _aclnn_static_shape_kernel_build_dir = StrOptionValue(None).emits(
        f"{_STATIC_KERNEL}_build_dir",
        modes=CAPTURE_MODES,
        when=_STATIC_KERNEL,
        encode=lambda raw: raw or "",
    )
    _aclnn_static_shape_kernel_sym_value_range = IntListValue(None).emits(
        f"{_STATIC_KERNEL}_sym_value_range", modes=CAPTURE_MODES, when=_STATIC_KERNEL
    )
    _aclnn_static_shape_kernel_sym_index = IntRangeValue(0, 0, INT64_MAX).emits(
        f"{_STATIC_KERNEL}_sym_index", modes=CAPTURE_MODES, when=_STATIC_KERNEL
    )
    _disable_static_kernel_compile_cache = flag(False)
    _super_kernel_optimize = flag(False).emits(
        _SUPER_KERNEL, modes=CAPTURE_MODES, when=_SUPER_KERNEL
    )
    _super_kernel_optimize_options = DictOptionValue(None).emits(
        "_super_kernel_optimize_options", modes=CAPTURE_MODES, when=_SUPER_KERNEL
    )
    _super_kernel_debug_options = DictOptionValue(None).emits(
        "_super_kernel_debug_options", modes=CAPTURE_MODES, when=_SUPER_KERNEL
    )


class ExperimentalConfig(Section):
    """Switches of the compiler's own transformations."""

    cc_parallel_enable = flag(False).emits("ge.exec.enableEngineParallel", scope="global")
    keep_inference_input_mutations = flag(True)
    memory_efficiency = flag(False).emits("ge.featureBaseRefreshable")
    frozen_parameter = flag(False).emits("frozen_parameter", modes=ALL_MODES)
    static_model_ops_lower_limit = IntRangeValue(None, -1, INT64_MAX).emits(
        "ge.exec.static_model_ops_lower_limit"
    )
    jit_compile = OptionValue("auto", ["auto"]).emits("ge.jit_compile", encode={"auto": "2"}.get)
    npu_fx_pass = flag(False)
    aot_config_enable_joint_graph = flag(False)
    aot_config_output_loss_index = OptionValue(0)
    topology_sorting_strategy = OptionValue("DFS", TOPOLOGY_STRATEGIES).emits(
        "ge.topoSortingMode", encode=_strategy_number
    )
    enable_ref_data = flag(False)
    enable_view_optimize = flag(True)
    remove_noop_ops = flag(True).emits("remove_noop_ops", modes=ALL_MODES)
    tiling_schedule_optimize = flag(False).emits("ge.tiling_schedule_optimize")
    pattern_fusion_pass = flag(True).emits("pattern_fusion_pass", modes=ALL_MODES)
    strict_converters = flag(False)
    native_code = flag(True).emits("torchair.nativeCode", encode=_only_off)
    kernel_cache = flag(True).emits("torchair.kernelCache", encode=_only_off)
    tuned_kernels = FileValue(None).emits("torchair.tunedKernels")
    aclgraph = AclgraphExperimentalConfig()


class GeConfig(Section):
    """Options of the engine of the process."""

    enable_single_stream = flag(False).emits(
        "ge.enableSingleStream", scope="global", encode=_true_or_false
    )
    # At O1 the order must be reproducible: this key replaces the one of topology_sorting_strategy,
    # because the root lists this section after experimental_config.
    oo_level = (
        OptionValue("O3", ["O1", "O3"])
        .emits("ge.oo.level", scope="global")
        .emits("ge.topoSortingMode", encode=_strategy_of_level)
    )
    oo_constant_folding = flag(None, or_none=True).emits(
        "ge.oo.constantFolding", scope="global", encode=_true_or_false
    )
    oo_dead_code_elimination = flag(None, or_none=True).emits(
        "ge.oo.deadCodeElimination", scope="global", encode=_true_or_false
    )
    # Files that nobody has asked for would be in everybody's folders: the default writes none.
    export_compile_stat = (
        OptionValue("2", ["0", "1", "2"])
        .emits("ge.exportCompileStat", scope="global")
        .emits("torchair.compileStat", assigned=True)
    )
    aicore_num = StrOptionValue(None).emits("ge.aicoreNum", scope="global")
    optimization_switch = StrOptionValue(None).emits("ge.optimizationSwitch", scope="global")


class FusionConfig(Section):
    """A JSON file that switches fusion passes by name."""

    fusion_switch_file = FileValue(None).emits("ge.fusionSwitchFile", scope="global")


class AoeConfig(Section):
    """Tuning of a graph before its first compilation."""

    aoe_mode = OptionValue(None, ["2"]).emits("aoe_mode", when="aoe_mode")
    work_path = MustExistedPathValue("./").emits("work_path", when="aoe_mode")
    aoe_config_file = FileValue(None).emits("aoe_config_file", when="aoe_mode")


class InferenceConfig(Section):
    """How the gears of several inputs combine."""

    dynamic_gears_merge_policy = OptionValue("zip", ["zip", "product"])
