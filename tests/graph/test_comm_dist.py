"""`torch.distributed` in compiled functions: under `torchrun`, patched, by parts of the processes,
with other sizes, and beside computing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forked
import torchair
from comm_groups import spawned
from compiling import compiled_afresh as compiled
from op_harness import convert, run
from processes import alone, run_forked, run_ranks
from torchair.convert import Decline
from torchair.convert.comm import _reduction
from torchair.ops import hcom
from torchair.ops.collectives import REDUCTIONS, group_text, named_group

ROOT = Path(__file__).resolve().parents[2]
define = torch.ops.npu_define


def torchrun(folder, *command):
    """Two processes that run a script."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, *map(str, command)],
        env=alone(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torchrun(tmp_path):
    """Every collective alone, and a tensor-parallel block: see comm_run.py."""
    torchrun(tmp_path, ROOT / "tests" / "tools" / "comm_run.py", tmp_path)
    assert sorted(p.name for p in tmp_path.glob("done*")) == ["done0", "done1"]


@pytest.mark.parametrize(("option", "lines"), [([], 4), (["--train"], 4)], ids=("logits", "train"))
def test_models_of_transformers(tmp_path, option, lines):
    """A Llama and a BERT that are cut, and steps of DDP and FSDP2, in both modes."""
    said = run_ranks(2, str(ROOT / "examples" / "tensor_parallel.py"), *option, cwd=tmp_path)
    assert [text.count("equal to one process") for text in said] == [lines, 0]


# ---- two processes in this test


def given(rank, rows=4):
    return torch.arange(rows * 3.0).reshape(rows, 3) + 100 * rank


def check_define(rank, folder):
    """Operators of `npu_define`: eager, converted and compiled."""
    group = ("", [0, 1], 2)
    rows = rank + 2
    counts, starts = [6, 9], [0, 6]

    def fn(x):
        parts = define.allgather([x.new_empty(2, 3), x.new_empty(3, 3)], x[:rows], *group)
        same = define.allgather([x, x], x, *group)
        stacked = define.allgather_in_tensor(x.new_empty(2, 4, 3), x, *group)
        joined = define._allgather_in_tensor_shape([8, 3], x, *group)
        uneven = define.allgather_in_tensor_uneven(
            x[:rows], 3 * rows, counts, "", [0, 1], 2, starts
        )
        scattered = define.reduce_scatter_tensor_uneven(
            joined[:5], "sum", counts, starts, 3 * rows, "", [0, 1], 2
        )
        root = define.broadcast(x * 2, None, *group, 1)
        return (*parts, *same, stacked, joined, uneven, scattered, root)

    both = given(0), given(1)
    whole = torch.cat(both)
    expected = (
        both[0][:2],
        both[1][:3],
        *both,
        torch.stack(both),
        whole,
        torch.cat([both[0][:2], both[1][:3]]),
        (whole[:5] * 2).split([2, 3])[rank],
        both[1] * 2,
    )
    x = given(rank)
    conversion = convert(fn, x)
    types = [n.type for n in conversion.graph.nodes if n.type.startswith("Hcom")]
    assert types == [
        "HcomBroadcast",
        "HcomBroadcast",
        "HcomAllGather",
        "HcomAllGather",
        "HcomAllGather",
        "HcomAllGatherV",
        "HcomReduceScatterV",
        "HcomBroadcast",
    ]
    for got in (fn(x), run(conversion, [x]), compiled(fn)(x)):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e)


def test_operators_of_npu_define(tmp_path):
    spawned(check_define, tmp_path)


def check_patched(rank, folder):
    def gather(x):
        made = [x.new_empty(2, 3), x.new_empty(3, 3)]
        dist.all_gather(made, x[: rank + 2])
        return torch.cat(made)

    def reduce(x):
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return x + 1

    def late(x):
        return dist.all_reduce(x, async_op=True)

    original = dist.all_reduce
    with pytest.warns(UserWarning, match="not needed"):
        torchair.patch_for_hcom()
    replaced = dist.all_reduce
    torchair.patch_for_hcom()
    assert dist.all_reduce is replaced and replaced is not original
    torch.testing.assert_close(
        compiled(gather)(given(rank)), torch.cat([given(0)[:2], given(1)[:3]])
    )
    torch.testing.assert_close(compiled(reduce)(given(rank)), given(0) + 1)
    with pytest.raises(Exception, match=r"async_op must be False|Observed exception"):
        compiled(late)(given(rank))
    x = given(rank)
    late(x).wait()  # outside of a graph the original runs
    torch.testing.assert_close(x, given(0) + given(1))


def test_patch_for_hcom(tmp_path):
    spawned(check_patched, tmp_path)


def check_sizes(rank, folder):
    """One dynamic graph for several sizes."""

    def fn(x):
        y = x * 2
        dist.all_reduce(y)
        made = x.new_empty(2 * x.shape[0], 3)
        dist.all_gather_into_tensor(made, x)
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        return y, made, swapped

    fast = compiled(fn, dynamic=True)
    for rows in (4, 6, 8):
        for got, wanted in zip(fast(given(rank, rows)), fn(given(rank, rows)), strict=True):
            torch.testing.assert_close(got, wanted)


def test_other_sizes(tmp_path):
    spawned(check_sizes, tmp_path)


def check_part(rank, folder):
    """A group of some of the processes, by global ranks."""
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    mine = alone if rank == 1 else pair
    text = group_text(mine.group_name)
    tag = dist.distributed_c10d._get_group_tag(mine)
    assert text == f"tag={tag};rank_list={'1' if rank == 1 else '0,2'}"
    assert named_group(text) is mine and named_group(mine.group_name) is mine

    def fn(x):
        y = x + 1
        dist.broadcast(y, 1 if rank == 1 else 2, group=mine)
        dist.all_reduce(x, group=mine)
        return x, y

    expected = given(1) if rank == 1 else given(0) + given(2)
    root = given(1 if rank == 1 else 2) + 1
    for got, wanted in zip(compiled(fn)(given(rank)), (expected, root), strict=True):
        torch.testing.assert_close(got, wanted)


def test_part_of_the_processes(tmp_path):
    spawned(check_part, tmp_path, count=3)


def check_overlap(rank, folder):
    """The first process waits for the second, which waits for what the first computes beside: with
    communication and computing one after the other neither would ever end."""
    mark = folder / "computed"
    library = torch.library.Library("comm_test", "FRAGMENT")
    library.define("leave_mark(Tensor x) -> Tensor")

    def leave_mark(x):
        mark.touch()
        return x * 3

    library.impl("leave_mark", leave_mark, "CompositeExplicitAutograd")
    library.impl("leave_mark", torch.empty_like, "Meta")

    def fn(x, y):
        dist.all_reduce(x)
        with torchair.scope.npu_stream_switch("beside"):  # a foreign operator, which might talk too
            marked = torch.ops.comm_test.leave_mark(y)
        return x + 1, marked

    fast = compiled(fn, cc_parallel_enable=True)
    x, y = given(rank), torch.ones(3)
    if rank == 1:
        while not mark.exists():
            time.sleep(0.01)
        dist.all_reduce(x)
        assert torch.equal(x, given(0) + given(1))
        return
    reduced, beside = fast(x, y)
    torch.testing.assert_close(reduced, given(0) + given(1) + 1)
    torch.testing.assert_close(beside, y * 3)


def test_communication_beside_computing(tmp_path):
    spawned(check_overlap, tmp_path)


def check_training(rank, folder):
    """Gradients through a collective; a send is in one of the two graphs only."""

    def fn(x):
        y = torch.distributed._functional_collectives.all_reduce(x.sin(), "sum", [0, 1])
        if rank == 0:
            dist.send(x.detach(), 1)
        else:
            dist.recv(torch.empty_like(x), 0)
        return (y * 2).sum()

    x = given(rank).requires_grad_()
    compiled(fn)(x).backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_training(tmp_path):
    spawned(check_training, tmp_path)


# ---- no process needed


def test_reductions_have_the_right_names():
    assert REDUCTIONS["band"] == dist.ReduceOp.BAND and REDUCTIONS["bor"] == dist.ReduceOp.BOR
    for word, op in REDUCTIONS.items():
        assert hcom.reduce_op_name(op) == ("product" if word == "prod" else word)
    assert hcom.reduce_op_name("sum") == "sum"
    with pytest.raises(ValueError, match="not a reduction"):
        hcom.reduce_op_name(17)
    assert [_reduction(w) for w in ("sum", "MIN", "max", "product")] == [
        "sum",
        "min",
        "max",
        "prod",
    ]
    with pytest.raises(Decline, match="GE has no reduction 'bor'"):
        _reduction("bor")


def test_arguments_are_checked():
    x = torch.ones(4, 2)
    with pytest.raises(AssertionError, match="one tensor for each of 3 ranks, got 2"):
        define.allgather([x, x], x, "", [0, 1, 2], 3)
    with pytest.raises(AssertionError, match="do not add up to the 4 rows"):
        hcom._checked_counts(x, [1, 2], 2)
    with pytest.raises(ValueError, match="rank 5 is not in the group"):
        define._send(x, 5, [0, 1], "", 0, None, [4, 2])


def test_dynamo_is_taught_once():
    hcom.teach_dynamo()
    remaps = torch.distributed._functional_collectives.traceable_collective_remaps
    known = dict(remaps)
    hcom.teach_dynamo()
    assert remaps == known and known[dist.broadcast] is hcom.npu_broadcast
    assert {dist.send, dist.recv, dist.all_to_all} <= set(known)


NAMED = """
import sys, tempfile, torch, torch.distributed as dist

place = "file://" + tempfile.mktemp()
dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)

def both(x):
    out, parts = torch.empty_like(x), [torch.empty_like(x)]
    dist.all_gather(parts, x)
    dist.broadcast(parts[0], 0)
    dist.all_to_all_single(out, x)
    return out * 2 + parts[0]

x = torch.arange(4.0)
torch.testing.assert_close(torch.compile(both, backend=sys.argv[1], fullgraph=True)(x), 3 * x)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["torchair", "npugraph_ex"])
def test_the_first_trace_knows_collectives(name):
    done = run_forked("-c", NAMED, name)
    assert done.returncode == 0, done.stderr


# ---- a method of each rank on disk


class Sharded(torch.nn.Module):
    """A layer whose results all ranks add up."""

    def forward(self, x):
        y = torch.relu(x) * 2
        dist.all_reduce(y)
        return y + 1


def _cached_by_rank(rank, folder):
    x = torch.arange(6.0).reshape(2, 3) + rank
    expected = torch.relu(torch.arange(6.0).reshape(2, 3)) * 4 + 2 + 1
    for there in (False, True):
        call = torchair.inference.cache_compile(
            Sharded().forward, dynamic=False, cache_dir=str(folder / "cache"), tp_rank=rank
        )
        assert call.path.exists() == there
        assert call.path.parts[-3] == f"world2global_rank{rank}_tp_rank{rank}"
        torch.testing.assert_close(call(x), expected)
    assert dist.all_reduce.__module__ == "torch.distributed.distributed_c10d"


def test_each_rank_has_a_cached_method(tmp_path):
    spawned(_cached_by_rank, tmp_path)


DYING = """
import os, sys, torch, torchair, torch.distributed as dist
from datetime import timedelta
rank, backend = int(sys.argv[1]), sys.argv[3]
store = dist.FileStore(sys.argv[2], 2)
limit = timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)

def summed(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

call = torch.compile(summed, backend=backend)
for k in range(3):
    if (rank, k) == (1, 2):
        os._exit(3)
    try:
        call(torch.ones(3) + k)
    except RuntimeError as e:
        print(k, e, flush=True)
        os._exit(7)
os._exit(0)
"""


@pytest.mark.parametrize("backend", ["torchair", "npugraph_ex"])
def test_a_process_that_dies_is_told_by_the_others(tmp_path, backend):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    rest = str(tmp_path / "store"), backend
    both = [forked.start(str(script), str(rank), *rest, env=environment) for rank in range(2)]
    first, second = (p.communicate(300) for p in both)
    assert [first.returncode, second.returncode] == [7, 3]
    assert first.stdout.startswith("2 HcomAllReduce failed")
