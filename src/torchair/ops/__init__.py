"""Operators of the `air` library: ordering marks, events, print, attention. Marks and events order
what runs on streams; eager code runs in order anyway."""

from torchair.ops.attention import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
)
from torchair.ops.output import npu_print
from torchair.ops.streams import (
    npu_create_tagged_event,
    npu_record_tagged_stream,
    npu_tagged_event_record,
    npu_tagged_event_wait,
    record,
    wait,
)

__all__ = [
    "npu_create_tagged_event",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_print",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
]
