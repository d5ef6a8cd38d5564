"""Batches that the groups of a step become, with the loss's columns and their updates."""

import json
import math
from dataclasses import dataclass

import pytest
import torch

from rl.algorithms.advantages import GAE, GDPO, ReinforcePlusPlus
from rl.algorithms.batch import counts_of
from rl.algorithms.corrections import MaskedIS, StalenessDecay, TruncatedIS
from rl.algorithms.kl import AdaptiveKL
from rl.algorithms.losses import ClippedLoss, DecoupledLoss, grpo
from rl.cli.arguments import find_config
from rl.config import PolicyGradientConfig, RolloutConfig
from rl.errors import ConfigError, RunError
from rl.metrics import Value
from rl.trainers.algorithm import Algorithm
from tests.kit.fakes import Critic
from tests.trainers.loops import EACH_PIPELINE, calls, updates

FOUR_UPDATES = updates(1, 1, prompts=4)
CHUNKS = {"rollout.stream_chunks": 2}


def test_two_epochs_over_mini_batches_of_a_quarter_are_eight_optimizer_steps(run):
    log, rows = run(steps=2, fields=updates(2, 16))
    assert calls(log, "step") == ["step"] * 16
    assert [row["policy_version"] for row in rows] == [8, 16]
    assert calls(log, "publish") == ["publish 0", "publish 8", "publish 16"]
    assert [len(batch) for batch in run.trainer.batches] == [32] * 16


def test_each_epoch_visits_every_rollout_once_in_its_own_order(run):
    def rows(folder):
        run(steps=2, fields=updates(2, 8, prompts=16), folder=folder)
        return [tuple(batch.rows) for batch in run.trainer.batches]

    first = rows("one")
    halves = zip(first[::2], first[1::2], strict=True)
    assert [sorted(one + other) for one, other in halves] == [[*range(len(first[0]) * 2)]] * 4
    assert len({*first}) == len(first) == 8
    assert rows("two") == first


def test_metrics_of_a_step_count_all_of_its_updates(run):
    def losses(trainer, _):
        trainer.losses = dict(enumerate((1.0, 2.0, 3.0, 6.0), start=1))

    _, rows = run(losses, steps=2, fields=FOUR_UPDATES)
    assert [row["loss/mean"] for row in rows] == [3.0, 0.0]
    assert [row["ratio/max"] for row in rows] == [5.0, 9.0]
    assert [row["trainer/updates"] for row in rows] == [4.0, 4.0]


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_the_watchdog_looks_at_every_update_of_a_step(run, bad):
    def nan(trainer, _):
        trainer.losses = {bad: math.nan}

    with pytest.raises(RunError, match=f"step 1: non_finite: update {bad} of 4: loss/mean is nan"):
        run(nan, steps=2, fields=FOUR_UPDATES | {"watchdog.non_finite": "fail"})


def test_the_loss_gets_the_staleness_of_each_token_at_its_update(run):
    run(steps=2, staleness=1, fields=updates(2, 1, prompts=2))
    stale = [
        batch.columns["staleness"][batch.loss_weights > 0].unique().tolist()
        for batch in run.trainer.batches
    ]
    assert stale == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]]


@pytest.mark.parametrize("staleness", [0, 2])
@EACH_PIPELINE
def test_several_updates_a_step_keep_the_bound_in_steps(run, staleness, pipeline):
    fields = updates(1, 1, prompts=3)
    _, rows = run(steps=6, staleness=staleness, pipeline=pipeline, fields=fields)
    assert max(row["rollout/staleness_max"] for row in rows) <= 3 * staleness
    assert rows[-1]["policy_version"] == 18


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ({"algorithm.old_logprobs": "recomputed"}, {"proximal_logprobs"}),
        (
            {"algorithm.loss": DecoupledLoss.Config()},
            {"proximal_logprobs", "behaviour_logprobs"},
        ),
    ],
    ids=["recomputed", "decoupled"],
)
def test_the_loss_has_the_trainers_logprobs_before_the_step(run, fields, columns):
    fields = fields | updates(2, 2, prompts=4) | {"weights.canary_tolerance": 0.0}
    log, _ = run(steps=1, fields=fields)
    assert calls(log, "forward", "train", "step")[:3] == ["forward 0", "train 0 on 0", "step"]
    assert log.count("forward 0") == 1
    assert all(batch.columns.keys() >= columns for batch in run.trainer.batches)


@pytest.mark.parametrize(("staleness", "passes"), [(0, []), (1, ["forward 1", "forward 2"])])
def test_equal_bits_save_the_pass_for_log_probs_of_current_weights(run, staleness, passes):
    fields = {
        "algorithm.old_logprobs": "recomputed",
        "parity": "bitwise",
        "weights.canary_tolerance": 0.0,
    }
    log, _ = run(steps=3, staleness=staleness, fields=fields)
    assert calls(log, "forward") == passes
    if not passes:
        columns = [batch.columns for batch in run.trainer.batches]
        sampled = [each["behaviour_logprobs"] for each in columns]
        assert all(map(torch.equal, sampled, [each["proximal_logprobs"] for each in columns]))


@pytest.mark.parametrize("correction", [TruncatedIS.Config(), MaskedIS.Config()])
def test_the_decoupled_loss_refuses_a_second_behaviour_weight(correction):
    fresh = (StalenessDecay.Config(), MaskedIS.Config(weigh=False))
    config = PolicyGradientConfig(loss=DecoupledLoss.Config(), corrections=fresh)
    config.check(RolloutConfig())
    config.corrections = (StalenessDecay.Config(), correction)
    with pytest.raises(ConfigError, match=r"algorithm\.corrections\.1 .*behaviour_cap"):
        config.check(RolloutConfig())


def test_corrections_weigh_tokens_by_the_ratio_of_trainer_and_generator(run):
    corrections = (TruncatedIS.Config(cap=2.0), StalenessDecay.Config(decay=0.5))
    _, rows = run(
        lambda trainer, _: setattr(trainer, "wrong_since", 0),
        steps=3,
        staleness=1,
        fields={"algorithm.corrections": corrections, "weights.canary_tolerance": 0.0},
    )
    ratio = float(torch.tensor(-1.0).exp())
    for batch, decay in zip(run.trainer.batches, (1.0, 0.5, 0.5), strict=True):
        found = batch.columns["correction"]
        expected = ratio * decay * (batch.loss_weights > 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    assert rows[-1]["correction/mean"] == pytest.approx(ratio / 2, rel=1e-4)


def test_a_fixed_length_divides_by_the_number_of_completions(run):
    loss = {"algorithm.loss": ClippedLoss.Config(reduction="fixed_length")}
    run(steps=1, fields=loss | updates(1, 2, prompts=4))
    assert run.trainer.options == {"denominator": None}
    assert [float(batch.denominators.sum()) for batch in run.trainer.batches] == [4.0, 4.0]


class Plain(Algorithm):
    """An algorithm of the user's: rewards are advantages."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        reduction: str = "token_mean"

    def loss(self, role):
        return ClippedLoss.Config(reduction=self.config.reduction)

    def score(self, batch, rollouts, rewards):
        batch.columns["advantages"] = batch.scatter(rewards.repeat_interleave(counts_of(rollouts)))
        return {}


@pytest.mark.parametrize(
    ("reduction", "weight", "divisor"),
    [("token_mean", 1.0, None), ("sequence_mean", 0.5, None), ("fixed_length", 1 / 3, 1.0)],
)
def test_the_reduction_of_the_loss_acts_in_an_algorithm_of_the_users(
    run, reduction, weight, divisor
):
    """Every completion has two tokens of three."""
    algorithm = Plain.Config(reduction=reduction)
    run(steps=1, fields={"rollout.max_tokens": 3, "algorithm": algorithm})
    (batch,) = run.trainer.batches
    assert batch.loss_weights[batch.loss_mask].tolist() == pytest.approx([weight] * 8)
    divisors = None if batch.denominators is None else batch.denominators.tolist()
    assert divisors == (divisor and [divisor] * 4)


class Measured(TruncatedIS):
    """Correction with metrics: one in its first call only, and others with reductions."""

    @dataclass(kw_only=True, slots=True)
    class Config(TruncatedIS.Config):
        pass

    calls = 0

    def __call__(self, proximal, *others):
        self.calls += 1
        tokens = float(len(proximal))
        metrics = {"tokens/max": Value(tokens, "max"), "tokens/sum": Value(tokens, "sum")}
        first = {"first": 0.25} if self.calls == 1 else {}
        return torch.ones_like(proximal), metrics | first


def test_advantages_and_corrections_are_measured_over_the_chunks_of_a_step_that_have_them(run):
    fields = CHUNKS | {
        "rollout.prompts_per_step": 4,
        "algorithm.corrections": (Measured.Config(),),
    }
    _, (row,) = run(steps=1, pipeline="asynchronous", fields=fields)
    parts = [batch.columns["advantages"][batch.loss_mask].double() for batch in run.trainer.batches]
    assert len(parts) == 2
    advantages = torch.cat(parts)
    assert row["advantage/mean"] == pytest.approx(float(advantages.mean()), abs=1e-9)
    assert row["advantage/std"] == pytest.approx(float(advantages.std(correction=0)))
    assert row["advantage/max"] == float(advantages.max()) > 0
    assert row["tokens/sum"] == len(advantages)
    assert row["tokens/max"] == max(map(len, parts))
    assert row["first"] == 0.25


@pytest.mark.parametrize(
    "advantage", [ReinforcePlusPlus.Config(), GAE.Config()], ids=["reinforce", "ppo"]
)
def test_an_algorithm_without_groups_trains_on_one_completion_of_each_prompt(run, advantage):
    fields = {
        "rollout.samples_per_prompt": 1,
        "rollout.prompts_per_step": 4,
        "algorithm.advantage": advantage,
    }
    critic = {"critic": Critic([], {})} if isinstance(advantage, GAE.Config) else {}
    log, rows = run(steps=2, fields=fields, models=lambda log: critic)
    assert [len(batch) for batch in run.trainer.batches] == [4, 4]
    assert all("advantages" in batch.columns for batch in run.trainer.batches)
    assert calls(log, "step") == ["step"] * 2
    assert [row["reward/zero_std_groups"] for row in rows] == [0.0, 0.0]


def test_long_completions_lose_reward(run):
    """Every completion has two tokens of three, so the penalty is -1/2 of a buffer of two."""

    def advantages(buffer):
        fields = {
            "rollout.max_tokens": 3,
            "algorithm.overlong_buffer": buffer,
            "algorithm.advantage": GAE.Config(whiten=False, lam=1.0),
        }
        critic = {"critic": Critic([], {})}
        run(steps=1, fields=fields, models=lambda log: critic, folder=f"buffer {buffer}")
        (batch,) = run.trainer.batches
        return batch.columns["advantages"][batch.loss_weights > 0]

    assert torch.allclose(advantages(0) - advantages(2), torch.tensor(0.5))


def test_truncated_rollouts_are_not_in_the_loss_if_the_config_says_so(run):
    """Their rewards still count in the advantages. Without a whole rollout, gradients are 0."""

    having = {"rewards.whole": {(0, 1), (1, 0)}}

    masked = {"algorithm.mask_truncated": True}
    _, rows = run(having=having, steps=2, fields=masked, folder="masked")
    first, second = run.trainer.batches
    run(having=having, steps=2, folder="plain")
    plain = run.trainer.batches[0]
    assert torch.equal(first.columns["advantages"], plain.columns["advantages"])
    kept = torch.tensor([False, True, True, False])[first.owners]
    assert torch.equal(first.loss_weights, plain.loss_weights * kept)
    assert not second.loss_mask.any() and plain.loss_mask.any()
    assert [row["completion/cut_off"] for row in rows] == [0.5, 1.0]
    assert run.trainer.options.get("denominator") is None
    run(having=having, steps=2, fields=masked, folder="again")
    assert run.trainer.options["denominator"] == 1.0


def test_the_rewards_of_gdpo_are_metrics_of_the_scores(run):
    """All completions have the metric ``correct`` 0, so that the reward alone counts."""
    rewards = {"reward": 1.0, "correct": 2.0}
    fields = {"algorithm.advantage": GDPO.Config(rewards=rewards)}
    run(steps=1, fields=fields)
    (batch,) = run.trainer.batches
    found = batch.columns["advantages"][batch.loss_mask]
    torch.testing.assert_close(found, torch.tensor([-1.0, -1, 1, 1] * 2))
    fields = {"algorithm.advantage": GDPO.Config(rewards={"corect": 1.0})}
    with pytest.raises(RunError, match="reads the metric 'corect' of the task's scores; they have"):
        run(steps=1, fields=fields, folder="wrong")


ADAPTIVE = {"adaptive_kl": AdaptiveKL.Config(target=0.5, rate=0.5, clip=1.0)}


@pytest.mark.parametrize(
    ("before", "after", "coefficient"),
    [
        ({"reward_kl_coef": 0.1}, {"reward_kl_coef": 0.3}, 0.3),
        ({"reward_kl_coef": 0.1, **ADAPTIVE}, {"reward_kl_coef": 0.1, **ADAPTIVE}, 0.15),
        ({"reward_kl_coef": 0.1, **ADAPTIVE}, {"reward_kl_coef": 0.3, **ADAPTIVE}, 0.3),
        ({"reward_kl_coef": 0.1, **ADAPTIVE}, {"reward_kl_coef": 0.1}, 0.1),
        ({"reward_kl_coef": 0.1}, {"reward_kl_coef": 0.1, **ADAPTIVE}, 0.1),
        ({"reward_kl_coef": 0.1}, {"loss": grpo(kl_coef=0.3)}, 0.3),
        ({"loss": grpo(kl_coef=0.1), **ADAPTIVE}, {"loss": grpo(kl_coef=0.1), **ADAPTIVE}, 0.15),
        ({"reward_kl_coef": 0.1}, {}, 0.0),
        ({}, {"loss": grpo(kl_coef=0.3)}, 0.3),
    ],
)
def test_a_resumed_run_has_the_kl_coefficient_of_its_own_config(before, after, coefficient):
    config = find_config("quickstart")()
    saved = PolicyGradientConfig(**before).build(run=config)
    saved.end_step({"kl/reference": 1.0})
    resumed = PolicyGradientConfig(**after).build(run=config)
    resumed.restore(json.loads(json.dumps(saved.to_dict())))
    found = resumed.to_dict()["kl_coef"]
    assert found == pytest.approx(coefficient)
    assert resumed.loss("trainer").kl_coef in (0.0, found)
