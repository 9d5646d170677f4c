"""Linear attention and causal convolutions: states of sequences that each token changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import NpuOperators, like, wide, wrong
from torchair.torch_private.dispatch import parse_schema

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- the gated delta rule: S = a S + b (v - a S k) k^T; o = S q ----


class _Steps:
    """Tokens of all sequences, (tokens, heads of values, features), in the type of sums."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor | None,
        scale: float,
        g: Tensor | None,
        gk: Tensor | None = None,
    ) -> None:
        kind = wide(value.dtype)
        heads = value.shape[1] // key.shape[1]
        self.query = query.to(kind).repeat_interleave(heads, 1) * scale
        self.key = key.to(kind).repeat_interleave(heads, 1)
        self.value = value.to(kind)
        self.beta = None if beta is None else beta.to(kind)
        self.decay = None if g is None else g.to(kind).exp()
        self.decays = None if gk is None else gk.to(kind).exp()
        self.out = torch.zeros_like(self.value)

    def step(self, t: int, state: Tensor) -> Tensor:
        """The state after a token, whose result is noted; states are (heads, values, keys)."""
        if self.decay is not None:
            state = state * self.decay[t, :, None, None]
        if self.decays is not None:
            state = state * self.decays[t, :, None, :]
        key = self.key[t, :, None, :]
        change = self.value[t] - (state * key).sum(-1)
        change = change if self.beta is None else change * self.beta[t, :, None]
        state = state + change.unsqueeze(-1) * key
        self.out[t] = (state * self.query[t, :, None, :]).sum(-1)
        return state


def _sequences(operator: str, lengths: Tensor | None, tokens: int) -> Iterator[range]:
    if lengths is None:
        raise wrong(operator, "actual_seq_lengths", "is needed")
    ends = [0, *lengths.reshape(-1).cumsum(0).tolist()]
    if ends[-1] > tokens:
        reason = f"are {ends[-1]} tokens together, there are {tokens}"
        raise wrong(operator, "actual_seq_lengths", reason)
    return (range(a, b) for a, b in pairwise(ends))


_RECURRENT = "npu_recurrent_gated_delta_rule"


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Each sequence starts from the state of its first token, or of the last one that was accepted,
    and writes the state after each token to where the token's index says."""
    if ssm_state_indices is None:
        raise wrong(_RECURRENT, "ssm_state_indices", "is needed")
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    steps = _Steps(query, key, value, beta, factor, g, gk)
    places = ssm_state_indices.reshape(-1).tolist()
    accepted = None if num_accepted_tokens is None else num_accepted_tokens.reshape(-1).tolist()
    for b, tokens in enumerate(_sequences(_RECURRENT, actual_seq_lengths, value.shape[0])):
        if not tokens:
            continue
        first = tokens.start + (0 if accepted is None else accepted[b] - 1)
        current = state[places[first]].to(steps.value.dtype)
        for t in tokens:
            current = steps.step(t, current)
            state[places[t]] = current.to(state.dtype)
    return steps.out.to(value.dtype)


def _recurrent_functional(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    new = state.clone()
    return recurrent_gated_delta_rule(query, key, value, new, **options), new


_RECURRENT_OPTIONS = (
    "*, Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None, "
    "Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
    "Tensor? gk=None"
)
_RECURRENT_NAMES = {"scale_value": "scale"}
OPERATORS.add(
    f"{_RECURRENT}(Tensor query, Tensor key, Tensor value, Tensor(a!) state, "
    f"{_RECURRENT_OPTIONS}) -> Tensor",
    lambda query, key, value, state, **options: like(0)(value),
    form=GeForm("RecurrentGatedDeltaRule", _RECURRENT_NAMES),
)(recurrent_gated_delta_rule)
OPERATORS.add(
    f"{_RECURRENT}_functional(Tensor query, Tensor key, Tensor value, Tensor state, "
    f"{_RECURRENT_OPTIONS}) -> (Tensor, Tensor)",
    lambda query, key, value, state, **options: like(0, 1)(value, state),
    form=GeForm("RecurrentGatedDeltaRule", _RECURRENT_NAMES, copied=("state",)),
)(_recurrent_functional)


@OPERATORS.add(
    "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, "
    "Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, "
    "Tensor? g=None) -> (Tensor, Tensor)",
    lambda query, key, value, *, initial_state=None, **options: like(0, 1)(
        value, _given_state(initial_state)
    ),
    form=GeForm("ChunkGatedDeltaRule", {"scale_value": "scale"}),
)
def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule over whole sequences, each from a state of its own: results, and last states."""
    final = _given_state(initial_state).clone()
    steps = _Steps(query, key, value, beta, 1.0 if scale is None else scale, g)
    name = "npu_chunk_gated_delta_rule"
    for b, tokens in enumerate(_sequences(name, actual_seq_lengths, value.shape[0])):
        current = final[b].to(steps.value.dtype)
        for t in tokens:
            current = steps.step(t, current)
        final[b] = current.to(final.dtype)
    return steps.out.to(value.dtype), final


def _given_state(state: Tensor | None) -> Tensor:
    if state is None:
        raise wrong("npu_chunk_gated_delta_rule", "initial_state", "is needed")
    return state


# ---- causal convolutions, feature by feature ----


@OPERATORS.add(
    "npu_masked_causal_conv1d(Tensor input, Tensor weight, *, Tensor? mask=None) -> Tensor",
    lambda x, weight, **options: like(0)(x),
    form=GeForm("MaskedCausalConv1d"),
)
def masked_causal_conv1d(input: Tensor, weight: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Positions, (positions, batch, features), and those before them, each feature with weights of
    its own; zero where the mask, (batch, positions), is false."""
    kind, width = wide(input.dtype), weight.shape[0]
    padded = torch.cat([input.new_zeros((width - 1, *input.shape[1:])), input]).to(kind)
    y = _convolved(padded, weight.to(kind), input.shape[0])
    if mask is not None:
        y = torch.where(mask.t().unsqueeze(-1), y, 0.0)
    return y.to(input.dtype)


def _convolved(padded: Tensor, weight: Tensor, length: int) -> Tensor:
    taps = [padded[k : k + length] * weight[k] for k in range(weight.shape[0])]
    return torch.stack(taps).sum(0)


_CONV = "npu_fused_causal_conv1d"


_CONV_OPTIONS = (
    "*, Tensor? query_start_loc=None, Tensor? cache_indices=None, "
    "Tensor? initial_state_mode=None, Tensor? bias=None, Tensor? num_accepted_tokens=None, "
    'str? activation="None", int? pad_slot_id=-1, int? run_mode=0, int? residual_connection=0, '
    "int? max_query_len=-1, Tensor? num_computed_tokens=None, "
    "Tensor? block_idx_first_scheduled_token=None, Tensor? block_idx_last_scheduled_token=None, "
    'Tensor? initial_state_idx=None, int? block_size=128, str? conv_mode="default"'
)
_CONV_SCHEMA = parse_schema(f"{_CONV}({_CONV_OPTIONS}) -> ()")
_CONV_DEFAULTS = {a.name: a.default_value for a in _CONV_SCHEMA.arguments}


class _FusedConvolution:
    """A call of the fused convolution. States are (lines, positions, features); with blocks
    (`cache_indices` of two dims) a sequence has a line for each block of its positions."""

    def __init__(self, weight: Tensor, states: Tensor, given: dict[str, Any]) -> None:
        self.weight, self.states = weight.to(wide(weight.dtype)), states
        self.width, self.capacity = weight.shape[0], states.shape[1]
        names = (
            "cache_indices",
            "num_accepted_tokens",
            "num_computed_tokens",
            "block_idx_first_scheduled_token",
            "block_idx_last_scheduled_token",
            "initial_state_idx",
        )
        self.lists = {n: None if given[n] is None else given[n].tolist() for n in names}
        self.lines: Any = self.lists["cache_indices"]
        self.blocks = given["cache_indices"] is not None and given["cache_indices"].dim() > 1
        self.block_size, self.pad = given["block_size"], given["pad_slot_id"]
        self.resets, self.adds = given["conv_mode"] == "pangu", given["residual_connection"]

    def _of(self, name: str, batch: int) -> Any:
        values = self.lists[name]
        return None if values is None else values[batch]

    def _line(self, batch: int, block: str) -> int:
        if self.lines is None:
            return batch
        line: int = self.lines[batch][self._of(block, batch)] if self.blocks else self.lines[batch]
        return line

    def run(self, batch: int, x: Tensor) -> Tensor:
        """The result of one sequence; its state is updated."""
        first, last = "initial_state_idx", "block_idx_last_scheduled_token"
        read, write = self._line(batch, first), self._line(batch, last)
        if self.lines is not None and self.pad in (read, write):
            return torch.zeros_like(x)
        done, accepted = (
            self._of("num_computed_tokens", batch),
            self._of("num_accepted_tokens", batch),
        )
        before = self.width - 1
        offset = self.capacity - before if accepted is None else accepted - 1
        cached = self.states[read, : offset + before]
        if done == 0:
            offset, cached = 0, x.new_zeros((before, x.shape[-1]))
        padded = torch.cat([cached, x])
        kept = min(self.capacity, padded.shape[0])
        window = padded[offset:]
        self.states[write, self.capacity - kept :] = padded[padded.shape[0] - kept :]
        if self.blocks:
            self._fill(batch, window, x.shape[0])
        y = _convolved(window.to(self.weight.dtype), self.weight, x.shape[0])
        if self.resets and done is not None:
            y[: min(max(before - done, 0), x.shape[0])] = 0
        return (y + x.to(y.dtype) if self.adds else y).to(x.dtype)

    def _fill(self, batch: int, window: Tensor, length: int) -> None:
        """States at the ends of the blocks that became full."""
        size, before = self.block_size, self.width - 1
        start, last = (
            self._of(f"block_idx_{end}_scheduled_token", batch) for end in ("first", "last")
        )
        behind = (length - (size - self._of("num_computed_tokens", batch) % size)) % size
        full = length - behind - (size if behind == 0 else 0)
        for chunk in range(last - start):
            edge = full - (last - start - chunk - 1) * size
            line = self.lines[batch][start + chunk]
            self.states[line, self.capacity - before :] = window[edge : edge + before]


def fused_causal_conv1d(x: Tensor, weight: Tensor, conv_states: Tensor, **given: Any) -> Tensor:
    """Each sequence convolved with what its state has of positions before; states are updated."""
    given = _CONV_DEFAULTS | given
    if given["conv_mode"] not in (None, "default", "pangu"):
        raise wrong(_CONV, "conv_mode", f"is {given['conv_mode']!r}, known: 'default', 'pangu'")
    call = _FusedConvolution(weight, conv_states, given)
    starts = given["query_start_loc"]
    if x.dim() > 2:
        return torch.stack([call.run(b, row) for b, row in enumerate(x)])
    if starts is None:
        raise wrong(_CONV, "query_start_loc", "is needed where sequences follow each other")
    y = torch.zeros_like(x)
    for b, (start, end) in enumerate(pairwise(starts.tolist())):
        if end > start:
            y[start:end] = call.run(b, x[start:end])
    return y


def _in_place(x: Tensor, weight: Tensor, conv_states: Tensor, **given: Any) -> None:
    x.copy_(fused_causal_conv1d(x, weight, conv_states, **given))


_CONV_FORM: dict[str, Any] = {
    "names": {"activation_mode": "activation"},
    "words": {
        "activation_mode": {"None": 0, None: 0, "silu": 1, "swish": 2},
        "conv_mode": {"default": 0, None: 0, "pangu": 1},
    },
}
OPERATORS.add(
    f"{_CONV}(Tensor x, Tensor weight, Tensor(a!) conv_states, {_CONV_OPTIONS}) -> Tensor",
    lambda x, weight, states, **options: like(0)(x),
    form=GeForm("FusedCausalConv1d", **_CONV_FORM),
)(fused_causal_conv1d)
OPERATORS.add(
    f"{_CONV}_v2(Tensor(a!) x, Tensor weight, Tensor(b!) conv_states, {_CONV_OPTIONS}) -> ()",
    lambda *given, **options: None,
    form=GeForm("InplaceFusedCausalConv1d", **_CONV_FORM),
)(_in_place)
