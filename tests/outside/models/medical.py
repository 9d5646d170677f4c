"""Networks of MONAI: volumes of 16 voxels a side, or small pictures where 16 is too few."""

from __future__ import annotations

import torch
from monai.networks import nets
from torch import Tensor

from .entry import Entry, Inputs, Method, image


def _volume(n: int, channels: int = 1, side: int = 16) -> tuple[Tensor]:
    return (torch.randn(2 + n, channels, side, side, side),)


def _picture(n: int) -> tuple[Tensor]:
    return (image(n, 1),)


def _noisy(n: int) -> Inputs:
    return {"x": image(n, 1, 16), "timesteps": torch.arange(2 + n)}


def _controlled(n: int) -> Inputs:
    return {**_noisy(n), "controlnet_cond": image(n, 1, 16)}


_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_PICTURE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_DIFFUSION = {
    "spatial_dims": 2,
    "in_channels": 1,
    "channels": (8, 8),
    "num_res_blocks": 1,
    "attention_levels": (False, True),
    "norm_num_groups": 4,
    "num_head_channels": 4,
}
_FEATURES = (4, 4, 8, 8, 8, 4)

MODELS = {
    "unet": Entry(
        lambda: nets.UNet(**_VOLUME, channels=(4, 8, 8), strides=(2, 2), num_res_units=1), _volume),
    "basic_unet": Entry(lambda: nets.BasicUNet(**_PICTURE, features=_FEATURES), _picture),
    "basic_unet_plus_plus": Entry(
        lambda: nets.BasicUNetPlusPlus(**_PICTURE, features=_FEATURES), _picture),
    "attention_unet": Entry(
        lambda: nets.AttentionUnet(**_PICTURE, channels=(4, 8, 8), strides=(2, 2)), _picture),
    "dyn_unet": Entry(
        lambda: nets.DynUNet(
            **_VOLUME, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
            filters=[4, 8, 8]),
        _volume),
    "seg_resnet": Entry(
        lambda: nets.SegResNet(**_VOLUME, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        _volume),
    "seg_resnet_ds": Entry(
        lambda: nets.SegResNetDS(**_PICTURE, init_filters=8, blocks_down=(1, 1)), _picture),
    "unetr": Entry(
        lambda: nets.UNETR(
            in_channels=1, out_channels=2, img_size=(32, 32), feature_size=4, hidden_size=16,
            mlp_dim=16, num_heads=2, spatial_dims=2),
        _picture),
    "swin_unetr": Entry(
        lambda: nets.SwinUNETR(
            in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1),
            num_heads=(1, 1, 1, 1), spatial_dims=2),
        lambda n: (image(n, 1, 64),)),
    "highres_net": Entry(
        lambda: nets.HighResNet(
            **_PICTURE, layer_params=(
                {"name": "conv_0", "n_features": 4, "kernel_size": 3},
                {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1})),
        _picture),
    "dense_net": Entry(
        lambda: nets.DenseNet(**_PICTURE, init_features=8, growth_rate=4, block_config=(1, 2)),
        _picture),
    "resnet": Entry(
        lambda: nets.ResNet(
            block="basic", layers=[1, 1, 1, 1], block_inplanes=[4, 4, 8, 8], spatial_dims=3,
            n_input_channels=1, num_classes=4),
        _volume),
    "vit": Entry(
        lambda: nets.ViT(
            in_channels=1, img_size=(32, 32), patch_size=(8, 8), hidden_size=16, mlp_dim=16,
            num_layers=2, num_heads=2, classification=True, spatial_dims=2),
        _picture),
    "vit_autoencoder": Entry(
        lambda: nets.ViTAutoEnc(
            in_channels=1, img_size=(32, 32), patch_size=(4, 4), hidden_size=16, mlp_dim=16,
            num_layers=1, num_heads=2, spatial_dims=2),
        _picture),
    "autoencoder": Entry(
        lambda: nets.AutoEncoder(
            spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8), strides=(2, 2),
            inter_channels=(4,)),
        _volume),
    "generator": Entry(
        lambda: nets.Generator(
            latent_shape=(8,), start_shape=(8, 4, 4), channels=(8, 4, 1), strides=(2, 2, 1)),
        lambda n: (torch.randn(2 + n, 8),)),
    "discriminator": Entry(
        lambda: nets.Discriminator((1, 32, 32), channels=(4, 8), strides=(2, 2)), _picture),
    "regressor": Entry(
        lambda: nets.Regressor((1, 32, 32), (2,), channels=(4, 8), strides=(2, 2)), _picture),
    "flexible_local_net": Entry(
        lambda: nets.LocalNet(
            spatial_dims=2, in_channels=1, out_channels=2, num_channel_initial=4,
            extract_levels=(0, 1), out_kernel_initializer="zeros"),
        _picture),
    "global_net": Entry(
        lambda: nets.GlobalNet(
            image_size=[32, 32], spatial_dims=2, in_channels=1, num_channel_initial=4, depth=2),
        _picture),
    "diffusion_unet": Entry(lambda: nets.DiffusionModelUNet(**_DIFFUSION, out_channels=1), _noisy),
    "controlnet": Entry(
        lambda: nets.ControlNet(**_DIFFUSION, conditioning_embedding_num_channels=(4,)),
        _controlled),
    "autoencoder_kl": Entry(
        lambda: Method(
            nets.AutoencoderKL(
                spatial_dims=3, in_channels=1, out_channels=1, num_res_blocks=(1, 1),
                channels=(4, 8), attention_levels=(False, True), latent_channels=2,
                norm_num_groups=4),
            "encode"),
        lambda n: _volume(n, 1, 8)),
    "vqvae": Entry(
        lambda: nets.VQVAE(
            spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8), num_res_layers=1,
            num_res_channels=(8, 8), num_embeddings=8, embedding_dim=4,
            downsample_parameters=((2, 4, 1, 1),) * 2,
            upsample_parameters=((2, 4, 1, 1, 0),) * 2),
        _picture),
    "patch_discriminator": Entry(
        lambda: nets.PatchDiscriminator(
            spatial_dims=2, in_channels=1, channels=4, num_layers_d=2), _picture),
    "mednext": Entry(
        lambda: nets.MedNeXt(
            spatial_dims=2, in_channels=1, out_channels=2, init_filters=4,
            blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1)),
        _picture),
    "quicknat": Entry(
        lambda: nets.Quicknat(
            num_classes=2, num_channels=1, num_filters=8, se_block="CSE", drop_out=0), _picture),
}  # fmt: skip
