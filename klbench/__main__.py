"""`python -m klbench`."""

import sys

from klbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
