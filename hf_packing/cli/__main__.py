"""Run the command line tool as `python -m hf_packing.cli`."""

import sys

from hf_packing.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
