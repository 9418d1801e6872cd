"""Routes of old log-probs kept over the K epochs: the same under expert parallelism, and no jumps at ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replay_runs import ReplayRun, run_epochs

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP1": {},
    "EP2": {"expert": 2},
    "TP2+SP+EP2": {"tensor": 2, "sequence": True, "expert": 2},
    "CP2": {"context": 2},
    "PP2": {"pipeline": 2},
}


def run_layouts(
    folder: Path, layouts: dict[str, dict[str, Any]], rate: float
) -> dict[tuple[str, bool], ReplayRun]:
    from pnpo_megatron.parallel.settings import ParallelSettings

    return {
        (name, replay): run_epochs(
            folder, replayed=replay, rate=rate, epochs=3, parallel=ParallelSettings(**layout)
        )
        for name, layout in layouts.items()
        for replay in (False, True)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_replays_the_same_routes(spawn: Any, folder: Path) -> None:
    """Small steps: no token crosses a tie, so layouts agree with replay on and off, and both agree."""
    [alone] = spawn(run_layouts, 1, folder, {"EP1": {}}, 1e-4, timeout_s=800)
    found = spawn(run_layouts, 2, folder, LAYOUTS, 1e-4, timeout_s=800)
    for (name, replay), run in found[0].items():
        wanted = alone["EP1", replay]
        assert run.losses == pytest.approx(wanted.losses, rel=1e-4, abs=1e-7), (name, replay)
        assert run.norms == pytest.approx(wanted.norms, rel=1e-4), (name, replay)
        assert run.first_rejected == 0.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replay_takes_away_what_routing_flips_add_to_log_ratios(spawn: Any, tmp_path: Path) -> None:
    """The same weights, scored with free and with kept routes: 1 to 3 % of flips widen log-ratios."""
    from reference_policy import write_model

    [found] = spawn(run_layouts, 1, write_model(tmp_path / "hf", "mixtral"), {"EP1": {}}, 3e-5, timeout_s=800)
    free = found["EP1", False]
    assert 0.005 < free.flipped < 0.05
    assert free.spread["kept std"] < 0.9 * free.spread["free std"]
