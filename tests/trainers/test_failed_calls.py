"""Record of a call that failed, so that it can be made again."""

import asyncio
import json

import pytest

from rl.errors import ActorFailure, ConfigError, RankLost, RunError
from rl.observe.rollout_files import read_rollouts
from rl.replay.repeated_call import RepeatedCall, read_failure

NO_RESTARTS = {"max_restarts": 0}


def raised(actor="trainer", kind="raised"):
    failure = ActorFailure if kind == "raised" else RankLost
    call = "forward_backward" if actor == "trainer" else "generate"
    return failure(f"{actor} rank 0, {call}: no", actor=actor, rank=0, call=call, kind=kind)


def failing_in_step_3(kind="raised"):
    """Return a function that has the trainer fail in step 3; ``cancels`` hangs meanwhile."""

    def prepare(trainer, *generators):
        async def learn():
            if trainer.version == 2 and kind == "cancels":
                trainer.lose("forward_backward")
                await asyncio.sleep(60)
            elif trainer.version == 2:
                raise raised(kind=kind)

        trainer.during["forward_backward"] = learn

    return prepare


def failing_to_generate(trainer, generator):
    async def generate(request):
        if generator.version == 2:
            raise raised("generator-0")

    generator.during = generate


def failure_of(run):
    return json.loads((run.record.folder / "failure.json").read_text())


@pytest.mark.parametrize("kind", ["raised", "died", "silent", "cancels"])
def test_the_rollouts_of_a_failing_step_are_kept(run, kind):
    with pytest.raises(ActorFailure):
        run(failing_in_step_3(kind), fields=NO_RESTARTS)
    failure = failure_of(run)
    assert (failure["step"], failure["again"], failure["call"]) == (2, "step", "forward_backward")
    (chunk,) = read_rollouts(run.record.rollouts.failed)
    assert {rollout.prompt.prompt_id for rollout in chunk.rollouts} == {4, 5}
    assert run.record.rollouts.steps() == [1, 2]
    assert read_failure(run.record.folder) == failure


def test_the_completions_of_a_lost_group_are_kept_without_a_reward(run):
    with pytest.raises(RunError, match="more than rollout.max_lost=0 allows"):
        run(having={"rewards.lost": (4,)}, fields={"rollout.max_lost": 0})
    failure = failure_of(run)
    assert (failure["again"], failure["cause"]) == ("reward", "task")
    assert failure["lost_group"]["error"] == "no reward for 4"
    (chunk,) = read_rollouts(run.record.rollouts.failed)
    assert [rollout.prompt.prompt_id for rollout in chunk.rollouts] == [4, 4]
    assert all(rollout.reward != rollout.reward for rollout in chunk.rollouts)
    assert all(rollout.sampled_count for rollout in chunk.rollouts)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            failing_to_generate,
            "The call generate of generator-0 cannot be made again alone, since what it received "
            "is not kept; a resumed run makes it again.",
        ),
        (
            failing_in_step_3(),
            "The rollouts of the failing call are not kept, since record.rollouts is 'none'; a ",
        ),
    ],
)
def test_a_call_that_cannot_be_made_again_is_refused_with_what_to_do(run, prepare, said):
    with pytest.raises(ActorFailure):
        run(prepare, fields={"record.rollouts": "none"})
    assert not run.record.rollouts.failed.exists()
    with pytest.raises(ConfigError, match="this call cannot be made again alone: ") as info:
        read_failure(run.record.folder)
    assert said in str(info.value)
    assert "start again with: " in str(info.value)


def test_an_alarm_names_the_step_to_train_again(run):
    def prepare(trainer, *generators):
        trainer.losses[3] = float("nan")

    with pytest.raises(RunError, match="non_finite"):
        run(prepare, fields={"watchdog.non_finite": "fail"})
    failure = failure_of(run)
    assert (failure["cause"], failure["again"]) == ("alarm", "")
    command = f"python -m rl.replay {run.record.folder} --step 3 trains the last step again."
    assert any(command in sentence for sentence in failure["advice"])


def test_a_resume_forgets_the_failed_call(run):
    with pytest.raises(ActorFailure):
        run(failing_in_step_3(), save_every=2)
    assert run.record.rollouts.failed.exists()
    run(save_every=2, saved=run.saved)
    assert not run.record.rollouts.failed.exists()
    with pytest.raises(ConfigError, match="so no failure is recorded; --step K trains a step"):
        read_failure(run.record.folder)


def test_a_call_that_was_made_again_is_compared_with_its_record():
    recorded = {"error": "x: boom", "type": "ValueError", "place": "a.py, line 3", "rank": 0}
    same = RepeatedCall(call="step 3", recorded=recorded | {"step": 2}, error=recorded)
    assert same.report == "step 3 fails again, with the same error:\nx: boom\nat a.py, line 3"
    other = RepeatedCall(call="step 3", recorded=recorded, error=recorded | {"rank": 1})
    assert other.differing == ["rank"]
    assert "with another rank:\n" in other.report
    none = RepeatedCall(call="step 3", recorded=recorded)
    assert none.report == "step 3 does not fail again"
    assert none.to_dict()["differing"] == []
