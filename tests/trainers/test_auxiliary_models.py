"""Reference, critic and roles in the steps of a run."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut
from rl.algorithms.kl import AdaptiveKL
from rl.algorithms.losses import ClippedLoss, DistillationLoss
from rl.cli.arguments import find_config
from rl.config import RoleConfig
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import CopyDigits
from rl.tasks.mixture import Mixture
from rl.validation.rl_runs import _validate_roles
from tests.kit.fakes import Critic, Reference
from tests.trainers.loops import calls, left, lost_once, updates

IN_LOSS = {"algorithm.loss": ClippedLoss.Config(kl_coef=0.1)}
IN_REWARD = {"algorithm.reward_kl_coef": 0.1, "algorithm.advantage": LeaveOneOut.Config()}
REFRESHED = IN_LOSS | {"reference.refresh_every": 2}
JUDGED = {"algorithm.advantage": GAE.Config(lam=1.0, whiten=False)} | updates(2, 2, prompts=4)


def with_reference(log):
    return {"reference": Reference(log)}


def first_advantages(run, count: int) -> tuple[float, ...]:
    """Return the advantages of the first rollouts of the first batch."""
    batch = run.trainer.batches[0]
    parts = batch.columns["advantages"].split(batch.lengths.tolist())
    return tuple(part[-1].item() for part in parts[:count])


@pytest.mark.parametrize("fields", [IN_LOSS, IN_REWARD], ids=["loss", "reward"])
def test_a_penalty_compares_with_the_reference_in_reward_and_loss(run, fields):
    _, rows = run(steps=2, fields=fields, models=with_reference)
    for batch in run.trainer.batches:
        found = batch.columns["reference_logprobs"]
        assert torch.equal(found, torch.full(batch.tokens.shape, -2.0))
    assert rows[0]["kl/reference"] == pytest.approx(torch.tensor(-1.0).exp().item())
    assert rows[0]["kl/coef"] == 0.1


def test_a_penalty_in_the_reward_lowers_the_advantage(run):
    class Uneven(Reference):
        async def forward(self, batch, *, temperature, source):
            starts = batch.lengths.cumsum(0) - batch.lengths
            logprobs = torch.full(batch.tokens.shape, -1.0)
            logprobs[starts[0] : starts[1]] = -3.0
            return {"logprobs": logprobs}

    fields = IN_REWARD | {"algorithm.reward_kl_estimator": "k1"}
    run(steps=1, fields=fields, models=lambda log: {"reference": Uneven(log)})
    # Rewards 0 and 1; two tokens of the first are 2 nats likelier than the reference has them: 0 -
    # 0.1 * 4.
    assert first_advantages(run, 2) == pytest.approx((-1.4, 1.4))


def test_an_adaptive_penalty_follows_its_target_across_a_restart(run):
    fields = IN_LOSS | {"algorithm.adaptive_kl": AdaptiveKL.Config(target=0.01)}
    options = {"fields": fields, "models": with_reference, "save_every": 1}
    _, whole = run(steps=5, **options)
    coefs = [row["kl/coef"] for row in whole]
    assert coefs == pytest.approx([0.1 * 1.02**step for step in range(5)])
    run(steps=3, **options, folder="again")
    _, rows = run(steps=5, **options, saved=run.saved, folder="again")
    assert [row["kl/coef"] for row in rows] == coefs


def kept_references(record) -> list[int]:
    folders = (record.folder / "reference").iterdir()
    return sorted(int(folder.name.removeprefix("policy-")) for folder in folders)


def distances(rows) -> list[float]:
    return [row["kl/reference"] for row in rows]


def test_a_reference_is_refreshed_at_its_interval_and_restored(run):
    options = {"fields": REFRESHED, "models": with_reference, "save_every": 1}
    log, whole = run(steps=6, **options)
    wanted = ["reference begins", "reference 2", "reference 4", "reference 6"]
    assert calls(log, "reference") == wanted
    for stop in (1, 2, 3):
        options["folder"] = f"stopped{stop}"
        run(steps=stop, **options)
        if stop == 3:  # the name in older checkpoints
            run.saved[stop]["companions"] = run.saved[stop].pop("auxiliary")
        _, rows = run(steps=6, **options, saved=run.saved)
        assert distances(rows) == distances(whole)
    assert kept_references(run.record) == [2, 4, 6]


def test_a_reference_that_a_checkpoint_needs_is_kept(run):
    """The only checkpoint is the one that leaving has saved, at a step that no interval gives."""
    options = {"steps": 12, "fields": REFRESHED, "models": with_reference}
    _, whole = run(**options)
    run(left(run), **options, folder="left")
    assert [*run.saved] == [3]
    _, rows = run(lost_once(9), **options, saved=run.saved, folder="left")
    assert run.trainer.starts == 2
    assert distances(rows) == distances(whole)


def test_a_reference_that_no_checkpoint_needs_is_deleted(run):
    def keep_one(trainer, *_):
        trainer.keep = 1
        partial = run.record.folder / "reference" / "policy-3.partial"  # as a kill leaves it
        partial.mkdir(parents=True)

    run(keep_one, steps=7, fields=REFRESHED, models=with_reference, save_every=1)
    assert kept_references(run.record) == [4, 6]  # step 5 was the newest checkpoint when 6 was kept


def test_a_resume_with_another_interval_keeps_the_reference(run):
    options = {"models": with_reference, "save_every": 1}
    _, twos = run(steps=5, **options, fields=REFRESHED)
    threes = REFRESHED | {"reference.refresh_every": 3}
    _, rows = run(steps=8, **options, fields=threes, saved={5: run.saved[5]})
    assert distances(rows[:5]) == distances(twos)
    assert rows[5]["kl/reference"] == rows[4]["kl/reference"] != rows[6]["kl/reference"]
    assert [int(call.split()[1]) for call in calls(run.log, "reference ")[-2:]] == [4, 6]


def test_a_critic_gives_values_and_is_trained_with_the_policy(run):
    critic = Critic([], {})
    _, rows = run(steps=2, fields=JUDGED, models=lambda log: {"critic": critic})
    assert critic.steps == 8
    for step, batch in enumerate(critic.batches):
        spoken = batch.loss_weights > 0
        old = float(4 * (step // 4))
        columns = batch.columns
        assert torch.equal(columns["old_values"], torch.full(batch.tokens.shape, old))
        assert torch.equal(columns["returns"][spoken], columns["advantages"][spoken] + old)
        assert {*columns["returns"][spoken].tolist()} <= {0.0, 1.0}  # the rewards, on every token
    tokens = [batch.tokens.tolist() for batch in run.trainer.batches]
    assert [batch.tokens.tolist() for batch in critic.batches] == tokens
    measured = (rows[-1]["critic/value/mean"], rows[-1]["critic/grad_norm"])
    assert measured == (6.5, 0.5)  # updates 5 to 8


def test_a_critics_checkpoint_is_written_before_the_policys(run):
    saved: dict[int, int] = {}
    options = {"fields": JUDGED, "save_every": 1}
    log, _ = run(steps=3, **options, models=lambda log: {"critic": Critic(log, saved)})
    assert calls(log, "critic saves", "save") == [
        f"{model} {step}" for step in (1, 2, 3) for model in ("critic saves", "save")
    ]
    del run.saved[3]  # killed between the two
    again = Critic([], saved)
    run(steps=4, **options, models=lambda log: {"critic": again}, saved=run.saved)
    assert again.steps == 16
    assert {*again.batches[0].columns["old_values"].tolist()} == {8.0}


@pytest.fixture
def role(tmp_path):
    """Function that returns the config of a role."""
    (tmp_path / ".metadata").touch()
    model = find_config("quickstart")().model

    def role(**fields):
        return RoleConfig(model=model, checkpoint=str(tmp_path), **fields)

    return role


class Judge(Reference):
    """Reward model whose value of a token is the number of tokens before it in its batch. It reads
    one more token after each sequence.
    """

    async def forward(self, batch, *, temperature, source):
        return {"values": torch.arange(len(batch.tokens)).float()}


UNSCALED = {"algorithm.advantage": GroupAdvantage.Config(normalize_std=False)}


def test_custom_models_fill_columns_and_score_completions(run, role):
    class Teacher(Reference):
        async def forward(self, batch, *, temperature, source):
            return {"logprobs": batch.tokens.float()}

    roles = {
        "roles.teacher": role(column="teacher_logprobs"),
        "roles.judge": role(head="values", reward_weight=0.5),
    }
    models = {"teacher": Teacher([]), "judge": Judge([])}
    _, rows = run(steps=1, fields=UNSCALED | roles, models=lambda log: models)
    (batch,) = run.trainer.batches
    scores = (batch.lengths + 1).cumsum(0).float() - 1
    assert torch.equal(batch.columns["teacher_logprobs"], batch.tokens.float())
    assert rows[0]["judge/score"] == pytest.approx(scores.mean().item())
    assert "judge" not in "".join(batch.columns)
    gap = 1 + 0.5 * float(scores[1] - scores[0])  # rewards 0 and 1 of the task, and the judge's
    assert first_advantages(run, 2) == pytest.approx((-gap / 2, gap / 2))


@pytest.mark.parametrize("by_task", [False, True])
def test_a_column_of_several_teachers_is_their_weighted_mean(run, role, by_task):
    """Prompts are of the tasks copy and sort in turns."""

    class Teacher(Reference):
        def __init__(self, factor):
            super().__init__([])
            self.factor = factor
            self.rows = []

        async def forward(self, batch, *, temperature, source):
            self.rows.append(len(batch))
            return {"logprobs": self.factor * batch.tokens.float()}

    task = {name: CopyDigits.Config() for name in ("copy", "sort")}
    names = {"copy": ("copy",), "sort": ("sort",)} if by_task else {"copy": (), "sort": ()}
    shares = {"copy": 1.0, "sort": 3.0}
    roles = {
        f"roles.{name}": role(column="teacher_logprobs", tasks=names[name], share=shares[name])
        for name in names
    }
    teachers = {"copy": Teacher(1.0), "sort": Teacher(5.0)}
    mixture = Mixture.Config(tasks=task, max_prompt_tokens=16)
    fields = {"task": mixture, "algorithm.loss": DistillationLoss.Config()}
    run(steps=1, fields=fields | roles, models=lambda log: teachers)
    (batch,) = run.trainer.batches
    own = [1.0, 1.0, 5.0, 5.0] if by_task else [(1.0 + 3 * 5.0) / 4] * 4
    found = batch.columns["teacher_logprobs"]
    assert torch.equal(found, torch.tensor(own)[batch.owners] * batch.tokens)
    assert [each.rows for each in teachers.values()] == [[2 if by_task else 4]] * 2


def test_a_snapshot_of_the_policy_is_a_teacher(run):
    fields = {
        "algorithm.loss": DistillationLoss.Config(teacher="reference"),
        "reference.refresh_every": 2,
    }
    log, _ = run(steps=4, fields=fields, models=with_reference)
    assert calls(log, "reference") == ["reference begins", "reference 2", "reference 4"]
    found = [batch.columns["reference_logprobs"][-1].item() for batch in run.trainer.batches]
    assert found == [-2.0, -2.0, -4.0, -4.0]
    columns = [each for batch in run.trainer.batches for each in batch.columns]
    assert "teacher_logprobs" not in columns


MODEL = "roles.teacher.model.hf_path"
TEACHERS = {
    "another tokenizer": (
        {},
        f"{MODEL} is '.*other'; it must be a model with the policy's token.*",
    ),
    "no such task": ({"tasks": ("copy",)}, "roles.teacher.tasks is .*; it must be empty without a"),
    "no column": ({"column": "", "share": 2.0}, "roles.teacher.share is 2.0; it must be 1 without"),
}


@pytest.mark.parametrize("case", TEACHERS)
def test_a_teacher_that_cannot_teach_is_refused_with_the_reason(case, chat_model, tmp_path):
    fields, message = TEACHERS[case]
    other = shutil.copytree(chat_model, tmp_path / "other")
    if case == "another tokenizer":
        path = other / "tokenizer.json"
        content = json.loads(path.read_text())
        vocab = content["model"]["vocab"]
        first, second = sorted(vocab, key=vocab.get)[5:7]
        vocab[first], vocab[second] = vocab[second], vocab[first]
        path.write_text(json.dumps(content))
        message += re.escape(f"token 5 is {first!r} here and {second!r} there")
    config = find_config("gsm8k_jsonl")()
    config.model = ModelConfig(hf_path=str(chat_model))
    own = {"model": ModelConfig(hf_path=str(other)), "column": "teacher_logprobs"}
    config.roles["teacher"] = RoleConfig(**own | fields)
    config.task.max_prompt_tokens = config.rollout.max_tokens = 32
    with pytest.raises(ConfigError, match=message):
        _validate_roles(config)


def test_each_task_needs_a_teacher(role):
    config = find_config("quickstart")()
    tasks = {name: CopyDigits.Config() for name in ("copy", "sort")}
    config.task = Mixture.Config(tasks=tasks, max_prompt_tokens=16)
    config.roles["teacher"] = role(column="teacher_logprobs", tasks=("copy",))
    with pytest.raises(ConfigError, match="gives the column teacher_logprobs for the task sort"):
        _validate_roles(config)


@pytest.mark.parametrize(("judged", "flat"), [(True, 0.0), (False, 1.0)])
def test_groups_that_a_reward_model_tells_apart_are_trained(run, role, judged, flat):
    """The rewards of the task are all equal, and the answers of a group differ."""

    def prepare(trainer, generator):
        run.rewards.flat = range(100)
        generate = generator.generate

        async def different(requests, **options):
            said = await generate(requests, **options)
            return [replace(each, tokens=[6, 7 + n]) for n, each in enumerate(said)]

        generator.generate = different

    fields = {
        "rollout.max_resampled_groups": 3,
        "watchdog.zero_std": "fail",
        "watchdog.zero_std_steps": 2,
    }
    if judged:
        fields["roles.judge"] = role(head="values", reward_weight=0.5)
    steps = 3 if judged else 1
    _, rows = run(prepare, steps=steps, fields=fields, models=lambda log: {"judge": Judge(log)})
    assert [row["reward/zero_std_groups"] for row in rows] == [flat] * steps
    assert rows[-1]["ledger/dropped"] == (0 if judged else 3)
