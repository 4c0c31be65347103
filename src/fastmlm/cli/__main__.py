"""``python -m fastmlm.cli``."""

import sys

from fastmlm.cli import main

if __name__ == "__main__":
    sys.exit(main())
