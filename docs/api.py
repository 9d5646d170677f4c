"""`make api`: the reference of the public modules as HTML, from docstrings, by pdoc."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pdoc

import torchair

PUBLIC = (
    "torchair",
    "torchair.configs.compiler_config",
    "torchair.ge",
    "torchair.inference",
    "torchair.llm_datadist",
    "torchair.npugraph_ex",
    "torchair.ops",
    "torchair.ops.scope",
    "torchair.versions",
)


def main() -> None:
    """Write the pages into the folder that is named."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api")
    for module in map(import_module, PUBLIC):  # names that are loaded when they are asked for
        vars(module).update({n: getattr(module, n) for n in getattr(module, "__all__", ())})
    specs = [spec for name in PUBLIC for spec in (name, rf"!{name}\..*")]  # none of those inside
    pdoc.pdoc(*specs, output_directory=target)
    print(f"{target / 'index.html'}: torchair {torchair.__version__}")


if __name__ == "__main__":
    main()
