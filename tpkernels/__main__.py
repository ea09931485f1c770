"""`python -m tpkernels` is the `tpkernels` command."""

import sys

from tpkernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
