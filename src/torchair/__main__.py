"""`python -m torchair`: the command line."""

import sys

from torchair.cli import main

if __name__ == "__main__":
    sys.exit(main())
