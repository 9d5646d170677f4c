"""python -m tests.conformance"""

from .runner import main

if __name__ == "__main__":
    raise SystemExit(main())
