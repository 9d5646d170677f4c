"""Engine options: the GE keys that a graph or the process is configured with, read once."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torchair.configs.compiler_config import engine_keys, engine_values, parse_switches
from torchair.configs.options import Numerics
from torchair.errors import EngineOptionError, pretty_error_msg
from torchair.flags import Flags
from torchair.locks import Lock
from torchair.log import logger, native_logger, warn_once


@dataclass(frozen=True)
class EngineOptions:
    """What the engine does to one graph. The options of the configuration say of themselves which
    field they are (`emits(..., field=...)` in `configs/`), and what the default is."""

    numerics: Numerics
    level: str
    fold: bool
    dead_code: bool
    topology: str
    switches: dict[str, bool]
    patterns: bool
    native: bool
    keep: bool  # kernels on disk
    super_kernels: bool  # launches of a GPU as one persistent kernel
    frozen: bool
    compact: bool  # memory before time of planning
    single_stream: bool
    overlap: bool  # of communication and computing
    timeline: str | None  # folder
    check_streams: bool
    strict: bool  # fallbacks are errors
    cores: str  # "<cube>|<vector>"
    statistics: str  # of fusion, in a file: "1" at exit, "2" after each graph
    tune: str | None  # folder for results of tuning
    tune_file: str | None  # that says what is to be tuned
    tuned: str | None  # file with results of tuning

    @classmethod
    def of(cls, local: Mapping[str, str], process: Mapping[str, str]) -> EngineOptions:
        """From the local options of a graph and the global ones of the process."""
        own = {k: v for k, v in local.items() if k in PER_GRAPH}
        flags, known = Flags.read(), engine_values(local, {**process, **own})
        in_file, tunes = read_switches(known.pop("switch_file")), known.pop("tune_mode") == "2"
        listed = parse_switches(known["switches"])
        known["switches"] = {**by_our_names(in_file), **by_our_names(listed)}
        known["native"] = flags.native and known["native"]
        known["timeline"] = known["timeline"] or flags.timeline
        known["tune"] = known["tune"] if tunes else None
        known["tuned"] = known["tuned"] or flags.tuned
        return cls(**known)


@dataclass(frozen=True)
class DumpOptions:
    """What to dump: the fields `dump.*` of the options of `dump_config`."""

    path: str  # with the folder of the rank, `worldsize<W>_global_rank<R>`
    mode: str
    data: str
    step: str
    layer: str
    quant_dumpable: str

    def takes(self, step: int) -> bool:
        """Whether a run is one of the chosen ones, like `0|2-5`; all are if none is chosen."""
        ranges = [part.split("-") for part in self.step.split("|") if part]
        return not ranges or any(int(r[0]) <= step <= int(r[-1]) for r in ranges)


def take_dump_options(options: Mapping[str, str]) -> tuple[dict[str, str], DumpOptions | None]:
    """Global options without those of the dump, which may differ from graph to graph, and what
    these say; None if the dump is off."""
    own = set(engine_keys("dump").values())
    rest = {k: v for k, v in options.items() if k not in own}
    if options.get("ge_dump_with_acl_config"):
        logger.warning(
            "dump_config_path has no effect: set dump_config.enable_dump and the options beside it"
        )
    known = engine_values({}, options, "dump")
    return rest, DumpOptions(**known) if known.pop("on") else None


PER_GRAPH = frozenset({"ge.optimizationSwitch"})
"""Global options that a graph may have of its own; those of the process are for graphs without."""


class GraphEngine:
    """The process-wide engine: global options are fixed by the first graph that needs it."""

    def __init__(self) -> None:
        self._options: dict[str, str] | None = None
        self._lock = Lock()

    @pretty_error_msg
    def initialize(self, options: Mapping[str, str]) -> None:
        """Set the global options, or check that they agree with those in force. A graph that has
        none, as one from a file, agrees with any."""
        if not options:
            return
        with self._lock:
            if self._options is None:
                self._options = dict(options)
                native_logger.info("Initializing GE with options: %s", self._options)
                return
            in_force = self._options
        differences = {
            k: (in_force.get(k, "not set"), v)
            for k, v in options.items()
            if in_force.get(k) != v and k not in PER_GRAPH
        }
        if differences:
            raise EngineOptionError(
                "the graph engine was initialised before with other global options",
                differences=differences,
            )

    def finalize(self) -> None:
        """Forget the global options; the next graph sets them anew."""
        with self._lock:
            self._options = None

    @property
    def options(self) -> Mapping[str, str]:
        """Global options in force."""
        return dict(self._options or {})


engine = GraphEngine()


def initialize_graph_engine(global_compile_options: Mapping[str, str] | None = None) -> None:
    """Initialise the engine of this process, once; ValueError if options differ from before."""
    engine.initialize(dict(global_compile_options or {}))


def finalize_graph_engine() -> None:
    """Close the engine, so that other global options can be chosen."""
    engine.finalize()


# ---- which rules, patterns and passes are on: a file of switches, and names known from CANN ----

UNIT_FUSION = "AutomaticUbFusion"
"""Nodes that become one kernel."""

_EVERY = "ALL"
_STATES = {"on": True, "off": False}
_LAYOUT = '{"Switch": {"GraphFusion": {"<name>": "on"}, "UBFusion": {"<name>": "off"}}}'

# Names of CANN for what has another name here.
_ALSO: dict[str, tuple[str, ...]] = {
    "AddRmsNormFusionGraphPass": ("AddRmsNormFusion",),
    "CastRemoveFusionPass": ("CastToSameType",),
    "CommonSubexpressionEliminationPass": ("merge_common",),
    "MatMulBiasAddFusionPass": ("BiasIntoMatMul", "BiasIntoMatMulV2"),
}

# Documented for CANN, and about what there is nothing of here: on or off is the same.
_NOTHING_HERE = """
    AABiasaddConvFusion ADeformableConv2dPass ADepthwiseFusionPass ALSTMFusionPass
    AReduceMeanFusionPass AReduceSumFusionPass AddNFusionPass ApplyAddOutputPass
    ArgMaxWithFusionPass AvgPool3DFusionPass AvgPool3DGradFusionPass AvgPoolGradFusionPass
    AvgPoolQuantProcessFusionPass BatchMatMulFusionPass BatchMatmulV2QuantProcessFusionPass
    BatchNormBnInferFusionPass BatchNormGradBnInferGradFusion BatchNormGradInfGradFusion COPYPass
    CommonLSTMFusionPass ConstToAttrGatherV2Fusion ConstToAttrPass ConstToAttrReduceSumFusion
    ConstToAttrResizeNearestNeighborGradFusion ConstToAttrStridedSliceV2Fusion
    Conv2DQuantProcessFusionPass Conv2DTDQuantProcessFusionPass DWConv2DQuantProcessFusionPass
    DeConvQuantProcessFusionPass DeformableOffsetsFusionPass DepthwiseDfFusionPass
    DepthwiseDwMulFusionPass DepthwiseFusionPass DepthwiseInsertTransDataFusionPass
    DepthwiseToConv2dFusionPass DreluFusionPass DynamicGRUV2GradFusionPass DynamicRNNFusionPass
    DynamicRNNGradAFusionPass DynamicRNNGradAlignFusionPass DynamicRNNGradDAlignFusionPass
    DynamicRNNGradDFusionPass DynamicRNNGradFusionPass DynamicRNNInsertTransposePass
    DynamicRNNSeqFusionPass EinsumPass FCQuantProcessFusionPass FixPipeAbilityProcessPass
    FlattenV2Pass FusedBatchNormBertFusionPass FusedBatchNormGradFusionPass
    FusedBatchnormFusionPass GlobalAvgPoolPass GroupConv2DQuantProcessFusionPass HostBNFusionPass
    HostShapeOptimizationPass In-placeAddRmsNormFusionPass MapIndexFusionPass
    MatMul2MatMulV2FusionPass MatmulV2QuantProcessFusionPass MaxPoolWithArgmaxFusionPass
    NormalizeFusionPass PReluGradFusionPass PackFusionPass PassThroughFusionPass
    PassThroughSecondFusionPass PermuteFusionPass PoolingQuantProcessFusionPass PriorBoxPass
    ProposalFusionPass RNNFusionPass SPPPass SingleBatchNormFusion SoftmaxGradExtFusion
    SpatialTransformerDPass TbeAntiquantMaxpoolingFusionPass TbeConvCommonRules0FusionPass
    TbeConvCommonRules2FusionPass TbeConvDequantS16FusionPass TbeConvRequantFusionPass
    TfMergeConv2DBackpropInputFusionPass TfMergeSubFusionPass TfTagNoConstFoldingFusionPass
    TransdataCastFusionPass TransposedUpdateFusionPass UnpackFusionPass V100NotRequantFusionPass
    V200NotRequantFusionPass WeightQuantBatchMatmulV2TransposeFusionPass YoloPass
    YoloV2DetectionOutputPass YoloV3DetectionOutputV2Pass ZConcatDFusionPass
    ZConcatExt2FusionPass ZConfusionSoftmaxGradFusionPass ZSplitVDFusionPass ZSplitVFusionPass
    clip_by_norm_nodivsquaresum sedBatchNormGradFusionPass
"""
_IDLE = frozenset(_NOTHING_HERE.split())


def read_switches(path: str | None) -> dict[str, bool]:
    """Switches of a file by name, `ALL` for what is not named; ValueError if it is not one. `ALL`
    of UBFusion is about the one name that group has here."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            groups = json.load(file)["Switch"]
        found = {name: _checked(groups.get(name, {})) for name in ("GraphFusion", "UBFusion")}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is not a file of fusion switches ({e}): {_LAYOUT}") from e
    units = found["UBFusion"]
    if _EVERY in units:
        units.setdefault(UNIT_FUSION, units.pop(_EVERY))
    return {**found["GraphFusion"], **units}


def _checked(group: dict[str, Any]) -> dict[str, bool]:
    wrong = [f"{name}: {state!r}" for name, state in group.items() if state not in _STATES]
    if wrong:
        raise ValueError(f"{wrong[0]} must be on or off")
    return {name: _STATES[state] for name, state in group.items()}


def by_our_names(switches: Mapping[str, bool]) -> dict[str, bool]:
    """The same with our names in the place of those of CANN; ours win."""
    also = {ours: on for name, on in switches.items() for ours in _ALSO.get(name, ())}
    return {**also, **{name: on for name, on in switches.items() if name not in _ALSO}}


def warn_unknown(switches: Mapping[str, bool], known: Collection[str]) -> None:
    """Tell of each name that switches nothing, once."""
    for name in switches:
        if name in known or name in _IDLE or name in (_EVERY, UNIT_FUSION):
            continue
        near = get_close_matches(name, [*known, UNIT_FUSION, *_ALSO], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "remove it, or see docs/options.md"
        warn_once(
            f"fusion switches name {name!r}, which has no effect here: {hint}",
            UserWarning,
            stacklevel=2,
        )
