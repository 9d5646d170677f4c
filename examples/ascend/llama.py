"""Llama-style inference: a prompt of any length in one graph, then token by token in another.

    torchair run llama.py max-autotune
    torchair run llama.py reduce-overhead

The prompt graph is compiled for varying lengths, the decode graph for fixed sizes, with a KV cache
that it updates in place. The operators are those of torch_npu.
"""

import sys
import warnings
from dataclasses import dataclass

import torch
import torch_npu
from torch import nn

import torchair


@dataclass
class Config:
    vocab: int = 128
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    longest: int = 32

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, 1e-5)[0]


class Attention(nn.Module):
    """Grouped attention over a cache of shape (batch, heads, longest, head_dim)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        narrow = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, narrow, bias=False)
        self.value = nn.Linear(config.dim, narrow, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        cache = torch.zeros(1, config.kv_heads, config.longest, config.head_dim)
        self.register_buffer("keys", cache.clone())
        self.register_buffer("values", cache.clone())

    def forward(self, x, rotation, positions, mask):
        c, length = self.config, x.shape[1]
        q, k, v = (
            layer(x).view(1, length, -1, c.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (torch_npu.npu_rotary_mul(t, *rotation) for t in (q, k))
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        mixed, _ = torch_npu.npu_fused_infer_attention_score(
            q,
            self.keys,
            self.values,
            atten_mask=mask,
            num_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            scale=c.head_dim**-0.5,
            input_layout="BNSD",
        )
        return self.out(mixed.transpose(1, 2).reshape(1, length, c.dim))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention = Attention(config)
        self.up = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x, rotation, positions, mask):
        x = x + self.attention(self.norm1(x), rotation, positions, mask)
        return x + self.down(torch_npu.npu_swiglu(self.up(self.norm2(x))))


class Llama(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        steps = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.longest), 10000.0**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[None, None])
        self.register_buffer("sin", angles.sin()[None, None])

    def forward(self, tokens, positions):
        """Logits of the token that follows; `positions` are those of `tokens` in the text."""
        x = self.embed(tokens)
        rotation = self.cos[:, :, positions], self.sin[:, :, positions]
        everywhere = torch.arange(self.config.longest, device=tokens.device)
        mask = everywhere[None, None, None, :] > positions[None, None, :, None]  # True is hidden
        for block in self.blocks:
            x = block(x, rotation, positions, mask)
        return self.head(self.norm(x[:, -1]))


def generate(prefill, decode, prompt: torch.Tensor, count: int) -> list[int]:
    """The most likely continuation of a prompt."""
    length = prompt.shape[1]
    logits = prefill(prompt, torch.arange(length, device=prompt.device))
    tokens = []
    for position in range(length, length + count):
        token = logits.argmax(-1, keepdim=True)
        tokens.append(token.item())
        logits = decode(token, torch.tensor([position], device=prompt.device))
    return tokens


def compiled(model: nn.Module, mode: str, dynamic: bool):
    config = torchair.CompilerConfig()
    config.mode = mode
    config.experimental_config.frozen_parameter = True
    with warnings.catch_warnings(action="ignore"):  # it reminds of what frozen parameters promise
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)


@torch.inference_mode()
def main(mode: str) -> None:
    torch.manual_seed(0)
    model = Llama(Config()).npu().eval()
    prefill = compiled(model, mode, dynamic=True)
    decode = compiled(model.forward, mode, dynamic=False)
    for length in (5, 9, 7):
        prompt = torch.randint(model.config.vocab, (1, length)).npu()
        expected = generate(model, model, prompt, 8)
        got = generate(prefill, decode, prompt, 8)
        assert got == expected, (got, expected)
        print(f"prompt of {length}: {got}")
    print(mode, "equals eager")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "max-autotune")
