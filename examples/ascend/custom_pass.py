"""A pass of one's own: two operators go to a stream of their own, a third one waits for them.

    torchair run custom_pass.py

The pass puts marks into the FX graph. The dumps in `graph_dump` show what they become, the trace in
`prof` shows it running: open it with TensorBoard, or at ui.perfetto.dev.
"""

import logging

import torch
import torch_npu

import torchair
from torchair import logger

logger.setLevel(logging.WARNING)  # logging.DEBUG shows the FX graph before and after each pass


class Model(torch.nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        abs = torch.abs(mm)
        add = torch.add(abs, 1)
        sub = torch.sub(x, mm)
        return add, sub


def mm_and_abs_on_their_own_stream(gm, example_inputs, config: torchair.CompilerConfig) -> None:
    """mm and abs run on the stream `stream_1`, and sub starts when abs is done."""
    graph = gm.graph
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target == torch.ops.aten.mm.default:
            with graph.inserting_before(node):
                marks = (["_user_stream_label"], ["stream_1"])
                graph.call_function(torch.ops.air.scope_enter.default, args=marks)
        if node.target == torch.ops.aten.abs.default:
            with graph.inserting_after(node):
                record = graph.call_function(torch.ops.air.record.default, args=())
            with graph.inserting_after(record):
                graph.call_function(torch.ops.air.scope_exit.default, args=())
        if node.target == torch.ops.aten.sub.Tensor:
            with graph.inserting_before(node):
                graph.call_function(torch.ops.air.wait.default, args=([record],))


def compiled(model: torch.nn.Module):
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = mm_and_abs_on_their_own_stream
    config.debug.graph_dump.type = "pbtxt"
    config.debug.graph_dump.path = "./graph_dump"
    # Without fusion every operator has a slice of its own in the trace.
    config.ge_config.optimization_switch = "AutomaticUbFusion:off"
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))


def main() -> None:
    model = Model().npu()
    fast = compiled(model)
    x = torch.randn([3, 3]).npu()
    for ours, eager in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(ours, eager)

    profiler = torch_npu.profiler
    experimental_config = profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level2)
    with profiler.profile(
        activities=[profiler.ProfilerActivity.NPU, profiler.ProfilerActivity.CPU],
        with_stack=True,
        record_shapes=False,
        profile_memory=False,
        schedule=profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=0),
        experimental_config=experimental_config,
        on_trace_ready=profiler.tensorboard_trace_handler("./prof"),
    ) as prof:
        fast(x)
    prof.step()
    print("equals eager; graphs in graph_dump, a trace in prof")


if __name__ == "__main__":
    main()
