"""Small models whose graphs the original has printed, and a program that compares all of them:
`python tests/tools/golden_models.py [--npu]` prints how many are equal, call by call."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

EXPECTED = Path(__file__).parent / "golden_graphs.json"
"""Lines of the original's dumps on torch 2.13: `model`, then `static` and `dynamic`."""

r = torch.randn


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


class LlamaBlock(nn.Module):
    """Grouped attention with rope, a gated MLP, root mean square norms, all written out."""

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        kv = self.size * kv_heads
        pairs = {
            "q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width),
            "gate": (width, 64), "up": (width, 64), "down": (64, width),
        }  # fmt: skip
        self.linear = nn.ModuleDict({n: nn.Linear(*p, bias=False) for n, p in pairs.items()})
        self.before, self.after = (nn.Parameter(torch.ones(width)) for _ in range(2))

    def norm(self, x, weight):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def apart(self, x, name, heads):
        b, t, _ = x.shape
        return self.linear[name](x).view(b, t, heads, self.size).transpose(1, 2)

    def repeated(self, x):
        b, n, t, size = x.shape
        wide = x[:, :, None].expand(b, n, self.heads // n, t, size)
        return wide.reshape(b, self.heads, t, size)

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        y = self.norm(x, self.before)
        q, k, v = (
            self.apart(y, name, n)
            for name, n in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        cos, sin, half = cos.unsqueeze(1), sin.unsqueeze(1), self.size // 2
        q, k = (z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin for z in (q, k))
        k, v = self.repeated(k), self.repeated(v)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.size**-0.5 + mask
        shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        joined = torch.matmul(shares, v).transpose(1, 2).contiguous().reshape(b, t, -1)
        x = x + self.linear["o"](joined)
        y = self.norm(x, self.after)
        return x + self.linear["down"](F.silu(self.linear["gate"](y)) * self.linear["up"](y))


def conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


Model = tuple[Callable[[], nn.Module], Callable[[], list[Any]]]


def fn(call: Callable[..., Any], *sizes: tuple[int, ...]) -> Model:
    return lambda: Calls(call), lambda: [r(s) for s in sizes]


def rows() -> torch.Tensor:
    return torch.tensor([1, 2, 0])


def zeros() -> torch.Tensor:
    return torch.zeros(5, 2, dtype=torch.long)


cat, t = torch.cat, torch.Tensor.t
MODELS: dict[str, Model] = {
    "cat of transposed": fn(
        lambda x, y: cat([x.transpose(0, 1), y.transpose(0, 1)], 0).view(-1), (3, 4), (3, 2)
    ),
    "cat of transposed, viewed": fn(
        lambda x, y: cat([t(x), t(y)], 1).t().view(-1, 2, 2) * 2, (3, 4), (2, 4)
    ),
    "cat, transposed, reshaped": fn(
        lambda x, y: cat([x, y], 1).transpose(1, 2).reshape(x.shape[0], -1), (2, 3, 4), (2, 2, 4)
    ),
    "cat of channels last": fn(
        lambda x, y: cat([z.permute(0, 3, 1, 2) for z in (x, y)], 1)
        .permute(0, 2, 3, 1).reshape(2, 16, -1) + 1, (2, 4, 4, 3), (2, 4, 4, 3),
    ),
    "llama": (LlamaBlock, lambda: [r(2, 5, 32), r(2, 5, 8), r(2, 5, 8), r(2, 1, 5, 5)]),
    "conv and norm": (conv_norm, lambda: [r(2, 3, 8, 8)]),
    "norm of rows": (lambda: nn.BatchNorm1d(3).eval(), lambda: [r(2, 3)]),
    "layer norm": (lambda: nn.LayerNorm(8), lambda: [r(2, 8)]),
    "two linears": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lambda: [r(3, 4)],
    ),
    "linear of rank three": (lambda: nn.Linear(4, 8), lambda: [r(2, 3, 4)]),
    "embedding": (lambda: nn.Embedding(10, 4), lambda: [torch.tensor([[1, 2], [3, 4]])]),
    "product of sizes": fn(lambda x: x.view(x.shape[0] * x.shape[1], -1) * x.shape[0], (3, 4, 5)),
    "expanded by a size": fn(
        lambda x, y: x[:, None].expand(x.shape[0], y.shape[0], x.shape[1]).reshape(-1, x.shape[1]),
        (3, 4), (6,),
    ),
    "sliced by a size": fn(lambda x, y: x[:, : y.shape[1]] * 2, (3, 8), (2, 5)),
    "sizes as numbers": fn(lambda x: x / x.shape[0] + x.shape[1], (3, 4)),
    "repeat": fn(lambda x: x.repeat(2, 1) + x.shape[0], (3, 4)),
    "softmax": fn(lambda x: F.softmax(x, -1), (3, 4)),
    "split": fn(lambda x: [p * 2 for p in x.split(2, 1)], (3, 6)),
    "split by sizes": fn(lambda x: [p * 2 for p in x.split([2, 4], 1)], (3, 6)),
    "chunks": fn(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (3, 6)),
    "unbind": fn(lambda x: [p * 2 for p in x.unbind(1)], (3, 2)),
    "rows by index": (lambda: Calls(lambda x, i: x[i]), lambda: [r(5, 6), rows()]),
    "gather": (lambda: Calls(lambda x, i: x.gather(1, i)), lambda: [r(5, 6), zeros()]),
    "scatter": (
        lambda: Calls(lambda x, i, v: x.scatter(1, i, v)), lambda: [r(5, 6), zeros(), r(5, 2)],
    ),
    "masked fill": (
        lambda: Calls(lambda x, m: x.masked_fill(m, -1e9)), lambda: [r(5, 6), r(5, 6) > 0],
    ),
    "mean": fn(lambda x: x.mean((1, 2), keepdim=True), (5, 6, 2)),
    "bmm": fn(lambda x, y: torch.bmm(x, y.transpose(1, 2)), (2, 3, 4), (2, 5, 4)),
    "matmul of rank four": fn(
        lambda x, y: torch.matmul(x, y.transpose(-1, -2)), (2, 2, 3, 4), (2, 2, 5, 4)
    ),
    "pooled": fn(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), (2, 3, 8, 8)),
    "where": fn(lambda x, y: torch.where(x > y, x, 0.5), (5, 6), (5, 6)),
    "clamp": fn(lambda x: x.clamp(-1, 1).pow(2).sqrt(), (5, 6)),
    "triangles": fn(lambda x: torch.tril(x) + torch.triu(x, 1), (5, 5)),
    "permuted copy": fn(lambda x: x.permute(2, 0, 1).contiguous().view(4, -1) + 1, (2, 3, 4)),
    "stack": fn(lambda x, y: torch.stack([x, y], 1).sum(1), (2, 3), (2, 3)),
    "casts": fn(lambda x: (x.half() * 2).float().to(torch.int32), (2, 3)),
    "cumsum": fn(lambda x: x.cumsum(-1), (2, 3)),
    "heads": fn(
        lambda x: x.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2) * 2, (2, 5, 32)
    ),
    "heads joined": fn(
        lambda x: (x * 2).transpose(1, 2).reshape(x.shape[0], x.shape[2], 32), (2, 4, 5, 8)
    ),
    "two views alike": fn(
        lambda x: (x.view(6, 4) * 2, x.view(6, 4) + 1, x.view(24) + 1), (2, 3, 4)
    ),
    "average pool": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        lambda: [r(2, 3, 8, 8)],
    ),
    "sort": fn(lambda x: x.sort(-1, descending=True), (3, 4)),
    "argsort": fn(lambda x: x.argsort(-1), (3, 4)),
    "padded": fn(lambda x: F.pad(x, (1, 2)), (3, 4)),
    "addmm with factors": fn(
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (4,), (3, 5), (5, 4)
    ),
    "updated argument": fn(lambda x, y: (x.mul_(2).add_(y), x.sum())[1], (2, 3), (2, 3)),
}  # fmt: skip


def lines(text: str) -> list[str]:
    """Calls of a dump, without where their inputs are."""
    found = [line for line in text.splitlines() if "= ge." in line]
    return [re.sub(r' placement="\w+",', "", line) for line in found]


def dumped(torchair: Any, name: str, dynamic: bool, device: str = "cpu") -> list[str]:
    """Calls of the original graph that a package has for a model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args = (made() for made in MODELS[name])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        config = torchair.CompilerConfig()
        config.debug.graph_dump.type, config.debug.graph_dump.path = "py", folder
        backend = torchair.get_npu_backend(compiler_config=config)
        compiled = torch.compile(model.to(device), backend=backend, dynamic=dynamic)
        try:
            compiled(*(a.to(device) for a in args))
        except Exception:
            if not list(Path(folder).iterdir()):
                raise
        (file,) = Path(folder).glob("dynamo_original_*")
        return lines(file.read_text())


def main(device: str) -> int:
    import torchair

    expected, equal, all_of_them = json.loads(EXPECTED.read_text()), 0, 0
    for name in MODELS:
        for kind, dynamic in (("static", False), ("dynamic", True)):
            same = dumped(torchair, name, dynamic, device) == expected[name][kind]
            all_of_them += 1
            equal += same
            if not same:
                print(f"{name}, {kind}: differs")
    print(f"{equal} of {all_of_them} graphs of {len(MODELS)} models are the original's on {device}")
    return equal != all_of_them


if __name__ == "__main__":
    if "--npu" in sys.argv:
        import torchair.ascend.emulate

        torchair.ascend.emulate.install()
    sys.exit(main("npu" if "--npu" in sys.argv else "cpu"))
