"""Models of timm for tests and benchmarks, with random weights; torchvision may be missing.

    pip install --no-deps timm
    python examples/vision.py resnet18     compiled, against eager

timm asks for torchvision, of which there is no build for a torch without CUDA. Models need one
class of it only; the rest of it serves timm.data, of which models read a few constants.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

INSTALL = "pip install --no-deps timm"

# Small members of 60 families, each with the smallest picture that suits it.
MODELS: dict[str, int] = {
    "beit_base_patch16_224": 224, "cait_xxs24_224": 224, "caformer_s18": 64,
    "coat_lite_tiny": 224, "coatnet_nano_rw_224": 224, "convformer_s18": 64,
    "convit_tiny": 224, "convmixer_768_32": 64, "convnext_atto": 64, "convnextv2_atto": 64,
    "crossvit_tiny_240": 240, "cs3darknet_s": 64, "cspresnet50": 64, "davit_tiny": 64,
    "deit_tiny_patch16_224": 224, "densenet121": 64, "dla34": 64, "dpn68": 64,
    "edgenext_xx_small": 64, "efficientformer_l1": 224, "efficientnet_b0": 64,
    "efficientnetv2_rw_t": 64, "efficientvit_b0": 64, "eva02_tiny_patch14_224": 224,
    "fastvit_t8": 64, "focalnet_tiny_srf": 64, "gcvit_xxtiny": 224, "gernet_s": 64,
    "ghostnet_050": 64, "gmixer_24_224": 224, "hardcorenas_a": 64, "hgnet_tiny": 64,
    "hrnet_w18_small": 64, "inception_next_tiny": 64, "inception_v4": 96, "lcnet_050": 64,
    "levit_128s": 224, "maxvit_pico_rw_256": 256, "mixer_s16_224": 224, "mnasnet_small": 64,
    "mobilenetv2_050": 64, "mobilenetv3_small_050": 64, "mobilenetv4_conv_small": 64,
    "mobileone_s0": 64, "mobilevit_xxs": 64, "mobilevitv2_050": 64, "nf_resnet26": 64,
    "nfnet_l0": 64, "pit_ti_224": 224, "poolformer_s12": 64, "pvt_v2_b0": 64,
    "regnetx_002": 64, "repvgg_a0": 64, "repvit_m0_9": 64, "res2net50_14w_8s": 64,
    "resmlp_12_224": 224, "resnest14d": 64, "resnet18": 64, "rexnet_100": 64,
    "sequencer2d_s": 224, "selecsls42": 64, "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224, "tinynet_e": 64, "tiny_vit_5m_224": 224, "tnt_s_patch16_224": 224,
    "twins_svt_small": 64, "vgg11": 64, "visformer_tiny": 224, "vit_tiny_patch16_224": 224,
    "volo_d1_224": 224, "xcit_nano_12_p16_224": 224,
}  # fmt: skip


def timm() -> Any:
    """The package timm; ImportError with the command that installs it where it is missing."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    path = [p for p in sys.path if not (Path(p) / "timm.py").exists()]  # a benchmark of ours
    spec = importlib.machinery.PathFinder.find_spec("timm", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the models of timm are not installed: {INSTALL}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["timm"] = package
    stand_ins = _without_torchvision(package) if not importlib.util.find_spec("torchvision") else []
    spec.loader.exec_module(package)
    for name in stand_ins:  # others must not take them for the package
        del sys.modules[name]
    return package


def _without_torchvision(package: ModuleType) -> list[str]:
    names = ["torchvision", "torchvision.ops", "torchvision.ops.misc"]
    sys.modules |= {name: ModuleType(name) for name in names}
    frozen = type("FrozenBatchNorm2d", (torch.nn.Module,), {})
    sys.modules[names[-1]].FrozenBatchNorm2d = frozen  # type: ignore[attr-defined]
    data = ModuleType("timm.data")
    data.__path__ = [str(Path(package.__path__[0]) / "data")]
    sys.modules["timm.data"] = data
    constants = importlib.import_module("timm.data.constants")
    data.__dict__.update({k: v for k, v in vars(constants).items() if k.isupper()})
    return names


def model_and_picture(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model in eval mode with random weights, and a picture of its size."""
    torch.manual_seed(0)
    model = timm().create_model(name, pretrained=False).eval()
    return model, torch.randn(1, 3, MODELS[name], MODELS[name])


def main() -> None:
    """Compile one of the models, and compare it with eager."""
    parser = argparse.ArgumentParser(description="a model of timm, compiled, against eager")
    parser.add_argument("name", nargs="?", default="resnet18", help="one of `MODELS`")
    name = parser.parse_args().name
    if name not in MODELS:
        parser.error(f"{name!r} is none of {', '.join(MODELS)}")
    try:
        model, picture = model_and_picture(name)
    except ImportError as error:
        parser.error(str(error))
    compiled = torch.compile(model, backend="torchair")
    with torch.no_grad():
        difference = (compiled(picture) - model(picture)).abs().max().item()
    print(f"{name}: largest difference to eager {difference:.1e}")


if __name__ == "__main__":
    main()
