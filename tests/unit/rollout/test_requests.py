"""Prompts to requests and arrays back to rollouts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pnpo_megatron.errors import ConfigError, DataError, RolloutError
from pnpo_megatron.rollout.messages import GroupDone
from pnpo_megatron.rollout.requests import check_call, make_request, refusal, unpack_group
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import Prompt, RolloutGroup, Sampling

PROMPT = Prompt("p", (1, 2, 3), "")


def unpack(
    ids: list[int], logprobs: list[float], lengths: list[int], routes: tuple[np.ndarray, ...] = ()
) -> RolloutGroup:
    reply = GroupDone(
        1,
        0,
        4,
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        np.array(lengths),
        ("stop", "length"),
        routes,
    )
    return unpack_group(reply, PROMPT, np.array([11, 12]), 4, lambda ids: "-".join(map(str, ids)))


def test_flat_arrays_are_cut_at_the_lengths_of_the_responses() -> None:
    first, second = unpack([5, 6, 7], [-1.0, -2.0, -3.0], [1, 2]).rollouts
    assert (first.response_ids.tolist(), first.rollout_logprobs.tolist()) == ([5], [-1.0])
    assert (second.response_ids.tolist(), second.rollout_logprobs.tolist()) == ([6, 7], [-2.0, -3.0])
    assert [(r.sample, r.seed, r.version, r.text) for r in (first, second)] == [
        (0, 11, 4, "5"),
        (1, 12, 4, "6-7"),
    ]
    assert (first.truncated, second.truncated) == (False, True)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_names_prompt_and_version(value: float) -> None:
    with pytest.raises(RolloutError, match="prompt p: .*not finite from weights of version 4"):
        unpack([5, 6, 7], [-1.0, value, -3.0], [1, 2])


def test_routes_are_of_every_token_but_the_last_of_their_own_response() -> None:
    routes = tuple(np.full((rows, 2, 1), rows, np.uint16) for rows in (3, 4))
    first, second = unpack([5, 6, 7], [-1.0, -2.0, -3.0], [1, 2], routes).rollouts
    assert first.routes is not None and second.routes is not None
    assert first.routes.tolist() == routes[0].tolist() and second.routes.tolist() == routes[1].tolist()
    assert unpack([5, 6, 7], [-1.0, -2.0, -3.0], [1, 2]).rollouts[0].routes is None
    with pytest.raises(
        RolloutError, match=r"prompt p: routes of \[4, 3\] tokens where the engine read \[3, 4\]"
    ):
        unpack([5, 6, 7], [-1.0, -2.0, -3.0], [1, 2], routes[::-1])


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"3 ids and 2 log-probs for responses of \[1, 2\] tokens"):
        unpack([5, 6, 7], [-1.0, -2.0], [1, 2])


def test_h35_a_seed_depends_on_call_prompt_and_sample_and_on_nothing_else() -> None:
    small, large = (make_request(index, PROMPT, size, (42, "rollout", 7)) for index, size in ((0, 2), (5, 4)))
    assert small.seeds.tolist() == large.seeds.tolist()[:2]
    assert large.seeds.tolist() == [derive_seed(42, "rollout", 7, "p", sample) for sample in range(4)]
    others = [
        make_request(0, PROMPT, 4, (42, "rollout", 8)),
        make_request(0, Prompt("q", (1, 2, 3), ""), 4, (42, "rollout", 7)),
    ]
    seeds = {seed for request in (large, *others) for seed in request.seeds.tolist()}
    assert len(seeds) == 12


def test_h35_calls_whose_responses_would_be_equal_are_refused() -> None:
    with pytest.raises(ConfigError, match="temperature = 0 gives 2 equal responses; use group_size = 1"):
        check_call([PROMPT], 2, Sampling(0.0, 4))
    with pytest.raises(DataError, match="'p' occurs twice"):
        check_call([PROMPT, Prompt("p", (9,), "")], 2, Sampling(1.0, 4))
    check_call([PROMPT], 1, Sampling(0.0, 4))


@pytest.mark.parametrize("temperature", [0.005, 2.1, -1.0, float("nan")])
def test_h12_a_temperature_that_the_engine_would_change_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"0\.01 to 2\.0"):
        check_call([PROMPT], 1, Sampling(temperature, 4))


@pytest.mark.parametrize(
    ("ids", "max_tokens", "reason"),
    [
        ((), 4, "empty"),
        ((1, 64), 4, r"0..63"),
        ((-1, 1), 4, r"0..63"),
        ((1, 2, 3), 14, "3 prompt tokens and max_tokens = 14 exceed max_model_len = 16"),
    ],
)
def test_a_prompt_that_the_engine_would_refuse_or_cut_is_named(
    ids: tuple[int, ...], max_tokens: int, reason: str
) -> None:
    assert reason in refusal(Prompt("p", ids, ""), Sampling(1.0, max_tokens), vocab_size=64, max_model_len=16)


def test_a_prompt_that_just_fits_is_not_refused() -> None:
    assert not refusal(Prompt("p", (0, 63, 1), ""), Sampling(1.0, 13), vocab_size=64, max_model_len=16)
