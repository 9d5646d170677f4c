"""A line about work that takes longer than two seconds, on a terminal. Imports no torchair."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

_PATIENCE = 2.0  # seconds


class _Shown:
    """Something on a terminal that appears once the work has taken a while, and goes with it."""

    def __init__(self, title: str, show: bool | None = None) -> None:
        """`show` is for terminals, unless told otherwise."""
        self._title = title
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.perf_counter()
        self._shown: Any = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def next(self, what: str) -> None:
        """The next step begins."""
        self.count += 1
        if self._show and time.perf_counter() - self._begun >= _PATIENCE:
            self._tell(what)

    def _tell(self, what: str) -> None:
        raise AssertionError("abstract")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class Steps(_Shown):
    """Shows which step of some work is being done."""

    def _tell(self, what: str) -> None:
        text = f"{self._title}: step {self.count}, {what}"
        if self._shown is None:
            from rich.console import Console

            self._shown = Console(stderr=True).status(text)
            self._shown.start()
        self._shown.update(text)


class Bar(_Shown):
    """Shows how much of some work is done and how long the rest will take."""

    def __init__(self, title: str, total: int, show: bool | None = None) -> None:
        super().__init__(title, show)
        self._total = total
        self._task: Any = None

    def _tell(self, what: str) -> None:
        if self._shown is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._shown.add_task(self._title, total=self._total)
            self._shown.start()
        done = self.count - 1
        self._shown.update(self._task, completed=done, description=f"{self._title}: {what}")
