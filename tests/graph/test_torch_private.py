"""Private names of torch are in `torchair.torch_private` and nowhere else, and exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module, invalidate_caches, reload
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from torchair.import_hooks import when_imported
from torchair.torch_private import attributes, dispatch, table
from torchair.torch_private.table import Names, PrivateName, Without, feature, optional, required

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "torchair"
HOME = PACKAGE / "torch_private"
OUTSIDE = [f for f in sorted(PACKAGE.rglob("*.py")) if HOME not in f.parents]

_SYMBOL = re.compile(r"aoti_torch_\w*|_ZN\w+|torch(\.\w+)*\._[a-z]\w*(\.\w+)*")
_IN_GENERATED_CODE = {"torch._sym_sqrt"}  # what guards of stored graphs may call
_CUDA_ONLY = {"torch._C:_cuda_getCurrentRawStream", "torch._C:_tensors_data_ptrs_at_indices_equal"}


def _is_private(name: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def _chain(node: ast.expr) -> tuple[ast.expr, list[str]]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return node, names[::-1]


def _imported(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """What imports of torch bind: the local name, what it stands for, the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in (a for a in node.names if a.name.split(".")[0] == "torch"):
                yield a.asname or "torch", a.name if a.asname else "torch", node.lineno
                yield "", a.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for a in node.names:
                yield a.asname or a.name, f"{node.module}.{a.name}", node.lineno


def private_names(text: str) -> list[str]:
    """Private names of torch in a source, with their lines. Operators are public."""
    tree = ast.parse(text)
    imported = list(_imported(tree))
    bound = {local: full for local, full, _ in imported if local}
    found = [f"{line}: {full}" for _, full, line in imported if _is_private(full)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, names = _chain(node)
            full = ".".join([bound.get(root.id, ""), *names]) if isinstance(root, ast.Name) else ""
            operator = full.startswith("torch.ops.")
            if full.startswith("torch.") and not operator and _is_private(".".join(names)):
                found.append(f"{node.lineno}: {full}")
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and _SYMBOL.fullmatch(text) and text not in _IN_GENERATED_CODE:
            found.append(f"{node.lineno}: {text!r}")
    return found


def test_private_names_of_torch_are_in_one_package():
    found = [f"{f.relative_to(PACKAGE)}:{x}" for f in OUTSIDE for x in private_names(f.read_text())]
    assert not found, "take them from torchair.torch_private:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch.utils._pytree as pytree",
        "from torch._guards import Guard",
        "from torch.utils import _pytree",
        "def f():\n    from torch._inductor import config",
        "import torch\nx = torch._C._set_grad_enabled(False)",
        "import torch\nx = torch.cuda._sleep(1)",
        "from torch.autograd import profiler\nx = profiler._is_profiler_enabled",
        "import sys\nx = sys.modules['torch._dynamo.utils']",
        "x = 'aoti_torch_get_dim'",
        "x = '_ZN2at15get_num_threadsEv'",
    ],
)
def test_a_private_name_is_found(text):
    assert private_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.ops.aten._softmax.default",
        "import torch\nx = torch.__version__",
        '"""Counters in `torch._dynamo.utils.counters`."""',
        "from torchair.torch_private.dispatch import OpOverload",
    ],
)
def test_other_names_are_not_found(text):
    assert not private_names(text)


def _defined() -> set[str]:
    """Names that this package defines: functions, attributes, fields."""
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "made"):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # slots, names that are set by `setattr`
    return found


_OPERATORS = {"aten", "_aten", "_ATEN", "define", "_define", "_nn", "torch"}
_OF_OTHERS = {
    "_CFuncPtr",
    "_at_fork_reinit",
    "_getframe",
    "_is_owned",
    "_replace",  # Python
    "_C",
    "_exchange_device",  # torch_npu
    "_get_layer_params",
    "_get_weight_params",
    "_k_scale_float",
    "_run_in_subprocess",
    "_v_scale_float",  # vLLM
}


def test_private_attributes_of_objects_are_listed():
    listed = {row.path.rpartition(".")[2] for row in attributes.NAMES.rows.values()}
    allowed = {*listed, *attributes.MARKS, *_OF_OTHERS, *_defined()}
    found = []
    for file in OUTSIDE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                root, _ = _chain(node)
                name = root.id if isinstance(root, ast.Name) else ""
                if name not in _OPERATORS and node.attr not in allowed:
                    found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.attr}")
    assert not found, "list them in torch_private/attributes.py:\n" + "\n".join(found)


# ---- the table


def _rows() -> list[tuple[str, str, PrivateName]]:
    return list(table.tables())


def test_every_module_has_its_names_in_the_table():
    here = {f.stem for f in HOME.glob("*.py")} - {"__init__", "table"}
    assert here == set(table.MODULES)
    assert all(row.use and row.path for _, _, row in _rows())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_this_torch_has_what_the_table_says():
    """With each torch of `make matrix`: a name is here exactly where it is said to have been."""
    cuda = torch.version.cuda is not None
    wrong = [
        f"{row.path}: {'here' if row.is_here() else 'missing'}"
        for _, _, row in _rows()
        if row.is_here() != (row.is_expected() and (cuda or row.path not in _CUDA_ONLY))
    ]
    assert not wrong, "\n".join(wrong)


def test_names_that_are_used_exist():
    known = {short: {n for s, n, _ in _rows() if s == short} for short in table.MODULES}
    for short in table.MODULES:
        known[short] |= set(vars(sys.modules[f"torchair.torch_private.{short}"]))
    missing = []
    for file in OUTSIDE:
        tree = ast.parse(file.read_text())
        modules = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module == "torchair.torch_private":
                modules |= {a.asname or a.name: a.name for a in node.names}
            short = node.module.removeprefix("torchair.torch_private.")
            if short in known:
                missing += [f"{short}.{a.name}" for a in node.names if a.name not in known[short]]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                short = modules.get(node.value.id)
                if short in known and node.attr not in known[short]:
                    missing.append(f"{file.name}:{node.lineno}: {short}.{node.attr}")
    assert not missing, missing


def test_types_are_those_of_the_table():
    """Imports for type checkers name the same objects as the rows."""
    rows = {(short, name): row.path for short, name, row in _rows()}
    for short in table.MODULES:
        for node in ast.walk(ast.parse((HOME / f"{short}.py").read_text())):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for line in node.body:
                    assert isinstance(line, ast.ImportFrom)
                    for a in line.names:
                        assert rows[short, a.asname or a.name] == f"{line.module}:{a.name}"


def test_a_missing_name():
    with pytest.raises(ImportError, match=r"no torch\._gone\.Thing \(seen on torch .*labels"):
        required("torch._gone:Thing", "labels").value()
    with pytest.raises(ImportError, match=r"torch\._ops\.Gone"):
        feature("torch._ops:Gone", "labels").value()
    assert optional("torch._ops:Gone", "labels").value() is None


def test_a_name_is_looked_up_once(monkeypatch):
    calls = []
    monkeypatch.setattr(PrivateName, "value", lambda self: calls.append(self.path) or 7)
    monkeypatch.delitem(vars(dispatch), "parse_schema", raising=False)
    assert (dispatch.parse_schema, dispatch.parse_schema) == (7, 7) and len(calls) == 1
    del vars(dispatch)["parse_schema"]  # or others would get the 7
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dispatch.nothing  # noqa: B018


# ---- the self-test


@pytest.fixture
def checked(monkeypatch):
    """`check` with the rows and on the torch that are given."""

    def check(version: str, *rows: PrivateName) -> None:
        monkeypatch.setattr(table, "_version", lambda: version)
        monkeypatch.setattr(table, "tables", lambda: iter([("a", r.path, r) for r in rows]))
        table.check.__wrapped__()

    return check


_GONE = (
    required("torch._gone:First", "graphs"),
    required("torch._ops:Second", "operators"),
    feature("torch._ops:Third", "one feature"),
    optional("torch._ops:Fourth", "a short cut"),
)


def test_a_torch_that_was_seen_is_not_searched(checked):
    checked("2.13.0", *_GONE)


def test_a_newer_torch_that_has_all_is_used(checked):
    checked("9.1.0", required("torch._ops:OpOverload", "operators"), *_GONE[2:])


def test_all_that_a_newer_torch_misses_is_one_message(checked):
    with pytest.raises(ImportError) as caught:
        checked("9.1.0", *_GONE)
    said = str(caught.value)
    assert "torch 9.1.0" in said and "torchair env" in said
    assert "torch._gone.First (graphs); torch._ops.Second (operators)" in said
    assert "Third" not in said and "Fourth" not in said


def test_the_report_names_what_is_missing(monkeypatch):
    rows = [("a", "x", required("torch._ops:OpOverload", "targets")), ("a", "y", _GONE[3])]
    monkeypatch.setattr(table, "tables", lambda: iter(rows))
    first, here, missing = table.report().split("\n")
    assert "1 of 2" in first and here.split()[0] == "here" and "torch._ops.OpOverload" in here
    assert missing.split()[0] == "MISSING" and Without.OPTIONAL.value in missing
    assert Names("nowhere", {}).rows == {}


# ---- nothing of the process is changed for others

_PROGRAM = """
import gc, json, logging, os, sys, types, warnings
import torch
import torch.distributed._functional_collectives as functional

nearest = (torch.ops.aten.upsample_nearest2d.default, torch.ops.aten.upsample_nearest2d.vec)

def shown(op):
    return sorted((str(k), getattr(f, "__name__", str(f))) for k, f in op.py_kernels.items())

def functions():
    '''Functions and classes of the modules that are loaded, and methods of the classes.'''
    found = {}
    for module in [m for m in sys.modules.values() if type(m) is types.ModuleType]:
        name = module.__name__
        if name.partition(".")[0] in ("torchair", "__main__", "__mp_main__"):
            continue
        for key, value in list(vars(module).items()):
            if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                continue
            if not key.startswith("__compiled_fn"):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                found |= {f"{name}.{key}.{k}": f for k, f in members if callable(f)}
    return found

def changed():
    '''Those that are others than at the beginning.'''
    now = functions()
    return sorted(k for k, f in first.items() if k not in now or now[k] is not f)

def operators():
    '''The dispatch of operators that other libraries have.'''
    here = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(("aten:", "prims:"))]
    return hash(tuple(torch._C._dispatch_dump(name) for name in sorted(here)))

def state():
    return {
        "functions": changed(),
        "operators": operators(),
        "warnings": [str(f) for f in warnings.filters],
        "environment": sorted(os.environ.items()),
        "hooks": [str(f) for f in (sys.excepthook, sys.unraisablehook)],
        "handlers": [str(h) for h in logging.getLogger().handlers],
        "frozen": gc.get_freeze_count(),
        "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "collecting": gc.isenabled(),
        "threshold": gc.get_threshold(),
        "compiling": torch.compiler._is_compiling_flag,
        "kernels": [shown(op) for op in nearest],
        "remaps": sorted(f.__name__ for f in functional.traceable_collective_remaps),
        "converters": [
            name for name in dir(torch.ops.aten.add.Tensor) if name == "_ge_converter"
        ],
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }

def compiled(backend, model, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)

x = torch.ones(1, 2, 3, 3)
up = torch.nn.Upsample(scale_factor=2)
compiled("aot_eager", up, x)
first = functions()
states = {"before": state()}
import torchair
states["import"] = state()
compiled("torchair", up, x)
states["compile"] = state()
torchair.compile(torch.nn.Linear(3, 3), (torch.ones(2, 3),))(torch.ones(2, 3))
states["without Dynamo"] = state()
try:
    compiled("torchair", lambda x: torch.ops.mine.gone(x), x)
except Exception:
    states["error"] = state()
print(json.dumps(states))
"""


@pytest.fixture(scope="module")
def states():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_hook_of_an_import_is_called_when_that_succeeds(tmp_path, monkeypatch):
    file = tmp_path / "imported_late.py"
    file.write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    finders, called = [*sys.meta_path], []
    when_imported({file.stem: lambda module: called.append(module.x)})
    with pytest.raises(ZeroDivisionError):
        import_module(file.stem)
    assert not called and find_spec(file.stem) is not None
    file.write_text("x = 12345")
    invalidate_caches()
    module = import_module(file.stem)
    assert called == [12345] and sys.meta_path == finders
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert reload(module) is module and called == [12345]


# What stays, each with its reason in docs/architecture.md: when it begins, and how it is seen.
_STAYS = {
    "finders": ["_LegacyFinder"],
    "remaps": ["_all_gather_base", "all_gather_into_tensor", "all_to_all", "broadcast"],
}


@pytest.mark.parametrize("when", ["import", "compile", "without Dynamo", "error"])
def test_what_stays_changed_is_what_is_written_down(states, when):
    before, after = states["before"], states[when]
    added = {
        what: [x for x in after[what] if x not in before[what]] for what in ("finders", "remaps")
    }
    assert [f for f in added["finders"] if f != "_AfterImport"] == _STAYS["finders"]
    assert when == "import" or "_AfterImport" not in added["finders"]
    assert set(added["remaps"]) <= {*_STAYS["remaps"], "send", "recv"}
    assert not [x for x in before["remaps"] if x not in after["remaps"]]
    same = set(before) - {"finders", "remaps", "converters"}
    assert {k: after[k] for k in same} == {k: before[k] for k in same}
