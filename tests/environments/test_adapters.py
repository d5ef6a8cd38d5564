"""Environments of gymnasium, skyrl-gym and OpenEnv as tasks."""

import asyncio
import random

import pytest

from rl.errors import ConfigError, GroupLost
from rl.rollout.episodes import Environments
from rl.types import Completion
from tests.environments.openenv_server import Games, Guess, serving, url_of
from tests.kit.countdown import Countdown, CountdownTask
from tests.kit.sums import SumsTask

WAIT_S = 60.0


def stepped(game, *answers):
    return [game.step({"role": "assistant", "content": str(text)}) for text in answers]


def begun(task, prompt):
    """Return an episode that counts down, and the number that it counts down from."""
    game = task.environment(prompt, 0)
    text = game.reset().messages[0]["content"]
    return game, int(text.removeprefix("Count down from ").removesuffix("."))


@pytest.fixture
def countdown(model):
    return CountdownTask.Config().build(seed=1, model=model)


def test_an_episode_of_gymnasium_has_the_seed_of_its_prompt_and_the_rewards_of_its_steps(countdown):
    numbers = [begun(countdown, countdown.prompt(n))[1] for n in range(40)]
    assert {*numbers} == {*range(1, 10)}
    assert numbers == [begun(countdown, countdown.prompt(n))[1] for n in range(40)]
    game, _ = begun(countdown, countdown.prompt(numbers.index(3)))
    replies = stepped(game, " 3 ", 2, 1)
    assert [(reply.reward, reply.done) for reply in replies] == [(0.5, False)] * 2 + [(0.5, True)]
    assert replies[-1].correct
    assert replies[0].messages == [{"role": "user", "content": "Go on."}]


def test_a_truncated_episode_ends_unsolved_and_is_closed(countdown):
    game, number = begun(countdown, countdown.prompt(0))
    (reply,) = stepped(game, "no")
    assert (reply.done, reply.correct, reply.reward) == (True, False, 0.0)
    Countdown.closed.clear()
    game.close()
    assert Countdown.closed == [number]


def test_seeds_of_training_are_not_held_out_and_differ_by_the_seed_of_the_run(model, countdown):
    seeds = [int(countdown.prompt(n).answer) for n in range(100)]
    assert all(seed % 2 == 0 and seed < 2**31 for seed in seeds)
    assert [prompt.answer for prompt in countdown.eval_prompts(3)] == ["1", "3", "5"]
    other = CountdownTask.Config().build(seed=2, model=model)
    assert [int(other.prompt(n).answer) for n in range(100)] != seeds
    assert other.eval_prompts(3) == countdown.eval_prompts(3)


@pytest.mark.parametrize(
    ("answers", "rewards", "solved"),
    [(("Hm.", "#### 42"), [0.0, 1.0], True), (("#### 41", "#### 43", "no"), [0.2 / 3], False)],
)
def test_an_episode_of_skyrl_has_the_rewards_and_metrics_of_its_environment(
    model, answers, rewards, solved
):
    task = SumsTask.Config().build(seed=1, model=model)
    game = task.environment(task.prompt(41), 0)
    text = "41 + 1 = ? Answer as #### NUMBER"
    assert game.reset().messages == [{"role": "user", "content": text}]
    replies = stepped(game, *answers)
    game.close()
    assert [reply.done for reply in replies] == [False] * (len(answers) - 1) + [True]
    assert [reply.reward for reply in replies][: len(rewards)] == pytest.approx(rewards)
    assert "#### ANSWER" in replies[0].messages[0]["content"]
    assert replies[-1].correct == solved
    assert replies[-1].metrics == {"steps": float(len(answers))}


def play(model, games, *answers):
    """Return prompt, texts and end of an episode of ``answers`` on an OpenEnv server."""

    async def work():
        async with asyncio.timeout(WAIT_S), serving(games) as server:
            task = Guess.Config(url=url_of(server)).build(seed=1, model=model)
            prompt = task.prompt(0)
            environments = Environments(task)
            turns = [await environments.open(0, prompt, 0)]
            try:
                for answer in answers:
                    tokens = task.tokenizer.encode(answer, add_special_tokens=False)
                    completion = Completion.written([*tokens, task.stop_token_ids[0]])
                    turns.append(await environments.step(0, completion))
            finally:
                await environments.close([0])
            return prompt, [task.tokenizer.decode(turn.tokens) for turn in turns], turns[-1].end

    return asyncio.run(work())


def test_an_episode_of_openenv_is_a_session_with_the_seed_of_its_prompt(model, behind_proxy):
    seed = int(play(model, Games())[0].answer)
    number = random.Random(seed).randint(1, 5)
    games = Games()
    wrong = number % 5 + 1
    _, texts, end = play(model, games, f"{wrong}", f" {number} ")
    assert f"From 1 to 5, seed {seed}?" in texts[0]
    assert "No." in texts[1]
    assert (end.reward, end.correct, end.turn_rewards) == (1.0, True, (0.0, 1.0))
    assert games.seen == [
        {"type": "reset", "data": {"seed": seed}},
        {"type": "step", "data": {"guess": f"{wrong}"}},
        {"type": "step", "data": {"guess": f"{number}"}},
        {"type": "close"},
    ]


FULL = r"failed: Server at capacity: 4/4 sessions; .* set task.max_open_episodes to"


@pytest.mark.parametrize(
    ("fault", "answers", "message"),
    [
        ("", ["no number"], r"server at ws://.* failed: guess: a number is missing"),
        ("", ["leave"], r"the connection to ws://.* ended: .*ConnectionClosed"),
        ("garbled", [], r"answered '\{' to reset; expected data with an obs"),
        # the connection may end before the first message is sent, or after it
        *[("is_full", [], FULL)] * 5,
    ],
)
def test_a_failure_of_the_server_costs_the_group_and_is_named(model, fault, answers, message):
    games = Games()
    if fault:
        setattr(games, fault, True)
    with pytest.raises(GroupLost, match=message):
        play(model, games, *answers)


async def test_a_server_that_does_not_answer_is_named(model):
    async with asyncio.timeout(WAIT_S), serving(Games()) as server:
        url = url_of(server)
    task = Guess.Config(url=url).build(seed=1, model=model)
    with pytest.raises(GroupLost, match=f"task.url {url}: cannot connect"):
        await Environments(task).open(0, task.prompt(0), 0)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1/ws"])
def test_an_address_of_something_else_is_refused(url, model):
    with pytest.raises(ConfigError, match=f"task.url is '{url}'; it must be the address of a Web"):
        Guess.Config(url=url).build(seed=1, model=model)
