"""`torchair.explain`: what became of a model, and where the time of a call goes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from torchair.backend import get_npu_backend, mode_of
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.section import given
from torchair.explanation.collect import Collector
from torchair.explanation.report import Explanation
from torchair.runner import observed

_CALLS = 5  # that are timed; the quickest tells where time goes


def explain(
    model: Callable[..., Any],
    *,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """A function that compiles the model, calls it as it is called, and tells about it:
    `torchair.explain(model)(*inputs)`."""
    known = copy.deepcopy(given(config, CompilerConfig))
    if (meant := mode_of(mode)) is not None:
        known.mode = meant
    plain = getattr(model, "_orig_mod", model)

    def run(*args: Any, **keywords: Any) -> Explanation:
        compiled = torch.compile(
            plain, backend=get_npu_backend(compiler_config=known), dynamic=dynamic
        )
        with torch.no_grad():
            collector = Collector()
            with observed(collector):
                for _ in range(2):  # the second call finds its quick ways
                    compiled(*args, **keywords)
                collector.forget_times()
                calls = [_timed(compiled, args, keywords, collector) for _ in range(_CALLS)]
            return collector.explanation(*min(calls))

    return run


def _timed(
    model: Callable[..., Any], args: Any, keywords: Any, collector: Collector
) -> tuple[float, float]:
    """Seconds of a call, and of its graphs."""
    before, begun = collector.seconds, time.perf_counter()
    model(*args, **keywords)
    return time.perf_counter() - begun, collector.seconds - before
