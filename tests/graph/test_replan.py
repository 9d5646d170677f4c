"""Plans for other sizes: of a family where that works, each from the graph where it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import models
import torchair
from compiling import compiled_afresh as compiled
from like_eager import assert_same, leaves, twin
from native_check import capture
from torchair import ge
from torchair.codegen.cpu.target import cpu
from torchair.engine.compile import GraphCompiler
from torchair.engine.plan.arena import Buffer, Packing, lower_bound, place
from torchair.engine.plan.planner import Planner
from torchair.engine.plan.records import Plan
from torchair.engine.plan.shape_family import ShapeFamily, ShapePlan
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.ge.shapes import symbol
from torchair.operators import infer

SIZES = (8, 3, 64, 7, 33, 2, 16, 5)


@dataclass
class Watch:
    """What became of the plans made inside: for one size alone, or of a family."""

    alone: int = 0
    members: int = 0
    families: int = 0
    different: list[Any] = field(default_factory=list)


@contextmanager
def watch() -> Iterator[Watch]:
    """Counts plans, and holds those of families against what the planner makes of these sizes."""
    seen = Watch()
    learn, plan = Planner.learn, GraphCompiler.plan

    def learned(self: Planner, *args: Any) -> Plan | ShapePlan:
        made = learn(self, *args)
        seen.families += isinstance(made, ShapePlan)
        return made

    def compared(self: GraphCompiler, inputs: Any, given: Any) -> Plan | ShapePlan:
        made = plan(self, inputs, given)
        if isinstance(made, Plan):
            seen.alone += 1
            return made
        seen.members += 1
        full = self.planner.plan(self.inputs.facts(inputs), [t.stride() for t in inputs])
        for one in (full, made):
            self.generate(one)  # packs constants
        own = made.plan()
        pairs = [(t, full.constants[slot]) for slot, t in own.constants.items()]
        if shown(full) != shown(own) or not all(torch.equal(a, b) for a, b in pairs):
            seen.different.append([tuple(t.shape) for t in inputs])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "learn", learned)
        patch.setattr(GraphCompiler, "plan", compared)
        yield seen


def shown(plan: Plan) -> Any:
    """What a plan does, to compare it with another; memory may be arranged differently."""
    allocations = [
        (r.kind, r.meta.shape, r.meta.stride(), r.meta.dtype, r.tied_to) for r in plan.allocations
    ]
    steps = [(s.node, s.kind, s.args, s.outs) for s in (*plan.bound, *plan.steps)]
    natives = [
        (
            n.order,
            [id(s) if isinstance(s, torch.Tensor) else s for s in n.addresses],
            n.numbers,
            n.work,
            n.copies,
            n.pointwise,
        )
        for n in plan.natives
    ]
    places = {slot: (allocation.slot, offset) for slot, (allocation, offset) in plan.places.items()}
    ends = plan.outputs, plan.write_backs, plan.read
    return allocations, steps, natives, places, ends


def kernels() -> int:
    return len(cpu().library._addresses)


def check(fn: Any, run: Any, args: tuple[Any, ...]) -> None:
    """One call, against eager: results and what becomes of the arguments."""
    mine = [twin(a) for a in args]
    with torch.no_grad():
        wanted, got = fn(*args), run(*mine)
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        assert_same(a, b)
    for a, b in zip(mine, args, strict=True):
        assert_same(a, b)


def check_sizes(
    fn: Any, make: Callable[[int], tuple[Any, ...]], sizes: tuple[int, ...] = SIZES
) -> None:
    """Many sizes, of which Dynamo may give one or two a graph of their own. Those of a graph are of
    one family, or two, are what the planner would make, and need no new kernel."""
    run = compiled(fn, dynamic=True)
    with watch() as seen, capture() as graphs:
        check(fn, run, make(sizes[0]))
        made = kernels()
        for n in sizes[1:]:
            check(fn, run, make(n))
            if len(graphs) == 1:
                assert kernels() == made
    assert not seen.different
    assert (seen.alone, seen.members) == (0, len(sizes))
    assert len(graphs) <= 2 and seen.families <= 2 * len(graphs)


# ---- functions ----


def noise(*dims: int) -> torch.Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(sum(dims)))


def slices(x):
    half = x.shape[0] // 2
    return x[:, 1:] + x[:, :-1], x[::2] * 2, x[:, -2:].exp(), x[half:] * 3


def transposes(x):
    return (x.t() @ x).relu(), x.t().contiguous(), (x.t() + 1).t() * 2, x[None].transpose(1, 2) + 1


def joins(x, y):
    return torch.cat([x, y]) * 2, torch.cat([x.t(), y.t()], 1) + 1, torch.stack([x, x]).sum(0)


def reductions(x):
    return x.sum(), x.sum(0), x.mean(1), x.softmax(-1), x.amax(0, True) - x, F.layer_norm(x, (6,))


def updates(x, y):
    x.add_(y)
    x[1:].mul_(2)
    return x.sum(0)


def two_updates(x, y):
    y.copy_(x * 2)
    x[:, 0] = 7.0
    return x + y


def cache_update(cache, new, positions):
    cache.index_copy_(0, positions, new)
    return cache.sum(1)


def views_out(x):
    y = x * 2
    return y.t(), y[1:], y.reshape(-1), x[1:], x


def reshapes(x):
    heads = x.reshape(x.shape[0], 2, -1).transpose(0, 1)
    return x.reshape(-1, 2) + 1, heads.reshape(2, -1) * 2, x.flatten() * 3, heads.sum(0)


def broadcasts(x, y):
    return x[:, None, :] + y[None], x.unsqueeze(1).expand(-1, 3, -1) * 2, x.repeat(2, 1) + 1


def numbers_of_sizes(x):
    n = x.shape[0]
    i = torch.arange(n)
    return x * n, x / n, torch.where(i[:, None] >= i, 0.0, -1.0), x.new_zeros(n + 1, n // 2) + n


def alike_but_for_numbers(x):
    left, right = F.pad(x, (1, 0)), F.pad(x, (0, 1))
    return left * 2, right * 2, x.flip(0) * 2, x.flip(1) * 2, torch.arange(1, x.shape[0] + 1) * 2


def half_native(x):
    y = torch.cumsum(x * 2, 0)
    z = torch.sort(y + 1, 0)[0]
    return z * 2, y.exp()


def lookups(x, i):
    return x[i] * 2, F.embedding(i, x) + 1, x.gather(0, i[:, None].expand(-1, x.shape[1]))


def attention(x):
    q = x.reshape(2, -1, 2, 8).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return out.transpose(1, 2).reshape(2, -1, 16)


def images(x):
    return (x * 2).relu(), x.mean((2, 3)), F.max_pool2d(x, 2)


FUNCTIONS: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    "slices": (slices, lambda n: (noise(n, 6),)),
    "transposes": (transposes, lambda n: (noise(n, 5),)),
    "transposed input": (transposes, lambda n: (noise(5, n).t(),)),
    "expanded input": (slices, lambda n: (noise(1, 6).expand(n, 6),)),
    "joins": (joins, lambda n: (noise(n, 4), noise(n + 1, 4))),
    "reductions": (reductions, lambda n: (noise(n, 6),)),
    "updates": (updates, lambda n: (noise(n, 4), noise(n, 4))),
    "updates of a transposed input": (updates, lambda n: (noise(4, n).t(), noise(n, 4))),
    "two updates": (two_updates, lambda n: (noise(n, 4), noise(n, 4))),
    "cache": (cache_update, lambda n: (noise(n, 4), noise(2, 4), torch.tensor([1, 0]))),
    "views as results": (views_out, lambda n: (noise(n, 4),)),
    "reshapes": (reshapes, lambda n: (noise(n, 8),)),
    "reshapes that copy": (reshapes, lambda n: (noise(8, n).t(),)),
    "broadcasts": (broadcasts, lambda n: (noise(n, 4), noise(n, 4))),
    "numbers of sizes": (numbers_of_sizes, lambda n: (noise(n, n),)),
    "alike but for numbers": (alike_but_for_numbers, lambda n: (noise(n, n),)),
    "half native": (half_native, lambda n: (noise(n, 4),)),
    "lookups": (lookups, lambda n: (noise(n, 4), torch.arange(n).flip(0))),
    "attention": (attention, lambda n: (noise(2, n, 16),)),
    "images": (images, lambda n: (noise(2, 3, n + 2, n + 3),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    check_sizes(*FUNCTIONS[name])


# ---- models ----


@pytest.mark.parametrize("frozen", [False, True])
def test_mlp(frozen):
    config = models.MLP["tiny"]
    model = models.build(models.Mlp, config).eval()
    run = compiled(model, dynamic=True, frozen_parameter=frozen)
    with watch() as seen:
        for batch in SIZES:
            check(model, run, models.mlp_inputs(config, batch))
    assert (seen.alone, seen.families, seen.members) == (0, 1, len(SIZES))
    assert not seen.different


@pytest.mark.parametrize("kind", ["tiny", "tiny explicit"])
def test_bert_in_batch_and_length(kind):
    config = replace(models.BERT[kind], layers=1 if "explicit" in kind else 2)
    model = models.build(models.Bert, config).eval()
    run = compiled(model, dynamic=True)
    sizes = [(3, 12), (5, 7), (2, 64), (7, 3), (3, 33), (5, 2), (6, 6)]
    with watch() as seen:
        check(model, run, models.bert_inputs(config, *sizes[0]))
        made = kernels()
        for batch, length in sizes[1:]:
            check(model, run, models.bert_inputs(config, batch, length))
    assert (seen.alone, seen.families, seen.members) == (0, 1, len(sizes))
    assert not seen.different
    assert kernels() == made


def test_llama_prompts_of_any_length_fill_its_cache():
    config = models.LLAMA["tiny"]
    eager = models.build(models.Llama, config).eval()
    other = copy.deepcopy(eager)
    run = compiled(other, dynamic=True)
    with watch() as seen:
        for length, start in [(5, 0), (3, 5), (7, 8), (2, 15), (6, 17)]:
            check(eager, run, models.llama_inputs(config, length, start))
            for a, b in zip(other.cache(), eager.cache(), strict=True):
                torch.testing.assert_close(a, b)
    assert (seen.alone, seen.families, seen.members) == (0, 1, 5)
    assert not seen.different


def test_sizes_that_happen_to_equal_other_dims():
    """The planner may choose other strides then; the family stays with those it knows."""

    def heads(x):
        return x.reshape(x.shape[0], -1, 4, 6).transpose(1, 2).relu().sum(-1) + 1

    run = compiled(heads, dynamic=True)
    with watch() as seen:
        for batch, length in [(3, 5), (4, 4), (2, 6), (6, 2), (8, 8)]:
            check(heads, run, (noise(batch, length, 24),))
    assert (seen.alone, seen.families, seen.members) == (0, 1, 5)


def sum_of_two() -> TorchNpuGraph:
    """e^(x + y) of two inputs with a dim of its own each."""
    with Graph("sum", infer) as g:
        dims = [symbol("a"), symbol("b")]
        x, y = (
            Data(index=k, dtype=DataType.DT_FLOAT, shape=[d, 4], placement="CPU")
            for k, d in enumerate(dims)
        )
        NetOutput([ge.Exp(ge.Add(x, y))])
    session = TorchNpuGraph("sum")
    session.load(g)
    return session


def test_dims_of_their_own_that_are_broadcast_or_not():
    """Nothing in the graph says that the two go together, and one call may broadcast either."""
    session = sum_of_two()
    for n, m in ((8, 8), (5, 1), (1, 6), (3, 3), (1, 1), (0, 1), (7, 1)):
        x, y = noise(n, 4), noise(m, 4)
        torch.testing.assert_close(session.run([x, y])[0], (x + y).exp())


def test_buffers_move_together_while_sizes_grow(monkeypatch):
    """Each needs more at another size; what follows from their places is worked out seldom."""

    def products(x):
        longer = [torch.cat([x, x.new_ones(40 * k, 4)]) for k in range(6)]
        return sum(y.t() @ y for y in [p @ p[:4] for p in longer])

    run, moved = compiled(products, dynamic=True), []
    barriers = ShapeFamily.barriers
    monkeypatch.setattr(
        ShapeFamily, "barriers", lambda self, *a: moved.append(1) or barriers(self, *a)
    )
    for n in range(8, 72):
        check(products, run, (noise(n, 4).round(),))
    assert 2 < len(moved) < 22


def test_only_the_last_size_has_guards():
    session = sum_of_two()
    for n in (3, 5, 5, 5, 7, 7, 7, 5, 5):
        session.run([noise(n, 4), noise(n, 4)])
    plans = session.current.plans
    assert len(plans) == 3
    assert [p for p in plans if p.guards is not None] == [plans.latest]


def test_tensors_that_grow_together_and_then_do_not():
    """As those of a cache: taken for equal as long as all are."""

    def cache(xs):
        longer = [torch.cat([x, x[:1] * 2]) for x in xs]
        return [*longer, sum(x.sum(0) for x in longer)]

    torch._dynamo.reset()
    run = torch.compile(cache, backend=torchair.get_npu_backend(), dynamic=True)
    with watch() as seen:
        for sizes in ([5] * 6, [6] * 6, [9] * 6, [4, 5, 6, 7, 8, 9], [5, 5, 6, 6, 7, 7], [7] * 6):
            xs = [noise(n, 4).round() for n in sizes]
            with torch.no_grad():
                for got, wanted in zip(run(xs), cache(xs), strict=True):
                    assert torch.equal(got, wanted), sizes
    assert seen.families <= 3


# ---- what a family is not for ----


def test_other_strides_get_a_family_of_their_own():
    run = compiled(reductions, dynamic=True)
    with watch() as seen:
        for n in (8, 3, 16):
            check(reductions, run, (noise(n, 6),))
        for n in (5, 9, 4):
            check(reductions, run, (noise(6, n).t(),))
        check(reductions, run, (noise(10, 6),))
        check(reductions, run, (noise(6, 11).t(),))
    assert (seen.alone, seen.families, seen.members) == (0, 2, 8)


def test_dims_that_only_the_data_tell_are_planned_from_the_graph():
    def nonzero(x):
        return (x.nonzero() + 1) * 2

    run = compiled(nonzero, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), watch() as seen:
        for n in SIZES:
            check(nonzero, run, (noise(n),))
    assert (seen.alone, seen.members) == (len(SIZES), 0)


def test_sizes_that_do_not_go_together_are_told_as_by_the_planner():
    """Nobody promised that the two dims are equal: planning must find out."""
    s = sum_of_two()
    with watch() as seen:
        for n in (8, 3, 5):
            x, y = noise(n, 4), noise(4, n).t().contiguous()
            torch.testing.assert_close(s.run([x, y])[0], (x + y).exp())
        with pytest.raises(GraphError, match="cannot take these sizes"):
            s.run([noise(6, 4), noise(7, 4)])
    assert (seen.alone, seen.families, seen.members) == (0, 1, 3)


# ---- other parts ----


def test_sizes_in_turn_from_many_threads():
    run = compiled(transposes, dynamic=True)
    inputs = [noise(n, 5) for n in range(2, 26)]
    with torch.no_grad():
        run(inputs[0])
        wanted = [transposes(x) for x in inputs]
        got: list[Any] = [None] * len(inputs)

        def work(first: int) -> None:
            with torch.no_grad():
                for k in range(first, len(inputs), 4):
                    got[k] = run(inputs[k])

        threads = [Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_small_constants_of_several_dims_follow_from_sizes():
    def positions(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], x.shape[1] + 1).unsqueeze(0)
        return x * at.float() + at

    run = compiled(positions, dynamic=True)
    for n in SIZES:
        check(positions, run, (noise(3, n),))


@pytest.mark.parametrize("seed", range(20))
def test_packing_keeps_live_buffers_apart(seed):
    random = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=random))

    lives = [(first := number(30), first + number(8)) for _ in range(40)]
    buffers = [Buffer(1 + number(5000), *life) for life in lives]
    place(buffers)
    packing = Packing(buffers)
    others = [Buffer(number(9000), *life) for life in lives]
    for group in (buffers, others):
        size = packing.place(group)
        assert size >= lower_bound(group)
        for k, a in enumerate(group):
            assert a.offset % 64 == 0 and a.offset + a.size <= size
            for b in group[:k]:
                apart = a.last < b.first or b.last < a.first
                assert apart or a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
