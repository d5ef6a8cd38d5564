"""Configs of algorithms.py: the quickstart's model, task and steps, under other algorithms and
corrections.
"""

from torchtitan.components.optimizer import default_adamw

from configs.quickstart import quickstart
from rl.algorithms.advantages import GAE, LeaveOneOut, ReinforcePlusPlus
from rl.algorithms.corrections import Correction, MaskedIS, StalenessDecay, TruncatedIS
from rl.algorithms.losses import CISPOLoss, ClippedLoss, DPPOLoss, GSPOLoss, PolicyLoss, dapo
from rl.config import RLConfig

ENTROPY = 0.02


def ppo() -> RLConfig:
    """PPO with a critic of the policy's size."""
    config = quickstart()
    config.algorithm.advantage = GAE.Config(lam=1.0)
    config.algorithm.loss = ClippedLoss.Config(entropy_coef=ENTROPY, reduction="token_mean")
    config.critic.optimizer = default_adamw(lr=3e-3, weight_decay=0.0)
    return config


def grpo_kl() -> RLConfig:
    """GRPO with a KL penalty against the initial policy, which is random."""
    config = quickstart()
    config.algorithm.loss = ClippedLoss.Config(entropy_coef=ENTROPY, kl_coef=0.005)
    return config


def dapo_loss() -> RLConfig:
    """DAPO's clip-higher, mean over tokens and dynamic sampling."""
    config = quickstart()
    config.algorithm.loss = dapo(entropy_coef=ENTROPY)
    config.rollout.max_resampled_groups = 8
    return config


def rloo() -> RLConfig:
    """REINFORCE with a leave-one-out baseline."""
    config = quickstart()
    config.algorithm.advantage = LeaveOneOut.Config()
    return config


def reinforce_plus_plus() -> RLConfig:
    """REINFORCE++ with the mean of the group as baseline."""
    config = quickstart()
    config.algorithm.advantage = ReinforcePlusPlus.Config(baseline="group_mean")
    return config


def _twice(loss: PolicyLoss.Config) -> RLConfig:
    """Two updates a step, so that ratios are not 1 in the second."""
    config = quickstart()
    config.algorithm.loss = loss
    config.algorithm.prompts_per_minibatch = 16
    return config


def gspo() -> RLConfig:
    """One clipped ratio per sequence."""
    return _twice(GSPOLoss.Config(entropy_coef=ENTROPY))


def cispo() -> RLConfig:
    """Clipped weights, unclipped gradients."""
    return _twice(CISPOLoss.Config(entropy_coef=ENTROPY))


def dppo() -> RLConfig:
    """DPPO, whose trust region is defined on probabilities."""
    return _twice(DPPOLoss.Config(entropy_coef=ENTROPY))


def stale() -> RLConfig:
    """PPO's clipped loss with the generators' log-probs as those of the old policy."""
    config = quickstart()
    config.rollout.max_staleness = 4
    return config


def stale_recomputed() -> RLConfig:
    """Ratios against log-probs that the trainer recomputes before the step, without a correction
    for staleness.
    """
    config = stale()
    config.algorithm.old_logprobs = "recomputed"
    return config


def _corrected(*corrections: Correction.Config) -> RLConfig:
    config = stale()
    config.algorithm.corrections = corrections
    return config


def stale_truncated() -> RLConfig:
    """Recomputed log-probs, with truncated importance ratios as weights."""
    return _corrected(TruncatedIS.Config())


def stale_masked_tokens() -> RLConfig:
    """Recomputed log-probs, without the tokens whose ratios are out of range."""
    return _corrected(MaskedIS.Config())


def stale_masked_sequences() -> RLConfig:
    """Recomputed log-probs, without the sequences whose ratios are out of range."""
    return _corrected(MaskedIS.Config(level="sequence"))


def stale_decayed() -> RLConfig:
    """Recomputed log-probs and truncated ratios, with smaller weights for older tokens."""
    return _corrected(TruncatedIS.Config(), StalenessDecay.Config())
