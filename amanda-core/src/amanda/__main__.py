"""``python -m amanda`` is the command ``amanda``."""

import sys

from amanda.cli import main

if __name__ == "__main__":
    sys.exit(main())
