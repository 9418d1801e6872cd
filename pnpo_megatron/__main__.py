"""``python -m pnpo_megatron`` is the command line."""

import sys

from pnpo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
