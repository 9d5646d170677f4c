"""Fused operators of the `npu` library that fall apart into operators with generated code: two
caches of pages, each updated in place; queries and keys turned by the same angles."""

from __future__ import annotations

from torchair import ge
from torchair.ge.build import builder
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet
from torchair.ge.shapes import is_static

CACHE_RULES = RuleSet()
_BLOCKED = "PA_NZ"
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


@CACHE_RULES("ApplyRotaryPosEmb")
def RotaryApart(node: Node, inner: Inner) -> Build:
    """ApplyRotaryPosEmb(query, key, cos, sin) -> RotaryMul(query), RotaryMul(key)"""
    if node.attr("rotary_mode") != "half":
        raise Mismatch("pairs are not in halves", node)
    cos, sin = node.value_on("cos"), node.value_on("sin")
    return lambda: [ge.RotaryMul(node.value_on(x), cos, sin) for x in ("query", "key")]
