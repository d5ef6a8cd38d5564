"""Configs of algorithms.py: the quickstart's model, task and steps, under other algorithms and
corrections.
"""

from torchtitan.components.optimizer import default_adamw

from configs.quickstart import quickstart
from rl.algorithms.advantages import GAE, LeaveOneOut, ReinforcePlusPlus
from rl.algorithms.corrections import Correction, MaskedIS, StalenessDecay, TruncatedIS
from rl.algorithms.losses import CISPOLoss, ClippedLoss, DPPOLoss, GSPOLoss, PolicyLoss, dapo
from rl.config import RunConfig

ENTROPY = 0.02


def ppo() -> RunConfig:
    """PPO with a critic of the policy's size."""
    config = quickstart()
    config.algorithm.advantage = GAE.Config(lam=1.0)
    config.algorithm.loss = ClippedLoss.Config(entropy_coef=ENTROPY, reduction="token_mean")
    config.critic.optimizer = default_adamw(lr=3e-3, weight_decay=0.0)
    return config


def grpo_kl() -> RunConfig:
    """GRPO that is held to its reference policy, the random one that it begins as."""
    config = quickstart()
    config.algorithm.loss = ClippedLoss.Config(entropy_coef=ENTROPY, kl_coef=0.005)
    return config


def dapo_loss() -> RunConfig:
    """DAPO's clip-higher and mean over tokens, and other groups for those that teach nothing."""
    config = quickstart()
    config.algorithm.loss = dapo(entropy_coef=ENTROPY)
    config.rollout.max_replacements = 8
    return config


def rloo() -> RunConfig:
    """REINFORCE with a leave-one-out baseline."""
    config = quickstart()
    config.algorithm.advantage = LeaveOneOut.Config()
    return config


def reinforce_plus_plus() -> RunConfig:
    """REINFORCE++ with its group's mean as baseline."""
    config = quickstart()
    config.algorithm.advantage = ReinforcePlusPlus.Config(baseline="group_mean")
    return config


def _twice(loss: PolicyLoss.Config) -> RunConfig:
    """Two updates a step, so that ratios are not 1 in the second."""
    config = quickstart()
    config.algorithm.loss = loss
    config.algorithm.mini_batch = 16
    return config


def gspo() -> RunConfig:
    """One clipped ratio per sequence."""
    return _twice(GSPOLoss.Config(entropy_coef=ENTROPY))


def cispo() -> RunConfig:
    """Clipped weights, unclipped gradients."""
    return _twice(CISPOLoss.Config(entropy_coef=ENTROPY))


def dppo() -> RunConfig:
    """A trust region of probabilities."""
    return _twice(DPPOLoss.Config(entropy_coef=ENTROPY))


def stale() -> RunConfig:
    """PPO's clipped loss, which takes the generators' log-probs for the old policy's."""
    config = quickstart()
    config.rollout.max_staleness = 4
    return config


def stale_recomputed() -> RunConfig:
    """The ratio is against the trainer's weights before the step, and no weight makes up for
    staleness.
    """
    config = stale()
    config.algorithm.proximal = "recomputed"
    return config


def _corrected(*corrections: Correction.Config) -> RunConfig:
    config = stale()
    config.algorithm.corrections = corrections
    return config


def stale_truncated() -> RunConfig:
    """Recomputed, weighed by truncated importance ratios: decoupled PPO with a cap."""
    return _corrected(TruncatedIS.Config())


def stale_masked_tokens() -> RunConfig:
    """Recomputed, without the tokens whose ratios are out of range."""
    return _corrected(MaskedIS.Config())


def stale_masked_sequences() -> RunConfig:
    """Recomputed, without the sequences whose ratios are out of range."""
    return _corrected(MaskedIS.Config(level="sequence"))


def stale_decayed() -> RunConfig:
    """Recomputed, truncated, older tokens counting for less."""
    return _corrected(TruncatedIS.Config(), StalenessDecay.Config())
