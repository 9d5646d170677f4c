"""Lines of random functions, as templates: what `random_functions.py` fills with names.

Each template uses `a` and perhaps `b`, `c`. What it does to exactness: "keeps" it, "loses" it, or
"needs" exact operands. `d` and `e` are dims of `a`, `m` is a mask, `j` and `k` are positions, `x`
and `y` are floating-point values.
"""

from __future__ import annotations

import torch

FLOAT = {
    "loses": (
        "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})",
        "torch.exp(-{a}.abs())",
        "{a} * {b}", "{a} + {b}", "{a} - {b}", "{a} / ({b}.abs() + 1)", "{a} * 0.5 + 1",
        "torch.softmax({a}, {d})", "{a}.log_softmax({d})", "{a}.sum({d})",
        "{a}.mean({d}, keepdim=True)",
        "{a}.sum()", "{a}.var({d}, correction=0)", "{a}.square().mean(-1, keepdim=True)",
        "{a} * torch.rsqrt({a}.square().mean(-1, keepdim=True) + 1e-5)", "{a}.cumsum({d})",
        "{a}.matmul({b})", "{a} @ {b}.transpose(-1, -2)", "torch.addcmul({a}, {b}, {c}, value=0.5)",
        "torch.lerp({a}, {b}, 0.3)", "F.softplus({a})", "{a}.pow(2)", "{a}.norm(dim={d})",
        "torch.where({m}, {a}, {b})", "{a}.masked_fill({m}, -2.0)", "{a}.logsumexp({d})",
        "F.layer_norm({a}, ({a}.shape[-1],), eps=0.1)", "torch.einsum('...i,...i->...', {a}, {b})",
        "F.glu(torch.cat([{a}, {a}], -1))", "torch.clamp({a}, -0.5, 0.75)",
        "F.scaled_dot_product_attention({a}, {b}, {b})", "F.avg_pool2d({a}, 2)",
        "F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)",
        "F.rms_norm({a}, ({a}.shape[-1],), eps=0.1)", "F.linear({a}, {b})",
    ),
    "keeps": (
        "{a}.relu()", "-{a}", "{a}.abs()", "torch.maximum({a}, {b})", "{a}.amax({d})",
        "{a}.amin({d}, keepdim=True)", "{a}.to(f64)", "F.max_pool2d({a}, 2, 1)",
    ),
    "needs": ("{a} > {b}", "{a} <= 0.25", "{a}.argmax({d})", "{a}.max({d})[1]", "{a} == {b}"),
    "casts": ("{a}.to(f32)", "{a}.to(bf16)", "{a}.to(f16)"),
}  # fmt: skip
ANY = (
    "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.flatten()", "{a}.flatten(0, 1)",
    "{a}.reshape(-1, {a}.shape[-1])", "{a}[1:]", "{a}[..., ::2]", "{a}[:, 1:-1]", "{a}[..., -1]",
    "{a}[0]", "{a}[None]", "{a}.expand(3, *{a}.shape)", "{a}.chunk(2, {d})[0]",
    "{a}.split(2, {d})[-1]", "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})",
    "{a}.flip({d}).contiguous()", "{a}.roll(1, {d})", "{a}.repeat(2, *[1] * {a}.dim())",
    "{a}.contiguous()",
    "{a}.clone()", "{a}.movedim(0, -1)", "{a}.unflatten(-1, ({a}.shape[-1], 1))",
    "{a}.narrow({d}, 0, 1)", "{a}.select({d}, -1)", "{a}.unbind({d})[0]",
    "{a}.permute(*reversed(range({a}.dim())))", "{a}.squeeze({d})", "{a}.diagonal()",
    "F.pad({a}, (1, 2))", "torch.tril({a})", "{a}.index_select({d}, {j})", "{a}[{j}]",
    "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))", "{a}.swapaxes(0, {d})",
    "{a}.new_zeros({a}.shape)", "torch.ones_like({a})", "{a}.view_as({a})", "{a}.detach()",
    "{a}.index_put(({j},), {b})", "{a}.slice_scatter({b}, {d}, 1, 3)",
    "{a}.take_along_dim({k}, {d})",
)  # fmt: skip
WHOLE = (
    "{a} + {b}", "{a} * 2", "{a} - {b}", "{a} // 3", "{a} % 4", "{a}.sum({d})", "{a}.amax({d})",
    "{a} & {b}", "{a} > {b}", "{a}.clamp(-2, 3)", "{a}.float()", "{a}.bool()", "{a}.cumsum({d})",
)  # fmt: skip
TRUTH = (
    "~{a}",
    "{a} & {b}",
    "{a} | {b}",
    "{a}.any({d})",
    "{a}.all()",
    "{a}.sum({d})",
    "{a}.to(f32)",
    "torch.where({a}, {x}, {y})",
)
CHANGES = (
    "{a}.add_({b}.clone())", "{a}.mul_(2)", "{a}[0] = {b}[0].clone()", "{a}[..., 1:] *= 3",
    "{a}.copy_({b}.clone())",
    "{a}.relu_()", "{a}.zero_()", "{a}.fill_(1)", "{a}.clamp_(-1, 1)",
    "{a}.transpose(0, -1).sub_(1)", "{a}.index_copy_(0, {j}, {b}[:3].clone())", "{a}[{j}] = 1",
    "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64)[:1], {b}[:1].clone())",
)  # fmt: skip
MORE = {
    "loses": (
        "F.mish({a})", "F.leaky_relu({a}, 0.1)", "torch.sin({a})", "torch.log1p({a}.abs())",
        "torch.atan2({a}, {b}.abs() + 1)", "{a}.std({d}, correction=0)", "{a}.prod({d})",
        "torch.addmm({a}, {b}, {c})", "torch.baddbmm({a}, {b}, {c})", "torch.outer({a}, {b})",
        "F.group_norm({a}, 1, eps=0.1)", "F.batch_norm({a}, None, None, training=True, eps=0.1)",
        "F.normalize({a}, dim={d}, eps=0.1)", "F.hardswish({a})", "{a}.logcumsumexp({d})",
        "F.smooth_l1_loss({a}, {b})", "F.mse_loss({a}, {b}, reduction='none')",
        "F.conv1d({a}, {a}[:, :, :3].contiguous(), padding=1)", "{a}.nansum({d})",
        "F.conv2d({a}, {a}[:, :, :2, :2])", "torch.cdist({a}, {b}, compute_mode='"
        "donot_use_mm_for_euclid_dist')", "{a}.sigmoid() * {b} + {c}", "{a} ** 3",
        "F.interpolate({a}[None, None], scale_factor=2.0, mode='bilinear')", "{a}.diff(dim={d})",
        "F.scaled_dot_product_attention({a}, {b}, {c}, {m}.expand({a}.shape[-2], {b}.shape[-2]))",
        "torch.einsum('...ij,...kj->...ik', {a}, {b})", "F.cosine_similarity({a}, {b}, {d})",
    ),
    "keeps": (
        "torch.minimum({a}, {b})", "{a}.sort({d})[0]", "{a}.topk(1, {d})[0]", "{a}.cummax({d})[0]",
        "torch.sign({a})", "{a}.nan_to_num()", "F.threshold({a}, 0.1, 0.0)", "torch.fmax({a}, {b})",
        "{a}.median({d})[0]", "torch.copysign({a}, {b})", "F.hardtanh({a})",
    ),
    "needs": (
        "{a}.floor()", "{a}.round()", "{a}.int()", "{a}.isnan()", "torch.signbit({a})",
        "{a}.argmin({d})", "{a}.sort({d})[1]", "{a} != {b}", "{a}.bool()", "{a}.to(torch.int8)",
    ),
    "casts": ("{a}.type(f32)", "{a}.to(f64).to(f32)"),
    "any": (
        "torch.triu({a}, 1)", "{a}.unfold({d}, 2, 2)", "{a}.T", "{a}.repeat_interleave(2)",
        "{a}.flatten().narrow(0, 0, 4).as_strided((2, 2), (2, 1))", "torch.where({m}, {a}, {b})",
        "{a}.rot90()",
        "{a}.tensor_split(2, {d})[1]", "torch.stack([{a}, {a}])[1]", "{a}.masked_fill({m}, 1)",
        "{a}.select_scatter({b}.select({d}, 0), {d}, 0)", "{a}.index_add(0, {j}, {b}[:3])",
        "{a}.scatter(0, torch.zeros_like({a}, dtype=torch.int64)[:1], {b})", "{a}.fliplr()",
        "torch.zeros_like({a}) + {a}", "{a}.reshape(-1)[1:]", "{a}.unsqueeze(-1).expand_as({b})",
        "{a}.mT", "{a}.diagonal_scatter({b}.diagonal())", "{a}.expand_as({b})",
        "{a}.new_full((2,), 3)", "torch.hstack([{a}, {b}])", "{a}.view(-1)",
        "{a}.t()", "{a}.ravel()", "{a}.tile(2)",
    ),
    "whole": (
        "{a} | {b}", "{a} ^ {b}", "{a} << 1", "{a} >> 1", "~{a}", "-{a}", "{a}.abs()", "{a} / 2",
        "{a} * 0.5", "{a}.mean(dtype=f32)", "{a}.argmax({d})", "{a}.sort({d})[0]", "{a} == {b}",
        "{a}.to(torch.uint8)", "{a}.to(torch.int16)", "{a}.prod({d})", "{a}.bitwise_not()",
        "torch.maximum({a}, {b})", "{a} + {x}", "{x} * {a}", "{a}.double()", "{a}.amin({d})",
        "F.one_hot({a} % 3, 3)", "{a} % 5 - 2", "torch.div({a}, 3, rounding_mode='trunc')",
    ),
    "truth": (
        "{a} ^ {b}", "{a}.logical_not()", "{a}.all({d})", "{a}.cumsum({d})", "{a} == {b}",
        "{a}.int()", "{a} * {x}", "{a}.any()", "{a}.nonzero().shape[1] + {a}.sum()",
    ),
    "changes": (
        "{a}.sigmoid_()", "{a}.div_(2)", "{a}.neg_()", "{a}.t_().mul_(2).t_()", "{a}[1:].add_(1)",
        "{a}.masked_fill_({m}, 0)", "{a}.index_add_(0, {j}, {b}[:3].clone())", "{a}.abs_()",
        "{a}.select(0, 0).copy_({b}.select(0, -1).clone())", "{a}.diagonal().zero_()",
        "{a}.index_fill_(0, {j}, 2)", "{a}.view(-1)[::2] += 1", "{a}.sub_({a}.clone())",
        "{a}.lerp_({b}.clone(), 0.25)", "{a}.addcmul_({b}.clone(), {b}.clone())",
    ),
}  # fmt: skip
NUMBERS = {
    "loses": (
        "{a} * {s}",
        "{a} + {n}",
        "{a} / {n}",
        "{s} - {a}",
        "{a}.clamp(max={s})",
        "{a}.pow({n})",
        "torch.where({m}, {a}, {s})",
        "{a} * {n} + {s}",
        "torch.full_like({a}, {s})",
        "{n} / ({a}.abs() + 1)",
    ),
    "any": (
        "{a}[:{n}]",
        "{a}.narrow({d}, 0, {n})",
        "{a}.expand({n}, *{a}.shape)",
        "{a}.roll({n}, {d})",
        "F.pad({a}, ({n}, 1))",
        "{a}[..., {n} - 1]",
        "{a}.repeat({n}, *[1] * {a}.dim())",
        "{a}.select({d}, {n} - 1)",
        "{a}.new_ones({n})",
    ),
    "whole": ("{a} + {n}", "{a} * {n}", "{a} // {n}", "{a} % {n}", "{a} * {s}", "{n} - {a}"),
}
"""What programs do with Python numbers among their arguments, an `n` and an `s`."""
TABLES = {**FLOAT, "any": ANY, "whole": WHOLE, "truth": TRUTH, "changes": CHANGES}
BROAD = {kind: (*TABLES[kind], *MORE[kind]) for kind in TABLES}
SMALL = (torch.int32, torch.int16, torch.int8, torch.uint8)

# ---- subjects: tables that a program mixes into its usual ones ----

COMPLEX = {
    "complex": (
        "{a} * {b}", "{a} + {b}", "{a} - {b}", "{a} / ({b}.abs() + 1)", "{a} * {b}.conj()",
        "torch.exp({a} * 0.1)", "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a} @ {b}.mH",
        "({a} * {a}.conj()).real", "{a}.abs()", "{a} * 2j", "{a} * {x}", "torch.fft.ifft({a})",
        "torch.fft.fft({a}, dim={d})", "{a}.cumsum({d})", "{a}.pow(2)", "torch.sin({a} * 0.1)",
        "torch.einsum('...i,...i->...', {a}, {b})", "{a}.conj() + 1", "torch.tanh({a} * 0.1)",
        "torch.fft.fftshift({a})", "torch.where({m}, {a}, {b})", "{a}.reciprocal() * 0 + {b}",
    ),
    "complex exact": (
        "{a}.real", "{a}.imag", "{a}.conj()", "torch.view_as_real({a})", "-{a}", "{a}.mH",
        "{a}.conj().resolve_conj()", "{a}.imag.neg().clone()", "{a} == {b}",
    ),
    "loses": ("torch.polar({a}.abs(), {a})", "torch.fft.rfft({a}.to(f32))", "{a} * 1j + {b}"),
    "keeps": ("torch.complex({a}, {b})", "torch.view_as_complex(torch.stack([{a}, {b}], -1))"),
}  # fmt: skip
FUNCTORCH = {
    "loses": (
        "torch.func.vmap(torch.sin)({a})",
        "torch.func.vmap(lambda t: t.softmax(-1))({a})",
        "torch.func.vmap(lambda t, u: t * u.sum())({a}, {b})",
        "torch.func.vmap(lambda t: t.cumsum(0), in_dims=-1, out_dims=-1)({a})",
        "torch.func.vmap(lambda t: t @ t.mT)({a})",
        "torch.func.vmap(lambda t: t + {c})({a})",
        "torch.func.vmap(torch.func.vmap(lambda t: t.sum() * t))({a})",
        "torch.func.vmap(lambda t, u: t @ u, in_dims=(0, None))({a}, {b})",
        "torch.func.vmap(lambda t: F.layer_norm(t, t.shape[-1:], eps=0.1))({a})",
        "torch.func.grad(lambda t: (t * t).sin().sum())({a})",
        "torch.func.grad(lambda t, u: (t * u).tanh().sum(), argnums=1)({a}, {b})",
        "torch.func.grad_and_value(lambda t: t.sigmoid().sum())({a})[0]",
        "torch.func.grad(torch.func.grad(lambda t: t.sin().sum()))({a}.flatten()[0])",
        "torch.func.jvp(lambda t: t.sin() * t, ({a},), ({a} * 0.5,))[1]",
        "torch.func.jvp(lambda t, u: t * u, ({a}, {b}), ({b}, {a}))[1]",
        "torch.func.vjp(torch.tanh, {a})[1](torch.ones_like({a}))[0]",
        "torch.func.jacrev(lambda t: t.sin().sum(0))({a}[:2])",
        "torch.func.jacfwd(lambda t: t.tanh().sum(0))({a}[:2])",
        "torch.func.hessian(lambda t: t.sin().prod())({a}.flatten()[:4])",
        "torch.func.vmap(torch.func.grad(lambda t: t.sin().sum()))({a})",
        "torch.func.vmap(torch.func.jacrev(torch.tanh))({a}.flatten()[:4])",
        "torch.func.grad(lambda t: F.gelu(t).mean())({a})",
        "torch.func.jvp(lambda t: t.softmax(-1), ({a},), ({b},))[1]",
    ),
    "any": (
        "torch.func.vmap(lambda t: t.flip(0))({a})",
        "torch.func.vmap(lambda t: t[0])({a})",
        "torch.func.vmap(lambda t: t.reshape(-1), in_dims=1)({a})",
    ),
}
HIGHER_ORDER = {
    "loses": (
        "h.cond({j}.sum() > 2, lambda t: t.sin() + 1, lambda t: t.cos(), ({a},))",
        "h.cond({j}.sum() > 3, lambda t, u: t * u, lambda t, u: t - u, ({a}, {b}))",
        "h.cond({a}.shape[0] > 3, lambda t: t.tanh(), lambda t: t * 2, ({a},))",
        "h.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 0.5 + 1), ({j}[0], {a}))[1]",
        "h.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t.sin()), ({j}[1], {a}))[1]",
        "h.scan(lambda c, t: (c + t, c * t), {a}[0].clone(), {a})[1]",
        "h.scan(lambda c, t: (c * 0.5 + t, c.tanh()), {a}[0].clone(), {a})[0]",
        "h.map(lambda t: t.sin() * 2, {a})",
        "h.map(lambda t, u: t + u.sum(), {a}, {b}.sum(0))",
        "h.associative_scan(lambda p, q: p * 0.5 + q * 0.5, {a}[:2])",
        "h.associative_scan(lambda p, q: p + q, {a})",
        "h.checkpoint(lambda t: t.tanh() * 2, {a})",
        "h.checkpoint(lambda t, u: (t * u).sigmoid().sum(-1), {a}, {b})",
        "h.flex_attention({a}[None, None], {a}[None, None], {a}[None, None])[0, 0]",
        "h.flex_attention({a}[None], {b}[None], {b}[None], lambda s, n, h, i, j: s + (i - j))[0]",
        "h.region({a}) + h.region({a} * 2)",
    ),
    "any": ("h.map(lambda t: t.flip(0), {a})", "h.checkpoint(lambda t: t.transpose(0, -1), {a})"),
}
DRAWS = {
    "loses": (
        "F.dropout(torch.ones({a}.shape, dtype=torch.float32), 0.5) * {a}",
        "torch.normal(torch.zeros({a}.shape, dtype=torch.float32), 1.0) + {a}",
    ),
    "keeps": (
        "torch.rand({a}.shape, dtype=torch.float32).to({a}.dtype)",
        "torch.maximum({a}, torch.rand_like({a}, dtype=torch.float32).to({a}.dtype))",
        "torch.randn({a}.shape, dtype=torch.float32)",
        "{a}[torch.randperm({a}.shape[0])]",
        "torch.bernoulli(torch.full({a}.shape, 0.5, dtype=torch.float32))",
        "torch.where(torch.rand({a}.shape, dtype=torch.float32) < 0.5, {a}, -{a})",
        "torch.empty({a}.shape, dtype=torch.float32).uniform_(-1, 1)",
        "torch.empty({a}.shape, dtype=torch.float32).exponential_()",
    ),
    "whole": (
        "torch.randint(0, 5, {a}.shape) + {a}",
        "torch.randperm({a}.numel()).reshape({a}.shape)",
        "torch.randint_like({a}, 3)",
    ),
}
AUTOCAST = {
    "loses": (
        "{a} @ {b}.mT",
        "F.linear({a}, {b})",
        "{a}.matmul({b})",
        "torch.baddbmm({a}, {b}, {c})",
        "F.linear({a}, {b}).tanh()",
        "F.scaled_dot_product_attention({a}, {b}, {b})",
        "{a}.softmax(-1) @ {b}",
        "torch.einsum('...ij,...kj->...ik', {a}, {b})",
        "{a}.sum({d})",
        "F.mse_loss({a}, {b})",
        "F.layer_norm({a}, {a}.shape[-1:], eps=0.1)",
        "{a}.log_softmax(-1)",
        "F.conv2d({a}, {a}[:, :, :2, :2])",
        "torch.cat([{a}, {b}.to(bf16)], {d})",
    ),
}
AUTOCASTS = (
    "with torch.autocast('cpu', torch.bfloat16): ",
    "with torch.autocast('cpu', torch.float16): ",
    "with torch.autocast('cpu', enabled=False): ",
)
"""What lines of a program about autocast may begin with."""
SUBJECTS = {
    "complex": COMPLEX,
    "autocast": AUTOCAST,
    "functorch": FUNCTORCH,
    "higher_order": HIGHER_ORDER,
    "draws": DRAWS,
}
"""What a program may be about: tables of its own, mixed with the usual ones."""


def subject_of(kind: str, template: str) -> str:
    """The subject that a template belongs to, "" if it is one of all programs."""
    found = (s for s, table in SUBJECTS.items() if template in table.get(kind, ()))
    return "" if template in BROAD.get(kind, ()) else next(found, "")


TEMPLATES = tuple(
    dict.fromkeys(
        (kind, template)
        for table in (BROAD, *SUBJECTS.values())
        for kind, templates in table.items()
        for template in templates
    )
)
"""All templates, each with what it does to exactness."""
