"""Networks of diffusers: denoisers of pictures, videos and sounds, and autoencoders."""

from __future__ import annotations

import diffusers
import torch

from .entry import Entry, Inputs, Method, image

_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_PLAIN = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_ENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}


def _noisy(n: int) -> Inputs:
    return {"sample": image(n, 4, 16), "timestep": torch.arange(2 + n)}


def _prompted(n: int) -> Inputs:
    return {**_noisy(n), "encoder_hidden_states": torch.randn(2 + n, 6, 16)}


def _latent(n: int, channels: int = 4, **more: object) -> Inputs:
    return {"hidden_states": image(n, channels, 8), "timestep": torch.arange(2 + n), **more}


def _text(n: int, width: int = 16) -> torch.Tensor:
    return torch.randn(2 + n, 6, width)


def _video(n: int, channels: int = 4, frames: int = 2) -> torch.Tensor:
    return torch.randn(1 + n, channels, frames, 8, 8)


def _sd3(n: int) -> Inputs:
    return _latent(n, encoder_hidden_states=_text(n), pooled_projections=torch.randn(2 + n, 24))


def _flux(n: int) -> Inputs:
    return {
        "hidden_states": torch.randn(2 + n, 16, 4),
        "encoder_hidden_states": _text(n),
        "pooled_projections": torch.randn(2 + n, 24),
        "timestep": torch.rand(2 + n),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
    }


def _ltx(n: int) -> Inputs:
    return {
        "hidden_states": torch.randn(2 + n, 8, 4),
        "encoder_hidden_states": _text(n),
        "timestep": torch.rand(2 + n),
        "encoder_attention_mask": torch.ones(2 + n, 6).bool(),
        "num_frames": 2,
        "height": 2,
        "width": 2,
    }


def _stable_audio(n: int) -> Inputs:
    return {
        "hidden_states": torch.randn(2 + n, 4, 12),
        "timestep": torch.rand(2 + n),
        "encoder_hidden_states": _text(n),
        "global_hidden_states": torch.randn(2 + n, 1, 16),
    }


def _control(n: int) -> Inputs:
    return {**_prompted(n), "controlnet_cond": image(n, 3, 128), "return_dict": False}


def _pixart(n: int) -> Inputs:
    return {
        **_latent(n, encoder_hidden_states=_text(n)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _cascade(n: int) -> Inputs:
    return {
        "sample": image(n, 4, 8),
        "timestep_ratio": torch.rand(2 + n),
        "clip_text_pooled": torch.randn(2 + n, 1, 8),
    }


def _uvit(n: int) -> Inputs:
    return {
        "input_ids": torch.randint(0, 16, (2 + n, 4, 4)),
        "encoder_hidden_states": _text(n, 8),
        "pooled_text_emb": torch.randn(2 + n, 8),
        "micro_conds": torch.rand(2 + n, 2),
    }


MODELS = {
    "unet2d": Entry(
        lambda: diffusers.UNet2DModel(
            **_BLOCKS, **_PLAIN, in_channels=4, out_channels=4, attention_head_dim=4),
        _noisy),
    "unet2d_condition": Entry(
        lambda: diffusers.UNet2DConditionModel(**_BLOCKS, **_CROSS), _prompted),
    "controlnet": Entry(
        lambda: diffusers.ControlNetModel(
            block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            down_block_types=_CROSS["down_block_types"], cross_attention_dim=16,
            attention_head_dim=4, conditioning_embedding_out_channels=(4, 8, 8, 8)),
        _control),
    "uvit2d": Entry(
        lambda: diffusers.UVit2DModel(
            hidden_size=16, cond_embed_dim=8, encoder_hidden_size=8, micro_cond_encode_dim=2,
            micro_cond_embed_dim=4, vocab_size=20, codebook_size=16, in_channels=16,
            block_out_channels=16, num_hidden_layers=1, num_attention_heads=2, block_num_heads=2,
            intermediate_size=32, num_res_blocks=1),
        _uvit),
    "autoencoder_kl": Entry(
        lambda: diffusers.AutoencoderKL(**_BLOCKS, **_ENCODER), lambda n: (image(n, side=16),)),
    "vq_model": Entry(
        lambda: diffusers.VQModel(**_BLOCKS, **_ENCODER, num_vq_embeddings=16),
        lambda n: (image(n, side=16),)),
    "autoencoder_tiny": Entry(
        lambda: diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        lambda n: (image(n, side=16),)),
    "asymmetric_autoencoder": Entry(
        lambda: diffusers.AsymmetricAutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(8, 8),
            up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(8, 8),
            layers_per_down_block=1, layers_per_up_block=1, norm_num_groups=4),
        lambda n: (image(n, side=16),)),
    "autoencoder_oobleck": Entry(
        lambda: diffusers.AutoencoderOobleck(
            encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2],
            decoder_channels=8, decoder_input_channels=4, audio_channels=2),
        lambda n: (torch.randn(2 + n, 2, 64),)),
    "autoencoder_dc": Entry(
        lambda: diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=4, encoder_block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)), upsample_block_type="interpolate"),
        lambda n: (image(n, side=16),)),
    "dit": Entry(
        lambda: diffusers.DiTTransformer2DModel(
            **_DIT, in_channels=4, patch_size=2, num_embeds_ada_norm=8, norm_num_groups=4),
        lambda n: _latent(n, class_labels=torch.arange(2 + n))),
    "pixart": Entry(
        lambda: diffusers.PixArtTransformer2DModel(
            **_DIT, in_channels=4, cross_attention_dim=16, caption_channels=16,
            use_additional_conditions=False),
        _pixart),
    "sd3": Entry(
        lambda: diffusers.SD3Transformer2DModel(
            **_DIT, patch_size=2, in_channels=4, joint_attention_dim=16, caption_projection_dim=16,
            pooled_projection_dim=24, out_channels=4),
        _sd3),
    "flux": Entry(
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=24,
            axes_dims_rope=[4, 4, 8]),
        _flux),
    "auraflow": Entry(
        lambda: diffusers.AuraFlowTransformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
            attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
            caption_projection_dim=16, out_channels=4, pos_embed_max_size=64),
        lambda n: _latent(n, encoder_hidden_states=_text(n))),
    "sana": Entry(
        lambda: diffusers.SanaTransformer2DModel(
            **_DIT, in_channels=4, out_channels=4, patch_size=1, num_cross_attention_heads=2,
            cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16),
        lambda n: _latent(n, encoder_hidden_states=_text(n))),
    "ltx_video": Entry(
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
            cross_attention_dim=16, num_layers=1, caption_channels=16),
        _ltx),
    "cogvideox": Entry(
        lambda: diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
            time_embed_dim=2, text_embed_dim=16, num_layers=1, sample_width=8, sample_height=8,
            sample_frames=8, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=6),
        lambda n: {"hidden_states": torch.randn(2 + n, 2, 4, 8, 8), "timestep": torch.arange(2 + n),
                   "encoder_hidden_states": _text(n)}),
    "latte": Entry(
        lambda: diffusers.LatteTransformer3DModel(
            **_DIT, in_channels=4, patch_size=2, caption_channels=16, video_length=2,
            cross_attention_dim=16, norm_type="ada_norm_single", num_embeds_ada_norm=100),
        lambda n: {"hidden_states": torch.randn(2 + n, 4, 2, 8, 8), "timestep": torch.arange(2 + n),
                   "encoder_hidden_states": _text(n)}),
    "wan": Entry(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
            out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1,
            rope_max_seq_len=32),
        lambda n: {"hidden_states": _video(n), "timestep": torch.arange(1 + n),
                   "encoder_hidden_states": torch.randn(1 + n, 6, 16)}),
    "stable_audio": Entry(
        lambda: diffusers.StableAudioDiTModel(
            sample_size=12, in_channels=4, num_layers=1, attention_head_dim=8,
            num_attention_heads=2, num_key_value_attention_heads=1, out_channels=4,
            cross_attention_dim=16, time_proj_dim=8, global_states_input_dim=16,
            cross_attention_input_dim=16),
        _stable_audio),
    "prior": Entry(
        lambda: diffusers.PriorTransformer(
            num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=8,
            num_embeddings=5, additional_embeddings=4),
        lambda n: {"hidden_states": torch.randn(2 + n, 8), "timestep": 2,
                   "proj_embedding": torch.randn(2 + n, 8),
                   "encoder_hidden_states": torch.randn(2 + n, 5, 8)}),
    "vae_decoder": Entry(
        lambda: Method(diffusers.AutoencoderKL(**_BLOCKS, **_ENCODER), "decode"),
        lambda n: (image(n, 4, 8),)),
    "stable_cascade": Entry(
        lambda: diffusers.StableCascadeUNet(
            in_channels=4, out_channels=4, conditioning_dim=8, block_out_channels=(8, 8),
            num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1), timestep_ratio_embedding_dim=8,
            clip_text_pooled_in_channels=8,
            block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                                   ("SDCascadeResBlock", "SDCascadeAttnBlock"))),
        _cascade),
}  # fmt: skip
