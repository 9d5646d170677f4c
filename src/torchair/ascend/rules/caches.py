"""Fused operators of the `npu` library that fall apart into operators with generated code: two
caches of pages, each updated in place; queries and keys turned by the same angles."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.ge.build import builder
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, rank_of, shape_of
from torchair.ge.shapes import is_static
from torchair.operators.slicing import END as _END

CACHE_RULES = RuleSet()
_BLOCKED = "PA_NZ"
_PLAIN = ("PA", "PA_BNSD")
_QUANTISED = ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")
_LATENT = ("kv_cache", "kr_cache")
_OPTIONAL = ("compress_lens", "compress_seq_offset", "seq_lens")


@CACHE_RULES("ScatterPaKvCache")
def PagedCachesApart(node: Node, inner: Inner) -> Build:
    """ScatterPaKvCache(keys, values) -> PagedUpdate(keys), PagedUpdate(values)"""
    if any(node.inputs.get(port) is not None for port in _OPTIONAL):
        raise Mismatch("caches are compressed", node)
    slots, blocked = node.value_on("slot_mapping"), node.attr("cache_mode") == _BLOCKED
    pairs = [(node.value_on(f"{name}_cache"), node.value_on(name)) for name in ("key", "value")]
    if not all(is_static((cache.shape or (None,))[1:]) for cache, _ in pairs):
        raise Mismatch("dims of the caches are not known", node)

    def one(cache: Value, tokens: Value) -> Value:
        dims = list(cache.shape or ())
        rest = [dims[1], dims[3]] if blocked else dims[2:]
        if list(tokens.shape or ())[1:] != rest:
            tokens = ge.Reshape(tokens, ge.Const([-1, *rest]))
        made: Value = builder("PagedUpdate")(cache, tokens, slots, blocked=blocked)
        return made

    return lambda: [one(*pair) for pair in pairs]


@CACHE_RULES("KvRmsNormRopeCache")
def LatentCacheApart(node: Node, inner: Inner) -> Build:
    """KvRmsNormRopeCache -> RmsNorm and InterleaveRope of two parts, PagedUpdate of both caches"""
    if node.attr("cache_mode") not in _PLAIN or any(node.inputs.get(p) for p in _QUANTISED):
        raise Mismatch("caches are quantised, or no plain pages", node)
    kv, gamma, index = (node.value_on(port) for port in ("kv", "gamma", "index"))
    caches = [node.value_on(port) for port in ("k_cache", "ckv_cache")]
    split, total = (gamma.shape or (None,))[0], (kv.shape or (None,))[-1]
    if not isinstance(split, int) or not isinstance(total, int):
        raise Mismatch("dims are not known", kv)
    if {v.dtype for v in (kv, gamma, *caches)} != {kv.dtype} or rank_of(index) != 1:
        raise Mismatch("types differ", node)

    def part(start: int, end: int) -> Value:
        made: Value = ge.StridedSlice(kv, [0, 0, 0, start], [_END, _END, _END, end], [1, 1, 1, 1])
        return made

    def build() -> list[Value]:
        latent, _ = ge.RmsNorm(part(0, split), gamma, epsilon=node.attr("epsilon"))
        turned = ge.InterleaveRope(part(split, total), node.value_on("cos"), node.value_on("sin"))
        rows = [ge.Reshape(turned, [-1, 1, total - split]), ge.Reshape(latent, [-1, 1, split])]
        new = [
            builder("PagedUpdate")(cache, tokens, index, blocked=False)
            for cache, tokens in zip(caches, rows, strict=True)
        ]
        return [*new, turned, latent]

    return build


@CACHE_RULES("MlaPrologV3")
def LatentPrologApart(node: Node, inner: Inner) -> Build:
    """MlaPrologV3 of two caches -> MlaPrologV3 of as many rows as there are tokens, and PagedUpdate
    of both caches with these rows. So the caches are updated in place, and none is copied."""
    if node.attr("cache_mode") != "PA_BSND":
        raise Mismatch("the caches are no plain pages", node)
    index = node.inputs.get("cache_index")
    if not isinstance(index, Value) or rank_of(index) != 1 or index.node.type == "Const":
        raise Mismatch("slots are not a list of integers that comes from outside", node)
    caches = [node.value_on(port) for port in _LATENT]
    tokens = _count(index)
    capacity = min(_places(cache) for cache in caches)
    if tokens is None or tokens >= capacity:
        raise Mismatch("there are as many tokens as places in the caches", node)

    def rows(cache: Value) -> Value:
        dims = [tokens, 1, 1, int(shape_of(cache)[-1])]
        return ge.Const(torch.zeros(dims, dtype=ge_to_torch(cache.dtype)), readable=False)

    def build() -> list[Value]:
        small = [rows(cache) for cache in caches]
        fed = {port: value for port, value in node.inputs.items() if value is not None}
        fed |= dict(zip(_LATENT, small, strict=True))
        fed["cache_index"] = ge.Const(torch.arange(tokens), readable=False)
        results = builder("MlaPrologV3")(**fed, **_numbers(node))
        made = results[0].node
        made.attrs |= {name: a for name, a in node.attrs.items() if name not in made.attrs}
        found = {value.port: value for value in results}
        for port, cache in zip(_LATENT, caches, strict=True):
            flat = ge.Reshape(found[port], [tokens, 1, shape_of(cache)[-1]])
            found[port] = builder("PagedUpdate")(cache, flat, index, blocked=False)
        return [found[value.port] for value in node.outputs]

    return build


def _count(index: Value) -> int | None:
    """The number of slots, None if it may change."""
    (count,) = index.shape or (None,)
    return count if isinstance(count, int) else None


def _places(cache: Value) -> int:
    """Tokens that a cache has places for, 0 if that is not known."""
    dims = list(cache.shape or ())
    known = len(dims) == 4 and dims[2] == 1 and is_static(dims)
    return int(dims[0]) * int(dims[1]) if known else 0


def _numbers(node: Node) -> dict[str, Any]:
    proto = node.prototype
    assert proto is not None
    return {spec.name: node.attr(spec.name) for spec in proto.attrs if spec.name in node.attrs}


@CACHE_RULES("ApplyRotaryPosEmb")
def RotaryApart(node: Node, inner: Inner) -> Build:
    """ApplyRotaryPosEmb(query, key, cos, sin) -> RotaryMul(query), RotaryMul(key)"""
    if node.attr("rotary_mode") != "half":
        raise Mismatch("pairs are not in halves", node)
    cos, sin = node.value_on("cos"), node.value_on("sin")
    return lambda: [ge.RotaryMul(node.value_on(x), cos, sin) for x in ("query", "key")]
