"""The rules of the house: layers, a light import, nothing patched, public names, tidy files."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import layers

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "torchair"
LAYER_OF = {room: layer for layer, rooms in layers.LAYERS.items() for room in rooms}


@dataclass(frozen=True)
class ImportEdge:
    """One import statement: ``importer`` and ``imported`` are dotted module names of torchair."""

    importer: str
    imported: str
    where: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.importer} imports {self.imported}"


class ImportFinder(ast.NodeVisitor):
    """Collects the torchair imports of one file and knows which of them stand in a function."""

    def __init__(self, file: Path, package: Path) -> None:
        self.package = package
        self.module = module_name(file, package)
        is_package = file.name == "__init__.py"
        self.parent = self.module if is_package else self.module.rpartition(".")[0]
        self.label = file.relative_to(package.parent).as_posix()
        self.depth = 0
        self.edges: list[ImportEdge] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.absolute("." * node.level + (node.module or ""))
        for alias in node.names:
            # `from torchair.ge import graph` is about the module graph, if there is one.
            inner = f"{base}.{alias.name}"
            self.add(inner if module_exists(inner, self.package) else base, node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.add(self.absolute(name.value), node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def absolute(self, name: str) -> str:
        bare = name.lstrip(".")
        level = len(name) - len(bare)
        if level == 0:
            return name
        base = self.parent.split(".")
        base = base[: len(base) - level + 1]
        return ".".join([*base, bare] if bare else base)

    def add(self, imported: str, node: ast.stmt | ast.expr) -> None:
        if imported.split(".")[0] != self.package.name:
            return
        where = f"{self.label}:{node.lineno}"
        self.edges.append(ImportEdge(self.module, imported, where, self.depth > 0))


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_exists(name: str, package: Path) -> bool:
    path = package.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def source_files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def import_edges(package: Path) -> list[ImportEdge]:
    found = []
    for file in source_files(package):
        finder = ImportFinder(file, package)
        finder.visit(parsed(file))
        found += finder.edges
    return found


def known_to(edge: ImportEdge) -> bool:
    """Whether a module may know a room inside of another."""
    inner = next((r for r in layers.KNOWN_TO if is_in(edge.imported, r)), None)
    return inner is None or any(is_in(edge.importer, r) for r in (inner, *layers.KNOWN_TO[inner]))


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def inner_fault(edge: ImportEdge) -> str | None:
    """What is wrong with an import inside of a package whose parts have layers of their own."""
    for inner, table in layers.INNER.items():
        room = f"torchair.{inner}"
        if not is_in(edge.importer, room) or not is_in(edge.imported, room):
            continue
        order = {part: n for n, parts in table.items() for part in parts}
        upper, lower = (
            m.removeprefix(room).removeprefix(".").partition(".")[0]
            for m in (edge.importer, edge.imported)
        )
        if upper != lower and order.get(upper, 0) <= order.get(lower, -1):
            return f"{edge}: {upper} of {inner} is not above {lower}"
    return None


def layer_faults(package: Path = PACKAGE) -> list[str]:
    faults = []
    for edge in import_edges(package):
        if (fault := inner_fault(edge)) is not None:
            faults.append(fault)
        if not known_to(edge):
            faults.append(f"{edge}, which it must not know")
        upper, lower = room_of(edge.importer), room_of(edge.imported)
        if upper == lower or upper not in LAYER_OF:
            continue  # a room without a layer is reported once, by its own test
        if lower not in LAYER_OF:
            faults.append(f"{edge}, and no such room is in the layer table")
        elif LAYER_OF[upper] <= LAYER_OF[lower]:
            faults.append(f"{edge}: from layer {LAYER_OF[upper]} to layer {LAYER_OF[lower]}")
    return faults


def run_fresh(code: str) -> list[str]:
    """What ``code`` prints, line by line, in a new interpreter that knows only our sources."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TNG_"))}
    environment["PYTHONPATH"] = str(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


# ---- layers


def test_every_package_has_one_layer():
    named = [room for rooms in layers.LAYERS.values() for room in rooms]
    assert len(named) == len(set(named))
    found = {room_of(module_name(file, PACKAGE)) for file in source_files()}
    missing = sorted(found - set(named))
    assert not missing, f"add to LAYERS in tests/tools/layers.py: {missing}"


@pytest.mark.parametrize("room", layers.INNER)
def test_every_part_of_a_package_has_one_layer(room):
    named = [part for parts in layers.INNER[room].values() for part in parts]
    assert len(named) == len(set(named))
    folder = PACKAGE.joinpath(*room.split("."))
    here = {f.stem for f in folder.glob("*.py") if f.stem != "__init__"}
    here |= {f.parent.name for f in folder.glob("*/__init__.py")}
    assert here == set(named), f"INNER in tests/tools/layers.py: {sorted(here ^ set(named))}"


def test_the_engine_asks_targets_and_names_no_device():
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted((PACKAGE / "engine").rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(layers.DEVICE_KINDS, line)
    ]
    assert len(found) <= layers.MOST_DEVICE_KINDS, "\n".join(found)


def test_imports_point_down():
    faults = layer_faults()
    assert not faults, "\n".join(faults)


def test_imports_in_functions_are_listed():
    unlisted = [
        str(edge)
        for edge in import_edges(PACKAGE)
        if edge.lazy and (edge.importer, edge.imported) not in layers.LAZY_IMPORTS
    ]
    assert not unlisted, "move to the top or list in LAZY_IMPORTS:\n" + "\n".join(unlisted)


def test_listed_imports_exist_and_have_a_reason():
    lazy = {(edge.importer, edge.imported) for edge in import_edges(PACKAGE) if edge.lazy}
    stale = set(layers.LAZY_IMPORTS) - lazy
    assert not stale, f"remove from LAZY_IMPORTS: {sorted(stale)}"
    assert all(layers.LAZY_IMPORTS.values())


@pytest.mark.parametrize(
    ("file", "code", "imported", "allowed"),
    [
        ("backend.py", "from .pipeline import compile", "torchair.pipeline", True),
        ("backend.py", "from torchair import pipeline", "torchair.pipeline", True),
        ("pipeline.py", "import torchair.backend", "torchair.backend", False),
        ("pipeline.py", "from torchair import get_compiler", "torchair", False),
        ("convert/registry.py", "from ..engine.plan import Plan", "torchair.engine.plan", False),
        ("convert/registry.py", "from . import shape", "torchair.convert.shape", True),
        ("convert/__init__.py", "from .shape import view", "torchair.convert.shape", True),
        ("ge/graph.py", "from ..errors import GraphError", "torchair.errors", True),
        ("ge/graph.py", "def f():\n    from .. import operators", "torchair.operators", False),
        ("ge/graph.py", "import_module('..operators')", "torchair.operators", False),
        ("ge/graph.py", "from ..nowhere import x", "torchair.nowhere", False),
        ("engine/compile.py", "from ..codegen.cpu import a", "torchair.codegen.cpu", True),
        ("engine/plan.py", "from ..codegen.cpu import a", "torchair.codegen.cpu", False),
        ("engine/run/a.py", "from ..plan import a", "torchair.engine.plan", True),
        ("engine/plan/a.py", "from ..run import a", "torchair.engine.run", False),
        ("engine/fuse/a.py", "def f():\n    from ..run import a", "torchair.engine.run", False),
        ("engine/tune/a.py", "from ..inspect import a", "torchair.engine.inspect", False),
        ("codegen/text/a.py", "from ..cpu import a", "torchair.codegen.cpu", False),
        ("codegen/cpu/b.py", "from . import c", "torchair.codegen.cpu", True),
        ("codegen/cpu/conv/a.py", "from ..jit import a", "torchair.codegen.cpu.jit", True),
        ("codegen/cpu/jit.py", "from .conv import a", "torchair.codegen.cpu.conv", False),
    ],
)
def test_the_layer_test_itself(tmp_path, file, code, imported, allowed):
    package = tmp_path / "torchair"
    for name in ("backend", "pipeline", "errors", "convert/shape", "engine/plan", "operators/a"):
        target = package / f"{name}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(code)
    (edge,) = import_edges(package)
    assert edge.imported == imported
    assert edge.lazy == code.startswith("def")
    assert (not layer_faults(package)) == allowed


# ---- what `import torchair` does, and what it leaves alone


def test_import_is_light():
    new = run_fresh(
        """
        import sys
        import torch
        before = set(sys.modules)
        import torchair
        print(*sorted(set(sys.modules) - before), sep="\\n")
        """
    )
    assert "torchair" in new
    heavy = [
        name
        for name in new
        if any(name == room or name.startswith(f"{room}.") for room in layers.NOT_AT_IMPORT)
    ]
    assert not heavy, f"loaded by `import torchair`: {heavy}"


def test_import_patches_nothing():
    changes = run_fresh(
        """
        import inspect
        import sys
        import torch, torch.distributed, torch.library

        owners = {
            "torch": torch,
            "torch.nn.Module": torch.nn.Module,
            "torch.Tensor": torch.Tensor,
            "torch.library": torch.library,
            "torch.distributed": torch.distributed,
            "torch._C": torch._C,
        }

        def snapshot():
            # The objects, not only their ids: an id can be given again once its object is gone.
            return {
                (owner, name): inspect.getattr_static(value, name)
                for owner, value in owners.items()
                for name in dir(value)
            }

        absent = object()
        before = snapshot()
        assert all(before[key] is value for key, value in snapshot().items())
        import torchair
        after = snapshot()
        for key in sorted({*before, *after}):
            old, new = before.get(key, absent), after.get(key, absent)
            submodule = old is absent and new is sys.modules.get(".".join(key))
            if old is not new and not submodule:
                print(".".join(key))
        """
    )
    assert not changes, f"changed by `import torchair`: {changes}"


# ---- public names


def test_public_and_pending_names_are_the_specified_ones():
    assert not layers.PUBLIC_API & set(layers.PENDING_API)
    assert layers.PUBLIC_API | set(layers.PENDING_API) == layers.SPECIFIED_API | layers.OWN_API
    assert all(layers.PENDING_API.values())


def test_package_offers_exactly_the_public_names():
    import torchair

    assert sorted(torchair.__all__) == sorted(layers.PUBLIC_API)
    missing = [name for name in torchair.__all__ if not hasattr(torchair, name)]
    assert not missing
    early = [name for name in layers.PENDING_API if hasattr(torchair, name)]
    assert not early, f"move to PUBLIC_API: {early}"


# ---- files


def test_tests_stand_in_folders():
    """tests/README.md says what each folder is for."""
    loose = [file.name for file in (ROOT / "tests").glob("*.py") if file.name != "conftest.py"]
    assert not loose, f"move to tests/unit, kernel, graph, model, gpu, outside or tools: {loose}"


def test_tests_do_not_import_each_other():
    """What two of them need is in tests/tools."""
    line = re.compile(r"^\s*(?:from|import) test_\w+", re.MULTILINE)
    files = (ROOT / "tests").rglob("test_*.py")
    found = [file.name for file in files if line.search(file.read_text(encoding="utf-8"))]
    assert not found


def test_unit_tests_need_no_dynamo():
    """`make check` stays quick."""
    files = sorted((ROOT / "tests" / "unit").glob("*.py"))
    found = [f.name for f in files if "torch.com" + "pile(" in f.read_text(encoding="utf-8")]
    assert not found, f"move to tests/graph: {found}"


def statements(node: ast.AST) -> int:
    """Statements inside of a node, docstrings apart."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in found)


def branches(node: ast.AST) -> int:
    """Decisions inside of a node."""
    kinds = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)
    found = list(ast.walk(node))
    either = sum(len(n.values) - 1 for n in found if isinstance(n, ast.BoolOp))
    return either + sum(isinstance(n, (*kinds, ast.match_case)) for n in found)


def budget_faults(file: Path, tree: ast.Module) -> Iterator[str]:
    """What is too large in a file."""
    if (count := statements(tree)) > layers.MOST_STATEMENTS:
        yield f"{file}: {count} statements"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (count := statements(node)) > layers.MOST_STATEMENTS_OF_A_FUNCTION:
                yield f"{file}: {node.name} has {count} statements"
            if (count := branches(node)) > layers.MOST_BRANCHES_OF_A_FUNCTION:
                yield f"{file}: {node.name} has {count} branches"


def test_files_and_functions_stay_small():
    faults = [fault for file in source_files() for fault in budget_faults(file, parsed(file))]
    assert not faults, "split these:\n" + "\n".join(faults)


def test_the_budget_test_itself():
    file = Path("large.py")

    def faults(code: str) -> list[str]:
        return list(budget_faults(file, ast.parse(code)))

    most = layers.MOST_STATEMENTS_OF_A_FUNCTION
    assert not faults('def f():\n    """Not counted."""\n' + "    a = 0\n" * most)
    long = faults("def f():\n" + "    a = 0\n" * (most + 1))
    assert long == [f"{file}: f has {most + 1} statements"]
    tests = " and ".join(["a"] * (layers.MOST_BRANCHES_OF_A_FUNCTION + 2))
    dense = faults(f"def f(a):\n    return {tests}\n")
    assert dense == [f"{file}: f has {layers.MOST_BRANCHES_OF_A_FUNCTION + 1} branches"]
    assert len(faults("a = 0\n" * (layers.MOST_STATEMENTS + 1))) == 1


def without_docstring(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module without a docstring. Registered functions, such as
    converters, are described by what they are registered for."""
    found = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        registered = node.decorator_list and not isinstance(node, ast.ClassDef)
        if not node.name.startswith("_") and not registered and not ast.get_docstring(node):
            found.append(node.name)
    return found


def test_modules_and_public_names_have_docstrings():
    files = [f for f in source_files() if not is_in_cuda(f)]
    found = [f"{f}: {name}" for f in files for name in without_docstring(parsed(f))]
    assert not found, "\n".join(found)
    code = '"""A module."""\ndef f(): ...\n@register\ndef g(): ...\ndef _h(): ...\n'
    assert without_docstring(ast.parse(code)) == ["f"]


def nested_conditions(tree: ast.Module) -> list[int]:
    """Lines with a conditional expression that is a part of another one."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        and any(isinstance(x, ast.IfExp) for x in (node.test, node.body, node.orelse))
    ]


def test_conditional_expressions_are_not_nested():
    files = [f for f in source_files() if not is_in_cuda(f)]
    found = [f"{f}:{line}" for f in files for line in nested_conditions(parsed(f))]
    assert not found, "write an if statement:\n" + "\n".join(found)
    assert nested_conditions(ast.parse("a\nx = 1 if a else 2 if b else 3")) == [2]


def type_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of types in a file with what each stands for: a class for itself, aliases of the same
    type for one. A private name counts as the public one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"class in line {node.lineno}"
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and re.match("_?[A-Z]+[a-z]", target.id):
                yield target.id.lstrip("_"), ast.unparse(node.value)


def double_type_names(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Type names with several meanings, and the files that have them."""
    files: dict[str, list[str]] = {}
    meanings: dict[str, set[str]] = {}
    for file in source_files(package):
        for name, meaning in type_names(parsed(file)):
            own = f"{file}: {meaning}" if meaning.startswith("class") else meaning
            meanings.setdefault(name, set()).add(own)
            files.setdefault(name, []).append(file.relative_to(package).as_posix())
    return {name: files[name] for name, several in meanings.items() if len(several) > 1}


def test_a_type_name_has_one_meaning():
    found = double_type_names()
    new = {name: files for name, files in found.items() if name not in layers.SAME_TYPE_NAMES}
    assert not new, f"rename one of each: {new}"
    assert not layers.SAME_TYPE_NAMES.keys() - found.keys(), "take these out of SAME_TYPE_NAMES"


def test_the_test_of_type_names_itself(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("class Work: ...\nTensor = torch.Tensor\n_Other = int | str\n")
    (package / "b.py").write_text("class _Work: ...\n_Tensor = torch.Tensor\nOther: Any = int\n")
    assert double_type_names(package) == {"Work": ["a.py", "b.py"], "Other": ["a.py", "b.py"]}


def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def private_words(text: str) -> Iterator[str]:
    """Identifiers in Python code with a word that only we would understand."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in layers.WORDS_LEFT:
            for word in set(words_of(token.string)) & layers.PRIVATE_WORDS.keys():
                hint = layers.PRIVATE_WORDS[word]
                yield f"{token.start[0]}: {token.string} has the word {word!r}; say {hint}"


def test_names_have_words_of_the_field():
    files = [f for f in source_files() if not is_in_cuda(f)]
    found = [f"{f}:{fault}" for f in files for fault in private_words(f.read_text("utf-8"))]
    assert not found, "\n".join(found)
    assert len(list(private_words("HeldErrors = a_room(cache_home).unsettled"))) == 2


def test_prose_has_words_of_the_field():
    files = [f for f in source_files() if not is_in_cuda(f)]
    pages = [p for p in (ROOT / "docs").glob("*.md") if p.name != "gpu_engine.md"]
    files += [ROOT / "README.md", *pages]
    pattern = re.compile(rf"\b({'|'.join(layers.PRIVATE_PROSE)})\b", re.IGNORECASE)
    found = [
        f"{file}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def is_in_cuda(file: Path) -> bool:
    return file.is_relative_to(PACKAGE / "codegen" / "cuda")


def test_no_machine_paths_or_package_hosts():
    # Written so that the pattern does not find itself.
    pattern = re.compile(
        r"(?<![\w.)>\]}*-])/(?:work|tmp|root|home)\b"
        r"|p[y]pi\.|p[y]thonhosted|index-u[r]l|download\.p[y]torch"
    )
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file()
        for number, line in enumerate(
            (ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines(), 1
        )
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
