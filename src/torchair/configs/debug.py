"""The ``debug`` and ``dump_config`` sections: all that looks inside a compilation or a run."""

from __future__ import annotations

import os
import sys

from torchair.configs.options import (
    ALL_MODES,
    CAPTURE_MODES,
    INT64_MAX,
    IntRangeValue,
    MustExistedFileAddr,
    MustExistedPathValue,
    OptionValue,
    RawValue,
    RegexValue,
    Section,
    flag,
)


class _Dump(Section):
    """What the dumps share: a kind of file, None meaning off, and the directory it goes to."""

    type = OptionValue(None)
    _path = OptionValue(".")

    @property
    def enabled(self) -> bool:
        """Whether a kind of file was chosen."""
        return self.type.raw is not None


class _PathDump(_Dump):
    """A dump whose directory is public and kept as an absolute path."""

    @property
    def path(self) -> str | None:
        """The directory, free of links once assigned; whoever writes there creates it."""
        directory: str | None = self._path.value
        return directory

    @path.setter
    def path(self, directory: str | os.PathLike[str]) -> None:
        self._path = os.path.realpath(directory)


class GraphDumpConfig(_PathDump):
    """Graph files of each compilation."""

    type = OptionValue(None, ["txt", "pbtxt", "py"])


class DataDumpConfig(_PathDump):
    """Inputs and outputs of each node of an eager run.

    ``filter`` maps a node to a node, or to None to skip it.
    """

    type = OptionValue(None, ["npy"])
    filter = RawValue(None)


class TimelineConfig(_PathDump):
    """When each step of a graph ran and on which stream, after each call."""

    type = OptionValue(None, ["json"])
    _path = OptionValue(".").emits("torchair.timeline", when="type")


class ReportConfig(Section):
    """One page about all graphs of the process, for a browser."""

    _path = OptionValue(None)

    @property
    def path(self) -> str | None:
        """The file, free of links once assigned; None: no report."""
        file: str | None = self._path.value
        return file

    @path.setter
    def path(self, file: str | os.PathLike[str] | None) -> None:
        self._path = None if file is None else os.path.realpath(file)


class FxSummaryConfig(_Dump):
    """Table of the operators of a graph and how well the converters cover them."""

    type = OptionValue(None, ["csv"])
    skip_compile = flag(True)


class AclgraphDebugConfig(Section):
    """Switches of graph capture."""

    disable_reinplace_inplaceable_ops_pass = flag(False)
    disable_reinplace_input_mutated_ops_pass = flag(False)
    disable_mempool_reuse_in_same_fx = flag(False).emits(
        "disable_mempool_reuse_in_same_fx", modes=ALL_MODES
    )
    enable_output_clone = flag(False).emits("enable_output_clone", modes=ALL_MODES)
    static_capture_size_limit = IntRangeValue(64, 1, INT64_MAX).emits(
        "static_capture_size_limit", modes=ALL_MODES
    )
    clone_input = flag(True).emits("clone_input", modes=ALL_MODES)
    remove_cat_ops = flag(True)
    capture_error_mode = OptionValue("global", ["global", "thread_local", "relaxed"])
    capture_fallback = flag(True)
    force_recapture = flag(False)
    evict_captures = flag(False)
    share_results = flag(False)
    capture_warmups = IntRangeValue(0, 0, INT64_MAX)


class DebugConfig(Section):
    """Dumps, summaries and checks of the compiler itself."""

    graph_dump = GraphDumpConfig()
    timeline = TimelineConfig()
    report = ReportConfig()
    data_dump = DataDumpConfig()
    fx_summary = FxSummaryConfig()
    aclgraph = AclgraphDebugConfig()
    run_eagerly = flag(False).emits("run_eagerly", modes=ALL_MODES)
    deadlock_check = flag(False).emits("deadlock_check", modes=ALL_MODES)


def rank_directory(root: str) -> str:
    """The sub-directory of ``root`` that belongs to this process of the job."""
    size, rank = _world()
    return os.path.join(root, f"worldsize{size}_global_rank{rank}")


def _world() -> tuple[int, int]:
    # Looked up instead of imported: without torch.distributed loaded there is only this process.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1, 0
    return distributed.get_world_size(), distributed.get_rank()


def _text_or_nothing(text: str) -> str | None:
    return text or None


# Only one way to read each text: nested repetition over digits would take exponential time on a
# long wrong value.
_STEPS = r"^(?:\d+(?:-\d+)?(?:\||$))*$"
_LAYERS = r'^[0-9a-zA-Z_" "/\\.]*$'


class DumpConfig(Section):
    """Data dump on the device while a compiled graph runs."""

    enable_dump = (
        flag(False)
        .emits("ge.exec.enableDump", scope="global", when="enable_dump")
        .emits("aclgraph.enableDump", scope="global", when="enable_dump", modes=CAPTURE_MODES)
    )
    dump_path = (
        MustExistedPathValue("./")
        .emits("ge.exec.dumpPath", scope="global", when="enable_dump", encode=rank_directory)
        .emits(
            "aclgraph.dumpPath",
            scope="global",
            when="enable_dump",
            modes=CAPTURE_MODES,
            encode=rank_directory,
        )
    )
    dump_mode = OptionValue("all", ["input", "output", "all"]).emits(
        "ge.exec.dumpMode", scope="global", when="enable_dump"
    )
    quant_dumpable = flag(False).emits("ge.quant_dumpable", scope="global", when="enable_dump")
    dump_step = RegexValue("", _STEPS, "steps and ranges joined by bars, like 0|2-5").emits(
        "ge.exec.dumpStep", scope="global", when="enable_dump", encode=_text_or_nothing
    )
    dump_layer = RegexValue("", _LAYERS, "operator names separated by spaces").emits(
        "ge.exec.dumpLayer", scope="global", when="enable_dump", encode=_text_or_nothing
    )
    dump_data = OptionValue("tensor", ["tensor", "stats"]).emits(
        "ge.exec.dumpData", scope="global", when="enable_dump"
    )
    dump_config_path = MustExistedFileAddr(None).emits("ge_dump_with_acl_config", scope="global")
    data_dump_stage = OptionValue("optimized", ["original", "optimized"]).emits(
        "aclgraph.dumpStage", scope="global", when="enable_dump", modes=CAPTURE_MODES
    )
