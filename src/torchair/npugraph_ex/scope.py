"""Scopes of npugraph_ex: the one of torchair's that captured graphs know besides streams."""

from torchair.ops.scope import limit_core_num

__all__ = ["limit_core_num"]
