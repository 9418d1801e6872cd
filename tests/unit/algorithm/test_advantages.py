import math

import pytest
import torch

from pnpo_megatron.algorithm import group_relative


def test_h11_population_and_sample_std_give_the_numbers_of_the_table():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    third = 1 / math.sqrt(3)
    torch.testing.assert_close(
        group_relative(rewards), torch.tensor([[math.sqrt(3), -third, -third, -third]])
    )
    sample = group_relative(rewards, std="sample")
    torch.testing.assert_close(sample, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
    centred = group_relative(rewards, std="none")
    torch.testing.assert_close(centred, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


@pytest.mark.parametrize(("size", "factor"), [(8, 1.0690450), (2, 1.4142136)])
def test_h11_the_two_stds_differ_by_the_known_factor(size, factor):
    rewards = torch.zeros(1, size)
    rewards[0, 0] = 1.0
    ratio = group_relative(rewards) / group_relative(rewards, std="sample")
    torch.testing.assert_close(ratio, torch.full_like(ratio, factor))


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_h11_equal_rewards_and_a_group_of_one_give_exactly_zero(std, reward, size):
    advantages = group_relative(torch.full((2, size), reward, dtype=torch.float64), std=std)
    assert torch.equal(advantages, torch.zeros(2, size, dtype=torch.float64))


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_h11_a_faulted_reward_leaves_the_statistics_and_gets_zero(fault):
    advantages = group_relative(torch.tensor([[1.0, fault, 0.0, 0.0, 0.0]]))
    alone = group_relative(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert advantages[0, 1] == 0.0
    assert torch.equal(advantages[0, [0, 2, 3, 4]], alone[0])


def test_h11_a_group_whose_only_valid_rewards_are_equal_or_missing_gives_zero():
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 1.0], [nan, nan, 0.3], [nan, nan, nan]])
    for std in ("population", "sample", "none"):
        assert torch.equal(group_relative(rewards, std=std), torch.zeros(3, 3))


def test_h11_the_order_of_samples_does_not_matter_and_groups_do_not_mix():
    rewards = torch.rand(6, 8, dtype=torch.float64)
    order = torch.randperm(8)
    torch.testing.assert_close(group_relative(rewards)[:, order], group_relative(rewards[:, order]))
    torch.testing.assert_close(group_relative(rewards)[2:3], group_relative(rewards[2:3]))


def test_advantages_have_mean_zero_and_population_std_one():
    advantages = group_relative(torch.rand(5, 8, dtype=torch.float64) * 100)
    torch.testing.assert_close(advantages.mean(-1), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(advantages.std(-1, correction=0), torch.ones(5, dtype=torch.float64))


def test_a_tiny_but_real_difference_is_not_swallowed_by_an_epsilon():
    advantages = group_relative(torch.tensor([[1e-9, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(advantages, torch.tensor([[1.0, -1.0]], dtype=torch.float64))


def test_wrong_shapes_and_names_are_errors_that_say_both():
    with pytest.raises(ValueError, match=r"\[4\].*\[P, G\]"):
        group_relative(torch.zeros(4))
    with pytest.raises(ValueError, match="'biased'"):
        group_relative(torch.zeros(1, 4), std="biased")
