"""The vector maths library against float64 references: all float32 numbers at a stride, the
neighbourhood of hard points, special values, and targets of every width."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from maths_cases import BINARY, UNARY, Array
from torchair.codegen import loops
from torchair.codegen.cpu.jit import Library, host, module_text, run_kernel
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Kernel
from torchair.codegen.text import maths
from torchair.codegen.text.writer import KernelWriter, Machine

ELEMENTS = {"f32": ("float", np.float32), "f64": ("double", np.float64)}


def _libraries() -> dict[str, Library]:
    return {
        "512": Library(dataclasses.replace(host(), bits=512)),
        "256": Library(dataclasses.replace(host(), bits=256, registers=16, dot_bf16=False)),
        "128 without fma": Library(
            dataclasses.replace(host(), bits=128, registers=16, dot_bf16=False, fma=False)
        ),
    }


LIBRARIES = _libraries()


def loop_kernel(
    machine: Machine,
    name: str,
    count: int,
    element: str = "f32",
    lanes: int | None = None,
) -> Kernel:
    """A kernel that applies a function to `count` arrays, a vector at a time."""
    w = KernelWriter(machine)
    kind, lanes = ELEMENTS[element][0], lanes or w.lanes
    out, *arrays = [w.pointer(i) for i in range(count + 1)]
    with w.loop("0", w.size(SizeArgument(count + 1)), lanes) as loop:
        vector = f"<{lanes} x {kind}>"
        places = [w.offset(array, kind, loop.index) for array in arrays]
        args = [w(f"load {vector}, ptr {place}, align 4") for place in places]
        result = maths.apply(w, name, args, element, lanes)
        w.do(f"store {vector} {result}, ptr {w.offset(out, kind, loop.index)}, align 4")
    return w.kernel(f"maths_{name}")


def evaluate(
    library: Library,
    name: str,
    *args: Array,
    element: str = "f32",
    lanes: int | None = None,
) -> Array:
    """A function of the library over arrays of any length."""
    kernel = loop_kernel(library.machine, name, len(args), element, lanes)
    size = len(args[0])
    padded = [np.append(a, np.full(-size % 64, 0.5, a.dtype)) for a in args]
    out = np.empty_like(padded[0])
    run_kernel(library, kernel, [a.ctypes.data for a in (out, *padded)] + [len(out)])
    return out[:size]


def ulp_errors(got: Array, want: Array) -> Array:
    """Distances in units in the last place of float32; infinity counts as 2^128."""
    with np.errstate(all="ignore"):
        near, far = (np.clip(v.astype(np.float64), -(2.0**128), 2.0**128) for v in (got, want))
        exponent = np.frexp(np.where(np.isfinite(far), far, 1.0))[1].clip(-125, 128)
        errors = np.abs(near - far) / np.ldexp(1.0, exponent - 24)
    one_nan = np.isnan(near) != np.isnan(far)
    return np.where(one_nan, np.inf, np.where(np.isnan(far), 0.0, errors))


def check(got: Array, want: Array, bound: float, *args: Array) -> None:
    """Within the bound; zeros and infinities are such, with the right sign."""
    errors = ulp_errors(got, want)
    at = int(errors.argmax())
    where = [float(a[at]) for a in args]
    assert errors[at] <= bound, f"{errors[at]:.3g} ulp at {where}: {got[at]}, not {want[at]}"
    exact = (want == 0) | np.isinf(want)
    wrong = exact & ((got != want) | (np.signbit(got) != np.signbit(want)))
    assert not wrong.any(), f"{got[wrong][:4]} at {[a[wrong][:4].tolist() for a in args]}"


# ---- references in float64 ----


IN_DOUBLES = (
    "log2", "log10", "log1p", "erfc", "tan", "atan", "asin", "acos", "sinh", "cosh", "asinh",
    "acosh", "atanh", "erfinv", "sqrt",
)  # fmt: skip
EXACT = ("floor", "ceil", "trunc", "round")
BOUNDS = dict.fromkeys(IN_DOUBLES, 0.6) | dict.fromkeys(EXACT, 0.0)


SPECIAL = np.array(
    [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        -1.0,
        2.0,
        -2.0,
        3.0,
        -3.0,
        0.5,
        -0.5,
        1.5,
        -2.5,
        2.0**-149,
        -(2.0**-149),
        2.0**-126,
        -(2.0**-126),
        3.4028235e38,
        -3.4028235e38,
        1e10,
        -1e10,
        2.0**24 - 1,
        2.0**24,
        1 - 2.0**-24,
        1 + 2.0**-23,
        -1 - 2.0**-23,
        2.0**20,
        100.0,
        1e-3,
    ],
    np.float32,
)

HARD = (
    0.0, 0.25, 1 / 3, 0.5, 0.6, 2 / 3, math.sqrt(0.5), 1.0, 4 / 3, math.sqrt(2.0), 2.0, 4.0, 10.0,
    14.6, 15.0, 16.635, 20.0, 40.0, 87.3, 88.7, 89.0, 103.3, 104.5, 105.0, 125.0, 128.0, 149.5,
    math.pi / 4, math.pi / 2, math.pi, 100 * math.pi, 2.0**20, 2.0**23, math.log(2.0) / 2,
)  # fmt: skip


def all_floats(stride: int) -> Array:
    """Float32 numbers over all bit patterns, and runs of neighbours around the hard points."""
    patterns = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32)
    hard = np.array([*HARD, *(-h for h in HARD)], np.float32).view(np.int32)
    runs = (hard[:, None] + np.arange(-300, 300)).ravel().astype(np.int32)
    return np.concatenate([patterns.view(np.float32), runs.view(np.float32), SPECIAL])


FLOATS = all_floats(5003)
FEWER_FLOATS = all_floats(30011)


def reference(function: Callable[..., Array], *args: Array) -> Array:
    with np.errstate(all="ignore"):
        return function(*(a.astype(np.float64) for a in args))


def test_the_ruler_measures_units_in_the_last_place() -> None:
    want = np.array([1.0, 3e-45, 3.4e38, 1.5])
    exact = want.astype(np.float32)
    assert ulp_errors(np.nextafter(exact, np.float32(math.inf)), exact).tolist() == [1, 1, 1, 1]
    wrong = ulp_errors(np.array([math.nan, 1.0, math.inf]), np.array([1.0, math.nan, 3e38]))
    assert wrong[0] == wrong[1] == math.inf and wrong[2] > 1e5
    assert ulp_errors(np.array([math.nan, -math.inf]), np.array([math.nan, -1e39])).max() == 0


def test_every_function_is_tested() -> None:
    assert {*UNARY, *BINARY} == set(maths.FUNCTIONS)


@pytest.mark.parametrize("width", LIBRARIES)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, width: str) -> None:
    floats = FEWER_FLOATS if width == "256" else FLOATS
    got = evaluate(LIBRARIES[width], name, floats)
    check(got, reference(UNARY[name], floats), BOUNDS.get(name, 2.0), floats)


def pairs() -> tuple[Array, Array]:
    """Operands of binary functions: all special pairs, any bits, near 1, integers."""
    random = np.random.default_rng(0)
    n = 100_000
    special = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32).T
    bits = random.integers(0, 2**32, (2, n), dtype=np.uint32).view(np.float32)
    usual = (random.standard_normal((2, n)) * np.exp(random.uniform(-3, 3, (2, n)))).astype("f")
    near_1 = np.stack([1 + usual[0] * 1e-4, usual[1] * 1e5])
    powers = np.stack([np.abs(usual[0]), usual[1] * 10])
    x, y = np.concatenate([special, bits, usual, near_1, powers, np.round(usual * 5)], axis=1)
    return x.astype(np.float32), y.astype(np.float32)


@pytest.mark.parametrize("width", LIBRARIES)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, width: str) -> None:
    x, y = pairs()
    function, bound = BINARY[name]
    check(evaluate(LIBRARIES[width], name, x, y), reference(function, x, y), bound, x, y)


def doubles() -> Array:
    random = np.random.default_rng(1)
    spread = random.standard_normal(3000) * np.exp(random.uniform(-20, 6, 3000))
    return np.concatenate([spread, random.uniform(-1, 1, 500), SPECIAL.astype(np.float64)])


@pytest.mark.parametrize("name", UNARY)
def test_float64_unary(name: str) -> None:
    x = doubles()
    got = evaluate(LIBRARIES["512"], name, x, element="f64", lanes=8)
    want = reference(UNARY[name], x)
    torch.testing.assert_close(
        torch.from_numpy(got), torch.from_numpy(want), rtol=3e-13, atol=1e-300, equal_nan=True
    )


@pytest.mark.parametrize("name", BINARY)
def test_float64_binary(name: str) -> None:
    x = doubles()
    y = np.random.default_rng(2).permutation(x)
    got = evaluate(LIBRARIES["256"], name, x, y, element="f64")
    want = reference(BINARY[name][0], x, y)
    torch.testing.assert_close(
        torch.from_numpy(got), torch.from_numpy(want), rtol=1e-14, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("lanes", [1, 2, 4, 32])
def test_the_lane_count_does_not_change_results(lanes: int) -> None:
    library = LIBRARIES["512"]
    x = np.concatenate([np.linspace(-20, 20, 333), SPECIAL]).astype(np.float32)
    for name in ("exp", "tanh", "gelu", "log", "sin", "tan", "erfinv", "round"):
        usual = evaluate(library, name, x)
        np.testing.assert_array_equal(evaluate(library, name, x, lanes=lanes), usual, name)
    usual = evaluate(library, "fmod", x, x[::-1].copy())
    np.testing.assert_array_equal(evaluate(library, "fmod", x, x[::-1].copy(), lanes=lanes), usual)


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_a_large_angle_leaves_its_neighbours_alone(name: str) -> None:
    x = np.linspace(-9, 9, 64).astype(np.float32)
    mixed = np.where(np.arange(64) % 16 == 5, np.float32(1e30), x)
    alone, together = (evaluate(LIBRARIES["512"], name, v) for v in (x, mixed))
    same = x == mixed
    np.testing.assert_array_equal(together[same], alone[same])
    check(together, reference(UNARY[name], mixed), 2.0, mixed)


def test_wrong_use_is_refused() -> None:
    w = KernelWriter(host())
    with pytest.raises(ValueError, match="pow takes 2 operands, not 1"):
        maths.apply(w, "pow", ["%x"])
    with pytest.raises(KeyError):
        maths.apply(w, "sine", ["%x"])


def test_the_code_is_valid_for_arm() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = Machine("generic", "", 128, 32, fma=True, arch="aarch64")
    kernels = [loop_kernel(machine, n, f.operands) for n, f in maths.FUNCTIONS.items()]
    module = llvm.parse_assembly(module_text(kernels, machine))
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=2)
    text = machine.emit_assembly(module)
    assert "fmla" in text and all(f"maths_{name}" in text for name in maths.FUNCTIONS)


def test_expressions_name_the_functions_of_the_library():
    """`fmod` is an operator on integers, too."""
    assert loops.MATHS | {"fmod"} == maths.FUNCTIONS.keys()
    assert not loops.MATHS & loops.OPERATORS
