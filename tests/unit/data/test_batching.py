"""Mini-batches of whole groups, and shares that turn a mean into a sum."""

from __future__ import annotations

import pytest
from train_rows import rollout_batch, sequence

from pnpo_megatron.data.batching import mini_batches, shares_of
from pnpo_megatron.errors import ConfigError


def test_an_epoch_covers_every_sequence_once_and_never_splits_a_group():
    batch = rollout_batch(groups=6, group_size=3)
    seen: list[int] = []
    for mini_batch in mini_batches(batch, 2, mean="response", seed=(42, 1, 0)):
        groups = [batch.groups[row] for row in mini_batch.indices]
        assert sorted(groups.count(group) for group in set(groups)) == [3, 3]
        for row, one in zip(mini_batch.indices, mini_batch.sequences, strict=True):
            assert one is batch.sequences[row]
        seen += mini_batch.indices
    assert sorted(seen) == list(range(18))


def test_the_order_of_groups_depends_on_seed_step_and_epoch_only():
    batch = rollout_batch(groups=8, group_size=2)

    def order(*seed: int) -> list[tuple[int, ...]]:
        return [mini_batch.indices for mini_batch in mini_batches(batch, 2, mean="token", seed=seed)]

    assert order(42, 1, 0) == order(42, 1, 0)
    assert len({str(order(*seed)) for seed in [(42, 1, 0), (42, 1, 1), (42, 2, 0), (43, 1, 0)]}) == 4


def test_h09_shares_of_the_two_means_are_the_numbers_of_the_trap():
    """L = 1 with loss 1 and L = 9 with loss 0: response-mean 0.5, token-mean 0.1 (TRAPS H09)."""
    sequences = [sequence(2, [True], seed=0), sequence(2, [True] * 9, seed=1)]
    assert shares_of(sequences, "response")[0] * 1 == pytest.approx(0.5, abs=1e-15)
    assert shares_of(sequences, "token")[0] * 1 == pytest.approx(0.1, abs=1e-15)


def test_h15_a_masked_response_leaves_numerator_and_denominator_together():
    """Lengths 4, 4 and 8, the last masked as truncated: token-mean of ones is 1.0, not 0.5 (TRAPS H15)."""
    sequences = [
        sequence(1, [True] * 4, seed=0),
        sequence(1, [True] * 4, seed=1),
        sequence(1, [False] * 8, seed=2),
    ]
    for mean in ("response", "token"):
        shares = shares_of(sequences, mean)
        assert shares[2] == 0.0
        assert sum(4 * share for share in shares[:2]) == pytest.approx(1.0, abs=1e-15)


def test_equal_rewards_count_in_the_denominator_and_full_masks_give_zero_shares():
    flat = sequence(1, [True] * 2, seed=0, advantage=0.0)
    assert shares_of([flat, sequence(1, [True] * 2, seed=1)], "response") == (0.25, 0.25)
    empty = [sequence(1, [False] * 2, seed=0)] * 2
    assert shares_of(empty, "response") == shares_of(empty, "token") == (0.0, 0.0)


def test_a_mini_batch_that_does_not_divide_the_groups_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"mini_batch = 4 does not divide the batch's 6 groups"):
        list(mini_batches(rollout_batch(6, 1), 4, mean="response", seed=(1,)))
