"""A line about work that takes longer than two seconds, on a terminal. Imports no torchair."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PATIENCE = 2.0  # seconds


class Steps:
    """Shows which step of some work is being done, once that has taken a while."""

    def __init__(self, title: str, show: bool | None = None) -> None:
        """`show` is for terminals, unless told otherwise."""
        self._title = title
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.perf_counter()
        self._status: Any = None
        self.count = 0

    def __enter__(self) -> Steps:
        return self

    def next(self, what: str) -> None:
        """The next step begins."""
        self.count += 1
        if not self._show or time.perf_counter() - self._begun < _PATIENCE:
            return
        text = f"{self._title}: step {self.count}, {what}"
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


class Bar:
    """Shows how much of some work is done and how long the rest will take, once it has taken a
    while."""

    def __init__(self, title: str, total: int, show: bool | None = None) -> None:
        """`show` is for terminals, unless told otherwise."""
        self._title, self._total = title, total
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None
        self.count = 0

    def __enter__(self) -> Bar:
        return self

    def next(self, what: str) -> None:
        """The next part begins."""
        done, self.count = self.count, self.count + 1
        if not self._show or time.perf_counter() - self._begun < _PATIENCE:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=done, description=f"{self._title}: {what}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
