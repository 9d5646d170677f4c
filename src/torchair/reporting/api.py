"""`torchair.report`: a page about a model, as a file and in a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchair import markup
from torchair.backend import config_in, get_npu_backend
from torchair.configs.compiler_config import CompilerConfig
from torchair.reporting.recorder import Reporter
from torchair.runner import observed

_MOST = 8 << 20  # bytes of a page that a notebook shows inside of itself


@dataclass(frozen=True)
class ReportPage:
    """A report that was written. A notebook shows the page, or where it lies if it is large."""

    path: Path
    graphs: int

    def __repr__(self) -> str:
        return f"<torchair report on {self.graphs} graphs: {self.path}>"

    def _repr_html_(self) -> str:
        if self.path.stat().st_size > _MOST:
            return markup.titled(f"torchair report on {self.graphs} graphs: {self.path}")
        return markup.framed(self.path.read_text(encoding="utf-8"))


def report(
    model: Callable[..., Any],
    *,
    path: str | os.PathLike[str] = "report.html",
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[..., ReportPage]:
    """A function that compiles the model, calls it as it is called, and writes a page about its
    graphs: `torchair.report(model)(*inputs)`."""
    backend = get_npu_backend(compiler_config=config_in(mode, config))
    plain: Any = getattr(model, "_orig_mod", model)
    name = getattr(plain, "__name__", type(plain).__name__)

    def run(*args: Any, **keywords: Any) -> ReportPage:
        compiled = torch.compile(plain, backend=backend, dynamic=dynamic)
        reporter = Reporter(Path(path), str(name))
        with torch.no_grad(), observed(reporter, changes=True):
            compiled(*args, **keywords)
        return ReportPage(reporter.write(), reporter.graphs)

    return run
