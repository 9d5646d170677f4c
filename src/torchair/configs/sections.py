"""Sections of the tree that steer the compiler: capture, engine, tuning, inference.
`debug_sections.py` has those for dumps, reports, checks and export.

Each option is declared once: its type and default, the engine keys it becomes and the field of
the engine's options that is read back from each, where it has an effect, the line of
docs/options.md about it, and its flat name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchair.configs import options
from torchair.configs.options import ALL_MODES, CAPTURE_MODES, OptionValue, Section, flag, or_else


class AclgraphConfig(options.PlainSection):
    """``use_custom_pool`` is the handle of a memory pool that the user owns, or None."""

    use_custom_pool = (
        options.RawValue(None, accepts="graph pool handle or None")
        .doc(
            "capture",
            "works (a handle as `graph_pool_handle()` of the device gives it: a pair of "
            "int, one of them 0)",
        )
        .flat("use_graph_pool")
    )


# ---- the engine


_ORDERS = {"BFS": "0", "DFS": "1", "RDFS": "2", "StableRDFS": "3"}
_ORDER_OF = {number: order for order, number in _ORDERS.items()}

_SINGLE_SHAPES = "kernels of CPU and CUDA are not compiled for single shapes"


def _true_or_false(raw: Any) -> str | None:
    return None if raw is None else str(bool(raw)).lower()


def _unless_false(text: str | None) -> bool:
    return text != "false"


def _only_on(raw: Any) -> str | None:
    return "1" if raw else None


def _only_off(raw: Any) -> str | None:
    return None if raw else "0"


def _static_kernel(option: OptionValue, **how: Any) -> OptionValue:
    how |= {"modes": CAPTURE_MODES, "when": "_aclnn_static_shape_kernel"}
    return option.emits(**how).idle("capture", _SINGLE_SHAPES)


def _super_kernel(option: OptionValue) -> OptionValue:
    option.emits(modes=CAPTURE_MODES, when="_super_kernel_optimize")
    return option.idle("capture", "it is about kernels of an NPU; see `super_kernels`")


class AclgraphExperimentalConfig(Section):
    """Kernel specialisation for captured graphs."""

    _aclnn_static_shape_kernel = (
        _static_kernel(flag(False)).flat("static_kernel_compile").ineffective(True)
    )
    _aclnn_static_shape_kernel_build_dir = _static_kernel(
        options.StrOptionValue(None), encode=or_else("")
    ).ineffective()
    _aclnn_static_shape_kernel_sym_value_range = _static_kernel(options.IntListValue(None)).flat(
        "_vllm_aclnn_static_kernel_sym_range"
    )
    _aclnn_static_shape_kernel_sym_index = _static_kernel(
        options.IntRangeValue(0, 0, options.INT64_MAX)
    ).flat("_vllm_aclnn_static_kernel_sym_index")
    _disable_static_kernel_compile_cache = (
        flag(False)
        .idle("capture", _SINGLE_SHAPES)
        .flat("disable_static_kernel_compile_cache", own=True)
    )
    _super_kernel_optimize = _super_kernel(flag(False)).flat("super_kernel_optimize")
    _super_kernel_optimize_options = _super_kernel(options.DictOptionValue(None)).flat(
        "super_kernel_optimize_options"
    )
    _super_kernel_debug_options = _super_kernel(options.DictOptionValue(None)).flat(
        "super_kernel_debug_options"
    )


class ExperimentalConfig(Section):
    """Switches of the compiler's own transformations."""

    cc_parallel_enable = (
        flag(False)
        .emits("ge.exec.enableEngineParallel", scope="global", field="overlap")
        .doc(
            "GE",
            "works: communication without a stream label gets a lane of its own and "
            "overlaps with independent computing",
        )
        .ineffective(True)
    )
    keep_inference_input_mutations = flag(True).doc("both")
    memory_efficiency = (
        flag(False)
        .emits("ge.featureBaseRefreshable", field="compact")
        .doc(
            "GE",
            "works: of several arrangements of intermediates the one that needs the least memory "
            "is taken, which makes plans slower to make, see [deploy.md](deploy.md#memory)",
        )
    )
    frozen_parameter = (
        flag(False)
        .emits(modes=ALL_MODES, field="frozen")
        .flat("frozen_parameter")
        .doc(
            "both",
            "works on CPU: weights are packed once for matrix products and convolutions, "
            "batch norms are folded into convolutions, and addresses of parameters are written "
            "down. Parameters that change all the same are packed again, see cpu_engine.md. In the "
            "capture modes the addresses of parameters are no part of the graph key",
        )
    )
    static_model_ops_lower_limit = (
        options.IntRangeValue(None, -1, options.INT64_MAX)
        .emits("ge.exec.static_model_ops_lower_limit")
        .ineffective()
        .idle("GE", "graphs are not split into parts of fixed and of varying sizes")
    )
    jit_compile = (
        OptionValue("auto", ["auto"])
        .emits("ge.jit_compile", encode={"auto": "2"}.get)
        .idle("GE", "it has one value only")
    )
    npu_fx_pass = flag(False).idle(
        "GE", "norms, rotary embeddings and attention are found by the rules of the engine"
    )
    aot_config_enable_joint_graph = flag(False).doc(
        "both",
        "works: a call runs the backward too, as a graph of its own: gradients are in "
        "`.grad` when it returns",
    )
    aot_config_output_loss_index = OptionValue(0).doc(
        "both", "works: which result is the loss that the option above runs the backward of"
    )
    topology_sorting_strategy = (
        OptionValue("DFS", tuple(_ORDERS))
        .emits(
            "ge.topoSortingMode",
            encode=_ORDERS.get,
            field="topology",
            decode=lambda text: _ORDER_OF.get(text, "DFS"),
        )
        .ineffective("BFS", "RDFS", "StableRDFS")
        .doc("GE")
    )
    enable_ref_data = (
        flag(False)
        .ineffective(True)
        .for_export(
            ", which switches it on: inputs that are updated are `RefData`; a graph in this "
            "process "
            "updates them either way",
            idle="inputs that a graph updates are updated either way; dynamo_export writes RefData",
        )
    )
    enable_view_optimize = flag(True).ineffective().doc("GE")
    remove_noop_ops = flag(True).emits(modes=ALL_MODES).flat("remove_noop_ops").doc("both")
    tiling_schedule_optimize = (
        flag(False)
        .emits("ge.tiling_schedule_optimize")
        .ineffective(True)
        .idle("GE", "tiling schedules belong to NPU kernels")
    )
    pattern_fusion_pass = (
        flag(True)
        .emits(modes=ALL_MODES, field="patterns")
        .flat("pattern_fusion_pass")
        .doc("both", "works: [patterns](patterns.md), built in and registered")
    )
    strict_converters = flag(False).doc(
        "GE", "works (an operator without a converter is an error instead of a generic torch node)"
    )
    native_code = (
        flag(True)
        .emits("torchair.nativeCode", encode=_only_off, field="native")
        .doc(
            "both",
            "works (ours, not of the original): `False` runs torch's kernels one by one "
            "instead of generated code on CPU, as the environment variable `TORCHAIR_NATIVE=0` "
            "does",
        )
    )
    kernel_cache = (
        flag(True)
        .emits("torchair.kernelCache", encode=_only_off, field="keep")
        .doc(
            "both",
            "works (ours, not of the original): `False` neither looks for kernels of this "
            "graph [on disk](deploy.md#kernels-on-disk) nor keeps them, as the environment "
            "variable "
            "`TORCHAIR_KERNEL_CACHE=0` does for all graphs",
        )
    )
    super_kernels = (
        flag(False)
        .emits("torchair.superKernels", encode=_only_on, field="super_kernels")
        .doc(
            "both",
            "works on a GPU (ours, not of the original): `True` makes [one persistent "
            "kernel](gpu_engine.md#one-kernel-for-many-steps) of all launches that can be part of "
            "one, as `scope.super_kernel` does for a block. Off by default: it was slower than "
            "separate launches",
        )
    )
    tuned_kernels = (
        options.FileValue(None)
        .emits("torchair.tunedKernels", field="tuned")
        .doc(
            "both",
            "works (ours, not of the original): results of [tuning](tuning.md) that kernels "
            "are made by, as the environment variable `TORCHAIR_TUNED=<file>` does for all graphs",
        )
    )
    aclgraph = AclgraphExperimentalConfig()


class GeConfig(Section):
    """Options of the engine of the process."""

    enable_single_stream = (
        flag(False)
        .emits(
            "ge.enableSingleStream", scope="global", encode=_true_or_false, field="single_stream"
        )
        .doc("GE", "works: stream labels are ignored when a graph runs")
        .ineffective(True)
    )
    # At O1 the order must be reproducible: this key replaces the one of topology_sorting_strategy,
    # because the root lists this section after experimental_config.
    oo_level = (
        OptionValue("O3", ["O1", "O3"])
        .emits("ge.oo.level", scope="global", field="level")
        .emits("ge.topoSortingMode", encode={"O1": _ORDERS["StableRDFS"]}.get)
        .ineffective("O1")
        .doc("GE")
    )
    oo_constant_folding = (
        flag(None, or_none=True)
        .emits(
            "ge.oo.constantFolding",
            scope="global",
            encode=_true_or_false,
            field="fold",
            decode=_unless_false,
        )
        .doc("GE")
        .ineffective()
    )
    oo_dead_code_elimination = (
        flag(None, or_none=True)
        .emits(
            "ge.oo.deadCodeElimination",
            scope="global",
            encode=_true_or_false,
            field="dead_code",
            decode=_unless_false,
        )
        .doc("GE")
        .ineffective()
    )
    # Without a request no files are written: they would be in the folder of every user.
    export_compile_stat = (
        OptionValue("2", ["0", "1", "2"])
        .emits("ge.exportCompileStat", scope="global")
        .emits("torchair.compileStat", assigned=True, field="statistics", decode=or_else("0"))
        .ineffective("0", "1")
        .doc(
            "GE",
            "works where it is set: `fusion_result.json` in the current folder says which "
            "rules, patterns and kinds of units had an effect, and how often; `'1'` at exit, `'2'` "
            "after each graph",
        )
    )
    aicore_num = (
        options.StrOptionValue(None)
        .emits("ge.aicoreNum", scope="global", field="cores", decode=or_else(""))
        .ineffective()
        .doc(
            "GE",
            "works: the cores that `debug.deadlock_check` counts with; nothing else divides "
            "cores here",
        )
    )
    optimization_switch = (
        options.StrOptionValue(None)
        .emits("ge.optimizationSwitch", scope="global", field="switches")
        .doc(
            "GE",
            "works (switches engine passes, rules, [patterns](patterns.md) and the joining "
            "of kernels by name, like `PassA:on;AutomaticUbFusion:off`). Names of CANN are known; "
            "a name that switches nothing is warned about, once",
        )
        .ineffective()
    )


class FusionConfig(Section):
    """A JSON file that switches fusion passes by name."""

    fusion_switch_file = (
        options.FileValue(None)
        .emits("ge.fusionSwitchFile", scope="global", field="switch_file")
        .ineffective()
        .doc("GE", "works for [patterns](patterns.md), by name or `ALL`")
    )


class AoeConfig(Section):
    """Tuning of a graph before its first compilation."""

    aoe_mode = (
        OptionValue(None, ["2"])
        .emits(when="aoe_mode", field="tune_mode")
        .doc(
            "both",
            "works on CPU and CUDA: forms of kernels are measured when a graph of fixed sizes "
            "is compiled, see [tuning.md](tuning.md)",
        )
    )
    work_path = (
        options.MustExistedPathValue("./")
        .emits(when="aoe_mode", field="tune")
        .doc("both", "works: the folder of `torchair_tuned.sqlite`, where results are kept")
    )
    aoe_config_file = (
        options.FileValue(None)
        .emits(when="aoe_mode", field="tune_file")
        .doc(
            "both",
            "works: a JSON file that says what is tuned, see [tuning.md](tuning.md#restricting-it)",
        )
    )


class InferenceConfig(Section):
    """How the gears of several inputs combine."""

    dynamic_gears_merge_policy = (
        OptionValue("zip", ["zip", "product"])
        .ineffective("product")
        .doc("GE", "works: how the gears of several dims combine, see [deploy.md](deploy.md#gears)")
    )


def gear_keys(
    shapes: Mapping[str, Sequence[int]], sizes: Sequence[Sequence[int]]
) -> dict[str, str]:
    """The options of the engine for gears: dims of all inputs by name, -1 for those that
    vary, and the sizes that these have together."""
    listed = dict.fromkeys(",".join(map(str, combination)) for combination in sizes)
    return {
        "ge.inputShape": ";".join(f"{n}:{','.join(map(str, s))}" for n, s in shapes.items()),
        "ge.dynamicDims": ";".join(listed),
        "ge.dynamicNodeType": "1",
    }
