"""Makes base/ and data/ of this example: examples/arithmetic_cpu/make_base.py with the task of totals.py.

python make_totals.py          # some minutes on one core
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "arithmetic_cpu"))

import make_base  # noqa: E402
import totals  # noqa: E402

if __name__ == "__main__":
    sys.exit(make_base.main(task=totals, folder=HERE))
