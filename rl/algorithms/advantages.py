"""How much better each completion was than expected."""

import torch


def group_advantages(rewards: torch.Tensor, *, normalize_std: bool) -> torch.Tensor:
    """Rewards [groups, samples] less their group's mean, divided by its std if asked.

    With std: GRPO, arXiv:2402.03300, section 4.1.2. Without: Dr. GRPO, arXiv:2503.20783, eq. 2.
    A group whose rewards are all equal gets advantages of exactly 0.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_std and rewards.shape[1] > 1:
        centred = centred / (rewards.std(dim=1, keepdim=True) + 1e-6)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return centred.masked_fill(equal, 0.0)
