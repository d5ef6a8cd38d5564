import pytest
import torch

from rl.algorithms.advantages import group_advantages

REWARDS = [[0.0, 1.0, 0.25, 0.25], [1.0, 1.0, 1.0, 0.0]]


def test_with_std_each_group_is_centred_and_scaled():
    exact = torch.tensor(REWARDS, dtype=torch.float64)
    wanted = (exact - exact.mean(1, keepdim=True)) / exact.std(1, keepdim=True)
    advantages = group_advantages(torch.tensor(REWARDS), normalize_std=True)
    torch.testing.assert_close(advantages.double(), wanted, rtol=1e-5, atol=1e-6)


def test_without_std_only_the_mean_is_taken_off():
    advantages = group_advantages(torch.tensor(REWARDS), normalize_std=False)
    torch.testing.assert_close(advantages, torch.tensor([[-0.375, 0.625, -0.125, -0.125], [0.25, 0.25, 0.25, -0.75]]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7e5])
@pytest.mark.parametrize("samples", [1, 3, 7, 8])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(reward, samples, normalize_std):
    """Also where the mean of equal numbers is not quite that number in float32."""
    rewards = torch.tensor([[reward] * samples, [0.0] * samples])
    assert group_advantages(rewards, normalize_std=normalize_std).tolist() == [[0.0] * samples] * 2


def test_groups_do_not_see_each_other():
    alone = group_advantages(torch.tensor(REWARDS[:1]), normalize_std=True)
    assert torch.equal(group_advantages(torch.tensor(REWARDS), normalize_std=True)[:1], alone)
