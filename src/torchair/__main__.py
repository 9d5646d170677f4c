"""`python -m torchair`: the command line."""

import sys

from torchair import begin
from torchair.cli import main

if __name__ == "__main__":
    sys.exit(main(begin=begin))
