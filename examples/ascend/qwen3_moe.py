"""Decoding with a Qwen3-style mixture of experts, written with operators of torch_npu: a paged
cache, the router on a stream of its own, experts quantised to int8.

    torchair run qwen3_moe.py all
    torchair run qwen3_moe.py max-autotune

The modes are eager, max-autotune, reduce-overhead and npugraph_ex. All give the same tokens.
"""

import sys
import warnings
from dataclasses import dataclass

import torch
import torch_npu
from torch import nn

import torchair

MODES = ("max-autotune", "reduce-overhead", "npugraph_ex")


@dataclass
class Config:
    vocab: int = 96
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    chosen: int = 2
    expert_dim: int = 32
    page: int = 8
    pages: int = 12  # of the whole cache


def weight(*dims: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*dims) * dims[-1] ** -0.5, requires_grad=False)


def int8_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of experts [experts, in, out] as int8, and a scale for each column."""
    scale = x.abs().amax(-2) / 127
    return (x / scale.unsqueeze(-2)).round().to(torch.int8), scale


class PagedAttention(nn.Module):
    """Grouped attention with norms of queries and keys, over pages [pages, page, heads, head]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, c = config, config
        self.qkv = weight((c.heads + 2 * c.kv_heads) * c.head_dim, c.dim)
        self.out = weight(c.dim, c.heads * c.head_dim)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(c.head_dim)) for _ in range(2))
        pages = torch.zeros(c.pages, c.page, c.kv_heads, c.head_dim)
        self.register_buffer("keys", pages.clone())
        self.register_buffer("values", pages.clone())

    def forward(self, x, rotation, step):
        c = self.config
        qkv = torch_npu.npu_linear(x, self.qkv).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q, k = torch_npu.npu_rms_norm(q, self.q_norm)[0], torch_npu.npu_rms_norm(k, self.k_norm)[0]
        q, k = (torch_npu.npu_rotary_mul(t.unsqueeze(1), *rotation).squeeze(1) for t in (q, k))
        torch_npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), self.keys, self.values, step.slots, cache_mode="Norm"
        )
        mixed = torch.empty_like(q)
        torch_npu._npu_paged_attention(
            q,
            self.keys,
            self.values,
            c.kv_heads,
            c.heads,
            c.head_dim**-0.5,
            step.table,
            step.lengths,
            mixed,
        )
        return torch_npu.npu_linear(mixed.flatten(1), self.out)


class Experts(nn.Module):
    """The chosen experts of each token, in int8; their router runs beside the quantisation."""

    def __init__(self, config: Config, side: torch.npu.Stream):
        super().__init__()
        self.config, c, self.side = config, config, side
        self.router = weight(c.experts, c.dim)
        up = int8_columns(torch.randn(c.experts, c.dim, 2 * c.expert_dim) * c.dim**-0.5)
        down = int8_columns(torch.randn(c.experts, c.expert_dim, c.dim) * c.expert_dim**-0.5)
        for name, t in zip(("up", "up_scale", "down", "down_scale"), up + down, strict=True):
            self.register_buffer(name, t)

    def forward(self, x):
        c, tokens, current = self.config, x.shape[0], torch.npu.current_stream()
        self.side.wait_stream(current)
        with torch.npu.stream(self.side):
            logits = torch_npu.npu_linear(x, self.router)
            weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
                logits, k=c.chosen, renorm=1
            )
        rows, scales = torch_npu.npu_dynamic_quant(x)
        current.wait_stream(self.side)
        expanded, pairs, counts, scales = torch_npu.npu_moe_init_routing_v2(
            rows,
            experts,
            scale=scales,
            expert_num=c.experts,
            row_idx_type=1,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
        )
        hidden, scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            expanded, [self.up], [self.up_scale], scales, counts, group_list_type=1
        )
        return torch_npu.npu_grouped_matmul_finalize_routing(
            hidden,
            self.down,
            counts,
            scale=self.down_scale,
            pertoken_scale=scales,
            logit=weights.flatten()[pairs],
            row_index=pairs // c.chosen,
            output_bs=tokens,
        )


@dataclass
class Step:
    """Where the tokens of a step stand: a slot of the cache for each, the pages of each sequence,
    and how long each is with its new token."""

    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


class Qwen3Moe(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config, c = config, config
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.attention = nn.ModuleList(PagedAttention(c) for _ in range(c.layers))
        side = torch.npu.Stream()
        self.experts = nn.ModuleList(Experts(c, side) for _ in range(c.layers))
        self.norms = nn.ParameterList(torch.ones(c.dim) for _ in range(2 * c.layers + 1))
        self.head = weight(c.vocab, c.dim)
        steps = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.outer(torch.arange(c.page * c.pages), 1e6**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, positions, slots, table, lengths):
        """Logits of the tokens that follow, one for each sequence."""
        step = Step(positions, slots, table, lengths)
        rotation = [t[positions][:, None, None] for t in (self.cos, self.sin)]
        total = self.embed(tokens)
        added = torch.zeros_like(total)
        for k, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x, _, total = torch_npu.npu_add_rms_norm(total, added, self.norms[2 * k])
            added = attention(x, rotation, step)
            x, _, total = torch_npu.npu_add_rms_norm(total, added, self.norms[2 * k + 1])
            added = experts(x)
        x, _, _ = torch_npu.npu_add_rms_norm(total, added, self.norms[-1])
        return torch_npu.npu_linear(x, self.head)


def decode(step, first: torch.Tensor, count: int, config: Config) -> list[list[int]]:
    """The most likely continuations of sequences that begin with one token each."""
    batch, device = first.shape[0], first.device
    room = config.pages // batch
    table = torch.arange(batch * room, dtype=torch.int32, device=device).view(batch, room)
    table = table.flip(1)  # pages need not be in order
    tokens, found = first, []
    for n in range(count):
        positions = torch.full((batch,), n, device=device)
        page = table.gather(1, (positions // config.page)[:, None].long())[:, 0]
        slots = (page * config.page + positions % config.page).int()
        lengths = torch.full((batch,), n + 1, dtype=torch.int32, device=device)
        logits = step(tokens, positions, slots, table, lengths)
        tokens = logits.argmax(-1)
        found.append(tokens.tolist())
    return found


def compiled(model: nn.Module, mode: str):
    """The model in a mode; one graph serves all steps."""
    torch.compiler.reset()
    if mode == "npugraph_ex":
        return torch.compile(model, backend="npugraph_ex", fullgraph=True, dynamic=False)
    config = torchair.CompilerConfig()
    config.mode = mode
    with warnings.catch_warnings(action="ignore"):  # of the mode's successor
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


@torch.inference_mode()
def main(mode: str) -> None:
    torch.manual_seed(0)
    model = Qwen3Moe(Config()).npu().eval()
    first = torch.tensor([3, 14, 15]).npu()
    expected = decode(model, first, 12, model.config)
    print("tokens:", expected)
    for chosen in MODES if mode == "all" else [m for m in MODES if m == mode]:
        for attention in model.attention:  # so that nothing of the last run is read again
            for cache in (attention.keys, attention.values):
                cache.fill_(7)
        got = decode(compiled(model, chosen), first, 12, model.config)
        assert got == expected, (got, expected)
        print(chosen, "gives the tokens of eager")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "all")
