"""Sampling of a run's completions, its evaluation, and the record of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Sampling
from rl.types.rules import COSMETIC, PERFORMANCE, SHARE, above, at_least


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    """Choice of prompts by their recent success, in place of the order of the task."""

    prompts: Annotated[int, at_least(0, 10**8)] = 0
    """Number of the task's first prompts to choose from, such as its number of examples; 0 for the
    order of the task."""

    rule: Literal["failure", "variance"] = "failure"
    """Weight of a prompt whose recent success is s, between 0 and 1. A prompt that was not asked
    yet has the largest weight.

    - ``failure``: 1 - s, the prioritized sampling of Kimi k1.5, arXiv:2501.12599, section 2.3.
    - ``variance``: s (1 - s), the learnability of arXiv:2502.12272.
    """

    memory: Annotated[float, SHARE] = 0.5
    """Share of the groups before the newest one in s. The newest group has the share of its correct
    rollouts."""

    floor: Annotated[float, SHARE] = 0.05
    """Least weight of a prompt, as a share of the largest, so that it is asked at times; 0 for the
    papers' rules."""

    skip_solved: Annotated[int, at_least(0, 10**6)] = 0
    """Number of groups in a row without a wrong rollout after which a prompt is not asked again; 0
    for no limit. Once no prompt is left, all are asked again."""

    skip_unsolved: Annotated[int, at_least(0, 10**6)] = 0
    """The same for groups without a correct rollout."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of the completions that each step trains on."""

    prompts_per_step: Annotated[int, at_least(1, 10**6)] = 32
    """Number of prompts whose completions a step trains on."""

    samples_per_prompt: Annotated[int, at_least(1, 10**5)] = 8
    """Number of completions per prompt. They form the group over which advantages are compared. 1
    requires an ``algorithm.advantage`` that compares no group, such as GAE."""

    max_tokens: Annotated[int, at_least(1, 10**8)] = 256
    """Maximum length of a completion, in tokens."""

    temperature: Annotated[float, at_least(MIN_TEMPERATURE, MAX_TEMPERATURE)] = 1.0
    """Sampling temperature. The log-probs of generator and trainer are both those of the
    distribution at this temperature."""

    final_temperature: Annotated[float, at_least(MIN_TEMPERATURE, MAX_TEMPERATURE, also=(0,))] = 0.0
    """Temperature of the last step's rollouts. Those between change linearly from ``temperature``,
    which evaluation samples at in any case. A rising one keeps the entropy of a policy that becomes
    certain. 0 keeps ``temperature``. Requires the deterministic pipeline."""

    top_p: Annotated[float, above(0, 1)] = 1.0
    """Threshold of nucleus sampling: the smallest set of the most likely tokens whose probabilities
    add up to this value is sampled from; 1 for all. If this, ``top_k`` or ``min_p`` cuts the
    vocabulary, each token is recorded with the set that it was sampled from, its sampling mask.
    Log-probs and entropies of every policy are then over this set. A mask takes 4 bytes for each
    token of the set, and at most an eighth of a byte for each token of the vocabulary."""

    top_k: Annotated[int, at_least(0)] = 0
    """Number of most likely tokens to sample from; 0 for all."""

    min_p: Annotated[float, SHARE] = 0.0
    """Probability, as a share of that of the most likely token, that a token must have to be
    sampled; 0 for all tokens."""

    max_staleness: Annotated[int, at_least(0, 10**4)] = 0
    """Maximum number of steps by which the weights that drew a token may be older than the weights
    at the start of the step that trains on it. 0 is lockstep: a batch is generated, then trained
    on. Above 0, generation, scoring, training and the weight push overlap."""

    pipeline: Literal["deterministic", "asynchronous"] = "deterministic"
    """Rule for which weights draw a token.

    - ``deterministic``: The config decides. Batch k comes from exactly the weights of step k -
      max_staleness, in the order of the prompts. The numbers are the same in every run and after
      every restart.
    - ``asynchronous``: Timing decides. Weights change while requests are in flight, and groups are
      trained on in the order in which they finish. Long groups may be passed over for as long as
      ``max_staleness`` allows.
    """

    stream_chunks: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 1
    """Number of chunks that a step's groups are split into. Each chunk is trained on as soon as its
    groups have finished; the gradient is the same. More than 1 requires the asynchronous
    pipeline."""

    max_resampled_groups: Annotated[int, at_least(0, 10**6)] = 0
    """Maximum number of groups per step that are set aside because all their rewards are equal, and
    replaced by the next prompts (dynamic sampling of DAPO, arXiv:2503.14476, section 3.2). The
    reward includes the penalty of ``overlong_buffer`` and the scores of reward models, which are
    equal for equal answers alone."""

    oversampling: Annotated[float, at_least(1, 100)] = 1.0
    """Number of prompts that are sampled for each group that a batch lacks. Above 1, a batch needs
    fewer rounds of requests, and groups that it does not need are dropped. Requires
    ``max_resampled_groups`` and the deterministic pipeline: the other one has no rounds."""

    reward_workers: Annotated[int, at_least(0, 10**4), PERFORMANCE] = 1
    """Number of processes that score completions. Processes that a reward starts end with its
    worker. 0 scores in the controller's process, where a reward that hangs or crashes ends the run
    and the processes that it starts are not ended."""

    max_lost: Annotated[float, SHARE, COSMETIC] = 0.1
    """Maximum share of groups that may be lost because their reward raised an error, hung or
    returned an invalid value. It is measured over the last 100 groups, or over one step's groups if
    they are more. A group that goes on by ``min_episodes`` counts by its share of lost episodes.
    Above it the run fails."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Prompts that are asked; by default those of the task, in its order."""

    min_episodes: Annotated[int, at_least(0, 10**5)] = 0
    """Number of episodes with which a group is trained on although others of it were lost: their
    environment failed. ``ledger.jsonl`` counts the episodes that are missing. 0 drops each group
    that lost one. Requires an environment as the task."""

    def sampling(self, stop_token_ids: Sequence[int]) -> Sampling:
        """Return the parameters with which rollouts are sampled."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=tuple(stop_token_ids),
        )


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Evaluation on held-out prompts, after training and during it."""

    every: Annotated[int, at_least(0)] = 0
    """Number of steps between evaluations during training; 0 for none. They run while training
    continues, and their results are written to ``evaluations.jsonl``."""

    at_start: bool = False
    """Whether to evaluate the initial weights before the first step too. The results are those of
    step 0."""

    prompts: Annotated[int, at_least(0, 10**7)] = 256
    """Number of held-out prompts; 0 disables evaluation. Fewer are used if the task holds out
    fewer. A task that holds out none is refused."""

    samples: Annotated[int, at_least(0, 10**5)] = 4
    """Number of completions per prompt at the rollouts' temperature, the k of pass@k. 0 for greedy
    decoding only."""


@dataclass(kw_only=True, slots=True)
class BestConfig:
    """Best checkpoints by a metric of the evaluations. ``python -m rl.export RUN --step best``
    exports the first of them.
    """

    metric: Annotated[str, COSMETIC] = ""
    """Name of the metric in ``evaluations.jsonl``, such as ``eval/exact_match``. Then each step
    that is evaluated during training is saved. Empty for no best checkpoint."""

    mode: Literal["max", "min"] = "max"
    """Whether higher or lower values are better."""

    keep: Annotated[int, at_least(1, 10**6), COSMETIC] = 1
    """Number of best checkpoints that stay, beside the newest ones of
    ``trainer.checkpoint.keep_latest_k``."""

    patience: Annotated[int, at_least(0, 10**6)] = 0
    """Number of evaluations in a row without a better value after which the run ends; 0 for no such
    end. The batches that were sampled by then are still trained on."""

    min_delta: Annotated[float, at_least(0, 1e6)] = 0.0
    """Change of the metric that ``patience`` takes as better; larger ones are too."""


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """Parts of each step that the run folder keeps, beside its metrics."""

    digests: Annotated[bool, PERFORMANCE] = True
    """Whether to write digests of each step's gradient and weights to ``digests.jsonl``, by
    parameter."""


@dataclass(kw_only=True, slots=True)
class RolloutRecordConfig(RecordConfig):
    """Parts of each step that the run folder keeps, beside its metrics."""

    rollouts: Literal["all", "sample", "none"] = "all"
    """Rollouts of each step that are written to ``rollouts/step-N.parquet``, with all tokens.
    ``python -m rl.replay`` requires ``all``. Unless it is ``none``, all rollouts of evaluations are
    written to ``evaluations/step-N.parquet``."""

    sample: Annotated[int, at_least(1)] = 8
    """Number of rollouts of a step that ``sample`` keeps."""

    max_gib: Annotated[float, above(0)] = 10.0
    """Disk space for rollouts of steps and evaluations, in GiB. Above it, the files of the oldest
    steps are deleted."""

    @property
    def max_bytes(self) -> float:
        """``max_gib`` in bytes."""
        return self.max_gib * 2**30

    def kept(self, step: int, count: int) -> list[int] | None:
        """Return the places of the rollouts that are written of the ``count`` of ``step``; None for
        all.

        A sample begins at another place each step, so that all tasks of a mixture appear.
        """
        if self.rollouts != "sample":
            return None
        first = step * self.sample
        return sorted((first + number) % count for number in range(min(self.sample, count)))
