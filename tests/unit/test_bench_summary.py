"""What `make bench` says about its figures: those that broke their bound, and those that got worse."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")
sys.path.insert(0, str(BENCH))

import measure  # noqa: E402
import run_all  # noqa: E402
from measure import Bound, report  # noqa: E402


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A repository whose last commit measured some figures; its folder of results."""

    def git(*command):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True
        )

    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(measure, "RESULTS", folder)
    bounds = [Bound("a", 0.5, 1.0), Bound("b", 0.5, 1.0), Bound("exact", 0.0, 0.0), Bound("gone", 1.0, 2.0)]
    git("init", "-q")
    report("any", [{"row": 1}], bounds, out=folder)
    git("add", ".")
    git("commit", "-q", "-m", "measured")
    return folder


def test_a_figure_over_a_tenth_worse_than_the_committed_one_says_so(results, capsys):
    capsys.readouterr()
    bounds = [Bound("a", 0.54, 1.0), Bound("b", 0.56, 1.0), Bound("exact", 1e-9, 0.0), Bound("new", 2.0, 1.0)]
    report("any", [{"row": 1}], bounds, out=results)
    said = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines() if ":" in line}
    assert said["a"].endswith(": holds")
    assert said["b"].endswith(": holds, WORSE than the committed 0.5")
    assert said["exact"].endswith(": DOES NOT HOLD, WORSE than the committed 0")
    assert said["new"].endswith(": DOES NOT HOLD")

    rows, missing = run_all.judged([results / "any.json"])
    text = run_all.summary(rows, missing, ["peers"])
    assert "of 4 figures 2 do not hold, 2 are WORSE" in text
    assert [text.count(f"| {name} |") for name in ("a", "b", "exact", "new")] == [
        1,
        2,
        2,
        2,
    ]  # bad ones again
    assert "not measured this time: any: gone" in text and "peers FAILED" in text


def peaks_of_one_tensor():
    size, found = 20 * 2**20, []
    for _ in range(5):
        kept = [torch.ones(size, dtype=torch.uint8) for _ in range(6)]
        del kept[1:4]  # the C library would keep this for later
        found.append(measure.peak_bytes(lambda: torch.ones(size, dtype=torch.uint8)) / size)
    return found


def test_a_peak_contains_what_fits_into_memory_that_was_freed_before():
    peaks = measure.in_fresh_process(peaks_of_one_tensor)
    assert all(0.98 < peak < 1.02 for peak in peaks), f"{peaks}: the kernel counts in batches"


def test_a_script_that_fails_or_hangs_is_named_and_leaves_nothing_behind(monkeypatch, tmp_path, capfd):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "good.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "bench" / "bad.py").write_text("raise SystemExit(3)")
    hangs = "import subprocess as s; print(s.Popen(['sleep', '60']).pid, flush=True); s.run(['sleep', '60'])"
    (tmp_path / "bench" / "hangs.py").write_text(hangs)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "DEADLINE_S", 2.0)
    assert [run_all.run(name, ["--out", "x"]) for name in ("good", "bad", "hangs")] == [True, False, False]
    said = capfd.readouterr().out
    assert "['--out', 'x']" in said and "bad: exit code 3" in said and "hangs: exit code 124" in said
    child, deadline = int(re.search(r"bench: hangs\n(\d+)\n", said)[1]), time.monotonic() + 5.0
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_judged_figure_is_a_time():
    for path in sorted((BENCH / "results").glob("*.json")):
        for bound in json.loads(path.read_text()).get("bounds", []):
            what = bound["what"]
            named = re.search(r"\b(time|seconds|wait|tokens/s|CPU minute)\b", what)
            assert not named or re.search(r"against|over|/ ", what), f"{path.stem}: {what} has no reference"
