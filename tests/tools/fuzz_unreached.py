"""What random programs cannot exercise, each with the reason."""

from __future__ import annotations

UNREACHED: dict[tuple[str, str], str] = {}
"""By kind and name, as `fuzz_coverage.everything` has them."""
