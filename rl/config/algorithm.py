"""Configs of algorithms."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.config import Configurable

from rl.algorithms import losses
from rl.algorithms.advantages import (
    GAE,
    GDPO,
    AdvantageEstimator,
    GroupAdvantage,
    LeaveOneOut,
    MaxRL,
    ReinforcePlusPlus,
)
from rl.algorithms.corrections import Correction, MaskedIS, TruncatedIS
from rl.algorithms.kl import AdaptiveKL, Estimator
from rl.algorithms.ratio_losses import GMPOLoss, SAPOLoss
from rl.config.rollout import RolloutConfig
from rl.errors import require, require_value
from rl.types.rules import at_least


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Configurable.Config):
    """Facts about the algorithm that the run needs before it starts."""

    mask_truncated: bool = False
    """Whether rollouts with an answer that was cut off at its maximum length are left out of the
    loss (overlong filtering of DAPO, arXiv:2503.14476, section 3.4). Their rewards still count in
    the advantages of the others."""

    def roles(self) -> tuple[str, ...]:
        """Return the roles that the algorithm needs: any of ``reference`` and ``critic``; by
        default those with a column.
        """
        return tuple(role for role in self.columns() if role in ("reference", "critic"))

    def columns(self) -> dict[str, tuple[str, str]]:
        """Return {role: (output, column)}: the output of a model, and the batch column that
        stores it.

        Roles are ``trainer``, ``reference``, ``critic`` and those of ``RLConfig.roles``.
        Outputs are ``logprobs``, ``entropy`` and ``values``.
        """
        return {}

    def updates(self, prompts: int) -> int:
        """Return the number of optimizer steps on the rollouts of ``prompts`` prompts."""
        return 1

    @property
    def passes(self) -> int:
        """Number of times that a step's rollouts are trained on."""
        return 1

    @property
    def by_group(self) -> bool:
        """Whether each group can be scored without the other groups of its batch."""
        return True

    def check(self, rollout: RolloutConfig) -> None:
        """Raise ConfigError, naming the field, if the value of a field is invalid."""


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig(AlgorithmConfig):
    """Advantages, loss and number of optimizer steps of a batch."""

    advantage: AdvantageEstimator.Config = field(default_factory=GroupAdvantage.Config)
    """Estimator of each token's advantage."""

    loss: losses.PolicyLoss.Config = field(default_factory=losses.ClippedLoss.Config)
    """Loss of the policy. ``grpo()``, ``dapo()`` and other functions in
    ``rl.algorithms.losses`` return common ones."""

    corrections: tuple[Correction.Config, ...] = ()
    """Weights for tokens that other weights or another engine drew; a token's weight is the
    product of all corrections. Corrections need the trainer's own log-probs, so any correction
    implies ``recomputed`` for ``old_logprobs``."""

    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """Log-probs in the denominator of the loss's importance ratio.

    - ``behaviour``: Log-probs of the generators, which drew the tokens.
    - ``recomputed``: Log-probs of the trainer before the step's first update, which takes one
      more forward pass. The ratio then does not correct for the generators' policy. Decoupled
      PPO, ``loss=DecoupledLoss.Config()``, has a weight that does."""

    reward_kl_coef: Annotated[float, at_least(0, 1e6)] = 0.0
    """Coefficient of a KL penalty against the reference policy in each token's reward. Only one
    of this and ``loss.kl_coef`` may be above 0."""

    reward_kl_estimator: Estimator = "k1"
    """Estimator of the KL divergence in the reward."""

    adaptive_kl: AdaptiveKL.Config = field(default_factory=AdaptiveKL.Config)
    """Adaptation of the KL coefficient that is above 0, in the loss or in the reward."""

    credit: Literal["episode", "turn", "player"] = "episode"
    """Sampled tokens that get the reward, for estimators that distinguish tokens.

    - ``episode``: The last token of a rollout gets the whole reward of the rollout.
    - ``turn``: The last token of each answer gets the reward of the environment step that
      follows the answer. The last token of the rollout also gets the rest. Requires an
      environment as the task, and an estimator that distinguishes tokens.
    - ``player``: Each conversation of a rollout, such as that of a player, gets the rewards of its
      own answers, and is compared with the same player's in the other rollouts of the prompt.
      Requires an environment as the task."""

    overlong_buffer: Annotated[int, at_least(0, 10**8)] = 0
    """Number of tokens before ``rollout.max_tokens`` over which a completion's reward decreases
    linearly by up to 1 (DAPO, arXiv:2503.14476, section 3.4). 0 disables it."""

    update_epochs: Annotated[int, at_least(1, 10**4)] = 1
    """Number of passes over the rollouts of a step."""

    prompts_per_minibatch: Annotated[int, at_least(0, 10**6)] = 0
    """Number of prompts per optimizer step; must divide ``rollout.prompts_per_step``. The prompts
    of a step are shuffled, by seed, step and epoch, and their rollouts are split into minibatches
    of equal size, which hold whole groups unless rollouts were lost. 0 for one minibatch."""

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL penalty, in loss or reward."""
        return self.loss.kl_coef or self.reward_kl_coef

    @property
    def recomputes(self) -> bool:
        """Whether each step first computes the trainer's log-probs of its rollouts."""
        by_loss = self.old_logprobs == "recomputed" or self.loss.needs_proximal
        return by_loss or bool(self.corrections)

    def columns(self) -> dict[str, tuple[str, str]]:
        """Return {role: (output, column)}: the output of a model, and the batch column that
        stores it.
        """
        columns = {"trainer": ("logprobs", "proximal_logprobs")} if self.recomputes else {}
        if self.kl_coef or self.loss.needs_reference:
            columns["reference"] = ("logprobs", "reference_logprobs")
        if self.advantage.needs_values:
            columns["critic"] = ("values", "old_values")
        return columns

    def updates(self, prompts: int) -> int:
        """Return the number of optimizer steps on the rollouts of ``prompts`` prompts."""
        return self.update_epochs * (prompts // (self.prompts_per_minibatch or prompts))

    @property
    def passes(self) -> int:
        """Number of times that a step's rollouts are trained on."""
        return self.update_epochs

    @property
    def by_group(self) -> bool:
        """Whether each group can be scored without the other groups of its batch."""
        return self.advantage.by_group

    def check(self, rollout: RolloutConfig) -> None:
        """Raise ConfigError, naming the field, if the value of a field is invalid."""
        prompts = rollout.prompts_per_step
        size = self.prompts_per_minibatch
        require(
            size == 0 or prompts % size == 0,
            f"algorithm.prompts_per_minibatch is {size}; it must divide "
            f"rollout.prompts_per_step={prompts}",
        )
        buffer = self.overlong_buffer
        rule = f"at most rollout.max_tokens={rollout.max_tokens}"
        require_value(buffer <= rollout.max_tokens, "algorithm.overlong_buffer", buffer, rule)
        samples = rollout.samples_per_prompt
        advantage = self.advantage
        require(
            samples > 1 or not advantage.needs_group,
            f"rollout.samples_per_prompt is {samples}; it must be at least 2 with "
            f"algorithm.advantage={type(advantage).__qualname__}, which compares the "
            "completions of a prompt; GAE and ReinforcePlusPlus without a baseline do not",
        )
        self._check_kl()
        for number, correction in enumerate(self.corrections):
            is_masked = isinstance(correction, MaskedIS.Config)
            weighs = correction.weigh if is_masked else isinstance(correction, TruncatedIS.Config)
            require(
                not (weighs and isinstance(self.loss, losses.DecoupledLoss.Config)),
                f"algorithm.corrections.{number} weights tokens by the ratio that "
                "algorithm.loss=DecoupledLoss has already; remove it, or set its cap in "
                "algorithm.loss.behaviour_cap",
            )
            if isinstance(correction, MaskedIS.Config):
                low = correction.low
                rule = f"at most high={correction.high}, or every token is masked"
                field = f"algorithm.corrections.{number}.low"
                require_value(low <= correction.high, field, low, rule)

    def _check_kl(self) -> None:
        in_loss = self.loss.kl_coef
        in_reward = self.reward_kl_coef
        rule = f"0 with algorithm.loss.kl_coef={in_loss}"
        require_value(not (in_loss and in_reward), "algorithm.reward_kl_coef", in_reward, rule)
        estimator = self.loss.kl_estimator
        holds = not in_loss or estimator != "k1"
        fix = "the gradient of k1 is 0 on average"
        require_value(holds, "algorithm.loss.kl_estimator", estimator, "'k2' or 'k3'", fix)
        adaptive = self.adaptive_kl
        change = adaptive.rate * adaptive.clip
        require(
            change < 1,
            f"algorithm.adaptive_kl.rate={adaptive.rate} times "
            f"algorithm.adaptive_kl.clip={adaptive.clip} is {change}; it must be below 1",
        )
        holds = adaptive.target == 0 or self.kl_coef > 0
        rule = "0 unless algorithm.loss.kl_coef or algorithm.reward_kl_coef is above 0"
        require_value(holds, "algorithm.adaptive_kl.target", adaptive.target, rule)


ALGORITHMS: dict[str, Callable[[], PolicyGradientConfig]] = {
    "grpo": PolicyGradientConfig,
    "dr_grpo": lambda: PolicyGradientConfig(
        advantage=GroupAdvantage.Config(normalize_std=False),
        loss=losses.ClippedLoss.Config(reduction="fixed_length"),
    ),
    "dapo": lambda: PolicyGradientConfig(loss=losses.dapo()),
    "ppo": lambda: PolicyGradientConfig(
        advantage=GAE.Config(), loss=losses.ClippedLoss.Config(reduction="token_mean")
    ),
    "decoupled_ppo": lambda: PolicyGradientConfig(loss=losses.DecoupledLoss.Config()),
    "rloo": lambda: PolicyGradientConfig(advantage=LeaveOneOut.Config()),
    "reinforce_plus_plus": lambda: PolicyGradientConfig(advantage=ReinforcePlusPlus.Config()),
    "gspo": lambda: PolicyGradientConfig(loss=losses.GSPOLoss.Config()),
    "cispo": lambda: PolicyGradientConfig(loss=losses.CISPOLoss.Config()),
    "dppo": lambda: PolicyGradientConfig(loss=losses.DPPOLoss.Config()),
    "sapo": lambda: PolicyGradientConfig(loss=SAPOLoss.Config()),
    "gmpo": lambda: PolicyGradientConfig(loss=GMPOLoss.Config()),
    "maxrl": lambda: PolicyGradientConfig(advantage=MaxRL.Config()),
    "gdpo": lambda: PolicyGradientConfig(advantage=GDPO.Config()),
}
"""Function that makes the config of an algorithm, by name. Each paper is cited by the parts that
the config consists of. Fields of ``rollout`` that a paper sets too are in docs/algorithms.md."""
