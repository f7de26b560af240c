"""`python -m jaxpfl` is the command `jaxpfl`."""

import sys

from jaxpfl.cli import main

if __name__ == "__main__":
    sys.exit(main())
