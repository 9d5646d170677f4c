"""A line on a terminal about work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

_PATIENCE = 2.0  # seconds


class Progress:
    """Shows on a terminal which step of some work is being done, once that has taken a while; of
    so many steps in `total`, how many are done and how long the rest will take."""

    def __init__(self, title: str, total: int | None = None, show: bool | None = None) -> None:
        """`show` is for terminals, unless told otherwise."""
        self._title, self._total = title, total
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.perf_counter()
        self._shown: Any = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def next(self, what: str) -> None:
        """The next step begins."""
        self.count += 1
        if not self._show or time.perf_counter() - self._begun < _PATIENCE:
            return
        if self._shown is None:
            self._shown = self._started()
        step = f"step {self.count}, " if self._total is None else ""
        text = f"{self._title}: {step}{what}"
        self._shown.update(self._shown.task_ids[0], completed=self.count - 1, description=text)

    def _started(self) -> Any:
        from rich import progress
        from rich.console import Console

        rest = (progress.BarColumn(), progress.TimeRemainingColumn())
        columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"))
        shown = progress.Progress(
            *columns, *(rest if self._total else ()), console=Console(stderr=True), transient=True
        )
        shown.add_task(self._title, total=self._total)
        shown.start()
        return shown

    def __exit__(self, *_error: Any) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
