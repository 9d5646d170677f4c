"""Classical vision of kornia: filters, warps, colours, morphology, local features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kornia
import torch
from kornia import feature, filters, geometry, losses, morphology
from torch import Tensor, nn

from .entry import Entry, image


class Chain(nn.Module):
    """A convolution, so that there is something to train, then functions."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.functions = functions

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        result: Any = self.conv(x).sigmoid()
        for function in self.functions:
            result = function(result, *more)
        return result


def _colors(x: Tensor) -> tuple[Tensor, ...]:
    color = kornia.color
    lab = color.rgb_to_lab(x)
    return color.lab_to_rgb(lab), color.rgb_to_hsv(x), color.rgb_to_yuv(x), color.rgb_to_luv(x)


def _magnitude(gradient: Tensor) -> Tensor:
    return (gradient.square().sum(2) + 1e-6).sqrt()


def _morphology(x: Tensor) -> tuple[Tensor, ...]:
    kernel = torch.ones(3, 3, dtype=x.dtype)
    opened = morphology.opening(x, kernel)
    return opened, morphology.gradient(x, kernel), morphology.top_hat(x, kernel)


def _enhanced(x: Tensor) -> Tensor:
    x = kornia.enhance.adjust_hue(kornia.enhance.adjust_gamma(x, 1.4), 0.3)
    return kornia.enhance.adjust_saturation(x, 1.2)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    return geometry.transform.rotate(x, angle)


def _warped(x: Tensor, matrix: Tensor) -> Tensor:
    return geometry.transform.warp_perspective(x, matrix, (20, 24))


def _similarity(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    return losses.ssim_loss(x, other, 5), losses.total_variation(x), losses.psnr_loss(x, other, 1.0)


def _pose(points: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    rotation = geometry.conversions.axis_angle_to_rotation_matrix(vectors)
    moved = points @ rotation.mT
    return geometry.conversions.rotation_matrix_to_quaternion(rotation), moved


class Pose(nn.Module):
    """Points moved by predicted rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, points: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return _pose(points, self.linear(vectors))


class Homography(nn.Module):
    """The homography of point pairs by direct linear transform."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return geometry.homography.find_homography_dlt(first, second)


def _matrices(n: int) -> Tensor:
    return torch.eye(3) + 0.01 * torch.randn(2 + n, 3, 3)


def _patches(n: int) -> tuple[Tensor]:
    return (torch.rand(2 + n, 1, 32, 32),)


def _points(n: int) -> tuple[Tensor, Tensor]:
    points = torch.rand(2 + n, 6, 2)
    return points, points @ torch.tensor([[0.9, 0.2], [-0.1, 1.1]]) + 0.3


MODELS = {
    "gaussian_blur": Entry(
        lambda: Chain(filters.GaussianBlur2d((5, 5), (1.5, 1.5))), lambda n: (image(n),)),
    "sobel": Entry(lambda: Chain(filters.SpatialGradient(), _magnitude), lambda n: (image(n),)),
    "bilateral": Entry(
        lambda: Chain(filters.BilateralBlur((3, 3), 0.1, (1.5, 1.5))), lambda n: (image(n),)),
    "unsharp": Entry(
        lambda: Chain(filters.UnsharpMask((3, 3), (1.5, 1.5))), lambda n: (image(n),)),
    "median": Entry(lambda: Chain(filters.MedianBlur((3, 3))), lambda n: (image(n),)),
    "guided": Entry(
        lambda: Chain(lambda x: filters.guided_blur(x, x, 3, 0.1)), lambda n: (image(n),)),
    "canny": Entry(lambda: Chain(filters.Canny(hysteresis=False)), lambda n: (image(n),)),
    "colors": Entry(lambda: Chain(_colors), lambda n: (image(n),)),
    "enhance": Entry(lambda: Chain(_enhanced), lambda n: (image(n),)),
    "equalize_clahe": Entry(
        lambda: Chain(lambda x: kornia.enhance.equalize_clahe(x, grid_size=(2, 2))),
        lambda n: (image(n),)),
    "morphology": Entry(lambda: Chain(_morphology), lambda n: (image(n),)),
    "rotate": Entry(lambda: Chain(_rotated), lambda n: (image(n), torch.rand(2 + n) * 90)),
    "warp_perspective": Entry(lambda: Chain(_warped), lambda n: (image(n), _matrices(n))),
    "pyramid": Entry(
        lambda: Chain(lambda x: geometry.transform.build_pyramid(x, 3)), lambda n: (image(n),)),
    "similarity": Entry(lambda: Chain(_similarity), lambda n: (image(n), image(n).sigmoid())),
    "soft_argmax": Entry(
        lambda: Chain(geometry.subpix.SpatialSoftArgmax2d()), lambda n: (image(n),)),
    "pose": Entry(Pose, lambda n: (torch.randn(2 + n, 5, 3), torch.randn(2 + n, 3))),
    "homography": Entry(Homography, _points),
    "hardnet": Entry(lambda: feature.HardNet(pretrained=False), _patches),
    "sosnet": Entry(lambda: feature.SOSNet(pretrained=False), _patches),
    "tfeat": Entry(lambda: feature.TFeat(pretrained=False), _patches),
    "sift": Entry(lambda: feature.SIFTDescriptor(32), _patches),
    "harris": Entry(lambda: Chain(feature.CornerHarris(0.04)), lambda n: (image(n),)),
    "orinet": Entry(lambda: feature.OriNet(pretrained=False), _patches),
}  # fmt: skip
