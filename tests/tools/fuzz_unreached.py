"""What random programs cannot exercise, each with the reason."""

from __future__ import annotations

_GPU = "only on a GPU: its kernels serve few rows, and its library wants channels last"
_REFUSED = "the operator raises an error for such operands, so there is no result to compare"

UNREACHED: dict[tuple[str, str], str] = {
    ("pass", "lay_out_filters"): _GPU,
    ("pattern", "DequantisedProduct"): _GPU,
    (
        "rule declines",
        "quantised: scales are not for columns of the weight or pieces of them",
    ): _GPU,
    (
        "rule declines",
        "rewrite: it may not, for now",
    ): "only where `torchair.verify` looks for the rule that made a result wrong",
    ("rule declines", "attention: it has dropout"): _REFUSED,
    ("rule declines", "attention: keys and values are several tensors"): _REFUSED,
    ("rule declines", "attention: what is added to the scores has no heads"): _REFUSED,
    ("rule declines", "caches: caches are compressed"): _REFUSED,
    ("fusion declines", "softmax over {}"): _REFUSED,
    ("fusion declines", "it is not the update of a cache"): _REFUSED,
}
"""By kind and name, as `fuzz_coverage.everything` has them."""
