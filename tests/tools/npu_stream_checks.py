"""Checks of `torch.npu` streams in compiled code, run in a process of their own: a process has one
emulated device. `python tests/tools/npu_stream_checks.py` prints what failed.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import pytest
import torch

import torchair
from compiling import compiled_afresh
from lane_tools import Meeting, Sessions
from torchair import emulate

equal = torch.testing.assert_close
MODES = ("max-autotune", "reduce-overhead", "npugraph_ex")


def compiled(function, mode="max-autotune"):
    if mode != "npugraph_ex":
        return compiled_afresh(function, mode=mode, dynamic=False)
    torch.compiler.reset()
    return torch.compile(function, backend="npugraph_ex", fullgraph=True, dynamic=False)


def inputs(count=4, size=6):
    torch.manual_seed(0)
    return [torch.randn(size, size).npu() for _ in range(count)]


def manual(in1, in2, in3, in4):
    """The example of the original's manual; the sorts are there to be met."""
    stream1, stream2 = torch.npu.Stream(), torch.npu.Stream()
    event1, event2 = torch.npu.Event(), torch.npu.Event()
    add_result = torch.add(in1, in2)
    B = in3 + in4
    event1.record()
    with torch.npu.stream(stream1):
        event1.wait(stream1)
        mm_result = torch.mm(B, in4).sort().values
        event2.record()
        B.record_stream(stream1)
    mm1 = torch.mm(in3, in4).cumsum(0)
    with torch.npu.stream(stream2):
        event2.wait(stream2)
        add2 = torch.add(in3, in4)
    return add_result, mm_result, mm1, add2


def lanes_of(plan):
    """Types of the nodes of each lane, and who waits for whom."""
    schedule = plan.schedule
    types = [[plan.steps[k].node.type for k in steps] for steps in schedule.steps]
    pairs = [(plan.steps[a].node.type, plan.steps[b].node.type) for a, b in schedule.events]
    return dict(zip(schedule.lanes, types, strict=True)), sorted(pairs)


def check_manual_in_all_modes(sessions):
    for mode in MODES:
        # Sort of one lane and Cumsum of another go on only when both have begun.
        sessions.watch = Meeting("Sort", "Cumsum")
        fast = compiled(manual, mode)
        with torch.no_grad():
            for got, wanted in zip(fast(*inputs()), manual(*inputs()), strict=True):
                equal(got, wanted)
        lanes, events = lanes_of(sessions.plan)
        assert list(lanes) == ["", "stream_1", "stream_2"], (mode, lanes)
        assert lanes["stream_1"] == ["MatMul", "Sort"] and lanes["stream_2"] == ["Add"], lanes
        assert lanes[""] == ["Add", "Add", "MatMul", "Cumsum"], lanes
        assert events == [("Add", "MatMul"), ("Sort", "Add")], events
        kinds = {n.type for n in sessions.made[-1].graph.nodes}
        assert not {k for k in kinds if "Torch" in k or "control" in k.lower()}, kinds


def check_streams_made_inside_are_not_traced(sessions):
    """As the manual compiles it: without `fullgraph`, Dynamo traces what Python code it meets."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    fast = torch.compile(manual, backend="npugraph_ex", dynamic=False)
    for _ in range(2):
        for got, wanted in zip(fast(*inputs()), manual(*inputs()), strict=True):
            equal(got, wanted)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters


def check_labels_of_scopes_and_streams_are_equal(sessions):
    stream = torch.npu.Stream()

    def by_stream(x):
        with torch.npu.stream(stream):
            y = torch.mm(x, x)
            done = stream.record_event()
        z = x + 1
        torch.npu.current_stream().wait_event(done)
        return y * z

    def by_scope(x):
        with torchair.scope.npu_stream_switch("stream_1"):
            y = torch.mm(x, x)
            done = torchair.ops.record()
        z = x + 1
        torchair.ops.wait([done])
        return y * z

    (x,) = inputs(1)
    seen = []
    for function in (by_stream, by_scope):
        equal(compiled(function)(x), by_scope(x))
        graph = sessions.made[-1].graph
        seen.append([(n.name, n.type, dict(n.attrs), list(n.control)) for n in graph.nodes])
    assert [row[:3] for row in seen[0]] == [row[:3] for row in seen[1]]
    assert [[c.name for c in row[3]] for row in seen[0]] == [
        [c.name for c in row[3]] for row in seen[1]
    ]


outer, timer = None, None


def check_other_ways_to_write_it(sessions):
    global outer, timer
    outer, timer = torch.npu.Stream(), torch.npu.Event(enable_timing=True)
    start = torch.npu.Event(enable_timing=True)
    start.record()

    def work(a, b):
        current = torch.npu.current_stream()
        outer.wait_stream(current)
        with torch.npu.stream(outer):
            x = a @ b
            with torch.npu.stream(current):  # back on the default stream
                y = a + b
            timer.record()
        inside = torch.npu.Stream()
        inside.wait_event(timer)
        with inside, torch.npu.stream(None):
            z = x.view(-1) * 2
        current.wait_stream(inside)
        w = z.sum() + y
        if not inside.query():
            w = w * 0
        torch.npu.set_stream(outer)
        v = a * 3
        torch.npu.set_stream(current)
        outer.synchronize()
        return w + v

    a, b = inputs(2)
    with warnings.catch_warnings(action="error"):
        equal(compiled(work)(a, b), (a @ b).sum() * 2 + a + b + a * 3)
    lanes, _ = lanes_of(sessions.plan)
    assert {"stream_1", "stream_2", ""} == set(lanes), lanes
    assert lanes["stream_1"][0] == "MatMul" and lanes["stream_2"][0] == "Mul", lanes
    assert start.elapsed_time(timer) > 0  # recorded when the call had ended
    assert torch.npu.current_stream() == torch.npu.default_stream()


def check_missing_waits_are_told_and_results_are_right(sessions):
    side = torch.npu.Stream()

    def work(x):
        y = torch.mm(x, x)
        with torch.npu.stream(side):
            return torch.exp(y)

    (x,) = inputs(1)
    with pytest.warns(UserWarning, match="no event orders them") as seen:
        equal(compiled(work)(x), torch.exp(x @ x))
    (text,) = [str(w.message) for w in seen if "no event" in str(w.message)]
    assert "on stream_1" in text and "reads what y on the default stream" in text, text
    _, events = lanes_of(sessions.plan)
    assert events == [("MatMul", "Exp")]


def check_updates_in_place_and_priorities(sessions):
    def work(cache, x):
        side, done = torch.npu.Stream(priority=-1), torch.npu.Event()
        cache.add_(1)
        done.record()  # Dynamo refuses that after an update of an argument
        with torch.npu.stream(side):
            done.wait()
            y = cache * x
        torch.npu.current_stream().wait_stream(side)
        return y

    for mode in MODES:
        cache, x = inputs(2)
        before = cache.clone()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            equal(compiled(work, mode)(cache, x), (before + 1) * x)
        told = [w for w in seen if "priority of a stream has no effect" in str(w.message)]
        assert len(told) == (mode == "max-autotune"), mode  # once in a process
        equal(cache, before + 1)
    priority = [n.attr("_user_stream_priority", "") for n in sessions.made[-1].graph.nodes]
    assert "-1" in priority


def check_scopes_of_the_user_stay_nested(sessions):
    side, other = torch.npu.Stream(), torch.npu.Stream()

    def work(x):
        with torch.npu.stream(side):
            a = torch.exp(x)
            with torchair.scope.limit_core_num(4, 8):
                b = torch.sin(x)
                with torch.npu.stream(other):
                    c = torch.cos(x)
                d = torch.tan(x)
        torch.npu.synchronize()
        torch.npu.current_stream().wait_stream(side)
        torch.npu.current_stream().wait_stream(other)
        return a + b + c + d

    (x,) = inputs(1)
    equal(compiled(work)(x), work(x))
    found = {
        n.type: (n.attr("_user_stream_label", ""), n.attr("_op_aicore_num", ""))
        for n in sessions.made[-1].graph.nodes
    }
    assert found["Exp"] == ("stream_1", "") and found["Sin"] == ("stream_1", "4"), found
    assert found["Cos"] == ("stream_2", "4") and found["Tan"] == ("stream_1", "4"), found


def check_a_stream_left_behind_is_refused(sessions):
    side = torch.npu.Stream()

    def work(x):
        torch.npu.set_stream(side)
        return x + 1

    try:
        compiled(work)(*inputs(1))
    except Exception as e:
        assert "use `with torch.npu.stream(s)`" in str(e), e
    else:
        raise AssertionError("no error")


def check_training(sessions):
    side = torch.npu.Stream()

    def work(x, w):
        with torch.npu.stream(side):
            y = (x @ w).relu()
        torch.npu.current_stream().wait_stream(side)
        return (y * x).sum()

    grads = []
    for function in (work, compiled(work)):
        x, w = (t.requires_grad_() for t in inputs(2))
        function(x, w).backward()
        grads.append((x.grad, w.grad))
    for got, wanted in zip(*grads, strict=True):
        equal(got, wanted)


def main() -> int:
    torch.set_num_threads(2)
    emulate.install()
    failed = 0
    for name, check in [(n, f) for n, f in globals().items() if n.startswith("check_")]:
        with pytest.MonkeyPatch.context() as patch:
            try:
                check(Sessions(patch))
            except Exception:
                failed += 1
                print(f"== {name}\n{traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
