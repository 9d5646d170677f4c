"""The sections of the tree: dumps, checks, capture and export; then those that steer the engine.

Each option is declared here once: its type and default, the engine keys it becomes and the field of
the engine's options that is read back from each, where it has an effect, the line of
docs/options.md about it, and its flat name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torchair.configs import options
from torchair.configs.options import ALL_MODES, CAPTURE_MODES, OptionValue, Section, flag, or_else
from torchair.process import world

# fmt: off: each declaration is a row of a table


_DIRECTORY = "path of a directory"


def _only_on(raw: Any) -> str | None:
    return "1" if raw else None


class _Dump(Section):
    """What the dumps share: a kind of file, None meaning off, and the directory it goes to."""

    type = OptionValue(None)
    _path = OptionValue(".").doc("GE")

    @property
    def enabled(self) -> bool:
        """Whether a kind of file was chosen."""
        return self.type.raw is not None


class _Placed(Section):
    """What goes to a place that is public and kept as an absolute path."""

    _path = OptionValue(None)

    @property
    def path(self) -> str | None:
        """The directory or file, free of links once assigned; whoever writes there makes it."""
        return self._path.value

    @path.setter
    def path(self, place: str | os.PathLike[str] | None) -> None:
        none = place is None and self._path.default is None  # where none is the default
        self._path = None if none else os.path.realpath(place)  # type: ignore[arg-type]


class _PathDump(_Dump, _Placed):
    """A dump whose directory is public."""

    _path: OptionValue = OptionValue(".", accepts=_DIRECTORY).doc("both")


class GraphDumpConfig(_PathDump):
    """Graph files of each compilation."""

    type = OptionValue(None, ["txt", "pbtxt", "py"]).doc(
        "both", "works; the capture modes have `py` only"
    )


class DataDumpConfig(_PathDump):
    """Inputs and outputs of each node of an eager run.

    ``filter`` maps a node to a node, or to None to skip it.
    """

    type = OptionValue(None, ["npy"]).doc(
        "both", "works (the graph is interpreted node by node instead of compiled)"
    )
    filter = options.RawValue(None).doc(
        "both", "works (a function from a node to the node to show, or to None to skip it)"
    )


class TimelineConfig(_PathDump):
    """When each step of a graph ran and on which stream, after each call."""

    type = OptionValue(None, ["json"]).doc(
        "GE",
        "works (ours, not of the original): a Chrome trace of each graph with one row for "
        "each stream, see [streams.md](streams.md); the environment variable "
        "`TORCHAIR_TIMELINE=<directory>` does the same",
    )
    _path = (
        OptionValue(".", accepts=_DIRECTORY)
        .doc("GE")
        .emits("torchair.timeline", when="type", field="timeline", decode=lambda text: text)
    )


class ReportConfig(_Placed):
    """One page about all graphs of the process, for a browser."""

    _path = OptionValue(None, accepts="path of a file").doc(
        "both",
        "works (ours, not of the original): one page for a browser about all graphs of the "
        "process, see [report.md](report.md)",
    )


class FxSummaryConfig(_Dump):
    """Table of the operators of a graph and how well the converters cover them."""

    type = OptionValue(None, ["csv"]).ineffective("csv").doc("GE")
    skip_compile = flag(True).doc("GE")


class AclgraphDebugConfig(Section):
    """Switches of graph capture."""

    disable_reinplace_inplaceable_ops_pass = (
        flag(False).flat("inplace_pass", inverted=True).ineffective(True).doc("capture")
    )
    disable_reinplace_input_mutated_ops_pass = (
        flag(False).flat("input_inplace_pass", inverted=True).ineffective(True).doc("capture")
    )
    disable_mempool_reuse_in_same_fx = (
        flag(False)
        .emits(modes=ALL_MODES)
        .flat("reuse_graph_pool_in_same_fx", inverted=True)
        .doc("capture")
    )
    enable_output_clone = (
        flag(False)
        .emits(modes=ALL_MODES)
        .flat("clone_output")
        .doc(
            "capture", "works (results belong to the caller anyway; this overrules `share_results`)"
        )
    )
    static_capture_size_limit = (
        options.IntRangeValue(64, 1, options.INT64_MAX)
        .emits(modes=ALL_MODES)
        .flat("capture_limit")
        .doc("capture")
    )
    clone_input = (
        flag(True).emits(modes=ALL_MODES).flat("clone_input").ineffective(False).doc("capture")
    )
    remove_cat_ops = flag(True).flat("remove_cat_ops").doc("capture")
    capture_error_mode = (
        OptionValue("global", ["global", "thread_local", "relaxed"])
        .flat("capture_error_mode", own=True)
        .doc("capture")
    )
    capture_fallback = (
        flag(True)
        .flat("capture_fallback")
        .doc(
            "capture",
            "works (ours, not of the original): a graph that cannot be captured runs "
            "without capture, with one warning; switched off that is an error",
        )
    )
    force_recapture = (
        flag(False)
        .flat("force_recapture", own=True)
        .doc("capture", "works (each call captures anew: to find out whether replay is at fault)")
    )
    evict_captures = flag(False).doc(
        "capture",
        "works (ours, not of the original): at the limit the captured graph used least "
        "recently is forgotten, instead of no capture any more",
    )
    share_results = (
        flag(False)
        .flat("share_results")
        .doc(
            "capture",
            "works (ours, not of the original): results stay in the memory of the graph, "
            "and the next call overwrites them, see [capture.md](capture.md#results)",
        )
    )
    capture_warmups = options.IntRangeValue(0, 0, options.INT64_MAX).doc(
        "capture", "works (so many runs without capture before the first one)"
    )


class DebugConfig(Section):
    """Dumps, summaries and checks of the compiler itself."""

    graph_dump = GraphDumpConfig()
    timeline = TimelineConfig()
    report = ReportConfig()
    data_dump = DataDumpConfig()
    fx_summary = FxSummaryConfig()
    aclgraph = AclgraphDebugConfig()
    run_eagerly = flag(False).emits(modes=ALL_MODES).flat("force_eager").doc("both")
    strict = (
        flag(False)
        .emits("torchair.strict", encode=_only_on, field="strict")
        .doc(
            "both",
            "works (ours, not of the original): a [fallback](reliability.md#fallbacks) that is "
            "a failure, as a converter that crashed or a kernel that was refused, is an error; the "
            "environment variable `TORCHAIR_STRICT=1` says so for all graphs",
        )
    )
    deadlock_check = (
        flag(False)
        .emits(modes=ALL_MODES, field="check_streams")
        .doc(
            "both",
            "works: races, waits that are never satisfied, and core budgets are reported "
            "when a graph is compiled; of a captured graph the core budgets, see "
            "[streams.md](streams.md)",
        )
        .flat("deadlock_check", own=True)
    )


# ---- export


class ExportExperimentalConfig(Section):
    """Extras of an exported model."""

    enable_record_nn_module_stack = (
        flag(False)
        .ineffective(True)
        .doc(
            "GE",
            "works: nodes of files and dumps have the module path they come from "
            "(`nn_module_stack`)",
        )
    )
    auto_atc_config_generated = (
        flag(False)
        .ineffective(True)
        .for_export(": rank 0 also writes `model_relation_config.json` and `numa_config.json`")
    )
    enable_lite_export = flag(False).for_export(": a warning: there are no lite converters here")


class ExportConfig(options.OpenSection):
    """What ``dynamo_export`` notes down for the compilation it starts."""

    export_mode = flag(False).for_export(", which sets it", idle=None)
    export_path_dir = (
        options.StrOptionValue("./")
        .emits(when="export_mode")
        .for_export(", which sets it: where files go")
    )
    export_name = (
        options.StrOptionValue(None)
        .emits(when="export_mode")
        .for_export(", which sets it: the name of the `.air` file")
    )
    weight_name = options.DictOptionValue(None).for_export(
        ", which sets it: names of weights by the `id` of their tensors"
    )
    inputs_name = options.RawValue(None).for_export(
        ": a list of names for the inputs of the file, in the order of `forward`"
    )
    experimental = ExportExperimentalConfig()


# ---- data dump on the device


def rank_directory(root: str) -> str:
    """The sub-directory of ``root`` that belongs to this process of the job."""
    size, rank = world() or (1, 0)
    return os.path.join(root, f"worldsize{size}_global_rank{rank}")


# Only one way to read each text: nested repetition over digits would take exponential time on a
# long wrong value.
_STEPS = r"^(?:\d+(?:-\d+)?(?:\||$))*$"
_LAYERS = r'^[0-9a-zA-Z_" "/\\.]*$'
_DUMPED: Any = {"scope": "global", "when": "enable_dump"}


class DumpConfig(Section):
    """Data dump on the device while a compiled graph runs."""

    enable_dump = (
        flag(False)
        .emits("ge.exec.enableDump", **_DUMPED, field="dump.on")
        .emits("aclgraph.enableDump", **_DUMPED, modes=CAPTURE_MODES)
        .flat("dump_tensor_data")
        .ineffective(True)
        .doc(
            "both",
            "works, see [debugging.md](debugging.md#data-dump-of-compiled-graphs); in the "
            "capture modes see [npugraph_ex.md](npugraph_ex.md#dumps)",
        )
    )
    dump_path = (
        options.MustExistedPathValue("./")
        .emits("ge.exec.dumpPath", **_DUMPED, encode=rank_directory, field="dump.path")
        .emits("aclgraph.dumpPath", **_DUMPED, modes=CAPTURE_MODES, encode=rank_directory)
        .flat("data_dump_dir")
        .doc("both")
    )
    dump_mode = (
        OptionValue("all", ["input", "output", "all"])
        .emits("ge.exec.dumpMode", **_DUMPED, field="dump.mode")
        .doc("GE")
    )
    quant_dumpable = (
        flag(False)
        .emits("ge.quant_dumpable", **_DUMPED, field="dump.quant_dumpable", decode=or_else("0"))
        .doc(
            "GE",
            "works (it is written to the JSON file; nothing is fused while dumping, so "
            "tensors before quantisation are always there)",
        )
    )
    dump_step = (
        options.RegexValue("", _STEPS, "steps and ranges joined by bars, like 0|2-5")
        .emits("ge.exec.dumpStep", **_DUMPED, encode=or_else(None), field="dump.step")
        .doc("GE")
    )
    dump_layer = (
        options.RegexValue("", _LAYERS, "operator names separated by spaces")
        .emits("ge.exec.dumpLayer", **_DUMPED, encode=or_else(None), field="dump.layer")
        .doc(
            "GE",
            "works (names or types of nodes; united with the types of nodes inside "
            "`scope.data_dump()`)",
        )
    )
    dump_data = (
        OptionValue("tensor", ["tensor", "stats"])
        .emits("ge.exec.dumpData", **_DUMPED, field="dump.data")
        .doc("GE", "works (`stats` writes one `stats.csv` for each run)")
    )
    dump_config_path = (
        options.MustExistedFileAddr(None)
        .emits("ge_dump_with_acl_config", scope="global")
        .idle(
            "GE",
            "the file is for the runtime of an NPU",
            "(dumps of single operators, overflow, watcher); a warning says so",
        )
    )
    data_dump_stage = (
        OptionValue("optimized", ["original", "optimized"])
        .emits("aclgraph.dumpStage", **_DUMPED, modes=CAPTURE_MODES)
        .flat("data_dump_stage")
        .doc("capture")
    )


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


def _only_off(raw: Any) -> str | None:
    return None if raw else "0"


def _static_kernel(option: OptionValue, **how: Any) -> OptionValue:
    how |= {"modes": CAPTURE_MODES, "when": "_aclnn_static_shape_kernel"}
    return option.emits(**how).idle("capture", _SINGLE_SHAPES)


def _super_kernel(option: OptionValue) -> OptionValue:
    option.emits(modes=CAPTURE_MODES, when="_super_kernel_optimize")
    return option.idle("capture", "CPU and CUDA have no super kernels")


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
    # Files that nobody has asked for would be in everybody's folders: the default writes none.
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
    """The options that tell the engine about gears: dims of all inputs by name, -1 for those that
    vary, and the sizes that these have together."""
    listed = dict.fromkeys(",".join(map(str, combination)) for combination in sizes)
    return {
        "ge.inputShape": ";".join(f"{n}:{','.join(map(str, s))}" for n, s in shapes.items()),
        "ge.dynamicDims": ";".join(listed),
        "ge.dynamicNodeType": "1",
    }
