"""Operators of the `air` library: scopes, ordering marks. In eager execution they do nothing."""

from torchair.ops.library import record, wait

__all__ = ["record", "wait"]
