"""Graph networks of torch-geometric, on one random graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from .entry import Entry, Inputs

_WIDTH = 8


def _edges(nodes: int, count: int) -> Tensor:
    """Random edges without loops."""
    source = torch.randint(0, nodes, (count,))
    return torch.stack([source, (source + torch.randint(1, nodes, (count,))) % nodes])


def _graph(n: int) -> Inputs:
    return torch.randn(12 + 5 * n, _WIDTH), _edges(12 + 5 * n, 30 + 9 * n)


def _weighted(n: int) -> Inputs:
    x, edges = _graph(n)
    return x, edges, torch.rand(edges.shape[1])


def _with_edges(n: int, width: int = 4) -> Inputs:
    x, edges = _graph(n)
    return x, edges, torch.rand(edges.shape[1], width)


def _typed(n: int) -> Inputs:
    x, edges = _graph(n)
    return x, edges, torch.arange(edges.shape[1]) % 3


def _pair(n: int) -> Inputs:
    x, edges = _graph(n)
    return x, torch.randn_like(x), edges


def _points(n: int) -> Inputs:
    x, edges = _graph(n)
    return x, torch.randn(x.shape[0], 3), edges


def _dense(n: int) -> Inputs:
    return torch.randn(2 + n, 6, _WIDTH), (torch.rand(2 + n, 6, 6) > 0.5).float()


def _batched(n: int) -> Inputs:
    x, edges = _graph(n)
    return x, edges, torch.arange(x.shape[0]) // 4


class Stack(nn.Module):
    """Two convolutions with an activation between them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor, *graph: Any) -> Tensor:
        return self.second(self.first(x, *graph).relu(), *graph)


class Pooled(nn.Module):
    """A network whose node features are pooled into one vector a graph."""

    def __init__(self, body: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.body, self.pool = body, pool

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return self.pool(self.body(x, edges), batch)


class DenseCluster(nn.Module):
    """DiffPool: a network that assigns nodes to clusters, and one on the clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign = gnn.DenseGCNConv(8, 8), gnn.DenseGCNConv(8, 3)
        self.after = gnn.DenseSAGEConv(8, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded, assigned = self.embed(x, adjacency), self.assign(x, adjacency)
        x, adjacency, link, entropy = gnn.dense_diff_pool(embedded, adjacency, assigned)
        return self.after(x, adjacency), link, entropy


def _mlp(width_in: int = _WIDTH, width_out: int = _WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, 16), nn.ReLU(), nn.Linear(16, width_out))


def _stack(name: str, *args: Any, inputs: Callable[[int], Inputs] = _graph, **more: Any) -> Entry:
    return Entry(lambda: Stack(lambda: getattr(gnn, name)(*args, **more)), inputs)


def _network(name: str, **more: Any) -> Entry:
    return Entry(
        lambda: getattr(gnn, name)(_WIDTH, 16, num_layers=2, out_channels=4, **more), _graph
    )


def _deeper_gcn() -> nn.Module:
    conv = gnn.GENConv(8, 8, aggr="softmax", t=1.0, learn_t=True, norm="layer")
    return gnn.DeepGCNLayer(conv, gnn.LayerNorm(8), nn.ReLU(), block="res+")


def _pna() -> Entry:
    how = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification"]}
    return _network("PNA", deg=torch.tensor([0, 3, 5, 4]), **how)


MODELS = {
    "gcn": _network("GCN"),
    "sage": _network("GraphSAGE"),
    "gin": _network("GIN"),
    "gat": _network("GAT", heads=2),
    "gatv2": _network("GAT", heads=2, v2=True),
    "pna": _pna(),
    "edge_cnn": _network("EdgeCNN"),
    "jumping_knowledge": _network("GCN", jk="lstm"),
    "transformer_conv": _stack("TransformerConv", 8, 4, heads=2, edge_dim=4, inputs=_with_edges),
    "cheb": _stack("ChebConv", 8, 8, K=3),
    "sgc": _stack("SGConv", 8, 8, K=2),
    "appnp": _stack("APPNP", K=3, alpha=0.1),
    "arma": _stack("ARMAConv", 8, 8, num_stacks=2, num_layers=2),
    "tag": _stack("TAGConv", 8, 8),
    "graph_conv": _stack("GraphConv", 8, 8, inputs=_weighted),
    "gated": _stack("GatedGraphConv", 8, num_layers=2),
    "res_gated": _stack("ResGatedGraphConv", 8, 8),
    "gmm": _stack("GMMConv", 8, 8, dim=4, kernel_size=3, inputs=_with_edges),
    "nn_conv": Entry(lambda: Stack(lambda: gnn.NNConv(8, 8, _mlp(4, 64))), _with_edges),
    "rgcn": _stack("RGCNConv", 8, 8, num_relations=3, inputs=_typed),
    "fast_rgcn": _stack("FastRGCNConv", 8, 8, num_relations=3, num_bases=2, inputs=_typed),
    "rgat": _stack("RGATConv", 8, 8, num_relations=3, inputs=_typed),
    "film": _stack("FiLMConv", 8, 8),
    "cg_conv": _stack("CGConv", 8, dim=4, inputs=_with_edges),
    "eg_conv": _stack("EGConv", 8, 8, num_heads=2, aggregators=["sum", "max"]),
    "super_gat": _stack("SuperGATConv", 8, 8, edge_sample_ratio=1.0),
    "gine": Entry(lambda: Stack(lambda: gnn.GINEConv(_mlp(), edge_dim=4)), _with_edges),
    "mix_hop": _stack("MixHopConv", 8, 8, powers=[1]),
    "fa_conv": Entry(lambda: gnn.FAConv(8), lambda n: (_pair(n)[0], _pair(n)[1], _graph(n)[1])),
    "gcn2": Entry(lambda: gnn.GCN2Conv(8, alpha=0.1, theta=0.5, layer=1), _pair),
    "point_net": Entry(lambda: gnn.PointNetConv(_mlp(11), _mlp()), _points),
    "point_transformer": Entry(lambda: gnn.PointTransformerConv(8, 8), _points),
    "deeper_gcn": Entry(_deeper_gcn, _graph),
    "gps": Entry(
        lambda: gnn.GPSConv(8, gnn.GINConv(_mlp()), heads=2, norm="layer_norm"), _batched),
    "set2set": Entry(lambda: Pooled(gnn.GCNConv(8, 8), gnn.Set2Set(8, 2)), _batched),
    "attentional": Entry(
        lambda: Pooled(gnn.GCNConv(8, 8), gnn.AttentionalAggregation(_mlp(8, 1))), _batched),
    "diff_pool": Entry(DenseCluster, _dense),
    "graph_unet": Entry(lambda: gnn.GraphUNet(8, 8, 4, depth=2), _graph),
    "light_gcn": Entry(
        lambda: gnn.LightGCN(24, 8, 2), lambda n: (_edges(24, 30 + 9 * n),)),
    "anti_symmetric": _stack("AntiSymmetricConv", 8, num_iters=2),
    "dir_gnn": Entry(lambda: Stack(lambda: gnn.DirGNNConv(gnn.SAGEConv(8, 8))), _graph),
}  # fmt: skip
