"""The convolutions of ResNet-18 at 224 x 224, batch 1, channels-last: our kernels beside oneDNN."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from common import console, interleaved, ratio, table
from torchair.codegen.cpu.conv.kernel import WEIGHTS, convolution
from torchair.codegen.cpu.conv.plan import output_size
from torchair.codegen.cpu.jit import Library, host
from torchair.codegen.requests import Conv, Convolution, stored
from torchair.codegen.target import Kernel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

CONTESTANTS = ("ours", "eager", "oneDNN")

# (input channels, input size, output channels, kernel, stride, how often)
RESNET18 = [
    (3, 224, 64, 7, 2, 1),
    (64, 56, 64, 3, 1, 4),
    (64, 56, 128, 3, 2, 1),
    (64, 56, 128, 1, 2, 1),
    (128, 28, 128, 3, 1, 3),
    (128, 28, 256, 3, 2, 1),
    (128, 28, 256, 1, 2, 1),
    (256, 14, 256, 3, 1, 3),
    (256, 14, 512, 3, 2, 1),
    (256, 14, 512, 1, 2, 1),
    (512, 7, 512, 3, 1, 3),
]

SCRATCH = 2 * 1024 * 1024
"""Bytes of scratch of a thread; enough for each of these."""

DRIVER = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define void @share(ptr %args) {
  %own = call i32 @omp_get_thread_num()
  %all = call i32 @omp_get_num_threads()
  %tid = sext i32 %own to i64
  %nt = sext i32 %all to i64
  %kernel = load ptr, ptr %args
  %place = getelementptr ptr, ptr %args, i64 1
  %words = load ptr, ptr %place
  call void %kernel(i64 %tid, i64 %nt, ptr %words)
  ret void
}
"""


class Team:
    """Runs kernels on the OpenMP threads that torch uses."""

    def __init__(self, threads: int) -> None:
        import llvmlite.binding as llvm

        self.threads = threads
        self.library = Library()
        self.scratch = torch.empty(threads * SCRATCH, dtype=torch.uint8)  # as a program shares it
        host()
        omp = ctypes.CDLL("libgomp.so.1")
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(omp, name), ctypes.c_void_p).value)
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(DRIVER), machine)
        self.engine.finalize_object()
        self.share = self.engine.get_function_address("share")
        self.parallel = omp.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

    def bind(self, kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """A call that runs the kernel on all threads."""
        addresses = [t.data_ptr() for t in tensors]
        block = (ctypes.c_int64 * len(addresses))(*addresses)
        args = (ctypes.c_int64 * 2)(self.library.address(kernel), ctypes.addressof(block))
        address = ctypes.addressof(args)

        def call(keep: Any = (block, args, tensors)) -> None:
            self.parallel(self.share, address, self.threads, 0)

        return call


@dataclass
class Contest:
    """One convolution and the ways to compute it."""

    name: str
    flops: int
    times: int
    calls: dict[str, Callable[[], Any]]


def contest(team: Team, dtype: str, winograd: int, layer: tuple[int, ...]) -> Contest:
    """Bind our kernel, eager torch and oneDNN with packed weights to the same tensors."""
    channels, size, out, kernel, step, times = layer
    pad = kernel // 2
    last = torch.channels_last if channels > 3 else torch.contiguous_format
    x = torch.randn(1, channels, size, size).to(DTYPES[dtype]).to(memory_format=last)
    weight = torch.randn(out, channels, kernel, kernel).to(DTYPES[dtype])
    weight /= (channels * kernel * kernel) ** 0.5
    n, c, h, w = x.stride()
    spec = Conv(
        dtype,
        1,
        channels,
        size,
        size,
        out,
        (kernel, kernel),
        (step, step),
        (pad, pad, pad, pad),
        (1, 1),
        1,
        (n, c, h, w),
        winograd,
    )
    result = torch.empty(output_size(spec), dtype=x.dtype).to(memory_format=torch.channels_last)
    n, c, h, w = result.stride()
    epilogue = stored(tuple(result.shape), (n, c, h, w), dtype, 3)
    made = convolution(Convolution(spec, epilogue), host(), "conv")
    assert made.scratch <= SCRATCH
    ours = team.bind(made.kernel, [x, made.pack[WEIGHTS](weight), team.scratch, result])
    weight = weight.to(memory_format=torch.channels_last)
    around = ((pad, pad), (step, step), (1, 1), 1)
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *around, list(x.shape))

    def eager() -> torch.Tensor:
        return F.conv2d(x, weight, None, step, pad)

    def onednn() -> torch.Tensor:
        return torch.ops.mkldnn._convolution_pointwise(x, packed, None, *around, "none", [], "")

    ours()
    limit = 1e-4 if dtype == "f32" else 5e-2
    torch.testing.assert_close(result, eager(), rtol=limit, atol=limit)
    name = f"{kernel}x{kernel} s{step} {channels}->{out} on {size}"
    flops = 2 * result.numel() * weight[0].numel()
    return Contest(name, flops, times, {"ours": ours, "eager": eager, "oneDNN": onednn})


def network(contests: list[Contest]) -> dict[str, Callable[[], None]]:
    """All convolutions one after the other, as the network runs them: none finds its weights in
    the first caches."""

    def all_of(contestant: str) -> Callable[[], None]:
        calls = [one.calls[contestant] for one in contests]

        def call() -> None:
            for each in calls:
                each()

        return call

    return {contestant: all_of(contestant) for contestant in CONTESTANTS}


def measure(team: Team, dtype: str, winograd: int, windows: int) -> None:
    """One table."""
    before = team.library.seconds
    contests = [contest(team, dtype, winograd, layer) for layer in RESNET18]
    compiled = (team.library.seconds - before) * 1e3
    columns = ["convolution", "times", *CONTESTANTS, "GFLOP/s", "against oneDNN"]
    title = f"ResNet-18 convolutions, {dtype}, {team.threads} threads, microseconds"
    made = table(f"{title}; compiling ours took {compiled:.0f} ms", columns)
    total = dict.fromkeys(CONTESTANTS, 0.0)
    for one in contests:
        times = interleaved(one.calls, windows, 0.03)
        total = {k: total[k] + times[k] * one.times for k in total}
        _row(made, one.name, str(one.times), times, one.flops)
    flops = sum(one.flops * one.times for one in contests)
    _row(made, "sum", "", total, flops)
    layers = [layer for layer in RESNET18 for _ in range(layer[-1])]
    each = [contest(team, dtype, winograd, layer) for layer in layers]
    _row(made, "in sequence", "", interleaved(network(each), windows, 0.2), flops)
    console.print(made)


def _row(made: Any, name: str, times: str, seconds: dict[str, float], flops: int) -> None:
    cells = [f"{seconds[k] * 1e6:.0f}" for k in CONTESTANTS]
    rate = f"{flops / seconds['ours'] / 1e9:.0f}"
    made.add_row(name, times, *cells, rate, ratio(seconds, "ours", "oneDNN"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--winograd", type=int, default=2, choices=[0, 2, 4])
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    team = Team(options.threads)
    for dtype in options.dtype:
        measure(team, dtype, options.winograd, options.windows)


if __name__ == "__main__":
    main()
