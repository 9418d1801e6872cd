"""Peak memory of the output layer of R1-Distill-Qwen-1.5B (h 1,536, V 151,936), forward and backward."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOGITS_ROW_GIB = 4 * 151_936 / 2**30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_peak_memory_of_the_head_is_bounded_and_does_not_grow_with_the_tokens(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "head_memory.py"), "--tokens", "2048", "4096"]
    command += ["--rounds", "0", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, timeout=3500)
    rows = json.loads((tmp_path / "head_memory.json").read_text())["rows"]
    peak = {row["tokens"]: row["peak above (GiB)"] for row in rows}
    assert peak[2048] <= 0.7 and peak[4096] <= 0.7
    # What is left of the growth is the hidden states' own gradient in float32: far below a row of logits.
    assert (peak[4096] - peak[2048]) / 2048 < LOGITS_ROW_GIB / 20
