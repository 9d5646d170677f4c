"""Vision, sound and time series of transformers, as small as the architectures allow."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

from .entry import Entry, Inputs, ids, image

_BODY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
_PICTURES = {"image_size": 32, "patch_size": 8, "num_labels": 5}
_VIT = {**_BODY, **_PICTURES}
_SWIN = {
    **_PICTURES,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
_PYRAMID = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_labels": 5}
_SOUND = {
    **_BODY, "vocab_size": 32, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "group",
    "apply_spec_augment": False, "num_feat_extract_layers": 2,
}  # fmt: skip
_SERIES = {
    "prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1,
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "scaling": "mean",
}  # fmt: skip


def _model(
    name: str, sizes: dict[str, Any], inputs: Callable[[int], Inputs], config: str = ""
) -> Entry:
    """A model by the name of its class; the name of its config follows from it."""

    def build() -> nn.Module:
        made = getattr(
            transformers, config or name.split("For")[0].removesuffix("Model") + "Config"
        )
        return getattr(transformers, name)(made(**sizes))

    return Entry(build, inputs)


def _pictures(n: int) -> Inputs:
    return {"pixel_values": image(n)}


def _wave(n: int) -> Inputs:
    return {"input_values": torch.randn(2 + n, 400)}


def _series(n: int) -> Inputs:
    return {
        "past_values": torch.rand(2 + n, 8),
        "past_time_features": torch.rand(2 + n, 8, 1),
        "past_observed_mask": torch.ones(2 + n, 8),
        "future_values": torch.rand(2 + n, 4),
        "future_time_features": torch.rand(2 + n, 4, 1),
        "use_cache": False,
    }


def _past(n: int) -> Inputs:
    return {"past_values": torch.randn(2 + n, 32, 3)}


def _clip(n: int) -> Inputs:
    return {"input_ids": ids(n), "pixel_values": image(n)}


def _two_towers(name: str, **more: Any) -> Entry:
    def build() -> nn.Module:
        text = {**_BODY, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 2}
        config = getattr(transformers, f"{name}Config")
        vision = {**_BODY, "image_size": 32, "patch_size": 8}
        return getattr(transformers, f"{name}Model")(
            config(text_config=text, vision_config=vision, **more)
        )

    return Entry(build, _clip)


def _codec(name: str, sizes: dict[str, Any], wave: int) -> Entry:
    def build() -> nn.Module:
        return getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**sizes)
        )

    return Entry(build, lambda n: {"input_values": torch.randn(1 + n, 1, wave)})


def _speech_t5(n: int) -> Inputs:
    return {
        "input_values": torch.randn(2 + n, 400),
        "decoder_input_ids": ids(n),
        "use_cache": False,
    }


class Masked(nn.Module):
    """A masked autoencoder whose noise, and so its mask, is an input."""

    def __init__(self) -> None:
        super().__init__()
        decoder = {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        }
        sizes = {**_BODY, "image_size": 32, "patch_size": 8, **decoder}
        self.model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes))

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        result = self.model(pixels, noise=noise)
        return result.loss, result.logits


def _depth() -> nn.Module:
    backbone = transformers.Dinov2Config(
        **_BODY, image_size=28, patch_size=14, out_indices=[1, 2], reshape_hidden_states=False
    )
    return transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(
            backbone_config=backbone,
            patch_size=14,
            reassemble_factors=[2, 1],
            neck_hidden_sizes=[8, 8],
            fusion_hidden_size=8,
            head_in_index=-1,
            head_hidden_size=8,
            reassemble_hidden_size=16,
        )
    )


_CLASSIFIERS = {
    "swin": _model("SwinForImageClassification", _SWIN, _pictures),
    "swinv2": _model("Swinv2ForImageClassification", _SWIN, _pictures),
    "beit": _model("BeitForImageClassification", _VIT, _pictures),
    "data2vec_vision": _model("Data2VecVisionForImageClassification", _VIT, _pictures),
    "dinov2": _model("Dinov2ForImageClassification", _VIT, _pictures),
    "dinov2_registers": _model("Dinov2WithRegistersForImageClassification", _VIT, _pictures),
    "ijepa": _model("IJepaForImageClassification", _VIT, _pictures),
    "hiera": _model(
        "HieraForImageClassification",
        {"image_size": [32, 32], "patch_size": [3, 3], "patch_stride": [2, 2],
         "patch_padding": [1, 1], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
         "query_stride": [2, 2], "masked_unit_size": [4, 4], "num_query_pool": 1,
         "num_labels": 5}, _pictures),
    "mobilevit": _model(
        "MobileViTForImageClassification",
        {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
         "num_attention_heads": 2, "image_size": 64, "num_labels": 5},
        lambda n: {"pixel_values": image(n, side=64)}),
    "mobilenet_v1": _model(
        "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5},
        _pictures),
    "mobilenet_v2": _model(
        "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5},
        _pictures),
    "resnet": _model("ResNetForImageClassification", {**_PYRAMID, "embedding_size": 8}, _pictures),
    "regnet": _model(
        "RegNetForImageClassification", {**_PYRAMID, "embedding_size": 8, "groups_width": 4},
        _pictures),
    "bit": _model("BitForImageClassification", {**_PYRAMID, "embedding_size": 8, "num_groups": 2},
                  _pictures),
    "pvt_v2": _model(
        "PvtV2ForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2],
         "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
         "num_encoder_blocks": 2, "num_labels": 5}, _pictures),
    "poolformer": _model(
        "PoolFormerForImageClassification",
        {"depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
         "padding": [2, 1], "num_encoder_blocks": 2, "num_labels": 5}, _pictures,
        "PoolFormerConfig"),
    "segformer": _model(
        "SegformerForSemanticSegmentation",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2],
         "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
         "num_encoder_blocks": 2, "decoder_hidden_size": 8, "num_labels": 5}, _pictures),
    "convnextv2": _model(
        "ConvNextV2ForImageClassification",
        {**_PYRAMID, "num_stages": 2, "patch_size": 4, "image_size": 32}, _pictures),
    "focalnet": _model(
        "FocalNetForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1],
         "hidden_sizes": [8, 16], "focal_levels": [2, 2], "focal_windows": [3, 3],
         "num_labels": 5}, _pictures),
    "swiftformer": _model(
        "SwiftFormerForImageClassification",
        {"depths": [1, 1], "embed_dims": [8, 16], "num_labels": 5, "downsamples": [True, True]},
        lambda n: {"pixel_values": image(n, side=64)}, "SwiftFormerConfig"),
}  # fmt: skip

_OTHER_VISION = {
    "vit_mae": Entry(Masked, lambda n: (image(n), torch.rand(2 + n, 16))),
    "depth_anything": Entry(_depth, lambda n: {"pixel_values": image(n, side=28)}),
    "yolos": _model(
        "YolosForObjectDetection",
        {**_VIT, "image_size": [32, 32], "num_detection_tokens": 4}, _pictures),
    "swin2sr": _model(
        "Swin2SRForImageSuperResolution",
        {"image_size": 16, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4,
         "upscale": 2, "upsampler": "pixelshuffledirect"},
        lambda n: {"pixel_values": image(n, side=16)}),
    "glpn": _model(
        "GLPNForDepthEstimation",
        {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1],
         "num_attention_heads": [1, 1, 1, 1], "decoder_hidden_size": 8}, _pictures),
    "clip": _two_towers("CLIP", projection_dim=8),
    "siglip": _two_towers("Siglip"),
    "perceiver": _model(
        "PerceiverForImageClassificationLearned",
        {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1,
         "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
         "num_cross_attention_heads": 2, "image_size": 16, "num_labels": 5},
        lambda n: {"inputs": image(n, side=16)}, "PerceiverConfig"),
    "videomae": _model(
        "VideoMAEForVideoClassification", {**_VIT, "num_frames": 4},
        lambda n: {"pixel_values": torch.randn(1 + n, 4, 3, 32, 32)}),
    "timesformer": _model(
        "TimesformerForVideoClassification", {**_VIT, "num_frames": 2},
        lambda n: {"pixel_values": torch.randn(1 + n, 2, 3, 32, 32)}),
}  # fmt: skip

_AUDIO = {
    "wav2vec2": _model("Wav2Vec2ForCTC", _SOUND, _wave),
    "hubert": _model("HubertForCTC", _SOUND, _wave),
    "wavlm": _model("WavLMForCTC", _SOUND, _wave),
    "unispeech": _model("UniSpeechForCTC", _SOUND, _wave),
    "sew": _model("SEWForCTC", {**_SOUND, "squeeze_factor": 2}, _wave),
    "data2vec_audio": _model("Data2VecAudioForCTC", {**_SOUND, "conv_pos_kernel_size": 5}, _wave),
    "wav2vec2_conformer": _model(
        "Wav2Vec2ConformerForCTC", {**_SOUND, "position_embeddings_type": "relative"}, _wave),
    "ast": _model(
        "ASTForAudioClassification",
        {**_BODY, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16,
         "num_mel_bins": 16},
        lambda n: {"input_values": torch.randn(2 + n, 16, 16)}),
    "speech_t5": _model(
        "SpeechT5ForSpeechToText",
        {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
         "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "vocab_size": 50, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4),
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "apply_spec_augment": False}, _speech_t5, "SpeechT5Config"),
    "encodec": _codec(
        "Encodec",
        {"num_filters": 4, "hidden_size": 8, "upsampling_ratios": [4, 2], "codebook_size": 16,
         "num_lstm_layers": 1, "num_residual_layers": 1, "target_bandwidths": [6.0],
         "sampling_rate": 800, "codebook_dim": 8}, 64),
    "dac": _codec(
        "Dac",
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 16,
         "n_codebooks": 2, "codebook_size": 16, "codebook_dim": 4, "sampling_rate": 800}, 64),
    "moonshine": _model(
        "MoonshineForConditionalGeneration",
        {"hidden_size": 16, "intermediate_size": 24, "encoder_num_hidden_layers": 1,
         "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 2,
         "decoder_num_attention_heads": 2, "vocab_size": 50},
        lambda n: {"input_values": torch.randn(2 + n, 1200), "decoder_input_ids": ids(n),
                   "use_cache": False}),
}  # fmt: skip

_TIME_SERIES = {
    "time_series_transformer": _model(
        "TimeSeriesTransformerModel", {**_SERIES}, _series),
    "informer": _model("InformerModel", {**_SERIES, "attention_type": "full"}, _series),
    "autoformer": _model(
        "AutoformerModel", {**_SERIES, "label_length": 2, "moving_average": 3}, _series),
    "patchtst": _model(
        "PatchTSTForPrediction",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
         "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24,
         "prediction_length": 4, "do_mask_input": False, "loss": "mse"}, _past),
    "patchtsmixer": _model(
        "PatchTSMixerForPrediction",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
         "d_model": 16, "num_layers": 1, "prediction_length": 4, "loss": "mse"}, _past),
    "patchtsmixer_attention": _model(
        "PatchTSMixerForTimeSeriesClassification",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
         "d_model": 16, "num_layers": 1, "num_targets": 4, "self_attn": True,
         "self_attn_heads": 2, "mode": "mix_channel"}, _past, "PatchTSMixerConfig"),
}  # fmt: skip

MODELS = {**_CLASSIFIERS, **_OTHER_VISION, **_AUDIO, **_TIME_SERIES}
