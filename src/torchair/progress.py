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
