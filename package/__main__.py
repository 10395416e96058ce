"""The command line as `python -m rondo`."""

import sys

from rondo.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
