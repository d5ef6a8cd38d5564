"""SFTConfig: all that a run of the supervised trainer depends on."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar

import tyro

from rl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.config.rl import RLConfig
from rl.config.rollout import EvaluationConfig, RolloutConfig
from rl.config.run import RunConfig
from rl.data.conversations import ConversationsConfig
from rl.environments.task import Task
from rl.generation.generator_config import GeneratorConfig
from rl.session.session_config import Colocate
from rl.types import MAX_TEMPERATURE, MIN_TEMPERATURE
from rl.types.rules import COSMETIC, NUMERICS, PERFORMANCE, at_least
from rl.weights.transport import WeightPushConfig


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(ConversationsConfig, DatasetConfig):
    """Examples of a run of the supervised trainer. A line of a file has ``messages``, ``prompt``
    and ``completion``, or ``text``.
    """

    weights: dict[str, Annotated[float, at_least(0)]] = field(default_factory=dict)
    """Shares of several sets in the examples that are trained, in proportion to these weights: by
    the text of each set in ``path``, and 0 for a set that is not named. A set begins again once it
    ends, and an epoch is as many examples as all sets have. Empty: each epoch has each example
    once."""


@dataclass(kw_only=True, slots=True)
class SampledEvaluationConfig(EvaluationConfig):
    """Evaluation of completions that generators sample. Training waits meanwhile, so scores depend
    on the config and the weights alone.
    """

    task: Annotated[Task.Config, NUMERICS]
    """Held-out prompts, and the reward of their completions: the config of a Task."""

    max_tokens: Annotated[int, at_least(1, 10**8)] = 256
    """Maximum length of a completion, in tokens."""

    temperature: Annotated[float, at_least(MIN_TEMPERATURE, MAX_TEMPERATURE)] = 1.0
    """Temperature of the samples for pass@k."""

    reward_workers: Annotated[int, at_least(0, 10**4), PERFORMANCE] = 1
    """Number of processes that score completions; 0 scores in the controller's process."""

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)

    colocate: Annotated[Colocate, PERFORMANCE] = "none"
    """Whether trainer and generators have devices of their own (``none``) or the same ones in turn
    (``all``)."""


@dataclass(kw_only=True, slots=True)
class SFTConfig(DatasetRunConfig):
    """Config of a run that trains a model on given conversations or texts."""

    trainer_class: ClassVar[str] = "rl.trainers.sft:SFTTrainer"
    generator_section: ClassVar[str] = "evaluation."

    task: Annotated[SFTDataConfig, NUMERICS] = field(default_factory=SFTDataConfig)
    loss: Annotated[PolicyLoss.Config, NUMERICS] = field(default_factory=CrossEntropyLoss.Config)
    """Cost of a trained token. Only losses of log-probs and entropy apply."""

    evaluation: Annotated[SampledEvaluationConfig | None, tyro.conf.AvoidSubcommands, COSMETIC] = (
        None
    )
    """Evaluation of completions, during training and at its end. None starts no generators."""

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        return self.task.max_tokens

    def sampling_run(self) -> RLConfig | None:
        """Return the config of an RL run in lockstep that starts the same processes and evaluates
        the same way; None without ``evaluation``.
        """
        evaluation = self.evaluation
        if evaluation is None:
            return None
        shared = {attribute.name: getattr(self, attribute.name) for attribute in fields(RunConfig)}
        del shared["record"]  # that of an RL run concerns rollouts
        shared["trainer"] = replace(  # for other lengths, and for steps that epochs may set
            self.trainer,
            micro_batch_tokens=None,
            lr_scheduler=replace(self.trainer.lr_scheduler, total_steps=None),
        )
        return RLConfig(
            **shared,
            task=evaluation.task,
            rollout=RolloutConfig(
                max_tokens=evaluation.max_tokens,
                temperature=evaluation.temperature,
                reward_workers=evaluation.reward_workers,
            ),
            evaluation=EvaluationConfig(
                **{spec.name: getattr(evaluation, spec.name) for spec in fields(EvaluationConfig)}
            ),
            generator=evaluation.generator,
            weights=evaluation.weights,
            colocate=evaluation.colocate,
        )
