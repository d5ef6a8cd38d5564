"""Reference, critic and roles in the steps of a run."""

from dataclasses import replace

import pytest
import torch

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut
from rl.algorithms.kl import AdaptiveKL
from rl.algorithms.losses import ClippedLoss
from rl.config import RoleConfig
from tests.trainers.fakes import Critic, Reference
from tests.trainers.loops import calls, updates


def with_reference(log):
    return {"reference": Reference(log)}


def in_loss(config):
    config.algorithm.loss = ClippedLoss.Config(kl_coef=0.1)


def in_reward(config):
    config.algorithm.reward_kl_coef = 0.1
    config.algorithm.advantage = LeaveOneOut.Config()


@pytest.mark.parametrize("edit", [in_loss, in_reward])
def test_a_penalty_compares_with_the_reference_in_reward_and_loss(run, edit):
    _, rows = run(steps=2, edit=edit, models=with_reference)
    for batch in run.trainer.batches:
        assert torch.equal(
            batch.columns["reference_logprobs"], torch.full(batch.tokens.shape, -2.0)
        )
    assert rows[0]["kl/reference"] == pytest.approx(torch.tensor(-1.0).exp().item())
    assert rows[0]["kl/coef"] == 0.1


def test_a_penalty_in_the_reward_lowers_the_advantage(run):
    def edit(config):
        in_reward(config)
        config.algorithm.reward_kl_estimator = "k1"
        config.rollout.samples_per_prompt = 2

    def uneven(log):
        class Uneven(Reference):
            async def forward(self, batch, *, temperature):
                starts = batch.lengths.cumsum(0) - batch.lengths
                logprobs = torch.full(batch.tokens.shape, -1.0)
                logprobs[starts[0] : starts[1]] = -3.0
                return {"logprobs": logprobs}

        return {"reference": Uneven(log)}

    run(steps=1, edit=edit, models=uneven)
    batch = run.trainer.batches[0]
    first, second = (
        part[-1].item() for part in batch.columns["advantages"].split(batch.lengths.tolist())[:2]
    )
    # Rewards 0 and 1; two tokens of the first are 2 nats likelier than the reference has them: 0 -
    # 0.1 * 4.
    assert (first, second) == pytest.approx((-1.4, 1.4))


def test_an_adaptive_penalty_follows_its_target_across_a_restart(run):
    def edit(config):
        in_loss(config)
        config.algorithm.adaptive_kl = AdaptiveKL.Config(target=0.01)

    _, whole = run(steps=5, edit=edit, models=with_reference)
    coefs = [row["kl/coef"] for row in whole]
    assert coefs == pytest.approx([0.1 * 1.02**step for step in range(5)])
    run(steps=3, edit=edit, models=with_reference, save_every=1, folder="again")
    _, rows = run(
        steps=5, edit=edit, models=with_reference, saved=run.saved, save_every=1, folder="again"
    )
    assert [row["kl/coef"] for row in rows] == coefs


def refreshed(config):
    in_loss(config)
    config.reference.refresh_every = 2


def test_a_reference_is_refreshed_at_its_interval_and_restored(run):
    log, whole = run(steps=6, edit=refreshed, models=with_reference, save_every=1)
    assert calls(log, "reference") == [
        "reference begins",
        "reference 2",
        "reference 4",
        "reference 6",
    ]
    for stop in (1, 2, 3):
        folder = f"stopped{stop}"
        run(steps=stop, edit=refreshed, models=with_reference, save_every=1, folder=folder)
        log, rows = run(
            steps=6,
            edit=refreshed,
            models=with_reference,
            saved=run.saved,
            save_every=1,
            folder=folder,
        )
        assert [row["kl/reference"] for row in rows] == [row["kl/reference"] for row in whole]
    assert kept_references(run.record) == [2, 4, 6]


def kept_references(record) -> list[int]:
    return sorted(
        int(folder.name.removeprefix("policy-"))
        for folder in (record.folder / "reference").iterdir()
    )


def test_a_reference_that_a_checkpoint_needs_is_kept(run):
    """The only checkpoint is the one that leaving has saved, at a step that no interval gives."""

    def leave(trainer, *_):
        async def train():
            if trainer.version == 2:
                run.loop.leave()

        trainer.during["forward_backward"] = train

    def die_once(trainer, *_):
        async def train():
            if trainer.version == 9 and trainer.starts == 1:
                raise trainer.lose("forward_backward")

        trainer.during["forward_backward"] = train

    _, whole = run(steps=12, edit=refreshed, models=with_reference)
    run(leave, steps=12, edit=refreshed, models=with_reference, folder="left")
    assert [*run.saved] == [3]
    _, rows = run(
        die_once, steps=12, edit=refreshed, models=with_reference, saved=run.saved, folder="left"
    )
    assert run.trainer.starts == 2
    assert [row["kl/reference"] for row in rows] == [row["kl/reference"] for row in whole]


def test_a_reference_that_no_checkpoint_needs_is_deleted(run):
    def keep_one(trainer, *_):
        trainer.keep = 1
        partial = run.record.folder / "reference" / "policy-3.partial"  # as a kill leaves it
        partial.mkdir(parents=True)

    run(keep_one, steps=7, edit=refreshed, models=with_reference, save_every=1)
    assert kept_references(run.record) == [4, 6]  # step 5 was the newest checkpoint when 6 was kept


def test_a_resume_with_another_interval_keeps_the_reference(run):
    def every_three(config):
        refreshed(config)
        config.reference.refresh_every = 3

    _, twos = run(steps=5, edit=refreshed, models=with_reference, save_every=1)
    _, rows = run(
        steps=8, edit=every_three, models=with_reference, saved={5: run.saved[5]}, save_every=1
    )
    assert [row["kl/reference"] for row in rows[:5]] == [row["kl/reference"] for row in twos]
    assert rows[5]["kl/reference"] == rows[4]["kl/reference"] != rows[6]["kl/reference"]
    assert [int(call.split()[1]) for call in calls(run.log, "reference ")[-2:]] == [4, 6]


def judged(config):
    config.algorithm.advantage = GAE.Config(lam=1.0, whiten=False)
    updates(2, 2, prompts=4)(config)


def test_a_critic_gives_values_and_is_trained_with_the_policy(run):
    critics: list[Critic] = []

    def models(log):
        critics.append(Critic(log, {}))
        return {"critic": critics[-1]}

    _, rows = run(steps=2, edit=judged, models=models)
    (critic,) = critics
    assert critic.steps == 8
    for step, batch in enumerate(critic.batches):
        spoken = batch.loss_weights > 0
        old = float(4 * (step // 4))
        assert torch.equal(batch.columns["old_values"], torch.full(batch.tokens.shape, old))
        assert torch.equal(
            batch.columns["returns"][spoken], batch.columns["advantages"][spoken] + old
        )
        assert {*batch.columns["returns"][spoken].tolist()} <= {
            0.0,
            1.0,
        }  # the rewards, on every token
    assert [batch.tokens.tolist() for batch in critic.batches] == [
        b.tokens.tolist() for b in run.trainer.batches
    ]
    assert (rows[-1]["critic/value/mean"], rows[-1]["critic/grad_norm"]) == (
        6.5,
        0.5,
    )  # updates 5 to 8


def test_a_critics_checkpoint_is_written_before_the_policys(run):
    saved: dict[int, int] = {}
    log, _ = run(
        steps=3, edit=judged, models=lambda log: {"critic": Critic(log, saved)}, save_every=1
    )
    assert calls(log, "critic saves", "save") == [
        f"{who} {step}" for step in (1, 2, 3) for who in ("critic saves", "save")
    ]
    del run.saved[3]  # killed between the two
    again = Critic([], saved)
    run(steps=4, edit=judged, models=lambda log: {"critic": again}, saved=run.saved, save_every=1)
    assert again.steps == 16
    assert {*again.batches[0].columns["old_values"].tolist()} == {8.0}


def test_custom_models_fill_columns_and_score_completions(run, tmp_path):
    class Teacher(Reference):
        async def forward(self, batch, *, temperature):
            return {"logprobs": batch.tokens.float()}

    class Judge(Reference):
        """Reward model whose value of a token is the number of tokens before it."""

        async def forward(self, batch, *, temperature):
            places = [torch.arange(length) for length in batch.lengths.tolist()]
            return {"values": torch.cat(places).float()}

    def edit(config):
        (tmp_path / ".metadata").touch()
        role = {"model": config.model, "checkpoint": str(tmp_path)}
        config.roles["teacher"] = RoleConfig(**role, column="teacher_logprobs")
        config.roles["judge"] = RoleConfig(**role, head="values", reward_weight=0.5)
        config.algorithm.advantage = GroupAdvantage.Config(normalize_std=False)

    _, rows = run(
        steps=1, edit=edit, models=lambda log: {"teacher": Teacher(log), "judge": Judge(log)}
    )
    (batch,) = run.trainer.batches
    assert torch.equal(batch.columns["teacher_logprobs"], batch.tokens.float())
    assert rows[0]["judge/score"] == pytest.approx(batch.lengths.float().mean().item())
    assert "judge" not in "".join(batch.columns)


def test_a_reward_models_score_is_added_to_the_reward(run, tmp_path):
    class Judge(Reference):
        async def forward(self, batch, *, temperature):
            ends = batch.lengths.cumsum(0) - 1
            values = torch.zeros(len(batch.tokens))
            values[ends] = torch.tensor([4.0, 0.0, 0.0, 0.0])
            return {"values": values}

    def edit(config):
        (tmp_path / ".metadata").touch()
        config.roles["judge"] = RoleConfig(
            model=config.model, checkpoint=str(tmp_path), head="values", reward_weight=0.5
        )
        config.algorithm.advantage = GroupAdvantage.Config(normalize_std=False)

    run(steps=1, edit=edit, models=lambda log: {"judge": Judge(log)})
    (batch,) = run.trainer.batches
    first, second, *_ = (
        part[-1].item() for part in batch.columns["advantages"].split(batch.lengths.tolist())
    )
    assert (first, second) == (0.5, -0.5)  # rewards 0 and 1 of the task, 2 and 0 of the judge


@pytest.mark.parametrize(("judged", "flat"), [(True, 0.0), (False, 1.0)])
def test_groups_that_a_reward_model_tells_apart_are_trained(run, tmp_path, judged, flat):
    """The rewards of the task are all equal, and the answers of a group differ."""

    class Judge(Reference):
        async def forward(self, batch, *, temperature):
            return {"values": torch.arange(len(batch.tokens)).float()}

    def prepare(trainer, generator):
        run.rewards.flat = range(100)
        generate = generator.generate

        async def different(requests, **options):
            said = await generate(requests, **options)
            return [replace(each, tokens=[6, 7 + n]) for n, each in enumerate(said)]

        generator.generate = different

    def edit(config):
        (tmp_path / ".metadata").touch()
        config.rollout.max_resampled_groups = 3
        config.watchdog.zero_std = "fail"
        config.watchdog.zero_std_steps = 2
        if judged:
            config.roles["judge"] = RoleConfig(
                model=config.model, checkpoint=str(tmp_path), head="values", reward_weight=0.5
            )

    steps = 3 if judged else 1
    _, rows = run(prepare, steps=steps, edit=edit, models=lambda log: {"judge": Judge(log)})
    assert [row["reward/zero_std_groups"] for row in rows] == [flat] * steps
    assert rows[-1]["ledger/dropped"] == (0 if judged else 3)


def test_ppo_trains_on_one_completion_of_each_prompt(run):
    def alone(config):
        config.rollout.samples_per_prompt = 1
        config.algorithm.advantage = GAE.Config()

    log, rows = run(steps=2, edit=alone, models=lambda log: {"critic": Critic(log, {})})
    assert [len(batch) for batch in run.trainer.batches] == [2, 2]
    assert calls(log, "step") == ["step"] * 2
    assert [row["reward/zero_std_groups"] for row in rows] == [0.0, 0.0]
