"""Every split gives the loss, metrics and gradient of one process in float64 (TRAPS H17-H22, H24, H37)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from matrix_cases import MATRIX, MODELS, MORE, TOLERANCE, Case, Fixture, make_fixture, plain_model
from matrix_faults import FAULTS, red_by_fault
from matrix_ranks import FAST, FEW, FULL, Run, run_cases


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fixture]:
    folder = tmp_path_factory.mktemp("matrix")
    return {model: make_fixture(folder / model, model) for model in MODELS}


@pytest.fixture(scope="module")
def stored(fixtures: dict[str, Fixture]) -> bytes:
    return pickle.dumps(fixtures)  # plain bytes: tensors in arguments would each need a file descriptor


def test_no_token_stands_at_a_bound_or_between_two_experts(fixtures: dict[str, Fixture]) -> None:
    """Where rounding could flip a decision, no tolerance would be honest; and both bounds have work to do."""
    for fixture in fixtures.values():
        assert fixture.closest_route > 1e-5
        for name, answer in fixture.answers.items():
            assert answer.nearest > 1e-6, name
            assert answer.counts["below"] and answer.counts["above"], name
            assert all(one.norm() > 0 for one in answer.gradients.values()), name


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_is_the_model_that_transformers_runs(fixtures: dict[str, Fixture], model: str) -> None:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    folder = fixtures[model].folder
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
    ids = fixtures[model].sequences[-1].ids
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        found = plain_model(folder, model).logits(ids)
    # transformers keeps norms, softmax and rotary angles in float32.
    assert (found - expected).norm() / expected.norm() < 1e-6


def run(spawn: Any, cases: dict[str, Case], ranks: int, stored: bytes, runs: list[Run]) -> None:
    here = {name: case for name, case in cases.items() if case.ranks == ranks}
    for rank, outcomes in enumerate(spawn(run_cases, ranks, here, stored, runs, timeout_s=600)):
        assert outcomes.keys() == here.keys()
        for layout, outcome in outcomes.items():
            assert not outcome.red(), (rank, layout)
            assert len(outcome.differences) == len(runs)
            counts = {one.micro_batches for one in outcome.differences.values()}
            assert layout in MORE or len(counts) > 1, f"{layout}: every run had {counts} micro-batches"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_h17_to_h22_h24_h37_every_layout_gives_the_answer_of_one_process(
    spawn: Any, stored: bytes, ranks: int
) -> None:
    run(spawn, MATRIX, ranks, stored, FAST)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_objective_packing_and_micro_batch_size_under_every_layout(
    spawn: Any, stored: bytes, ranks: int
) -> None:
    run(spawn, MATRIX, ranks, stored, FULL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", sorted({case.ranks for case in MORE.values()}))
def test_recompute_overlap_and_products_of_layouts_give_the_answer_too(
    spawn: Any, stored: bytes, ranks: int
) -> None:
    run(spawn, MORE, ranks, stored, FEW)


def test_every_seeded_fault_turns_the_matrix_red(spawn: Any, stored: bytes) -> None:
    ranks = spawn(red_by_fault, 2, stored)
    for found in ranks:
        assert found.keys() >= FAULTS.keys()
        for name, red in found.items():
            if name.startswith("none"):
                assert not red, name
    for fault in FAULTS:
        wrong = {name for found in ranks for name in found[fault]}
        assert "lm_head.weight" in wrong, f"{fault}: the gradient came out right"
    assert "loss" not in ranks[0]["loss doubled by CP"]  # it is only the gradient that tells
    assert TOLERANCE == 5e-6
