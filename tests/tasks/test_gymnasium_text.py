import pytest

from rl.model.shape import ModelConfig
from tests.tasks.countdown import Countdown, CountdownTask
from tests.tiny_tokenizers import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("gymnasium"))))


def begun(task, prompt):
    game = task.environment(prompt, 0)
    text = game.reset().messages[0]["content"]
    return game, int(text.removeprefix("Count down from ").removesuffix("."))


def said(text):
    return {"role": "assistant", "content": str(text)}


def test_an_episode_has_the_seed_of_its_prompt_and_the_rewards_of_its_steps(model):
    task = CountdownTask.Config().build(seed=1, model=model)
    numbers = [begun(task, task.prompt(prompt_id))[1] for prompt_id in range(40)]
    assert {*numbers} == {*range(1, 10)}
    assert numbers == [begun(task, task.prompt(prompt_id))[1] for prompt_id in range(40)]
    game, _ = begun(task, task.prompt(numbers.index(3)))
    replies = [game.step(said(f" {n} ")) for n in (3, 2, 1)]
    assert [reply.reward for reply in replies] == [0.5, 0.5, 0.5]
    assert [reply.done for reply in replies] == [False, False, True]
    assert replies[-1].correct
    assert replies[0].messages == [{"role": "user", "content": "Go on."}]


def test_a_truncated_episode_ends_and_is_not_solved(model):
    task = CountdownTask.Config().build(seed=1, model=model)
    game, _ = begun(task, task.prompt(0))
    reply = game.step(said("no"))
    assert (reply.done, reply.correct, reply.reward) == (True, False, 0.0)


def test_close_closes_the_environment(model):
    task = CountdownTask.Config().build(seed=1, model=model)
    game, number = begun(task, task.prompt(0))
    Countdown.closed.clear()
    game.close()
    assert Countdown.closed == [number]


def test_seeds_of_training_are_not_held_out_and_differ_by_the_seed_of_the_run(model):
    task = CountdownTask.Config().build(seed=1, model=model)
    prompts = [task.prompt(prompt_id) for prompt_id in range(100)]
    assert all(int(prompt.answer) % 2 == 0 for prompt in prompts)
    assert max(int(prompt.answer) for prompt in prompts) < 2**31
    assert [prompt.answer for prompt in task.eval_prompts(3)] == ["1", "3", "5"]
    other = CountdownTask.Config().build(seed=2, model=model)
    assert [other.prompt(n).answer for n in range(100)] != [prompt.answer for prompt in prompts]
    assert other.eval_prompts(3) == task.eval_prompts(3)
