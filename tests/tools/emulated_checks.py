"""Checks of the emulated device, run in a process of their own: a process has one such device.

`python tests/tools/emulated_checks.py eager` runs the functions `eager_*` and prints what failed.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import socket
import sys
import threading
import traceback
import warnings
import weakref
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

from torchair import emulate

equal = torch.testing.assert_close
NPU_CASES = ("npu_fused_cases", "npu_cache_cases", "npu_state_cases", "npu_latent_cases")


def raises(kind, call, *words):
    """The text of the error that a call raises, which contains all the words."""
    try:
        call()
    except kind as e:
        missing = [w for w in words if w not in str(e)]
        assert not missing, f"{missing} not in: {e}"
        return str(e)
    raise AssertionError(f"no {kind.__name__}")


# ---- tensors


def eager_tensors_are_on_the_device_over_host_memory():
    x = torch.randn(3, 4)
    y = x.npu()
    assert y.device == torch.device("npu:0") and y.is_npu and not x.is_npu and not y.is_cpu
    assert type(y) is torch.Tensor and y.data_ptr() != x.data_ptr()
    equal(y.cpu(), x)
    host = torch.npu.host.as_host(y)
    assert host.data_ptr() == y.data_ptr() and host.is_cpu
    host.fill_(2)
    assert y.sum().item() == 24
    assert "device='npu:0'" in repr(y)
    assert y.npu() is y and y.to("npu:1").device.index == 1
    raises(TypeError, lambda: y.numpy(), "npu:0")


def eager_views_share_memory_and_updates_show():
    x = torch.arange(12.0).npu()
    view = x.view(3, 4).t()[1]
    assert view._base is x or view._is_view()
    view.add_(100)
    assert x.tolist()[1::4] == [101, 105, 109]
    part = x[2:6]
    torch.relu_(part.neg_())
    assert x.tolist()[2:6] == [0, 0, 0, 0] and x._version > 0
    assert x.chunk(3)[1].data_ptr() == x.data_ptr() + 16
    y = torch.randn(2, 3, dtype=torch.complex64).npu()
    equal(y.conj().cpu(), y.cpu().conj())
    equal(y.real.cpu() + 1, y.cpu().real + 1)
    equal(y.conj().imag.cpu(), y.cpu().conj().imag)


def eager_results_can_be_given():
    x = torch.randn(3, 4)
    y = x.npu()
    for dims in ((0,), (3, 4), (2,), (20,)):
        out = torch.empty(dims, device="npu")
        with warnings.catch_warnings(action="ignore"):
            torch.add(y, y, out=out)
        equal(out.cpu(), x + x)
    values, indices = torch.empty(0).npu(), torch.empty(0, dtype=torch.long).npu()
    torch.sort(y, out=(values, indices))
    equal(values.cpu(), x.sort()[0])


def eager_memory_can_grow_and_change():
    x = torch.arange(4.0).npu()
    x.resize_(6)
    assert x.tolist()[:4] == [0, 1, 2, 3] and x.shape == (6,)
    x.resize_(2)
    assert x.tolist() == [0, 1]
    x.set_()
    assert x.numel() == 0
    y = torch.arange(6.0).npu()
    x.set_(y.untyped_storage(), 1, (2, 2), (2, 1))
    assert x.tolist() == [[1, 2], [3, 4]]
    x.data = torch.zeros(1).npu()
    assert x.tolist() == [0] and y.tolist()[1] == 1


def eager_numbers_keep_types():
    for dtype in (torch.int8, torch.float16, torch.float32, torch.bool):
        x = torch.ones((), dtype=dtype)
        y = x.npu()
        for f in (
            lambda t: t * 2,
            lambda t: t + 2.5,
            lambda t: 2 - t.float(),
            lambda t: t / 3,
            lambda t: t > 0.5,
            lambda t: torch.where(t > 0, t, 2),
        ):
            if dtype is torch.bool and f(x).dtype is torch.bool:
                continue
            assert f(y).dtype is f(x).dtype, (dtype, f(y).dtype, f(x).dtype)
    y = torch.ones((), dtype=torch.int8).npu()
    assert (y & 3).dtype is y.fmod(2).dtype is y.bitwise_left_shift(1).dtype is torch.int8


def eager_devices_do_not_mix():
    x, y = torch.randn(3), torch.randn(3).npu()
    words = "Expected all tensors to be on the same device"
    raises(RuntimeError, lambda: x + y, words, "cpu", "npu:0")
    raises(RuntimeError, lambda: y.npu(1) + y, words, "npu:1")
    equal((y + torch.tensor(1.0)).cpu(), y.cpu() + 1)  # a number of the host is welcome
    equal(y[torch.tensor([0, 2])].cpu(), y.cpu()[[0, 2]])
    raises(RuntimeError, lambda: y.npu(99), "npu:99", "torchair run --devices")
    raises(NotImplementedError, lambda: y.to_sparse(), "sparse")


def eager_current_device_is_each_threads_own():
    torch.npu.set_device(2)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert torch.npu.current_device() == 2 and seen == [0]
    assert torch.ones(1).npu().device.index == 2 and torch.ones(1, device="npu").get_device() == 2
    with torch.npu.device("npu:3"):
        assert torch.npu.current_device() == 3 and torch.randn(1, device="npu").get_device() == 3
    with torch.npu.device_of(torch.ones(1, device="npu:4")):
        assert torch.npu.current_device() == 4
    torch.npu.set_device("npu:0")
    with torch.device("npu"):
        assert torch.zeros(2).device.type == "npu" and nn.Linear(2, 2).weight.is_npu
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    torch.accelerator.set_device_index(5)
    assert torch.npu.current_device() == torch.accelerator.current_device_index() == 5
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.device_count() == torch.npu.device_count() == 8


def eager_modules_train_as_on_the_cpu():
    torch.manual_seed(0)
    ours = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "lstm": nn.LSTM(16, 5, 2),
            "gru": nn.GRU(5, 6),
            "out": nn.Linear(6, 2),
        }
    )
    theirs = copy.deepcopy(ours).npu()
    assert theirs["conv"].weight.is_npu and isinstance(theirs["conv"].weight, nn.Parameter)

    def loss(m, x):
        x = m["norm"](m["conv"](x)).relu().flatten(2)
        return m["out"](m["gru"](m["lstm"](x)[0])[0]).square().sum()

    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        for model, data in ((ours, x), (theirs, x.npu())):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            optimizer.zero_grad()
            loss(model, data).backward()
            optimizer.step()
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            equal(a.grad.cpu(), b.grad)
            equal(a.detach().cpu(), b.detach())


def eager_attention_is_the_cpus():
    for heads, mask in ((2, None), (2, "bool"), (1, "float"), (2, "causal")):
        q = torch.randn(2, 2, 5, 8, requires_grad=True)
        k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for _ in range(2))
        given = {"enable_gqa": heads == 1}
        if mask == "causal":
            given["is_causal"] = True
        elif mask is not None:
            visible = torch.ones(5, 5).tril().bool()
            given["attn_mask"] = visible if mask == "bool" else torch.randn(5, 5)
        there = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        expected = F.scaled_dot_product_attention(q, k, v, **given)
        copies = [t.detach().npu().requires_grad_() for t in (q, k, v)]
        got = F.scaled_dot_product_attention(*copies, **there)
        assert torch.equal(got.cpu(), expected)
        expected.sum().backward()
        got.sum().backward()
        for a, b in zip(copies, (q, k, v), strict=True):
            assert torch.equal(a.grad.cpu(), b.grad)


def eager_fused_attention_is_chosen_as_torch_does():
    """A tracer has no memory to ask about: the choice is made from dims alone."""
    from torchair.ascend.emulate.choices import suits

    q = torch.randn(2, 4, 5, 8)
    keys = [
        q,
        q[:, :2],
        q[:1],
        q[..., :4],
        q[:, :, :0],
        q.double(),
        q.transpose(2, 3),
        q[0],
        torch.randn(2, 4, 5, 16)[..., ::2],
    ]
    dims = ((1, 5), (5, 1), (2, 1, 5, 5), (3, 5), (4, 5, 5), (5, 5))
    masks = [
        None,
        torch.ones(5, 5).bool(),
        *map(torch.zeros, dims),
        torch.zeros(5, 5).requires_grad_(),
    ]
    for k in keys:
        for mask in masks:
            for drop, groups in ((0.0, False), (0.0, True), (0.1, False)):
                try:
                    choice = torch._fused_sdp_choice(q, k, k, mask, drop, enable_gqa=groups)
                except RuntimeError:
                    continue
                ours = suits(q, k, k, mask, drop, groups)
                about = (tuple(k.shape), mask is not None and tuple(mask.shape), drop, groups)
                assert ours == (choice == 1), about


def eager_custom_operators_run():
    library = torch.library.Library("emulated_checks", "DEF")
    library.define("twice(Tensor x, *, Device? device=None) -> Tensor")
    library.impl(
        "twice", lambda x, device=None: torch.empty_like(x, device=device).copy_(x) * 2, "CPU"
    )
    x = torch.randn(3)
    y = torch.ops.emulated_checks.twice(x.npu(1), device=torch.device("npu:1"))
    assert y.device == torch.device("npu:1")
    equal(y.cpu(), x * 2)
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: x + 1, "CPU")
    library.impl("own", lambda x: x + 5, "PrivateUse1")
    equal(torch.ops.emulated_checks.own(x.npu()).cpu(), x + 5)


# ---- files, copies, memory


def eager_operators_of_the_npu_library_equal_the_cpu():
    for module in NPU_CASES:
        for case in import_module(module).CASES:
            expected = case.call(*(t.clone() for t in case.inputs))
            found = case.call(*(t.npu() for t in case.inputs))
            assert all(t.device.type == "npu" for t in found), case
            for ours, cpu in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.cpu(), cpu, msg=lambda m, c=case: f"{c}: {m}")


def eager_save_and_load():
    state = {"x": torch.randn(3, 4).npu(1)[1:], "n": 3}
    file = io.BytesIO()
    torch.save(state, file)
    for place, wanted in ((None, "npu:1"), ("cpu", "cpu"), ("npu:2", "npu:2")):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded["x"].device == torch.device(wanted)
        equal(loaded["x"].cpu(), state["x"].cpu())
    model = nn.Linear(3, 2).npu()
    clone = copy.deepcopy(model)
    assert clone.weight.is_npu and clone.weight.data_ptr() != model.weight.data_ptr()
    clone.load_state_dict(nn.Linear(3, 2).state_dict())
    assert clone.weight.is_npu
    storage = torch.UntypedStorage(8, device="npu")
    assert storage.device.type == "npu" and storage.nbytes() == 8 and storage.is_npu
    assert torch.arange(3.0).untyped_storage().npu().device.type == "npu"


def eager_data_loaders_pin():
    data = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=3, pin_memory=True, num_workers=1)
    batches = list(loader)
    assert all(t.is_pinned() for batch in batches for t in batch)
    assert batches[1][0].npu(non_blocking=True).tolist() == [3, 4, 5]
    x = torch.ones(2)
    assert not x.is_pinned() and x.pin_memory().is_pinned()
    raises(RuntimeError, lambda: x.npu().pin_memory(), "pin")


def eager_memory_is_counted():
    base = torch.npu.memory_allocated()
    x = torch.zeros(1024).npu()
    assert torch.npu.memory_allocated() - base == 4096
    view = x.view(2, 512)
    y = x + 1
    assert torch.npu.memory_allocated() - base == 8192
    del x, y
    assert torch.npu.memory_allocated() - base == 4096  # the view holds it
    del view
    assert torch.npu.memory_allocated() == base
    assert torch.npu.max_memory_allocated() - base >= 8192
    assert torch.npu.memory_reserved() >= base + 8192
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == base
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == base
    stats = torch.npu.memory_stats()
    assert stats["allocated_bytes.all.current"] == base and stats["num_ooms"] == 0
    assert torch.npu.memory_allocated(7) == 0
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total and "allocated" in torch.npu.memory_summary()


# ---- random numbers, mixed precision


def eager_seeds_give_the_cpus_numbers():
    torch.manual_seed(7)
    expected = torch.randn(4), torch.rand(3), F.dropout(torch.ones(50), 0.4)
    torch.manual_seed(7)
    got = [
        torch.randn(4, device="npu"),
        torch.rand(3, device="npu"),
        F.dropout(torch.ones(50).npu(), 0.4),
    ]
    for a, b in zip(got, expected, strict=True):
        equal(a.cpu(), b)
    torch.npu.manual_seed(1)
    state = torch.npu.get_rng_state()
    first = torch.randn(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="npu"), first)
    host = torch.get_rng_state()
    torch.randn(3, device="npu")
    assert torch.equal(torch.get_rng_state(), host)  # another generator
    own = torch.Generator("npu").manual_seed(3)
    assert own.device == torch.device("npu:0") and isinstance(own, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    drawn = torch.randn(3, generator=own, device="npu")
    equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(3)))
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.randn(3, device="npu")


def eager_autocast():
    x = torch.randn(4, 4).npu()
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype is F.linear(x, x).dtype is torch.bfloat16
        assert (x @ x).exp().dtype is F.layer_norm(x.bfloat16(), (4,)).dtype is torch.float32
        assert (x + x).dtype is torch.float32
        assert x.sum(dtype=torch.float64).dtype is torch.float64
        raises(RuntimeError, lambda: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()), "logits")
    with torch.npu.amp.autocast(dtype=torch.float16):
        assert (x @ x).dtype is torch.float16
    model = nn.Linear(4, 1).npu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.npu.amp.GradScaler(init_scale=8.0)
    before = model.weight.clone()
    with torch.autocast("npu"):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)


# ---- streams, events, graphs


def eager_streams_and_events():
    default = torch.npu.current_stream()
    assert default == torch.npu.default_stream() and default.device == torch.device("npu:0")
    stream = torch.npu.Stream()
    assert stream != default and stream.query()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == stream
        torch.ones(3).npu().record_stream(stream)
    with torch.npu.Stream() as other:
        assert torch.npu.current_stream() == other
    assert torch.npu.current_stream() == default
    stream.wait_stream(default)
    stream.wait_event(stream.record_event())
    end.record()
    end.synchronize()
    torch.npu.synchronize()
    assert start.elapsed_time(end) > 0 and end.query()
    raises(RuntimeError, lambda: start.elapsed_time(torch.npu.Event(enable_timing=True)), "record")
    raises(ValueError, lambda: start.elapsed_time(torch.npu.Event()), "enable_timing")


def eager_graphs_replay():
    x, total = torch.zeros(3).npu(), torch.zeros(3).npu()
    kept = total.clone()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        y = (x * 2 + 1).relu()
        total += y
        total[1:].mul_(3)
        raises(RuntimeError, lambda: y.sum().item(), "captured")
        inner = torch.npu.NPUGraph()
        raises(RuntimeError, inner.capture_begin, "already")
    assert torch.equal(total, kept)  # captured, not done
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [5, 5, 5] and total.tolist() == [5, 15, 15]
    graph.replay()
    assert total.tolist() == [10, 60, 60]
    graph.reset()
    raises(RuntimeError, graph.replay, "captured")
    assert torch.npu.graph_pool_handle() != torch.npu.graph_pool_handle()
    raises(AttributeError, lambda: torch.npu.nonsense, "torch.npu.nonsense")
    assert not hasattr(torch.npu, "nonsense") and torch.npu.npugraph_ex.CompilerConfig


def eager_graphs_hold_their_memory():
    x = torch.ones(3).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
    x.data = torch.full((3,), 5.0).npu()  # the graph reads what it captured
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    drawn = torch.zeros(4).npu()
    with torch.npu.graph(other := torch.npu.NPUGraph()):
        drawn.copy_(torch.randn(4, device="npu"))
    other.replay()
    first = drawn.clone()
    other.replay()
    assert not torch.equal(first, drawn)  # new numbers for each replay


# ---- compiled graphs


def backend(mode: str = "max-autotune", **settings):
    import torchair

    config = torchair.CompilerConfig()
    config.mode = mode
    for name, value in settings.items():
        setattr(config.experimental_config, name, value)
    with warnings.catch_warnings(action="ignore"):
        return torchair.get_npu_backend(compiler_config=config)


MODES = ("max-autotune", "reduce-overhead")


def compiled_models_equal_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).eval()
    there, x = copy.deepcopy(model).npu(), torch.randn(4, 8)
    for mode in MODES:
        for frozen in (False, True):
            torch._dynamo.reset()
            fast = torch.compile(
                there, backend=backend(mode, frozen_parameter=frozen), dynamic=False, fullgraph=True
            )
            with torch.no_grad():
                for scale in (1, 2, 3):
                    got = fast(x.npu() * scale)
                    assert got.device == torch.device("npu:0") and type(got) is torch.Tensor
                    equal(got.cpu(), model(x * scale))


def compiled_graphs_draw_from_the_generator_of_the_device():
    def f(x):
        return F.dropout(x, 0.5), torch.rand(3, device=x.device), torch.poisson(x)

    x = torch.ones(4, 50).npu()
    for mode in MODES:
        torch._dynamo.reset()
        fast = torch.compile(f, backend=backend(mode), fullgraph=True)
        for seed in range(3):
            drawn = []
            for function in (f, fast):
                torch.manual_seed(seed)
                torch.rand(2), torch.rand(7, device="npu")  # different numbers of both
                drawn.append([*function(x), torch.rand(3, device="npu"), torch.rand(2)])
            for wanted, got in zip(*drawn, strict=True):
                assert torch.equal(got.cpu(), wanted.cpu())


def compiled_graphs_see_what_happens_to_arguments():
    for mode in MODES:
        torch._dynamo.reset()
        model = nn.Linear(3, 2, bias=False).npu()
        fast = torch.compile(model, backend=backend(mode), dynamic=False)
        x = torch.randn(4, 3).npu()
        with torch.no_grad():
            equal(fast(x).clone(), model(x))
            model.weight.mul_(2)
            equal(fast(x).clone(), model(x))
            model.weight.data = torch.randn(2, 3).npu()  # other memory under the same name
            equal(fast(x).clone(), model(x))
            equal(fast(x.npu()[1:].clone()).clone(), model(x[1:]))


def compiled_updates_and_views():
    def work(x, y):
        x.add_(1)
        return x, x.t(), y, y * 2, x.sum()

    for mode in MODES:
        torch._dynamo.reset()
        fast = torch.compile(work, backend=backend(mode), fullgraph=True)
        for _ in range(3):
            x, y = torch.randn(2, 3).npu(), torch.randn(3).npu()
            mine = x.clone()
            a, b, c, d, e = fast(x, y)
            equal(x, mine + 1)
            assert a is x and c is y and b.data_ptr() == x.data_ptr() and b.shape == (3, 2)
            equal(d, y * 2)
            equal(e, (mine + 1).sum())


def compiled_results_on_either_device():
    x = torch.randn(3).npu()
    fast = torch.compile(lambda x: (x.cpu() + 1, x + 1), backend=backend(), fullgraph=True)
    host, device = fast(x)
    assert host.is_cpu and device.is_npu
    equal(host, device.cpu())
    for mode in MODES:
        torch._dynamo.reset()
        make = torch.compile(lambda n: torch.ones(n, device="npu") * 2, backend=backend(mode))
        assert make(3).is_npu and make(3).tolist() == [2, 2, 2]
    both = torch.compile(lambda x, h: x + h.to(x.device), backend=backend())(x, torch.ones(3))
    assert both.is_npu
    equal(both, x + 1)
    there = torch.compile(lambda x: x * 2, backend=backend())(x.npu(3))
    assert there.device == torch.device("npu:3")


def compiled_generic_nodes_run_on_the_host():
    def noise(x):
        return torch.special.i0(x) + torch.arange(3, device=x.device)

    def branches(x):
        return torch.cond(
            x.sum() > 0, lambda t: t + torch.ones(3, device=t.device), lambda t: t - 1, (noise(x),)
        )

    for work, mode in ((noise, MODES[0]), (noise, MODES[1]), (branches, MODES[0])):
        torch._dynamo.reset()
        fast = torch.compile(work, backend=backend(mode), fullgraph=True)
        for x in (torch.ones(3).npu(), -torch.ones(3).npu()):
            equal(fast(x), work(x))


def compiled_sizes_may_vary():
    for mode in MODES:
        torch._dynamo.reset()
        fast = torch.compile(lambda x: (x @ x.t()).softmax(-1), backend=backend(mode), dynamic=True)
        for n in (3, 5, 3, 7):
            x = torch.randn(n, 4).npu()
            equal(fast(x), (x @ x.t()).softmax(-1))


def compiled_graphs_update_pieces_of_one_buffer():
    """Other dims at the same address are another argument."""
    for mode in MODES:
        torch._dynamo.reset()
        fast = torch.compile(lambda x: x.add_(1).sum(), backend=backend(mode), dynamic=True)
        buffer = torch.zeros(8).npu()
        assert [fast(buffer[:n]).item() for n in (3, 5, 3, 8)] == [3, 8, 9, 19], mode
        assert buffer.tolist() == [4, 4, 4, 2, 2, 1, 1, 1]


def compiled_calls_that_cannot_be_replayed():
    """Beyond the limit of captures calls run eagerly; what the engine does not take is taped."""
    import torchair

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.debug.aclgraph.static_capture_size_limit = 1
    model = nn.Linear(3, 3).npu()
    limited = torchair.get_npu_backend(compiler_config=config)

    def work(x):
        return model(x) + torch.ones(3, device=x.device)

    with torch.no_grad():
        fast = torch.compile(work, backend=limited, dynamic=True)
        for n in (2, 4, 2, 5):
            x = torch.randn(n, 3).npu()
            equal(fast(x), work(x))

        def strided(x):
            return torch.as_strided(model(x), (2, 2), (1, 1)) * 2

        fast = torch.compile(strided, backend=backend("reduce-overhead"), dynamic=False)
        for _ in range(3):
            x = torch.randn(2, 3).npu()
            equal(fast(x), strided(x))


def compiled_training():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    theirs = copy.deepcopy(ours).npu()
    x = torch.randn(5, 4)
    ours(x).square().mean().backward()
    torch.compile(theirs, backend=backend())(x.npu()).square().mean().backward()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        equal(a.grad.cpu(), b.grad)


def compiled_attention_is_fused():
    import torchair
    from torchair.engine.session import TorchNpuGraph

    found = []
    load = TorchNpuGraph.load

    def seen(self, graph, *args, **kwargs):
        found.extend(n.type for n in graph.nodes)
        load(self, graph, *args, **kwargs)

    TorchNpuGraph.load = seen
    try:
        q = torch.randn(1, 2, 4, 8).npu()
        for guard in (torch.no_grad, torch.inference_mode):
            torch._dynamo.reset()
            found.clear()
            with guard():
                fast = torch.compile(F.scaled_dot_product_attention, backend=backend())
                equal(fast(q, q, q), F.scaled_dot_product_attention(q, q, q))
            assert "FusedInferAttentionScore" in found, found
    finally:
        TorchNpuGraph.load = load
    assert torchair is not None


def compiled_graphs_are_captured_as_one_operator():
    for mode in MODES:
        torch._dynamo.reset()
        total = torch.zeros(3).npu()

        def work(x, total):
            total.add_(x)
            return x * 2 + 1

        fast = torch.compile(work, backend=backend(mode))
        x = torch.zeros(3).npu()
        fast(x, total)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = fast(x, total)
        assert len(graph._tape.entries) == 1, mode
        assert total.tolist() == [0, 0, 0]
        x.fill_(4)
        graph.replay()
        assert y.tolist() == [9, 9, 9] and total.tolist() == [4, 4, 4], mode
        graph.replay()
        assert total.tolist() == [8, 8, 8]


def compiled_streams_are_part_of_the_graph():
    stream = torch.npu.Stream()

    def work(x):
        with torch.npu.stream(stream):
            y = x * 2
        torch.npu.current_stream().wait_stream(stream)
        return y + 1

    x = torch.randn(3).npu()
    equal(torch.compile(work, backend=backend(), fullgraph=True)(x), x * 2 + 1)


def compiled_arguments_are_not_kept():
    fast = torch.compile(lambda x: x * 2, backend=backend())
    x = torch.randn(3).npu()
    fast(x)
    fast(x)
    gone = weakref.ref(x.untyped_storage())
    del x
    assert gone() is None


def transformers_llama_and_bert():
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
    )

    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2)).eval()
    bert = BertForSequenceClassification(BertConfig(**small)).eval()
    ids = torch.randint(1, 64, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    there = {k: v.npu() for k, v in inputs.items()}
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        twin = copy.deepcopy(llama).npu()
        assert torch.equal(
            twin.generate(**there, **greedy).cpu(), llama.generate(**inputs, **greedy)
        )
        for model in (llama, bert):
            twin = copy.deepcopy(model).npu()
            expected = model(**inputs).logits
            assert torch.equal(twin(**there).logits.cpu(), expected)
            for dynamic in (False, True):
                torch._dynamo.reset()
                fast = torch.compile(twin, backend=backend(), dynamic=dynamic)
                equal(fast(**there).logits.cpu(), expected)
    for model, labels in ((llama, ids), (bert, torch.tensor([0, 1]))):
        _same_training_step(model, inputs, labels)


def _same_training_step(model, inputs, labels):
    """One step with dropout: losses, gradients and new parameters to the last bit."""
    results = []
    for device in ("cpu", "npu"):
        own = copy.deepcopy(model).to(device).train()
        optimizer = torch.optim.AdamW(own.parameters(), 0.01)
        torch.manual_seed(3)
        moved = {k: v.to(device) for k, v in inputs.items()}
        loss = own(**moved, labels=labels.to(device)).loss
        loss.backward()
        optimizer.step()
        results.append(
            [
                loss.detach(),
                *(p.grad for p in own.parameters()),
                *(p.detach() for p in own.parameters()),
            ]
        )
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs.cpu())


# ---- process groups


def distributed_collectives():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_collectives, args=(rank, 2, port)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0, 0]


def _collectives(rank, world, port):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import torch_npu

    torch.npu.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("hccl", init_method=address, rank=rank, world_size=world)
    assert dist.get_backend() == "hccl" and dist.is_hccl_available()
    mine = torch.full((2,), float(rank + 1)).npu()
    assert mine.device.index == rank

    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [3, 3] and total.get_device() == rank
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    assert total.tolist() == [6, 6]
    whole = torch.empty(4).npu()
    dist.all_gather_into_tensor(whole, mine)
    assert whole.tolist() == [1, 1, 2, 2]
    parts = [torch.empty(2).npu() for _ in range(world)]
    dist.all_gather(parts, mine)
    assert parts[1].tolist() == [2, 2]
    given = mine.clone()
    dist.broadcast(given, 1)
    assert given.tolist() == [2, 2]
    part = torch.empty(2).npu()
    dist.reduce_scatter_tensor(part, torch.arange(4.0).npu())
    assert part.tolist() == [[0, 2], [4, 6]][rank]
    swapped = torch.empty(2).npu()
    dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]).npu())
    assert swapped.tolist() == [rank, 10 + rank]
    if rank == 0:
        dist.send(torch.tensor([7.0]).npu(), 1)
    else:
        dist.recv(part[:1], 0)
        assert part[0].item() == 7
    told = [None] * world
    dist.all_gather_object(told, {"rank": rank})
    assert told[1] == {"rank": 1}
    uneven = torch.empty(3).npu()
    piece = torch.full((rank + 1,), float(rank)).npu()
    torch_npu.distributed.all_gather_into_tensor_uneven(uneven, piece, [1, 2])
    assert uneven.tolist() == [0, 1, 1]
    kept = torch.empty(rank + 1).npu()
    torch_npu.distributed.reduce_scatter_tensor_uneven(kept, torch.arange(3.0).npu(), [1, 2])
    assert kept.tolist() == [[0], [2, 4]][rank]

    def summed(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert summed(mine).tolist() == [7, 7]
    fast = torch.compile(summed, backend=backend(), fullgraph=True)
    assert fast(mine).tolist() == [7, 7] and fast(mine).get_device() == rank

    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1).npu(), device_ids=[rank])
    model(torch.full((2, 3), float(rank)).npu()).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1, 1]]  # the mean of 0 and 2
    dist.barrier()
    dist.destroy_process_group()


def main(group: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert emulate.install() and emulate.install() and emulate.installed()
    checks = {n: f for n, f in globals().items() if n.startswith(f"{group}_")}
    assert checks, group
    failed = 0
    for name, check in checks.items():
        try:
            check()
        except Exception:
            failed += 1
            print(f"== {name}\n{traceback.format_exc()}")
    print(f"{len(checks) - failed} of {len(checks)} checks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
