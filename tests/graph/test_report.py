"""`torchair report`: the page holds what it promises, whatever texts a model has in it, and draws
itself in a browser without errors."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import time
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair
from gpu_kernel import HOPPER, feed_forward
from processes import inherited, run_forked
from torchair.engine.inspect.dry_run import dry_run
from torchair.reporting.recorder import embedded, kernel_rows
from torchair.reporting.recorder import page as page_of

SCRIPT = """
import torch, torchair

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        y = torch.nn.functional.gelu(self.up(self.norm(x)))  # </script><img src=x onerror=fail()>
        return x + self.down(y).view(-1, 16)

model = torch.nn.Sequential(Block(16), Block(16), Block(16)).eval()
compiled = torch.compile(model, backend="torchair")
with torch.no_grad():
    for rows in 4, 4:
        compiled(torch.randn(rows, 16))
"""
PARTS = ("overview", "code", "graph", "memory", "timeline", "roofline", "kernels", "passes")
LISTS = ("list-source", "list-fx", "list-ge", "list-steps")
VOID = ("meta", "img", "br", "input", "link")


class Page(HTMLParser):
    """Elements of a page by id, each with its classes, texts and the elements inside of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        inside = tuple(i for _, i in self._open if i)
        self.elements.append((tag, dict(attrs), inside))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, tag

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data

    def inside(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        """Attributes of the elements inside of one, of those with a class if that is given."""
        return [
            a
            for _, a, inside in self.elements
            if name in inside and (not kind or kind in (a.get("class") or "").split())
        ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "script.py").write_text(SCRIPT)
    done = run_forked(
        "-m", "torchair", "report", "-o", "page.html", "script.py", env=inherited(), cwd=folder
    )
    assert done.returncode == 0 and done.stdout == "page.html\n", done.stderr
    return folder / "page.html"


@pytest.fixture(scope="module")
def graph(report: Path) -> dict[str, Any]:
    (found,) = json.loads(Page(report.read_text()).texts["data"])["graphs"]
    return found


def test_page_has_its_parts_and_loads_nothing(report):
    page = Page(report.read_text())
    assert [a["id"] for tag, a, _ in page.elements if tag == "section"] == list(PARTS)
    assert [tag for tag, *_ in page.elements].count("script") == 2  # the data, and ours
    assert not [a for _, a, _ in page.elements if "src" in a or "onerror" in a]
    (policy,) = [a["content"] for _, a, _ in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_texts_of_a_model_cannot_end_the_data():
    text = "</script><!--<script>alert(1)</script>&amp;\u2028"
    assert json.loads(embedded([text])) == [text]
    assert not set("<>&\u2028") & set(embedded([text]))


def test_lines_nodes_and_steps_belong_together(graph):
    source = {k: row[1] for k, row in enumerate(graph["source"]) if len(row) == 2}
    (line,) = [k for k, text in source.items() if "self.up(" in text]
    assert "onerror=fail()" in source[line]
    nodes = [k for k, (_, row, _) in enumerate(graph["fx"]) if row == line]
    texts = " ".join(graph["fx"][k][0] for k in nodes)
    assert all(f"aten.{name}" in texts for name in ("gelu", "addmm", "native_layer_norm"))
    made = {m for k in nodes for m in graph["fx"][k][2]}
    assert sum("Gelu(" in graph["ge"][m][0] for m in made) == 3  # one in each block
    steps = [s for s in graph["steps"] if made & set(s["ge"])]
    assert sum("gelu" in s["name"] for s in steps) == 3
    assert {s["module"].split(".")[0] for s in steps} == {"0", "1", "2"}
    assert all(r < k for k, s in enumerate(graph["steps"]) for r in s["reads"])
    assert all(s["reads"] for s in graph["steps"][1:])


def test_the_model_has_a_name_arguments_are_known_and_lines_begin_at_the_left(graph, report):
    assert graph["model"] == "Block" and 'id="model"' in report.read_text()
    assert all("argument" in graph["fx"][k][0] for k in graph["arguments"]["fx"])
    assert len(graph["arguments"]["fx"]) == len(graph["arguments"]["ge"]) == 3 * 6 + 1
    assert {graph["ge"][k][2] for k in graph["arguments"]["ge"]} == {"Data"}
    texts = [row[1] for row in graph["source"] if len(row) == 2]
    assert any(text.startswith("def forward") for text in texts)
    assert any(text.startswith("    return x + self.down") for text in texts)
    assert graph["source"][0][0].endswith("script.py")
    assert graph["others"] >= 0 and graph["rates"]["others"] >= 0


def test_a_function_is_named_and_a_notebook_shows_the_page(tmp_path):
    def scaled(x):
        return x * 2 + 1

    torch._dynamo.reset()
    shown = torchair.report(scaled, path=tmp_path / "own.html")(torch.ones(3))
    assert repr(shown) == f"<torchair report on 1 graphs: {tmp_path / 'own.html'}>"
    data = json.loads(Page(shown.path.read_text()).texts["data"])
    assert data["title"] == "scaled" and data["graphs"][0]["model"] == "scaled"
    html = shown._repr_html_()
    assert html.startswith("<iframe") and 'sandbox="allow-scripts"' in html
    (frame,) = [a for tag, a, _ in Page(html).elements if tag == "iframe"]
    assert frame["srcdoc"] == shown.path.read_text()


def test_buffers_that_live_together_do_not_overlap(graph):
    memory = graph["memory"]
    boxes = memory["boxes"]
    assert len(boxes) > 3 and max(b[4] + b[5] for b in boxes) <= memory["size"]
    for k, (_, writers, first, last, offset, size) in enumerate(boxes):
        assert writers[0] == first < last < memory["steps"] and size > 0
        readers = [j for j, s in enumerate(graph["steps"]) if set(s["reads"]) & set(writers)]
        assert max(readers) == last, "it lives until its last reader"
        for _, _, other_first, other_last, other, other_size in boxes[:k]:
            together = first <= other_last and other_first <= last
            assert not together or offset + size <= other or other + other_size <= offset


def test_timeline_kernels_and_passes(graph):
    slices, steps = graph["timeline"]["slices"], graph["steps"]
    timed = [k for k, s in enumerate(steps) if s["kind"] != "view"]
    assert sorted(k for _, k, _, _ in slices) == timed and all(a < b for *_, a, b in slices)
    native = [s for s in steps if s["kind"] == "native"]
    assert len(graph["kernels"]) < len(native)  # blocks share theirs
    kernel = graph["kernels"][next(s["kernel"] for s in native if "gelu" in s["name"])]
    assert "for a0 in range" in kernel["nest"] and "define" in kernel["text"]
    assert kernel["name"] in kernel["machine"] and "ret" in kernel["machine"]
    passes = {p["name"]: p for p in graph["passes"]}
    views, rules = passes["optimize_noop_ops"], passes["apply_rules"]
    assert (views["kind"], rules["kind"]) == ("fx", "ge")
    assert sum(x.startswith("-") and "aten.view" in x for x in views["lines"]) == 3
    assert views["before"] - views["after"] == 3
    assert sum(x.startswith("-Transpose") for x in rules["lines"]) == 6
    assert rules["after"] < rules["before"]


def test_steps_know_what_they_move_and_compute(graph):
    product = next(s for s in graph["steps"] if "gelu" in s["name"])
    assert product["bytes"] == 4 * (4 * 16 + 16 * 64 + 64 + 4 * 64)
    assert product["operations"] >= 2 * 4 * 16 * 64 and product["us"] > 0
    rates = graph["rates"]
    assert rates["operations"] >= product["operations"] / (product["us"] * 1.001e-6)
    assert rates["near"] >= product["bytes"] / (product["us"] * 1.001e-6) and rates["bytes"] > 0


def test_kernels_of_a_gpu_show_ptx():
    plan = dry_run(feed_forward(), HOPPER).plan
    rows, kernel_of = kernel_rows(plan)
    assert rows and sorted(set(kernel_of.values())) == list(range(len(rows)))
    for row in rows:
        assert f".entry {row['name']}" in row["machine"]
    first, made = rows[kernel_of[0]], plan.steps[0].code.generated
    assert made.launch is not None and f".maxntid {made.launch.block}" in first["machine"]


@pytest.mark.parametrize("mode", ["max-autotune", "npugraph_ex"])
def test_option_reports_graphs_of_both_modes(mode, tmp_path):
    config = torchair.CompilerConfig()
    config.mode = mode
    config.debug.report.path = tmp_path / "own.html"

    def update(x, cache):
        cache.add_(x)
        return torch.dropout(cache * 2, 0.5, True)

    torch._dynamo.reset()
    compiled = torch.compile(update, backend=torchair.get_npu_backend(compiler_config=config))
    x, cache = torch.ones(3), torch.zeros(3)
    torch.manual_seed(5)
    compiled(x, cache)
    after = torch.rand(2)
    assert cache.tolist() == [1.0] * 3  # updated once, though the graph ran twice
    compiled(x, cache)
    (first,) = json.loads(Page((tmp_path / "own.html").read_text()).texts["data"])["graphs"]
    assert first["mode"] == mode and not first["note"] and first["steps"]
    torch._dynamo.reset()
    plain = torch.compile(update, backend="torchair")
    torch.manual_seed(5)
    plain(x, torch.zeros(3))
    assert torch.equal(torch.rand(2), after)  # and drew its random numbers once


def drawn(page: Path, wish: str, folder: Path, *options: str) -> Page:
    """The page as Chromium has drawn it."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=5000",
        *options,
        f"{page.as_uri()}#{wish}",
    ]
    assert shutil.which("chromium"), "this test needs Chromium: apt-get install chromium"
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return Page(done.stdout)


def colours(png: bytes) -> Counter[tuple[int, int, int]]:
    """How often each colour is in a picture of 8 bits a channel, as Chromium writes them."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        packed += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    data, size = zlib.decompress(packed), width * channels
    found: Counter[tuple[int, int, int]] = Counter()
    above = bytearray(size)
    for y in range(height):
        kind, *packed_row = data[y * (size + 1) : (y + 1) * (size + 1)]
        row = unfiltered(kind, bytearray(packed_row), above, channels)
        found.update(zip(row[::channels], row[1::channels], row[2::channels], strict=True))
        above = row
    return found


def unfiltered(kind: int, row: bytearray, above: bytearray, step: int) -> bytearray:
    """A row of a PNG as it was before its filter."""
    for i in range(len(row)):
        left, up = row[i - step] if i >= step else 0, above[i]
        corner = above[i - step] if i >= step else 0
        if kind == 4:
            aim = left + up - corner
            guess = min((left, up, corner), key=lambda v: abs(aim - v))
        else:
            guess = (0, left, up, (left + up) // 2)[kind]
        row[i] = (row[i] + guess) & 255
    return row


def check_parts(page: Page, graph: dict[str, Any], number: int) -> None:
    """Every part of a page on which a step was chosen shows something, and the step lit up."""
    (errors,) = [a for _, a, _ in page.elements if a.get("id") == "errors"]
    assert "hidden" in errors, page.texts["errors"]
    for name in LISTS:
        assert page.inside(name, "row") and page.inside(name, "lit"), name
    lit = [a for a in page.inside("graph-stage", "lit") if "box" in a["class"].split()]
    assert len(lit) == 1
    assert page.inside("graph-stage", "edge")
    assert len(page.inside("memory-stage", "buffer")) == len(graph["memory"]["boxes"])
    assert len(page.inside("timeline-stage", "slice")) == len(graph["timeline"]["slices"])
    assert len(page.inside("timeline-stage", "lit")) == 1
    assert len(page.inside("roofline-stage", "dot")) == len(graph["timeline"]["slices"])
    assert len(page.inside("roofline-stage", "lit")) == 1
    assert page.inside("list-kernels", "lit") and "for a0 in range" in page.texts["kernel-text"]
    assert page.inside("list-passes", "row") and page.inside("list-lines", "minus")
    assert graph["steps"][number]["name"] in page.texts["chosen"]


@pytest.mark.browser
def test_browser_draws_everything_and_lights_up_what_belongs_together(report, graph, tmp_path):
    number = next(k for k, s in enumerate(graph["steps"]) if "gelu" in s["name"])
    page = drawn(report, f"steps={number}", tmp_path, "--dump-dom")
    check_parts(page, graph, number)
    assert "img" not in [tag for tag, *_ in page.elements]
    assert "onerror=fail()" in page.texts["list-source"]
    assert len(page.inside("graph-stage", "item")) == len(graph["steps"])
    assert len(page.inside("memory-stage", "lit")) == 1


def bert_base() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(attn_implementation="sdpa"))


def llama_of_32_layers() -> Any:
    from transformers import LlamaConfig, LlamaModel

    width = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8}
    return LlamaModel(LlamaConfig(num_hidden_layers=32, vocab_size=2000, use_cache=False, **width))


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("make", [bert_base, llama_of_32_layers])
def test_pages_of_real_models(make, tmp_path, capsys):
    config = torchair.CompilerConfig()
    config.debug.report.path = file = tmp_path / "page.html"
    model = make().eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
    with torch.no_grad():
        compiled(torch.randint(0, 1000, (1, 32)))
    (graph,) = json.loads(Page(file.read_text()).texts["data"])["graphs"]
    assert file.stat().st_size < 10e6
    number = max(k for k, s in enumerate(graph["steps"]) if s["kernel"] is not None)
    empty = tmp_path / "empty.html"
    empty.write_text("<!doctype html>")
    times = []
    for page in (empty, file):
        start = time.perf_counter()
        found = drawn(page, f"steps={number}", tmp_path / page.stem, "--dump-dom")
        times.append(time.perf_counter() - start)
    check_parts(found, graph, number)
    with capsys.disabled():
        print(
            f"\n{make.__name__}: {len(graph['steps'])} steps, {file.stat().st_size / 1e6:.1f} MB, "
            f"Chromium took {times[1]:.1f} s, {times[0]:.1f} s for an empty page"
        )


@pytest.mark.browser
def test_browser_keeps_only_what_is_in_sight_of_a_large_graph(graph, tmp_path):
    step = graph["steps"][0]
    steps = [
        {**step, "module": f"layers.{k // 10}.mlp", "reads": [k - 1] if k else []}
        for k in range(3000)
    ]
    many = {name: graph[name] * 150 for name in ("fx", "ge")}
    file = tmp_path / "large.html"
    file.write_bytes(page_of("large", [{**graph, **many, "steps": steps}]))
    large = drawn(file, "steps=2995", tmp_path / "profile", "--dump-dom")
    (errors,) = [a for _, a, _ in large.elements if a.get("id") == "errors"]
    assert "hidden" in errors, large.texts["errors"]
    assert "3000 steps" in large.texts["count-steps"]
    assert all(0 < len(large.inside(name, "row")) < 60 for name in LISTS)
    assert len(large.inside("list-steps", "lit")) == 1, "the chosen one is in sight"
    boxes = [a for a in large.inside("graph-stage", "box") if "group" in a["class"].split()]
    assert 0 < len(boxes) < 60 and "layers" in large.texts["graph-stage"]


@pytest.mark.browser
@pytest.mark.parametrize("scheme, back, lit", [(1, 0xFBFBFA, 0xFFF0B8), (0, 0x15181C, 0x4A3C0C)])
def test_picture_of_the_page_is_not_broken(report, scheme, back, lit, tmp_path):
    file = tmp_path / "page.png"
    options = (f"--screenshot={file}", "--window-size=800,640")
    drawn(report, "steps=1", tmp_path, f"--blink-settings=preferredColorScheme={scheme}", *options)
    found = colours(file.read_bytes())
    assert len(found) > 60, "text has many shades"
    for colour in (back, lit):  # around the parts, and what was chosen
        assert found[colour >> 16, colour >> 8 & 255, colour & 255] > 1000, hex(colour)
