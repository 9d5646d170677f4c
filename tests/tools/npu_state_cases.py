"""Calls of linear attention, convolutions and attention over pages beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_state_references as ref
from npu_cases import BF16, HALF, Case, npu, randint, randn

Tensor = torch.Tensor
atb = torch.ops.atb
Q, K, V = randn(6, 2, 4) / 2, randn(6, 2, 4, seed=1) / 2, randn(6, 4, 3)
BETA, G, GK = randn(6, 4).sigmoid(), -randn(6, 4).abs(), -randn(6, 4, 4).abs()
STATE, PLACES = randn(8, 4, 3, 4), torch.tensor([3, 0, 5, 6, 1, 2], dtype=torch.int32)
LENGTHS = torch.tensor([3, 1, 2], dtype=torch.int32)


def _recurrent(functional: bool = False, **options: Any) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *more: Tensor) -> Any:
        names = ("actual_seq_lengths", "ssm_state_indices", "beta", "g", "gk")
        given = dict(zip(names, more, strict=False)) | options
        if functional:
            return npu.npu_recurrent_gated_delta_rule_functional(q, k, v, state, **given)
        return npu.npu_recurrent_gated_delta_rule(q, k, v, state, **given), state

    return run


def _recurrent_expected(accepted: Any = (1, 1, 1), scale: float = 0.5) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *more: Tensor) -> Any:
        lengths, places, *rest = more
        starts = [0, 3, 4]
        first = [state[int(places[s + a - 1])] for s, a in zip(starts, accepted, strict=True)]
        out, kept = ref.delta_rule(q, k, v, first, lengths.tolist(), scale, *rest)
        new = state.double().clone()
        for start, after in zip(starts, kept, strict=True):
            for i, s in enumerate(after):
                new[int(places[start + i])] = s
        return out, new

    return run


DELTA = [
    Case(
        "recurrent",
        _recurrent(),
        (Q, K, V, STATE, LENGTHS, PLACES, BETA, G),
        _recurrent_expected(),
    ),
    Case(
        "recurrent-functional",
        _recurrent(functional=True, scale=0.3),
        (Q, K, V, STATE, LENGTHS, PLACES, BETA, G, GK),
        _recurrent_expected(scale=0.3),
    ),
    Case(
        "recurrent-accepted",
        lambda *x: _recurrent(num_accepted_tokens=x[-1])(*x[:-1]),
        (Q, K, V, STATE, LENGTHS, PLACES, BETA, torch.tensor([2, 1, 2], dtype=torch.int32)),
        lambda *x: _recurrent_expected((2, 1, 2))(*x[:-1]),
    ),
    Case(
        "recurrent-bfloat16",
        _recurrent(),
        (*(x.to(BF16) for x in (Q, K, V, STATE)), LENGTHS, PLACES, BETA.to(BF16), G),
        _recurrent_expected(),
        rough=HALF * 2,
    ),
    Case(
        "chunk",
        lambda q, k, v, s, n, b, g: npu.npu_chunk_gated_delta_rule(
            q, k, v, initial_state=s, actual_seq_lengths=n, beta=b, g=g, scale=0.4
        ),
        (Q, K, V, STATE[:3], LENGTHS, BETA, G),
        lambda q, k, v, s, n, b, g: (lambda out, kept: (out, torch.stack([a[-1] for a in kept])))(
            *ref.delta_rule(q, k, v, s, n.tolist(), 0.4, b, g)
        ),
    ),
    Case(
        "chunk-empty-sequence",
        lambda q, k, v, s, n: npu.npu_chunk_gated_delta_rule(
            q, k, v, initial_state=s, actual_seq_lengths=n
        ),
        (Q, K, V, STATE[:2], torch.tensor([0, 6], dtype=torch.int32)),
        lambda q, k, v, s, n: (lambda out, kept: (out, torch.stack([s[0].double(), kept[1][-1]])))(
            *ref.delta_rule(q, k, v, s, [0, 6], 1.0)
        ),
    ),
]

X, WEIGHT, STATES = randn(7, 8), randn(3, 8), randn(5, 2, 8)
STARTS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def _conv(*names: str, **options: Any) -> Any:
    def run(x: Tensor, weight: Tensor, states: Tensor, *more: Tensor) -> Any:
        given = dict(zip(names, more, strict=True)) | options
        return npu.npu_fused_causal_conv1d(x, weight, states, **given), states

    return run


def _conv_expected(x: Tensor, weight: Tensor, states: Tensor, *more: Any, **modes: Any) -> Any:
    _, lines, done = (*more, None, None, None)[:3]
    y, new = torch.zeros(x.shape, dtype=torch.float64), states.double().clone()
    for b, (start, end) in enumerate(((0, 3), (3, 3), (3, 7))):
        line = b if lines is None else int(lines[b])
        if line < 0 or start == end:
            continue
        state = states[line] if done is None or done[b] else torch.zeros_like(states[line])
        rows = x[start:end]
        y[start:end] = ref.causal_conv(rows, weight, state)
        if modes.get("pangu"):
            y[start : start + max(2 - int(done[b]), 0)] = 0
        y[start:end] += rows.double() if modes.get("residual") else 0
        new[line] = ref.shifted(state, rows)
    return y, new


def _in_place(x: Tensor, weight: Tensor, states: Tensor, starts: Tensor) -> Any:
    npu.npu_fused_causal_conv1d_v2(x, weight, states, query_start_loc=starts)
    return x, states


def _speculative(x: Tensor, weight: Tensor, states: Tensor, accepted: Tensor) -> Any:
    """Three tokens a batch, states of two more positions: those that were accepted count."""
    y, new = [], states.double().clone()
    for b, n in enumerate(accepted.tolist()):
        before = states[b, n - 1 : n + 1]
        y.append(ref.causal_conv(x[b], weight, before))
        rows = torch.cat([states[b, : n + 1], x[b]]).double()
        new[b, -min(4, len(rows)) :] = rows[-min(4, len(rows)) :]
    return torch.stack(y), new


def _blocks(x: Tensor, weight: Tensor, states: Tensor, *more: Any) -> Any:
    """One sequence of 7 tokens after 3, in blocks of 4 positions: two become full."""
    new = states.double().clone()
    y = ref.causal_conv(x, weight, states[2])
    rows = torch.cat([states[2], x]).double()  # positions 1 to 9
    for line, end in ((4, 4), (0, 8), (3, 10)):
        new[line] = rows[end - 3 : end - 1]
    return y, new


CONVOLUTIONS = [
    Case("conv", _conv("query_start_loc"), (X, WEIGHT, STATES, STARTS), _conv_expected),
    Case(
        "conv-lines",
        _conv("query_start_loc", "cache_indices", residual_connection=1),
        (X, WEIGHT, STATES, STARTS, torch.tensor([4, 0, -1], dtype=torch.int32)),
        lambda *x: _conv_expected(*x, residual=True),
    ),
    Case(
        "conv-first",
        _conv("query_start_loc", "cache_indices", "num_computed_tokens", conv_mode="pangu"),
        (
            X,
            WEIGHT,
            STATES,
            STARTS,
            torch.tensor([4, 0, 1], dtype=torch.int32),
            torch.tensor([0, 5, 1], dtype=torch.int32),
        ),
        lambda *x: _conv_expected(*x, pangu=True),
    ),
    Case("conv_v2", _in_place, (X, WEIGHT, STATES, STARTS), _conv_expected),
    Case(
        "conv-speculative",
        _conv("num_accepted_tokens"),
        (randn(2, 3, 8), WEIGHT, randn(2, 4, 8), torch.tensor([1, 3], dtype=torch.int32)),
        _speculative,
    ),
    Case(
        "conv-blocks",
        _conv(
            "query_start_loc",
            "cache_indices",
            "num_computed_tokens",
            "block_idx_first_scheduled_token",
            "block_idx_last_scheduled_token",
            "initial_state_idx",
            block_size=4,
        ),
        (
            X,
            WEIGHT,
            STATES,
            *(
                torch.tensor(v, dtype=torch.int32)
                for v in ([0, 7], [[4, 0, 3, 2]], [3], [0], [2], [3])
            ),
        ),
        _blocks,
    ),
    Case(
        "masked_conv",
        lambda x, w, m: npu.npu_masked_causal_conv1d(x, w, mask=m),
        (randn(5, 2, 4), randn(3, 4), torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]]).bool()),
        lambda x, w, m: torch.stack(
            [ref.causal_conv(x[:, b], w, x[:0, b]) * m[b].double()[:, None] for b in range(2)], 1
        ),
    ),
    Case(
        "masked_conv-one",
        npu.npu_masked_causal_conv1d,
        (randn(1, 2, 4), randn(3, 4)),
        lambda x, w: x.double() * w[2].double(),
    ),
]

PAGES = randn(4, 4, 2, 8), randn(4, 4, 2, 6)
TABLE = torch.tensor([[2, 0, 1], [1, 3, 0]], dtype=torch.int32)
CONTEXT = torch.tensor([6, 9], dtype=torch.int32)
CAUSAL = torch.triu(torch.full((12, 12), float("-inf")), 1)
QUERY, TOKENS = randn(2, 4, 8), (randn(5, 4, 8), randn(5, 2, 8), randn(5, 2, 6))


def _paged(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, n: Tensor, out: Tensor) -> Any:
    space = atb._npu_paged_attention_get_workspace(q, kc, vc, 2, 4, 0.4, table, n, out)
    atb._npu_paged_attention(q, kc, vc, 2, 4, 0.4, table, n, out, workspace=space)
    return out


def _paged_expected(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, n: Tensor, *o: Any) -> Tensor:
    rows = [
        ref.attended(q[b : b + 1], *(ref.of_pages(c, table[b], int(n[b])) for c in (kc, vc)), 0.4)
        for b in range(len(q))
    ]
    return torch.cat(rows)


def _mla(q: Tensor, kc: Tensor, table: Tensor, n: Tensor, out: Tensor) -> Any:
    atb._npu_paged_attention_mla(q, kc, 2, 4, 0.4, table, n, 5, out)
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
    *mask, n, out = more
    name = "_npu_flash_attention" if mask else "_npu_flash_attention_unpad"
    getattr(atb, name)(q, k, v, *mask, n, 0.4, 4, 2, out)
    return out


def _flash_expected(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    mask = more[0] if len(more) > 2 else None
    parts = [slice(0, 3), slice(3, 5)]
    shifts = [None if mask is None else mask[:n, :n] for n in (3, 2)]
    found = zip(parts, shifts, strict=True)
    return torch.cat([ref.attended(q[p], k[p], v[p], 0.4, shift) for p, shift in found])


def _split(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, *more: Tensor) -> Any:
    context, mask, n, out = more
    atb._npu_paged_attention_splitfuse(q, kc, vc, table, context, mask, n, 2, 4, 0.4, out)
    return out


def _split_expected(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, *more: Tensor) -> Tensor:
    rows = []
    for b, (start, end, length) in enumerate(((0, 3, 6), (3, 5, 9))):
        shift = CAUSAL[length - (end - start) : length, :length]
        pages = (ref.of_pages(c, table[b], length) for c in (kc, vc))
        rows.append(ref.attended(q[start:end], *pages, 0.4, shift))
    return torch.cat(rows)


SEQ = torch.tensor([3, 2], dtype=torch.int32)
ROWS = torch.cat([CAUSAL[3:6], CAUSAL[7:9]])
ATTENTION = [
    Case(
        "paged",
        _paged,
        (QUERY, *PAGES, TABLE, CONTEXT, torch.zeros(2, 4, 6)),
        _paged_expected,
        generic=True,
    ),
    Case(
        "paged-mla",
        _mla,
        (QUERY, PAGES[0], TABLE, CONTEXT, torch.zeros(2, 4, 5)),
        lambda q, kc, table, n, out: _paged_expected(q, kc, kc[..., :5], table, n),
        generic=True,
    ),
    Case(
        "flash",
        _flash,
        (*TOKENS, CAUSAL, SEQ, torch.zeros(5, 4, 6)),
        _flash_expected,
        generic=True,
    ),
    Case(
        "flash-unpad", _flash, (*TOKENS, SEQ, torch.zeros(5, 4, 6)), _flash_expected, generic=True
    ),
    *(
        Case(
            f"splitfuse-{name}",
            _split,
            (TOKENS[0], *PAGES, TABLE, CONTEXT, mask, SEQ, torch.zeros(5, 4, 6)),
            _split_expected,
            generic=True,
        )
        for name, mask in (("positions", CAUSAL), ("rows", ROWS))
    ),
    *(
        Case(
            f"attention_update-{kind}",
            lambda a, b, x, y, kind=kind: npu.npu_attention_update([a, b], [x, y], kind),
            (randn(5), randn(5, seed=1), randn(5, 8), randn(5, 8, seed=1)),
            lambda a, b, x, y: (
                (x.double() * a.double().exp()[:, None] + y.double() * b.double().exp()[:, None])
                / (a.double().exp() + b.double().exp())[:, None],
                (a.double().exp() + b.double().exp()).log(),
            ),
        )
        for kind in (0, 1)
    ),
    Case(
        "masked_softmax",
        lambda x, m, b: npu.npu_masked_softmax_with_rel_pos_bias(x, m, b, 0.5),
        (randn(2, 3, 2, 4, 4), randn(3, 4, 4), randn(2, 4, 4)),
        lambda x, m, b: (lambda e: e / e.sum(-1, keepdim=True))(
            (x.double() / 2 + m.double()[:, None] + b.double()).exp()
        ),
    ),
]


def _conv2d(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Steps of 2 down and 1 across, one row of zeros above and below, two groups of channels."""
    padded = torch.zeros(2, 4, 7, 6)
    padded[:, :, 1:6] = x
    out = torch.zeros(2, 6, 3, 4, dtype=torch.float64)
    for c in range(6):
        group = slice(0, 2) if c < 3 else slice(2, 4)
        for i in range(3):
            for j in range(4):
                part = padded[:, group, 2 * i : 2 * i + 3, j : j + 3].double()
                out[:, c, i, j] = (part * w[c].double()).sum((1, 2, 3)) + bias[c].double()
    return out * scale.double()[:, None, None]


def _gathered(grad: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=torch.float64)
    for i in range(2):
        for j in range(4):
            out[int(index[i, j]), j] += grad[i, j].double()
    return out


Q4, K4, V4, DY = (randn(1, 2, n, 4, seed=n) for n in (3, 5, 6, 7))
Q4, K4, V4, DY = Q4[:, :, :3], K4[:, :, :5], V4[:, :, :5], DY[:, :, :3]


def _attention_gradients(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *saved: Tensor) -> Any:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * 0.4
    powers = scores.exp()
    out = powers / powers.sum(-1, keepdim=True) @ leaves[2]
    return torch.autograd.grad(out, leaves, dy.double())


IMAGES = [
    Case(
        "fusion_attention_grad",
        lambda q, k, v, dy, top, total: npu.npu_fusion_attention_grad(
            q, k, v, dy, 2, "BNSD", softmax_max=top, softmax_sum=total, scale_value=0.4
        )[:3],
        (Q4, K4, V4, DY, *npu.npu_fusion_attention(Q4, K4, V4, 2, "BNSD", scale=0.4)[1:3]),
        _attention_gradients,
    ),
    Case(
        "quant_conv2d",
        lambda x, w, s, b: npu.npu_quant_conv2d(
            x,
            w,
            npu.npu_trans_quant_param(s),
            [2, 1],
            [1, 0],
            1,
            2,
            output_dtype=torch.float16,
            bias=b,
        ),
        (
            randint(-9, 9, 2, 4, 5, 6),
            randint(-9, 9, 6, 2, 3, 3),
            randn(6).abs().bfloat16().float(),
            randint(-99, 99, 6, dtype=torch.int32),
        ),
        _conv2d,
        rough=2e-3,
    ),
    Case(
        "gather_backward",
        lambda grad, index: npu.npu_gather_backward(grad, [3, 4], 0, index, False),
        (randn(2, 4), torch.tensor([[0, 2, 1, 1], [0, 1, 1, 2]])),
        _gathered,
    ),
]

CASES = [*DELTA, *CONVOLUTIONS, *ATTENTION, *IMAGES]
