"""Sections of the tree for dumps, reports, checks and export. `sections.py` has those that steer
the compiler.

Each option is declared once: its type and default, the engine keys it becomes and the field of
the engine's options that is read back from each, where it has an effect, the line of
docs/options.md about it, and its flat name.
"""

from __future__ import annotations

import os
from typing import Any

from torchair.configs import options
from torchair.configs.options import ALL_MODES, CAPTURE_MODES, OptionValue, Section, flag, or_else
from torchair.process import world

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


class _SectionWithPath(Section):
    """What goes to a place that is public and kept as an absolute path."""

    _path = OptionValue(None)

    @property
    def path(self) -> str | None:
        """The directory or file, free of links once assigned; made when a file is written."""
        return self._path.value

    @path.setter
    def path(self, place: str | os.PathLike[str] | None) -> None:
        none = place is None and self._path.default is None  # where none is the default
        self._path = None if none else os.path.realpath(place)  # type: ignore[arg-type]


class _PathDump(_Dump, _SectionWithPath):
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


class ReportConfig(_SectionWithPath):
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
