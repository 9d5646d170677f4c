"""Where the seconds of a start of vLLM go: processor time by stage, with empty caches and again
with what that start has left.

    python bench/vllm_stages.py                                # a Llama of 100M, eager and torchair
    python bench/vllm_stages.py --models qwen3 --backends torchair

A start is what `vllm bench startup` times: `LLM(...)` in one process, without `import vllm`. The
stack of Python is looked at every few milliseconds of processor time, and the innermost function
that the table of stages names gets them. Backends other than torchair run without the plug-in.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_benches import BACKENDS, MODELS, OPTIONS, SIZES, environment, make_model

# A measured process comes through here too: what it does not need is imported in functions.

OTHERS = "other processes: the model's class, compilers"
IMPORTS, GARBAGE = "imports", "garbage"
STAGES: dict[str, tuple[tuple[str, str], ...]] = {
    IMPORTS: (("importlib._bootstrap>", "_find_and_load"),),
    "LLVM": (("codegen/cpu/jit.py", "add"),),
    "weights packed": (("engine/units/native_units.py", "packed"),),
    "plan and text of kernels": (("engine/compile.py", "_program"),),
    "our passes": (("torchair/pipeline.py", "__call__"), ("concrete/ge.py", "compile")),
    "AOTAutograd": (("_functorch/aot_autograd.py", "aot_module_simplified"),),
    "inductor": (("_inductor/compile_fx.py", "_compile_fx_inner"),),
    "files written": (("compilation/decorators.py", "save_aot_compiled_function"),),
    "files read": (("compilation/decorators.py", "_try_load_aot_compiled_fn"),),
    "Dynamo": (("_dynamo/convert_frame.py", "fullgraph_capture"),),
    "first run": (("worker/cpu_model_runner.py", "warming_up_model"),),
    "model made, weights read": (("worker/cpu_model_runner.py", "load_model"),),
    "cache of keys and values": (("worker/cpu_model_runner.py", "initialize_kv_cache"),),
}
"""Functions by the end of their file and their name."""
REST = "the rest of vLLM"
INTERVAL = 0.002  # seconds of processor time


class Samples:
    """Processor time of this process by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stages = {name: stage for stage, names in STAGES.items() for name in names}
        self._names = {name for _, name in self._stages}
        self._last = time.process_time()
        self._collecting = False

    def begin(self) -> None:
        """Look on from now on."""
        gc.callbacks.append(self._garbage)
        signal.signal(signal.SIGPROF, lambda _, frame: self.add(frame))
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        self._last = time.process_time()

    def end(self) -> None:
        """The last of it."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.callbacks.remove(self._garbage)
        self.add(None)

    def add(self, frame: FrameType | None) -> None:
        """What has passed since the last time, also in a long call of native code."""
        now = time.process_time()
        stage = GARBAGE if self._collecting else self._stage(frame)
        self.seconds[stage] += now - self._last
        self._last = now

    def _stage(self, frame: FrameType | None) -> str:
        while frame is not None:
            code = frame.f_code
            if code.co_name in self._names:
                for (file, name), stage in self._stages.items():
                    if code.co_name == name and code.co_filename.endswith(file):
                        return stage
            frame = frame.f_back
        return REST

    def _garbage(self, phase: str, _: dict[str, int]) -> None:
        self.add(sys._getframe(1))
        self._collecting = phase == "start"


def start(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of a start of this process by stage, and those on the clock."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    given = EngineArgs(
        model=model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        enable_prefix_caching=False,
        **options,
    )
    samples, begun = Samples(), time.perf_counter()
    samples.begin()
    llm = LLM.from_engine_args(given)
    samples.end()
    passed = time.perf_counter() - begun
    del llm  # ending takes time as well
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {OTHERS: used.ru_utime + used.ru_stime, **samples.seconds}
    return found | {"total": sum(found.values()), "on the clock": passed}


def measure(model: Path, backends: list[str]) -> Table:
    """A column for each backend and state of the caches, a row for each stage."""
    columns: dict[str, dict[str, float]] = {}
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="torchair-vllm-") as folder:
            for state in ("cold", "warm"):
                target = Path(folder) / "figures.json"
                command = [sys.executable, __file__, "--process", backend, str(model), str(target)]
                done = subprocess.run(
                    command,
                    env=environment(Path(folder), backend),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode != 0:
                    raise SystemExit((done.stdout + done.stderr)[-4000:])
                columns[f"{backend}, {state}"] = json.loads(target.read_text())
    table = Table(title=f"{model.name}: seconds of processor time of a start")
    table.add_column("stage")
    for name in columns:
        table.add_column(name, justify="right")
    for stage in (OTHERS, *STAGES, GARBAGE, REST, "total", "on the clock"):
        figures = [c.get(stage, 0.0) for c in columns.values()]
        if max(figures) >= 0.05:
            table.add_row(stage, *(f"{s:.1f}" if s >= 0.05 else "" for s in figures))
    return table


def main() -> None:
    """Measure what the arguments say."""
    if sys.argv[1:2] == ["--process"]:
        backend, model, target = sys.argv[2:]
        Path(target).write_text(json.dumps(start(model, OPTIONS[backend])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=("llama",), choices=MODELS)
    parser.add_argument(
        "--backends", nargs="+", default=("eager", "torchair"), choices=tuple(BACKENDS)
    )
    parser.add_argument("--size", default="100m", choices=tuple(SIZES))
    wanted = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory(prefix="torchair-vllm-") as folder:
        for kind in wanted.models:
            model = make_model(Path(folder), kind, wanted.size)
            console.print(measure(model, list(wanted.backends)))


if __name__ == "__main__":
    main()
