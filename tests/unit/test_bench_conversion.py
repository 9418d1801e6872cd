"""A full-size model (Qwen2-1.5B's shape, untied, 3.5 GB) through both converters: bytes and peak memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_full_size_model_comes_back_byte_equal_within_three_of_its_largest_tensors(tmp_path):
    if shutil.disk_usage(tmp_path).free < 16 * 2**30:
        pytest.skip("needs 16 GiB on the disk of the temporary folder")
    command = [sys.executable, str(ROOT / "bench" / "conversion.py"), "--folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(tmp_path)], check=True, env=environment, timeout=3500)
    bounds = {
        bound["what"]: bound for bound in json.loads((tmp_path / "conversion.json").read_text())["bounds"]
    }
    assert bounds["files that differ after both ways"]["measured"] == 0
    for way in ("HF to Megatron", "Megatron to HF"):
        assert bounds[f"{way}: peak, in largest tensors"]["measured"] <= 3
