"""Decoding with DeepSeek-style latent attention, written with operators of torch_npu: latent keys
in pages, an indexer that chooses which of them are read, a mixture of experts in int8 whose shared
expert runs on a stream of its own.

    torchair run deepseek_mla.py all
    torchair run deepseek_mla.py max-autotune

The modes are eager, max-autotune, reduce-overhead and npugraph_ex. All give the same tokens.
"""

import sys
from dataclasses import dataclass

import torch
import torch_npu
from qwen3_moe import MODES, Step, compiled, decode, int8_columns, weight
from torch import nn


@dataclass
class Config:
    vocab: int = 96
    dim: int = 64
    layers: int = 2
    heads: int = 4
    low: int = 24  # of queries
    latent: int = 32  # of keys and values
    nope: int = 16
    rope: int = 8
    value: int = 16
    index_heads: int = 2
    index_dim: int = 16
    index_count: int = 8  # keys that a query reads
    experts: int = 8
    groups: int = 4
    chosen: int = 3
    expert_dim: int = 32
    page: int = 8
    pages: int = 12  # of the whole cache


class LatentAttention(nn.Module):
    """Attention over the latent keys that an indexer chooses."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, c = config, config
        self.down_q = weight(c.dim, c.low)
        self.up_q = weight(c.low, c.heads * (c.nope + c.rope))
        self.up_k = weight(c.heads, c.nope, c.latent)
        self.down_kv = weight(c.dim, c.latent + c.rope)
        self.q_norm = nn.Parameter(torch.ones(c.low))
        self.kv_norm = nn.Parameter(torch.ones(c.latent))
        self.up_v = weight(c.heads, c.latent, c.value)
        self.out = weight(c.dim, c.heads * c.value)
        self.index_q = weight(c.index_heads * c.index_dim, c.low)
        self.index_k = weight(c.index_dim, c.dim)
        self.index_w = weight(c.index_heads, c.dim)
        for name, width in (("kv", c.latent), ("kr", c.rope), ("index", c.index_dim)):
            self.register_buffer(f"{name}_cache", torch.zeros(c.pages, c.page, 1, width))

    def chosen(self, x, low, step):
        """Places of the keys that each query reads."""
        c = self.config
        keys = torch_npu.npu_linear(x, self.index_k)
        torch_npu.npu_scatter_nd_update_(
            self.index_cache.view(-1, c.index_dim), step.slots[:, None], keys
        )
        queries = torch_npu.npu_linear(low, self.index_q).view(-1, 1, c.index_heads, c.index_dim)
        weights = torch_npu.npu_linear(x, self.index_w).unsqueeze(1)
        return torch_npu.npu_lightning_indexer(
            queries,
            self.index_cache,
            weights,
            actual_seq_lengths_query=torch.ones_like(step.lengths),
            actual_seq_lengths_key=step.lengths,
            block_table=step.table,
            layout_key="PA_BSND",
            sparse_count=c.index_count,
        )[0]

    def forward(self, x, rotation, step):
        c = self.config
        cos, sin = rotation
        query, turned, _, low, _ = torch_npu.npu_mla_prolog_v3(
            x,
            self.down_q,
            self.up_q,
            self.up_k,
            self.down_kv,
            self.q_norm,
            self.kv_norm,
            sin,
            cos,
            self.kv_cache,
            self.kr_cache,
            cache_index=step.slots.long(),
            query_norm_flag=True,
        )
        mixed, _, _ = torch_npu.npu_sparse_flash_attention(
            query.unsqueeze(1),
            self.kv_cache,
            self.kv_cache,
            self.chosen(x, low, step),
            (c.nope + c.rope) ** -0.5,
            block_table=step.table,
            actual_seq_lengths_query=torch.ones_like(step.lengths),
            actual_seq_lengths_kv=step.lengths,
            query_rope=turned.unsqueeze(1),
            key_rope=self.kr_cache,
            layout_kv="PA_BSND",
            attention_mode=2,
        )
        heads = torch_npu.npu_transpose_batchmatmul(
            mixed.squeeze(1), self.up_v, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
        return torch_npu.npu_linear(heads.flatten(1), self.out)


class Experts(nn.Module):
    """Chosen experts in int8, and one for all tokens that runs beside them."""

    def __init__(self, config: Config, side: torch.npu.Stream):
        super().__init__()
        self.config, c, self.side = config, config, side
        self.router, self.bias = weight(c.experts, c.dim), weight(c.experts)
        self.shared_up = weight(2 * c.expert_dim, c.dim)
        self.shared_down = weight(c.dim, c.expert_dim)
        up = int8_columns(torch.randn(c.experts, c.dim, 2 * c.expert_dim) * c.dim**-0.5)
        down = int8_columns(torch.randn(c.experts, c.expert_dim, c.dim) * c.expert_dim**-0.5)
        for name, t in zip(("up", "up_scale", "down", "down_scale"), up + down, strict=True):
            self.register_buffer(name, t)

    def forward(self, x):
        c, ready, done = self.config, torch.npu.Event(), torch.npu.Event()
        ready.record()
        with torch.npu.stream(self.side):
            ready.wait()
            hidden = torch_npu.npu_swiglu(torch_npu.npu_linear(x, self.shared_up))
            shared = torch_npu.npu_linear(hidden, self.shared_down)
            done.record()
        logits = torch_npu.npu_linear(x, self.router)
        weights, experts, _ = torch_npu.npu_moe_gating_top_k(
            logits,
            c.chosen,
            bias=self.bias,
            k_group=2,
            group_count=c.groups,
            group_select_mode=1,
            norm_type=1,
            routed_scaling_factor=2.5,
        )
        place = ("", 1, 0, c.experts)  # one rank holds all experts
        rows, scales, info, counts, received, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
            x, experts, *place, quant_mode=2
        )
        rows, scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            rows, [self.up], [self.up_scale], scales, counts, group_list_type=1
        )
        (made,) = torch_npu.npu_grouped_matmul(
            [rows],
            [self.down],
            scale=[self.down_scale.bfloat16()],
            per_token_scale=[scales],
            group_list=counts,
            group_list_type=1,
            group_type=0,
            split_item=3,
            output_dtype=torch.bfloat16,
        )
        done.wait()
        back = torch_npu.npu_moe_distribute_combine_v2(
            made, experts, info, received, weights, *place, shared_expert_x=shared.bfloat16()
        )
        return back.float()


class DeepSeek(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config, c = config, config
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.attention = nn.ModuleList(LatentAttention(c) for _ in range(c.layers))
        side = torch.npu.Stream()
        self.experts = nn.ModuleList(Experts(c, side) for _ in range(c.layers))
        self.norms = nn.ParameterList(torch.ones(c.dim) for _ in range(2 * c.layers + 1))
        self.head = weight(c.vocab, c.dim)
        steps = torch.arange(0, c.rope, 2) / c.rope
        angles = torch.outer(torch.arange(c.page * c.pages), 1e4**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, positions, slots, table, lengths):
        """Logits of the tokens that follow, one for each sequence."""
        step = Step(positions, slots, table, lengths)
        rotation = self.cos[positions], self.sin[positions]
        total = self.embed(tokens)
        added = torch.zeros_like(total)
        for k, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x, _, total = torch_npu.npu_add_rms_norm(total, added, self.norms[2 * k])
            added = attention(x, rotation, step)
            x, _, total = torch_npu.npu_add_rms_norm(total, added, self.norms[2 * k + 1])
            added = experts(x)
        x, _, _ = torch_npu.npu_add_rms_norm(total, added, self.norms[-1])
        return torch_npu.npu_linear(x, self.head)


@torch.inference_mode()
def main(mode: str) -> None:
    torch.manual_seed(0)
    model = DeepSeek(Config()).npu().eval()
    first = torch.tensor([3, 14, 15]).npu()
    expected = decode(model, first, 12, model.config)
    print("tokens:", expected)
    for chosen in MODES if mode == "all" else [m for m in MODES if m == mode]:
        for attention in model.attention:  # so that nothing of the last run is read again
            for cache in (attention.kv_cache, attention.kr_cache, attention.index_cache):
                cache.fill_(7)
        got = decode(compiled(model, chosen), first, 12, model.config)
        assert got == expected, (got, expected)
        print(chosen, "gives the tokens of eager")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "all")
