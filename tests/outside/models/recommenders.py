"""Recommenders: models of DeepCTR-Torch and of tab-transformer-pytorch, and plain torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from tab_transformer_pytorch import FTTransformer, TabTransformer
from torch import Tensor, nn

from .entry import Entry, Inputs, ids

_SPARSE, _DENSE, _VALUES, _WIDTH = 4, 3, 20, 8


def _deep_ctr(name: str, **sizes: Any) -> Entry:
    """A model whose input is one matrix: sparse features as numbers, then dense ones."""

    def build() -> nn.Module:
        inputs = importlib.import_module("deepctr_torch.inputs")
        models = importlib.import_module("deepctr_torch.models")
        sparse = [inputs.SparseFeat(f"s{i}", _VALUES, _WIDTH) for i in range(_SPARSE)]
        dense = [inputs.DenseFeat(f"d{i}", 1) for i in range(_DENSE)]
        columns = [*sparse, *dense]
        both = () if name in _ONE_LIST else (columns,)
        return getattr(models, name)(*both, columns, device="cpu", **sizes)

    return Entry(build, _features)


_ONE_LIST = ("PNN", "MMOE", "PLE")  # of these the linear part has no columns of its own
_TASKS = {
    "task_types": ["binary", "regression"],
    "task_names": ["a", "b"],
    "expert_dnn_hidden_units": (8,),
    "gate_dnn_hidden_units": (4,),
    "tower_dnn_hidden_units": (4,),
}


def _features(n: int) -> tuple[Tensor]:
    sparse = torch.randint(0, _VALUES, (4 + 2 * n, _SPARSE)).float()
    return (torch.cat([sparse, torch.rand(4 + 2 * n, _DENSE)], 1),)


def _table(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 5, (3 + n, 3)), torch.randn(3 + n, 2)


class Dlrm(nn.Module):
    """Embedding bags, pairwise dot products, two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(_VALUES, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(b(s) for b, s in zip(self.bags, sparse, strict=True))], 1)
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).sigmoid()


class NeuralFactors(nn.Module):
    """Neural collaborative filtering: a product of factors beside a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 16), nn.Embedding(40, 16)
        self.deep = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
        self.last = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, v = self.users(user), self.items(item)
        deep = self.deep(torch.cat([u[:, :8], v[:, :8]], 1))
        return self.last(torch.cat([u[:, 8:] * v[:, 8:], deep], 1)).squeeze(-1)


class SelfAttentive(nn.Module):
    """SASRec: causal attention over a history, scores of all items."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(50, 16, padding_idx=0), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, history: Tensor) -> Tensor:
        length = history.shape[1]
        x = self.items(history) + self.places.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.body(x, mask=mask) @ self.items.weight.T


class Sessions(nn.Module):
    """GRU4Rec: a recurrent network over a session, with a ranking loss."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.gru = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, session: Tensor, target: Tensor) -> Tensor:
        state = self.gru(self.items(session))[0][:, -1]
        scores = state @ self.items(target).T
        return -F.logsigmoid(scores.diagonal()[:, None] - scores).mean()


class Interests(nn.Module):
    """DIN: a history weighted by what it has in common with a candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 8, padding_idx=0)
        self.attend = nn.Sequential(nn.Linear(32, 16), nn.PReLU(), nn.Linear(16, 1))
        self.last = nn.Sequential(nn.Linear(16, 8), nn.PReLU(), nn.Linear(8, 1))

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        past, item = self.items(history), self.items(candidate)[:, None].expand(-1, 8, -1)
        both = torch.cat([past, item, past - item, past * item], -1)
        weights = self.attend(both).masked_fill((history == 0)[..., None], -1e9).softmax(1)
        return self.last(torch.cat([(weights * past).sum(1), item[:, 0]], 1))


class TwoTowers(nn.Module):
    """Retrieval: normalised vectors of queries and items, a softmax over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 16, mode="mean")
        self.query, self.item = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        q = F.normalize(self.query(self.words(query)), dim=-1)
        v = F.normalize(self.item(self.words(item)), dim=-1)
        return F.cross_entropy(q @ v.T / 0.1, torch.arange(q.shape[0]))


class MultinomialAutoencoder(nn.Module):
    """Mult-VAE without its noise: a likelihood of all items and a divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(40, 16), nn.Linear(8, 40)

    def forward(self, clicks: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encode(F.normalize(clicks)).chunk(2, 1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.log_softmax(self.decode(mean), 1), divergence


class Cross(nn.Module):
    """DCN-v2 with low-rank experts, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.u = (nn.Parameter(torch.randn(2, 3, *s) * 0.2) for s in ((8, 4), (4, 8)))
        self.gate, self.last = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        crossed = x
        for v, u in zip(self.v, self.u, strict=True):
            experts = torch.einsum("bd,edr->ber", crossed, v).tanh()
            mixed = torch.einsum("ber,erd->bed", experts, u) * x[:, None]
            crossed = crossed + (self.gate(crossed).softmax(1)[..., None] * mixed).sum(1)
        return self.last(crossed)


def _clicks(n: int) -> Inputs:
    return ((torch.rand(3 + n, 40) > 0.8).float(),)


def _pairs(n: int) -> Inputs:
    return torch.arange(5 + n), torch.arange(5 + n) + 7


_SMALL = {"dnn_hidden_units": (16, 8)}

MODELS = {
    "deep_fm": _deep_ctr("DeepFM", **_SMALL),
    "xdeep_fm": _deep_ctr("xDeepFM", cin_layer_size=(8, 8), **_SMALL),
    "wide_deep": _deep_ctr("WDL", **_SMALL),
    "dcn": _deep_ctr("DCN", **_SMALL),
    "dcn_mix": _deep_ctr("DCNMix", num_experts=2, low_rank=4, **_SMALL),
    "auto_int": _deep_ctr("AutoInt", **_SMALL),
    "nfm": _deep_ctr("NFM", **_SMALL),
    "pnn": _deep_ctr("PNN", use_outter=True, **_SMALL),
    "fibinet": _deep_ctr("FiBiNET", **_SMALL),
    "ifm": _deep_ctr("IFM", **_SMALL),
    "difm": _deep_ctr("DIFM", **_SMALL),
    "mmoe": _deep_ctr("MMOE", num_experts=2, **_TASKS),
    "tab_transformer": Entry(
        lambda: TabTransformer(
            categories=(5, 5, 5), num_continuous=2, mlp_act=nn.ReLU(),
            dim=8, dim_out=1, depth=1, heads=2,
            attn_dropout=0.0, ff_dropout=0.0),
        _table),
    "ft_transformer": Entry(
        lambda: FTTransformer(
            categories=(5, 5, 5), num_continuous=2, dim=8, dim_out=1, depth=1, heads=2,
            attn_dropout=0.0, ff_dropout=0.0),
        _table),
    "dlrm": Entry(
        Dlrm, lambda n: (torch.rand(4 + n, 4), torch.randint(0, _VALUES, (3, 4 + n, 5)))),
    "ncf": Entry(NeuralFactors, _pairs),
    "sasrec": Entry(SelfAttentive, lambda n: (ids(n, 8 + 2 * n),)),
    "gru4rec": Entry(Sessions, lambda n: (ids(n), torch.arange(2 + n))),
    "din": Entry(Interests, lambda n: (ids(n, 8), torch.arange(2 + n))),
    "two_towers": Entry(TwoTowers, lambda n: (ids(n, 6), ids(n, 5))),
    "mult_vae": Entry(MultinomialAutoencoder, _clicks),
    "dcn_v2": Entry(Cross, lambda n: (torch.randn(4 + n, 8),)),
}  # fmt: skip
