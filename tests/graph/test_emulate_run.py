"""`torchair run`: scripts run as they would under Python, with the device in place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from processes import SOURCE, run, run_forked


def torchair(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return run("-m", "torchair", *arguments, **kwargs)


def torchair_forked(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """The same where a script compiles, which needs what takes seconds to import."""
    return run_forked("-m", "torchair", *arguments, **kwargs)


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def test_a_script_finds_what_it_expects(write):
    write("VALUE = 5", "neighbour.py")
    script = write("""
        import pickle, random, sys, __main__
        import torch, torch_npu, neighbour
        class Local: pass
        assert __name__ == "__main__" and __main__.Local is Local
        assert type(pickle.loads(pickle.dumps(Local()))) is Local
        x = torch.rand(2).npu()
        print(sys.argv[1:], __file__, neighbour.VALUE, x.device, torch.npu.device_count())
        print(torch.rand(1).item(), torch.rand(1, device="npu").item(), random.random())
    """)
    ways = [torchair("run", "--devices", "3", "--seed", "5", script, "a", "--devices", "9")]
    ways.append(torchair("run", "--devices=3", "--seed=5", script, "a", "--devices", "9"))
    first, second = (done.stdout.splitlines() for done in ways)
    assert first == second, ways[0].stderr
    assert first[0] == f"['a', '--devices', '9'] {script} 5 npu:0 3"
    assert not ways[0].stderr


def test_scripts_that_start_with_torch_npu(write):
    script = write("import torch_npu\nimport torch\nprint(torch.ones(1).npu())")
    assert "npu:0" in torchair("run", script).stdout


def test_modules_run(tmp_path, write):
    write("import sys, torch\nprint(__name__, sys.argv[1:], torch.npu.is_available())", "tool.py")
    done = torchair("run", "-m", "tool", "x", cwd=tmp_path)
    assert done.stdout == "__main__ ['x'] True\n", done.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys\nsys.exit(7)", 7),
        ("import sys\nsys.exit()", 0),
        ("import sys\nsys.exit('a message')", 1),
        ("def f():\n    raise ValueError('mine')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(3) from e", 1),
        ("x = (", 1),
        ("import os\nos._exit(9)", 9),
        ("import sys\nsys.excepthook = lambda *a: print('own hook', a[0].__name__)\n1 / 0", 1),
    ],
)
def test_leaving_is_as_under_python(write, text, code):
    script = write(text)
    ours, pythons = torchair("run", script), run(script)
    assert ours.returncode == pythons.returncode == code
    assert ours.stderr == pythons.stderr
    assert ours.stdout == pythons.stdout


def test_errors_of_modules_show_no_other_frames(tmp_path, write):
    write("def f():\n    raise ValueError('mine')\nf()", "tool.py")
    done = torchair("run", "-m", "tool", cwd=tmp_path)
    assert done.returncode == 1 and "torchair" not in done.stderr and "runpy" not in done.stderr
    assert done.stderr.endswith("ValueError: mine\n") and done.stderr.count("File") == 2


def test_a_missing_script(tmp_path):
    done = torchair("run", str(tmp_path / "none.py"))
    assert done.returncode == 2 and "none.py" in done.stderr and "Traceback" not in done.stderr


def test_interrupts_pass_through(write):
    script = write("import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.1)")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [sys.executable, "-m", "torchair", "run", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n") and "torchair" not in errors


def test_processes_started_afresh_have_the_device(write):
    script = write("""
        import torch, torch_npu, torch.multiprocessing as mp
        def work(rank, world):
            print(rank, torch.ones(1).npu(rank).device, torch.npu.device_count(), flush=True)
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
    """)
    done = torchair("run", "--devices", "4", script)
    assert sorted(done.stdout.splitlines()) == ["0 npu:0 4", "1 npu:1 4"], done.stderr


COMPILES = """
import torch, torchair
def work(x):
    y = torch.special.i0(x) + 1
    print("between")
    return y * 2
fast = torch.compile(work, backend=torchair.get_npu_backend())
print(fast(torch.ones(3).npu()).tolist())
"""


def test_explain_dump_and_timeline(tmp_path, write):
    folders = ["--dump", str(tmp_path / "dumps"), "--timeline", str(tmp_path / "times")]
    done = torchair_forked("run", "--explain", *folders, write(COMPILES))
    assert done.returncode == 0, done.stderr
    told = done.stderr
    assert "graphs         2 by Dynamo; in the engine 2 of fixed sizes" in told
    assert "graph breaks   1\n" in told and "fallbacks      1 operators" in told
    assert "1 x aten.i0.default" in told and "compile time" in told
    assert "graph 1, forward: 2 nodes" in told and "torch  i0" in told
    dumps = sorted(f.name.partition("_rank")[0] for f in (tmp_path / "dumps").iterdir())
    kinds = ("optimized", "original")
    assert dumps == [f"dynamo_{kind}_graph_{n}" for kind in kinds for n in (1, 2)]
    times = [json.loads(f.read_text()) for f in (tmp_path / "times").iterdir()]
    assert len(times) == 2 and all(t["traceEvents"] for t in times)


def test_explain_without_graphs_and_with_an_error(write):
    done = torchair("run", "--explain", write("raise SystemExit(3)"))
    assert done.returncode == 3 and done.stderr == "torchair: nothing was compiled\n"


def test_environment_report():
    done = torchair("env")
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["torch_npu"] == "not installed" and rows["torch"] and rows["python"]
    assert "emulated" in rows


def test_levels_that_a_script_asks_for(write):
    script = write("""
        import os
        os.environ["TNG_LOG_LEVEL"] = "1"
        import torch, torchair
        backend = torchair.get_npu_backend()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2).npu())
    """)
    done = torchair_forked("run", script)
    assert "[INFO] TORCHAIR(" in done.stderr and "graph_1 compiled" in done.stderr


def test_scripts_for_cuda_run_on_the_device(write):
    script = write("""
        import tempfile
        import torch, torch_npu, torchair
        import torch.distributed as dist
        from torch_npu.contrib import transfer_to_npu

        assert torch.cuda.is_available() and torch.cuda.device_count() == 8
        x, place = torch.randn(2, 3).cuda(), torch.device("cuda:0")
        model = torch.nn.Linear(3, 4).cuda()
        made = [
            x, torch.zeros(2, device="cuda"), torch.ones(2, device=place), torch.ones_like(x),
            torch.randn(3).to("cuda"), x.new_zeros(2, device=place), model.weight,
            torch.nn.Linear(3, 4, device="cuda").weight, torch.nn.Linear(3, 4).to(place).weight,
            torch.rand(2, generator=torch.Generator("cuda"), device="cuda"),
        ]
        with torch.device("cuda"):
            made.append(torch.ones(2))
        with torch.cuda.stream(torch.cuda.Stream()):
            made.append(x * 2)
        torch.cuda.synchronize()
        assert {str(t.device) for t in made} == {"npu:0"} and x.is_cuda
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (x @ x.t()).dtype == torch.bfloat16
        with torch.cuda.amp.autocast(dtype=torch.float16):
            assert (x @ x.t()).dtype == torch.float16

        def step(x):
            return torch.relu(model(x)) + torch.zeros(2, 4, device="cuda") + x.cuda().sum()

        compiled = torch.compile(step, backend=torchair.get_npu_backend(), fullgraph=True)
        torch.testing.assert_close(compiled(x), step(x))
        compiled(x).sum().backward()
        rendezvous = "file://" + tempfile.mktemp()
        dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
        dist.all_reduce(x)
        assert dist.get_backend() == "hccl"
        dist.destroy_process_group()
        assert torch.zeros(2, device="cpu").device.type == "cpu"
    """)
    done = torchair_forked("run", script)
    assert done.returncode == 0, done.stderr
