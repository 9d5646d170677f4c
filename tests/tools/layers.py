"""The house rules of ``test_house.py`` as data: who may import whom, and what is public."""

from __future__ import annotations

# Imports point strictly down this table; packages of one layer do not import each other. The empty
# name is the package's own `__init__`, on top of all. `flags` is below `log`, which reads its level
# there; `store` writes files for `trace`.
LAYERS: dict[int, tuple[str, ...]] = {
    16: ("__main__",),
    15: ("",),
    14: ("cli", "emulate", "llm_datadist", "old_names"),
    13: ("ascend", "vllm_plugin"),
    12: ("inference", "npugraph_ex", "reporting"),
    11: ("deploy", "explanation", "verification"),
    10: ("backend",),
    9: ("cacheable", "pipeline"),
    8: ("concrete",),
    7: ("capture", "runner"),
    6: ("devices",),
    5: ("convert", "engine", "serde"),
    4: ("fx", "operators"),
    3: ("codegen", "ge"),
    2: ("ops", "passes"),
    1: ("configs", "tools", "trace"),
    0: ("fallbacks", "store", "structured"),
    -1: ("errors", "log"),
    -2: ("flags", "garbage", "import_hooks", "markup", "process", "progress"),
    -3: ("extensions", "labels", "locks"),
    -4: ("torch_private",),
    -5: ("versions",),
}

# The same inside of a package: its modules and sub-packages, with imports in functions.
INNER: dict[str, dict[int, tuple[str, ...]]] = {
    "engine": {
        8: ("packaged", "session"),
        7: ("compile",),
        6: ("inspect", "tune"),
        5: ("run",),
        4: ("plan",),
        3: ("units",),
        2: ("fuse",),
        1: ("optimize",),
        0: ("lower", "options", "strides"),
    },
    "codegen.cpu": {
        8: ("target",),
        7: ("generators", "trial"),
        6: ("attention", "nest", "run"),
        5: ("conv", "driver", "native_guard", "identity", "matmul"),
        4: ("jit",),
        3: ("image", "openmp"),
        2: ("layouts", "link", "templates"),
        1: ("elf", "processors"),
        0: ("libraries", "pool"),
    },
    "ascend": {
        3: ("legacy", "npu_page"),
        2: ("convert", "emulate", "gegraph_check", "llm_datadist", "rules"),
        1: ("operators",),
        0: ("ops",),
    },
}

# Packages inside of a package that only these may know, beside themselves: the text of kernels is
# written for any target, targets do not know each other, and the engine asks them by what all of
# them are. `compile` has the table of targets. What the host itself does in native code is the
# CPU's: tests of arguments (`frozen`, `contents`), threads of lanes, plans from files (`recipe`).
KNOWN_TO: dict[str, tuple[str, ...]] = {
    "torchair.codegen.cpu": (
        "torchair.engine.compile",
        "torchair.engine.packaged",
        "torchair.engine.run.contents",
        "torchair.engine.run.frozen",
        "torchair.engine.run.lanes",
        "torchair.engine.run.recipe",
        "torchair.capture",
    ),
    "torchair.codegen.cuda": (
        "torchair.engine.compile",
        "torchair.engine.packaged",
        "torchair.engine.inspect.dry_run",
        "torchair.capture",
    ),
}

# Lines of the engine that name a kind of device: the table of targets, and whose addresses the host
# can read. Everything else is asked of the target or of the streams of the device.
DEVICE_KINDS = r'"cpu"|"cuda"|is_cpu|is_cuda|on_host|torch\.cuda'
MOST_DEVICE_KINDS = 5

# Imports of torchair modules inside a function: (importing module, imported module) -> the reason.
# They must point down as well; what they are excused from is standing at the top of the file.
# Example: ("torchair.backend", "torchair.pipeline"): "converters load on the first compile".
_PROFILES = "torchair.ascend.emulate.profiles.recording"
LAZY_IMPORTS: dict[tuple[str, str], str] = {
    ("torchair.backend", "torchair.cacheable"): "as for torchair.pipeline",
    ("torchair.backend", "torchair.pipeline"): "converters and engine load on the first compile",
    ("torchair.backend", "torchair.concrete.fast_path"): "as for torchair.pipeline",
    ("torchair.backend", "torchair.fx.tracing"): "imports torch._functorch and torch._dynamo",
    ("torchair.backend", "torchair.fx.torch_streams"): "as for torchair.fx.passes",
    ("torchair.backend", "torchair.fx.masks"): "for graphs with attention",
    ("torchair.fx.tracing", "torchair.fx.layouts"): "for training graphs",
    ("torchair.fx.tracing", "torchair.fx.losses"): "likewise",
    ("torchair.fx.tracing", "torchair.fx.padding"): "likewise",
    ("torchair.backend", "torchair.ops.hcom"): "imports functional collectives of torch",
    ("torchair", "torchair.ops.hcom"): "imports functional collectives of torch",
    ("torchair.backend", "torchair.fx.passes"): "needs torch.fx internals of the first compile",
    ("torchair", "torchair.backend"): "imports torch",
    ("torchair", "torchair.fallbacks"): "for the command line, which may not need it",
    ("torchair", "torchair.old_names"): "imports torch",
    ("torchair", "torchair.ops"): "imports torch",
    ("torchair", "torchair.trace"): "imports torch",
    ("torchair.vllm_plugin", "torchair.vllm_plugin.linear"): "needs vLLM, which calls the function",
    ("torchair.vllm_plugin", "torchair.vllm_plugin.head"): "the same",
    ("torchair.vllm_plugin", "torchair.vllm_plugin.quantised"): "the same",
    ("torchair.vllm_plugin", "torchair.vllm_plugin.inspection"): "the same",
    ("torchair", "torchair.reporting.recorder"): "for graphs that are reported on",
    ("torchair.codegen.cpu.target", "torchair.codegen.cpu.generators"): "no text, no generators",
    ("torchair.deploy.cached", "torchair.deploy.storing"): "loads the engine, to write a file",
    ("torchair.deploy.compiled", "torchair.deploy.tracing"): "loads AOTAutograd",
    ("torchair.deploy.compiled", "torchair.deploy.exported"): "loads Dynamo, for torch.export",
    ("torchair.deploy.load", "torchair.deploy.exported"): "likewise",
    ("torchair.deploy.packaging", "torchair.deploy.exported"): "likewise",
    ("torchair.npugraph_ex.backend", "torchair.deploy.cached"): "loads the engine",
    ("torchair.deploy.stored", "torchair.capture.graph"): "for modes that capture",
    ("torchair.deploy.stored", "torchair.deploy.runnable"): "loads the engine, for a graph",
    ("torchair.deploy.stored", "torchair.devices.base"): "as for torchair.capture.graph",
    ("torchair.deploy.stored", "torchair.serde.convention"): "as for torchair.deploy.runnable",
    ("torchair.deploy.runnable", "torchair.capture"): "imports sympy; for a GPU",
    ("torchair.deploy.runnable", "torchair.concrete.acl"): "as for torchair.capture",
    ("torchair.engine.compile", "torchair.engine.tune.tuner"): "loads SQLite, on request",
    ("torchair.engine.run.recipe", "torchair.codegen.cpu.matmul.pack"): "for frozen weights",
    ("torchair.deploy.call_version", "torchair.devices.base"): "loads the engine, for its handle",
    ("torchair.ascend.emulate.launcher", "torchair.explanation.api"): "loads AOTAutograd",
    ("torchair.ascend.emulate.launcher", "torchair.runner"): "as for torchair.explanation.api",
    ("torchair.ascend.emulate.streams", "torchair.capture"): "loads the engine, for one number",
    (_PROFILES, "torchair.operators"): "of a loaded graph",
    (_PROFILES, "torchair.engine.optimize.passes.ordering"): "likewise",
    (_PROFILES, "torchair.ge.dtypes"): "loads GE graphs, for a profile",
    (_PROFILES, "torchair.ge.shapes"): "likewise",
    ("torchair.ascend.emulate.facade", "torchair.ascend.emulate.hosted"): "loads the engine",
    ("torchair.ascend.emulate.facade", "torchair.npugraph_ex"): "a script that wants it asks",
    ("torchair.old_names", "torchair.convert.registry"): "loads all converters",
    ("torchair.npugraph_ex.backend", "torchair.pipeline"): "as for torchair.backend",
    ("torchair.npugraph_ex", "torchair.fx.passes.user"): "needs torch.fx internals",
}

# Loading these is the cost of the first compile, not of `import torchair`.
NOT_AT_IMPORT: tuple[str, ...] = (
    "google.protobuf",
    "sympy",
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torchair.ascend",
    "torchair.operators",
    "torchair.codegen",
    "torchair.convert",
    "torchair.engine",
    "torchair.serde",
)

SPECIFIED_API: frozenset[str] = frozenset(
    {
        "CompilerConfig",
        "dynamo_export",
        "get_compiler",
        "get_npu_backend",
        "logger",
        "npu_format_cast_via_cpu",
        "package",
        "patch_for_hcom",
        "register_fx_node_ge_converter",
        "register_replacement",
        "use_internal_format_weight",
    }
)

# Ours, without a counterpart in the original.
OWN_API: frozenset[str] = frozenset(
    {
        "__version__",
        "compile",
        "explain",
        "load",
        "package",
        "report",
        "skip_model_guards_unsafe",
        "verify",
        "weights_changed",
    }
)

# Exactly what `torchair.__all__` holds today.
PUBLIC_API: frozenset[str] = frozenset(
    {
        "__version__",
        "CompilerConfig",
        "compile",
        "dynamo_export",
        "explain",
        "get_compiler",
        "get_npu_backend",
        "load",
        "logger",
        "npu_format_cast_via_cpu",
        "package",
        "patch_for_hcom",
        "register_fx_node_ge_converter",
        "register_replacement",
        "report",
        "skip_model_guards_unsafe",
        "use_internal_format_weight",
        "verify",
        "weights_changed",
    }
)

# Specified, not built yet: name -> what it waits for. Move a name to PUBLIC_API when it works.
PENDING_API: dict[str, str] = {}

# Budgets of a file and of a function. Statements and branches are counted, not lines: layout is for
# the formatter.
MOST_STATEMENTS = 450
MOST_STATEMENTS_OF_A_FUNCTION = 40
MOST_BRANCHES_OF_A_FUNCTION = 24

# Type names that stand for two types, leading underscores apart. All others stand for one.
SAME_TYPE_NAMES: dict[str, str] = {
    "AclConcreteGraph": "the class of scripts for the original, made from ours",
    "Attention": "a request, and the writer of its kernel on CUDA",
    "Attribute": "of a GE node, and CUDA's structure for attributes of a launch",
    "ExperimentalConfig": "an option of ours, and a class of torch_npu",
    "GeConcreteGraph": "the class of scripts for the original, made from ours",
    "NpugraphExCacheFile": "the class of scripts for the original, made from ours",
    "Shape": "dims of a GE value, and how a head lies in threads of CUDA's attention",
    "Sums": "accumulators of a loop, and the unit that writes a shared reduction on CUDA",
    "Tensor": "torch's, and the base of values that converters receive in scripts for the original",
}

# Words that names of variables, functions and classes do not have, and what to say instead. CUDA's
# generators are still to follow.
PRIVATE_WORDS: dict[str, str] = {
    "book": "guards",
    "edition": "variant",
    "held": "what it is: retained, attributes, container, frozen",
    "home": "owner, module, folder",
    "homes": "references",
    "lot": "group, stream",
    "outline": "layout",
    "quick": "fast path",
    "room": "capacity, scratch, registers",
    "rooms": "packages",
    "settle": "resolve, restore, update",
    "settled": "resolved, restored",
    "settling": "resolving, restoring",
    "told": "message, metadata, described",
    "wish": "request",
}
PRIVATE_PROSE = ("as ever", "catalogue", "nobody", "somebody", "whoever")
WORDS_LEFT = {
    "cache_home": "XDG's name",
    "room": "a field of `codegen/target.py` that CUDA's generators set",
}
