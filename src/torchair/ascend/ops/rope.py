"""Rotary embeddings of queries and keys: angles given for each position, or taken from a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchair.ascend.ops.activation import check_rotary, rotary
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import ATB, NpuOperators, like, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
LAYOUTS = ("", "BSND", "SBND", "BNSD", "TND")
"""Names of layouts; the place of a name is the number that GE has for it."""
_MODES = ("half", "quarter", "interleave")


def _check(layout: str, rotary_mode: str) -> None:
    name = "npu_apply_rotary_pos_emb"
    if layout not in (*LAYOUTS[1:], "BSH"):
        raise wrong(name, "layout", f"{layout!r} is none of {', '.join(LAYOUTS[1:])}")
    if rotary_mode not in _MODES:
        raise wrong(name, "rotary_mode", f"{rotary_mode!r} is none of {', '.join(_MODES)}")


def _fake_apply(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    _check(layout, rotary_mode)
    return like(0)(query), like(0)(key)


def apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the same angles, in place, as the device does; both are returned.
    Graphs copy them first."""
    _check(layout, rotary_mode)
    for x in (query, key):
        x.copy_(rotary(x, cos, sin, rotary_mode))
    return query, key


OPERATORS.add(
    "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, "
    "str layout='BSND', str rotary_mode='half') -> (Tensor, Tensor)",
    _fake_apply,
    form=GeForm(
        "ApplyRotaryPosEmb",
        copied=("query", "key"),
        words={"layout": {name: k for k, name in enumerate(LAYOUTS) if k} | {"BSH": 1}},
    ),
)(apply_rotary_pos_emb)


@OPERATORS.add(
    "npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    like(0),
    form=GeForm("InterleaveRope"),
)
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours are turned; the result has all first members before all second ones."""
    check_rotary(x.shape, "interleave-half")
    return rotary(x, cos, sin, "interleave-half")


# ---- angles from a cache: rows of cosines, then sines ----


def _turned(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, neighbours: bool) -> Tensor:
    """The first features of each head are turned, two for each angle; x is (tokens, ...)."""
    heads = x.reshape(x.shape[0], -1, head_size)
    width, kind = 2 * cos.shape[-1], wide(x.dtype)
    part = heads[..., :width].to(kind)
    cos, sin = cos.to(kind).unsqueeze(1), sin.to(kind).unsqueeze(1)
    a, b = (part[..., ::2], part[..., 1::2]) if neighbours else part.chunk(2, -1)
    both = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(both, -1).flatten(-2) if neighbours else torch.cat(both, -1)
    return torch.cat([turned.to(x.dtype), heads[..., width:]], -1).reshape(x.shape)


def _sections(x: Tensor, sections: Sequence[int], interleaved: bool) -> Tensor:
    """Angles of several kinds of positions, (kinds, tokens, angles), as one row for each token:
    runs of columns one after the other, or columns by turns."""
    if not interleaved:
        return torch.cat([p[k] for k, p in enumerate(x.split(list(sections), -1))], -1)
    columns = torch.arange(x.shape[-1], device=x.device)
    kinds = torch.where(columns < 3 * sections[1], columns % 3, 0)  # three kinds: time and place
    return x.gather(0, kinds.expand(1, x.shape[1], -1)).squeeze(0)


@OPERATORS.add(
    "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, "
    "*, int[]? mrope_section=None, str? rotary_mode='half', str? cache_mode='default') "
    "-> (Tensor, Tensor)",
    lambda positions, query, key, *rest, **options: like(0, 1)(query, key),
)
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Queries and keys, (tokens, features), turned by the angles of their positions; with several
    positions for each token, `mrope_section` says how many angles each of them gives."""
    name, mode = "npu_mrope", rotary_mode or "half"
    if mode not in ("half", "interleave", "interleaved"):
        raise wrong(name, "rotary_mode", f"is {mode!r}, known are 'half' and 'interleaved'")
    if cache_mode not in (None, "default", "interleave"):
        raise wrong(name, "cache_mode", f"is {cache_mode!r}, known are 'default' and 'interleave'")
    cos, sin = cos_sin_cache[positions.to(torch.int64)].chunk(2, -1)
    if positions.dim() > 1:
        sections = mrope_section or ()
        if len(sections) != positions.shape[0] or sum(sections) != cos.shape[-1]:
            reason = f"{list(sections)} is not {positions.shape[0]} parts of {cos.shape[-1]} angles"
            raise wrong(name, "mrope_section", reason)
        cos, sin = (_sections(x, sections, cache_mode == "interleave") for x in (cos, sin))
    neighbours = mode != "half"
    return (
        _turned(query, cos, sin, head_size, neighbours),
        _turned(key, cos, sin, head_size, neighbours),
    )


@OPERATORS.add(
    "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox_style) -> ()",
    lambda *given: None,
    space=ATB,
)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> None:
    """The same for one position a token, in place."""
    cos, sin = cos_sin_cache[positions.reshape(-1).to(torch.int64)].chunk(2, -1)
    for x in (query, key):
        rows = x.reshape(cos.shape[0], -1)
        x.copy_(_turned(rows, cos, sin, head_size, not is_neox_style).reshape(x.shape))
