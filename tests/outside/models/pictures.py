"""Architectures of timm with few layers and channels; `make timm` runs 72 at their full size."""

from __future__ import annotations

from typing import Any

from torch import nn

from vision import timm

from .entry import Entry, image


def _model(name: str, side: int = 32, **sizes: Any) -> Entry:
    def build() -> nn.Module:
        return timm().create_model(name, pretrained=False, num_classes=5, **sizes)

    return Entry(build, lambda n: (image(n, side=side),))


def _mixer(block: str) -> Entry:
    def build() -> nn.Module:
        mixers = timm().models.mlp_mixer
        return mixers.MlpMixer(
            num_classes=5,
            img_size=32,
            patch_size=8,
            num_blocks=2,
            embed_dim=16,
            mlp_ratio=(0.5, 4.0) if block == "MixerBlock" else 4,
            block_layer=getattr(mixers, block),
        )

    return Entry(build, lambda n: (image(n),))


def _conv_mixer() -> nn.Module:
    return timm().models.convmixer.ConvMixer(dim=16, depth=2, kernel_size=5, num_classes=5)


def _meta_former(mixer: str) -> nn.Module:
    layers = timm().models.metaformer
    return layers.MetaFormer(
        num_classes=5, depths=(1, 1), dims=(8, 16), token_mixers=getattr(layers, mixer)
    )


_TOKENS = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2}

MODELS = {
    "resnet": _model("resnet18", layers=(1, 1, 1, 1), channels=(4, 8, 8, 16)),
    "seresnet": _model("seresnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "vit": _model("vit_tiny_patch16_224", num_heads=2, **_TOKENS),
    "deit": _model("deit_tiny_distilled_patch16_224", num_heads=2, **_TOKENS),
    "beit": _model("beit_base_patch16_224", num_heads=2, **_TOKENS),
    "eva": _model("eva02_tiny_patch14_224", num_heads=2, **_TOKENS),
    "cait": _model("cait_xxs24_224", num_heads=2, **_TOKENS),
    "xcit": _model("xcit_nano_12_p16_224", num_heads=2, **_TOKENS),
    "mixer": _mixer("MixerBlock"),
    "resmlp": _mixer("ResBlock"),
    "conv_mixer": Entry(_conv_mixer, lambda n: (image(n),)),
    "poolformer": Entry(lambda: _meta_former("Pooling"), lambda n: (image(n),)),
    "convformer": Entry(lambda: _meta_former("SepConv"), lambda n: (image(n),)),
    "convit": _model("convit_tiny", num_heads=2, local_up_to_layer=1, **_TOKENS),
    "convnext": _model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "swin": _model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2),
        num_heads=(1, 2)),
    "swinv2": _model(
        "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(2, 2),
        num_heads=(1, 2)),
    "davit": _model(
        "davit_tiny", depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), window_size=4),
    "regnet": _model("regnetx_002"),
    "mobilenetv3": _model("mobilenetv3_small_050"),
    "densenet": _model("densenet121", growth_rate=4, block_config=(1, 1, 1, 1)),
    "tnt": _model("tnt_s_legacy_patch16_224", img_size=32, embed_dim=16, inner_dim=8, depth=2,
                  num_heads_inner=2, num_heads_outer=2),
    "edgenext": _model("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16),
                       heads=(2, 2, 2, 2)),
}  # fmt: skip
