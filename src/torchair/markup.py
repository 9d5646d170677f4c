"""HTML of results for notebooks: a headline, lines and tables. All texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CELL = "padding:1px 8px;text-align:{align};white-space:nowrap"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """A table whose first `texts` columns and the last one are texts, the others numbers."""
    last = len(header) - 1
    aligns = ["left" if k < texts or k == last else "right" for k in range(len(header))]

    def row(tag: str, cells: Sequence[object]) -> str:
        made = "".join(
            f'<{tag} style="{_CELL.format(align=align)}">{escape(str(cell))}</{tag}>'
            for align, cell in zip(aligns, cells, strict=True)
        )
        return f"<tr>{made}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><thead>{row('th', header)}</thead><tbody>{body}</tbody></table>"


def folded(title: str, inside: str, opened: bool = True) -> str:
    """A part that opens and closes; `inside` is HTML."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(title)}</summary>{inside}</details>"


def lines(texts: Iterable[str]) -> str:
    """Texts below each other, as they are."""
    shown = "\n".join(texts)
    return f"<pre>{escape(shown)}</pre>" if shown else ""


def titled(title: str, *parts: str) -> str:
    """All of it; `parts` are HTML."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def framed(page: str, height: int = 640) -> str:
    """A whole page inside of another, which its scripts cannot reach."""
    style = "width:100%;border:1px solid #8888"
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" height="{height}" '
        f'style="{style}"></iframe>'
    )
