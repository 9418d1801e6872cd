"""The doctor's bytes against tiny models that ran: state and traffic exact, activations within 15 %."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from doctor_checks import (
    LAYOUTS,
    RANKS,
    Options,
    Ranks,
    counted_traffic,
    make_cases,
    measure_all,
    planned_saved,
    planned_state,
    planned_traffic,
)

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.parallel.settings import ParallelSettings
from pnpo_megatron.planning.shards import chunks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Measured = dict[str, tuple[Path, Options, Ranks]]


@pytest.fixture(scope="module")
def measured(process_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Folder, options and what each of two ranks measured, for every layout; one launch."""
    from spawned import run_on_ranks

    cases = make_cases(tmp_path_factory.mktemp("models"))
    ranks = run_on_ranks(process_server, measure_all, RANKS, (cases,), 900.0)
    return {name: (*cases[name], [rank[name] for rank in ranks]) for name in cases}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_weights_gradients_and_optimizer_are_exact(measured: Measured, name: str) -> None:
    folder, options, ranks = measured[name]
    for rank, found in enumerate(ranks):
        assert planned_state(folder, options, rank) == found["state"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "PP2"])
def test_activations_are_within_fifteen_percent(measured: Measured, name: str) -> None:
    wanted = planned_saved(*measured[name])
    assert wanted == pytest.approx(sum(one["saved"] for one in measured[name][2]), rel=0.15)


@pytest.mark.parametrize("name", LAYOUTS)
def test_communication_is_what_is_counted(measured: Measured, name: str) -> None:
    """Exact, and nothing else is sent."""
    assert planned_traffic(*measured[name]) == counted_traffic(measured[name][2])


def test_the_parameters_of_all_ranks_are_those_of_the_model(measured: Measured) -> None:
    """Vocabulary padding (131 to 256 rows, twice) and copies of norms aside."""
    folder = measured["TP2"][0]
    arch = HfFolder(folder).architecture
    whole = sum(sum(chunk.dense) for chunk in chunks_of(arch, ParallelSettings(), 0))
    tables = 2 * (256 - 131) * arch.hidden
    assert whole - tables == sum(prod(HfFolder(folder).tensor(n).shape) for n in HfFolder(folder).names())
