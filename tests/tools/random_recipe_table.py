"""The recipes of `random_recipes.py`, by what they are for."""

from __future__ import annotations

from typing import Any

from torchair.ops.streams import DEFAULT_STREAM

RMS = "r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3); "
LAYER = "m = x.mean(-1, keepdim=True); c = x - m; u = c.pow(2).mean(-1, keepdim=True); "
TURNED = "t = torch.cat((-x[..., 8:], x[..., :8]), -1); "
HALVES = "a = x.chunk(2, -1)[0]; c = x.chunk(2, -1)[1]; "
PERHAPS_STATIC: dict[str, Any] = {"dynamic": False, "automatic": True, "frozen": False}
NOT_NATIVE: dict[str, Any] = {"native": False, "mode": "max-autotune"}
FROZEN: dict[str, Any] = {"frozen": True, "backward": False}
INTEGERS: dict[str, Any] = {"backward": False}
DEFAULT = ", ".join(map(repr, DEFAULT_STREAM))
STREAM = "with torchair.scope.npu_stream_switch('1'): "
WAIT = "p = x * 2; torchair.ops.wait([p]); "
SHIFTED = "a = (x.to(torch.int16) + 128).to(torch.uint8); y = torch._int_mm(a, w); "

TABLE: tuple[Any, ...] = (
    # norms
    ("x=f[A,B,64] w=f[64]", RMS + "y = w * (x * r)"),
    (
        "x=h[A,64] w=h[64]",
        "g = x.float(); r = torch.rsqrt((g * g).mean(-1, keepdim=True) + 1e-3); "
        "y = w * (g * r).to(w.dtype)",
    ),
    (
        "x=h[A,64] w=f[64]",
        "g = x.float(); r = torch.rsqrt((g * g).mean(-1, keepdim=True) + 1e-3); "
        "y = (g * r).to(bf16) * w.to(bf16)",
    ),
    ("x=f[A,64] z=f[A,64] w=f[64]", "x = x + z; " + RMS + "y = w * (x * r); return y, x"),
    ("x=f[A,64] z=f[64] w=f[64]", "x = x + z; " + RMS + "y = w * (x * r)"),
    ("x=s[A,64] z=s[64,64] w=s[64]", "x = x @ z + x; " + RMS + "y = w * (x * r)"),
    ("x=s[A,64] z=s[A,64]", "x = x + z; w = x.sum(0); " + RMS + "y = w * (x * r)"),
    ("x=f[A,64] w=f[64] b=f[64]", LAYER + "y = c / torch.sqrt(u + 1e-3) * w + b"),
    (
        "x=f[A,64] w=f[64] b=f[64]",
        "m = x.mean(-1, keepdim=True); u = x.var(-1, correction=0, "
        "keepdim=True); y = (x - m) * torch.rsqrt(u + 1e-3) * w + b",
    ),
    ("x=f[A,B] w=f[B] b=f[B]", LAYER + "y = c / torch.sqrt(u + 0.1) * w + b", {"dynamic": True}),
    (
        "x=f[A,64] w=f[64] b=f[64]",
        "u = x.var(-1, correction=1, keepdim=True); "
        "y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(u + 1e-3) * w + b",
    ),
    (
        "x=f[A,64] w=f[64] b=f[64]",
        "u = x.var(0, correction=0, keepdim=True); "
        "y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(u + 1e-3) * w + b",
    ),
    (
        "x=f[4,4] w=f[4] b=f[4]",
        "m = x.mean(0, keepdim=True); u = x.var(-1, correction=0, "
        "keepdim=True); y = (x - m) / torch.sqrt(u + 0.1) * w + b",
    ),
    (
        "x=f[A,64] w=f[64]",
        "m = x.mean(-1, keepdim=True); y = (x - m) / torch.sqrt(m.abs() + 0.1) * w + w",
    ),
    ("x=f[A,8] w=f[8]", "y = w * (x * torch.rsqrt(x.abs().pow(2).mean(-1, keepdim=True) + 0.1))"),
    ("x=f[8,8] w=f[8]", RMS + "y = w[:, None] * (x * r)"),
    ("x=f[A,8] w=f[8]", RMS + "y = w * (x * r); return y, r"),
    (
        "x=s[A,8] w=f[8]",
        RMS + "y = w.to(f64) * (x.to(f64) * torch.rsqrt(x.to(f64).pow(2).mean(-1, "
        "keepdim=True) + 1e-3))",
    ),
    ("x=f[A,64] w=f[64]", LAYER + "y = w * (c * torch.rsqrt(u + 1e-3)) + w"),
    # activations
    ("x=f[A,33]", "y = 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3.0))))"),
    ("x=f[A,33]", "y = 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))"),
    ("x=f[A,33]", "y = x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))"),
    ("x=f[A,33]", "y = x / 2 * (torch.erf(x * 0.7071067811865475) + 1)", NOT_NATIVE),
    ("x=f[A,33]", "y = 0.5 * x * (1 + torch.tanh(x))"),
    ("x=f[A,33]", "y = 0.4 * x * (1 + torch.tanh(x))"),
    ("x=f[A,33] w=f[33]", "y = x * w * (1 + torch.tanh(x))"),
    ("x=f[A,33]", "y = x * torch.sigmoid(1.702 * x)"),
    ("x=f[A,33] w=f[33]", "y = w * torch.sigmoid(x)"),
    ("x=f[A,B,64]", HALVES + "y = F.silu(a) * c"),
    ("x=f[A,64]", "a = x[..., :32]; y = x[..., 32:] * (a * torch.sigmoid(a))"),
    ("x=f[A,64]", HALVES + "y = F.silu(c) * a"),
    ("x=f[A,64]", HALVES + "y = (a * torch.sigmoid(1.702 * a)) * c"),
    ("x=f[A,4,B,16] a=f[B,16] c=f[B,16]", TURNED + "y = x * a + t * c"),
    (
        "x=f[A,4,B,16] a=f[B,16] c=f[B,16]",
        "p = x.chunk(2, -1)[0]; q = x.chunk(2, -1)[1]; "
        "t = torch.cat((-q, p), -1); y = t * a + c * x",
    ),
    (
        "x=f[8,16] a=f[16]",
        "z = x + 1; t = torch.cat((-z[..., 8:], z[..., :8]), -1); y = a * x + t * a",
    ),
    ("x=f[B,16] a=f[A,B,16] c=f[A,B,16]", TURNED + "y = x * a + t * c"),
    ("x=h[B,16] a=s[B,16] c=s[B,16]", TURNED + "y = x * a + t * c"),
    # attention
    ("q=f[A,4,40,16] k=f[A,4,50,16] v=f[A,4,50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ v"),
    (
        "q=f[A,4,40,16] k=f[A,4,50,16] v=f[A,4,50,16] m=f[A,1,40,50]",
        "y = F.softmax(q @ k.mT * 0.25 + m, -1, dtype=torch.float32).to(v.dtype) @ v",
    ),
    ("q=f[6,40,16] k=f[6,50,16] v=f[6,50,8]", "y = (q * 0.3 @ k.mT).softmax(-1) @ v"),
    (
        "q=f[6,40,16] k=f[6,50,16] v=f[6,50,8] m=f[6,40,50]",
        "y = torch.bmm(torch.baddbmm(m, q, k.transpose(1, 2)).softmax(-1), v)",
    ),
    (
        "q=f[A,6,40,16] k=f[A,2,50,16] v=f[A,2,50,16]",
        "k = k[:, :, None].expand(-1, 2, 3, 50, 16).reshape(-1, 6, 50, 16); "
        "v = v[:, :, None].expand(-1, 2, 3, 50, 16).reshape(-1, 6, 50, 16); "
        "y = torch.softmax(q @ k.mT / 4, -1) @ v",
    ),
    (
        "q=f[A,6,40,16] k=f[A,2,50,16] v=f[A,6,50,16]",
        "k = k[:, :, None].expand(-1, 2, 3, 50, 16).reshape(-1, 6, 50, 16); "
        "y = torch.softmax(q @ k.mT / 4, -1) @ v",
    ),
    ("x=f[A,8]", "x = x[None]; y = torch.softmax(x @ x.mT / 4, -1) @ x"),
    ("x=f[2,40,8] w=f[8]", "y = torch.bmm(F.softmax(x + w, -1), x.mT)"),
    ("x=f[2,40,8]", "y = torch.bmm(F.softmax(x, -1), x.mT)"),
    ("x=f[2,40,8]", "y = torch.bmm(F.softmax(torch.bmm(x, x.mT), 1), x)"),
    (
        "x=f[2,40,8] w=f[2]",
        "y = torch.bmm(F.softmax(torch.bmm(x[:1], x[:1].mT) + w[:, None, None], -1), x)",
    ),
    ("q=d[2,4,40,16] k=d[2,4,50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k"),
    ("q=f[1,2,40,600] k=f[1,2,40,600]", "y = torch.softmax(q @ k.mT / 30, -1) @ k"),
    ("q=f[A,B,40,16] k=f[A,B,50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k", {"dynamic": True}),
    ("q=f[40,16] k=f[50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k"),
    ("q=f[A,4,40,16] k=f[A,4,50,16]", "y = F.scaled_dot_product_attention(q, k, k)"),
    (
        "q=f[A,4,40,16] k=f[A,4,50,16] m=f[40,50]",
        "y = F.scaled_dot_product_attention(q, k, k, m, scale=0.3)",
    ),
    (
        "q=f[A,4,40,16] k=f[A,2,40,16]",
        "y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)",
    ),
    # products
    ("x=f[A,4,64] w=f[A,64,16]", "y = torch.bmm(x, w).transpose(0, 1)"),
    ("x=f[4,A,64] w=f[A,64,16]", "y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)", NOT_NATIVE),
    (
        "x=f[4,2,64] w=f[2,64,16]",
        "y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)",
        {"mode": "reduce-overhead", "dynamic": False},
    ),
    (
        "x=f[4,2,64] w=f[2,64,16]",
        "y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1).flatten(1); y = y @ y.mT / 64",
        {"mode": "reduce-overhead", "dynamic": False},
    ),
    ("x=f[2,4,64] w=f[2,16,64]", "y = torch.bmm(x, w.mT).transpose(0, 1)", NOT_NATIVE),
    ("x=d[2,4,64] w=d[2,64,16]", "y = torch.bmm(x, w).transpose(0, 1)", NOT_NATIVE),
    ("x=f[A,8] w=f[8,16]", "y = (x.t().t() @ w).t() * 2"),
    ("x=f[8,A] w=f[16,8]", "y = x.t() @ w.t()"),
    ("x=f[A,8,4] w=f[A,16,8]", "y = torch.bmm(x.mT, w.mT)"),
    ("x=f[8,4,A] w=f[A,8,16]", "y = torch.bmm(x.permute(2, 1, 0), w)"),
    ("x=f[A,8] w=f[8,16] b=f[16]", "y = x @ w + b"),
    ("x=f[A,8] w=f[8,16] b=f[16]", "p = x @ w; y = p + b; return y, p"),
    ("x=f[4,8] w=f[8,16] b=f[4,1]", "y = x @ w + b"),
    ("x=f[A,8] w=f[8,16] b=f[1]", "y = x @ w + b"),
    ("x=h[A,8] w=h[8,16] b=s[16]", "y = x @ w + b"),
    # leftovers
    ("x=f[A,8]", "y = (x * 1).reshape(-1).reshape(8, -1).permute(0, 1) + 1"),
    ("x=f[A,8]", "y = x.permute(1, 0).permute(0, 1).permute(1, 0) * torch.ones(8)"),
    ("x=f[A,8]", "y = x.clone().add_(1)"),
    ("x=f[A,8]", "y = x.clone(); return y, x"),
    ("x=f[9,8] p=f[3,8]", "x.copy_(torch.cat([x[:2], p, x[5:]])); y = x + 1"),
    ("x=f[9,8] p=f[3,8]", "y = torch.cat([x[:2], p, x[5:]])"),
    ("x=f[9,8] p=f[3,8]", "y = torch.cat([x[:2], p, x[6:]])"),
    ("x=f[9,8] p=f[3,8]", "y = torch.cat([x[1:2], p, x[5:]])"),
    ("x=f[A,8] p=f[A,8]", "y = torch.cat([x[:1], p, x[1:]])"),
    # quantised weights
    ("x=f[A,32] w=n[16,32] u=f[16,1]", "y = F.linear(x, w.to(u.dtype) * u)", FROZEN),
    (
        "x=f[A,32] w=n[16,32] u=f[16,1] o=f[16,1]",
        "y = F.linear(x, (w.to(u.dtype) - o) * u)",
        FROZEN,
    ),
    (
        "x=f[A,32] w=n[16,4,8] u=f[16,4,1]",
        "y = F.linear(x, (w.to(u.dtype) * u).reshape(16, 32))",
        FROZEN,
    ),
    ("x=f[A,32] w=n[16,32] u=f[1,32]", "y = F.linear(x, w.to(u.dtype) * u)", FROZEN),
    ("x=f[A,32] w=n[16,32] u=f[16]", "y = F.linear(x, w.to(u.dtype)) * u", FROZEN),
    ("x=s[A,32] w=n[16,32] u=s[4,1]", "y = F.linear(x, w.float()) * u[:1]", FROZEN),
    ("x=s[A,32] w=n[16,32] u=d[16]", "y = F.linear(x, w.float()) * u", FROZEN),
    # fusion
    ("x=s[A,33] z=s[33]", "y = x.sum(0).tanh() + z; y = y * 2 + x.amax(0)"),
    ("x=s[2,70000]", "y = (x * 2).sum(-1)"),
    ("x=s[4,8] w=s[8,8]", "y = (x @ w).softmax(-1)"),
    ("x=s[4,8] w=s[8,8]", "y = (x @ w).tanh().sum(-1)"),
    ("x=s[4,8] w=s[8,8] b=s[3,4,8]", "y = (x @ w) + b"),
    ("x=s[4,8] w=s[8,8]", "p = x @ w; y = p.t() * 2 + 1"),
    ("x=s[4,8] w=s[8,8]", "p = x @ w; y = p.sum(0) * p"),
    ("x=s[A,8]", "y = (x + 1).softmax(-1) + (x + 1).softmax(0)"),
    ("x=s[A,8]", "p = x.tanh(); q = p.sum(0); y = q * p + p.sum(1, keepdim=True)"),
    ("x=s[A,8]", "p = x.tanh(); q = p.cumsum(0); y = p * q"),
    ("x=s[A,8]", "y = ((x.tanh() + 1).nonzero() + 1) * 2"),
    ("x=z[A,8]", "y = (x * 2).abs() + 1"),
    ("x=s[A,8]", "y = " + " + ".join(f"torch.sin(x * {k})" for k in range(1, 30))),
    ("x=s[A,8] j=i[3]", "y = (x * 2).index_add(0, j.clamp(0, 1), x[:2].sum(0).expand(3, 8)) + 1"),
    ("x=s[2,4,16,16]", "y = F.max_pool2d(x, 2) * 2 + 1"),
    ("x=s[2,4,16,16]", "p = F.max_pool2d(x, 2, return_indices=True)[1]; y = p + 1"),
    ("x=s[2,4,16,16]", "y = F.avg_pool2d(x.tanh(), 2).relu()"),
    ("x=s[2,4,9,9] w=s[8,4,3,3] b=s[8]", "y = F.conv2d(x, w, b).relu() * 2", FROZEN),
    (
        "x=s[2,4,9,9] w=s[8,4,3,3] b=s[8]",
        "y = F.batch_norm(F.conv2d(x, w), b, b.abs() + 1).relu()",
        FROZEN,
    ),
    (
        "x=s[2,4,9,9] w=s[8,4,3,3] b=s[8]",
        "p = F.conv2d(x, w, b); y = F.batch_norm(p, b, b.abs() + 1, b, b)",
        FROZEN,
    ),
    ("x=s[2,4,9,9] w=s[8,4,3,3]", "y = F.conv2d(x, w).relu()", {"frozen": False}),
    ("x=s[2,4,40,16] k=s[2,4,40,16]", "y = F.scaled_dot_product_attention(x, k, k).tanh() * 2"),
    ("x=s[1,1,8,400] k=s[1,1,40,400]", "y = F.scaled_dot_product_attention(x, k, k) + 1"),
    ("x=i[A,8] z=i[8]", "y = x // (z.abs() + 1) + 1"),
    ("x=i[A,8] z=i[8]", "y = x.pow(z.abs()) + x.pow(2)"),
    ("x=s[A,8] i=i[A]", "y = F.cross_entropy(x, i % 8)"),
    ("x=s[A,8] z=s[A,8]", "y = F.cross_entropy(x, z.softmax(-1)) + F.nll_loss(x, x.argmax(-1))"),
    ("x=s[A,8]", "y = F.pad(x[None], (2, 1), mode='reflect') + 1"),
    ("x=s[A,8]", "y = F.pad(x[None], (2, 1), mode='circular').tanh()"),
    ("x=s[2,3,8,8]", "y = F.interpolate(x, scale_factor=2.0, mode='nearest-exact') + 1"),
    ("x=s[2,3,8,8]", "y = F.interpolate(x, size=(5, 11), mode='nearest') + 1"),
    ("x=s[2,3,8,8] w=s[3] b=s[3]", "y = F.batch_norm(x, w, w.abs() + 1, w, b) * 2"),
    ("x=s[2,3,8,8] w=s[3] b=s[3]", "y = F.batch_norm(x, None, None, w, b, training=True) * 2"),
    ("x=s[6,3] w=s[3] b=s[3]", "y = F.batch_norm(x, None, None, w, b, training=True) * 2"),
    ("x=s[9,8] p=s[1,8]", "x[2:5] = p; y = x + 1"),
    ("x=s[9,8] p=s[8]", "x[torch.tensor([1, 2])] = p; y = x * 2"),
    ("x=s[9,8] p=s[3,8]", "x[2:5] = p; y = x.roll(5) + 1"),
    ("x=s[9,8] i=i[3] p=s[3,8]", "y = x.index_put((i.abs() % 9,), p, accumulate=True) + 1"),
    ("x=s[9,8] i=i[3,8] p=s[3,8]", "y = x.scatter_add(0, i.abs() % 9, p) + 1"),
    ("x=s[9,8] i=i[3,8] p=s[3,8]", "y = x.scatter(0, i.abs() % 9, 2.0).tanh() + 1"),
    ("x=s[] p=s[]", "y = x.scatter(0, torch.tensor(0), p) + 1"),
    ("x=s[A,8]", "y = x.var(0) * x.std(1, keepdim=True)"),
    (
        "x=s[A,B,8] w=s[8]",
        "y = F.layer_norm(x, (8,), w, w, 0.1) * 2",
        {"backward": True, "frozen": False},
    ),
    ("x=s[A,8] w=s[8]", "y = F.rms_norm(x, (8,), w, 0.1) * 2", {"backward": True, "frozen": False}),
    (
        "x=s[A,16] c=s[A,16] t=s[A,16]",
        "t = torch.cat((-x[..., 8:], x[..., :8]), -1); y = x * c + t * c.cos()",
        {"backward": True, "frozen": False},
    ),
    (
        "x=s[A,8]",
        "with torchair.scope.npu_stream_switch('1'): g = torch.sigmoid(1.702 * x); y = x * g",
    ),
    (
        "x=s[A,8]",
        "with torchair.scope.npu_stream_switch('1'): g = (x * 2).tanh(); p = x + 1; "
        "q = p * 2; with torchair.scope.npu_stream_switch('2'): r = q.sin(); y = (q + g) * r + p",
    ),
    # forms that rules and patterns look at and leave alone
    ("x=f[A,B,4,8] y=f[A,B,4,8]", "y = x.permute(0, 1, 3, 2).permute(0, 1, 2, 3) @ y"),
    ("x=f[A,64]", "a = x.chunk(2, -1)[0]; y = (a * torch.sigmoid(1.5 * a)) * x.chunk(2, -1)[1]"),
    ("x=h[A,64]", "g = x.float(); y = (g * torch.sigmoid(1.702 * g)) * x.float().cos()"),
    ("x=s[A,B,16] a=d[B,16] c=d[B,16]", TURNED + "y = x * a + t * c"),
    ("q=f[2,3,4,40,16] k=f[2,3,4,50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k"),
    (
        "q=f[A,2,40,16] k=f[A,2,50,16]",
        "q = q.flatten(0, 1); k = k.flatten(0, 1); "
        "y = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 4, -1), k)",
        {"dynamic": True},
    ),
    (
        "q=f[A,40,16] k=f[A,50,16]",
        "y = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 4, -1), k)",
        {"dynamic": True},
    ),
    ("q=f[A,4,B,16] k=f[A,4,40,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k", {"dynamic": True}),
    (
        "q=f[A,4,40,16] k=f[A,1,50,16] v=f[A,2,50,16]",
        "k = k.expand(-1, 4, 50, 16); v = v[:, :, None].expand(-1, 2, 2, 50, 16).flatten(1, 2); "
        "y = torch.softmax(q @ k.mT / 4, -1) @ v",
    ),
    (
        "q=f[A,4,40,16] k=f[A,2,50,16] v=f[A,1,50,16]",
        "k = k[:, :, None].expand(-1, 2, 2, 50, 16).reshape(-1, 4, 50, 16); "
        "v = v[:, :, None].expand(-1, 1, 4, 50, 16).reshape(-1, 4, 50, 16); "
        "y = torch.softmax(q @ k.mT / 4, -1) @ v",
    ),
    ("x=s[A,64] w=d[64]", "x = x.to(f64); " + RMS + "y = (x * r).to(f32) * w"),
    ("x=h[A,64] w=s[64]", RMS + "y = w * (x * r)"),
    (
        "x=s[A,64] z=s[64,64] w=s[64]",
        "p = x @ z; x = p + x; " + RMS + "y = w * (x * r)",
        {"mode": "max-autotune"},
    ),
    ("x=f[9,8] p=f[3,8]", "x.copy_(torch.cat([x[:2], p, x[5:]])); y = x + 1", {"dynamic": True}),
    ("x=f[A,8] p=f[3,8]", "x.copy_(torch.cat([x[:1], p, x[4:]])[:x.shape[0]]); y = x + 1"),
    (
        "x=f[A,8] p=f[1,8]",
        "x.copy_(torch.cat([x[:x.shape[0] - 1], p, x[x.shape[0]:]])); y = x + 1",
        {"dynamic": True},
    ),
    # quantised products
    ("x=s[A,32] w=n[16,32] u=i[16,1]", "y = F.linear(x, (w.to(torch.int64) * u).float())", FROZEN),
    (
        "x=s[A,32] w=n[16,32] u=s[16,1] o=s[16]",
        "y = F.linear(x, (w.float() - o[:, None]) * u)",
        FROZEN,
    ),
    (
        "x=s[A,32] w=n[16,4,8] u=s[64]",
        "y = F.linear(x, (w.float() * u.reshape(16, 4, 1)).reshape(16, 32))",
        FROZEN,
    ),
    ("x=h[A,32] w=n[16,32] u=s[16]", "y = F.linear(x, w.to(bf16).to(x.dtype)).float() * u", FROZEN),
    ("x=h[300,32] w=n[16,32] u=h[16,1]", "y = F.linear(x, w.to(u.dtype) * u)", FROZEN),
    ("x=n[8,32] w=n[32,16]", "y = torch._int_mm(x, w) * 2"),
    ("x=n[32,32] w=n[16,32] u=s[16]", "y = torch._int_mm(x, w.t()).float() * u", FROZEN),
    # fusion
    ("x=s[A,8] m=b[A,8]", "x[m] = 2.0; y = x + 1"),
    ("x=s[A,8] m=b[A,8]", "y = (x[m] * 2).tanh() + 1"),
    ("x=s[A,8]", "p = x.tanh(); n = p.nonzero(); y = (n.float() * 2).sum(0)"),
    ("x=s[A,8]", "y = " + " + ".join(f"torch.sin(x * {k})" for k in range(1, 60))),
    (
        "x=s[A,8] w=s[8]",
        "y = F.layer_norm(x, (8,), w, w, 0.1) * 2",
        {"numerics": "strict", "backward": True, "frozen": False},
    ),
    (
        "x=s[A,8] w=s[8]",
        "y = F.rms_norm(x, (8,), w, 0.1).tanh() * 2",
        {"numerics": "strict", "backward": True, "frozen": False},
    ),
    (
        "x=h[A,8] w=h[8]",
        "y = (x * w + 1).tanh() * w + x.sum(-1, keepdim=True)",
        {"numerics": "strict"},
    ),
    (
        "x=s[2,3,8,8] w=s[3] b=s[3]",
        "y = F.batch_norm(x, w, w.abs() + 1, w, b).tanh()",
        {"backward": True, "frozen": False},
    ),
    ("x=s[2,4,9,9] w=s[8,4,3,3]", "y = F.conv2d(x, w).tanh()", {"backward": True, "frozen": False}),
    (
        "x=h[2,16,9,9] w=h[8,16,3,3]",
        "y = F.conv2d(x, w).tanh()",
        {"frozen": False, "backward": False},
    ),
    (
        "x=s[2,3,8,8]",
        "y = F.interpolate(x, size=(5, 11), mode='bilinear') + F.interpolate(x, "
        "size=(5, 11), mode='bilinear', align_corners=True)",
    ),
    ("x=s[2,3,8,8] i=i[2,8,8]", "y = F.nll_loss(x, i % 3) + F.cross_entropy(x, i % 3)"),
    ("x=i[A,8]", "y = x.float().mean(0) + x.sum(1, keepdim=True)"),
    ("x=s[A,8] z=s[8]", "y = torch.ops.aten.mse_loss(x, z) * 2"),
    ("x=s[A,8]", "y = torch.cat([x.flatten(), x[0]]) + torch.cat([x.flatten(), torch.zeros(8)])"),
    ("x=s[A,8] p=s[8]", "x.copy_(p); y = x + 1"),
    ("x=s[A,8] p=s[1]", "x[0] = p; x[1, 1:] = p; y = x * 2"),
    (
        "x=s[A,8] c=s[A,8]",
        "with torchair.scope.npu_stream_switch('1'): g = (x * 2).tanh(); "
        "p = g + c; y = p * g; return y, p",
    ),
    (
        "x=s[A,8] c=s[A,8]",
        "p = (x + c).tanh(); with torchair.scope.npu_stream_switch('1'): "
        "g = p * 2; q = p * 3 + c; y = (q * 2).sin() + g; return y, q",
    ),
    ("x=s[A,8] c=s[A,8]", "y = ((x + c).tanh() + (c + x)).sin() + (x + c)", {"custom": True}),
    # scopes, caches and other operators of the `npu` library
    (
        "x=s[A,8]",
        "with torchair.scope.limit_core_num(1, 2): g = (x * 2).tanh(); y = g + x",
        {"mode": "reduce-overhead"},
    ),
    (
        "x=s[A,8]",
        "with torchair.scope.npu_stream_switch('1'): g = (x * 2).tanh(); y = g + x",
        {"mode": "reduce-overhead"},
    ),
    (
        "x=s[12,4] i=i[2] u=s[2,2,4]",
        "torch.ops.npu.scatter_update_(x.view(2, 6, 4), i.abs() % 4, u, 1); y = x.sum()",
    ),
    (
        "x=s[12,4] i=i[2] u=s[2,2,4]",
        "torch.ops.npu.scatter_update_(x.view(2, 6, 4), i.abs() % 4, u, 1); y = u * 2",
    ),
    ("x=s[2,3,6,4] i=i[2] u=s[2,3,1,4]", "y = torch.ops.npu.scatter_update(x, i.abs() % 6, u, -2)"),
    ("x=s[6,4] i=i[2,1] u=s[2,4]", "y = torch.ops.npu.npu_scatter_nd_update(x, i.abs() % 6, u)"),
    (
        "x=s[A,8] w=s[8,8]",
        "torch.ops.npu.npu_prefetch(w, None, 16, 0); p = x * 2; "
        "torch.ops.npu.npu_prefetch(w, p, 16, 0); y = p @ w",
        {"backward": False},
    ),
    (
        "x=s[A,8] w=s[8,8]",
        "torch.ops.npu.npu_prefetch(w, x, 16, 0); p = x * 2; "
        "torch.ops.npu.npu_prefetch(w, p, 16, 0); y = p @ w",
        {"backward": False, "mode": "max-autotune"},
    ),
    ("x=s[A,8]", "x.copy_(x.clone()); y = x + 1", {"mode": "npugraph_ex", "numerics": "default"}),
    (
        "q=s[A,6,16] k=s[A,9,16] m=b[6,9]",
        "y = torch.ops.npu.npu_prompt_flash_attention(q, k, k, "
        "atten_mask=m, num_heads=2, input_layout='BSH', scale_value=0.3, pre_tokens=3, "
        "next_tokens=2)",
        {"backward": False},
    ),
    (
        "q=s[A,B,16]",
        "y = torch.ops.npu.npu_prompt_flash_attention(q, q, q, num_heads=2, "
        "input_layout='BSH', scale_value=0.3)",
        {"dynamic": True, "backward": False},
    ),
    (
        "x=f[A,B,8] w=f[8]",
        "y = torch.ops.npu.npu_rms_norm(x, w, 0.1)[0] * 2",
        {"backward": True, "frozen": False, "mode": "max-autotune"},
    ),
    # sizes that become symbols one by one, where the rest stays known
    (
        "q=s[A,B,16]",
        "y = torch.ops.npu.npu_prompt_flash_attention(q, q, q, num_heads=2, "
        "input_layout='BSH', scale_value=0.3)",
        {**PERHAPS_STATIC, "backward": False, "mode": "max-autotune"},
    ),
    (
        "q=s[2,1,32] k=s[2,B,32]",
        "y = torch.ops.npu.npu_incre_flash_attention(q, k, k, num_heads=2, "
        "input_layout='BSH', scale_value=0.25, actual_seq_lengths=[1, 2])",
        {**PERHAPS_STATIC, "backward": False, "mode": "max-autotune"},
    ),
    (
        "q=f[1,6,B,16] k=f[1,6,40,16] v=f[1,6,40,8]",
        "q = q.flatten(0, 1); k = k.flatten(0, 1); v = v.flatten(0, 1); "
        "y = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 4, -1), v)",
        {**PERHAPS_STATIC, "mode": "max-autotune"},
    ),
    (
        "x=f[A,8] p=f[1,8]",
        "x.copy_(torch.cat([x[:x.shape[0] - 2], p, x[x.shape[0] - 1:]])); y = x + 1",
        {"dynamic": True},
    ),
    # order that streams and marks ask for
    (
        "x=s[A,8]",
        f"torch.ops.air.tagged_stream_wait_stream('1', '0', '1', {DEFAULT}); y = x + 1",
        {"mode": "reduce-overhead"},
    ),
    ("x=s[A,8]", WAIT + "g = torch.sigmoid(x * 1.702); y = x * g + p"),
    ("x=s[A,8]", WAIT + "y = x * 1; return y, p"),
    ("x=s[A,64] z=s[A,64] w=s[64]", WAIT + "x = x + z; " + RMS + "y = w * (x * r); return y, p"),
    (
        "x=s[A,8]",
        STREAM + "g = (x * 2).tanh(); torchair.ops.wait([g]); y = g + x",
        {"mode": "reduce-overhead"},
    ),
    # types, and bytes that are shifted
    (
        "q=d[2,2,6,16]",
        "y = torch.ops.npu.npu_prompt_flash_attention(q, q, q, num_heads=2, "
        "input_layout='BNSD', scale_value=0.3)",
        {"backward": False},
    ),
    ("q=f[A,4,8,16] k=f[A,4,50,16]", "y = torch.softmax(q @ k.mT / 4, -1) @ k"),
    ("x=s[A,32] w=n[16,32] u=s[16,1] o=s[1,32]", "y = F.linear(x, (w.float() - o) * u)", FROZEN),
    ("x=s[A,32] w=n[16,32] u=i[16,1]", "y = F.linear(x, (w * u).float())", FROZEN),
    ("x=s[A,32] w=n[16,32] u=i[16]", "y = F.linear(x, w.float()) * u", FROZEN),
    (
        "x=s[A,8]",
        "p = x * 2; q = p.to(bf16); m = p > 0; y = torch.where(m, q, -q)",
        {"numerics": "strict"},
    ),
    ("x=n[32,32] w=n[32,16]", SHIFTED + "y = y - 128 * w.sum(0, dtype=torch.int32)", INTEGERS),
    ("x=n[32,32] w=n[32,16]", SHIFTED + "y = y - 64 * w.sum(0, dtype=torch.int32)", INTEGERS),
    ("x=n[32,32] w=n[32,16]", SHIFTED + "y = y - 128 * x.sum(1, dtype=torch.int32)[:16]", INTEGERS),
)
