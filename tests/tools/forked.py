"""Python programs in processes forked from one that has imported torch: the seconds that this takes
are spent once for a run of the tests, not once for each program.

A program runs as `__main__` in a process of its own, with its arguments, environment, folder and
outputs, imports our sources anew, and ends as an interpreter ends. What differs from a new process:
torch and what it needs are imported already, so programs whose subject is how a process starts, or
that are to differ in their hashes of strings, take `processes.run` instead.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd",
    "torch.distributed.tensor", "torch.distributed.fsdp", "torch.testing", "llvmlite.binding",
    "google.protobuf.message", "rich.table",
)  # fmt: skip
READ_ONCE = (
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "LD_",
    "ATEN_",
    "PYTHON",
    "MALLOC_",
)
"""Variables that torch or the interpreter reads as it is loaded: no program has others."""
OURS = ("TORCHAIR_", "TORCHINDUCTOR_", "PYTHONPATH")
"""Those of them that are read later, or by the programs alone."""
_BYTES = 1 << 18  # a request fits


@dataclass
class Process:
    """A program that runs, and files with what it said."""

    arguments: list[str]
    stdout: TextIO
    stderr: TextIO
    answers: socket.socket
    pid: int

    def communicate(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """What it gave, at its end."""
        self.answers.settimeout(timeout)
        try:
            code = self.answers.recv(_BYTES)
        except TimeoutError as e:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0) from e
        finally:
            said = [_text(f) for f in (self.stdout, self.stderr)]
            self.answers.close()
        assert code, "the server of processes has died"
        return subprocess.CompletedProcess(self.arguments, int(code), *said)


def _text(file: TextIO) -> str:
    with file:
        file.seek(0)
        return file.read()


def start(
    *arguments: str, env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
) -> Process:
    """Begin `python arguments`: a script, `-c` and its code, or `-m` and a module."""
    server, known = _server()
    other = {k for k in known.keys() | env.keys() if known.get(k) != env.get(k)}
    late = [k for k in other if k.startswith(READ_ONCE) and not k.startswith(OURS)]
    assert not late, f"{late}: torch has read them already; take a new process"
    assert not arguments[0].startswith("-") or arguments[0] in ("-c", "-m"), arguments[0]
    request = {"arguments": arguments, "env": dict(env), "cwd": str(cwd or os.getcwd())}
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        files = [out.fileno(), err.fileno(), theirs.fileno()]
        socket.send_fds(server, [json.dumps(request).encode()], files)
    return Process(list(arguments), out, err, ours, int(ours.recv(_BYTES)))


def run(
    *arguments: str,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python arguments` from begin to end."""
    return start(*arguments, env=env, cwd=cwd).communicate(timeout)


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """The server of this process, and the environment that it was started in."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_", "PYTHONPATH"))
    }
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours, environment


# ---- in the server


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, and tell how the children ended. In a child: what it is to run."""
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != requests.fileno():
                poll.unregister(fd)
                os.close(fd)
                pid, answers = running.pop(fd)
                _answer(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            data, files, _, _ = socket.recv_fds(requests, _BYTES, 3)
            if not data:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                os._exit(0)
            answers = socket.socket(fileno=files[2])
            pid = os.fork()
            if pid == 0:
                os.dup2(files[0], 1)
                os.dup2(files[1], 2)
                for open_socket in (requests, answers, *(a for _, a in running.values())):
                    open_socket.close()
                for open_fd in (*files[:2], *running):
                    os.close(open_fd)
                return json.loads(data)
            os.close(files[0])
            os.close(files[1])
            answers.send(str(pid).encode())
            watched = os.pidfd_open(pid)
            running[watched] = pid, answers
            poll.register(watched, select.POLLIN)


def _answer(answers: socket.socket, code: int) -> None:
    with answers:
        try:
            answers.send(str(code).encode())
        except BrokenPipeError:  # who asked has given up
            return


def become(request: dict[str, Any], library: Sequence[str]) -> None:
    """Run a program as the interpreter would."""
    first, *rest = request["arguments"]
    sys.orig_argv = [sys.executable, first, *rest]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    here = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [here, *path, *library]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
        return
    sys.argv = ["-c", *rest[1:]] if first == "-c" else [first, *rest]
    if first == "-c":
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        main.__file__ = os.path.abspath(first)
        code = compile(Path(first).read_bytes(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def main() -> None:
    """Import, then serve; a child goes on from here."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    library = sys.path[1:]
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end us
    gc.collect()
    gc.freeze()
    request = serve(requests)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        become(request, library)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_show, sys.excepthook)
        raise


def _show(hook: Any, kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    """An error without the frames that a new process does not have."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    hook(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
