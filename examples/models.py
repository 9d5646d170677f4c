"""Plain-torch models for the tests, the benchmarks and the demo: MLP, ResNet, BERT and Llama.

Each model has a frozen config with tiny defaults, a table of named shapes, and a function that
makes its inputs. Nothing here knows torchair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build(model_class: type[nn.Module], config: object, seed: int = 0) -> nn.Module:
    """A model whose weights depend on the seed only, in evaluation mode."""
    torch.manual_seed(seed)
    return model_class(config).eval()


def _noise(*dims: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tokens(vocab: int, *dims: int, seed: int) -> Tensor:
    return torch.randint(vocab, dims, generator=torch.Generator().manual_seed(seed))


# ---- MLP


@dataclass(frozen=True)
class MlpConfig:
    layers: int = 3
    dim: int = 16


MLP = {"tiny": MlpConfig(), "16 layers": MlpConfig(layers=16, dim=64)}


class Mlp(nn.Module):
    """Blocks `x = LayerNorm(x + GELU(Linear(x)))` over the last dim."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(config.dim, config.dim) for _ in range(config.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(config.dim) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(x + F.gelu(linear(x)))
        return x


def mlp_inputs(
    config: MlpConfig, batch: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor]:
    return (_noise(batch, config.dim, seed=seed, dtype=dtype),)


# ---- a chain of linear layers


@dataclass(frozen=True)
class ChainConfig:
    """Widths from the input to the result, with a GELU behind each layer or behind all but the
    last one, and the rows of the input."""

    widths: tuple[int, ...] = (16, 32)
    rows: int = 8
    ends_in_gelu: bool = True


CHAINS = {
    "linear + gelu 4096": ChainConfig((4096, 4096), 4096),
    "linear + gelu 8192": ChainConfig((8192, 8192), 8192),
    "MLP 2048 to 8192 and back": ChainConfig((2048, 8192, 2048), 2048, ends_in_gelu=False),
}


class Chain(nn.Module):
    """Linear layers one after the other."""

    def __init__(self, config: ChainConfig) -> None:
        super().__init__()
        pairs = zip(config.widths, config.widths[1:], strict=False)
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.last = None if config.ends_in_gelu else len(self.linears) - 1

    def forward(self, x: Tensor) -> Tensor:
        for k, linear in enumerate(self.linears):
            x = linear(x)
            x = x if k == self.last else F.gelu(x)
        return x


def chain_inputs(config: ChainConfig) -> tuple[Tensor]:
    return (_noise(config.rows, config.widths[0], seed=0, dtype=torch.float32),)


# ---- ResNet


@dataclass(frozen=True)
class ResNetConfig:
    """`blocks` per stage; every stage after the first halves the image and doubles the width."""

    blocks: tuple[int, ...] = (1, 1)
    width: int = 8
    classes: int = 10
    image: int = 32


RESNET = {
    "tiny": ResNetConfig(),
    "18": ResNetConfig(blocks=(2, 2, 2, 2), width=64, classes=1000, image=224),
}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where dims change."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of residual blocks, average over the image, classifier."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(config.width)
        stages: list[nn.Module] = []
        before = config.width
        for stage, blocks in enumerate(config.blocks):
            after = config.width * 2**stage
            for i in range(blocks):
                stages.append(ResidualBlock(before, after, 2 if stage and not i else 1))
                before = after
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        x = F.adaptive_avg_pool2d(self.stages(x), 1)
        return self.head(torch.flatten(x, 1))


def resnet_inputs(
    config: ResNetConfig,
    batch: int = 2,
    image: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor]:
    side = image or config.image
    return (_noise(batch, 3, side, side, seed=seed, dtype=dtype),)


# ---- attention, shared by the two transformers


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Softmax attention over (batch, heads, length, dim); True in the mask means visible."""
    if kind == "causal":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if kind == "grouped":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


# ---- BERT


@dataclass(frozen=True)
class BertConfig:
    """`attention` is "sdpa" (the fused operator) or "explicit" (matmul, softmax, matmul)."""

    layers: int = 2
    dim: int = 32
    heads: int = 4
    ffn: int = 64
    vocab: int = 99
    positions: int = 64
    attention: str = "sdpa"


BERT = {
    "tiny": BertConfig(),
    "tiny explicit": BertConfig(attention="explicit"),
    "base": BertConfig(12, 768, 12, 3072, 30522, 512),
}


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by residual and layer norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.kind = config.heads, config.attention
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.project = nn.Linear(config.dim, config.dim)
        self.norm1 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, config.ffn)
        self.down = nn.Linear(config.ffn, config.dim)
        self.norm2 = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_split_heads(f(x), self.heads) for f in (self.query, self.key, self.value))
        x = self.norm1(x + self.project(_join_heads(attention(q, k, v, mask, self.kind))))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Token, position and segment embeddings, then encoder layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab, config.dim)
        self.places = nn.Embedding(config.positions, config.dim)
        self.segments = nn.Embedding(2, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.places(places) + self.segments(segments))
        visible = mask[:, None, None, :].to(torch.bool)
        for layer in self.layers:
            x = layer(x, visible)
        return x


def bert_inputs(
    config: BertConfig, batch: int = 2, length: int = 12, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, segments and a mask that hides the last third of every odd row."""
    tokens = _tokens(config.vocab, batch, length, seed=seed)
    segments = (torch.arange(length) >= length // 2).long().expand(batch, length).contiguous()
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1::2, length - length // 3 :] = 0
    return tokens, segments, mask


# ---- Llama


@dataclass(frozen=True)
class LlamaConfig:
    """`batch` and `context` are the dims of the static cache.

    `cache_update` is how new keys get into it: "index_copy" (`index_copy_`) or "index_put" (an
    assignment at a position tensor). `attention` is as in BertConfig, or "grouped": the fused
    operator shares a head of keys between heads of queries, so that none is repeated; or "causal":
    likewise and without a mask, for a prompt that fills the whole cache.
    """

    layers: int = 2
    dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 64
    vocab: int = 99
    context: int = 32
    batch: int = 1
    theta: float = 10000.0
    eps: float = 1e-5
    attention: str = "sdpa"
    cache_update: str = "index_copy"


LLAMA = {
    "tiny": LlamaConfig(),
    "tiny explicit": LlamaConfig(attention="explicit", cache_update="index_put", batch=2),
    "tiny grouped": LlamaConfig(attention="grouped"),
    "4 layers": LlamaConfig(4, 256, 8, 4, 32, 688, 4096, 256, attention="grouped"),
    "100M": LlamaConfig(8, 768, 12, 4, 64, 2048, 32000, 512, attention="grouped"),
    "1B": LlamaConfig(16, 2048, 32, 8, 64, 8192, 128256, 512, attention="grouped"),
    "8B": LlamaConfig(32, 4096, 32, 8, 128, 14336, 128256, 512, attention="grouped"),
}


class RmsNorm(nn.Module):
    """Root mean square norm, computed in float32 at least, as Llama does."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, -1, length, dim)


class DecoderLayer(nn.Module):
    """Grouped-query attention over a static cache, then SwiGLU; norms come first."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm1 = RmsNorm(config.dim, config.eps)
        self.query = nn.Linear(config.dim, wide, bias=False)
        self.key = nn.Linear(config.dim, narrow, bias=False)
        self.value = nn.Linear(config.dim, narrow, bias=False)
        self.project = nn.Linear(wide, config.dim, bias=False)
        self.norm2 = RmsNorm(config.dim, config.eps)
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)
        cache = (config.batch, config.kv_heads, config.context, config.head_dim)
        self.register_buffer("keys", torch.zeros(cache))
        self.register_buffer("values", torch.zeros(cache))

    def _store(self, cache: Tensor, positions: Tensor, new: Tensor) -> None:
        if self.config.cache_update == "index_copy":
            cache.index_copy_(2, positions, new)
        else:
            cache[:, :, positions] = new

    def _attend(
        self, x: Tensor, positions: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        config = self.config
        q = _rotate(_split_heads(self.query(x), config.heads), *rope)
        k = _rotate(_split_heads(self.key(x), config.kv_heads), *rope)
        self._store(self.keys, positions, k)
        self._store(self.values, positions, _split_heads(self.value(x), config.kv_heads))
        keys, values = self.keys, self.values
        if config.attention not in ("grouped", "causal"):
            times = config.heads // config.kv_heads
            keys, values = _repeat_heads(keys, times), _repeat_heads(values, times)
        return _join_heads(attention(q, keys, values, mask, config.attention))

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        x = x + self.project(self._attend(self.norm1(x), positions, mask, rope))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder that keeps its cache in buffers: call it with new tokens and where they stand."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.dim, config.eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        powers = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.context), config.theta**-powers)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("places", torch.arange(config.context))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits of the last token. `tokens` is (batch, length), `positions` is (length,)."""
        mask = self.places <= positions[:, None]
        rope = self.cos[positions], self.sin[positions]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask, rope)
        return self.head(self.norm(x[:, -1]))

    def cache(self) -> list[Tensor]:
        """The buffers that a call updates."""
        return [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]


def llama_inputs(
    config: LlamaConfig, length: int = 1, start: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """New tokens and their positions: a prompt from `start` 0, or one decode step later on."""
    tokens = _tokens(config.vocab, config.batch, length, seed=seed + start)
    return tokens, torch.arange(start, start + length)
