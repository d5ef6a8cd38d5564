import pytest

from rl.model.shape import ModelConfig
from tests.tasks.sums import SumsTask
from tests.tiny_tokenizers import make_model


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    model = ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("skyrl"))))
    return SumsTask.Config().build(seed=1, model=model)


def played(task, *answers):
    game = task.environment(task.prompt(41), 0)
    assert game.reset().messages == [
        {"role": "user", "content": "41 + 1 = ? Answer as #### NUMBER"}
    ]
    replies = [game.step({"role": "assistant", "content": text}) for text in answers]
    game.close()
    return replies


def test_a_solved_episode_has_the_rewards_and_metrics_of_the_environment(task):
    replies = played(task, "Hm.", "#### 42")
    assert [reply.done for reply in replies] == [False, True]
    assert [reply.reward for reply in replies] == [0.0, 1.0]
    assert "#### ANSWER" in replies[0].messages[0]["content"]
    assert replies[-1].correct
    assert replies[-1].metrics == {"steps": 2.0}


def test_an_episode_that_runs_out_of_turns_is_not_solved(task):
    replies = played(task, "#### 41", "#### 43", "no")
    assert [reply.done for reply in replies] == [False, False, True]
    assert replies[0].reward == pytest.approx(0.2 / 3)
    assert not replies[-1].correct
    assert replies[-1].metrics == {"steps": 3.0}
