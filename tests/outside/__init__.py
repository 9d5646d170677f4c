"""Programs from outside, run in our modes and judged by float64: docs/outside.md.

`table` holds what the programs share: rows, CSV files, the comparison with the CSV in
docs/outside. `judging` compiles in a mode, compares trees of results, and counts graph breaks and
fallbacks. Run with `python -m tests.outside.<program>` from the root of the repository.
"""
