"""Attributes that nodes of FX and GE graphs and scopes of users have in common."""

STREAM_LABEL = "_user_stream_label"
"""The name of the stream that a node is on."""
STREAM_PRIORITY = "_user_stream_priority"
"""The priority of that stream: -1 is a high one, 0 the default."""
SUPER_KERNEL = "_super_kernel_scope"
"""The name of the `super_kernel` scope that a node is in."""
SUPER_KERNEL_OPTIONS = "_super_kernel_options"
