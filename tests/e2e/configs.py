"""Configs of the tests' own, as a user has them in a package of their own."""

from configs.quickstart import quickstart
from rl.algorithms.advantages import GAE
from rl.config import RunConfig


def many_models() -> RunConfig:
    """PPO with a critic, held to a reference that follows, with four updates a step."""
    config = quickstart()
    config.algorithm.advantage = GAE.Config()
    config.algorithm.loss.kl_coef, config.algorithm.adaptive_kl.target = 0.05, 0.01
    config.algorithm.proximal = "recomputed"
    config.algorithm.update_epochs, config.algorithm.mini_batch = 2, 2
    config.reference.refresh_every = 2
    return config
