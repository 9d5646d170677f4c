"""Equivariant networks of e3nn: its code generators without TorchScript, traced by Dynamo."""

from __future__ import annotations

import e3nn
import torch
from e3nn import nn as enn
from e3nn import o3
from torch import Tensor, nn

from .entry import Entry

e3nn.set_optimization_defaults(jit_script_fx=False, jit_mode="eager")

_IN, _OUT = "4x0e + 2x1o", "4x0e + 2x1o + 1x2e"


class Harmonics(nn.Module):
    """Spherical harmonics of directions, weighted by a radial network."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics([0, 1, 2, 3], normalize=True)
        self.radial = enn.FullyConnectedNet([8, 16, 4], torch.nn.functional.silu)

    def forward(self, vectors: Tensor) -> Tensor:
        lengths = vectors.norm(dim=1)
        basis = e3nn.math.soft_one_hot_linspace(
            lengths, 0.0, 3.0, 8, basis="gaussian", cutoff=False
        )
        return self.harmonics(vectors)[:, None] * self.radial(basis)[:, :, None]


class Convolution(nn.Module):
    """Messages along edges: a tensor product with weights from the lengths of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics("1x0e + 1x1o + 1x2e", normalize=True)
        self.product = o3.FullyConnectedTensorProduct(
            _IN, self.harmonics.irreps_out, _OUT, shared_weights=False
        )
        self.radial = enn.FullyConnectedNet([1, 8, self.product.weight_numel], torch.tanh)
        self.linear = o3.Linear(_OUT, _OUT)

    def forward(self, x: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        vectors = positions[source] - positions[target]
        weights = self.radial(vectors.norm(dim=1, keepdim=True))
        messages = self.product(x[source], self.harmonics(vectors), weights)
        summed = torch.zeros(x.shape[0], messages.shape[1], dtype=x.dtype)
        return self.linear(summed.index_add(0, target, messages))


class Gated(nn.Module):
    """A tensor product of a tensor with itself, then a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = enn.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.product = o3.FullyConnectedTensorProduct(_IN, _IN, self.gate.irreps_in)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.product(x, x))


def _features(n: int, irreps: str = _IN) -> tuple[Tensor]:
    return (torch.randn(6 + 3 * n, o3.Irreps(irreps).dim),)


def _cloud(n: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes, count = 6 + 2 * n, 14 + 5 * n
    source = torch.randint(0, nodes, (count,))
    edges = torch.stack([source, (source + torch.randint(1, nodes, (count,))) % nodes])
    return *_features_of(nodes), torch.randn(nodes, 3), edges


def _features_of(nodes: int) -> tuple[Tensor]:
    return (torch.randn(nodes, o3.Irreps(_IN).dim),)


MODELS = {
    "linear": Entry(lambda: o3.Linear(_IN, _OUT), _features),
    "harmonics": Entry(Harmonics, lambda n: (torch.randn(6 + 3 * n, 3),)),
    "convolution": Entry(Convolution, _cloud),
    "gate": Entry(Gated, _features),
    "norm_activation": Entry(
        lambda: nn.Sequential(o3.Linear(_IN, _IN), enn.NormActivation(_IN, torch.sigmoid)),
        _features),
    "batch_norm": Entry(lambda: nn.Sequential(o3.Linear(_IN, _IN), enn.BatchNorm(_IN)), _features),
    "tensor_square": Entry(lambda: o3.TensorSquare(_IN, "2x0e + 1x1o + 1x2e"), _features),
    "elementwise": Entry(
        lambda: o3.ElementwiseTensorProduct("3x0e + 2x1o", "3x0e + 2x1o"),
        lambda n: (*_features(n, "3x0e + 2x1o"), *_features(n, "3x0e + 2x1o"))),
    "s2_activation": Entry(
        lambda: nn.Sequential(
            o3.Linear("1x0e + 1x1o + 1x2e", "1x0e + 1x1o + 1x2e"),
            enn.S2Activation("1x0e + 1x1o + 1x2e", torch.tanh, 8)),
        lambda n: _features(n, "1x0e + 1x1o + 1x2e")),
}  # fmt: skip
