"""Algorithms by the names of their papers, as configs of PolicyGradient."""

from collections.abc import Callable

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut, ReinforcePlusPlus
from rl.algorithms.losses import CISPOLoss, ClippedLoss, DecoupledLoss, DPPOLoss, GSPOLoss, dapo
from rl.algorithms.policy_gradient import PolicyGradient

Config = PolicyGradient.Config

ALGORITHMS: dict[str, Callable[[], Config]] = {
    "grpo": Config,
    "dr_grpo": lambda: Config(
        advantage=GroupAdvantage.Config(normalize_std=False),
        loss=ClippedLoss.Config(reduction="fixed_length"),
    ),
    "dapo": lambda: Config(loss=dapo()),
    "ppo": lambda: Config(advantage=GAE.Config(), loss=ClippedLoss.Config(reduction="token_mean")),
    "decoupled_ppo": lambda: Config(loss=DecoupledLoss.Config()),
    "rloo": lambda: Config(advantage=LeaveOneOut.Config()),
    "reinforce_plus_plus": lambda: Config(advantage=ReinforcePlusPlus.Config()),
    "gspo": lambda: Config(loss=GSPOLoss.Config()),
    "cispo": lambda: Config(loss=CISPOLoss.Config()),
    "dppo": lambda: Config(loss=DPPOLoss.Config()),
}
"""Function that makes the config of an algorithm, by name. Each paper is cited by the parts that
the config consists of. Fields of ``rollout`` that a paper sets too are in docs/algorithms.md."""
