"""The sections that steer the engine: experimental, ge, fusion, tuning and inference.

Each option is declared here once: its type and default, the engine keys it becomes and the field of
the engine's options that is read back from each, where it has an effect, the line of
docs/options.md about it, and its flat name.
"""

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

# fmt: off: each declaration is a row of a table


# The position of a strategy is its number in the engine.
TOPOLOGY_STRATEGIES = ("BFS", "DFS", "RDFS", "StableRDFS")

_STATIC_KERNEL = "_aclnn_static_shape_kernel"
_SUPER_KERNEL = "_super_kernel_optimize"
_SINGLE_SHAPES = "kernels of CPU and CUDA are not compiled for single shapes"
_SUPER_KERNELS = "CPU and CUDA have no super kernels"


def _true_or_false(raw: Any) -> str | None:
    return None if raw is None else str(bool(raw)).lower()


def _unless_false(text: str | None) -> bool:
    return text != "false"


def _only_off(raw: Any) -> str | None:
    return None if raw else "0"


def _strategy_number(strategy: str) -> str:
    return str(TOPOLOGY_STRATEGIES.index(strategy))


def _strategy_of_number(text: str | None) -> str:
    return dict(zip("0123", TOPOLOGY_STRATEGIES, strict=True)).get(text or "", "DFS")


def _strategy_of_level(level: str) -> str | None:
    return _strategy_number("StableRDFS") if level == "O1" else None


class AclgraphExperimentalConfig(Section):
    """Kernel specialisation for captured graphs."""

    _aclnn_static_shape_kernel = (
        flag(False).emits(modes=CAPTURE_MODES, when=_STATIC_KERNEL)
        .idle("capture", _SINGLE_SHAPES).flat("static_kernel_compile").ineffective(True)
    )
    _aclnn_static_shape_kernel_build_dir = (
        StrOptionValue(None)
        .emits(modes=CAPTURE_MODES, when=_STATIC_KERNEL,
            encode=lambda raw: raw or "").idle("capture", _SINGLE_SHAPES).ineffective()
    )
    _aclnn_static_shape_kernel_sym_value_range = (
        IntListValue(None)
        .emits(modes=CAPTURE_MODES, when=_STATIC_KERNEL)
        .idle("capture", _SINGLE_SHAPES).flat("_vllm_aclnn_static_kernel_sym_range")
    )
    _aclnn_static_shape_kernel_sym_index = (
        IntRangeValue(0, 0, INT64_MAX)
        .emits(modes=CAPTURE_MODES, when=_STATIC_KERNEL)
        .idle("capture", _SINGLE_SHAPES).flat("_vllm_aclnn_static_kernel_sym_index")
    )
    _disable_static_kernel_compile_cache = (
        flag(False).idle("capture", _SINGLE_SHAPES)
        .flat("disable_static_kernel_compile_cache", own=True)
    )
    _super_kernel_optimize = (
        flag(False).emits(modes=CAPTURE_MODES, when=_SUPER_KERNEL)
        .idle("capture", _SUPER_KERNELS).flat("super_kernel_optimize")
    )
    _super_kernel_optimize_options = (
        DictOptionValue(None)
        .emits(modes=CAPTURE_MODES, when=_SUPER_KERNEL)
        .idle("capture", _SUPER_KERNELS).flat("super_kernel_optimize_options")
    )
    _super_kernel_debug_options = (
        DictOptionValue(None)
        .emits(modes=CAPTURE_MODES, when=_SUPER_KERNEL)
        .idle("capture", _SUPER_KERNELS).flat("super_kernel_debug_options")
    )


class ExperimentalConfig(Section):
    """Switches of the compiler's own transformations."""

    cc_parallel_enable = (
        flag(False).emits("ge.exec.enableEngineParallel", scope="global", field="overlap")
        .doc("GE", "works: communication without a stream label gets a lane of its own and "
            "overlaps with independent computing").ineffective(True)
    )
    keep_inference_input_mutations = flag(True).doc("both")
    memory_efficiency = (
        flag(False).emits("ge.featureBaseRefreshable", field="compact")
        .doc("GE", "works: of several arrangements of intermediates the one that needs the least "
            "memory is taken, which makes plans slower to make, see [deploy.md](deploy.md#memory)")
    )
    frozen_parameter = (
        flag(False).emits(modes=ALL_MODES, field="frozen")
        .doc("both", "works on CPU: weights are packed once for matrix products and convolutions, "
            "batch norms are folded into convolutions, and addresses of parameters are written "
            "down. Parameters that change all the same are packed again, see cpu_engine.md. In "
            "the capture modes the addresses of parameters are no part of the graph key")
        .flat("frozen_parameter")
    )
    static_model_ops_lower_limit = (
        IntRangeValue(None, -1, INT64_MAX).emits("ge.exec.static_model_ops_lower_limit")
        .idle("GE", "graphs are not split into parts of fixed and of varying sizes").ineffective()
    )
    jit_compile = (
        OptionValue("auto", ["auto"]).emits("ge.jit_compile", encode={"auto": "2"}.get)
        .idle("GE", "it has one value only")
    )
    npu_fx_pass = (
        flag(False)
        .idle("GE", "norms, rotary embeddings and attention are found by the rules of the engine")
    )
    aot_config_enable_joint_graph = (
        flag(False)
        .doc("both", "works: a call runs the backward too, as a graph of its own: gradients are "
            "in `.grad` when it returns")
    )
    aot_config_output_loss_index = (
        OptionValue(0)
        .doc("both", "works: which result is the loss that the option above runs the backward of")
    )
    topology_sorting_strategy = (
        OptionValue("DFS", TOPOLOGY_STRATEGIES)
        .emits("ge.topoSortingMode", encode=_strategy_number, field="topology",
            decode=_strategy_of_number).doc("GE").ineffective("BFS", "RDFS", "StableRDFS")
    )
    enable_ref_data = (
        flag(False)
        .for_export(", which switches it on: inputs that are updated are `RefData`; a graph in "
            "this process updates them either way", idle="inputs that a graph updates are updated "
            "either way; dynamo_export writes RefData").ineffective(True)
    )
    enable_view_optimize = flag(True).doc("GE").ineffective()
    remove_noop_ops = (
        flag(True).emits(modes=ALL_MODES).doc("both").flat("remove_noop_ops")
    )
    tiling_schedule_optimize = (
        flag(False).emits("ge.tiling_schedule_optimize")
        .idle("GE", "tiling schedules belong to NPU kernels").ineffective(True)
    )
    pattern_fusion_pass = (
        flag(True).emits(modes=ALL_MODES, field="patterns")
        .doc("both", "works: [patterns](patterns.md), built in and registered")
        .flat("pattern_fusion_pass")
    )
    strict_converters = (
        flag(False)
        .doc("GE", "works (an operator without a converter is an error instead of a generic torch "
            "node)")
    )
    native_code = (
        flag(True).emits("torchair.nativeCode", encode=_only_off, field="native")
        .doc("both", "works (ours, not of the original): `False` runs torch's kernels one by one "
            "instead of generated code on CPU, as the environment variable `TORCHAIR_NATIVE=0` "
            "does")
    )
    kernel_cache = (
        flag(True).emits("torchair.kernelCache", encode=_only_off, field="keep")
        .doc("both", "works (ours, not of the original): `False` neither looks for kernels of "
            "this graph [on disk](deploy.md#kernels-on-disk) nor keeps them, as the environment "
            "variable `TORCHAIR_KERNEL_CACHE=0` does for all graphs")
    )
    tuned_kernels = (
        FileValue(None).emits("torchair.tunedKernels", field="tuned")
        .doc("both", "works (ours, not of the original): results of [tuning](tuning.md) that "
            "kernels are made by, as the environment variable `TORCHAIR_TUNED=<file>` does for "
            "all graphs")
    )
    aclgraph = AclgraphExperimentalConfig()


class GeConfig(Section):
    """Options of the engine of the process."""

    enable_single_stream = (
        flag(False)
        .emits("ge.enableSingleStream", scope="global", encode=_true_or_false,
            field="single_stream").doc("GE", "works: stream labels are ignored when a graph runs")
        .ineffective(True)
    )
    # At O1 the order must be reproducible: this key replaces the one of topology_sorting_strategy,
    # because the root lists this section after experimental_config.
    oo_level = (
        OptionValue("O3", ["O1", "O3"]).emits("ge.oo.level", scope="global", field="level")
        .emits("ge.topoSortingMode", encode=_strategy_of_level).doc("GE").ineffective("O1")
    )
    oo_constant_folding = (
        flag(None, or_none=True)
        .emits("ge.oo.constantFolding", scope="global", encode=_true_or_false, field="fold",
            decode=_unless_false).doc("GE").ineffective()
    )
    oo_dead_code_elimination = (
        flag(None, or_none=True)
        .emits("ge.oo.deadCodeElimination", scope="global", encode=_true_or_false,
            field="dead_code", decode=_unless_false).doc("GE").ineffective()
    )
    # Files that nobody has asked for would be in everybody's folders: the default writes none.
    export_compile_stat = (
        OptionValue("2", ["0", "1", "2"]).emits("ge.exportCompileStat", scope="global")
        .emits("torchair.compileStat", assigned=True, field="statistics",
            decode=lambda text: text or "0")
        .doc("GE", "works where it is set: `fusion_result.json` in the current folder says which "
            "rules, patterns and kinds of units had an effect, and how often; `'1'` at exit, "
            "`'2'` after each graph").ineffective("0", "1")
    )
    aicore_num = (
        StrOptionValue(None)
        .emits("ge.aicoreNum", scope="global", field="cores", decode=lambda text: text or "")
        .doc("GE", "works: the cores that `debug.deadlock_check` counts with; nothing else "
            "divides cores here").ineffective()
    )
    optimization_switch = (
        StrOptionValue(None).emits("ge.optimizationSwitch", scope="global", field="switches")
        .doc("GE", "works (switches engine passes, rules, [patterns](patterns.md) and the joining "
            "of kernels by name, like `PassA:on;AutomaticUbFusion:off`). Names of CANN are known; "
            "a name that switches nothing is warned about, once").ineffective()
    )


class FusionConfig(Section):
    """A JSON file that switches fusion passes by name."""

    fusion_switch_file = (
        FileValue(None).emits("ge.fusionSwitchFile", scope="global", field="switch_file")
        .doc("GE", "works for [patterns](patterns.md), by name or `ALL`").ineffective()
    )


class AoeConfig(Section):
    """Tuning of a graph before its first compilation."""

    aoe_mode = (
        OptionValue(None, ["2"]).emits(when="aoe_mode", field="tune_mode")
        .doc("both", "works on CPU and CUDA: forms of kernels are measured when a graph of fixed "
            "sizes is compiled, see [tuning.md](tuning.md)")
    )
    work_path = (
        MustExistedPathValue("./").emits(when="aoe_mode", field="tune")
        .doc("both", "works: the folder of `torchair_tuned.sqlite`, where results are kept")
    )
    aoe_config_file = (
        FileValue(None).emits(when="aoe_mode", field="tune_file")
        .doc("both", "works: a JSON file that says what is tuned, see "
            "[tuning.md](tuning.md#restricting-it)")
    )


class InferenceConfig(Section):
    """How the gears of several inputs combine."""

    dynamic_gears_merge_policy = (
        OptionValue("zip", ["zip", "product"])
        .doc("GE", "works: how the gears of several dims combine, see [deploy.md](deploy.md#gears)")
        .ineffective("product")
    )
