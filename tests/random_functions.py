"""Random functions of torch operators, written as source text so that a failing one can be read.

A line is kept if it runs: it is tried on real tensors while the function grows. Comparisons and
positions of maxima take only values that every way of computing gives bit by bit.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from random_graphs import FLOATS, Noise, Resize

SIZES = (2, 3, 4, 5, 7, 8, 16, 17, 33)
MOST = 4000  # elements of a value
NAMES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
WAYS = ("plain", "permuted", "spread", "expanded", "channels_last", "offset")

# Each template uses `a` and perhaps `b`, `c`. What it does to exactness: "keeps" it, "loses" it,
# or "needs" exact operands. `i` is a random small integer, `d` and `e` are dims of `a`.
FLOAT = {
    "loses": (
        "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})",
        "torch.exp(-{a}.abs())",
        "{a} * {b}", "{a} + {b}", "{a} - {b}", "{a} / ({b}.abs() + 1)", "{a} * 0.5 + 1",
        "torch.softmax({a}, {d})", "{a}.log_softmax({d})", "{a}.sum({d})",
        "{a}.mean({d}, keepdim=True)",
        "{a}.sum()", "{a}.var({d}, correction=0)", "{a}.square().mean(-1, keepdim=True)",
        "{a} * torch.rsqrt({a}.square().mean(-1, keepdim=True) + 1e-5)", "{a}.cumsum({d})",
        "{a}.matmul({b})", "{a} @ {b}.transpose(-1, -2)", "torch.addcmul({a}, {b}, {c}, value=0.5)",
        "torch.lerp({a}, {b}, 0.3)", "F.softplus({a})", "{a}.pow(2)", "{a}.norm(dim={d})",
        "torch.where({m}, {a}, {b})", "{a}.masked_fill({m}, -2.0)", "{a}.logsumexp({d})",
        "F.layer_norm({a}, ({a}.shape[-1],), eps=0.1)", "torch.einsum('...i,...i->...', {a}, {b})",
        "F.glu(torch.cat([{a}, {a}], -1))", "torch.clamp({a}, -0.5, 0.75)",
        "F.scaled_dot_product_attention({a}, {b}, {b})", "F.avg_pool2d({a}, 2)",
        "F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)",
        "F.rms_norm({a}, ({a}.shape[-1],), eps=0.1)", "F.linear({a}, {b})",
    ),
    "keeps": (
        "{a}.relu()", "-{a}", "{a}.abs()", "torch.maximum({a}, {b})", "{a}.amax({d})",
        "{a}.amin({d}, keepdim=True)", "{a}.to(f64)", "F.max_pool2d({a}, 2, 1)",
    ),
    "needs": ("{a} > {b}", "{a} <= 0.25", "{a}.argmax({d})", "{a}.max({d})[1]", "{a} == {b}"),
    "casts": ("{a}.to(f32)", "{a}.to(bf16)", "{a}.to(f16)"),
}  # fmt: skip
ANY = (
    "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.flatten()", "{a}.flatten(0, 1)",
    "{a}.reshape(-1, {a}.shape[-1])", "{a}[1:]", "{a}[..., ::2]", "{a}[:, 1:-1]", "{a}[..., -1]",
    "{a}[0]", "{a}[None]", "{a}.expand(3, *{a}.shape)", "{a}.chunk(2, {d})[0]",
    "{a}.split(2, {d})[-1]", "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})",
    "{a}.flip({d}).contiguous()", "{a}.roll(1, {d})", "{a}.repeat(2, *[1] * {a}.dim())",
    "{a}.contiguous()",
    "{a}.clone()", "{a}.movedim(0, -1)", "{a}.unflatten(-1, ({a}.shape[-1], 1))",
    "{a}.narrow({d}, 0, 1)", "{a}.select({d}, -1)", "{a}.unbind({d})[0]",
    "{a}.permute(*reversed(range({a}.dim())))", "{a}.squeeze({d})", "{a}.diagonal()",
    "F.pad({a}, (1, 2))", "torch.tril({a})", "{a}.index_select({d}, {j})", "{a}[{j}]",
    "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))", "{a}.swapaxes(0, {d})",
    "{a}.new_zeros({a}.shape)", "torch.ones_like({a})", "{a}.view_as({a})", "{a}.detach()",
    "{a}.index_put(({j},), {b})", "{a}.slice_scatter({b}, {d}, 1, 3)",
    "{a}.take_along_dim({k}, {d})",
)  # fmt: skip
WHOLE = (
    "{a} + {b}", "{a} * 2", "{a} - {b}", "{a} // 3", "{a} % 4", "{a}.sum({d})", "{a}.amax({d})",
    "{a} & {b}", "{a} > {b}", "{a}.clamp(-2, 3)", "{a}.float()", "{a}.bool()", "{a}.cumsum({d})",
)  # fmt: skip
TRUTH = (
    "~{a}", "{a} & {b}", "{a} | {b}", "{a}.any({d})", "{a}.all()", "{a}.sum({d})", "{a}.to(f32)",
    "torch.where({a}, {x}, {y})",
)  # fmt: skip
CHANGES = (
    "{a}.add_({b}.clone())", "{a}.mul_(2)", "{a}[0] = {b}[0].clone()", "{a}[..., 1:] *= 3",
    "{a}.copy_({b}.clone())",
    "{a}.relu_()", "{a}.zero_()", "{a}.fill_(1)", "{a}.clamp_(-1, 1)",
    "{a}.transpose(0, -1).sub_(1)", "{a}.index_copy_(0, {j}, {b}[:3].clone())", "{a}[{j}] = 1",
    "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64)[:1], {b}[:1].clone())",
)  # fmt: skip
MORE = {
    "loses": (
        "F.mish({a})", "F.leaky_relu({a}, 0.1)", "torch.sin({a})", "torch.log1p({a}.abs())",
        "torch.atan2({a}, {b}.abs() + 1)", "{a}.std({d}, correction=0)", "{a}.prod({d})",
        "torch.addmm({a}, {b}, {c})", "torch.baddbmm({a}, {b}, {c})", "torch.outer({a}, {b})",
        "F.group_norm({a}, 1, eps=0.1)", "F.batch_norm({a}, None, None, training=True, eps=0.1)",
        "F.normalize({a}, dim={d}, eps=0.1)", "F.hardswish({a})", "{a}.logcumsumexp({d})",
        "F.smooth_l1_loss({a}, {b})", "F.mse_loss({a}, {b}, reduction='none')",
        "F.conv1d({a}, {a}[:, :, :3].contiguous(), padding=1)", "{a}.nansum({d})",
        "F.conv2d({a}, {a}[:, :, :2, :2])", "torch.cdist({a}, {b}, compute_mode='"
        "donot_use_mm_for_euclid_dist')", "{a}.sigmoid() * {b} + {c}", "{a} ** 3",
        "F.interpolate({a}[None, None], scale_factor=2.0, mode='bilinear')", "{a}.diff(dim={d})",
        "F.scaled_dot_product_attention({a}, {b}, {c}, {m}.expand({a}.shape[-2], {b}.shape[-2]))",
        "torch.einsum('...ij,...kj->...ik', {a}, {b})", "F.cosine_similarity({a}, {b}, {d})",
    ),
    "keeps": (
        "torch.minimum({a}, {b})", "{a}.sort({d})[0]", "{a}.topk(1, {d})[0]", "{a}.cummax({d})[0]",
        "torch.sign({a})", "{a}.nan_to_num()", "F.threshold({a}, 0.1, 0.0)", "torch.fmax({a}, {b})",
        "{a}.median({d})[0]", "torch.copysign({a}, {b})", "F.hardtanh({a})",
    ),
    "needs": (
        "{a}.floor()", "{a}.round()", "{a}.int()", "{a}.isnan()", "torch.signbit({a})",
        "{a}.argmin({d})", "{a}.sort({d})[1]", "{a} != {b}", "{a}.bool()", "{a}.to(torch.int8)",
    ),
    "casts": ("{a}.type(f32)", "{a}.to(f64).to(f32)"),
    "any": (
        "torch.triu({a}, 1)", "{a}.unfold({d}, 2, 2)", "{a}.T", "{a}.repeat_interleave(2)",
        "{a}.flatten().narrow(0, 0, 4).as_strided((2, 2), (2, 1))", "torch.where({m}, {a}, {b})",
        "{a}.rot90()",
        "{a}.tensor_split(2, {d})[1]", "torch.stack([{a}, {a}])[1]", "{a}.masked_fill({m}, 1)",
        "{a}.select_scatter({b}.select({d}, 0), {d}, 0)", "{a}.index_add(0, {j}, {b}[:3])",
        "{a}.scatter(0, torch.zeros_like({a}, dtype=torch.int64)[:1], {b})", "{a}.fliplr()",
        "torch.zeros_like({a}) + {a}", "{a}.reshape(-1)[1:]", "{a}.unsqueeze(-1).expand_as({b})",
        "{a}.mT", "{a}.diagonal_scatter({b}.diagonal())", "{a}.expand_as({b})",
        "{a}.new_full((2,), 3)", "torch.hstack([{a}, {b}])", "{a}.view(-1)",
        "{a}.t()", "{a}.ravel()", "{a}.tile(2)",
    ),
    "whole": (
        "{a} | {b}", "{a} ^ {b}", "{a} << 1", "{a} >> 1", "~{a}", "-{a}", "{a}.abs()", "{a} / 2",
        "{a} * 0.5", "{a}.mean(dtype=f32)", "{a}.argmax({d})", "{a}.sort({d})[0]", "{a} == {b}",
        "{a}.to(torch.uint8)", "{a}.to(torch.int16)", "{a}.prod({d})", "{a}.bitwise_not()",
        "torch.maximum({a}, {b})", "{a} + {x}", "{x} * {a}", "{a}.double()", "{a}.amin({d})",
        "F.one_hot({a} % 3, 3)", "{a} % 5 - 2", "torch.div({a}, 3, rounding_mode='trunc')",
    ),
    "truth": (
        "{a} ^ {b}", "{a}.logical_not()", "{a}.all({d})", "{a}.cumsum({d})", "{a} == {b}",
        "{a}.int()", "{a} * {x}", "{a}.any()", "{a}.nonzero().shape[1] + {a}.sum()",
    ),
    "changes": (
        "{a}.sigmoid_()", "{a}.div_(2)", "{a}.neg_()", "{a}.t_().mul_(2).t_()", "{a}[1:].add_(1)",
        "{a}.masked_fill_({m}, 0)", "{a}.index_add_(0, {j}, {b}[:3].clone())", "{a}.abs_()",
        "{a}.select(0, 0).copy_({b}.select(0, -1).clone())", "{a}.diagonal().zero_()",
        "{a}.index_fill_(0, {j}, 2)", "{a}.view(-1)[::2] += 1", "{a}.sub_({a}.clone())",
        "{a}.lerp_({b}.clone(), 0.25)", "{a}.addcmul_({b}.clone(), {b}.clone())",
    ),
}  # fmt: skip
NUMBERS = {
    "loses": (
        "{a} * {s}", "{a} + {n}", "{a} / {n}", "{s} - {a}", "{a}.clamp(max={s})", "{a}.pow({n})",
        "torch.where({m}, {a}, {s})", "{a} * {n} + {s}", "torch.full_like({a}, {s})",
        "{n} / ({a}.abs() + 1)",
    ),
    "any": (
        "{a}[:{n}]", "{a}.narrow({d}, 0, {n})", "{a}.expand({n}, *{a}.shape)", "{a}.roll({n}, {d})",
        "F.pad({a}, ({n}, 1))", "{a}[..., {n} - 1]", "{a}.repeat({n}, *[1] * {a}.dim())",
        "{a}.select({d}, {n} - 1)", "{a}.new_ones({n})",
    ),
    "whole": ("{a} + {n}", "{a} * {n}", "{a} // {n}", "{a} % {n}", "{a} * {s}", "{n} - {a}"),
}  # fmt: skip
"""What programs do with Python numbers among their arguments, an `n` and an `s`."""
TABLES = {**FLOAT, "any": ANY, "whole": WHOLE, "truth": TRUTH, "changes": CHANGES}
BROAD = {kind: (*TABLES[kind], *MORE[kind]) for kind in TABLES}
SMALL = (torch.int32, torch.int16, torch.int8, torch.uint8)


class Program:
    """One function with inputs for it. `wide` runs it in float64."""

    def __init__(
        self,
        seed: int,
        lines: int = 8,
        changes: bool = True,
        tiny: bool = False,
        broad: bool = False,
        numbers: Sequence[int | float] = (),
    ) -> None:
        """With `tiny` sizes of 0 and 1 are as frequent as others; with `broad` there are more
        operators and types, and arguments may be results. `numbers` are the first values of two
        arguments that are Python's."""
        self.numbers = dict(zip("ns", numbers, strict=False))
        self.tables = BROAD if broad else TABLES
        self.pick = random.Random(seed)
        self.name = f"<random function {seed}>"
        self.least = 0 if tiny else 1  # elements of a value
        self.sizes = self.pick.sample(SIZES, 3)
        if tiny:
            self.sizes[:2] = [0, 1] if self.pick.random() < 0.5 else [1, 1]
        self.floats = self.pick.choices(FLOATS, [6, 2, 2, 2], k=2)
        self.makes: list[Callable[[Resize], Any]] = []
        self.given: list[str] = []
        self.body: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        self.exact: set[str] = set()
        for _ in range(self.pick.randint(2, 4)):
            self._input(self.pick.choice(self.floats))
        for dtype in (torch.int64, torch.bool, *(SMALL if broad else ())):
            if self.pick.random() < (0.15 if dtype in SMALL else 0.4):
                self._input(dtype)
        self._indices()
        tries = 0
        while len(self.body) < lines and tries < 40 * lines:
            tries += 1
            change = changes and self.pick.random() < 0.15
            self._change() if change else self._line()
        if all(n in self.given for n in self.values):
            self.body.append(f"v0 = {self.given[0]}.clone()")
            self.values["v0"] = self.values[self.given[0]].clone()
        made = [n for n in self.values if n not in self.given]
        count = min(len(made), self.pick.randint(1, 4))
        self.results = made[-1:] + self.pick.sample(made, count)
        if broad and self.pick.random() < 0.15:
            self.results.append(self.pick.choice(self.given))

    # ---- inputs ----

    def _dims(self) -> list[int]:
        rank = self.pick.choices([0, 1, 2, 3, 4], [1, 2, 6, 6, 3])[0]
        dims = [
            1 if self.pick.random() < 0.1 else self.pick.choice(self.sizes) for _ in range(rank)
        ]
        return dims if torch.Size(dims).numel() <= MOST else dims[:2]

    def _input(self, dtype: torch.dtype) -> None:
        dims, seed = self._dims(), self.pick.getrandbits(32)
        way = self.pick.choices(WAYS, [6, 2, 1, 1, 1, 1])[0]
        self._given(lambda size: laid_out(Noise(seed), dtype, [size(n) for n in dims], way))

    def _indices(self) -> None:
        """Positions 0 to 2, which every dim of three has."""
        self._given(lambda size: torch.tensor([1, 0, 2]))

    def _given(self, make: Callable[[Resize], torch.Tensor]) -> None:
        name = f"x{len(self.given)}"
        self.makes.append(make)
        self.given.append(name)
        self.values[name] = make(lambda n: n)
        self.exact.add(name)

    def inputs(self, size: Resize = lambda n: n) -> list[torch.Tensor]:
        """Inputs, perhaps of other sizes."""
        return [make(lambda n: size(n) if n > 1 else n) for make in self.makes]

    # ---- lines ----

    def _line(self) -> None:
        a = self._recent()
        x, exact = self.values[a], a in self.exact
        kind = "any"
        if x.is_floating_point():
            kind = self.pick.choices(["loses", "keeps", "needs", "casts", "any"], [9, 3, 1, 1, 7])[
                0
            ]
        elif self.pick.random() < 0.6:
            kind = "truth" if x.dtype == torch.bool else "whole"
        table = self.tables[kind]
        if self.numbers and kind in NUMBERS and self.pick.random() < 0.4:
            table = NUMBERS[kind]
        text, used = self._filled(self.pick.choice(table), a)
        exact = all(u in self.exact for u in used)
        if kind == "needs" and not exact:
            return
        made = self._tried(text)
        name = f"v{len(self.body)}"
        if made is None:
            return
        self.body.append(f"{name} = {text}")
        self.values[name] = made
        if exact and (kind != "loses" and kind != "casts"):
            self.exact.add(name)

    def _change(self) -> None:
        a = self._recent()
        if self._overlaps(self.values[a]):
            return
        text, _ = self._filled(self.pick.choice(self.tables["changes"]), a)
        before = {n: v.clone() for n, v in self.values.items()}
        if self._tried(text, statement=True) is None:
            for n, v in before.items():
                assert torch.equal(v.nan_to_num(), self.values[n].nan_to_num()), text
            return
        self.body.append(text)
        memory = self.values[a].untyped_storage().data_ptr()
        for n, v in self.values.items():
            if v.untyped_storage().data_ptr() == memory and self.values[a].is_floating_point():
                self.exact.discard(n)

    def _overlaps(self, x: torch.Tensor) -> bool:
        """Whether elements of this memory have several places in some view of it."""
        memory = x.untyped_storage().data_ptr()
        views = [v for v in self.values.values() if v.untyped_storage().data_ptr() == memory]
        return any(map(overlapping, views))

    def _recent(self) -> str:
        names = [n for n in self.values if not self._is_index(n)]
        return names[-1 - min(int(self.pick.expovariate(0.5)), len(names) - 1)]

    def _is_index(self, name: str) -> bool:
        return name == self.given[-1]

    def _filled(self, template: str, a: str) -> tuple[str, list[str]]:
        """The template with names in it, and those it reads."""
        x = self.values[a]
        like = [n for n, v in self.values.items() if v.dtype == x.dtype and not self._is_index(n)]
        masks = [n for n, v in self.values.items() if v.dtype == torch.bool] or [a]
        real = [n for n, v in self.values.items() if v.is_floating_point()]
        rank = max(x.dim(), 1)
        names = {
            "a": a, "b": self._fitting(x, like), "c": self.pick.choice(like),
            "m": self.pick.choice(masks), "x": (p := self.pick.choice(real)),
            "y": self._fitting(
                self.values[p],
                [n for n in real if self.values[n].dtype == self.values[p].dtype],
            ),
            "j": self.given[-1], "k": self.given[-1],
        }  # fmt: skip
        used = [n for k, n in names.items() if f"{{{k}}}" in template]
        dims = {"d": self.pick.randrange(rank), "e": self.pick.randrange(rank), "n": "n", "s": "s"}
        return template.format(**names, **dims), used

    def _fitting(self, x: torch.Tensor, names: Sequence[str]) -> str:
        same = [n for n in names if self.values[n].shape == x.shape]
        return self.pick.choice(same if same and self.pick.random() < 0.6 else list(names))

    def _tried(self, text: str, statement: bool = False) -> torch.Tensor | None:
        """What a line gives, None if it does not run or is too large."""
        names: dict[str, Any] = {"torch": torch, "F": F, **NAMES, **self.numbers, **self.values}
        try:
            if statement:
                trial = {n: v.clone() for n, v in self.values.items()}
                exec(text, {**names, **trial})
                exec(text, names)
                return torch.ones(())
            made = eval(text, names)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
        fits = isinstance(made, torch.Tensor) and self.least <= made.numel() <= MOST
        return made if fits else None

    # ---- the function ----

    @property
    def source(self) -> str:
        """The text of the function."""
        lines = [f"def function({', '.join([*self.given, *self.numbers])}):", *self.body]
        lines.append(f"return {', '.join(self.results)},")
        return "\n    ".join(lines) + "\n"

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        text = self.source
        linecache.cache[self.name] = (len(text), None, text.splitlines(True), self.name)
        names: dict[str, Any] = {"torch": torch, "F": F, **NAMES}
        exec(compile(text, self.name, "exec"), names)
        return names["function"]

    def wide(
        self,
        inputs: Sequence[torch.Tensor],
        backward: bool = False,
        numbers: Sequence[int | float] = (),
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results and inputs after it ran in float64, with `backward` gradients too, and everything
        it computed."""
        names = self._widened(inputs, numbers)
        given = wanting_gradients([names[n] for n in self.given]) if backward else []
        for line in self.body:
            self._run_wide(line, names)
        ends = [names[n] for n in [*self.results, *self.given]]
        ends += gradients([names[n] for n in self.results], given)
        return ends, [v for n, v in names.items() if n in self.values]

    def by_lines(
        self, inputs: Sequence[torch.Tensor], numbers: Sequence[int | float] = ()
    ) -> list[torch.Tensor]:
        """Results where every line computes, in its own types, from what float64 has so far. It
        changes its inputs."""
        wide = self._widened(inputs, numbers)
        names: dict[str, Any] = {"torch": torch, "F": F, **NAMES}
        names |= zip([*self.numbers, *self.given], [*numbers, *inputs], strict=True)
        made: dict[str, torch.Tensor] = {}
        for line in self.body:
            exec(line, names)
            self._run_wide(line, wide)
            known = [n for n in self.values if n in names]
            assigned = re.match(r"(v\d+) = ", line)
            made |= {n: names[n].clone() for n in ([assigned[1]] if assigned else known)}
            for n in known:
                if not overlapping(names[n]):
                    names[n].copy_(wide[n])
        return [made.get(n, names[n]) for n in self.results]

    def _widened(
        self, inputs: Sequence[torch.Tensor], numbers: Sequence[int | float]
    ) -> dict[str, Any]:
        """Names that a program in float64 knows at first."""
        names: dict[str, Any] = {"torch": torch, "F": F, **dict.fromkeys(NAMES, torch.float64)}
        names |= zip(self.numbers, numbers, strict=True)
        wholes: dict[int, torch.Tensor] = {}  # memory that several inputs may share, in float64
        for name, x in zip(self.given, inputs, strict=True):
            if not x.is_floating_point() or not x.numel():
                names[name] = x.double() if x.is_floating_point() else x.clone()
                continue
            storage = x.untyped_storage()
            if storage.data_ptr() not in wholes:
                flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
                wholes[storage.data_ptr()] = flat.to(torch.float64, copy=True)
            whole = wholes[storage.data_ptr()]
            names[name] = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        return names

    def _run_wide(self, line: str, names: dict[str, Any]) -> None:
        """One line in float64."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of quotients of integers
        try:
            exec(line.replace(".float()", ".double()"), names)
            if (made := re.match(r"(v\d+) = ", line)) is not None:
                self._keep_apart(made[1], names)
        finally:
            torch.set_default_dtype(usual)

    def _keep_apart(self, name: str, names: dict[str, Any]) -> None:
        """A conversion that copies does so in float64 too, where it has nothing to convert."""
        there = _memory(names[name])
        shared = [n for n in self.values if n in names and _memory(names[n]) == there]
        if any(_memory(self.values[n]) != _memory(self.values[name]) for n in shared):
            names[name] = names[name].clone()


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def wanting_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that can have gradients, which are asked for from now on."""
    return [t.requires_grad_() for t in tensors if t.is_floating_point()]


def gradients(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a sum of all results, with weights that every type can tell."""
    ends = [r for r in results if r.requires_grad]
    if not ends or not given:
        return []
    weights = [((torch.arange(r.numel()) % 17 - 8) / 8).to(r.dtype).reshape(r.shape) for r in ends]
    return list(torch.autograd.grad(ends, given, weights, materialize_grads=True))


def overlapping(x: torch.Tensor) -> bool:
    """Whether elements of a tensor lie on each other: it is expanded, or windows."""
    end = 0  # of what inner dims reach
    for s, n in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if s <= end:
            return True
        end += s * (n - 1)
    return False


def laid_out(noise: Noise, dtype: torch.dtype, dims: Sequence[int], way: str) -> torch.Tensor:
    """A random tensor in one of the layouts that callers pass in."""
    if way == "channels_last" and len(dims) == 4:
        return noise.strided(dtype, dims).to(memory_format=torch.channels_last)
    if way == "offset" and dims:
        return noise.strided(dtype, [dims[0] + 2, *dims[1:]])[2:]
    return noise.strided(dtype, dims, way)
