"""What the modes that capture promise, as functions of a device; tests of both devices call them.

Only what a user can see is looked at: results, counters, log lines, files. `graphs` is the one
exception: pools and rebuilt results show nowhere else.
"""

from __future__ import annotations

import concurrent.futures
import copy
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchair
from capture_tools import (
    LongRun,
    compiled,
    compiled_ex,
    counted,
    equal,
    fresh,
    graphs,
    log,
    one_thread,
)
from torchair.capture import graph_pool_handle

RECAPTURED = "recapture_due_to_mutated_input_change"


class Step(nn.Module):
    """Reads a weight, updates an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum(0))
        return x @ self.weight + state

    def change_weight(self) -> torch.Tensor:
        """Other data at another address; gives the old, which must live that long."""
        old = self.weight.data
        self.weight.data = torch.randn_like(old)
        return old


class Steps:
    """A compiled `Step` beside an eager one, called with equal arguments."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.device = device
        self.model = Step().to(device)
        self.fast = compiled(self.model, **options)
        self.alive: list[torch.Tensor] = []

    def __call__(self, rows: int, state: torch.Tensor) -> None:
        x = torch.randn(rows, 4, device=self.device)
        expected_state = state.clone()
        expected = self.model(x, expected_state)
        equal(self.fast(x, state), expected)
        equal(state, expected_state)

    def state(self) -> torch.Tensor:
        """A new argument to update, at a new address."""
        self.alive.append(torch.zeros(4, device=self.device))
        return self.alive[-1]

    def change_weight(self) -> None:
        """Replace the data of the weight."""
        self.alive.append(self.model.change_weight())


# ---- keys, limits, counters


@torch.no_grad()
def case_each_size_is_captured_once(device: torch.device) -> None:
    """Scenario 28."""
    model = nn.Linear(4, 4).to(device)
    fast = compiled(model, dynamic=True)
    with log() as lines:
        for rows in (3, 4, 5, 3, 4, 5):
            x = torch.randn(rows, 4, device=device)
            equal(fast(x), model(x))
    assert counted() == [3]
    assert len(lines.about("Success to capture fx_graph")) == 3
    assert len(lines.about("No find captured AclGraph")) == 3
    assert not lines.about("limit reached")


@torch.no_grad()
def case_at_the_limit_calls_run_eagerly(device: torch.device) -> None:
    """Scenario 28."""
    model = nn.Linear(4, 4).to(device)
    fast = compiled(model, dynamic=True, capture_limit=1)
    fast(torch.randn(3, 4, device=device))
    with log() as lines, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rows in (4, 3, 4, 5):
            x = torch.randn(rows, 4, device=device)
            equal(fast(x), model(x))
    assert len(lines.about("static_capture_size_limit reached")) == 1
    assert len([w for w in warned if "static_capture_size_limit reached" in str(w.message)]) == 1
    assert not lines.about("Success to capture")
    assert counted() == []


@torch.no_grad()
def case_numbers_are_part_of_the_key(device: torch.device) -> None:
    """Scenario 29."""

    def add(x: torch.Tensor, n: float) -> torch.Tensor:
        return x + n

    fast = compiled(add, dynamic=True)
    x, longer = torch.randn(6, device=device), torch.randn(9, device=device)
    for argument, n, captures in (
        (x, 4, [1]),
        (x, 5, [2]),
        (x, 4, [2]),
        (longer, 4, [3]),
        (x, 2.5, [3, 1]),
    ):
        equal(fast(argument, n), argument + n)
        assert counted() == captures


@torch.no_grad()
def case_addresses(device: torch.device) -> None:
    """Scenario 30."""
    steps = Steps(device)
    state = steps.state()
    steps(3, state)
    steps(3, state)  # another x
    assert counted() == [1] and counted(RECAPTURED) == []
    for times in (1, 2):
        steps(3, steps.state())
        assert counted() == [1] and counted(RECAPTURED) == [times]
    steps.change_weight()
    steps(3, state)
    assert counted() == [2]


@torch.no_grad()
def case_frozen_parameters_are_not_in_the_key(device: torch.device) -> None:
    """Scenario 30."""
    model = nn.Linear(4, 4).to(device)
    with warnings.catch_warnings(action="ignore"):  # it reminds of the promise
        fast = compiled(model, frozen_parameter=True)
        x = torch.randn(3, 4, device=device)
        equal(fast(x), model(x))
    old = model.weight.data
    model.weight.data = torch.randn_like(old)
    equal(fast(x), model(x))
    assert counted() == [1]
    del old


@torch.no_grad()
def case_counters_up_to_the_limit(device: torch.device) -> None:
    """Scenario 31."""
    steps = Steps(device, capture_limit=3)
    state = steps.state()
    steps(3, state)
    assert counted() == [1]
    steps(5, state)
    assert counted() == [1, 1]
    steps.change_weight()
    steps(5, state)
    assert counted() == [1, 2]
    for times in (1, 2):
        steps(5, steps.state())
        assert counted() == [1, 2] and counted(RECAPTURED) == [times]
    steps.change_weight()
    steps(5, steps.state())
    assert counted() == [1, 3] and counted(RECAPTURED) == [2]
    with log() as lines, warnings.catch_warnings(action="ignore"):
        steps(5, steps.state())
    assert lines.about("static_capture_size_limit reached")
    assert counted() == [1] and counted(RECAPTURED) == []
    steps(5, steps.state())
    assert counted() == [1]


# ---- results


@torch.no_grad()
def case_lives_of_results(device: torch.device) -> None:
    """Scenario 32, for those who ask for it."""
    model = nn.Linear(4, 4).to(device)
    fast = compiled(model, dynamic=True, share_results=True)
    x, longer = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    first = fast(x)
    assert fast(x) is first  # with one key the result is held
    (graph,) = graphs()
    (one,) = [m.recording.outputs for m in graph.captured.values()]
    assert one.rebuilt == 1
    del first
    equal(fast(x), model(x))
    assert one.rebuilt == 1
    equal(fast(longer), model(longer))
    two = [m.recording.outputs for m in graph.captured.values()][1]
    result = fast(longer)
    equal(result, model(longer))
    count = two.rebuilt
    assert fast(longer) is result and two.rebuilt == count
    del result
    equal(fast(longer), model(longer))
    assert two.rebuilt == count + 1
    equal(fast(x), model(x))


class Several(nn.Module):
    """Results of many kinds: computed, views of one another, of arguments, repeated, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x)
        return y, y[1:], y, x, x[:2], x.sum(0).expand(3, 4), (x > 0).to(torch.int8), x.t() * 2


@torch.no_grad()
def case_every_result_can_be_kept(device: torch.device) -> None:
    """A hundred calls, all results are held and compared in the end; nobody is warned."""
    model = Several().to(device)
    fast = compiled(model, dynamic=True)
    inputs = [torch.randn(5 + i % 4, 4, device=device) for i in range(100)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kept = [fast(x) for x in inputs]
    assert not [str(w.message) for w in warned if "torchair" in w.filename]
    assert counted() == [4]
    for got, x in zip(kept, inputs, strict=True):
        expected = model(x)
        equal(got, expected)
        assert [r.stride() for r in got] == [r.stride() for r in expected]
        assert _sharing((*got, x)) == _sharing((*expected, x))


def _sharing(tensors: tuple[torch.Tensor, ...]) -> list[int]:
    """For each tensor the first one that lies in the same memory."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [memory.index(m) for m in memory]


@torch.no_grad()
def case_results_are_fed_back_while_they_are_kept(device: torch.device) -> None:
    """A result that is the next argument, and is returned again, as it is and as a view."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2 + 1, x, x.t()

    fast = compiled(step)
    x = wanted = torch.randn(3, 3, device=device)
    kept, expected = [], []
    for _ in range(6):
        kept.append(fast(x))
        expected.append(step(wanted))
        x, wanted = kept[-1][0], expected[-1][0]
    equal(kept, expected)


@torch.no_grad()
def case_threads_have_results_of_their_own(device: torch.device) -> None:
    """Threads that call one function never see what another got."""
    model = nn.Linear(4, 4).to(device)
    fast = compiled(model, dynamic=True)
    fast(torch.randn(2, 4, device=device))
    inputs = [[torch.randn(2 + i % 3, 4, device=device) for i in range(40)] for _ in range(4)]

    def work(own: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [fast(x) for x in own]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, inputs))
    assert counted() == [3]
    for own, results in zip(inputs, found, strict=True):
        equal(results, [model(x) for x in own])


def case_results_of_inference_mode(device: torch.device) -> None:
    """Inside of torch.inference_mode results are inference tensors, and outside they are not."""
    model = Several().to(device).requires_grad_(False)
    fast = compiled(model)
    for inference in (False, True, False):
        with torch.inference_mode(inference):
            x = torch.randn(3, 4, device=device)
            got, expected = fast(x), model(x)
            equal(got, expected)
            assert [t.is_inference() for t in got] == [t.is_inference() for t in expected]


@torch.no_grad()
def case_cloned_results_stay(device: torch.device) -> None:
    """With clone_output a result belongs to the caller, whatever else is asked for."""
    model = nn.Linear(4, 4).to(device)
    fast = compiled(model, dynamic=True, clone_output=True, share_results=True)
    inputs = [torch.randn(2 + i % 3, 4, device=device) for i in range(12)]
    for got, x in zip([fast(x) for x in inputs], inputs, strict=True):
        equal(got, model(x))


@torch.no_grad()
def case_results_become_inputs(device: torch.device) -> None:
    """A result, or a part of it, is a legal input of the next call with any key."""
    first, second = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)

    def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(first(x) + y), torch.tanh(second(y) - x)

    fast = compiled(pair, dynamic=True)
    x, y = (torch.randn(9, 4, device=device) for _ in range(2))
    a, b = x.clone(), y.clone()
    for rows in (9, 7, 7, 5, 4, 5, 3, 3):
        rows = min(rows, len(x))
        x, y = fast(y[:rows], x[:rows])
        a, b = pair(b[:rows], a[:rows])
        equal((x, y), (a, b))
        x, y = y, x
        a, b = b, a


@torch.no_grad()
def case_views_of_arguments(device: torch.device) -> None:
    """Results that share memory with an argument share it with that of this very call."""

    def views(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.mul_(2)
        return x + 1, x[1:], x.t(), x, state[:2], state

    fast = compiled(views)
    state = torch.ones(4, device=device)
    for k in range(3):
        x, before = torch.randn(3, 3, device=device), state.clone()
        got = fast(x, state)
        equal(got, views(x, before))
        for view in got[1:4]:
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), k
        assert got[4].data_ptr() == state.data_ptr()


@torch.no_grad()
def case_layouts_of_inputs(device: torch.device) -> None:
    """Inputs may be transposed, have gaps or repeat elements."""

    def mix(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        return (a.t() + 1).view(-1), b * 2 + c, d.sum(-1), d[1] + a[0, :3]

    fast = compiled(mix)
    for _ in range(3):
        args = (
            torch.randn(5, 6, device=device).t(),
            torch.randn(4, 10, device=device)[:, ::2],
            torch.randn(1, 5, device=device).expand(4, 5),
            torch.randn(3, device=device).expand(2, 3),
        )
        equal(fast(*args), mix(*args))


@torch.no_grad()
def case_inputs_without_private_copies(device: torch.device) -> None:
    """With clone_input off the values are those of the call, wherever its tensors are."""
    fast = compiled(lambda x, y: (x * y, x - y), clone_input=False)
    for _ in range(4):
        x, y = torch.randn(5, device=device), torch.randn(5, device=device)
        expected = x * y, x - y
        equal(fast(x, y), expected)


def case_random_numbers(device: torch.device) -> None:
    """Replays draw anew, and a seed repeats them."""
    fast = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(1000, device=device)
    fast(x)

    def draws() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [fast(x).clone() for _ in range(3)]

    one, again = draws(), draws()
    equal(one, again)
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[1], one[2])
    assert all(300 < int((d == 0).sum()) < 700 for d in one)


# ---- pools, files


def new_pool(device: torch.device) -> tuple[int, int]:
    """A handle as users get it."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else graph_pool_handle()


@torch.no_grad()
def case_pools(device: torch.device) -> None:
    """Scenario 33."""
    handle = new_pool(device)
    x, longer = torch.randn(3, device=device), torch.randn(5, device=device)
    for options, pools in (({}, 2), ({"use_graph_pool": handle}, 1)):
        fresh()
        functions = [(lambda x: x + 1), (lambda x: x.exp() * 3)]
        fasts = [compiled(f, dynamic=True, share_results=True, **options) for f in functions]
        for fast, fn in zip(fasts, functions, strict=True):
            equal(fast(x), fn(x))
        found = {g.substrate.pool.handle for g in graphs()}
        assert len(found) == pools, found
        assert not options or found == {handle}
        held, longest = fasts[0](x), fasts[0](longer)
        assert (fasts[0](x) is held) and (not options or fasts[0](longer) is longest)
        equal(fasts[0](longer), longer + 1)


@torch.no_grad()
def case_graph_dumps(device: torch.device) -> None:
    """Scenario 34."""
    x = torch.randn(3, device=device)
    with tempfile.TemporaryDirectory() as folder:
        fast = _dumping("py", folder)
        equal(fast(x), (x + 3).relu())
        files = sorted(Path(folder).glob("*.py"))
        stems = [f.name.split("_graph_")[0] for f in files]
        assert stems == ["dynamo_optimized", "dynamo_original"]
        for file in files:
            text = file.read_text()
            assert "torch.ops.aten.relu" in text and "code: return (x + 3).relu()" in text, text
        for kind in ("txt", "pbtxt"):
            try:
                _dumping(kind, folder)(x)
            except torch._dynamo.exc.BackendCompilerFailed as e:
                assert isinstance(e.inner_exception, NotImplementedError) and kind in str(e)
            else:
                raise AssertionError(f"a dump as {kind} was not refused")


def _dumping(kind: str, folder: str) -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):
        config.mode = "reduce-overhead"
        config.debug.graph_dump.type = kind
        config.debug.graph_dump.path = folder
        backend = torchair.get_npu_backend(compiler_config=config)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return (x + 3).relu()

    return torch.compile(shifted, backend=backend)


_PASSES = [
    "optimize_noop_ops", "recover_view_inplace_pattern", "apply_pattern_passes", "view_to_reshape",
    "remove_cat_ops", "apply_event_closure_with_multi_stream", "apply_event_record",
    "eliminate_dead_code", "reinplace_inplaceable_ops_pass", "reinplace_input_mutated_ops",
    "decompose_auto_functionalized", "replace_dynamic_workspace_ops", "replace_core_limit_nodes",
    "resolve_default_stream_markers",
]  # fmt: skip

_PROGRAM = """
import sys, warnings
import torch, torchair
warnings.simplefilter("ignore")
config = torchair.CompilerConfig()
config.mode = "reduce-overhead"
backend = torchair.get_npu_backend(compiler_config=config)
model = torch.nn.Linear(3, 2).to(sys.argv[1])
torch.compile(model, backend=backend)(torch.randn(4, 3, device=sys.argv[1])).sum().backward()
"""


def case_debug_folder(device: torch.device) -> None:
    """Scenario 38, with the backward of 39."""
    with tempfile.TemporaryDirectory() as folder:
        _debug_run(device, folder, "True")
        assert not (Path(folder) / "torch_compile_debug").exists()
        _debug_run(device, folder, "1")
        (run,) = Path(folder).glob("torch_compile_debug/run_*-pid_*")
        assert {p.name for p in (run / "torchair").iterdir()} == {"debug.log", "model__0"}
        model = run / "torchair" / "model__0"
        for phase in ("forward", "backward"):
            steps = ["graph", *(f"graph_after_{p}" for p in _PASSES)]
            wanted = [f"{n:03d}_aot_{phase}_{what}.txt" for n, what in enumerate(steps)]
            assert sorted(p.name for p in (model / phase).iterdir()) == [*wanted, "output_code.py"]
            code = (model / phase / "output_code.py").read_text()
            assert re.search(r"capture_error_mode\W+global", code), "scenario 40"


def _debug_run(device: torch.device, folder: str, value: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    environment["TORCH_COMPILE_DEBUG"] = value
    environment["INDUCTOR_PROVENANCE"] = "0"  # else torch reads the other variable as a number
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(device)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- training, the other surface


def case_training(device: torch.device) -> None:
    """Scenario 39: forward and backward are graphs of their own, each captured."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    eager = copy.deepcopy(model)
    fast = compiled(model)
    for _ in range(3):
        x = torch.randn(5, 6, device=device)
        for m, call in ((model, fast), (eager, eager)):
            m.zero_grad()
            call(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            equal(mine.grad, theirs.grad)
    assert counted() == [1, 1]


def case_gradients_are_not_required(device: torch.device) -> None:
    """Scenario 39: inference does not need torch.no_grad."""
    model = nn.Linear(4, 4).to(device).requires_grad_(False)
    fast = compiled(model)
    for _ in range(3):
        x = torch.randn(2, 4, device=device)
        result = fast(x)
        assert not result.requires_grad
        equal(result, model(x))
    assert counted() == [1]


@torch.no_grad()
def case_error_modes(device: torch.device) -> None:
    """Scenario 40: the three modes are known, others are an error that lists them."""
    x = torch.randn(4, device=device)
    for mode in ("global", "thread_local", "relaxed"):
        torch._dynamo.reset()
        fast = compiled_ex(lambda x: x * 2, capture_error_mode=mode)
        equal(fast(x), x * 2)
    try:
        compiled_ex(lambda x: x * 2, capture_error_mode="no")(x)
    except Exception as e:
        assert all(mode in str(e) for mode in ("global", "thread_local", "relaxed")), e
    else:
        raise AssertionError("an unknown error mode was taken")


@torch.no_grad()
def case_copies_onto_themselves_are_removed(device: torch.device) -> None:
    """Scenario 40: what decomposition leaves of an update in place is no copy."""
    state = torch.zeros(4, device=device)

    def update(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    fast = compiled_ex(update)
    for k in range(1, 4):
        equal(fast(torch.ones(4, device=device), state), torch.full((4,), 2.0 * k, device=device))
    (graph,) = graphs()
    copies = graph.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert not [n for n in copies if n.args[0] is n.args[1]]


# ---- long runs


class Small(nn.Module):
    """Several results, some of which share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.down(nn.functional.gelu(self.up(x)))
        return y, y[:1] + 1, y.mean(0)


@torch.no_grad()
def case_ten_thousand_replays(device: torch.device) -> None:
    """Keys change, inputs die, results are kept: every value is right and memory does not grow."""
    model = Small().to(device)
    with one_thread():  # others would wait for each other
        for share in (False, True):
            fast = compiled(model, dynamic=True, share_results=share)
            run = LongRun(model, fast, not share, device)
            run.calls(500)
            before = run.memory()
            run.calls(4500)
            grown = run.memory() - before
            assert grown <= run.slack, f"{grown} bytes more after 4500 calls, share_results {share}"
    assert counted() == [6, 6]


CASES: dict[str, Callable[[torch.device], None]] = {
    name.removeprefix("case_"): value
    for name, value in sorted(globals().items())
    if name.startswith("case_")
}
"""All of them by name."""
