"""Which rules, patterns and passes of the engine are on: the file of fusion switches, and names
that users know from CANN."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from torchair.log import warn_once

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
        raise ValueError(f"{wrong[0]} is neither on nor off")
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
            f"fusion switches name {name!r}, which switches nothing here: {hint}",
            UserWarning, stacklevel=2,
        )  # fmt: skip
